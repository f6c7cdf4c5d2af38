"""Runs: which recipes and seeds, in which folders, and what is refused."""

import os
from pathlib import Path

import pytest
from tests.experiments.small_runs import small_resources, small_runs, write_text

from sigsoftmax.experiments.runs.evaluate import evaluate_best
from sigsoftmax.experiments.runs.executors import train_runs
from sigsoftmax.experiments.runs.run import (
    Resources,
    checkpoint_file,
    chosen_recipes,
    epoch_records,
    folder_name,
    measured_on,
    payloads,
    planned_runs,
    run_in,
    text_of,
)
from sigsoftmax.lm.saving.saved_models import load_model
from sigsoftmax.records.schemas.training import EpochRecord, EvaluationRecord


def test_every_recipe_meets_every_seed():
    recipes = chosen_recipes(["ptb-softmax", "ptb-mos"], None, ["training.epochs=3"])
    runs = planned_runs(recipes, (1, 2), Path("out"))
    assert [(run.recipe.name, run.seed, str(run.path)) for run in runs] == [
        ("ptb-softmax", 1, "out/ptb-softmax/1/train"),
        ("ptb-softmax", 2, "out/ptb-softmax/2/train"),
        ("ptb-mos", 1, "out/ptb-mos/1/train"),
        ("ptb-mos", 2, "out/ptb-mos/2/train"),
    ]
    assert all(run.recipe.training.epochs == 3 and run.recipe.overrides == ("training.epochs=3",) for run in runs)
    assert str(runs[0].finetuning().path) == "out/ptb-softmax/1/finetune"


def test_records_are_read_by_their_kind_and_if_they_are_of_the_weights(tmp_path):
    [one] = small_runs(tmp_path, "tiny-softmax")
    assert epoch_records(one, one.finetuning()) == []
    [(_, evaluations)] = train_runs([one], small_resources(tmp_path), evaluate_best)
    assert [epoch.epoch for epoch in epoch_records(one, one.finetuning())] == [1, 2]
    path = one.path / "evaluations.jsonl"
    assert payloads(path, EpochRecord) == []
    assert payloads(path, EvaluationRecord) == measured_on(one.best, path.name, EvaluationRecord) == evaluations
    assert measured_on(one.best, "missing.jsonl", EvaluationRecord) == []
    content = path.read_text()
    path.write_text(content.replace('"epoch": ', '"epoch": 1'))
    assert measured_on(one.best, path.name, EvaluationRecord) == []
    path.write_text(content)
    os.utime(path, (0, 0))
    assert measured_on(one.best, path.name, EvaluationRecord) == []


def test_without_seeds_the_published_one_is_taken():
    runs = planned_runs(chosen_recipes(["ptb-softmax", "ptb-mos"], None, []), (), Path("out"))
    assert [run.seed for run in runs] == [141, 28]


@pytest.mark.parametrize(
    ("names", "seeds", "message"),
    [
        ([], (), "name a recipe"),
        (["ptb-softmax", "ptb-softmax"], (), "more than once"),
        (["ptb-sofmax"], (), "did you mean ptb-softmax"),
        (["ptb-softmax"], (1, 1), "seeds must differ"),
        (["ptb-softmax"], (-1,), "between 0 and"),
    ],
)
def test_plans_that_are_refused(names, seeds, message):
    with pytest.raises(ValueError, match=message):
        planned_runs(chosen_recipes(names, None, []), seeds, Path("out"))


def test_a_name_and_a_file_are_too_much(tmp_path):
    with pytest.raises(ValueError, match="not both"):
        chosen_recipes(["ptb-softmax"], tmp_path / "recipe.toml", [])


def test_an_output_folder_that_is_a_file(tmp_path):
    (tmp_path / "runs").write_text("")
    with pytest.raises(ValueError, match="is a file"):
        planned_runs(chosen_recipes(["ptb-softmax"], None, []), (), tmp_path / "runs")


def test_folder_names_have_nothing_that_a_shell_reads():
    assert folder_name("language-gss(k=0.3)") == "language-gss-k=0.3"
    assert folder_name("tiny-mixture(gss(k=0), K=4)") == "tiny-mixture-gss-k=0-K=4"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"at_once": 0}, "at_once must be a positive integer"),
        ({"precision": "fp8"}, "precision must be one of float32"),
        ({"device": "toaster"}, "device must be as"),
    ],
)
def test_resources_are_checked(options, message):
    with pytest.raises(ValueError, match=message):
        Resources(**options)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    resources = small_resources(folder)
    [(run, _)] = train_runs(small_runs(folder, "tiny-softmax"), resources, evaluate_best)
    return run, resources


def test_a_checkpoint_is_found_by_file_and_by_folder(trained, tmp_path):
    run, _ = trained
    assert {checkpoint_file(path) for path in (run.best, run.path, run.folder)} == {run.best}
    with pytest.raises(ValueError, match="no trained model at"):
        checkpoint_file(tmp_path)


def test_a_run_is_found_by_its_folder(trained, tmp_path):
    run, resources = trained
    assert run_in(run.folder, resources) == run_in(run.path, resources) == run
    with pytest.raises(ValueError, match="no trained run in"):
        run_in(tmp_path, resources)


def test_text_of_ones_own_must_be_named_again(trained):
    run, _ = trained
    with pytest.raises(ValueError, match=r"trained on the text 'text' in place of 'ptb'.*--data"):
        text_of(load_model(run.best), Resources())


def test_another_text_is_not_finetuned_on(trained, tmp_path):
    run, _ = trained
    with pytest.raises(ValueError, match="belongs to another text"):
        run_in(run.folder, Resources(data=write_text(tmp_path / "other", seed=1)))
