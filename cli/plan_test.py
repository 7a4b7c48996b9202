#!/usr/bin/env python3
"""annulus plan ring: its figures, its tables, its page, what it refuses. Usage: plan_test.py ANNULUS"""
import json
import os
import re
import tempfile
import time

from testing import annulus, expect, expect_code, finish, read

BASE = ["--tokens", "1000000", "--heads", "32", "--kv-heads", "8", "--head-dim", "128"]


def plan(*arguments, **options):
    return annulus("plan", "ring", *arguments, **options)


def rows(*arguments):
    got = plan(*arguments, "--format", "json")
    expect(got.returncode == 0 and not got.stderr, f"{arguments}: exit code {got.returncode}, {got.stderr!r}")
    return json.loads(got.stdout)


def test_figures():
    """By hand: full attention sends a shard's keys and values to every other rank."""
    (row,) = rows(*BASE, "--ranks", "8", "--full")
    shard = 125000
    sent = 7 * shard * 8 * 256 * 2
    expect(row["forward"]["bytes"]["max"] == row["forward"]["bytes"]["mean"] == sent == row["gather_forward"]["bytes"],
           f"forward bytes {row['forward']['bytes']}")
    expect(row["backward"]["bytes"]["max"] == 3 * sent, f"backward bytes {row['backward']['bytes']}")
    expect(row["forward"]["flops"]["mean"] == 4 * 32 * 128 * 1e12 / 8, f"flops {row['forward']['flops']}")
    expect(row["forward"]["hops"] == row["forward"]["hidden_hops"] == 7 and row["forward"]["hides"], "a long shard does not hide")
    expect(row["forward"]["hides_from"] == 2000, f"hides from {row['forward']['hides_from']}")  # 400e12 / 50e9 * (8 / 32)
    expect(row["forward"]["memory_bytes"]["tensors"] == shard * ((32 * 2 + 8 * 2) * 128 * 2 + 32 * 4), "memory of tensors")

    slow, fast = (rows(*BASE, "--ranks", "8", "--link-gbs", gbs)[0] for gbs in ("0.5", "450"))
    expect(not slow["forward"]["hides"] and slow["forward"]["time_s"] > slow["forward"]["compute_s"]["max"], "a slow link hides")
    expect(fast["forward"]["hides_from"] < slow["forward"]["hides_from"], "a fast link hides later than a slow one")

    many = rows("--tokens", "1000", "2000", "--ranks", "1", "2", "3", "--causal")
    expect([(r["tokens"], r["ranks"]) for r in many] == [(n, p) for n in (1000, 2000) for p in (1, 2, 3)], "rows are not all there")
    expect(all(r["forward"]["work_balance"] < 1.02 for r in many), "zigzag is not balanced")
    (windowed,) = rows(*BASE, "--ranks", "8", "--causal", "--window-left", "1000")
    expect(windowed["forward"]["bytes"]["max"] < sent / 50 and windowed["forward"]["hides_from"] is None, "a window sends all")
    (apart,) = rows(*BASE, "--ranks", "8", "--causal", "--balance", "contiguous")
    expect(abs(apart["forward"]["work_balance"] - 15 / 8) < 1e-4, f"contiguous: {apart['forward']['work_balance']}")


def test_table():
    got = plan(*BASE, "--ranks", "2", "1024", "--causal")
    table = [line for line in got.stdout.splitlines() if line.startswith("|")]
    expect(len(table) == 2 + 4 and len({line.count("|") for line in table}) == 1, f"not a table: {got.stdout}")
    expect("(8 of keys), bf16, causal, zigzag" in got.stdout and "| 1 000 000 | 1024 | backward |" in got.stdout, got.stdout)
    expect("from " in table[-1] and "yes" in table[2], f"hides: {got.stdout}")
    begin = time.monotonic()
    expect_code(0, plan("--tokens", "100000000", "--ranks", "1024", "--causal"), "100 M tokens over 1024 ranks")
    expect(time.monotonic() - begin < 10, "100 M tokens over 1024 ranks take long")


