"""Comparisons of heads: which records belong together, and what is made of them."""

import dataclasses
import math

import pytest
from tests.report import synthetic_runs
from tests.report.findings.test_rankings import cells

from sigsoftmax.records.schemas.training import Budget, ComparisonRecord
from sigsoftmax.report.findings.comparisons import comparisons

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


TWO = {"softmax": (0.4714, 0.5318), "sigsoftmax": (0.4533, 0.5151), "mos(K=4)": (0.2855, 0.3116)}
"""as a comparison with two seeds measured them"""


def test_a_group_does_not_depend_on_what_varies_with_the_seed():
    records = heads(TWO)
    assert len({r.updates for r in records}) == 2
    found = only(records)
    assert found.ranking.seeds == [1, 2]
    assert "6 epochs, 2 seeds, 1,001 to 1,002 updates" in found.ranking.caption
    # With averaging that ends when it no longer helps, the epochs vary, too.
    stale = [dataclasses.replace(r, epochs=5 + r.run.seed) for r in records]
    assert only(stale).ranking.seeds == [1, 2]
    first_version = [dataclasses.replace(r, budget=None) for r in records]
    assert only(first_version).ranking.seeds == [1, 2]


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
    assert len(only([changed, record("mos(K=4)", 0.3)]).heads) == 2


def test_the_best_head_stands_first_everywhere():
    found = only(heads(TWO))
    assert [head.head for head in found.ranking.heads] == ["mos(K=4)", "sigsoftmax", "softmax"]
    assert [head.head for head in found.ranking.heads] == ["mos(K=4)", "sigsoftmax", "softmax"]
    assert list(cells(found.details())) == ["the truth", "MoS(K=4)", "sigsoftmax", "softmax"]


def test_without_a_truth_losses_are_compared():
    assert only(heads(TWO)).ranking.quantity == "KL to the truth"
    ranking = only(heads(TWO, truth=False)).ranking
    assert ranking.quantity == "test loss"
    assert ranking.heads[0].values == {1: 3.5 + 0.2855, 2: 3.5 + 0.3116}
    # One record without a KL, and none of them is compared by it.
    mixed = [record("softmax", 0.4), record("mos(K=4)", 0.3, truth=False)]
    assert only(mixed).ranking.quantity == "test loss"


def test_the_truth_stands_beside_the_perplexities():
    shown = cells(only(heads(TWO)).details())
    assert shown["the truth"]["Test perplexity"] == f"{math.exp(3.5):.2f}"
    assert shown["softmax"]["Test perplexity"].startswith(f"{(math.exp(3.9714) + math.exp(4.0318)) / 2:.2f} ± ")
    assert "the truth" not in cells(only(heads(TWO, truth=False)).details())


def test_time_parameters_and_lengths_come_from_the_records():
    records = [record("softmax", 0.4, seconds=70.0), record("softmax", 0.4, seed=2, seconds=80.0, epochs=7)]
    (head,) = only(records).ranking.heads
    assert head.mean_seconds == 75.0
    assert head.epochs == {1: 6, 2: 7}
    assert head.parameters == {24_221_600}


def test_ranks_are_beside_the_loss():
    full = [*heads({"softmax": (0.4,)}), *heads({"sigsoftmax": (0.5,), "mos(K=4)": (0.3,)}, rank=200)]
    assert only(full).findings()[-1] == (
        "The 2 heads of full or almost full rank have a KL to the truth from 0.3000 to 0.5000 nats: a higher rank does "
        "not by itself lower it."
    )
    assert cells(only(full).details())["sigsoftmax"]["Rank"] == "200"
