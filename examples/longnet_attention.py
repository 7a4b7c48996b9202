"""A LongNet layer of a language model in PyTorch: dilated attention in place of the dense one, exact gradients, linear cost.

Branch i cuts the text into segments of w_i tokens and looks at every r_i-th of them; segments and rates grow together, so that a
token sees its neighbourhood whole and the far past ever more thinly, with as many keys a branch. First the layer's attention is
compared with plain torch over explicit sets of keys and timed beside the dense one; then a model of one such layer learns
to repeat what stood eight tokens ago.
"""

import argparse
import time

import torch

import annulus

SEGMENTS, RATES = (32, 64, 128, 256), (1, 2, 4, 8)


class LongNetAttention(torch.nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.qkv = torch.nn.Linear(width, 3 * width, bias=False)
        self.out = torch.nn.Linear(width, width, bias=False)
        self.rope = annulus.nn.LrpeRotate(head_dim=width // heads)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).unbind(2)  # views of one tensor: nothing is copied
        q, k = (t.transpose(1, 2) for t in self.rope.qk(q.transpose(1, 2), k.transpose(1, 2)))
        # was: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True), with heads before tokens
        o = annulus.dilated_attention(q, k, v, SEGMENTS, RATES, causal=True)
        return self.out(o.flatten(2))


class Model(torch.nn.Module):
    def __init__(self, vocabulary, width=64, heads=8):
        super().__init__()
        self.embedding = torch.nn.Embedding(vocabulary, width)
        self.norms = torch.nn.ModuleList(torch.nn.RMSNorm(width) for _ in range(2))
        self.attention = LongNetAttention(width, heads)
        self.mlp = torch.nn.Sequential(torch.nn.Linear(width, 4 * width), torch.nn.GELU(), torch.nn.Linear(4 * width, width))
        self.head = torch.nn.Linear(width, vocabulary)

    def forward(self, text):
        x = self.embedding(text)
        x = x + self.attention(self.norms[0](x))
        return self.head(x + self.mlp(self.norms[1](x)))


def by_sets(q, k, v):
    """The definition: how often each branch gives a key, then a softmax over all of them."""
    T, H = q.shape[1:3]
    t, times = torch.arange(T), torch.zeros(H, T, T)
    for w, r in zip(SEGMENTS, RATES):
        for h in range(H):
            own = t % w % r == h % r
            times[h] += (t[:, None] // w == t // w) & own & own[:, None] & (t[:, None] >= t)
    s = torch.einsum("bihd,bjhd->bhij", q, k) * q.shape[3] ** -0.5 + times.log()
    return torch.einsum("bhij,bjhd->bihd", s.softmax(-1), v)


def compare(tokens=500):
    torch.manual_seed(0)
    tensors = torch.randn(3, 1, tokens, 8, 16).unbind(0)
    results = []
    for f in (lambda *x: annulus.dilated_attention(*x, SEGMENTS, RATES, causal=True), by_sets):
        inputs = [x.clone().requires_grad_() for x in tensors]
        o = f(*inputs)
        results.append((o, *torch.autograd.grad(o.square().sum(), inputs)))
    error = max(((g - w).norm() / w.norm()).item() for g, w in zip(*results))
    print(f"o, dq, dk, dv against explicit sets of keys: relative error {error:.1e}")
    assert error < 1e-5


def seconds(call):
    call()
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def cost():
    for tokens in (1024, 4096):
        q, k, v = torch.randn(3, 1, tokens, 8, 32).unbind(0)
        longnet = seconds(lambda: annulus.dilated_attention(q, k, v, SEGMENTS, RATES, causal=True))
        dense = seconds(lambda: annulus.attention(q, k, v, causal=True))
        print(f"{tokens} tokens: dilated {1e3 * longnet:.1f} ms, dense {1e3 * dense:.1f} ms")


def train(steps, vocabulary=16, tokens=256, distance=8):
    torch.manual_seed(0)
    model = Model(vocabulary)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for step in range(steps):
        text = torch.randint(vocabulary, (4, tokens))
        logits = model(text)[:, distance:]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), text[:, :-distance].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0 or step == steps - 1:
            right = (logits.argmax(-1) == text[:, :-distance]).float().mean().item()
            print(f"step {step}: loss {loss.item():.3f}, right {right:.0%}")
    return right


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=81, help="of the training")
    arguments = parser.parse_args()
    compare()
    cost()
    right = train(arguments.steps)
    assert arguments.steps < 81 or right > 0.7, "the layer finds what stood eight tokens ago"
