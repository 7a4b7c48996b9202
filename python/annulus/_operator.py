"""What every operator shares: its ops' arguments by name, its gradient derived from their schemas, the quickest call.

The schemas that the C++ files register are the only argument lists. Of an operator `f` with a gradient they read

    f(T1..Tn, the rest) -> outputs                        T1..Tn: the leading tensors, those that have a gradient
    f_backward(gradients and saved values, int needed) -> Tensor[]

and an argument of f_backward is, by its name, the gradient of an output ("d" + name), an output, an argument of f, or
something that f's own file keeps. Bit i of `needed` asks for the gradient of the i-th tensor; only those come back.

The op's own autograd kernel serves torch.compile, torch.export, torch.func and direct calls of torch.ops; in eager mode it costs
50 us a call (10 without gradients). There the same formulas run in a plain autograd.Function (15 us), where every
argument and output of a node costs time: what has no gradient is one argument, and what nobody sees is no output.
"""

import collections
import contextlib
import functools
from operator import itemgetter

import torch
from torch.autograd import forward_ad

from ._library import ops
from ._vmap import register_vmap
from .errors import InvalidArgument, NotSupported, require

# Skips the op's own autograd kernel where autograd is already dealt with. Without it results are the same, later.
_BelowAutograd = getattr(torch._C, "_AutoDispatchBelowAutograd", contextlib.nullcontext)

# What _register_formulas takes of torch that torch does not promise to keep.
try:
    from torch._functorch.utils import enable_single_level_autograd_function as _single_level
except ImportError:
    _single_level = None
_SingleLevelFunction = getattr(torch.autograd.function, "_SingleLevelFunction", None)
_after_autograd = getattr(torch._C, "_after_autograd_keyset", None)

# Whether a transform of torch.func is running.
are_transforms_active = getattr(torch._C, "_are_functorch_transforms_active", lambda: False)

_library = torch.library.Library("annulus", "IMPL")  # lives as long as what it registers


@functools.cache
def op_of(name):
    return getattr(ops, name).default


def arguments_of(name):
    """The named tuple of an op's arguments."""
    return collections.namedtuple(name.strip("_"), [a.name for a in op_of(name)._schema.arguments])


def fake(name, **ranks):
    """Registers a function of the op's arguments, by name, as its fake kernel: shapes, dtypes and strides without data.

    It is called once all tensors are on the first one's device (a meta tensor among real ones leads here, too) and
    those of `ranks` have that many dimensions; all other rules are C++'s.
    """

    def register(function):
        named = arguments_of(name)
        spoken = name.removesuffix("_backward").removesuffix("_out").removesuffix("_")

        def run(*values, **others):
            a = named(*values, **others)
            tensors = {k: v for k, v in a._asdict().items() if isinstance(v, torch.Tensor)}
            for argument, rank in ranks.items():
                if tensors[argument].dim() != rank:
                    came = tuple(tensors[argument].shape)
                    raise InvalidArgument(f"[{spoken}] {argument} must have {rank} dimensions but has shape {came}")
            (first_name, first), *rest = tensors.items()
            for argument, t in rest:
                if t.device != first.device:
                    raise InvalidArgument(
                        f"[{spoken}] {argument} must be on the device of {first_name}, {first.device}, but is on {t.device}"
                    )
            return function(a)

        torch.library.register_fake(f"annulus::{name}")(run)

    return register


def plain_op(name, samples):
    """The quickest way to call an op that autograd passes by: for use where no gradient is wanted of it."""
    op = op_of(name)
    register_vmap(op, samples)
    _library.impl(op._schema.name, torch.library.fallthrough_kernel, "Autograd")
    return op._op  # the function that OpOverload.__call__ calls


def needs_autograd(*tensors):
    if torch.is_grad_enabled():
        for t in tensors:
            if getattr(t, "requires_grad", False):  # what is no tensor is refused by the op
                return True
    return False


def below_autograd(op, *arguments):
    with _BelowAutograd():
        return op(*arguments)


