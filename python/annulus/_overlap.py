"""Which tensors may be written together, where the write is torch's and not a kernel's that checks it: as core/tensor.cpp says."""

import torch

from .errors import InvalidArgument, call_typed, unusual

_is_wrapped = getattr(torch._C._functorch, "is_functorch_wrapped_tensor", lambda x: False)
_library = torch.library.Library("annulus", "FRAGMENT")  # lives as long as what it registers
_library.define("_require_apart(str op, str first, Tensor a, str second, Tensor b) -> ()")


def _require_apart(op, first, a, second, b):
    if unusual(a) or unusual(b):
        return  # which the operator refuses
    for name, x in ((first, a), (second, b)):
        if 0 in x.stride() and any(n > 1 and s == 0 for n, s in zip(x.shape, x.stride())):
            raise InvalidArgument(
                f"[{op}] y{name} must have strides under which no two elements share an address but has strides "
                f"{tuple(x.stride())} for shape {tuple(x.shape)}"
            )
    a, b = innermost(a), innermost(b)
    if a is b or _share_storage(a, b) and not _apart(a, b):
        raise InvalidArgument(f"[{op}] y{first} must not overlap {second} in memory but does")


# Composite, so that transforms and torch.compile run the function itself, on what stands for the tensors there.
_library.impl("_require_apart", _require_apart, "CompositeImplicitAutograd")
_op = torch.ops.annulus._require_apart.default
_op._op = call_typed(_op)


def require_apart(op, first, a, second, b):
    """That writing a and b leaves in each what was written to it."""
    if torch.compiler.is_compiling():
        _op(op, first, a, second, b)
    else:
        _require_apart(op, first, a, second, b)


def innermost(x):
    """What transforms have wrapped: with all samples, where it is one of a batch."""
    while _is_wrapped(x):
        x = torch._C._functorch.get_unwrapped(x)
    return x


def _share_storage(a, b):
    try:
        return a.numel() != 0 != b.numel() and a.untyped_storage()._cdata == b.untyped_storage()._cdata
    except (RuntimeError, NotImplementedError, AttributeError):  # a kind that has none to overlap in
        return False


def _span(shape, stride, offset, size):
    """First and one past the last byte of the storage that a view can touch; strides in torch are not negative."""
    return offset * size, (offset + sum((n - 1) * s for n, s in zip(shape, stride)) + 1) * size


def _apart(a, b):
    (a0, a1), (b0, b1) = (_span(x.shape, x.stride(), x.storage_offset(), x.element_size()) for x in (a, b))
    if a1 <= b0 or b1 <= a0:
        return True
    periods = [s * a.element_size() for n, s in zip(a.shape, a.stride()) if n > 1 and s != 0]
    return any(_apart_in_rows(a, b, period) for period in periods)


def _apart_in_rows(a, b, period):
    """Whether both lie in rows `period` bytes apart, in parts of them that do not meet, as parts of one projection do."""
    parts = []
    for x in (a, b):
        size = x.element_size()
        row = [1 if s * size % period == 0 else n for n, s in zip(x.shape, x.stride())]
        low, high = _span(row, x.stride(), x.storage_offset(), size)
        if high - low > period:
            return False
        parts.append((low % period, low % period + high - low))
    (x0, x1), (y0, y1) = sorted(parts)
    return x1 <= y0 and y1 - period <= x0
