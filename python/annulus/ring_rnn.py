"""Ring RNN: a leaky recurrent network whose recurrent matrix is mixed, per sample and step, from K action matrices.

    y = J0 sum(r) + J1 Wo r + sum_k A[b,t,k] Wa[k] r + drive[b,t]        r <- (1 - alpha) r + alpha F(y)

One call runs all T steps; nothing of size B * N * N ever exists. The C++ library checks every argument and takes any
strides; Python only routes.
"""

import torch

from ._autograd import (
    are_transforms_active, below_autograd, call, call_backward, call_transformed, differentiable, needs_autograd,
    refuse_double_backward, refuse_tangents, register_formulas,
)
from ._library import ops
from .errors import InvalidArgument, typed


def ring_rnn(
    A,
    Wa,
    Wo,
    r0,
    J0=-0.1,
    J1=0.1,
    alpha=0.15,
    *,
    activation="relu",
    drive=None,
    reset=None,
    reset_state=None,
    mask=None,
    precision="auto",
    checkpoint=0,
    packed=None,
    return_state=False,
    return_readout=False,
):
    """A (B, T, K), Wa (K, N, N), Wo (N, N), r0 (B, N) -> out (B, T, N): the state after every step, r0 not included.

    J0, J1, alpha: numbers, or 0-dim tensors (then differentiable); alpha also (N,).
    activation F: relu | gelu (erf) | tanh | silu.
    drive (B, T, N): added to y.  mask (B, T) bool: a step whose mask is false leaves the state as it is.
    reset (B, T) bool: before step t the state becomes reset_state (B, N), or r0 where that is None.
    precision: auto | fp32 | bf16x6 | bf16x3 | tf32 | bf16.  auto: float32 tensors fp32 on the CPU and bf16x3 on CUDA;
        16-bit tensors bf16; float64 tensors float64.  Within a call the state is float32 (float64 for float64).
    checkpoint s > 0: every s-th state is kept for the backward, which computes the steps between again, to the same
        bits; 0: every step's y is kept.  Without gradients nothing is kept.
    packed: what ring_rnn_pack made of Wa and Wo, for many calls with the same weights.
    return_state: also h_n (B, N), the last state, in float32 (float64): fed back as r0, it goes on with the bits of one
        long call.  r0 and reset_state may be float32 beside 16-bit tensors.
    return_readout: also angle and amplitude (B, T) of ring_readout, of the state before it is rounded to out's dtype.

    Returns out, or the tuple (out[, h_n][, angle, amplitude]). Gradients: A, Wa, Wo, r0, J0, J1, alpha, drive,
    reset_state, through every output; only those that are asked for are computed.
    """
    J0, J0_tensor = _split(J0)
    J1, J1_tensor = _split(J1)
    alpha, alpha_tensor = _split(alpha)
    tensors = (A, Wa, Wo, r0, J0_tensor, J1_tensor, alpha_tensor, drive, reset_state)
    # An exported program keeps nothing for a backward, which, should one come, runs the forward again.
    save = needs_autograd(*tensors) and not torch.compiler.is_exporting()
    if packed is not None and save and (Wa.requires_grad or Wo.requires_grad):
        raise InvalidArgument(
            "[ring_rnn] packed must be left out where Wa or Wo requires grad, since their values will change; but is given"
        )
    options = (reset, mask, J0, J1, alpha, activation, precision, checkpoint, packed, save, return_readout)
    refuse_tangents(ops.ring_rnn.default, *tensors)
    try:
        if torch.compiler.is_compiling():
            out, h_n, _, *read = ops.ring_rnn.default(*tensors, *options)
        elif are_transforms_active():
            out, h_n, _, *read = call_transformed(ops.ring_rnn.default, *tensors, *options)
        elif save:
            out, h_n, *read = _RingRnn.apply(*tensors, options)
        else:
            out, h_n, _, *read = below_autograd(ops.ring_rnn.default, *tensors, *options)
    except RuntimeError as e:
        raise typed(e) from None
    if return_readout:
        return (out, h_n, *read) if return_state else (out, *read)
    return (out, h_n) if return_state else out


def ring_rnn_pack(Wa, Wo, precision="auto"):
    """The weights in the form the kernels read, for `ring_rnn(..., packed=...)`: many calls, packed once.

    Good for every B and T with the same dtype, device and precision, as long as Wa and Wo keep their values. Opaque, and
    aligned: pass it on as it is (a clone may be refused). To be called outside torch.compile; its result may go in.
    """
    try:
        with torch.no_grad():
            return ops.ring_rnn_pack.default(Wa, Wo, precision)
    except RuntimeError as e:
        raise typed(e) from None


def ring_readout(states):
    """states (B, T, N) -> angle (B, T) in [-pi, pi] and amplitude (B, T) of the population vector, in float32 (float64).

    Preferred angles are 2 pi i / N. Differentiable; where the amplitude is 0 the angle is 0 and so are both gradients.
    """
    try:
        return call(ops.ring_readout.default, _Readout, (states,), (states,))
    except RuntimeError as e:
        raise typed(e) from None


def _split(parameter):
    """(number, tensor or None) of J0, J1 or alpha."""
    return (0.0, parameter) if isinstance(parameter, torch.Tensor) else (parameter, None)


# Fake kernels: shapes and dtypes without data, for torch.compile and torch.export


