"""Modules over the functions of annulus."""

import torch

from .errors import InvalidArgument
from .lrpe_cosine import lrpe_cosine, lrpe_cosine_qk


class LrpeCosine(torch.nn.Module):
    """Multi-axis LRPE-cosine with a frequency table per head.

    theta (n_heads, E), E = ceil(head_dim / n_axes), starts as base ** (-k / E) in every head, in float32. It is a
    parameter when learnable, else a buffer; keep it in float32 (16-bit frequencies are wrong by radians at long range).
    """

    def __init__(self, head_dim, n_heads, n_axes=1, base=10000.0, learnable=True, device=None):
        super().__init__()
        if not 1 <= n_axes <= 4:
            raise InvalidArgument(f"[LrpeCosine] n_axes must be 1 to 4 but is {n_axes}")
        columns = -(-head_dim // n_axes)
        if head_dim < 1 or (n_axes - 1) * columns >= head_dim:
            raise InvalidArgument(
                f"[LrpeCosine] head_dim must give each of {n_axes} axes a column of {columns} but is {head_dim}"
            )
        self.head_dim, self.n_heads, self.n_axes, self.base, self.learnable = head_dim, n_heads, n_axes, base, learnable
        theta = torch.empty(n_heads, columns, dtype=torch.float32, device=device)
        if learnable:
            self.theta = torch.nn.Parameter(theta)
        else:
            self.register_buffer("theta", theta)
        self.reset_parameters()

    def reset_parameters(self):
        columns = self.theta.shape[1]
        with torch.no_grad():
            k = torch.arange(columns, dtype=torch.float64, device=self.theta.device)
            self.theta.copy_((float(self.base) ** (-k / columns)).expand(self.n_heads, columns))

    def forward(self, x, shape, prefix=0, activation="none", softmax_dim=-1, offset=0):
        """x (B, n_heads, L, head_dim) -> (B, n_heads, L, 2 * head_dim); arguments as annulus.lrpe_cosine."""
        return lrpe_cosine(
            x, self.theta, shape, prefix=prefix, activation=activation, softmax_dim=softmax_dim, offset=offset
        )

    def qk(self, q, k, shape, prefix=0, activation="none", softmax_dim=-1, offset=0):
        """Queries and keys in one launch; n_heads is the smaller of their head counts."""
        return lrpe_cosine_qk(
            q, k, self.theta, shape, prefix=prefix, activation=activation, softmax_dim=softmax_dim, offset=offset
        )

    def extra_repr(self):
        return (
            f"head_dim={self.head_dim}, n_heads={self.n_heads}, n_axes={self.n_axes}, base={self.base}, "
            f"learnable={self.learnable}"
        )
