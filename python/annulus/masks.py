"""Block masks for block_sparse_attention: which blocks of keys a block of queries sees, (1 or heads, n, n) bool.

n = ceil(tokens / block_size). Every pattern is asked for by its density, the share that it keeps of the blocks there are (of
those on and below the diagonal, where it is causal), and keeps that many to within one a row of them. The block on the
diagonal is always kept. A mask that is used more than once is best made a list once: annulus.BlockCsr.from_mask(mask).
"""

import torch
from torch import Tensor

from .errors import InvalidArgument, require, require_size

__all__ = ["bigbird", "causal_window", "local_global"]

_Device = torch.device | str | None


def local_global(tokens: int, block_size: int, density: float, *, global_blocks: int = 1, causal: bool = False, seed: int = 0,
                 device: _Device = None) -> Tensor:
    """A window around the diagonal and a few blocks that all see and that see all (Longformer): (1, n, n) bool.

    The first global_blocks rows are full. Every other row x has its share of the density that is left, taken in the order: the
    diagonal; columns 0 to global_blocks - 1; then the nearest of x - 1, x + 1, x - 2, ... causal: only columns up to x.
    seed: unused; every pattern has one. Gradients: none.

    >>> mask = masks.local_global(tokens=80, block_size=16, density=0.6)
    >>> mask[0].int()
    tensor([[1, 1, 1, 1, 1],
            [1, 1, 0, 0, 0],
            [1, 1, 1, 0, 0],
            [1, 0, 1, 1, 0],
            [1, 0, 0, 0, 1]], dtype=torch.int32)
    """
    n = _blocks("local_global", tokens, block_size)
    return _nearest_first("local_global", n, density, global_blocks, causal, _distance(n)[None], device)


def bigbird(tokens: int, block_size: int, density: float, *, global_blocks: int = 1, window_blocks: int = 3,
            causal: bool = False, heads: int = 1, seed: int = 0, device: _Device = None) -> Tensor:
    """A window, a few blocks that all see and that see all, and random blocks (BigBird): (heads, n, n) bool.

    As local_global, but of a row's nearest blocks only those within window_blocks // 2 of the diagonal come after the global
    columns; the rest of its share are random ones, drawn by `seed` without replacement, for every head anew. Device and number of
    threads change nothing about them. Gradients: none.

    >>> mask = masks.bigbird(tokens=1024, block_size=64, density=0.4, heads=2, seed=7)
    >>> mask.shape, round(mask.float().mean().item(), 2)
    (torch.Size([2, 16, 16]), 0.4)
    """
    n = _blocks("bigbird", tokens, block_size)
    require_size("bigbird", "window_blocks", window_blocks, 1)
    require_size("bigbird", "heads", heads)
    require(isinstance(seed, int), "bigbird", "seed", "be an integer", seed)
    distance = _distance(n)
    generator = torch.Generator("cpu").manual_seed(seed)
    at_random = torch.rand(heads, n, n, generator=generator, dtype=torch.float64, device="cpu")
    near = distance <= 2 * (window_blocks // 2)
    score = torch.where(near, distance, 2.0 * n + at_random)
    return _nearest_first("bigbird", n, density, global_blocks, causal, score, device)


def causal_window(tokens: int, block_size: int, density: float, *, seed: int = 0, device: _Device = None) -> Tensor:
    """The last w blocks up to the diagonal, in every row alike (a sliding window): (1, n, n) bool.

    w is the number, 1 to n, whose mask comes nearest to `density` of the n (n + 1) / 2 blocks on and below the diagonal.
    seed: unused; every pattern has one. Gradients: none.

    >>> masks.causal_window(tokens=64, block_size=16, density=0.7)[0].int()
    tensor([[1, 0, 0, 0],
            [1, 1, 0, 0],
            [0, 1, 1, 0],
            [0, 0, 1, 1]], dtype=torch.int32)
    """
    n = _blocks("causal_window", tokens, block_size)
    _require_density("causal_window", density)
    whole = n * (n + 1) // 2
    kept = lambda w: whole - (n - w) * (n - w + 1) // 2  # noqa: E731
    w = min(range(1, n + 1), key=lambda w: abs(kept(w) - density * whole), default=0)
    row, column = _rows_and_columns(n)
    back = row - column
    return ((back >= 0) & (back < w))[None].to(device)


def _blocks(op, tokens, block_size):
    require_size(op, "tokens", tokens)
    require_size(op, "block_size", block_size, 1)
    return -(-tokens // block_size)


def _require_density(op, density):
    good = isinstance(density, (int, float)) and 0 < density <= 1
    require(good, op, "density", "be more than 0 and at most 1", density)


def _rows_and_columns(n):
    """On the CPU, wherever the mask will go: the same numbers on every device."""
    row = torch.arange(n, device="cpu")
    return row[:, None], row


def _distance(n):
    """(n, n): 0 on the diagonal, then 1, 2 for x - 1, x + 1, then 3, 4, ..."""
    row, column = _rows_and_columns(n)
    ahead = (column - row).double()
    return torch.where(ahead > 0, 2 * ahead, (-2 * ahead - 1).clamp_min(0))


def _nearest_first(op, n, density, global_blocks, causal, score, device):
    """Of every row the blocks with the lowest score (.., n, n), after the diagonal and the global columns."""
    _require_density(op, density)
    require_size(op, "global_blocks", global_blocks)
    row, column = _rows_and_columns(n)
    score = torch.where(column < global_blocks, -1.0, score)
    score = torch.where(row == column, -2.0, score)
    there = row + 1 if causal else torch.full_like(row, n)  # blocks that a row may have
    if causal:
        score = torch.where(column > row, torch.inf, score)
    full = min(global_blocks, n)
    taken, rest = int(there[:full].sum()), int(there[full:].sum())
    left = density * (taken + rest) - taken
    if left < 0 or left == 0 < rest:
        raise InvalidArgument(f"[{op}] density must be more than {taken / (taken + rest):.3g}, which {full} full rows of "
                              f"{n} are, but is {density!r}")
    # What rounding takes from a row the next one gets.
    share = torch.where(row < full, 0, there).double() * (left / max(rest, 1))
    count = share.cumsum(0).round().diff(dim=0, prepend=share.new_zeros(1, 1)).clamp_min(1)
    count = torch.where(row < full, there, count)
    rank = score.sort(dim=-1, stable=True).indices.argsort(-1)
    return (rank < count).to(device)