def _check(op, name, tensor, rank, first):
    """The rules a fake kernel cannot go on without; all others are C++'s."""
    if tensor.dim() != rank:
        raise InvalidArgument(f"[{op}] {name} must have {rank} dimensions but has shape {tuple(tensor.shape)}")
    if tensor.device != first.device:  # a meta tensor among real ones leads here, too
        raise InvalidArgument(f"[{op}] {name} must be on the device of A, {first.device}, but is on {tensor.device}")


def _state_dtype(tensor):
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


@torch.library.register_fake("annulus::ring_rnn")
def _(A, Wa, Wo, r0, J0_tensor, J1_tensor, alpha_tensor, drive, reset_state, reset, mask, J0, J1, alpha, activation,
      precision, checkpoint, packed, save, readout):
    for name, tensor, rank in (("A", A, 3), ("Wa", Wa, 3), ("Wo", Wo, 2), ("r0", r0, 2)):
        _check("ring_rnn", name, tensor, rank, A)
    B, T, N = A.shape[0], A.shape[1], r0.shape[1]
    empty = lambda *size: A.new_empty(size, dtype=_state_dtype(A))  # noqa: E731
    saved = empty(0)
    if save:
        saved = empty(T if checkpoint == 0 else (T + checkpoint - 1) // checkpoint, B, N)
    angle, amplitude = (empty(B, T), empty(B, T)) if readout else (empty(0), empty(0))
    return A.new_empty((B, T, N)), empty(B, N), saved, angle, amplitude


@torch.library.register_fake("annulus::ring_rnn_backward")
def _(dout, dh_n, out, saved, A, Wa, Wo, r0, J0_tensor, J1_tensor, alpha_tensor, drive, reset_state, reset, mask, J0, J1,
      alpha, activation, precision, checkpoint, needed):
    inputs = (A, Wa, Wo, r0, J0_tensor, J1_tensor, alpha_tensor, drive, reset_state)
    return [x.new_empty(x.shape) for i, x in enumerate(inputs) if needed >> i & 1]


@torch.library.register_fake("annulus::ring_readout")
def _(states):
    _check("ring_readout", "states", states, 3, states)
    return tuple(states.new_empty(states.shape[:2], dtype=_state_dtype(states)) for _ in range(2))


@torch.library.register_fake("annulus::ring_readout_backward")
def _(dangle, damplitude, states):
    return states.new_empty(states.shape)


# Autograd

_DIFFERENTIABLE = 9  # the first so many inputs
_INPUTS = 20


def _setup(ctx, inputs, output):
    out, _, saved, angle, amplitude = output
    *_, packed, save, readout = inputs
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*((saved,) if readout else (saved, angle, amplitude)))
    ctx.save_for_backward(*inputs[:11], out, saved if save else None, packed)
    ctx.options = inputs[11:17]


def _backward(ctx, dout, dh_n, dsaved, dangle, damplitude):
    return _gradients(ctx, dout, dh_n, dangle, damplitude) + (None,) * (_INPUTS - _DIFFERENTIABLE)


def _gradients(ctx, dout, dh_n, dangle, damplitude):
    """Of the differentiable inputs, None for those that need none."""
    if dout is None and dh_n is None and dangle is None and damplitude is None:
        return (None,) * _DIFFERENTIABLE
    *inputs, out, saved, packed = ctx.saved_tensors
    needs = ctx.needs_input_grad[:_DIFFERENTIABLE]
    needed = sum(1 << i for i, need in enumerate(needs) if need)
    try:
        if dangle is not None or damplitude is not None:
            dstates = call_backward(ops.ring_readout_backward.default, dangle, damplitude, out)
            dout = dstates if dout is None else dout + dstates
        if saved is None:
            saved = call_backward(ops.ring_rnn.default, *inputs, *ctx.options, packed, True, False)[2]
        gradients = iter(
            call_backward(ops.ring_rnn_backward.default, dout, dh_n, out, saved, *inputs, *ctx.options, needed)
        )
    except RuntimeError as e:
        raise typed(e) from None
    return tuple(next(gradients) if need else None for need in needs)


class _RingRnn(torch.autograd.Function):
    """The same formulas in eager mode, where every argument and output of a node costs time: the options are one
    argument, and what nobody sees is no output."""

    @staticmethod
    def forward(ctx, *inputs):
        *tensors, options = inputs
        out, h_n, saved, angle, amplitude = below_autograd(ops.ring_rnn.default, *tensors, *options)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, *options[:2], out, saved, options[8])
        ctx.options = options[2:8]
        return (out, h_n, angle, amplitude) if options[10] else (out, h_n)

    @staticmethod
    def backward(ctx, dout, dh_n, dangle=None, damplitude=None):
        return _gradients(ctx, dout, dh_n, dangle, damplitude) + (None,)


def _readout_setup(ctx, inputs, output):
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(inputs[0])


def _readout_backward(ctx, dangle, damplitude):
    if dangle is None and damplitude is None:
        return None
    (states,) = ctx.saved_tensors
    try:
        return call_backward(ops.ring_readout_backward.default, dangle, damplitude, states)
    except RuntimeError as e:
        raise typed(e) from None


register_formulas(ops.ring_rnn.default, _setup, _backward)
_Readout = differentiable(ops.ring_readout.default, _readout_setup, _readout_backward)
for _op in (ops.ring_rnn_backward, ops.ring_readout_backward):
    refuse_double_backward(_op.default)
