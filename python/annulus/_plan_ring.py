"""annulus.plan_ring(): what ring attention over some ranks would cost. The figures are C++'s (ring_attention_plan.h)."""

import json
from dataclasses import dataclass
from typing import Any, Literal

import torch

from ._library import ops
from .errors import require


@dataclass(frozen=True)
class RingMemory:
    """Bytes of the rank that has most."""

    tensors: int  # its inputs and outputs
    carried: int  # in float32, of all its rows
    messages: int  # rows of others

    @property
    def total(self) -> int:
        return self.tensors + self.carried + self.messages


@dataclass(frozen=True)
class RingPass:
    """A forward or a backward; of the rank that has most, where ranks differ."""

    bytes_sent: int
    mean_bytes_sent: float
    hop_bytes: int  # that come in a hop, at most
    flops: float
    work_balance: float  # the most work of a rank over the mean
    compute_s: float
    transfer_s: float
    time_s: float
    hops: int
    hidden_hops: int  # in which nobody waits
    hides_from: int | None  # tokens a rank, from which on all hops are hidden
    memory: RingMemory

    @property
    def hides(self) -> bool:
        return self.hidden_hops == self.hops


@dataclass(frozen=True)
class GatherPass:
    """The same with all keys and values on every rank."""

    bytes_sent: int
    time_s: float
    memory: RingMemory


@dataclass(frozen=True)
class RingPlan:
    forward: RingPass
    backward: RingPass
    gather_forward: GatherPass
    gather_backward: GatherPass
    queries_travel: bool  # in the backward, instead of keys and values
    fits: bool
    gather_fits: bool


def plan_ring(
    tokens: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    world_size: int,
    link_gbs: float = 50.0,
    dtype: torch.dtype = torch.bfloat16,
    causal: bool = False,
    *,
    balance: Literal["zigzag", "contiguous"] = "zigzag",
    window_size: tuple[int, int] = (-1, -1),
    batch: int = 1,
    tflops: float = 400.0,
    memory_gib: float | None = None,
    slice: int = 8192,
) -> RingPlan:
    """What attention over `world_size` ranks would cost: bytes, work, time and memory of a rank, and of gathering instead.

    tokens: of the whole sequence; up to 10^9, over up to 4096 ranks.   link_gbs: GB/s of a rank's link, each way.   tflops: what a
    rank reaches in attention.   memory_gib: what it has; `fits` then says whether forward and backward fit.
    slice: rows of a message, at most: 8192 between GPUs, 1536 between CPUs; a rank has three.
    Bytes are those that the C++ communicators count, exactly. Time is a model: rows of a hop come while those before them are computed,
    so a hop takes the longer of both; `hides` says that in no hop anybody waits, `hides_from` from how many tokens a rank on.

    >>> plan = plan_ring(1_000_000, 32, 8, 128, world_size=8, link_gbs=50, causal=True, memory_gib=80)
    >>> plan.forward.bytes_sent, plan.forward.hides, plan.forward.hides_from, plan.fits
    (3584000000, True, 4000, True)
    >>> plan.backward.memory.total < plan.gather_backward.memory.total
    True
    """
    op = "plan_ring"
    require(isinstance(dtype, torch.dtype), op, "dtype", "be a torch.dtype", dtype)
    pair = isinstance(window_size, (tuple, list)) and len(window_size) == 2
    require(pair, op, "window_size", "be a pair (left, right)", window_size)
    for name, value in {"link_gbs": link_gbs, "tflops": tflops, "memory_gib": memory_gib}.items():
        number = isinstance(value, (int, float)) and 0 < value < float("inf")
        require(number or value is None and name == "memory_gib", op, name, "be a number more than 0", value)
    whole = isinstance(world_size, int) and 1 <= world_size <= 4096
    require(whole, op, "world_size", "be an integer between 1 and 4096", world_size)
    found = json.loads(ops._plan_ring_json.default(
        tokens, heads, kv_heads, head_dim, world_size, link_gbs, str(dtype).removeprefix("torch."), causal, balance, *window_size,
        batch, tflops, 0.0 if memory_gib is None else memory_gib, slice))
    return RingPlan(_pass(RingPass, found.pop("forward")), _pass(RingPass, found.pop("backward")),
                    _pass(GatherPass, found.pop("gather_forward")), _pass(GatherPass, found.pop("gather_backward")), **found)


def _pass(kind: type, figures: dict[str, Any]) -> Any:
    figures["memory"] = RingMemory(**figures["memory"])
    for name in ("bytes_sent", "hop_bytes"):
        if name in figures:
            figures[name] = int(figures[name])
    return kind(**figures)
