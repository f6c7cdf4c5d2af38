"""Several runs: alone, in turns and in processes they end in the same bits; killed, they go on."""

import os
import signal
import subprocess
import time

import pytest
from tests.experiments.small_runs import SINGLE, command, sigsoftmax, small_resources, small_runs, write_text
from tests.lm.runs import assert_same_end, epochs_of

from sigsoftmax.experiments.runs.evaluate import evaluate_best
from sigsoftmax.experiments.runs.executors import train_runs
from sigsoftmax.lm.training.interruption import OutOfTime
from sigsoftmax.lm.training.trainer import Diverged


def ended(runs, resources, watch=lambda *_: None):
    return dict(train_runs(runs, resources, evaluate_best, watch))


def losses(evaluations):
    return [(record.split, record.batch, record.loss, record.epoch) for record in evaluations]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_in_turns_and_in_processes_end_in_the_same_bits(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    folders, results = [], []
    for name, at_once in (("turns", 1), ("processes", 2)):
        folder = tmp_path / name
        runs = small_runs(folder, "tiny-softmax", "tiny-gss-0", seeds=(1, 2))
        seen = []
        found = ended(runs, small_resources(folder, at_once=at_once), lambda run, at, seen=seen: seen.append((run, at)))
        assert {run for run, at in seen if at.record is not None} == set(runs)
        folders.append([run.path for run in runs])
        results.append([losses(found[run]) for run in runs])
    assert results[0] == results[1]
    for one, other in zip(*folders, strict=True):
        # Records tell how many runs were made at once, and nothing else differs.
        assert [record.valid_loss for record in epochs_of(one)] == [record.valid_loss for record in epochs_of(other)]
        assert (one / "best.safetensors").read_bytes() == (other / "best.safetensors").read_bytes()


def test_a_finished_run_is_not_trained_again(tmp_path):
    runs, resources = small_runs(tmp_path, "tiny-softmax"), small_resources(tmp_path)
    first = ended(runs, resources)
    before = {path: path.read_bytes() for path in runs[0].path.iterdir()}
    seen = []
    assert ended(runs, resources, lambda *at: seen.append(at)) == first
    assert not seen
    assert {path: path.read_bytes() for path in runs[0].path.iterdir()} == before


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("at_once", [1, pytest.param(2, marks=pytest.mark.thorough)])
def test_at_the_end_of_the_time_all_save_and_go_on_later_in_the_same_bits(at_once, tmp_path):
    straight = small_runs(tmp_path / "straight", "tiny-softmax", "tiny-gss-0")
    ended(straight, small_resources(tmp_path / "straight"))
    runs = small_runs(tmp_path / "stopped", "tiny-softmax", "tiny-gss-0")
    resources = small_resources(tmp_path / "stopped", at_once=at_once)
    with pytest.raises(OutOfTime):
        list(train_runs(runs, resources, evaluate_best, until=time.monotonic()))
    assert not any((run.path / "evaluations.jsonl").exists() for run in runs)
    ended(runs, small_resources(tmp_path / "stopped"))
    for one, other in zip(straight, runs, strict=True):
        assert (one.path / "best.safetensors").read_bytes() == (other.path / "best.safetensors").read_bytes()


def test_a_run_that_diverges_stops_alone_and_is_named(tmp_path):
    changes = ("training.learning_rate=1e30", "training.clip=1e30")
    good, bad = small_runs(tmp_path, "tiny-softmax"), small_runs(tmp_path, "tiny-sigsoftmax", changes=changes)
    found = []
    results = (found.append(run) for run, _ in train_runs([*bad, *good], small_resources(tmp_path), evaluate_best))
    with pytest.raises(Diverged, match=r"tiny-sigsoftmax, seed 1: the loss became"):
        list(results)
    assert found == good
    assert not bad[0].best.exists()


def command_of(folder, *, at_once):
    """Two runs long enough to be stopped."""
    changes = [change for change in SINGLE if not change.startswith("training.epochs")]
    return command(
        *("train", "tiny-softmax", "tiny-sigsoftmax", "--seed", 1, "--data", folder / "text", "--at-once", at_once),
        *("--out", folder / "runs", "--set", "training.epochs=40", *changes),
    )


def wait_for_epochs(folder, count=1):
    """Until some run has as many epochs on record."""
    until = time.monotonic() + 120
    while time.monotonic() < until:
        for path in folder.glob("runs/*/1/train/records.jsonl"):
            if path.read_bytes().count(b"\n") >= count:
                return
        time.sleep(0.02)
    raise AssertionError("no epoch was recorded")


@pytest.mark.slow
@pytest.mark.parametrize("at_once", [1, 2])
def test_an_interrupt_saves_and_the_same_command_goes_on(at_once, tmp_path):
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    for folder in (straight, broken):
        write_text(folder / "text")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(command_of(straight, at_once=at_once), check=True, capture_output=True, env=environment, timeout=300)
    with subprocess.Popen(
        command_of(broken, at_once=at_once), stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        wait_for_epochs(broken, 2)
        process.send_signal(signal.SIGINT)
        error = process.communicate(timeout=120)[1]
    assert process.returncode == 130
    assert error.splitlines()[-1] == "interrupted; the same command goes on from there"
    assert list(broken.glob("runs/*/1/train/last.safetensors"))
    subprocess.run(command_of(broken, at_once=at_once), check=True, capture_output=True, env=environment, timeout=300)
    for name in ("tiny-softmax", "tiny-sigsoftmax"):
        assert_same_end(straight / f"runs/{name}/1/train", broken / f"runs/{name}/1/train")


@pytest.mark.slow
def test_killed_it_leaves_no_process_behind_and_goes_on(tmp_path):
    write_text(tmp_path / "text")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    words = command_of(tmp_path, at_once=2)
    with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment) as process:
        wait_for_epochs(tmp_path)
        children = subprocess.run(["ps", "-o", "pid=", "--ppid", str(process.pid)], capture_output=True, text=True)
        process.kill()
    alive = [int(pid) for pid in children.stdout.split()]
    until = time.monotonic() + 60
    while alive and time.monotonic() < until:
        alive = [pid for pid in alive if _is_alive(pid)]
        time.sleep(0.05)
    assert not alive
    done = sigsoftmax(*words[3:], env=environment)
    assert done.returncode == 0, done.stderr


def _is_alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
