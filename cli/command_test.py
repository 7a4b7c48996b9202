#!/usr/bin/env python3
"""The command line as a user meets it: wrong words, Ctrl-C, full disks. Usage: command_test.py ANNULUS"""
import json
import os
import resource
import shutil
import subprocess
import tempfile
import time

from testing import ANNULUS, annulus, expect, finish, interrupted, read, write


def test_bad_usage():
    """Each is exit code 2 and a short message that holds these words."""
    for arguments, words in [
        (["-x"], ['"-x"']),
        (["foo"], ['"foo"']),
        (["train", "foo"], ['"foo"', "annulus train --help"]),
        (["report", "--foo"], ['"--foo"']),
        (["check", "--cases", "-1"], ["--cases", "between 0 and", '"-1"']),
        (["check", "--cases", "abc"], ["--cases", '"abc"']),
        (["check", "--cases", "99999999999999999999"], ["--cases", "between 0 and"]),
        (["check", "--seed", "-5"], ["--seed", '"-5"']),
        (["check", "--jobs", "100000"], ["--jobs", "256"]),
        (["check", "--repro", ""], ["--repro", "seed=N"]),
        (["check", "ring_rnn", "--repro", "lrpe_cosine seed=3"], ["lrpe_cosine", "ring_rnn"]),
        (["train", "ring-attractor", "--seed", "-3"], ["--seed", '"-3"']),
        (["bench", "--save", "/dev/null", "--filter", "fwd-1d"], ["/dev/null", "regular file"]),
        (["bench", "--list", "--filter", "(" * 30000], ["--filter", "longer than"]),
        (["bench", "--list", "--filter", "(a"], ["--filter", '"(a"']),
        (["bench", "--list", "--filter", r"n\d"], ["--filter", r"\d"]),
        (["bench", "--list", "--filter", "a{1,99}{1,99}{1,99}"], ["--filter", "braces"]),
    ]:
        got = annulus(*arguments)
        name = f"annulus {' '.join(arguments)}: exit code {got.returncode}, {got.stderr!r}"
        expect(got.returncode == 2 and not got.stdout, name)
        expect(all(word in got.stderr for word in words) and len(got.stderr) < 300, name)


def test_named_twice_runs_once():
    got = annulus("check", "lrpe_cosine", "lrpe_cosine", "--filter", "prefix", "--format", "json")
    expect(got.returncode == 0 and len(json.loads(got.stdout)) == 1, f"an operator twice: {got.stdout} {got.stderr}")
    once, twice = (annulus("bench", *suites, "--list") for suites in (["ring-rnn"], ["ring-rnn"] * 2))
    expect(once.stdout == twice.stdout and once.stdout, "a suite named twice runs twice")


def test_help_names_the_exit_codes():
    for command in ("info", "check", "bench", "report"):
        expect("3 what was asked for is not available" in annulus(command, "--help").stdout, f"{command} --help")


def test_a_seed_is_of_random_numbers():
    """What a paper says is the original's."""
    for arguments in (["bench", "--help"], ["bench", "--list"], ["report", "--help"]):
        expect("seed" not in annulus(*arguments).stdout.lower(), f"{arguments} speaks of a seed")


def test_full_disk():
    if not os.path.exists("/dev/full"):
        return
    for arguments in (["info"], ["--help"], ["check", "--repro", "lrpe_cosine seed=3"], ["bench", "--list"]):
        with open("/dev/full", "w") as full:
            got = subprocess.run([ANNULUS, *arguments], stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
        expect(got.returncode == 2 and "cannot write to stdout" in got.stderr,
               f"{arguments} to a full disk: exit code {got.returncode}, {got.stderr!r}")


def test_no_threads(folder):
    """Neither OpenMP nor OpenBLAS ends the process where its user may have no other thread."""
    os.chmod(folder, 0o777)
    alone = shutil.copy(ANNULUS, os.path.join(folder, "alone"))
    row = annulus("bench", "ring-rnn", "--list").stdout.split()[0]
    for arguments in (["info"], ["check", "ring_rnn", "--filter", "reset", "--jobs", "4"],
                      ["bench", "ring-rnn", "--filter", f"^{row}$", "--reps", "1"],
                      ["train", "ring-attractor", "--recipe", "original", "--steps", "1", "--neurons", "16", "--batch", "4",
                       "--out", os.path.join(folder, "run")]):
        try:
            got = subprocess.run([alone, *arguments], capture_output=True, text=True, timeout=60,
                                 user=54321 if os.geteuid() == 0 else None,  # the limit is none for root
                                 preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NPROC, (1, 1)))
        except OSError as error:  # no such user in this container, or none that may read the temporary folder
            print(f"skipped, a user without threads: {error}")
            return
        expect(got.returncode == 0 and got.stdout, f"{arguments[0]} without threads: exit code {got.returncode}, {got.stderr!r}")


