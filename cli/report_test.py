#!/usr/bin/env python3
"""`annulus report` on good, broken and hostile files. Usage: report_test.py ANNULUS files|results|compare|browser

files    at least 200 broken files, each exit code 2, one clear line, no output file left behind
results  the measured rows of bench/results make a page of at most 1 MB that explains every implementation and has no row
         below its floor
compare  two files of different commits: ratio per row, what got slower marked, what is in one file only
browser  the page in headless chromium: markup from a file shows as text (skipped without chromium)
"""
import copy
import json
import os
import random
import re
import sys
import tempfile

from testing import EVIL, annulus, browse, expect, expect_code, finish, read, write

GOOD = {
    "schema": 1, "suite": "lrpe-cosine", "row": "fwd-1d-n256-l0-b12", "op": "lrpe_cosine",
    "impl": "annulus", "device": "cpu", "dtype": "bf16",
    "params": {"B": 12, "direction": "fwd", "shape": [256]},
    "time_ms": {"median": 1.5, "min": 1.4, "p95": 1.9, "n": 20},
    "error": {"metric": "max|err|/max|ref|", "value": 1e-3}, "zero_rows": 0,
    "flops_needed": 1e9, "flops_executed": 1e9, "bytes": 28311552, "workspace_bytes": 1024,
    "peak_bytes": 30000000, "floor_ms": 1.2, "floor_kind": "bandwidth",
    "ceiling": {"copy_gbs": 25.0, "gemm_gflops": 100.0, "gemm": "bf16", "step_us": 0.9},
    "original": {"value": 0.163, "unit": "ms", "hardware": "A800", "columns": {"Triton": 0.163}},
    "hardware": "a CPU", "commit": "abc", "date": "2025-01-01T00:00:00Z", "status": "ok",
}


def line(record):
    return (json.dumps(record) + "\n").encode()


def mutants():
    """(name, bytes) of files that must all be refused."""
    good = line(GOOD)
    yield "empty", b""
    yield "blank", b"\n\n  \n"
    yield "binary", bytes(random.Random(1).randbytes(4096))
    yield "elf", b"\x7fELF\x02\x01\x01" + bytes(64)
    yield "zeros", bytes(1000)
    yield "html", b"<html><body>results</body></html>\n"
    yield "csv", b"suite,row\nlrpe-cosine,x\n"
    yield "array", b"[" + good.strip() + b"]\n"
    yield "number", b"42\n"
    yield "string", b'"row"\n'
    yield "null", b"null\n"
    yield "two objects on a line", good.strip() + good
    yield "trailing comma", good.replace(b"}\n", b",}\n")
    yield "comment", good.strip() + b" // ok\n"
    yield "nan literal", good.replace(b"1.5", b"NaN")
    yield "single quotes", good.replace(b'"', b"'")
    yield "utf-16", good.decode().encode("utf-16")
    yield "bad utf-8", good.replace(b"a CPU", b"a \xc3\x28 CPU")
    yield "surrogate", good.replace(b"a CPU", b"\\ud800")
    yield "deep array", b"[" * 100000
    yield "deep object", b'{"a":' * 50000
    yield "deep params", good.replace(b"[256]", b"[" * 40 + b"]" * 40)
    yield "long string", good.replace(b"a CPU", b"x" * 70000)
    yield "long line", good.replace(b"a CPU", b"x" * (2 << 20))
    yield "many params", line({**GOOD, "params": {f"k{i}": i for i in range(1000)}})
    yield "big array", line({**GOOD, "params": {"a": list(range(10000))}})
    yield "huge exponent", good.replace(b"1.5", b"1e999")
    yield "huge integer", good.replace(b'"n": 20', b'"n": 1' + b"0" * 400)
    yield "duplicate key", good.replace(b'"op":', b'"op": "x", "op":')
    yield "unknown products", good.replace(b'"gemm": "bf16"', b'"gemm": "int4"')
    yield "bad second line", good + b"{}\n" + good
    yield "cut short, alone", good[:100]
    yield "cut short, then a newline", good + good[:100] + b"\n"
    # Every key with every wrong type, gone, and misspelt.
    optional = {"params", "zero_rows", "flops_needed", "flops_executed", "bytes", "workspace_bytes",
                "peak_bytes", "floor_ms", "floor_kind", "ceiling", "original", "commit", "date"}
    text = {"suite", "row", "op", "impl", "device", "dtype", "hardware", "commit", "date"}
    for key, value in GOOD.items():
        wrong = [[], [1], True, -1e300, 1e300]
        wrong += [{"x": 1}] if key != "params" else [3]
        if key not in text:
            wrong += ["text", ""]
        for w in wrong:
            yield f"{key} = {w!r}", line({**GOOD, key: w})
        if key not in optional:
            yield f"no {key}", line({k: v for k, v in GOOD.items() if k != key})
        yield f"{key} misspelt", line({(k + "x" if k == key else k): v for k, v in GOOD.items()})
    for outer in ("time_ms", "error", "ceiling", "original"):
        for inner in GOOD[outer]:
            r = copy.deepcopy(GOOD)
            r[outer][inner] = [[]]
            yield f"{outer}.{inner} = [[]]", line(r)
            r = copy.deepcopy(GOOD)
            r[outer]["no_" + inner] = r[outer].pop(inner)
            yield f"{outer}.{inner} misspelt", line(r)


