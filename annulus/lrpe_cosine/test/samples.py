"""The LRPE forms for the tests in Python: their definitions in double precision, differentiable; sample and wrong calls."""

import torch
from contract import Sample

import annulus

ACTIVATIONS = [("none", -1), ("relu", -1), ("sigmoid", -1), ("silu", -1), ("softmax", -1), ("softmax", -2)]
DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
# Largest deviation, relative to the largest exact value. Outputs of 16-bit types: one unit in the last place.
OUTPUT = {torch.float64: 1e-12, torch.float32: 2e-7, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-8}
# The exponential activations add the roundings of exp and of a reciprocal sum to those of the phase: the common
# policy of testing/limits.h.
EXPONENTIAL = {**OUTPUT, torch.float32: 1e-6}
GRADIENT = {torch.float64: 1e-12, torch.float32: 1e-6, torch.float16: 2.0**-9, torch.bfloat16: 2.0**-7}


def _phase(theta, columns, shape, prefix, offset, position_ids):
    """(B or 1, H, L, columns) in double."""
    if position_ids is None:
        axes = [torch.arange(n, dtype=torch.float64, device=theta.device) for n in shape]
        s = torch.stack(torch.meshgrid(*axes, indexing="ij"), -1).reshape(1, -1, len(shape))
    else:
        s = position_ids.double()  # (B or 1, L, m)
    if isinstance(offset, torch.Tensor):
        s = s + offset.to(torch.float64)[:, None, None]
    else:
        s = s + offset
    theta = theta.double().reshape(-1, theta.shape[-1])
    phase = torch.einsum("btm,he->bhtme", s, theta).flatten(3)[..., :columns]
    return torch.nn.functional.pad(phase, (0, 0, prefix, 0))


def _activate(x, activation, softmax_dim):
    if activation == "none":
        return x
    if activation == "softmax":
        return x.softmax(softmax_dim)
    return {"relu": torch.relu, "sigmoid": torch.sigmoid, "silu": torch.nn.functional.silu}[activation](x)


def cosine(x, theta, shape=None, *, prefix=0, activation="none", softmax_dim=-1, offset=0, position_ids=None):
    x = _activate(x.double(), activation, softmax_dim)
    phase = _phase(theta, x.shape[-1], shape, prefix, offset, position_ids)
    return torch.cat([x * phase.cos(), x * phase.sin()], -1)


