#!/usr/bin/env python3
"""`annulus train ring-attractor` as a user meets it. Usage: cli_test.py ANNULUS command|browser

command  what it writes, Ctrl-C and --resume, and bad usage: exit codes and one clear message
browser  the page in headless chromium (skipped without chromium)
"""
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time

ANNULUS = os.path.abspath(sys.argv[1])
SKIP = 77  # what CTest is told means "skipped"
SMALL = ["--neurons", "16", "--batch", "4", "--length", "10", "--steps", "6", "--device", "cpu"]
EVIL = "</title></style><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"
PEER = {"name": EVIL, "T": 500, "mean": 0.5, "std": 0.4, "max": 3.0, "final": 0.7, "curve": [0.1, 0.4, 0.7]}


def train(*arguments, cwd=None):
    return subprocess.run([ANNULUS, "train", "ring-attractor", *arguments], capture_output=True, text=True,
                          timeout=300, cwd=cwd)


def read(*path):
    with open(os.path.join(*path), "rb") as f:
        return f.read()


def outputs(folder):
    """What a run leaves that does not hold a time."""
    return {f"{r}/{name}": read(folder, r, name) for r in ("seed", "default")
            for name in ("model.safetensors", "curve.csv")}


def test_command():
    faults = []
    folder = tempfile.mkdtemp()
    out = os.path.join(folder, "run")

    got = train(*SMALL, "--out", out)
    if got.returncode != 0:
        return [f"a small run: exit code {got.returncode}, {got.stderr}"]
    if len(got.stdout.splitlines()) != 8 or not got.stdout.startswith("| model |"):
        faults.append(f"the table: {got.stdout!r}")
    results = json.loads(read(out, "results.json"))
    if [r["recipe"]["name"] for r in results["recipes"]] != ["seed", "default"]:
        faults.append("results.json lacks a recipe")
    if b"</html>" not in read(out, "ring-attractor.html"):
        faults.append("no page")
    whole = outputs(out)

    # A run is not overwritten unasked, and a finished one can be evaluated again.
    got = train(*SMALL, "--out", out)
    if got.returncode != 2 or "--resume" not in got.stderr:
        faults.append(f"over a run: exit code {got.returncode}, {got.stderr}")
    if train("--out", out, "--resume", "--device", "cpu").returncode != 0 or outputs(out) != whole:
        faults.append("a finished run, resumed")
    got = train("--out", out, "--resume", "--steps", "7", "--device", "cpu")
    if got.returncode != 2 or "steps 6, not 7" not in got.stderr:
        faults.append(f"resumed with other steps: exit code {got.returncode}, {got.stderr}")

    # Ctrl-C in the middle: code 130, a message that says how to go on, and going on gives the bits of
    # a run that was never stopped.
    long = [*SMALL[:-4], "--steps", "3000", "--device", "cpu", "--recipe", "seed"]
    stopped, never = os.path.join(folder, "stopped"), os.path.join(folder, "never")
    process = subprocess.Popen([ANNULUS, "train", "ring-attractor", *long, "--out", stopped,
                                "--checkpoint-every", "1000000"], stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, text=True)
    deadline = time.time() + 60
    while not os.path.exists(os.path.join(stopped, "seed", "manifest.json")) and time.time() < deadline:
        time.sleep(0.01)
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=60)
    if process.returncode == 0:
        print("the run was over before Ctrl-C came")
    elif process.returncode != 130 or "--resume" not in stderr or stdout:
        faults.append(f"Ctrl-C: exit code {process.returncode}, {stderr!r}")
    elif os.path.exists(os.path.join(stopped, "results.json")):
        faults.append("Ctrl-C: there are results all the same")
    if train("--out", stopped, "--resume", "--device", "cpu").returncode != 0:
        faults.append("after Ctrl-C: not resumed")
    elif train(*long, "--out", never).returncode != 0:
        faults.append("the run that is never stopped")
    elif read(stopped, "seed", "model.safetensors") != read(never, "seed", "model.safetensors"):
        faults.append("after Ctrl-C: other weights")

    # A checkpoint that was damaged is refused, by name.
    damaged = os.path.join(folder, "damaged")
    shutil.copytree(out, damaged)
    name = next(f for f in os.listdir(os.path.join(damaged, "seed")) if f.startswith("checkpoint"))
    data = bytearray(read(damaged, "seed", name))
    data[len(data) // 2] ^= 1
    with open(os.path.join(damaged, "seed", name), "wb") as f:
        f.write(data)
    got = train("--out", damaged, "--resume", "--device", "cpu")
    if got.returncode != 2 or name not in got.stderr or "damaged" not in got.stderr:
        faults.append(f"a damaged checkpoint: exit code {got.returncode}, {got.stderr}")

    peer = os.path.join(folder, "peer.json")
    with open(peer, "w") as f:
        json.dump({**PEER, "means": 1}, f)
    with open(os.path.join(folder, "file"), "w") as f:
        f.write("in the way")
    for bad, word in (([], None), (["--neurons", "2"], "neurons"), (["--neurons", "many"], "--neurons"),
                      (["--neurons", "-5"], "neurons"), (["--actions", "1"], "actions"),
                      (["--batch", "0"], "batch"), (["--steps", "0"], "steps must be between 1"), (["--length", "0"], "length"),
                      (["--gain", "-1"], "gain"), (["--recipe", "best"], "--recipe"),
                      (["--encoding", "x"], "--encoding"), (["--device", "tpu"], "--device"),
                      (["--checkpoint-every", "0"], "--checkpoint-every"), (["--threads", "-1"], "--threads"),
                      (["--seed", "-1"], "--seed"), (["--peer", "/nonexistent.json"], "nonexistent"),
                      (["--peer", peer], "means"), (["--resume"], "--resume"),
                      (["--resume", "--overwrite"], "--overwrite"), (["--frobnicate"], "frobnicate"),
                      (["--out", os.path.join(folder, "file", "x")], "folder")):
        if not bad:
            got = subprocess.run([ANNULUS, "train"], capture_output=True, text=True, timeout=20)
        else:
            new = [] if "--out" in bad else ["--out", os.path.join(folder, "new")]
            got = train(*bad, *new, cwd=folder)
        if got.returncode != 2 or (word and word not in got.stderr + got.stdout):
            faults.append(f"{bad}: exit code {got.returncode}, {got.stderr}")
        if os.path.exists(os.path.join(folder, "new")):
            faults.append(f"{bad}: wrote something")
            shutil.rmtree(os.path.join(folder, "new"))
    if shutil.which("nvidia-smi") is None and train("--device", "cuda", "--out", out).returncode != 3:
        faults.append("--device cuda where there is none is not code 3")
    shutil.rmtree(folder)
    return faults


def test_browser():
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if not chromium:
        print("skipped: no chromium on PATH")
        sys.exit(SKIP)
    folder = tempfile.mkdtemp()
    peer, out = os.path.join(folder, "peer.json"), os.path.join(folder, "run")
    with open(peer, "w") as f:
        json.dump(PEER, f)
    got = train(*SMALL, "--out", out, "--peer", peer)
    if got.returncode != 0:
        return [f"exit code {got.returncode}, {got.stderr}"]
    page, image = os.path.join(out, "ring-attractor.html"), os.path.join(folder, "page.png")
    common = [chromium, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
              f"--user-data-dir={folder}/profile"]
    try:
        dom = subprocess.run([*common, "--dump-dom", "file://" + page], capture_output=True, text=True,
                             timeout=120).stdout
        subprocess.run([*common, f"--screenshot={image}", "--window-size=1280,3600", "file://" + page],
                       capture_output=True, timeout=120)
    except subprocess.TimeoutExpired:
        return ["chromium did not answer within 120 s"]
    faults = []
    if "<title>Ring attractor</title>" not in dom:
        faults.append("no page, or a script ran: " + dom[:200])
    for word in ("<script", "<img"):
        if word in dom:
            faults.append(f"{word} is an element of the page")
    if "&lt;script&gt;" not in dom:
        faults.append("the markup is not shown as text")
    if dom.count("<svg") < 14:
        faults.append(f"only {dom.count('<svg')} figures")
    if not os.path.exists(image) or os.path.getsize(image) < 10000:
        faults.append("the screenshot is empty")
    shutil.rmtree(folder, ignore_errors=True)
    return faults


faults = test_command() if sys.argv[2] == "command" else test_browser()
print(f"{len(faults)} faults")
for fault in faults:
    print("FAULT", fault)
sys.exit(1 if faults else 0)
