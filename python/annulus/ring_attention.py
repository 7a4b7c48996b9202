"""Attention over ranks: every rank holds a part of one sequence, and every query attends what it would on one device.

The C++ library checks every argument, and says what travels when; messages go by the group's gloo backend (_group.py).
"""

import sys
from collections.abc import Sequence
from typing import Literal, TypedDict, overload

import torch
from torch import Tensor
from typing_extensions import Unpack

from ._group import handle_of, interrupted
from ._library import ops
from ._operator import Operator, call_backward, fake, op_of
from ._plan_ring import plan_ring as plan_ring
from .attention import BlockCsr, _is_asked, _keeps, _lists, _outputs, _seed, _window
from .errors import InvalidArgument, NotSupported, require, require_size, unusual

_No = Literal[False]
_Yes = Literal[True]


class _Options(TypedDict, total=False):
    causal: bool
    balance: str
    softmax_scale: float | None
    window_size: tuple[int, int]
    segment_lengths: Sequence[int] | None
    dilation_rates: Sequence[int] | None
    mode: str
    offset_map: str
    multiplicity: str
    alpha_grad: str
    group_remainder: str
    block_mask: Tensor | BlockCsr | None
    block_size: int | None
    dropout_p: float
    dropout_seed: int | None
    checkpoint: bool
    deadline_s: float
    deterministic: bool


@overload
def ring_attention(q: Tensor, k: Tensor, v: Tensor, group: "torch.distributed.ProcessGroup | None" = None, *,
                   return_lse: _No = False, **options: Unpack[_Options]) -> Tensor: ...
@overload
def ring_attention(q: Tensor, k: Tensor, v: Tensor, group: "torch.distributed.ProcessGroup | None" = None, *,
                   return_lse: _Yes, **options: Unpack[_Options]) -> tuple[Tensor, Tensor]: ...
def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group: "torch.distributed.ProcessGroup | None" = None,
    *,
    causal: bool = False,
    balance: str = "zigzag",
    softmax_scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    segment_lengths: Sequence[int] | None = None,
    dilation_rates: Sequence[int] | None = None,
    mode: str = "longnet",
    offset_map: str = "mod",
    multiplicity: str = "multiset",
    alpha_grad: str = "exact",
    group_remainder: str = "first",
    block_mask: Tensor | BlockCsr | None = None,
    block_size: int | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | None = None,
    checkpoint: bool = False,
    deadline_s: float = 120.0,
    deterministic: bool = False,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """attention, dilated_attention or block_sparse_attention of a sequence of n tokens that lies on the P ranks of a group:

        o_i = sum_j exp(s_ij - lse_i) v_j        i of this rank's tokens, j of all ranks'

    q (B, m, H, D), k (B, m, Hkv, D), v (B, m, Hkv, Dv) -> o (B, m, H, Dv) are this rank's shards, of the m tokens that shard() gives
    it (equal parts cut otherwise, as by torch.chunk, look the same and give wrong results unless balance="contiguous"). A token's position is that in the whole sequence, and all options go by it. Memory of a rank is O(n / P).

    group: a group of torch.distributed (by default all processes) whose backend for the CPU is gloo, as of
        init_process_group("gloo") or "cpu:gloo,cuda:nccl": through it keys and values travel, in host memory.
    balance: how the sequence is cut, as in shard.
    segment_lengths and dilation_rates, with mode, offset_map, multiplicity, alpha_grad and group_remainder: dilated_attention.
    block_mask and block_size: block_sparse_attention; the mask is that of the whole sequence, on every rank.
    causal, softmax_scale, window_size, dropout_p, dropout_seed, checkpoint, return_lse: as there.
    deterministic: the same bits for every P, which takes up to 1.7 times as long on CPUs and 2.6 times on a GPU.
    deadline_s: how long a rank waits for another.

    All ranks make the same calls with the same options, forward and backward; ranks that do not fit together all raise RankLost
    before any data moves. When a rank dies, stops or is slower than the deadline, every other raises RankLost, no later than a
    second after it; so does every later call of that group. To go on, make a new group. What is sent is not encrypted. A program ends
    with torch.distributed.destroy_process_group(): without it torch's gloo may abort at exit, with or without this library.

    Returns o, or (o, lse) with lse (B, H, m). Gradients: q, k, v; of every rank's tokens, with respect to the losses of all ranks.

    >>> torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    >>> q = torch.rand(1, 64, 4, 8)  # on P ranks: shard(q, P)[rank]
    >>> ring_attention(q, q, q, causal=True).shape
    torch.Size([1, 64, 4, 8])
    >>> torch.distributed.destroy_process_group()
    """
    return _call(q, k, v, handle_of("ring_attention", group), 0, causal, balance, softmax_scale, window_size, segment_lengths,
                 dilation_rates, mode, offset_map, multiplicity, alpha_grad, group_remainder, block_mask, block_size, dropout_p,
                 dropout_seed, checkpoint, deadline_s, deterministic, return_lse)


