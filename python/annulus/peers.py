"""`python -m annulus.peers`: times what a user would otherwise write, beside annulus, in one run.

Results go to stdout as a table and, with --save, row by row to a JSONL file in the format of `annulus bench`, which
`annulus report` merges by row. Progress goes to stderr. Exit codes: 0 done, 1 a row of annulus failed, 2 bad usage,
3 the device is not available here.
"""

import argparse
import datetime
import json
import os
import re
import shutil
import sys

import torch
import torch._functorch.config

from . import _peers_lrpe_cosine
from ._info import info as build_info
from ._timing import Clock, summary

SUITES = {"lrpe-cosine": _peers_lrpe_cosine}
SCHEMA = 1
ERROR_METRIC = "max|err|/max|ref|"  # reference: double precision
OURS = "annulus-torch"
# What the numeric policy allows a single output, relative to its largest value: one unit in the last place of bf16.
ERROR_LIMIT = {"f32": 1e-6, "bf16": 2.0**-8}


class Skip(Exception):
    """This implementation cannot run here; the message says why."""


class Output:
    """The table on stdout and the records in a file, one row at a time: a crash loses nothing."""

    def __init__(self, path):
        self._file = open(path, "w", encoding="utf-8") if path else None
        self.failed = False
        print("| row | dtype | implementation | median ms | p95 ms | peak MiB | error | x eager |")
        print("|---|---|---|--:|--:|--:|--:|--:|")

    def write(self, record, eager_ms=None):
        self.failed |= record["status"] == "failed"
        if self._file:
            self._file.write(json.dumps(record, allow_nan=False) + "\n")
            self._file.flush()
            os.fsync(self._file.fileno())
        cells = [record["row"], record["dtype"], record["impl"]]
        if "time_ms" in record:
            t = record["time_ms"]
            peak = f"{record['peak_bytes'] / 2**20:.1f}" if "peak_bytes" in record else ""
            ratio = f"{eager_ms / t['median']:.2f}" if eager_ms else ""
            error = record["error"]["value"]
            error = error if isinstance(error, str) else f"{error:.2g}"
            cells += [f"{t['median']:.4f}", f"{t['p95']:.4f}", peak, error, ratio]
        else:
            cells += [f"{record['status']}: {record['reason']}".replace("|", "/"), "", "", "", ""]
        print("| " + " | ".join(cells) + " |", flush=True)

    def close(self):
        if self._file:
            self._file.close()


def measure(suite, problem, directions, clock, reps, hardware, commit, output):
    """All implementations of one problem, all asked-for directions, interleaved."""
    x, dy, theta = problem.inputs(clock.device)
    exact = problem.exact(x, dy, theta)
    implementations = problem.implementations(theta)
    working, reasons, errors = {}, {}, {}
    for name, function in implementations.items():
        try:
            errors[name] = accuracy(name, function, x, dy, exact)
            for direction in directions:
                prepare, call = timed_call(function, x, dy, direction)
                prepare()
                call()
            working[name] = function
        except Exception as e:  # what does not run is a row with a reason, not the end of the table
            text = f"{type(e).__name__}: {e}".strip().splitlines()[0][:300]
            reasons[name] = {"status": "failed" if name == OURS else "skipped", "reason": text}

    for direction in directions:
        blank = {
            "schema": SCHEMA, "suite": suite, "row": problem.row(direction), "op": problem.op, "impl": "",
            "device": clock.device, "dtype": problem.dtype, "params": problem.params(direction),
            "bytes": problem.bytes(direction), "hardware": hardware, "commit": commit,
            "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"), "status": "ok",
        }
        calls = {name: timed_call(function, x, dy, direction) for name, function in working.items()}
        times = clock.time(calls, reps)
        del calls
        records = []
        for name in implementations:
            if name in reasons:
                records.append({**blank, "impl": name, **reasons[name]})
                continue
            e = max(errors[name][part] for part in parts_of(direction))
            record = {**blank, "impl": name, "time_ms": summary(times[name])}
            record["error"] = {"metric": ERROR_METRIC, "value": number(e)}
            if clock.device == "cuda":
                record["peak_bytes"] = peak_bytes(working[name], x, dy, direction)
            if name == OURS and not e <= ERROR_LIMIT[problem.dtype]:
                limit = ERROR_LIMIT[problem.dtype]
                record |= {"status": "failed", "reason": f"error {e:.3g} is above the limit {limit:.3g}"}
            records.append(record)
        eager = times.get("torch-eager")
        for record in records:
            output.write(record, summary(eager)["median"] if eager else None)
        for record in records:
            if "peak_bytes" in record and record["status"] == "ok":
                output.write({**record, "row": "memory-" + record["row"], "measures": "memory"})


