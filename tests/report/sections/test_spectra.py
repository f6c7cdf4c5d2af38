"""Spectra: ranks beside the paper's, thresholds and noise floors, cliffs."""

import dataclasses
import math

import pytest
from tests.report import synthetic_runs
from tests.report.sections.making import drawn, rows_of, section_of, table_of

from sigsoftmax.records.schemas.model_spectra import ModelSpectrum
from sigsoftmax.records.schemas.spectra import Spectrum
from sigsoftmax.records.schemas.training import EvaluationRecord
from sigsoftmax.report.sections import spectra


def test_ranks_beside_the_papers(tmp_path):
    made = section_of(spectra, synthetic_runs.model_spectra(), tmp_path)
    rows = rows_of(table_of(made, "Table 3."))
    assert rows[:3] == [["softmax"], ["paper", "402", "402"], ["ours, finetuned, test", "402", "–"]]
    assert ["ours, finetuned, test", "1,300", "–"] in rows


def test_thresholds_and_the_noise_floor_are_drawn(tmp_path):
    made = section_of(spectra, synthetic_runs.model_spectra(), tmp_path)
    figure = made.figures[0]
    (threshold,) = drawn(figure, "press32")
    assert threshold["y"][0] == pytest.approx(0.5 * math.sqrt(18_001) * 2.0**-23, rel=1e-6)
    assert len(drawn(figure, "rules")) == 3
    floors = [trace for trace in drawn(figure, "noise") if trace["name"].startswith("Noise floor")]
    assert floors[0]["y"] == pytest.approx([2.0 * (2e-9 + 1e-9)] * 2)
    # What lies below the floor is a trace of its own.
    assert [t["name"] for t in drawn(figure, "noise") if "below" in t["name"]] == ["softmax, below its noise floor"]


def seeds_of(head: str, rank: int, seeds: tuple[int, ...], **changes) -> list[ModelSpectrum]:
    return [
        ModelSpectrum(
            run=synthetic_runs.identity(head, seed, phase="finetune", **changes),
            split="test",
            spectrum=synthetic_runs.spectrum(f"{head} {seed}", rank + seed),
        )
        for seed in seeds
    ]


def test_ranks_are_told_by_head_and_labels_say_only_what_differs(tmp_path):
    common = {"overrides": ("training.epochs=4", "finetuning.epochs=2"), "precision": "bf16"}
    payloads = [*seeds_of("softmax", 400, (1, 2, 3), **common), *seeds_of("sigsoftmax", 1300, (1, 2, 3), **common)]
    made = section_of(spectra, payloads, tmp_path)
    figure = made.figures[0]
    assert "Ranks by the paper's threshold: softmax 401 to 403 (3 seeds); sigsoftmax 1,301 to 1,303" in figure.summary
    assert "seed 1" not in figure.summary + made.findings[0]
    assert "epochs" not in figure.summary + made.findings[0]
    assert "softmax 401 to 403, sigsoftmax 1,301 to 1,303 by the paper's" in made.findings[0]
    assert [switch.label for switch in figure.legend][:3] == [f"softmax, seed {seed}" for seed in (1, 2, 3)]
    longer = seeds_of("softmax", 500, (1,), **{**common, "overrides": ("training.epochs=8", "finetuning.epochs=2")})
    made = section_of(spectra, [*payloads, *longer], tmp_path)
    assert made.figures[0].legend[-1].label == "softmax (training.epochs=8)"
    assert "softmax (training.epochs=4) 401 to 403 (3 seeds); " in made.figures[0].summary


def test_settings_of_one_head_differ_in_dash_and_have_findings_of_their_own(tmp_path):
    heads = {"softmax": (57.0, 402), "sigsoftmax": (56.6, 1300)}
    longer = synthetic_runs.model_spectra(heads)
    shorter = [
        dataclasses.replace(m, run=dataclasses.replace(m.run, overrides=("training.epochs=22",), phase="train"))
        for m in longer
    ]
    made = section_of(spectra, [*longer, *shorter], tmp_path)
    figure = made.figures[0]
    softmax = [switch.look for switch in figure.legend if switch.label.startswith("softmax")]
    assert len({look.dash for look in softmax}) == 2
    assert len({look.slot for look in softmax}) == 1
    assert [finding.partition(": ranks")[0] for finding in made.findings] == [
        "Penn Treebank, finetuned",
        "Penn Treebank, training.epochs=22, not finetuned",
    ]
    assert all("(" not in finding.partition(" by the paper's")[0] for finding in made.findings)


def test_a_cliff_is_drawn_where_it_is():
    values = synthetic_runs.spectrum("x", 402, cliff=True).singular_values
    places = spectra.drawn_places(values)
    assert {401, 402} <= set(places)
    assert (places[0], places[-1]) == (0, len(values) - 1)
    assert len(places) <= spectra.POINTS + 2


def test_a_rank_below_the_noise_floor_is_not_counted(tmp_path):
    made = section_of(spectra, synthetic_runs.model_spectra(), tmp_path)
    table = made.figures[0].table
    place = [column.title for column in table.columns].index("Rank, numpy's, float64")
    assert {row[place] for row in rows_of(table)} == {"not counted: below the noise floor"}
    assert made.findings[0].startswith("Penn Treebank: ranks are a matter of the threshold: softmax 402")


def test_spectra_without_a_run_are_shown_by_their_words(tmp_path):
    plain = [Spectrum(source=f"matrix {n}", words=50, contexts=80, singular_values=(2.0, 1.0, 1e-17)) for n in (1, 2)]
    empty = Spectrum(source="empty", words=50, contexts=80, singular_values=())
    made = section_of(spectra, [*plain, empty, *synthetic_runs.rank_bounds()], tmp_path)
    assert [switch.label for switch in made.figures[0].legend] == ["matrix 1", "matrix 2", "empty"]
    assert rows_of(made.figures[0].table)[2][2] == "–"
    assert rows_of(table_of(made, "Bounds on a rank"))[0][4] == "exactly 2,049"


def test_losses_stand_beside_ranks_where_they_are_on_record(tmp_path):
    models = [*seeds_of("softmax", 400, (1, 2)), *seeds_of("sigsoftmax", 1300, (1, 2))]
    losses = {("softmax", 1): 4.05, ("softmax", 2): 4.04, ("sigsoftmax", 1): 4.03}
    evaluations = [
        EvaluationRecord(
            run=synthetic_runs.identity(head, seed, phase="finetune"),
            split="test",
            loss=loss,
            tokens=82_429,
            seconds=1.0,
            batch=1,
            loss_over_rows=loss,
            epoch=500,
        )
        for (head, seed), loss in losses.items()
    ]
    made = section_of(spectra, [*models, *evaluations], tmp_path)
    text = next(text for text in made.findings if "ranks are a matter of the threshold" in text)
    assert "above the noise floor" in text
    assert text.endswith("Losses in nats: softmax 4.040 to 4.050, sigsoftmax 4.030.")
    table = made.figures[0].table
    place = [column.title for column in table.columns].index("Loss (nats)")
    assert sorted(row.texts[place] for row in table.rows) == ["4.030", "4.040", "4.050", "–"]
