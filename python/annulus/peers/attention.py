"""Peers of the suite attention: what one writes in torch instead, beside annulus.

Rows, names and sizes are those of the C++ suite (bench/README.md), so that a report merges them. Tensors are (B, T, H, D), as
projections give them; torch's kernels take transposed views of that.

    torch-sdpa                  scaled_dot_product_attention, whichever kernel torch chooses; on CUDA also by kernel:
    torch-sdpa-flash, -cudnn, -efficient
    ...-graph                   the same under a CUDA graph: what the device takes, without the launches (CUDA)
    torch-flex                  flex_attention under torch.compile (CUDA), its block mask made before and not timed
    torch-mask                  blocks: scaled_dot_product_attention with a mask of all pairs, made before and not timed
    torch-gather                dilated: a branch at a time, rows copied by index, attended, copied back (torchscale's way)
    torch-strided               dilated: the same on strided views, a call a residue, which copies nothing
    ...-compile                 those two under torch.compile

LongNet's branches are merged by their log-sum-exp, and the backward is exact: torch's own kernel, given the merged output and
log-sum-exp. (torchscale takes the weights of branches as constants there, which is another gradient.)
"""

import contextlib
import dataclasses
import itertools
import math
import re

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as sdpa

from ._peer import Graph, Implementation, Skip, relative_error

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
# The worst of o and all gradients, relative to the largest value of each. float32 on CUDA is bf16x3.
ERROR_LIMIT = {("f32", "fwd"): 2e-5, ("f32", "fwdbwd"): 1e-4, ("bf16", "fwd"): 2e-2, ("bf16", "fwdbwd"): 5e-2,
               ("f16", "fwd"): 4e-3, ("f16", "fwdbwd"): 1e-2}
BLOCK = 64


