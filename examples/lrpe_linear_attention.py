"""Linear attention with relative positions, in PyTorch.

LRPE-cosine turns a position into an inner product, so the scores q(s) . k(t) = sum_c q_c k_c cos((s - t) theta_c) keep
their meaning when attention is computed as q (k^T v): the cost grows with the tokens, not with their square.
"""

import torch

import annulus

torch.manual_seed(0)
batch, heads, height, width, dim = 2, 4, 12, 16, 32
tokens = height * width
encode = annulus.nn.LrpeCosine(dim, heads, n_axes=2)  # an image: positions have a row and a column

q, k, v = (torch.randn(batch, heads, tokens, dim, requires_grad=True) for _ in range(3))
q2, k2 = encode.qk(q, k, (height, width), activation="silu")
out = q2 @ (k2.transpose(-1, -2) @ v) / tokens

# The same by definition: all pairs of tokens, phases by difference of rows and of columns.
with torch.no_grad():
    row, column = torch.arange(tokens) // width, torch.arange(tokens) % width
    theta = encode.theta.double()
    phase = torch.cat(
        [
            (row[:, None] - row[None, :])[None, :, :, None] * theta[:, None, None, :],
            (column[:, None] - column[None, :])[None, :, :, None] * theta[:, None, None, :],
        ],
        dim=-1,
    )[..., :dim]
    fq, fk = torch.nn.functional.silu(q.double()), torch.nn.functional.silu(k.double())
    scores = torch.einsum("bhsc,bhtc,hstc->bhst", fq, fk, phase.cos())
    expected = scores @ v.double() / tokens
error = ((out - expected).norm() / expected.norm()).item()
print(f"linear against quadratic attention: relative error {error:.1e}")

loss = out.square().mean()
loss.backward()
print(f"loss {loss.item():.6f}, |dq| {q.grad.norm().item():.6f}, |dtheta| {encode.theta.grad.norm().item():.6f}")

compiled = torch.compile(encode, fullgraph=True)
difference = (compiled(q, (height, width)) - encode(q, (height, width))).abs().max().item()
print(f"torch.compile against eager: {difference:.1e}")

assert error < 1e-5, "the two forms must agree"
assert difference == 0.0, "the compiled module must give the same bits"
