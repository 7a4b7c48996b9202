"""The attention family for the tests in Python: its definitions in double precision, differentiable, over explicit sets of keys;
sample and wrong calls."""

import torch
from contract import Sample

import annulus

# Definitions


def _softmax(s, times):
    """p and lse of scores, each taken so many times; a row without any has 0 and -inf."""
    there = times > 0
    some = there.any(-1, keepdim=True)
    s = torch.where(there, s, -torch.inf)
    s = torch.where(some, s, 0.0) + torch.where(there, times, 1).double().log()
    lse = s.logsumexp(-1, keepdim=True)
    p = torch.where(there, (s - lse).exp(), 0.0)
    return p, torch.where(some, lse, -torch.inf)


def attend(q, k, v, branches, scale=None, z=1.0, stop=False):
    """o and lse over sets of keys: branches are counts, each (B or 1, H or 1, Tq, Tk), that add up. stop: of their weights
    as constants. z: what dropout makes of a weight."""
    q, k, v = q.double(), k.double(), v.double()
    k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], 2) for x in (k, v))
    s = (q.shape[3] ** -0.5 if scale is None else scale) * torch.einsum("bihd,bjhd->bhij", q, k)
    p, lse = _softmax(s, sum(branches))
    if stop:
        parts = [_softmax(s, times) for times in branches]
        p = sum(own * (own_lse - lse).exp().nan_to_num().detach() for own, own_lse in parts)
    return torch.einsum("bhij,bjhd->bihd", z * p, v), lse[..., 0]


def _mix(x, first, second, shift, last):
    mask = 2**64 - 1 if shift == 33 else 2**32 - 1
    x = (x ^ (x >> shift)) * first & mask
    x = (x ^ (x >> second)) * last & mask
    return x ^ (x >> shift)


def mix32(x):
    return _mix(x, 0x85EBCA6B, 13, 16, 0xC2B2AE35)


def mix64(x):
    return _mix(x, 0xFF51AFD7ED558CCD, 33, 33, 0xC4CEB9FE1A85EC53)


def dropout(p, seed, B, H, Tq, Tk, device, first_sample=0):
    """(B, H, Tq, Tk): 0 or 1 / (1 - p), by the hash of annulus/attention/dropout.h."""

    def row(b, h, i):
        x = mix64((seed + 0x9E3779B97F4A7C15) % 2**64)
        for number in (b + first_sample, h, i):
            x = mix64(x ^ number)
        low, high = x % 2**32, x >> 32
        return [float(mix32((mix32(j ^ low) + high) % 2**32) >= int(p * 2**32)) for j in range(Tk)]

    kept = [[[row(b, h, i) for i in range(Tq)] for h in range(H)] for b in range(B)]
    return torch.tensor(kept, dtype=torch.float64, device=device).reshape(B, H, Tq, Tk) / (1 - p)


def _ranks(T, order, device):
    rank = torch.arange(T, device=device)
    return rank if order is None else torch.empty_like(rank).scatter_(0, order.long(), rank)


def dense(Tq, Tk, device, causal=False, window_size=(-1, -1), order=None, key_lengths=None):
    """(B or 1, 1, Tq, Tk): 1 where the query sees the key."""
    i, j = _ranks(Tq, order, device)[:, None], _ranks(Tk, order, device)
    keys = torch.tensor([Tk], device=device) if key_lengths is None else key_lengths.long()
    keys = keys[:, None, None]
    behind = i + keys - Tq - j
    left, right = window_size
    seen = j < keys
    seen = seen & (behind >= 0) if causal else seen
    seen = seen & (behind <= left) if left >= 0 else seen
    seen = seen & (-behind <= right) if right >= 0 else seen
    return seen[:, None].long()


