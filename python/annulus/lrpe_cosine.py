"""LRPE-cosine and its rotating sibling (RoPE): multi-axis relative positional encoding with exact phases.

The C++ library checks every argument; Python only routes. Outputs keep x's order of heads and tokens in memory, so a
transposed (B, L, H, D) view goes through without a copy in either direction.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ._library import ops
from ._operator import (
    Operator, are_transforms_active, below_autograd, call_backward, fake, needs_autograd, plain_op, refuse_tangents,
)
from ._overlap import innermost, require_apart
from .errors import InvalidArgument, require, require_size, unusual

Shape = Sequence[int] | int | None


def lrpe_cosine(
    x: Tensor, theta: Tensor, shape: Shape = None, *, prefix: int = 0, activation: str = "none", softmax_dim: int = -1,
    offset: int | Tensor = 0, position_ids: Tensor | None = None, out: Tensor | None = None,
) -> Tensor:
    """Relative positions as phases, y = [f(x) cos(phi), f(x) sin(phi)], of which dot products see only differences:

        phi[h,t,c] = s_{1 + c div E} * theta[h, c mod E]     s = grid position of token t >= prefix, row-major over `shape`

    x (B, H, L, D) -> y (B, H, L, 2D), L = prefix + n1 * ... * nm.

    theta (H, E), or (1, E) or (E,) for all heads: radians per unit of position, float32 or x's dtype; m * E >= D >= E, every
    axis longer than 1 owns columns.
    shape: (n1..nm), 1 <= m <= 4, or n, or by default (L - prefix,).  prefix: leading tokens without a position (phase 0).
    activation f: none | relu | sigmoid | silu | softmax (softmax_dim -1: features of a token, -2: tokens of a column).
    offset: int or integer tensor, () or (B,), 1-D shapes only: token t >= prefix has position offset + t - prefix.
    position_ids, in place of shape, prefix and offset: integer tensor (L,), (B or 1, L), or (B or 1, L, m) for m axes that
    all own columns. One row where sequences are alike is faster than B equal ones. See `packed_positions` for
    sequences packed one after the other; softmax over tokens does not know their ends.
    out: y's memory, of any strides, for inference: the pages of a large fresh y may cost a CPU more than its values.
    Under autocast x is taken as it comes and theta in float32.
    Gradients: x, theta.  x is saved for backward only where an activation or theta's gradient needs it.

    >>> y = lrpe_cosine(torch.ones(1, 1, 4, 2), torch.tensor([[0.0, math.pi]]))  # column 1 turns half around a token
    >>> y[0, 0, :, 1].round()
    tensor([ 1., -1.,  1., -1.])
    """
    shape, *positions = _positions("lrpe_cosine", x, shape, prefix, offset, position_ids)
    return _lrpe_cosine(x, theta, shape, prefix, activation, softmax_dim, *positions, out=out)


def lrpe_cosine_qk(
    q: Tensor, k: Tensor, theta: Tensor, shape: Shape = None, *, prefix: int = 0, activation: str = "none",
    softmax_dim: int = -1, offset: int | Tensor = 0, position_ids: Tensor | None = None, out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """lrpe_cosine of queries (B, Hq, L, D) and keys (B, Hk, L, D) in one launch: returns (q2, k2), 2D columns wide.

    theta has a row per head of the smaller count, which divides the larger, and heads of one GQA group share a row; or one in
    all. out: (q2, k2), for inference. Under autocast q and k are taken in the wider dtype of the two. Gradients: q, k, theta.

    >>> q2, k2 = lrpe_cosine_qk(torch.rand(1, 8, 6, 4), torch.rand(1, 2, 6, 4), torch.rand(2, 2), (2, 3))  # a grid
    >>> q2.shape, k2.shape
    (torch.Size([1, 8, 6, 8]), torch.Size([1, 2, 6, 8]))
    """
    shape, *positions = _positions("lrpe_cosine_qk", q, shape, prefix, offset, position_ids)
    return _lrpe_cosine_qk(q, k, theta, shape, prefix, activation, softmax_dim, *positions, out=out)


def lrpe_rotate(
    x: Tensor, theta: Tensor, shape: Shape = None, *, prefix: int = 0, interleaved: bool = False, offset: int | Tensor = 0,
    position_ids: Tensor | None = None, out: Tensor | None = None,
) -> Tensor:
    """The rotating form (RoPE): pairs of columns turned by lrpe_cosine's phases,

        y1 = x1 cos(phi) - x2 sin(phi)    y2 = x1 sin(phi) + x2 cos(phi)

    x (B, H, L, D) -> y (B, H, L, D), D even, E <= D / 2; arguments as lrpe_cosine. R = min(m * E, D / 2) pairs turn: columns
    (c, c + R), or (2c, 2c + 1) when interleaved. Columns from 2R on pass through as they are (partial rotary), bit for bit.
    Gradients: x, theta.

    >>> theta = 10000.0 ** (-torch.arange(32) / 32)
    >>> lrpe_rotate(torch.rand(2, 12, 1, 64), theta, offset=1000).shape  # decoding token 1000
    torch.Size([2, 12, 1, 64])
    """
    shape, *positions = _positions("lrpe_rotate", x, shape, prefix, offset, position_ids)
    return _lrpe_rotate(x, theta, shape, prefix, interleaved, *positions, out=out)


def lrpe_rotate_qk(
    q: Tensor, k: Tensor, theta: Tensor, shape: Shape = None, *, prefix: int = 0, interleaved: bool = False,
    offset: int | Tensor = 0, position_ids: Tensor | None = None, out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """lrpe_rotate of queries (B, Hq, L, D) and keys (B, Hk, L, D) in one launch, with the theta and `out` of lrpe_cosine_qk:

        y1 = x1 cos(phi) - x2 sin(phi)    y2 = x1 sin(phi) + x2 cos(phi)    for x = q and x = k

    Partial rotary takes one more launch on CUDA, which copies the columns that pass through (lrpe_rotate_qk_ has nothing to
    copy). Under autocast q and k are taken in the wider dtype of the two. Gradients: q, k, theta.

    >>> q, k = lrpe_rotate_qk(torch.rand(1, 8, 6, 64), torch.rand(1, 2, 6, 64), 0.1 ** torch.arange(8))  # 16 columns turn
    >>> q.shape, k.shape
    (torch.Size([1, 8, 6, 64]), torch.Size([1, 2, 6, 64]))
    """
    shape, *positions = _positions("lrpe_rotate_qk", q, shape, prefix, offset, position_ids)
    return _lrpe_rotate_qk(q, k, theta, shape, prefix, interleaved, *positions, out=out)


def lrpe_rotate_(
    x: Tensor, theta: Tensor, shape: Shape = None, *, prefix: int = 0, interleaved: bool = False, offset: int | Tensor = 0,
    position_ids: Tensor | None = None,
) -> Tensor:
    """lrpe_rotate over x's own memory; returns x. Columns that pass through are not touched. Gradients: x, theta, as of any
    in-place function of torch.

    >>> x, theta = torch.rand(1, 1, 5, 4), torch.rand(1, 2)
    >>> lrpe_rotate_(x, theta) is x
    True
    """
    shape, *positions = _positions("lrpe_rotate", x, shape, prefix, offset, position_ids)
    return _overwrite(_lrpe_rotate, ops.lrpe_rotate_.default, (x,), theta, shape, prefix, interleaved, *positions)[0]


def lrpe_rotate_qk_(
    q: Tensor, k: Tensor, theta: Tensor, shape: Shape = None, *, prefix: int = 0, interleaved: bool = False,
    offset: int | Tensor = 0, position_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """lrpe_rotate_qk over the memory of q and k, which may be parts of one projection; returns them. Gradients: q, k, theta.

    They may not overlap. Where there are gradients to come it is lrpe_rotate_qk and a copy: in torch a function in place on
    views has one output; and the parts must be slices, since torch lets nobody overwrite those of split, chunk and unbind then.

    >>> qkv = torch.rand(1, 6, 3, 4, 32)  # tokens, what, heads
    >>> q, k, v = qkv.transpose(1, 3).unbind(2)
    >>> lrpe_rotate_qk_(q, k, torch.rand(16))[0] is q
    True
    """
    shape, *positions = _positions("lrpe_rotate_qk", q, shape, prefix, offset, position_ids)
    return _overwrite(_lrpe_rotate_qk, ops.lrpe_rotate_qk_.default, (q, k), theta, shape, prefix, interleaved, *positions)


def _overwrite(operator, op, xs, theta, *rest):
    """The operator, by its op in place, on the memory of xs themselves, which keep their dtype under autocast; returns them."""
    (theta,) = operator.cast((*xs, theta))[len(xs) :]
    learns = needs_autograd(*xs, theta)
    try:
        if are_transforms_active():
            return _copy_over(operator, xs, theta, rest, keep=True)
        if torch.compiler.is_compiling():
            if not learns:
                op(*xs, theta, *rest)  # the compiler sees the mutation in the schema
                return xs
            # The mutating op has no gradient: functional form plus copy. theta's gradient needs the x of before.
            return _copy_over(operator, xs, theta, rest, keep=needs_autograd(theta))
        refuse_tangents(operator.name, *xs, theta)
        if learns and all(isinstance(x, torch.Tensor) for x in xs):
            _require_writable(operator, xs)
            if len(xs) == 1:
                return (_RotateInPlace.apply(*xs, theta, rest),)
            return _copy_over(operator, xs, theta, rest, keep=needs_autograd(theta))
        below_autograd(op, *xs, theta, *rest)
        torch.autograd.graph.increment_version(xs)  # so that a graph that saved the old values notices
        return xs
    except InvalidArgument as e:
        raise operator.spoken(e) from None


def _copy_over(operator, xs, theta, rest, keep):
    """By the functional form; `keep`: what it saves must not be overwritten."""
    for name, x in zip(operator.arguments._fields, xs):  # which autocast would change in what is not in place
        require(x.dtype == xs[0].dtype, operator.name, name, f"be {xs[0].dtype}, as what comes before it,", x.dtype)
    if len(xs) == 2:
        (first, a), (second, b) = zip(operator.arguments._fields, xs)
        require_apart(operator.name, first, a, second, b)
    ys = operator(*[x.clone() if keep else x for x in xs], theta, *rest)
    for x, y in zip(xs, (ys,) if len(xs) == 1 else ys):
        inner = x if torch.compiler.is_compiling() else innermost(x)
        inner.is_leaf  # noqa: B018: until asked, a view does not know that the write before this one gave it a gradient
        x.copy_(y)
    return xs


def _require_writable(operator, xs):
    """What torch's own rules for writing in place ask of every x, before the first is written."""
    for name, x in zip(operator.arguments._fields, xs):
        for where, t in ((f"{name} must not be", x), (f"{name} must not be a view of", x._base)):
            if t is not None and t.requires_grad and t.is_leaf:
                raise InvalidArgument(
                    f"[{operator.name}] {where} a leaf that requires grad, since its values are overwritten; "
                    f"use {operator.name}, or {name}.detach()"
                )
        why = "an inference tensor" if x.is_inference() else None
        if x._base is not None and _creation_of(x) in _UNWRITABLE:
            why = "a view of several that one function made, as split and unbind do, or of torch.no_grad()"
        if why is not None:
            raise InvalidArgument(
                f"[{operator.name}] {name} must be what torch lets be overwritten where there are gradients but is {why}; "
                f"use {operator.name}, or slices"
            )