def report(path, out):
    return annulus("report", path, "--out", out, timeout=20)


def test_files(folder):
    path, out = os.path.join(folder, "in.jsonl"), os.path.join(folder, "report.html")
    count = 0
    for name, data in mutants():
        count += 1
        write(data, path)
        got = report(path, out)
        message = got.stderr.strip()
        if expect_code(2, got, name):
            expect(message.startswith("annulus: ") and path in message and "\n" not in message,
                   f"{name}: not one line that names the file: {message!r}")
            expect(not got.stdout, f"{name}: prints a result: {got.stdout!r}")
        expect(os.listdir(folder) == ["in.jsonl"], f"{name}: left {os.listdir(folder)}")

    # Bytes flipped at random: some stay legal, none may crash or leave anything half-written.
    rng = random.Random(2)
    for i in range(100):
        data = bytearray(line(GOOD) * 2)
        for _ in range(rng.randint(1, 4)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        write(bytes(data), path)
        code = report(path, out).returncode
        expect(code in (0, 2), f"flipped {i}: exit code {code}")

    # A failed report leaves the old page as it was.
    write("old", out)
    write("garbage\n", path)
    report(path, out)
    expect(read(out) == b"old", "a failed report touched the old page")

    # The good file, whole and with a last line cut short.
    write(line(GOOD), path)
    expect_code(0, report(path, out), "good file")
    expect(b"</html>" in read(out), "good file: no page")
    write(line(GOOD) + line(GOOD)[:80], path)
    expect_code(0, report(path, out), "cut short", "cut short")
    for bad in ([], ["/nonexistent.jsonl"], [folder], ["/dev/zero"]):
        expect_code(2, annulus("report", *bad, timeout=20, cwd=folder), f"report {bad}")
    expect_code(2, report(path, "/nonexistent/report.html"), "unwritable output")
    print(f"{count} broken files, 100 flipped ones")
    assert count >= 200, count


def test_results(folder):
    page = os.path.join(folder, "page.html")
    results = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "bench", "results")
    files = sorted(os.path.join(results, f) for f in os.listdir(results) if f.endswith(".jsonl"))
    assert files
    if expect_code(0, annulus("report", *files, "--out", page), "report"):
        expect(os.path.getsize(page) <= 1 << 20, f"the page has {os.path.getsize(page)} bytes")
        html = read(page).decode()
        expect("not explained" not in html, "an implementation of the results has no words in its suite")
        expect("Below their floor" not in html, "a row of the results is below its floor")
    # Every peer that python -m annulus.peers can write is explained too, measured yet or not.
    root = os.path.join(results, "..", "..")
    peers = os.path.join(root, "python", "annulus", "peers")
    for script in sorted(f for f in os.listdir(peers) if f.endswith(".py") and not f.startswith("_")):
        names = set(re.findall(r'"(torch-[a-z0-9-]+)"', read(peers, script).decode()))
        assert names, script
        suite = script.removesuffix(".py").replace("_", "-")
        rows = write(b"".join(line({**GOOD, "suite": suite, "impl": name}) for name in names), folder, "peers.jsonl")
        if expect_code(0, annulus("report", rows, "--out", page), "report of peers"):
            expect("not explained" not in read(page).decode(), f"{suite}: a peer of {sorted(names)} has no words")
    print(f"{len(files)} files")


