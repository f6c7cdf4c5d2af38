"""Turns, ratios and peak memory; and the CPU benchmark on tiny cases."""

import dataclasses
import itertools
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from measuring import MIB, RECORDS, Case, Measurement, Step, cpu_peak_mib, table, take_turns
from tests.records import samples

from sigsoftmax.records import read, targets

ROOT = Path(__file__).parents[2]


def nothing() -> torch.Tensor:
    return torch.zeros((), requires_grad=True)


def case_of(**more: str) -> Case:
    steps = {name: Step(nothing, []) for name in ("base", "ours", "third")}
    return Case(suite="cpu", name="case", baseline="base", implementations=steps, targets=more)


def test_ratios_are_taken_within_a_round():
    case = case_of()
    names = {id(step): name for name, step in case.implementations.items()}
    # The machine gets slower from round to round; the ratios stay.
    calls = itertools.count()
    base = {"base": 1.0, "ours": 0.5, "third": 3.0}
    results = take_turns(
        case,
        rounds=5,
        milliseconds_of=lambda step: base[names[id(step)]] * (1 + next(calls) // 3),
        peak_mib={"ours": 2.0},
    )
    assert [m.implementation for m in results] == ["base", "ours", "third"]
    assert [m.ratio for m in results] == [1.0, 0.5, 3.0]
    assert results[1].ratio_quartiles == (0.5, 0.5)
    assert results[1].milliseconds == 1.5
    assert results[1].milliseconds_quartiles == (1.0, 2.0)
    assert [m.peak_mib for m in results] == [None, 2.0, None]


def test_each_round_runs_all_in_an_order_of_its_own():
    case = case_of()
    names = {id(step): name for name, step in case.implementations.items()}
    seen: list[str] = []

    def milliseconds_of(step: object) -> float:
        seen.append(names[id(step)])
        return 1.0

    take_turns(case, rounds=20, milliseconds_of=milliseconds_of, peak_mib={})
    rounds = [tuple(seen[i : i + 3]) for i in range(0, 60, 3)]
    assert all(sorted(turn) == ["base", "ours", "third"] for turn in rounds)
    assert len(set(rounds)) > 2


def test_peak_memory_leaves_out_inputs_and_gradients():
    x = torch.randn(MIB, requires_grad=True)  # 4 MiB

    def loss() -> torch.Tensor:
        torch.empty(3 * MIB)  # 12 MiB that are freed before the gradient is there
        return x.sum()

    # 12 MiB in the forward pass; 4 MiB of gradient in the backward pass, which are not counted.
    assert cpu_peak_mib(Step(loss, [x])) == pytest.approx(12 - 4, abs=0.1)
    assert cpu_peak_mib(Step(lambda: x.sum(), [x])) == pytest.approx(0, abs=0.1)
    kept = Step(lambda: (x * x).exp().sum(), [x])
    assert cpu_peak_mib(kept) == cpu_peak_mib(kept)
    assert x.grad is None


def test_the_worst_error_is_judged_and_nan_is_worst():
    case = case_of()
    errors = {"ours": {"hidden, deviation 1": 1.5, "weight, deviation 1": 1.25}, "third": {"a": 1.0, "b": math.nan}}
    base, ours, third = take_turns(
        case,
        rounds=1,
        milliseconds_of=lambda step: 1.0,
        peak_mib={},
        gradient_errors=errors,
        host_microseconds={"ours": 12.0},
    )
    assert base.gradient_error is None
    assert ours.gradient_error == 1.5
    assert ours.gradient_errors == errors["ours"]
    assert ours.host_microseconds == 12.0
    assert third.gradient_error is not None
    assert math.isnan(third.gradient_error)
    assert targets.verdict(dataclasses.replace(third, target="<= 2x torch's error"), {"base": base}).startswith("no")


def test_targets_are_checked_before_anything_is_measured():
    with pytest.raises(ValueError, match=r"cannot judge the target 'fast'; expected '<= 1.0x'"):
        case_of(ours="fast")
    with pytest.raises(ValueError, match=r"a target names \['theirs'\], expected some of \['base', 'ours', 'third'\]"):
        case_of(ours="<= 1.0x of theirs")
    with pytest.raises(ValueError, match=r"a target names \['theirs'\]"):
        case_of(theirs="<= 1.0x")


def test_the_printed_table_is_aligned():
    fields = {"baseline": "base", "ratio": 0.5, "ratio_quartiles": (0.4, 0.6)}
    base, ours = (samples.measurement(implementation=name, **fields) for name in ("base", "ours"))
    header, rule, *rows = table([base, dataclasses.replace(ours, target="<= 1.0x")]).splitlines()
    assert header.index("target") == rows[1].index("<= 1.0x")
    assert rows[1].endswith("yes")
    assert set(rule) == {"-", " "}


def run_cpu(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "benchmarks/cpu.py", *options]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=os.environ)


@pytest.mark.thorough
def test_the_cpu_benchmark_runs_on_tiny_cases(tmp_path):
    before = (RECORDS / "cpu.jsonl").read_bytes()
    out = tmp_path / "new" / "cpu.jsonl"
    result = run_cpu("--smoke", "--threads", "1", "--out", str(out))
    assert result.returncode == 0, result.stderr
    written = [record.payload_as(Measurement) for record in read(out)]
    assert len({m.case for m in written}) == 4
    assert all(m.case in result.stdout and m.implementation in result.stdout for m in written)
    assert all(m.peak_mib is not None and m.peak_mib >= 0 for m in written)
    where = next(iter(read(out))).environment
    assert where.command == f"python benchmarks/cpu.py --smoke --threads 1 --out {out}"
    assert where.threads == 1
    assert (RECORDS / "cpu.jsonl").read_bytes() == before


def test_a_label_that_is_not_there():
    result = run_cpu("--smoke", "--only", "nonsense")
    assert result.returncode == 2
    assert "the labels are: logits, linear, mixture, memory" in result.stderr
