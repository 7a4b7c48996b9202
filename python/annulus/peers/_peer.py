"""What the suites of `python -m annulus.peers` share: an implementation that can be timed, checked and weighed."""

import contextlib
import gc

import torch


class Skip(Exception):
    """This implementation cannot run here; the message says why."""


class Implementation:
    """function() -> output, over tensors that are there already; `leaves` are those that get a gradient.

    Of several outputs `dout` has a gradient each.
    inference: the forward alone runs without autograd.  around: a context manager for the length of every call.
    """

    def __init__(self, function, leaves, dout, inference=False, around=contextlib.nullcontext):
        self._function, self._leaves, self._dout = function, leaves, dout
        self._forward_mode = torch.no_grad if inference else contextlib.nullcontext
        self._around = around

    def _reset(self):
        for x in self._leaves.values():
            x.grad = None

    def timed(self, direction):
        """(prepare, call) for the clock."""
        if direction == "fwd":
            return self._reset, self._forward
        if direction == "fwdbwd":
            return self._reset, self._both
        with self._around():
            y = self._function()
        return self._reset, lambda: self._backward(y, retain_graph=True)

    def _forward(self):
        with self._around(), self._forward_mode():
            return self._function()

    def _both(self):
        with self._around():
            torch.autograd.backward(self._function(), self._dout)

    def _backward(self, y, retain_graph=False):
        with self._around():
            torch.autograd.backward(y, self._dout, retain_graph=retain_graph)

    def results(self, directions):
        """The output as "y" and, where a direction has a backward, the gradients as "d" + name."""
        self._reset()
        if set(directions) == {"fwd"}:
            return {"y": self._forward()}
        with self._around():
            y = self._function()
            torch.autograd.backward(y, self._dout)
        got = {"y": y.detach() if isinstance(y, torch.Tensor) else [part.detach() for part in y]}
        got |= {"d" + name: x.grad for name, x in self._leaves.items()}
        self._reset()
        return got

    def peak_bytes(self, direction):
        """Most bytes that torch had allocated for the call; the leaves and, for a backward, y and dout count, too."""
        self._reset()
        gc.collect()  # what falls to it later would count against the call
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        _, call = self.timed(direction)  # for a backward alone this makes y, which counts
        douts = [self._dout] if isinstance(self._dout, torch.Tensor) else self._dout
        own = sum(x.nbytes for x in (*self._leaves.values(), *(douts if direction != "fwd" else ())))
        torch.cuda.reset_peak_memory_stats()
        result = call()
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before + own
        del result
        self._reset()
        return peak


class Graph:
    """The same function under a CUDA graph: captured once, then replayed, so that no launch costs the host anything."""

    def __init__(self, function, leaves, dout, around=contextlib.nullcontext):
        self._function, self._leaves, self._dout, self._around = function, leaves, dout, around
        self._captured = {}

    def timed(self, direction):
        graph, _ = self._capture(direction)
        return (lambda: None), graph.replay

    def results(self, directions):
        got = {}
        for direction in directions:
            graph, tensors = self._capture(direction)
            graph.replay()
            got |= {name: t.clone() for name, t in tensors.items()}  # its own memory goes with the graph
            torch.cuda.synchronize()
        self._captured.clear()  # what is timed may differ
        return got

    def peak_bytes(self, direction):
        return None  # a graph's memory is its own pool's

    def _run(self, direction):
        if direction == "fwd":
            with torch.no_grad():
                return {"y": self._function()}
        y = self._function()
        gradients = torch.autograd.grad(y, tuple(self._leaves.values()), self._dout)
        return {"y": y.detach()} | {"d" + name: g for name, g in zip(self._leaves, gradients)}

    def _capture(self, direction):
        if direction not in self._captured:
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side), self._around():  # lazy set-up is no part of a graph
                for _ in range(2):
                    self._run(direction)
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph), self._around():
                tensors = self._run(direction)
            self._captured[direction] = graph, tensors
        return self._captured[direction]


def relative_error(got, want):
    """max|err| / max|ref|; where the reference is zero, the largest error itself."""
    scale = want.abs().max().item()
    return (got.double() - want).abs().max().item() / (scale or 1.0)
