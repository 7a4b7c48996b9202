"""What torch expects of the ring RNN: opcheck, compile, export, autograd's bookkeeping; the module; wrong calls."""

import pytest
import torch
from ring_formula import GRADIENT, assert_close, error, leaves, problem
from ring_formula import ring_rnn as formula

import annulus

ops = torch.ops.annulus
ALL = dict(drive=True, reset=True, reset_state=True, mask=True, per_neuron=True)
NAMES = ("A", "Wa", "Wo", "r0", "J0", "J1", "alpha", "drive", "reset_state", "reset", "mask")


def op_arguments(p, activation="gelu", checkpoint=0, save=True, readout=False):
    return (*(p.get(name) for name in NAMES), -0.1, 0.1, 0.15, activation, "auto", checkpoint, None, save, readout)


def op_calls(device, grad):
    """Each op of the namespace with a few argument lists."""
    plain = problem(2, 4, 3, 5, dtype=torch.float32, device=device, grad=grad, tensors=False)
    every = problem(2, 4, 3, 5, dtype=torch.float32, device=device, grad=grad, **ALL)
    sixteen = problem(2, 4, 3, 5, dtype=torch.bfloat16, device=device, grad=grad, state_dtype=torch.float32)
    for p in (plain, every, sixteen):
        yield ops.ring_rnn.default, op_arguments(p)
    yield ops.ring_rnn.default, op_arguments(plain, save=False)  # a backward then runs the forward again
    yield ops.ring_rnn.default, op_arguments(every, checkpoint=3)
    states = torch.rand(2, 4, 5, device=device, requires_grad=grad)
    yield ops.ring_readout.default, (states,)
    if grad:
        return  # second derivatives do not exist: below without gradients
    yield ops.ring_rnn.default, op_arguments(plain, readout=True)
    angle = torch.rand(2, 4, device=device)
    for dangle, damplitude in ((angle, None), (None, angle), (angle, angle)):
        yield ops.ring_readout_backward.default, (dangle, damplitude, states)
    for p, checkpoint, needed in ((plain, 0, 0b1111), (every, 2, 0b111111111), (every, 0, 0b10), (sixteen, 0, 0b1001011)):
        out, h_n, saved, _, _ = ops.ring_rnn.default(*op_arguments(p, checkpoint=checkpoint))
        inputs = op_arguments(p, checkpoint=checkpoint)[:-3]
        yield ops.ring_rnn_backward.default, (torch.rand_like(out), torch.rand_like(h_n), out, saved, *inputs, needed)
        yield ops.ring_rnn_backward.default, (None, torch.rand_like(h_n), out, saved, *inputs, needed)


@pytest.mark.parametrize("grad", [False, True])
def test_opcheck(grad, device):
    seen = set()
    for op, arguments in op_calls(device, grad):
        torch.library.opcheck(op, arguments)  # raises unless all four tests pass
        seen.add(op.name())
    assert len(seen) == (2 if grad else 4), seen


def everything(p):
    """Both functions, with every input and output; sizes come from the tensors, so they are dynamic, too."""
    out, h_n, angle, amplitude = annulus.ring_rnn(**p, activation="gelu", return_state=True, return_readout=True)
    direction, length = annulus.ring_readout(out * 2)
    return out.square().sum() + h_n.sum() + amplitude.sum() + (angle - direction).cos().sum() + length.sum()


# No two equal, nor equal to other sizes: torch takes equal ones to be one symbol and would compile again.
SIZES = [(5, 13, 3, 23), (7, 17, 6, 29), (9, 31, 4, 19)]


def compare_compiled(function, device, sizes):
    """As eager, forward and backward, over several sizes; other operations may be fused, hence the tolerance."""
    for B, T, K, N in sizes:
        p = problem(B, T, K, N, dtype=torch.float32, device=device, **ALL)
        got, want = function(p), everything(p)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
        inputs = list(leaves(p).values())
        for g, e in zip(torch.autograd.grad(got, inputs), torch.autograd.grad(want, inputs)):
            assert error(g, e) <= 1e-4


def test_compile_fullgraph_dynamic(device):
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return torch._dynamo.backends.registry.lookup_backend("aot_eager")(graph, inputs)

    compiled = torch.compile(everything, fullgraph=True, dynamic=True, backend=count)
    compare_compiled(compiled, device, SIZES)
    assert len(graphs) == 1, "another size compiled again"


def test_compile_inductor(device):
    if device == "cpu":
        from torch._inductor.cpp_builder import get_cpp_compiler
        from torch._inductor.exc import InvalidCxxCompiler

        try:
            get_cpp_compiler()
        except InvalidCxxCompiler:
            pytest.skip("torch.compile needs a C++ compiler here, and none works")
    compare_compiled(torch.compile(everything, fullgraph=True, dynamic=True), device, SIZES[:1])


