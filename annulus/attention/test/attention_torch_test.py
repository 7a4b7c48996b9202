"""Attention from PyTorch, beyond what is asked of every operator."""

import math

import pytest
import samples_attention as samples
import torch
from contract import relative_error
from torch.nn.functional import scaled_dot_product_attention

import annulus

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
LIMIT = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}


def qkv(B=2, Tq=50, Tk=50, H=6, Hkv=None, D=16, Dv=None, dtype=torch.float32, device="cpu", grad=True):
    shapes = (B, Tq, H, D), (B, Tk, Hkv or H, D), (B, Tk, Hkv or H, Dv or D)
    return [torch.randn(shape, device=device).to(dtype).requires_grad_(grad) for shape in shapes]


def with_gradients(function, tensors, weights=None):
    """Outputs, then the gradients of their sum, each times fixed numbers."""
    ys = function(*tensors)
    ys = (ys,) if isinstance(ys, torch.Tensor) else ys
    generator = torch.Generator().manual_seed(3)
    dys = [torch.randn(y.shape, generator=generator, dtype=torch.float64).to(y) for y in ys]
    return *ys, *torch.autograd.grad(ys, tensors, dys)


def same_bits(got, want):
    return all(torch.equal(g, w) for g, w in zip(got, want, strict=True))


def close(got, want, limit=2e-5):
    return all(relative_error(g, w) <= limit for g, w in zip(got, want, strict=True))


# Against torch


@DTYPES
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("Hkv", [6, 2, 1])
def test_is_torchs_own(causal, Hkv, dtype, device):
    tensors = qkv(Hkv=Hkv, dtype=dtype, device=device)

    def swapped(q, k, v):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=Hkv != 6).transpose(1, 2)

    exact = [t.detach().double().requires_grad_() for t in tensors]
    got = with_gradients(lambda q, k, v: annulus.attention(q, k, v, causal=causal), tensors)
    assert close(got, with_gradients(swapped, exact), LIMIT[dtype])


def test_heads_before_tokens_cost_no_copy(device):
    """torch's layout, (B, H, T, D), as a view: to the bit what dense tensors give."""
    tensors = qkv(device=device)
    turned = [t.detach().transpose(1, 2).contiguous().requires_grad_() for t in tensors]
    views = lambda *x: annulus.attention(*(t.transpose(1, 2) for t in x), causal=True)  # noqa: E731
    got, want = with_gradients(views, turned), with_gradients(lambda *x: annulus.attention(*x, causal=True), tensors)
    assert torch.equal(got[0], want[0]) and same_bits([g.transpose(1, 2) for g in got[1:]], want[1:])
    qkv_packed = torch.randn(2, 50, 3, 6, 16, device=device)
    q, k, v = qkv_packed.unbind(2)
    assert torch.equal(annulus.attention(q, k, v), annulus.attention(q.contiguous(), k.contiguous(), v.contiguous()))


def test_one_token_at_a_time(device):
    """Aligned at the end: the last query of a causal call, by itself, is the call's last row."""
    q, k, v = qkv(device=device, grad=False)
    whole = annulus.attention(q, k, v, causal=True, window_size=(7, -1))
    for t in (0, 5, 30, 49):
        one = annulus.attention(q[:, t : t + 1], k[:, : t + 1], v[:, : t + 1], causal=True, window_size=(7, -1))
        torch.testing.assert_close(one, whole[:, t : t + 1])
        room = annulus.attention(q[:, t : t + 1], k, v, causal=True, window_size=(7, -1),
                                 key_lengths=torch.full((2,), t + 1, device=device))
        torch.testing.assert_close(room, one)


