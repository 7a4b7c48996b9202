"""What the tests of the command line share. A test is called as TEST ANNULUS [PART]."""
import os
import shutil
import signal
import subprocess
import sys
import time

ANNULUS = os.path.abspath(sys.argv[1])
SKIP = 77  # what CTest is told means "skipped"
EVIL = "</title></style><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"
FAULTS = []


def annulus(*arguments, timeout=300, **options):
    return subprocess.run([ANNULUS, *arguments], capture_output=True, text=True, timeout=timeout, **options)


def expect(truth, what):
    if not truth:
        FAULTS.append(what)
    return truth


def expect_code(code, got, what, *words):
    """The exit code, and words of what was printed."""
    said = got.stderr + got.stdout
    return expect(got.returncode == code and all(word in said for word in words),
                  f"{what}: exit code {got.returncode}, {got.stderr}")


def read(*path):
    with open(os.path.join(*path), "rb") as f:
        return f.read()


def write(data, *path):
    with open(os.path.join(*path), "wb") as f:
        f.write(data if isinstance(data, bytes) else data.encode())
    return os.path.join(*path)


def interrupted(arguments, ready, cwd=None):
    """Runs until ready() holds, sends Ctrl-C, and gives exit code, stdout and stderr."""
    process = subprocess.Popen([ANNULUS, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=cwd)
    deadline = time.monotonic() + 60
    while not ready() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err


def browse(page, title, folder):
    """The page as headless chromium has it; markup that came from a file must show as text."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if not chromium:
        print("skipped: no chromium on PATH")
        sys.exit(SKIP)
    image = os.path.join(folder, "page.png")
    common = [chromium, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
              f"--user-data-dir={folder}/profile"]
    try:
        dom = subprocess.run([*common, "--dump-dom", "file://" + page], capture_output=True, text=True, timeout=120).stdout
        subprocess.run([*common, f"--screenshot={image}", "--window-size=1280,3600", "file://" + page],
                       capture_output=True, timeout=120)
    except subprocess.TimeoutExpired:
        expect(False, "chromium did not answer within 120 s")
        return ""
    expect(f"<title>{title}</title>" in dom, "no page, or a script ran: " + dom[:200])
    for word in ("<script", "<img"):
        expect(word not in dom, f"{word} is an element of the page")
    expect("&lt;script&gt;" in dom, "the markup is not shown as text")
    expect(os.path.exists(image) and os.path.getsize(image) >= 10000, "the screenshot is empty")
    return dom


def finish():
    print(f"{len(FAULTS)} faults")
    for fault in FAULTS:
        print("FAULT", fault)
    sys.exit(1 if FAULTS else 0)
