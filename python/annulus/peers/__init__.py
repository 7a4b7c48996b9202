"""`python -m annulus.peers`: times what a user would otherwise write, beside annulus, in one run.

Results go to stdout as a table and, with --save F, to a JSONL file in the format of `annulus bench`, which `annulus
report` merges by row: row by row to F.partial, which becomes F when the run is done, so that an older F stays until then.
Progress goes to stderr. Exit codes: 0 done, 1 a row of annulus failed, 2 bad usage, 3 the device is not available here,
130 stopped by Ctrl-C.
"""

import argparse
import datetime
import errno
import fcntl
import importlib
import json
import os
import pkgutil
import re
import shutil
import sys

import torch
import torch._functorch.config

from .._info import info as build_info
from ._peer import Skip
from ._timing import Clock, summary

# Suite -> module: <operator>.py beside this file is the suite <operator>, with dashes.
SUITES = {
    m.name.replace("_", "-"): importlib.import_module("." + m.name, __name__)
    for m in pkgutil.iter_modules(__path__)
    if not m.name.startswith("_")
}
SCHEMA = 1
ERROR_METRIC = "max|err|/max|ref|"  # reference: double precision
OURS = ("annulus-torch", "annulus-torch-graph")


class Output:
    """The table on stdout and the records in path.partial, one row at a time: a crash loses nothing."""

    def __init__(self, path):
        self._path = os.path.realpath(path) if path else None  # of a link the target is replaced, not the link
        self._file = None
        self.rows = 0
        self.failed = False
        if path:
            if os.path.exists(path) and not os.path.isfile(path):
                raise OSError(errno.EINVAL, "it exists and is not a regular file", path)
            self._file = self._open_locked()
        print("| row | dtype | implementation | median ms | p95 ms | peak MiB | error | x baseline |")
        print("|---|---|---|--:|--:|--:|--:|--:|")

    @property
    def partial(self):
        return self._path + ".partial"

    def _open_locked(self):
        """As `annulus bench` does: one writer at a time, by a lock that ends with the process."""
        while True:
            file = open(self.partial, "a", encoding="utf-8")
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.close()
                raise OSError(errno.EBUSY, f"another process writes {self.partial}", self.partial) from None
            if os.path.exists(self.partial) and os.path.samestat(os.fstat(file.fileno()), os.stat(self.partial)):
                file.truncate(0)
                return file
            file.close()  # it took its name while we waited

    def write(self, record, baseline_ms=None):
        self.failed |= record["status"] == "failed"
        if self._file:
            self._file.write(json.dumps(record, allow_nan=False) + "\n")
            self._file.flush()
            os.fsync(self._file.fileno())
            self.rows += 1
        cells = [record["row"], record["dtype"], record["impl"]]
        if "time_ms" in record:
            t = record["time_ms"]
            peak = f"{record['peak_bytes'] / 2**20:.1f}" if "peak_bytes" in record else ""
            ratio = f"{baseline_ms / t['median']:.2f}" if baseline_ms else ""
            error = record["error"]["value"]
            error = error if isinstance(error, str) else f"{error:.2g}"
            cells += [f"{t['median']:.4f}", f"{t['p95']:.4f}", peak, error, ratio]
        else:
            cells += [f"{record['status']}: {record['reason']}".replace("|", "/"), "", "", "", ""]
        print("| " + " | ".join(cells) + " |", flush=True)

    def finish(self):
        """All rows are there: the file takes its name."""
        if self._file:
            os.replace(self.partial, self._path)  # every row is flushed
            self._file.close()

    def break_off(self):
        """Says where the rows are that an unfinished run leaves; a run without any leaves no file."""
        if not self._file:
            return
        if self.rows:
            print(f"peers: {self.rows} row{'' if self.rows == 1 else 's'} saved to {self.partial}", file=sys.stderr)
        else:
            os.remove(self.partial)
        self._file.close()


