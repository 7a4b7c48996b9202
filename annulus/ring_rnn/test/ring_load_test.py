"""annulus.nn.RingRNN.load: the ring that the training program left, and nothing that a stranger forged."""

import json
import os
import pathlib
import re
import shutil
import struct
import subprocess

import pytest
import torch

import annulus
from annulus._xxh64 import xxh64

PROGRAM = pathlib.Path(annulus.__file__).resolve().parents[2] / "bin" / "annulus"
SMALL = "--recipe default --neurons 24 --batch 16 --length 20 --steps 60 --device cpu".split()


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """out(*options): the folder of a small run."""
    if not PROGRAM.exists():
        pytest.skip(f"no training program at {PROGRAM}")

    def out(*options):
        folder = tmp_path_factory.mktemp("run") / "out"
        subprocess.run([PROGRAM, "train", "ring-attractor", *SMALL, *options, "--out", folder], check=True, capture_output=True)
        return folder

    return out


@pytest.fixture(scope="module")
def trained(runs):
    return runs()


@pytest.fixture
def folder(trained, tmp_path):
    return shutil.copytree(trained / "default", tmp_path / "default")


def forge(folder, change=lambda manifest: None, weights=None):
    """The manifest after change(manifest), its checksums right again, and its file after weights(bytes)."""
    manifest = json.loads((folder / "manifest.json").read_text())
    path = folder / manifest["file"]["name"]
    if weights:
        path.write_bytes(weights(path.read_bytes()))
        manifest["file"] |= {"bytes": path.stat().st_size, "xxh64": f"{xxh64(path.read_bytes()):016x}"}
    change(manifest)
    text = json.dumps(manifest | {"xxh64": "0" * 16}, indent=2) + "\n"
    (folder / "manifest.json").write_text(text[:-20] + f"{xxh64(text.encode()):016x}" + text[-4:])


@pytest.mark.parametrize("options", [[], ["--gain", "0"], ["--actions", "4"], ["--actions", "3", "--encoding", "spread"]], ids=str)
def test_its_error_is_the_programs(runs, options):
    """On the program's own test sequences; the network decays or turns as it did there, to a few roundings."""
    out = runs(*options)
    ring = annulus.nn.RingRNN.load(out / "default")
    example = _example("ring_simulation")
    (test,) = [t for t in json.loads((out / "results.json").read_text())["recipes"][0]["test"] if t["T"] == 500 and t["lead"] == 0.1]
    assert example.simulate(ring, 200, 500)["error"].mean().item() == pytest.approx(test["mean"], rel=1e-3)
    assert (ring.gain is None) == ("--gain" in options)


def test_weights_are_those_of_the_file(trained):
    ring = annulus.nn.RingRNN.load(str(trained / "default") + "/")
    data = (trained / "default" / "model.safetensors").read_bytes()
    begin = 8 + struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8:begin])
    names = {"gain.W1": "gain.0.weight", "gain.b1": "gain.0.bias", "gain.W2": "gain.2.weight", "gain.b2": "gain.2.bias"}
    state = ring.state_dict()
    for name, about in header.items():
        if name != "__metadata__":
            start, end = about["data_offsets"]
            want = torch.frombuffer(bytearray(data[begin + start:begin + end]), dtype=torch.float32).view(about["shape"])
            assert torch.equal(state.pop(names.get(name, name)), want), name
    assert not state
    assert ring.activation == json.loads(header["__metadata__"]["recipe"])["activation"]


def test_it_trains_on(trained):
    ring = annulus.nn.RingRNN.load(trained / "default")
    ring(ring.actions(torch.randn(2, 7) / 10))[0].sum().backward()
    assert all(p.grad.isfinite().all() and p.grad.any() for p in ring.parameters())
    half = annulus.nn.RingRNN.load(trained / "default").bfloat16()
    assert half(half.actions(torch.randn(2, 7) / 10))[0].dtype == torch.bfloat16


