#!/usr/bin/env python3
"""`annulus train ring-attractor` as a user meets it. Usage: train_test.py ANNULUS command|browser

command  what it writes, Ctrl-C and --resume, and bad usage: exit codes and one clear message
browser  the page in headless chromium (skipped without chromium)
"""
import json
import os
import shutil
import sys
import tempfile
import time

from testing import EVIL, annulus, browse, expect, expect_code, finish, interrupted, read, write

SMALL = ["--neurons", "16", "--batch", "4", "--length", "10", "--steps", "6", "--device", "cpu"]
PEER = {"name": EVIL, "T": 500, "mean": 0.5, "std": 0.4, "max": 3.0, "final": 0.7, "curve": [0.1, 0.4, 0.7]}


def train(*arguments, cwd=None):
    return annulus("train", "ring-attractor", *arguments, cwd=cwd)


def outputs(folder):
    """What a run leaves that does not hold a time."""
    return {f"{r}/{name}": read(folder, r, name) for r in ("original", "default")
            for name in ("model.safetensors", "curve.csv")}


def test_run(out):
    got = train(*SMALL, "--out", out)
    if not expect_code(0, got, "a small run"):
        return
    expect(len(got.stdout.splitlines()) == 8 and got.stdout.startswith("| model |"), f"the table: {got.stdout!r}")
    expect(got.stdout.count("| no |") == 6 and got.stderr.count("did not learn: mean error") == 2,
           f"six steps teach nothing, and nobody says so: {got.stdout!r} {got.stderr!r}")
    for recipe in ("original", "default"):
        expect(f"annulus: {recipe}, step 6 of 6: loss " in got.stderr, f"redirected, no word of {recipe}: {got.stderr!r}")
    results = json.loads(read(out, "results.json"))
    expect([r["learned"] for r in results["recipes"]] == [False, False], "results.json: learned")
    expect([r["recipe"]["name"] for r in results["recipes"]] == ["original", "default"], "results.json lacks a recipe")
    expect(b"</html>" in read(out, "ring-attractor.html"), "no page")

    # A run is not overwritten unasked, and a finished one can be evaluated again.
    whole = outputs(out)
    expect_code(2, train(*SMALL, "--out", out), "over a run", "--resume")
    expect_code(0, train("--out", out, "--resume", "--device", "cpu"), "a finished run, resumed")
    expect(outputs(out) == whole, "a finished run, resumed: other files")
    expect_code(2, train("--out", out, "--resume", "--steps", "5", "--device", "cpu"),
                "resumed with fewer steps", "at step 6 already: --steps must be at least that but is 5")
    expect_code(0, train("--out", out, "--resume", "--steps", "8", "--device", "cpu"), "trained on")
    expect(read(out, "default", "curve.csv").count(b"\n") == 9, "trained on: not eight steps")


def test_options(folder):
    """Every one reaches the recipe, and the model with it."""
    out = os.path.join(folder, "options")
    given = {"J0": -0.2, "J1": 0.3, "alpha": 0.25, "activation": "tanh", "rate": 0.002, "velocity_noise": 0.01,
             "state_noise": 0.05}
    words = [w for key, value in given.items() for w in ("--" + key.replace("_", "-"), str(value))]
    if expect_code(0, train(*SMALL, "--recipe", "default", *words, "--out", out), "options"):
        recipe = json.loads(read(out, "results.json"))["recipes"][0]["recipe"]
        expect({key: recipe[key] for key in given} == given, f"options: {recipe}")


def test_ctrl_c(folder):
    """Code 130, a message that says how to go on, and going on gives the bits of a run never stopped."""
    long = [*SMALL[:-4], "--steps", "20000", "--device", "cpu", "--recipe", "original"]
    stopped, never = os.path.join(folder, "stopped"), os.path.join(folder, "never")
    begun = []

    def ready():
        if not begun and os.path.exists(os.path.join(stopped, ".lock")):
            begun.append(time.monotonic())
        return begun and time.monotonic() - begun[0] > 0.2

    code, out, err = interrupted(["train", "ring-attractor", *long, "--out", stopped,
                                  "--checkpoint-every", "1000000"], ready)
    expect(code == 130 and "--resume" in err and not out, f"Ctrl-C: exit code {code}, {err!r}")
    expect(not os.path.exists(os.path.join(stopped, "results.json")), "Ctrl-C: there are results all the same")
    expect_code(0, train("--out", stopped, "--resume", "--device", "cpu"), "after Ctrl-C")
    expect_code(0, train(*long, "--out", never), "the run that is never stopped")
    expect(read(stopped, "original", "model.safetensors") == read(never, "original", "model.safetensors"),
           "after Ctrl-C: other weights")


def test_bad_usage(folder, out):
    peer = write(json.dumps({**PEER, "means": 1}), folder, "peer.json")
    in_the_way = write("in the way", folder, "file")
    new = os.path.join(folder, "new")
    expect_code(2, annulus("train"), "train alone")
    for bad, word in ((["--neurons", "2"], "neurons"), (["--neurons", "many"], "--neurons"),
                      (["--neurons", "-5"], "neurons"), (["--actions", "1"], "actions"),
                      (["--batch", "0"], "batch"), (["--steps", "0"], "steps must be between 1"),
                      (["--length", "0"], "length"), (["--alpha", "1.5"], "alpha"), (["--J0", "nan"], "J0"),
                      (["--J1", "1e9"], "J1"), (["--rate", "-1"], "rate"), (["--activation", "cos"], "--activation"),
                      (["--velocity-noise", "-1"], "velocity_noise"), (["--state-noise", "x"], "--state-noise"),
                      (["--gain", "-1"], "gain"), (["--recipe", "best"], "--recipe"),
                      (["--encoding", "x"], "--encoding"), (["--device", "tpu"], "--device"),
                      (["--checkpoint-every", "0"], "--checkpoint-every"), (["--threads", "-1"], "--threads"),
                      (["--seed", "-1"], "--seed"), (["--peer", "/nonexistent.json"], "nonexistent"),
                      (["--peer", peer], "means"), (["--resume"], "--resume"),
                      (["--resume", "--overwrite"], "--overwrite"), (["--frobnicate"], "frobnicate"),
                      (["--out", os.path.join(in_the_way, "x")], "folder")):
        expect_code(2, train(*bad, *([] if "--out" in bad else ["--out", new]), cwd=folder), f"{bad}", word)
        if not expect(not os.path.exists(new), f"{bad}: wrote something"):
            shutil.rmtree(new)
    if shutil.which("nvidia-smi") is None:
        expect_code(3, train("--device", "cuda", "--out", out), "--device cuda where there is none")


def test_command(folder):
    out = os.path.join(folder, "run")
    test_run(out)
    test_ctrl_c(folder)
    test_options(folder)
    test_bad_usage(folder, out)


def test_browser(folder):
    peer, out = write(json.dumps(PEER), folder, "peer.json"), os.path.join(folder, "run")
    if expect_code(0, train(*SMALL, "--out", out, "--peer", peer), "a small run"):
        dom = browse(os.path.join(out, "ring-attractor.html"), "Ring attractor", folder)
        expect(dom.count("<svg") >= 14, f"only {dom.count('<svg')} figures")


with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as temporary:
    {"command": test_command, "browser": test_browser}[sys.argv[2]](temporary)
finish()
