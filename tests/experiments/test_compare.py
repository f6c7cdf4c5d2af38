"""The comparison on a small sample of the embedded language, and on text of one's own."""

import dataclasses
import io

import pytest
import torch
from tests.experiments.small_runs import SINGLE, small_resources

from sigsoftmax.experiments.compare import HEADS, CompareConfig, run
from sigsoftmax.experiments.display import PlainLines
from sigsoftmax.experiments.runs import Resources
from sigsoftmax.lm import data
from sigsoftmax.lm.training import Diverged
from sigsoftmax.records import read
from sigsoftmax.records.model_spectra import ModelSpectrum
from sigsoftmax.records.training import ComparisonRecord

CHANGES = ("training.epochs=1", "finetuning.epochs=1")


@pytest.fixture(autouse=True, scope="module")
def short_text():
    before = dict(data.EMBEDDED_LENGTHS)
    data.EMBEDDED_LENGTHS.update(train=3000, valid=400, test=600)
    yield
    data.EMBEDDED_LENGTHS.update(before)


def compared(config):
    said, shown = [], io.StringIO()
    return run(config, said.append, PlainLines(shown)), said, shown.getvalue()


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
    of_truth = -corpus.language.log_p_NM[contexts, words].mean().item()
    entropy = torch.special.entr(corpus.language.log_p_NM.exp()).sum(1)[contexts].mean().item()
    for measured in two_seeds[1]:
        record = measured.record
        assert record.kl > 0
        assert record.entropy_rate == corpus.language.entropy_rate
        # The exact KL replaces the word drawn by its expectation: they differ by the luck of these 599 draws.
        assert abs((record.test_loss - of_truth) - record.kl) < 0.25
        assert abs(of_truth - entropy) < 0.25
        assert len(measured.values_L) == corpus.test.numel() - 1


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
    assert said[0].startswith("3 heads, 2 seeds, 1 epochs and 1 with averaged weights each, width 12; 3,000 words")
    assert "standard deviation over 2 seeds" in said[1]
    assert "comparison.jsonl" in said[-1]


def test_a_second_time_nothing_is_trained(two_seeds):
    config, results, _, _ = two_seeds
    again, _, shown = compared(config)
    assert "epoch" not in shown
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
    assert "loss minus" in said[1]


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
        run(config, said.append, PlainLines(io.StringIO()))
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
