"""What torch expects of an operator: opcheck, compile, export, autograd's bookkeeping, memory."""

import pytest
import torch
from formula import GRADIENT, assert_close, cosine, rotate

import annulus

ops = torch.ops.annulus


def randn(*size, device, grad=False, dtype=torch.float32):
    return torch.randn(size, device=device, dtype=dtype).requires_grad_(grad)


def op_calls(device, grad):
    """Each op of the namespace with a few argument lists."""
    x, theta = randn(2, 3, 14, 8, device=device, grad=grad), randn(3, 4, device=device, grad=grad)
    k = randn(2, 6, 14, 8, device=device, grad=grad)
    theta1 = randn(3, 8, device=device, grad=grad)
    transposed = randn(2, 14, 3, 8, device=device, grad=grad).transpose(1, 2)
    offsets = torch.tensor([3, 9], device=device)
    grid = ([3, 4], 2)  # shape, prefix
    for activation, softmax_dim in (("none", -1), ("silu", -1), ("softmax", -2)):
        options = (*grid, activation, softmax_dim, 0, None, None)
        yield ops.lrpe_cosine.default, (x, theta, *options)
        yield ops.lrpe_cosine.default, (transposed, theta, *options)
        yield ops.lrpe_cosine_qk.default, (x, k, theta, *options)
    yield ops.lrpe_cosine.default, (x, theta1, [14], 0, "none", -1, 5, offsets, None)
    ids = torch.randint(-50, 50, (2, 14, 2), device=device)
    yield ops.lrpe_cosine.default, (x, theta, [], 0, "silu", -1, 0, None, ids)
    yield ops.lrpe_cosine_qk.default, (x, k, theta, [], 0, "none", -1, 0, None, ids[:1])
    yield ops.lrpe_rotate.default, (x, theta[:, :2], [], 0, False, 0, None, ids)
    yield ops.lrpe_rotate.default, (x, theta, [12], 2, False, 1, None, None)
    yield ops.lrpe_rotate.default, (transposed, theta, [12], 2, True, 0, offsets, None)
    if grad:
        return  # in place on a leaf is refused; second derivatives do not exist: below without gradients
    dy, dk = randn(2, 3, 14, 16, device=device), randn(2, 6, 14, 16, device=device)
    yield ops.lrpe_rotate_.default, (x.clone(), theta, [12], 2, False, 0, None, None)
    for needs in ((True, True), (True, False), (False, True)):
        for token_major in (False, True):
            saved = x if needs[1] else None
            options = (*grid, "none", -1, 0, None, None)
            yield ops.lrpe_cosine_backward.default, (dy, saved, theta, *options, token_major, *needs)
            rotating = (theta[:, :2], *grid, True, 0, None, None)
            yield ops.lrpe_rotate_backward.default, (dy[..., :8], saved, *rotating, token_major, *needs)
            for form, width, columns in ((0, 16, 4), (1, 8, 2), (2, 8, 2)):
                yield ops._lrpe_dx.default, (dy[..., :width], theta[:, :columns], [form, token_major, 2, 0, 3, 4])
    options = (*grid, "sigmoid", -1, 0, None, None)
    yield ops.lrpe_cosine_qk_backward.default, (dy, dk, x, k, theta, *options, False, True, True, True, True)
    yield ops.lrpe_cosine_qk_backward.default, (dy, dk, x, k, theta, *options, False, False, False, True, False)


@pytest.mark.parametrize("grad", [False, True])
def test_opcheck(grad, device):
    seen = set()
    for op, arguments in op_calls(device, grad):
        torch.library.opcheck(op, arguments)  # raises unless all four tests pass
        seen.add(op.name())
    assert len(seen) == (3 if grad else 8), seen