@overload
def ring_attention_local(q: Tensor, k: Tensor, v: Tensor, world_size: int, *, return_lse: _No = False,
                         **options: Unpack[_Options]) -> Tensor: ...
@overload
def ring_attention_local(q: Tensor, k: Tensor, v: Tensor, world_size: int, *, return_lse: _Yes,
                         **options: Unpack[_Options]) -> tuple[Tensor, Tensor]: ...
def ring_attention_local(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    world_size: int,
    *,
    causal: bool = False,
    balance: str = "zigzag",
    softmax_scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    segment_lengths: Sequence[int] | None = None,
    dilation_rates: Sequence[int] | None = None,
    mode: str = "longnet",
    offset_map: str = "mod",
    multiplicity: str = "multiset",
    alpha_grad: str = "exact",
    group_remainder: str = "first",
    block_mask: Tensor | BlockCsr | None = None,
    block_size: int | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | None = None,
    checkpoint: bool = False,
    deadline_s: float = 120.0,
    deterministic: bool = False,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """ring_attention with world_size ranks that are threads of this process, and whole tensors: to try a program out without
    processes, and to compare.

        o = unshard([ring_attention(q_p, k_p, v_p) on rank p])        q_p = shard(q, world_size)[p], and likewise k and v

    q (B, n, H, D), k (B, n, Hkv, D), v (B, n, Hkv, Dv) -> o (B, n, H, Dv). Options as in ring_attention.

    Returns o, or (o, lse) with lse (B, H, n). Gradients: q, k, v.

    >>> q = torch.rand(1, 64, 4, 8)
    >>> o = ring_attention_local(q, q, q, 4, causal=True)
    >>> torch.allclose(o, attention(q, q, q, causal=True), atol=1e-6)
    True
    """
    require_size("ring_attention", "world_size", world_size, least=1)
    return _call(q, k, v, 0, world_size, causal, balance, softmax_scale, window_size, segment_lengths, dilation_rates, mode,
                 offset_map, multiplicity, alpha_grad, group_remainder, block_mask, block_size, dropout_p, dropout_seed, checkpoint,
                 deadline_s, deterministic, return_lse)


def _call(q, k, v, group, world_size, causal, balance, softmax_scale, window_size, segment_lengths, dilation_rates, mode, offset_map,
          multiplicity, alpha_grad, group_remainder, block_mask, block_size, dropout_p, dropout_seed, checkpoint, deadline_s,
          deterministic, return_lse):
    op = "ring_attention"
    dilated, blocks = segment_lengths is not None, block_mask is not None
    try:
        dropout_seed = _seed(op, dropout_p, dropout_seed)
        left, right, row_ptr, col_idx = _checked(op, window_size, segment_lengths, dilation_rates, mode, offset_map, multiplicity,
                                                 alpha_grad, group_remainder, block_mask, block_size, deadline_s)
        o, *lse = _ring_attention(q, k, v, group, world_size, balance, deadline_s, causal, softmax_scale, left, right,
                                  segment_lengths if dilated else (), dilation_rates if dilated else (), mode, offset_map,
                                  multiplicity, alpha_grad, group_remainder, row_ptr, col_idx, block_size if blocks else 0, dropout_p,
                                  dropout_seed, _is_asked(deterministic), return_lse, _keeps(q, k, v, checkpoint))
    except (InvalidArgument, NotSupported, torch.OutOfMemoryError) as refused:
        if group and not torch.compiler.is_compiling() and not hasattr(refused, "_of_cpp"):
            # The other ranks are in this call, or will be.
            ops._ring_refuse.default(group, deadline_s if _is_deadline(deadline_s) else 0.0, str(refused))
        raise
    return (o, lse[0]) if return_lse else o


def _checked(op, window_size, segment_lengths, dilation_rates, mode, offset_map, multiplicity, alpha_grad, group_remainder, block_mask,
             block_size, deadline_s):
    """The rules that C++ does not know; the window and the lists of blocks."""
    left, right = _window(op, window_size)
    _require_together(op, segment_lengths=segment_lengths, dilation_rates=dilation_rates)
    _require_together(op, block_mask=block_mask, block_size=block_size)
    dilated, blocks = segment_lengths is not None, block_mask is not None
    if dilated and blocks:
        raise InvalidArgument(f"[{op}] block_mask must be left out where segment_lengths are given, but is given")
    if dilated:
        for name, numbers in (("segment_lengths", segment_lengths), ("dilation_rates", dilation_rates)):
            require(isinstance(numbers, Sequence), op, name, "be a sequence of integers", numbers)
        require(len(segment_lengths) > 0, op, "segment_lengths", "have 1 to 16 entries", segment_lengths)
    if (dilated or blocks) and tuple(window_size) != (-1, -1):
        given = "segment_lengths" if dilated else "block_mask"
        raise InvalidArgument(f"[{op}] window_size must be left out where {given} is given, but is {window_size!r}")
    for name, value, plain in (("mode", mode, "longnet"), ("offset_map", offset_map, "mod"), ("multiplicity", multiplicity, "multiset"),
                               ("alpha_grad", alpha_grad, "exact"), ("group_remainder", group_remainder, "first")):
        if not dilated and value != plain:
            raise InvalidArgument(f"[{op}] {name} must be left out where no segment_lengths are given, but is {value!r}")
    require(_is_deadline(deadline_s), op, "deadline_s", "be a positive, finite number", deadline_s)
    row_ptr = col_idx = None
    if blocks:
        row_ptr, col_idx = block_mask if isinstance(block_mask, BlockCsr) else _lists(op, block_mask)
    return left, right, row_ptr, col_idx


def _is_deadline(x):
    return isinstance(x, (int, float)) and 0 < x <= sys.float_info.max


def _require_together(op, **both):
    (one, first), (other, second) = both.items()
    if (first is None) != (second is None):
        missing, given = (one, other) if first is None else (other, one)
        raise InvalidArgument(f"[{op}] {missing} must be given where {given} is, but is None")


# How a sequence is cut


def shard(x: Tensor, world_size: int, balance: str = "zigzag", dim: int = 1) -> list[Tensor]:
    """A sequence cut into the parts that the ranks of a ring hold; rank p takes shard(x, world_size)[p].

    x of any shape, dimension dim being that of its n tokens -> world_size tensors, of x's shape but for that dimension.

    balance: contiguous: rank p holds chunk p of world_size, chunk c beginning at (c n) div world_size.
        zigzag: rank p holds chunks p and 2 world_size - 1 - p of 2 world_size, chunk c beginning at (c n) div (2 world_size), one
        behind the other. With causal attention all ranks then have as much to do, where the last of contiguous ones has most.
    Any n will do, 0 and fewer than there are ranks included: chunks differ by one token at most. Of contiguous shards, and
    wherever chunks are neighbours, the results are views of x.

    Returns a list. Gradients: x.

    >>> [part.tolist() for part in shard(torch.arange(10), 2, dim=0)]
    [[0, 1, 7, 8, 9], [2, 3, 4, 5, 6]]
    """
    _require_tensor("shard", "x", x, dim)
    require_size("shard", "world_size", world_size, least=1)
    parts = []
    for ranges in _ranges("shard", x.shape[dim], world_size, balance):
        if len(ranges) == 2 and ranges[0][1] == ranges[1][0]:
            ranges = [(ranges[0][0], ranges[1][1])]
        pieces = [x.narrow(dim, first, end - first) for first, end in ranges]
        parts.append(pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim))
    return parts