@dataclasses.dataclass(frozen=True)
class Problem:
    """One set of sizes; its directions are the rows."""

    kind: str  # dense, grouped, longnet, blocks10
    n: int
    dtype: str
    directions: tuple  # of "fwd", "fwdbwd"
    causal: bool = False
    H: int = 8
    Hkv: int = 8
    D: int = 64
    segments: tuple = ()  # of LongNet, where they do not grow with n
    only: str = ""  # of the implementations, those whose names match

    B = 1
    memory_rows = False

    @property
    def op(self):
        return {"dense": "attention", "blocks10": "block_sparse_attention"}.get(self.kind, "dilated_attention")

    @property
    def branches(self):
        """(w, r), n divided by w and w by r."""
        if self.segments:
            return [(w, 2**i) for i, w in enumerate(self.segments)]
        return [(self.n // 4, 1), (self.n // 2, 2), (self.n, 4)]

    def row(self, direction):
        heads = f"h{self.H}" + (f"x{self.Hkv}" if self.Hkv < self.H else "")
        own = self.segments and 4 * self.segments[0] != self.n  # as the C++ suite names them
        return f"{direction}-{self.kind}-b{self.B}-{heads}-d{self.D}-n{self.n}" + (
            "-causal" if self.causal else "") + (f"-w{self.segments[0]}" if own else "")

    def params(self, direction):
        params = {"B": self.B, "H": self.H, "Hkv": self.Hkv, "D": self.D, "tokens": self.n, "causal": self.causal,
                  "kind": self.kind.rstrip("0123456789"), "direction": direction}
        if self.op == "dilated_attention":
            w, r = zip(*self.branches)
            params |= {"segment_lengths": list(w), "dilation_rates": list(r)}
        if self.kind == "blocks10":
            params |= {"block_size": BLOCK, "density": 0.1}
        return params

    def bytes(self, direction):
        """q, k, v, o; and in a backward these again with do, dq, dk, dv, and lse written and read."""
        of_queries, of_keys = (self.B * self.n * h * self.D * DTYPES[self.dtype].itemsize for h in (self.H, self.Hkv))
        forward = 2 * of_queries + 2 * of_keys
        return forward if direction == "fwd" else 2 * forward + 2 * of_queries + 2 * of_keys + 8 * self.B * self.n * self.H

    def wants(self, implementation):
        return re.search(self.only, implementation) is not None

    def open(self, device, directions):
        return Session(self, device, directions)

    def group(self, h):
        """The branch of a head: the remainder goes to the first groups."""
        sizes = [self.H // 3 + (g < self.H % 3) for g in range(3)]
        return next(g for g in range(3) if h < sum(sizes[: g + 1]))

    def mask(self):
        """(H, blocks, blocks) bool on the CPU: the diagonal, and others at random up to a tenth."""
        blocks = -(-self.n // BLOCK)
        generator = torch.Generator().manual_seed(1)
        score = torch.rand(self.H, blocks, blocks, generator=generator)
        score.diagonal(dim1=1, dim2=2).fill_(-1)
        return score < score.sort(-1).values[..., round(0.1 * blocks), None]

    def times(self, mask, h, i, j):
        """How often query i of head h sees key j; tensors of any shapes that broadcast."""
        if self.kind == "dense":
            times = torch.ones_like(h + i + j)
        elif self.kind == "blocks10":
            times = mask[h, i // BLOCK, j // BLOCK].int()
        else:
            times = 0
            for number, (w, r) in enumerate(self.branches):
                if self.kind == "longnet":
                    offset, own = h % r, True
                else:
                    sizes = [self.H // 3 + (g < self.H % 3) for g in range(3)]
                    offset, own = number % r, (h >= sum(sizes[:number])) & (h < sum(sizes[: number + 1]))
                times = times + (own & (i // w == j // w) & (i % w % r == offset) & (j % w % r == offset)).int()
        return times * (j <= i) if self.causal else times


# --- the reference: one head at a time in double precision, some queries at a time -----------------------------------------


def reference(problem, mask, q, k, v, do):
    """{part: (B, T, heads, D)} of the first and the last head of keys, with the heads of queries that read them."""
    got = {"y": [], "dq": [], "dk": [], "dv": []}
    n, shared, scale = problem.n, problem.H // problem.Hkv, problem.D**-0.5
    for hk in sorted({0, problem.Hkv - 1}):
        keys, values = k[0, :, hk].double(), v[0, :, hk].double()
        dk, dv = torch.zeros_like(keys), torch.zeros_like(values)
        j = torch.arange(n, device=q.device)
        for h in range(hk * shared, (hk + 1) * shared):
            y, dq = torch.empty(n, problem.D, device=q.device, dtype=torch.float64), torch.zeros_like(keys)
            for i in torch.arange(n, device=q.device).split(1024):
                queries, own_do = q[0, i, h].double(), do[0, i, h].double()
                times = problem.times(mask, torch.tensor(h, device=q.device), i[:, None], j[None, :])
                p = torch.softmax(queries @ keys.T * scale + times.double().log(), -1).nan_to_num(0.0)  # no key: no weight
                y[i] = p @ values
                ds = scale * p * (own_do @ values.T - (own_do * y[i]).sum(-1, keepdim=True))
                dq[i] = ds @ keys
                dk += ds.T @ queries
                dv += p.T @ own_do
            got["y"].append(y)
            got["dq"].append(dq)
        got["dk"].append(dk)
        got["dv"].append(dv)
    return {part: torch.stack(heads, 1)[None] for part, heads in got.items()}


# --- dilated attention in torch --------------------------------------------------------------------------------------------


class Lines:
    """The rows of a branch of some heads as a batch of segments, (B S, heads, L, D), by a view or by a copy."""

    def __init__(self, w, r, heads, offsets):
        self._w, self._r, self._heads, self._offsets = w, r, heads, offsets

    def _at(self):
        return (slice(None), slice(None), slice(None), self._offsets, self._heads)

    def _cut(self, x):  # (B, T, H, ...) -> (B, S, L, r, H, ...)
        return x.unflatten(1, (-1, self._w // self._r, self._r))

    def take(self, x):
        return self._cut(x)[self._at()].flatten(0, 1).transpose(1, 2)

    def put(self, x, to):
        """x, as take gave it, into the rows of `to`."""
        cut = self._cut(to)
        cut[self._at()] = x.transpose(1, 2).unflatten(0, cut.shape[:2])

    def add(self, x, to):
        cut = self._cut(to)
        cut[self._at()] += x.transpose(1, 2).unflatten(0, cut.shape[:2])


def lines_of(problem, device, copies):
    """A list a branch: of all its heads at once, by index; or of the heads of a residue, which are a slice of a view."""
    result = []
    for number, (w, r) in enumerate(problem.branches):
        if problem.kind == "grouped":
            heads = [h for h in range(problem.H) if problem.group(h) == number]
            own = slice(heads[0], heads[-1] + 1)
            result.append([Lines(w, r, own, number % r)])
        elif copies:
            heads = torch.arange(problem.H, device=device)
            result.append([Lines(w, r, heads, heads % r)])
        else:
            result.append([Lines(w, r, slice(offset, None, r), offset) for offset in range(r)])
    return result


def grouped(problem, lines, copies, q, k, v):
    o = torch.zeros_like(q)
    for line in itertools.chain(*lines):
        qkv = [line.take(x) for x in (q, k, v)]
        if copies:
            qkv = [x.contiguous() for x in qkv]
        line.put(sdpa(*qkv, is_causal=problem.causal), o)
    return o


def kernel_of(device, dtype):
    """(forward -> o, lse, the rest; backward) of torch's kernel that gives a log-sum-exp."""
    aten = torch.ops.aten
    if device == "cpu":
        def forward(q, k, v, causal):
            return *aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal), ()

        def backward(do, q, k, v, o, lse, rest, causal):
            return aten._scaled_dot_product_flash_attention_for_cpu_backward(do, q, k, v, o, lse, 0.0, causal)

        return forward, backward
    if dtype == torch.float32:
        raise Skip("torch's kernel that gives a log-sum-exp takes tensors of 16 bits")

    def forward(q, k, v, causal):
        o, lse, *rest = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)
        return o, lse, rest

    def backward(do, q, k, v, o, lse, rest, causal):
        cum_q, cum_k, max_q, max_k, seed, offset, _ = rest
        return aten._scaled_dot_product_flash_attention_backward(
            do, q, k, v, o, lse, cum_q, cum_k, max_q, max_k, 0.0, causal, seed, offset)

    return forward, backward


def longnet(problem, lines, device, dtype):
    """f(q, k, v): a kernel's call a line, merged; and its exact backward by the same kernel."""
    kernel, kernel_backward = kernel_of(device, dtype)
    causal = problem.causal

    class LongNet(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v):
            B, T, H, _ = q.shape
            parts, rest = [], []
            for branch in lines:
                o = torch.zeros_like(q)
                lse = torch.full((B, T, H, 1), -math.inf, device=q.device)
                for line in branch:
                    own, own_lse, more = kernel(*(line.take(x) for x in (q, k, v)), causal)
                    line.put(own, o)
                    line.put(own_lse[..., None], lse)
                    rest.append(more)
                parts.append((o, lse))
            lse = torch.logsumexp(torch.stack([x for _, x in parts]), 0)
            o = sum((x - lse).exp() * o for o, x in parts).to(q.dtype)
            ctx.save_for_backward(q, k, v, o, lse)
            ctx.rest = rest
            return o

        @staticmethod
        def backward(ctx, do):
            q, k, v, o, lse = ctx.saved_tensors
            gradients = [torch.zeros_like(x) for x in (q, k, v)]
            for line, rest in zip(itertools.chain(*lines), ctx.rest):
                own = [line.take(x) for x in (do, q, k, v, o)]
                for to, x in zip(gradients, kernel_backward(*own, line.take(lse)[..., 0].contiguous(), rest, causal)):
                    line.add(x, to)
            return tuple(gradients)

    return LongNet.apply


# --- all implementations ---------------------------------------------------------------------------------------------------


def transposed(f):
    return lambda q, k, v: f(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)).transpose(1, 2)


class Session:
    """The tensors of a problem, and the implementations over them."""

    def __init__(self, problem, device, directions):
        self._problem = problem
        generator = torch.Generator(device).manual_seed(1)
        dtype = DTYPES[problem.dtype]
        make = lambda h: torch.randn(problem.B, problem.n, h, problem.D, generator=generator, device=device).to(dtype)  # noqa: E731
        q, k, v, do = make(problem.H), make(problem.Hkv), make(problem.Hkv), make(problem.H)
        mask = problem.mask().to(device) if problem.kind == "blocks10" else None
        self._exact = reference(problem, mask, q, k, v, do)
        if list(directions) == ["fwd"]:
            self._exact = {"y": self._exact["y"]}
        leaves = {"q": q, "k": k, "v": v}
        if list(directions) != ["fwd"]:
            for x in leaves.values():
                x.requires_grad_()
        self.implementations = {}
        for name, make_function, around in self._recipes(device, dtype, mask):
            if not (problem.wants(name) or problem.wants(name + "-graph")):
                continue
            own = {"leaves": leaves, "dout": do, "around": around}
            try:
                function = lambda f=make_function(): f(q, k, v)  # noqa: E731
            except Skip as e:
                self.implementations[name] = e
                continue
            if problem.wants(name):
                self.implementations[name] = Implementation(function, inference=True, **own)
            if device == "cuda" and not name.endswith(("-compile", "-flex")) and problem.wants(name + "-graph"):
                self.implementations[name + "-graph"] = Graph(function, **own)
        self.baseline = next(iter(self.implementations))

    def _recipes(self, device, dtype, mask):
        """(name, what makes the function of q, k and v, around)."""
        problem, plain = self._problem, contextlib.nullcontext
        kind = problem.kind
        if kind == "dense":
            f = transposed(lambda q, k, v: sdpa(q, k, v, is_causal=problem.causal, enable_gqa=problem.Hkv < problem.H))
            yield "torch-sdpa", lambda: f, plain
            if device == "cuda":
                for name, backend in (("flash", SDPBackend.FLASH_ATTENTION), ("cudnn", SDPBackend.CUDNN_ATTENTION),
                                      ("efficient", SDPBackend.EFFICIENT_ATTENTION)):
                    yield f"torch-sdpa-{name}", lambda: f, lambda backend=backend: sdpa_kernel(backend)
        elif kind == "blocks10":
            yield "torch-mask", lambda: self._masked(mask), plain
        else:
            for copies, name in ((True, "torch-gather"), (False, "torch-strided")):
                yield name, lambda copies=copies: self._by_branch(copies, device, dtype), plain
                yield name + "-compile", lambda copies=copies: self._compiled(copies, device, dtype), plain
        yield "torch-flex", lambda: self._flex(device, mask), plain
        yield "annulus-torch", lambda: self._ours(mask), plain

    def _masked(self, mask):
        if mask.numel() * BLOCK**2 >= 8 << 30:
            raise Skip("a mask of all pairs would take 8 GiB or more")
        pairs = mask.repeat_interleave(BLOCK, 1).repeat_interleave(BLOCK, 2)[None, :, : self._problem.n, : self._problem.n]
        return transposed(lambda q, k, v: sdpa(q, k, v, attn_mask=pairs))

    def _by_branch(self, copies, device, dtype):
        problem = self._problem
        lines = lines_of(problem, device, copies)
        if problem.kind == "longnet":
            return longnet(problem, lines, device, dtype)
        return lambda q, k, v: grouped(problem, lines, copies, q, k, v)

    def _compiled(self, copies, device, dtype):
        from . import check_compiler

        check_compiler(device)
        return torch.compile(self._by_branch(copies, device, dtype), dynamic=False)

    def _flex(self, device, mask):
        if device == "cpu":
            raise Skip("flex_attention is compared on CUDA")
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        problem = self._problem
        times = lambda h, i, j: problem.times(mask, h, i, j)  # noqa: E731
        heads = None if problem.kind == "dense" else problem.H
        n = problem.n
        blocks = None
        if problem.kind != "dense" or problem.causal:
            blocks = create_block_mask(lambda b, h, i, j: times(h, i, j) > 0, None, heads, n, n, device=device, _compile=True)
        score = None
        if problem.kind == "longnet":  # a key of several branches counts as often
            score = lambda s, b, h, i, j: s + times(h, i, j).float().log()  # noqa: E731
        compiled = torch.compile(flex_attention, dynamic=False)
        return transposed(lambda q, k, v: compiled(q, k, v, score_mod=score, block_mask=blocks,
                                                   enable_gqa=problem.Hkv < problem.H))

    def _ours(self, mask):
        from ..attention import BlockCsr, attention, block_sparse_attention, dilated_attention  # the others need none

        problem = self._problem
        if problem.kind == "dense":
            return lambda q, k, v: attention(q, k, v, causal=problem.causal)
        if problem.kind == "blocks10":
            lists = BlockCsr.from_mask(mask)
            return lambda q, k, v: block_sparse_attention(q, k, v, lists, BLOCK)
        w, r = zip(*problem.branches)
        return lambda q, k, v: dilated_attention(q, k, v, w, r, causal=problem.causal, mode=problem.kind)

    def errors(self, implementation, directions):
        results = implementation.results(directions)
        errors = {}
        for part, want in self._exact.items():
            heads = self._problem.Hkv if part in ("dk", "dv") else self._problem.H
            half = want.shape[2] // 2 or 1
            chosen = sorted({*range(half), *range(heads - want.shape[2] + half, heads)})
            errors[part] = relative_error(results[part][:, :, chosen], want)
        return errors

    def parts(self, direction):
        return ("y",) if direction == "fwd" else tuple(self._exact)

    def limit(self, direction):
        return ERROR_LIMIT[self._problem.dtype, direction]


def problems(size, device):
    """The C++ suite's rows; of the quick ones, for CPUs, in bf16 only the short: there torch takes minutes for the others."""
    both = ("fwd", "fwdbwd")
    if size == "quick":
        for dtype, n in (("f32", 1024), ("f32", 4096), ("bf16", 1024)):
            yield Problem("dense", n, dtype, ("fwd",) if n > 1024 else both)
            yield Problem("dense", n, dtype, both, causal=True)
        for kind in ("grouped", "longnet", "blocks10"):
            yield Problem(kind, 4096, "f32", both)
        return
    for dtype in ("f32", "bf16"):
        for n, causal in itertools.product((1024, 4096), (False, True)):
            yield Problem("dense", n, dtype, both, causal=causal)
        for n, kind in itertools.product((4096, 8192), ("grouped", "longnet")):
            yield Problem(kind, n, dtype, both)
        yield Problem("blocks10", 4096, dtype, both)
    for n in (16384, 32768):
        yield Problem("blocks10", n, "bf16", both)
    yield Problem("dense", 4096, "f16", both, causal=True)
    if device == "cuda":
        lengths = (1024, 2048, 4096, 8192, 16384, 32768)
        for D, n, causal in itertools.product((64, 128), lengths, (False, True)):
            if D > 64 or n not in (1024, 4096):
                yield Problem("dense", n, "bf16", both, causal=causal, D=D, only="(flash|cudnn|annulus-torch)-graph")
    else:
        for n in (16384, 32768):
            yield Problem("dense", n, "bf16", both, causal=n == 16384)
    for n in (1024, 2048, 8192, 16384, 32768):  # branches as in ring-attention-comprehensive; of 4096 they are those above
        yield Problem("longnet", n, "bf16", both, segments=(512, 1024) if n < 4096 else (1024, 2048, 4096), only="gather|annulus")
    for shared in (1, 4):
        yield Problem("dense", 8192, "bf16", both, causal=True, H=16, Hkv=16 // shared, D=128)
