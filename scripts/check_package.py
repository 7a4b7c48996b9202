"""What a C++ project gets: check_package.py BUILD_FOLDER PREFIX.

Installs the build, moves the installation to PREFIX, and looks at it as a stranger would:
  headers      those that annulus.h (and dist/mpi.h, dist/nccl.h) lead to and no other; each compiles alone, without a warning; the fields of
               every options struct can be named in one initialiser
  static       the examples by find_package (under mpirun, where there is MPI), and by pkg-config; by add_subdirectory without a build type (configured only): kernels
               are optimised, and nothing of ours is on the programs' link line
  shared       the examples by add_subdirectory, which builds the library and nothing else; then that library installed,
               what it exports, and the example by find_package and by pkg-config
"""

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

ROOT = pathlib.Path(__file__).resolve().parents[1]
CONSUMER = ROOT / "examples" / "consumer"
WORK = ROOT / "build" / "package"
WARNINGS = ["-std=c++20", "-Wall", "-Wextra", "-Wpedantic", "-Wshadow", "-Werror"]
PROGRAMS = ("consumer", "lrpe_cosine", "ring_attention", "ring_rnn")
JOBS = int(os.environ.get("JOBS") or os.cpu_count())
# Headers of libraries that stand beside, where a static build has them.
BESIDE = {"annulus/dist/mpi.h", "annulus/dist/nccl.h"}
# What only tests, benchmarks, the command or Python need. No library project should even look for it.
UNASKED = re.compile(r"^(GTest|fmt|nlohmann_json|CLI11|BLAS|CBLAS|MPI|NCCL|_?Python)\w*:", re.M)


def run(*command, **options):
    done = subprocess.run([str(c) for c in command], text=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, **options)
    if done.returncode != 0:
        raise SystemExit(f"package: {' '.join(map(str, command))} gave {done.returncode}\n{done.stdout}")
    return done.stdout


def check(holds, message):
    if not holds:
        raise SystemExit(f"package: {message}")


def install(build, prefix):
    """Moved after it was made: whatever names its first place breaks below."""
    shutil.rmtree(prefix, ignore_errors=True)
    made = WORK / "made"
    run("cmake", "--install", build, "--prefix", made)
    prefix.parent.mkdir(parents=True, exist_ok=True)
    made.rename(prefix)


def without_comments(text):
    return re.sub(r"//.*", "", text)


def check_headers(include):
    """Returns their code by name."""
    headers = {str(p.relative_to(include)): without_comments(p.read_text()) for p in include.rglob("*") if p.is_file()}
    reached, ahead = set(), ["annulus/annulus.h", *(BESIDE & set(headers))]
    while ahead:
        name = ahead.pop()
        check(name in headers, f"a public header includes {name}, which is not installed")
        if name not in reached:
            reached.add(name)
            ahead += re.findall(r'#include "([^"]+)"', headers[name])
    check(reached == set(headers), f"installed, but not public: {sorted(set(headers) - reached)}")

    compilers = [c for c in ("g++", "clang++") if shutil.which(c)]
    with ThreadPoolExecutor(JOBS) as pool:
        for compiler in compilers:
            # By a file that includes it: a header as the main file has a warning of its own, for #pragma once.
            list(pool.map(lambda name: run(compiler, *WARNINGS, f"-I{include}", "-include", name, "-fsyntax-only", "-xc++",
                                           "/dev/null"), sorted(headers)))
    return headers, compilers


def check_options(include, headers, compilers):
    """Returns how many structs and fields there were."""
    lines, fields = [], 0
    structs = [s for code in headers.values() for s in re.findall(r"\bstruct (\w+Options)\b[^;{]*{(.*?)\n};", code, re.S)]
    for name, body in structs:
        names = re.findall(r"\b(\w+)\s*(?==[^=]|;|{)", re.sub(r"=[^;]*", "=", body))
        values = ", ".join(f".{field} = {{}}" for field in names)
        lines.append(f"[[maybe_unused]] const annulus::{name} o{len(lines)}{{{values}}};\n")
        fields += len(names)
    check(fields, "no header has options")
    source = WORK / "options.cpp"
    source.write_text('#include "annulus/annulus.h"\n' + "".join(lines))
    for compiler in compilers:
        run(compiler, *WARNINGS, f"-I{include}", "-fsyntax-only", source)
    return len(structs), fields


