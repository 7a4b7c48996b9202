"""Peers of the suite lrpe-cosine: the formula as one writes it in torch, eager and compiled, beside annulus.

Rows, names and sizes are those of the C++ suite (bench/README.md), so that a report merges them. Forward is fn(x);
backward is y.backward(dy, retain_graph=True) with x.grad set to None before each repetition, so that no accumulation
is timed; for every implementation alike. theta has no gradient, as in the table that started the suite.

RoPE of queries and keys is beside what models do, apply_rotary_pos_emb, whose cos and sin were made before and are not timed.
"""

import dataclasses
import itertools
import math

import torch

from ..lrpe_cosine import lrpe_cosine, lrpe_rotate_qk
from ._peer import Implementation, relative_error

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


def rotate_half(x):
    x1, x2 = x.chunk(2, -1)
    return torch.cat((-x2, x1), -1)


def apply_rotary(q, k, cos, sin):
    """As the models of Hugging Face have it."""
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


class RotateProblem(Problem):
    """Queries and a quarter as many heads of keys, with one theta."""

    op, memory_rows, heads = "lrpe_rotate_qk", False, (H, H // 4)
    E = D // 2

    def row(self, direction):
        return super().row(direction) + "-rotate-qk"

    def params(self, direction):
        return super().params(direction) | {"variant": "rotate-qk"}

    def bytes(self, direction):
        return super().bytes(direction) * sum(self.heads) * 2 // (H * 3)

    def open(self, device, directions):
        return RotateSession(self, device)


class RotateSession(Session):
    def __init__(self, problem, device):
        self._problem = problem
        B, tokens, dtype = problem.B, problem.tokens, DTYPES[problem.dtype]
        generator = torch.Generator(device).manual_seed(1)
        (q, k), dy = [[torch.randn(B, h, tokens, D, generator=generator, device=device).to(dtype) for h in problem.heads]
                      for _ in range(2)]
        q.requires_grad_(), k.requires_grad_()
        theta = 10000.0 ** (-torch.arange(problem.E, device=device) / problem.E)
        phase = torch.arange(tokens, device=device, dtype=torch.float64)[:, None] * theta.double().repeat(2)
        cos, sin = phase.cos().to(dtype), phase.sin().to(dtype)
        functions = {
            "torch-eager": lambda q, k: apply_rotary(q, k, cos, sin),
            "torch-compile": torch.compile(lambda q, k: apply_rotary(q, k, cos, sin), dynamic=False),
            "annulus-torch": lambda q, k: lrpe_rotate_qk(q, k, theta),
        }
        self.implementations = {
            name: Implementation(lambda f=f: f(q, k), {"q": q, "k": k}, dy) for name, f in functions.items()
        }
        # In double precision, for one batch element and a head of each.
        few = [x.detach()[:1, :1].double().requires_grad_() for x in (q, k)]
        y = apply_rotary(*few, phase.cos(), phase.sin())
        self._exact = {"y": y, "dx": torch.autograd.grad(y, few, [d[:1, :1].double() for d in dy])}
        self._exact = {part: torch.cat([t.detach() for t in both], 1) for part, both in self._exact.items()}

    def errors(self, implementation, directions):
        results = implementation.results(directions)
        got = {"y": results["y"]} | ({"dx": (results["dq"], results["dk"])} if "dq" in results else {})
        return {part: relative_error(torch.cat([t[:1, :1] for t in both], 1), self._exact[part]) for part, both in got.items()}


def problems(size, device):  # noqa: ARG001  the same on both
    """The C++ suite's quick rows, or the 64 rows of the original's table and RoPE."""
    if size == "quick":
        grids = [((1024,), 0), ((4096,), 10), ((64, 64), 0), ((16, 16, 16), 10)]
        for (shape, prefix), dtype in itertools.product(grids, DTYPES):
            yield Problem(2, shape, prefix, dtype, ("fwd", "bwd", "fwdbwd"))
        return
    extents_of = {1: [2**i for i in range(8, 16)], 2: [16, 32, 64, 128], 3: [4, 8, 16, 32]}
    for axes, extents in extents_of.items():
        for prefix, n in itertools.product((0, 10), extents):
            yield Problem(12, (n,) * axes, prefix, "bf16", ("fwd", "bwd"))
    yield RotateProblem(12, (4096,), 0, "bf16", ("fwd", "bwd"))
