"""Faults of real processes: mpi_faults.py PROGRAM [--cases N] [--jobs N] [--only TEXT].

Runs mpi_ring under mpirun with a deadline of one second, several rings at a time, each with one fault of one rank at one
hop, and looks at every rank by itself, since mpirun may return 0 whatever its ranks did: those that are left must have
ended by themselves, with 11, in time, and must all name the same rank, hop and direction; where all are left, a second ring must work. Half a deadline's delay must do no
harm. A ring that hangs is ended after HARD_S and counts as failed.
"""

import argparse
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor

DEADLINE_S = 1.0
PATIENT_S = 20.0  # of a ring without a fault, whose ranks compute for long between two messages
HARD_S = 30.0
LOST, DONE = 11, 0
OF_RANK = ("kill", "stop", "exit", "delay-half", "delay-twice", "no-memory")
OF_MESSAGE = ("drop", "duplicate", "reorder", "flip-payload", "flip-header", "wrong-bytes", "mute")
OF_HANDSHAKE = ("version", "size", "same-rank", "shape", "kill", "stop", "exit", "delay-twice")
# Some small enough to be sent at once by MPI, some for which sender and receiver have to meet.
TOKENS = (101, 600)
# As a program so that what it returned is seen, not what mpirun makes of it.
WRAPPER = 'folder=$1; "$0" "$@"; code=$?; echo $code >"$folder/exit.$OMPI_COMM_WORLD_RANK"; exit $code'


def every_case():
    """Yields (ranks, fault, rank, operator, hop, receiving)."""
    yield from ((ranks, "none", 0, "ring_attention", 0, 0) for ranks in (1, 2, 3, 4))
    count = 0
    for ranks in (2, 3, 4):
        hops = [(o, h) for o in ("ring_attention", "ring_backward", "ring_gradients") for h in range(2, ranks + 1)]
        for operator, hop in hops:
            for fault in OF_RANK + OF_MESSAGE:
                count += 1
                yield ranks, fault, count % ranks, operator, hop, (count // ranks + hop) % 2
        for fault in OF_HANDSHAKE:
            count += 1
            # Of two ranks that differ rank 0 is taken to be right.
            yield ranks, fault, count % ranks if ranks > 2 else 1, "hello", -1, 0
        for fault in ("kill", "stop", "exit"):
            count += 1
            yield ranks, fault, count % ranks, "init", -1, 0


def choose(cases, number):
    """So many of them, evenly, and all without a fault."""
    if not number or number >= len(cases):
        return cases
    return [c for i, c in enumerate(cases) if c[1] == "none" or (i * number) % len(cases) < number]


def read(path):
    try:
        return path.read_text()
    except FileNotFoundError:
        return ""


def wait_for(condition, seconds):
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


def run_ring(program, case, number, folder):
    """Starts the ring and sees it to its end; returns whether it ended by itself, and what mpirun wrote."""
    ranks, fault, rank, operator, hop, receiving = case
    command = ["mpirun", "--oversubscribe", "--enable-recovery", "--bind-to", "none", "-n", ranks]
    if os.geteuid() == 0:
        command.append("--allow-run-as-root")
    command += ["sh", "-c", WRAPPER, program, folder, PATIENT_S if fault == "none" else DEADLINE_S, TOKENS[number % len(TOKENS)]]
    if fault != "none":
        command += [fault, rank, operator, hop, receiving]
    output = folder / "output"
    with output.open("w") as stream:
        ring = subprocess.Popen([str(c) for c in command], stdin=subprocess.DEVNULL, stdout=stream, stderr=stream,
                                start_new_session=True)
    if fault == "stop":
        # The others end while it is stopped; then it goes on, and must end as well.
        others = [folder / f"exit.{r}" for r in range(ranks) if r != rank]
        wait_for(lambda: all(read(o) for o in others), HARD_S / 2)
        if read(folder / f"pid.{rank}"):
            os.kill(int(read(folder / f"pid.{rank}")), signal.SIGCONT)
    try:
        ring.wait(HARD_S)
        return True, read(output)
    except subprocess.TimeoutExpired:
        for r in range(ranks):
            pid = read(folder / f"pid.{r}")
            if pid and not read(folder / f"exit.{r}"):
                os.kill(int(pid), signal.SIGKILL)
        ring.kill()
        ring.wait()
        return False, read(output)


def judge(program, case, number):
    """Returns what is wrong, as text, none where nothing is; and whether it can be that a process was starved."""
    ranks, fault, rank, operator, hop, receiving = case
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        ended, output = run_ring(program, case, number, folder)
        wrong = [] if ended else [f"did not end within {HARD_S} s"]
        starved = ended
        lost = rank
        if receiving and fault in OF_MESSAGE:  # hops 0 and 1 are a rank's own rows, then come those of the rank before it, ...
            distance = hop - 1
            lost = (rank + distance if operator == "ring_gradients" else rank - distance) % ranks
        if operator == "init":
            lost = -1  # of a rank that never came MPI does not say which
        places = set()
        for r in range(ranks):
            code, said = read(folder / f"exit.{r}").strip(), read(folder / f"said.{r}").splitlines()
            expected = str(DONE if fault in ("none", "delay-half") else LOST)
            if fault == "duplicate" and operator != "ring_attention" and code == str(DONE):
                continue  # it was through with the closing barrier, and has its results
            if r == rank and fault in ("kill", "exit"):
                expected = {"kill": "137", "exit": "3"}[fault]
            if code != expected:
                wrong.append(f"rank {r} returned {code or 'nothing'}, not {expected}: {said}")
                starved &= (code, expected) == (str(LOST), str(DONE))
            if expected != str(LOST) or len(said) < 4:
                continue
            named, *place = said[2].split()
            places.add(" ".join(place))
            if int(named) != lost:
                wrong.append(f"rank {r} names rank {named}, not {lost}: {said[3]}")
            slow = r == rank and fault in ("stop", "delay-twice")
            if float(said[1]) > DEADLINE_S * (2 if slow else 1) + 1 and not (slow and fault == "stop"):
                wrong.append(f"rank {r} took {said[1]} s: {said[3]}")
        if len(places) > 1:
            wrong.append(f"they name hops {sorted(places)}")
        if wrong and output:
            wrong.append(output)
        return wrong, starved


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("program", type=pathlib.Path)
    parser.add_argument("--cases", type=int, default=0, help="how many of all, evenly chosen; 0 is all")
    parser.add_argument("--jobs", type=int, default=4)
    parser.add_argument("--only", default="", help="cases whose text has this")
    options = parser.parse_args()
    cases = [c for c in choose(list(every_case()), options.cases) if options.only in str(c)]
    start = time.monotonic()
    with ThreadPoolExecutor(options.jobs) as pool:
        results = list(pool.map(lambda numbered: judge(options.program.resolve(), numbered[1], numbered[0]), enumerate(cases)))
    failed = repeated = 0
    for number, (case, (wrong, starved)) in enumerate(zip(cases, results)):
        if wrong and starved and repeated < 3:  # there are more processes than cores
            repeated += 1
            print("again, by itself", case, *wrong, sep="\n    ")
            wrong = [fault for _ in range(3) for fault in judge(options.program.resolve(), case, number)[0]]  # all of them
        if wrong:
            failed += 1
            print("FAILED", case, *wrong, sep="\n    ")
    print(f"{len(cases) - failed} of {len(cases)} rings of processes came out right, {time.monotonic() - start:.0f} s")
    return 1 if failed or not cases else 0


if __name__ == "__main__":
    sys.exit(main())
