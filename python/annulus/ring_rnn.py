"""Ring RNN: a leaky recurrent network whose recurrent matrix is mixed, per sample and step, from K action matrices.

One call runs all T steps; nothing of size B * N * N ever exists. The C++ library checks every argument and takes any
strides; Python only routes.
"""

import math
import os
from collections.abc import Sequence
from typing import Literal, NamedTuple, TypedDict, overload

import torch
from torch import Tensor
from typing_extensions import Unpack

from ._checkpoint import read_checkpoint
from ._library import ops
from ._module import _WideModule
from ._operator import Operator, call_backward, fake, needs_autograd
from .errors import InvalidArgument, NotSupported, require, require_placement, require_size


class PackedWeights(NamedTuple):
    """What ring_rnn_pack made, and what it made it for: (dtype, device, K, N, precision), which a call compares."""

    words: Tensor
    form: tuple[int, ...]


class _Options(TypedDict, total=False):
    J0: float | Tensor
    J1: float | Tensor
    alpha: float | Tensor
    activation: str
    drive: Tensor | None
    reset: Tensor | None
    reset_state: Tensor | None
    mask: Tensor | None
    precision: str
    checkpoint: int
    packed: PackedWeights | None


_No = Literal[False]
_Yes = Literal[True]


@overload
def ring_rnn(A: Tensor, Wa: Tensor, Wo: Tensor, r0: Tensor, *numbers: float | Tensor, return_state: _No = False,
             return_readout: _No = False, **options: Unpack[_Options]) -> Tensor: ...
@overload
def ring_rnn(A: Tensor, Wa: Tensor, Wo: Tensor, r0: Tensor, *numbers: float | Tensor, return_state: _Yes,
             return_readout: _No = False, **options: Unpack[_Options]) -> tuple[Tensor, Tensor]: ...
@overload
def ring_rnn(A: Tensor, Wa: Tensor, Wo: Tensor, r0: Tensor, *numbers: float | Tensor, return_state: _No = False,
             return_readout: _Yes, **options: Unpack[_Options]) -> tuple[Tensor, Tensor, Tensor]: ...
@overload
def ring_rnn(A: Tensor, Wa: Tensor, Wo: Tensor, r0: Tensor, *numbers: float | Tensor, return_state: _Yes,
             return_readout: _Yes, **options: Unpack[_Options]) -> tuple[Tensor, Tensor, Tensor, Tensor]: ...
