"""Values and gradients of every form against double precision, by grids and by tokens that say where they are.

What every sample is asked (other layouts, threads, gradients by finite differences, compilation, export) is in
python/tests; positions far out, parts of calls and the bits of offsets are in test/cases_named.cpp and bits_test.cpp.
"""

import pytest
import torch
from samples_lrpe_cosine import ACTIVATIONS, DTYPES, compare, cosine, cosine_qk, rotate

import annulus

GRIDS = [((7,), 0, 6), ((9,), 3, 5), ((4, 5), 2, 8), ((2, 3, 4), 1, 7), ((2, 3, 2, 2), 0, 10)]  # shape, prefix, D
B, H, L = 2, 3, 23  # L: where tokens say where they are


def tensors(dtype, device, tokens, axes, columns, heads=H):
    x = torch.randn(B, heads, tokens, columns, device=device).to(dtype).requires_grad_()
    theta = torch.randn(heads, -(-columns // axes), device=device).requires_grad_()
    return x, theta


def on_grid(grid, dtype, device, columns=None, heads=H):
    shape, prefix, D = grid
    return tensors(dtype, device, prefix + torch.Size(shape).numel(), len(shape), columns or D, heads)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation,softmax_dim", ACTIVATIONS)
@pytest.mark.parametrize("grid", GRIDS)
def test_cosine(grid, activation, softmax_dim, dtype, device):
    x, theta = on_grid(grid, dtype, device)
    compare(annulus.lrpe_cosine, cosine, (x, theta, grid[0]), prefix=grid[1], activation=activation, softmax_dim=softmax_dim)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("grid", GRIDS)
def test_rotate(grid, interleaved, dtype, device):
    D = 2 * grid[2]
    x, _ = on_grid(grid, dtype, device, columns=D)
    _, theta = on_grid(grid, dtype, device)
    compare(annulus.lrpe_rotate, rotate, (x, theta, grid[0]), prefix=grid[1], interleaved=interleaved)


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (1, 3)])
@pytest.mark.parametrize("activation,softmax_dim", ACTIVATIONS)
def test_cosine_qk(heads, activation, softmax_dim, device):
    grid = GRIDS[2]
    q, _ = on_grid(grid, torch.float32, device, heads=heads[0])
    k, _ = on_grid(grid, torch.float32, device, heads=heads[1])
    _, theta = on_grid(grid, torch.float32, device, heads=min(heads))
    compare(
        annulus.lrpe_cosine_qk, cosine_qk, (q, k, theta, grid[0]), prefix=grid[1], activation=activation, softmax_dim=softmax_dim
    )


@pytest.mark.parametrize("size,shape,prefix", [((0, 3, 7, 4), (7,), 0), ((2, 0, 7, 4), (7,), 0), ((2, 3, 0, 4), (0,), 0),
                                               ((2, 3, 2, 4), (0,), 2), ((2, 3, 7, 0), (7,), 0), ((2, 3, 0, 4), (3, 0), 0)])
