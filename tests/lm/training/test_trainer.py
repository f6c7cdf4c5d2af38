"""The loop: validation, best weights, the switch, finetuning, resumption and refusals."""

import json
import math
import os
import signal

import pytest
import torch
from tests.lm.recurrence.layers import H200
from tests.lm.runs import assert_same_end, epochs_of, small_corpus, small_recipe, small_trainer

from sigsoftmax.lm.data.windows import batchify
from sigsoftmax.lm.recurrence import plan_layer
from sigsoftmax.lm.saving import checkpoints
from sigsoftmax.lm.saving.saved_models import load_model
from sigsoftmax.lm.training.evaluation import evaluate
from sigsoftmax.lm.training.trainer import Diverged, TrainerOptions, resolve_device, run_together


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished")
    small_trainer(folder).run()
    return folder


def test_a_run_learns_and_keeps_its_best(finished):
    records = epochs_of(finished)
    assert [record.epoch for record in records] == list(range(1, 10))
    best = min(records, key=lambda record: record.valid_loss)
    assert best.valid_loss < records[0].valid_loss
    assert best.valid_loss < math.log(20), "better than all words alike"
    loaded = load_model(finished)
    assert loaded.epoch == best.epoch
    assert best.is_best
    evaluation = evaluate(loaded.model, batchify(small_corpus().valid, 2))
    assert evaluation.loss == pytest.approx(best.valid_loss, abs=1e-12)
    assert [r.is_best for r in records] == [
        r.valid_loss < min((e.valid_loss for e in records[:i]), default=math.inf) for i, r in enumerate(records)
    ]


def test_averaging_begins_when_validation_stalls(finished):
    records = epochs_of(finished)
    optimizers = [record.optimizer for record in records]
    switch = optimizers.index("asgd")
    losses = [record.valid_loss for record in records[:switch]]
    assert losses[-1] > min(losses[:-2]), "the epoch before the first averaged one fired the trigger"
    assert set(optimizers[switch:]) == {"asgd"}, "there is no way back"


def test_validated_and_saved_are_the_averages_while_training_goes_on_from_the_weights(tmp_path):
    trainer = small_trainer(tmp_path, recipe=small_recipe(optimizer="asgd", epochs=2))
    trainer.run()
    last = checkpoints.load(tmp_path / "last.safetensors")
    averages = [last.tensors[f"optimizer.average.{i}"] for i in range(len(list(trainer.model.parameters())))]
    best = checkpoints.load(tmp_path / "best.safetensors")
    assert best.meta["best_epoch"] == 2
    for (name, parameter), average in zip(trainer.model.named_parameters(), averages, strict=True):
        assert torch.equal(best.tensors[name], average)
        assert not torch.equal(parameter, average)


def test_the_same_seed_gives_the_same_run_and_another_does_not(finished, tmp_path):
    small_trainer(tmp_path / "same").run()
    assert_same_end(finished, tmp_path / "same")
    small_trainer(tmp_path / "other", seed=6).run()
    assert epochs_of(tmp_path / "other")[0].valid_loss != epochs_of(finished)[0].valid_loss


def test_how_often_checkpoints_are_written_changes_nothing(finished, tmp_path):
    small_trainer(tmp_path, checkpoint_updates=1).run()
    assert_same_end(finished, tmp_path)


@pytest.mark.grid
@pytest.mark.parametrize("steps", [1, 7, 40, 90])
@pytest.mark.parametrize("head", ["sigsoftmax", "moss(K=3)", "mos(K=3, latent=residual)"])
def test_a_run_that_stops_anywhere_goes_on_to_the_same_end(head, steps, tmp_path):
    recipe = small_recipe(head, epochs=5, group=2)
    small_trainer(tmp_path / "whole", recipe=recipe).run()
    folder = tmp_path / "stopped"
    for _ in range(50):
        trainer = small_trainer(folder, recipe=recipe, checkpoint_updates=3)
        try:
            for _ in range(steps + 5):
                trainer.advance()
        except StopIteration:
            break
    small_trainer(folder, recipe=recipe).run()
    assert_same_end(tmp_path / "whole", folder)


