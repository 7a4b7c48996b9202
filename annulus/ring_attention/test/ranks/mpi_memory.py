"""Memory of a rank falls as 1 / P: mpi_memory.py PROGRAM. The same sequence over 1, 2, 4 and 8 processes, each of which says by how
much its resident memory grew; the largest times P must be within a tenth of what one process took. Returns 77 without mpirun.
"""

import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

TOKENS = 1 << 18
NEEDED = 5 << 30  # bytes, with room for what else runs


def peak(program, ranks):
    """Returns the largest of the ranks, in bytes."""
    command = ["mpirun", "--oversubscribe", "--bind-to", "none", *(["--allow-run-as-root"] if os.geteuid() == 0 else []),
               "-n", str(ranks), program]
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([*command, folder, str(TOKENS)], check=True, timeout=120, stdin=subprocess.DEVNULL)
        said = [int(path.read_text()) for path in pathlib.Path(folder).iterdir()]
    assert len(said) == ranks, said
    return max(said)


def main():
    if not shutil.which("mpirun"):
        print("skipped: no mpirun (openmpi-bin)")
        return 77
    available = next(int(line.split()[1]) << 10 for line in open("/proc/meminfo") if line.startswith("MemAvailable:"))
    if available < NEEDED:
        print(f"skipped: {available >> 20} MiB of memory are free, of {NEEDED >> 20} that this needs")
        return 77
    one = peak(sys.argv[1], 1)
    print(f"1 process: {one / 2**20:.0f} MiB")
    failed = 0
    for ranks in (2, 4, 8):
        most = peak(sys.argv[1], ranks)
        print(f"{ranks} processes: {most / 2**20:.0f} MiB at most, {most * ranks / one:.3f} of a share")
        failed += abs(most * ranks / one - 1) > 0.1
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
