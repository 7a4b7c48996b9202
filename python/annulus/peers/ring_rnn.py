"""Peers of the suite ring-rnn: the recurrence as one writes it in torch, beside annulus.

Rows, names and sizes are those of the C++ suite (bench/README.md), so that a report merges them.

    torch-sum, torch-matmul    the two of the table that started the suite: a matrix per sample, mixed by a sum over
                               [B, K, N, N] or by a product of depth K, then applied
    torch-gemm                 one product a step, (c x r).reshape(B, -1) @ [Wo; Wa]^T: what the table should have had
    torch-gemm2                one product a step, (r @ [Wo; Wa]^T), contracted with c afterwards
    ...-tf32, ...-graph        float32 products in tf32; the whole call under a CUDA graph
    torch-compile              torch-gemm with its step compiled

The weights are laid out anew in every call, as annulus does it. A forward keeps nothing for a backward; forward and
backward give every gradient: A, Wa, Wo, r0, J0, J1, alpha.
"""

import contextlib
import dataclasses

import torch

from ..ring_rnn import ring_rnn
from ._peer import Graph, Implementation, Skip, relative_error

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}
FUNCTIONS = {"relu": torch.relu, "gelu": torch.nn.functional.gelu}
# Out, and the worst of out and all gradients, relative to the largest value of each. float32 on CUDA is bf16x3. The
# gradients of J0, J1 and alpha are sums over all samples and steps that cancel.
ERROR_LIMIT = {("f32", "fwd"): 1e-5, ("f32", "fwdbwd"): 1e-4, ("bf16", "fwd"): 2e-2, ("bf16", "fwdbwd"): 5e-2}


def run(step, prepare, F, A, Wa, Wo, r0, J0, J1, alpha):
    """The loop that every implementation shares: activation, leak, all states stacked."""
    weights = prepare(Wa, Wo)
    # No copy from the host: a CUDA graph may be recording.
    J1 = J1.to(A.dtype) if isinstance(J1, torch.Tensor) else A.new_full((), J1)
    c = torch.cat([J1.expand(*A.shape[:2], 1), A], 2)
    r, states = r0, []
    for t in range(A.shape[1]):
        r = step(c[:, t], r, weights, J0, alpha, F)
        states.append(r)
    return torch.stack(states, 1)


def leak(r, y, J0, alpha, F):
    return (1 - alpha) * r + alpha * F(y + J0 * r.sum(1, keepdim=True))


def sum_step(c, r, W, J0, alpha, F):
    mixed = (c[:, :, None, None] * W[None]).sum(1)
    return leak(r, (mixed @ r[:, :, None])[:, :, 0], J0, alpha, F)


def matmul_step(c, r, W, J0, alpha, F):
    N = r.shape[1]
    mixed = (c @ W.flatten(1)).view(-1, N, N)
    return leak(r, (mixed @ r[:, :, None])[:, :, 0], J0, alpha, F)


def gemm_step(c, r, W, J0, alpha, F):
    return leak(r, (c[:, :, None] * r[:, None, :]).flatten(1) @ W, J0, alpha, F)


def gemm2_step(c, r, W, J0, alpha, F):
    z = (r @ W).view(r.shape[0], -1, r.shape[1])
    return leak(r, (c[:, None, :] @ z)[:, 0], J0, alpha, F)


def stacked(Wa, Wo):
    return torch.cat([Wo[None], Wa])


def operand_rows(Wa, Wo):  # ((K + 1) N, N)
    return stacked(Wa, Wo).transpose(1, 2).reshape(-1, Wo.shape[0])


def accumulator_columns(Wa, Wo):  # (N, (K + 1) N)
    return stacked(Wa, Wo).flatten(0, 1).T


@contextlib.contextmanager
def tf32():
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


