"""`python -m annulus.info`. The function annulus.info() is in _info.py."""

import sys
import types

from ._info import info, main


class _Callable(types.ModuleType):
    """`import annulus.info` puts this module where the function was: let both be called."""

    def __call__(self):
        return info()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
sys.modules[__name__].__class__ = _Callable
