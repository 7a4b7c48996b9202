"""LRPE-cosine and its rotating sibling (RoPE): multi-axis relative positional encoding with exact phases.

    phi[h,t,c] = s_{1 + c div E} * theta[h, c mod E]     s = grid position of token t >= prefix, row-major over `shape`,
                                                         or position_ids[b, t]
    cosine:  y = [f(x) cos(phi), f(x) sin(phi)]          rotate:  pairs of columns turned by phi

The C++ library checks every argument; Python only routes. Outputs keep x's order of heads and tokens in memory, so a
transposed (B, L, H, D) view goes through without a copy in either direction.
"""

import torch

from ._autograd import (
    are_transforms_active, below_autograd, call, call_backward, call_transformed, differentiable, needs_autograd,
    plain_op, refuse_double_backward, refuse_tangents,
)
from ._library import ops
from .errors import InvalidArgument, typed


def lrpe_cosine(x, theta, shape=None, *, prefix=0, activation="none", softmax_dim=-1, offset=0, position_ids=None):
    """Encodes x (B, H, L, D) into y (B, H, L, 2D), L = prefix + n1 * ... * nm.

    theta (H, E): radians per unit of position, float32 or x's dtype; m * E >= D, every axis longer than 1 owns columns.
    shape: (n1..nm), 1 <= m <= 4.  prefix: leading tokens without a position (phase 0).
    activation f: none | relu | sigmoid | silu | softmax (softmax_dim -1: features of a token, -2: tokens of a column).
    offset: int or (B,) integer tensor, 1-D shapes only: token t >= prefix has position offset + t - prefix.
    position_ids, in place of shape, prefix and offset: integer tensor (L,), (B or 1, L), or (B or 1, L, m) for m axes that
    all own columns. One row where sequences are alike is faster than B equal ones. See `packed_positions` for
    sequences packed one after the other; softmax over tokens does not know their ends.
    Gradients: x, theta.  x is saved for backward only where an activation or theta's gradient needs it.
    """
    offset, offsets = _split_offset(offset)
    shape, position_ids = _grid("lrpe_cosine", shape, position_ids), _ids("lrpe_cosine", position_ids)
    arguments = (x, theta, shape, prefix, activation, softmax_dim, offset, offsets, position_ids)
    try:
        return call(ops.lrpe_cosine.default, _Cosine, (x, theta), arguments)
    except RuntimeError as e:
        raise _error(e) from None


def lrpe_cosine_qk(
    q, k, theta, shape=None, *, prefix=0, activation="none", softmax_dim=-1, offset=0, position_ids=None
):
    """lrpe_cosine of queries (B, Hq, L, D) and keys (B, Hk, L, D) in one launch: returns (q2, k2).

    theta has a row per head of the smaller count, which divides the larger; heads of one GQA group share a row.
    """
    offset, offsets = _split_offset(offset)
    shape, position_ids = _grid("lrpe_cosine_qk", shape, position_ids), _ids("lrpe_cosine_qk", position_ids)
    arguments = (q, k, theta, shape, prefix, activation, softmax_dim, offset, offsets, position_ids)
    try:
        return call(ops.lrpe_cosine_qk.default, _CosineQk, (q, k, theta), arguments)
    except RuntimeError as e:
        raise _error(e) from None


def lrpe_rotate(x, theta, shape=None, *, prefix=0, interleaved=False, offset=0, position_ids=None):
    """The rotating form (RoPE): y (B, H, L, D), D even, m * E >= D / 2.

    Columns (c, c + D/2) form a pair, or (2c, 2c + 1) when interleaved. Gradients: x, theta.
    """
    offset, offsets = _split_offset(offset)
    shape, position_ids = _grid("lrpe_rotate", shape, position_ids), _ids("lrpe_rotate", position_ids)
    arguments = (x, theta, shape, prefix, interleaved, offset, offsets, position_ids)
    try:
        return call(ops.lrpe_rotate.default, _Rotate, (x, theta), arguments)
    except RuntimeError as e:
        raise _error(e) from None


