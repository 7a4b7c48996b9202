"""What `annulus train ring-attractor` keeps in OUT/<recipe>, read as the program itself reads it (train/files/checkpoint.h): files of
strangers, whose names are compared with the folder's and whose numbers with the sizes of the files before memory is taken."""

import json
import math
import os
import stat
import struct
from typing import Any, NamedTuple

import torch

from ._xxh64 import xxh64
from .errors import InvalidArgument

_ZEROS = b"0" * 16


class Checkpoint(NamedTuple):
    recipe: dict[str, Any]
    tensors: dict[str, torch.Tensor]  # Wa, Wo and the gain network's


def read_checkpoint(folder: str) -> Checkpoint:
    path = os.path.join(folder, "manifest.json")
    name = os.path.basename(os.path.abspath(folder))
    text = _read(path, 1 << 20)
    _check_sum(path, text)
    try:
        manifest = json.loads(text.decode(), object_pairs_hook=_once, parse_constant=_no_number)
        recipe, step, file = _looked_at(manifest, name)
    except (ValueError, RecursionError) as e:  # InvalidArgument is one, and so is what json and UTF-8 raise
        _refuse(path, str(e))
    path = os.path.join(folder, file["name"])
    head, shapes = _head(recipe, step)
    data = _read(path, file["bytes"])
    if len(data) != file["bytes"]:
        _refuse(path, f"has {len(data)} bytes, the manifest says {file['bytes']}")
    if (sum := f"{xxh64(data):016x}") != file["xxh64"]:
        _refuse(path, f"is damaged: its XXH64 is {sum}, the manifest says {file['xxh64']}")
    if not data.startswith(head):
        _refuse(path, "does not hold the tensors of this recipe at this step")
    tensors, at = {}, len(head)
    for name, shape in shapes:
        count = math.prod(shape)
        values = torch.frombuffer(bytearray(data[at:at + 4 * count]), dtype=torch.float32) if count else torch.empty(0)
        if not bool(values.isfinite().all()):
            _refuse(path, f"{name} holds what is not finite")
        tensors[name] = values.view(shape)
        at += 4 * count
    return Checkpoint(recipe, {name: t for name, t in tensors.items() if not name.startswith(("adam.", "history."))})


def _refuse(path, what):
    raise InvalidArgument(f"[RingRNN.load] {_printable(path)}: {what}") from None


def _printable(text):
    return text if text.isprintable() else ascii(text)[1:-1]


def _read(path, most):
    """Of a plain file, which no pipe or device is."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                _refuse(path, "must be a plain file")
            if status.st_size > most:
                _refuse(path, f"has {status.st_size} bytes, at most {most} are read")
            return file.read(most)
    except OSError as e:
        _refuse(path, f"cannot be read ({e.strerror}); folder must be one that annulus train made for a recipe, as OUT/default")


def _check_sum(path, text):
    """The file ends with the XXH64 of its bytes, taken with zeros in its place."""
    before, said, after = text[:-20], text[-20:-4], text[-4:]
    if after != b'"\n}\n' or not before.endswith(b'"xxh64": "'):
        _refuse(path, 'must end with its checksum, "xxh64": it is cut short, or of an earlier version, which is not read')
    if (sum := f"{xxh64(before + _ZEROS + after):016x}") != said.decode(errors="replace"):
        _refuse(path, f"is damaged: its XXH64 is {sum}, it says {said!r}")


def _once(pairs):
    if len(dict(pairs)) != len(pairs):
        raise ValueError("a key appears twice")
    return dict(pairs)


def _no_number(word):
    raise ValueError(f"{word} is no number")


def _take(place, key, rule, good):
    value = place.get(key) if isinstance(place, dict) else None
    if not good(value):
        raise InvalidArgument(f'"{key}" must be {rule} but is {ascii(value)[:80]}')
    return value


def _whole(place, key, low, high):
    return _take(place, key, f"a whole number between {low} and {high}", lambda v: type(v) is int and low <= v <= high)


def _number(place, key):
    return _take(place, key, "a number", lambda v: type(v) in (int, float) and math.isfinite(v))


def _one_of(place, key, *names):
    return _take(place, key, " or ".join(f'"{n}"' for n in names), lambda v: isinstance(v, str) and v in names)


def _looked_at(manifest, name):
    """What is needed of it: recipe, step and file."""
    _one_of(manifest, "kind", "annulus ring-attractor checkpoint")
    _whole(manifest, "schema", 2, 2)
    recipe, file = (_take(manifest, key, "an object", lambda v: isinstance(v, dict)) for key in ("recipe", "file"))
    _take(recipe, "name", f"{ascii(name)}, as the folder is called,", lambda v: v == name)
    for key, low, high in (("neurons", 3, 8192), ("actions", 2, 1024), ("gain_hidden", 0, 4096), ("delay", 0, 1000),
                           ("steps", 1, 10_000_000)):
        _whole(recipe, key, low, high)
    _one_of(recipe, "encoding", "turns", "spread")
    _one_of(recipe, "activation", "relu", "gelu", "tanh", "silu")
    for key in ("J0", "J1", "alpha"):  # left out: the module's own
        if key in recipe:
            _number(recipe, key)
    step = _whole(manifest, "step", 0, recipe["steps"])
    _one_of(file, "name", f"checkpoint-{step:06}.safetensors")
    _take(file, "xxh64", "16 hexadecimal digits", lambda v: isinstance(v, str) and len(v) == 16 and v.isascii())
    head, shapes = _head(recipe, step)
    bytes = len(head) + 4 * sum(math.prod(shape) for _, shape in shapes)
    _take(file, "bytes", f"{bytes}, as this recipe makes at step {step},", lambda v: type(v) is int and v == bytes)
    return recipe, step, file


def _head(recipe, step):
    """How the file of this step begins, to the byte, and the names and shapes of its tensors in order."""
    N, K, H = recipe["neurons"], recipe["actions"], recipe["gain_hidden"]
    parameters = [("Wa", (K, N, N)), ("Wo", (N, N))]
    if H:
        parameters += [("gain.W1", (H, 2)), ("gain.b1", (H,)), ("gain.W2", (2 * K, H)), ("gain.b2", (2 * K,))]
    shapes = [(before + name, shape) for name, shape in parameters for before in ("", "adam.mean.", "adam.square.")]
    shapes += [("history.loss", (step,)), ("history.error", (step,))]
    header, at = {}, 0
    for name, shape in shapes:
        end = at + 4 * math.prod(shape)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text, shapes
