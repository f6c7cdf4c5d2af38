"""A trial is the run that train makes; its folder tells whether it has ended; whatever it raises is a reason."""

import dataclasses
import json

import pytest
from tests.experiments.small_runs import SINGLE, small_resources, small_runs
from tests.lm.runs import assert_same_end, epochs_of

from sigsoftmax.experiments.runs import executors, ray_executor
from sigsoftmax.experiments.runs.evaluate import evaluate_best
from sigsoftmax.experiments.runs.executors import Failed, train_runs
from sigsoftmax.experiments.runs.ray_executor import Place, work
from sigsoftmax.experiments.runs.run import epoch_records
from sigsoftmax.experiments.sweep.manifest import PLAN_FILE
from sigsoftmax.experiments.sweep.plan import SweepConfig, Trial
from sigsoftmax.experiments.sweep.trials import finish_trial, finished_record, gathered
from sigsoftmax.lm.data import corpus as data
from sigsoftmax.lm.recipes import recipe
from sigsoftmax.records.schemas.sweeps import TrialRecord
from sigsoftmax.records.schemas.training import ComparisonRecord, EpochRecord, EvaluationRecord


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """A trial settles in its process, which here is the test's."""
    import sys

    import torch

    threads = torch.get_num_threads()
    monkeypatch.setattr(sys, "argv", ["sigsoftmax", "sweep", "tiny-softmax"])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SIGSOFTMAX_DATA", "")
    ray_executor._corpus.cache_clear()
    yield
    torch.set_num_threads(threads)


def place_of(folder, **options):
    (folder / "runs").mkdir(exist_ok=True)
    (folder / "runs" / PLAN_FILE).write_text("{}")
    resources = {"data": small_resources(folder).data, "device": "cpu", "precision": "float32", "at_once": 1}
    return Place.here(folder / "runs" / PLAN_FILE, threads=1, **resources | options)


def trial_of(folder, *names, **options):
    [run] = small_runs(folder, *(names or ("tiny-softmax",)), **options)
    return Trial(**vars(run))


def run_trial(trial, place):
    """As a worker of Ray does it."""
    return work(trial, finish_trial, place)


