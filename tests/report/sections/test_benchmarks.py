"""Benchmarks: bars, targets, verdicts."""

import dataclasses

from tests.report import synthetic_runs
from tests.report.sections.making import rows_of, section_of

from sigsoftmax.report.sections import benchmarks


def test_targets_are_judged_and_marked(tmp_path):
    made = section_of(benchmarks, synthetic_runs.measurements(), tmp_path)
    assert made.findings == ["Benchmarks: 1 of 2 targets are met."]
    bars, target, aim = (trace.data for trace in made.figures[0].traces)
    assert bars["x"] == [1.0, 2.6, 0.4, 0.5, 1.2]
    assert (target["x"], target["y"]) == ([1.0, 0.42], [3, 4])
    assert (aim["x"], aim["y"]) == ([0.6], [3])
    rows = rows_of(made.figures[0].table)
    assert rows[3][-1] == "yes; aim 0.6x: reached"
    assert rows[4][-1] == "no: <= 1.0x, <= 1.05x of ours softmax"


def test_a_target_that_cannot_be_judged_says_so(tmp_path):
    first, *_ = synthetic_runs.measurements()
    odd = [
        dataclasses.replace(first, implementation="a", target="fast"),
        dataclasses.replace(first, implementation="b", target="<= 1.0x of nobody"),
    ]
    made = section_of(benchmarks, [first, *odd], tmp_path)
    rows = rows_of(made.figures[0].table)
    assert rows[1][-1].startswith("not judged: cannot judge the target 'fast'")
    assert rows[2][-1] == "not judged: the case lacks 'nobody'"


def test_memory_is_drawn_where_no_times_are_compared(tmp_path):
    first, *_ = synthetic_runs.measurements()
    rows = [
        dataclasses.replace(first, implementation=f"N={n}", baseline=f"N={n}", peak_mib=n / 10.0, target="<= 64 MiB")
        for n in (100, 500)
    ]
    figure = section_of(benchmarks, rows, tmp_path).figures[0]
    assert figure.x.title == "peak memory (MiB)"
    assert figure.traces[0].data["x"] == [10.0, 50.0]
    assert figure.traces[1].data["x"] == [64.0, 64.0]
