"""A run on several processes against the same run on one: every loss, the weights, the records, the checkpoints."""

from __future__ import annotations

import math
import os
import re
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.distributed.ranks import end, on_ranks, start
from tests.distributed.test_world import free_port
from tests.lm.masks import draw_masks
from tests.lm.runs import epochs_of, small_recipe, small_trainer

from sigsoftmax import distributed
from sigsoftmax.lm.config import ModelConfig, Recipe
from sigsoftmax.lm.parallel.single_process import KINDS, SingleProcessStrategy, parallel_strategy
from sigsoftmax.lm.parallel.strategies import DDPStrategy, broadcast_from_first
from sigsoftmax.lm.saving import checkpoints
from sigsoftmax.lm.training import trainer as training
from sigsoftmax.lm.training.trainer import Diverged, Trainer

TOLERANCE = 1e-5
BATCH = 12
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("sigsoftmax", {}),
    # A process of two has two groups.
    "grouped": ("moss(K=3)", {"group": 3}),
    # A process of four has half a group.
    "halves": ("sigsoftmax", {"group": 6}),
    # Three processes have no column each to evaluate.
    "learned number": ("shifted_sigsoftmax", {"evaluation_batch": 2}),
    # The weights that are validated are others than those that are trained.
    "learned per word": ("shifted_sigsoftmax(b=per_class:2)", {"optimizer": "asgd"}),
}


def recipe_of(case: str, **training: Any) -> Recipe:
    head, own = CASES[case]
    fields = {"epochs": 3, "batch": BATCH, "evaluation_batch": 5, "learning_rate": 4.0, **own, **training}
    recipe = small_recipe("moss(K=3)" if "(K" in head else "sigsoftmax", **fields)
    return replace(recipe, model=replace(recipe.model, head=head))


def losses_of(trainer: Trainer, updates: int | None = None) -> list[float]:
    """Train to the end, or so far, and return the loss of every update."""
    losses: list[float] = []
    while updates is None or len(losses) < updates:
        try:
            progress = trainer.advance()
        except StopIteration:
            break
        if progress is not None and progress.record is None:
            losses += trainer.state.updater.losses(progress.update - 1, progress.update)
    return losses


def forbid_files() -> None:
    """In the processes that are not the first."""

    def refuse(*arguments: Any) -> None:
        raise AssertionError("only the first process writes files")

    if dist.get_rank():
        checkpoints.save = training.append = refuse  # type: ignore[assignment]


def train_cases(folder: str, kind: Any, cases: list[str]) -> dict[str, list[float]]:
    forbid_files()
    return {
        case: losses_of(small_trainer(Path(folder) / case, recipe=recipe_of(case), parallel=kind)) for case in cases
    }


def assert_near(found: Path, expected: Path) -> None:
    """Weights, averages, states and what was recorded, to rounding."""
    for file in ("last", "best"):
        ours, theirs = (checkpoints.load(folder / f"{file}.safetensors") for folder in (found, expected))
        assert ours.tensors.keys() == theirs.tensors.keys()
        for name, tensor in theirs.tensors.items():
            mine = ours.tensors[name]
            assert (mine.dtype, mine.shape) == (tensor.dtype, tensor.shape)
            if not tensor.is_floating_point():
                assert torch.equal(mine, tensor), name
            else:
                error = float((mine.double() - tensor.double()).norm())
                assert error <= TOLERANCE * (1e-3 + float(tensor.double().norm())), f"{file} {name}: {error:.2e}"
        for key in ("epoch", "row", "update", "window_lengths", "best_epoch", "stale", "run", "recipe"):
            assert ours.meta.get(key) == theirs.meta.get(key), key
    for mine, theirs in zip(epochs_of(found), epochs_of(expected), strict=True):
        for name in ("train_loss", "valid_loss", "valid_loss_over_rows"):
            assert getattr(mine, name) == pytest.approx(getattr(theirs, name), rel=TOLERANCE)
        same = dict.fromkeys(("train_loss", "valid_loss", "valid_loss_over_rows"), 0.0)
        assert replace(mine, **same) == replace(theirs, **same)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[float]]]:
    """The same in one process."""
    folder = tmp_path_factory.mktemp("alone")
    torch.set_num_threads(1)
    return folder, {case: losses_of(small_trainer(folder / case, recipe=recipe_of(case))) for case in CASES}


