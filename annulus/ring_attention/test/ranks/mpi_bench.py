"""`annulus bench --transport mpi` as a user calls it: mpi_bench.py ANNULUS. Two processes measure the quick rows of two ranks; then
one of them is killed, and the other must end by itself. Returns 77 where there is no mpirun.
"""

import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

from mpi_faults import read, wait_for

HARD_S = 60.0
MPIRUN = ["mpirun", "--oversubscribe", "--bind-to", "none", *(["--allow-run-as-root"] if os.geteuid() == 0 else [])]
# With the process id and the exit code of every rank beside each other: mpirun may return 0 whatever its ranks did.
WRAPPER = '"$0" "$@" & echo $! >pid.$OMPI_COMM_WORLD_RANK; wait $!; echo $? >exit.$OMPI_COMM_WORLD_RANK'


def bench(annulus, *options):
    return [annulus, "bench", "ring-attention", "--transport", "mpi", "--device", "cpu", "--save", "rows.jsonl", *options]


def rows_of_two(annulus, folder):
    """Every row of two ranks once, right, from one process's mouth. Returns those that are faster than their floor."""
    command = [*MPIRUN, "-n", "2", "-x", "OMP_NUM_THREADS=1", *bench(annulus, "--filter", "/f32", "--reps", "1", "--format", "json")]
    got = subprocess.run(command, capture_output=True, text=True, timeout=HARD_S, cwd=folder)
    assert got.returncode == 0, got.stderr
    rows = [json.loads(line) for line in read(folder / "rows.jsonl").splitlines()]
    assert [printed["record"] for printed in json.loads(got.stdout)["benchmarks"]] == rows, got.stdout
    names = sorted((r["row"], r["impl"]) for r in rows)
    assert names == sorted([(f"{kind}-n1024-P2", "annulus-mpi") for kind in ("Standard", "Distributed", "Hilbert-window", "BlockSparse", "Standard-fwdbwd")]
                           + [("Standard-fwdbwd-n1024-P2", "annulus-deterministic-mpi")]), names
    for r in rows:
        assert r["status"] == "ok" and r["params"]["transport"] == "mpi" and r["params"]["ranks"] == 2, r
        assert 0 < r["error"]["value"] < 3e-6 and r["time_ms"]["median"] > 0, r
    return [r for r in rows if r["time_ms"]["median"] < 0.9 * r["floor_ms"]]


def one_dies(annulus, folder):
    """The other has it from nobody, waits for its deadline, and keeps the rows that there are."""
    command = [*MPIRUN, "--enable-recovery", "-n", "2", "sh", "-c", WRAPPER, *bench(annulus, "--deadline", "1")]
    with (folder / "output").open("w") as output:
        ring = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, cwd=folder)
        assert wait_for(lambda: read(folder / "rows.jsonl.partial"), HARD_S / 2), read(folder / "output")
        os.kill(int(read(folder / "pid.1")), 9)
        ring.wait(HARD_S / 2)
    said = read(folder / "output")
    assert read(folder / "exit.0").strip() == "1" and "rank 1 is lost" in said, said
    assert read(folder / "rows.jsonl.partial") and not read(folder / "rows.jsonl"), said


def main():
    annulus = os.path.abspath(sys.argv[1])
    alone = subprocess.run([annulus, "bench", "ring-attention", "--transport", "mpi", "--list"], capture_output=True, text=True,
                           timeout=HARD_S)
    if "no MPI" in alone.stderr:
        assert alone.returncode == 3 and not alone.stdout, alone
        print("this build has no MPI, and the command says so")
        return 0
    if not shutil.which("mpirun"):
        print("skipped: no mpirun (openmpi-bin)")
        return 77
    for again in range(3):
        with tempfile.TemporaryDirectory() as folder:
            faster = rows_of_two(annulus, pathlib.Path(folder))
        # The floor is what both can do together, not one's core alone; of three measurements one is not disturbed.
        if not faster:
            break
        assert again < 2, faster
    with tempfile.TemporaryDirectory() as folder:
        one_dies(annulus, pathlib.Path(folder))
    print("rows over two processes, and one that is left alone")
    return 0


if __name__ == "__main__":
    sys.exit(main())
