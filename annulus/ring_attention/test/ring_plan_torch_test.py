"""annulus.plan_ring: the figures of the command, and what it refuses."""

import json
import math
import subprocess

import pytest
import torch
from contract import ROOT

import annulus


def test_figures():
    plan = annulus.plan_ring(1_000_000, 32, 8, 128, 8)
    sent = 7 * 125_000 * 8 * 256 * 2
    assert plan.forward.bytes_sent == sent == plan.gather_forward.bytes_sent
    assert plan.backward.bytes_sent == 3 * sent and not plan.queries_travel
    assert plan.forward.flops == 4 * 32 * 128 * 1e12 / 8 and plan.forward.hops == 7
    assert plan.forward.hides and plan.forward.hides_from == 2000
    assert plan.forward.memory.tensors == 125_000 * (80 * 128 * 2 + 32 * 4)
    assert plan.fits and not annulus.plan_ring(1_000_000, 32, 8, 128, 8, memory_gib=1).fits
    assert not annulus.plan_ring(1_000_000, 32, 8, 128, 8, link_gbs=0.1).forward.hides
    assert annulus.plan_ring(1_000_000, 32, 32, 128, 8).queries_travel
    assert annulus.plan_ring(1000, 4, 4, 64, 4, window_size=(10, 0)).forward.hides_from is None
    causal = {b: annulus.plan_ring(4096, 8, 8, 64, 8, causal=True, balance=b).forward for b in ("zigzag", "contiguous")}
    assert causal["zigzag"].work_balance < 1.02 and math.isclose(causal["contiguous"].work_balance, 15 / 8, rel_tol=1e-3)


def test_is_the_command():
    program = ROOT / "build" / "cpu" / "bin" / "annulus"
    if not program.exists():
        pytest.skip(f"no {program}")
    options = ["--tokens", "123457", "--ranks", "6", "--heads", "12", "--kv-heads", "4", "--head-dim", "96", "--dtype", "f16",
               "--link-gbs", "25", "--causal", "--format", "json"]
    (row,) = json.loads(subprocess.run([program, "plan", "ring", *options], capture_output=True, text=True, check=True).stdout)
    plan = annulus.plan_ring(123457, 12, 4, 96, 6, 25, torch.float16, True)
    for name in ("forward", "backward"):
        mine, its = getattr(plan, name), row[name]
        assert (mine.bytes_sent, mine.mean_bytes_sent, mine.flops) == (its["bytes"]["max"], its["bytes"]["mean"], its["flops"]["max"])
        assert (mine.time_s, mine.hidden_hops, mine.hides_from) == (its["time_s"], its["hidden_hops"], its["hides_from"])
        assert mine.memory.total == its["memory_bytes"]["total"]
    assert plan.gather_backward.time_s == row["gather_backward"]["time_s"]


@pytest.mark.parametrize("wrong, words", [
    ({"tokens": -1}, "tokens must be between 0"),
    ({"tokens": 2.5}, "tokens must be int"),
    ({"world_size": 0}, "world_size must be an integer between 1"),
    ({"world_size": 2**40}, "world_size must be an integer between 1"),
    ({"kv_heads": 3}, "kv_heads must divide heads"),
    ({"head_dim": 257}, "head_dim must be between 1 and 256"),
    ({"link_gbs": 0.0}, "link_gbs must be a number more than 0"),
    ({"tflops": float("nan")}, "tflops must be a number more than 0"),
    ({"memory_gib": -1.0}, "memory_gib must be a number more than 0"),
    ({"dtype": torch.int64}, "dtype must be"),
    ({"dtype": "bf16"}, "dtype must be a torch.dtype"),
    ({"balance": "even"}, "balance must be"),
    ({"window_size": 5}, "window_size must be a pair"),
], ids=str)
def test_refuses(wrong, words):
    with pytest.raises(annulus.InvalidArgument, match=words):
        annulus.plan_ring(**{"tokens": 1000, "heads": 8, "kv_heads": 2, "head_dim": 64, "world_size": 4, **wrong})