def test_actions_of_a_velocity():
    ring = annulus.nn.RingRNN(8, 3)
    velocity = torch.tensor([[-0.5, 0.25, 0.0]])
    assert ring.actions(velocity).tolist() == [[[0.5, 0, 0], [0, 0.25, 0], [0, 0, 0]]]
    ring.delay = 2
    assert ring.actions(velocity).tolist() == [[[0, 0, 0], [0, 0, 0], [0.5, 0, 0]]]
    assert ring.actions(velocity[:, :1]).tolist() == [[[0, 0, 0]]]
    for bad in (None, velocity[0], velocity.int()):
        with pytest.raises(annulus.InvalidArgument, match=r"\[RingRNN\] velocity must be a real tensor of shape \(B, T\)"):
            ring.actions(bad)
    with pytest.raises(annulus.InvalidArgument, match="n_actions must be at least 2"):
        annulus.nn.RingRNN(8, 1).actions(velocity)


def refused(folder, words):
    with pytest.raises(annulus.InvalidArgument, match=r"\[RingRNN.load\].*" + words) as e:
        annulus.nn.RingRNN.load(folder)
    assert str(e.value).isprintable()


def test_what_is_no_folder_of_a_recipe(trained, tmp_path):
    refused(trained, "OUT/default")
    refused(tmp_path / "nothing", "cannot be read")
    refused(None, "folder must be a path but is None")
    (tmp_path / "manifest.json").mkdir()
    refused(tmp_path, "cannot be read")
    (tmp_path / "manifest.json").rmdir()
    os.mkfifo(tmp_path / "manifest.json")
    refused(tmp_path, "plain file")


@pytest.mark.parametrize("name", ["../../victim", "seed", "", ".", "\x1b]0;owned\x07", 3])
def test_the_name_of_another_folder(folder, name):
    forge(folder)
    annulus.nn.RingRNN.load(folder)
    forge(folder, lambda m: m["recipe"].update(name=name))
    refused(folder, '"name" must be \'default\'')


@pytest.mark.parametrize("key, value", [("neurons", 8192), ("actions", 1024), ("gain_hidden", 4096), ("neurons", 1 << 40),
                                        ("steps", 0), ("delay", -1), ("encoding", "x"), ("activation", None), ("neurons", True)])
@pytest.mark.parametrize("bytes", [None, 1 << 36])
def test_numbers_that_are_not_those_of_the_file(folder, key, value, bytes):
    forge(folder, lambda m: (m["recipe"].update({key: value}), m["file"].update({"bytes": bytes} if bytes else {})))
    refused(folder, "must be")


def test_sizes_are_compared_before_memory_is_taken(folder):
    """A manifest that fits its recipe, beside a file that does not."""
    forge(folder, lambda m: m["recipe"].update(neurons=8192))
    with pytest.raises(annulus.InvalidArgument) as e:
        annulus.nn.RingRNN.load(folder)
    needed = int(re.search(r"must be (\d+), as this recipe makes", str(e.value))[1])
    forge(folder, lambda m: m["file"].update(bytes=needed))
    refused(folder, f"the manifest says {needed}")


def test_every_flipped_bit(folder):
    for name in ("manifest.json", next(p.name for p in folder.glob("checkpoint-*"))):
        good = (folder / name).read_bytes()
        for bit in range(0, 8 * len(good), 13 if name == "manifest.json" else 8 * len(good) // 50):
            bad = bytearray(good)
            bad[bit // 8] ^= 1 << bit % 8
            (folder / name).write_bytes(bad)
            refused(folder, "")
        (folder / name).write_bytes(good[:-1])
        refused(folder, "")
        (folder / name).write_bytes(good)
    annulus.nn.RingRNN.load(folder)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite(folder, value):
    forge(folder, weights=lambda data: data[:-400] + struct.pack("<f", value) + data[-396:])
    refused(folder, "not finite")


def test_the_example(trained, tmp_path, capsys):
    example = _example("ring_simulation")
    example.main([str(trained / "default"), "--steps", "120", "--plot", str(tmp_path / "ring.svg")])
    said = capsys.readouterr().out
    assert "mean error" in said and "rad" in said
    picture = (tmp_path / "ring.svg").read_text()
    assert picture.startswith("<svg") and picture.count("<polyline") >= 3 and "data:image/png;base64," in picture


def _example(name):
    import importlib.util
    import sys

    folder = pathlib.Path(__file__).resolve().parents[3] / "examples"
    sys.path.insert(0, str(folder))
    try:
        spec = importlib.util.spec_from_file_location(name, folder / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
    finally:
        sys.path.remove(str(folder))