@dataclasses.dataclass(frozen=True)
class Problem:
    """One set of sizes; its directions are the rows."""

    B: int
    N: int
    K: int
    dtype: str
    directions: tuple  # of "fwd", "fwdbwd"
    variant: str = ""  # "live2": two live channels; "actions": the original's actions; "dead": the original's own setting
    matrices: bool = False  # also the two that make a matrix per sample
    compiled: bool = False

    op = "ring_rnn"
    memory_rows = False
    T = 20

    def row(self, direction):
        return f"{direction}-b{self.B}-n{self.N}-k{self.K}-t{self.T}" + (f"-{self.variant}" if self.variant else "")

    def params(self, direction):
        params = {"B": self.B, "T": self.T, "K": self.K, "N": self.N, "direction": direction, "activation": "relu"}
        return params | ({"variant": self.variant} if self.variant else {})

    def bytes(self, direction):
        """A, Wa, Wo, r0 read once, out written; and y written and read, dout read, gradients written."""
        B, T, K, N = self.B, self.T, self.K, self.N
        inputs, out = B * T * K + (K + 1) * N * N + B * N, B * T * N
        size = DTYPES[self.dtype].itemsize
        one_way = (inputs + out) * size
        return one_way if direction == "fwd" else 2 * one_way + inputs * size + 2 * out * 4

    def tensors(self, device):
        """Live dynamics: a third to a half of the units active (but for `dead`, whose state only decays)."""
        B, T, K, N = self.B, self.T, self.K, self.N
        generator = torch.Generator(device).manual_seed(1)
        normal = lambda *size: torch.randn(size, generator=generator, device=device)  # noqa: E731
        uniform = lambda *size: torch.rand(size, generator=generator, device=device)  # noqa: E731
        A = normal(B, T, K)
        if self.variant in ("actions", "dead"):
            v = torch.where(uniform(B, T, 1) < 0.56, 0.0, uniform(B, T, 1) * 2 - 1)
            A = torch.relu(v * torch.linspace(-1, 1, K, device=device))
        elif self.variant == "live2":
            A[:, :, 2:] = 0
        p = {
            "A": A,
            "Wa": normal(K, N, N) * (N if self.variant else N * K) ** -0.5,
            "Wo": normal(N, N) * N**-0.5,
            "r0": normal(B, N).abs() * N**-0.5,
        }
        p = {name: x.to(DTYPES[self.dtype]) for name, x in p.items()}
        J0 = -0.1 if self.variant == "dead" else -1 / N
        return p | {name: torch.tensor(v, device=device) for name, v in (("J0", J0), ("J1", 0.1), ("alpha", 0.15))}

    def open(self, device, directions):
        return Session(self, device, directions)


def room(device):
    """Bytes that a temporary may take."""
    return int(0.85 * torch.cuda.mem_get_info()[0]) if device == "cuda" else 8 << 30


def reference(p, dout, F):
    """Out and, with dout, every gradient in double precision."""
    doubles = {name: x.detach().double().requires_grad_(dout is not None) for name, x in p.items()}
    out = run(gemm2_step, accumulator_columns, F, **doubles)
    if dout is None:
        return {"y": out}
    gradients = torch.autograd.grad(out, tuple(doubles.values()), dout.double())
    return {"y": out.detach()} | {"d" + name: g for name, g in zip(doubles, gradients)}


