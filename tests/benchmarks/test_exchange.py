"""The exchange benchmark: what a process sends does not depend on the number of classes, and gathering does."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_it_runs(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "benchmarks/exchange.py"), "--smoke", "--rounds", "2"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    rows = {
        line.split("  ")[0].strip(): line for line in done.stdout.splitlines() if line.startswith(("ours", "torch"))
    }
    # 8 tokens of width 4: four numbers each forward, their gradient backward, and a few integers of agreement.
    assert int(rows["ours sigsoftmax, 2 processes"].split()[-1].replace(",", "")) - 8 * 4 * (4 + 4) < 256
    assert int(rows["torch, logits gathered, 2 processes"].split()[-1]) == 8 * 4 * (25 + 4)
