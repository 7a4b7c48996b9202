"""Peers of the suite lrpe-cosine: the formula as one writes it in torch, eager and compiled, beside annulus.

Rows, names and sizes are those of the C++ suite (bench/README.md), so that a report merges them. Forward is fn(x);
backward is y.backward(dy, retain_graph=True) with x.grad set to None before each repetition, so that no accumulation
is timed; for every implementation alike. theta has no gradient, as in the table that started the suite.
"""

import dataclasses
import itertools
import math

import torch

from ._peer import Implementation, relative_error
from .lrpe_cosine import lrpe_cosine

H, D = 12, 128
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}


def allowed_error(dtype, largest):
    """What the numeric policy allows a single output, relative to the largest value: one unit in its last place of bf16."""
    if dtype == "f32":
        return 1e-6
    mantissa, _ = math.frexp(largest)  # 0.5 <= mantissa < 1
    return 2.0**-8 / mantissa


def formula(x, theta, shape, prefix, phase_dtype=torch.float32):
    """What a straightforward programmer writes: phases in float32, a table of cos and sin, a concatenation."""
    axes = [torch.arange(n, device=x.device, dtype=phase_dtype) for n in shape]
    positions = torch.stack(torch.meshgrid(*axes, indexing="ij"), -1).reshape(-1, len(shape))
    phase = (positions[None, :, :, None] * theta.to(phase_dtype)[:, None, None]).flatten(2)[..., : x.shape[-1]]
    phase = torch.nn.functional.pad(phase, (0, 0, prefix, 0))
    x32 = x.to(phase_dtype)
    return torch.cat([x32 * phase.cos(), x32 * phase.sin()], -1).to(x.dtype)


@dataclasses.dataclass(frozen=True)
class Problem:
    """One set of sizes; its directions are the rows."""

    B: int
    shape: tuple
    prefix: int
    dtype: str
    directions: tuple  # of "fwd", "bwd", "fwdbwd"

    op = "lrpe_cosine"
    memory_rows = True

    @property
    def tokens(self):
        return self.prefix + math.prod(self.shape)

    @property
    def E(self):
        return -(-D // len(self.shape))

    def row(self, direction):
        return f"{direction}-{len(self.shape)}d-n{self.shape[0]}-l{self.prefix}-b{self.B}"

    def params(self, direction):
        return {
            "B": self.B, "H": H, "D": D, "E": self.E, "shape": list(self.shape), "prefix": self.prefix,
            "tokens": self.tokens, "direction": direction,
        }

    def bytes(self, direction):
        one_way = 3 * self.B * H * self.tokens * D * DTYPES[self.dtype].itemsize  # x and y, or dy and dx
        return 2 * one_way if direction == "fwdbwd" else one_way

    def open(self, device, directions):
        return Session(self, device)


class Session:
    """The tensors of a problem, and the implementations over them. The first is what others are compared with."""

    baseline = "torch-eager"

    def __init__(self, problem, device):
        self._problem = problem
        generator = torch.Generator(device).manual_seed(1)
        normal = lambda *size: torch.randn(size, generator=generator, device=device)  # noqa: E731
        B, shape, prefix, tokens, dtype = problem.B, problem.shape, problem.prefix, problem.tokens, DTYPES[problem.dtype]
        x = normal(B, H, tokens, D).to(dtype).requires_grad_()
        dy = normal(B, H, tokens, 2 * D).to(dtype)
        theta = normal(H, problem.E)
        eager = lambda x: formula(x, theta, shape, prefix)  # noqa: E731
        functions = {
            "torch-eager": eager,
            "torch-compile": torch.compile(eager, dynamic=False),
            "annulus-torch": lambda x: lrpe_cosine(x, theta, shape, prefix=prefix),
        }
        self.implementations = {
            name: Implementation(lambda f=f: f(x), {"x": x}, dy) for name, f in functions.items()
        }
        # In double precision, for one batch element and two heads.
        x64 = x.detach()[:1, :2].double().requires_grad_()
        y = formula(x64, theta[:2], shape, prefix, torch.float64)
        self._exact = {"y": y.detach(), "dx": torch.autograd.grad(y, x64, dy[:1, :2].double())[0]}

    def errors(self, implementation, directions):
        results = implementation.results(directions)
        return {
            part: relative_error(results[part][: want.shape[0], : want.shape[1]], want)
            for part, want in self._exact.items()
            if part in results
        }

    def parts(self, direction):
        return {"fwd": ("y",), "bwd": ("dx",), "fwdbwd": ("y", "dx")}[direction]

    def limit(self, direction):
        largest = [self._exact[part].abs().max().item() for part in self.parts(direction)]
        return min(allowed_error(self._problem.dtype, value) for value in largest)


def problems(size):
    """The C++ suite's quick rows, or the 64 rows of the original's table."""
    if size == "quick":
        grids = [((1024,), 0), ((4096,), 10), ((64, 64), 0), ((16, 16, 16), 10)]
        for (shape, prefix), dtype in itertools.product(grids, DTYPES):
            yield Problem(2, shape, prefix, dtype, ("fwd", "bwd", "fwdbwd"))
        return
    extents_of = {1: [2**i for i in range(8, 16)], 2: [16, 32, 64, 128], 3: [4, 8, 16, 32]}
    for axes, extents in extents_of.items():
        for prefix, n in itertools.product((0, 10), extents):
            yield Problem(12, (n,) * axes, prefix, "bf16", ("fwd", "bwd"))
