"""Runs what README.md shows: check_readme.py BUILD_FOLDER INSTALL_PREFIX CUDA_BUILD_FOLDER [--update].

python, cpp + cmake, and sh blocks are run as a reader would run them; console blocks are whole-machine commands (make
test itself) and are not. The support table must be what `annulus info --markdown` of the CUDA build prints; --update
writes it. Without a CUDA build (no nvcc) the table is compared but for its CUDA column, and the note says so.
"""

import os
import pathlib
import re
import subprocess
import sys
import tempfile

README = pathlib.Path(__file__).resolve().parents[1] / "README.md"
SUPPORT = re.compile(r"(<!-- support: annulus info --markdown -->\n)(.*?)(<!-- /support -->)", re.S)


def run(command, **options):
    done = subprocess.run(command, text=True, capture_output=True, stdin=subprocess.DEVNULL, timeout=300, **options)
    if done.returncode != 0:
        raise SystemExit(f"README: {command} gave {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def run_cpp(project, program, prefix, folder):
    """The cmake block is the project, a cpp block its main.cpp."""
    (folder / "CMakeLists.txt").write_text(project)
    (folder / "main.cpp").write_text(program)
    run(["cmake", "-G", "Ninja", "-S", folder, "-B", folder / "build", f"-DCMAKE_PREFIX_PATH={prefix}"])
    run(["cmake", "--build", folder / "build"])
    return run([folder / "build" / "example"])


def without_cuda(table):
    rows = [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in table.strip().splitlines()]
    column = rows[0].index("CUDA")
    return [row[:column] + row[column + 1 :] for row in rows]


def check_support(readme, build, cuda_build, update):
    """Returns what was compared."""
    found = SUPPORT.search(readme)
    if found is None:
        raise SystemExit("README: the markers of the support table are missing")
    cuda = cuda_build / "bin" / "annulus"
    whole = cuda.exists()
    table = run([cuda if whole else build / "bin" / "annulus", "info", "--markdown"])
    if update:
        if not whole:
            raise SystemExit(f"README: the table is written from a CUDA build, and {cuda} is not there")
        new = README.with_suffix(".md.new")
        new.write_text(SUPPORT.sub(lambda m: m[1] + table.strip() + "\n" + m[3], readme))
        new.replace(README)
        return "support table written"
    same = found[2].strip() == table.strip() if whole else without_cuda(found[2]) == without_cuda(table)
    if not same:
        raise SystemExit(f"README: the support table is old (--update writes it); it should be\n{table}")
    return "support table is up to date" + ("" if whole else " but for the CUDA column, which needs a CUDA build")


def main():
    update = "--update" in sys.argv
    build, prefix, cuda_build = (pathlib.Path(path).resolve() for path in sys.argv[1:4])
    readme = README.read_text()
    if readme.count("\n") >= 200:
        raise SystemExit("README: must stay under 200 lines")
    compared = check_support(readme, build, cuda_build, update)
    if update:
        return

    blocks = re.findall(r"^```(\w+)\n(.*?)^```$", readme, re.M | re.S)
    (project,) = [text for language, text in blocks if language == "cmake"]
    environment = dict(os.environ, PYTHONPATH=f"{build}/python", PATH=f"{build}/bin:{os.environ['PATH']}")
    counts = {}
    with tempfile.TemporaryDirectory() as folder:
        for language, text in blocks:
            if language == "python":
                output = run([sys.executable, "-c", text], env=environment, cwd=folder)
            elif language == "cpp":
                output = run_cpp(project, text, prefix, pathlib.Path(folder))
            elif language == "sh":
                output = run(["bash", "-euo", "pipefail", "-c", text], env=environment, cwd=folder)
            elif language in ("cmake", "console", "text"):
                continue
            else:
                raise SystemExit(f"README: no way to run a {language} block")
            counts[language] = counts.get(language, 0) + 1
            print(f"--- {language} block ran:\n{output.rstrip()}")
    if set(counts) != {"python", "cpp", "sh"}:
        raise SystemExit(f"README: needs python, cpp and sh examples but has {sorted(counts)}")
    print(f"note: {sum(counts.values())} snippets ran, {compared}")


main()
