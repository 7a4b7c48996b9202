"""The module, info, the peers command, and what importing costs."""

import json
import os
import subprocess
import sys
import time

import pytest
import torch
from formula import cosine

import annulus
from annulus import peers
from annulus._peers_lrpe_cosine import allowed_error
from annulus._timing import turn


def test_module_trains_theta(device):
    """theta learns the frequencies that another table encoded with."""
    torch.manual_seed(1)
    teacher = annulus.nn.LrpeCosine(8, 2, 2).to(device)
    student = annulus.nn.LrpeCosine(8, 2, 2).to(device)
    with torch.no_grad():
        student.theta.mul_(1.05)
    start = (student.theta - teacher.theta).abs().max().item()
    optimizer = torch.optim.Adam(student.parameters(), lr=2e-3)
    x = torch.randn(4, 2, 37, 8, device=device)
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        loss = (student(x, (6, 6), prefix=1, activation="silu") - teacher(x, (6, 6), prefix=1, activation="silu")).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.05 * losses[0]
    assert (student.theta - teacher.theta).abs().max().item() < 0.5 * start


def test_module(device):
    module = annulus.nn.LrpeCosine(128, 12, 3, base=500.0, learnable=False).to(device)
    assert module.theta.shape == (12, 43) and module.theta.dtype == torch.float32
    assert not list(module.parameters()) and "theta" in module.state_dict()
    assert torch.allclose(module.theta[5].cpu().double(), 500.0 ** (-torch.arange(43).double() / 43))
    x = torch.randn(1, 12, 24, 128, device=device)
    want = cosine(x, module.theta, (2, 3, 4))
    assert (module(x, (2, 3, 4)).double() - want).abs().max() <= 1e-6 * want.abs().max()
    q2, k2 = module.qk(x, x, (2, 3, 4))
    assert torch.equal(q2, k2) and torch.equal(q2, module(x, (2, 3, 4)))
    assert "n_axes=3" in repr(module)
    with pytest.raises(annulus.InvalidArgument, match="n_axes"):
        annulus.nn.LrpeCosine(8, 2, 5)
    with pytest.raises(annulus.InvalidArgument, match="head_dim"):
        annulus.nn.LrpeCosine(4, 2, 3)  # two columns an axis leave none to the third
    for arguments, name in (((8.5, 2), "head_dim"), ((0, 2), "head_dim"), ((8, -2), "n_heads"), ((8, 2, 1, 0), "base")):
        with pytest.raises(annulus.InvalidArgument, match=rf"\[LrpeCosine\] {name} must"):
            annulus.nn.LrpeCosine(*arguments)