@pytest.mark.parametrize(
    ("kind", "size", "cases"),
    [
        ("ddp", 2, ["plain", "grouped", "learned number"]),
        ("ddp", 4, ["halves"]),
        ("fsdp", 2, ["plain", "grouped"]),
        ("fsdp", 3, ["learned number", "learned per word"]),
        ("vocabulary", 2, ["plain", "grouped", "learned number"]),
        ("vocabulary", 3, ["learned per word"]),
        pytest.param("ddp", 3, ["plain", "learned per word"], marks=pytest.mark.slow),
        pytest.param("fsdp", 4, list(CASES), marks=pytest.mark.slow),
        pytest.param("vocabulary", 4, list(CASES), marks=pytest.mark.slow),
    ],
)
def test_every_loss_and_weight_is_that_of_one_process(
    kind: str, size: int, cases: list[str], alone: Any, tmp_path: Path
) -> None:
    folder, expected = alone
    for found in on_ranks(tmp_path, size, train_cases, str(tmp_path), kind, cases):
        for case in cases:
            assert found[case] == pytest.approx(expected[case], rel=TOLERANCE), case
    for case in cases:
        assert_near(tmp_path / case, folder / case)


# --- checkpoints ------------------------------------------------------------------------------------------------------


def go_on(folder: str, kind: Any, updates: int | None) -> None:
    trainer = small_trainer(Path(folder), recipe=recipe_of("grouped", optimizer="asgd"), parallel=kind)
    losses_of(trainer, updates)
    if updates is not None:
        trainer.save()


def test_a_run_goes_on_with_another_number_of_processes(tmp_path: Path) -> None:
    """Two processes, one, two, three: averages and hidden states come along."""
    torch.set_num_threads(1)
    go_on(str(tmp_path / "whole"), None, None)
    folder = str(tmp_path / "moved")
    on_ranks(tmp_path, 2, go_on, folder, "ddp", 4)
    go_on(folder, None, 3)
    on_ranks(tmp_path, 2, go_on, folder, "fsdp", 4)
    on_ranks(tmp_path, 2, go_on, folder, "vocabulary", None)
    assert_near(tmp_path / "moved", tmp_path / "whole")


# --- stopping ---------------------------------------------------------------------------------------------------------


def stop_on_one_rank(folder: str) -> str:
    """Ctrl-C reaches one process at one moment, and all of them stop."""

    def interrupt(progress: Any) -> None:
        if dist.get_rank() == 1 and (progress.epoch, progress.update) == (2, 3):
            os.kill(os.getpid(), signal.SIGINT)

    forbid_files()
    try:
        small_trainer(Path(folder), recipe=recipe_of("plain"), parallel="ddp").run(interrupt)
    except KeyboardInterrupt:
        return "stopped"
    return "ended"


def diverge_on_one_rank(folder: str) -> str:
    trainer = small_trainer(Path(folder), recipe=recipe_of("plain"), parallel="ddp", checkpoint_updates=2)
    losses_of(trainer, 2)
    if dist.get_rank() == 1:
        trainer.state.updater._states[0][0].hidden.fill_(math.nan)
    try:
        trainer.run()
    except Diverged as error:
        return str(error)
    return "ended"


def stop_in_all_ways(folder: str) -> tuple[str, str]:
    return stop_on_one_rank(f"{folder}/stopped"), diverge_on_one_rank(f"{folder}/diverged")


def test_what_happens_to_one_process_stops_all(tmp_path: Path) -> None:
    (stopped, diverged), others = on_ranks(tmp_path, 2, stop_in_all_ways, str(tmp_path))
    assert (stopped, diverged) == others
    assert stopped == "stopped"
    meta = checkpoints.load(tmp_path / "stopped" / "last.safetensors").meta
    assert (meta["epoch"], meta["update"]) == (2, 3)
    assert re.search(r"became nan at update 3 of epoch 1", diverged)
    assert checkpoints.load(tmp_path / "diverged" / "last.safetensors").meta["update"] == 2, "what was good is kept"


def lose_a_rank(rank: int, size: int, port: int, folder: str, kind: Any) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    sys.stderr = (Path(folder) / f"{rank}.txt").open("w", encoding="utf-8")
    torch.set_num_threads(1)

    def kill(progress: Any) -> None:
        if rank == 1 and progress.update == 3:
            os.kill(os.getpid(), signal.SIGKILL)

    with distributed.processes():
        recipe = recipe_of("plain", epochs=1000)
        small_trainer(Path(folder), recipe=recipe, parallel=kind, checkpoint_updates=2).run(kill)


