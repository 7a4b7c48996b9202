"""The ring RNN in torch, beyond what python/tests asks of every operator and the tests in C++ of its values."""

import pytest
import torch
from contract import leaves, relative_error
from samples_ring_rnn import ACTIVATIONS, ALL, good, problem
from samples_ring_rnn import ring_rnn as formula

import annulus
from annulus.peers import ring_rnn as peers

ops = torch.ops.annulus


# Which optional inputs are there.
INPUTS = {
    "plain": {},
    "numbers": dict(tensors=False),
    "per-neuron": dict(per_neuron=True),
    "drive": dict(drive=True),
    "reset": dict(reset=True),
    "reset-state": dict(reset=True, reset_state=True),
    "mask": dict(mask=True),
    "all": ALL,
}


def check(p, activation):
    """Outputs, and the gradients of everything through both of them; returns the outputs."""
    got, want = annulus.ring_rnn(**p, activation=activation, return_state=True), formula(**p, activation=activation)
    dys = [torch.randn_like(y) for y in got]
    for g, w in zip(got, want):
        assert relative_error(g, w) <= 1e-12
    for g, w in zip(*(torch.autograd.grad(y, leaves(p), dys, allow_unused=True) for y in (got, want))):
        assert torch.isfinite(g).all() and relative_error(g, torch.zeros_like(g) if w is None else w) <= 1e-11
    return got