# How torch made a view; where a later torch does not say so, its own error comes later.
_creation_of = getattr(torch._C._autograd, "_get_creation_meta", lambda x: None)
_UNWRITABLE = [getattr(getattr(torch._C._autograd, "CreationMeta", None), kind, ...)
               for kind in ("MULTI_OUTPUT_NODE", "NO_GRAD_MODE", "INFERENCE_MODE", "IN_CUSTOM_FUNCTION")]


def _positions(op, x, shape, prefix, offset, position_ids):
    """What the ops take of what a user may say: shape, offset, offsets, position_ids (B or 1, L, m)."""
    offset, offsets = (0, offset) if isinstance(offset, torch.Tensor) else (offset, None)
    tokens = isinstance(x, torch.Tensor) and not x.is_nested and x.dim() == 4  # else the op refuses x
    if isinstance(shape, _INTEGER):
        shape = (shape,)
    elif shape is None:
        shape = (x.shape[2] - prefix,) if position_ids is None and tokens and isinstance(prefix, _INTEGER) else ()
    if tokens and offsets is not None and offsets.dim() == 0:
        offsets = offsets.expand(x.shape[0])
    if position_ids is None:
        return shape, offset, offsets, None
    if not isinstance(position_ids, torch.Tensor):
        raise InvalidArgument(f"[{op}] position_ids must be a tensor but is {type(position_ids).__name__}")
    if position_ids.dim() not in (1, 2, 3):
        raise InvalidArgument(f"[{op}] position_ids must have 1 to 3 dimensions but has {position_ids.dim()}")
    position_ids = position_ids[None] if position_ids.dim() == 1 else position_ids
    return shape, offset, offsets, position_ids[..., None] if position_ids.dim() == 2 else position_ids


