"""The opening of the page: rankings of all runs on record, each text and budget for itself."""

import dataclasses
import math
import re

import pytest
from tests.records import samples
from tests.report import synthetic_runs
from tests.report.reading import Page
from tests.report.sections.making import rows_of, section_of

from sigsoftmax.records import Record, append
from sigsoftmax.records.schemas.sweeps import TrialRecord
from sigsoftmax.records.schemas.training import DynamicEvaluationRecord, EpochRecord, EvaluationRecord
from sigsoftmax.report import ReportConfig, write_report
from sigsoftmax.report.sections import verdict
from sigsoftmax.report.sections.section import Absent
from sigsoftmax.report.tables import Table, plain_text

TWO_HEADS = {"softmax": (57.0, 402), "sigsoftmax": (55.0, 1300)}


def text_of(section) -> str:
    blocks = [block.to_text() if isinstance(block, Table) else plain_text(block) for block in section.blocks]
    return "\n".join([*section.findings, *blocks])


def changed(payloads, **changes):
    return [dataclasses.replace(p, run=dataclasses.replace(p.run, **changes)) for p in payloads]


def test_the_page_opens_with_the_answer(tmp_path):
    append(
        tmp_path / "records.jsonl",
        [Record.of(p, synthetic_runs.environment("a command")) for p in synthetic_runs.comparisons(seeds=3)],
    )
    write_report(ReportConfig(paths=(tmp_path / "records.jsonl",), out=tmp_path / "page.html"))
    page = Page(tmp_path / "page.html")
    assert next(text for level, text in page.headings() if level == 2) == "Which head should I use?"
    html = (tmp_path / "page.html").read_text()
    assert html.index("Use MoS(K=4)") < html.index("In short</h2>") < html.index("What was run</h2>")
    assert html.index('href="#verdict"') < html.index('href="#overview"')


def test_a_comparison_is_ranked_with_its_table(tmp_path):
    made = section_of(verdict, synthetic_runs.comparisons(seeds=3), tmp_path)
    assert made.findings[0].startswith("Use MoS(K=4)")
    (table,) = made.blocks
    assert rows_of(table)[0][0] == "MoS(K=4)"
    assert any(text.startswith("The control for scale: softmax(alpha=1.5)") for text in made.findings)


def test_trained_models_are_ranked_at_the_last_stage_that_all_have(tmp_path):
    payloads = synthetic_runs.training(TWO_HEADS, epochs=3)
    made = section_of(verdict, payloads, tmp_path)
    (table,) = made.blocks
    assert table.caption == "Penn Treebank; ptb recipes, dynamic evaluation; 3 epochs, 3 seeds"
    assert table.columns[1].title == "Test perplexity"
    rows = rows_of(table)
    assert [row[0] for row in rows] == ["sigsoftmax", "softmax"]
    # Three epochs of 5.6 s and validation of 0.5 s each.
    assert rows[0][-2:] == ["18 s", "24,221,600"]
    without = [p for p in payloads if not (isinstance(p, DynamicEvaluationRecord) and p.run.head == "sigsoftmax")]
    (table,) = section_of(verdict, without, tmp_path).blocks
    assert "finetuned" in table.caption
    assert any("not ranked by: dynamic evaluation" in note for note in table.notes)


def test_a_stage_with_seeds_enough_is_preferred_to_a_later_one(tmp_path):
    payloads = synthetic_runs.training(TWO_HEADS, epochs=3)
    epochs = [p for p in payloads if isinstance(p, EpochRecord)]
    one = [p for p in payloads if isinstance(p, EvaluationRecord) and p.run.seed == synthetic_runs.SEEDS[0]]
    (table,) = section_of(verdict, [*epochs, *one], tmp_path).blocks
    assert "without finetuning; 3 epochs, 3 seeds" in table.caption
    assert table.columns[1].title == "Validation perplexity"
    assert any("least of the epochs on record" in note for note in table.notes)


def test_settings_and_texts_are_ranked_for_themselves_and_that_is_said(tmp_path):
    usual = [p for p in synthetic_runs.training(TWO_HEADS, epochs=3) if isinstance(p, EpochRecord)]
    longer = changed(usual, overrides=("training.epochs=12",))
    text = text_of(section_of(verdict, [*usual, *longer], tmp_path))
    assert "Runs of different lengths or settings are ranked for themselves" in text
    assert "texts, each ranked for itself" not in text
    other = changed(usual, corpus="my-text", corpus_checksum="another")
    text = text_of(section_of(verdict, [*usual, *other], tmp_path))
    assert "The records are of 2 texts, each ranked for itself" in text
    assert "Runs of different lengths" not in text
    assert text.count("No control for scale is on record") == 2


def test_rankings_that_can_resolve_nothing_are_folded(tmp_path):
    usual = [p for p in synthetic_runs.training(TWO_HEADS, epochs=3) if isinstance(p, EpochRecord)]
    few = changed([p for p in usual if p.run.seed != synthetic_runs.SEEDS[0]], overrides=("training.epochs=12",))
    made = section_of(verdict, [*few, *usual], tmp_path)
    first, second, *_ = made.blocks
    assert "3 seeds" in first
    assert second.startswith("<details><summary>1 more ranking, with fewer than 3 seeds in common</summary>")
    # Seven seeds of one head are no pairs.
    alone = [dataclasses.replace(p, run=dataclasses.replace(p.run, seed=p.run.seed + 100)) for p in few]
    alone = [p for p in alone if p.run.head == "softmax"]
    first, second, *_ = section_of(verdict, [*few, *alone, *usual], tmp_path).blocks
    assert second.startswith("<details>")


