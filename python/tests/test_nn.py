"""The modules, beyond what their functions do."""

import inspect

import pytest
import torch

import annulus


def test_ring_without_a_start_begins_at_its_bump(device):
    """From zeros the states and every gradient are exactly 0, for ever."""
    model = annulus.nn.RingRNN(16, 2, learn_scalars=True).to(device)
    A = torch.randn(3, 5, 2, device=device)
    out, h_n = model(A)
    for got, want in zip((out, h_n), model(A, model.bump(torch.zeros(3, device=device)))):
        assert torch.equal(got, want) and got.any()
    out.square().sum().backward()
    assert all(p.grad.any() for p in model.parameters())


def test_ring_has_the_defaults_of_its_function():
    module, function = (inspect.signature(f).parameters for f in (annulus.nn.RingRNN, annulus.ring_rnn))
    shared = [name for name in module if name in function]
    assert {"activation", "J0", "J1", "alpha", "precision", "checkpoint"} <= set(shared)
    assert [module[name].default for name in shared] == [function[name].default for name in shared]


def test_lrpe_sizes_a_user_may_leave_out(device):
    x, theta = torch.randn(2, 3, 10, 8, device=device), torch.randn(3, 4, device=device)
    functions = [lambda t, *a, **k: annulus.lrpe_cosine(x, torch.cat([t, t], 1), *a, **k),
                 lambda t, *a, **k: torch.cat(annulus.lrpe_cosine_qk(x, x, torch.cat([t, t], 1), *a, **k)),
                 lambda t, *a, **k: annulus.lrpe_rotate(x, t, *a, **k),
                 lambda t, *a, **k: annulus.lrpe_rotate_(x.clone(), t, *a, **k)]
    for function in [f for g in functions for f in (g, torch.compile(g, fullgraph=True, dynamic=True, backend="aot_eager"))]:
        assert torch.equal(function(theta), function(theta, (10,)))
        assert torch.equal(function(theta, prefix=3), function(theta, (7,), prefix=3))
        assert torch.equal(function(theta, 7, prefix=3), function(theta, (7,), prefix=3))
        assert torch.equal(function(theta, offset=torch.tensor(5, device=device)), function(theta, (10,), offset=5))
        with pytest.raises(annulus.InvalidArgument, match=r"shape must have prefix \+ product = 10"):
            function(theta, 9)
        with pytest.raises(annulus.InvalidArgument, match="shape must have no negative size"):
            function(theta, prefix=11)
        with pytest.raises(annulus.InvalidArgument, match=r"theta must have at most [48] columns"):
            function(torch.cat([theta, theta], 1))
