"""Learning curves: means over what every seed has, the reference, thinning."""

import dataclasses
import math
from collections.abc import Sequence

import pytest
from tests.report import synthetic_runs
from tests.report.sections.making import drawn, section_of

from sigsoftmax.records.published.references import reference_curves
from sigsoftmax.records.schemas.training import EpochRecord
from sigsoftmax.report.sections import learning


def curve(head: str, seed: int, perplexities: Sequence[float]) -> list[EpochRecord]:
    return [
        EpochRecord(
            run=synthetic_runs.identity(head, seed),
            epoch=epoch,
            optimizer="sgd",
            updates=1,
            train_loss=math.log(value * 0.9),
            train_loss_parts=(),
            valid_loss=math.log(value),
            valid_loss_over_rows=math.log(value),
            is_best=True,
            seconds_training=6.0,
            seconds_validation=0.5,
        )
        for epoch, value in enumerate(perplexities, start=1)
    ]


def test_the_mean_is_over_epochs_that_every_seed_has(tmp_path):
    made = section_of(learning, [*curve("softmax", 1, [300, 200, 100, 90]), *curve("softmax", 2, [320, 210])], tmp_path)
    upper, lower, mean = drawn(made.figures[0], "valid", "mean")
    assert mean["x"] == [1, 2]
    assert mean["y"] == pytest.approx([310.0, 205.0])
    deviation = 20.0 / math.sqrt(2.0)
    assert upper["y"][0] == pytest.approx(310.0 + deviation)
    assert lower["y"][0] == pytest.approx(310.0 - deviation)
    assert lower["fill"] == "tonexty"
    singles = drawn(made.figures[0], "valid", "runs")
    assert [trace["x"] for trace in singles] == [[1, 2, 3, 4], [1, 2]]


def test_training_comes_before_finetuning_whatever_the_files_name_first(tmp_path):
    training = curve("softmax", 1, [300, 200])
    finetuning = [dataclasses.replace(p, run=dataclasses.replace(p.run, phase="finetune")) for p in training]
    made = section_of(learning, [*finetuning, *training], tmp_path)
    assert [figure.title for figure in made.figures] == ["Penn Treebank: training", "Penn Treebank: finetuning"]


def test_the_reference_curve_is_compared_with_the_value_that_divides_alike(tmp_path):
    reference = next(c for c in reference_curves() if c.head == "softmax")
    values = [reference.perplexities.get(epoch, 100.0) * 1.02 for epoch in range(1, 23)]
    made = section_of(learning, curve("softmax", 1, values), tmp_path)
    (finding,) = made.findings
    assert "lies +2.0% to +2.0% from the reference curve at epochs 8 to 22, within a tolerance of 4%" in finding
    assert len(drawn(made.figures[0], "reference")) == 1
    off = section_of(learning, curve("softmax", 1, [value * 1.05 for value in values]), tmp_path)
    assert "beyond a tolerance of 4%" in off.findings[0]
    other = section_of(learning, curve("sigsoftmax", 1, values), tmp_path)
    assert other.findings == []
    assert not drawn(other.figures[0], "reference")


def test_long_curves_are_thinned_with_a_word(tmp_path):
    made = section_of(learning, curve("softmax", 1, [1000.0 / e + 50.0 for e in range(1, 1501)]), tmp_path)
    (mean,) = drawn(made.figures[0], "valid", "mean")
    assert len(mean["x"]) == learning.POINTS
    assert (mean["x"][0], mean["x"][-1]) == (1, 1500)
    assert any("of its epochs" in str(note) for note in made.figures[0].notes)
    assert len(made.figures[0].table.rows) == learning.TABLE_EPOCHS
    assert "of 1500 epochs" in made.figures[0].table.notes[0]


def test_settings_of_one_head_share_its_colour_and_differ_in_dash(tmp_path):
    first = curve("softmax", 1, [300, 200])
    second = [dataclasses.replace(p, run=dataclasses.replace(p.run, precision="bf16")) for p in first]
    figure = section_of(learning, [*first, *second], tmp_path).figures[0]
    looks = [switch.look for switch in figure.legend]
    assert looks[0].slot == looks[1].slot
    assert looks[0].dash != looks[1].dash
    assert [switch.label for switch in figure.legend] == ["softmax", "softmax, bf16"]


def test_a_summary_says_once_what_holds_for_all_and_names_settings_only_where_they_differ(tmp_path):
    def of(head, value, **changes):
        made = [record for seed in (1, 2) for record in curve(head, seed, [300, value + seed])]
        return [dataclasses.replace(p, run=dataclasses.replace(p.run, **changes)) for p in made]

    common = {"overrides": ("training.epochs=2", "training.batch=8"), "precision": "bf16"}
    made = section_of(learning, [*of("softmax", 200, **common), *of("sigsoftmax", 190, **common)], tmp_path)
    assert made.figures[0].summary == (
        "Least validation perplexity (2 seeds, 2 epochs): sigsoftmax 191.5 ± 0.71; softmax 201.5 ± 0.71."
    )
    other = of("softmax", 180, **{**common, "overrides": ("training.epochs=2", "training.batch=16")})
    made = section_of(learning, [*of("softmax", 200, **common), *other], tmp_path)
    assert [s.label for s in made.figures[0].legend] == ["softmax, training.batch=8", "softmax, training.batch=16"]


def test_a_summary_of_many_settings_stays_short(tmp_path):
    payloads = []
    for batch in range(20):
        run = synthetic_runs.identity("softmax", 1, overrides=(f"training.batch={batch}",))
        payloads += [dataclasses.replace(p, run=run) for p in curve("softmax", 1, [300, 200 + batch])]
    summary = section_of(learning, payloads, tmp_path).figures[0].summary
    assert summary.endswith("; and 13 more.")
    assert len(summary) < 400
