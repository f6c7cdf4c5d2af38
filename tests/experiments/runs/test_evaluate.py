"""Evaluation of checkpoints: the numbers, the records, and texts that are not the model's own."""

import math

import pytest
from tests.experiments.small_runs import small_resources, small_runs, write_text

from sigsoftmax.experiments.runs.evaluate import EvaluateConfig, evaluate_best, run
from sigsoftmax.experiments.runs.executors import train_runs
from sigsoftmax.experiments.runs.ranks import log_output_blocks
from sigsoftmax.experiments.runs.run import Resources
from sigsoftmax.lm.saving.saved_models import load_model
from sigsoftmax.records import read


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("evaluate")
    resources = small_resources(folder)
    [(one, evaluations)] = train_runs(small_runs(folder, "tiny-sigsoftmax"), resources, evaluate_best)
    return one, resources, evaluations


def test_the_verb_agrees_with_what_training_recorded(trained):
    one, resources, evaluations = trained
    before = len(list(read(one.path / "evaluations.jsonl")))
    said = []
    found = run(EvaluateConfig(checkpoint=one.folder, resources=resources), said.append)
    assert [(e.split, e.batch, e.loss) for e in found] == [(e.split, e.batch, e.loss) for e in evaluations]
    assert len(said) == 3
    assert len(list(read(one.path / "evaluations.jsonl"))) == before + 3


def test_a_split_and_a_batch_can_be_chosen(trained):
    one, resources, _ = trained
    config = EvaluateConfig(checkpoint=one.best, splits=("test",), batch=3, resources=resources)
    [found] = run(config, lambda _: None)
    assert (found.split, found.batch, found.tokens) == ("test", 3, 3 * ((20 * 7) // 3 - 1))


def test_log_outputs_are_those_that_the_loss_is_made_of(trained):
    one, resources, evaluations = trained
    corpus = resources.corpus(one.recipe.corpus)
    blocks = list(log_output_blocks(load_model(one.best).model, corpus.test))
    positions = sum(len(block) for block in blocks)
    assert positions == corpus.test.numel() - 1
    total, start = 0.0, 0
    for block in blocks:
        targets = corpus.test[start + 1 : start + 1 + len(block)]
        total -= float(block.gather(1, targets.unsqueeze(1)).sum())
        start += len(block)
    assert math.isclose(total / positions, evaluations[2].loss, rel_tol=1e-5)


def test_another_text_is_evaluated_and_not_recorded(trained, tmp_path):
    one, _, evaluations = trained
    before = (one.path / "evaluations.jsonl").read_bytes()
    said = []
    other = Resources(data=write_text(tmp_path / "other", seed=7))
    found = run(EvaluateConfig(checkpoint=one.best, splits=("test",), resources=other), said.append)
    assert "another text" in said[0]
    assert found[0].loss != evaluations[2].loss
    assert (one.path / "evaluations.jsonl").read_bytes() == before


def test_a_text_in_other_words_is_refused(trained, tmp_path):
    folder = write_text(tmp_path / "foreign")
    (folder / "test.txt").write_text("word1 strange word2\n")
    with pytest.raises(ValueError, match="the word 'strange' is not among"):
        run(EvaluateConfig(checkpoint=trained[0].best, resources=Resources(data=folder)), lambda _: None)


def test_a_file_that_is_no_checkpoint_is_refused(trained, tmp_path):
    (tmp_path / "best.safetensors").write_bytes(b"no")
    with pytest.raises(ValueError, match="no safetensors file"):
        run(EvaluateConfig(checkpoint=tmp_path, resources=trained[1]), lambda _: None)
    with pytest.raises(ValueError, match=r"best\.safetensors for using the model"):
        run(EvaluateConfig(checkpoint=trained[0].path / "last.safetensors", resources=trained[1]), lambda _: None)