def call_backward(name, *arguments):
    """Calls a backward op; with create_graph=True through autograd, where _refuse_double_backward waits."""
    op = op_of(name)
    if not torch.is_grad_enabled():
        return below_autograd(op, *arguments)
    return op(*arguments)


def _register_formulas(op, setup_context, backward):
    """As torch.library.register_autograd does, but for torch.func too, in eager mode and while torch.compile traces: its
    levels of autograd come to an op's kernel one after the other, as they come to those of torch's own ops. Without what that
    takes of torch, by torch.library: all but gradients by torch.func and, of a direct call, what refuses a tangent."""
    if any(part is None for part in (_single_level, _SingleLevelFunction, _after_autograd)):
        torch.library.register_autograd(op._schema.name, backward, setup_context=setup_context)
        return
    name, listed = op._schema.name.split("::")[1], str(op._schema.returns[0].type) == "List[Tensor]"

    def below(keyset, inputs):
        with _BelowAutograd():
            return op.redispatch(keyset & _after_autograd, *inputs)

    def forward(*inputs):
        with torch.enable_grad():  # a Function has it off, and the next level would find it so
            output = below(inputs[-1], inputs[:-1])
        return tuple(output) if listed else output  # a list's tensors would have no gradient

    level = _function(op, _SingleLevelFunction, forward=forward,
                      setup_context=lambda ctx, inputs, output: setup_context(ctx, inputs[:-1], output),
                      backward=lambda ctx, *gradients: (*backward(ctx, *gradients), None))

    def kernel(keyset, *inputs):
        refuse_tangents(name, *inputs)
        if not needs_autograd(*inputs):
            return below(keyset, inputs)
        with _single_level():
            output = level.apply(*inputs, keyset)
        return list(output) if listed else output

    _library.impl(op._schema.name, kernel, "Autograd", with_keyset=True)


def _function(op, base, **members):
    name = op._schema.name.split("::")[1]
    return type(name, (base,), {k: staticmethod(v) for k, v in members.items()})


OPERATORS = []  # as they are made


