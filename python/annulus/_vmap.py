"""The vmap rule of every op: the batch becomes more samples of one call, where all that is batched is one per sample."""

import types

import torch

_library = torch.library.Library("annulus", "IMPL")  # lives as long as what it registers
_is_old_batch = torch._C._functorch.is_legacy_batchedtensor


def _old_level(x):
    """The innermost of such a batch. Not the nesting that torch counts: a backward on CUDA runs in a thread without it."""
    return next((level for level in range(64, 0, -1) if len(torch._remove_batch_dim(x, level, 0, 0)) > 0), 1)


def _fold(x, batched, place, size, V, B):
    """The batch, if any the first dimension, into that of the samples."""
    if size is None or not batched and size == 1 != B:  # one row for all samples stays that
        return x
    x = x if batched else x.expand(V, *x.shape)
    x = x.repeat_interleave(B, place + 1) if size == 1 else x
    x = x.movedim(0, place)
    return x.reshape(*x.shape[:place], -1, *x.shape[place + 2 :])  # flatten has no rule for old batches


def register_vmap(op, samples, gradients=(), folds=None):
    """samples: name of an argument or a result -> the dimension that counts samples.

    gradients: where the results are a list of them, what the bits of the last argument ask for, by name.
    folds(inputs): whether a batch may be more samples of one call; else every element of it is a call. Of all by default.
    """
    places = [samples.get(a.name) for a in op._schema.arguments]
    returns = [r.name for r in op._schema.returns]
    single = len(returns) == 1 and not gradients
    listed = lambda y: [y] if single else y  # noqa: E731

    def rule(info, dims, *inputs):
        V, batched = info.batch_size, [isinstance(d, int) for d in dims]
        inputs = [x.movedim(d, 0) if b else x for x, d, b in zip(inputs, dims, batched)]
        asked = [name for i, name in enumerate(gradients) if inputs[-1] >> i & 1] if gradients else returns
        out = [samples.get(name) for name in asked]
        sizes = [x.shape[p + b] if p is not None and isinstance(x, torch.Tensor) and x.dim() > p + b else None
                 for x, p, b in zip(inputs, places, batched)]
        alone = folds is not None and not folds(inputs)
        if alone or None in out or any(b and s is None for b, s in zip(batched, sizes)):
            calls = [listed(op(*[x[i] if b else x for x, b in zip(inputs, batched)])) for i in range(V)]
            results = [torch.stack(ys) for ys in zip(*calls)]
            out = [0] * len(results)
        else:
            B = next(s for s in sizes if s is not None)
            results = listed(op(*[_fold(*each, V, B) for each in zip(inputs, batched, places, sizes)]))
            out = [None if y.shape == (0,) else p for y, p in zip(results, out)]  # was not asked for: has no samples
            results = [y if p is None else y.reshape(*y.shape[:p], V, B, *y.shape[p + 1 :]) for y, p in zip(results, out)]
        kind = list if gradients else tuple
        return (results[0], out[0]) if single else (kind(results), kind(out))

    def run_old(*inputs):
        """is_grads_batched, and autograd.functional with vectorize: batches of another make."""
        levels = [_old_level(x) if isinstance(x, torch.Tensor) and _is_old_batch(x) else 0 for x in inputs]
        level = max(levels)
        dims = [0 if at == level else None for at in levels]
        inputs = [x if d is None else torch._remove_batch_dim(x, level, 0, 0) for x, d in zip(inputs, dims)]
        size = next(len(x) for x, d in zip(inputs, dims) if d == 0)
        results, out = rule(types.SimpleNamespace(batch_size=size), dims, *inputs)
        results = [y if d is None else torch._add_batch_dim(y, d, level) for y, d in zip(listed(results), listed(out))]
        return results[0] if single else results

    torch.library.register_vmap(op, rule)
    _library.impl(op._schema.name, run_old, "Batched")
