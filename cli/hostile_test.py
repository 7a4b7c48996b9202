#!/usr/bin/env python3
"""Folders that strangers made, second writers and what a kill leaves behind. Usage: hostile_test.py ANNULUS"""
import contextlib
import json
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import time

from testing import ANNULUS, annulus, expect, expect_code, finish, read, write

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "python", "annulus"))
from _xxh64 import xxh64  # noqa: E402

SMALL = ["--recipe", "default", "--neurons", "16", "--batch", "4", "--length", "10", "--device", "cpu"]
STEPS = ["--steps", "6"]
MOST_BYTES, MOST_SECONDS = 64 << 20, 1.0  # what refusing a file may take beyond what the program takes to start


def train(*arguments):
    return annulus("train", "ring-attractor", *arguments)


def resume(out):
    return train("--out", out, "--resume", "--device", "cpu")


def copy_of(run, name):
    return shutil.copytree(run, os.path.join(os.path.dirname(run), name))


def forge(out, change, weights=None):
    """The manifest after change(manifest), its checksum right again; and the bytes of its file after weights(bytes)."""
    folder = os.path.join(out, "default")
    manifest = json.loads(read(folder, "manifest.json"))
    if weights:
        content = weights(read(folder, manifest["file"]["name"]))
        write(content, folder, manifest["file"]["name"])
        manifest["file"] |= {"bytes": len(content), "xxh64": f"{xxh64(content):016x}"}
    change(manifest)
    zeros = json.dumps(manifest | {"xxh64": "0" * 16}, indent=2, ensure_ascii=False) + "\n"
    write(zeros.replace('"xxh64": "' + "0" * 16 + '"\n}\n', f'"xxh64": "{xxh64(zeros.encode()):016x}"\n}}\n'),
          folder, "manifest.json")


def tree(folder):
    return {os.path.join(at, name): read(at, name) for at, _, names in os.walk(folder) for name in names}