def dilated(T, H, device, w, r, causal=False, mode="longnet", offset_map="mod", group_remainder="first"):
    """A branch's (1, H, T, T) for each branch, or one for all groups of heads."""
    t, sets = torch.arange(T, device=device), []
    groups = torch.arange(len(w)).repeat_interleave(
        torch.tensor([H // len(w) + ((g if group_remainder == "first" else len(w) - 1 - g) < H % len(w)) for g in range(len(w))]))
    for branch in range(len(w)) if mode == "longnet" else [None]:
        rows = []
        for h in range(H):
            i = int(groups[h]) if branch is None else branch
            rho = i % r[i] if branch is None else h % r[i] if offset_map == "mod" else h // (-(-H // r[i]))
            own = t % w[i] % r[i] == rho
            seen = (t[:, None] // w[i] == t // w[i]) & own
            seen = seen if mode == "grouped_kv" else seen & own[:, None]
            rows.append(seen & (t[:, None] >= t) if causal else seen)
        sets.append(torch.stack(rows)[None].long())
    return sets


def blocks(Tq, Tk, device, mask, size, causal=False, order=None):
    i, j = _ranks(Tq, order, device)[:, None], _ranks(Tk, order, device)
    seen = mask[:, i // size, j // size]
    return (seen & (j <= i + Tk - Tq) if causal else seen)[None].long()


# Functions with the arguments of annulus's


def attention(q, k, v, *, return_lse=False, softmax_scale=None, dropout_p=0.0, dropout_seed=0, **options):
    sizes = q.shape[0], q.shape[2], q.shape[1], k.shape[1]
    z = dropout(dropout_p, dropout_seed, *sizes, q.device) if dropout_p else 1.0
    o, lse = attend(q, k, v, [dense(*sizes[2:], q.device, **options)], softmax_scale, z)
    return (o, lse) if return_lse else o


def attention_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, *, return_lse=False, dropout_p=0.0, dropout_seed=0, **options):
    parts, ends = [], zip(*(cu.tolist() for cu in (cu_seqlens_q, cu_seqlens_k)))
    (q0, k0), *ends = ends
    for b, (q1, k1) in enumerate(ends):
        z = dropout(dropout_p, dropout_seed, 1, q.shape[1], q1 - q0, k1 - k0, q.device, b) if dropout_p else 1.0
        branch = dense(q1 - q0, k1 - k0, q.device, **options)
        parts.append(attend(q[None, q0:q1], k[None, k0:k1], v[None, k0:k1], [branch], z=z))
        q0, k0 = q1, k1
    o, lse = torch.cat([o[0] for o, _ in parts]), torch.cat([lse[0] for _, lse in parts], 1)
    return (o, lse) if return_lse else o


def dilated_attention(q, k, v, segment_lengths, dilation_rates, *, multiplicity="multiset", alpha_grad="exact",
                      return_lse=False, softmax_scale=None, **options):
    sets = dilated(q.shape[1], q.shape[2], q.device, segment_lengths, dilation_rates, **options)
    sets = [sum(sets).clamp_max(1)] if multiplicity == "union" else sets
    o, lse = attend(q, k, v, sets, softmax_scale, stop=alpha_grad == "stop")
    return (o, lse) if return_lse else o


def block_sparse_attention(q, k, v, block_mask, block_size, *, return_lse=False, **options):
    if isinstance(block_mask, annulus.BlockCsr):
        block_mask = block_mask.to_mask(-(-k.shape[1] // block_size))
    o, lse = attend(q, k, v, [blocks(q.shape[1], k.shape[1], q.device, block_mask, block_size, **options)])
    return (o, lse) if return_lse else o


DEFINITIONS = dict(attention=attention, attention_varlen=attention_varlen, dilated_attention=dilated_attention,
                   block_sparse_attention=block_sparse_attention)


# Sample calls. Between them they reach every op of the operator.

_SIZES = ((2, 6, 9), (5, 13, 17), (7, 19, 23), (9, 29, 31))  # B, Tq, Tk


def _qkv(dtype, device, B, Tq, Tk, H, Hkv, D, Dv):
    shapes = dict(q=(Tq, H, D), k=(Tk, Hkv, D), v=(Tk, Hkv, Dv))
    shapes = {name: shape if B is None else (B, *shape) for name, shape in shapes.items()}
    return {name: torch.randn(shape, dtype=torch.float64).to(device, dtype) for name, shape in shapes.items()}


def _tensors(H=6, Hkv=6, D=8, Dv=10, square=False, **others):
    def make(size, dtype, device):
        B, Tq, Tk = _SIZES[size]
        tensors = _qkv(dtype, device, B, Tk if square else Tq, Tk, H, Hkv, D, Dv)
        return tensors | {name: f(B, Tk).to(device) for name, f in others.items()}

    return make


def _packed(size, dtype, device):
    _, Tq, Tk = _SIZES[size]
    ends = dict(cu_seqlens_q=[0, 4, 4, Tq], cu_seqlens_k=[0, 5, 6, Tk])
    tensors = _qkv(dtype, device, None, Tq, Tk, 6, 3, 8, 10)
    return tensors | {name: torch.tensor(e, dtype=torch.int32, device=device) for name, e in ends.items()}


def _listed(per_head, **others):
    def make(size, dtype, device):
        B, T = ((2, 40), (5, 85), (7, 101), (9, 117))[size]
        n = -(-T // 16)
        mask = torch.ones(n, n).tril()[None] > 0
        if per_head:
            mask = torch.cat([mask, (torch.eye(n)[None] + (torch.arange(n) == 0)) > 0])
        row_ptr, col_idx = annulus.BlockCsr.from_mask(mask.to(device))
        tensors = _qkv(dtype, device, B, T, T, 2, 1, 12, 8) | dict(row_ptr=row_ptr, col_idx=col_idx)
        return tensors | {name: f(B, T).to(device) for name, f in others.items()}

    return make


def _sample(op, what, tensors, *arguments, fixed=(), folds=True, **options):
    def of(function):
        def call(q, k, v, *, row_ptr=None, col_idx=None, **others):
            given = (annulus.BlockCsr(row_ptr, col_idx), *arguments) if op == "block_sparse_attention" else arguments
            return function(q, k, v, *given, **{**options, **others})

        return call

    return Sample(op, what, of(getattr(annulus, op)), tensors, of(DEFINITIONS[op]), fixed=fixed, folds=folds)


def _order(B, T):
    return torch.randperm(T)


_LISTS = ("row_ptr", "col_idx")
SAMPLES = [
    _sample("attention", "", _tensors()),
    _sample("attention", "causal window", _tensors(Hkv=3), causal=True, window_size=(4, -1), softmax_scale=-0.7,
            return_lse=True),
    _sample("attention", "key lengths", _tensors(Hkv=2, key_lengths=lambda B, T: 1 + torch.arange(B) % T), return_lse=True),
    _sample("attention", "order", _tensors(square=True, order=_order), window_size=(2, 3)),
    _sample("attention", "dropout", _tensors(Hkv=3), dropout_p=0.3, dropout_seed=2**40 + 5, folds=False),
    _sample("attention_varlen", "", _packed, fixed=("cu_seqlens_q", "cu_seqlens_k"), folds=False),
    _sample("attention_varlen", "causal window", _packed, causal=True, window_size=(3, -1), dropout_p=0.2, dropout_seed=3,
            fixed=("cu_seqlens_q", "cu_seqlens_k"), folds=False),
    _sample("dilated_attention", "", _tensors(Hkv=2, square=True), (4, 64), (1, 3)),
    _sample("dilated_attention", "causal", _tensors(square=True), (4, 8, 64), (1, 2, 4), causal=True, return_lse=True),
    _sample("dilated_attention", "union", _tensors(Hkv=2, square=True), (4, 9, 64), (1, 2, 3), multiplicity="union",
            offset_map="block", return_lse=True),
    _sample("dilated_attention", "stop", _tensors(Hkv=3, square=True), (4, 6), (1, 3), alpha_grad="stop", return_lse=True),
    _sample("dilated_attention", "grouped", _tensors(square=True), (4, 5, 8, 64), (1, 2, 3, 4), mode="grouped",
            group_remainder="last", causal=True),
    _sample("dilated_attention", "grouped keys", _tensors(Hkv=2, square=True), (5, 64), (2, 3), mode="grouped_kv"),
    _sample("block_sparse_attention", "", _listed(per_head=True), 16, causal=True, return_lse=True, fixed=_LISTS),
    _sample("block_sparse_attention", "order", _listed(per_head=False, order=_order), 16, fixed=_LISTS),
]
# Writes to a tensor that it is given, which is integers.
OUTSIDE_OF_COMPILED_CODE = {"_hilbert_order"}


def _bad(function, *arguments, q=(2, 5, 4, 8), k=(2, 7, 2, 8), v=(2, 7, 2, 6), dtype=torch.float32, **options):
    def call(grad):
        tensors = [torch.ones(shape, dtype=dtype) for shape in (q, k, v)]
        if grad and dtype.is_floating_point:
            tensors[0].requires_grad_()
        return function(*tensors, *arguments, **options)

    return call


def _integers(*values):
    return torch.tensor(values, dtype=torch.int64)


_dense = lambda **options: _bad(annulus.attention, **options)  # noqa: E731
_same = lambda **options: _bad(annulus.attention, **{**dict(k=(2, 5, 2, 8), v=(2, 5, 2, 6)), **options})  # noqa: E731


def _varlen(cu_q=(0, 3, 5), cu_k=(0, 2, 7), **options):
    ends = [torch.tensor(cu, dtype=torch.int32) if isinstance(cu, tuple) else cu for cu in (cu_q, cu_k)]
    return _bad(annulus.attention_varlen, *ends, **{**dict(q=(5, 4, 8), k=(7, 2, 8), v=(7, 2, 6)), **options})


def _longnet(w=(2, 4), r=(1, 2), **options):
    return _bad(annulus.dilated_attention, w, r, **{**dict(k=(2, 5, 2, 8), v=(2, 5, 2, 6)), **options})


def _blocks(mask=(1, 3, 4), size=16, dtype=torch.bool, **options):
    mask = torch.ones(mask, dtype=dtype) if type(mask) is tuple else mask
    return _bad(annulus.block_sparse_attention, mask, size,
                **{**dict(q=(2, 40, 4, 8), k=(2, 60, 2, 8), v=(2, 60, 2, 6)), **options})


def _csr(rows, columns):
    return annulus.BlockCsr(_integers(*rows)[None], torch.tensor(columns, dtype=torch.int32))


BAD = [
    (_dense(q=(5, 4, 8)), r"\[attention\] q must have 4 dimensions but has shape \(5, 4, 8\)"),
    (_dense(k=(3, 7, 2, 8)), r"\[attention\] k must have shape"),
    (_dense(k=(2, 7, 2, 9)), r"\[attention\] k must have shape"),
    (_dense(v=(2, 6, 2, 6)), r"\[attention\] v must have shape"),
    (_dense(k=(2, 7, 3, 8), v=(2, 7, 3, 6)), r"k must have a number of heads that divides q's 4"),
    (_dense(q=(2, 5, 4, 257), k=(2, 7, 2, 257)), r"q must have 1 to 256 columns"),
    (_dense(v=(2, 7, 2, 0)), r"v must have 1 to 256 columns"),
    (_dense(dtype=torch.float64), r"q must be one of f32, f16, bf16 but is f64"),
    (_dense(dtype=torch.int32), r"q must be one of f32, f16, bf16 but is i32"),
    (_dense(softmax_scale=float("nan")), r"softmax_scale must be a finite number"),
    (_dense(softmax_scale="large"), r"softmax_scale must be Optional\[float\] but is str"),
    (_dense(causal="no"), r"causal must be bool"),
    (_dense(window_size=3), r"\[attention\] window_size must be \(left, right\) but is 3"),
    (_dense(window_size=(1.5, 0)), r"window_size must be int but is float"),
    (_dense(dropout_p=1.0), r"dropout_p must be at least 0 and less than 1 but is 1.0"),
    (_dense(dropout_p=-0.1), r"dropout_p must be at least 0"),
    (_dense(dropout_p=0.1), r"dropout_seed must be given, another for every layer and step, as dropout_p is 0.1"),
    (_dense(dropout_p=torch.tensor(0.5)), r"dropout_seed must be given"),
    (_dense(dropout_seed=0.5), r"dropout_seed must be int"),
    (_dense(order=_integers(0, 1, 2, 3, 4)), r"order must be left out where q and k have different numbers of rows"),
    (_same(order=_integers(0, 1, 2, 3)), r"order must have shape \(5,\)"),
    (_same(order=_integers(0, 1, 2, 3, 3)), r"order must have every number below 5 once but has 3 twice"),
    (_same(order=_integers(0, 1, 2, 3, 5)), r"order must have every number below 5 once but has 5 at 4"),
    (_same(order=torch.ones(5)), r"order must be one of i32, i64 but is f32"),
    (_same(order=_integers(0, 1, 2, 3, 4), key_lengths=_integers(1, 2)), r"key_lengths must be left out where an order is given"),
    (_dense(key_lengths=_integers(1, 8)), r"key_lengths must lie within 0..7 but has 8 at 1"),
    (_dense(key_lengths=_integers(1, 2, 3)), r"key_lengths must have shape \(2,\)"),
    (_varlen(q=(2, 5, 4, 8)), r"\[attention_varlen\] q must have 3 dimensions"),
    (_varlen(cu_q=(0, 3, 4)), r"\[attention_varlen\] cu_seqlens_q must end with the number of rows, 5 but ends with 4"),
    (_varlen(cu_k=(0, 3, 2)), r"cu_seqlens_k must ascend from 0 but has 2 at 2"),
    (_varlen(cu_k=(0, 7)), r"cu_seqlens_k must have shape \(3,\)"),
    (_varlen(cu_q=None), r"cu_seqlens_q must be a tensor but is None"),
    (_varlen(cu_q=(), cu_k=()), r"cu_seqlens_q must have at least 1 entry"),
    (_longnet(k=(2, 6, 2, 8), v=(2, 6, 2, 6)), r"\[dilated_attention\] k must have q's 5 rows"),
    (_longnet(w=(), r=()), r"segment_lengths must have 1 to 16 entries but has 0"),
    (_longnet(w=(2,) * 17, r=(1,) * 17), r"segment_lengths must have 1 to 16 entries but has 17"),
    (_longnet(r=(1,)), r"dilation_rates must have as many entries as segment_lengths, 2, but has 1"),
    (_longnet(w=(2, 0)), r"segment_lengths must be at least 1 but has 0"),
    (_longnet(r=(1, -2)), r"dilation_rates must be at least 1 but has -2"),
    (_longnet(w="24"), r"segment_lengths must be List\[int\]"),
    (_longnet(mode="dense"), r"mode must be longnet, grouped or grouped_kv but is 'dense'"),
    (_longnet(offset_map="none"), r"offset_map must be mod or block"),
    (_longnet(multiplicity="set"), r"multiplicity must be multiset or union"),
    (_longnet(alpha_grad="no"), r"alpha_grad must be exact or stop"),
    (_longnet(group_remainder="middle"), r"group_remainder must be first or last"),
    (_longnet(alpha_grad="stop", multiplicity="union"), r"alpha_grad must be 'exact' with multiplicity 'union'"),
    (_longnet(mode="grouped", multiplicity="union"), r"multiplicity must be 'multiset' where heads are grouped"),
    (_longnet(mode="grouped", alpha_grad="stop"), r"alpha_grad must be 'exact' where heads are grouped"),
    (_longnet(mode="grouped_kv", offset_map="block"), r"offset_map must be 'mod' where heads are grouped"),
    (_longnet(group_remainder="last"), r"group_remainder must be 'first' in mode 'longnet'"),
    (_longnet(mode="grouped", w=(2,) * 5, r=(1,) * 5), r"segment_lengths must have at most 4 entries, so that every group has a head"),
    (_blocks(size=24), r"\[block_sparse_attention\] block_size must be 16, 32, 64 or 128 but is 24|block_mask must have"),
    (_blocks(size=16.0), r"block_size must be int"),
    (_blocks(mask=(3, 4)), r"block_mask must have 3 dimensions"),
    (_blocks(mask=(1, 4, 4)), r"block_mask must have 3 rows, which 40 rows of q are, but has shape \(1, 4, 4\)"),
    (_blocks(mask=(1, 3, 3)), r"block_mask must have 4 columns, which 60 rows of k are"),
    (_blocks(mask=(2, 3, 4)), r"row_ptr must have shape \(4, 4\)"),
    (_blocks(dtype=torch.float32), r"block_mask must be a tensor of bool but is torch.float32"),
    (_blocks(mask=[1]), r"block_mask must be a tensor of bool but is list"),
    (_blocks(mask=_csr((0, 1, 2), (0, 1))), r"row_ptr must have shape"),
    (_blocks(mask=_csr((0, 1, 2, 4), (0, 1, 2))), r"row_ptr must ascend within 0..3"),
    (_blocks(mask=_csr((0, 2, 2, 3), (1, 0, 2))), r"col_idx must ascend within a row"),
    (_blocks(mask=_csr((0, 1, 2, 3), (0, 1, 4))), r"col_idx must ascend within a row and be less than 4"),
    (lambda grad: annulus.hilbert_order((2, 2, 2, 2)), r"\[hilbert_order\] shape must have 1 to 3 sizes"),
    (lambda grad: annulus.hilbert_order((2, -1)), r"\[hilbert_order\] shape must be an integer of at least 0 but is -1"),
    (lambda grad: annulus.masks.causal_window(64, 16, 0), r"\[causal_window\] density must be more than 0 and at most 1"),
    (lambda grad: annulus.masks.local_global(64, 0, 0.5), r"\[local_global\] block_size must be an integer of at least 1"),
    (lambda grad: annulus.masks.bigbird(160, 16, 0.1, global_blocks=2), r"\[bigbird\] density must be more than 0.2, which 2 full"),
    (lambda grad: annulus.BlockCsr.from_mask(torch.ones(2, 2)), r"\[BlockCsr\] mask must be a tensor of bool"),
]
