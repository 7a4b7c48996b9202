"""Values and gradients of the ring RNN against its definition in double precision, and its promises about bits."""

import math

import pytest
import torch
from contract import leaves, relative_error
from samples_ring_rnn import ACTIVATIONS, ALL, GRADIENT, assert_close, check, limit, problem, readout
from samples_ring_rnn import ring_rnn as formula

import annulus

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
# Which optional inputs are there.
INPUTS = {
    "plain": {},
    "numbers": dict(tensors=False),
    "per-neuron": dict(per_neuron=True),
    "drive": dict(drive=True),
    "reset": dict(reset=True),
    "reset-state": dict(reset=True, reset_state=True),
    "mask": dict(mask=True),
    "all": ALL,
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("inputs", INPUTS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_values(activation, inputs, dtype, device):
    check(problem(dtype=dtype, device=device, **INPUTS[inputs]), dict(activation=activation))


@pytest.mark.parametrize("B,T,K,N", [(1, 1, 1, 1), (5, 3, 1, 33), (17, 4, 3, 64), (2, 9, 17, 5), (64, 5, 2, 130)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sizes(dtype, B, T, K, N, device):
    check(problem(B, T, K, N, dtype=dtype, device=device, drive=True, reset=True), dict(activation="tanh"))


@pytest.mark.parametrize("zero", ["B", "T", "K", "N"])
@pytest.mark.parametrize("inputs", ["plain", "all"])
def test_zero_sizes(zero, inputs, device):
    size = dict(B=2, T=3, K=2, N=4) | {zero: 0}
    p = problem(**size, dtype=torch.float32, device=device, **INPUTS[inputs])
    out, h_n = check(p, dict(activation="silu"))
    if zero == "T":
        assert torch.equal(h_n, p["r0"])
    angle, amplitude = annulus.ring_readout(out)
    assert angle.shape == amplitude.shape == out.shape[:2]
    assert zero != "N" or not (angle.any() or amplitude.any())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_float32_state_beside_16_bits(dtype, device):
    p = problem(dtype=dtype, device=device, state_dtype=torch.float32, reset=True, reset_state=True)
    check(p, dict(activation="gelu"))
    p["J0"] = p["J0"].detach().to(dtype).requires_grad_()
    check(p, dict(activation="gelu"))


def test_expanded_gradients_and_inputs(device):
    p = problem(4, 5, 3, 9, dtype=torch.float32, device=device)
    p["r0"] = p["r0"].detach()[:1].expand(4, 9)
    p["A"] = p["A"].detach()[:, :1].expand(4, 5, 3).requires_grad_()
    out, want = annulus.ring_rnn(**p), formula(**p)[0]
    assert_close(out, want)
    inputs = leaves(p)
    for g, e in zip(torch.autograd.grad(out.sum(), inputs), torch.autograd.grad(want.sum(), inputs)):  # stride-0 dout
        assert_close(g, e, GRADIENT)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("precision", ["auto", "fp32", "bf16x6", "bf16x3", "tf32", "bf16"])
def test_precisions(precision, dtype, device):
    """What each mode delivers on live dynamics; a 16-bit output rounds more than any of them."""
    p = problem(32, 20, 4, 96, dtype=dtype, device=device, tensors=False)
    try:
        out = annulus.ring_rnn(**p, activation="tanh", precision=precision)
    except annulus.NotSupported as e:
        assert device == "cpu" and precision == "tf32", e
        pytest.skip(str(e))
    if precision == "auto" and device == "cuda":
        precision = "bf16x3"
    most = {"auto": 1e-6, "fp32": 1e-6, "bf16x6": 1e-6, "bf16x3": 5e-6, "tf32": 5e-4, "bf16": 5e-3}[precision]
    assert relative_error(out, formula(**p, activation="tanh")[0]) <= max(most, 0 if dtype == torch.float32 else 5e-3)


def test_f16_products_are_of_float16_tensors(device):
    """On CUDA the default for them, an eighth of bf16's error; the CPU multiplies them in fp32."""
    p = problem(32, 20, 4, 96, dtype=torch.float16, device=device, tensors=False)
    out = annulus.ring_rnn(**p, activation="tanh")
    assert relative_error(out, formula(**p, activation="tanh")[0]) <= 7e-4  # 3e-4 of it rounds the output
    named = annulus.ring_rnn(**p, activation="tanh", precision="f16" if device == "cuda" else "fp32")
    assert torch.equal(out, named)
    if device == "cpu":
        with pytest.raises(annulus.NotSupported, match="multiplies f16 tensors in fp32"):
            annulus.ring_rnn(**p, precision="f16")
    p = problem(2, 3, 1, 8, dtype=torch.float32, device=device, grad=False)
    with pytest.raises(ValueError, match="precision must be f16 beside f16 tensors alone but is f16 beside f32 tensors"):
        annulus.ring_rnn(**p, precision="f16")


def test_default_precision_of_float32(device):
    p = problem(5, 6, 3, 40, dtype=torch.float32, device=device, grad=False)
    named = annulus.ring_rnn(**p, precision="bf16x3" if device == "cuda" else "fp32")
    assert torch.equal(annulus.ring_rnn(**p), named)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("cuts", [(1,) * 8, (3, 5), (1, 6, 1)])
def test_streaming_is_one_call(cuts, dtype, device):
    """h_n fed back as r0 gives the bits of one call, masks and resets included."""
    p = problem(5, 8, 3, 20, dtype=dtype, device=device, grad=False, **INPUTS["all"])
    whole, last = annulus.ring_rnn(**p, activation="gelu", return_state=True)
    state, start, parts = p["r0"], 0, []
    packed = annulus.ring_rnn_pack(p["Wa"], p["Wo"])
    for n in cuts:
        part = {k: p[k][:, start : start + n] for k in ("A", "drive", "reset", "mask")}
        out, state = annulus.ring_rnn(**{**p, **part, "r0": state}, activation="gelu", packed=packed, return_state=True)
        parts.append(out)
        start += n
    assert torch.equal(torch.cat(parts, 1), whole) and torch.equal(state, last)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("checkpoint", [1, 3, 7, 100])
def test_checkpoint_changes_no_bit(checkpoint, dtype, device):
    p = problem(4, 7, 3, 12, dtype=dtype, device=device, **INPUTS["all"])
    inputs = leaves(p)
    out, h_n = annulus.ring_rnn(**p, activation="gelu", return_state=True)
    other, other_h = annulus.ring_rnn(**p, activation="gelu", checkpoint=checkpoint, return_state=True)
    assert torch.equal(out, other) and torch.equal(h_n, other_h)
    dout, dh = torch.randn_like(out), torch.randn_like(h_n)
    a = torch.autograd.grad((out, h_n), inputs, (dout, dh))
    b = torch.autograd.grad((other, other_h), inputs, (dout, dh))
    assert all(torch.equal(x, y) for x, y in zip(a, b))


def test_lengths_by_mask(device):
    """A batch of sequences of different lengths is those sequences one by one; padding has no gradient."""
    p = problem(3, 9, 2, 11, dtype=torch.float64, device=device)
    lengths = (9, 4, 0)
    p["mask"] = torch.arange(9, device=device) < torch.tensor(lengths, device=device)[:, None]
    out, h_n = annulus.ring_rnn(**p, activation="tanh", return_state=True)
    (dA,) = torch.autograd.grad(out.square().sum(), p["A"])
    for b, n in enumerate(lengths):
        alone = {**p, "A": p["A"][b : b + 1, :n], "r0": p["r0"][b : b + 1]}
        alone.pop("mask")
        one, h_one = annulus.ring_rnn(**alone, activation="tanh", return_state=True)
        torch.testing.assert_close(out[b : b + 1, :n], one, rtol=1e-13, atol=0)
        torch.testing.assert_close(h_n[b : b + 1], h_one, rtol=1e-13, atol=0)
        assert (out[b, n:] == h_n[b]).all() and not dA[b, n:].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_padded_channels_change_no_bit(dtype, device):
    p = problem(6, 5, 3, 16, dtype=dtype, device=device, grad=False)
    wide = {**p, "A": torch.nn.functional.pad(p["A"], (0, 13)), "Wa": torch.nn.functional.pad(p["Wa"], (0,) * 5 + (13,), value=9.0)}
    assert torch.equal(annulus.ring_rnn(**p), annulus.ring_rnn(**wide))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_threads_change_no_bit(dtype):
    p = problem(33, 6, 4, 70, dtype=dtype, **INPUTS["all"])
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3, 8):
            torch.set_num_threads(threads)
            out = annulus.ring_rnn(**p, activation="gelu")
            results.append((out, *torch.autograd.grad(out, leaves(p), torch.ones_like(out) * 0.1)))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(x, y) for x, y in zip(results[0], other))


# Readout


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("N", [1, 3, 64, 257])
def test_readout(N, dtype, device):
    states = (torch.rand(3, 5, N, device=device) + 0.1 * torch.randn(3, 5, N, device=device)).to(dtype).requires_grad_()
    angle, amplitude = annulus.ring_readout(states)
    want, want_amplitude = readout(states)
    assert angle.dtype == amplitude.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    apart = torch.remainder(angle.double() - want + math.pi, 2 * math.pi) - math.pi
    most = 1e-12 if dtype == torch.float64 else 1e-6
    # What rounding leaves of a sum that nearly cancels turns the angle by so much over the amplitude.
    length = states.detach().double().norm(dim=-1)
    assert (apart.abs() <= most * length / want_amplitude + most).all()
    assert ((amplitude.double() - want_amplitude).abs() <= most * length).all()
    dangle, damplitude = torch.randn_like(angle), torch.randn_like(angle)
    for used in ((0,), (1,), (0, 1)):
        gradients = [(dangle, damplitude)[i] for i in used]
        (got,) = torch.autograd.grad([(angle, amplitude)[i] for i in used], states, gradients, retain_graph=True)
        (exact,) = torch.autograd.grad(
            [(want, want_amplitude)[i] for i in used], states, [g.double() for g in gradients], retain_graph=True
        )
        assert_close(got, exact, GRADIENT)


def test_readout_of_nothing(device):
    states = torch.zeros(1, 2, 8, device=device, requires_grad=True)
    angle, amplitude = annulus.ring_readout(states)
    assert not angle.any() and not amplitude.any()
    (angle.sum() + amplitude.sum()).backward()
    assert not states.grad.any()


def test_readout_finds_the_bump(device):
    """Preferred angles are 2 pi i / N: a decoder that ends them at 2 pi is off by 1.7 degrees at N = 120."""
    angles = torch.linspace(-3, 3, 41, dtype=torch.float64, device=device)
    model = annulus.nn.RingRNN(120, 2).to(device)
    angle, _ = annulus.ring_readout(model.bump(angles)[:, None])
    assert (angle[:, 0].double() - angles).abs().max() <= 1e-5


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_fused_readout(dtype, device):
    """return_readout is ring_readout of the unrounded state, with the gradient of it added to out's."""
    p = problem(4, 6, 3, 24, dtype=dtype, device=device)
    p["r0"] = p["r0"].detach().abs().requires_grad_()
    options = dict(activation="gelu", J0=0.0, J1=0.2)
    p.pop("J0"), p.pop("J1")
    out, h_n, angle, amplitude = annulus.ring_rnn(**p, **options, return_state=True, return_readout=True)
    assert len(annulus.ring_rnn(**p, **options, return_readout=True)) == 3
    want, want_h = formula(**p, **options)
    want_angle, want_amplitude = readout(want)
    most = {torch.float64: 1e-11, torch.float32: limit({torch.float32: 3e-6}, torch.float32, device)}.get(dtype, 1e-2)
    assert (torch.remainder(angle.double() - want_angle + math.pi, 2 * math.pi) - math.pi).abs().max() <= 30 * most
    assert relative_error(amplitude, want_amplitude) <= most
    if dtype in (torch.float32, torch.float64):
        again = annulus.ring_readout(out)
        assert_close(angle, again[0]), assert_close(amplitude, again[1])
    grads = [torch.randn_like(x) for x in (out, h_n, angle, amplitude)]
    inputs = leaves(p)
    got = torch.autograd.grad((out, h_n, angle, amplitude), inputs, grads)
    exact = torch.autograd.grad((want, want_h, want_angle, want_amplitude), inputs, [g.double() for g in grads])
    for g, e in zip(got, exact):
        assert relative_error(g, e) <= {torch.float64: 1e-10, torch.float32: 100 * most}.get(dtype, 0.2)
