"""Every test that takes `device` runs on the CPU and, where there is one, on a CUDA device."""

import pytest
import torch

import annulus
import contract  # noqa: F401  (lets tests import samples_<operator>)


@pytest.fixture(params=["cpu", "cuda"])
def device(request):
    support = annulus.info()["devices"][request.param]
    if not support["available"]:
        pytest.skip(f"device {request.param}: {support['reason']}")
    return request.param


@pytest.fixture(autouse=True)
def _fresh():
    torch.manual_seed(0)
    yield
    torch.compiler.reset()
