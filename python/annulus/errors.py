"""The library's exceptions. C++ raises them; torch carries them over as RuntimeError, and typed() here
gives them their type back. Messages name operator, argument, rule and what came."""

import re


class InvalidArgument(ValueError):
    """The call breaks a rule of the operator's documentation. No output was written."""


class NotSupported(NotImplementedError):
    """The call is right, but this build or this machine cannot run it; the message says what is missing."""


class DeviceError(RuntimeError):
    """The device failed: out of memory, a launch error, a lost GPU."""


class RankLost(RuntimeError):
    """A peer of a distributed call did not answer in time. Later calls on that communicator raise it again."""

    def __init__(self, message, rank, hop, direction, waited_s):
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
        return InvalidArgument(f"[{op.rstrip('_')}] {name} must be {wanted} but is {found}" + (f" {value}" if value else ""))
    message = text[mark.end():].split("\nException raised from", 1)[0]  # torch may append a C++ trace
    if mark[1] != "RankLost":
        return _PLAIN[mark[1]](message)
    fields = _RANK_LOST.match(message)
    if fields is None:
        return error
    return RankLost(message[fields.end():], int(fields[1]), int(fields[2]), fields[3], float(fields[4]))
