"""Values and gradients of every form against double precision, and what must not change them."""

import itertools

import pytest
import torch
from samples_lrpe_cosine import ACTIVATIONS, DTYPES, GRADIENT, assert_close, compare, cosine, cosine_qk, rotate

import annulus

GRIDS = [((7,), 0, 6), ((9,), 3, 5), ((4, 5), 2, 8), ((2, 3, 4), 1, 7), ((2, 3, 2, 2), 0, 10)]  # shape, prefix, D
B, H = 2, 3


def tensors(grid, dtype, device, columns=None, theta_dtype=torch.float32, heads=H):
    shape, prefix, D = grid
    D = columns or D
    tokens = prefix + torch.Size(shape).numel()
    x = torch.randn(B, heads, tokens, D, device=device).to(dtype).requires_grad_()
    E = -(-D // len(shape))
    theta = torch.randn(heads, E, device=device).to(theta_dtype).requires_grad_()
    return x, theta


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation,softmax_dim", ACTIVATIONS)
@pytest.mark.parametrize("grid", GRIDS)
def test_cosine(grid, activation, softmax_dim, dtype, device):
    x, theta = tensors(grid, dtype, device)
    compare(annulus.lrpe_cosine, cosine, (x, theta, grid[0]), prefix=grid[1], activation=activation, softmax_dim=softmax_dim)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("grid", GRIDS)
def test_rotate(grid, interleaved, dtype, device):
    D = 2 * grid[2]
    x, _ = tensors(grid, dtype, device, columns=D)
    _, theta = tensors(grid, dtype, device)
    compare(annulus.lrpe_rotate, rotate, (x, theta, grid[0]), prefix=grid[1], interleaved=interleaved)


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (1, 3)])
@pytest.mark.parametrize("activation,softmax_dim", ACTIVATIONS)
def test_cosine_qk(heads, activation, softmax_dim, device):
    grid = GRIDS[2]
    q, _ = tensors(grid, torch.float32, device, heads=heads[0])
    k, _ = tensors(grid, torch.float32, device, heads=heads[1])
    _, theta = tensors(grid, torch.float32, device, heads=min(heads))
    compare(
        annulus.lrpe_cosine_qk, cosine_qk, (q, k, theta, grid[0]), prefix=grid[1], activation=activation, softmax_dim=softmax_dim
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_theta_of_the_dtype_of_x(dtype, device):
    x, theta = tensors(GRIDS[0], dtype, device, theta_dtype=dtype)
    compare(annulus.lrpe_cosine, cosine, (x, theta, GRIDS[0][0]))


@pytest.mark.parametrize("integers", [torch.int32, torch.int64])
def test_offset_tensor(integers, device):
    (n,), prefix, _ = GRIDS[1]
    x, theta = tensors(GRIDS[1], torch.float32, device)
    offset = torch.tensor([1_000_003, 5], dtype=integers, device=device)
    options = dict(prefix=prefix)
    compare(annulus.lrpe_cosine, cosine, (x, theta, (n,)), offset=17, **options)
    with torch.no_grad():
        together = annulus.lrpe_cosine(x, theta, (n,), offset=offset, **options)
        for b, o in enumerate(offset.tolist()):
            alone = annulus.lrpe_cosine(x[b : b + 1], theta, (n,), offset=o, **options)
            assert torch.equal(together[b : b + 1], alone)
        turned = annulus.lrpe_rotate(x[..., :4], theta[:, :2], (n,), offset=offset, **options)
        assert_close(turned, rotate(x[..., :4], theta[:, :2], (n,), offset=offset, **options))


def test_decoding_token_by_token_gives_the_same_bits(device):
    x, theta = tensors(GRIDS[0], torch.bfloat16, device)
    with torch.no_grad():
        whole = annulus.lrpe_cosine(x, theta, (7,))
        parts = [annulus.lrpe_cosine(x[:, :, t : t + 1], theta, (1,), offset=t) for t in range(7)]
    assert torch.equal(whole, torch.cat(parts, 2))


def test_phase_is_exact_far_out(device):
    # 2^31 * theta in float32 would be wrong by radians; the formula in double is right to 1e-6 here.
    x = torch.randn(1, 2, 5, 4, device=device)
    theta = torch.rand(2, 4, device=device)
    assert_close(annulus.lrpe_cosine(x, theta, (5,), offset=2**31), cosine(x, theta, (5,), offset=2**31))


def layouts(t):
    """The same values in other layouts: none may be copied, none may change a bit."""
    yield t.transpose(1, 2).contiguous().transpose(1, 2)
    yield torch.cat([t, t], -1)[..., : t.shape[-1]]
    yield torch.stack([t, t], -1)[..., 0]  # last stride 2
    yield t.permute(3, 0, 1, 2).contiguous().permute(1, 2, 3, 0)
    yield torch.cat([t.new_zeros(1), t.flatten()])[1:].view(t.shape)  # aligned to one element only


@pytest.mark.parametrize("activation,softmax_dim", ACTIVATIONS)
def test_layout_changes_no_bit(activation, softmax_dim, device):
    grid = GRIDS[2]
    x, theta = tensors(grid, torch.bfloat16, device, columns=16)
    options = dict(prefix=grid[1], activation=activation, softmax_dim=softmax_dim)
    y = annulus.lrpe_cosine(x, theta, grid[0], **options)
    dy = torch.randn_like(y)
    want = torch.autograd.grad(y, (x, theta), dy)
    for other_x, other_dy in zip(layouts(x.detach()), layouts(dy)):
        other_x = other_x.detach().requires_grad_()
        other_y = annulus.lrpe_cosine(other_x, theta, grid[0], **options)
        assert torch.equal(other_y, y)
        for g, w in zip(torch.autograd.grad(other_y, (other_x, theta), other_dy), want):
            assert torch.equal(g, w)


def test_expanded_gradient_and_input(device):
    x, theta = tensors(GRIDS[0], torch.float32, device)
    y = annulus.lrpe_cosine(x, theta, (7,))
    y.sum().backward()  # its gradient has stride 0 everywhere
    want = torch.autograd.grad(cosine(x, theta, (7,)).sum(), (x, theta))
    assert_close(x.grad, want[0], GRADIENT)
    assert_close(theta.grad, want[1], GRADIENT)
    wide = torch.randn(1, H, 7, 6, device=device).expand(B, H, 7, 6)
    assert_close(annulus.lrpe_cosine(wide, theta, (7,)), cosine(wide, theta, (7,)))


def test_deterministic_over_runs_and_threads(device):
    x, theta = tensors(((64, 33), 5, 32), torch.bfloat16, device)
    dy = torch.randn(B, H, x.shape[2], 64, device=device).bfloat16()

    def run():
        y = annulus.lrpe_cosine(x, theta, (64, 33), prefix=5, activation="softmax", softmax_dim=-2)
        return (y, *torch.autograd.grad(y, (x, theta), dy))

    want, before = run(), torch.get_num_threads()
    try:
        for threads in (1, 2, 4, 8):
            torch.set_num_threads(threads)
            assert all(torch.equal(a, b) for a, b in zip(run(), want))
    finally:
        torch.set_num_threads(before)


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


GRADCHECK = [(a, d, g) for (a, d), g in itertools.product(ACTIVATIONS, (GRIDS[1], GRIDS[2])) if a != "relu"]


@pytest.mark.parametrize("activation,softmax_dim,grid", GRADCHECK)
def test_gradcheck_cosine(activation, softmax_dim, grid):
    x = torch.randn(1, 2, grid[1] + torch.Size(grid[0]).numel(), 4, dtype=torch.float64, requires_grad=True)
    theta = torch.randn(2, -(-4 // len(grid[0])), dtype=torch.float64, requires_grad=True)
    options = dict(prefix=grid[1], activation=activation, softmax_dim=softmax_dim)
    assert torch.autograd.gradcheck(lambda x, t: annulus.lrpe_cosine(x, t, grid[0], **options), (x, theta), nondet_tol=0.0)


@pytest.mark.parametrize("interleaved", [False, True])
def test_gradcheck_rotate_and_qk(interleaved):
    x = torch.randn(1, 2, 7, 4, dtype=torch.float64, requires_grad=True)
    k = torch.randn(1, 1, 7, 2, dtype=torch.float64, requires_grad=True)
    theta = torch.randn(2, 2, dtype=torch.float64, requires_grad=True)
    rotated = lambda x, t: annulus.lrpe_rotate(x, t, (6,), prefix=1, interleaved=interleaved)  # noqa: E731
    in_place = lambda x, t: annulus.lrpe_rotate_(x * 1.0, t, (6,), prefix=1, interleaved=interleaved)  # noqa: E731
    both = lambda q, k, t: annulus.lrpe_cosine_qk(q, k, t, (7,), activation="silu")  # noqa: E731
    assert torch.autograd.gradcheck(rotated, (x, theta), nondet_tol=0.0)
    assert torch.autograd.gradcheck(in_place, (x, theta), nondet_tol=0.0)
    assert torch.autograd.gradcheck(both, (x[..., :2], k, theta[:1]), nondet_tol=0.0)
