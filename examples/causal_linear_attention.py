"""Causal linear attention with relative positions, in PyTorch: chunks to train with, a state to decode with.

    o_t = sum over s <= t of <q_t, k_s> v_s,    <q_t, k_s> = sum_c q_c k_c cos((t - s) theta_c) after LRPE-cosine

Three ways to compute it, equal but for rounding: all pairs of tokens; chunks, quadratic within and a state of 2D x D for all
before, which costs L instead of L^2; token by token, a state and an offset. Then a layer of it learns to repeat what stood
seven tokens ago, which nothing but a relative position tells it.
"""

import argparse

import torch

import annulus


def by_pairs(q, k, v):
    return (q @ k.mT).tril() @ v


def by_chunks(q, k, v, chunk=32):
    tokens = q.shape[2]
    whole = -tokens % chunk
    q, k, v = (torch.nn.functional.pad(x, (0, 0, 0, whole)).unflatten(2, (-1, chunk)) for x in (q, k, v))
    states = k.mT @ v  # of each chunk
    before = states.cumsum(2) - states
    return (q @ before + by_pairs(q, k, v)).flatten(2, 3)[:, :, :tokens]


class Attention(torch.nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.qkv = torch.nn.Linear(width, 3 * width)
        self.encode = annulus.nn.LrpeCosine(width // heads, heads)
        with torch.no_grad():  # all frequencies alike, so that a score can single out a distance
            self.encode.theta.copy_(torch.linspace(0, 3, width // heads).expand(heads, -1))
        self.norm = torch.nn.RMSNorm(width // heads)  # in place of a softmax's denominator
        self.out = torch.nn.Linear(width, width)

    def qkv_of(self, x, offset=0):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.encode.n_heads, -1)).permute(2, 0, 3, 1, 4)
        return *self.encode.qk(q, k, activation="silu", offset=offset), v

    def forward(self, x):
        o = by_chunks(*self.qkv_of(x))
        return self.out(self.norm(o).transpose(1, 2).flatten(2))


def relative_error(got, want):
    return ((got - want).norm() / want.norm()).item()


def compare():
    torch.manual_seed(0)
    layer, x = Attention(64, 2), torch.randn(2, 200, 64)
    q, k, v = layer.qkv_of(x)
    exact = by_pairs(q.double(), k.double(), v.double())
    chunked = relative_error(by_chunks(q, k, v), exact)
    state, outputs = 0, []
    for t in range(x.shape[1]):
        q1, k1, v1 = layer.qkv_of(x[:, t : t + 1], offset=t)
        state = state + k1.mT @ v1
        outputs.append(q1 @ state)
    decoded = relative_error(torch.cat(outputs, 2), exact)
    parameters = [*layer.qkv.parameters(), layer.encode.theta]
    grads = [torch.autograd.grad(f(q, k, v).square().mean(), parameters, retain_graph=True) for f in (by_chunks, by_pairs)]
    gradient = max(relative_error(g, w) for g, w in zip(*grads))
    print(f"relative error against all pairs in double: chunks {chunked:.1e}, token by token {decoded:.1e}")
    print(f"gradients by chunks against by pairs: {gradient:.1e}")
    assert max(chunked, decoded) < 1e-5 and gradient < 1e-4


def train(steps, width=32, vocabulary=16, tokens=100, distance=7):
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Embedding(vocabulary, width), Attention(width, 1), torch.nn.Linear(width, vocabulary)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for step in range(steps):
        text = torch.randint(vocabulary, (8, tokens))
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
    parser.add_argument("--steps", type=int, default=61, help="of the training")
    arguments = parser.parse_args()
    compare()
    right = train(arguments.steps)
    assert arguments.steps < 61 or right > 0.9, "the layer finds what stood seven tokens ago"
