# Sourced by the scripts beside it: the repository root, the Python to use, the number of jobs.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
# Stamps of files should not depend on the user's locale, nor messages we parse.
export LC_ALL=C.UTF-8
jobs=${JOBS:-$(nproc)}
# Python keeps what it compiles, whatever a container's image says: importing torch takes 7 seconds without, 3 with it,
# and the tests start a hundred interpreters. Not beside the sources.
unset PYTHONDONTWRITEBYTECODE
export PYTHONPYCACHEPREFIX=$root/build/pycache
if [ -x .venv/bin/python ]; then
  python=$root/.venv/bin/python
else
  python=$(command -v python3 || true)
fi
# A compiler cache where there is one. CI builds the library five times and most of three of them alike: paths of
# this folder are hashed from its root, and the folder a compiler runs in is not, so that build/cpu, build/cuda
# and build/wheel share objects. What a user has set stays.
if command -v ccache >/dev/null; then
  export CMAKE_CXX_COMPILER_LAUNCHER=${CMAKE_CXX_COMPILER_LAUNCHER-ccache}
  export CMAKE_CUDA_COMPILER_LAUNCHER=${CMAKE_CUDA_COMPILER_LAUNCHER-ccache}
  export CCACHE_BASEDIR=${CCACHE_BASEDIR-$root} CCACHE_NOHASHDIR=${CCACHE_NOHASHDIR-1}
fi
# How make test compiles CUDA code, of which nothing runs without a GPU: cuda-check, whether it compiles, in a third of
# the time. `make release-check` says cuda, as `make cuda`, `make wheel` and scripts/gpu build it.
cuda_preset=${CUDA_PRESET:-cuda-check}
have_nvcc() { command -v nvcc >/dev/null || [ -x "${CUDA_HOME:-/usr/local/cuda}/bin/nvcc" ]; }
say() { printf '== %s\n' "$*"; }