def test_compiled_training_step(device):
    """A module under torch.compile trains to the same bits as in eager mode."""
    torch.manual_seed(3)
    model = annulus.nn.RingRNN(16, 2).to(device)
    A, r0 = torch.rand(4, 6, 2, device=device), model.bump(torch.tensor([0.0, 1.0, 2.0, 3.0], device=device))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    grads = []
    for m in (model, compiled):
        model.zero_grad()
        m(A, r0)[0].square().sum().backward()
        grads.append([p.grad.clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads))
    with torch.no_grad():
        assert torch.equal(compiled(A, r0)[1], model(A, r0)[1])


def test_errors_in_compiled_code_keep_their_message(device):
    compiled = torch.compile(lambda p: annulus.ring_rnn(**p), fullgraph=True, backend="aot_eager")
    p = problem(2, 4, 3, 5, dtype=torch.float32, device=device, grad=False)
    p["Wa"] = p["Wa"][:2]
    with pytest.raises(RuntimeError, match=r"annulus.InvalidArgument: \[ring_rnn\] Wa must have shape"):
        compiled(p)


def test_export(device):
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.ring = annulus.nn.RingRNN(12, 3, learn_scalars=True)

        def forward(self, A, r0):
            out, h_n = self.ring(A, r0)
            return *annulus.ring_readout(out), h_n

    model = Model().to(device)
    A, r0 = torch.rand(2, 6, 3, device=device), torch.rand(2, 12, device=device)
    batch, steps = torch.export.Dim("batch", min=1, max=64), torch.export.Dim("steps", min=1, max=4096)
    program = torch.export.export(model, (A, r0), dynamic_shapes={"A": {0: batch, 1: steps}, "r0": {0: batch}})
    (node,) = (n for n in program.graph.nodes if "ring_rnn" in str(n.target))
    assert node.args[-2] is False, "an exported program keeps nothing for a backward"
    A, r0 = torch.rand(5, 19, 3, device=device), torch.rand(5, 12, device=device)
    for a, b in zip(program.module()(A, r0), model(A, r0)):
        assert torch.equal(a, b)
    # It can be trained all the same.
    exported = program.module()
    exported(A, r0)[0].sum().backward()
    model(A, r0)[0].sum().backward()
    for name, parameter in model.named_parameters():
        assert torch.equal(exported.get_parameter(name).grad, parameter.grad), name


# Autograd's bookkeeping


def saved_tensors(function):
    """The distinct tensors that the graph keeps for its backward."""
    kept = {}

    def pack(t):
        kept[t.data_ptr(), t.shape] = t
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        function()
    return list(kept.values())


def test_what_is_saved(device):
    p = problem(2, 12, 3, 5, dtype=torch.float32, device=device, tensors=False)
    inputs = sum(x.nbytes for x in p.values())
    out = p["A"].new_empty(2, 12, 5).nbytes
    for checkpoint, steps in ((0, 12), (4, 3), (5, 3), (100, 1)):
        kept = saved_tensors(lambda checkpoint=checkpoint: annulus.ring_rnn(**p, checkpoint=checkpoint))
        assert sum(t.nbytes for t in kept) == inputs + out + steps * out // 12
    p = {name: x.detach() for name, x in p.items()}
    assert not saved_tensors(lambda: annulus.ring_rnn(**p)) and not annulus.ring_rnn(**p).requires_grad
    assert ops.ring_rnn.default(*op_arguments(p, save=False))[2].numel() == 0


def test_no_gradients_no_saved_states(device):
    """The kernel writes what a backward needs where there will be one, and nowhere else."""
    B, T, K, N = 8, 64, 2, 16
    p = problem(B, T, K, N, dtype=torch.float32, device=device, grad=False)

    def allocated():
        with torch.profiler.profile(profile_memory=True) as profile:
            annulus.ring_rnn(**p)
        name = "self_device_memory_usage" if device == "cuda" else "self_cpu_memory_usage"
        return sum(max(getattr(e, name), 0) for e in profile.events())

    without = allocated()
    p["J1"].requires_grad_()
    assert allocated() >= without + B * T * N * 4
    with torch.no_grad():
        assert allocated() <= without + B * N * 4


