"""annulus.info() and `python -m annulus.info`: what this build is and what it can run here, with reasons."""

import json
import os
import platform
import sys
from typing import Any, overload

import torch

from ._library import ops


def info() -> dict[str, Any]:
    """What this build is and what it can run here: version, commit, devices, and per operator support with reasons.

    >>> info()["operators"]["ring_rnn"]["cpu"]["available"]
    True
    """
    build = json.loads(ops._info_json())
    operators = build.pop("operators")
    return {
        "version": build.pop("version"),
        "commit": build.pop("commit"),
        "build": build,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torch_threads": torch.get_num_threads(),
        "library": os.path.join(os.path.dirname(os.path.abspath(__file__)), "_ops.so"),
        "devices": _devices(build),
        "operators": operators,
    }


@overload
def last_backend(op: None = None) -> dict[str, str]: ...
@overload
def last_backend(op: str) -> str | None: ...
def last_backend(op: str | None = None) -> dict[str, str] | str | None:
    """What the last call of an operator ran on, in any thread of this process, backwards included: "cpu, bfmmla 8x8",
    "cuda, tensor cores in clusters"; None before the first. Without a name: of all operators that ran, by name.

    Operators as their errors name them, "ring_rnn", "ring_rnn_backward", ... With ANNULUS_LOG=1 in the environment every
    change of it is a line on stderr.

    >>> last_backend("no_such_operator") is None
    True
    """
    all_of_them = json.loads(ops._last_backends_json())
    return all_of_them if op is None else all_of_them.get(op)


def _devices(build):
    devices = {"cpu": {"available": True, "reason": build["cpu"]}}
    if not torch.cuda.is_available():
        reason = "this torch was built without CUDA" if torch.version.cuda is None else "torch sees no CUDA device"
        devices["cuda"] = {"available": False, "reason": reason}
    elif build["cuda"] == "not built":
        devices["cuda"] = {"available": False, "reason": "annulus was built without CUDA"}
    else:
        names = ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
        devices["cuda"] = {"available": True, "reason": names}
    return devices


def _lines(facts):
    yield f"annulus {facts['version']} (commit {facts['commit']})"
    yield f"python {facts['python']}, torch {facts['torch']} ({facts['torch_threads']} threads)"
    for key, value in facts["build"].items():
        yield f"  {key:<14}{value}"
    for name, device in facts["devices"].items():
        yield f"device {name:<7}{'available' if device['available'] else 'not available'}: {device['reason']}"
    for name, op in facts["operators"].items():
        yield f"operator {name}: {op['summary']}"
        yield f"  dtypes        {' '.join(op['dtypes'])}"
        yield f"  gradients     {' '.join(op['gradients'])}"
        yield f"  deterministic {'always' if op['deterministic'] else 'on the CPU; on CUDA when asked'}"
        for device in ("cpu", "cuda"):
            support = op[device]
            yield f"  {device:<14}{'yes' if support['available'] else 'no'} ({support['reason']})"
        if op["precisions"]:
            yield f"  error of states and gradients, {op['precisions_measured_with']}:"
        for p in op["precisions"]:
            yield f"    {p['name']:<12}{p['state_error']:.1e}  {p['gradient_error']:.1e}  {p['product']}"


def main(arguments):
    if arguments not in ([], ["--json"]):
        print("usage: python -m annulus.info [--json]", file=sys.stderr)
        return 2
    facts = info()
    print(json.dumps(facts, indent=2) if arguments else "\n".join(_lines(facts)))
    return 0