@pytest.mark.parametrize("function", ["lrpe_cosine", "lrpe_rotate"])
@pytest.mark.parametrize("interleaved", [False, True])
def test_short_way_backward_has_the_same_bits(function, interleaved, device):
    """Where x alone has a gradient, eager mode takes an op of its own; the registered formula is the measure."""
    x = randn(2, 14, 3, 8, device=device, grad=True)
    rotating = function == "lrpe_rotate"
    for shape, prefix, offset in (((3, 4), 2, 0), ((14,), 0, 7), ((2, 7, 1), 0, 0)):
        theta = randn(3, -(-(4 if rotating else 8) // len(shape)), device=device)
        for view in (x.transpose(1, 2), x.reshape(2, 3, 14, 8)):
            how = (interleaved,) if rotating else ("none", -1)
            keywords = {"interleaved": interleaved} if rotating else {}
            y = getattr(annulus, function)(view, theta, shape, prefix=prefix, offset=offset, **keywords)
            want = getattr(ops, function).default(view, theta, list(shape), prefix, *how, offset, None, None)
            dy = torch.randn_like(y)
            (got,), (exact,) = (torch.autograd.grad(o, view, dy) for o in (y, want))
            assert torch.equal(got, exact) and got.stride() == exact.stride()
    for bad in ([], [3, 0, 0, 0, 14], [0, 0, 0, 0, 13]):
        with pytest.raises(RuntimeError, match="annulus.InvalidArgument"):
            ops._lrpe_dx(dy, theta, bad)


def all_functions(x, k, theta, prefix, offset):
    """Every function once; the sizes of `shape` come from the tensors, so they are dynamic, too."""
    y = annulus.lrpe_cosine(x, theta, (x.shape[2] - prefix,), prefix=prefix, activation="silu", offset=offset)
    q2, k2 = annulus.lrpe_cosine_qk(x, k, theta, (x.shape[2],), activation="softmax")
    z = annulus.lrpe_rotate(y, theta, (x.shape[2],))
    annulus.lrpe_rotate_(z, theta, (x.shape[2],), interleaved=True)
    return z + q2 + k2[:, : x.shape[1]]


# No two equal, nor equal to other sizes: torch takes equal ones to be one symbol and would compile again.
SIZES = [(5, 13), (7, 17), (9, 31)]


def compare_compiled(function, device, sizes):
    """As eager, forward and backward, over several sizes; other operations may be fused, hence the tolerance."""
    for B, L in sizes:
        x, k = randn(B, 2, L, 8, device=device, grad=True), randn(B, 4, L, 8, device=device, grad=True)
        theta = randn(2, 8, device=device, grad=True)
        out, want = function(x, k, theta, 3, 19), all_functions(x, k, theta, 3, 19)
        torch.testing.assert_close(out, want, rtol=1e-6, atol=1e-6)
        got, exact = (torch.autograd.grad(o.square().sum(), (x, k, theta)) for o in (out, want))
        for g, e in zip(got, exact):
            torch.testing.assert_close(g, e, rtol=1e-5, atol=1e-5 * e.abs().max().item())


def test_compile_fullgraph_dynamic(device):
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return torch._dynamo.backends.registry.lookup_backend("aot_eager")(graph, inputs)

    compiled = torch.compile(all_functions, fullgraph=True, dynamic=True, backend=count)
    compare_compiled(compiled, device, SIZES)
    assert len(graphs) == 1, "another size compiled again"


def test_compile_inductor(device):
    if device == "cpu":
        pytest.importorskip("torch._inductor.cpp_builder")
        from torch._inductor.exc import InvalidCxxCompiler
        from torch._inductor.cpp_builder import get_cpp_compiler

        try:
            get_cpp_compiler()
        except InvalidCxxCompiler:
            pytest.skip("torch.compile needs a C++ compiler here, and none works")
    compare_compiled(torch.compile(all_functions, fullgraph=True, dynamic=True), device, SIZES[:2])


def test_compile_in_place_without_gradients(device):
    """Decoding: the compiled function overwrites x itself, as eager does."""
    rotate_ = lambda x, t, o: annulus.lrpe_rotate_(x, t, (x.shape[2],), offset=o) + 1  # noqa: E731
    compiled = torch.compile(rotate_, fullgraph=True, dynamic=True, backend="aot_eager")
    for tokens in (7, 12):
        x, theta = randn(2, 3, tokens, 8, device=device), randn(3, 4, device=device)
        offset = torch.tensor([5, 1], device=device)
        other, version = x.clone(), x._version
        assert torch.equal(compiled(x, theta, offset), rotate_(other, theta, offset))
        assert torch.equal(x, other) and x._version > version


def test_errors_in_compiled_code_keep_their_message(device):
    """Compiled code calls the op itself, past our Python: the type is then at the front of the message."""
    compiled = torch.compile(lambda x, t: annulus.lrpe_cosine(x, t, (5,)), fullgraph=True, backend="aot_eager")
    with pytest.raises(RuntimeError, match=r"annulus.InvalidArgument: \[lrpe_cosine\] shape must"):
        compiled(randn(1, 2, 6, 4, device=device), randn(2, 4, device=device))


def test_export(device):
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.encode = annulus.nn.LrpeCosine(8, 2, 1)

        def forward(self, x):
            return self.encode(x, (x.shape[2],), activation="relu")

    model = Model().to(device)
    x = randn(2, 2, 6, 8, device=device)
    tokens = torch.export.Dim("tokens", min=2, max=4096)
    program = torch.export.export(model, (x,), dynamic_shapes={"x": {2: tokens}})
    assert any("lrpe_cosine" in str(n.target) for n in program.graph.nodes)
    longer = randn(2, 2, 19, 8, device=device)
    assert torch.equal(program.module()(longer), model(longer))


# Autograd's bookkeeping


def saved_bytes(function):
    """Bytes of the distinct tensors that the graph keeps for its backward."""
    kept = {}

    def pack(t):
        kept[t.data_ptr(), t.shape] = t.nbytes
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        function()
    return sum(kept.values())


def test_nothing_is_saved_that_is_not_needed(device):
    x, theta = randn(2, 3, 50, 8, device=device, grad=True), randn(3, 8, device=device)
    k = randn(2, 3, 50, 8, device=device, grad=True)
    assert saved_bytes(lambda: annulus.lrpe_cosine(x, theta, (50,))) == theta.nbytes
    assert saved_bytes(lambda: annulus.lrpe_cosine_qk(x, k, theta, (50,))) == theta.nbytes
    assert saved_bytes(lambda: annulus.lrpe_rotate(x, theta, (50,))) == theta.nbytes
    assert saved_bytes(lambda: annulus.lrpe_cosine(x, theta, (50,), activation="silu")) == theta.nbytes + x.nbytes
    theta.requires_grad_()
    assert saved_bytes(lambda: annulus.lrpe_cosine(x, theta, (50,))) == theta.nbytes + x.nbytes
    assert saved_bytes(lambda: ops.lrpe_cosine.default(x, theta.detach(), [50], 0, "none", -1, 0, None, None)) == theta.nbytes


def test_only_needed_gradients(device):
    x, theta = randn(2, 3, 5, 4, device=device), randn(3, 4, device=device, grad=True)
    annulus.lrpe_cosine(x, theta, (5,)).sum().backward()
    assert x.grad is None and theta.grad is not None
    assert not annulus.lrpe_cosine(x, theta.detach(), (5,)).requires_grad
    with torch.no_grad():
        assert not annulus.lrpe_cosine(x, theta, (5,)).requires_grad


def test_qk_with_one_output_unused(device):
    q, k = randn(2, 4, 5, 4, device=device, grad=True), randn(2, 2, 5, 4, device=device, grad=True)
    theta = randn(2, 4, device=device, grad=True)
    for used, unused, heads in ((0, k, 4), (1, q, 2)):
        gradients = torch.autograd.grad(annulus.lrpe_cosine_qk(q, k, theta, (5,))[used].sum(), (q, k, theta))
        x = (q, k)[used]
        want = torch.autograd.grad(cosine(x, theta.repeat_interleave(heads // 2, 0), (5,)).sum(), (x, theta))
        assert_close(gradients[used], want[0], GRADIENT)
        assert_close(gradients[2], want[1], GRADIENT)
        assert not gradients[1 - used].any()


@pytest.mark.parametrize("direct", [False, True])
def test_double_backward_raises(direct, device):
    x, theta = randn(2, 3, 5, 4, device=device, grad=True), randn(3, 4, device=device, grad=True)
    calls = [
        lambda: annulus.lrpe_cosine(x, theta, (5,), activation="silu"),
        lambda: annulus.lrpe_cosine_qk(x, x, theta, (5,))[0],
        lambda: annulus.lrpe_rotate(x, theta, (5,)),
    ]
    if direct:
        calls = [lambda: ops.lrpe_cosine.default(x, theta, [5], 0, "silu", -1, 0, None, None)]
    for call in calls:
        (dx,) = torch.autograd.grad(call().square().sum(), x, create_graph=True)
        with pytest.raises(annulus.NotSupported, match="no second derivative"):
            dx.sum().backward()


def test_no_copy(device):
    """A transposed view goes through without a copy: only the output is allocated, in the same order of axes."""
    base, theta = randn(2, 512, 3, 64, device=device, grad=True), randn(3, 64, device=device)
    x = base.transpose(1, 2)
    with torch.profiler.profile(profile_memory=True) as profile, torch.no_grad():
        y = annulus.lrpe_cosine(x, theta, (512,))
    events = profile.events()
    names = {e.name for e in events}
    assert not {"aten::copy_", "aten::clone", "aten::contiguous"} & names, names
    memory = (lambda e: e.self_device_memory_usage) if device == "cuda" else (lambda e: e.self_cpu_memory_usage)
    allocated = sum(max(memory(e), 0) for e in events)
    assert y.nbytes <= allocated <= y.nbytes + (1 << 20), "output, and at most a small table beside it"
    assert y.transpose(1, 2).is_contiguous()
    (dx,) = torch.autograd.grad(annulus.lrpe_cosine(x, theta, (512,)), x, y)
    assert dx.transpose(1, 2).is_contiguous()


# In place


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotate_in_place(dtype, interleaved, device):
    x, theta = randn(2, 3, 9, 8, device=device, dtype=dtype), randn(3, 4, device=device)
    options = dict(prefix=2, interleaved=interleaved)
    want = annulus.lrpe_rotate(x, theta, (7,), **options)
    address, version = x.data_ptr(), x._version
    y = annulus.lrpe_rotate_(x, theta, (7,), **options)
    assert y is x and x.data_ptr() == address and x._version > version
    assert torch.equal(x, want)

    leaf = randn(2, 3, 9, 8, device=device, dtype=dtype, grad=True)
    theta.requires_grad_()
    inner = leaf * 1
    y = annulus.lrpe_rotate_(inner, theta, (7,), **options)
    assert y is inner and y.grad_fn is not None
    dy = torch.randn_like(y)
    exact = torch.autograd.grad(rotate(leaf, theta, (7,), **options), (leaf, theta), dy.double())
    got = torch.autograd.grad(y, (leaf, theta), dy)
    assert_close(got[0], exact[0], GRADIENT)
    assert_close(got[1], exact[1], GRADIENT)


def test_in_place_is_noticed(device):
    x, theta = randn(2, 3, 5, 4, device=device, grad=True), randn(3, 2, device=device)
    with pytest.raises(annulus.InvalidArgument, match="leaf"):
        annulus.lrpe_rotate_(x, theta, (5,))
    y = x.exp()  # saves its result
    with torch.no_grad():
        annulus.lrpe_rotate_(y, theta, (5,))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


FORK = """
import os, signal, sys
import torch
import annulus

torch.set_num_threads(4)
x, theta = torch.randn(2, 8, 64, 32), torch.randn(8, 32)
encode = lambda: annulus.lrpe_cosine(x, theta, (64,)).numpy().tobytes()
if sys.argv[1] == "torch":
    torch.randn(1 << 20).exp()  # its threads, before any of ours
else:
    encode()
there, here = os.pipe()
child = os.fork()
if child == 0:
    signal.alarm(60)
    os.write(here, encode()[:4096])
    os._exit(0)
status = os.waitpid(child, 0)[1]
sys.exit(0 if status == 0 and os.read(there, 4096) == encode()[:4096] else 1)
"""


@pytest.mark.parametrize("first", ["annulus", "torch"])
def test_goes_on_in_a_fork(first):
    """As in the workers of a DataLoader: threads do not survive a fork, the results do."""
    import subprocess
    import sys

    done = subprocess.run([sys.executable, "-c", FORK, first], timeout=120)
    assert done.returncode == 0, "the child hangs or fails"


def test_streams_and_graphs():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device: streams and graphs are CUDA's")
    x, theta = randn(2, 3, 64, 32, device="cuda"), randn(3, 32, device="cuda")
    offset = torch.zeros(2, dtype=torch.int64, device="cuda")
    want = annulus.lrpe_cosine(x, theta, (64,), offset=7)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        late = x.clone().mul_(1)
        y = annulus.lrpe_cosine(late, theta, (64,), offset=7)
    torch.cuda.current_stream().wait_stream(side)
    assert torch.equal(y, want)
    graph = torch.cuda.CUDAGraph()
    position_ids = torch.zeros(1, 64, dtype=torch.int64, device="cuda")
    with torch.cuda.graph(graph):
        captured = annulus.lrpe_cosine(x, theta, (64,), offset=offset)
        by_ids = annulus.lrpe_cosine(x, theta, position_ids=position_ids)
    offset.fill_(7)  # new positions, no new capture
    position_ids.copy_(torch.arange(7, 71))
    graph.replay()
    assert torch.equal(captured, want) and torch.equal(by_ids, want)