class Session:
    """The tensors of a problem, and the implementations over them.

    Everything is timed with relu. Gradients are judged with gelu: relu's derivative jumps, and where rounding takes one
    unit across the jump its error would hide all others.
    """

    baseline = "torch-gemm"

    def __init__(self, problem, device, directions):
        self._problem = problem
        p = problem.tensors(device)
        dout = torch.randn(
            (problem.B, problem.T, problem.N), generator=torch.Generator(device).manual_seed(2), device=device
        ).to(DTYPES[problem.dtype])
        backward = list(directions) != ["fwd"]
        self._activation = "relu"
        self._judged_with = "gelu" if backward else "relu"
        self._exact = reference(p, dout if backward else None, FUNCTIONS[self._judged_with])
        if backward:
            for x in p.values():
                x.requires_grad_()
        else:  # what a forward alone is called with
            p |= {name: p[name].item() for name in ("J0", "J1", "alpha")}
        leaves = {name: x for name, x in p.items() if isinstance(x, torch.Tensor)}
        self.implementations = self._implementations(p, leaves, dout, device)

    def _implementations(self, p, leaves, dout, device):
        problem = self._problem
        loop = lambda step, prepare: lambda: run(step, prepare, FUNCTIONS[self._activation], **p)  # noqa: E731
        gemm, gemm2 = loop(gemm_step, operand_rows), loop(gemm2_step, accumulator_columns)
        make = lambda f, **options: Implementation(f, leaves, dout, inference=True, **options)  # noqa: E731
        all_of = {"torch-gemm": make(gemm), "torch-gemm2": make(gemm2)}
        if device == "cuda":
            all_of |= {"torch-gemm-graph": Graph(gemm, leaves, dout), "torch-gemm2-graph": Graph(gemm2, leaves, dout)}
            if problem.dtype == "f32":
                all_of |= {"torch-gemm-tf32": make(gemm, around=tf32),
                           "torch-gemm-tf32-graph": Graph(gemm, leaves, dout, around=tf32)}
        if problem.compiled:
            all_of["torch-compile"] = make(loop(torch.compile(gemm_step, dynamic=False), operand_rows))
        if problem.matrices:
            B, K, N = problem.B, problem.K, problem.N
            for name, step, copies in (("torch-sum", sum_step, K + 3), ("torch-matmul", matmul_step, 2)):
                need = copies * B * N * N * 4
                fits = need <= room(device)
                all_of[name] = make(loop(step, stacked)) if fits else Skip(f"needs {need / 1e9:.0f} GB of memory")
        all_of["annulus-torch"] = make(lambda: ring_rnn(**p, activation=self._activation))
        return all_of

    def errors(self, implementation, directions):
        self._activation = self._judged_with
        try:
            results = implementation.results(directions)
        finally:
            self._activation = "relu"
        return {part: relative_error(results[part], want) for part, want in self._exact.items()}

    def parts(self, direction):
        return ("y",) if direction == "fwd" else tuple(self._exact)

    def limit(self, direction):
        return ERROR_LIMIT[self._problem.dtype, direction]


QUICK = [(32, 128, 16), (256, 128, 16), (64, 256, 16), (256, 256, 3), (64, 512, 6)]
FULL = [(128, 16), (256, 16), (384, 16), (512, 16), (1024, 16), (2048, 16), (2048, 32), (2048, 64), (1024, 2), (1024, 3),
        (1024, 6), (1024, 12)]


def problems(size, device):  # noqa: ARG001  the same on both
    """The C++ suite's quick rows, or the rows of the original's table and what stands beside them."""
    if size == "quick":
        for B, N, K in QUICK:
            few = (B, N, K) in (QUICK[0], QUICK[3])  # the others take seconds a call
            yield Problem(B, N, K, "f32", ("fwd",), matrices=few, compiled=(B, N, K) == QUICK[0])
            yield Problem(B, N, K, "bf16", ("fwd",))
            yield Problem(B, N, K, "f32", ("fwdbwd",))
        yield Problem(256, 128, 16, "bf16", ("fwdbwd",))
        for dtype in DTYPES:
            yield Problem(256, 128, 16, dtype, ("fwd",), variant="live2")
        return
    for N, K in FULL:
        compiled = K == 16 and N in (128, 1024)  # compiling takes longer than measuring
        yield Problem(256, N, K, "bf16", ("fwd",), compiled=compiled)
        yield Problem(256, N, K, "f32", ("fwd",), matrices=True, compiled=compiled)
        for dtype in DTYPES:
            yield Problem(256, N, K, dtype, ("fwdbwd",), compiled=compiled)
        if K == 16:
            yield Problem(256, N, K, "bf16", ("fwd",), variant="actions")
    yield Problem(256, 1024, 16, "bf16", ("fwd",), variant="live2")
    yield Problem(256, 1024, 16, "f32", ("fwd",), variant="dead")
