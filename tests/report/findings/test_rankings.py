"""Rankings: one table, sizes before intervals, pairs of the same seed, intervals that hold together."""

import math

import pytest

from sigsoftmax.records.statistics import student_quantile
from sigsoftmax.report.findings.rankings import KL, RankedHead, Ranking

TWO = {"softmax": (0.4714, 0.5318), "sigsoftmax": (0.4533, 0.5151), "mos(K=4)": (0.2855, 0.3116)}
"""as a comparison with two seeds measured them"""
THREE = {"softmax": (0.40, 0.45, 0.35), "sigsoftmax": (0.42, 0.41, 0.36), "mos(K=4)": (0.20, 0.25, 0.15)}
ENTROPY_RATE = 3.5


def ranked(head, values, *, epochs=6, **changes):
    """A head by the values of seeds 1, 2, ..., or by seed."""
    values = dict(enumerate(values, 1)) if not isinstance(values, dict) else values
    fields = {
        "losses": {seed: ENTROPY_RATE + value for seed, value in values.items()},
        "seconds": dict.fromkeys(values, 75.0),
        "epochs": dict.fromkeys(values, epochs),
        "parameters": frozenset({26_000}),
    }
    return RankedHead(head=head, values=values, **{**fields, **changes})


def ranking(levels, **fields):
    heads = [level if isinstance(level, RankedHead) else ranked(head, level) for head, level in levels.items()]
    given = {"quantity": KL, "perplexity_of": "test", "subject": ("a text", "language recipes")}
    return Ranking.of(heads, **{**given, **fields})


def named(found, name):
    (head,) = (head for head in found.heads if head.head == name)
    return head


def by_loss(levels, **fields):
    """A ranking without a truth."""
    heads = {head: ranked(head, values, losses=dict(enumerate(values, 1))) for head, values in levels.items()}
    return ranking(heads, quantity="test loss", **fields)


def cells(table) -> dict[str, dict[str, str]]:
    titles = [f"{column.title}, {column.group}" if column.group else column.title for column in table.columns]
    rows = [[cell if isinstance(cell, str) else cell.text for cell in row.cells] for row in table.rows]
    return {row[0]: dict(zip(titles, row, strict=True)) for row in rows}


def plain(text: str) -> str:
    return text.replace("\u00a0", " ")


def test_the_best_head_stands_first():
    found = ranking(TWO)
    assert [head.head for head in found.heads] == ["mos(K=4)", "sigsoftmax", "softmax"]
    assert list(cells(found.table())) == ["MoS(K=4)", "sigsoftmax", "softmax"]


def test_two_seeds_have_sizes_and_no_interval_however_near_they_fall():
    """sigsoftmax differs by nearly the same in both seeds, and mos by far more: intervals of t would mislead."""
    table = ranking(TWO).table()
    assert "interval" not in table.to_text().lower()
    assert "Resolved" not in table.to_text()
    shown = cells(table)
    assert shown["sigsoftmax"]["Nats, against softmax"] == "−0.0174"
    assert shown["MoS(K=4)"]["Nats, against softmax"] == "−0.2031"
    assert plain(shown["MoS(K=4)"]["KL to the truth (nats)"]) == "0.2985 ± 0.0185"


def test_from_three_seeds_on_intervals_follow_the_sizes():
    shown = cells(ranking(THREE).table())
    half = student_quantile(0.975, 2) * 0.05 / math.sqrt(3)
    assert plain(shown["softmax"]["KL to the truth (nats)"]) == f"0.4000 ({0.4 - half:.4f} to {0.4 + half:.4f})"
    assert shown["sigsoftmax"]["Nats, against softmax"].startswith("−0.0033 (−")
    assert shown["sigsoftmax"]["Resolved, against softmax"] == "no"
    assert plain(shown["MoS(K=4)"]["Nats, against softmax"]) == "−0.2000 (−0.2000 to −0.2000)"
    assert shown["MoS(K=4)"]["Perplexity, against softmax"] == f"−{100 * (1 - math.exp(-0.2)):.1f} %"
    assert shown["MoS(K=4)"]["Resolved, against softmax"] == "yes"
    assert shown["softmax"]["Nats, against softmax"] == shown["softmax"]["Resolved, against softmax"] == "–"


