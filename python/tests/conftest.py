"""Every test that takes `device` runs on the CPU and, where there is one, on a CUDA device."""

import pytest
import torch

import annulus


def _why_not(device):
    if device == "cpu":
        return None
    support = annulus.info()["devices"]["cuda"]
    return None if support["available"] else support["reason"]


@pytest.fixture(params=["cpu", "cuda"])
def device(request):
    reason = _why_not(request.param)
    if reason:
        pytest.skip(f"device {request.param}: {reason}")
    return request.param


@pytest.fixture(autouse=True)
def _fresh():
    torch.manual_seed(0)
    yield
    torch.compiler.reset()
