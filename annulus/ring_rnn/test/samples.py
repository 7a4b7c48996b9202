"""The ring RNN for the tests in Python: its definition in double precision, differentiable; sample and wrong calls."""

import math

import torch
from contract import Sample, leaves, relative_error

import annulus

ACTIVATIONS = {
    "relu": torch.relu,
    "gelu": torch.nn.functional.gelu,
    "tanh": torch.tanh,
    "silu": torch.nn.functional.silu,
}
# Largest relative error (2-norm) by the numeric policy. On CUDA float32 means bf16x3: see limit().
OUTPUT = {torch.float64: 1e-12, torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}
GRADIENT = {torch.float64: 1e-11, torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 5e-2}
# relu: a y that rounds to the other side of 0 takes a whole term of the gradient with it.
KINKED = {**GRADIENT, torch.float16: 0.1, torch.bfloat16: 0.2}


def ring_rnn(A, Wa, Wo, r0, J0=-0.1, J1=0.1, alpha=0.15, *, activation="gelu", drive=None, reset=None, reset_state=None,
             mask=None):
    """(out, h_n) in double. J0, J1 and alpha may also be (T, B, N): one for each place they act in."""
    A, Wa, Wo, r = A.double(), Wa.double(), Wo.double(), r0.double()
    start = r if reset_state is None else reset_state.double()
    J0, J1, alpha = (p.double() if isinstance(p, torch.Tensor) else p for p in (J0, J1, alpha))
    at = lambda p, t: p[t] if isinstance(p, torch.Tensor) and p.dim() == 3 else p  # noqa: E731
    steps = []
    for t in range(A.shape[1]):
        if reset is not None:
            r = torch.where(reset[:, t, None], start, r)
        y = at(J0, t) * r.sum(1, keepdim=True) + at(J1, t) * (r @ Wo.T)
        y = y + torch.einsum("bk,kij,bj->bi", A[:, t], Wa, r)
        if drive is not None:
            y = y + drive[:, t].double()
        new = (1 - at(alpha, t)) * r + at(alpha, t) * ACTIVATIONS[activation](y)
        r = new if mask is None else torch.where(mask[:, t, None], new, r)
        steps.append(r)
    out = torch.stack(steps, 1) if steps else r[:, None][:, :0]
    return out, r


def readout(states):
    states = states.double()
    N = states.shape[-1]
    angles = 2 * math.pi * torch.arange(N, dtype=torch.float64, device=states.device) / N
    X, Y = states @ angles.cos(), states @ angles.sin()
    return torch.atan2(Y, X), torch.hypot(X, Y)


def limit(limits, dtype, device):
    """One product of bf16x3, the default for float32 on CUDA, is right to 5e-6, one of fp32 to 2e-7."""
    return limits[dtype] * (10 if dtype == torch.float32 and torch.device(device).type == "cuda" else 1)


def assert_close(got, want, limits=OUTPUT):
    e, most = relative_error(got, want), limit(limits, got.dtype, got.device)
    assert e <= most, f"relative error {e:.3g}, limit {most:.3g}"


def problem(B=3, T=7, K=4, N=10, *, dtype=torch.float64, device="cpu", grad=True, drive=False, reset=False, mask=False,
            reset_state=False, tensors=True, per_neuron=False, state_dtype=None):
    """Keyword arguments of ring_rnn: live dynamics, a dead action channel, all gradients asked for."""

    def new(*size, scale=1.0, dtype=dtype):
        return (torch.randn(size, device=device) * scale).to(dtype).requires_grad_(grad)

    state = state_dtype or dtype
    scalar = torch.float64 if dtype == torch.float64 else torch.float32
    A = torch.randn(B, T, K, device=device)
    A[:, :, 1:2] = 0
    p = dict(
        A=A.to(dtype).requires_grad_(grad),
        Wa=new(K, N, N, scale=max(N * K, 1) ** -0.5),
        Wo=new(N, N, scale=2 * max(N, 1) ** -0.5),
        r0=new(B, N, dtype=state),
    )
    if tensors:
        value = lambda x: torch.tensor(x, device=device, dtype=scalar).requires_grad_(grad)  # noqa: E731
        p |= dict(J0=value(-0.3 / max(N, 1)), J1=value(0.7))
        alphas = torch.rand(N, device=device, dtype=scalar) * 0.5 + 0.1
        p["alpha"] = alphas.requires_grad_(grad) if per_neuron else value(0.3)
    if drive:
        p["drive"] = new(B, T, N, scale=0.3)
    if reset:
        p["reset"] = torch.rand(B, T, device=device) < 0.3
        if reset_state:
            p["reset_state"] = new(B, N, dtype=state)
    if mask:
        p["mask"] = torch.rand(B, T, device=device) < 0.7
    return p