def test_a_pattern_takes_no_time():
    got = annulus("bench", "--list", "--filter", "(([a-z0-9-]*)*)*!", timeout=5)
    expect(got.returncode == 2 and "leaves no row" in got.stderr, f"a slow pattern: {got.stderr!r}")


def test_closed_streams(folder):
    """What is printed must not end up in a file that took the stream's number."""
    saved = os.path.join(folder, "closed.jsonl")
    row = annulus("bench", "lrpe-cosine", "--list").stdout.split()[0]
    for closed in (">&-", "2>&-", "<&-", ">&- 2>&- <&-"):
        got = subprocess.run(["sh", "-c", f'exec "$@" {closed}', "sh", ANNULUS, "bench", "--filter", f"^{row}$", "--reps", "1",
                              "--save", saved], capture_output=True, text=True, timeout=60)
        expect(got.returncode == (2 if closed.startswith(">") else 0), f"{closed}: exit code {got.returncode}")
        rows = [json.loads(line) for line in read(saved).splitlines()]
        expect(len(rows) > 0, f"{closed}: no rows")


def test_ctrl_c(folder):
    saved, partial = os.path.join(folder, "rows.jsonl"), os.path.join(folder, "rows.jsonl.partial")
    write("old\n", saved)
    code, out, err = interrupted(["bench", "--format", "json", "--save", saved],
                                 lambda: os.path.exists(partial) and os.path.getsize(partial) > 0, folder)
    expect(code == 130, f"bench after Ctrl-C: exit code {code}, {err!r}")
    rows = json.loads(out)["benchmarks"]  # closed, whenever the signal came
    expect(len(read(partial).splitlines()) == len(rows) > 0, "the rows printed are not the rows saved")
    expect(f"saved to {partial}" in err, f"bench does not say where the rows are: {err!r}")
    expect(read(saved) == b"old\n", "an older file was touched by a run that was stopped")

    start = time.monotonic()
    code, out, err = interrupted(["check", "lrpe_cosine", "--cases", "1000000000", "--format", "json"],
                                 lambda: time.monotonic() - start > 3, folder)
    expect(code == 130 and "stopped" in err, f"check after Ctrl-C: exit code {code}, {err!r}")
    expect(json.loads(out)[0]["cases"] > 0, f"check after Ctrl-C prints {out!r}")


def test_saved_at_the_end(folder):
    saved = os.path.join(folder, "one.jsonl")
    row = annulus("bench", "lrpe-cosine", "--list").stdout.split()[0]
    got = annulus("bench", "--filter", f"^{row}$", "--reps", "1", "--save", saved)
    expect(got.returncode == 0 and f"saved to {saved}\n" in got.stderr, f"bench --save: {got.stderr!r}")
    expect(os.path.exists(saved) and not os.path.exists(saved + ".partial"), "the rows have not taken their name")

    for out, words in ((saved, "one of the result files"), ("/dev/null", "regular file"), (folder, "folder")):
        before = read(saved)
        got = annulus("report", saved, "--out", out)
        expect(got.returncode == 2 and words in got.stderr, f"report --out {out}: {got.returncode}, {got.stderr!r}")
        expect(read(saved) == before, f"report --out {out} touched the rows")
    got = annulus("report", saved, saved, "--out", os.path.join(folder, "page.html"))
    expect("measured again" in got.stderr, f"rows given twice are not reported: {got.stderr!r}")


test_bad_usage()
test_named_twice_runs_once()
test_help_names_the_exit_codes()
test_a_seed_is_of_random_numbers()
test_full_disk()
test_a_pattern_takes_no_time()
with tempfile.TemporaryDirectory() as temporary:
    test_no_threads(temporary)
    test_closed_streams(temporary)
    test_ctrl_c(temporary)
    test_saved_at_the_end(temporary)
finish()