@pytest.mark.parametrize("learnable", [False, True])
def test_frequencies_stay_wide(device, learnable):
    """bfloat16 frequencies would be radians off at position 100 000."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), annulus.nn.LrpeCosine(8, 2, learnable=learnable))
    want = model[1].theta.detach().clone()
    for cast in (lambda: model.to(torch.bfloat16), model.half, lambda: model.to(device, torch.float16)):
        cast()
        assert model[0].weight.dtype.itemsize == 2
        assert model[1].theta.dtype == torch.float32 and torch.equal(model[1].theta.detach().cpu(), want)
    assert model[1].theta.device.type == torch.device(device).type
    x = torch.randn(1, 2, 3, 8, device=device, dtype=torch.bfloat16)
    assert model[1](x, (3,), offset=100_000).dtype == torch.bfloat16
    assert model.double()[1].theta.dtype == torch.float64


def test_last_backend(device):
    x = torch.randn(2, 3, 4, 8, device=device, requires_grad=True)
    theta = torch.rand(3, 8, device=device)
    annulus.lrpe_cosine(x, theta, (4,)).sum().backward()
    every = annulus.last_backend()
    for op in ("lrpe_cosine", "lrpe_cosine_backward"):
        assert annulus.last_backend(op).startswith(device.split(":")[0] + ", ") and every[op] == annulus.last_backend(op)
    assert annulus.last_backend("no_such_operator") is None


def test_log_says_once_what_runs():
    code = "import torch, annulus; x = torch.ones(1, 1, 2, 4); [annulus.lrpe_cosine(x, x[0, :, 0], (2,)) for _ in range(3)]"
    run = subprocess.run([sys.executable, "-c", code], env={**os.environ, "ANNULUS_LOG": "1"}, capture_output=True, text=True)
    assert run.returncode == 0 and run.stderr.count("annulus: lrpe_cosine runs on cpu, ") == 1, run.stderr


def test_info():
    info = annulus.info()
    assert info["version"] == annulus.__version__ and info["commit"]
    assert info["devices"]["cpu"]["available"]
    for name in ("lrpe_cosine", "lrpe_rotate"):
        op = info["operators"][name]
        assert op["gradients"] == ["x", "theta"] and {"f32", "bf16"} <= set(op["dtypes"])
        assert op["cpu"]["available"] and op["cpu"]["reason"] and op["cuda"]["reason"]
    precisions = info["operators"]["ring_rnn"]["precisions"]
    assert [p["name"] for p in precisions] == ["fp32", "bf16x6", "bf16x3", "tf32", "bf16"]
    assert all(0 < p["state_error"] < p["gradient_error"] < 1e-2 for p in precisions)


def run(*arguments):
    environment = {**os.environ, "PYTHONPATH": os.path.dirname(os.path.dirname(annulus.__file__))}
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=environment)


def test_info_command():
    text = run("-m", "annulus.info")
    assert text.returncode == 0 and text.stderr == "" and "operator lrpe_cosine" in text.stdout
    parsed = json.loads(run("-m", "annulus.info", "--json").stdout)
    assert parsed["version"] == annulus.__version__
    assert run("-m", "annulus.info", "--frobnicate").returncode == 2


def test_import_is_quick():
    script = "import torch, time; t = time.perf_counter(); import annulus; print(time.perf_counter() - t)"
    seconds = min(float(run("-c", script).stdout) for _ in range(2))
    assert seconds <= 0.3, f"importing takes {seconds:.2f} s beyond torch"


SMALLEST = {
    "lrpe_cosine": lambda one: annulus.lrpe_cosine(one(1, 1, 1, 1), one(1, 1), (1,)),
    "ring_rnn": lambda one: annulus.ring_rnn(one(1, 1, 1), one(1, 1, 1), one(1, 1), one(1, 1)),
    "ring_readout": lambda one: annulus.ring_readout(one(1, 1, 1)),
}


@pytest.mark.parametrize("name", SMALLEST)
def test_call_overhead(name):
    """The smallest call, so all of it is overhead. The limit is generous: a shared machine is no laboratory."""
    tensors = {rank: torch.ones((1,) * rank, requires_grad=True) for rank in range(1, 5)}
    call = lambda: SMALLEST[name](lambda *size: tensors[len(size)])  # noqa: E731

    def microseconds(n=300):
        start = time.thread_time()
        for _ in range(n):
            call()
        return (time.thread_time() - start) / n * 1e6

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # waiting for another thread is no overhead of the call
    try:
        microseconds()
        assert min(microseconds() for _ in range(5)) <= 120
    finally:
        torch.set_num_threads(threads)


KEYS = {"schema", "suite", "row", "op", "impl", "device", "dtype", "params", "bytes", "time_ms", "error", "hardware", "commit",
        "date", "status"}


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    """One problem through the command, as a user runs it; the compiler's rows may be skipped, with a reason."""
    path = tmp_path_factory.mktemp("peers") / "peers.jsonl"
    result = run("-m", "annulus.peers", "lrpe-cosine", "--filter", "1d-n1024", "--reps", "2", "--save", str(path))
    assert result.returncode == 0, result.stderr
    return path, result


def test_peers_allow_one_unit_in_the_last_place():
    for largest, unit in ((1.0, 2.0**-7), (1.9921875, 2.0**-7), (4.5, 2.0**-5)):
        assert allowed_error("bf16", largest) * largest == unit


def test_peers_take_turns():
    orders = [turn(list("ABC"), i) for i in range(6)]
    assert all(sorted(order) == list("ABC") for order in orders)
    assert sorted(order[0] for order in orders) == list("AABBCC")
    followed = [{pair for order in orders for pair in zip(order, order[1:]) if pair[1] == name} for name in "ABC"]
    assert all(len(before) == 2 for before in followed)  # nobody always comes after the same one


def test_peers_records(records):
    path, result = records
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert {r["row"] for r in rows} == {f"{d}-1d-n1024-l0-b2" for d in ("fwd", "bwd", "fwdbwd")}
    assert {r["impl"] for r in rows} == {"torch-eager", "torch-compile", "annulus-torch"}
    assert {r["dtype"] for r in rows} == {"f32", "bf16"} and len(rows) == 18
    for r in rows:
        if r["status"] == "skipped":
            assert r["impl"] == "torch-compile" and r["reason"]
            continue
        assert r["status"] == "ok" and set(r) == KEYS and r["schema"] == 1
        assert 0 < r["time_ms"]["min"] <= r["time_ms"]["median"] <= r["time_ms"]["p95"] and r["time_ms"]["n"] == 2
        assert 0 <= r["error"]["value"] < (1e-3 if r["dtype"] == "f32" else 1e-2)
        assert r["params"]["shape"] == [1024] and r["params"]["E"] == 128
    exact = [r for r in rows if r["impl"] == "annulus-torch" and r["dtype"] == "f32"]
    assert all(r["error"]["value"] <= 1e-6 for r in exact)
    assert result.stdout.count("\n") == 20 and result.stderr.startswith("peers: lrpe-cosine")


