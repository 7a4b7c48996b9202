"""RoPE as people use it: theta of every shape, partial rotary, queries and keys of one projection, other models' frequencies.

Hugging Face's equations are written here as its models have them: the rotary_emb that makes cos and sin from inv_freq and
position_ids, and apply_rotary_pos_emb, of Llama (all columns), GPT-NeoX (the first of them) and GPT-J (interleaved).
"""

import sys

import pytest
import torch
from samples_lrpe_cosine import DTYPES, compare, cosine, cosine_qk, rotate, rotate_qk

import annulus

LrpeRotate = annulus.nn.LrpeRotate


class RotaryEmbedding(torch.nn.Module):
    """LlamaRotaryEmbedding, in double so that it is a measure."""

    def __init__(self, dim, base=10000.0, attention_scaling=1.0):
        super().__init__()
        inv_freq = 1.0 / (base ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim))
        self.register_buffer("inv_freq", inv_freq, persistent=False)
        self.attention_scaling = attention_scaling

    def forward(self, x, position_ids):
        freqs = position_ids[:, :, None].double() * self.inv_freq.double()
        emb = torch.cat((freqs, freqs), dim=-1)
        return emb.cos() * self.attention_scaling, emb.sin() * self.attention_scaling


def rotate_half(x):
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat((-x2, x1), dim=-1)


def rotate_every_two(x):
    return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)


