"""Modules, helpers and single operators, beyond what is asked of every one."""

import copy
import inspect

import pytest
import torch
from contract import outputs

import annulus


def test_ring_without_a_start_begins_at_its_bump(device):
    """From zeros the states and every gradient are exactly 0, for ever; with relu they were so after 100 steps."""
    model = annulus.nn.RingRNN(64, 2, learn_scalars=True).to(device)
    A = 0.3 * torch.randn(3, 100, 2, device=device).relu()
    out, h_n = model(A)
    for got, want in zip((out, h_n), model(A, model.bump(torch.zeros(3, device=device)))):
        assert torch.equal(got, want) and got.any()
    annulus.ring_readout(out)[0].cos().mean().backward()
    assert all(p.grad.any() for p in model.parameters())


def test_ring_has_the_defaults_of_its_function():
    module, function = (inspect.signature(f).parameters for f in (annulus.nn.RingRNN, annulus.ring_rnn))
    shared = [name for name in module if name in function]
    assert {"activation", "J0", "J1", "alpha", "precision", "checkpoint"} <= set(shared)
    assert [module[name].default for name in shared] == [function[name].default for name in shared]


@pytest.mark.parametrize("learn_scalars", [False, True])
def test_ring_scalars_stay_wide(learn_scalars, device):
    """However the module gets its 16 bits."""
    options = dict(alpha=[0.1, 0.2, 0.3, 0.7], learn_scalars=learn_scalars)
    want = annulus.nn.RingRNN(4, 2, **options).to(device)
    want(torch.ones(1, 2, 2, device=device))[0].sum().backward()
    for model in (annulus.nn.RingRNN(4, 2, **options, device=device, dtype=torch.bfloat16), copy.deepcopy(want).bfloat16(),
                  copy.deepcopy(want).to(device, torch.float16)):
        assert model.Wa.dtype == model.Wo.dtype != torch.float32
        for name in ("J0", "J1", "alpha"):
            got, exact = getattr(model, name), getattr(want, name)
            assert type(got) is type(exact) and got.dtype == torch.float32 if isinstance(got, torch.Tensor) else got == exact
            assert not isinstance(got, torch.Tensor) or torch.equal(got, exact)
        out, h_n = model(torch.ones(1, 2, 2, device=device, dtype=model.Wo.dtype))
        assert out.dtype == model.Wo.dtype and h_n.dtype == torch.float32
    assert annulus.nn.RingRNN(4, 2, **options).double().alpha.dtype == torch.float64


def test_lrpe_sizes_a_user_may_leave_out(device):
    x, theta = torch.randn(2, 3, 10, 8, device=device), torch.randn(3, 4, device=device)
    functions = [lambda t, *a, **k: annulus.lrpe_cosine(x, torch.cat([t, t], 1), *a, **k),
                 lambda t, *a, **k: torch.cat(annulus.lrpe_cosine_qk(x, x, torch.cat([t, t], 1), *a, **k)),
                 lambda t, *a, **k: annulus.lrpe_rotate(x, t, *a, **k),
                 lambda t, *a, **k: torch.cat(annulus.lrpe_rotate_qk(x, x, t, *a, **k)),
                 lambda t, *a, **k: annulus.lrpe_rotate_(x.clone(), t, *a, **k)]
    for function in [f for g in functions for f in (g, torch.compile(g, fullgraph=True, dynamic=True, backend="aot_eager"))]:
        assert torch.equal(function(theta), function(theta, (10,)))
        assert torch.equal(function(theta, prefix=3), function(theta, (7,), prefix=3))
        assert torch.equal(function(theta, 7, prefix=3), function(theta, (7,), prefix=3))
        assert torch.equal(function(theta, offset=torch.tensor(5, device=device)), function(theta, (10,), offset=5))
        with pytest.raises(annulus.InvalidArgument, match=r"shape must have prefix \+ product = 10"):
            function(theta, 9)
        with pytest.raises(annulus.InvalidArgument, match="shape must have no negative size"):
            function(theta, prefix=11)
        with pytest.raises(annulus.InvalidArgument, match=r"theta must have at most [48] columns"):
            function(torch.cat([theta, theta], 1))


def test_lrpe_into_memory_of_the_caller(device):
    x, theta = torch.randn(2, 3, 10, 8, device=device), torch.randn(3, 4, device=device)
    wide = torch.cat([theta, theta], 1)
    functions = [lambda **k: annulus.lrpe_cosine(x, wide, activation="silu", **k), lambda **k: annulus.lrpe_rotate(x, theta, **k),
                 lambda **k: annulus.lrpe_rotate_qk(x, x, theta[:, :3], **k), lambda **k: annulus.lrpe_cosine_qk(x, x, wide, **k)]
    encode = annulus.nn.LrpeCosine(8, 3, learnable=False, device=device)
    rope = annulus.nn.LrpeRotate(8, 3, rotary_dim=4, scaling=1.5, device=device)
    functions += [lambda **k: encode(x, **k), lambda **k: rope(x, **k), lambda **k: rope.qk(x, x, **k),
                  lambda **k: encode.qk(x, x, **k)]
    for function in [f for g in functions for f in (g, torch.compile(g, fullgraph=True, backend="aot_eager"))]:
        want = outputs(function())
        out = tuple(torch.empty(2, 10, 3, y.shape[3], device=device).transpose(1, 2) for y in want)  # in another order
        versions = [y._version for y in out]
        got = function(out=out if len(out) > 1 else out[0])
        assert all(g is y and torch.equal(y, w) for g, y, w in zip(outputs(got), out, want))
        assert all(y._version > v for y, v in zip(out, versions))
    with pytest.raises(annulus.InvalidArgument, match="out must be left out where there are gradients"):
        annulus.nn.LrpeCosine(8, 3, device=device)(x, out=want[0])
    for bad, message in ((want[0][:1], "y must have shape"), (want[0].double(), "y must be f32"), ((x, x), "be 1 tensors"),
                         (5, "y must be Tensor"), (want[0].clone().requires_grad_(), "out must be left out where there are gradients")):
        with pytest.raises(annulus.InvalidArgument, match=rf"\[lrpe_cosine\] .*{message}"):
            annulus.lrpe_cosine(x, wide, out=bad)
    with torch.profiler.profile(profile_memory=True) as profile:
        annulus.lrpe_cosine(x, wide, out=want[0])
    assert sum(max(e.self_cpu_memory_usage, 0) for e in profile.events()) < want[0].nbytes


