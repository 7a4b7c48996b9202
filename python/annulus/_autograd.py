"""What every operator's autograd shares.

torch.library's registration serves torch.compile, torch.export and direct calls of torch.ops; in eager mode it costs
50 us a call (10 without gradients). There the same formulas run in a plain autograd.Function (15 us).

A short kernel is over before that: at 1024 tokens the time of a backward is the time its node takes on the host. What
costs there is the number of arguments of an op (0.5 us each) and the context manager that skips its autograd kernel
(1.5 us), so an operator may have a third way, for its plainest backward: an op of few arguments that autograd does not
see at all (plain_op).
"""

import contextlib

import torch
from torch.autograd import forward_ad

from .errors import NotSupported

# Skips the op's own autograd kernel where autograd is already dealt with. Without it results are the same, later.
_BelowAutograd = getattr(torch._C, "_AutoDispatchBelowAutograd", contextlib.nullcontext)

# Whether a transform of torch.func is running.
are_transforms_active = torch._C._are_functorch_transforms_active

_below = torch.library.Library("annulus", "IMPL")  # lives as long as what it registers


def plain_op(op):
    """The quickest way to call an op that autograd passes by: for use where no gradient is wanted of it."""
    _below.impl(op._schema.name, torch.library.fallthrough_kernel, "Autograd")
    return getattr(op, "_op", op)  # the function that OpOverload.__call__ calls


def needs_autograd(*tensors):
    if torch.is_grad_enabled():
        for t in tensors:
            if getattr(t, "requires_grad", False):  # what is no tensor is refused by the op
                return True
    return False


def call(op, function, tensors, arguments):
    """Calls a forward op the quickest way; `tensors` are the arguments that may want a gradient."""
    if torch.compiler.is_compiling():
        return op(*arguments)
    refuse_tangents(op, *tensors)
    if are_transforms_active():
        return call_transformed(op, *arguments)
    if needs_autograd(*tensors):
        return function.apply(*arguments)
    return below_autograd(op, *arguments)


def below_autograd(op, *arguments):
    with _BelowAutograd():
        return op(*arguments)


def call_backward(op, *arguments):
    """Calls a backward op; with create_graph=True through autograd, where refuse_double_backward waits."""
    if not torch.is_grad_enabled():
        return below_autograd(op, *arguments)
    if are_transforms_active() and not torch.compiler.is_compiling():
        return call_transformed(op, *arguments)
    return op(*arguments)


_transformable = {}  # op -> its formulas in the form that torch.func asks for


def call_transformed(op, *arguments):
    """Calls an op inside torch.func's grad, vjp, jacrev or vmap."""
    return _transformable[op].apply(*arguments)


def register_formulas(op, setup_context, backward):
    """Registers an op's gradient: with the op, and for torch.func, which takes no op's own."""
    torch.library.register_autograd(op, backward, setup_context=setup_context)

    def forward(*inputs):
        output = below_autograd(op, *inputs)
        return tuple(output) if isinstance(output, list) else output  # a list's tensors would have no gradient

    _transformable[op] = _function(
        op, forward=forward, setup_context=setup_context, backward=backward, generate_vmap_rule=True
    )


def differentiable(op, setup_context, backward, eager_backward=None):
    """Registers the formulas with the op and returns the eager autograd.Function of the same formulas.

    eager_backward takes the place of backward in eager mode.
    """
    register_formulas(op, setup_context, backward)

    # Not the form for torch.func, which takes 64 us a call where this takes 26.
    def forward(ctx, *inputs):
        output = below_autograd(op, *inputs)
        setup_context(ctx, inputs, output)
        return output

    return _function(op, forward=forward, backward=eager_backward or backward)


def _function(op, **members):
    return type(
        _name(op), (torch.autograd.Function,), {k: staticmethod(v) if callable(v) else v for k, v in members.items()}
    )


def _name(op):
    return op._schema.name.split("::")[1]


def refuse_double_backward(op):
    """A second derivative raises instead of being silently zero."""
    name = _name(op).removesuffix("_backward")

    def setup_context(ctx, inputs, output):
        pass

    def backward(ctx, *gradients):
        raise NotSupported(f"[{name}] has no second derivative: backward through its backward is not available")

    register_formulas(op, setup_context, backward)


def refuse_tangents(op, *tensors):
    """A forward-mode derivative raises instead of being silently zero."""
    if forward_ad._current_level < 0:
        return
    for t in tensors:
        if isinstance(t, torch.Tensor) and forward_ad.unpack_dual(t).tangent is not None:
            raise NotSupported(
                f"[{_name(op)}] has no forward-mode derivative: use torch.func.vjp, grad or jacrev"
            )