def apply_rotary_pos_emb(q, k, cos, sin, interleaved=False):
    """With fewer columns in cos and sin than in q and k, the first of them (GPT-NeoX)."""
    cos, sin = cos[:, None], sin[:, None]
    if interleaved:
        cos, sin = (t[..., : t.shape[-1] // 2].repeat_interleave(2, -1) for t in (cos, sin))
    turn = rotate_every_two if interleaved else rotate_half
    dim = cos.shape[-1]
    return tuple(torch.cat((x[..., :dim] * cos + turn(x[..., :dim]) * sin, x[..., dim:]), -1) for x in (q, k))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("head_dim,rotary_dim,scaling", [(64, 64, 1.0), (64, 16, 1.0), (20, 20, 1.25), (24, 10, 0.8)])
def test_hugging_face(head_dim, rotary_dim, scaling, interleaved, device):
    """Eight query heads to two of keys, positions of each sequence's own, values and gradients."""
    theirs = RotaryEmbedding(rotary_dim, 500000.0, scaling).to(device)
    ours = LrpeRotate.from_inv_freq(theirs, head_dim, interleaved=interleaved)
    q, k = (torch.randn(2, 11, h, head_dim, device=device).transpose(1, 2).requires_grad_() for h in (8, 2))
    position_ids = torch.stack([torch.arange(11), torch.arange(4000, 4011)]).to(device)
    got = ours.qk(q, k, position_ids=position_ids)
    want = apply_rotary_pos_emb(q.double(), k.double(), *theirs(q, position_ids), interleaved)
    dy = [torch.randn_like(y) for y in got]
    gradients = (torch.autograd.grad(y, (q, k), d) for y, d in ((got, dy), (want, [d.double() for d in dy])))
    for g, w in [*zip(got, want), *zip(*gradients)]:
        assert (g - w).abs().max() <= 5e-7 * w.abs().max()
    if scaling == 1.0:  # what passes through is what came, to the bit
        assert torch.equal(got[0][..., rotary_dim:], q[..., rotary_dim:])
    one = ours(q, position_ids=position_ids)
    assert torch.equal(one, got[0])
    # The same frequencies by the formula; theirs are powers in float32.
    made = LrpeRotate(head_dim, base=500000.0, rotary_dim=rotary_dim, interleaved=interleaved, scaling=scaling).to(device)
    torch.testing.assert_close(made.theta, ours.theta, rtol=1e-6, atol=0)


class Transformer(torch.nn.Module):
    """A layer as Llama has it: one projection, grouped queries, RoPE, causal attention."""

    def __init__(self, width=64, heads=4, kv_heads=2):
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, width // heads
        self.qkv = torch.nn.Linear(width, (heads + 2 * kv_heads) * self.head_dim, bias=False)
        self.out = torch.nn.Linear(width, width, bias=False)
        self.rotary_emb = RotaryEmbedding(self.head_dim)

    def forward(self, x, position_ids):
        qkv = self.qkv(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        q, k, v = qkv.split((self.heads, self.kv_heads, self.kv_heads), 1)
        q, k = (y.to(x.dtype) for y in apply_rotary_pos_emb(q, k, *self.rotary_emb(x, position_ids)))
        o = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(o.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("compiled", [False, True])
def test_swapped_in_a_transformer(compiled, device, monkeypatch):
    """The three lines of lrpe_cosine.md; the same outputs and gradients, and the same entries in the state dict."""
    model = Transformer().to(device)
    x, ids = torch.randn(2, 13, 64, device=device), torch.arange(13, device=device)[None]
    want, names = model(x, ids), list(model.state_dict())
    dy = torch.randn_like(want)
    exact = torch.autograd.grad(want, model.parameters(), dy)

    rope = LrpeRotate.from_inv_freq(model.rotary_emb)
    model.rotary_emb.forward = lambda x, position_ids: (position_ids, None)
    calls = []

    def swapped(q, k, position_ids, _):
        calls.append(q.shape)  # which torch.compile repeats after its graph
        return rope.qk(q, k, position_ids=position_ids)

    monkeypatch.setattr(sys.modules[__name__], "apply_rotary_pos_emb", swapped)

    got = (torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model)(x, ids)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    assert calls == [(2, 4, 13, 16)] and list(model.state_dict()) == names
    for g, w in zip(torch.autograd.grad(got, model.parameters(), dy), exact):
        torch.testing.assert_close(g, w, rtol=1e-4, atol=1e-5)
    step = torch.randn(1, 4, 1, 16, device=device)  # decoding by an offset is the same rotation
    for offset in (0, 12, 131071):
        assert torch.equal(rope(step, offset=offset), rope(step, position_ids=torch.tensor([offset], device=device)))


# Theta as (E,), (1, E) and (H, E), in every form


@pytest.mark.parametrize("rows", [(), (1,), (2,)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_theta_of_every_shape(rows, dtype, device):
    x, k = (torch.randn(2, h, 9, 12, device=device).to(dtype).requires_grad_() for h in (2, 6))
    options = dict(prefix=1)
    for function, definition, inputs, frequencies in (
        (annulus.lrpe_cosine, cosine, (x,), 12), (annulus.lrpe_cosine_qk, cosine_qk, (x, k), 12),
        (annulus.lrpe_rotate, rotate, (x,), 6), (annulus.lrpe_rotate_qk, rotate_qk, (x, k), 6),
    ):
        theta = torch.randn(*rows, frequencies, device=device).requires_grad_()
        compare(function, definition, (*inputs, theta, (8,)), **options)  # dtheta in theta's shape, too
        if rows == ():  # the bits of the row that it is, repeated or not
            ys = function(*inputs, theta, (8,), **options), function(*inputs, theta.expand(2, -1), (8,), **options)
            assert all(torch.equal(a, b) for a, b in zip(*(y if isinstance(y, tuple) else (y,) for y in ys)))


# Partial rotary


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape,frequencies", [((9,), 3), ((3, 3), 2), ((3, 1, 3), 1)])
def test_partial_rotary(shape, frequencies, dtype, interleaved, device):
    x, k = (torch.randn(2, h, 9, 12, device=device).to(dtype).requires_grad_() for h in (2, 4))
    theta = torch.randn(2, frequencies, device=device).requires_grad_()
    compare(annulus.lrpe_rotate, rotate, (x, theta, shape), interleaved=interleaved)
    compare(annulus.lrpe_rotate_qk, rotate_qk, (x, k, theta, shape), interleaved=interleaved)
    # A NaN in a column that passes through reaches nothing; in place the rest is not touched.
    turning = 2 * len(shape) * frequencies
    spoilt = x.detach().clone()
    spoilt[..., turning:] = float("nan")
    want = annulus.lrpe_rotate(x.detach(), theta.detach(), shape, interleaved=interleaved)
    for y in (annulus.lrpe_rotate(spoilt, theta.detach(), shape, interleaved=interleaved),
              annulus.lrpe_rotate_(spoilt, theta.detach(), shape, interleaved=interleaved)):
        assert torch.equal(y[..., :turning], want[..., :turning]) and y[..., turning:].isnan().all()


# Queries and keys


def test_one_projection_in_place(device):
    """q and k side by side in memory are turned there, v stays; with gradients the values are the same."""
    theta = torch.randn(8, device=device)
    qkv = torch.randn(2, 7, (6 + 2 + 2) * 16, device=device)
    want = qkv.clone()
    split = lambda t: t.unflatten(-1, (10, 16)).transpose(1, 2).split((6, 2, 2), 1)  # noqa: E731
    q, k, _ = split(want)
    expected = annulus.lrpe_rotate_qk(q, k, theta, offset=3)
    q.copy_(expected[0]), k.copy_(expected[1])
    version = qkv._version
    q, k, _ = split(qkv)
    yq, yk = annulus.lrpe_rotate_qk_(q, k, theta, offset=3)
    assert yq is q and yk is k and qkv._version > version
    assert torch.equal(qkv, want)

    base = torch.randn(2, 7, 160, device=device, requires_grad=True)
    for learns in (False, True):
        frequencies = theta.clone().requires_grad_(learns)
        q, k, v = split(base * 1)
        # (split makes views of which torch allows none to be changed in place where it has gradients)
        q, k = q.clone(), k.clone()
        annulus.lrpe_rotate_qk_(q, k, frequencies, offset=3)
        q1, k1, _ = split(base)
        exact = annulus.lrpe_rotate_qk(q1, k1, frequencies, offset=3)
        leaves = (base, frequencies) if learns else (base,)
        dy = [torch.randn_like(q), torch.randn_like(k)]
        got, want = (torch.autograd.grad(y, leaves, dy) for y in ((q, k), exact))
        assert all(torch.equal(g, w) for g, w in zip(got, want))
    with pytest.raises(annulus.InvalidArgument, match=r"\[lrpe_rotate_qk\] k must not be a leaf"):
        annulus.lrpe_rotate_qk_(torch.ones(1, 1, 2, 16), torch.ones(1, 1, 2, 16, requires_grad=True), theta.cpu())
    q = torch.ones(1, 2, 3, 16, device=device)
    with pytest.raises(annulus.InvalidArgument, match=r"\[lrpe_rotate_qk\] yq must not overlap k in memory"):
        annulus.lrpe_rotate_qk_(q, q, theta)
    with pytest.raises(annulus.InvalidArgument, match=r"\[lrpe_rotate_qk\] k must be f32 but is bf16"):
        annulus.lrpe_rotate_qk_(q, q.bfloat16(), theta)
    with pytest.raises(annulus.InvalidArgument, match=r"\[lrpe_rotate_qk\] k must be torch.float32"), torch.autocast(device):
        annulus.lrpe_rotate_qk_(q, q.bfloat16(), theta.requires_grad_())
    assert (q == 1).all()


HEADS = {"slices": lambda x: (x[:, :6], x[:, 6:8]), "split": lambda x: x.split((6, 2, 2), 1)[:2],
         "unbind": lambda x: x[:, :8].unflatten(1, (2, 4)).unbind(1), "no_grad": lambda x: torch.no_grad()(HEADS["slices"])(x),
         "second of split": lambda x: (x[:, :2].clone(), x.split((6, 2, 2), 1)[1])}


@pytest.mark.parametrize("needs", ["theta", "both"])
@pytest.mark.parametrize("parts", HEADS)
def test_one_projection_in_place_with_gradients(parts, needs, device):
    """Either both are written, with the gradients of lrpe_rotate_qk, or neither is and the error is typed."""
    theta = torch.randn(8, device=device, requires_grad=True)
    leaf = torch.randn(2, 7, 160, device=device, requires_grad=needs == "both")
    base = leaf * 1
    q, k = HEADS[parts](base.unflatten(-1, (10, 16)).transpose(1, 2))
    before = q.detach().clone()
    if parts != "slices":
        with pytest.raises(annulus.InvalidArgument, match=r"\[lrpe_rotate_qk\] [qk] must (be what torch lets|not be a leaf)"):
            annulus.lrpe_rotate_qk_(q, k, theta)
        assert torch.equal(q.detach(), before) and torch.equal(base.detach(), leaf.detach())
        return
    leaves = (theta, leaf) if needs == "both" else (theta,)
    q1, k1 = HEADS[parts](leaf.unflatten(-1, (10, 16)).transpose(1, 2))
    want = annulus.lrpe_rotate_qk(q1, k1, theta)
    annulus.lrpe_rotate_qk_(q, k, theta)
    dy = [torch.randn_like(y) for y in want]
    assert torch.equal(q, want[0]) and torch.equal(k, want[1])
    for g, w in zip(*(torch.autograd.grad(ys, leaves, dy) for ys in ((q, k), want))):
        torch.testing.assert_close(g, w)
    for bad in (torch.ones(1, 1, 2, 16, device=device, requires_grad=True)[:, :1], torch.inference_mode()(torch.ones)(1, 1, 2, 16, device=device)):
        q = torch.ones(1, 1, 2, 16, device=device)
        with pytest.raises(annulus.InvalidArgument, match=r"\[lrpe_rotate_qk\] k must (not be a view of a leaf|be what torch lets)"):
            annulus.lrpe_rotate_qk_(q, bad, theta)
        assert (q == 1).all() and not q.requires_grad


MODES = {
    "eager": lambda f: f, "compiled": lambda f: torch.compile(f, fullgraph=True, backend="aot_eager"),
    "grad": lambda f: lambda b, t: torch.func.grad(lambda t: sum(y.sum() for y in f(b * t.sum(), t)))(t.detach()),
    "vmap": lambda f: lambda b, t: torch.vmap(lambda b: f(b, t))(b[None]),
}
MODES["compiled grad"] = lambda f: MODES["compiled"](MODES["grad"](f))


@pytest.mark.parametrize("learns", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_overlap_is_refused_in_every_mode(mode, learns, device):
    theta = torch.randn(8, device=device, requires_grad=learns)
    base = torch.ones(2, 7, 160, device=device)

    def turn(q, k):
        def run(b, t):
            x = b.unflatten(-1, (10, 16)).transpose(1, 2)
            return annulus.lrpe_rotate_qk_(q(x), k(x), t)

        return MODES[mode](run)

    for q, k in ((0, 6), (6, 0), (4, 2)):  # side by side
        turn(lambda x: x[:, q : q + 2], lambda x: x[:, k : k + 2])(base.clone(), theta)  # noqa: B023
    turn(lambda x: x[:, ::2], lambda x: x[:, 1::2])(base.clone(), theta)
    turn(lambda x: x[:, :, :3], lambda x: x[:, :, 3:6])(base.clone(), theta)
    for q, k in ((0, 0), (0, 1), (3, 2)):
        with pytest.raises(annulus.InvalidArgument, match=r"\[lrpe_rotate_qk\] yq must not overlap k in memory but does"):
            turn(lambda x: x[:, q : q + 2], lambda x: x[:, k : k + 2])(base, theta)  # noqa: B023
    with pytest.raises(annulus.InvalidArgument, match=r"\[lrpe_rotate_qk\] yk must have strides under which no two"):
        turn(lambda x: x[:, :2], lambda x: x[:, 4:5].expand(-1, 2, -1, -1))(base, theta)
    assert (base == 1).all()


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (1, 3)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rotate_qk(heads, dtype, device):
    q, k = (torch.randn(2, h, 14, 10, device=device).to(dtype).requires_grad_() for h in heads)
    theta = torch.randn(min(heads), 3, device=device).requires_grad_()
    compare(annulus.lrpe_rotate_qk, rotate_qk, (q, k, theta, (3, 4)), prefix=2)


# The module


def test_module(device):
    module = LrpeRotate(40, 2, 3, base=500.0, learnable=True).to(device)
    assert module.theta.shape == (2, 7) and "theta" in module.state_dict()
    x = torch.randn(1, 2, 24, 40, device=device)
    want = rotate(x, module.theta, (2, 3, 4))
    assert (module(x, (2, 3, 4)).double() - want).abs().max() <= 1e-6 * want.abs().max()
    module(x, (2, 3, 4))[..., 0].sum().backward()
    assert module.theta.grad[:, 0].all()
    partial = LrpeRotate(40, n_axes=2, rotary_dim=24)
    assert partial.theta.shape == (1, 6) and not partial.state_dict() and "rotary_dim=24" in repr(partial)
    assert partial.half().theta.dtype == torch.float32
    for arguments, name in (((7,), "head_dim"), ((8, 1, 1, 1.0, 10), "rotary_dim"), ((8, 1, 1, 1.0, 3), "rotary_dim"),
                            ((16, 1, 3, 1.0, 8), "rotary_dim"), ((4, 1, 3), "rotary_dim"), ((8, 1, 5), "n_axes")):
        with pytest.raises(annulus.InvalidArgument, match=rf"\[LrpeRotate\] {name} must"):
            LrpeRotate(*arguments)


@pytest.mark.parametrize("mode", ["eager", "compiled", "fullgraph"])
def test_module_refuses_what_it_was_not_made_for(mode, device):
    """Columns or axes for which theta would fit as well, and turn fewer columns than head_dim or others."""
    run = lambda f, *a, **k: (f if mode == "eager" else torch.compile(  # noqa: E731
        f, fullgraph=mode == "fullgraph", backend="aot_eager"))(*a, **k)
    x = lambda columns: torch.ones(2, 3, 6, columns, device=device)  # noqa: E731
    ids = torch.ones(2, 6, 2, dtype=torch.int64, device=device)
    one, two = LrpeRotate(8, device=device), LrpeRotate(8, n_axes=2, device=device)
    cosine2 = annulus.nn.LrpeCosine(8, 3, 2, device=device)
    scaled = RotaryEmbedding(8, attention_scaling=1.5).to(device)
    assert run(two, x(8), (2, 3)).shape == run(two, x(8), position_ids=ids).shape == run(one, x(8), 6).shape == x(8).shape
    assert run(cosine2, x(8), [2, 3]).shape == x(16).shape
    for module, inputs, options, message in (
        (one, (x(16),), {}, "x must have head_dim, 8, columns but has 16"),
        (one.qk, (x(8), x(16)), {}, "k must have head_dim, 8, columns but has 16"),
        (one.qk, (x(16), x(16)), {}, "q must have head_dim, 8, columns but has 16"),
        (LrpeRotate.from_inv_freq(scaled), (x(16),), {}, "x must have head_dim, 8, columns but has 16"),
        (two, (x(8),), {}, "shape must have n_axes, 2, axes but has 1"),
        (two.qk, (x(8), x(8)), dict(shape=6), "shape must have n_axes, 2, axes but has 1"),
        (two, (x(8),), dict(shape=(2, 3, 1)), "shape must have n_axes, 2, axes but has 3"),
        (two, (x(8),), dict(position_ids=ids[..., 0]), "position_ids must have n_axes, 2, axes but has 1"),
        (one.qk, (x(8), x(8)), dict(position_ids=ids), "position_ids must have n_axes, 1, axes but has 2"),
        (cosine2, (x(6),), dict(shape=(2, 3)), "x must have head_dim, 8, columns but has 6"),
        (cosine2.qk, (x(8), x(6)), dict(shape=(2, 3)), "k must have head_dim, 8, columns but has 6"),
        (cosine2, (x(8),), {}, "shape must have n_axes, 2, axes but has 1"),
    ):
        name = "LrpeCosine" if "cosine" in str(type(getattr(module, "__self__", module))).lower() else "LrpeRotate"
        wanted = rf"\[{name}\] {message}"
        # With fullgraph torch.compile raises its own type for what Python code raises, with our sentence in it.
        kind = torch._dynamo.exc.Unsupported if mode == "fullgraph" else annulus.InvalidArgument
        with pytest.raises(kind, match=wanted):
            run(module, *inputs, **options)


def test_frequencies_of_others(device):
    inv_freq = torch.rand(3, 4, dtype=torch.float64, device=device)
    module = LrpeRotate.from_inv_freq(inv_freq, head_dim=12, learnable=True)
    assert module.n_heads == 3 and module.rotary_dim == 8 and torch.equal(module.theta.detach(), inv_freq.float())
    with pytest.raises(annulus.InvalidArgument, match="base must be known"):
        module.reset_parameters()  # what they were made from is not there
    theirs = RotaryEmbedding(8)
    for bad, message in ((theirs.inv_freq.bfloat16(), "be float32 or float64 but is torch.bfloat16"), (None, "be a tensor"),
                         (torch.nn.Linear(2, 2), "be a tensor, or that of a module, but comes as Linear"),
                         (torch.ones(2, 2, 2), r"have shape \(E,\)"), (torch.ones(0), r"have shape \(E,\)")):
        with pytest.raises(annulus.InvalidArgument, match=rf"\[LrpeRotate\] inv_freq must {message}"):
            LrpeRotate.from_inv_freq(bad)
    with pytest.raises(annulus.InvalidArgument, match="rotary_dim must be even and at most head_dim"):
        LrpeRotate.from_inv_freq(theirs, head_dim=6)
    theirs.rope_type = "dynamic"
    with pytest.raises(annulus.NotSupported, match="changes its frequencies"):
        LrpeRotate.from_inv_freq(theirs)
