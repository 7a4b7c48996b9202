"""A language model whose sequence lies on several processes, in PyTorch: each holds and computes its part of every text, and
attention alone needs the others'.

    torchrun --nproc-per-node 2 examples/ring_language_model.py

Texts repeat a pattern of six tokens, another in each, so that the next token stands wherever the pattern did before: mostly on other
processes, too. The model is trained on all processes together and, to compare, on one alone: the losses are the same at every step.
"""

import argparse
import os
import sys

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

import annulus

VOCABULARY, PERIOD = 16, 6


class Attention(torch.nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.qkv = torch.nn.Linear(width, 3 * width, bias=False)
        self.out = torch.nn.Linear(width, width, bias=False)
        self.rope = annulus.nn.LrpeRotate(head_dim=width // heads)

    def forward(self, x, positions, attend):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).unbind(2)
        # A token's position is that in the whole text, wherever it lies.
        q, k = (t.transpose(1, 2) for t in self.rope.qk(q.transpose(1, 2), k.transpose(1, 2), position_ids=positions))
        return self.out(attend(q, k, v, causal=True).flatten(2))


class Model(torch.nn.Module):
    def __init__(self, width=64, heads=4):
        super().__init__()
        self.embedding = torch.nn.Embedding(VOCABULARY, width)
        self.norms = torch.nn.ModuleList(torch.nn.RMSNorm(width) for _ in range(2))
        self.attention = Attention(width, heads)
        self.mlp = torch.nn.Sequential(torch.nn.Linear(width, 4 * width), torch.nn.GELU(), torch.nn.Linear(4 * width, width))
        self.head = torch.nn.Linear(width, VOCABULARY)

    def forward(self, text, positions, attend):
        x = self.embedding(text)
        x = x + self.attention(self.norms[0](x), positions, attend)
        return self.head(x + self.mlp(self.norms[1](x)))


def train(steps, tokens, rank=0, world_size=1):
    """The losses, of all processes together. One alone trains without any group."""
    torch.manual_seed(0)
    model, losses = Model(), []
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    attend = annulus.attention if world_size == 1 else annulus.ring_attention
    mine = lambda t: annulus.shard(t, world_size)[rank]  # noqa: E731  (here every process makes all of a text)
    positions = mine(torch.arange(tokens)[None])
    for _ in range(steps):
        text = torch.randint(VOCABULARY, (4, PERIOD)).repeat(1, tokens // PERIOD + 1)[:, : tokens + 1]
        logits = model(mine(text[:, :-1]), positions, attend)
        # Its share of the mean over all tokens: losses and gradients of the processes add up to those of one.
        loss = cross_entropy(logits.flatten(0, 1), mine(text[:, 1:]).flatten(), reduction="sum") / text[:, 1:].numel()
        optimizer.zero_grad()
        loss.backward()
        loss = loss.detach()
        if world_size > 1:
            for t in (loss, *(p.grad for p in model.parameters())):
                dist.all_reduce(t)
        optimizer.step()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=257, help="of a text; any number, which the processes share")
    arguments = parser.parse_args()
    if "RANK" not in os.environ:
        sys.exit("start it with torchrun --nproc-per-node 2 " + sys.argv[0])
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    together = train(arguments.steps, arguments.tokens, rank, world_size)
    if rank == 0:
        alone = train(arguments.steps, arguments.tokens)
        for step in sorted({*range(0, arguments.steps, 20), arguments.steps - 1}):
            print(f"step {step}: loss {together[step]:.5f} on {world_size} processes, {alone[step]:.5f} on one")
        difference = max(abs(a - b) for a, b in zip(together, alone))
        print(f"the losses differ by {difference:.1e} at most")
        assert difference < 1e-3, "a sequence on several processes trains as on one"
        assert arguments.steps < 100 or together[-1] < 0.5 * together[0], "the model learns to repeat the pattern"
    dist.destroy_process_group()