def lrpe_rotate_(x, theta, shape=None, *, prefix=0, interleaved=False, offset=0, position_ids=None):
    """lrpe_rotate over x's own memory; returns x. Differentiable, as any in-place function of torch."""
    offset, offsets = _split_offset(offset)
    shape, position_ids = _grid("lrpe_rotate", shape, position_ids), _ids("lrpe_rotate", position_ids)
    arguments = (x, theta, shape, prefix, interleaved, offset, offsets, position_ids)
    try:
        refuse_tangents(ops.lrpe_rotate.default, x, theta)
        if torch.compiler.is_compiling():
            if not needs_autograd(x, theta):
                ops.lrpe_rotate_.default(*arguments)  # the compiler sees the mutation in the schema
                return x
            # The mutating op has no gradient: functional form plus copy. theta's gradient needs the x of before.
            source = x.clone() if theta.requires_grad else x
            return x.copy_(ops.lrpe_rotate.default(source, *arguments[1:]))
        if are_transforms_active():
            return x.copy_(call_transformed(ops.lrpe_rotate.default, x.clone(), *arguments[1:]))
        if needs_autograd(x, theta):
            if x.requires_grad and x.is_leaf:
                raise InvalidArgument(
                    "[lrpe_rotate] x must not be a leaf that requires grad, since its values are overwritten; "
                    "use lrpe_rotate, or x.detach()"
                )
            return _RotateInPlace.apply(*arguments)
        below_autograd(ops.lrpe_rotate_.default, *arguments)
        torch.autograd.graph.increment_version(x)  # so that a graph that saved the old values notices
        return x
    except RuntimeError as e:
        raise _error(e) from None


def _error(e):
    """The typed exception of a call of ours, in which the op's `offsets` is the tensor given as `offset`."""
    e = typed(e)
    e.args = tuple(a.replace("] offsets must", "] offset must") if isinstance(a, str) else a for a in e.args)
    return e


def _split_offset(offset):
    """(int part, tensor part) of an offset argument."""
    return (0, offset) if isinstance(offset, torch.Tensor) else (offset, None)


def _grid(op, shape, position_ids):
    if isinstance(shape, (tuple, list)):
        return shape
    if shape is None and position_ids is not None:
        return ()
    raise InvalidArgument(
        f"[{op}] shape must be a tuple of 1 to 4 integers, unless position_ids is given, but is {shape!r}"
    )


def _ids(op, position_ids):
    """(B or 1, L, m) of what a user may give for one axis."""
    if position_ids is None:
        return None
    if not isinstance(position_ids, torch.Tensor):
        raise InvalidArgument(f"[{op}] position_ids must be a tensor but is {type(position_ids).__name__}")
    if position_ids.dim() not in (1, 2, 3):
        raise InvalidArgument(f"[{op}] position_ids must have 1 to 3 dimensions but has {position_ids.dim()}")
    if position_ids.dim() == 2:
        return position_ids[..., None]
    return position_ids[None, :, None] if position_ids.dim() == 1 else position_ids