def test_names_of_rankings_say_only_what_differs(tmp_path):
    usual = [p for p in synthetic_runs.training(TWO_HEADS, epochs=3) if isinstance(p, EpochRecord)]
    first, second = (changed(usual, overrides=(f"training.epochs={n}", "training.batch=8")) for n in (3, 12))
    made = section_of(verdict, [*first, *second], tmp_path)
    assert re.findall(r"<h3>(.*?)</h3>", "".join(made.blocks)) == ["training.epochs=3", "training.epochs=12"]


def test_a_head_given_as_a_change_is_the_same_setting(tmp_path):
    usual = [p for p in synthetic_runs.training({"softmax": (57.0, 402)}, epochs=3) if isinstance(p, EpochRecord)]
    other = changed(usual, head="gss(k=0)", overrides=("model.head=gss(k=0)",))
    (table,) = section_of(verdict, [*usual, *other], tmp_path).blocks
    assert [row[0] for row in rows_of(table)] == ["softmax", "gss(k=0)"]


def test_what_has_no_second_head_is_named_and_not_ranked(tmp_path):
    usual = [p for p in synthetic_runs.training({"softmax": (57.0, 402)}, epochs=3) if isinstance(p, EpochRecord)]
    made = section_of(verdict, usual, tmp_path)
    assert made.findings == [verdict.NO_TWO]
    assert "Not ranked, for want of a second head: softmax, Penn Treebank, ptb recipes" in text_of(made)


def trial(head: str, seed: int, loss: float, *point: str) -> TrialRecord:
    run = synthetic_runs.identity(head, seed, corpus="my-text", recipe=f"tiny-{head}", overrides=point)
    return samples.trial(run=run, point=point, valid_loss=loss, test_loss=loss)


def test_trials_of_a_sweep_are_ranked_point_by_point(tmp_path):
    payloads = [
        trial(head, seed, loss + 0.01 * seed, f"training.learning_rate={rate}")
        for rate in (10, 20)
        for head, loss in (("softmax", 4.0), ("sigsoftmax", 3.8))
        for seed in (1, 2, 3)
    ]
    made = section_of(verdict, payloads, tmp_path)
    text = text_of(made)
    assert "training.learning_rate=10" in text
    assert "training.learning_rate=20" in text
    assert text.count("Use sigsoftmax") == 2


def test_runs_of_a_comparison_are_not_ranked_again_as_training(tmp_path):
    compared = synthetic_runs.comparisons(seeds=3)
    epochs = [
        EpochRecord(
            run=p.run,
            epoch=1,
            optimizer="sgd",
            updates=1,
            train_loss=4.0,
            train_loss_parts=(),
            valid_loss=4.0,
            valid_loss_over_rows=4.0,
            is_best=True,
            seconds_training=1.0,
            seconds_validation=1.0,
        )
        for p in compared
    ]
    assert len(section_of(verdict, [*compared, *epochs], tmp_path).blocks) == 1


@pytest.mark.parametrize("loss", [math.inf, -1000.0])
def test_losses_beyond_a_float_are_no_obstacle(tmp_path, loss):
    usual = [p for p in synthetic_runs.training(TWO_HEADS, epochs=1) if isinstance(p, EpochRecord)]
    odd = [dataclasses.replace(p, valid_loss=loss) if p.run.head == "softmax" else p for p in usual]
    section_of(verdict, odd, tmp_path)


def test_without_trained_heads_there_is_no_verdict(tmp_path):
    from sigsoftmax.report.loading import load
    from sigsoftmax.report.material import Material

    path = tmp_path / "records.jsonl"
    append(path, [Record.of(p, synthetic_runs.environment("a command")) for p in synthetic_runs.capacities()])
    material = Material.of(load([path]))
    made = verdict.section(material, material.looks())
    assert made == Absent("Which head should I use?", "sigsoftmax compare --seeds 1,2,3")


def test_longer_runs_of_the_same_text_speak_beside_the_answer(tmp_path):
    """Two seeds of longer runs resolve nothing, but a reader must not be sent off by the short ones alone."""
    short = [p for p in synthetic_runs.training(TWO_HEADS, epochs=3) if isinstance(p, EpochRecord)]
    long = synthetic_runs.training({**TWO_HEADS, "sigsoftmax": (58.0, 1300)}, epochs=9)
    long = [p for p in long if isinstance(p, EpochRecord) and p.run.seed != synthetic_runs.SEEDS[0]]
    made = section_of(verdict, [*short, *changed(long, overrides=("training.epochs=9",))], tmp_path)
    said = text_of(made)
    (sentence,) = re.findall(r"Longer runs are on record .*?nothing\.", said)
    assert "training.epochs=9" in sentence
    assert "there sigsoftmax is" in sentence
    assert "nats above softmax" in sentence
    assert sentence.endswith("; 2 seeds resolve nothing.")
    # The longer ones are not followed by a word on the shorter ones.
    assert said.count("Longer runs are on record") == 1
