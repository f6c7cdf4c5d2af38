"""Runs of torchrun's processes, from the command line: the same results, told once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.experiments.small_runs import SINGLE, sigsoftmax, small_resources, small_runs, write_text

from sigsoftmax.experiments.runs.distributed_launch import process_group
from sigsoftmax.experiments.runs.evaluate import evaluate_best
from sigsoftmax.experiments.runs.executors import train_runs
from sigsoftmax.experiments.runs.run import Resources
from sigsoftmax.records import read
from sigsoftmax.records.schemas.training import EpochRecord, EvaluationRecord


def torchrun(processes: int, *words: object) -> subprocess.CompletedProcess[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    return subprocess.run(
        [*launcher, "-m", "sigsoftmax", *map(str, words)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )


def words(text: Path, out: Path) -> list[object]:
    changes = (*SINGLE, "model.dropout_hidden=0.2", "model.weight_drop=0.3")
    return ["train", "tiny-sigsoftmax", "--seed", 1, "--data", text, "--out", out, "--set", *changes]


def numbers(folder: Path) -> list[float]:
    """The records of training, and of the evaluations after it."""
    epochs = [record.payload_as(EpochRecord) for record in read(folder / "records.jsonl")]
    evaluations = [record.payload_as(EvaluationRecord) for record in read(folder / "evaluations.jsonl")]
    losses = [loss for epoch in epochs for loss in (epoch.train_loss, epoch.valid_loss)]
    return [*losses, *(evaluation.loss for evaluation in evaluations)]


@pytest.mark.thorough
def test_two_processes_record_and_say_what_one_does(tmp_path: Path) -> None:
    text = write_text(tmp_path / "text")
    one, two = sigsoftmax(*words(text, tmp_path / "one")), torchrun(2, *words(text, tmp_path / "two"))
    assert (one.returncode, two.returncode) == (0, 0), one.stderr + two.stderr
    found, expected = (numbers(tmp_path / out / "tiny-sigsoftmax" / "1" / "train") for out in ("two", "one"))
    assert len(expected) == 2 * 2 + 3
    assert found == pytest.approx(expected, rel=1e-5)
    assert two.stdout.replace("two/", "one/") == one.stdout, "told once"


@pytest.mark.slow
def test_finetuning_goes_on_from_what_other_processes_trained(tmp_path: Path) -> None:
    text = write_text(tmp_path / "text")
    assert torchrun(2, *words(text, tmp_path), "--parallel", "fsdp").returncode == 0
    run = tmp_path / "tiny-sigsoftmax" / "1"
    tuned = torchrun(4, "finetune", run, "--data", text, "--parallel", "vocabulary")
    assert tuned.returncode == 0, tuned.stderr
    assert tuned.stdout.count("seed 1, finetuning") == 1
    alone = sigsoftmax("finetune", run, "--data", text)
    assert alone.returncode == 0, alone.stderr
    assert alone.stdout == tuned.stdout, "it has ended, and is only told again"


@pytest.mark.slow
def test_a_bad_batch_is_told_without_a_traceback(tmp_path: Path) -> None:
    failed = torchrun(3, *words(write_text(tmp_path / "text"), tmp_path))
    assert failed.returncode != 0
    assert "sigsoftmax train: error: the batch of 4 columns must be divisible by the number of processes, 3" in (
        failed.stderr
    )
    assert "sigsoftmax/lm" not in failed.stderr
    assert not (tmp_path / "tiny-sigsoftmax" / "1" / "train").exists()


def test_without_torchrun_there_is_nothing_to_join(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    resources = Resources()
    with process_group(resources) as (same, prints):
        assert same is resources
        assert prints
    with pytest.raises(ValueError, match=r"parallel 'fsdp' divides a run.*torchrun --standalone"):
        process_group(Resources(parallel="fsdp")).__enter__()
    with pytest.raises(ValueError, match="parallel must be one of 'ddp', 'fsdp', 'vocabulary', got 'tp'"):
        Resources(parallel="tp")  # type: ignore[arg-type]


def test_what_processes_cannot_share(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="one run at a time, got at_once 3"):
        process_group(Resources(at_once=3)).__enter__()
    runs = small_runs(tmp_path, "tiny-softmax")
    with pytest.raises(ValueError, match="would all write the same runs"):
        next(train_runs(runs, small_resources(tmp_path), evaluate_best))


def test_a_world_of_one_is_joined_and_left(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch.distributed as dist
    from tests.distributed.test_world import free_port

    settings = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    with process_group(Resources()) as (own, prints):
        assert dist.is_initialized()
        assert (own.parallel, own.device, prints) == ("ddp", "cpu", True)
    assert not dist.is_initialized()