def test_time_and_parameters_stand_beside():
    shown = cells(ranking(THREE).table())["MoS(K=4)"]
    assert (shown["Time"], shown["Parameters"]) == ("1 min 15 s", "26,000")
    without = cells(ranking({"softmax": ranked("softmax", (0.4,), seconds={}, parameters=frozenset())}).table())
    assert (without["softmax"]["Time"], without["softmax"]["Parameters"]) == ("–", "–")


def test_intervals_of_differences_hold_together():
    """With more heads each comparison needs more: one of many would leave out zero by chance."""
    few = ranking({"softmax": (0.40, 0.45, 0.35), "sigsoftmax": (0.38, 0.44, 0.34)})
    difference = few.difference(named(few, "sigsoftmax"), named(few, "softmax"))
    assert difference.confidence == 0.95
    more = ranking({head.head: head for head in few.heads} | {f"gss(k={k})": (0.5, 0.5, 0.5) for k in range(5)})
    assert more.comparisons_made == 6
    wider = more.difference(named(more, "sigsoftmax"), named(more, "softmax"))
    assert wider.confidence == pytest.approx(1 - 0.05 / 6)
    assert wider.mean == difference.mean
    assert (difference.is_resolved, wider.is_resolved) == (False, False)
    assert wider.interval[0] < difference.interval[0] < wider.mean < difference.interval[1] < wider.interval[1]
    assert "all 6 hold together" in more.table().to_text()


def test_pairs_are_of_the_same_seed():
    """Seeds move both heads by far more than the heads differ."""
    softmax = {seed: 0.1 * seed for seed in (1, 2, 3)}
    other = {seed: 0.1 * seed - 0.05 - 1e-4 * seed for seed in (3, 1, 2)}
    found = ranking({"softmax": softmax, "sigsoftmax": other})
    difference = found.difference(named(found, "sigsoftmax"), named(found, "softmax"))
    assert difference.mean == pytest.approx(-0.0502)
    assert difference.is_resolved is True


def test_heads_with_different_seeds_are_compared_on_those_they_share():
    found = ranking({**THREE, "gss(k=0)": {1: 0.1}, "gss(k=0.2)": {7: 0.1}})
    shown = cells(found.table())
    assert shown["gss(k=0)"]["Nats, against softmax"] == "−0.3000"
    assert shown["gss(k=0)"]["Resolved, against softmax"] == "–"
    assert shown["gss(k=0.2)"]["Nats, against softmax"] == "–"
    assert "different seeds" in found.table().to_text()
    assert [row["Seeds"] for row in shown.values()] == ["1", "1", "3", "3", "3"]
    assert "Seeds" not in cells(ranking(THREE).table())["softmax"]
    assert "3 seeds" in ranking(THREE).caption


def test_without_a_truth_perplexities_have_the_interval():
    found = by_loss({head: [value + 4 for value in values] for head, values in THREE.items()})
    shown = cells(found.table())
    mean = sum(math.exp(4 + value) for value in THREE["softmax"]) / 3
    assert shown["softmax"]["Test perplexity"].startswith(f"{mean:.2f} (")
    assert "KL" not in found.table().to_text()
    assert "the test loss less that of softmax" in found.table().to_text()


def test_heads_without_softmax_have_no_baseline():
    found = ranking({"sigsoftmax": (0.4,), "mos(K=4)": (0.3,)})
    assert found.differences == {}
    assert "against softmax" not in found.table().to_text()


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_numbers_that_are_none_are_shown_and_never_best(value):
    found = ranking({"softmax": (0.4, 0.4, 0.4), "relu": (value, 0.5, 0.5)})
    assert found.heads[0].head == "softmax"
    assert cells(found.table())["ReLU"]["Nats, against softmax"] in ("NaN", "∞")


def test_the_page_and_the_terminal_show_one_table():
    table = ranking(THREE).table()
    html, text = table.to_html(), table.to_text()
    for row in cells(table).values():
        for cell in row.values():
            assert f">{cell}<" in html
            assert plain(cell) in text