@pytest.mark.parametrize("name", NAMES[:9])
def test_only_needed_gradients(name, device):
    """One gradient alone is what it is among all of them (another kernel may make it, so not to the bit)."""
    p = problem(3, 5, 3, 8, dtype=torch.float32, device=device, **ALL)
    dout = torch.randn(3, 5, 8, device=device)
    inputs = leaves(p)
    assert set(inputs) == set(NAMES[:9])
    together = dict(zip(inputs, torch.autograd.grad(annulus.ring_rnn(**p, activation="tanh"), inputs.values(), dout)))
    alone = {k: x.detach().requires_grad_(k == name) for k, x in p.items()}
    annulus.ring_rnn(**alone, activation="tanh").backward(dout)
    assert_close(alone[name].grad, together[name], GRADIENT)
    assert all(x.grad is None for k, x in alone.items() if k != name)


def test_outputs_nobody_used(device):
    p = problem(3, 5, 3, 8, device=device)
    want, want_h = formula(**p)
    out, h_n = annulus.ring_rnn(**p, return_state=True)
    for used, exact in ((out, want), (h_n, want_h)):
        got = torch.autograd.grad(used.sum(), p["Wa"], retain_graph=True)
        assert_close(got[0], torch.autograd.grad(exact.sum(), p["Wa"], retain_graph=True)[0], GRADIENT)


def test_changed_tensors_are_noticed(device):
    p = problem(2, 3, 2, 4, dtype=torch.float32, device=device)
    out = annulus.ring_rnn(**p)
    with torch.no_grad():
        out.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("direct", [False, True])
