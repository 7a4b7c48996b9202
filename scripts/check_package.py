"""What a C++ project gets: check_package.py BUILD_FOLDER PREFIX.

Installs the build, moves the installation to PREFIX, and looks at it as a stranger would:
  headers      those that annulus.h leads to and no other; each compiles alone, without a warning; every field of every
               options struct can be named in an initialiser
  static       the examples by find_package, and by pkg-config
  shared       the examples by add_subdirectory, which builds the library and nothing else; then that library installed,
               what it exports, and the example by find_package and by pkg-config
"""

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
PROGRAMS = ("consumer", "lrpe_cosine", "ring_rnn")
JOBS = int(os.environ.get("JOBS") or os.cpu_count())
# What only tests, benchmarks, the command or Python need. No library project should even look for it.
UNASKED = re.compile(r"^(GTest|fmt|nlohmann_json|CLI11|XXHASH|BLAS|CBLAS|MPI|NCCL|_?Python)\w*:", re.M)


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
    reached, ahead = set(), ["annulus/annulus.h"]
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
    lines = []
    structs = [s for code in headers.values() for s in re.findall(r"\bstruct (\w+Options)\b[^;{]*{(.*?)\n};", code, re.S)]
    for name, body in structs:
        for field in re.findall(r"\b(\w+)\s*(?==[^=]|;|{)", re.sub(r"=[^;]*", "=", body)):
            lines.append(f"[[maybe_unused]] const annulus::{name} o{len(lines)}{{.{field} = {{}}}};\n")
    check(lines, "no header has options")
    source = WORK / "options.cpp"
    source.write_text('#include "annulus/annulus.h"\n' + "".join(lines))
    for compiler in compilers:
        run(compiler, *WARNINGS, f"-I{include}", "-fsyntax-only", source)
    return len(structs), len(lines)


def consumer(build, *options, programs=PROGRAMS, env=None):
    run("cmake", "-G", "Ninja", "-S", CONSUMER, "-B", build, "-DCMAKE_BUILD_TYPE=Release", *options)
    run("cmake", "--build", build, "-j", JOBS, "--target", *programs)
    for program in programs:
        run(build / program, env=env)


def by_pkg_config(prefix, *kind):
    """The example as a Makefile would build it."""
    folder = next(prefix.glob("lib*/**/pkgconfig"))
    env = {**os.environ, "PKG_CONFIG_PATH": str(folder), "LD_LIBRARY_PATH": str(folder.parent)}
    flags = run("pkg-config", *kind, "--cflags", "--libs", "annulus", env=env).split()
    check(run("pkg-config", "--modversion", "annulus", env=env).strip() == (ROOT / "VERSION").read_text().strip(), "wrong version")
    run("g++", *WARNINGS, CONSUMER / "main.cpp", "-o", WORK / "by_pkg_config", *flags)
    run(WORK / "by_pkg_config", env=env)


def check_exports(library, headers):
    """Returns how many names it exports: those of the public headers, all of them and no other."""
    words = set(re.findall(r"\w+", " ".join(headers.values())))
    names = {line.split(maxsplit=2)[2] for line in run("nm", "-DC", "--defined-only", library).splitlines()}
    plain = {re.sub(r"\(.*|\[abi:.*", "", re.sub(r"^(typeinfo( name)?|vtable) for ", "", n)) for n in names}
    inside = {n for n in plain if not n.startswith("annulus::") or not set(re.findall(r"\w+", n)) <= words}
    check(not inside, f"{library.name} exports what no public header has: {sorted(inside)}")
    code = "\n".join(headers.values())
    promised = set(re.findall(r"\bANNULUS_API (?!__)[^;{(]*?\b(\w+)\(", code))
    promised |= {f"typeinfo for annulus::{error}" for error in ("InvalidArgument", "NotSupported", "DeviceError")}
    missing = promised - names - {n.rpartition("::")[2] for n in plain}
    check(not missing, f"{library.name} does not export {sorted(missing)}")
    return len(names)


def main():
    build, prefix = (pathlib.Path(p).resolve() for p in sys.argv[1:3])
    shutil.rmtree(WORK, ignore_errors=True)
    WORK.mkdir(parents=True)
    install(build, prefix)
    headers, compilers = check_headers(prefix / "include")
    structs, fields = check_options(prefix / "include", headers, compilers)
    consumer(WORK / "static", f"-DCMAKE_PREFIX_PATH={prefix}")
    by_pkg_config(prefix)
    by_pkg_config(prefix, "--static")
    run(prefix / "bin" / "annulus", "info")

    # A folder as deep as those of the other builds, and their flags: a compiler cache then has all of its objects.
    inside, shared = ROOT / "build" / "subdirectory", WORK / "shared"
    shutil.rmtree(inside, ignore_errors=True)
    consumer(inside, f"-DANNULUS_SOURCE={ROOT}", "-DBUILD_SHARED_LIBS=ON", "-DANNULUS_CUDA=OFF", "-DANNULUS_INSTALL=ON",
             "-DCMAKE_COMPILE_WARNING_AS_ERROR=ON")
    looked_for = UNASKED.findall((inside / "CMakeCache.txt").read_text())
    check(not looked_for, f"add_subdirectory looks for {sorted(set(looked_for))}")
    install(inside, shared)
    library = next(shared.glob("lib*/**/libannulus.so"))
    exported = check_exports(library, headers)
    dynamic = run("readelf", "-d", library)
    minor = ".".join((ROOT / "VERSION").read_text().split(".")[:2])
    check(f"[libannulus.so.{minor}]" in dynamic and "PATH" not in dynamic, f"soname or search path:\n{dynamic}")
    check({str(p.relative_to(shared / "include")) for p in (shared / "include").rglob("*.h")} == set(headers), "other headers")
    consumer(WORK / "of_shared", f"-DCMAKE_PREFIX_PATH={shared}", programs=("consumer",))
    by_pkg_config(shared)
    print(f"note: {len(headers)} headers alone ({', '.join(compilers)}), {fields} fields of {structs} options; static, shared "
          f"({exported} names), add_subdirectory, pkg-config")


main()
