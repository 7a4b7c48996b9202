"""What torch expects of an operator: opcheck, compile, export, autograd's bookkeeping, memory, streams."""

import pytest
import torch
from contract import OPERATORS, SAMPLES, Recorder, every_operator, every_sample, leaves, outputs, relative_error

import annulus

DTYPES = [torch.float64, torch.float32, torch.bfloat16]


def op_calls(sample, device, dtype=torch.float32):
    """What the sample's forward and backward call: without gradients, with all, and with the first alone."""
    with Recorder() as recorder:
        sample.run(sample.make(device, dtype))
        tensors = sample.make(device, dtype, grad=True)
        sample.run_backward(tensors)
        first = next(iter(tensors))
        sample.run_backward({k: t.detach().requires_grad_(k == first) for k, t in tensors.items()})
    written = []  # an operator may have a form that writes to tensors it is given
    for op, arguments in recorder.calls:
        name = op._schema.name.removeprefix("annulus::") + "_out"
        if f"annulus::{name}" in EVERY:
            given = [torch.empty_like(y) for y in outputs(op(*arguments))]
            written.append((getattr(torch.ops.annulus, name).default, [*arguments, *given]))
    return recorder.calls + written


# Those that compute: not what is said of the build, nor a rule that torch.compile is to see as an op (rope_test.py has it), nor what opens
# and closes groups of processes.
EVERY = {n for n in torch._C._dispatch_get_all_op_names()
         if n.startswith("annulus::") and "_json" not in n and "::_require" not in n and not n.endswith("_group")}


def test_samples_reach_every_op():
    outside = {f"annulus::{name}" for m in OPERATORS.values() for name in getattr(m, "OUTSIDE_OF_COMPILED_CODE", ())}
    reached = {op.name() for sample in SAMPLES for op, _ in op_calls(sample, "cpu")}
    assert reached == EVERY - outside
    assert {sample.op for sample in SAMPLES} >= set(annulus.info()["operators"])


@every_sample
def test_opcheck(sample, device):
    calls = op_calls(sample, device)
    for op, arguments in calls:
        torch.library.opcheck(op, arguments)  # raises unless all four tests pass
    (op, arguments), *_ = calls
    if not op._schema.is_mutable:  # in place on a leaf is refused
        for a in arguments:
            if isinstance(a, torch.Tensor) and a.is_floating_point():
                a.requires_grad_()
        torch.library.opcheck(op, arguments)


@every_sample
def test_definition(sample, device):
    """That the right arguments arrive in the right places; values in every dtype are for the tests in C++."""
    tensors = sample.make(device, sample.widest, grad=True)
    ys, wanted = sample.run(tensors), outputs(sample.definition(**tensors))
    dys = [torch.randn_like(y) for y in ys]
    got, want = ((*o, *torch.autograd.grad(o, leaves(tensors), [d.to(y) for d, y in zip(dys, o)])) for o in (ys, wanted))
    for g, w in zip(got, want, strict=True):
        assert relative_error(g, w) <= sample.limit(device)


@every_sample
def test_gradcheck(sample, device):
    sample.require(torch.float64)
    tensors = sample.make(device, torch.float64, grad=True)
    names = [k for k, t in tensors.items() if t.requires_grad]
    call = lambda *values: sample.run({**tensors, **dict(zip(names, values))})  # noqa: E731
    assert torch.autograd.gradcheck(call, [tensors[k] for k in names], nondet_tol=0.0, fast_mode=True)


def layouts(t):
    """The same values in other layouts: none may be copied, none may change a bit."""
    yield "transposed", t.mT.contiguous().mT if t.dim() > 1 else t
    yield "reversed", t.permute(list(range(t.dim()))[::-1]).contiguous().permute(list(range(t.dim()))[::-1])
    yield "sliced", t.new_zeros([2 * n + 1 for n in t.shape])[tuple(slice(1, None, 2) for _ in t.shape)].copy_(t)
    yield "wide", torch.cat([t, t], -1)[..., : t.shape[-1]] if t.dim() else t
    yield "aligned to one element", torch.cat([t.new_zeros(1), t.flatten()])[1:].view(t.shape)


