"""Two processes on one run: a command that would write to its folder as the second is refused, and nothing is lost."""

import os
import re
import subprocess
import time

import pytest
from tests.experiments.runs.test_distributed_launch import torchrun
from tests.experiments.small_runs import SINGLE, command, sigsoftmax, small_resources, small_runs, write_text
from tests.lm.runs import epochs_of

from sigsoftmax import cli
from sigsoftmax.experiments.runs import folder_locks
from sigsoftmax.experiments.runs.evaluate import evaluate_best
from sigsoftmax.experiments.runs.executors import train_runs
from sigsoftmax.experiments.runs.folder_locks import Busy, FolderLock
from sigsoftmax.experiments.runs.ranks import measure_rank
from sigsoftmax.experiments.runs.run import run_folder

LONG = [change for change in SINGLE if not change.startswith("training.epochs")]


def train_words(folder, epochs, out="runs"):
    changes = (f"training.epochs={epochs}", *LONG)
    return "train", "tiny-softmax", "--seed", 1, "--data", folder / "text", "--out", folder / out, "--set", *changes


def losses(folder):
    return [(record.epoch, record.train_loss, record.valid_loss) for record in epochs_of(folder)]


@pytest.mark.thorough
def test_the_second_of_two_is_refused_until_the_first_is_dead(tmp_path):
    write_text(tmp_path / "text")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    folder = tmp_path / "runs/tiny-softmax/1/train"
    words = train_words(tmp_path, 100_000)
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command(*words), **quiet, env=environment) as first:
        while not (folder / "records.jsonl").is_file() and first.poll() is None:
            time.sleep(0.01)
        second = sigsoftmax(*words, env=environment)
        assert first.poll() is None
        first.kill()
    assert second.returncode == 1
    assert re.search(
        rf"sigsoftmax train: error: another process is at work in \S+/tiny-softmax/1: process {first.pid} on ",
        second.stderr,
    )
    # A second one would have begun anew, and deleted what the first had recorded.
    done = len(epochs_of(folder))
    assert [record.epoch for record in epochs_of(folder)] == list(range(1, done + 1))
    # The lock of the dead one blocks nobody.
    for out in ("runs", "alone"):
        ended = sigsoftmax(*train_words(tmp_path, 3, out=out), env=environment)
        assert ended.returncode == 0, ended.stderr
    assert losses(folder) == losses(tmp_path / "alone/tiny-softmax/1/train")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    [(one, _)] = train_runs(small_runs(folder, "tiny-softmax"), small_resources(folder), evaluate_best)
    return folder, one


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(folder_locks, "PATIENCE", 0.0)


def files(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and ".lock" not in path.name}


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("verb", ["train", "finetune", "dynamic-eval", "dynamic-eval grid", "reproduce", "compare"])
def test_every_command_that_writes_to_the_folder_is_refused(trained, verb, capsys):
    folder, one = trained
    data = ("--data", folder / "text", "--device", "cpu")
    runs = folder / "runs"
    heads = ("--heads", "softmax", "--setting", "tiny")
    words = {
        "train": (*train_words(folder, 9), "--device", "cpu"),
        "finetune": ("finetune", one.folder, *data),
        "dynamic-eval": ("dynamic-eval", one.folder, *data, "--learning-rate", 1e-5, "--decay", 1e-3),
        "dynamic-eval grid": ("dynamic-eval", one.best, *data),
        "reproduce": ("reproduce", "table1", *heads, *data, "--out", runs, "--set", "seed=1", *SINGLE),
        "compare": ("compare", *heads, "--seeds", 1, *data, "--out", runs, "--at-once", 1, "--set", *SINGLE),
    }[verb]
    before = files(folder)
    with FolderLock(one.folder):
        assert cli.main([str(word) for word in words]) == 1
    told = capsys.readouterr().err
    assert re.search(rf"another process is at work in {one.folder}: process {os.getpid()} on \S+, since 20", told)
    assert files(folder) == before


@pytest.mark.usefixtures("impatient")
def test_a_rank_is_not_measured_in_a_folder_of_another(trained):
    folder, one = trained
    corpus = small_resources(folder).corpus(one.recipe.corpus)
    with FolderLock(one.folder), pytest.raises(Busy):
        measure_rank(one.best, corpus, small_resources(folder))
    assert not (one.path / "spectrum.jsonl").exists()


@pytest.mark.usefixtures("impatient")
def test_two_comparisons_of_different_heads_do_not_share_a_folder(trained, capsys):
    folder, _ = trained
    with FolderLock(folder / "comparison"):
        words = ("compare", "--heads", "relu", "--data", folder / "text", "--out", folder / "comparison", "--quick")
        assert cli.main([*map(str, words)]) == 1
    assert "another process is at work in" in capsys.readouterr().err


def test_a_model_can_be_looked_at_while_it_is_trained(trained, capsys):
    folder, one = trained
    words = ["evaluate", str(one.folder), "--data", str(folder / "text"), "--device", "cpu"]
    before = files(folder)
    with FolderLock(one.folder):
        assert cli.main(words) == 0
    told = capsys.readouterr().out
    assert re.search(r"Not recorded: another process is at work in .*process \d+ on", told)
    assert told.count("perplexity") == 3
    assert files(folder) == before
    assert cli.main(words) == 0
    assert "Not recorded" not in capsys.readouterr().out
    assert files(folder) != before


def test_runs_in_processes_hold_their_folders_too(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    runs = small_runs(tmp_path, "tiny-softmax", seeds=(1, 2))
    with FolderLock(runs[1].folder), pytest.raises(Busy, match=rf"at work in {runs[1].folder}: process {os.getpid()}"):
        dict(train_runs(runs, small_resources(tmp_path, at_once=2), evaluate_best))
    assert not runs[1].path.exists()


@pytest.mark.thorough
def test_processes_that_share_a_run_share_its_lock(tmp_path):
    write_text(tmp_path / "text")
    with FolderLock(tmp_path / "runs/tiny-softmax/1"):
        refused = torchrun(2, *train_words(tmp_path, 2))
    assert refused.returncode != 0
    assert refused.stderr.count(f"another process is at work in {tmp_path}/runs/tiny-softmax/1: process {os.getpid()}")
    assert "sigsoftmax/experiments" not in refused.stderr, "told without a traceback"
    assert not (tmp_path / "runs/tiny-softmax/1/train").exists()


def test_the_run_that_a_checkpoint_belongs_to(tmp_path, monkeypatch):
    assert run_folder(tmp_path / "1" / "train" / "best.safetensors") == tmp_path / "1"
    assert run_folder(tmp_path / "1" / "finetune" / "best.safetensors") == tmp_path / "1"
    assert run_folder(tmp_path / "1" / "best.safetensors") == tmp_path / "1"
    (tmp_path / "1" / "train").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "1" / "train")
    assert run_folder(type(tmp_path)("best.safetensors")) == tmp_path / "1"