def test_ctrl_c_saves_where_the_state_is_whole(finished, tmp_path):
    def interrupt(progress):
        if progress.epoch == 3 and progress.update == 4:
            os.kill(os.getpid(), signal.SIGINT)

    trainer = small_trainer(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        trainer.run(interrupt)
    meta = checkpoints.load(tmp_path / "last.safetensors").meta
    assert (meta["epoch"], meta["update"]) == (3, 4)
    small_trainer(tmp_path).run()
    assert_same_end(finished, tmp_path)


def test_a_finished_run_is_not_run_again_but_may_go_on_for_longer(finished, tmp_path):
    small_trainer(tmp_path, recipe=small_recipe(epochs=4)).run()
    again = small_trainer(tmp_path, recipe=small_recipe(epochs=4))
    assert again.finished
    again.run()
    assert len(epochs_of(tmp_path)) == 4
    small_trainer(tmp_path, recipe=small_recipe(epochs=9)).run()
    assert epochs_of(tmp_path) == epochs_of(finished)


def test_finetuning_starts_from_the_best_and_never_ends_worse(finished, tmp_path):
    trainer = small_trainer(tmp_path, phase="finetune", start=finished / "best.safetensors")
    start = checkpoints.load(finished / "best.safetensors").meta["valid_loss"]
    trainer.run()
    assert trainer.state.valid_loss <= start
    records = epochs_of(tmp_path)
    assert {record.optimizer for record in records} == {"asgd"}
    assert {record.run.phase for record in records} == {"finetune"}
    assert load_model(tmp_path).run.phase == "finetune"


def test_finetuning_without_improvement_keeps_the_model_it_was_given(finished, tmp_path):
    recipe = small_recipe(learning_rate=200.0, epochs=3)
    small_trainer(tmp_path, recipe=recipe, phase="finetune", start=finished / "best.safetensors").run()
    given, kept = load_model(finished), load_model(tmp_path)
    assert kept.epoch == 0
    assert all(torch.equal(a, b) for a, b in zip(given.model.parameters(), kept.model.parameters(), strict=True))


def test_finetuning_stops_when_validation_is_stale(finished, tmp_path):
    recipe = small_recipe(learning_rate=200.0, epochs=50)
    trainer = small_trainer(tmp_path, recipe=recipe, phase="finetune", start=finished / "best.safetensors")
    trainer.run()
    losses = [record.valid_loss for record in epochs_of(tmp_path)]
    assert 3 <= len(losses) < 50
    assert losses[-1] > min(losses[:-2])
    assert small_trainer(tmp_path, recipe=recipe, phase="finetune", start=finished / "best.safetensors").finished


def test_a_finetuning_run_that_stops_goes_on(finished, tmp_path):
    options = {"phase": "finetune", "start": finished / "best.safetensors", "recipe": small_recipe(epochs=4)}
    small_trainer(tmp_path / "whole", **options).run()
    trainer = small_trainer(tmp_path / "stopped", checkpoint_updates=2, **options)
    for _ in range(60):
        trainer.advance()
    small_trainer(tmp_path / "stopped", **options).run()
    assert_same_end(tmp_path / "whole", tmp_path / "stopped")


def test_runs_in_turns_are_the_runs_alone(finished, tmp_path):
    trainers = [small_trainer(tmp_path / str(seed), seed=seed) for seed in (5, 6)]
    ended = list(run_together(trainers, lambda trainer, progress: None))
    assert sorted(trainer.identity.seed for trainer in ended) == [5, 6]
    assert_same_end(finished, tmp_path / "5")


def test_one_that_diverges_does_not_stop_the_other(tmp_path):
    bad = small_trainer(tmp_path / "bad", recipe=small_recipe(learning_rate=1e30, clip=1e30))
    good = small_trainer(tmp_path / "good", recipe=small_recipe(epochs=2))
    with pytest.raises(Diverged):
        list(run_together([bad, good], lambda trainer, progress: None))
    assert len(epochs_of(tmp_path / "good")) == 2


def test_a_loss_that_is_not_a_number_stops_the_run_and_saves_nothing(tmp_path):
    trainer = small_trainer(tmp_path, recipe=small_recipe(epochs=9), checkpoint_updates=5)
    while not (progress := trainer.advance()) or progress.epoch < 3 or progress.update < 2:
        pass
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with torch.no_grad():
        trainer.model.embedding.fill_(math.nan)
    with pytest.raises(Diverged, match=r"became nan at update 3 of epoch 3.*lower learning_rate than 8"):
        trainer.run()
    with pytest.raises(Diverged):
        trainer.save()
    after = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert after.keys() == before.keys()
    assert {name for name in after if after[name] != before[name]} == {"best.safetensors"}
    assert checkpoints.load(tmp_path / "best.safetensors").meta["best_epoch"] == 2, "which had not been saved yet"


def test_another_recipe_seed_or_text_is_refused_and_the_checkpoint_stays(finished):
    before = (finished / "last.safetensors").read_bytes()
    with pytest.raises(ValueError, match=r"another run: training\.learning_rate is 8\.0 there and 9\.0 here"):
        small_trainer(finished, recipe=small_recipe(learning_rate=9.0))
    with pytest.raises(ValueError, match="another run: seed is 5 there and 7 here"):
        small_trainer(finished, seed=7)
    with pytest.raises(ValueError, match=r"another text.*was the corpus changed"):
        small_trainer(finished, corpus=small_corpus(seed=1))
    assert (finished / "last.safetensors").read_bytes() == before


def test_a_full_disk_leaves_the_last_good_checkpoint(tmp_path, monkeypatch):
    trainer = small_trainer(tmp_path, recipe=small_recipe(epochs=9))
    while not (progress := trainer.advance()) or progress.epoch < 2:
        pass
    trainer.save()
    before = (tmp_path / "last.safetensors").read_bytes()
    for _ in range(5):
        trainer.advance()

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"No space left on device.*is as it was"):
        trainer.save()
    monkeypatch.undo()
    assert (tmp_path / "last.safetensors").read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best.safetensors", "last.safetensors", "records.jsonl"]


