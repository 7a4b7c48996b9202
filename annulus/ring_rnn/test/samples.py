"""The ring RNN for the tests in Python: its definition in double precision, differentiable; sample and wrong calls."""

import math

import torch
from contract import Sample

import annulus
from annulus.ring_rnn import PackedWeights

ACTIVATIONS = {
    "relu": torch.relu,
    "gelu": torch.nn.functional.gelu,
    "tanh": torch.tanh,
    "silu": torch.nn.functional.silu,
}


def ring_rnn(A, Wa, Wo, r0, J0=-0.1, J1=0.1, alpha=0.15, *, activation="gelu", drive=None, reset=None, reset_state=None,
             mask=None):
    """(out, h_n) in double."""
    A, Wa, Wo, r = A.double(), Wa.double(), Wo.double(), r0.double()
    start = r if reset_state is None else reset_state.double()
    steps = []
    for t in range(A.shape[1]):
        if reset is not None:
            r = torch.where(reset[:, t, None], start, r)
        y = J0 * r.sum(1, keepdim=True) + J1 * (r @ Wo.T)
        y = y + torch.einsum("bk,kij,bj->bi", A[:, t], Wa, r)
        if drive is not None:
            y = y + drive[:, t].double()
        new = (1 - alpha) * r + alpha * ACTIVATIONS[activation](y)
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
    (_bad(Wo=ONES(5, 5, dtype=torch.bfloat16)), r"Wo must be f32 but is bf16"),
    (_bad(Wo=ONES(5, 5, device="meta")), r"Wo must be on the device of A"),
    (_bad(r0=ONES(3, 5)), r"r0 must have shape \(2, 5\) but has \(3, 5\)"),
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
    (_bad(drive=0.5), r"drive must be Optional\[Tensor\]"),
    (_bad(reset=ONES(2, 4)), r"reset must be bool but is f32"),
    (_bad(reset=None), r"reset must be given with reset_state but is missing"),
    (_bad(precision="fp8"), r"precision must be auto, fp32, bf16x6, bf16x3, tf32, bf16 or f16 but is 'fp8'"),
    (_bad(precision=32), r"precision must be str but is int 32"),
    (_bad(checkpoint=-1), r"checkpoint must be at least 0 but is -1"),
    (_bad(checkpoint=1.5), r"checkpoint must be int but is float"),
    (_bad(packed=ONES(3)), r"packed must be what ring_rnn_pack made but is a Tensor"),
    (_bad(packed=PackedWeights(ONES(3, dtype=torch.int32), ())), r"packed must be made for f32, K 3, N 5, precision"),
]
