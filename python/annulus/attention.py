"""Softmax attention: dense, of packed sequences, LongNet's dilated branches, and lists of blocks.

One pass over tiles, forward and backward: nothing of size Tq x Tk ever exists. The C++ library checks every argument and takes
any strides; Python only routes.
"""

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple, TypedDict, overload

import torch
from torch import Tensor
from typing_extensions import Unpack

from . import masks as masks
from ._library import ops
from ._operator import Operator, call_backward, fake, needs_autograd
from .errors import InvalidArgument, require, require_size, unusual

_No = Literal[False]
_Yes = Literal[True]


class _Shared(TypedDict, total=False):
    causal: bool
    softmax_scale: float | None
    deterministic: bool
    dropout_p: float
    dropout_seed: int | None
    checkpoint: bool


class _Varlen(_Shared, total=False):
    window_size: tuple[int, int]


class _Dense(_Varlen, total=False):
    order: Tensor | None
    key_lengths: Tensor | None


class _Dilated(_Shared, total=False):
    mode: str
    offset_map: str
    multiplicity: str
    alpha_grad: str
    group_remainder: str


class _Blocks(_Shared, total=False):
    order: Tensor | None


@overload
def attention(q: Tensor, k: Tensor, v: Tensor, *, return_lse: _No = False, **options: Unpack[_Dense]) -> Tensor: ...
@overload
def attention(q: Tensor, k: Tensor, v: Tensor, *, return_lse: _Yes, **options: Unpack[_Dense]) -> tuple[Tensor, Tensor]: ...
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    order: Tensor | None = None,
    return_lse: bool = False,
    deterministic: bool = False,
    dropout_p: float = 0.0,
    dropout_seed: int | None = None,
    key_lengths: Tensor | None = None,
    checkpoint: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Softmax attention over the keys j that query i may see:

        s_ij = softmax_scale <q_i, k_j>        lse_i = log sum_j exp(s_ij)        o_i = sum_j exp(s_ij - lse_i) v_j

    q (B, Tq, H, D), k (B, Tk, Hkv, D), v (B, Tk, Hkv, Dv) -> o (B, Tq, H, Dv); D and Dv 1 to 256, every other size may be 0. Hkv
    divides H: head h reads keys of head h div (H / Hkv). float32, float16 or bfloat16; sums and the softmax are float32.
    (On CUDA products of float32 are made of two bfloat16 terms each, right to about 1e-5; on the CPU they are float32.)

    causal: with i' = i + Tk - Tq, so that the last query stands at the last key, j <= i'.
    window_size (left, right): i' - left <= j <= i' + right; a negative bound is none.
    softmax_scale: any finite number; 1 / sqrt(D) by default.
    order (T,) integers, Tq == Tk: a permutation. Token order[r] has rank r, and i and j above are ranks (hilbert_order).
    key_lengths (B,) integers: sample b has only its first key_lengths[b] keys, and that number is Tk above.
    dropout_p: every weight that o is made of (lse is not) is kept with probability 1 - p and divided by it. Which ones is a
        function of dropout_seed, sample, head, query and key alone, so the caller must give one, another for every layer and step.
    checkpoint: q, k and v are all that is kept for the backward, which computes o and lse again, to the same bits. (Within
        torch.utils.checkpoint it changes nothing.)
    deterministic: gradients are the same to the bit in every run. On CUDA that takes other kernels for the backward of float16
        and bfloat16 with D and Dv up to 128, which need more time; everything else is always so. torch.use_deterministic_algorithms
        asks for it, too.
    return_lse: also lse (B, H, Tq) in float32, differentiable like o.

    A query without keys has o = 0, lse = -inf and gives no gradient. Integers that say where to read are checked on the CPU;
    on CUDA they are cut to what is there. Under autocast q, k and v become the widest of their dtypes.

    Returns o, or (o, lse). Gradients: q, k, v; only those that are asked for are computed (k's and v's together).

    >>> q, k, v = torch.rand(2, 5, 4, 8), torch.rand(2, 7, 2, 8), torch.rand(2, 7, 2, 16)
    >>> attention(q, k, v, causal=True).shape
    torch.Size([2, 5, 4, 16])
    """
    left, right = _window("attention", window_size)
    o, *lse = _attention(q, k, v, causal, softmax_scale, left, right, order, key_lengths,
                         dropout_p, _seed("attention", dropout_p, dropout_seed),
                         _is_asked(deterministic), return_lse, _keeps(q, k, v, checkpoint))
    return (o, lse[0]) if return_lse else o


@overload
def attention_varlen(q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, *, return_lse: _No = False,
                     **options: Unpack[_Varlen]) -> Tensor: ...
@overload
def attention_varlen(q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, *, return_lse: _Yes,
                     **options: Unpack[_Varlen]) -> tuple[Tensor, Tensor]: ...
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    return_lse: bool = False,
    deterministic: bool = False,
    dropout_p: float = 0.0,
    dropout_seed: int | None = None,
    checkpoint: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """attention of each of several sequences that lie packed one behind the other, without padding:

        s_ij = softmax_scale <q_i, k_j>        lse_i = log sum_j exp(s_ij)        o_i = sum_j exp(s_ij - lse_i) v_j

    q (total_q, H, D), k (total_k, Hkv, D), v (total_k, Hkv, Dv) -> o (total_q, H, Dv). Sequence b is rows cu_seqlens_q[b] to
    cu_seqlens_q[b + 1] - 1 of q, and likewise of k and v: cu_seqlens_q and cu_seqlens_k (sequences + 1,) int32 or int64 ascend
    from 0 to the total (checked on the CPU).

    Everything else as in attention, of each sequence by itself: causality and windows are aligned at its end, and dropout
    counts samples, queries and keys as a batch of the sequences would. lse is (H, total_q).
    vmap runs one call a sample: a batch is better packed.

    Returns o, or (o, lse). Gradients: q, k, v.

    >>> q, cu = torch.rand(10, 4, 8), torch.tensor([0, 3, 10])  # two sequences, of 3 and 7 tokens
    >>> o = attention_varlen(q, q, q, cu, cu, causal=True)
    >>> torch.equal(o[3:], attention(q[None, 3:], q[None, 3:], q[None, 3:], causal=True)[0])
    True
    """
    left, right = _window("attention_varlen", window_size)
    o, *lse = _attention_varlen(q, k, v, causal, softmax_scale, left, right, cu_seqlens_q, cu_seqlens_k,
                                dropout_p, _seed("attention_varlen", dropout_p, dropout_seed),
                                _is_asked(deterministic), return_lse, _keeps(q, k, v, checkpoint))
    return (o, lse[0]) if return_lse else o


@overload
def dilated_attention(q: Tensor, k: Tensor, v: Tensor, segment_lengths: Sequence[int], dilation_rates: Sequence[int], *,
                      return_lse: _No = False, **options: Unpack[_Dilated]) -> Tensor: ...
@overload
def dilated_attention(q: Tensor, k: Tensor, v: Tensor, segment_lengths: Sequence[int], dilation_rates: Sequence[int], *,
                      return_lse: _Yes, **options: Unpack[_Dilated]) -> tuple[Tensor, Tensor]: ...
def dilated_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    segment_lengths: Sequence[int],
    dilation_rates: Sequence[int],
    *,
    causal: bool = False,
    mode: str = "longnet",
    offset_map: str = "mod",
    multiplicity: str = "multiset",
    alpha_grad: str = "exact",
    group_remainder: str = "first",
    softmax_scale: float | None = None,
    return_lse: bool = False,
    deterministic: bool = False,
    dropout_p: float = 0.0,
    dropout_seed: int | None = None,
    checkpoint: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """LongNet's dilated attention: branch i cuts the T tokens into segments of w_i and thins each by a rate r_i. Token t is of
    the branch, for head h, where (t mod w_i) mod r_i = rho_i(h), and then sees the tokens of its segment that are, too:

        o = sum_i alpha_i o_i        alpha_i = exp(lse_i - lse)        lse = log sum_i exp(lse_i)

    which is a softmax over all keys that any branch gives. q (B, T, H, D), k (B, T, Hkv, D), v (B, T, Hkv, Dv) -> o (B, T, H, Dv).

    segment_lengths w, dilation_rates r: 1 to 16 of each. A last segment may be short and w longer than T; there is no padding.
    mode: longnet: every head runs every branch.  grouped: heads are split into as many groups as there are branches, and
        group i runs branch i alone with rho = i mod r_i; rows outside it are exact zeros (lse -inf), and nothing is divided by the
        number of groups.  grouped_kv: as grouped, but every query of a segment sees the branch's keys.
    group_remainder: heads that do not divide evenly go one each to the "first" groups, or to the "last".
    offset_map, of longnet: "mod", rho_i(h) = h mod r_i (the paper);  "block", rho_i(h) = h div ceil(H / r_i) (torchscale).
    multiplicity, of longnet: "multiset": a key of several branches counts as often as it is of one (the paper);  "union": once.
    alpha_grad, of longnet with multiset: "exact", or "stop": gradients of o take the alpha_i for constants (torchscale).
    causal: keys j <= i only.  softmax_scale, dropout_p, dropout_seed, checkpoint, deterministic, return_lse: as in attention.

    Returns o, or (o, lse) with lse (B, H, T). Gradients: q, k, v.

    >>> q = torch.rand(1, 64, 4, 8)
    >>> o = dilated_attention(q, q, q, segment_lengths=(16, 32, 64), dilation_rates=(1, 2, 4), causal=True)
    >>> o.shape
    torch.Size([1, 64, 4, 8])
    """
    o, *lse = _dilated_attention(q, k, v, segment_lengths, dilation_rates, causal, mode, offset_map, multiplicity, alpha_grad,
                                 group_remainder, softmax_scale,
                                 dropout_p, _seed("dilated_attention", dropout_p, dropout_seed), _is_asked(deterministic), return_lse,
                                 _keeps(q, k, v, checkpoint))
    return (o, lse[0]) if return_lse else o


class BlockCsr(NamedTuple):
    """Lists of blocks, for block_sparse_attention: row x of head h has the columns

        col_idx[row_ptr[h, x]], ..., col_idx[row_ptr[h, x + 1] - 1]

    row_ptr (1 or H, rows + 1) int64 or int32, col_idx (blocks,) int32, ascending within a row. Gradients: none.

    >>> blocks = BlockCsr.from_mask(torch.tensor([[[True, False], [True, True]]]))
    >>> blocks.row_ptr, blocks.col_idx
    (tensor([[0, 1, 3]]), tensor([0, 0, 1], dtype=torch.int32))
    >>> blocks.density(columns=2)
    0.75
    """

    row_ptr: Tensor
    col_idx: Tensor

    @classmethod
    def from_mask(cls, mask: Tensor) -> "BlockCsr":
        """mask (1 or H, rows, columns) bool. Once, and outside torch.compile, for many calls; it waits for the device."""
        row_ptr, col_idx = _lists("BlockCsr", mask)
        return cls(row_ptr, col_idx[: int(row_ptr[-1, -1]) if row_ptr.numel() else 0].clone())

    def to_mask(self, columns: int) -> Tensor:
        """(1 or H, rows, columns) bool."""
        require_size("BlockCsr", "columns", columns)
        start, end = self.row_ptr[:, :-1, None], self.row_ptr[:, 1:, None]
        block = torch.arange(self.col_idx.shape[0], device=self.col_idx.device)
        inside = (block >= start) & (block < end)  # (heads, rows, blocks)
        mask = torch.zeros(*inside.shape[:2], columns + 1, dtype=torch.bool, device=inside.device)
        place = torch.where(inside, self.col_idx.long(), columns)
        return mask.scatter(2, place, True)[..., :columns]

    def density(self, columns: int) -> float:
        """The share of the blocks there could be; 0 where there are none."""
        heads, rows = self.row_ptr.shape[0], self.row_ptr.shape[1] - 1
        kept = (self.row_ptr[:, -1] - self.row_ptr[:, 0]).sum().item()
        return float(kept) / max(heads * rows * columns, 1)

    def to(self, device: torch.device | str) -> "BlockCsr":
        return BlockCsr(self.row_ptr.to(device), self.col_idx.to(device))


@overload
def block_sparse_attention(q: Tensor, k: Tensor, v: Tensor, block_mask: Tensor | BlockCsr, block_size: int, *,
                           return_lse: _No = False, **options: Unpack[_Blocks]) -> Tensor: ...
@overload
def block_sparse_attention(q: Tensor, k: Tensor, v: Tensor, block_mask: Tensor | BlockCsr, block_size: int, *,
                           return_lse: _Yes, **options: Unpack[_Blocks]) -> tuple[Tensor, Tensor]: ...
def block_sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_mask: Tensor | BlockCsr,
    block_size: int,
    *,
    causal: bool = False,
    order: Tensor | None = None,
    softmax_scale: float | None = None,
    return_lse: bool = False,
    deterministic: bool = False,
    dropout_p: float = 0.0,
    dropout_seed: int | None = None,
    checkpoint: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """attention where query i of head h sees key j only if block_mask[h, i div block_size, j div block_size]:

        s_ij = softmax_scale <q_i, k_j>        lse_i = log sum_j exp(s_ij)        o_i = sum_j exp(s_ij - lse_i) v_j

    q (B, Tq, H, D), k (B, Tk, Hkv, D), v (B, Tk, Hkv, Dv) -> o (B, Tq, H, Dv). Work and time are those of the blocks there are.

    block_size: 16, 32, 64 or 128; the last blocks may be short.
    block_mask (1 or H, ceil(Tq / block_size), ceil(Tk / block_size)) bool, which annulus.masks makes; or, better where it
        is used again, the BlockCsr of one. Of a mask the lists are made in every call, without waiting for the device.
    order: as in attention; blocks cut the sequence of ranks, so that tokens that are near on a curve share one.
    causal, softmax_scale, dropout_p, dropout_seed, checkpoint, deterministic, return_lse: as in attention.

    Returns o, or (o, lse) with lse (B, H, Tq). Gradients: q, k, v.

    >>> q = torch.rand(1, 100, 4, 8)
    >>> mask = masks.causal_window(tokens=100, block_size=16, density=0.5)
    >>> block_sparse_attention(q, q, q, mask, 16, causal=True).shape
    torch.Size([1, 100, 4, 8])
    """
    op = "block_sparse_attention"
    if isinstance(block_mask, BlockCsr):
        row_ptr, col_idx = block_mask
    else:
        row_ptr, col_idx = _lists(op, block_mask)
        if isinstance(block_size, (int, torch.SymInt)) and block_size > 0:  # else the op refuses it
            for t, name, axis in ((q, "q", 1), (k, "k", 2)):
                if isinstance(t, torch.Tensor) and not t.is_nested and t.dim() == 4:
                    blocks = (t.shape[1] + block_size - 1) // block_size
                    if block_mask.shape[axis] != blocks:
                        raise InvalidArgument(
                            f"[{op}] block_mask must have {blocks} {('rows', 'columns')[axis - 1]}, which {t.shape[1]} rows of "
                            f"{name} are, but has shape {tuple(block_mask.shape)}"
                        )
    o, *lse = _block_sparse_attention(q, k, v, row_ptr, col_idx, block_size, causal, softmax_scale, order,
                                      dropout_p, _seed("block_sparse_attention", dropout_p, dropout_seed),
                                      _is_asked(deterministic), return_lse, _keeps(q, k, v, checkpoint))
    return (o, lse[0]) if return_lse else o


def hilbert_order(shape: int | Sequence[int], device: torch.device | str | None = None) -> Tensor:
    """The order in which a Hilbert curve visits the cells of a grid, for attention's `order`: near on the curve is near on the grid.

    shape (n1,), (n1, n2) or (n1, n2, n3), of any sizes -> (n1 * n2 * n3,) int64: entry r is the row-major number of the r-th cell,
    every cell once. Where all sizes are one power of two, cells that follow each other are neighbours; elsewhere the curve is that of
    the next cube, with what is outside left out. Gradients: none.

    >>> order = hilbert_order((4, 4))
    >>> (order // 4).diff().abs() + (order % 4).diff().abs()  # a step at a time
    tensor([1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1])
    """
    sizes = [shape] if isinstance(shape, int) else shape
    good = isinstance(sizes, Sequence) and 1 <= len(sizes) <= 3 and not isinstance(sizes, str)
    require(good, "hilbert_order", "shape", "have 1 to 3 sizes", shape)
    for n in sizes:
        require_size("hilbert_order", "shape", n)
    require(math.prod(sizes) < 2**48, "hilbert_order", "shape", "have fewer than 2^48 cells", shape)
    order = torch.empty(math.prod(sizes), dtype=torch.int64, device="cpu")
    ops._hilbert_order.default(list(sizes), order)
    return order if device is None else order.to(device)


def _window(op, window_size):
    if not isinstance(window_size, (tuple, list)) or len(window_size) != 2:
        raise InvalidArgument(f"[{op}] window_size must be (left, right) but is {window_size!r}")
    return window_size


def _seed(op, dropout_p, dropout_seed):
    """One that nobody chose would drop the same weights in every layer and step."""
    if dropout_seed is not None:
        return dropout_seed
    try:  # as torch takes it: also numbers of numpy and tensors of one
        drops = 0 < float(dropout_p) < 1
    except (TypeError, ValueError):  # refused by name where it is read
        drops = False
    if drops:
        raise InvalidArgument(f"[{op}] dropout_seed must be given, another for every layer and step, as dropout_p is {dropout_p}")
    return 0


def _is_asked(deterministic):
    return bool(deterministic) or torch.are_deterministic_algorithms_enabled()


def _keeps(q, k, v, checkpoint):
    """Whether a backward will find o and lse: elsewhere it runs the forward again (an exported program keeps nothing)."""
    return not checkpoint and needs_autograd(q, k, v) and not torch.compiler.is_exporting()


def _lists(op, mask):
    """row_ptr and col_idx of a mask, with room for all of its blocks: no shape depends on a value, so nothing waits."""
    name = "mask" if op == "BlockCsr" else "block_mask"
    what = unusual(mask) or (mask.dtype if mask.dtype != torch.bool else None)
    if what is not None:
        raise InvalidArgument(f"[{op}] {name} must be a tensor of bool but is {what}")
    if mask.dim() != 3:
        raise InvalidArgument(f"[{op}] {name} must have 3 dimensions, (heads, rows, columns), but has shape {tuple(mask.shape)}")
    heads, rows, columns = mask.shape
    row = torch.arange(rows + 1, device=mask.device)
    before = torch.nn.functional.pad(mask.sum(-1).flatten().cumsum(0), (1, 0))
    row_ptr = before[torch.arange(heads, device=mask.device)[:, None] * rows + row]
    kept = mask.flatten()
    place = torch.where(kept, kept.cumsum(0) - 1, kept.shape[0])  # what is not kept goes one past the end
    column = torch.arange(columns, device=mask.device, dtype=torch.int32).expand(heads, rows, columns).flatten()
    col_idx = torch.zeros(kept.shape[0] + 1, device=mask.device, dtype=torch.int32).scatter(0, place, column)
    return row_ptr, col_idx


# Fake kernels: shapes and dtypes without data, for torch.compile and torch.export


def _outputs(a):
    *batch, Tq, H, _ = a.q.shape
    lse = (*batch, H, Tq) if a.return_lse or a.keep else (0,)
    return a.q.new_empty((*batch, Tq, H, a.v.shape[-1])), a.q.new_empty(lse, dtype=torch.float32)


for _name, _rank in (("attention", 4), ("attention_varlen", 3), ("dilated_attention", 4), ("block_sparse_attention", 4)):
    fake(_name, q=_rank, k=_rank, v=_rank)(_outputs)
fake("_hilbert_order")(lambda a: None)


# Autograd


def _operator(name, samples):
    def complete(b, gradients, also):
        """What the forward did not keep it makes again; of an output that nobody used the gradient is 0."""
        if b.lse is None:
            given = b._asdict() | dict(return_lse=False, keep=True)
            o, lse = call_backward(name, *(given[field] for field in operator.arguments._fields))
            b = b._replace(o=o, lse=lse)
        if b.do is None:
            b = b._replace(do=b.o.new_zeros(()).expand(b.o.shape))
        return b

    operator = Operator(
        name,
        keep=lambda ctx, a, outputs: outputs if a.keep else (None, None),
        kept=("o", "lse"),
        visible=lambda a: 2 if a.return_lse else 1,
        complete=complete,
        samples=dict.fromkeys(samples, 0),
        # Dropout knows samples by their numbers, which a batch's must not change.
        folds=lambda a: a.dropout_p == 0,
        autocast=dict.fromkeys(("q", "k", "v"), "promote"),
        spoken={"window_left": "window_size", "window_right": "window_size", "dropout": "dropout_p"},
    )
    return operator


_samples = ("q", "k", "v", "key_lengths", "o", "lse")
_attention, _dilated_attention = _operator("attention", _samples), _operator("dilated_attention", _samples)
_attention_varlen, _block_sparse_attention = _operator("attention_varlen", ()), _operator("block_sparse_attention", _samples)
