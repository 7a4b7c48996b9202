"""Modules over the functions of annulus: every torch.nn.Module in the file of an operator, under this name."""

import sys

import torch

for _file in [m for name, m in sys.modules.items() if name.startswith(__package__ + ".")]:
    for _name, _class in vars(_file).items():
        if isinstance(_class, type) and issubclass(_class, torch.nn.Module) and not _name.startswith("_"):
            _class.__module__ = __name__
            globals()[_name] = _class
