"""Modules over the functions of annulus."""

import math

import torch

from .errors import InvalidArgument
from .lrpe_cosine import lrpe_cosine, lrpe_cosine_qk
from .ring_rnn import ring_rnn


class LrpeCosine(torch.nn.Module):
    """Multi-axis LRPE-cosine with a frequency table per head.

    theta (n_heads, E), E = ceil(head_dim / n_axes), starts as base ** (-k / E) in every head, in float32. It is a
    parameter when learnable, else a buffer. It stays float32 when the module is cast to 16 bits (.half(), .to(bfloat16)):
    frequencies of 16 bits are wrong by radians at long range.
    """

    def __init__(self, head_dim, n_heads, n_axes=1, base=10000.0, learnable=True, device=None):
        super().__init__()
        if not 1 <= n_axes <= 4:
            raise InvalidArgument(f"[LrpeCosine] n_axes must be 1 to 4 but is {n_axes}")
        for name, value, least in (("head_dim", head_dim, 1), ("n_heads", n_heads, 0)):
            if not isinstance(value, int) or value < least:
                raise InvalidArgument(f"[LrpeCosine] {name} must be an integer of at least {least} but is {value!r}")
        if not (0 < base < math.inf):
            raise InvalidArgument(f"[LrpeCosine] base must be positive and finite but is {base}")
        columns = -(-head_dim // n_axes)
        if (n_axes - 1) * columns >= head_dim:
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

    def _apply(self, fn, recurse=True):
        # .to(), .half(), .cuda() and their like go through here. A cast to 16 bits moves theta and leaves its values.
        def without_rounding(t):
            moved = fn(t)
            return t.to(moved.device) if moved.dtype.itemsize == 2 else moved

        return super()._apply(without_rounding, recurse)

    def forward(self, x, shape=None, prefix=0, activation="none", softmax_dim=-1, offset=0, position_ids=None):
        """x (B, n_heads, L, head_dim) -> (B, n_heads, L, 2 * head_dim); arguments as annulus.lrpe_cosine."""
        return lrpe_cosine(
            x, self.theta, shape, prefix=prefix, activation=activation, softmax_dim=softmax_dim, offset=offset,
            position_ids=position_ids,
        )

    def qk(self, q, k, shape=None, prefix=0, activation="none", softmax_dim=-1, offset=0, position_ids=None):
        """Queries and keys in one launch; n_heads is the smaller of their head counts."""
        return lrpe_cosine_qk(
            q, k, self.theta, shape, prefix=prefix, activation=activation, softmax_dim=softmax_dim, offset=offset,
            position_ids=position_ids,
        )

    def extra_repr(self):
        return (
            f"head_dim={self.head_dim}, n_heads={self.n_heads}, n_axes={self.n_axes}, base={self.base}, "
            f"learnable={self.learnable}"
        )


class RingRNN(torch.nn.Module):
    """A ring attractor: Wa (n_actions, n_neurons, n_neurons) and Wo (n_neurons, n_neurons), normal / sqrt(n_neurons).

    J0, J1 and alpha are numbers (alpha also n_neurons of them), parameters when learn_scalars.
    """

    def __init__(self, n_neurons, n_actions, activation="gelu", *, J0=-0.1, J1=0.1, alpha=0.15, learn_scalars=False,
                 precision="auto", checkpoint=0, device=None, dtype=None):
        super().__init__()
        for name, value in (("n_neurons", n_neurons), ("n_actions", n_actions)):
            if value < 0:
                raise InvalidArgument(f"[RingRNN] {name} must be at least 0 but is {value}")
        self.n_neurons, self.n_actions, self.activation = n_neurons, n_actions, activation
        self.precision, self.checkpoint = precision, checkpoint
        self.Wa = torch.nn.Parameter(torch.empty(n_actions, n_neurons, n_neurons, device=device, dtype=dtype))
        self.Wo = torch.nn.Parameter(torch.empty(n_neurons, n_neurons, device=device, dtype=dtype))
        scalar = torch.float64 if self.Wo.dtype == torch.float64 else torch.float32
        for name, value in (("J0", J0), ("J1", J1), ("alpha", alpha)):
            several = not isinstance(value, (int, float))
            if several and (name != "alpha" or len(value) != n_neurons):
                rule = f"a number or {n_neurons} of them" if name == "alpha" else "a number"
                raise InvalidArgument(f"[RingRNN] {name} must be {rule} but is {value!r}")
            if several or learn_scalars:
                value = torch.as_tensor(value, device=device, dtype=scalar).clone()
            if learn_scalars:
                value = torch.nn.Parameter(value)
            if several and not learn_scalars:
                self.register_buffer(name, value)
            else:
                setattr(self, name, value)
        self.reset_parameters()

    def reset_parameters(self):
        for W in (self.Wa, self.Wo):
            torch.nn.init.normal_(W, std=max(self.n_neurons, 1) ** -0.5)

    def bump(self, angle):
        """angle (B,) in radians -> state (B, n_neurons): a Gaussian bump, a tenth of the ring wide, of length 1."""
        N = self.n_neurons
        away = torch.arange(N, device=angle.device, dtype=torch.float64) - angle.double()[:, None] * N / (2 * math.pi)
        away = away - N * torch.round(away / N)
        bump = torch.exp(-0.5 * (10 * away / N).square())
        bump = bump / bump.norm(dim=1, keepdim=True)
        return bump.to(self.Wo.device, torch.float64 if self.Wo.dtype == torch.float64 else torch.float32)

    def forward(self, A, r0=None, *, drive=None, reset=None, reset_state=None, mask=None):
        """A (B, T, n_actions), r0 (B, n_neurons; zeros by default) -> out (B, T, n_neurons), h_n (B, n_neurons).

        h_n is the state to go on from. Arguments as annulus.ring_rnn.
        """
        if r0 is None:
            r0 = A.new_zeros(A.shape[0], self.n_neurons)
        return ring_rnn(
            A, self.Wa, self.Wo, r0, self.J0, self.J1, self.alpha, activation=self.activation, drive=drive, reset=reset,
            reset_state=reset_state, mask=mask, precision=self.precision, checkpoint=self.checkpoint, return_state=True
        )

    def extra_repr(self):
        return (
            f"n_neurons={self.n_neurons}, n_actions={self.n_actions}, activation={self.activation!r}, "
            f"precision={self.precision!r}, checkpoint={self.checkpoint}"
        )
