"""LRPE in torch, beyond what python/tests asks of every operator: bits of the short way, memory, in place, packing."""

import concurrent.futures

import pytest
import torch
from samples_lrpe_cosine import GRADIENT, assert_close, cosine, rotate

import annulus
from annulus.peers import lrpe_cosine as peers

ops = torch.ops.annulus


def randn(*size, device, grad=False, dtype=torch.float32):
    return torch.randn(size, device=device, dtype=dtype).requires_grad_(grad)


@pytest.mark.parametrize("function", ["lrpe_cosine", "lrpe_rotate"])
@pytest.mark.parametrize("interleaved", [False, True])
def test_short_way_backward_has_the_same_bits(function, interleaved, device):
    """Where x alone has a gradient, eager mode takes an op of its own; the registered formula is the measure."""
    x = randn(2, 14, 3, 8, device=device, grad=True)
    rotating = function == "lrpe_rotate"
    for shape, prefix, offset in (((3, 4), 2, 0), ((14,), 0, 7), ((2, 7, 1), 0, 0)):
        theta = randn(3, -(-(4 if rotating else 8) // len(shape)), device=device)
        for view in (x.transpose(1, 2), x.reshape(2, 3, 14, 8)):
            how = (interleaved,) if rotating else ("none", -1)
            keywords = {"interleaved": interleaved} if rotating else {}
            y = getattr(annulus, function)(view, theta, shape, prefix=prefix, offset=offset, **keywords)
            want = getattr(ops, function).default(view, theta, list(shape), prefix, *how, offset, None, None)
            dy = torch.randn_like(y)
            (got,), (exact,) = (torch.autograd.grad(o, view, dy) for o in (y, want))
            assert torch.equal(got, exact) and got.stride() == exact.stride()
    for bad in ([], [3, 0, 0, 0, 14], [0, 0, 0, 0, 13]):
        with pytest.raises(RuntimeError, match="annulus.InvalidArgument"):
            ops._lrpe_dx(dy, theta, bad)


def test_compile_in_place_without_gradients(device):
    """Decoding: the compiled function overwrites x itself, as eager does."""
    rotate_ = lambda x, t, o: annulus.lrpe_rotate_(x, t, (x.shape[2],), offset=o) + 1  # noqa: E731
    compiled = torch.compile(rotate_, fullgraph=True, dynamic=True, backend="aot_eager")
    for tokens in (7, 12):
        x, theta = randn(2, 3, tokens, 8, device=device), randn(3, 4, device=device)
        offset = torch.tensor([5, 1], device=device)
        other, version = x.clone(), x._version
        assert torch.equal(compiled(x, theta, offset), rotate_(other, theta, offset))
        assert torch.equal(x, other) and x._version > version


def test_export(device):
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.encode = annulus.nn.LrpeCosine(8, 2, 1)

        def forward(self, x):
            return self.encode(x, (x.shape[2],), activation="relu")

    model = Model().to(device)
    x = randn(2, 2, 6, 8, device=device)
    tokens = torch.export.Dim("tokens", min=2, max=4096)
    program = torch.export.export(model, (x,), dynamic_shapes={"x": {2: tokens}})
    assert any("lrpe_cosine" in str(n.target) for n in program.graph.nodes)
    longer = randn(2, 2, 19, 8, device=device)
    assert torch.equal(program.module()(longer), model(longer))


def saved_bytes(function):
    """Bytes of the distinct tensors that the graph keeps for its backward."""
    kept = {}

    def pack(t):
        kept[t.data_ptr(), t.shape] = t.nbytes
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        function()
    return sum(kept.values())


def test_nothing_is_saved_that_is_not_needed(device):
    x, theta = randn(2, 3, 50, 8, device=device, grad=True), randn(3, 8, device=device)
    k = randn(2, 3, 50, 8, device=device, grad=True)
    assert saved_bytes(lambda: annulus.lrpe_cosine(x, theta, (50,))) == theta.nbytes
    assert saved_bytes(lambda: annulus.lrpe_cosine_qk(x, k, theta, (50,))) == theta.nbytes
    assert saved_bytes(lambda: annulus.lrpe_rotate(x, theta[:, :4], (50,))) == theta[:, :4].nbytes
    assert saved_bytes(lambda: annulus.lrpe_rotate_qk(x, k, theta[0, :4])) == theta[0, :4].nbytes
    assert saved_bytes(lambda: annulus.lrpe_cosine(x, theta, (50,), activation="silu")) == theta.nbytes + x.nbytes
    theta.requires_grad_()
    assert saved_bytes(lambda: annulus.lrpe_cosine(x, theta, (50,))) == theta.nbytes + x.nbytes
    assert saved_bytes(lambda: ops.lrpe_cosine.default(x, theta.detach(), [50], 0, "none", -1, 0, None, None)) == theta.nbytes


def test_memory_and_order_of_axes(device):
    """Of a transposed view only the output is allocated, in the same order of axes."""
    base, theta = randn(2, 512, 3, 64, device=device, grad=True), randn(3, 64, device=device)
    x = base.transpose(1, 2)
    with torch.profiler.profile(profile_memory=True) as profile, torch.no_grad():
        y = annulus.lrpe_cosine(x, theta, (512,))
    events = profile.events()
    memory = (lambda e: e.self_device_memory_usage) if device == "cuda" else (lambda e: e.self_cpu_memory_usage)
    allocated = sum(max(memory(e), 0) for e in events)
    assert y.nbytes <= allocated <= y.nbytes + (1 << 20), "output, and at most a small table beside it"
    assert y.transpose(1, 2).is_contiguous()
    (dx,) = torch.autograd.grad(annulus.lrpe_cosine(x, theta, (512,)), x, y)
    assert dx.transpose(1, 2).is_contiguous()


# In place


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotate_in_place(dtype, interleaved, device):
    x, theta = randn(2, 3, 9, 8, device=device, dtype=dtype), randn(3, 4, device=device)
    options = dict(prefix=2, interleaved=interleaved)
    want = annulus.lrpe_rotate(x, theta, (7,), **options)
    address, version = x.data_ptr(), x._version
    y = annulus.lrpe_rotate_(x, theta, (7,), **options)
    assert y is x and x.data_ptr() == address and x._version > version
    assert torch.equal(x, want)

    leaf = randn(2, 3, 9, 8, device=device, dtype=dtype, grad=True)
    theta.requires_grad_()
    inner = leaf * 1
    y = annulus.lrpe_rotate_(inner, theta, (7,), **options)
    assert y is inner and y.grad_fn is not None
    dy = torch.randn_like(y)
    exact = torch.autograd.grad(rotate(leaf, theta, (7,), **options), (leaf, theta), dy.double())
    got = torch.autograd.grad(y, (leaf, theta), dy)
    assert_close(got[0], exact[0], GRADIENT)
    assert_close(got[1], exact[1], GRADIENT)


def test_in_place_is_noticed(device):
    x, theta = randn(2, 3, 5, 4, device=device, grad=True), randn(3, 2, device=device)
    with pytest.raises(annulus.InvalidArgument, match="leaf"):
        annulus.lrpe_rotate_(x, theta, (5,))
    y = x.exp()  # saves its result
    with torch.no_grad():
        annulus.lrpe_rotate_(y, theta, (5,))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


# Wrong calls


def test_bad_pairs_and_devices():
    q, theta = torch.ones(2, 4, 10, 8), torch.ones(3, 8)
    with pytest.raises(annulus.InvalidArgument, match=r"\[lrpe_cosine_qk\] k must"):
        annulus.lrpe_cosine_qk(q, torch.ones(2, 3, 10, 8), theta, (10,))
    with pytest.raises(annulus.InvalidArgument, match=r"k must have shape \(2, 2, 10, 8\)"):
        annulus.lrpe_cosine_qk(q, torch.ones(2, 2, 9, 8), theta[:2], (10,))
    with pytest.raises(annulus.InvalidArgument, match="theta must be on the device of x"):
        annulus.lrpe_cosine(torch.ones((2, 3, 10, 8)), torch.ones((3, 8), device="meta"), (10,))
    for name in ("offset", "position_ids"):  # torch would take the call for one without data, and return garbage
        for function in (annulus.lrpe_cosine, annulus.lrpe_rotate, annulus.lrpe_rotate_):
            x, positions = torch.ones(2, 3, 10, 8), torch.zeros(2, dtype=torch.int64, device="meta")
            with pytest.raises(annulus.InvalidArgument, match=f"{name} must be on the device of x, cpu, but is on meta"):
                function(x, theta, (10,) if name == "offset" else None, **{name: positions})
            assert torch.equal(x, torch.ones_like(x))
    with pytest.raises(annulus.InvalidArgument, match=r"x must be Tensor but is ndarray|x must be Tensor"):
        annulus.lrpe_cosine([1.0], theta, (10,))
    with pytest.raises(annulus.InvalidArgument, match="x must be a tensor but is None"):
        annulus.lrpe_cosine(None, theta, (10,))
    with pytest.raises(annulus.InvalidArgument, match="x must have a dtype that annulus knows .* but has int16"):
        annulus.lrpe_cosine(torch.ones((2, 3, 10, 8), dtype=torch.int16), theta, (10,))


def test_bad_packed_positions():
    for cu_seqlens, came in (
        ([0, 3], "list"),
        (torch.tensor([0.0, 3.0]), "torch.float32"),
        (torch.tensor([0, 3], dtype=torch.uint8), "torch.uint8"),
    ):
        with pytest.raises(annulus.InvalidArgument, match=rf"cu_seqlens must be a tensor of int32 or int64 but is {came}"):
            annulus.packed_positions(cu_seqlens, 3)
    for size in ((0,), (1, 2), ()):
        with pytest.raises(annulus.InvalidArgument, match=r"cu_seqlens must have shape \(sequences \+ 1,\)"):
            annulus.packed_positions(torch.zeros(size, dtype=torch.int64), 3)


def test_in_place_needs_distinct_elements():
    x = torch.ones(1, 3, 10, 8).expand(2, 3, 10, 8)
    with pytest.raises(annulus.InvalidArgument, match=r"\[lrpe_rotate\] y must"):
        annulus.lrpe_rotate_(x, torch.ones(3, 4), (10,))
    assert (x == 1).all()


# The module


def test_module_trains_theta(device):
    """theta learns the frequencies that another table encoded with."""
    torch.manual_seed(1)
    teacher = annulus.nn.LrpeCosine(8, 2, 2).to(device)
    student = annulus.nn.LrpeCosine(8, 2, 2).to(device)
    with torch.no_grad():
        student.theta.mul_(1.05)
    start = (student.theta - teacher.theta).abs().max().item()
    optimizer = torch.optim.Adam(student.parameters(), lr=2e-3)
    x = torch.randn(4, 2, 37, 8, device=device)
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        loss = (student(x, (6, 6), prefix=1, activation="silu") - teacher(x, (6, 6), prefix=1, activation="silu")).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.05 * losses[0]
    assert (student.theta - teacher.theta).abs().max().item() < 0.5 * start


def test_module(device):
    module = annulus.nn.LrpeCosine(128, 12, 3, base=500.0, learnable=False).to(device)
    assert module.theta.shape == (12, 43) and module.theta.dtype == torch.float32
    assert not list(module.parameters()) and "theta" in module.state_dict()
    assert torch.allclose(module.theta[5].cpu().double(), 500.0 ** (-torch.arange(43).double() / 43))
    x = torch.randn(1, 12, 24, 128, device=device)
    want = cosine(x, module.theta, (2, 3, 4))
    assert (module(x, (2, 3, 4)).double() - want).abs().max() <= 1e-6 * want.abs().max()
    q2, k2 = module.qk(x, x, (2, 3, 4))
    assert torch.equal(q2, k2) and torch.equal(q2, module(x, (2, 3, 4)))
    assert "n_axes=3" in repr(module)
    with pytest.raises(annulus.InvalidArgument, match="n_axes"):
        annulus.nn.LrpeCosine(8, 2, 5)
    with pytest.raises(annulus.InvalidArgument, match="head_dim"):
        annulus.nn.LrpeCosine(4, 2, 3)  # two columns an axis leave none to the third
    for arguments, name in (((8.5, 2), "head_dim"), ((0, 2), "head_dim"), ((8, -2), "n_heads"), ((8, 2, 1, 0), "base")):
        with pytest.raises(annulus.InvalidArgument, match=rf"\[LrpeCosine\] {name} must"):
            annulus.nn.LrpeCosine(*arguments)


@pytest.mark.parametrize("learnable", [False, True])
def test_frequencies_stay_wide(device, learnable):
    """bfloat16 frequencies would be radians off at position 100 000."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), annulus.nn.LrpeCosine(8, 2, learnable=learnable))
    want = model[1].theta.detach().clone()
    for cast in (lambda: model.to(torch.bfloat16), model.half, lambda: model.to(device, torch.float16)):
        cast()
        assert model[0].weight.dtype.itemsize == 2
        assert model[1].theta.dtype == torch.float32 and torch.equal(model[1].theta.detach().cpu(), want)
    assert model[1].theta.device.type == torch.device(device).type
    x = torch.randn(1, 2, 3, 8, device=device, dtype=torch.bfloat16)
    assert model[1](x, (3,), offset=100_000).dtype == torch.bfloat16
    assert model.double()[1].theta.dtype == torch.float64


# Peers


def test_peers_allow_one_unit_in_the_last_place():
    for largest, unit in ((1.0, 2.0**-7), (1.9921875, 2.0**-7), (4.5, 2.0**-5)):
        assert peers.allowed_error("bf16", largest) * largest == unit


def test_full_size_is_the_table():
    rows = [p.row(d) for p in peers.problems("full", "cpu") for d in p.directions]
    assert len(rows) == len(set(rows)) == 64 + 2 and {"bwd-3d-n32-l10-b12", "bwd-1d-n4096-l0-b12-rotate-qk"} <= set(rows)


def test_rope_has_a_peer(device):
    """Ours against the equations of others in double, and theirs in bf16, which rounds cos and sin."""
    session = peers.RotateProblem(2, (300,), 0, "bf16", ("fwd", "bwd")).open(device, ("fwd", "bwd"))
    for name in ("annulus-torch", "torch-eager"):
        errors = session.errors(session.implementations[name], ("fwd", "bwd"))
        assert all(errors[part] <= (1 if name == "annulus-torch" else 3) * session.limit(direction)
                   for direction, part in (("fwd", "y"), ("bwd", "dx")))


def test_old_batches_in_another_thread():
    """As in a backward on CUDA, whose thread does not know how deep batches are nested."""
    theta, several = torch.rand(1, 4, dtype=torch.float64), torch.randn(3, 2, 1, 5, 4, dtype=torch.float64)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        elsewhere = lambda x: pool.submit(annulus.lrpe_cosine, x, theta).result()  # noqa: E731
        once = torch._vmap_internals._vmap(elsewhere)
        torch.testing.assert_close(once(several), torch.stack([annulus.lrpe_cosine(x, theta) for x in several]))
        twice = torch._vmap_internals._vmap(once)(torch.stack([several, -several]))
        torch.testing.assert_close(twice, torch.stack([once(several), once(-several)]))