def test_zero_size(size, shape, prefix, device):
    x = torch.randn(size, device=device, requires_grad=True)
    theta = torch.randn(size[1], -(-size[3] // len(shape)), device=device, requires_grad=True)
    for function, width in ((annulus.lrpe_cosine, 2 * size[3]), (annulus.lrpe_rotate, size[3])):
        y = function(x, theta[:, : -(-width // 2 // len(shape))], shape, prefix=prefix)
        assert y.shape == (*size[:3], width)
        dx, dtheta = torch.autograd.grad(y.sum(), (x, theta))
        assert dx.shape == x.shape and dtheta.shape == theta.shape
        assert not dtheta.any()  # nothing has a position, or nothing is there


# Tokens that say where they are


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("axes", [1, 2, 3])
@pytest.mark.parametrize("rows", [1, B])
def test_position_ids(rows, axes, dtype, device):
    ids = torch.randint(-300, 300, (rows, L, axes), device=device)
    x, theta = tensors(dtype, device, L, axes, 12)
    for activation, softmax_dim in (("none", -1), ("silu", -1), ("softmax", -1), ("softmax", -2)):
        options = dict(position_ids=ids, activation=activation, softmax_dim=softmax_dim)
        compare(annulus.lrpe_cosine, cosine, (x, theta, None), **options)
    half = torch.randn(H, -(-6 // axes), device=device, requires_grad=True)
    compare(annulus.lrpe_rotate, rotate, (x, half, None), position_ids=ids, interleaved=rows == 1)
    k, _ = tensors(dtype, device, L, axes, 12, heads=2 * H)
    compare(annulus.lrpe_cosine_qk, cosine_qk, (x, k, theta, None), position_ids=ids)


def test_shapes_a_user_may_give(device):
    x, theta = tensors(torch.float32, device, L, 1, 12)
    ids = torch.arange(L, device=device)
    want = annulus.lrpe_cosine(x, theta, (L,))
    for same in (ids, ids[None], ids.expand(B, L), ids[None, :, None], ids.int()):
        assert torch.equal(annulus.lrpe_cosine(x, theta, position_ids=same), want)
    module = annulus.nn.LrpeCosine(12, H).to(device)
    assert torch.equal(module(x, position_ids=ids), module(x, (L,)))
    for got, exact in zip(module.qk(x, x, position_ids=ids), module.qk(x, x, (L,))):
        assert torch.equal(got, exact)


def test_position_ids_in_place(device):
    ids = torch.randint(0, 1000, (B, L), device=device)
    x, theta = torch.randn(B, H, L, 12, device=device), torch.randn(H, 6, device=device)
    want = annulus.lrpe_rotate(x, theta, position_ids=ids)
    assert torch.equal(annulus.lrpe_rotate_(x.clone(), theta, position_ids=ids), want)

    weight = torch.randn_like(x)

    def turned(function, x, theta):  # in place on what is not a leaf
        return (function(x * 1, theta, position_ids=ids) * weight).sum()

    x.requires_grad_(), theta.requires_grad_()
    for compiled in (False, True):
        in_place = torch.compile(turned, fullgraph=True) if compiled else turned
        got = torch.autograd.grad(in_place(annulus.lrpe_rotate_, x, theta), (x, theta))
        for g, e in zip(got, torch.autograd.grad(turned(annulus.lrpe_rotate, x, theta), (x, theta))):
            assert (g - e).abs().max() <= 1e-5 * e.abs().max()


@pytest.mark.parametrize("integers", [torch.int32, torch.int64])
def test_packed_sequences_equal_separate_calls(integers, device):
    lengths = [5, 1, 0, 9, 8]
    cu_seqlens = torch.tensor([0, 5, 6, 6, 15, 23], dtype=integers, device=device)
    packed = torch.randn(L, H, 12, device=device).transpose(0, 1)[None]  # (total, H, D) as it lies in memory
    theta = torch.randn(H, 12, device=device)
    ids = annulus.packed_positions(cu_seqlens, L)
    assert ids.dtype == integers
    assert ids.tolist() == [s for n in lengths for s in range(n)]
    y = annulus.lrpe_cosine(packed, theta, position_ids=ids)
    parts = [annulus.lrpe_cosine(p, theta, (p.shape[2],)) for p in packed.split(lengths, 2)]
    assert torch.equal(y, torch.cat(parts, 2))
    assert annulus.packed_positions(cu_seqlens[:2], 7).tolist() == [0, 1, 2, 3, 4, 0, 1]


def test_compiled_with_dynamic_sizes(device):
    @torch.compile(fullgraph=True, dynamic=True)
    def packed(x, theta, cu_seqlens):
        return annulus.lrpe_cosine(x, theta, position_ids=annulus.packed_positions(cu_seqlens, x.shape[2]))

    for tokens in (9, 14, 31):
        x = torch.randn(1, H, tokens, 12, device=device, requires_grad=True)
        theta = torch.randn(H, 12, device=device, requires_grad=True)
        cu_seqlens = torch.tensor([0, 4, tokens], device=device)
        y = packed(x, theta, cu_seqlens)
        want = annulus.lrpe_cosine(x, theta, position_ids=annulus.packed_positions(cu_seqlens, tokens))
        assert torch.equal(y, want)
        for got, exact in zip(*(torch.autograd.grad(o.square().sum(), (x, theta)) for o in (y, want))):
            torch.testing.assert_close(got, exact, rtol=1e-6, atol=1e-6)