def unshard(shards: Sequence[Tensor], balance: str = "zigzag", dim: int = 1) -> Tensor:
    """The sequence that shard cut: unshard(shard(x, world_size, balance, dim), balance, dim) is x.

    shards: one tensor a rank, in order, equal in all dimensions but dim.  balance, dim: as they were cut.

    Returns a tensor. Gradients: shards.

    >>> unshard(shard(torch.arange(10), 4, dim=0), dim=0)
    tensor([0, 1, 2, 3, 4, 5, 6, 7, 8, 9])
    """
    good = isinstance(shards, Sequence) and len(shards) > 0
    require(good, "unshard", "shards", "be a list of at least one tensor", shards)
    for p, part in enumerate(shards):
        _require_tensor("unshard", f"shards[{p}]", part, dim)
        rest = [(*t.shape[: dim % t.dim()], *t.shape[dim % t.dim() + 1 :], t.dtype, t.device) for t in (shards[0], part)]
        if rest[0] != rest[1]:
            raise InvalidArgument(f"[unshard] shards[{p}] must be as shards[0] but for its size {dim}, but has shape "
                                  f"{tuple(part.shape)}, {part.dtype}, {part.device}")
    n, pieces = sum(part.shape[dim] for part in shards), []
    for p, (part, ranges) in enumerate(zip(shards, _ranges("unshard", n, len(shards), balance))):
        tokens = sum(end - first for first, end in ranges)
        if part.shape[dim] != tokens:
            raise InvalidArgument(f"[unshard] shards[{p}] must have {tokens} of the {n} tokens but has {part.shape[dim]}")
        at = 0
        for first, end in ranges:
            pieces.append((first, part.narrow(dim, at, end - first)))
            at += end - first
    pieces.sort(key=lambda piece: piece[0])
    return torch.cat([piece for _, piece in pieces], dim)