def test_memory():
    expect_code(0, plan(*BASE, "--ranks", "1", "64", "--memory-gib", "16"), "one of two fits", "does not fit")
    expect_code(1, plan(*BASE, "--ranks", "1", "2", "--memory-gib", "16"), "none fits", "none of these fits in 16 GiB")
    expect("does not fit" not in plan(*BASE, "--ranks", "1").stdout, "memory that was not asked for does not fit")


def test_refused():
    """Exit code 2, a short message that names what was wrong, and nothing on stdout."""
    good = ["--tokens", "1000", "--ranks", "4"]
    for arguments, words in [
        ([], ["--tokens"]),
        (["--tokens", "1000"], ["--ranks"]),
        (["--tokens", "-5", "--ranks", "4"], ["--tokens", '"-5"']),
        (["--tokens", "0", "--ranks", "4"], ["--tokens", "between 1"]),
        (["--tokens", "1e6", "--ranks", "4"], ["--tokens", '"1e6"']),
        (["--tokens", "1000", "--ranks", "0"], ["--ranks", "between 1"]),
        (["--tokens", "1000", "--ranks", "5000"], ["--ranks", "4096"]),
        ([*good, "--heads", "8", "--kv-heads", "3"], ["kv_heads", "divide heads"]),
        ([*good, "--heads", "8", "--kv-heads", "16"], ["kv_heads", "between 1 and 8"]),
        ([*good, "--head-dim", "300"], ["--head-dim", "256"]),
        ([*good, "--link-gbs", "0"], ["--link-gbs", "more than 0"]),
        ([*good, "--link-gbs", "-1"], ["--link-gbs", "more than 0"]),
        ([*good, "--link-gbs", "nan"], ["--link-gbs", "finite"]),
        ([*good, "--tflops", "inf"], ["--tflops", "finite"]),
        ([*good, "--memory-gib", "-2"], ["--memory-gib", "more than 0"]),
        ([*good, "--dtype", "f64"], ["--dtype", "f64"]),
        ([*good, "--balance", "even"], ["--balance", "even"]),
        ([*good, "--out", "/dev/null"], ["/dev/null"]),
        ([*good, "--out", "one.html"], ["--out", "two values of --ranks"]),
        (["--tokens", "1000000000", "--ranks", "4", "--heads", "1000000000"], ["63 bits"]),
    ]:
        got = plan(*arguments)
        name = f"plan ring {' '.join(arguments)}: exit code {got.returncode}, {got.stderr!r}"
        expect(got.returncode == 2 and not got.stdout, name)
        expect(all(word in got.stderr for word in words) and len(got.stderr) < 300, name)
    expect("1 nothing that was asked for fits" in plan("--help").stdout, "plan ring --help")


def test_page(folder):
    page = os.path.join(folder, "plan.html")
    got = plan("--tokens", "100000", "1000000", "--ranks", "1", "2", "8", "--causal", "--memory-gib", "80", "--out", page)
    expect_code(0, got, "plan --out", page)
    text = read(page).decode()
    expect(text.count("<svg class=\"fig\"") == 6, f"{text.count('<svg class=')} figures of 6")
    for word in ("Bytes that a rank sends", "Memory of a rank", "1 000 000 tokens", "what a rank has", "causal"):
        expect(word in text, f"{word} is not on the page")
    expect("nan" not in text and "inf" not in text and "<script" not in text, "no numbers, or a script, on the page")


def test_documentation():
    """The page quotes a command and its table."""
    page = os.path.join(os.path.dirname(__file__), "..", "annulus", "ring_attention", "ring_attention.md")
    (command, table), = re.findall(r"^```console\nannulus plan ring (.*)\n```\n\n((?:\|.*\n)+)", read(page).decode(), re.M)
    printed = plan(*command.split()).stdout
    expect(table == "".join(re.findall(r"^\|.*\n", printed, re.M)), f"{page} should have\n{printed}")


test_figures()
test_table()
test_documentation()
test_memory()
test_refused()
with tempfile.TemporaryDirectory() as temporary:
    test_page(temporary)
finish()
