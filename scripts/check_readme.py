"""Runs what README.md shows: check_readme.py BUILD_FOLDER INSTALL_PREFIX [--update].

python, cpp + cmake, and sh blocks are run as a reader would run them; console blocks are whole-machine commands (make
test itself) and are not. The support table must be what `annulus info --markdown` prints; --update writes it.
"""

import os
import re
import subprocess
import sys
import tempfile

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
SUPPORT = re.compile(r"(<!-- support: annulus info --markdown -->\n)(.*?)(<!-- /support -->)", re.S)


def run(command, **options):
    done = subprocess.run(command, text=True, capture_output=True, stdin=subprocess.DEVNULL, timeout=300, **options)
    if done.returncode != 0:
        raise SystemExit(f"README: {command} gave {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def run_cpp(blocks, prefix, folder):
    """The cmake block is the project, the cpp block its main.cpp."""
    for language, name in (("cmake", "CMakeLists.txt"), ("cpp", "main.cpp")):
        (text,) = [text for found, text in blocks if found == language]
        with open(os.path.join(folder, name), "w") as file:
            file.write(text)
    build = os.path.join(folder, "build")
    run(["cmake", "-G", "Ninja", "-S", folder, "-B", build, f"-DCMAKE_PREFIX_PATH={prefix}"])
    run(["cmake", "--build", build])
    return run([os.path.join(build, "example")])


def main():
    update = "--update" in sys.argv
    build, prefix = (os.path.abspath(path) for path in sys.argv[1:3])
    path = os.path.join(ROOT, "README.md")
    with open(path) as file:
        readme = file.read()
    if readme.count("\n") >= 200:
        raise SystemExit("README: must stay under 200 lines")

    table = run([os.path.join(build, "bin", "annulus"), "info", "--markdown"])
    if SUPPORT.search(readme) is None:
        raise SystemExit("README: the markers of the support table are missing")
    fresh = SUPPORT.sub(lambda m: m[1] + table.strip() + "\n" + m[3], readme)
    if update:
        with open(path + ".new", "w") as file:
            file.write(fresh)
        os.replace(path + ".new", path)
    elif fresh != readme:
        raise SystemExit(f"README: the support table is old; scripts/check_readme.py --update writes:\n{table}")

    blocks = re.findall(r"^```(\w+)\n(.*?)^```$", readme, re.M | re.S)
    environment = dict(
        os.environ,
        PYTHONPATH=os.path.join(build, "python"),
        PATH=os.path.join(build, "bin") + os.pathsep + os.environ["PATH"],
    )
    counts = {}
    with tempfile.TemporaryDirectory() as folder:
        for language, text in blocks:
            if language == "python":
                output = run([sys.executable, "-c", text], env=environment, cwd=folder)
            elif language == "cpp":
                output = run_cpp(blocks, prefix, folder)
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
    print(f"note: {sum(counts.values())} snippets ran, support table is up to date")


main()
