"""Ring attention for the tests in Python: sample and wrong calls, of ranks that are threads. It has the definitions of attention
on one device, whose samples are loaded first."""

import samples_attention as one
import torch
from contract import Sample

import annulus

_SIZES = ((2, 9), (5, 17), (7, 23), (9, 31))  # B, n: no multiples of what there are ranks


def _tensors(H=6, Hkv=6, D=8, Dv=10, sizes=_SIZES, mask=False):
    def make(size, dtype, device):
        B, n = sizes[size]
        shapes = dict(q=(B, n, H, D), k=(B, n, Hkv, D), v=(B, n, Hkv, Dv))
        tensors = {name: torch.randn(shape, dtype=torch.float64).to(device, dtype) for name, shape in shapes.items()}
        if mask:
            rows = -(-n // 16)
            lists = annulus.BlockCsr.from_mask(torch.ones(1, rows, rows, device=device).tril() > 0)
            tensors |= dict(row_ptr=lists.row_ptr, col_idx=lists.col_idx)
        return tensors

    return make


def _sample(what, definition, tensors, ranks, fixed=(), folds=True, ring=(), **options):
    """ring: options that one device does not have."""

    def run(q, k, v, *, row_ptr=None, col_idx=None, **others):
        blocks = {} if row_ptr is None else dict(block_mask=annulus.BlockCsr(row_ptr, col_idx))
        return annulus.ring_attention_local(q, k, v, ranks, **blocks, **{**options, **dict(ring), **others})

    def define(q, k, v, *, row_ptr=None, col_idx=None, **others):
        blocks = {} if row_ptr is None else dict(block_mask=annulus.BlockCsr(row_ptr, col_idx))
        return definition(q, k, v, **blocks, **{**options, **others})

    cuts = dict(ring).get("balance") != "contiguous"
    return Sample("ring_attention", what, run, tensors, define, fixed=fixed, folds=folds, cuts=cuts, graphs=False)


SAMPLES = [
    _sample("zigzag", one.attention, _tensors(), 2),
    _sample("causal window", one.attention, _tensors(Hkv=3), 3, causal=True, window_size=(4, -1), softmax_scale=-0.7, return_lse=True),
    _sample("contiguous", one.attention, _tensors(Hkv=2), 4, causal=True, ring=dict(balance="contiguous", deterministic=True)),
    _sample("dropout", one.attention, _tensors(Hkv=3), 2, dropout_p=0.3, dropout_seed=2**40 + 5, folds=False),
    _sample("longnet", one.dilated_attention, _tensors(Hkv=2), 2, segment_lengths=(4, 8, 64), dilation_rates=(1, 2, 4), causal=True,
            return_lse=True),
    _sample("grouped", one.dilated_attention, _tensors(), 3, segment_lengths=(5, 64), dilation_rates=(2, 3), mode="grouped"),
    _sample("blocks", one.block_sparse_attention, _tensors(H=2, Hkv=1, sizes=((2, 40), (5, 85), (7, 101), (9, 117)), mask=True), 2,
            block_size=16, causal=True, fixed=("row_ptr", "col_idx")),
]
# Tells the other processes of a group that this one's call broke a rule (ring_attention_torch_test.py has it).
OUTSIDE_OF_COMPILED_CODE = {"_ring_refuse"}


def _bad(ranks=2, q=(2, 5, 4, 8), k=(2, 5, 2, 8), v=(2, 5, 2, 6), dtype=torch.float32, **options):
    def call(grad):
        tensors = [torch.ones(shape, dtype=dtype) for shape in (q, k, v)]
        if grad and dtype.is_floating_point:
            tensors[0].requires_grad_()
        return annulus.ring_attention_local(*tensors, ranks, **options)

    return call


_MASK = torch.ones(1, 1, 1, dtype=torch.bool)
_w = dict(segment_lengths=(2, 4), dilation_rates=(1, 2))
BAD = [
    (_bad(q=(5, 4, 8)), r"\[ring_attention\] q must have 4 dimensions but has shape \(5, 4, 8\)"),
    (_bad(k=(2, 7, 2, 8), v=(2, 7, 2, 6)), r"\[ring_attention\] k must have q's 5 rows but has shape \(2, 7, 2, 8\)"),
    (_bad(k=(2, 5, 3, 8), v=(2, 5, 3, 6)), r"\[ring_attention\] k must have a number of heads that divides q's 4"),
    (_bad(dtype=torch.int32), r"q must be one of f32, f16, bf16 but is i32"),
    (_bad(ranks=0), r"world_size must be an integer of at least 1 but is 0"),
    (_bad(ranks=2.0), r"world_size must be an integer"),
    (_bad(ranks=5000), r"world_size must be 1 to 1024 but is 5000"),
    (_bad(balance="even"), r"balance must be zigzag or contiguous but is 'even'"),
    (_bad(window_size=3), r"\[ring_attention\] window_size must be \(left, right\) but is 3"),
    (_bad(dropout_p=1.0), r"dropout_p must be at least 0 and less than 1"),
    (_bad(deadline_s=0), r"deadline_s must be a positive, finite number but is 0"),
    (_bad(deadline_s=float("inf")), r"deadline_s must be a positive, finite number"),
    (_bad(segment_lengths=(2, 4)), r"dilation_rates must be given where segment_lengths is, but is None"),
    (_bad(dilation_rates=(1,)), r"segment_lengths must be given where dilation_rates is, but is None"),
    (_bad(segment_lengths=(), dilation_rates=()), r"segment_lengths must have 1 to 16 entries but is \(\)"),
    (_bad(segment_lengths=3, dilation_rates=1), r"segment_lengths must be a sequence of integers but is 3"),
    (_bad(**_w, mode="dense"), r"mode must be longnet, grouped or grouped_kv but is 'dense'"),
    (_bad(**_w, window_size=(1, 1)), r"window_size must be left out where segment_lengths is given, but is \(1, 1\)"),
    (_bad(mode="grouped"), r"mode must be left out where no segment_lengths are given, but is 'grouped'"),
    (_bad(block_mask=_MASK), r"block_size must be given where block_mask is, but is None"),
    (_bad(block_mask=_MASK, block_size=16, **_w), r"block_mask must be left out where segment_lengths are given"),
    (_bad(block_mask=_MASK, block_size=24), r"block_size must be 16, 32, 64 or 128 but is 24"),
    (_bad(block_mask=torch.ones(1, 2, 2) > 0, block_size=16), r"row_ptr must have shape"),
    (_bad(block_mask=torch.ones(1, 1, 1), block_size=16), r"block_mask must be a tensor of bool but is torch.float32"),
]
