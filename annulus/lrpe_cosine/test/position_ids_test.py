"""Tokens that say where they are: values, gradients, packed sequences, compilation."""

import pytest
import torch
from samples_lrpe_cosine import DTYPES, compare, cosine, cosine_qk, rotate

import annulus

B, H, L = 2, 3, 23


def tensors(dtype, device, axes, columns=12, heads=H):
    x = torch.randn(B, heads, L, columns, device=device).to(dtype).requires_grad_()
    theta = torch.randn(heads, -(-columns // axes), device=device).requires_grad_()
    return x, theta


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("axes", [1, 2, 3])
@pytest.mark.parametrize("rows", [1, B])
def test_values_and_gradients(rows, axes, dtype, device):
    ids = torch.randint(-300, 300, (rows, L, axes), device=device)
    x, theta = tensors(dtype, device, axes)
    for activation, softmax_dim in (("none", -1), ("silu", -1), ("softmax", -1), ("softmax", -2)):
        options = dict(position_ids=ids, activation=activation, softmax_dim=softmax_dim)
        compare(annulus.lrpe_cosine, cosine, (x, theta, None), **options)
    half = torch.randn(H, -(-6 // axes), device=device, requires_grad=True)
    compare(annulus.lrpe_rotate, rotate, (x, half, None), position_ids=ids, interleaved=rows == 1)
    k, _ = tensors(dtype, device, axes, heads=2 * H)
    compare(annulus.lrpe_cosine_qk, cosine_qk, (x, k, theta, None), position_ids=ids)


def test_shapes_a_user_may_give(device):
    x, theta = tensors(torch.float32, device, 1)
    ids = torch.arange(L, device=device)
    want = annulus.lrpe_cosine(x, theta, (L,))
    for same in (ids, ids[None], ids.expand(B, L), ids[None, :, None], ids.int()):
        assert torch.equal(annulus.lrpe_cosine(x, theta, position_ids=same), want)
    module = annulus.nn.LrpeCosine(12, H).to(device)
    assert torch.equal(module(x, position_ids=ids), module(x, (L,)))
    for got, exact in zip(module.qk(x, x, position_ids=ids), module.qk(x, x, (L,))):
        assert torch.equal(got, exact)


def test_in_place(device):
    ids = torch.randint(0, 1000, (B, L), device=device)
    x, theta = torch.randn(B, H, L, 12, device=device), torch.randn(H, 6, device=device)
    want = annulus.lrpe_rotate(x, theta, position_ids=ids)
    assert torch.equal(annulus.lrpe_rotate_(x.clone(), theta, position_ids=ids), want)

    weight = torch.randn_like(x)

    def turned(function, x, theta):  # in place on what is not a leaf
        return (function(x * 1, theta, position_ids=ids) * weight).sum()

    x.requires_grad_(), theta.requires_grad_()
    for compiled in (False, True):
        in_place = torch.compile(turned, fullgraph=True) if compiled else turned
        got = torch.autograd.grad(in_place(annulus.lrpe_rotate_, x, theta), (x, theta))
        for g, e in zip(got, torch.autograd.grad(turned(annulus.lrpe_rotate, x, theta), (x, theta))):
            assert (g - e).abs().max() <= 1e-5 * e.abs().max()


def test_exported(device):
    class Packed(torch.nn.Module):
        def forward(self, x, theta, ids):
            return annulus.lrpe_cosine(x, theta, position_ids=ids, activation="silu")

    x, theta = torch.randn(B, H, L, 12, device=device), torch.randn(H, 12, device=device)
    ids = torch.randint(0, 1000, (B, L), device=device)
    program = torch.export.export(Packed(), (x, theta, ids))
    assert torch.equal(program.module()(x, theta, ids), Packed()(x, theta, ids))


@pytest.mark.parametrize("integers", [torch.int32, torch.int64])
def test_packed_sequences_equal_separate_calls(integers, device):
    lengths = [5, 1, 0, 9, 8]
    cu_seqlens = torch.tensor([0, 5, 6, 6, 15, 23], dtype=integers, device=device)
    packed = torch.randn(L, H, 12, device=device).transpose(0, 1)[None]  # (total, H, D) as it lies in memory
    theta = torch.randn(H, 12, device=device)
    ids = annulus.packed_positions(cu_seqlens, L)
    assert ids.dtype == integers
    assert ids.tolist() == [s for n in lengths for s in range(n)]
    y = annulus.lrpe_cosine(packed, theta, position_ids=ids)
    parts = [annulus.lrpe_cosine(p, theta, (p.shape[2],)) for p in packed.split(lengths, 2)]
    assert torch.equal(y, torch.cat(parts, 2))
    assert annulus.packed_positions(cu_seqlens[:2], 7).tolist() == [0, 1, 2, 3, 4, 0, 1]


def test_compiled_with_dynamic_sizes(device):
    @torch.compile(fullgraph=True, dynamic=True)
    def packed(x, theta, cu_seqlens):
        return annulus.lrpe_cosine(x, theta, position_ids=annulus.packed_positions(cu_seqlens, x.shape[2]))

    for tokens in (9, 14, 31):
        x = torch.randn(1, H, tokens, 12, device=device, requires_grad=True)
        theta = torch.randn(H, 12, device=device, requires_grad=True)
        cu_seqlens = torch.tensor([0, 4, tokens], device=device)
        y = packed(x, theta, cu_seqlens)
        want = annulus.lrpe_cosine(x, theta, position_ids=annulus.packed_positions(cu_seqlens, tokens))
        assert torch.equal(y, want)
        for got, exact in zip(*(torch.autograd.grad(o.square().sum(), (x, theta)) for o in (y, want))):
            torch.testing.assert_close(got, exact, rtol=1e-6, atol=1e-6)


def test_gradcheck():
    ids = torch.randint(-9, 9, (2, 3, 2))
    x = torch.randn(2, 2, 3, 4, dtype=torch.float64, requires_grad=True)
    theta = torch.randn(2, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, t: annulus.lrpe_cosine(x, t, position_ids=ids), (x, theta))
