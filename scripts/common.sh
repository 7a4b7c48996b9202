# Sourced by the scripts beside it: the repository root, the Python to use, the number of jobs.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
# Stamps of files should not depend on the user's locale, nor messages we parse.
export LC_ALL=C.UTF-8
jobs=${JOBS:-$(nproc)}
if [ -x .venv/bin/python ]; then
  python=$root/.venv/bin/python
else
  python=$(command -v python3 || true)
fi
have_nvcc() { command -v nvcc >/dev/null || [ -x "${CUDA_HOME:-/usr/local/cuda}/bin/nvcc" ]; }
say() { printf '== %s\n' "$*"; }