def test_a_damaged_checkpoint_is_named(finished, tmp_path):
    data = bytearray((finished / "last.safetensors").read_bytes())
    data[-10] ^= 1
    (tmp_path / "last.safetensors").write_bytes(data)
    with pytest.raises(ValueError, match=r"last\.safetensors is damaged"):
        small_trainer(tmp_path)


def test_records_of_epochs_that_are_trained_again_are_not_doubled(tmp_path):
    trainer = small_trainer(tmp_path, recipe=small_recipe(epochs=4), checkpoint_updates=10**6)
    while not (progress := trainer.advance()) or progress.epoch < 2:
        pass
    trainer.save()
    while not progress or progress.epoch < 4:
        progress = trainer.advance()
    assert len(epochs_of(tmp_path)) == 3
    small_trainer(tmp_path, recipe=small_recipe(epochs=4)).run()
    assert [record.epoch for record in epochs_of(tmp_path)] == [1, 2, 3, 4]


def test_records_of_a_run_that_died_before_its_first_checkpoint_are_not_doubled(tmp_path):
    trainer = small_trainer(tmp_path, recipe=small_recipe(epochs=2), checkpoint_updates=10**6)
    while not (progress := trainer.advance()) or progress.epoch < 2:
        pass
    # As if killed between the record and the checkpoint.
    (tmp_path / "last.safetensors").unlink(missing_ok=True)
    assert len(epochs_of(tmp_path)) == 1
    small_trainer(tmp_path, recipe=small_recipe(epochs=2)).run()
    assert [record.epoch for record in epochs_of(tmp_path)] == [1, 2]