def check(p, options=None, **extra):
    """Outputs, and the gradients of everything through both of them; returns the outputs.

    A gradient's error is measured by its length; that of J0, J1 and alpha, which is a sum over all samples and steps, by
    the terms of that sum, since it may cancel to anything.

    float32 on CUDA is asked for bf16x6, which promises what fp32 does. What bf16x3, the default there, gets wrong in
    networks as small as these depends on how the draw cancels: 1e-5 of the states in one draw of twenty.
    """
    options = dict(options or {})
    dtype, device = p["A"].dtype, p["A"].device
    if dtype == torch.float32 and device.type == "cuda" and "precision" not in {**options, **extra}:
        extra["precision"] = "bf16x6"
    exact_products = extra.get("precision") == "bf16x6"
    limits = KINKED if options.get("activation") == "relu" else GRADIENT
    most_of = lambda limits, dtype: limits[dtype] if exact_products else limit(limits, dtype, device)  # noqa: E731
    out, h_n = annulus.ring_rnn(**p, **options, **extra, return_state=True)
    B, T, N = out.shape
    inputs = {name: x for name, x in p.items() if x.requires_grad}
    terms = {
        name: inputs[name].detach().double().expand(T, B, N).clone().requires_grad_()
        for name in ("J0", "J1", "alpha")
        if name in inputs
    }
    want, want_h = ring_rnn(**{**p, **terms}, **options)
    assert out.dtype == dtype and h_n.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert relative_error(out, want) <= most_of(OUTPUT, dtype), relative_error(out, want)
    assert relative_error(h_n, want_h) <= most_of(OUTPUT, dtype), relative_error(h_n, want_h)
    dout, dh = torch.randn_like(out), torch.randn_like(h_n)
    got = torch.autograd.grad((out, h_n), inputs.values(), (dout, dh))
    exact = torch.autograd.grad((want, want_h), {**inputs, **terms}.values(), (dout.double(), dh.double()), allow_unused=True)
    for (name, x), g, e in zip(inputs.items(), got, exact):
        assert g.dtype == x.dtype and g.shape == x.shape, name
        assert torch.isfinite(g).all(), name
        if e is None:
            e = torch.zeros_like(terms.get(name, x), dtype=torch.float64)
        size = e.abs().sum() if name in terms else e.double().norm()
        if name in terms:
            e = e.sum((0, 1)) if x.dim() else e.sum()
        relative = ((g.double() - e).norm() / size.clamp_min(1e-300)).item()
        most = max(most_of(limits, t) for t in (dtype, x.dtype))
        assert relative <= most, f"d{name}: relative error {relative:.3g}, limit {most:.3g}"
    return out, h_n



# Sample calls. Between them they reach every op of the operator.

ALL = dict(drive=True, reset=True, reset_state=True, mask=True, per_neuron=True)


def _sample(what, given, **options):
    def tensors(size, dtype, device):
        sizes = ((2, 4, 3, 5), (5, 13, 3, 23), (7, 17, 6, 29), (9, 31, 4, 19))[size]
        return problem(*sizes, dtype=dtype, device=device, grad=False, **given)

    def definition(**p):
        out, h_n = ring_rnn(**p, activation=options.get("activation", "gelu"))
        return (out, h_n, *(readout(out) if "return_readout" in options else ()))

    call = lambda **p: annulus.ring_rnn(**{"activation": "gelu", **options, **p}, return_state=True)  # noqa: E731
    return Sample("ring_rnn", what, call, tensors, definition)


def _states(size, dtype, device):
    B, T, N = ((2, 4, 5), (5, 13, 23), (7, 17, 29), (9, 31, 19))[size]
    return dict(states=torch.rand(B, T, N, device=device, dtype=torch.float64).to(dtype))


SAMPLES = [
    _sample("", dict(tensors=False)),
    _sample("all inputs", ALL),
    _sample("readout", {}, return_readout=True, activation="tanh"),
    _sample("checkpoints", ALL, checkpoint=3, activation="silu"),
    Sample("ring_readout", "", lambda states: annulus.ring_readout(states), _states, lambda states: readout(states)),
]
# Opaque to the compiler, without a gradient: neither a fake kernel nor a formula.
OUTSIDE_OF_COMPILED_CODE = {"ring_rnn_pack"}


