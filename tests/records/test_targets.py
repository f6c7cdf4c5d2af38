"""Targets of benchmarks: what each clause bounds, and how it is judged."""

import pytest
from tests.records import samples

from sigsoftmax.records import targets
from sigsoftmax.records.schemas.speed import Measurement


def measured(name: str = "ours", **fields: object) -> Measurement:
    common = {"case": "case", "baseline": "base", "ratio": 0.5, "ratio_quartiles": (0.4, 0.6), "rounds": 3}
    return samples.measurement(implementation=name, **{**common, **fields})


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("", ""),
        ("<= 0.5x", "yes"),
        ("<= 0.49x", "no: <= 0.49x"),
        ("<= 1.25x of third", "yes"),
        ("<= 1.2x of third", "no: <= 1.2x of third"),
        ("<= 10 ms", "yes"),
        ("<= 9.9 ms", "no: <= 9.9 ms"),
        ("<= 64 MiB", "yes"),
        ("<= 1/10 of the memory", "yes"),
        ("<= 1/20 of the memory", "no: <= 1/20 of the memory"),
        ("<= 0.4x, <= 64 MiB, <= 1 ms", "no: <= 0.4x, <= 1 ms"),
        ("<= 1.0x, aim 0.5x", "yes; aim 0.5x: reached"),
        ("<= 1.0x, aim 0.4x", "yes; aim 0.4x: not reached"),
        ("flat", "no: flat"),
        ("<= 1.2x torch's error", "yes"),
        ("<= 1.15x torch's error, <= 0.5x", "no: <= 1.15x torch's error"),
        ("aim 1.0x torch's error", "aim 1.0x torch's error: not reached"),
        ("linear", "not measured: linear"),
        ("no slower", "yes"),
    ],
)
def test_verdicts(target: str, expected: str):
    own = measured(target=target, gradient_error=1.2)
    base = measured("base", ratio=1.0, peak_mib=500.0)
    case = {"base": base, "ours": own, "third": measured("third", ratio=0.4, peak_mib=40.0)}
    assert targets.verdict(own, case) == expected


def test_no_slower_is_judged_by_the_spread():
    for quartiles, expected in (((0.99, 1.02), "yes"), ((1.001, 1.02), "no: no slower")):
        own = measured(target="no slower", ratio=1.01, ratio_quartiles=quartiles)
        assert targets.verdict(own, {"ours": own}) == expected


def test_flat_allows_a_fifth():
    sizes = (("a", 100.0), ("b", 119.0), ("c", 121.0))
    case = {name: measured(name, peak_mib=mib, target="flat") for name, mib in sizes}
    assert [targets.verdict(m, case) for m in case.values()] == ["yes", "yes", "no: flat"]


def growing(*times: float) -> dict[str, Measurement]:
    sizes = {f"N={n}": (n, time) for n, time in zip((100, 200, 400, 800), times, strict=True)}
    return {name: measured(name, size=size, milliseconds=time, target="linear") for name, (size, time) in sizes.items()}


def test_linear_allows_a_tenth_beside_a_line_that_need_not_start_at_zero():
    case = growing(3.0, 5.0, 9.0, 17.0)
    assert targets.off_the_line(list(case.values())) == pytest.approx(dict.fromkeys(case, 0.0), abs=1e-12)
    case = growing(3.0, 5.3, 9.0, 17.0)
    assert [targets.verdict(m, case) for m in case.values()] == ["yes"] * 4
    # A square is not a line, whatever its end does.
    squares = growing(1.0, 4.0, 16.0, 64.0)
    assert "no: linear" in [targets.verdict(m, squares) for m in squares.values()]
    jump = growing(1.0, 2.0, 4.0, 12.0)
    assert targets.verdict(jump["N=800"], jump) == "no: linear"


def test_memory_that_was_not_measured_meets_nothing():
    own = measured(peak_mib=None, target="<= 1.0x, <= 64 MiB, <= 1/10 of the memory")
    case = {"base": measured("base"), "ours": own}
    assert targets.verdict(own, case) == "not measured: <= 64 MiB, <= 1/10 of the memory"


def test_every_size_counts_alike_in_the_line():
    """A line through the times themselves would follow the largest, and the smallest would lie far from it."""
    off = targets.off_the_line(list(growing(1.0, 2.0, 4.0, 9.0).values()))
    assert off["N=100"] == pytest.approx(0.0, abs=0.03)
    assert off["N=800"] == pytest.approx(0.05, abs=0.03)