def test_vmap_of_positions_that_samples_share(device):
    x, theta = torch.randn(3, 2, 2, 5, 4, device=device), torch.randn(2, 4, device=device)
    ids = torch.randint(0, 99, (3, 1, 5), device=device)
    encode = lambda x, ids: annulus.lrpe_cosine(x, theta, position_ids=ids)  # noqa: E731
    for dims in ((0, 0), (0, None), (None, 0)):
        given = [t if d == 0 else t[0] for t, d in zip((x, ids), dims)]
        each = [[t[i] if d == 0 else t for t, d in zip(given, dims)] for i in range(3)]
        assert torch.equal(torch.vmap(encode, dims)(*given), torch.stack([encode(*e) for e in each]))


RING, LRPE = annulus.nn.RingRNN, annulus.nn.LrpeCosine
CALLS = [
    *((RING, dict(n_neurons=4, n_actions=2) | bad) for bad in (
        dict(n_neurons="a"), dict(n_neurons=2.5), dict(n_neurons=True), dict(n_actions=None), dict(n_actions=-1),
        dict(activation="sigmoid"), dict(activation=None), dict(precision="fp8"), dict(precision=3), dict(checkpoint=-1),
        dict(checkpoint=1.5), dict(J0="x"), dict(J0=None), dict(J0=[1.0, 2.0]), dict(J1=float("nan")), dict(J0=1e300),
        dict(J1=float("inf"), learn_scalars=True), dict(J0=1e300, learn_scalars=True), dict(alpha=None), dict(alpha="abcd"),
        dict(alpha=[1, 2, "x", 3]), dict(alpha=[1.0] * 3), dict(alpha=[1.0, 1.0, 1.0, float("inf")]), dict(dtype=torch.int32),
        dict(dtype="f32"), dict(device="nowhere"))),
    *((LRPE, dict(head_dim=8, n_heads=2) | bad) for bad in (
        dict(head_dim="a"), dict(head_dim=True), dict(n_heads=None), dict(n_axes="x"), dict(n_axes=1.5), dict(base="b"),
        dict(base=None), dict(base=float("nan")), dict(device="nowhere"))),
    *((annulus.nn.LrpeRotate, dict(head_dim=8) | bad) for bad in (
        dict(head_dim="a"), dict(head_dim=7), dict(n_heads=None), dict(rotary_dim="x"), dict(rotary_dim=0), dict(base="b"),
        dict(scaling="s"), dict(scaling=float("inf")), dict(device="nowhere"))),
    *((annulus.packed_positions, dict(cu_seqlens=torch.tensor([0, 3]), total=3) | bad) for bad in (
        dict(total=-1), dict(total="x"), dict(total=None), dict(total=2.5), dict(total=2**70),
        dict(cu_seqlens=torch.tensor([0, 3]).to_sparse()), dict(cu_seqlens=None))),
    *((RING(4, 2).bump, dict(angle=bad)) for bad in (None, 0.0, torch.zeros(2, 2), torch.zeros(2, dtype=torch.complex64))),
]


@pytest.mark.parametrize("call,arguments", CALLS)
def test_bad_module_or_helper(call, arguments):
    op = getattr(call, "__name__").replace("bump", "RingRNN")
    with pytest.raises(annulus.InvalidArgument, match=rf"\[{op}\] \w+ must "):
        call(**arguments)


@pytest.mark.parametrize("A", [None, [1.0], torch.ones(2), torch.ones(()), torch.ones(2, 3, 2).to_sparse()], ids=repr)
def test_bad_actions_without_a_start(A):
    with pytest.raises(annulus.InvalidArgument, match=r"\[ring_rnn\] A must"):
        RING(4, 2)(A)


@pytest.mark.parametrize("name", ["J0", "J1", "alpha"])
def test_numbers_beyond_float32(name):
    """They became infinite, and the states NaN."""
    shapes = ((2, 4, 3), (3, 5, 5), (5, 5), (2, 5))
    with pytest.raises(annulus.InvalidArgument, match=rf"\[ring_rnn\] {name} must be a finite number in f32"):
        annulus.ring_rnn(*(torch.ones(s) for s in shapes), **{name: 1e300})
    annulus.ring_rnn(*(torch.ones(s, dtype=torch.float64) for s in shapes), **{name: 1e300})