@pytest.fixture
def command():
    path = os.path.join(os.path.dirname(annulus.__file__), "..", "..", "bin", "annulus")
    if not os.path.exists(path):
        pytest.skip("the annulus command was not built beside the package")
    return path


@pytest.mark.parametrize("suite", peers.SUITES)
@pytest.mark.parametrize("size", ["quick", "full"])
def test_rows_are_those_of_the_command(size, suite, command):
    """The report merges by row name, so every peer row must be one of the C++ suite's."""
    listed = subprocess.run([command, "bench", suite, "--size", size, "--list"], capture_output=True, text=True)
    assert listed.returncode == 0, listed.stderr
    names = set(listed.stdout.split())
    ours = {f"{suite}/{p.row(d)}/{p.dtype}" for p in peers.SUITES[suite].problems(size) for d in p.directions}
    assert ours <= names, sorted(ours - names)


def test_peers_records_go_into_a_report(records, command, tmp_path):
    page = tmp_path / "report.html"
    result = subprocess.run([command, "report", str(records[0]), "--out", str(page)], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "torch-eager" in page.read_text()


@pytest.mark.parametrize("arguments", [["no-such-suite"], ["--filter", "("], ["--reps", "0"], ["--size", "huge"]])
def test_peers_usage(arguments, capsys):
    with pytest.raises(SystemExit) as stopped:
        peers.main(arguments)
    assert stopped.value.code == 2 and "usage" in capsys.readouterr().err


def test_peers_filter_that_leaves_nothing_writes_nothing(capsys, tmp_path):
    path = tmp_path / "peers.jsonl"
    path.write_text("old")
    assert peers.main(["--filter", "nomatch", "--save", str(path)]) == 2
    assert "nomatch" in capsys.readouterr().err and path.read_text() == "old" and len(os.listdir(tmp_path)) == 1


def test_peers_keep_the_old_file_until_all_rows_are_there(capsys, tmp_path):
    path, partial = tmp_path / "peers.jsonl", tmp_path / "peers.jsonl.partial"
    path.write_text("old")
    record = {"row": "r", "dtype": "f32", "impl": "i", "status": "skipped", "reason": "none"}

    stopped = peers.Output(str(path))
    stopped.write(record)
    stopped.break_off()
    assert path.read_text() == "old" and json.loads(partial.read_text()) == record
    assert f"1 row saved to {partial}" in capsys.readouterr().err

    without_rows = peers.Output(str(path))
    without_rows.break_off()
    assert path.read_text() == "old" and not partial.exists()

    link = tmp_path / "link"
    link.symlink_to(path)
    whole = peers.Output(str(link))
    whole.write(record)
    whole.finish()
    assert json.loads(path.read_text()) == record and link.is_symlink() and not partial.exists()
    with pytest.raises(OSError, match="regular file"):
        peers.Output("/dev/null")


def test_peers_cannot_run(capsys):
    assert peers.main(["--save", "/no/such/folder/f.jsonl"]) == 2
    assert "cannot write" in capsys.readouterr().err
    if not annulus.info()["devices"]["cuda"]["available"]:
        assert peers.main(["--device", "cuda"]) == 3
        assert "not available" in capsys.readouterr().err


def test_full_size_is_the_table():
    rows = [p.row(d) for p in peers.SUITES["lrpe-cosine"].problems("full") for d in p.directions]
    assert len(rows) == len(set(rows)) == 64 and "bwd-3d-n32-l10-b12" in rows
    rows = [(p.row(d), p.dtype) for p in peers.SUITES["ring-rnn"].problems("full") for d in p.directions]
    assert len(rows) == len(set(rows)) and ("fwd-b256-n2048-k64-t20", "bf16") in rows
    assert len({r for r, dtype in rows if dtype == "f32" and r.startswith("fwd-") and not r.endswith("dead")}) == 12


def test_peers_of_the_ring_rnn():
    """A small problem through every implementation: forward and all gradients against double precision."""
    from annulus._peers_ring_rnn import Problem

    for directions in (("fwd",), ("fwdbwd",)):
        for variant in ("", "live2", "actions", "dead"):
            problem = Problem(4, 12, 3, "f32", directions, variant=variant, matrices=True)
            session = problem.open("cpu", directions)
            wanted = {"torch-gemm", "torch-gemm2", "torch-sum", "torch-matmul", "annulus-torch"}
            assert set(session.implementations) == wanted
            for name, implementation in session.implementations.items():
                errors = session.errors(implementation, directions)
                assert set(errors) == set(session.parts(directions[0])) and max(errors.values()) <= 1e-5, (name, errors)
    active = (problem.tensors("cpu")["A"] > 0).float().mean()
    assert 0.1 < active < 0.35