def good(**changes):
    return {**problem(2, 4, 3, 5, dtype=torch.float32, grad=False, **ALL), **changes}


def _bad(**changes):
    def call(grad):
        p = good(**changes)
        if grad:
            p["Wa" if "Wa" not in changes and "packed" not in changes else "r0"].requires_grad_()
        return annulus.ring_rnn(**p)

    return call


ONES = torch.ones
BAD = [
    (_bad(A=ONES(2, 4)), r"\[ring_rnn\] A must have 3 dimensions but has shape \(2, 4\)"),
    (_bad(A=ONES(2, 4, 2)), r"Wa must have shape \(2, 5, 5\) but has \(3, 5, 5\)"),
    (_bad(A=ONES(2, 4, 3, dtype=torch.int32)), r"A must be one of f64, f32, f16, bf16 but is i32"),
    (_bad(A=ONES(2, 4, 3, dtype=torch.complex64)), r"A must have a dtype that annulus knows"),
    (_bad(A=ONES(2, 4, 3, dtype=torch.float64)), r"r0 must be f64 but is f32"),
    (_bad(A=ONES((1,) * 7)), r"A must have at most 6 dimensions"),
    (_bad(A=[1.0]), r"A must be Tensor"),
    (_bad(Wa=ONES(3, 5, 4)), r"Wa must have shape \(3, 5, 5\)"),
    (_bad(Wa=ONES(5, 5)), r"Wa must have 3 dimensions"),
    (_bad(Wo=ONES(5, 4)), r"Wo must have shape \(5, 5\)"),
    (_bad(Wo=ONES(5, 5, dtype=torch.bfloat16)), r"Wo must be f32 but is bf16"),
    (_bad(Wo=ONES(5, 5, device="meta")), r"Wo must be on the device of A"),
    (_bad(r0=ONES(3, 5)), r"r0 must have shape \(2, 5\) but has \(3, 5\)"),
    (_bad(r0=ONES(5)), r"r0 must have 2 dimensions"),
    (_bad(J0=ONES(1)), r"J0 must have rank 0 but has shape \(1,\)"),
    (_bad(J0="large"), r"J0 must be float but is str"),
    (_bad(J1=ONES((), dtype=torch.float64)), r"J1 must be f32 but is f64"),
    (_bad(J1=float("nan")), r"J1 must be a finite number"),
    (_bad(alpha=ONES(4)), r"alpha must have shape \(5,\) but has \(4,\)"),
    (_bad(alpha=ONES(5, 1)), r"alpha must have rank 0 or shape \(5"),
    (_bad(alpha=float("inf")), r"alpha must be a finite number"),
    (_bad(alpha=None), r"alpha must be float but is NoneType"),
    (_bad(activation="sigmoid"), r"activation must be relu, gelu, tanh or silu but is 'sigmoid'"),
    (_bad(activation=None), r"activation must be str"),
    (_bad(drive=ONES(2, 4, 3)), r"drive must have shape \(2, 4, 5\)"),
    (_bad(drive=ONES(2, 4, 5, dtype=torch.float64)), r"drive must be f32 but is f64"),
    (_bad(drive=0.5), r"drive must be Optional\[Tensor\]"),
    (_bad(reset=ONES(2, 4)), r"reset must be bool but is f32"),
    (_bad(reset=ONES(4, 2, dtype=torch.bool)), r"reset must have shape \(2, 4\)"),
    (_bad(reset=None), r"reset must be given with reset_state but is missing"),
    (_bad(reset_state=ONES(2, 4)), r"reset_state must have shape \(2, 5\)"),
    (_bad(mask=ONES(2, 4, dtype=torch.int32)), r"mask must be bool but is i32"),
    (_bad(mask=ONES(2, 3, dtype=torch.bool)), r"mask must have shape \(2, 4\)"),
    (_bad(precision="fp8"), r"precision must be auto, fp32, bf16x6, bf16x3, tf32, bf16 or f16 but is 'fp8'"),
    (_bad(precision=32), r"precision must be str but is int 32"),
    (_bad(checkpoint=-1), r"checkpoint must be at least 0 but is -1"),
    (_bad(checkpoint=1.5), r"checkpoint must be int but is float"),
    (_bad(packed=ONES(3)), r"packed must be i32 but is f32"),
    (_bad(packed=ONES(3, dtype=torch.int32)), r"packed must"),
]