def rotate(x, theta, shape=None, *, prefix=0, interleaved=False, offset=0, position_ids=None):
    x = x.double()
    phase = _phase(theta, x.shape[-1] // 2, shape, prefix, offset, position_ids)
    R = phase.shape[-1]  # pairs that turn
    x1, x2 = (x[..., 0 : 2 * R : 2], x[..., 1 : 2 * R : 2]) if interleaved else (x[..., :R], x[..., R : 2 * R])
    y1, y2 = x1 * phase.cos() - x2 * phase.sin(), x1 * phase.sin() + x2 * phase.cos()
    turned = torch.stack([y1, y2], -1).flatten(-2) if interleaved else torch.cat([y1, y2], -1)
    return torch.cat([turned, x[..., 2 * R :]], -1)


def _of_both(definition):
    def both(q, k, theta, shape=None, **options):
        def one(x):
            rows = theta.reshape(-1, theta.shape[-1])
            return definition(x, rows.repeat_interleave(x.shape[1] // rows.shape[0], 0), shape, **options)

        return one(q), one(k)

    return both


cosine_qk, rotate_qk = _of_both(cosine), _of_both(rotate)


def assert_close(got, want, limits=OUTPUT):
    assert got.shape == want.shape
    assert torch.isfinite(got).all()
    if got.numel() == 0:
        return
    error = (got.double() - want.double()).abs().max() / want.double().abs().max().clamp_min(1e-300)
    assert error <= limits[got.dtype], f"relative error {error:.3g}, limit {limits[got.dtype]:.3g}"


def compare(function, definition, inputs, **options):
    """Forward and all gradients, with one random output gradient of the output's dtype."""
    out = function(*inputs, **options)
    want = definition(*inputs, **options)
    outs, wants = (out, want) if isinstance(out, tuple) else ((out,), (want,))
    limits = OUTPUT if options.get("activation", "none") in ("none", "relu") else EXPONENTIAL
    for o, w in zip(outs, wants):
        assert_close(o, w, limits)
    leaves = [t for t in inputs if isinstance(t, torch.Tensor)]
    grads = [torch.randn_like(o) for o in outs]
    got = torch.autograd.grad(outs, leaves, grads)
    exact = torch.autograd.grad(wants, leaves, [g.double() for g in grads])
    for g, e in zip(got, exact):
        assert_close(g, e, GRADIENT)


# Sample calls. Between them they reach every op of the operator.


def _tensors(heads=3, columns=8, frequencies=8, transposed=False, rows=(3,), **others):
    """x (B, heads, L, columns), theta (*rows, frequencies), and what `others` make of (B, L, device)."""

    def make(size, dtype, device):
        B, L = ((2, 14), (5, 13), (7, 17), (9, 31))[size]
        x = torch.randn(B, L, heads, columns, device=device, dtype=torch.float64).to(dtype).transpose(1, 2)
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        theta = torch.randn(*rows, frequencies, device=device, dtype=wide)
        return dict(x=x if transposed else x.contiguous(), theta=theta, **{k: f(B, L, device) for k, f in others.items()})

    return make


def _queries_and_keys(**options):
    def make(size, dtype, device):
        q, k = (_tensors(heads, **options)(size, dtype, device) for heads in (3, 6))
        return dict(q=q["x"], k=k["x"], theta=q["theta"])

    return make


def _sample(op, what, tensors, function=None, **options):
    def of(function):
        def call(**arguments):
            first, *_ = arguments.values()
            if "position_ids" not in arguments:
                tokens = first.shape[2] if isinstance(first, torch.Tensor) else 14
                arguments["shape"] = (tokens - options.get("prefix", 0),)
            return function(**options, **arguments)

        return call

    definition = {
        "lrpe_cosine": cosine, "lrpe_cosine_qk": cosine_qk, "lrpe_rotate": rotate, "lrpe_rotate_qk": rotate_qk,
    }[op]
    return Sample(op, what, of(function or getattr(annulus, op)), tensors, of(definition))


def _of_its_own(x, *others):
    """An x that may be overwritten, with the others in a sum, so that a batch of them makes a batch of x."""
    if isinstance(x, torch.Tensor):
        x = x * 1
        for t in others:
            if isinstance(t, torch.Tensor) and x.device == t.device:
                x = x + 0 * t.sum().to(x.dtype)
    return x


def _in_place(x, theta, **options):
    return annulus.lrpe_rotate_(_of_its_own(x, theta), theta, **options)


def _in_place_qk(q, k, theta, **options):
    if all(isinstance(x, torch.Tensor) and x.is_floating_point() for x in (q, k)):  # of one dtype, which they keep
        dtype = torch.promote_types(q.dtype, k.dtype)
        q, k = q.to(dtype), k.to(dtype)
    return annulus.lrpe_rotate_qk_(_of_its_own(q, k, theta), _of_its_own(k, q, theta), theta, **options)


_ids = lambda B, L, device: torch.randint(-50, 50, (B, L, 2), device=device)  # noqa: E731
_offsets = lambda B, L, device: torch.arange(3, 3 + B, device=device)  # noqa: E731
SAMPLES = [
    _sample("lrpe_cosine", "", _tensors()),
    _sample("lrpe_cosine", "silu", _tensors(transposed=True), prefix=3, activation="silu", offset=19),
    _sample("lrpe_cosine", "softmax of tokens", _tensors(), activation="softmax", softmax_dim=-2),
    _sample("lrpe_cosine", "offsets", _tensors(offset=_offsets)),
    _sample("lrpe_cosine", "position_ids", _tensors(frequencies=4, position_ids=_ids), activation="sigmoid"),
    _sample("lrpe_cosine", "one theta", _tensors(rows=(), transposed=True)),
    _sample("lrpe_cosine_qk", "", _queries_and_keys()),
    _sample("lrpe_cosine_qk", "softmax", _queries_and_keys(rows=(1,)), activation="softmax"),
    _sample("lrpe_rotate", "", _tensors(frequencies=4)),
    _sample("lrpe_rotate", "interleaved", _tensors(frequencies=4, transposed=True), prefix=2, interleaved=True),
    _sample("lrpe_rotate", "position_ids", _tensors(frequencies=2, position_ids=_ids)),
    _sample("lrpe_rotate", "partial", _tensors(columns=10, frequencies=3, rows=())),
    _sample("lrpe_rotate", "in place", _tensors(frequencies=4), _in_place),
    _sample("lrpe_rotate_qk", "", _queries_and_keys(frequencies=4)),
    _sample("lrpe_rotate_qk", "partial", _queries_and_keys(frequencies=2, rows=(), transposed=True), prefix=2, interleaved=True),
    _sample("lrpe_rotate_qk", "in place", _queries_and_keys(frequencies=3, rows=(1,)), _in_place_qk, offset=19),
]


def _bad(function=annulus.lrpe_cosine, size=(2, 3, 10, 8), theta=(3, 8), shape=(10,), dtype=torch.float32,
         theta_dtype=torch.float32, **options):
    return lambda grad: function(torch.ones(size, dtype=dtype), torch.ones(theta, dtype=theta_dtype), shape, **options)


BAD = [
    (_bad(size=(3, 10, 8)), r"\[lrpe_cosine\] x must have 4 dimensions but has shape \(3, 10, 8\)"),
    (_bad(size=(1, 2, 3, 10, 8)), r"x must have 4 dimensions"),
    (_bad(size=(1,) * 7), r"x must have at most 6 dimensions"),
    (_bad(theta=(1, 3, 8)), r"theta must have 2 dimensions"),
    (_bad(theta=(3,)), r"theta must have at least"),
    (_bad(theta=(2, 8)), r"theta must have 3 rows"),
    (_bad(theta=(3, 7)), r"theta must have at least"),
    (_bad(theta=(3, 8), size=(2, 3, 12, 8), shape=(3, 4)), r"theta must leave a column to every axis"),
    (_bad(dtype=torch.int32), r"x must be one of f64, f32, f16, bf16 but is i32"),
    (_bad(dtype=torch.int8), r"x must have a dtype that annulus knows"),
    (_bad(dtype=torch.complex64), r"x must have a dtype"),
    (_bad(theta_dtype=torch.float64), r"theta must be f32 but is f64"),
    (_bad(dtype=torch.bfloat16, theta_dtype=torch.float16), r"theta must be one of f32, bf16 but is f16"),
    (_bad(shape=(11,)), r"shape must have prefix \+ product = 10"),
    (_bad(shape=()), r"shape must have 1 to 4 axes but has 0"),
    (_bad(shape=(1, 1, 1, 1, 10)), r"shape must have 1 to 4 axes but has 5"),
    (_bad(shape=(-10,)), r"shape must have no negative size"),
    (_bad(shape="10"), r"shape must be List\[int\] but is str '10'"),
    (_bad(shape=(10.0,)), r"shape must be"),
    (_bad(prefix=-1, shape=(11,)), r"prefix must be at least 0 but is -1"),
    (_bad(prefix=1.5), r"prefix must be int but is float 1.5"),
    (_bad(activation="tanh"), r"activation must be none, relu, sigmoid, silu or softmax but is 'tanh'"),
    (_bad(activation=None), r"activation must be str"),
    (_bad(softmax_dim=1), r"softmax_dim must be -1 \(features\) or -2 \(tokens\) but is 1"),
    (_bad(offset=2**63 - 1), r"offset must lie within"),
    (_bad(offset=2**80), r"offset must be int"),
    (_bad(offset=0.5), r"offset must be int"),
    (_bad(offset=1, shape=(2, 5), theta=(3, 4)), r"offset must be 0 for a shape of several axes"),
    (_bad(offset=torch.zeros(3, dtype=torch.int64)), r"offset must have shape \(2,\)"),
    (_bad(offset=torch.zeros(2)), r"offset must be one of i32, i64 but is f32"),
    (_bad(offset=torch.zeros(2, 1, dtype=torch.int64)), r"offset must have 1 dimension"),
    (_bad(offset=torch.zeros(2, dtype=torch.int64), shape=(2, 5), theta=(3, 4)), r"offset must be left out"),
    (_bad(position_ids=torch.zeros(10, dtype=torch.int64)), r"shape must be left out where position_ids is given"),
    (_bad(shape=None, position_ids=list(range(10))), r"position_ids must be a tensor but is list"),
    (_bad(shape=None, position_ids=torch.zeros(())), r"position_ids must have 1 to 3 dimensions but has 0"),
    (_bad(shape=None, position_ids=torch.zeros(10)), r"position_ids must be one of i32, i64 but is f32"),
    (_bad(shape=None, position_ids=torch.zeros(3, 10, dtype=torch.int32)),
     r"position_ids must have shape \(2 or 1, 10, 1 to 4\) but has \(3, 10, 1\)"),
    (_bad(shape=None, position_ids=torch.zeros(1, 10, 2, dtype=torch.int32)),
     r"axis 2 of position_ids is encoded nowhere"),
    (_bad(shape=(2**62, 4)), r"\[lrpe_cosine\] shape must have a product below 2\^63 but is \(4611686018427387904, 4\)"),
    (_bad(function=annulus.lrpe_rotate, size=(2, 3, 10, 7)), r"\[lrpe_rotate\] x must have an even number of columns"),
    (_bad(function=annulus.lrpe_rotate, theta=(3, 0)), r"\[lrpe_rotate\] theta must have at least 1 column"),
    (_bad(function=annulus.lrpe_rotate, theta=(3, 5)), r"\[lrpe_rotate\] theta must have at most 4 columns"),
    (_bad(function=annulus.lrpe_rotate, theta=(2, 4)), r"\[lrpe_rotate\] theta must have 3 rows, one per head, or 1 but"),
    (_bad(function=annulus.lrpe_rotate_, size=(2, 3, 10, 7)), r"\[lrpe_rotate\] x must have an even number"),
]