def parts_of(direction):
    return {"fwd": ("y",), "bwd": ("dx",), "fwdbwd": ("y", "dx")}[direction]


def accuracy(name, function, x, dy, exact):
    """Relative error of y and dx against double precision, on the slice that `exact` covers."""
    if name == "torch-compile":
        check_compiler(x.device.type)
    x.grad = None
    y = function(x)
    y.backward(dy)
    got = {"y": y.detach(), "dx": x.grad}
    x.grad = None
    result = {}
    for key, want in exact.items():
        part = got[key][: want.shape[0], : want.shape[1]].double()
        result[key] = ((part - want).abs().max() / want.abs().max()).item()
    return result


def check_compiler(device):
    if device == "cpu" and not any(shutil.which(c) for c in (os.environ.get("CXX", "g++"), "g++", "clang++")):
        raise Skip("torch.compile on the CPU needs a C++ compiler, and none was found")


def timed_call(function, x, dy, direction):
    """(prepare, call) for the clock."""

    def reset():
        x.grad = None

    if direction == "fwd":
        return reset, lambda: function(x)
    if direction == "fwdbwd":
        return reset, lambda: function(x).backward(dy)
    y = function(x)
    return reset, lambda: y.backward(dy, retain_graph=True)


def peak_bytes(function, x, dy, direction):
    """Most bytes that torch had allocated for the call: x and, for a backward, y and dy are counted in."""
    x.grad = None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    own = x.nbytes + (0 if direction == "fwd" else dy.nbytes)
    if direction == "bwd":
        y = function(x)
        torch.cuda.reset_peak_memory_stats()
        y.backward(dy)
    else:
        torch.cuda.reset_peak_memory_stats()
        y = function(x)
        if direction == "fwdbwd":
            y.backward(dy)
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before + own
    x.grad = None
    return peak


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
    parser.add_argument("--save", metavar="F.jsonl", help="write the records here, row by row")
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


def main(arguments):
    options = parse(arguments)
    info = build_info()
    support = info["devices"][options.device]
    if not support["available"]:
        print(f"peers: device {options.device} is not available: {support['reason']}", file=sys.stderr)
        return 3
    try:
        output = Output(options.save)
    except OSError as e:
        print(f"peers: cannot write {options.save}: {e.strerror}", file=sys.stderr)
        return 2
    # The protocol keeps the graph for the next repetition; compiled code must not reuse its buffers.
    torch._functorch.config.donated_buffer = False
    clock = Clock(options.device)
    hardware = hardware_name(options.device, info)
    for suite in options.suites:
        for problem in SUITES[suite].problems(options.size):
            wanted = [d for d in problem.directions if options.filter is None or options.filter.search(problem.row(d))]
            if not wanted:
                continue
            print(f"peers: {suite} {problem.row('+'.join(wanted))} {problem.dtype}", file=sys.stderr, flush=True)
            torch.compiler.reset()  # shapes are compiled for themselves; without this a limit on recompiles is hit
            measure(suite, problem, wanted, clock, options.reps, hardware, info["commit"], output)
            if options.device == "cuda":
                torch.cuda.empty_cache()
    output.close()
    return 1 if output.failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
