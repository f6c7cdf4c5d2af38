"""The comparison on a small sample of the embedded language, and on text of one's own."""

import dataclasses
import functools
import html
import io
import re
import shutil

import pytest
import torch
from tests.experiments.small_runs import SINGLE, small_resources

from sigsoftmax.experiments import compare, display
from sigsoftmax.experiments.compare import HEADS, CompareConfig, run
from sigsoftmax.experiments.display import RunPlan
from sigsoftmax.experiments.runs.run import Resources
from sigsoftmax.lm.data import corpus as data
from sigsoftmax.lm.training.trainer import Diverged
from sigsoftmax.records import read
from sigsoftmax.records.schemas.model_spectra import ModelSpectrum
from sigsoftmax.records.schemas.training import ComparisonRecord
from sigsoftmax.report import recorded_comparisons
from sigsoftmax.report.loading import load
from sigsoftmax.report.material import Material
from sigsoftmax.report.number_text import wrapped
from sigsoftmax.report.sections import comparison, verdict
from sigsoftmax.report.tables import Table
from sigsoftmax.report.theme import head_label

HEADS_HERE = ("softmax", "sigsoftmax", "mos(K=4)")
CHANGES = ("training.epochs=1", "finetuning.epochs=1")


@pytest.fixture(autouse=True, scope="module")
def short_text():
    before = dict(data.EMBEDDED_LENGTHS)
    data.EMBEDDED_LENGTHS.update(train=3000, valid=400, test=600)
    yield
    data.EMBEDDED_LENGTHS.update(before)


def compared(config):
    said, shown = [], io.StringIO()
    return run(config, said.append, shown), said, shown.getvalue()


@pytest.fixture(scope="module")
def two_seeds(tmp_path_factory, short_text):
    config = CompareConfig(
        heads=("softmax", "sigsoftmax", "mos"),
        seeds=(1, 2),
        changes=CHANGES,
        out=tmp_path_factory.mktemp("compare"),
        resources=Resources(),
    )
    return config, *compared(config)


def test_heads_have_equal_budgets(two_seeds):
    results = two_seeds[1]
    assert [(m.record.run.head, m.record.run.seed) for m in results] == [
        (head, seed) for head in ("softmax", "sigsoftmax", "mos(K=4)") for seed in (1, 2)
    ]
    assert {m.record.epochs for m in results} == {2}
    for seed in (1, 2):
        assert len({m.record.updates for m in results if m.record.run.seed == seed}) == 1


def test_distance_to_the_truth_is_loss_minus_entropy(two_seeds):
    corpus = data.Corpus.load("language")
    contexts, words = corpus.test_contexts[1:], corpus.test[1:]
    of_truth = -corpus.language.log_p_NV[contexts, words].mean().item()
    entropy = torch.special.entr(corpus.language.log_p_NV.exp()).sum(1)[contexts].mean().item()
    for measured in two_seeds[1]:
        record = measured.record
        assert record.kl > 0
        assert record.entropy_rate == corpus.language.entropy_rate
        # The exact KL replaces the word drawn by its expectation: they differ by the luck of these 599 draws.
        assert abs((record.test_loss - of_truth) - record.kl) < 0.25
        assert abs(of_truth - entropy) < 0.25


def test_ranks_of_softmax_are_those_of_theory(two_seeds):
    for measured in two_seeds[1]:
        record = measured.record
        if record.run.head == "softmax":
            assert record.rank_bound == 12 + 2
            assert record.rank <= record.rank_bound
        else:
            assert record.rank_bound == min(record.words, record.contexts)


def test_what_was_measured_is_on_record_and_in_a_page(two_seeds):
    config, results, _, _ = two_seeds
    records = list(read(config.out / "comparison.jsonl"))
    assert [r.payload_as(ComparisonRecord) for r in records if r.kind == ComparisonRecord.KIND] == [
        m.record for m in results
    ]
    assert sum(r.kind == ModelSpectrum.KIND for r in records) == len(results)
    page = (config.out / "report.html").read_text()
    assert "Output heads under equal budgets" in page


def test_the_words_name_the_table_and_its_files(two_seeds):
    _, _, said, _ = two_seeds
    assert said[0].startswith("3 heads, 2 seeds, 1 epoch and 1 with averaged weights each, width 12; 3,000 words")
    assert re.match(r"In all about [\d.]+ (s|min \d+ s) on this machine \(cpu; 12 epochs are left\)", said[1])
    assert "2 epochs" in said[2]
    assert "standard deviation over seeds" in said[2]
    assert said[3].startswith("Perplexity and rank")
    assert said[4].startswith("Which head should I use?\n- ")
    assert "With 2 seeds nothing can be resolved, so no head is recommended" in said[4]
    assert "No control for scale is on record" in said[4]
    assert "comparison.jsonl" in said[-1]


