"""torch.func: what it differentiates is right, and what it cannot have raises instead of being zero."""

import collections

import pytest
import torch
from contract import Recorder, every_sample
from torch.autograd import forward_ad
from torch.func import grad, jacfwd, jacrev, jvp, vmap

import annulus


def loss(ys):
    return sum((0.5 * y.square() + y).sum() for y in ys)


def one_at_a_time(sample, device):
    """(name, value, value -> loss, value -> its gradient by torch.autograd, which other tests compare with the
    definition), for each tensor that has a gradient."""
    tensors = sample.make(device, sample.widest)
    for name, value in tensors.items():
        if value.is_floating_point():
            run = lambda v, name=name: loss(sample.run(tensors, **{name: v}))  # noqa: E731

            def gradient(v, run=run):
                v = v.clone().requires_grad_()
                return torch.autograd.grad(run(v), v)[0]

            yield name, value, run, gradient


@every_sample
def test_grad_and_vmap(sample, device):
    for name, value, run, gradient in one_at_a_time(sample, device):
        torch.testing.assert_close(grad(run)(value), gradient(value))
        several = torch.stack([value, 0.5 * value, -value])
        want = torch.stack([gradient(v) for v in several])
        torch.testing.assert_close(vmap(grad(run))(several), want)
        torch.testing.assert_close(grad(lambda v: vmap(run)(v).sum())(several), want)  # noqa: B023
        # A batched tensor does not say that it requires grad.
        several.requires_grad_()
        values = vmap(run)(several)
        torch.testing.assert_close(values, torch.stack([run(v) for v in several.detach()]))
        torch.testing.assert_close(torch.autograd.grad(values.sum(), several)[0], want)


@every_sample
def test_jacrev(sample, device):
    for name, value, _, gradient in one_at_a_time(sample, device):
        tensors = sample.make(device, sample.widest)
        run = lambda v: sample.run(tensors, **{name: v})[0].sum(0)  # noqa: E731,B023
        jacobian = jacrev(run)(value)
        leaf = value.clone().requires_grad_()
        y = run(leaf)
        weights = torch.randn_like(y)
        want = torch.autograd.grad(y, leaf, weights)[0]
        torch.testing.assert_close(torch.tensordot(weights, jacobian, y.dim()), want, **sample.close(device))
        rows = torch.eye(y.numel(), device=device, dtype=y.dtype).view(-1, *y.shape)
        (got,) = torch.autograd.grad(run(leaf), leaf, rows, is_grads_batched=True)
        torch.testing.assert_close(got.view_as(jacobian), jacobian, **sample.close(device))
        torch.testing.assert_close(torch.autograd.functional.jacobian(run, value, vectorize=True), jacobian, **sample.close(device))


@every_sample
def test_vmap(sample, device):
    """Of every tensor, in any place of the batch. Of the first one, forward and backward are one call each."""
    tensors = sample.make(device, sample.widest)
    for i, (name, value) in enumerate(tensors.items()):
        other = value if name in sample.fixed else value.flip(0) if value.dim() else -value
        several = torch.stack([value, other, value], -1)
        run = lambda v: sample.run(tensors, **{name: v})  # noqa: E731,B023
        with Recorder() as recorder:
            got = vmap(run, in_dims=-1)(several)
            if i == 0:
                vmap(grad(lambda v: loss(run(v))), in_dims=-1)(several)  # noqa: B023
        for g, w in zip(got, zip(*(run(v) for v in several.unbind(-1))), strict=True):
            torch.testing.assert_close(g, torch.stack(w))
        if i == 0 and sample.folds:
            counts = collections.Counter(op._schema.name.removeprefix("annulus::") for op, _ in recorder.calls)
            assert counts.pop(sample.op) == 2 and set(counts.values()) == {1}, counts


@every_sample
@pytest.mark.parametrize("by", [jvp, jacfwd, forward_ad], ids=["jvp", "jacfwd", "forward_ad"])
def test_forward_mode_is_refused(sample, device, by):
    for _, value, run, _ in one_at_a_time(sample, device):
        with pytest.raises(annulus.NotSupported, match=rf"\[{sample.op}\] has no forward-mode derivative"):
            if by is jvp:
                jvp(run, (value,), (value,))
            elif by is jacfwd:
                jacfwd(run)(value)
            else:
                with forward_ad.dual_level():
                    run(forward_ad.make_dual(value, value))
        with forward_ad.dual_level():  # of something else
            run(value)


@every_sample
def test_second_derivative_is_refused(sample, device):
    for _, value, run, _ in one_at_a_time(sample, device):
        with pytest.raises(annulus.NotSupported, match=rf"\[{sample.op}\] has no second derivative"):
            grad(lambda v: grad(run)(v).sum())(value)  # noqa: B023


@every_sample
def test_bad_call_is_typed(sample, device):
    for _, value, run, _ in one_at_a_time(sample, device):
        with pytest.raises(annulus.InvalidArgument, match=rf"\[{sample.op}\] \w+ must"):
            grad(run)(value[(None,) * 4])


@every_sample
def test_compiled(sample, device):
    """The same while torch.compile traces: what is right stays right, and what there is not is no zero."""
    compiled = lambda f: torch.compile(f, fullgraph=True, backend="aot_eager")  # noqa: E731
    (_, value, run, gradient), *others = one_at_a_time(sample, device)
    for _, v, r, g in ((None, value, run, gradient), *others[:1]):
        torch.compiler.reset()  # torch does not tell the function of one tensor from that of another of the same shape
        several = torch.stack([v, 0.5 * v])
        torch.testing.assert_close(compiled(vmap(grad(r)))(several), torch.stack([g(one) for one in several]))
    for f in (grad(lambda v: grad(run)(v).sum()), lambda v: jvp(run, (v,), (v,))):
        with pytest.raises(Exception, match=rf"\[{sample.op}(_backward)?\] has no (second|forward-mode) derivative"):
            compiled(f)(value)