def test_empty(device):
    for sizes in (dict(B=0), dict(Tq=0), dict(Tk=0), dict(H=0, Hkv=0), dict(Tq=0, Tk=0)):
        tensors = qkv(device=device, **sizes)
        o, lse, *gradients = with_gradients(lambda *x: annulus.attention(*x, return_lse=True), tensors)
        assert not o.any() and (lse == -math.inf).all() and not any(g.any() for g in gradients)
    tensors = qkv(Tq=9, Tk=4, device=device)  # the first five queries stand before the first key
    o, lse, *gradients = with_gradients(lambda *x: annulus.attention(*x, causal=True, return_lse=True), tensors)
    assert not o[:, :5].any() and o[:, 5:].any() and torch.equal(lse == -math.inf, (torch.arange(9, device=device) < 5).expand_as(lse))
    assert all(g.isfinite().all() for g in gradients) and not gradients[0][:, :5].any()


# lse, checkpoints, dropout


def test_lse_has_a_gradient(device):
    """By finite differences, of lse alone: nothing goes to v."""
    q, k, v = qkv(B=1, Tq=4, Tk=5, H=2, D=3, device=device)
    function = lambda q, k: annulus.attention(q, k, v, causal=True, return_lse=True)[1].sin().sum()  # noqa: E731
    dq, dk, dv = torch.autograd.grad(function(q, k), (q, k, v), allow_unused=True)
    assert dv is None or not dv.any()
    for at, gradient in ((0, dq), (1, dk)):
        for i in range(0, gradient.numel(), 5):
            shifted = []
            for step in (1e-2, -1e-2):
                moved = [q.detach().clone(), k.detach().clone()]
                moved[at].view(-1)[i] += step
                shifted.append(function(*moved).item())
            assert abs((shifted[0] - shifted[1]) / 2e-2 - gradient.flatten()[i].item()) <= 2e-3


def saved_bytes(call):
    """Of everything that autograd keeps for the call's backward."""
    kept = {}

    def pack(t):
        kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = call()
    return sum(kept.values()), y


MASK = torch.ones(1, 4, 4, dtype=torch.bool).tril()
CALLS = {
    "attention": lambda q, k, v, **o: annulus.attention(q, k, v, causal=True, **o),
    "dropout": lambda q, k, v, **o: annulus.attention(q, k, v, dropout_p=0.1, dropout_seed=7, **o),
    "varlen": lambda q, k, v, **o: annulus.attention_varlen(
        *(t.flatten(0, 1) for t in (q, k, v)), *[torch.tensor([0, 20, 128], device=q.device)] * 2, **o),
    "longnet": lambda q, k, v, **o: annulus.dilated_attention(q, k, v, (16, 64), (1, 2), **o),
    "stop": lambda q, k, v, **o: annulus.dilated_attention(q, k, v, (16, 64), (1, 2), alpha_grad="stop", **o),
    "blocks": lambda q, k, v, **o: annulus.block_sparse_attention(q, k, v, MASK.to(q.device), 16, causal=True, **o),
}
every_call = pytest.mark.parametrize("name", CALLS)


@every_call
@DTYPES
def test_checkpoint_keeps_less_and_changes_no_bit(name, dtype, device):
    call, tensors = CALLS[name], qkv(Tq=64, Tk=64, dtype=dtype, device=device)
    inputs = sum(t.nbytes for t in tensors)
    much, o = saved_bytes(lambda: call(*tensors))
    little, _ = saved_bytes(lambda: call(*tensors, checkpoint=True))
    assert much >= inputs + o.nbytes and inputs <= little < inputs + 0.1 * o.nbytes
    want = with_gradients(lambda *x: call(*x, return_lse=True), tensors)
    assert same_bits(with_gradients(lambda *x: call(*x, return_lse=True, checkpoint=True), tensors), want)
    compiled = torch.compile(lambda *x: call(*x, return_lse=True, checkpoint=True), fullgraph=True, backend="aot_eager")
    assert same_bits(with_gradients(compiled, tensors), want)


@every_call
def test_within_torchs_checkpoint(name, device):
    """torch.utils.checkpoint keeps the block's input alone, and gives the same bits."""
    call, x = CALLS[name], torch.randn(2, 64, 6 * 16, device=device, requires_grad=True)
    weight = torch.randn(6 * 16, 3 * 6 * 16, device=device).div_(10).requires_grad_()

    def block(x, weight):
        return call(*(x @ weight).unflatten(-1, (3, 6, 16)).unbind(2)).flatten()

    again = lambda *inputs: torch.utils.checkpoint.checkpoint(block, *inputs, use_reentrant=False)  # noqa: E731
    assert same_bits(with_gradients(again, [x, weight]), with_gradients(block, [x, weight]))
    much, _ = saved_bytes(lambda: block(x, weight))
    little, _ = saved_bytes(lambda: again(x, weight))
    assert little <= x.nbytes + weight.nbytes < much / 2


