"""Ring attention from PyTorch: how sequences are cut, and rings of real processes, which are this file run as a program."""

import datetime
import functools
import os
import signal
import subprocess
import sys
import time
import weakref

import pytest
import torch

import annulus

if __name__ != "__main__":
    from contract import relative_error

DEADLINE = 1.5
PATIENCE = 8.0  # of calls whose end nobody waits for

# How a sequence is cut


@pytest.mark.parametrize("balance", ["zigzag", "contiguous"])
def test_shards_are_the_sequence(balance):
    for n in (0, 1, 3, 8, 10, 37):
        for P in (1, 2, 3, 4, 8):
            x = torch.randn(2, n, 3, dtype=torch.float64, requires_grad=True)
            shards = annulus.shard(x, P, balance)
            assert len(shards) == P and max(s.shape[1] for s in shards) - min(s.shape[1] for s in shards) <= 2
            y = annulus.unshard(shards, balance)
            assert torch.equal(y, x)
            weights = torch.randn_like(x)
            (dx,) = torch.autograd.grad(y, x, weights)
            assert torch.equal(dx, weights)
            turned = annulus.unshard(annulus.shard(x.mT, P, balance, dim=-1), balance, dim=2)
            assert torch.equal(turned, x.mT)


def test_which_tokens_a_rank_holds():
    n, P = 37, 4
    start = [c * n // (2 * P) for c in range(2 * P + 1)]
    for p, part in enumerate(annulus.shard(torch.arange(n), P, dim=0)):
        chunks = [range(start[c], start[c + 1]) for c in (p, 2 * P - 1 - p)]
        assert part.tolist() == [t for chunk in chunks for t in chunk]
    parts = annulus.shard(torch.arange(n), P, "contiguous", dim=0)
    assert [part[0].item() for part in parts] == [c * n // P for c in range(P)]
    assert [part.tolist() for part in annulus.shard(torch.arange(2), 3, dim=0)] == [[1], [], [0]]


X = torch.zeros(2, 10)


@pytest.mark.parametrize("call,message", [
    (lambda: annulus.shard(X, 0), r"\[shard\] world_size must be an integer of at least 1 but is 0"),
    (lambda: annulus.shard(X, 2.0), r"\[shard\] world_size must be an integer"),
    (lambda: annulus.shard(X, 2, "even"), r"\[shard\] balance must be zigzag or contiguous but is 'even'"),
    (lambda: annulus.shard(X, 2, dim=2), r"\[shard\] dim must be a dimension of x, of shape \(2, 10\), but is 2"),
    (lambda: annulus.shard([1, 2], 2), r"\[shard\] x must be a dense tensor but is list"),
    (lambda: annulus.unshard([]), r"\[unshard\] shards must be a list of at least one tensor but is \[\]"),
    (lambda: annulus.unshard([X, None]), r"\[unshard\] shards\[1\] must be a dense tensor but is None"),
    (lambda: annulus.unshard([X, X[:1]]), r"\[unshard\] shards\[1\] must be as shards\[0\] but for its size 1"),
    (lambda: annulus.unshard([X, X.double()]), r"\[unshard\] shards\[1\] must be as shards\[0\]"),
    (lambda: annulus.unshard([X, X[:, :5]]), r"\[unshard\] shards\[0\] must have 7 of the 15 tokens but has 10"),
    (lambda: annulus.unshard([X, X], balance=None), r"\[unshard\] balance must be zigzag or contiguous but is None"),
], ids=lambda x: x if isinstance(x, str) else "")
def test_refuses(call, message):
    with pytest.raises(annulus.InvalidArgument, match=message):
        call()


# A group of one: what a group must be


@pytest.fixture
def alone():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def test_group_of_one(alone):
    q = torch.randn(1, 20, 2, 8, requires_grad=True)
    for group in (None, torch.distributed.group.WORLD):
        o = annulus.ring_attention(q, q, q, group, causal=True)
        want = annulus.attention(q, q, q, causal=True)
        assert relative_error(o, want) < 1e-6
        (got,), (dq,) = torch.autograd.grad(o.sum(), q), torch.autograd.grad(want.sum(), q)
        assert relative_error(got, dq) < 1e-5


def test_a_destroyed_group_is_refused(alone):
    from annulus import _group

    q = torch.randn(1, 20, 2, 8, requires_grad=True)
    o = annulus.ring_attention(q, q, q)
    handle = _group.handle_of("ring_attention", None)
    assert handle == _group.handle_of("ring_attention", torch.distributed.group.WORLD)
    # What is left of gloo when Python ends may end the process with an abort: none of it may outlive the group.
    (link,) = _group._links.values()
    backend = weakref.ref(link.backend)
    torch.distributed.destroy_process_group()  # its last reference
    assert backend() is None and not _group._links and not _group._handles
    for call in (lambda: o.sum().backward(), lambda: annulus.ring_attention(q, q, q)):
        with pytest.raises(annulus.InvalidArgument, match=r"\[ring_attention\] group must be"):
            call()
    torch.ops.annulus._close_group.default(12345)  # of none: nothing


def test_what_a_group_must_be():
    from torch.testing._internal.distributed.fake_pg import FakeStore

    q = torch.randn(1, 20, 2, 8)
    with pytest.raises(annulus.InvalidArgument, match=r"group must be given where .*init_process_group was not called"):
        annulus.ring_attention(q, q, q)
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        with pytest.raises(annulus.NotSupported, match=r"group must have gloo for messages in host memory.*'fake'"):
            annulus.ring_attention(q, q, q)
        with pytest.raises(annulus.InvalidArgument, match=r"group must be a ProcessGroup that this process is in"):
            annulus.ring_attention(q, q, q, "all")
    finally:
        torch.distributed.destroy_process_group()


# Rings of processes


def ring(tmp_path, size, what, seconds=50):
    """Exit codes of the ranks, None of one that does not end by itself, and what they said."""
    program = subprocess.Popen([sys.executable, __file__, str(size), str(tmp_path), what], stdout=subprocess.PIPE,
                               stderr=subprocess.STDOUT, text=True, start_new_session=True)
    try:
        text, _ = program.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(program.pid, signal.SIGKILL)
        text, _ = program.communicate()
    codes = [tmp_path / f"rank{rank}" for rank in range(size)]
    return [int(path.read_text()) if path.exists() else None for path in codes], text


@pytest.mark.parametrize("size", [2, 4])
def test_equals_one_device(size, tmp_path):
    codes, text = ring(tmp_path, size, "equal")
    assert codes == [0] * size and text.count("all are equal") == size, text


@pytest.mark.parametrize("fault", ["kill", "stop", "exit", "interrupt"])
def test_a_rank_is_lost(fault, tmp_path):
    """Rank 1 goes between the forward and the backward of the second step. Rank 0 does not catch what it gets, rank 2 looks at it."""
    codes, text = ring(tmp_path, 3, fault)
    assert codes == [1, {"kill": -9, "stop": -9, "exit": 3, "interrupt": 0}[fault], 0], text
    assert "annulus.errors.RankLost: " in text and text.count("lost as it should be") == 1, text


def test_mismatched_calls(tmp_path):
    codes, text = ring(tmp_path, 3, "mismatch")
    assert codes == [0] * 3 and text.count("lost as it should be") == 3, text


# What the processes do


def equal(rank, size):
    def case(function, n=101, H=4, Hkv=2, dtype=torch.float32, limit=2e-5, bits=False, **options):
        """function, and its options, of the whole sequence."""
        torch.manual_seed(n)
        whole = [torch.randn(2, n, heads, 16).to(dtype).requires_grad_() for heads in (H, Hkv, Hkv)]
        do, dlse = torch.randn(2, n, H, 16).to(dtype), torch.randn(2, H, n)
        o, lse = function(*whole)
        want = (o, lse, *torch.autograd.grad((o, lse), whole, (do, dlse)))
        balance = options.get("balance", "zigzag")
        cut = lambda t, dim=1: annulus.shard(t.detach(), size, balance, dim)[rank]  # noqa: E731
        mine = [cut(t).requires_grad_() for t in whole]
        o, lse = annulus.ring_attention(*mine, return_lse=True, deadline_s=20.0, **options)
        got = (o, lse, *torch.autograd.grad((o, lse), mine, (cut(do), cut(dlse, 2))))
        for name, g, w, dim in zip(("o", "lse", "dq", "dk", "dv"), got, want, (1, 2, 1, 1, 1)):
            w = cut(w, dim)
            seen = w != -torch.inf
            error = ((g.double() - w.double())[seen].norm() / w[seen].double().norm().clamp_min(1e-30)).item()
            assert torch.equal(g, w) if bits else torch.equal(g == -torch.inf, ~seen) and error <= limit, (name, error, options)

    causal = dict(causal=True)
    dense = lambda **o: lambda q, k, v: annulus.attention(q, k, v, return_lse=True, **o)  # noqa: E731
    case(dense(**causal), **causal)
    case(dense(**causal), balance="contiguous", **causal)
    case(dense(window_size=(20, 5)), window_size=(20, 5), softmax_scale=None)
    case(dense(), n=3)  # fewer tokens than zigzag has chunks
    case(dense(dropout_p=0.2, dropout_seed=5), dropout_p=0.2, dropout_seed=5)
    case(dense(**causal), dtype=torch.bfloat16, limit=1.5e-2, **causal)
    case(dense(**causal), checkpoint=True, **causal)
    segments = dict(segment_lengths=(8, 32, 128), dilation_rates=(1, 2, 4))
    longnet = lambda **o: lambda q, k, v: annulus.dilated_attention(q, k, v, **segments, return_lse=True, **o)  # noqa: E731
    case(longnet(**causal), **segments, **causal)
    for form in (dict(mode="grouped"), dict(mode="grouped_kv", **causal), dict(multiplicity="union"),
                 dict(offset_map="block", alpha_grad="stop", **causal), dict(dropout_p=0.2, dropout_seed=9)):
        case(longnet(**form), Hkv=4 if "mode" in form else 2, **segments, **form)
    mask = annulus.masks.causal_window(tokens=101, block_size=16, density=0.5)
    blocks = lambda q, k, v: annulus.block_sparse_attention(q, k, v, mask, 16, return_lse=True, **causal)  # noqa: E731
    case(blocks, block_mask=mask, block_size=16, **causal)
    case(blocks, block_mask=annulus.BlockCsr.from_mask(mask), block_size=16, **causal)
    one = lambda q, k, v: annulus.ring_attention_local(q, k, v, 1, deterministic=True, return_lse=True, **causal)  # noqa: E731
    case(one, deterministic=True, bits=True, **causal)
    print("all are equal")


def step(q, lost_before_backward=None, **options):
    o = annulus.ring_attention(q, q, q, **({"causal": True, "deadline_s": DEADLINE} | options))
    if lost_before_backward is not None:
        lost_before_backward()
    o.sum().backward()


def expect_lost(call, rank=1, within=DEADLINE + 1.0):
    start = time.monotonic()
    try:
        call()
    except annulus.RankLost as e:
        seconds = time.monotonic() - start
        assert e.rank == rank and isinstance(e.hop, int) and e.direction in ("send", "receive") and e.waited_s >= 0, vars(e)
        assert seconds <= within, seconds
        return e
    raise AssertionError("nothing was lost")


def lose(rank, fault):
    q = torch.randn(1, 64, 2, 8, requires_grad=True)
    step(q)

    def go():
        if fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        if fault == "exit":
            sys.exit(3)
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        signal.setitimer(signal.ITIMER_REAL, DEADLINE / 3)  # while it waits

    if rank == 1:
        try:
            step(q, go)
        except KeyboardInterrupt:
            print("interrupted")
            return
    o = annulus.ring_attention(q, q, q, causal=True, deadline_s=DEADLINE)
    if fault == "interrupt":
        time.sleep(DEADLINE)
    if rank == 0:
        o.sum().backward()
    expect_lost(lambda: o.sum().backward())
    again = expect_lost(lambda: annulus.ring_attention(q, q, q, deadline_s=DEADLINE), within=1.0)
    assert "the communicator is closed" in str(again) and q.isfinite().all()
    print("lost as it should be")


def mismatch(rank, size):
    """One rank calls otherwise: all are told. Then a new group works, where all calls that break a rule are refused alike."""
    q = torch.randn(1, 64, 2, 8, requires_grad=True)
    call = functools.partial(step, deadline_s=PATIENCE)
    told = functools.partial(expect_lost, within=PATIENCE / 2)  # not when time was up
    error = told(lambda: call(q, window_size=(5 + (rank == 1), -1)))
    assert error.hop == -1
    told(lambda: call(q))
    group = torch.distributed.new_group()
    call(q, group=group)
    for _ in range(2):
        with pytest.raises(annulus.InvalidArgument, match="balance must be zigzag or contiguous but is 'even'"):
            call(q, group=group, balance="even")
        with pytest.raises(annulus.InvalidArgument, match="dilation_rates must be given"):
            call(q, group=group, segment_lengths=(4 + rank,))
        with pytest.raises(annulus.InvalidArgument, match="q must have"):  # each rank of its own shape
            call(q[0, : 64 - rank], group=group)
    call(q, group=group)
    group = torch.distributed.new_group()
    call(q, group=group)
    if rank == 2:  # alone in breaking a rule: it knows which, the others who
        with pytest.raises(annulus.InvalidArgument, match="mode must be longnet"):
            call(q, group=group, mode="none", segment_lengths=(4,), dilation_rates=(1,))
    else:
        lost = told(lambda: call(q, group=group, segment_lengths=(4,), dilation_rates=(1,)), rank=2)
        assert "refuses its own call: [ring_attention] mode must be longnet" in str(lost)
    group = torch.distributed.new_group()
    call(q, group=group)
    if rank > 0:  # most of them do
        with pytest.raises(annulus.InvalidArgument, match="dropout_seed must be given"):
            call(q, group=group, dropout_p=0.1)
    else:
        lost = told(lambda: call(q, group=group, dropout_p=0.1, dropout_seed=3))
        assert "refuses its own call: [ring_attention] dropout_seed must be given" in str(lost)
    group = torch.distributed.new_group()
    if rank == 1:  # a derivative that there is not
        with torch.autograd.forward_ad.dual_level(), pytest.raises(annulus.NotSupported, match="forward-mode"):
            dual = torch.autograd.forward_ad.make_dual(q.detach(), torch.ones_like(q))
            annulus.ring_attention(dual, q, q, group=group, causal=True, deadline_s=PATIENCE)
    else:
        told(lambda: call(q, group=group), rank=1)
    group = torch.distributed.new_group()
    call(q, group=group)
    meeting = torch.distributed.new_group()
    if rank == 1:  # it need not wait for the others to tell them
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        signal.setitimer(signal.ITIMER_REAL, DEADLINE / 4)
        with pytest.raises(KeyboardInterrupt):
            call(q, group=group, block_mask=torch.ones(1, 1, dtype=torch.bool))
        torch.distributed.barrier(meeting)
    else:
        torch.distributed.barrier(meeting)
        lost = told(lambda: call(q, group=group), rank=1)
        assert "it gave up: the call was interrupted" in str(lost)
    # And the same where Python finds it, where torch does, and at a group's first call.
    for words, bad in (
        ("block_size must be given", {"block_mask": torch.ones(1, 1, dtype=torch.bool)}),
        ("causal must be bool but is str", {"causal": "yes"}),
        ("deadline_s must be a positive, finite number", {"deadline_s": -1.0}),
    ):
        for first in (False, True):
            group = torch.distributed.new_group()
            if not first:
                call(q, group=group)
            if rank == 1:
                with pytest.raises(annulus.InvalidArgument, match=words):
                    call(q, **{"group": group, **bad})
            else:
                lost = told(lambda: call(q, group=group), rank=1)
                assert f"refuses its own call: [ring_attention] {words}" in str(lost)
    print("lost as it should be")


def run_rank(rank, size, folder, what):
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size,
                                         timeout=datetime.timedelta(seconds=40))
    if what in ("equal", "mismatch"):
        globals()[what](rank, size)
        torch.distributed.destroy_process_group()
    else:
        lose(rank, what)


def main(size, folder, what):
    """Forks the ranks, since importing torch takes longer than most of what they do, and keeps how each ended."""
    ranks = {}
    for rank in range(size):
        process = os.fork()
        if process == 0:
            return run_rank(rank, size, folder, what)
        ranks[process] = rank
    while ranks:
        process, status = os.wait()
        with open(f"{folder}/rank{ranks.pop(process)}", "w") as file:
            file.write(str(os.waitstatus_to_exitcode(status)))
        if list(ranks.values()) == [1] and what == "stop":
            os.kill(*ranks, signal.SIGKILL)


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