def packed_positions(cu_seqlens, total):
    """position_ids (total,) of sequences packed one after the other along the tokens of a batch of one.

    cu_seqlens (sequences + 1,), from 0 on: where each begins and the last ends, as flash-attn has it: 0, n1, n1 + n2, ...
    Its values are not looked at (that would wait for the device): fit for CUDA graphs and torch.compile. Tokens from cu_seqlens[-1] on are one more sequence.
    """
    if not isinstance(cu_seqlens, torch.Tensor) or cu_seqlens.dtype not in (torch.int32, torch.int64):
        what = cu_seqlens.dtype if isinstance(cu_seqlens, torch.Tensor) else type(cu_seqlens).__name__
        raise InvalidArgument(f"[packed_positions] cu_seqlens must be a tensor of int32 or int64 but is {what}")
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] == 0:
        raise InvalidArgument(
            f"[packed_positions] cu_seqlens must have shape (sequences + 1,) but has {tuple(cu_seqlens.shape)}"
        )
    token = torch.arange(total, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    sequence = torch.searchsorted(cu_seqlens, token, right=True) - 1
    return token - cu_seqlens[sequence]


# Fake kernels: shapes, dtypes and strides without data, for torch.compile and torch.export


def _token_major(x):
    return x.stride(1) < x.stride(2)


def _empty(like, H, width, token_major):
    B, L = like.shape[0], like.shape[2]
    if token_major:
        return like.new_empty((B, L, H, width)).transpose(1, 2)
    return like.new_empty((B, H, L, width))


def _check(op, name, x, **others):
    """The rules a fake kernel cannot go on without; all others are C++'s."""
    if x.dim() != 4:
        raise InvalidArgument(f"[{op}] {name} must have 4 dimensions but has shape {tuple(x.shape)}")
    for other, t in others.items():  # a meta tensor among real ones leads here, too
        if t is not None and t.device != x.device:
            raise InvalidArgument(f"[{op}] {other} must be on the device of {name}, {x.device}, but is on {t.device}")


def _encoded(op, name, x, factor, **others):
    _check(op, name, x, **others)
    return _empty(x, x.shape[1], factor * x.shape[3], _token_major(x))


def _gradient(like, needed, token_major, columns):
    return _empty(like, like.shape[1], columns, token_major) if needed else like.new_empty((0,))


def _theta_gradient(theta, needed):
    return theta.new_empty(theta.shape) if needed else theta.new_empty((0,))


@torch.library.register_fake("annulus::lrpe_cosine")
def _(x, theta, shape, prefix, activation, softmax_dim, offset, offsets, position_ids):
    return _encoded("lrpe_cosine", "x", x, 2, theta=theta, offset=offsets, position_ids=position_ids)


@torch.library.register_fake("annulus::lrpe_cosine_backward")
def _(dy, x, theta, shape, prefix, activation, softmax_dim, offset, offsets, position_ids, token_major, need_dx,
      need_dtheta):
    return _gradient(dy, need_dx, token_major, dy.shape[3] // 2), _theta_gradient(theta, need_dtheta)


@torch.library.register_fake("annulus::lrpe_cosine_qk")
def _(q, k, theta, shape, prefix, activation, softmax_dim, offset, offsets, position_ids):
    op = "lrpe_cosine_qk"
    return (
        _encoded(op, "q", q, 2, k=k, theta=theta, offset=offsets, position_ids=position_ids),
        _encoded(op, "k", k, 2),
    )


@torch.library.register_fake("annulus::lrpe_cosine_qk_backward")
def _(dyq, dyk, q, k, theta, shape, prefix, activation, softmax_dim, offset, offsets, position_ids, q_token_major,
      k_token_major, need_dq, need_dk, need_dtheta):
    return (
        _gradient(dyq, need_dq, q_token_major, dyq.shape[3] // 2),
        _gradient(dyk, need_dk, k_token_major, dyk.shape[3] // 2),
        _theta_gradient(theta, need_dtheta),
    )


@torch.library.register_fake("annulus::lrpe_rotate")
def _(x, theta, shape, prefix, interleaved, offset, offsets, position_ids):
    return _encoded("lrpe_rotate", "x", x, 1, theta=theta, offset=offsets, position_ids=position_ids)


@torch.library.register_fake("annulus::lrpe_rotate_")
def _(x, theta, shape, prefix, interleaved, offset, offsets, position_ids):
    _check("lrpe_rotate", "x", x, theta=theta, offset=offsets, position_ids=position_ids)


@torch.library.register_fake("annulus::lrpe_rotate_backward")
def _(dy, x, theta, shape, prefix, interleaved, offset, offsets, position_ids, token_major, need_dx, need_dtheta):
    return _gradient(dy, need_dx, token_major, dy.shape[3]), _theta_gradient(theta, need_dtheta)


@torch.library.register_fake("annulus::_lrpe_dx")
def _(dy, theta, call):
    form, token_major = call[:2]
    return _gradient(dy, True, token_major, dy.shape[3] // 2 if form == _COSINE else dy.shape[3])


# Autograd

_COSINE, _ROTATE, _INTERLEAVED = range(3)  # forms of _lrpe_dx
_lrpe_dx = plain_op(ops._lrpe_dx.default)


def _cosine_setup(ctx, inputs, output):
    x, theta, shape, prefix, activation, softmax_dim, offset, offsets, position_ids = inputs
    ctx.set_materialize_grads(False)
    needs_x = activation != "none" or ctx.needs_input_grad[1]
    ctx.save_for_backward(x if needs_x else None, theta, offsets, position_ids)
    ctx.options = (shape, prefix, activation, softmax_dim, offset)
    ctx.token_major = _token_major(x)
    plain = offsets is None and position_ids is None and not needs_x
    ctx.plain = (_COSINE, ctx.token_major, prefix, offset, *shape) if plain else None


def _cosine_backward(ctx, dy):
    need_dx, need_dtheta = ctx.needs_input_grad[:2]
    if dy is None:
        return (None,) * 9
    x, theta, *positions = ctx.saved_tensors
    try:
        dx, dtheta = call_backward(
            ops.lrpe_cosine_backward.default, dy, x, theta, *ctx.options, *positions, ctx.token_major, need_dx,
            need_dtheta,
        )
    except RuntimeError as e:
        raise typed(e) from None
    return (dx if need_dx else None, dtheta if need_dtheta else None) + (None,) * 7


def _qk_setup(ctx, inputs, output):
    q, k, theta, shape, prefix, activation, softmax_dim, offset, offsets, position_ids = inputs
    ctx.set_materialize_grads(False)
    needs_inputs = activation != "none" or ctx.needs_input_grad[2]
    ctx.save_for_backward(q if needs_inputs else None, k if needs_inputs else None, theta, offsets, position_ids)
    ctx.options = (shape, prefix, activation, softmax_dim, offset)
    ctx.token_major = (_token_major(q), _token_major(k))
    ctx.shapes = (output[0].shape, output[1].shape)


def _qk_backward(ctx, dyq, dyk):
    if dyq is None and dyk is None:
        return (None,) * 10
    # An output nobody used has gradient 0: one element, expanded, instead of a tensor of zeros.
    dyq = dyk.new_zeros(()).expand(ctx.shapes[0]) if dyq is None else dyq
    dyk = dyq.new_zeros(()).expand(ctx.shapes[1]) if dyk is None else dyk
    needed = ctx.needs_input_grad[:3]
    q, k, theta, *positions = ctx.saved_tensors
    try:
        gradients = call_backward(
            ops.lrpe_cosine_qk_backward.default, dyq, dyk, q, k, theta, *ctx.options, *positions, *ctx.token_major,
            *needed,
        )
    except RuntimeError as e:
        raise typed(e) from None
    return tuple(g if n else None for g, n in zip(gradients, needed)) + (None,) * 7


def _rotate_setup(ctx, inputs, output):
    x, theta, shape, prefix, interleaved, offset, offsets, position_ids = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, theta, offsets, position_ids)
    ctx.options = (shape, prefix, interleaved, offset)
    ctx.token_major = _token_major(x)
    plain = offsets is None and position_ids is None and not ctx.needs_input_grad[1]
    form = _INTERLEAVED if interleaved else _ROTATE
    ctx.plain = (form, ctx.token_major, prefix, offset, *shape) if plain else None


def _rotate_backward(ctx, dy):
    need_dx, need_dtheta = ctx.needs_input_grad[:2]
    if dy is None:
        return (None,) * 8
    x, theta, *positions = ctx.saved_tensors
    try:
        dx, dtheta = call_backward(
            ops.lrpe_rotate_backward.default, dy, x, theta, *ctx.options, *positions, ctx.token_major, need_dx,
            need_dtheta,
        )
    except RuntimeError as e:
        raise typed(e) from None
    return (dx if need_dx else None, dtheta if need_dtheta else None) + (None,) * 6


def _plain_first(backward, inputs):
    """`backward`, with a short cut where only x has a gradient and nothing but theta is needed for it."""
    none = (None,) * (inputs - 1)

    def eager_backward(ctx, dy):
        if ctx.plain is None or dy is None or torch.is_grad_enabled():
            return backward(ctx, dy)
        try:
            return _lrpe_dx(dy, ctx.saved_tensors[1], ctx.plain), *none
        except RuntimeError as e:
            raise typed(e) from None

    return eager_backward


class _RotateInPlace(torch.autograd.Function):
    """x is gone after the forward, and not needed: a rotation turns the gradient of the phase, dy . J y, with it.

    16 bits of y are too few for that (dtheta would be 2e-3 off): where theta has a gradient, x is kept as a copy.
    """

    @staticmethod
    def forward(ctx, x, theta, shape, prefix, interleaved, offset, offsets, position_ids):
        ctx.keeps_x = ctx.needs_input_grad[1] and x.element_size() == 2
        kept = x.clone() if ctx.keeps_x else x
        below_autograd(ops.lrpe_rotate_.default, x, theta, shape, prefix, interleaved, offset, offsets, position_ids)
        ctx.mark_dirty(x)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(kept if ctx.needs_input_grad[1] else None, theta, offsets, position_ids)
        ctx.options = (shape, prefix, interleaved, offset)
        ctx.token_major = _token_major(x)
        return x

    @staticmethod
    def backward(ctx, dy):
        need_dx, need_dtheta = ctx.needs_input_grad[:2]
        if dy is None:
            return (None,) * 8
        kept, theta, *positions = ctx.saved_tensors
        options = (*ctx.options, *positions, ctx.token_major)
        backward = ops.lrpe_rotate_backward.default
        dx = dtheta = None
        try:
            if need_dx:
                dx = call_backward(backward, dy, None, theta, *options, True, False)[0]
            if need_dtheta:  # of y, if that is what was kept: with theta = 0 the backward's x is its y
                turned = theta if ctx.keeps_x else torch.zeros_like(theta)
                dtheta = call_backward(backward, dy, kept, turned, *options, False, True)[1]
        except RuntimeError as e:
            raise typed(e) from None
        return (dx, dtheta) + (None,) * 6


_Cosine = differentiable(ops.lrpe_cosine.default, _cosine_setup, _cosine_backward, _plain_first(_cosine_backward, 9))
_CosineQk = differentiable(ops.lrpe_cosine_qk.default, _qk_setup, _qk_backward)
_Rotate = differentiable(ops.lrpe_rotate.default, _rotate_setup, _rotate_backward, _plain_first(_rotate_backward, 8))
for _op in (ops.lrpe_cosine_backward, ops.lrpe_cosine_qk_backward, ops.lrpe_rotate_backward):
    refuse_double_backward(_op.default)
