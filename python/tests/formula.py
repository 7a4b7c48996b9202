"""The definitions of the LRPE forms in torch, in double precision, differentiable: what the tests compare with."""

import torch

ACTIVATIONS = [("none", -1), ("relu", -1), ("sigmoid", -1), ("silu", -1), ("softmax", -1), ("softmax", -2)]
# Largest deviation, relative to the largest exact value. Outputs of 16-bit types: one unit in the last place.
OUTPUT = {torch.float64: 1e-12, torch.float32: 2e-7, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-8}
# The exponential activations add the roundings of exp and of a reciprocal sum to those of the phase: the common
# policy of testing/limits.h.
EXPONENTIAL = {**OUTPUT, torch.float32: 1e-6}
GRADIENT = {torch.float64: 1e-12, torch.float32: 1e-6, torch.float16: 2.0**-9, torch.bfloat16: 2.0**-7}


def _phase(theta, columns, B, shape, prefix, offset, position_ids):
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
    phase = torch.einsum("btm,he->bhtme", s, theta.double()).flatten(3)[..., :columns]
    return torch.nn.functional.pad(phase, (0, 0, prefix, 0))


def _activate(x, activation, softmax_dim):
    if activation == "none":
        return x
    if activation == "softmax":
        return x.softmax(softmax_dim)
    return {"relu": torch.relu, "sigmoid": torch.sigmoid, "silu": torch.nn.functional.silu}[activation](x)


def cosine(x, theta, shape, *, prefix=0, activation="none", softmax_dim=-1, offset=0, position_ids=None):
    x = _activate(x.double(), activation, softmax_dim)
    phase = _phase(theta, x.shape[-1], x.shape[0], shape, prefix, offset, position_ids)
    return torch.cat([x * phase.cos(), x * phase.sin()], -1)


def cosine_qk(q, k, theta, shape, **options):
    def one(x):
        return cosine(x, theta.repeat_interleave(x.shape[1] // theta.shape[0], 0), shape, **options)

    return one(q), one(k)


def rotate(x, theta, shape, *, prefix=0, interleaved=False, offset=0, position_ids=None):
    x = x.double()
    half = x.shape[-1] // 2
    x1, x2 = (x[..., 0::2], x[..., 1::2]) if interleaved else (x[..., :half], x[..., half:])
    phase = _phase(theta, half, x.shape[0], shape, prefix, offset, position_ids)
    y1, y2 = x1 * phase.cos() - x2 * phase.sin(), x1 * phase.sin() + x2 * phase.cos()
    return torch.stack([y1, y2], -1).flatten(-2) if interleaved else torch.cat([y1, y2], -1)


def assert_close(got, want, limits=OUTPUT):
    assert got.shape == want.shape
    assert torch.isfinite(got).all()
    if got.numel() == 0:
        return
    error = (got.double() - want.double()).abs().max() / want.double().abs().max().clamp_min(1e-300)
    assert error <= limits[got.dtype], f"relative error {error:.3g}, limit {limits[got.dtype]:.3g}"
