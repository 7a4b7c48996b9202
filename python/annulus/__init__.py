"""Annulus: sequence-model operators that frameworks do not ship, for PyTorch.

Every function takes torch tensors of any strides without copying them, works under autograd, torch.compile and
torch.export, and raises InvalidArgument (a ValueError), NotSupported (a NotImplementedError), DeviceError or RankLost
(RuntimeErrors) with a message that names operator, argument, rule and what came.
"""

from typing import TYPE_CHECKING

from . import _library  # noqa: F401  (loads the compiled operators first)
from ._info import info as info, last_backend as last_backend
from .attention import BlockCsr as BlockCsr, attention as attention, attention_varlen as attention_varlen
from .attention import block_sparse_attention as block_sparse_attention, dilated_attention as dilated_attention
from .attention import hilbert_order as hilbert_order, masks as masks
from .errors import DeviceError as DeviceError, InvalidArgument as InvalidArgument
from .errors import NotSupported as NotSupported, RankLost as RankLost
from .lrpe_cosine import lrpe_cosine as lrpe_cosine, lrpe_cosine_qk as lrpe_cosine_qk, lrpe_rotate as lrpe_rotate
from .lrpe_cosine import lrpe_rotate_ as lrpe_rotate_, lrpe_rotate_qk as lrpe_rotate_qk, lrpe_rotate_qk_ as lrpe_rotate_qk_
from .lrpe_cosine import packed_positions as packed_positions
from .ring_attention import plan_ring as plan_ring
from .ring_attention import ring_attention as ring_attention, ring_attention_local as ring_attention_local
from .ring_attention import shard as shard, unshard as unshard
from .ring_rnn import ring_readout as ring_readout, ring_rnn as ring_rnn, ring_rnn_pack as ring_rnn_pack

from . import nn as nn  # isort: skip  (the modules of all of them)

__version__: str
if not TYPE_CHECKING:  # to type checkers, every name would be there

    def __getattr__(name):
        if name == "__version__":
            return info()["version"]
        raise AttributeError(f"module 'annulus' has no attribute {name!r}")


# Files that an operator is in are no part of it: where a function has a file's name, the name is the function's.
__all__ = sorted(name for name, value in globals().items() if not name.startswith("_") and
                 (callable(value) or name in ("masks", "nn")))
