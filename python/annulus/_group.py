"""Communicators (annulus/dist) over groups of torch.distributed: one for each group, for as long as the group lives.

C++ decides what is sent when, and how long is waited. Here its messages, bytes in memory of its own, become sends and receives of
the group's gloo backend. There are no threads: of a gloo request is_completed() stays false until someone waits for it, so C++
looks at the memory itself, and has a request waited for only when there is nothing left to wait for (annulus/dist/callbacks.h).
"""

import ctypes
import itertools
import threading
import weakref

import torch

from ._library import ops
from .errors import InvalidArgument, NotSupported

_PTR, _I32, _I64, _U64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_uint64
_Begin = ctypes.CFUNCTYPE(_I64, _PTR, _I32, _I32, _PTR, _U64)
_Finish = ctypes.CFUNCTYPE(_I32, _PTR, _I64)
_Pulse = ctypes.CFUNCTYPE(_I32, _PTR)
_Release = ctypes.CFUNCTYPE(None, _PTR)


class _Callbacks(ctypes.Structure):
    """LinkCallbacks of annulus/dist/callbacks.h."""

    _fields_ = [("self", _PTR), ("rank", _I32), ("size", _I32), ("send", _Begin), ("receive", _Begin), ("finish", _Finish),
                ("pulse", _Pulse), ("release", _Release), ("why", ctypes.c_char * 200)]


class _Link:
    def __init__(self, backend, rank, size):
        self.backend = backend
        self.requests = {}  # number -> what gloo waits by, which keeps what it reads or writes through
        self.numbers = itertools.count(1)
        self.interrupt = None
        pulse = self.pulses()
        next(pulse)
        self.pulse = _Pulse(pulse.send)
        self.callbacks = _Callbacks(next(_numbers), rank, size, _send, _receive, _finish, self.pulse, _release)
        _links[self.callbacks.self] = self

    def begin(self, function, peer, tag, data, bytes):
        memory = torch.frombuffer((ctypes.c_uint8 * bytes).from_address(data), dtype=torch.uint8)
        number = next(self.numbers)
        self.requests[number] = function([memory], peer, tag)
        return number

    def finish(self, number):
        self.requests.pop(number).wait()
        return 1

    def release(self):
        """gloo must end with its group: what is left of it when Python ends may end the process with an abort."""
        self.requests.clear()
        self.backend = None

    def pulses(self):
        """Python handles signals while Python runs, as this does: Ctrl-C is raised in it. A generator, since that may be at the first
        step of a function, outside of all that it tries, and at no step of this one."""
        while True:
            try:
                while self.interrupt is None:
                    yield 1
                yield 0
            except GeneratorExit:
                return
            except BaseException as e:
                self.interrupt = e


_links = {}  # by what C++ knows them by, until it releases them
_numbers = itertools.count(1)


def _safely(call, key):
    """C++ cannot be thrown at from here. 0 is failure, to it and to ctypes."""
    link = _links[key]
    try:
        return call(link)
    except Exception as e:
        link.callbacks.why = str(e).encode(errors="replace")[:199]
    except BaseException as e:
        link.interrupt, link.callbacks.why = e, b"it was interrupted"
    return 0


# Not methods: they may be called until the process ends, whatever has become of a link.
_send = _Begin(lambda key, to, tag, data, bytes: _safely(lambda link: link.begin(link.backend.send, to, tag, data, bytes), key))
_receive = _Begin(lambda key, of, tag, data, bytes: _safely(lambda link: link.begin(link.backend.recv, of, tag, data, bytes), key))
_finish = _Finish(lambda key, number: _safely(lambda link: link.finish(number), key))
_release = _Release(lambda key: _links.pop(key).release())


def interrupted():
    """Raises what interrupted the call that has just failed, if it was that."""
    for link in list(_links.values()):
        error, link.interrupt = link.interrupt, None
        if error is not None:
            raise error


_handles = weakref.WeakKeyDictionary()  # group -> number
_opening = threading.Lock()


def handle_of(op, group):
    """The number of the group's communicator, which C++ makes at the group's first call."""
    distributed = torch.distributed
    if not distributed.is_available():
        raise NotSupported(f"[{op}] this torch has no torch.distributed")
    if group is None:
        if not distributed.is_initialized():
            raise InvalidArgument(f"[{op}] group must be given where torch.distributed.init_process_group was not called, but is None")
        group = distributed.group.WORLD
    if not isinstance(group, distributed.ProcessGroup):
        member = group is not distributed.GroupMember.NON_GROUP_MEMBER
        what = f"is {type(group).__name__}" if member else "this process is not in it"
        raise InvalidArgument(f"[{op}] group must be a ProcessGroup that this process is in, but {what}")
    with _opening:
        handle = _handles.get(group)
        if handle is None:
            link = _Link(_gloo_of(op, group), group.rank(), group.size())
            handle = ops._open_group.default(ctypes.addressof(link.callbacks), 120.0, False)
            _handles[group] = handle
            # Also when Python ends, in which case the others hear that this rank has left.
            weakref.finalize(group, ops._close_group.default, handle)
    return handle


def _gloo_of(op, group):
    try:
        backend = group._get_backend(torch.device("cpu"))
    except RuntimeError:
        backend = None
    if backend is None or backend.name() != "gloo":
        has = "none" if backend is None else repr(backend.name())
        raise NotSupported(
            f"[{op}] group must have gloo for messages in host memory, as of init_process_group('cpu:gloo,cuda:nccl') or "
            f"new_group(backend='gloo'), but has {has}"
        )
    return backend