def ring_rnn(
    A: Tensor,
    Wa: Tensor,
    Wo: Tensor,
    r0: Tensor,
    J0: float | Tensor = -0.1,
    J1: float | Tensor = 0.1,
    alpha: float | Tensor = 0.15,
    *,
    activation: str = "gelu",
    drive: Tensor | None = None,
    reset: Tensor | None = None,
    reset_state: Tensor | None = None,
    mask: Tensor | None = None,
    precision: str = "auto",
    checkpoint: int = 0,
    packed: PackedWeights | None = None,
    return_state: bool = False,
    return_readout: bool = False,
) -> Tensor | tuple[Tensor, ...]:
    """A leaky network whose recurrent matrix is mixed, per sample and step, from K action matrices:

        y = J0 sum(r) + J1 Wo r + sum_k A[b,t,k] Wa[k] r + drive[b,t]        r <- (1 - alpha) r + alpha F(y)

    A (B, T, K), Wa (K, N, N), Wo (N, N), r0 (B, N) -> out (B, T, N): the state after every step, r0 not included.

    J0, J1, alpha: numbers, or 0-dim tensors (then differentiable); alpha also (N,).
    activation F: relu | gelu (erf) | tanh | silu. A relu network whose y are all negative has no gradient, and stays so.
    drive (B, T, N): added to y.  mask (B, T) bool: a step whose mask is false leaves the state as it is.
    reset (B, T) bool: before step t the state becomes reset_state (B, N), or r0 where that is None.
    precision: auto | fp32 | bf16x6 | bf16x3 | tf32 | bf16 | f16.  auto: float32 tensors fp32 on the CPU and bf16x3 on CUDA;
        float16 tensors fp32 on the CPU and f16 on CUDA; bfloat16 tensors bf16; float64 tensors float64.  fp32: as exact
        as fp32, on CUDA by bf16x6.  Within a call the state is float32 (float64 for float64).
    checkpoint s > 0: every s-th state is kept for the backward, which computes the steps between again, to the same
        bits; 0: every step's y is kept.  Without gradients nothing is kept.
    packed: what ring_rnn_pack made of Wa and Wo, for many calls with the same weights.
    return_state: also h_n (B, N), the last state, in float32 (float64): fed back as r0, it goes on with the bits of one
        long call.  r0 and reset_state may be float32 beside 16-bit tensors.
    return_readout: also angle and amplitude (B, T) of ring_readout, of the state before it is rounded to out's dtype.

    Under autocast A, Wa, Wo and drive are cast to its dtype, as a product's operands are; the state, J0, J1 and alpha to float32.

    Returns out, or the tuple (out[, h_n][, angle, amplitude]). Gradients: A, Wa, Wo, r0, J0, J1, alpha, drive,
    reset_state, through every output; only those that are asked for are computed.

    >>> A, Wa, Wo, r0 = torch.ones(1, 3, 2), torch.zeros(2, 8, 8), torch.eye(8), torch.ones(1, 8)
    >>> ring_rnn(A, Wa, Wo, r0, J0=0.0, J1=1.0, alpha=0.5, activation="relu").shape  # r <- r: nothing moves
    torch.Size([1, 3, 8])
    """
    J0, J0_tensor = _split(J0)
    J1, J1_tensor = _split(J1)
    alpha, alpha_tensor = _split(alpha)
    tensors = (A, Wa, Wo, r0, J0_tensor, J1_tensor, alpha_tensor, drive, reset_state)
    # An exported program keeps nothing for a backward, which, should one come, runs the forward again.
    save = needs_autograd(*tensors) and not torch.compiler.is_exporting()
    if packed is not None and needs_autograd(Wa, Wo):
        raise InvalidArgument(
            "[ring_rnn] packed must be left out where Wa or Wo requires grad, since their values will change; but is given"
        )
    if packed is not None and not isinstance(packed, PackedWeights):
        raise InvalidArgument(f"[ring_rnn] packed must be what ring_rnn_pack made but is a {type(packed).__name__}")
    words, form = packed or (None, ())
    out, h_n, *read = _ring_rnn(
        *tensors, J0, J1, alpha, reset, mask, activation, precision, checkpoint, words, form, save, return_readout
    )
    states = (out, h_n) if return_state else (out,)
    return (*states, *read) if return_state or return_readout else out


def ring_rnn_pack(Wa: Tensor, Wo: Tensor, precision: str = "auto") -> PackedWeights:
    """The weights in the form the kernels read, for `ring_rnn(..., packed=...)`: many calls, packed once.

    Good for every B and T with the same dtype, device and precision, and refused by calls of another, as long as Wa and Wo
    keep their values. Opaque, and aligned: pass it on as it is (a clone may be refused). To be called outside torch.compile; its result may go in.
    Gradients: none.

    >>> A, Wa, Wo, r0 = torch.rand(1, 3, 2), torch.rand(2, 8, 8), torch.rand(8, 8), torch.rand(1, 8)
    >>> torch.equal(ring_rnn(A, Wa, Wo, r0, packed=ring_rnn_pack(Wa, Wo)), ring_rnn(A, Wa, Wo, r0))
    True
    """
    with torch.no_grad():
        words, form = ops.ring_rnn_pack.default(*_ring_rnn.cast((Wa, Wa, Wo))[1:], precision)
    return PackedWeights(words, tuple(form.tolist()))


def ring_readout(states: Tensor) -> tuple[Tensor, Tensor]:
    """The population vector, of preferred angles 2 pi i / N:

        X = sum_i r_i cos(2 pi i / N)    Y = sum_i r_i sin(2 pi i / N)    angle = atan2(Y, X)    amplitude = hypot(X, Y)

    states (B, T, N) -> angle (B, T) in [-pi, pi] and amplitude (B, T), in float32 (float64). autocast leaves states as they are.
    Gradients: states; where the amplitude is 0 the angle is 0 and so are both gradients.

    >>> angle, amplitude = ring_readout(torch.eye(4)[None])  # a neuron after the other
    >>> angle / math.pi
    tensor([[ 0.0000,  0.5000,  1.0000, -0.5000]])
    """
    return _ring_readout(states)