def test_a_trial_ends_in_the_bits_and_numbers_of_train(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    trial, [run] = trial_of(tmp_path / "a"), small_runs(tmp_path / "b", "tiny-softmax")
    found = run_trial(trial, place_of(tmp_path / "a"))
    [(_, evaluations)] = train_runs([run], small_resources(tmp_path / "b"), evaluate_best)
    assert_same_end(trial.path, run.path)
    losses = {(evaluation.split, evaluation.batch): evaluation.loss for evaluation in evaluations}
    assert (found.valid_loss, found.test_loss) == (losses["valid", 2], losses["test", 1])
    assert found.run == evaluations[0].run
    assert found.epochs == 2
    assert found.updates == sum(epoch.updates for epoch in epochs_of(run.path))
    assert found.kl is None


def test_its_records_name_the_command_and_are_gathered(tmp_path):
    trial, place = trial_of(tmp_path), place_of(tmp_path)
    found = run_trial(trial, place)
    records = gathered([trial])
    kinds = [record.kind for record in records]
    assert kinds == [EpochRecord.KIND] * 2 + [EvaluationRecord.KIND] * 3 + [TrialRecord.KIND]
    assert records[-1].payload_as(TrialRecord) == found
    assert {record.environment.command for record in records} == {"sigsoftmax sweep tiny-softmax"}
    assert [epoch.epoch for epoch in epoch_records(*trial.runs())] == [1, 2]


def test_a_trial_that_has_ended_is_not_made_again(tmp_path):
    trial, place = trial_of(tmp_path), place_of(tmp_path)
    assert finished_record(trial, "float32") is None
    found = run_trial(trial, place)
    assert finished_record(trial, "float32") == found
    before = {path: path.stat().st_mtime_ns for path in trial.folder.rglob("*.*") if not path.name.startswith(".lock")}
    assert run_trial(trial, place) == found
    assert {path: path.stat().st_mtime_ns for path in before} == before


def test_what_belongs_to_another_plan_or_is_damaged_has_not_ended(tmp_path):
    trial = trial_of(tmp_path)
    run_trial(trial, place_of(tmp_path))
    assert finished_record(trial, "bf16") is None
    assert finished_record(dataclasses.replace(trial, phases=("train", "finetune")), "float32") is None
    changed = dataclasses.replace(trial.recipe, overrides=("training.epochs=9",))
    assert finished_record(dataclasses.replace(trial, recipe=changed), "float32") is None
    path = trial.folder / "trial.jsonl"
    whole = path.read_text()
    path.write_text(whole[:50])
    assert finished_record(trial, "float32") is None
    run_trial(trial, place_of(tmp_path))
    assert finished_record(trial, "float32") is not None
    assert path.read_text().startswith(whole[:50] + "\n"), "what cannot be read is left as it is"
    path.write_text(whole)
    trial.best.unlink()
    assert finished_record(trial, "float32") is None


def test_a_lost_trial_goes_on_from_its_checkpoint(tmp_path, monkeypatch):
    straight, broken = (tmp_path / name for name in ("straight", "broken"))
    trials = {}
    for folder in (straight, broken):
        folder.mkdir()
        trial = trial_of(folder)
        training = dataclasses.replace(trial.recipe.training, epochs=5)
        trials[folder] = dataclasses.replace(trial, recipe=dataclasses.replace(trial.recipe, training=training))
    run_trial(trials[straight], place_of(straight))
    # Every update is saved, and the process is lost in the fourth epoch.
    monkeypatch.setattr(ray_executor, "CHECKPOINT_SECONDS", 0.0)
    together, seen, begun = executors.run_together, [], []

    def until_the_fourth(trainers, watch):
        def counted(trainer, progress):
            watch(trainer, progress)
            if progress.record is not None:
                seen.append(progress.record.epoch)
            elif progress.epoch == 4 and not begun:
                begun.append(progress.update)
                raise KeyboardInterrupt

        return together(trainers, counted)

    monkeypatch.setattr(executors, "run_together", until_the_fourth)
    with pytest.raises(KeyboardInterrupt):
        run_trial(trials[broken], place_of(broken))
    assert run_trial(trials[broken], place_of(broken)).epochs == 5
    assert seen == [1, 2, 3, 4, 5]
    assert_same_end(trials[straight].path, trials[broken].path)


def test_epochs_of_a_process_that_died_before_its_first_checkpoint_are_not_counted(tmp_path):
    trial, place = trial_of(tmp_path), place_of(tmp_path)
    run_trial(trial, place)
    for path in (trial.folder / "trial.jsonl", trial.best, trial.path / "last.safetensors"):
        path.unlink()
    assert len(epochs_of(trial.path)) == 2
    assert run_trial(trial, place).epochs == 2
    assert [epoch.epoch for epoch in epochs_of(trial.path)] == [1, 2]


def test_on_a_language_the_distance_to_the_truth_is_measured(tmp_path, monkeypatch):
    lengths = {"train": 2000, "valid": 300, "test": 300}
    monkeypatch.setattr(data, "EMBEDDED_LENGTHS", lengths)
    chosen = SweepConfig(
        recipes=(recipe("language-softmax"),),
        seeds=(1,),
        changes=("training.epochs=1", "finetuning.epochs=1"),
        out=tmp_path / "runs",
    )
    [trial] = chosen.trials()
    found = run_trial(trial, place_of(tmp_path, data=None))
    assert found.run.phase == "finetune"
    assert (found.epochs, found.kl > 0.0, found.entropy_rate > 0.0) == (2, True, True)
    [compared] = [record for record in gathered([trial]) if record.kind == ComparisonRecord.KIND]
    assert compared.payload_as(ComparisonRecord).kl == found.kl


def test_whatever_a_trial_raises_is_a_reason(tmp_path):
    place = place_of(tmp_path)
    wild = trial_of(tmp_path, "tiny-sigsoftmax", changes=("training.learning_rate=1e30", "training.clip=1e30"))
    assert run_trial(wild, place).reason.startswith("the loss became")
    trial = trial_of(tmp_path)
    assert "the corpus 'ptb' was not found" in run_trial(trial, place_of(tmp_path, data=tmp_path)).reason
    elsewhere = dataclasses.replace(place, witness=tmp_path / "elsewhere" / PLAN_FILE)
    assert "a folder that all nodes share" in run_trial(trial, elsewhere).reason

    def broken(*arguments):
        raise RuntimeError("surprise")

    found = work(trial, broken, place)
    path = trial.folder / "error.txt"
    assert found == Failed(f"RuntimeError: surprise (all of it in {path})")
    assert "def broken" not in path.read_text()
    assert "RuntimeError: surprise" in path.read_text()

    class OutOfMemoryError(RuntimeError):
        pass

    def full(*arguments):
        raise OutOfMemoryError("CUDA out of memory")

    assert "--gpus-per-trial" in work(trial, full, place).reason


def test_a_trial_in_other_hands_is_waited_for_and_then_refused(tmp_path, monkeypatch):
    from sigsoftmax.experiments.runs.folder_locks import FolderLock

    trial, place = trial_of(tmp_path), place_of(tmp_path)
    monkeypatch.setattr(ray_executor, "LOCK_PATIENCE", 0.5)
    with FolderLock(trial.folder):
        assert "another process is at work" in run_trial(trial, place).reason


def test_another_run_in_the_folder_is_refused_with_a_reason(tmp_path):
    place = place_of(tmp_path)
    run_trial(trial_of(tmp_path), place)
    found = run_trial(trial_of(tmp_path, changes=("training.clip=3",)), place)
    assert "belongs to another run" in found.reason


def test_trial_records_can_be_read_as_json(tmp_path):
    trial = trial_of(tmp_path)
    run_trial(trial, place_of(tmp_path))
    [line] = (trial.folder / "trial.jsonl").read_text().splitlines()
    payload = json.loads(line)["payload"]
    assert payload["run"]["overrides"] == list(trial.recipe.overrides)
    assert len(payload["run"]["overrides"]) <= len(SINGLE)
