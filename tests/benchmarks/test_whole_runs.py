"""Tables and pictures of the whole runs: every cell is there, what is not run says so, and numbers are the records'."""

import dataclasses
import json
import math
from pathlib import Path

import pytest
import whole_run_findings
import whole_run_pictures
import whole_runs
from paper_queue import QUEUE
from tests.report import synthetic_runs
from tests.report.test_tables import TABLE
from whole_run_findings import Claim, claims, findings, summary
from whole_runs import NOT_RUN, WholeRuns, first_table, markdown_of

from sigsoftmax.records import Payload, Record, append
from sigsoftmax.records.published import paper
from sigsoftmax.records.schemas.model_spectra import ModelSpectrum
from sigsoftmax.records.schemas.spectra import Spectrum
from sigsoftmax.records.schemas.training import DynamicEvaluationRecord, EpochRecord, EvaluationRecord, RunIdentity
from sigsoftmax.report.number_text import NO_BREAK
from sigsoftmax.report.tables import Column, Row, Table

CHANGES = ("training.epochs=30", "finetuning.epochs=2")


def run_of(head: str, seed: int, levels: tuple[float, float, float], *, early: float = 80.0) -> list[Payload]:
    """A whole run with the test perplexities of its three stages, and ``early`` on validation after 22 epochs."""
    trained = synthetic_runs.identity(head, seed, overrides=CHANGES, precision="bf16")
    finetuned = dataclasses.replace(trained, phase="finetune")
    found: list[Payload] = [epoch(trained, number, early if number == 22 else levels[0]) for number in range(1, 31)]
    found += [epoch(finetuned, number, levels[1]) for number in (1, 2)]
    for run, level in ((trained, levels[0]), (finetuned, levels[1])):
        for split, batch in (("valid", 10), ("test", 1)):
            loss = math.log(level)
            found.append(
                EvaluationRecord(
                    run=run, split=split, batch=batch, loss=loss, loss_over_rows=loss, tokens=9, epoch=30, seconds=1.0
                )
            )
    for split, rate, chosen, seconds in (
        *(("valid", 1e-5, False, 5.0), ("valid", 2e-5, False, 5.0)),
        *(("valid", 2e-5, True, 5.0), ("test", 2e-5, True, 3.0)),
    ):
        found.append(
            DynamicEvaluationRecord(
                run=finetuned,
                split=split,
                learning_rate=rate,
                decay=0.002,
                epsilon=2e-5,
                window=5,
                loss=math.log(levels[2]) + (0.1 if rate == 1e-5 else 0.0),
                tokens=9,
                complete=True,
                chosen=chosen,
                seconds=seconds,
            )
        )
    return found


def epoch(run: RunIdentity, number: int, perplexity: float) -> EpochRecord:
    loss = math.log(perplexity)
    return EpochRecord(
        run=run,
        epoch=number,
        optimizer="asgd" if number > 25 or run.phase == "finetune" else "sgd",
        updates=1,
        train_loss=loss,
        train_loss_parts=(),
        valid_loss=loss,
        valid_loss_over_rows=loss,
        is_best=True,
        seconds_training=2.0,
        seconds_validation=0.5,
        concurrent_runs=2,
    )


def spectrum_of(head: str, seed: int, rank: int) -> ModelSpectrum:
    """By the paper's threshold so many singular values count."""
    run = synthetic_runs.identity(head, seed, phase="finetune", overrides=CHANGES, precision="bf16")
    values = (1.0, *[1e-3] * (rank - 1), *[1e-9] * (1000 - rank))
    spectrum = Spectrum(
        source="a model",
        words=1000,
        contexts=2000,
        singular_values=values,
        dtype="float32",
        value_error=1e-8,
        seconds=6.0,
    )
    return ModelSpectrum(run=run, split="test", spectrum=spectrum)


@pytest.fixture
def runs_of(tmp_path: Path):
    def made(*payloads: Payload) -> WholeRuns:
        append(tmp_path / "line.jsonl", [Record.of(payload) for payload in payloads])
        return WholeRuns(tmp_path)

    return made