def consumer(build, *options, programs=PROGRAMS, env=None):
    run("cmake", "-G", "Ninja", "-S", CONSUMER, "-B", build, "-DCMAKE_BUILD_TYPE=Release", *options)
    run("cmake", "--build", build, "-j", JOBS, "--target", *programs)
    for program in programs:
        run(build / program, env=env)


def check_mpi(prefix):
    """The example whose ranks are processes, as a user starts it. Returns how many there were."""
    mpirun = shutil.which("mpirun")
    if mpirun is None or not any(prefix.glob("lib*/**/annulusMpiTargets.cmake")):
        return 0
    consumer(WORK / "mpi", f"-DCMAKE_PREFIX_PATH={prefix}", "-DWITH_MPI=ON", programs=("ring_attention_mpi",))
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    said = run(mpirun, *root, "-n", "4", "--oversubscribe", WORK / "mpi" / "ring_attention_mpi")
    check(said.count("as it should be") == 4, f"four ranks under mpirun say\n{said}")
    return 4


def by_pkg_config(prefix, *kind):
    """The example as a Makefile would build it."""
    folder = next(prefix.glob("lib*/**/pkgconfig"))
    env = {**os.environ, "PKG_CONFIG_PATH": str(folder), "LD_LIBRARY_PATH": str(folder.parent)}
    flags = run("pkg-config", *kind, "--cflags", "--libs", "annulus", env=env).split()
    check(run("pkg-config", "--modversion", "annulus", env=env).strip() == (ROOT / "VERSION").read_text().strip(), "wrong version")
    run("g++", *WARNINGS, CONSUMER / "main.cpp", "-o", WORK / "by_pkg_config", *flags)
    run(WORK / "by_pkg_config", env=env)


def promised(code):
    """What ANNULUS_API marks in a header: functions defined in the library, those it may hold a copy of, and classes."""
    defined, inline, classes = set(), set(), set()
    scopes, statement = [], ""  # a scope is its name and whether its functions are exported; None is code
    for text, end in re.findall(r"([^{};]*)([{};])", re.sub(r"^#.*", "", code, flags=re.M)):
        statement += text
        if statement.count("(") != statement.count(")"):  # within a default argument
            statement += end
            continue
        inside = None not in scopes
        marked = "ANNULUS_API" in statement or any(s and s[1] for s in scopes)
        opened = re.search(r"(?<!enum )\b(namespace|class|struct)\s+(?:ANNULUS_API\s+)?([\w:]+)[^()=]*$", statement) if end == "{" else None
        function = re.search(r"(operator\W+?|~?\w+)\s*\(", statement)
        if inside and marked and function and not opened and "template" not in statement:
            name = "::".join([s[0] for s in scopes] + [function[1]])
            (defined if end == ";" and not re.search(r"=\s*(0|default|delete)\s*$", statement) else inline).add(name)
        if end == "{":
            scopes.append((opened[2], opened[1] != "namespace" and marked) if inside and opened else None)
            if scopes[-1] and scopes[-1][1]:
                classes.add("::".join(s[0] for s in scopes))
        elif end == "}":
            scopes.pop()
        statement = ""
    return defined, inline, classes


def check_exports(library, headers):
    """Returns how many names it exports: those of the public headers, all of them and no other."""
    names = {line.split(maxsplit=2)[2] for line in run("nm", "-DC", "--defined-only", library).splitlines()}
    plain = {re.sub(r"(\[abi:\w+\])?\(.*", "", name) for name in names}
    defined, inline, classes = (set().union(*sets) for sets in zip(*map(promised, headers.values())))
    tables = {f"{table} for {name}" for name in classes for table in ("typeinfo", "typeinfo name", "vtable")}
    special = {name + "::" + which.format(name.rpartition("::")[2]) for name in classes for which in ("{}", "~{}", "operator=")}
    inside = plain - defined - inline - tables - special
    check(not inside, f"{library.name} exports what no public header has: {sorted(inside)}")
    thrown = {f"typeinfo for annulus::{error}" for error in ("InvalidArgument", "NotSupported", "DeviceError")}
    missing = (defined | thrown) - plain
    check(not missing, f"{library.name} does not export {sorted(missing)}")
    return len(names)


