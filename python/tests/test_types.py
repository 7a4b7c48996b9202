"""What a user reads and a type checker sees: annotations, examples, the names there are."""

import doctest
import inspect
import math
import os
import re
import subprocess
import sys

import pytest
import torch
from contract import ROOT

import annulus

PARTS = {name: getattr(annulus, name) for name in annulus.__all__ if inspect.ismodule(getattr(annulus, name))}
PUBLIC = {name: getattr(annulus, name) for name in annulus.__all__ if name not in PARTS}
PUBLIC |= {f"{part}.{name}": getattr(module, name) for part, module in PARTS.items() for name in module.__all__}
ERRORS = [name for name, value in PUBLIC.items() if inspect.isclass(value) and issubclass(value, Exception)]
every_name = pytest.mark.parametrize("name", [name for name in PUBLIC if name not in ERRORS])


def test_namespaces():
    assert os.path.exists(os.path.join(os.path.dirname(annulus.__file__), "py.typed"))
    assert dir(annulus.nn) == annulus.nn.__all__ and "nn" in PARTS
    assert all(issubclass(getattr(annulus.nn, name), torch.nn.Module) for name in dir(annulus.nn))
    assert {"InvalidArgument", "NotSupported", "DeviceError", "RankLost"} == set(ERRORS)
    assert not {"torch", "errors", "TYPE_CHECKING"} & set(annulus.__all__)


@every_name
def test_example(name):
    test = doctest.DocTestFinder(recurse=False).find(PUBLIC[name], name, globs={**vars(annulus), **vars(annulus.nn)})[0]
    test.globs.update(torch=torch, math=math)
    assert test.examples, "a docstring shows how it is called"
    said = []
    doctest.DocTestRunner(verbose=False).run(test, out=said.append)
    assert not said, "".join(said)
    if name.removeprefix("nn.") not in ("info", "last_backend", "plan_ring"):
        assert "Gradients:" in test.docstring


def functions(value):
    """Itself, or the public methods of a class."""
    if not inspect.isclass(value):
        return [value]
    return [f for n, f in vars(value).items() if inspect.isfunction(f) and (n == "__init__" or not n.startswith("_"))]


@every_name
def test_annotations_are_complete(name):
    for function in functions(PUBLIC[name]):
        signature = inspect.signature(function)
        bare = [p.name for p in signature.parameters.values() if p.annotation is p.empty and p.name != "self"]
        assert not bare and signature.return_annotation is not signature.empty, (function.__name__, bare)


