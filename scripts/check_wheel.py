"""check_wheel.py WHEEL: installs it into an environment that has torch and nothing else, and uses it there.

The environment is made beside the wheel, without a network: torch and what torch requires are links. There is no
compiler on the path, no library path and no numpy; the README's PyTorch examples must run, and nothing may be loaded
for them but what torch had loaded before and what the wheel brought. A wheel with CUDA also runs an operator and its
backward on the GPU, where there is one.
"""

import importlib.metadata
import os
import pathlib
import platform
import re
import subprocess
import sys

from packaging.requirements import Requirement

ROOT = pathlib.Path(__file__).resolve().parents[1]
# libcuda and libnvidia-* are the driver's, opened where there is one.
LOADED = """
import re, sys
def loaded():
    files = re.findall(r" (/.*)", open("/proc/self/maps").read())
    return {p for p in files if ".so" in p and not re.search(r"/lib(cuda\\.so|nvidia-)", p)}
import torch
torch.relu(torch.ones(1 << 20))
import doctest, json, typing, pickle  # of Python, which brings libraries of its own
before = loaded()
"""
FOREIGN = """
strange = {p for p in loaded() - before if not p.startswith(sys.argv[1]) and "/lib-dynload/" not in p}
if strange:
    raise SystemExit(f"loads what the wheel does not have: {sorted(strange)}")
"""
# Prints whether it ran, and on what.
ON_CUDA = """
import torch, annulus
if not torch.cuda.is_available():
    raise SystemExit(print("cuda: nothing was run, torch sees no GPU here"))
def gradients(device):
    x = torch.linspace(-1, 1, 2 * 3 * 16 * 8, device=device).reshape(2, 3, 16, 8).requires_grad_()
    theta = torch.linspace(0.1, 1, 24, device=device).reshape(3, 8).requires_grad_()
    y = annulus.lrpe_cosine(x, theta, (16,))
    (y * y * torch.arange(16., device=device)).sum().backward()
    return [t.detach().cpu() for t in (y, x.grad, theta.grad)]
for got, expected in zip(gradients("cuda"), gradients("cpu")):
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-3)
print("cuda: lrpe_cosine and its backward ran on", torch.cuda.get_device_name())
"""


def run(*command, **options):
    done = subprocess.run([str(c) for c in command], text=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, **options)
    if done.returncode != 0:
        raise SystemExit(f"wheel: {' '.join(map(str, command))[:2000]} gave {done.returncode}\n{done.stdout}")
    return done.stdout


def link_with_requirements(name, site, done):
    """A distribution, and those it requires here, as links to where they are installed."""
    if name in done:
        return
    done.add(name)
    try:
        found = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return  # then torch here does without it
    for top in {file.parts[0] for file in found.files or ()} - {"..", "__pycache__"}:
        if not (site / top).exists():
            (site / top).symlink_to(found.locate_file(top).resolve())
    for line in found.requires or ():
        requirement = Requirement(line)
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            link_with_requirements(requirement.name, site, done)


def main():
    wheel = pathlib.Path(sys.argv[1]).resolve()
    version = (ROOT / "VERSION").read_text().strip()
    tag = rf"annulus-{re.escape(version)}(\+cu\d+)?-cp310-abi3-manylinux_2_\d+_{platform.machine()}\.whl"
    if not re.fullmatch(tag, wheel.name):
        raise SystemExit(f"wheel: {wheel.name} is not named as {tag}")
    alone = wheel.parent / "alone"
    base = getattr(sys, "_base_executable", sys.executable)
    run(base, "-m", "venv", "--clear", "--without-pip", alone)
    python = alone / "bin" / "python"
    site = pathlib.Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    link_with_requirements("torch", site, set())
    # The wheel has a folder of its own, so that the tests beside it can have it too.
    own = alone / "lib" / "annulus-site"
    run(sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-index", "--no-deps", "--no-compile",
        "--target", own, wheel)
    (site / "annulus.pth").write_text(f"{own}\n")

    exported = run("nm", "-D", "--defined-only", own / "annulus" / "_ops.so").strip()
    if exported:
        raise SystemExit(f"wheel: the module exports\n{exported}")
    environment = {"HOME": str(alone), "PATH": str(alone / "bin"), "OMP_NUM_THREADS": "2"}
    readme = (ROOT / "README.md").read_text()
    examples = re.findall(r"^```python\n(.*?)^```$", readme, re.M | re.S)
    check_version = "import annulus; assert annulus.__version__ == sys.argv[2].split('+')[0], annulus.__version__\n"
    for example in examples:
        print(run(python, "-W", "ignore", "-I", "-c", LOADED + check_version + example + FOREIGN, own, version, env=environment, cwd=alone), end="")
    if "+cu" in wheel.name:
        print(run(python, "-W", "ignore", "-I", "-c", ON_CUDA, env=environment, cwd=alone), end="")
    size = wheel.stat().st_size / 1e6
    libraries = sorted(p.name for p in own.glob("annulus.libs/*"))
    print(f"{wheel.name}: {size:.2f} MB, brings {', '.join(libraries) or 'no library'}; {len(examples)} examples ran beside torch alone")


main()
