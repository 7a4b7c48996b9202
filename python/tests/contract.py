"""How the tests of this folder find operators: each has annulus/<operator>/test/samples.py with

    SAMPLES = [Sample(...), ...]               calls of its functions that between them reach all of its ops
    BAD = [(sample, changes, message), ...]    calls that break a rule: `sample` with other arguments, and what is said

which tests beside it import as samples_<operator>. Adding an operator adds no line here.
"""

import dataclasses
import importlib.util
import pathlib
import sys
from typing import Callable

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import annulus


@dataclasses.dataclass(frozen=True)
class Sample:
    """function(**tensors, **changes) -> a tensor or a tuple of them. What it is told of sizes it takes from the tensors."""

    op: str  # as its errors name it
    what: str
    function: Callable
    # (size, dtype, device) -> {name: tensor}; floating ones have gradients. Sizes 0 to 3: no extent of the last three is
    # that of another dimension, since torch takes equal ones to be one symbol and would compile again.
    tensors: Callable
    definition: Callable = None  # the same in torch, in double
    fixed: tuple = ()  # tensors that say where to read: in another order they would be wrong
    cuts: bool = False  # it makes tensors of parts of others, which are copies
    graphs: bool = True  # CUDA graphs take its calls; else it refuses to be captured
    folds: bool = True  # a batch of vmap's is more samples of one call; else it is as many calls

    @property
    def info(self):
        """What annulus.info says of it: its own, or that of the operator whose name its own begins with."""
        operators = annulus.info()["operators"]
        return operators[max((name for name in operators if self.op.startswith(name)), key=len)]

    @property
    def widest(self):
        return torch.float64 if "f64" in self.info["dtypes"] else torch.float32

    def limit(self, device):
        """Of the relative error of its widest dtype. On CUDA products of float32 may be those of two bfloat16 each."""
        return 1e-11 if self.widest == torch.float64 else 2e-5 if device == "cpu" else 1e-4

    def close(self, device):
        """For assert_close, of sums made in different ways: torch's own, or by that."""
        return {"rtol": 1e-3, "atol": 1e-4} if self.limit(device) == 1e-4 else {}

    def require(self, dtype):
        if dtype == torch.float64 != self.widest:
            pytest.skip("the operator does not take float64")

    def __str__(self):
        return f"{self.op} {self.what}".strip()

    def make(self, device, dtype=torch.float32, size=0, grad=False):
        tensors = self.tensors(size, dtype, device)
        return {k: t.requires_grad_(grad) if t.is_floating_point() else t for k, t in tensors.items()}

    def run(self, tensors, **changes):
        return outputs(self.function(**{**tensors, **changes}))

    def run_backward(self, tensors, scale=1.0):
        """Outputs and gradients of everything, with the same incoming gradients for the same shapes."""
        ys = self.run(tensors)
        generator = torch.Generator().manual_seed(7)
        dys = [scale * torch.randn(y.shape, generator=generator, dtype=torch.float64).to(y) for y in ys]
        return (*ys, *torch.autograd.grad(ys, leaves(tensors), dys))


class Recorder(TorchDispatchMode):
    """The calls of annulus's ops that reach the kernels, with arguments as they were."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op.namespace == "annulus":
            self.calls.append((op, [a.detach().clone() if isinstance(a, torch.Tensor) else a for a in args]))
        return op(*args, **(kwargs or {}))


def outputs(result):
    return (result,) if isinstance(result, torch.Tensor) else tuple(result)


def leaves(tensors):
    return [t for t in tensors.values() if t.requires_grad]


def relative_error(got, want):
    """In the 2-norm."""
    assert got.shape == want.shape and torch.isfinite(got).all()
    return ((got.double() - want.double()).norm() / want.double().norm().clamp_min(1e-300)).item() if got.numel() else 0.0


def _load(path):
    name = "samples_" + path.parts[-3]
    spec = importlib.util.spec_from_file_location(name, path)
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


sys.modules.setdefault("contract", sys.modules[__name__])
ROOT = pathlib.Path(__file__).resolve().parents[2]
OPERATORS = {path.parts[-3]: _load(path) for path in sorted(ROOT.glob("annulus/*/test/samples.py"))}
SAMPLES = [s for module in OPERATORS.values() for s in module.SAMPLES]

every_operator = pytest.mark.parametrize("operator", OPERATORS)
every_sample = pytest.mark.parametrize("sample", SAMPLES, ids=str)