def cells(text: str, beginning: str) -> list[str]:
    line = next(line for line in text.splitlines() if line.startswith(f"| {beginning}"))
    return [cell.strip().replace(NO_BREAK, " ") for cell in line.strip("|").split("|")]


def test_tables_of_the_report_as_markdown() -> None:
    lines = markdown_of(TABLE).splitlines()
    assert lines[:2] == ["| Name | first: valid | first: test | n |", "| --- | ---: | ---: | ---: |"]
    assert lines[2:4] == ["| **softmax** |  |  |  |", "| paper | 51.2 | 50.5 | 10 |"]
    assert lines[-2:] == ["", "bold & safe"]
    assert "bold" not in markdown_of(TABLE, has_notes=False)
    piped = Table(caption="", columns=[Column("a"), Column("b")], rows=[Row(("x|y", "z"))])
    assert markdown_of(piped).splitlines()[-1] == "| x\\|y | z |"


def test_without_records_every_cell_says_so(tmp_path: Path) -> None:
    runs = WholeRuns(tmp_path / "no-such-folder")
    text = first_table(runs)
    assert cells(text, "softmax |")[1:] == ["", "", NOT_RUN, "57.0 ± 0.6", NOT_RUN, "50.5 ± 0.5"]
    # The paper has no such head.
    assert cells(text, "softmax(alpha=1.5)")[3:] == [NOT_RUN, "", NOT_RUN, ""]
    assert whole_runs.paper_tables(runs).count(f"ours: {NOT_RUN}") == 5 * len(paper.HEADS)
    assert whole_run_pictures.curves_picture(runs) is None
    assert whole_run_pictures.pictures(runs, tmp_path, check=False) == []
    assert {claim.verdict for claim in claims(runs, None)} == {"open"}
    assert NOT_RUN in summary(runs)


def test_a_run_fills_its_cells_and_leaves_the_others(runs_of) -> None:
    runs = runs_of(*run_of("softmax", 141, (61.0, 59.0, 51.0)), *run_of("softmax", 142, (61.0, 59.4, 51.2)))
    row = cells(first_table(runs), "softmax |")
    assert row[1:] == ["30 + 2", "2", "59.20 ± 0.28", "57.0 ± 0.6", "51.10 ± 0.14", "50.5 ± 0.5"]
    assert cells(first_table(runs), "sigsoftmax")[3] == NOT_RUN
    short, below = first_table(runs, is_short=True).split("\n\n")
    assert len(short.splitlines()) == 3
    assert below.startswith("Not run yet: softmax(alpha=1.5), scale only; sigsoftmax; ")
    tables = whole_runs.paper_tables(runs)
    assert [f"### Table {number}." in tables for number in range(1, 6)] == [True] * 5
    rows = [line for line in tables.splitlines() if line.startswith("| ours, training.epochs=30")]
    assert [len(row.split("|")) - 2 for row in rows] == [5, 9]  # tables 1 and 4


def test_runs_of_another_length_have_a_row_of_their_own(runs_of) -> None:
    longer = [
        dataclasses.replace(p, run=dataclasses.replace(p.run, overrides=("training.epochs=31",)), epoch=31)
        for p in run_of("softmax", 141, (50.0, 49.0, 40.0))
        if isinstance(p, EpochRecord | EvaluationRecord)
    ]
    runs = runs_of(*longer, *run_of("softmax", 141, (61.0, 59.0, 51.0)))
    assert cells(first_table(runs), "softmax |")[3] == "59.00"
    assert cells(first_table(runs), "softmax, longer")[3] == "49.00"
    assert "longer" not in first_table(runs, is_short=True)


def test_another_corpus_has_rows_where_it_was_run(runs_of) -> None:
    other = [
        dataclasses.replace(p, run=dataclasses.replace(p.run, corpus="wikitext-2", recipe="wt2-softmax"))
        for p in run_of("softmax", 1882, (68.0, 65.0, 44.0))
    ]
    runs = runs_of(*other)
    row = cells(first_table(runs), "softmax, WikiText-2")
    assert row[1:] == ["30 + 2", "1", "65.00", "64.7 ± 0.2", "44.00", "43.3 ± 0.1"]
    assert first_table(runs).count("WikiText-2") == 1
    assert "WikiText-2" not in first_table(runs, is_short=True)


