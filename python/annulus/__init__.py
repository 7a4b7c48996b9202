"""Annulus: sequence-model operators that frameworks do not ship, for PyTorch.

Every function takes torch tensors of any strides without copying them, works under autograd, torch.compile and
torch.export, and raises InvalidArgument (a ValueError), NotSupported (a NotImplementedError), DeviceError or RankLost
(RuntimeErrors) with a message that names operator, argument, rule and what came.
"""

from . import _library  # noqa: F401  (loads the compiled operators first)
from . import nn
from ._info import info, last_backend
from .errors import DeviceError, InvalidArgument, NotSupported, RankLost
from .lrpe_cosine import lrpe_cosine, lrpe_cosine_qk, lrpe_rotate, lrpe_rotate_, packed_positions
from .ring_rnn import ring_readout, ring_rnn, ring_rnn_pack


def __getattr__(name):
    if name == "__version__":
        return info()["version"]
    raise AttributeError(f"module 'annulus' has no attribute {name!r}")


__all__ = [
    "DeviceError",
    "InvalidArgument",
    "NotSupported",
    "RankLost",
    "info",
    "last_backend",
    "lrpe_cosine",
    "lrpe_cosine_qk",
    "lrpe_rotate",
    "lrpe_rotate_",
    "nn",
    "packed_positions",
    "ring_readout",
    "ring_rnn",
    "ring_rnn_pack",
]