@pytest.mark.parametrize("inputs", INPUTS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_values(activation, inputs, device):
    check(problem(device=device, **INPUTS[inputs]), activation)


@pytest.mark.parametrize("zero", ["B", "T", "K", "N"])
@pytest.mark.parametrize("inputs", ["plain", "all"])
def test_zero_sizes(zero, inputs, device):
    p = problem(**dict(B=2, T=3, K=2, N=4) | {zero: 0}, device=device, **INPUTS[inputs])
    out, h_n = check(p, "silu")
    if zero == "T":
        assert torch.equal(h_n, p["r0"])
    angle, amplitude = annulus.ring_readout(out)
    assert angle.shape == amplitude.shape == out.shape[:2]
    assert zero != "N" or not (angle.any() or amplitude.any())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("precision", ["auto", "fp32", "bf16x6", "bf16x3", "tf32", "bf16"])
def test_precisions(precision, dtype, device):
    """What each mode delivers on live dynamics; a 16-bit output rounds more than any of them."""
    p = problem(32, 20, 4, 96, dtype=dtype, device=device, tensors=False)
    try:
        out = annulus.ring_rnn(**p, activation="tanh", precision=precision)
    except annulus.NotSupported as e:
        assert device == "cpu" and "precision tf32 is not available on cpu" in str(e)
        pytest.skip(str(e))
    if precision == "auto" and device == "cuda":
        precision = "bf16x3"
    most = {"auto": 1e-6, "fp32": 1e-6, "bf16x6": 1e-6, "bf16x3": 5e-6, "tf32": 5e-4, "bf16": 5e-3}[precision]
    assert relative_error(out, formula(**p, activation="tanh")[0]) <= max(most, 0 if dtype == torch.float32 else 5e-3)


def test_f16_products_are_of_float16_tensors(device):
    """On CUDA the default for them, an eighth of bf16's error; the CPU multiplies them in fp32."""
    p = problem(32, 20, 4, 96, dtype=torch.float16, device=device, tensors=False)
    out = annulus.ring_rnn(**p, activation="tanh")
    assert relative_error(out, formula(**p, activation="tanh")[0]) <= 7e-4  # 3e-4 of it rounds the output
    named = annulus.ring_rnn(**p, activation="tanh", precision="f16" if device == "cuda" else "fp32")
    assert torch.equal(out, named)
    if device == "cpu":
        with pytest.raises(annulus.NotSupported, match="multiplies f16 tensors in fp32"):
            annulus.ring_rnn(**p, precision="f16")
    p = problem(2, 3, 1, 8, dtype=torch.float32, device=device, grad=False)
    with pytest.raises(ValueError, match="precision must be f16 beside f16 tensors alone but is f16 beside f32 tensors"):
        annulus.ring_rnn(**p, precision="f16")


def test_default_precision_of_float32(device):
    p = problem(5, 6, 3, 40, dtype=torch.float32, device=device, grad=False)
    named = annulus.ring_rnn(**p, precision="bf16x3" if device == "cuda" else "fp32")
    assert torch.equal(annulus.ring_rnn(**p), named)


def test_readout_finds_the_bump(device):
    """Preferred angles are 2 pi i / N: a decoder that ends them at 2 pi is off by 1.7 degrees at N = 120."""
    angles = torch.linspace(-3, 3, 41, dtype=torch.float64, device=device)
    model = annulus.nn.RingRNN(120, 2).to(device)
    angle, _ = annulus.ring_readout(model.bump(angles)[:, None])
    assert (angle[:, 0].double() - angles).abs().max() <= 1e-5


def op_arguments(p, checkpoint=0, save=True):
    """Of the op ring_rnn."""
    tensors = [p.get(name) for name in ("A", "Wa", "Wo", "r0", "J0", "J1", "alpha", "drive", "reset_state")]
    return (*tensors, -0.1, 0.1, 0.15, p.get("reset"), p.get("mask"), "gelu", "auto", checkpoint, None, [], save, False)


@pytest.mark.parametrize("grad", [False, True])
def test_opcheck_of_a_float32_state_beside_16_bits(grad, device):
    p = problem(2, 4, 3, 5, dtype=torch.bfloat16, device=device, grad=grad, state_dtype=torch.float32)
    torch.library.opcheck(ops.ring_rnn.default, op_arguments(p))
    if grad:
        return  # second derivatives do not exist: below without gradients
    out, h_n, _, _, saved = ops.ring_rnn.default(*op_arguments(p))
    for dout in (torch.rand_like(out), None):
        inputs = (dout, torch.rand_like(h_n), out, saved, *op_arguments(p)[:-4])
        torch.library.opcheck(ops.ring_rnn_backward.default, (*inputs, 0b1001011))


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
    assert ops.ring_rnn.default(*op_arguments(p, save=False))[-1].numel() == 0


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


def test_changed_tensors_are_noticed(device):
    p = problem(2, 3, 2, 4, dtype=torch.float32, device=device)
    out = annulus.ring_rnn(**p)
    with torch.no_grad():
        out.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


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
    want = formula(A, fixed.Wa, fixed.Wo, fixed.bump(torch.tensor([1.0, 2.0], device=device)), alpha=fixed.alpha,
                   activation="tanh")
    assert relative_error(out, want[0]) <= 1e-12 and relative_error(h_n, want[1]) <= 1e-12
    assert len(fixed(A)) == 2 and len(annulus.ring_rnn(A, fixed.Wa, fixed.Wo, h_n, return_readout=True)) == 3
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
    for name, gradients in (("ring_rnn", "A Wa Wo r0 J0 J1 alpha drive reset_state".split()), ("ring_readout", ["states"])):
        op = annulus.info()["operators"][name]
        assert op["gradients"] == gradients and op["deterministic"] and op["cpu"]["available"]
        assert op["dtypes"] == ["f64", "f32", "f16", "bf16"] and op["cuda"]["reason"]


# Wrong calls


def test_bad_gradient_call():
    """The backward op checks what it is given, too: nothing is written where something is wrong."""
    p = good()
    out, h_n, _, _, saved = ops.ring_rnn.default(*op_arguments(p))
    inputs = op_arguments(p)[:-4]
    with pytest.raises(annulus.InvalidArgument, match=r"\[ring_rnn_backward\] saved must have shape"):
        ops.ring_rnn_backward.default(out, h_n, out, saved[:1], *inputs, 1)
    with pytest.raises(annulus.InvalidArgument, match=r"dout must have shape"):
        ops.ring_rnn_backward.default(out[:1], h_n, out, saved, *inputs, 1)
    plain = op_arguments({k: p[k] for k in ("A", "Wa", "Wo", "r0")})[:-4]
    with pytest.raises(annulus.InvalidArgument, match=r"ddrive must not be asked for"):
        ops.ring_rnn_backward.default(out, h_n, out, saved, *plain, 1 << 7)


def test_packed():
    p = good()
    packed = annulus.ring_rnn_pack(p["Wa"], p["Wo"])
    assert packed.words.dtype == torch.int32 and packed.words.data_ptr() % 256 == 0
    assert torch.equal(annulus.ring_rnn(**p, packed=packed), annulus.ring_rnn(**p))
    with pytest.raises(annulus.InvalidArgument, match="packed must be made for f32, .*, precision bf16x6 .*but is made for f32, .*fp32"):
        annulus.ring_rnn(**p, packed=packed, precision="bf16x6")  # whose packed weights may be of equal length
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


# Peers


def test_full_size_is_the_table():
    rows = [(p.row(d), p.dtype) for p in peers.problems("full", "cpu") for d in p.directions]
    assert len(rows) == len(set(rows)) and ("fwd-b256-n2048-k64-t20", "bf16") in rows
    assert len({r for r, dtype in rows if dtype == "f32" and r.startswith("fwd-") and not r.endswith("dead")}) == 12


def test_peers():
    """A small problem through every implementation: forward and all gradients against double precision."""
    for directions in (("fwd",), ("fwdbwd",)):
        for variant in ("", "live2", "actions", "dead"):
            problem = peers.Problem(4, 12, 3, "f32", directions, variant=variant, matrices=True)
            session = problem.open("cpu", directions)
            wanted = {"torch-gemm", "torch-gemm2", "torch-sum", "torch-matmul", "annulus-torch"}
            assert set(session.implementations) == wanted
            for name, implementation in session.implementations.items():
                errors = session.errors(implementation, directions)
                assert set(errors) == set(session.parts(directions[0])) and max(errors.values()) <= 1e-5, (name, errors)
    active = (problem.tensors("cpu")["A"] > 0).float().mean()
    assert 0.1 < active < 0.35