def measure(suite, problem, directions, clock, reps, hardware, commit, output):
    """All implementations of one problem, all asked-for directions, interleaved."""
    session = problem.open(clock.device, directions)
    working, reasons, errors = {}, {}, {}
    for name, implementation in session.implementations.items():
        try:
            if isinstance(implementation, Skip):
                raise implementation
            if name == "torch-compile":
                check_compiler(clock.device)
            errors[name] = session.errors(implementation, directions)
            for direction in directions:
                prepare, call = implementation.timed(direction)
                prepare()
                call()
            working[name] = implementation
        except Exception as e:  # what does not run is a row with a reason, not the end of the table
            text = str(e) if isinstance(e, Skip) else f"{type(e).__name__}: {e}".strip().splitlines()[0][:300]
            reasons[name] = {"status": "failed" if name in OURS else "skipped", "reason": text}

    for direction in directions:
        blank = {
            "schema": SCHEMA, "suite": suite, "row": problem.row(direction), "op": problem.op, "impl": "",
            "device": clock.device, "dtype": problem.dtype, "params": problem.params(direction),
            "bytes": problem.bytes(direction), "hardware": hardware, "commit": commit,
            "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"), "status": "ok",
        }
        times = clock.time({name: i.timed(direction) for name, i in working.items()}, reps)
        records = []
        for name in session.implementations:
            if name in reasons:
                records.append({**blank, "impl": name, **reasons[name]})
                continue
            e = max(errors[name][part] for part in session.parts(direction))
            record = {**blank, "impl": name, "time_ms": summary(times[name])}
            record["error"] = {"metric": ERROR_METRIC, "value": number(e)}
            peak = working[name].peak_bytes(direction) if clock.device == "cuda" else None
            if peak is not None:
                record["peak_bytes"] = peak
            limit = session.limit(direction)
            if name in OURS and not e <= limit:
                record |= {"status": "failed", "reason": f"error {e:.3g} is above the limit {limit:.3g}"}
            records.append(record)
        baseline = times.get(session.baseline)
        for record in records:
            output.write(record, summary(baseline)["median"] if baseline else None)
        for record in records:
            if problem.memory_rows and "peak_bytes" in record and record["status"] == "ok":
                output.write({**record, "row": "memory-" + record["row"], "measures": "memory"})


def check_compiler(device):
    if device == "cpu" and not any(shutil.which(c) for c in (os.environ.get("CXX", "g++"), "g++", "clang++")):
        raise Skip("torch.compile on the CPU needs a C++ compiler, and none was found")


def number(v):
    """JSON has no NaN and no infinity: the record spells them out."""
    if v != v:
        return "NaN"
    return v if abs(v) != float("inf") else ("Infinity" if v > 0 else "-Infinity")


def hardware_name(device, info):
    if device == "cuda":
        return torch.cuda.get_device_name()
    threads = torch.get_num_threads()
    return f"{info['build']['cpu']}, {threads} core{'' if threads == 1 else 's'}"


def parse(arguments):
    parser = argparse.ArgumentParser(prog="python -m annulus.peers", description=__doc__.splitlines()[0])
    parser.add_argument("suites", nargs="*", metavar="SUITE", help=f"all by default: {', '.join(SUITES)}")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--size", choices=("quick", "full"), help="quick on the CPU, full on CUDA by default")
    parser.add_argument("--save", metavar="F.jsonl", help="write the records here; in F.jsonl.partial until the run is done")
    parser.add_argument("--filter", type=_regex, default=None, metavar="RE", help="only rows whose name matches")
    parser.add_argument("--reps", type=_positive, default=None, metavar="N", help="repetitions (default: by time)")
    options = parser.parse_args(arguments)
    options.suites = options.suites or list(SUITES)
    for suite in options.suites:
        if suite not in SUITES:
            parser.error(f"no suite '{suite}'; there are {', '.join(SUITES)}")
    options.size = options.size or ("full" if options.device == "cuda" else "quick")
    return options


def _regex(text):
    try:
        return re.compile(text)
    except re.error as e:
        raise argparse.ArgumentTypeError(f"not a regular expression: {e}") from None


def _positive(text):
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number above 0 but is '{text}'")
    return int(text)


def chosen(options):
    """(suite, problem, directions) of what --filter leaves."""
    picked = []
    for suite in dict.fromkeys(options.suites):  # one that is named twice runs once
        for problem in SUITES[suite].problems(options.size, options.device):
            wanted = [d for d in problem.directions if options.filter is None or options.filter.search(problem.row(d))]
            if wanted:
                picked.append((suite, problem, wanted))
    return picked


def run(options, problems, info, output):
    # The protocol keeps the graph for the next repetition; compiled code must not reuse its buffers.
    torch._functorch.config.donated_buffer = False
    clock = Clock(options.device)
    hardware = hardware_name(options.device, info)
    for suite, problem, wanted in problems:
        print(f"peers: {suite} {problem.row('+'.join(wanted))} {problem.dtype}", file=sys.stderr, flush=True)
        torch.compiler.reset()  # shapes are compiled for themselves; without this a limit on recompiles is hit
        measure(suite, problem, wanted, clock, options.reps, hardware, info["commit"], output)
        if options.device == "cuda":
            torch.cuda.empty_cache()


def main(arguments):
    options = parse(arguments)
    info = build_info()
    support = info["devices"][options.device]
    if not support["available"]:
        print(f"peers: device {options.device} is not available: {support['reason']}", file=sys.stderr)
        return 3
    problems = chosen(options)
    if not problems:
        print(f"peers: --filter '{options.filter.pattern}' leaves no row", file=sys.stderr)
        return 2
    try:
        output = Output(options.save)
    except OSError as e:
        print(f"peers: cannot write {options.save}: {e.strerror}", file=sys.stderr)
        return 2
    try:
        run(options, problems, info, output)
        output.finish()
    except KeyboardInterrupt:
        output.break_off()
        return 130
    except BaseException:
        output.break_off()
        raise
    return 1 if output.failed else 0