def test_one_line_tells_of_all_runs(tmp_path, monkeypatch):
    config = CompareConfig(
        heads=("softmax", "gss-0"), changes=SINGLE, out=tmp_path / "out", resources=small_resources(tmp_path)
    )
    monkeypatch.setattr(compare, "WholeLine", functools.partial(display.WholeLine, rest=0.0))
    _, _, shown = compared(config)
    lines = [line for line in shown.splitlines() if "done" in line]
    assert lines
    assert all(re.fullmatch(r"\d+% done, \d of 2 runs ended, about .+ left", line) for line in lines)
    assert lines[-1].startswith("100% done, 2 of 2 runs ended")
    assert shown.count("LSTM recurrence") <= 1


def test_what_is_trained_is_not_in_the_plan(two_seeds):
    config = two_seeds[0]
    _, said, _ = compared(config)
    assert said[1] == "All runs are trained already; what is left is to measure them."
    more = dataclasses.replace(config, seeds=(1, 2, 3), heads=("softmax",))
    runs = more.runs()
    plans = compare._plans(runs, data.Corpus.load("language"), more.resources)
    assert [(run.seed, run.phase, plan.epochs_left) for run, plan in plans.items()] == [
        *((1, "train", 0), (2, "train", 0), (3, "train", 1)),
        *((1, "finetune", 0), (2, "finetune", 0), (3, "finetune", 1)),
    ]
    assert all(plan.epoch_seconds > 0.0 for plan in plans.values())


def test_the_time_of_all_runs_is_phase_by_phase():
    runs = CompareConfig(heads=("softmax", "mos"), seeds=(1, 2)).runs()
    plans = {
        run: RunPlan(epoch_seconds=seconds, epochs_left=10) for run, seconds in zip(runs, (1, 1, 1, 3), strict=True)
    }
    plans |= {run.finetuning(): RunPlan(epoch_seconds=1.0, epochs_left=5) for run in runs}
    assert compare._seconds_of_all(plans, Resources(at_once=1)) == 60.0 + 20.0
    starts = 2 * compare.PROCESS_SECONDS
    assert compare._seconds_of_all(plans, Resources(at_once=2)) == 30.0 + 10.0 + starts
    # The longest run bounds it from below.
    assert compare._seconds_of_all(plans, Resources(at_once=4)) == 30.0 + 5.0 + starts
    assert compare._seconds_of_all(dict.fromkeys(runs, RunPlan(epoch_seconds=1.0, epochs_left=0)), Resources()) == 0.0


def test_the_page_shows_what_the_terminal_printed(two_seeds):
    config, results, said, _ = two_seeds
    material = Material.of(load([config.out / "comparison.jsonl"]))
    looks = material.looks()
    opening, made = verdict.section(material, looks), comparison.section(material, looks)
    (figure,) = made.figures
    (table,) = opening.blocks
    assert table.to_text() == figure.table.to_text() == said[2]
    assert next(block for block in made.blocks if isinstance(block, Table)).to_text() == said[3]
    sentences = [*opening.findings, *made.findings]
    assert "\n".join(["Which head should I use?", *(wrapped(f"- {text}") for text in sentences)]) == said[4]
    levels = {head: sum(m.record.kl for m in results if m.record.run.head == head) for head in HEADS_HERE}
    best = min(levels, key=levels.__getitem__)
    assert opening.findings[0].startswith(f"{head_label(best)} has the lowest KL to the truth")
    page = (config.out / "report.html").read_text()
    for text in opening.findings:
        assert page.count(f"<li>{html.escape(text)}</li>") == 1
    assert page.index(html.escape(opening.findings[0])) < page.index("What was run</h2>")
    assert page.count("With 2 seeds nothing can be resolved") == 1


