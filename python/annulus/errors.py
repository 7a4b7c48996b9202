"""The library's exceptions. C++ raises them; torch carries them over as RuntimeError, and call_typed() here
gives them their type back. Messages name operator, argument, rule and what came."""

import functools
import re

import torch


class InvalidArgument(ValueError):
    """The call breaks a rule of the operator's documentation. No output was written."""


class NotSupported(NotImplementedError):
    """The call is right, but this build or this machine cannot run it; the message says what is missing."""


class DeviceError(RuntimeError):
    """The device failed: out of memory, a launch error, a lost GPU."""


class RankLost(RuntimeError):
    """A peer of a distributed call did not answer in time. Later calls on that communicator raise it again."""

    def __init__(self, message: str, rank: int, hop: int, direction: str, waited_s: float) -> None:
        super().__init__(message)
        self.rank = rank
        self.hop = hop
        self.direction = direction
        self.waited_s = waited_s

    def __reduce__(self):  # several arguments: pickling (as data loaders and launchers do) needs to know them
        return type(self), (self.args[0], self.rank, self.hop, self.direction, self.waited_s)


_PLAIN = {"InvalidArgument": InvalidArgument, "NotSupported": NotSupported, "DeviceError": DeviceError}
_MARK = re.compile(r"annulus\.(InvalidArgument|NotSupported|DeviceError|RankLost): ")
_RANK_LOST = re.compile(r"rank=(-?\d+) hop=(-?\d+) direction=(\w+) waited_s=([-\d.]+): ")
# What torch itself says when an argument does not fit an op's schema.
_SCHEMA = re.compile(
    r"annulus::(\w+)\(\) Expected a value of type '([^']+)' for argument '(\w+)' but instead found type '([^']+)'"
    r"(?:.*?^Value: ([^\n]{1,80})$)?",
    re.DOTALL | re.MULTILINE,
)


def typed(error):
    """The typed exception that `error` carries, or `error` itself when it is none of ours."""
    text = str(error)
    mark = _MARK.search(text)
    if mark is None:
        misfit = _SCHEMA.match(text)
        if misfit is None:
            return error
        op, wanted, name, found, value = misfit.groups()
        return InvalidArgument(f"[{op.removesuffix('_out').rstrip('_')}] {name} must be {wanted} but is {found}" + (f" {value}" if value else ""))
    message = text[mark.end():].split("\nException raised from", 1)[0]  # torch may append a C++ trace
    if mark[1] != "RankLost":
        plain = _PLAIN[mark[1]](message)
        plain._of_cpp = True  # C++ knows of it, and with it the other ranks of a group
        return plain
    fields = _RANK_LOST.match(message)
    if fields is None:
        return error
    return RankLost(message[fields.end():], int(fields[1]), int(fields[2]), fields[3], float(fields[4]))


def unusual(tensor):
    """None of a dense tensor, else what it is."""
    if not isinstance(tensor, torch.Tensor):
        return "None" if tensor is None else type(tensor).__name__
    kinds = {"quantized": tensor.is_quantized, "nested": tensor.is_nested, str(tensor.layout): tensor.layout != torch.strided}
    return next((kind for kind, holds in kinds.items() if holds), None)


def require(holds, op, name, rule, value):
    if not holds:
        raise InvalidArgument(f"[{op}] {name} must {rule} but is {value!r}")


def require_size(op, name, value, least=0):
    whole = isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool)
    require(whole and least <= value < 2**63, op, name, f"be an integer of at least {least}", value)


def require_placement(op, device, dtype=None):
    """Of a module."""
    good = dtype is None or isinstance(dtype, torch.dtype) and dtype.is_floating_point
    require(good, op, "dtype", "be a floating dtype", dtype)
    try:
        torch.empty(0, device=device)
    except (RuntimeError, TypeError, AssertionError) as e:
        raise InvalidArgument(f"[{op}] device must be one that torch has but is {device!r}: {e}") from None


def call_typed(op):
    """The function that calls the op, with typed errors: in eager, compiled and exported code alike."""
    call, schema = op._op, op._schema.arguments
    spoken = op._schema.name.split("::")[1].removesuffix("_backward").removesuffix("_out").rstrip("_")

    def run(*arguments, **others):
        try:
            return call(*arguments, **others)
        except (RuntimeError, InvalidArgument) as e:
            error = typed(e)
            if error is e:  # torch has no kernel for such tensors, and says so in its own words
                for a, kind in zip(schema, map(unusual, arguments)):
                    if kind is not None and "Tensor" in str(a.type) and (kind != "None" or str(a.type) == "Tensor"):
                        error = InvalidArgument(f"[{spoken}] {a.name} must be a dense tensor but is {kind}")
            if type(error) is InvalidArgument and torch._guards.TracingContext.try_get() is not None:
                error = _traced()(*error.args)
            raise error from None

    return run


@functools.cache
def _traced():
    """An InvalidArgument that torch.compile, tracing, does not wrap: it runs the call as it is, or with fullgraph raises this."""
    from torch._dynamo.exc import Unsupported

    members = {"__module__": __name__, "__reduce__": lambda self: (InvalidArgument, (str(self),))}
    return type("InvalidArgument", (Unsupported, InvalidArgument), members)
