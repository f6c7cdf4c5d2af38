"""A run that diverges saves nothing that is not finite, in any way of saving, says at which update, and can go on."""

import dataclasses
import math
import os
import signal

import pytest
import torch
from tests.lm.runs import assert_same_end, epochs_of, small_corpus, small_recipe, small_trainer

from sigsoftmax.lm.saving import checkpoints
from sigsoftmax.lm.saving.saved_models import first_not_finite
from sigsoftmax.lm.training.evaluation import Evaluation
from sigsoftmax.lm.training.trainer import Diverged, run_together

EPOCHS = 5


def recipe(**training):
    return small_recipe(epochs=EPOCHS, **training)


def spoil_after(trainer, epoch, update, spoil):
    """Let ``spoil`` loose right after an update of an epoch; ``update`` -1 is the last one."""
    state, run = trainer.state, trainer.state.updater.run

    def spoiling(*, drawn, length):
        run(drawn=drawn, length=length)
        is_last = state.row + drawn >= state.rows - 2
        if state.epoch == epoch and (is_last if update == -1 else state.update + 1 == update):
            spoil(trainer)

    state.updater.run = spoiling


@torch.no_grad()
def nan_weights(trainer):
    trainer.model.embedding[3, 2] = math.nan


@torch.no_grad()
def infinite_bias(trainer):
    """A word gets a logit of -inf, which is a mask: losses stay finite where it is no target."""
    trainer.model.output.bias[3] = -math.inf


@torch.no_grad()
def infinite_average(trainer):
    trainer.state.optimizer.averages[0][1, 1] = math.inf


def assert_finite_files(folder):
    for path in folder.glob("*.safetensors"):
        checkpoint = checkpoints.load(path)
        assert first_not_finite(checkpoint.tensors) is None, path
        assert all(map(math.isfinite, checkpoint.meta.get("losses", ()))), path
    for record in epochs_of(folder) if (folder / "records.jsonl").exists() else ():
        assert math.isfinite(record.valid_loss)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    small_trainer(folder, recipe=recipe()).run()
    return folder


def test_weights_that_break_at_the_last_update_of_an_epoch(whole, tmp_path):
    trainer = small_trainer(tmp_path, recipe=recipe(), checkpoint_updates=25)
    spoil_after(trainer, 3, -1, nan_weights)
    last = epochs_of(whole)[2].updates
    with pytest.raises(
        Diverged,
        match=rf"\('embedding'\) is no longer finite after update {last} of epoch 3; nothing was saved since\. "
        r"Kept: .*last\.safetensors holds the run after update \d+ of epoch [23]: the same command goes on from there; "
        r".*best\.safetensors holds the best weights, of epoch 2\. Try a lower learning_rate than 8, in another folder",
    ):
        trainer.run()
    assert_finite_files(tmp_path)
    assert checkpoints.load(tmp_path / "best.safetensors").meta["best_epoch"] == 2
    small_trainer(tmp_path, recipe=recipe()).run()
    assert_same_end(whole, tmp_path)


def test_what_is_said_to_be_kept_is_kept_before_the_first_checkpoint_too(whole, tmp_path):
    trainer = small_trainer(tmp_path, recipe=recipe())
    spoil_after(trainer, 3, -1, nan_weights)
    with pytest.raises(Diverged, match=r"Kept: \S+best\.safetensors holds the best weights, of epoch 2\. Try"):
        trainer.run()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best.safetensors", "records.jsonl"]
    small_trainer(tmp_path, recipe=recipe()).run()
    assert_same_end(whole, tmp_path)


def test_nothing_is_kept_where_nothing_is_good(tmp_path):
    trainer = small_trainer(tmp_path, recipe=recipe())
    spoil_after(trainer, 1, -1, nan_weights)
    with pytest.raises(
        Diverged, match=r"of epoch 1; nothing was saved since\. Kept: nothing, since no epoch had ended"
    ):
        trainer.run()
    assert not list(tmp_path.iterdir())


