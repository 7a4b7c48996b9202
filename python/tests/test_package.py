"""The module, info, the peers command, and what importing costs."""

import json
import os
import subprocess
import sys
import time

import pytest
import torch
from contract import SAMPLES, Recorder

import annulus
from annulus import peers
from annulus.peers._timing import turn


def test_log_says_once_what_runs():
    code = "import torch, annulus; x = torch.ones(1, 1, 2, 4); [annulus.lrpe_cosine(x, x[0, :, 0], (2,)) for _ in range(3)]"
    run = subprocess.run([sys.executable, "-c", code], env={**os.environ, "ANNULUS_LOG": "1"}, capture_output=True, text=True)
    assert run.returncode == 0 and run.stderr.count("annulus: lrpe_cosine runs on cpu, ") == 1, run.stderr


def test_info():
    info = annulus.info()
    assert info["version"] == annulus.__version__ and info["commit"]
    assert info["devices"]["cpu"]["available"]
    for name, op in info["operators"].items():
        assert callable(getattr(annulus, name)) and op["summary"] and {"f32", "bf16"} <= set(op["dtypes"])
        assert op["gradients"] and op["cpu"]["available"] and op["cpu"]["reason"] and op["cuda"]["reason"]
        for p in op["precisions"]:
            assert 0 < p["state_error"] < p["gradient_error"] < 1e-2


def run(*arguments):
    environment = {**os.environ, "PYTHONPATH": os.path.dirname(os.path.dirname(annulus.__file__))}
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=environment)


@pytest.mark.parametrize("module,name", [("torch._functorch.utils", "enable_single_level_autograd_function"),
                                         ("torch.autograd.function", "_SingleLevelFunction"),
                                         ("torch._C", "_after_autograd_keyset"),
                                         ("torch._C", "_are_functorch_transforms_active"),
                                         ("torch._C", "_AutoDispatchBelowAutograd")])
def test_without_a_private_name_of_torch(module, name):
    """A later torch may not have it: gradients are there all the same, eager, compiled and of a direct call of the op."""
    code = f"""
import importlib, torch
owner = importlib.import_module({module!r})
kept = owner.{name}
del owner.{name}
import annulus
owner.{name} = kept  # torch itself cannot do without
x, theta = torch.randn(1, 2, 5, 4, requires_grad=True), torch.randn(2, 4, requires_grad=True)
rotate = lambda x, theta: annulus.lrpe_cosine(x, theta)
gradients = lambda f: torch.autograd.grad(f(x, theta).square().sum() + f(x, theta).sum(), (x, theta))
want = gradients(rotate)
phase = torch.arange(5.0)[:, None] * theta[:, None]
exact = gradients(lambda x, theta: torch.cat((x * phase.cos(), x * phase.sin()), -1))
direct = lambda x, theta: torch.ops.annulus.lrpe_cosine(x, theta, (5,), 0, "none", -1, 0, None, None)
for f in (rotate, torch.compile(rotate, fullgraph=True, backend="aot_eager"), direct):
    for g, w in zip(gradients(f), exact):
        torch.testing.assert_close(g, w, rtol=1e-4, atol=1e-4)
(dx,) = torch.autograd.grad(direct(x, theta).sum(), x, create_graph=True)
try:
    dx.sum().backward()
except annulus.NotSupported as e:
    print(e)
"""
    done = run("-c", code)
    assert done.returncode == 0 and "has no second derivative" in done.stdout, done.stderr


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


ONE_POOL = """
import os, re
import torch, annulus

torch.set_num_threads(3)
threads = lambda: len(os.listdir("/proc/self/task"))
before, x = threads(), torch.randn(4, 8, 512, 64)
annulus.lrpe_cosine(x, x[0, :, 0], (512,))
ours = threads()
torch.relu(x)
runtimes = set(re.findall(r"/\\S*/lib[gi]?omp\\S*", open("/proc/self/maps").read()))
print(before, ours, threads(), *runtimes)
"""


def test_threads_are_those_of_torch():
    before, ours, both, *runtimes = run("-c", ONE_POOL).stdout.split()
    assert len(runtimes) == 1, f"several OpenMP runtimes in a process: {runtimes}"
    assert int(ours) == int(before) + 2 == int(both), "the call must start torch's threads, and torch no others"


FORK = """
import os, signal, sys
import torch

torch.set_num_threads(4)
x, theta = torch.randn(2, 8, 64, 32), torch.randn(8, 32)

def encode():
    import annulus
    return annulus.lrpe_cosine(x, theta, (64,)).numpy().tobytes()

if sys.argv[1] == "annulus":
    encode()
else:  # its threads, before any of ours, or before we are there at all
    torch.randn(1 << 20).exp()
    if sys.argv[1] == "torch":
        import annulus
there, here = os.pipe()
child = os.fork()
if child == 0:
    signal.alarm(60)
    os.write(here, encode()[:4096])
    os._exit(0)
status = os.waitpid(child, 0)[1]
sys.exit(0 if status == 0 and os.read(there, 4096) == encode()[:4096] else 1)
"""


@pytest.mark.parametrize("first", ["annulus", "torch", "torch, annulus only in the fork"])
def test_goes_on_in_a_fork(first):
    """As in the workers of a DataLoader: threads do not survive a fork, the results do."""
    done = subprocess.run([sys.executable, "-c", FORK, first], timeout=120)
    assert done.returncode == 0, "the child hangs or fails"


class _Nothing(torch.autograd.Function):
    """What any operator costs that is called from Python and has a gradient."""

    @staticmethod
    def forward(ctx, *tensors):
        ctx.save_for_backward(*tensors)
        return tensors[0].view_as(tensors[0])

    @staticmethod
    def backward(ctx, *gradients):
        raise AssertionError


@pytest.mark.parametrize("sample", [s for s in SAMPLES if not s.what], ids=str)
def test_call_overhead(sample):
    """What Python adds to a call of the op, in calls of a Function that does nothing: 2 to 5 of them (7 us each). Timed in turns,
    and again where the machine, which others share, was disturbed."""
    tensors = sample.make("cpu", grad=True)
    with Recorder() as recorder:
        sample.function(**tensors)
    x = torch.zeros(4, requires_grad=True)
    calls = (lambda: sample.function(**tensors), lambda: [op(*arguments) for op, arguments in recorder.calls],
             lambda: _Nothing.apply(x, x, x))

    def microseconds(call, n=300):
        start = time.thread_time()
        for _ in range(n):
            call()
        return (time.thread_time() - start) / n * 1e6

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # waiting for another thread is no overhead of the call
    try:
        for _ in range(4):
            whole, op, nothing = map(min, zip(*([microseconds(call) for call in calls] for _ in range(6)), strict=True))
            if whole - op <= 8 * nothing:
                break
        assert whole - op <= 8 * nothing
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
def test_rows_are_those_of_the_command(size, suite, command, device):
    """The report merges by row name, so every peer row must be one of the C++ suite's."""
    listed = subprocess.run([command, "bench", suite, "--size", size, "--device", device, "--list"], capture_output=True, text=True)
    assert listed.returncode == 0, listed.stderr
    names = set(listed.stdout.split())
    ours = {f"{suite}/{p.row(d)}/{p.dtype}" for p in peers.SUITES[suite].problems(size, device) for d in p.directions}
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
    assert peers.main(["--filter", "1d-n1024", "--save", str(path)]) == 2  # one writer at a time
    assert f"another process writes {partial}" in capsys.readouterr().err
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