def _ranges(op, n, world_size, balance):
    """Of every rank, the tokens (first, end) that it holds."""
    require(balance in ("zigzag", "contiguous"), op, "balance", "be zigzag or contiguous", balance)
    chunks = world_size * (2 if balance == "zigzag" else 1)
    chunk = [(c * n // chunks, (c + 1) * n // chunks) for c in range(chunks)]
    if balance == "contiguous":
        return [[c] for c in chunk]
    return [[chunk[p], chunk[-1 - p]] for p in range(world_size)]


def _require_tensor(op, name, x, dim):
    what = unusual(x)
    if what is not None:
        raise InvalidArgument(f"[{op}] {name} must be a dense tensor but is {what}")
    good = isinstance(dim, int) and not isinstance(dim, bool) and -x.dim() <= dim < x.dim()
    require(good, op, "dim", f"be a dimension of {name}, of shape {tuple(x.shape)},", dim)


# Fake kernel and autograd

fake("ring_attention", q=4, k=4, v=4)(_outputs)


def _complete(b, gradients, also):
    """What the forward did not keep it makes again, on all ranks; of an output that nobody used the gradient is 0."""
    if b.lse is None:
        given = b._asdict() | dict(return_lse=False, keep=True)
        o, lse = call_backward("ring_attention", *(given[field] for field in _ring_attention.arguments._fields))
        b = b._replace(o=o, lse=lse)
    if b.do is None:
        b = b._replace(do=b.o.new_zeros(()).expand(b.o.shape))
    return b


_ring_attention = Operator(
    "ring_attention",
    keep=lambda ctx, a, outputs: outputs if a.keep else (None, None),
    kept=("o", "lse"),
    visible=lambda a: 2 if a.return_lse else 1,
    complete=_complete,
    samples=dict.fromkeys(("q", "k", "v", "o", "lse"), 0),
    # Dropout knows samples by their numbers, which a batch's must not change.
    folds=lambda a: a.dropout_p == 0,
    autocast=dict.fromkeys(("q", "k", "v"), "promote"),
    spoken={"window_left": "window_size", "window_right": "window_size", "dropout": "dropout_p"},
)


def _interruptible(call):
    """Where Ctrl-C came during the call, that is what is raised."""

    def run(*arguments, **others):
        try:
            result = call(*arguments, **others)
        except (RuntimeError, InvalidArgument):
            interrupted()
            raise
        interrupted()
        return result

    return run


for _name in ("ring_attention", "ring_attention_backward", "_ring_refuse"):
    op_of(_name)._op = _interruptible(op_of(_name)._op)
