"""Times several implementations of one thing in turn, so that drift hits them alike.

Who begins changes from round to round (A, B, C, B, C, A, ...): on CUDA, what comes after a slow kernel has its launches
enqueued while that kernel runs, and its time on the host does not show; that must be nobody's privilege.

Caches are cold: before every repetition, outside the timed region, a buffer larger than the last-level cache is written.
CUDA is timed by events around the call, and nothing waits until all repetitions are enqueued.
"""

import statistics
import time

import torch

_FLUSH_BYTES = {"cpu": 128 << 20, "cuda": 256 << 20}  # above twice the last-level cache; the usual for GPU benchmarks
_ROW_MS = {"cpu": 1000, "cuda": 400}  # time spent on a row, about
_SLOW_MS = 200  # what takes longer is repeated only a few times, so that it does not set the pace of a row
_SLOW_REPS = 3


class Clock:
    def __init__(self, device):
        self.device = device
        self._flush_buffer = torch.empty(_FLUSH_BYTES[device] // 4, dtype=torch.int32, device=device)

    def time(self, calls, reps=None):
        """calls: {name: (prepare, call)}. Returns {name: [milliseconds, ...]} after one warm-up each."""
        once = {name: self._once(*c) for name, c in calls.items()}
        slow = set()
        if reps is None:  # within what a median needs and what patience allows
            slow = {name for name, ms in once.items() if ms > _SLOW_MS}
            per_round = sum(ms for name, ms in once.items() if name not in slow) + len(calls) * self._flush_ms()
            reps = int(min(max(_ROW_MS[self.device] / per_round, 7), 50))
        rounds = [
            {name: self._enqueue(*calls[name]) for name in turn(list(calls), i) if name not in slow or i < _SLOW_REPS}
            for i in range(reps)
        ]
        self.synchronize()
        return {name: [r[name]() for r in rounds if name in r] for name in calls}

    def synchronize(self):
        if self.device == "cuda":
            torch.cuda.synchronize()

    def _flush_ms(self):
        start = time.perf_counter()
        self._flush_buffer.zero_()
        self.synchronize()
        return (time.perf_counter() - start) * 1e3

    def _once(self, prepare, call):
        elapsed = self._enqueue(prepare, call)  # the first pays for lazy set-up
        self.synchronize()
        elapsed = self._enqueue(prepare, call)
        self.synchronize()
        return elapsed()

    def _enqueue(self, prepare, call):
        """Runs the call once; returns a function that gives its milliseconds (after synchronize on CUDA)."""
        prepare()
        self._flush_buffer.zero_()
        if self.device == "cuda":
            start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            result = call()
            stop.record()
            del result
            return lambda: start.elapsed_time(stop)
        begin = time.perf_counter()
        result = call()
        elapsed = (time.perf_counter() - begin) * 1e3
        del result  # freeing is no part of the call
        return lambda: elapsed


def turn(names, i):
    """The order of round i: all names begin by turns, and a name follows now one neighbour, now the other."""
    order = names[::-1] if i // len(names) % 2 else names
    first = i % len(names)
    return order[first:] + order[:first]


def summary(milliseconds):
    """The record's time_ms."""
    ordered = sorted(milliseconds)
    return {
        "median": statistics.median(ordered),
        "min": ordered[0],
        "p95": ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))],
        "n": len(ordered),
    }
