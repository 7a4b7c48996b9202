"""Loads the compiled operators (annulus/_ops.so) into torch, once."""

import os

import torch

from .errors import call_typed

_OLDEST_TORCH = (2, 10)


def _load():
    version = tuple(int(p) for p in torch.__version__.split("+")[0].split(".")[:2])
    if version < _OLDEST_TORCH:
        raise ImportError(
            f"annulus needs torch >= {_OLDEST_TORCH[0]}.{_OLDEST_TORCH[1]} (its stable ABI) but found {torch.__version__}"
        )
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), "_ops.so")
    if not os.path.exists(path):
        raise ImportError(
            f"annulus is not built: {path} is missing. Install it with `pip install .`, or build with CMake and put "
            "<build folder>/python on PYTHONPATH"
        )
    torch.ops.load_library(path)
    for name in torch._C._dispatch_get_all_op_names():
        if name.startswith("annulus::"):
            op = getattr(torch.ops.annulus, name.removeprefix("annulus::")).default
            op._op = call_typed(op)


_load()
ops = torch.ops.annulus