_INTEGER = (int, torch.SymInt)


def packed_positions(cu_seqlens: Tensor, total: int) -> Tensor:
    """position_ids (total,) of sequences packed one after the other along the tokens of a batch of one.

    cu_seqlens (sequences + 1,), from 0 on: where each begins and the last ends, as flash-attn has it: 0, n1, n1 + n2, ...
    Its values are not looked at (that would wait for the device): fit for CUDA graphs and torch.compile. Tokens
    from cu_seqlens[-1] on are one more sequence. Gradients: none.

    >>> packed_positions(torch.tensor([0, 3, 5]), 6)
    tensor([0, 1, 2, 0, 1, 0])
    """
    what = unusual(cu_seqlens) or cu_seqlens.dtype
    if what not in (torch.int32, torch.int64):
        raise InvalidArgument(f"[packed_positions] cu_seqlens must be a tensor of int32 or int64 but is {what}")
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] == 0:
        raise InvalidArgument(
            f"[packed_positions] cu_seqlens must have shape (sequences + 1,) but has {tuple(cu_seqlens.shape)}"
        )
    require_size("packed_positions", "total", total)
    token = torch.arange(total, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    sequence = torch.searchsorted(cu_seqlens, token, right=True) - 1
    return token - cu_seqlens[sequence]


# Fake kernels: shapes, dtypes and strides without data, for torch.compile and torch.export


def _token_major(x):
    return x.stride(1) < x.stride(2)


def _empty(like, columns, token_major):
    B, H, L = like.shape[:3]
    return like.new_empty((B, L, H, columns)).transpose(1, 2) if token_major else like.new_empty((B, H, L, columns))


def _encoded(x, factor):
    return _empty(x, factor * x.shape[3], _token_major(x))


@fake("lrpe_cosine", x=4)
def _(a):
    return _encoded(a.x, 2)


@fake("lrpe_cosine_qk", q=4, k=4)
def _(a):
    return _encoded(a.q, 2), _encoded(a.k, 2)


@fake("lrpe_rotate", x=4)
def _(a):
    return _encoded(a.x, 1)


@fake("lrpe_rotate_qk", q=4, k=4)
def _(a):
    return _encoded(a.q, 1), _encoded(a.k, 1)


fake("lrpe_cosine_out", x=4)(lambda a: None)
fake("lrpe_cosine_qk_out", q=4, k=4)(lambda a: None)
fake("lrpe_rotate_out", x=4)(lambda a: None)
fake("lrpe_rotate_", x=4)(lambda a: None)
fake("lrpe_rotate_qk_out", q=4, k=4)(lambda a: None)
fake("lrpe_rotate_qk_", q=4, k=4)(lambda a: None)


@fake("_lrpe_dx")
def _(a):
    form, token_major = a.call[:2]
    return _empty(a.dy, a.dy.shape[3] // 2 if form == _COSINE else a.dy.shape[3], token_major)


def _empty_gradient(b, name):
    """x need not be there: its gradient is shaped as dy."""
    if name == "theta":
        return b.theta.new_empty(b.theta.shape)
    which = "" if name == "x" else name
    dy = getattr(b, "dy" + which)
    rotates = hasattr(b, "interleaved")
    return _empty(dy, dy.shape[3] if rotates else dy.shape[3] // 2, getattr(b, (which and which + "_") + "token_major"))


# Autograd

_COSINE, _ROTATE, _INTERLEAVED = range(3)  # forms of _lrpe_dx
_lrpe_dx = plain_op("_lrpe_dx", dict(dy=0, dx=0))


def _keep(ctx, a, outputs):
    """x where theta's gradient or an activation needs it; and the call of _lrpe_dx, where dx needs nothing but theta.

    A short kernel is over before a node of autograd is: at 1024 tokens the time of a backward is the time its node takes
    on the host. What costs there is the number of arguments of an op (0.5 us each) and the context manager that skips
    its autograd kernel (1.5 us), so the plainest backward is an op of few arguments that autograd does not see at all.
    """
    rotates = hasattr(a, "interleaved")
    needs_x = ctx.needs_input_grad[1] or not (rotates or a.activation == "none")
    token_major = _token_major(a.x)
    ctx.plain = None
    if a.offsets is None and a.position_ids is None and not needs_x:
        form = _COSINE if not rotates else _INTERLEAVED if a.interleaved else _ROTATE
        ctx.plain = (form, token_major, a.prefix, a.offset, *a.shape)
    return (a.x if needs_x else None), token_major


def _quick(ctx, dy):
    if ctx.plain is None or dy is None or torch.is_grad_enabled():
        return None
    return _lrpe_dx(dy, ctx.saved_tensors[1], ctx.plain), None, None


def _keep_qk(ctx, a, outputs):
    needs_inputs = ctx.needs_input_grad[2] or getattr(a, "activation", "none") != "none"
    return *((a.q, a.k) if needs_inputs else (None, None)), _token_major(a.q), _token_major(a.k)


class _RotateInPlace(torch.autograd.Function):
    """x is gone after the forward, and not needed: a rotation turns the gradient of the phase, dy . J y, with it.

    16 bits of y are too few for that (dtheta would be 2e-3 off): where theta has a gradient, x is kept as a copy.
    """

    @staticmethod
    def forward(ctx, x, theta, rest):
        ctx.keeps_x = ctx.needs_input_grad[1] and x.element_size() == 2
        kept = x.clone() if ctx.keeps_x else x
        below_autograd(ops.lrpe_rotate_.default, x, theta, *rest)
        ctx.mark_dirty(x)
        ctx.set_materialize_grads(False)
        *ctx.options, offsets, position_ids = rest
        ctx.save_for_backward(kept if ctx.needs_input_grad[1] else None, theta, offsets, position_ids)
        ctx.token_major = _token_major(x)
        return x

    @staticmethod
    def backward(ctx, dy):
        need_dx, need_dtheta, _ = ctx.needs_input_grad
        dx = dtheta = None
        if dy is None:
            return None, None, None
        kept, theta, *positions = ctx.saved_tensors
        rest = (*ctx.options, *positions, ctx.token_major)
        if need_dx:
            (dx,) = call_backward("lrpe_rotate_backward", dy, None, theta, *rest, 0b01)
        if need_dtheta:  # of y, if that is what was kept: with theta = 0 the backward's x is its y
            turned = theta if ctx.keeps_x else torch.zeros_like(theta)
            (dtheta,) = call_backward("lrpe_rotate_backward", dy, kept, turned, *rest, 0b10)
        return dx, dtheta, None


_samples = dict.fromkeys(("x", "q", "k", "offsets", "position_ids", "y", "yq", "yk"), 0)
_shared = dict(empty=_empty_gradient, spoken={"offsets": "offset"}, samples=_samples)
_one = dict(keep=_keep, kept=("x", "token_major"), quick=_quick, autocast={"theta": "fp32"}, **_shared)
_lrpe_cosine, _lrpe_rotate = Operator("lrpe_cosine", **_one), Operator("lrpe_rotate", **_one)
_two = dict(keep=_keep_qk, kept=("q", "k", "q_token_major", "k_token_major"),
            autocast={"q": "promote", "k": "promote", "theta": "fp32"}, **_shared)
_lrpe_cosine_qk, _lrpe_rotate_qk = Operator("lrpe_cosine_qk", **_two), Operator("lrpe_rotate_qk", **_two)


from . import _modules_lrpe_cosine  # noqa: E402,F401  (for nn; it needs the functions above)