def test_double_backward_raises(direct, device):
    p = problem(2, 3, 2, 4, dtype=torch.float32, device=device)
    states = torch.rand(2, 3, 4, device=device, requires_grad=True)
    out = ops.ring_rnn.default(*op_arguments(p, save=False))[0] if direct else annulus.ring_rnn(**p)
    angle = ops.ring_readout.default(states)[0] if direct else annulus.ring_readout(states)[0]
    for y, x in ((out, p["Wa"]), (out, p["J0"]), (angle, states)):
        (g,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        with pytest.raises(annulus.NotSupported, match="no second derivative"):
            g.sum().backward()


def test_no_copy(device):
    """Whatever the strides: only outputs and scratch are allocated."""
    p = problem(4, 8, 2, 32, dtype=torch.float32, device=device, grad=False)
    p = {k: x.mT.contiguous().mT if x.dim() > 1 else x for k, x in p.items()}
    with torch.profiler.profile() as profile:
        annulus.ring_rnn(**p)
    names = {e.name for e in profile.events()}
    assert not {"aten::copy_", "aten::clone", "aten::contiguous"} & names, names


# The module


def test_module(device):
    model = annulus.nn.RingRNN(24, 3, alpha=[0.1] * 24, learn_scalars=True).to(device)
    assert {n: tuple(p.shape) for n, p in model.named_parameters()} == {
        "Wa": (3, 24, 24), "Wo": (24, 24), "J0": (), "J1": (), "alpha": (24,)
    }
    assert abs(model.Wa.std().item() - 24**-0.5) < 0.05
    fixed = annulus.nn.RingRNN(24, 3, "tanh", alpha=[0.1] * 24, dtype=torch.float64).to(device)
    assert set(dict(fixed.named_parameters())) == {"Wa", "Wo"} and "alpha" in fixed.state_dict()
    A = torch.randn(2, 5, 3, device=device, dtype=torch.float64)
    out, h_n = fixed(A, fixed.bump(torch.tensor([1.0, 2.0], device=device)))
    want, want_h = formula(A, fixed.Wa, fixed.Wo, fixed.bump(torch.tensor([1.0, 2.0], device=device)), alpha=fixed.alpha,
                           activation="tanh")
    assert_close(out, want), assert_close(h_n, want_h)
    assert not fixed(A)[0].any(), "no state to start from, no drive: nothing happens"
    bump = fixed.bump(torch.tensor([0.0, 6.0], device=device))
    torch.testing.assert_close(bump.norm(dim=1), torch.ones(2, device=device, dtype=torch.float64))
    assert bump.argmax(1).tolist() == [0, 23] and "activation='tanh'" in repr(fixed)
    for bad, message in ((dict(n_neurons=-1), "n_neurons"), (dict(J0=[1.0]), "J0"), (dict(alpha=[1.0]), "24 of them")):
        with pytest.raises(annulus.InvalidArgument, match=message):
            annulus.nn.RingRNN(**{"n_neurons": 24, "n_actions": 2, **bad})


def test_module_trains(device):
    """A student recovers a teacher's states from its actions."""
    torch.manual_seed(1)
    teacher, student = (annulus.nn.RingRNN(12, 2, learn_scalars=True).to(device) for _ in range(2))
    optimizer = torch.optim.Adam(student.parameters(), lr=2e-2)
    A, r0 = torch.randn(32, 6, 2, device=device), torch.randn(32, 12, device=device)
    want = teacher(A, r0)[0].detach()
    losses = []
    for _ in range(150):
        optimizer.zero_grad()
        loss = (student(A, r0)[0] - want).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.1 * losses[0], (losses[0], losses[-1])


def test_info():
    for name, gradients in (("ring_rnn", list(NAMES[:9])), ("ring_readout", ["states"])):
        op = annulus.info()["operators"][name]
        assert op["gradients"] == gradients and op["deterministic"] and op["cpu"]["available"]
        assert op["dtypes"] == ["f64", "f32", "f16", "bf16"] and op["cuda"]["reason"]


# Wrong calls


def good(**changes):
    p = problem(2, 4, 3, 5, dtype=torch.float32, grad=False, **ALL)
    return {**p, **changes}


ONES = torch.ones
BAD = [
    (dict(A=ONES(2, 4)), r"\[ring_rnn\] A must have 3 dimensions but has shape \(2, 4\)"),
    (dict(A=ONES(2, 4, 2)), r"Wa must have shape \(2, 5, 5\) but has \(3, 5, 5\)"),
    (dict(A=ONES(2, 4, 3, dtype=torch.int32)), r"A must be one of f64, f32, f16, bf16 but is i32"),
    (dict(A=ONES(2, 4, 3, dtype=torch.complex64)), r"A must have a dtype that annulus knows"),
    (dict(A=ONES(2, 4, 3, dtype=torch.float64)), r"r0 must be f64 but is f32"),
    (dict(A=ONES((1,) * 7)), r"A must have at most 6 dimensions"),
    (dict(A=[1.0]), r"A must be Tensor"),
    (dict(Wa=ONES(3, 5, 4)), r"Wa must have shape \(3, 5, 5\)"),
    (dict(Wa=ONES(5, 5)), r"Wa must have 3 dimensions"),
    (dict(Wo=ONES(5, 4)), r"Wo must have shape \(5, 5\)"),
    (dict(Wo=ONES(5, 5, dtype=torch.bfloat16)), r"Wo must be f32 but is bf16"),
    (dict(Wo=ONES(5, 5, device="meta")), r"Wo must be on the device of A"),
    (dict(r0=ONES(3, 5)), r"r0 must have shape \(2, 5\) but has \(3, 5\)"),
    (dict(r0=ONES(5)), r"r0 must have 2 dimensions"),
    (dict(J0=ONES(1)), r"J0 must have rank 0 but has shape \(1,\)"),
    (dict(J0="large"), r"J0 must be float but is str"),
    (dict(J1=ONES((), dtype=torch.float64)), r"J1 must be f32 but is f64"),
    (dict(J1=float("nan")), r"J1 must be a finite number"),
    (dict(alpha=ONES(4)), r"alpha must have shape \(5,\) but has \(4,\)"),
    (dict(alpha=ONES(5, 1)), r"alpha must have rank 0 or shape \(5"),
    (dict(alpha=float("inf")), r"alpha must be a finite number"),
    (dict(alpha=None), r"alpha must be float but is NoneType"),
    (dict(activation="sigmoid"), r"activation must be relu, gelu, tanh or silu but is 'sigmoid'"),
    (dict(activation=None), r"activation must be str"),
    (dict(drive=ONES(2, 4, 3)), r"drive must have shape \(2, 4, 5\)"),
    (dict(drive=ONES(2, 4, 5, dtype=torch.float64)), r"drive must be f32 but is f64"),
    (dict(drive=0.5), r"drive must be Optional\[Tensor\]"),
    (dict(reset=ONES(2, 4)), r"reset must be bool but is f32"),
    (dict(reset=ONES(4, 2, dtype=torch.bool)), r"reset must have shape \(2, 4\)"),
    (dict(reset=None), r"reset must be given with reset_state but is missing"),
    (dict(reset_state=ONES(2, 4)), r"reset_state must have shape \(2, 5\)"),
    (dict(mask=ONES(2, 4, dtype=torch.int32)), r"mask must be bool but is i32"),
    (dict(mask=ONES(2, 3, dtype=torch.bool)), r"mask must have shape \(2, 4\)"),
    (dict(precision="fp8"), r"precision must be auto, fp32, bf16x6, bf16x3, tf32 or bf16 but is 'fp8'"),
    (dict(precision=32), r"precision must be str but is int 32"),
    (dict(checkpoint=-1), r"checkpoint must be at least 0 but is -1"),
    (dict(checkpoint=1.5), r"checkpoint must be int but is float"),
    (dict(packed=ONES(3)), r"packed must be i32 but is f32"),
    (dict(packed=ONES(3, dtype=torch.int32)), r"packed must"),
]


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("changes,message", BAD)
def test_bad_call(changes, message, grad):
    p = good(**changes)
    if grad:
        p["Wa" if "Wa" not in changes and "packed" not in changes else "r0"].requires_grad_()
    with pytest.raises(annulus.InvalidArgument, match=message):
        annulus.ring_rnn(**p)
    assert torch.isfinite(annulus.ring_rnn(**good())).all()  # a bad call leaves nothing behind


def test_bad_gradient_call():
    """The backward op checks what it is given, too: nothing is written where something is wrong."""
    p = good()
    out, h_n, saved, _, _ = ops.ring_rnn.default(*op_arguments(p))
    inputs = op_arguments(p)[:-3]
    with pytest.raises(RuntimeError, match=r"annulus.InvalidArgument: \[ring_rnn_backward\] saved must have shape"):
        ops.ring_rnn_backward.default(out, h_n, out, saved[:1], *inputs, 1)
    with pytest.raises(RuntimeError, match=r"dout must have shape"):
        ops.ring_rnn_backward.default(out[:1], h_n, out, saved, *inputs, 1)
    plain = op_arguments({k: p[k] for k in ("A", "Wa", "Wo", "r0")})[:-3]
    with pytest.raises(RuntimeError, match=r"ddrive must not be asked for"):
        ops.ring_rnn_backward.default(out, h_n, out, saved, *plain, 1 << 7)


def test_packed():
    p = good()
    packed = annulus.ring_rnn_pack(p["Wa"], p["Wo"])
    assert packed.dtype == torch.int32 and packed.data_ptr() % 256 == 0
    assert torch.equal(annulus.ring_rnn(**p, packed=packed), annulus.ring_rnn(**p))
    p["r0"].requires_grad_()  # gradients of everything but the weights
    dout = torch.rand(2, 4, 5)
    (a,) = torch.autograd.grad(annulus.ring_rnn(**p, packed=packed), p["r0"], dout)
    (b,) = torch.autograd.grad(annulus.ring_rnn(**p), p["r0"], dout)
    assert torch.equal(a, b)
    p["Wo"].requires_grad_()
    with pytest.raises(annulus.InvalidArgument, match="packed must be left out where Wa or Wo requires grad"):
        annulus.ring_rnn(**p, packed=packed)
    with torch.no_grad():
        annulus.ring_rnn(**p, packed=packed)
    with pytest.raises(annulus.InvalidArgument, match=r"\[ring_rnn_pack\] Wo must have shape"):
        annulus.ring_rnn_pack(p["Wa"], p["Wo"][:2])
    with pytest.raises(annulus.InvalidArgument, match=r"\[ring_rnn_pack\] precision must be auto"):
        annulus.ring_rnn_pack(p["Wa"], p["Wo"], "double")


def test_bad_readout():
    with pytest.raises(annulus.InvalidArgument, match=r"\[ring_readout\] states must have 3 dimensions"):
        annulus.ring_readout(ONES(2, 3))
    with pytest.raises(annulus.InvalidArgument, match=r"states must be one of"):
        annulus.ring_readout(ONES(2, 3, 4, dtype=torch.int64))


def test_not_available():
    with pytest.raises(annulus.NotSupported, match="precision tf32 is not available on cpu"):
        annulus.ring_rnn(**good(), precision="tf32")
    if not annulus.info()["devices"]["cuda"]["available"] and torch.cuda.is_available():
        with pytest.raises(annulus.NotSupported, match="CUDA"):
            annulus.ring_rnn(**{k: x.cuda() for k, x in good().items()})


# CUDA's own


def test_streams_and_graphs():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device: streams and graphs are CUDA's")
    p = problem(8, 10, 3, 64, dtype=torch.float32, device="cuda", grad=False)
    want = annulus.ring_rnn(**p, activation="tanh")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        late = {**p, "A": p["A"].clone().mul_(1)}
        got = annulus.ring_rnn(**late, activation="tanh")
    torch.cuda.current_stream().wait_stream(side)
    assert torch.equal(got, want)
    graph, alpha = torch.cuda.CUDAGraph(), p["alpha"].clone()
    with torch.cuda.graph(graph):
        captured = annulus.ring_rnn(**p, activation="tanh")
    p["alpha"].mul_(0.5)  # a tensor is read when the kernel runs: no new capture
    graph.replay()
    assert not torch.equal(captured, want)
    p["alpha"].copy_(alpha)
    graph.replay()
    assert torch.equal(captured, want)
