"""torch.func: what it differentiates is right, and what it cannot have raises instead of being zero."""

import pytest
import torch
from torch.autograd import forward_ad
from torch.func import grad, jacfwd, jacrev, jvp, vmap

import annulus


def x_theta(device):
    return (
        torch.randn(2, 3, 5, 4, dtype=torch.float64, device=device),
        torch.randn(3, 4, dtype=torch.float64, device=device),
    )


def half(theta):
    return theta[:, :2].contiguous()


FORMS = {
    "lrpe_cosine": lambda x, theta: annulus.lrpe_cosine(x, theta, (5,)),
    "lrpe_cosine silu": lambda x, theta: annulus.lrpe_cosine(x, theta, (5,), activation="silu"),
    "lrpe_cosine_qk": lambda x, theta: annulus.lrpe_cosine_qk(x, 2 * x, theta, (5,))[1],
    "lrpe_rotate": lambda x, theta: annulus.lrpe_rotate(x, half(theta), (5,)),
    # theta in the sum, so that a batch of thetas makes a batch of x to be overwritten
    "lrpe_rotate in place": lambda x, theta: annulus.lrpe_rotate_(x + 0 * theta.sum(), half(theta), (5,)),
}


@pytest.fixture(params=FORMS, ids=str)
def form(request):
    return FORMS[request.param]


def loss(y):
    return (0.5 * y.square() + y).sum()


def gradients(form, x, theta):
    """By torch.autograd, which other tests compare with the definition."""
    x, theta = x.clone().requires_grad_(), theta.clone().requires_grad_()
    return torch.autograd.grad(loss(form(x, theta)), (x, theta))


def test_grad(form, device):
    x, theta = x_theta(device)
    got = grad(lambda x, theta: loss(form(x, theta)), argnums=(0, 1))(x, theta)
    torch.testing.assert_close(got, gradients(form, x, theta))


def test_vmap_of_grad(form, device):
    x, theta = x_theta(device)
    xs, thetas = torch.stack([x, 2 * x, 3 * x]), torch.stack([theta, -theta])
    got = vmap(grad(lambda x: loss(form(x, theta))))(xs)
    torch.testing.assert_close(got, torch.stack([gradients(form, x, theta)[0] for x in xs]))
    got = vmap(grad(lambda theta: loss(form(x, theta))))(thetas)
    torch.testing.assert_close(got, torch.stack([gradients(form, x, theta)[1] for theta in thetas]))


def test_gradient_through_vmap(form, device):
    """A batched tensor does not say that it requires grad."""
    x, theta = x_theta(device)
    thetas = torch.stack([theta, -theta]).requires_grad_()
    vmap(lambda theta: loss(form(x, theta)))(thetas).sum().backward()
    torch.testing.assert_close(thetas.grad, torch.stack([gradients(form, x, t)[1] for t in thetas.detach()]))


def test_jacrev(form, device):
    x, theta = x_theta(device)
    jacobian = jacrev(lambda theta: form(x, theta).sum((0, 3)))(theta)
    assert jacobian.shape == (3, 5, 3, 4) and (jacobian[0, 1, 0] != 0).any()
    assert not jacobian[0, :, 1].any()  # another head's


@pytest.mark.parametrize("by", [jvp, jacfwd, forward_ad])
def test_forward_mode_is_refused(form, device, by):
    x, theta = x_theta(device)
    with pytest.raises(annulus.NotSupported, match=r"\[lrpe_\w+\] has no forward-mode derivative"):
        if by is jvp:
            jvp(lambda theta: form(x, theta), (theta,), (theta,))
        elif by is jacfwd:
            jacfwd(lambda x: form(x, theta))(x)
        else:
            with forward_ad.dual_level():
                form(forward_ad.make_dual(x, x), theta)
    with forward_ad.dual_level():  # of something else
        form(x, theta)


def test_second_derivative_is_refused(form, device):
    x, theta = x_theta(device)
    with pytest.raises(annulus.NotSupported, match=r"\[lrpe_\w+\] has no second derivative"):
        grad(lambda theta: grad(lambda theta: loss(form(x, theta)))(theta).sum())(theta)


def test_bad_call_is_typed(device):
    x, theta = x_theta(device)
    with pytest.raises(annulus.InvalidArgument, match=r"\[lrpe_cosine\] theta must have"):
        grad(lambda x: annulus.lrpe_cosine(x, theta[:, :3], (5,)).sum())(x)


def ring(device):
    A, Wa = torch.randn(2, 4, 3, dtype=torch.float64), 0.3 * torch.randn(3, 6, 6, dtype=torch.float64)
    Wo, r0 = 0.3 * torch.randn(6, 6, dtype=torch.float64), torch.randn(2, 6, dtype=torch.float64)
    A, Wa, Wo, r0 = (t.to(device) for t in (A, Wa, Wo, r0))
    return Wa, r0, lambda Wa: annulus.ring_rnn(A, Wa, Wo, r0, return_readout=True)


def test_ring_rnn(device):
    Wa, _, run = ring(device)
    leaf = Wa.clone().requires_grad_()
    (want,) = torch.autograd.grad(sum(map(loss, run(leaf))), leaf)
    torch.testing.assert_close(grad(lambda Wa: sum(map(loss, run(Wa))))(Wa), want)
    outs = vmap(lambda Wa: run(Wa)[0])(torch.stack([Wa, 0.5 * Wa]))
    torch.testing.assert_close(outs, torch.stack([run(Wa)[0], run(0.5 * Wa)[0]]))


def test_ring_rnn_refuses_what_it_has_not(device):
    Wa, r0, run = ring(device)
    with pytest.raises(annulus.NotSupported, match=r"\[ring_rnn\] has no forward-mode derivative"):
        jvp(lambda Wa: run(Wa)[0], (Wa,), (Wa,))
    with pytest.raises(annulus.NotSupported, match=r"\[ring_readout\] has no forward-mode derivative"):
        jvp(lambda r: annulus.ring_readout(r[:, None])[0], (r0,), (r0,))
    with pytest.raises(annulus.NotSupported, match=r"\[ring_rnn\] has no second derivative"):
        grad(lambda Wa: grad(lambda Wa: loss(run(Wa)[0]))(Wa).sum())(Wa)