def timed(row, median, **more):
    return {**GOOD, "row": row, "time_ms": {"median": median, "min": 0.9 * median, "p95": 1.02 * median, "n": 20}, **more}


def test_compare(folder):
    old = write(line(timed("steady", 1)) + line(timed("slow", 1)) + line(timed("fast", 2)) + line(timed("noisy", 1))
                + line(timed("right", 1)) + line(timed("gone", 1)) + line(timed("moved", 1)), folder, "old.jsonl")
    broken = {**timed("right", 1), "status": "failed", "reason": "error 1 is above the \x1b]0;owned\x07 limit"}
    new = write(line(timed("steady", 1.03)) + line(timed("slow", 1.5)) + line(timed("fast", 1)) + line(broken)
                + line({**timed("noisy", 1.04), "commit": "\x1b[31mdef"}) + line(timed("fresh", 1))
                + line(timed("moved", 9, hardware="another CPU")), folder, "new.jsonl")
    page = os.path.join(folder, "page.html")
    got = annulus("report", old, new, "--compare", "--out", page)
    if not expect_code(1, got, "compare"):  # what a script stops at: rows are slower, or broken
        return
    out = got.stdout
    for words in (["slow", "1.500", "slower"], ["fast", "0.500", "faster"], ["steady", "1.030"], ["noisy", "1.040"],
                  ["right", "failed", "broken"]):
        lines = [text for text in out.splitlines() if text.startswith(f"| {words[0]} ")]
        expect(len(lines) == 1 and all(word in lines[0] for word in words), f"{words} is not a line of {out}")
        expect(len(words) > 2 or not any(w in lines[0] for w in ("slower", "faster")), f"noise is marked: {lines}")
    order = [text.split()[1] for text in out.splitlines() if text.startswith("| ") and text.split()[1] != "row"]
    expect(order[:2] == ["right", "slow"], f"what got worse is not first: {order}")
    gone, fresh = out.split("only in A")[1].split("only in B")
    expect("gone" in gone and "moved" in gone and "fresh" in fresh and "another CPU" in fresh, f"one file only: {out}")
    expect("\x1b" not in got.stdout + got.stderr, "a control character of a file reached the terminal")
    expect(b"slower" in read(page) and b"</html>" in read(page), "no page")
    # The same file twice: nothing changed. One file or three: refused.
    got = annulus("report", old, old, "--compare", "--out", page)
    expect(got.returncode == 0 and "7 rows in both files, 0 slower or larger" in got.stdout, f"twice: {got.stdout}")
    for files in ([old], [old, new, new]):
        expect_code(2, annulus("report", *files, "--compare", "--out", page), f"{len(files)} files", "takes two result files")
    # A thousandfold difference in size still makes a page and ends.
    many = write(b"".join(line(timed(f"r{i}", 1 + i % 7)) for i in range(4000)), folder, "many.jsonl")
    expect_code(1, annulus("report", many, old, "--compare", "--out", page), "many")  # nothing in common
    expect(os.path.getsize(page) <= 1 << 20, f"the page has {os.path.getsize(page)} bytes")


def test_browser(folder):
    evil = {k: (EVIL if isinstance(v, str) and k not in ("status", "floor_kind") else v) for k, v in GOOD.items()}
    evil["impl"] = "annulus"
    evil["params"] = {EVIL: EVIL, "direction": EVIL}
    evil["original"] = {"value": 1, "unit": "ms", "hardware": EVIL, "columns": {EVIL: 1}}
    evil["error"] = {"metric": EVIL, "value": "NaN"}
    skipped = {**GOOD, "row": "other", "status": "skipped", "reason": EVIL}
    path = write(line(evil) + line({**evil, "impl": EVIL}) + line(skipped) + line(GOOD), folder, "in.jsonl")
    page = os.path.join(folder, "report.html")
    if expect_code(0, report(path, page), "report"):
        browse(page, "Annulus benchmark report", folder)
    if expect_code(0, annulus("report", path, path, "--compare", "--out", page), "compare"):
        browse(page, "Annulus benchmark comparison", folder)


with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as temporary:
    {"files": test_files, "results": test_results, "compare": test_compare, "browser": test_browser}[sys.argv[2]](temporary)
finish()
