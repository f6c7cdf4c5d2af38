"""Comparisons of heads: one grouping, sizes before intervals, and no claim that seeds do not carry."""

import dataclasses
import math

import pytest
from tests.report import synthetic_runs

from sigsoftmax.records.training import Budget, ComparisonRecord
from sigsoftmax.report.comparisons import comparisons

BUDGET = Budget(setting="language", changes=("training.epochs=4",), epochs=6)


def record(head, kl, *, seed=1, rank=14, truth=True, budget=BUDGET, **changes) -> ComparisonRecord:
    run = synthetic_runs.identity(head, seed, phase="finetune", corpus="language")
    made = ComparisonRecord(
        run=run,
        epochs=6,
        # The windows of a run are drawn by its seed, and their number with them.
        updates=1000 + seed,
        valid_loss=4.0,
        test_loss=3.5 + kl,
        entropy_rate=3.5 if truth else None,
        kl=kl if truth else None,
        kl_standard_error=0.002 if truth else None,
        rank=rank,
        rank_bound=14 if head.startswith("softmax") else 200,
        words=200,
        contexts=400,
        seconds=75.0,
        budget=budget,
    )
    return dataclasses.replace(made, **changes)


def heads(levels, **options) -> list[ComparisonRecord]:
    return [record(head, kl, seed=seed, **options) for head, kls in levels.items() for seed, kl in enumerate(kls, 1)]


def only(records):
    (found,) = comparisons(records)
    return found


def cells(table) -> dict[str, list[str]]:
    titles = [f"{column.title}, {column.group}" if column.group else column.title for column in table.columns]
    rows = [[cell if isinstance(cell, str) else cell.text for cell in row.cells] for row in table.rows]
    return {row[0]: dict(zip(titles, row, strict=True)) for row in rows}


TWO = {"softmax": (0.4714, 0.5318), "sigsoftmax": (0.4533, 0.5151), "mos(K=4)": (0.2855, 0.3116)}
"""as a comparison with two seeds measured them"""
THREE = {"softmax": (0.40, 0.45, 0.35), "sigsoftmax": (0.42, 0.41, 0.36), "mos(K=4)": (0.20, 0.25, 0.15)}


def test_a_group_does_not_depend_on_what_varies_with_the_seed():
    records = heads(TWO)
    assert len({r.updates for r in records}) == 2
    found = only(records)
    assert found.seeds == [1, 2]
    assert "1,001 to 1,002 updates, 2 seeds" in found.caption
    # With averaging that ends when it no longer helps, the epochs vary, too.
    stale = [dataclasses.replace(r, epochs=5 + r.run.seed) for r in records]
    assert only(stale).seeds == [1, 2]
    first_version = [dataclasses.replace(r, budget=None) for r in records]
    assert only(first_version).seeds == [1, 2]


@pytest.mark.parametrize(
    "changes",
    [
        {"budget": dataclasses.replace(BUDGET, changes=("training.epochs=8",))},
        {"budget": dataclasses.replace(BUDGET, setting="tiny")},
        {"budget": dataclasses.replace(BUDGET, epochs=9)},
        {"run": synthetic_runs.identity("softmax", 3, corpus="language", corpus_checksum="another")},
        {"run": synthetic_runs.identity("softmax", 3, corpus="language", precision="bf16")},
    ],
)
def test_other_texts_and_budgets_are_other_comparisons(changes):
    other = dataclasses.replace(record("softmax", 0.4, seed=3), **changes)
    assert [len(found.records) for found in comparisons([*heads(TWO), other])] == [6, 1]


def test_a_change_that_is_none_to_one_of_the_heads_divides_nothing():
    """The overrides of a run leave out what its recipe has by default, and defaults differ between heads."""
    changed = record("softmax", 0.4)
    changed = dataclasses.replace(changed, run=dataclasses.replace(changed.run, overrides=("training.epochs=4",)))
    assert len(only([changed, record("mos(K=4)", 0.3)]).contenders) == 2


def test_the_best_head_stands_first_everywhere():
    found = only(heads(TWO))
    assert [contender.head for contender in found.contenders] == ["mos(K=4)", "sigsoftmax", "softmax"]
    assert found.findings()[0] == (
        "MoS(K=4) has the lowest KL to the truth, 0.2985 nats: 0.2031 nats below softmax (−18.4 % in perplexity, "
        "40.5 % of its KL)."
    )
    assert found.table().to_text().splitlines()[5].startswith("MoS(K=4)")
    if_softmax_is_best = only(heads({"softmax": (0.3,), "sigsoftmax": (0.4,), "gss(k=0.0)": (0.5,)}))
    assert if_softmax_is_best.findings()[0].startswith(
        "softmax has the lowest KL to the truth, 0.3000 nats: 0.1000 nats below sigsoftmax"
    )


