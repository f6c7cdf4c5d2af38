"""Two checkouts compared: which rows count, how repeats are joined, and the command on tiny cases."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from compare_checkouts import changes, costs, text
from measuring import Measurement, measured_once

ROOT = Path(__file__).parents[2]


def measured(case: str, name: str, ratio: float, baseline: str = "torch", peak: float | None = None) -> Measurement:
    return replace(measured_once("cpu", case, name, 1.0), ratio=ratio, baseline=baseline, peak_mib=peak)


def test_rows_are_ours_with_another_baseline_and_repeats_are_joined_by_their_median():
    runs = [
        [measured("a", "ours", ratio, peak=ratio), measured("a", "torch", 1.0), measured("b", "ours", 1.0, "ours")]
        for ratio in (2.0, 1.0, 9.0)
    ]
    found = costs(runs)
    assert [*found] == [("a", "ours")]
    assert (found["a", "ours"].ratio, found["a", "ours"].peak_mib) == (2.0, 9.0)


def test_rows_of_both_are_compared_and_the_slowest_comes_first():
    old = costs([[measured("a", "ours", 2.0), measured("b", "ours", 1.0), measured("gone", "ours", 1.0)]])
    new = costs([[measured("a", "ours", 1.0), measured("b", "ours", 1.1)]])
    found = changes(old, new)
    assert [change.row[0] for change in found] == ["b", "a"]
    assert [change.factor for change in found] == pytest.approx([1.1, 0.5])
    lines = text(found, left_out=1).splitlines()
    assert lines[0] == "1.100x  ? -> ? MiB  b: ours"
    assert lines[-2:] == [
        "2 rows: median 0.800x, most 1.100x, least 0.500x",
        "1 rows are in one checkout only, and are left out",
    ]


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    script = [sys.executable, str(ROOT / "benchmarks" / "compare_checkouts.py")]
    return subprocess.run([*script, *arguments], cwd=ROOT, text=True, capture_output=True, check=False)


@pytest.mark.thorough
def test_command_runs_the_benchmark_of_both(tmp_path: Path):
    done = command(".", ".", "--suite", "cpu", "--repeats", "1", "--", "--smoke", "--only", "mixture")
    assert done.returncode == 0, done.stderr
    assert "2 rows: median" in done.stdout
    refused = command(".", str(tmp_path), "--suite", "cpu")
    assert refused.returncode == 2
    assert f"{tmp_path} is no checkout: it has no benchmarks/cpu.py" in refused.stderr