class Operator:
    """An op with its gradient, to be called with the op's arguments.

    keep(ctx, arguments, outputs): values for the backward that are neither arguments nor outputs, or take their place, in the
        order of `kept`, their names.
    visible(arguments): how many of the outputs, from the first on, the caller sees; all by default.
    complete(arguments of the backward, dict of the gradients it has no argument for, dict of `also`) -> arguments: a
        last hand on them.  also: arguments of the forward that it wants to see beside those of the backward.
    empty(arguments of the backward, name of a tensor): its gradient's fake; by default dense, of the tensor's shape.
    quick(ctx, *gradients): a backward for eager mode's plainest case, or None where it is another.
    spoken: the op's name of an argument -> the user's.
    samples: name of an argument or an output -> its dimension that counts samples, for vmap: a batch is more of them.
    folds(arguments, of the op or its backward): whether a batch of vmap's may be more samples; by default always.
    autocast: name of a tensor -> what autocast makes of it: "lower", its own dtype, as of the operands of a product; "fp32";
        "promote", the widest of all that say so. float64 stays, and so does what has no name here.
    """

    def __init__(self, name, *, autocast, keep=None, kept=(), visible=None, complete=None, also=(), empty=None, quick=None,
                 spoken=None, samples=None, folds=None):
        self.name, self.op, self.arguments = name, op_of(name), arguments_of(name)
        self._out_op = op_of(name + "_out") if hasattr(ops, name + "_out") else None
        self._backward_name, self._backward_arguments = name + "_backward", arguments_of(name + "_backward")
        self._keep, self._visible, self._complete, self._quick = keep, visible, complete, quick
        self._spoken, self.casts = spoken or {}, autocast
        schema, backward_schema = self.op._schema, op_of(self._backward_name)._schema
        is_tensor = lambda argument: "Tensor" in str(argument.type)  # noqa: E731
        self.tensors = next((i for i, a in enumerate(schema.arguments) if not is_tensor(a)), len(schema.arguments))
        self._outputs = [r.name for r in schema.returns]
        self._nothing = (None,) * len(schema.arguments)
        gradients = ["d" + name for name in self._outputs]

        # Where the saved values come from, among (*inputs, *outputs, *kept); later names shadow earlier ones.
        source = {name: i for i, name in enumerate((*self.arguments._fields, *self._outputs, *kept))}
        saved = [a for a in backward_schema.arguments if a.name not in (*gradients, "needed")]
        saved += [a for a in schema.arguments if a.name in also]
        tensors, values = [a.name for a in saved if is_tensor(a)], [a.name for a in saved if not is_tensor(a)]
        self._saved_tensors = [source[name] for name in tensors]
        self._saved_values = [source[name] for name in values]
        # And where the arguments of the backward come from, among (*gradients, *tensors, *values, needed).
        place = {name: i for i, name in enumerate((*gradients, *tensors, *values, "needed"))}
        self._order = itemgetter(*(place[name] for name in self._backward_arguments._fields))
        self._also = {name: place[name] for name in also}
        self._spare = {name: place[name] for name in gradients if name not in self._backward_arguments._fields}
        # Gradients that must be there: zeros where an output was not used.
        self._required = [gradients.index(a.name) for a in backward_schema.arguments
                          if a.name in gradients and str(a.type) == "Tensor"]

        empty = empty or (lambda b, name: getattr(b, name).new_empty(getattr(b, name).shape))
        names = self.arguments._fields[: self.tensors]
        fake(self._backward_name)(lambda b: [empty(b, name) for i, name in enumerate(names) if b.needed >> i & 1])
        samples = samples or {}
        samples = samples | {"d" + name: samples[name] for name in self._outputs if name in samples}
        each = lambda named: folds and (lambda inputs: folds(named(*inputs)))  # noqa: E731
        register_vmap(self.op, samples, folds=each(self.arguments))
        register_vmap(op_of(self._backward_name), samples, names, each(self._backward_arguments))
        _register_formulas(self.op, self._setup, self._gradients)
        _refuse_double_backward(name)
        self._eager = _function(self.op, torch.autograd.Function, forward=self._eager_forward, backward=self._eager_backward)
        OPERATORS.append(self)

    def cast(self, arguments):
        """As autocast has them, where it is on: in Python, so that eager, transformed and compiled calls have one rule."""
        device = arguments[0].device.type if isinstance(arguments[0], torch.Tensor) else None
        if device not in ("cpu", "cuda") or not torch.is_autocast_enabled(device):
            return arguments
        policies = [self.casts.get(name) for name in self.arguments._fields[: len(arguments)]]
        eligible = [p is not None and isinstance(x, torch.Tensor) and x.is_floating_point() and x.dtype != torch.float64
                    for x, p in zip(arguments, policies)]
        widths = [x.dtype for x, p, e in zip(arguments, policies, eligible) if e and p == "promote"]
        dtypes = {"lower": torch.get_autocast_dtype(device), "fp32": torch.float32,
                  "promote": functools.reduce(torch.promote_types, widths) if widths else None}
        return tuple([x.to(dtypes[p]) if e else x for x, p, e in zip(arguments, policies, eligible)])

    def __call__(self, *arguments, out=None):
        arguments = self.cast(arguments)
        tensors = arguments[: self.tensors]
        try:
            if out is not None:
                return self._into(out, arguments)
            if torch.compiler.is_compiling():
                return self._seen(arguments, self.op(*arguments))
            refuse_tangents(self.name, *tensors)
            if are_transforms_active():
                return self._seen(arguments, self.op(*arguments))
            if needs_autograd(*tensors):
                return self._eager.apply(*tensors, arguments[self.tensors :])
            return self._seen(arguments, below_autograd(self.op, *arguments))
        except InvalidArgument as e:
            raise self.spoken(e) from None

    def _into(self, out, arguments):
        """Into tensors of the caller's, by the op of this name with _out: without gradients."""
        outs = tuple(out) if isinstance(out, (tuple, list)) else (out,)
        if are_transforms_active() or needs_autograd(*arguments[: self.tensors], *outs):
            raise InvalidArgument(f"[{self.name}] out must be left out where there are gradients or transforms, but is given")
        require(len(outs) == len(self._outputs), self.name, "out", f"be {len(self._outputs)} tensors", f"{len(outs)} of them")
        if torch.compiler.is_compiling():
            self._out_op(*arguments, *outs)
        else:
            refuse_tangents(self.name, *arguments[: self.tensors])
            below_autograd(self._out_op, *arguments, *outs)
            torch.autograd.graph.increment_version(outs)  # so that a graph that saved the old values notices
        return out

    def spoken(self, e):
        """The exception in the user's words."""
        for name, spoken in self._spoken.items():
            e.args = tuple(a.replace(f"] {name} must", f"] {spoken} must") for a in e.args)
        return e

    def _seen(self, arguments, output):
        return output if self._visible is None else output[: self._visible(self.arguments(*arguments))]

    def _save(self, ctx, inputs, outputs):
        ctx.set_materialize_grads(False)
        pool = (*inputs, *outputs)
        if self._keep is not None:
            pool += self._keep(ctx, self.arguments(*inputs), outputs)
        ctx.save_for_backward(*[pool[i] for i in self._saved_tensors])
        ctx.values = [pool[i] for i in self._saved_values]
        if len(self._required) > 1:
            ctx.shapes = [y.shape for y in outputs]

    def _setup(self, ctx, inputs, output):
        outputs = (output,) if isinstance(output, torch.Tensor) else output
        if self._visible is not None:
            ctx.mark_non_differentiable(*outputs[self._visible(self.arguments(*inputs)) :])
        self._save(ctx, inputs, outputs)

    # Not the form for torch.func, which takes 64 us a call where this takes 26.
    def _eager_forward(self, ctx, *inputs):
        arguments = (*inputs[:-1], *inputs[-1])
        output = below_autograd(self.op, *arguments)
        self._save(ctx, arguments, (output,) if isinstance(output, torch.Tensor) else output)
        return self._seen(arguments, output)

    def _eager_backward(self, ctx, *gradients):
        if self._quick is not None:
            quick = self._quick(ctx, *gradients)
            if quick is not None:
                return quick
        return *self._gradients(ctx, *gradients)[: self.tensors], None

    def _gradients(self, ctx, *gradients):
        """Of all inputs, None where there is none."""
        if all([g is None for g in gradients]):
            return self._nothing
        if len(gradients) < len(self._outputs):  # eager mode does not show all
            gradients += (None,) * (len(self._outputs) - len(gradients))
        if len(self._required) > 1:
            gradients = self._with_zeros(ctx, gradients)
        needed, bit = 0, 1
        needs = ctx.needs_input_grad[: self.tensors]
        for need in needs:
            needed += bit if need else 0
            bit += bit
        pool = (*gradients, *ctx.saved_tensors, *ctx.values, needed)
        arguments = self._order(pool)
        if self._complete is not None:
            part = lambda places: {name: pool[i] for name, i in places.items()}  # noqa: E731
            arguments = self._complete(self._backward_arguments(*arguments), part(self._spare), part(self._also))
        results = iter(call_backward(self._backward_name, *arguments))
        return *[next(results) if need else None for need in needs], *self._nothing[self.tensors :]

    def _with_zeros(self, ctx, gradients):
        """One element, expanded, instead of a tensor of zeros."""
        one = next(g for g in gradients if g is not None)
        return tuple(one.new_zeros(()).expand(s) if g is None else g for g, s in zip(gradients, ctx.shapes))


def _refuse_double_backward(name):
    """A second derivative raises instead of being silently zero."""

    def setup_context(ctx, inputs, output):
        pass

    def backward(ctx, *gradients):
        raise NotSupported(f"[{name}] has no second derivative: backward through its backward is not available")

    _register_formulas(op_of(name + "_backward"), setup_context, backward)


def refuse_tangents(name, *tensors):
    """A forward-mode derivative raises instead of being silently zero."""
    if forward_ad._current_level < 0:
        return
    for t in tensors:
        if isinstance(t, torch.Tensor) and forward_ad.unpack_dual(t).tangent is not None:
            raise NotSupported(f"[{name}] has no forward-mode derivative: use torch.func.vjp, grad or jacrev")