@every_sample
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_layout_changes_no_bit(sample, dtype, device):
    sample.require(dtype)
    tensors = sample.make(device, dtype, grad=True)
    ys = sample.run(tensors)
    dys = [torch.randn_like(y) for y in ys]
    want = (*ys, *torch.autograd.grad(ys, leaves(tensors), dys))
    for kind, _ in layouts(ys[0]):
        other = {k: dict(layouts(t.detach()))[kind].requires_grad_(t.requires_grad) for k, t in tensors.items()}
        ys = sample.run(other)
        got = (*ys, *torch.autograd.grad(ys, leaves(other), [dict(layouts(d))[kind] for d in dys]))
        assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True)), kind
    expanded = [d.flatten()[0].expand(d.shape) for d in dys]  # stride 0 everywhere
    got, want = (torch.autograd.grad(sample.run(tensors), leaves(tensors), d)
                 for d in (expanded, [d.contiguous() for d in expanded]))
    assert all(torch.equal(g, w) for g, w in zip(got, want))


@every_sample
def test_no_copy(sample, device):
    """Whatever the strides: only outputs and scratch are allocated."""
    if sample.what == "in place":
        pytest.skip("the sample makes the x that is overwritten")
    if sample.cuts:
        pytest.skip("its ranks hold parts that do not lie together")
    tensors = {k: dict(layouts(t))["transposed"] for k, t in sample.make(device).items()}
    with torch.profiler.profile() as profile:
        sample.run(tensors)
    names = {e.name for e in profile.events()}
    assert not {"aten::copy_", "aten::clone", "aten::contiguous"} & names, names


@every_sample
def test_registered_formula(sample, device):
    """Eager mode has a way of its own; compiled code and torch.ops take the registered one: the same bits and strides."""
    tensors = sample.make(device, grad=True)
    with Recorder() as recorder:
        ys = sample.run(tensors)
    ((op, arguments),) = recorder.calls
    if op._schema.is_mutable:
        pytest.skip(f"{op.name()} has no formula: compiled code takes that of the functional op")
    named = {a.name.removesuffix("_tensor"): v for a, v in zip(op._schema.arguments, arguments) if isinstance(v, torch.Tensor)}
    inputs = [named[k].requires_grad_() for k, t in tensors.items() if t.requires_grad]
    others = [y for y in outputs(op(*arguments)) if y.requires_grad]
    dys = [torch.randn_like(y) for y in ys]
    want = (*ys, *torch.autograd.grad(ys, leaves(tensors), dys))
    for g, w in zip((*others, *torch.autograd.grad(others, inputs, dys, create_graph=True)), want, strict=True):
        assert torch.equal(g, w) and g.stride() == w.stride()
    with pytest.raises(annulus.NotSupported, match="no second derivative"):
        g.sum().backward()


# Compiled


def run_all(operator, tensors):
    """Every sample of an operator, in one graph."""
    return [y for sample, t in zip(OPERATORS[operator].SAMPLES, tensors) for y in sample.run(t)]


def compare_compiled(compiled, operator, device, sizes):
    """As eager, forward and backward, over several sizes; other operations may be fused, hence the tolerance."""
    for size in sizes:
        tensors = [s.make(device, size=size, grad=True) for s in OPERATORS[operator].SAMPLES]
        inputs = [x for t in tensors for x in leaves(t)]
        got, want = compiled(operator, tensors), run_all(operator, tensors)
        for g, w in zip(got, want, strict=True):
            torch.testing.assert_close(g, w, rtol=1e-5, atol=1e-5)
        got, want = (torch.autograd.grad(sum(y.cos().sum() for y in ys), inputs) for ys in (got, want))
        assert all(relative_error(g, w) <= 1e-4 for g, w in zip(got, want))


@every_operator
def test_compile_fullgraph_dynamic(operator, device):
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return torch._dynamo.backends.registry.lookup_backend("aot_eager")(graph, inputs)

    compiled = torch.compile(run_all, fullgraph=True, dynamic=True, backend=count)
    compare_compiled(compiled, operator, device, [1])
    first = len(graphs)  # more than one where torch starts over, as it does when an op wants a float as a number
    compare_compiled(compiled, operator, device, (2, 3))
    assert len(graphs) == first, "another size compiled again"


@every_operator
def test_compile_inductor(operator, device):
    if device == "cpu":
        from torch._inductor.cpp_builder import get_cpp_compiler
        from torch._inductor.exc import InvalidCxxCompiler

        try:
            get_cpp_compiler()
        except InvalidCxxCompiler:
            pytest.skip("torch.compile needs a C++ compiler here, and none works")
    compare_compiled(torch.compile(run_all, fullgraph=True, dynamic=True), operator, device, [1])