USER = """
import torch
from torch import Tensor
from typing_extensions import assert_type

import annulus

x, theta = torch.rand(2, 3, 10, 8), torch.rand(3, 8)
assert_type(annulus.lrpe_cosine(x, theta, (2, 5), activation="silu"), Tensor)
assert_type(annulus.lrpe_cosine_qk(x, x, theta, 10, offset=torch.tensor(3)), tuple[Tensor, Tensor])
assert_type(annulus.lrpe_rotate(x, theta[:, :4], position_ids=annulus.packed_positions(torch.tensor([0, 10]), 10)), Tensor)
assert_type(annulus.lrpe_rotate_(x, theta[:, :4], interleaved=True), Tensor)
assert_type(annulus.lrpe_rotate_qk(x, x, theta[0, :4], offset=3), tuple[Tensor, Tensor])
assert_type(annulus.lrpe_rotate_qk_(x, x.clone(), theta[:1, :3]), tuple[Tensor, Tensor])
A, Wa, Wo, r0 = torch.rand(2, 4, 3), torch.rand(3, 5, 5), torch.rand(5, 5), torch.rand(2, 5)
assert_type(annulus.ring_rnn(A, Wa, Wo, r0, -0.1, torch.tensor(0.1), alpha=0.2, packed=annulus.ring_rnn_pack(Wa, Wo)), Tensor)
assert_type(annulus.ring_rnn(A, Wa, Wo, r0, return_state=True, mask=None), tuple[Tensor, Tensor])
assert_type(annulus.ring_rnn(A, Wa, Wo, r0, return_readout=True), tuple[Tensor, Tensor, Tensor])
assert_type(annulus.ring_rnn(A, Wa, Wo, r0, return_state=True, return_readout=True), tuple[Tensor, Tensor, Tensor, Tensor])
assert_type(annulus.ring_readout(A), tuple[Tensor, Tensor])
q, cu = torch.rand(2, 40, 4, 8), torch.tensor([0, 40], dtype=torch.int32)
order = annulus.hilbert_order((5, 8), device="cpu")
assert_type(annulus.attention(q, q, q, causal=True, window_size=(4, -1), order=order, deterministic=True), Tensor)
assert_type(annulus.attention(q, q, q, return_lse=True, softmax_scale=0.5, key_lengths=cu), tuple[Tensor, Tensor])
assert_type(annulus.attention_varlen(q[0], q[0], q[0], cu, cu, dropout_p=0.1, dropout_seed=3), Tensor)
assert_type(annulus.dilated_attention(q, q, q, (8, 40), [1, 4], mode="grouped", checkpoint=True), Tensor)
assert_type(annulus.dilated_attention(q, q, q, (8, 40), (1, 4), return_lse=True), tuple[Tensor, Tensor])
mask = annulus.masks.bigbird(40, 16, density=0.8, heads=4, seed=1)
blocks = annulus.BlockCsr.from_mask(mask | annulus.masks.local_global(40, 16, 0.8) & annulus.masks.causal_window(40, 16, 0.5))
assert_type(annulus.block_sparse_attention(q, q, q, blocks.to("cpu"), 16, order=order), Tensor)
assert_type(annulus.block_sparse_attention(q, q, q, mask, 16, return_lse=True), tuple[Tensor, Tensor])
assert_type(annulus.ring_attention(q, q, q, None, causal=True, balance="contiguous", deadline_s=5), Tensor)
assert_type(annulus.ring_attention(q, q, q, torch.distributed.group.WORLD, return_lse=True), tuple[Tensor, Tensor])
assert_type(annulus.ring_attention_local(q, q, q, 4, segment_lengths=(8, 40), dilation_rates=[1, 4]), Tensor)
assert_type(annulus.ring_attention_local(q, q, q, 4, block_mask=blocks, block_size=16, return_lse=True), tuple[Tensor, Tensor])
assert_type(annulus.shard(q, 4, dim=-3), list[Tensor])
assert_type(annulus.unshard(annulus.shard(q, 4, "contiguous"), balance="contiguous"), Tensor)
assert_type(blocks.density(3), float)
assert_type(blocks.to_mask(3), Tensor)
assert_type(annulus.last_backend("ring_rnn"), str | None)
assert_type(annulus.last_backend(), dict[str, str])
assert_type(annulus.__version__, str)
assert_type(annulus.plan_ring(1000, 8, 2, 64, 4, dtype=torch.float32).forward.hides, bool)
print(annulus.info()["version"])
ring = annulus.nn.RingRNN(5, 3, alpha=[0.1] * 5, learn_scalars=True, dtype=torch.float32)
assert_type(ring.bump(torch.zeros(2)), Tensor)
encode = annulus.nn.LrpeCosine(8, 3, device="cpu")
assert_type(encode.qk(x, x), tuple[Tensor, Tensor])
rope = annulus.nn.LrpeRotate(8, rotary_dim=4, interleaved=True)
assert_type(rope.qk(x, x, position_ids=torch.arange(10)), tuple[Tensor, Tensor])
assert_type(annulus.nn.LrpeRotate.from_inv_freq(theta[0, :2], head_dim=8, learnable=True), annulus.nn.LrpeRotate)
try:
    ring(A)
except (annulus.InvalidArgument, annulus.NotSupported, annulus.DeviceError) as e:
    print(e)
except annulus.RankLost as lost:
    assert_type(lost.rank, int)
"""
WRONG = ["annulus.ring_rnn('A', Wa, Wo, r0)", "annulus.ring_readout(A).sum()", "annulus.no_such_name",
         "annulus.nn.RingRNN('5', 3)", "annulus.attention(q, q, q, window_size=4)"]


@pytest.mark.parametrize("checker", ["mypy", "basedpyright"])
def test_user_file(checker, tmp_path):
    """Clean as it is, and each wrong line is found."""
    pytest.importorskip(checker)
    assert all(f"annulus.{name}" in USER for name in PUBLIC), "the file uses every public name"
    (tmp_path / "user.py").write_text(USER + "\n".join(WRONG))
    package = os.path.dirname(os.path.dirname(annulus.__file__))
    if checker == "mypy":  # errors within a package that is installed are not shown: neither are they here
        options = ["--strict", "--follow-imports=silent", "--cache-dir", str(ROOT / "build" / "mypy"), "user.py"]
    else:  # pyright with everything it needs inside; in standard mode it is pyright
        (tmp_path / "pyrightconfig.json").write_text(f'{{"typeCheckingMode": "standard", "extraPaths": ["{package}"]}}')
        options = ["--pythonpath", sys.executable]
    run = subprocess.run([sys.executable, "-m", checker, *options], cwd=tmp_path, env={**os.environ, "MYPYPATH": package},
                         capture_output=True, text=True)
    found = {int(line) - USER.count("\n") for line in re.findall(r"user\.py:(\d+)\b.* error: ", run.stdout)}
    assert found == set(range(1, len(WRONG) + 1)), run.stdout + run.stderr
