"""Sweeps: means over seeds, and differences only where the intervals allow them."""

import dataclasses

import pytest
from tests.records import samples
from tests.report import synthetic_runs
from tests.report.sections.making import rows_of, section_of, table_of

from sigsoftmax.records.schemas.sweeps import PairedDifferenceRecord, TrialRecord
from sigsoftmax.report.sections import sweeps


def trials(kl: float | None = 0.4) -> list[TrialRecord]:
    return [
        samples.trial(
            run=comparison.run,
            point=(f"training.learning_rate={rate}",),
            test_loss=4.0 + 0.1 * (comparison.run.seed % 2),
            kl=None if kl is None else kl + 0.01 * (comparison.run.seed % 2),
            entropy_rate=None if kl is None else 3.5,
            seconds=17.0,
        )
        for comparison in synthetic_runs.comparisons(seeds=2)[:4]
        for rate in (20, 30)
    ]


def difference(low: float | None, high: float | None, *, seeds=(1, 2, 3), **changes) -> PairedDifferenceRecord:
    deviation = None if low is None else 0.01
    return samples.paired_difference(seeds=seeds, mean=-0.125, deviation=deviation, low=low, high=high, **changes)


def test_every_point_has_a_row_with_its_seeds(tmp_path):
    made = section_of(sweeps, trials(), tmp_path)
    rows = rows_of(table_of(made, "A language"))
    assert len(rows) == len({(t.run.head, t.point) for t in trials()})
    assert {row[2] for row in rows} == {"2"}
    assert all("±" in row[4] and "±" in row[5] for row in rows)
    assert made.findings == []


def test_without_a_truth_there_is_no_column_for_it(tmp_path):
    table = table_of(section_of(sweeps, trials(kl=None), tmp_path), "A language")
    assert [column.title for column in table.columns][-2:] == ["Test perplexity", "Time of a trial"]


def test_differences_are_resolved_by_their_intervals(tmp_path):
    made = section_of(sweeps, [*trials(), difference(-0.2, -0.05)], tmp_path)
    assert made.findings == [
        "1 of 1 differences are resolved: language-mos −0.125 nats of KL to the truth against language-softmax."
    ]
    assert rows_of(table_of(made, "Differences"))[0][-2:] == ["−0.2000 to −0.0500", "yes"]
    open_ = section_of(sweeps, [*trials(), difference(-0.2, 0.05)], tmp_path)
    assert open_.findings == ["None of 1 differences from the baseline is resolved by these seeds."]


@pytest.mark.parametrize("ends", [(None, None), (-0.2, -0.05)], ids=["without an interval", "of an earlier version"])
def test_two_seeds_resolve_nothing(tmp_path, ends):
    made = section_of(sweeps, [*trials(), difference(*ends, seeds=(1, 2))], tmp_path)
    assert made.findings == ["With fewer than 3 seeds of each nothing can be resolved."]
    row = rows_of(table_of(made, "Differences"))[0]
    assert row[-3:] == ["−0.1250", "–", "–"]


def test_sweeps_that_differ_in_what_was_changed_for_all_are_not_pooled(tmp_path):
    short = [
        dataclasses.replace(t, run=dataclasses.replace(t.run, overrides=("training.epochs=2",)), kl=9.0)
        for t in trials()
    ]
    differences = [
        difference(-0.2, -0.1, changes=("training.clip=1",)),
        difference(0.1, 0.2, changes=("training.clip=1", "training.epochs=2")),
    ]
    made = section_of(sweeps, [*trials(), *short, *differences], tmp_path)
    rows = rows_of(table_of(made, "A language"))
    assert len(rows) == 2 * len({(t.run.head, t.point) for t in trials()})
    assert {row[2] for row in rows} == {"2"}
    assert sum("training.epochs=2" in row[1] for row in rows) == len(rows) // 2
    assert [row[0] for row in rows_of(table_of(made, "Differences"))] == [
        "language-mos",
        "language-mos, training.epochs=2",
    ]


def test_a_trial_that_was_made_again_counts_once(tmp_path):
    made = trials()
    again = [*made, dataclasses.replace(made[0], test_loss=9.0)]
    rows = rows_of(table_of(section_of(sweeps, again, tmp_path), "A language"))
    assert {row[2] for row in rows} == {"2"}