def cost(arguments):
    """Exit code, peak bytes and seconds of work: those of the clock depend on who else runs here."""
    def run(*words):
        process = subprocess.Popen([ANNULUS, *words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        return process.returncode, usage.ru_maxrss << 10, usage.ru_utime + usage.ru_stime

    _, start_bytes, start_seconds = run("--version")  # cuBLAS alone is 200 MiB where the program has it
    code, bytes, seconds = run(*arguments)
    return code, bytes - start_bytes, seconds - start_seconds


def test_a_name_is_no_path(run):
    victim, out = copy_of(run, "victim"), copy_of(run, "named")
    forge(out, lambda m: None)
    expect_code(0, resume(out), "a manifest forged to say the same")
    before = tree(victim)
    for name in ("../victim/default", "../../victim", "seed", ".", "default/", "default\0", "\x1b]0;owned\x07"):
        forge(out, lambda m: m["recipe"].update(name=name))
        got = resume(out)
        expect_code(2, got, f"a recipe called {name!r}", "recipe.name", '"default"')
        expect("\x1b" not in got.stderr, f"an escape sequence is printed: {got.stderr!r}")
    expect(tree(victim) == before, "a manifest wrote outside its folder")


def test_numbers_are_those_of_the_files(run):
    def grown(m, name, value, bytes=None):
        m["recipe"][name] = value
        m["file"]["bytes"] = bytes or m["file"]["bytes"]

    for i, (name, value) in enumerate((("neurons", 8192), ("actions", 1024), ("gain_hidden", 4096))):
        for said in (None, 4 * 3 * 3 * 8192**2, 1 << 52):
            out = copy_of(run, f"grown{i}-{said}")
            forge(out, lambda m: grown(m, name, value, said))
            expect_code(2, resume(out), f"{name} {value}", "bytes")
            code, bytes, seconds = cost(["train", "ring-attractor", "--out", out, "--resume", "--device", "cpu"])
            expect(code == 2 and bytes <= MOST_BYTES and seconds <= MOST_SECONDS,
                   f"{name} {value}: exit code {code}, {bytes >> 20} MiB, {seconds:.1f} s")
    out = copy_of(run, "long")
    forge(out, lambda m: (m["recipe"].update(steps=10**7), m.update(step=10**7),
                          m["file"].update(name="checkpoint-10000000.safetensors")))
    code, bytes, seconds = cost(["train", "ring-attractor", "--out", out, "--resume", "--device", "cpu"])
    expect(code == 2 and bytes <= MOST_BYTES and seconds <= MOST_SECONDS, f"steps: {code}, {bytes >> 20} MiB, {seconds:.1f} s")
    out = copy_of(run, "huge")  # a file larger than the manifest says is not read
    with open(os.path.join(out, "default", "checkpoint-000006.safetensors"), "r+b") as file:
        file.truncate(3 << 30)
    code, bytes, seconds = cost(["train", "ring-attractor", "--out", out, "--resume", "--device", "cpu"])
    expect(code == 2 and bytes <= MOST_BYTES and seconds <= MOST_SECONDS, f"3 GiB: {code}, {bytes >> 20} MiB, {seconds:.1f} s")


def test_control_characters(run):
    out = copy_of(run, "device")
    for escape in ("\x1b]0;owned\x07", "\x9b31m", "\x7f"):
        forge(out, lambda m: m.update(device=f"cpu{escape}"))
        got = resume(out)
        expect(not any(c in got.stderr + got.stdout for c in "\x1b\x9b\x07\x7f"), f"printed as it is: {got.stderr!r}")
        expect("\\x" in got.stderr, f"not escaped: {got.stderr!r}")
    peer = {"name": "\x9b31mred\x1b[0m", "T": 500, "mean": 0.5, "std": 0.4, "max": 3.0, "final": 0.7, "curve": [0.1, 0.4]}
    path = write(json.dumps(peer), out, "peer.json")
    forge(out, lambda m: m.update(device="cpu"))
    got = train("--out", out, "--resume", "--device", "cpu", "--peer", path)
    expect_code(0, got, "a peer with a colour", "\\x9b31mred\\x1b[0m")
    expect("\x9b" not in got.stdout and "\x1b" not in got.stdout, f"a peer's name is printed as it is: {got.stdout!r}")


def test_what_is_not_finite(run):
    def all_weights(value):
        def changed(content):
            begin = 8 + struct.unpack("<Q", content[:8])[0]
            end = begin + json.loads(content[8:begin])["Wa"]["data_offsets"][1]
            return content[:begin] + struct.pack("<f", value) * ((end - begin) // 4) + content[end:]
        return changed

    for i, (value, code, words) in enumerate((
            (float("nan"), 2, "not finite"), (float("inf"), 2, "not finite"), (-float("inf"), 2, "not finite"),
            (3e38, 1, "not finite"))):  # a number, but no state of the network is one
        out = copy_of(run, f"finite{i}")
        for name in ("results.json", "ring-attractor.html"):
            os.remove(os.path.join(out, name))
        forge(out, lambda m: None, all_weights(value))
        got = resume(out)
        expect_code(code, got, f"weights of {value}", words)
        expect(not got.stdout and not os.path.exists(os.path.join(out, "results.json")), f"weights of {value}: results")


@contextlib.contextmanager
def running(arguments, ready):
    """The process, once ready() holds; killed at the end."""
    process = subprocess.Popen([ANNULUS, *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while not ready() and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        expect(process.poll() is None, f"{arguments} ended before it was ready")
        yield process
    finally:
        process.kill()
        process.wait()


def test_one_writer_a_folder(folder):
    out = os.path.join(folder, "shared")
    mine = os.path.join(out, "default")
    begin = ["train", "ring-attractor", *SMALL, "--steps", "100000", "--checkpoint-every", "1", "--out", out]
    with running(begin, lambda: os.path.exists(os.path.join(mine, "checkpoint-000003.safetensors"))):
        for second in (["--resume"], ["--overwrite"], []):
            expect_code(2, train(*SMALL, "--steps", "100000", "--out", out, *second), f"a second writer {second}",
                        "another process", out)
    # Killed: the lock is free, and what it left is gone after the next start.
    left = [write("half", mine, name) for name in (
        "checkpoint-000001.safetensors.4000000.tmp", "manifest.json.4000000.tmp", "checkpoint-099999.safetensors")]
    kept = [write("mine", mine, name) for name in ("notes.tmp", "checkpoint-best.safetensors")]
    ready = lambda: not any(map(os.path.exists, left))  # noqa: E731
    with running(["train", "ring-attractor", "--out", out, "--resume", "--checkpoint-every", "1000000", "--device", "cpu"],
                 ready):
        time.sleep(0.1)
        expect(ready(), f"left behind by a kill: {sorted(os.listdir(mine))}")
        expect(all(map(os.path.exists, kept)), "a file that is not ours was removed")
        files = [name for name in os.listdir(mine) if name not in map(os.path.basename, kept)]
        expect(len(files) == 2 and "manifest.json" in files, f"more than a checkpoint: {sorted(files)}")


def test_one_writer_a_file(folder):
    saved = os.path.join(folder, "rows.jsonl")
    with running(["bench", "--save", saved], lambda: os.path.exists(saved + ".partial") and read(saved + ".partial")):
        rows = read(saved + ".partial")
        got = annulus("bench", "--filter", "no-such-row|fwd-1d", "--reps", "1", "--save", saved)
        expect_code(2, got, "a second bench --save", "another process", saved)
        expect(not got.stdout, "the second one measured all the same")
        expect(read(saved + ".partial").startswith(rows), "the second one touched the rows of the first")
    row = annulus("bench", "--list").stdout.splitlines()[0]
    expect_code(0, annulus("bench", "--filter", f"^{row}$", "--reps", "1", "--save", saved), "after a kill")
    expect(not os.path.exists(saved + ".partial"), "a kill's rows are still beside the new ones")


def test_all(folder):
    run = os.path.join(folder, "run")
    if not expect_code(0, train(*SMALL, *STEPS, "--out", run), "a small run"):
        return
    test_a_name_is_no_path(run)
    test_numbers_are_those_of_the_files(run)
    test_control_characters(run)
    test_what_is_not_finite(run)
    test_one_writer_a_folder(folder)
    test_one_writer_a_file(folder)


with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as temporary:
    test_all(temporary)
finish()
