"""The ring RNN in torch, beyond what python/tests asks of every operator: what is saved, the module, packed weights."""

import pytest
import torch
from samples_ring_rnn import ALL, assert_close, good, problem
from samples_ring_rnn import ring_rnn as formula

import annulus
from annulus import _peers_ring_rnn as peers

ops = torch.ops.annulus


def op_arguments(p, checkpoint=0, save=True):
    """Of the op ring_rnn."""
    tensors = [p.get(name) for name in ("A", "Wa", "Wo", "r0", "J0", "J1", "alpha", "drive", "reset_state")]
    return (*tensors, -0.1, 0.1, 0.15, p.get("reset"), p.get("mask"), "gelu", "auto", checkpoint, None, save, False)


@pytest.mark.parametrize("grad", [False, True])
def test_opcheck_of_a_float32_state_beside_16_bits(grad, device):
    p = problem(2, 4, 3, 5, dtype=torch.bfloat16, device=device, grad=grad, state_dtype=torch.float32)
    torch.library.opcheck(ops.ring_rnn.default, op_arguments(p))
    if grad:
        return  # second derivatives do not exist: below without gradients
    out, h_n, _, _, saved = ops.ring_rnn.default(*op_arguments(p))
    for dout in (torch.rand_like(out), None):
        inputs = (dout, torch.rand_like(h_n), out, saved, *op_arguments(p)[:-3])
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
    want, want_h = formula(A, fixed.Wa, fixed.Wo, fixed.bump(torch.tensor([1.0, 2.0], device=device)), alpha=fixed.alpha,
                           activation="tanh")
    assert_close(out, want), assert_close(h_n, want_h)
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
    inputs = op_arguments(p)[:-3]
    with pytest.raises(annulus.InvalidArgument, match=r"\[ring_rnn_backward\] saved must have shape"):
        ops.ring_rnn_backward.default(out, h_n, out, saved[:1], *inputs, 1)
    with pytest.raises(annulus.InvalidArgument, match=r"dout must have shape"):
        ops.ring_rnn_backward.default(out[:1], h_n, out, saved, *inputs, 1)
    plain = op_arguments({k: p[k] for k in ("A", "Wa", "Wo", "r0")})[:-3]
    with pytest.raises(annulus.InvalidArgument, match=r"ddrive must not be asked for"):
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
        annulus.ring_readout(torch.ones(2, 3))
    with pytest.raises(annulus.InvalidArgument, match=r"states must be one of"):
        annulus.ring_readout(torch.ones(2, 3, 4, dtype=torch.int64))


def test_not_available():
    with pytest.raises(annulus.NotSupported, match="precision tf32 is not available on cpu"):
        annulus.ring_rnn(**good(), precision="tf32")


# Peers


def test_full_size_is_the_table():
    rows = [(p.row(d), p.dtype) for p in peers.problems("full") for d in p.directions]
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