def test_every_model_has_its_static_and_dynamic_perplexity(runs_of) -> None:
    runs = runs_of(*run_of("softmax", 141, (61.0, 60.0, 51.0)))
    rows = [line for line in whole_runs.static_and_dynamic(runs).splitlines() if "seed 141" in line]
    assert len(rows) == 2
    assert cells(rows[1], "softmax")[1:] == [
        "test",
        "60.00",
        "51.00",
        "−15.00 %",
        "η = 2e-05, λ = 0.002 (η on the edge)",
        "2 of 24",
    ]


def test_times_count_what_ran_together_once(runs_of) -> None:
    runs = runs_of(*run_of("softmax", 141, (61.0, 60.0, 51.0)), spectrum_of("softmax", 141, 402))
    assert cells(whole_runs.times(runs), "softmax")[1:] == [
        "2",
        "30 epochs, 1 min 15 s",
        "2 epochs, 5 s, ended at its limit",
        "2 points and test, 8 s",
        "6 s",
    ]


def test_one_seed_resolves_nothing_and_three_do(runs_of) -> None:
    heads = (("softmax", 60.0, 81.0), ("sigsoftmax", 58.0, 79.0))
    first = [p for head, level, early in heads for p in run_of(head, 141, (level, level, level - 8.0), early=early)]
    assert "With 1 seed nothing is resolved" in findings(runs_of(*first), None)
    more = [
        p
        for seed in (142, 143)
        for head, level, early in heads
        for p in run_of(head, seed, (level + seed, level + seed, level + seed - 8.0), early=early)
    ]
    verdicts: dict[str, Claim] = {}
    for claim in claims(runs_of(*more), -0.018):
        verdicts.setdefault(claim.text.split("*")[1], claim)
    lower = verdicts["sigsoftmax is lower than softmax"]
    assert lower.verdict == "holds"
    assert "resolved by 3 seeds" in lower.text
    # softmax of scaled logits is in line 4, and no run of it is on record.
    assert f"{NOT_RUN} (line 4 of the queue)" in verdicts["sigsoftmax is lower than softmax of scaled logits"].text
    assert "as in the runs of 22 epochs (−1.80 %)" in verdicts["The lead of the first epochs remains."].text


def test_a_lead_that_turns_is_said_to_be_gone(runs_of) -> None:
    runs = runs_of(
        *run_of("softmax", 141, (60.0, 59.0, 51.0), early=80.0),
        *run_of("sigsoftmax", 141, (61.2, 60.0, 51.0), early=79.2),
    )
    (claim,) = (c for c in claims(runs, None) if c.text.startswith("*The lead"))
    assert claim.verdict == "open"
    assert "−1.00 % after 22 epochs, and +2.00 % after 30: the lead is gone (1 seed)" in claim.text
    assert "softmax at epoch 26, sigsoftmax at epoch 26" in claim.text
    (claim,) = (c for c in claims(runs, None) if c.text.startswith("*Dynamic evaluation"))
    assert "of softmax by −13.56 % and that of sigsoftmax by −15.00 % (paper −11.40 % and −13.07 %)" in claim.text
    assert "favours sigsoftmax here" in claim.text
    shown = summary(runs)
    assert "is +1.69 % after finetuning (static) and +0.00 % under dynamic evaluation. With 1 seed nothing" in shown