@every_sample
def test_export(sample, device):
    class Model(torch.nn.Module):
        def forward(self, tensors):
            return sample.run(tensors)

    program = torch.export.export(Model(), (sample.make(device, size=1),))
    assert any(sample.op in str(n.target) for n in program.graph.nodes)
    tensors = sample.make(device, size=1)
    for got, want in zip(program.module()(tensors), sample.run(tensors), strict=True):
        assert torch.equal(got, want)


# Autograd's bookkeeping


@every_sample
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_only_needed_gradients(sample, dtype, device):
    """One gradient alone is what it is among all of them (another kernel may make it, so not to the bit)."""
    sample.require(dtype)
    tensors = sample.make(device, dtype, grad=True)
    count = len(sample.run(tensors))
    together = dict(zip([k for k, t in tensors.items() if t.requires_grad], sample.run_backward(tensors)[count:]))
    limit = 1e-11 if dtype == torch.float64 else 1e-5 if device == "cpu" else 1e-4
    for name, want in together.items():
        alone = {k: t.detach().requires_grad_(k == name) if k in together else t for k, t in tensors.items()}
        *_, got = sample.run_backward(alone)
        assert relative_error(got, want) <= limit, name
    assert not any(y.requires_grad for y in sample.run({k: t.detach() for k, t in tensors.items()}))
    with torch.no_grad():
        assert not any(y.requires_grad for y in sample.run(tensors))


@every_sample
def test_outputs_nobody_used(sample, device):
    tensors = sample.make(device, sample.widest, grad=True)
    for i, y in enumerate(sample.run(tensors)):
        got = torch.autograd.grad(y.square().sum(), leaves(tensors), allow_unused=True, retain_graph=True)
        ys = sample.run(tensors)
        zeros = [torch.zeros_like(o) for o in ys]
        zeros[i] = 2 * ys[i].detach()
        for g, w in zip(got, torch.autograd.grad(ys, leaves(tensors), zeros)):
            torch.testing.assert_close(torch.zeros_like(w) if g is None else g, w, rtol=1e-12, atol=1e-13)


@every_sample
def test_double_backward_raises(sample, device):
    tensors = sample.make(device, grad=True)
    gradients = torch.autograd.grad([y.square().sum() for y in sample.run(tensors)], leaves(tensors), create_graph=True)
    for g in gradients:
        with pytest.raises(annulus.NotSupported, match=rf"\[{sample.op}\] has no second derivative"):
            g.sum().backward(retain_graph=True)


@every_sample
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_threads_and_runs_change_no_bit(sample, dtype, device):
    sample.require(dtype)
    tensors = sample.make(device, dtype, size=2, grad=True)
    want, before = sample.run_backward(tensors), torch.get_num_threads()
    try:
        for threads in (1, 2, 3, 8):
            torch.set_num_threads(threads)
            assert all(torch.equal(a, b) for a, b in zip(sample.run_backward(tensors), want))
    finally:
        torch.set_num_threads(before)


@every_sample
def test_last_backend(sample, device):
    sample.run_backward(sample.make(device, grad=True))
    for op in (sample.op, sample.op + "_backward"):
        assert annulus.last_backend(op).startswith(device + ", ") and annulus.last_backend()[op] == annulus.last_backend(op)


@every_sample
def test_streams_and_graphs(sample):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device: streams and graphs are CUDA's")
    tensors, others = sample.make("cuda"), sample.make("cuda")
    want, changed = sample.run(tensors), sample.run(others)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        got = sample.run({k: t.clone() for k, t in tensors.items()})
    torch.cuda.current_stream().wait_stream(side)
    assert all(torch.equal(a, b) for a, b in zip(got, want))
    if not sample.graphs:
        with pytest.raises(NotImplementedError, match="CUDA graph"), torch.cuda.graph(torch.cuda.CUDAGraph()):
            sample.run(tensors)
        torch.cuda.synchronize()
        return
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = sample.run(tensors)
    for values, wanted in ((tensors, want), (others, changed)):  # tensors are read when the kernel runs: no new capture
        for k, t in tensors.items():
            t.copy_(values[k])
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(captured, wanted))
