#!/usr/bin/env python3
"""The command line as a user meets it: wrong words, Ctrl-C, full disks. Usage: cli_test.py ANNULUS"""
import json
import os
import signal
import subprocess
import sys
import tempfile
import time

ANNULUS = os.path.abspath(sys.argv[1])
FAULTS = []


def annulus(*arguments, **options):
    return subprocess.run([ANNULUS, *arguments], capture_output=True, text=True, timeout=120, **options)


def expect(truth, what):
    if not truth:
        FAULTS.append(what)


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


def test_full_disk():
    if not os.path.exists("/dev/full"):
        return
    for arguments in (["info"], ["--help"], ["check", "--repro", "lrpe_cosine seed=3"], ["bench", "--list"]):
        with open("/dev/full", "w") as full:
            got = subprocess.run([ANNULUS, *arguments], stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
        expect(got.returncode == 2 and "cannot write to stdout" in got.stderr,
               f"{arguments} to a full disk: exit code {got.returncode}, {got.stderr!r}")


def interrupted(arguments, ready, cwd):
    """Runs until ready() holds, sends Ctrl-C, and gives what came of it."""
    process = subprocess.Popen([ANNULUS, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=cwd)
    deadline = time.monotonic() + 60
    while not ready() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err


def test_ctrl_c(folder):
    saved, partial = os.path.join(folder, "rows.jsonl"), os.path.join(folder, "rows.jsonl.partial")
    with open(saved, "w") as f:
        f.write("old\n")
    code, out, err = interrupted(["bench", "--format", "json", "--save", saved],
                                 lambda: os.path.exists(partial) and os.path.getsize(partial) > 0, folder)
    expect(code == 130, f"bench after Ctrl-C: exit code {code}, {err!r}")
    rows = json.loads(out)["benchmarks"]  # closed, whenever the signal came
    with open(partial) as f:
        expect(len(f.readlines()) == len(rows) > 0, "the rows printed are not the rows saved")
    expect(f"saved to {partial}" in err, f"bench does not say where the rows are: {err!r}")
    with open(saved) as f:
        expect(f.read() == "old\n", "an older file was touched by a run that was stopped")

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
        with open(saved) as f:
            before = f.read()
        got = annulus("report", saved, "--out", out)
        expect(got.returncode == 2 and words in got.stderr, f"report --out {out}: {got.returncode}, {got.stderr!r}")
        with open(saved) as f:
            expect(f.read() == before, f"report --out {out} touched the rows")
    link, page = os.path.join(folder, "link.html"), os.path.join(folder, "page.html")
    with open(page, "w") as f:
        f.write("old")
    os.symlink(page, link)
    got = annulus("report", saved, saved, "--out", link)
    with open(page) as f:
        expect(os.path.islink(link) and "</html>" in f.read(), "a link is not followed")
    expect("measured again" in got.stderr, f"rows given twice are not reported: {got.stderr!r}")


test_bad_usage()
test_named_twice_runs_once()
test_help_names_the_exit_codes()
test_full_disk()
with tempfile.TemporaryDirectory() as temporary:
    test_ctrl_c(temporary)
    test_saved_at_the_end(temporary)
print(f"{len(FAULTS)} faults")
for fault in FAULTS:
    print("FAULT", fault)
sys.exit(1 if FAULTS else 0)
