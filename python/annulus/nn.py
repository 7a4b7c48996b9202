"""Modules over the functions of annulus: every torch.nn.Module in the file of an operator, under this name."""

import sys as _sys
from typing import TYPE_CHECKING as _TYPE_CHECKING

import torch as _torch

if _TYPE_CHECKING:  # type checkers want each by name
    from ._modules_lrpe_cosine import LrpeCosine as LrpeCosine, LrpeRotate as LrpeRotate
    from .ring_rnn import RingRNN as RingRNN

for _file in [m for name, m in _sys.modules.items() if name.startswith(__package__ + ".")]:
    for _name, _class in vars(_file).items():
        if isinstance(_class, type) and issubclass(_class, _torch.nn.Module) and not _name.startswith("_"):
            _class.__module__ = __name__
            globals()[_name] = _class
__all__ = sorted(name for name in globals() if not name.startswith("_"))


def __dir__() -> list[str]:
    return __all__