def test_dropout_is_the_hash(device):
    """Of its mask as it is, which v of unit vectors shows, on other tilings and in a backward."""
    B, H, T, p, seed = 2, 3, 70, 0.25, 12345678901234567
    q, k = torch.zeros(2, B, T, H, 8, device=device)
    v = torch.eye(T, device=device)[None, :, None].expand(B, T, H, T)
    mask = annulus.attention(q, k, v, dropout_p=p, dropout_seed=seed).permute(0, 2, 1, 3) * T  # (B, H, Tq, Tk)
    torch.testing.assert_close(mask, samples.dropout(p, seed, B, H, T, T, mask.device).to(mask))
    assert abs((mask > 0).float().mean() - (1 - p)) < 0.02
    other = annulus.attention(q, k, v, dropout_p=p, dropout_seed=seed + 1).permute(0, 2, 1, 3) * T
    assert ((mask > 0) != (other > 0)).float().mean() > 0.3
    order = torch.randperm(T, device=device)  # tokens are what counts, in whatever order they stand
    again = annulus.attention(q, k, v, dropout_p=p, dropout_seed=seed, order=order).permute(0, 2, 1, 3) * T
    assert torch.equal(mask > 0, again > 0)


def test_dropout_under_vmap_is_that_of_each_call(device):
    several = torch.randn(3, 2, 9, 2, 4, device=device)
    call = lambda x: annulus.attention(x, x, x, dropout_p=0.4, dropout_seed=1)  # noqa: E731
    assert torch.equal(torch.vmap(call)(several), torch.stack([call(x) for x in several]))


