"""examples/ring_attractor.py: the data of the C++ training, and a network that learns."""

import importlib.util
import json
import pathlib

import pytest
import torch

PATH = pathlib.Path(__file__).resolve().parents[3] / "examples" / "ring_attractor.py"


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("ring_attractor", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_random_numbers_are_those_of_cpp(example):
    """The first numbers of splitmix64 from state 0 (train/test/task_test.cpp has the same), and one batch of the task."""
    rng = example.Rng(0, 0, 0)
    assert [n & rng.MASK for n in rng.next(3).tolist()] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    velocity, start, target = example.draw_sequences(7, 53, example.Rng(5, 3, 17))
    assert start[:2].tolist() == [float.fromhex("0x1.20890ea4ef86cp+2"), float.fromhex("0x1.e71feaf0705fbp+1")]
    drawn = ["-0x1.ba9db80000000p-4", "0x0.0p+0", "0x1.4416c20000000p-5", "0x1.887e600000000p-5"]
    assert velocity[1, 20:24].tolist() == [float.fromhex(x) for x in drawn]
    assert not velocity[:, :5].any() and velocity.abs().max() <= example.FASTEST
    torch.testing.assert_close(target[:, 1:] - target[:, :-1], velocity[:, :-1].double())
    assert torch.equal(target[:, 0], start)


def test_training_is_that_of_cpp(example):
    """`annulus train ring-attractor --recipe original --neurons 24 --batch 16 --length 20 --steps 5` wrote these losses."""
    options = example.parse("--neurons 24 --batch 16 --length 20 --steps 5".split())
    history, _ = example.train(example.Ring(24, False, 0), options)
    assert history == pytest.approx([0.724278986, 0.693995535, 0.708913624, 0.822223485, 0.739936292], rel=1e-5)


@pytest.mark.parametrize("arguments", [[], ["--gain"], ["--gru"]], ids=["ring", "gain", "gru"])
def test_it_learns(example, arguments, tmp_path):
    path = tmp_path / "result.json"
    sizes = "--neurons 24 --steps 60 --batch 16 --length 15 --rate 1e-2".split()
    history, results = example.main([*arguments, *sizes, "--save", str(path)])
    first, last = sum(history[:5]) / 5, sum(history[-5:]) / 5
    assert last < 0.7 * first, (first, last)
    saved = json.loads(path.read_text())
    assert [r["T"] for r in saved] == [500, 1000] and all(len(r["curve"]) == r["T"] for r in saved)
    assert {"name", "T", "mean", "std", "max", "final", "curve", "parameters", "steps", "seconds"} == set(saved[0])
    assert results[0]["mean"] == saved[0]["mean"] <= saved[0]["max"] <= 3.15
