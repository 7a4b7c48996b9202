"""Autocast: every operator takes what torch's layers make of its tensors there, and every module trains."""

import pytest
import torch
from contract import SAMPLES, every_sample, leaves

import annulus
from annulus import _operator

NARROW = pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float16], ids=str)


def test_every_operator_states_its_policy():
    operators = {o.name: o for o in _operator.OPERATORS}
    assert operators.keys() == {s.op for s in SAMPLES}
    for o in operators.values():
        assert o.casts.keys() <= set(o.arguments._fields) and set(o.casts.values()) <= {"lower", "fp32", "promote"}


def by_hand(sample, tensors, narrow):
    (operator,) = (o for o in _operator.OPERATORS if o.name == sample.op)
    casts = {k.removesuffix("_tensor"): policy for k, policy in operator.casts.items()}
    promoted = {t.dtype for k, t in tensors.items() if casts.get(k) == "promote"}
    wide = torch.float32 if torch.float32 in promoted else narrow
    dtypes = {"lower": narrow, "fp32": torch.float32, "promote": wide}
    return {k: t.to(dtypes[casts[k]]) if k in casts and t.dtype != torch.float64 else t for k, t in tensors.items()}


@NARROW
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@every_sample
def test_policy(sample, dtype, narrow, device):
    """The call of what the policy makes of the tensors, to the bit, with each in turn as a layer of torch's gives it there.

    float64 stays: such a call is not autocast's.
    """
    sample.require(dtype)
    tensors = sample.make(device, dtype, grad=True)
    names = [k for k, t in tensors.items() if t.requires_grad and dtype == torch.float32]
    for name in [None, *names]:
        mixed = {k: t.to(narrow) if k == name else t for k, t in tensors.items()}
        with torch.autocast(device, narrow):
            got = sample.run(mixed)
        want = sample.run(by_hand(sample, mixed, narrow))
        dys = [torch.randn_like(y) for y in want]
        for g, w in zip(*((*ys, *torch.autograd.grad(ys, leaves(tensors), dys)) for ys in (got, want)), strict=True):
            assert g.dtype == w.dtype and torch.equal(g, w), name


class Ring(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.actions, self.ring = torch.nn.Linear(3, 2), annulus.nn.RingRNN(16, 2, learn_scalars=True)

    def forward(self, x):
        out, h_n = self.ring(self.actions(x))
        return annulus.ring_readout(out)[1].mean() + h_n.square().mean()


class Attention(torch.nn.Module):
    def __init__(self, encode=lambda: annulus.nn.LrpeCosine(8, 2)):
        super().__init__()
        self.q, self.encode = torch.nn.Linear(3, 16), encode()

    def forward(self, x):
        q = self.q(x).unflatten(-1, (2, 8)).transpose(1, 2)
        q2, k2 = self.encode.qk(q, q.float(), (x.shape[1],))
        return (q2 @ k2.mT).square().mean() + self.encode(q, (x.shape[1],)).square().mean()


MODULES = {"RingRNN": Ring, "LrpeCosine": Attention,
           "LrpeRotate": lambda: Attention(lambda: annulus.nn.LrpeRotate(8, rotary_dim=4, learnable=True))}


@pytest.mark.parametrize("compiled", [False, True])
@NARROW
@pytest.mark.parametrize("name", annulus.nn.__all__)
def test_module_trains(name, narrow, compiled, device):
    model = MODULES[name]().to(device)
    step = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    x, losses = torch.randn(4, 6, 3, device=device), []
    for _ in range(20):
        with torch.autocast(device, narrow):
            loss = step(x)
        optimizer.zero_grad()
        loss.backward()
        assert all(p.grad.dtype == torch.float32 and p.grad.any() and p.grad.isfinite().all() for p in model.parameters())
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0], losses
