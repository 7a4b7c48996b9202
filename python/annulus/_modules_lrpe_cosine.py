"""The modules over LRPE-cosine and its rotating form: what keeps theta. They appear in annulus.nn."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ._module import _WideModule
from .errors import InvalidArgument, NotSupported, require, require_placement, require_size
from .lrpe_cosine import Shape, lrpe_cosine, lrpe_cosine_qk, lrpe_rotate, lrpe_rotate_qk


class _Frequencies(_WideModule):
    """What the modules share: theta (n_heads, ceil(pairs / n_axes)), a parameter when learnable, else a buffer."""

    _wide = ("theta",)
    theta: Tensor

    def __init__(self, name, sizes, n_heads, n_axes, base, learnable, device, persistent):
        super().__init__()
        (size_name, size), pairs = sizes
        require_size(name, "n_heads", n_heads)
        require(n_axes in (1, 2, 3, 4), name, "n_axes", "be 1 to 4", n_axes)
        good = isinstance(base, (int, float)) and 0 < base < math.inf
        require(good, name, "base", "be positive and finite", base)
        require_placement(name, device)
        columns = -(-pairs // n_axes)
        if (n_axes - 1) * columns >= pairs:
            raise InvalidArgument(f"[{name}] {size_name} must give each of {n_axes} axes a column of {columns} but is {size}")
        self.n_heads, self.n_axes, self.base, self.learnable = n_heads, n_axes, base, learnable
        theta = torch.empty(n_heads, columns, dtype=torch.float32, device=device)
        if learnable:
            self.theta = torch.nn.Parameter(theta)
        else:
            self.register_buffer("theta", theta, persistent=persistent)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        require(self.base is not None, type(self).__name__, "base", "be known where frequencies are made anew", self.base)
        columns = self.theta.shape[1]
        with torch.no_grad():
            k = torch.arange(columns, dtype=torch.float64, device=self.theta.device)
            self.theta.copy_((float(self.base) ** (-k / columns)).expand(self.n_heads, columns))

    def _require(self, shape, position_ids, **tensors):
        """The columns and axes that the module was made for: with others theta would fit, too, and mean something else."""
        op = type(self).__name__
        for name, x in tensors.items():
            if isinstance(x, torch.Tensor) and not x.is_nested and x.dim() == 4:  # else the operator refuses it
                if x.shape[3] != self.head_dim:
                    raise InvalidArgument(f"[{op}] {name} must have head_dim, {self.head_dim}, columns but has {x.shape[3]}")
        if position_ids is None:
            name, axes = "shape", len(shape) if isinstance(shape, Sequence) else 1
        elif isinstance(position_ids, torch.Tensor):
            name, axes = "position_ids", position_ids.shape[2] if position_ids.dim() == 3 else 1
        else:
            return
        if axes != self.n_axes:
            raise InvalidArgument(f"[{op}] {name} must have n_axes, {self.n_axes}, axes but has {axes}")


class LrpeCosine(_Frequencies):
    """Multi-axis LRPE-cosine with a frequency table per head.

    theta (n_heads, E), E = ceil(head_dim / n_axes), starts as base ** (-k / E) in every head, in float32. It is a
    parameter when learnable, else a buffer. It stays float32 when the module is cast to 16 bits (.half(), .to(bfloat16)):
    frequencies of 16 bits are wrong by radians at long range. Gradients: x, and theta where it is learnable.

    >>> encode = LrpeCosine(head_dim=64, n_heads=12, n_axes=2)
    >>> encode(torch.rand(2, 12, 16, 64), (4, 4)).shape
    torch.Size([2, 12, 16, 128])
    """

    def __init__(self, head_dim: int, n_heads: int, n_axes: int = 1, base: float = 10000.0, learnable: bool = True,
                 device: torch.device | str | None = None) -> None:
        require_size("LrpeCosine", "head_dim", head_dim, 1)
        sizes = ("head_dim", head_dim), head_dim
        super().__init__("LrpeCosine", sizes, n_heads, n_axes, base, learnable, device, persistent=True)
        self.head_dim = head_dim

    def forward(self, x: Tensor, shape: Shape = None, prefix: int = 0, activation: str = "none", softmax_dim: int = -1,
                offset: int | Tensor = 0, position_ids: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        """x (B, n_heads, L, head_dim) -> (B, n_heads, L, 2 * head_dim); arguments as annulus.lrpe_cosine."""
        self._require(shape, position_ids, x=x)
        return lrpe_cosine(
            x, self.theta, shape, prefix=prefix, activation=activation, softmax_dim=softmax_dim, offset=offset,
            position_ids=position_ids, out=out,
        )

    def qk(self, q: Tensor, k: Tensor, shape: Shape = None, prefix: int = 0, activation: str = "none", softmax_dim: int = -1,
           offset: int | Tensor = 0, position_ids: Tensor | None = None,
           out: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:
        """Queries and keys in one launch; n_heads is the smaller of their head counts."""
        self._require(shape, position_ids, q=q, k=k)
        return lrpe_cosine_qk(
            q, k, self.theta, shape, prefix=prefix, activation=activation, softmax_dim=softmax_dim, offset=offset,
            position_ids=position_ids, out=out,
        )

    def extra_repr(self) -> str:
        return (
            f"head_dim={self.head_dim}, n_heads={self.n_heads}, n_axes={self.n_axes}, base={self.base}, "
            f"learnable={self.learnable}"
        )


class LrpeRotate(_Frequencies):
    """RoPE over 1 to 4 axes: pairs of columns turned by their position, scaling (x1 cos - x2 sin, x1 sin + x2 cos).

    theta (n_heads, E), E = ceil(rotary_dim / 2 / n_axes), starts as base ** (-k / E), in float32, and stays so when the module is
    cast to 16 bits. With n_heads = 1 it serves any number of heads. It is a parameter when learnable; else a buffer that
    is not in the state dict, as Hugging Face's inv_freq is not.
    head_dim: the columns of x, all of them.  n_axes: those of every call's shape or position_ids.
    rotary_dim: the first columns turn and the others pass through; all of them by default.
    interleaved: columns (2c, 2c + 1) form a pair, not (c, c + rotary_dim / 2).
    scaling: of what turns (YaRN's attention factor). Other than 1 it is a multiplication of its own by torch, with one more
    rounding to x's dtype and, without `out`, a copy.
    Gradients: x, and theta where it is learnable.

    >>> rope = LrpeRotate(head_dim=64, base=500000.0)
    >>> q, k = rope.qk(torch.rand(2, 8, 16, 64), torch.rand(2, 2, 16, 64))  # in place of apply_rotary_pos_emb
    >>> q.shape, k.shape
    (torch.Size([2, 8, 16, 64]), torch.Size([2, 2, 16, 64]))
    """

    def __init__(self, head_dim: int, n_heads: int = 1, n_axes: int = 1, base: float = 10000.0, rotary_dim: int | None = None,
                 interleaved: bool = False, learnable: bool = False, scaling: float = 1.0,
                 device: torch.device | str | None = None) -> None:
        name = "LrpeRotate"
        require_size(name, "head_dim", head_dim, 2)
        require(head_dim % 2 == 0, name, "head_dim", "be even", head_dim)
        rotary_dim = head_dim if rotary_dim is None else rotary_dim
        require_size(name, "rotary_dim", rotary_dim, 2)
        good = rotary_dim % 2 == 0 and rotary_dim <= head_dim
        require(good, name, "rotary_dim", f"be even and at most head_dim, {head_dim},", rotary_dim)
        good = isinstance(scaling, (int, float)) and math.isfinite(scaling)
        require(good, name, "scaling", "be a finite number", scaling)
        sizes = ("rotary_dim", rotary_dim), rotary_dim // 2
        super().__init__(name, sizes, n_heads, n_axes, base, learnable, device, persistent=False)
        whole = rotary_dim == head_dim or 2 * n_axes * self.theta.shape[1] == rotary_dim
        require(whole, name, "rotary_dim", f"be a multiple of {2 * n_axes} where columns pass through", rotary_dim)
        self.head_dim, self.rotary_dim, self.interleaved, self.scaling = head_dim, rotary_dim, interleaved, float(scaling)

    @classmethod
    def from_inv_freq(cls, source: Tensor | torch.nn.Module, head_dim: int | None = None, *, interleaved: bool = False,
                      learnable: bool = False) -> "LrpeRotate":
        """With the frequencies that another implementation has: a tensor (E,) or (n_heads, E), or a module whose `inv_freq` it
        is, like the rotary_emb of a model of Hugging Face, whose attention_scaling is taken too. Frequencies that change
        with the length of a call are refused. The first 2E columns turn. head_dim: the columns of x, 2E by default; where
        more pass through (partial rotary, as of GPT-NeoX) inv_freq does not know them and head_dim must be given.
        """
        refuse = lambda why: InvalidArgument(f"[LrpeRotate] inv_freq must {why}")  # noqa: E731
        inv_freq = source if isinstance(source, torch.Tensor) else getattr(source, "inv_freq", None)
        if not isinstance(inv_freq, torch.Tensor):
            raise refuse(f"be a tensor, or that of a module, but comes as {type(source).__name__}")
        if inv_freq.dtype not in (torch.float32, torch.float64):  # radians off at long range, and nobody would notice
            raise refuse(f"be float32 or float64 but is {inv_freq.dtype}: take it before the model is cast")
        if inv_freq.dim() not in (1, 2) or inv_freq.shape[-1] == 0:
            raise refuse(f"have shape (E,) or (n_heads, E) but has {tuple(inv_freq.shape)}")
        kind = getattr(source, "rope_type", "default")
        if kind in ("dynamic", "longrope"):
            raise NotSupported(f"[LrpeRotate] rope_type {kind!r} changes its frequencies from call to call, which has no module here")
        rows = inv_freq.detach().reshape(-1, inv_freq.shape[-1])
        columns = 2 * rows.shape[1]
        module = cls(
            columns if head_dim is None else head_dim, rows.shape[0], rotary_dim=columns, interleaved=interleaved,
            learnable=learnable, scaling=getattr(source, "attention_scaling", 1.0), device=rows.device,
        )
        module.base = None
        with torch.no_grad():
            module.theta.copy_(rows)
        return module

    def forward(self, x: Tensor, shape: Shape = None, prefix: int = 0, offset: int | Tensor = 0,
                position_ids: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        """x (B, H, L, head_dim) -> the same shape; arguments as annulus.lrpe_rotate."""
        self._require(shape, position_ids, x=x)
        y = lrpe_rotate(x, self.theta, shape, prefix=prefix, interleaved=self.interleaved, offset=offset,
                        position_ids=position_ids, out=out)
        return self._scaled(y, out is not None)

    def qk(self, q: Tensor, k: Tensor, shape: Shape = None, prefix: int = 0, offset: int | Tensor = 0,
           position_ids: Tensor | None = None, out: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:
        """Queries and keys by annulus.lrpe_rotate_qk; n_heads is 1 or the smaller of their head counts."""
        self._require(shape, position_ids, q=q, k=k)
        q, k = lrpe_rotate_qk(q, k, self.theta, shape, prefix=prefix, interleaved=self.interleaved, offset=offset,
                              position_ids=position_ids, out=out)
        return self._scaled(q, out is not None), self._scaled(k, out is not None)

    def _scaled(self, y: Tensor, in_place: bool) -> Tensor:
        if self.scaling == 1.0:
            return y
        turned, passed = y.split((self.rotary_dim, self.head_dim - self.rotary_dim), -1)
        if in_place:
            turned *= self.scaling
            return y
        return torch.cat((turned * self.scaling, passed), -1)

    def extra_repr(self) -> str:
        return (
            f"head_dim={self.head_dim}, n_heads={self.n_heads}, n_axes={self.n_axes}, base={self.base}, "
            f"rotary_dim={self.rotary_dim}, interleaved={self.interleaved}, learnable={self.learnable}, scaling={self.scaling}"
        )