@pytest.mark.parametrize("kind", KINDS)
def test_a_process_that_dies_stops_the_others_with_a_message(kind: str, tmp_path: Path) -> None:
    processes = start(lose_a_rank, 2, free_port(), str(tmp_path), kind)
    codes = end(processes, 120.0)
    assert codes[0] not in (None, 0), f"exit codes {codes}; None had to be killed"
    assert codes[1] == -signal.SIGKILL
    said = (tmp_path / "0.txt").read_text(encoding="utf-8").strip()
    assert re.search(r"LostRankError: rank 0 of 2 stops.*one of them has died", said.splitlines()[-1]), said
    assert checkpoints.load(tmp_path / "last.safetensors").meta["update"] == 2


# --- validation -------------------------------------------------------------------------------------------------------


def message_of(folder: Path, recipe: Recipe, kind: Any) -> str:
    with pytest.raises(ValueError, match=r"must be|find the same") as caught:
        small_trainer(folder, recipe=recipe, parallel=kind)
    return str(caught.value)


def refuse(folder: str) -> dict[str, str]:
    own = Path(folder) / str(dist.get_rank())
    messages = {
        "batch": message_of(own, recipe_of("plain", batch=13), "ddp"),
        "group": message_of(own, recipe_of("plain", batch=12, group=4), "fsdp"),
        "kind": message_of(own, recipe_of("plain"), "zero"),
    }
    # One rank finds a checkpoint where the other finds none.
    if dist.get_rank() == 0:
        go_on(str(own), None, 3)
    messages["folder"] = message_of(own, recipe_of("grouped", optimizer="asgd"), "ddp")
    return messages


def share_what_the_first_knows() -> Any:
    return broadcast_from_first(lambda: ("from rank", dist.get_rank()))


def test_bad_input_and_the_word_of_the_first(tmp_path: Path) -> None:
    for rank, messages in enumerate(on_ranks(tmp_path, 2, refuse, str(tmp_path))):
        assert re.search(r"13 columns must be divisible by the number of processes, 2", messages["batch"])
        assert re.search(r"has 6 of the 12 columns, which must be a part of a group of 4", messages["group"])
        assert messages["kind"] == "parallel must be one of 'ddp', 'fsdp', 'vocabulary', got 'zero'"
        found = rf"do not find the same at .*rank {rank} of 2 is at \[{1 - rank}\], the first one at \[1\]"
        assert re.search(found, messages["folder"])
    assert on_ranks(tmp_path, 2, share_what_the_first_knows) == [("from rank", 0)] * 2


def test_processes_must_be_joined(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"not initialised; start the program with torchrun"):
        small_trainer(tmp_path, parallel="ddp")
    assert type(parallel_strategy(small_trainer(tmp_path).model, None)) is SingleProcessStrategy


def strategy_of(rank: int, size: int) -> DDPStrategy:
    strategy = DDPStrategy.__new__(DDPStrategy)
    strategy.rank, strategy.size = rank, size
    return strategy


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_every_column_is_read_once(size: int) -> None:
    for batch in range(1, 12):
        shares = [strategy_of(rank, size).evaluated_columns(batch) for rank in range(size)]
        counted = [column for share in shares if share.counts for column in range(batch)[share.columns]]
        assert counted == list(range(batch))
        assert all(range(batch)[share.columns] for share in shares), "all make passes, counted or not"
    slices = [strategy_of(rank, size).columns(6 * size, 6) for rank in range(size)]
    assert [column for own in slices for column in range(6 * size)[own]] == list(range(6 * size))


def test_masks_of_columns_are_cut_from_those_of_the_batch() -> None:
    config = ModelConfig(head="moss(K=3)", embedding=8, hidden=(12, 10), dropout_latent=0.3)
    whole = draw_masks(config, words=9, batch=6, generator=torch.Generator().manual_seed(0))
    part = whole.of_columns(slice(2, 4))
    for name in ("input_1BD", "output_1BH", "latent_1BKD"):
        assert torch.equal(getattr(part, name), getattr(whole, name)[:, 2:4])
    assert torch.equal(part.hidden_1BH[0], whole.hidden_1BH[0][:, 2:4])
    assert part.words_V is whole.words_V
    assert part.weights_4HH is whole.weights_4HH
