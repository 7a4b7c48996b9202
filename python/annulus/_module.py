"""What modules share."""

import torch


class _WideModule(torch.nn.Module):
    """Its tensors that `_wide` names are moved but not rounded when a model is cast to 16 bits (.half(), .to(bfloat16))."""

    _wide: tuple[str, ...] = ()

    def _apply(self, fn, recurse=True):
        kept = [t for t in (getattr(self, name) for name in self._wide) if isinstance(t, torch.Tensor)]
        kept += [t.grad for t in kept if t.is_leaf]

        def without_rounding(t):
            moved = fn(t)
            return t.to(moved.device) if moved.dtype.itemsize == 2 and any(t is k for k in kept) else moved

        return super()._apply(without_rounding, recurse)