def test_a_comparison_of_fewer_heads_or_other_seeds_takes_nothing_away(two_seeds, tmp_path):
    config, results, _, _ = two_seeds
    out = shutil.copytree(config.out, tmp_path / "again")
    fewer = dataclasses.replace(config, heads=("softmax",), seeds=(2,), out=out)
    _, said, _ = compared(fewer)
    assert said[2] == "With 5 runs of earlier comparisons in this folder under the same budget."
    kept = [r.payload_as(ComparisonRecord).run for r in read(out / "comparison.jsonl") if r.kind == "comparison"]
    assert set(kept) == {m.record.run for m in results}
    assert len(kept) == len(results)
    assert "MoS(K=4)" in said[3]
    # A third seed makes it a comparison that can resolve something.
    more, said, _ = compared(dataclasses.replace(config, seeds=(3,), out=out))
    assert [m.record.run.seed for m in more] == [3, 3, 3]
    assert "95 % interval" in said[3]
    page = (out / "report.html").read_text()
    assert "3 seeds" in page
    assert "nothing can be resolved" not in page


def test_another_budget_in_the_same_folder_is_another_comparison(two_seeds, tmp_path):
    config = two_seeds[0]
    out = shutil.copytree(config.out, tmp_path / "again")
    longer = dataclasses.replace(config, heads=("softmax", "mos"), seeds=(1,), out=out)
    longer = dataclasses.replace(longer, changes=("finetuning.epochs=2", "training.epochs = 1"))
    _, said, _ = compared(longer)
    assert "finetuning.epochs=2" in said[2]
    assert "sigsoftmax" not in said[2]
    found = recorded_comparisons((out / "comparison.jsonl",))
    assert [(len(comparison.heads), comparison.ranking.seeds) for comparison in found] == [(3, [1, 2]), (2, [1])]


def test_a_budget_is_the_same_for_all_heads_and_however_it_is_written():
    one = CompareConfig(heads=("softmax",), changes=("training.learning_rate=20", "training.epochs=4"))
    other = CompareConfig(heads=("mos",), changes=("training.epochs = 4", "training.learning_rate=2e1"))
    assert one.budget() == other.budget()
    assert one.budget() != dataclasses.replace(one, quick=True).budget()
    assert CompareConfig(setting="wt2", heads=("mos",)).budget() == CompareConfig(setting="wt2").budget()


def test_a_second_time_nothing_is_trained(two_seeds):
    config, results, _, _ = two_seeds
    again, _, shown = compared(config)
    # Measuring may take long enough for a line; of training there is none.
    assert all(line.startswith("100% done") for line in shown.splitlines())
    assert [m.record for m in again] == [m.record for m in results]


def test_on_text_of_ones_own_there_is_no_truth(tmp_path):
    config = CompareConfig(
        heads=("softmax", "gss-0"),
        changes=SINGLE,
        out=tmp_path / "out",
        resources=small_resources(tmp_path),
    )
    results, said, _ = compared(config)
    assert all(m.record.kl is None and m.record.run.recipe.startswith("tiny-") for m in results)
    assert "the test loss less that of softmax" in said[2]


def test_a_head_that_diverges_is_left_out_and_the_others_compared(tmp_path, monkeypatch):
    config = CompareConfig(
        heads=("softmax", "gss-0"), changes=SINGLE, out=tmp_path / "out", resources=small_resources(tmp_path)
    )
    runs = config.runs()
    training = dataclasses.replace(runs[0].recipe.training, learning_rate=1e30, clip=1e30)
    wild = dataclasses.replace(runs[1], recipe=dataclasses.replace(runs[1].recipe, training=training))
    monkeypatch.setattr(CompareConfig, "runs", lambda self: [runs[0], wild])
    said = []
    with pytest.raises(Diverged, match="tiny-gss-0"):
        run(config, said.append, io.StringIO())
    assert any(text.startswith("Left out: tiny-gss-0") for text in said)
    assert any("softmax" in text and "perplexity" in text for text in said[2:])


def test_the_control_for_scale_is_among_the_defaults():
    assert {"softmax", "softmax-1.5", "sigsoftmax"} <= set(HEADS)
    heads = [recipe.model.head for recipe in CompareConfig().recipes()]
    assert "softmax(alpha=1.5)" in heads
    assert len({dataclasses.replace(recipe.training) for recipe in CompareConfig().recipes()}) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"heads": ("softmx",)}, "did you mean"),
        ({"heads": ("softmax", "softmax")}, "each head is compared once"),
        ({"setting": "ptbb"}, "setting must be one of"),
        ({"seeds": ()}, "at least one seed"),
        ({"changes": ("model.head=softmax",)}, "heads are chosen with --heads"),
        ({"changes": ("training.epoch=1",)}, "no field 'training.epoch'"),
    ],
)
def test_bad_settings_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        CompareConfig(**options)
