"""The tests that only a GPU can run, in several processes, by the Python that runs this script: make test-gpu.

Nothing is installed: torch, triton and pytest are needed, and a test that needs more is skipped with its reason.
Compiling kernels takes most of the time, so that the tests are dealt out to as many processes as there are cores, and
all of them share the GPU.

    python3 .ci/test_gpu.py [--processes 12] [--seconds 360] [tests/lm/recurrence ...] [-k EXPRESSION]
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TESTS = (
    "tests/backends/triton",
    "tests/lm/kernels",
    "tests/lm/recurrence/test_gpu.py",
    "tests/lm/dynamic/test_evaluation.py",
    "tests/lm/dynamic/test_search.py",
    "tests/lm/test_gpu.py",
)
"""where tests for a GPU are"""
ON_A_CPU = ("test_interpreted.py", "test_compile.py")
"""files in them that run the same everywhere"""
SECONDS_TO_END = 20.0
SUMMARY = re.compile(r"(\d+) (passed|failed|errors?|skipped)")


def collected(python: list[str], places: list[str], expression: str) -> list[str]:
    """The ids of the tests, in pytest's order."""
    command = [*python, "--collect-only", "-q", "-k", expression, *places]
    found = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, check=False)
    ids = [line for line in found.stdout.splitlines() if "::" in line and not line.startswith(("SKIPPED", "ERROR"))]
    if not ids:
        raise SystemExit(f"no test was found for {' '.join(places)}:\n{found.stdout[-2000:]}{found.stderr[-2000:]}")
    return [name for name in ids if not name.partition("::")[0].endswith(ON_A_CPU)]


def environment() -> dict[str, str]:
    paths = [str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("places", nargs="*", default=list(TESTS), help="folders, files or ids of tests")
    parser.add_argument("-k", dest="expression", default="", help="as pytest's")
    parser.add_argument("--processes", type=int, default=min(os.cpu_count() or 1, 14))
    parser.add_argument("--seconds", type=float, default=360.0, help="after which what still runs is ended and fails")
    options = parser.parse_args()
    import torch

    if not torch.cuda.is_available():
        raise SystemExit("torch sees no CUDA device here, and these tests need one; make test runs all others")
    python = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--show-capture=no"]
    began = time.monotonic()
    ids = collected(python, options.places, options.expression)
    totals: Counter[str] = Counter()
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        running = []
        for index in range(min(options.processes, len(ids))):
            listed, log = Path(folder) / f"{index}.txt", Path(folder) / f"{index}.log"
            listed.write_text("\n".join(ids[index :: options.processes]))
            with log.open("w") as file:
                command = [*python, "-q", "-rfE", "--tb=short", f"@{listed}"]
                process = subprocess.Popen(command, cwd=ROOT, env=environment(), stdout=file, stderr=subprocess.STDOUT)
            running.append((process, log))
        for process, log in running:
            try:
                process.wait(max(0.0, options.seconds - (time.monotonic() - began)))
            except subprocess.TimeoutExpired:
                print(f"a process is ended after {options.seconds:g} s; what it has found so far follows", flush=True)
                # As by Ctrl-C: pytest then tells what failed before.
                process.send_signal(signal.SIGINT)
                try:
                    process.wait(SECONDS_TO_END)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
            printed = log.read_text()
            for number, kind in SUMMARY.findall(printed.rstrip().rpartition("\n")[2]):
                totals[kind.rstrip("s")] += int(number)
            if process.returncode:
                failed = True
                print(printed[-6000:])
    counts = {kind: totals[kind] for kind in ("passed", "failed", "error", "skipped")}
    print(f"{len(ids)} tests in {time.monotonic() - began:.0f} s with {len(running)} processes, {counts}")
    # The closing line that other tools read.
    print(f"{totals['passed']} passed, {totals['failed'] + totals['error']} failed, {totals['skipped']} skipped")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