def test_a_checkpoint_that_is_due_in_the_middle_of_an_epoch(whole, tmp_path):
    trainer = small_trainer(tmp_path, recipe=recipe(), checkpoint_updates=1)
    spoil_after(trainer, 2, 4, nan_weights)
    with pytest.raises(
        Diverged, match=r"\('model\.embedding'\).*after update 4 of epoch 2.*holds the run after update 3 of epoch 2: "
    ):
        trainer.run()
    assert_finite_files(tmp_path)
    meta = checkpoints.load(tmp_path / "last.safetensors").meta
    assert (meta["epoch"], meta["update"]) == (2, 3)
    small_trainer(tmp_path, recipe=recipe()).run()
    assert_same_end(whole, tmp_path)


def test_ctrl_c_saves_the_runs_that_are_finite_and_tells_of_the_others(whole, tmp_path):
    bad, good = (small_trainer(tmp_path / name, recipe=recipe()) for name in ("bad", "good"))
    spoil_after(bad, 2, 4, nan_weights)

    def interrupt(trainer, progress):
        if trainer is good and (progress.epoch, progress.update) == (2, 3):
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt, match=r"is no longer finite after update 4 of epoch 2"):
        list(run_together([bad, good], interrupt))
    assert_finite_files(tmp_path / "bad")
    assert not (tmp_path / "bad" / "last.safetensors").exists()
    small_trainer(tmp_path / "good", recipe=recipe()).run()
    assert_same_end(whole, tmp_path / "good")


def test_weights_that_break_without_a_trace_in_any_loss(tmp_path):
    corpus = small_corpus()
    corpus = dataclasses.replace(corpus, valid=torch.where(corpus.valid == 3, 4, corpus.valid))
    trainer = small_trainer(tmp_path, recipe=recipe(), corpus=corpus)
    spoil_after(trainer, 2, -1, infinite_bias)
    with pytest.raises(Diverged, match=r"\('output\.bias'\) is no longer finite after update \d+ of epoch 2"):
        trainer.run()
    assert_finite_files(tmp_path)


@pytest.mark.parametrize("every", [1, None])
def test_averages_and_finetuning(whole, tmp_path, every):
    options = {"phase": "finetune", "start": whole / "best.safetensors", "checkpoint_updates": every}
    trainer = small_trainer(tmp_path, recipe=recipe(), **options)
    spoil_after(trainer, 2, -1, infinite_average)
    with pytest.raises(
        Diverged, match=r"\('(optimizer\.)?average\.0'\).*of epoch 2.*the best weights, of epoch [01]\."
    ):
        trainer.run()
    assert_finite_files(tmp_path)
    small_trainer(tmp_path, recipe=recipe(), **options).run()
    small_trainer(tmp_path / "other", recipe=recipe(), **options).run()
    assert epochs_of(tmp_path) == epochs_of(tmp_path / "other")


def test_a_validation_loss_that_is_not_finite(tmp_path):
    trainer = small_trainer(tmp_path, recipe=recipe())
    result, calls = trainer._evaluator.result, []

    def third_is_infinite():
        calls.append(result())
        return calls[-1] if len(calls) < 3 else Evaluation(math.inf, 10, 10, 1)

    trainer._evaluator.result = third_is_infinite
    with pytest.raises(
        Diverged, match=r"the validation loss is inf after update \d+ of epoch 3.*best weights, of epoch 2"
    ):
        trainer.run()
    assert len(epochs_of(tmp_path)) == 2
    with pytest.raises(Diverged, match="the validation loss is inf"):
        trainer.save()
    assert not (tmp_path / "last.safetensors").exists(), "validation had exchanged the weights"
    assert_finite_files(tmp_path)


def test_a_step_that_float32_cannot_hold(tmp_path):
    trainer = small_trainer(tmp_path, recipe=recipe(learning_rate=3.4e38, clip=2e-38))
    with pytest.raises(
        Diverged, match=r"a window of \d+ steps would take a step of size \S+, more than float32 can hold"
    ):
        trainer.run()
    assert_finite_files(tmp_path)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_the_tensor_that_is_not_finite_is_named(bad):
    tensors = {
        "large": torch.full((100,), 3e38),
        "double": torch.tensor(1e300, dtype=torch.float64),
        "half": torch.ones(7).bfloat16(),
        "empty": torch.empty(0, 3),
        "whole": torch.tensor([2**62]),
    }
    assert first_not_finite(tensors) is None
    assert first_not_finite({}) is None
    for name in ("large", "double", "half"):
        broken = {key: tensor.clone() for key, tensor in tensors.items()}
        broken[name].view(-1)[-1] = bad
        assert first_not_finite(broken) == name