def check_static_inside(build):
    """add_subdirectory as it comes: static, CUDA where it is found, no build type. Configured, not built."""
    env = {k: v for k, v in os.environ.items() if k not in ("CXXFLAGS", "LDFLAGS", "CMAKE_BUILD_TYPE")}
    run("cmake", "-G", "Ninja", "-S", CONSUMER, "-B", build, f"-DANNULUS_SOURCE={ROOT}", "-DCMAKE_EXPORT_COMPILE_COMMANDS=ON", env=env)
    check_unasked(build)
    commands = {c["file"]: c["command"].split() for c in json.loads((build / "compile_commands.json").read_text())}
    kernels = {f: c for f, c in commands.items() if re.search(r"/annulus/(\w+/)?(cpu|cuda)/\w+\.(cpp|cu)$", f)}
    slow = [f for f, c in kernels.items() if "-O3" not in c]
    check(kernels and not slow, f"compiled without optimisation where the project has no build type: {slow}")
    link = run("ninja", "-C", build, "-t", "commands", "consumer").splitlines()[-1]
    check("libannulus.a" in link, f"not the command that links the static library: {link}")
    check(not re.search(r"-z,|--as-needed|-O3", link) and "-O3" not in commands[str(CONSUMER / "main.cpp")],
          f"options of ours on a program of another project: {link}")
    return len(kernels)


def check_unasked(build):
    looked_for = UNASKED.findall((build / "CMakeCache.txt").read_text())
    check(not looked_for, f"add_subdirectory looks for {sorted(set(looked_for))}")


def main():
    build, prefix = (pathlib.Path(p).resolve() for p in sys.argv[1:3])
    shutil.rmtree(WORK, ignore_errors=True)
    WORK.mkdir(parents=True)
    install(build, prefix)
    headers, compilers = check_headers(prefix / "include")
    structs, fields = check_options(prefix / "include", headers, compilers)
    consumer(WORK / "static", f"-DCMAKE_PREFIX_PATH={prefix}")
    processes = check_mpi(prefix)
    by_pkg_config(prefix)
    by_pkg_config(prefix, "--static")
    run(prefix / "bin" / "annulus", "info")

    kernels = check_static_inside(WORK / "inside")

    # A folder as deep as those of the other builds, and their flags: a compiler cache then has all of its objects.
    inside, shared = ROOT / "build" / "subdirectory", WORK / "shared"
    shutil.rmtree(inside, ignore_errors=True)
    consumer(inside, f"-DANNULUS_SOURCE={ROOT}", "-DBUILD_SHARED_LIBS=ON", "-DANNULUS_CUDA=OFF", "-DANNULUS_INSTALL=ON",
             "-DCMAKE_COMPILE_WARNING_AS_ERROR=ON")
    check_unasked(inside)
    install(inside, shared)
    library = next(shared.glob("lib*/**/libannulus.so"))
    exported = check_exports(library, headers)
    dynamic = run("readelf", "-d", library)
    minor = ".".join((ROOT / "VERSION").read_text().split(".")[:2])
    check(f"[libannulus.so.{minor}]" in dynamic and "PATH" not in dynamic, f"soname or search path:\n{dynamic}")
    check({str(p.relative_to(shared / "include")) for p in (shared / "include").rglob("*.h")} == set(headers) - BESIDE, "other headers")
    consumer(WORK / "of_shared", f"-DCMAKE_PREFIX_PATH={shared}", programs=("consumer",))
    by_pkg_config(shared)
    print(f"note: {len(headers)} headers alone ({', '.join(compilers)}), {fields} fields of {structs} options; static, shared "
          f"({exported} names), add_subdirectory ({kernels} kernels at -O3), pkg-config; {processes} ranks under mpirun")


main()
