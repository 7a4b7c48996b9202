"""Modules over the functions of annulus: every torch.nn.Module in the file of an operator, under this name."""

import sys as _sys

import torch as _torch

for _file in [m for name, m in _sys.modules.items() if name.startswith(__package__ + ".")]:
    for _name, _class in vars(_file).items():
        if isinstance(_class, type) and issubclass(_class, _torch.nn.Module) and not _name.startswith("_"):
            _class.__module__ = __name__
            globals()[_name] = _class
__all__ = sorted(name for name in globals() if not name.startswith("_"))


def __dir__():
    return __all__