def test_the_meta_of_a_checkpoint_is_plain_json(finished):
    meta = checkpoints.load(finished / "best.safetensors").meta
    assert json.loads(json.dumps(meta, allow_nan=False)) == meta
    assert meta["words"][:2] == ["w0", "w1"]


def test_bad_input(finished, tmp_path):
    with pytest.raises(ValueError, match="finetuning starts from a checkpoint"):
        TrainerOptions(phase="finetune")
    with pytest.raises(ValueError, match="precision must be one of float32, tf32, bf16, got 'fp8'"):
        small_trainer(tmp_path, precision="fp8")
    with pytest.raises(ValueError, match="'bf16' is for CUDA devices, and this run is on cpu"):
        small_trainer(tmp_path, precision="bf16")
    with pytest.raises(ValueError, match="columns need at least"):
        small_trainer(tmp_path, recipe=small_recipe(batch=5000))
    with pytest.raises(ValueError, match="device must be as 'cpu'"):
        resolve_device("gpu")
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="'cuda' was asked for, but torch sees no CUDA device"):
            resolve_device("cuda")


def test_the_first_word_of_a_run_and_its_records_say_what_computes_the_lstm(tmp_path):
    trainer = small_trainer(tmp_path, recipe=small_recipe(epochs=1))
    first = trainer.advance()
    assert first.note == "LSTM recurrence: torch's own LSTM, because the layer is on cpu, not on an NVIDIA GPU"
    notes = []
    trainer.run(lambda progress: notes.append(progress.note))
    assert not any(notes)
    assert [record.recurrence for record in epochs_of(tmp_path)] == [first.note]


def test_a_run_that_goes_on_with_another_recurrence_says_so_in_its_records(tmp_path, monkeypatch):
    trainer = small_trainer(tmp_path, recipe=small_recipe(epochs=1))
    monkeypatch.setattr(
        trainer.state.recurrence, "plans_in_use", lambda: [plan_layer(width, 4, "tf32", H200) for width in (12, 8)]
    )
    trainer.run()
    longer = small_trainer(tmp_path, recipe=small_recipe(epochs=2))
    longer.run()
    first, second = (record.recurrence for record in epochs_of(tmp_path))
    assert second.startswith(first)
    assert "the persistent recurrence that the run was begun on cannot be had here" in second


def test_a_recurrence_that_failed_ends_the_run_and_saves_nothing(tmp_path):
    trainer = small_trainer(tmp_path, recipe=small_recipe(epochs=2))
    for _ in range(4):
        trainer.advance()
    trainer.state.recurrence._flag = torch.ones(1, dtype=torch.int32)
    with pytest.raises(Diverged, match=r"are NaN, after update.*Kept: nothing.*SIGSOFTMAX_RECURRENCE=torch"):
        trainer.run()
    assert not (tmp_path / "last.safetensors").exists()


def test_a_recurrence_that_fails_in_the_validation_ends_the_run_too(tmp_path):
    trainer = small_trainer(tmp_path, recipe=small_recipe(epochs=2))
    validated = trainer._evaluator.launch

    def fails():
        yield from validated()
        trainer.state.recurrence._flag = torch.ones(1, dtype=torch.int32)

    trainer._evaluator.launch = fails
    with pytest.raises(Diverged, match=r"forward LSTM recurrence waited in vain.*in the validation after update"):
        trainer.run()
    assert not (tmp_path / "best.safetensors").exists()


def test_one_run_whose_recurrence_fails_does_not_end_the_others(tmp_path):
    trainers = [small_trainer(tmp_path / name, recipe=small_recipe(epochs=1)) for name in ("one", "other")]
    trainers[0].state.recurrence._flag = torch.ones(1, dtype=torch.int32)
    ended = []
    with pytest.raises(Diverged, match="waited in vain"):
        ended.extend(run_together(trainers, lambda *_: None))
    assert (tmp_path / "other" / "last.safetensors").exists()