def _split(parameter):
    """(number, tensor or None) of J0, J1 or alpha."""
    return (0.0, parameter) if isinstance(parameter, torch.Tensor) else (parameter, None)


class RingRNN(_WideModule):
    """A ring attractor, ring_rnn with its weights: Wa (n_actions, n_neurons, n_neurons) and Wo (n_neurons, n_neurons), which
    start as normal / sqrt(n_neurons).

    J0, J1 and alpha are numbers (alpha also n_neurons of them), parameters when learn_scalars. Those that are tensors are float32
    (float64) beside weights of 16 bits, and stay so when the module is cast. Gradients: as ring_rnn.
    RingRNN.load reads one that `annulus train ring-attractor` trained; actions() makes a velocity's actions.

    >>> ring = RingRNN(n_neurons=64, n_actions=2)
    >>> states, last = ring(torch.rand(8, 100, 2))  # (batch, steps, actions), from a bump at angle 0
    >>> states.shape, last.shape
    (torch.Size([8, 100, 64]), torch.Size([8, 64]))
    """

    _wide = ("J0", "J1", "alpha")
    J0: float | Tensor
    J1: float | Tensor
    alpha: float | Tensor
    gain: torch.nn.Sequential | None

    def __init__(self, n_neurons: int, n_actions: int, activation: str = "gelu", *, J0: float = -0.1, J1: float = 0.1,
                 alpha: float | Sequence[float] | Tensor = 0.15, learn_scalars: bool = False, precision: str = "auto",
                 checkpoint: int = 0, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        require_size("RingRNN", "n_neurons", n_neurons)
        require_size("RingRNN", "n_actions", n_actions)
        require_placement("RingRNN", device, dtype)
        self.n_neurons, self.n_actions, self.activation = n_neurons, n_actions, activation
        self.precision, self.checkpoint = precision, checkpoint
        self.encoding, self.delay, self.gain = "turns", 0, None  # of actions(), as load() finds them
        self.Wa = torch.nn.Parameter(torch.empty(n_actions, n_neurons, n_neurons, device=device, dtype=dtype))
        self.Wo = torch.nn.Parameter(torch.empty(n_neurons, n_neurons, device=device, dtype=dtype))
        for name, value in (("J0", J0), ("J1", J1), ("alpha", alpha)):
            several = name == "alpha" and not isinstance(value, (int, float))
            if several or learn_scalars:
                value = self._numbers(name, value, (n_neurons,) if several else ()).to(self.Wo.device)
            if learn_scalars:
                value = torch.nn.Parameter(value)
            if several and not learn_scalars:
                self.register_buffer(name, value)
            else:
                setattr(self, name, value)
        self._try(J0, J1, 0.0 if isinstance(self.alpha, torch.Tensor) else alpha)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for W in (self.Wa, self.Wo):
            torch.nn.init.normal_(W, std=max(self.n_neurons, 1) ** -0.5)

    def _numbers(self, name, value, shape):
        try:
            numbers = torch.as_tensor(value, dtype=_state_dtype(self.Wo), device="cpu").clone()
        except (TypeError, ValueError, RuntimeError):
            numbers = None
        rule = "be a number" if name != "alpha" else f"be a number or {self.n_neurons} of them"
        good = numbers is not None and numbers.shape == shape and bool(numbers.isfinite().all())
        require(good, "RingRNN", name, rule, value)
        return numbers

    def _try(self, J0, J1, alpha):
        """A call of nothing, so that what is wrong is said here."""
        dtype = torch.float64 if self.Wo.dtype == torch.float64 else torch.float16 if self.precision == "f16" else torch.float32
        nothing = [torch.zeros((0,) * rank, dtype=dtype, device="cpu") for rank in (3, 3, 2, 2)]
        try:
            ring_rnn(*nothing, J0, J1, alpha, activation=self.activation, precision=self.precision, checkpoint=self.checkpoint)
        except NotSupported:
            pass  # on this device
        except InvalidArgument as e:
            raise InvalidArgument(str(e).replace("[ring_rnn]", "[RingRNN]")) from None

    @classmethod
    def load(cls, folder: str | os.PathLike[str], *, device: torch.device | str | None = None) -> "RingRNN":
        """The ring in `folder`, OUT/<recipe> of `annulus train ring-attractor`, as its last checkpoint has it, gain network
        included. What is damaged, forged or not finite there raises InvalidArgument; nothing in it is executed.

            ring = annulus.nn.RingRNN.load("ring-attractor/default")
            states, last = ring(ring.actions(velocity), ring.bump(start))    # velocity (B, T), start (B,), in radians
            angle, amplitude = annulus.ring_readout(states)
        """
        if not isinstance(folder, (str, os.PathLike)):
            raise InvalidArgument(f"[RingRNN.load] folder must be a path but is {folder!r}")
        require_placement("RingRNN.load", device)
        recipe, tensors = read_checkpoint(os.fsdecode(folder))
        numbers = {name: float(recipe[name]) for name in ("J0", "J1", "alpha") if name in recipe}
        ring = cls(recipe["neurons"], recipe["actions"], recipe["activation"], **numbers)
        ring.encoding, ring.delay = recipe["encoding"], recipe["delay"]
        weights = {"Wa": ring.Wa, "Wo": ring.Wo}
        if recipe["gain_hidden"]:
            first = torch.nn.Linear(2, recipe["gain_hidden"])
            last = torch.nn.Linear(recipe["gain_hidden"], 2 * recipe["actions"])
            ring.gain = torch.nn.Sequential(first, torch.nn.Tanh(), last)
            weights |= {"gain.W1": first.weight, "gain.b1": first.bias, "gain.W2": last.weight, "gain.b2": last.bias}
        with torch.no_grad():
            for name, weight in weights.items():
                weight.copy_(tensors[name])
        return ring.to(device)

    def actions(self, velocity: Tensor) -> Tensor:
        """velocity (B, T), radians a step -> A (B, T, n_actions), as `annulus train ring-attractor` tells its rings: action 0 is
        max(-v, 0) and turns left, action 1 is max(v, 0) and turns right, others are 0. A ring that was loaded may spread v over
        all its actions, hear of it some steps later, and let its gain network say how much of each turns it."""
        require(isinstance(velocity, torch.Tensor) and velocity.dim() == 2 and velocity.is_floating_point(),
                "RingRNN", "velocity", "be a real tensor of shape (B, T)", velocity)
        require(self.n_actions >= 2, "RingRNN", "n_actions", "be at least 2 for velocities", self.n_actions)
        later = lambda x, steps: torch.cat([torch.zeros_like(x[:, :steps]), x[:, :max(x.size(1) - steps, 0)]], 1)  # noqa: E731
        v = later(velocity, self.delay)
        turns = torch.linspace(-1, 1, self.n_actions, dtype=torch.float64)
        if self.encoding == "turns":
            turns = torch.tensor([-1.0, 1.0] + [0.0] * (self.n_actions - 2))
        A = torch.relu(v[..., None] * turns.to(v))
        if self.gain is not None:
            seen = torch.stack([v, later(v, 1)], -1) / (0.1 * math.pi)
            now, before = self.gain(seen.to(self.gain[0].weight.dtype)).chunk(2, -1)
            A = now * A + before * later(A, 1)
        return A.to(self.Wo.dtype)

    def bump(self, angle: Tensor) -> Tensor:
        """angle (B,) in radians -> state (B, n_neurons): a Gaussian bump, a tenth of the ring wide, of length 1."""
        require(isinstance(angle, torch.Tensor) and angle.dim() == 1 and not angle.is_complex(),
                "RingRNN", "angle", "be a real tensor of shape (B,)", angle)
        N = self.n_neurons
        away = torch.arange(N, device=angle.device, dtype=torch.float64) - angle.double()[:, None] * N / (2 * math.pi)
        away = away - N * torch.round(away / N)
        bump = torch.exp(-0.5 * (10 * away / N).square())
        bump = bump / bump.norm(dim=1, keepdim=True)
        return bump.to(self.Wo.device, _state_dtype(self.Wo))

    def forward(self, A: Tensor, r0: Tensor | None = None, *, drive: Tensor | None = None, reset: Tensor | None = None,
                reset_state: Tensor | None = None, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """A (B, T, n_actions), r0 (B, n_neurons) -> out (B, T, n_neurons), h_n (B, n_neurons).

        Without r0 every sample starts from bump(0): zeros would stay zeros, and so would their gradients.

        h_n is the state to go on from. Arguments as annulus.ring_rnn.
        """
        if isinstance(A, torch.Tensor) and A.dim() == 3 and A.size(2) != self.n_actions:
            raise InvalidArgument(f"[RingRNN] A must have n_actions, {self.n_actions}, columns but has {A.size(2)}")
        if isinstance(A, torch.Tensor) and (A.dtype == torch.float64) != (self.Wo.dtype == torch.float64):
            raise InvalidArgument(f"[RingRNN] A must be {self.Wo.dtype}, as its weights are, but is {A.dtype}")
        if r0 is None and isinstance(A, torch.Tensor):
            r0 = self.bump(torch.zeros(A.size(0) if A.dim() else 0, device=A.device))
        return ring_rnn(
            A, self.Wa, self.Wo, r0, self.J0, self.J1, self.alpha, activation=self.activation, drive=drive, reset=reset,
            reset_state=reset_state, mask=mask, precision=self.precision, checkpoint=self.checkpoint, return_state=True
        )

    def extra_repr(self) -> str:
        return (
            f"n_neurons={self.n_neurons}, n_actions={self.n_actions}, activation={self.activation!r}, "
            f"precision={self.precision!r}, checkpoint={self.checkpoint}"
        )


# Fake kernels: shapes and dtypes without data, for torch.compile and torch.export


def _state_dtype(tensor):
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


@fake("ring_rnn", A=3, Wa=3, Wo=2, r0=2)
def _(a):
    B, T, N = a.A.shape[0], a.A.shape[1], a.r0.shape[1]
    empty = lambda *size: a.A.new_empty(size, dtype=_state_dtype(a.A))  # noqa: E731
    angle, amplitude = (empty(B, T), empty(B, T)) if a.readout else (empty(0), empty(0))
    steps = T if a.checkpoint == 0 else (T + a.checkpoint - 1) // a.checkpoint
    return a.A.new_empty((B, T, N)), empty(B, N), angle, amplitude, empty(steps, B, N) if a.save else empty(0)


@fake("ring_readout", states=3)
def _(a):
    return tuple(a.states.new_empty(a.states.shape[:2], dtype=_state_dtype(a.states)) for _ in range(2))


# Autograd


def _complete(b, gradients, also):
    """The readout's gradient is one of out; what the forward did not save, it makes now."""
    dangle, damplitude = gradients["dangle"], gradients["damplitude"]
    if dangle is not None or damplitude is not None:
        (dstates,) = call_backward("ring_readout_backward", dangle, damplitude, b.out, 1)
        b = b._replace(dout=dstates if b.dout is None else b.dout + dstates)
    if not also["save"]:
        forward = b._asdict() | also | {"save": True, "readout": False}
        saved = call_backward("ring_rnn", *(forward[name] for name in _ring_rnn.arguments._fields))[-1]
        b = b._replace(saved=saved)
    return b


_ring_rnn = Operator(
    "ring_rnn",
    keep=lambda ctx, a, outputs: (outputs[-1] if a.save else None,),
    kept=("saved",),
    visible=lambda a: 4 if a.readout else 2,
    complete=_complete,
    also=("packed", "packed_form", "save"),
    spoken={name + "_tensor": name for name in ("J0", "J1", "alpha")},
    samples=dict.fromkeys(("A", "r0", "drive", "reset_state", "reset", "mask", "out", "h_n", "angle", "amplitude"), 0)
    | {"saved": 1},
    autocast=dict.fromkeys(("A", "Wa", "Wo", "drive"), "lower")
    | dict.fromkeys(("r0", "J0_tensor", "J1_tensor", "alpha_tensor", "reset_state"), "fp32"),
)
_ring_readout = Operator("ring_readout", autocast={}, samples=dict(states=0, angle=0, amplitude=0))
