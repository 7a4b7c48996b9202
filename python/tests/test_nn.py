"""The modules, beyond what their functions do."""

import inspect

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