@pytest.mark.parametrize("asked", ["here", "of torch"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_deterministic_gradients_have_the_same_bits(asked, dtype, device):
    """Of several tiles of keys, whose parts of dq are otherwise added in any order."""
    tensors = qkv(Tq=700, Tk=700, Hkv=3, D=64, dtype=dtype, device=device)
    call = lambda *x: annulus.attention(*x, causal=True, deterministic=asked == "here")  # noqa: E731
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(asked == "of torch")
    try:
        first = with_gradients(call, tensors)
        assert all(same_bits(with_gradients(call, tensors), first) for _ in range(4))
    finally:
        torch.use_deterministic_algorithms(before)
    assert close(with_gradients(lambda *x: annulus.attention(*x, causal=True), tensors), first, LIMIT[dtype])


# LongNet


@pytest.mark.parametrize("causal", [False, True])
def test_one_branch_of_everything_is_dense(causal, device):
    tensors = qkv(Hkv=2, device=device)
    want = with_gradients(lambda *x: annulus.attention(*x, causal=causal, return_lse=True), tensors)
    for w in (50, 64, 2**40):
        for mode in ("longnet", "grouped", "grouped_kv"):
            longnet = lambda *x: annulus.dilated_attention(*x, (w,), (1,), causal=causal, mode=mode, return_lse=True)  # noqa: E731,B023
            assert close(with_gradients(longnet, tensors), want)


@pytest.mark.parametrize("causal", [False, True])
def test_union_of_nested_branches_is_the_largest(causal, device):
    """Where one branch has all keys of the others, the union is that branch; as a multiset it is not."""
    tensors = qkv(device=device)
    want = with_gradients(lambda *x: annulus.attention(*x, causal=causal, return_lse=True), tensors)
    call = lambda how: lambda *x: annulus.dilated_attention(  # noqa: E731
        *x, (8, 16, 50), (2, 4, 1), causal=causal, multiplicity=how, return_lse=True)
    assert close(with_gradients(call("union"), tensors), want)
    assert not close(with_gradients(call("multiset"), tensors), want, 1e-2)


def test_longnet_is_its_branches_merged(device):
    """alpha_i = exp(lse_i - lse), as the paper has it; with alpha_grad="stop" its gradient is that of alpha as a constant."""
    tensors, w, r = qkv(device=device), (8, 16, 50), (1, 2, 4)

    def merged(q, k, v, stop=False):
        parts = [annulus.dilated_attention(q, k, v, w[i : i + 1], r[i : i + 1], return_lse=True) for i in range(3)]
        lse = torch.stack([lse for _, lse in parts])
        alpha = (lse - lse.logsumexp(0)).exp().transpose(2, 3)[..., None]
        alpha = alpha.detach() if stop else alpha
        return sum(a * o for a, (o, _) in zip(alpha, parts))

    for stop in (False, True):
        got = with_gradients(lambda *x: annulus.dilated_attention(*x, w, r, alpha_grad=("exact", "stop")[stop]), tensors)  # noqa: B023
        if stop:
            assert close(got, with_gradients(lambda *x: merged(*x, stop=True), tensors))
        else:  # a row of no key in a branch has lse -inf, and its weight's gradient is nan: o alone
            assert close(got[:1], [merged(*tensors)])


def test_grouped_rows_outside_are_zero(device):
    q, k, v = qkv(H=5, device=device, grad=False)
    o, lse = annulus.dilated_attention(q, k, v, (10, 20), (2, 3), mode="grouped", return_lse=True)
    t = torch.arange(50, device=device)
    for heads, own in ((slice(0, 3), t % 10 % 2 == 0), (slice(3, 5), t % 20 % 3 == 1)):
        assert not o[:, ~own, heads].any() and o[:, own, heads].any()
        assert (lse[:, heads, ~own] == -math.inf).all() and lse[:, heads][..., own].isfinite().all()


# Blocks


@pytest.mark.parametrize("size", [16, 32, 64, 128])
@pytest.mark.parametrize("heads", [1, 6])
def test_mask_and_lists_are_one(size, heads, device):
    tensors = qkv(Tq=200, Tk=150, device=device)
    mask = torch.rand(heads, -(-200 // size), -(-150 // size), device=device) < 0.6
    blocks = annulus.BlockCsr.from_mask(mask)
    assert blocks.row_ptr.dtype == torch.int64 and blocks.col_idx.dtype == torch.int32
    assert blocks.col_idx.numel() == mask.sum() and torch.equal(blocks.to_mask(mask.shape[2]), mask)
    assert blocks.density(mask.shape[2]) == pytest.approx(mask.float().mean().item())
    call = lambda given: lambda *x: annulus.block_sparse_attention(*x, given, size, causal=True)  # noqa: E731
    want = with_gradients(call(blocks), tensors)
    assert same_bits(with_gradients(call(mask), tensors), want)
    assert same_bits(with_gradients(call(blocks._replace(row_ptr=blocks.row_ptr.int())), tensors), want)
    exact = with_gradients(lambda *x: samples.block_sparse_attention(*x, mask, size, causal=True), tensors)
    assert close(want, exact)


def test_mask_in_compiled_code(device):
    """Without a break of the graph and without another compilation for another density."""
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return torch._dynamo.backends.registry.lookup_backend("aot_eager")(graph, inputs)

    call = lambda q, k, v, mask: annulus.block_sparse_attention(q, k, v, mask, 16)  # noqa: E731
    compiled, tensors = torch.compile(call, fullgraph=True, dynamic=True, backend=count), qkv(Tq=90, Tk=70, device=device)
    counts = []
    for density in (0.2, 0.8):
        mask = torch.rand(1, 6, 5, device=device) < density
        got, want = (with_gradients(lambda *x: f(*x, mask), tensors) for f in (compiled, call))  # noqa: B023
        assert same_bits(got, want)
        counts.append(len(graphs))
    assert counts[0] == counts[1]


def test_no_blocks(device):
    for shape in ((1, 0, 3), (6, 0, 3), (1, 3, 0)):
        blocks = annulus.BlockCsr.from_mask(torch.ones(shape, dtype=torch.bool, device=device))
        assert blocks.to_mask(shape[2]).shape == shape and blocks.density(shape[2]) == 0
        tensors = qkv(Tq=16 * shape[1], Tk=16 * shape[2], device=device)
        o, *gradients = with_gradients(lambda *x: annulus.block_sparse_attention(*x, blocks, 16), tensors)  # noqa: B023
        assert not o.any() and not any(g.any() for g in gradients)


@pytest.mark.parametrize("density", [0.05, 0.25, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("tokens,size", [(1024, 16), (1000, 64), (130, 128), (64, 64)])
@pytest.mark.parametrize("pattern", annulus.masks.__all__)
def test_masks_have_the_density_asked_for(pattern, tokens, size, density, device):
    make, n = getattr(annulus.masks, pattern), -(-tokens // size)
    for options in [{}] if pattern == "causal_window" else [dict(causal=c, global_blocks=g) for c in (False, True) for g in (0, 1, 2)]:
        causal = options.get("causal", pattern == "causal_window")
        there = n * (n + 1) // 2 if causal else n * n
        try:
            mask = make(tokens, size, density, device=device, **options)
        except annulus.InvalidArgument as e:  # full rows alone are more
            g = min(options["global_blocks"], n)
            full = g * (g + 1) // 2 if causal else g * n
            assert full >= density * there * 0.999 and "density must be more than" in str(e)
            continue
        assert mask.shape == (1, n, n) and mask.dtype == torch.bool and mask.device.type == device
        assert mask[0].diagonal().all() and not (causal and mask[0].triu(1).any())
        assert abs(mask.sum().item() - density * there) <= n
        full = options.get("global_blocks", 0)
        assert mask[0, :full].sum() == (mask[0, :full].numel() if not causal else sum(range(1, min(full, n) + 1)))
        assert torch.equal(mask, make(tokens, size, density, device=device, **options))


def test_bigbird_is_random_by_its_seed():
    first, other = (annulus.masks.bigbird(1024, 16, 0.3, heads=4, seed=s) for s in (0, 1))
    assert not torch.equal(first, other) and not torch.equal(first[0], first[1])
    for d in (-1, 0, 1):
        assert first.diagonal(d, 1, 2).all()  # the window


@pytest.mark.parametrize("shape", [(1,), (7,), (8, 8), (16, 16), (5, 9), (4, 4, 4), (3, 5, 2), (0, 4), (1, 1)])
def test_hilbert_order(shape, device):
    order = annulus.hilbert_order(shape, device=device)
    assert order.dtype == torch.int64 and order.device.type == device
    assert torch.equal(order.sort().values, torch.arange(math.prod(shape), device=device))
    if len(set(shape)) == 1 and shape[0] & (shape[0] - 1) == 0:
        cells = torch.stack(torch.unravel_index(order, shape))
        assert (cells.diff(dim=1).abs().sum(0) == 1).all()
    assert torch.equal(annulus.hilbert_order(5), torch.arange(5)) or torch.equal(annulus.hilbert_order(5), torch.arange(5).flip(0))


def test_order_is_the_permuted_call(device):
    """Attention of the tokens put in the order, and put back."""
    tensors, order = qkv(device=device), annulus.hilbert_order((5, 10)).to(device)
    order = order[torch.randperm(50, device=device)]
    back = order.argsort()
    mask = torch.rand(1, 4, 4, device=device) < 0.7
    for call in (lambda q, k, v, **o: annulus.attention(q, k, v, causal=True, window_size=(9, -1), **o),
                 lambda q, k, v, **o: annulus.block_sparse_attention(q, k, v, mask, 16, causal=True, **o)):
        got = with_gradients(lambda *x: call(*x, order=order), tensors)  # noqa: B023
        want = with_gradients(lambda *x: call(*(t[:, order] for t in x))[:, back], tensors)  # noqa: B023
        assert close(got, want)
        assert same_bits(with_gradients(lambda *x: call(*x, order=order.int()), tensors), got)  # noqa: B023