def test_finetuning_of_unequal_lengths_is_said_with_the_gap_at_equal_ones(runs_of) -> None:
    """softmax has eight epochs and its rule fires in the last; sigsoftmax was ended in the third by the clock."""
    softmax, other = (run_of(head, 141, (60.0, 59.0, 51.0)) for head in ("softmax", "sigsoftmax"))
    finetuned = {p.run.head: p.run for p in (*softmax, *other) if p.run.phase == "finetune"}
    longer = {head: dataclasses.replace(run, overrides=CHANGES[:1]) for head, run in finetuned.items()}
    payloads = [
        dataclasses.replace(p, run=dataclasses.replace(p.run, overrides=CHANGES[:1])) for p in (*softmax, *other)
    ]
    payloads += [epoch(longer["softmax"], number, 59.0 + 0.1 * (number > 2)) for number in range(1, 9)]
    payloads += [epoch(longer["sigsoftmax"], number, 60.0 - 0.1 * number) for number in range(1, 4)]
    (claim,) = (c for c in claims(runs_of(*payloads), None) if c.text.startswith("*The gap after finetuning"))
    assert "8 epochs of softmax (ended by its rule)" in claim.text
    assert "3 epochs of sigsoftmax (ended by the time budget)" in claim.text
    assert (
        "after 3 epochs of both the validation perplexity of sigsoftmax relative to softmax was +1.02 %" in claim.text
    )


def test_ranks_stand_beside_thresholds_and_losses(runs_of) -> None:
    runs = runs_of(
        *(*run_of("softmax", 141, (60.0, 59.0, 51.0)), *run_of("sigsoftmax", 141, (61.0, 60.0, 51.0))),
        *(spectrum_of("softmax", 141, 402), spectrum_of("sigsoftmax", 141, 900)),
    )
    row = cells(whole_runs.ranks(runs), "sigsoftmax")
    assert row[1:6] == ["4.094 (60.00)", "900", "900", "below noise", "900"]
    assert row[-1] == "4,640"
    verdicts = {claim.text.split("*")[1]: claim.verdict for claim in claims(runs, None)}
    assert verdicts["The rank of softmax is at most d + 2 = 402."] == "holds"
    assert verdicts["By the paper's threshold the heads order by rank as in its table 3:"] == "holds"
    # sigsoftmax has the higher rank and the higher perplexity.
    assert verdicts["A higher rank lowers the loss."] == "does not hold"
    shown = summary(runs)
    assert "Softmax has rank 402 by the paper's threshold, 402 by numpy's in float32 and 402 above the noise" in shown
    assert "at a test loss of 4.094 nats" in shown
    assert "noise floor: 2e-08 of the largest" in shown


def test_pictures_are_drawn_once_and_say_what_they_show(runs_of, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    runs = runs_of(
        *(*run_of("softmax", 141, (60.0, 59.0, 51.0)), *run_of("sigsoftmax", 141, (61.0, 60.0, 50.0))),
        spectrum_of("softmax", 141, 402),
    )
    names = [whole_run_pictures.CURVES, whole_run_pictures.SPECTRA]
    assert whole_run_pictures.pictures(runs, tmp_path, check=True) == names
    assert not list(tmp_path.glob("*.png"))
    assert whole_run_pictures.pictures(runs, tmp_path, check=False) == names
    assert whole_run_pictures.pictures(runs, tmp_path, check=True) == []
    assert "softmax 59.00, sigsoftmax 60.00" in whole_run_pictures.picture_text(runs)
    assert "softmax: rank 402" in whole_run_pictures.spectra_text(runs)
    drawn = whole_run_pictures.curves_picture(runs)
    assert drawn is not None
    assert drawn.finetuning_from == 30
    assert drawn.training[0].points[-1] == (32.0, pytest.approx(59.0))
    (stages,) = drawn.stages
    assert [round(y, 2) for _, y in stages.points] == [1.67, 1.69, -1.96]
    (published,) = drawn.published
    assert [round(y, 2) for _, y in published.points] == [-0.68, -0.7, -2.57]


def test_questions_are_about_heads_of_the_queue() -> None:
    for question in whole_run_findings.QUESTIONS:
        planned = set().union(*(whole_runs.line_heads(line, question.corpus) for line in QUEUE))
        assert {question.first, question.second} <= planned


def test_records_of_whole_runs_hold_where_they_come_from() -> None:
    """Revision, versions, device and command, in every record that is kept."""
    for path in sorted(whole_runs.FOLDER.glob("*.jsonl")):
        assert path.stem in {line.name for line in QUEUE}
        for text in path.read_text(encoding="utf-8").splitlines():
            where = json.loads(text)["environment"]
            assert all(where[key] for key in ("commit", "torch_version", "package_version", "device", "command"))