def test_two_seeds_resolve_nothing_however_near_they_fall():
    """sigsoftmax differs by nearly the same in both seeds, and mos by far more: intervals of t would mislead."""
    found = only(heads(TWO))
    text = found.table().to_text() + "\n".join(found.findings())
    assert found.findings()[1].startswith("With 2 seeds nothing can be resolved")
    assert "interval" not in text.lower()
    assert "resolved for" not in text
    shown = cells(found.table())
    assert (shown["sigsoftmax"]["Nats, against softmax"], shown["MoS(K=4)"]["Nats, against softmax"]) == (
        "−0.0174",
        "−0.2031",
    )
    one = only(heads({head: kls[:1] for head, kls in TWO.items()}))
    assert one.findings()[1].startswith("With one seed nothing can be resolved")


def test_from_three_seeds_on_intervals_follow_the_sizes():
    found = only(heads(THREE))
    shown = cells(found.table())
    titles = list(shown["softmax"])
    assert titles.index("Nats, against softmax") < titles.index("95 % interval (nats)")
    assert shown["sigsoftmax"]["Nats, against softmax"] == "−0.0033"
    assert shown["sigsoftmax"]["Resolved"] == "no"
    assert shown["MoS(K=4)"]["Nats, against softmax"] == "−0.2000"
    assert shown["MoS(K=4)"]["Perplexity, against softmax"] == f"−{100 * (1 - math.exp(-0.2)):.1f} %"
    assert shown["MoS(K=4)"]["Resolved"] == "yes"
    assert shown["softmax"]["Nats, against softmax"] == shown["softmax"]["Resolved"] == "–"
    assert "The difference from softmax is resolved for MoS(K=4); not resolved for sigsoftmax." in found.findings()
    assert "interval −0.2000 to −0.2000: resolved by 3 seeds" in found.findings()[0]


def test_pairs_are_of_the_same_seed():
    """Seeds move both heads by far more than the heads differ."""
    softmax = [record("softmax", 0.1 * seed, seed=seed) for seed in (1, 2, 3)]
    other = [record("sigsoftmax", 0.1 * seed - 0.05 - 1e-4 * seed, seed=seed) for seed in (3, 1, 2)]
    found = only([*softmax, *other])
    difference = found.difference(found.named("sigsoftmax"), found.named("softmax"))
    assert difference.mean == pytest.approx(-0.0502)
    assert difference.is_resolved is True


def test_heads_with_different_seeds_are_compared_on_those_they_share():
    records = [*heads(THREE), record("gss(k=0.0)", 0.1, seed=1), record("gss(k=0.2)", 0.1, seed=7)]
    found = only(records)
    shown = cells(found.table())
    assert shown["gss(k=0)"]["Nats, against softmax"] == "−0.3000"
    assert shown["gss(k=0)"]["Resolved"] == "–"
    assert shown["gss(k=0.2)"]["Nats, against softmax"] == "–"
    assert any("different seeds" in note for note in found.table().notes)
    assert "cannot be resolved for gss(k=0), for want of seeds" in found.findings()[1]


def test_the_control_for_scale_is_compared():
    found = only(heads({"softmax": (0.4,), "softmax(alpha=1.5)": (0.39,), "sigsoftmax": (0.395,)}))
    assert any(
        text.startswith("Against the control for scale, sigsoftmax is 0.0050 nats above softmax(alpha=1.5)")
        for text in found.findings()
    )


def test_without_a_truth_losses_are_compared():
    found = only(heads({"softmax": (0.4,), "mos(K=4)": (0.3,)}, truth=False))
    text = found.table().to_text()
    assert "KL" not in text + "\n".join(found.findings())
    assert "the test loss less that of softmax" in text
    assert found.findings()[0].startswith("MoS(K=4) has the lowest test loss, 3.8000 nats: 0.1000 nats below softmax")
    # One record without a KL, and none of them is compared by it.
    mixed = [record("softmax", 0.4), record("mos(K=4)", 0.3, truth=False)]
    assert only(mixed).quantity == "loss"


def test_heads_without_softmax_have_no_baseline():
    found = only(heads({"sigsoftmax": (0.4,), "mos(K=4)": (0.3,)}))
    assert "against softmax" not in found.table().to_text()
    assert found.findings()[0].endswith("0.1000 nats below sigsoftmax (−9.5 % in perplexity, 25.0 % of its KL).")
    assert only(heads({"softmax": (0.4,)})).findings() == []


def test_ranks_are_beside_the_loss():
    full = [*heads({"softmax": (0.4,)}), *heads({"sigsoftmax": (0.5,), "mos(K=4)": (0.3,)}, rank=200)]
    assert only(full).findings()[-1] == (
        "The 2 heads of full or almost full rank have a KL to the truth from 0.3000 to 0.5000 nats: a higher rank does "
        "not by itself lower it."
    )
    assert cells(only(full).details())["sigsoftmax"]["Rank"] == "200"


@pytest.mark.parametrize("kl", [math.nan, math.inf])
def test_numbers_that_are_none_are_shown_and_never_best(kl):
    found = only(heads({"softmax": (0.4, 0.4, 0.4), "relu": (kl, 0.5, 0.5)}))
    assert found.contenders[0].head == "softmax"
    assert cells(found.table())["ReLU"]["Resolved"] == "–"
    assert found.findings()
    found.details().to_text()


def test_the_page_and_the_terminal_show_one_table():
    found = only(heads(THREE))
    html = found.table().to_html()
    for row in cells(found.table()).values():
        for cell in row.values():
            assert f">{cell}<" in html
