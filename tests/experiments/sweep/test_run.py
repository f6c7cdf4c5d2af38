"""Sweeps on a real Ray: what train would give, failures beside results, and everything goes on after a kill."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch
from tests.experiments.small_runs import SINGLE, command, small_runs, write_text
from tests.lm.runs import epochs_of

from sigsoftmax import cli
from sigsoftmax.experiments.runs import folder_locks
from sigsoftmax.experiments.runs.evaluate import evaluate_best
from sigsoftmax.experiments.runs.executors import train_runs
from sigsoftmax.experiments.runs.folder_locks import FolderLock
from sigsoftmax.experiments.runs.run import Resources
from sigsoftmax.experiments.sweep.plan import SweepConfig
from sigsoftmax.lm.recipes import recipe
from sigsoftmax.records import read
from sigsoftmax.records.schemas.sweeps import PairedDifferenceRecord, TrialRecord

NAMES = ("tiny-softmax", "tiny-sigsoftmax")
BROKEN = "tiny-gss-0"


def words(folder, *names, out="out", seeds="1,2", changes=()):
    fixed = [change for change in SINGLE if change.partition("=")[0] not in {c.partition("=")[0] for c in changes}]
    return (
        *("sweep", *names, "--seeds", seeds, "--data", str(folder / "text"), "--out", str(folder / out)),
        *("--device", "cpu", "--set", *fixed, *changes),
    )


# --- without Ray ------------------------------------------------------------------------------------------------------


@pytest.fixture
def no_ray(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)


def test_a_dry_run_lists_trials_and_writes_nothing(tmp_path, capsys, no_ray):
    write_text(tmp_path / "text")
    assert cli.main([*words(tmp_path, *NAMES, changes=("training.clip=1,2",)), "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("8 trials, 0 ended, in ")
    assert printed.count("  to come\n") == 8
    assert "  tiny-sigsoftmax, training.clip=2, seed 2  to come" in printed
    assert [path.name for path in tmp_path.iterdir()] == ["text"]


def test_a_text_that_no_trial_has_is_told_before_ray_starts(tmp_path, capsys, no_ray, monkeypatch):
    monkeypatch.setenv("SIGSOFTMAX_DATA", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("sigsoftmax.experiments.sweep.run.check_ray", lambda: None)
    assert cli.main(["sweep", "tiny-softmax", "--out", str(tmp_path / "out")]) == 2
    assert "sigsoftmax data fetch ptb" in capsys.readouterr().err


def test_without_ray_nothing_is_begun(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(
        "sigsoftmax.experiments.runs.ray_executor.find_spec", lambda name: None if name == "ray" else name
    )
    assert cli.main(["sweep", "language-softmax", "--out", str(tmp_path / "out")]) == 2
    assert "a sweep needs ray: pip install '.[sweep]' in the folder of sigsoftmax" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "name recipes, as tiny-softmax"),
        (("tiny-sofmax",), "did you mean tiny-softmax"),
        (("tiny-softmax", "--gpus-per-trial", "3"), "a trial runs on one GPU"),
        (("tiny-softmax", "--baseline", "tiny-mos"), "must be a recipe of the sweep"),
        (("--config", "nowhere.toml"), "no sweep file at nowhere.toml"),
    ],
)
def test_bad_words_are_told_without_traceback(arguments, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["sweep", *arguments]) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_the_example_of_the_help_can_be_planned(capsys):
    with pytest.raises(SystemExit):
        cli.main(["sweep", "--help"])
    [example] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("example: sigsoftmax ")]
    assert cli.main([*example.removeprefix("example: sigsoftmax ").split(), "--dry-run"]) == 0
    assert capsys.readouterr().out.startswith("18 trials")


# --- on Ray -----------------------------------------------------------------------------------------------------------


def environment(temporary):
    return {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(temporary)}


def sweep_once(folder):
    """Six trials, one of which finds in its folder what it cannot go on from."""
    write_text(folder / "text")
    damaged = folder / "out" / BROKEN / "2" / "train"
    damaged.mkdir(parents=True)
    (damaged / "last.safetensors").write_bytes(b"no checkpoint")
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="s") as temporary:
        done = subprocess.run(
            command(*words(folder, *NAMES, BROKEN)),
            capture_output=True,
            text=True,
            timeout=600,
            env=environment(temporary),
        )
        left = [path.name for path in Path(temporary).iterdir()]
    told = {"status": done.returncode, "output": done.stdout, "error": done.stderr, "left": left}
    (folder / "told.json").write_text(json.dumps(told))


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    """A copy of a sweep that the processes of pytest make once: its folder, and what the command told."""
    pytest.importorskip("ray")
    own = tmp_path_factory.mktemp("copy") / "sweep"
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    folder = shared / "sweep-in-a-folder-too-long-for-the-sockets-of-ray"
    with FolderLock(shared / "sweep-lock", patience=900.0):
        if not (folder / "told.json").is_file():
            sweep_once(folder)
    shutil.copytree(folder, own)
    return own, json.loads((own / "told.json").read_text())


def test_a_trial_that_fails_loses_no_other_and_shows_in_the_status(swept):
    folder, told = swept
    assert told["status"] == 1, told["error"]
    assert "error: 1 trial of 6 failed; the same command tries again" in told["error"]
    assert f"failed: {BROKEN}, seed 2: " in told["output"]
    assert "is no safetensors file" in told["output"]
    rows = {line.split()[0]: line for line in told["output"].splitlines() if line.startswith("tiny-")}
    assert "± " in rows["tiny-softmax"]
    assert "1 of 2" in rows[BROKEN]
    assert len(list(folder.glob("out/*/*/trial.jsonl"))) == 5


def test_its_numbers_are_those_of_train_to_the_bit(swept, tmp_path):
    folder, _ = swept
    runs = small_runs(tmp_path, *NAMES, seeds=(1, 2))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        trained = dict(train_runs(runs, Resources(data=folder / "text", at_once=1), evaluate_best))
    finally:
        torch.set_num_threads(threads)
    for run in runs:
        trial = folder / "out" / run.recipe.name / str(run.seed)
        assert (trial / "train/best.safetensors").read_bytes() == run.best.read_bytes()
        [record] = [one.payload_as(TrialRecord) for one in read(trial / "trial.jsonl")]
        assert record.test_loss == next(found.loss for found in trained[run] if found.split == "test")


def test_records_are_gathered_in_one_file(swept):
    folder, _ = swept
    records = list(read(folder / "out" / "sweep.jsonl"))
    trials = [record.payload_as(TrialRecord) for record in records if record.kind == TrialRecord.KIND]
    assert len(trials) == 5
    differences = [record for record in records if record.kind == PairedDifferenceRecord.KIND]
    found = {one.recipe: one for one in (record.payload_as(PairedDifferenceRecord) for record in differences)}
    assert set(found) == {"tiny-sigsoftmax", BROKEN}
    assert found[BROKEN].seeds == (1,)
    losses = {(one.run.recipe, one.run.seed): one.test_loss for one in trials}
    mean = sum(losses["tiny-sigsoftmax", seed] - losses["tiny-softmax", seed] for seed in (1, 2)) / 2
    assert found["tiny-sigsoftmax"].mean == pytest.approx(mean)
    assert all(" sweep " in record.environment.command for record in records)


def test_ray_leaves_nothing_behind(swept):
    folder, told = swept
    assert "too long a path for Ray's sockets" in told["output"]
    assert told["left"] == []
    assert not (folder / "out" / "ray").exists()
    assert "raylet" not in told["output"] + told["error"]


def test_what_has_ended_is_not_made_again_and_needs_no_ray(swept, capsys, no_ray):
    folder, _ = swept
    before = {path: path.stat().st_mtime_ns for path in folder.glob("out/*/*/train/*")}
    assert cli.main([*words(folder, *NAMES)]) == 0
    printed = capsys.readouterr().out
    assert "2 trials of it left out and kept on disk" in printed
    assert "4 trials: 2 recipes x 2 seeds; 4 ended before." in printed
    assert "test loss minus baseline's" in printed
    assert {path: path.stat().st_mtime_ns for path in folder.glob("out/*/*/train/*")} == before
    records = [record for record in read(folder / "out" / "sweep.jsonl") if record.kind == TrialRecord.KIND]
    assert len(records) == 5, "the records of trials that are left out stay, too"
    assert cli.main([*words(folder, *NAMES, BROKEN), "--dry-run"]) == 0
    listed = capsys.readouterr().out
    assert "6 trials, 5 ended" in listed
    assert f"  {BROKEN}, seed 2" in listed
    assert listed.count("ended, ") == 6


def test_another_plan_in_the_same_folder_is_refused(swept, capsys, no_ray):
    folder, _ = swept
    assert cli.main([*words(folder, *NAMES, changes=("training.batch=8",))]) == 2
    assert "holds another sweep" in capsys.readouterr().err


def test_two_commands_in_one_folder_do_not_meet(swept, capsys, monkeypatch):
    folder, _ = swept
    monkeypatch.setattr(folder_locks, "PATIENCE", 0.0)
    with FolderLock(folder / "out"):
        assert cli.main([*words(folder, *NAMES)]) == 1
    assert re.search(rf"another process is at work in \S+out: process {os.getpid()} on ", capsys.readouterr().err)


# --- kills ------------------------------------------------------------------------------------------------------------


LONG = ("training.epochs=50",)


@pytest.fixture
def short_folder():
    """Short enough for Ray's sockets, so that Ray stays in it."""
    folder = Path(tempfile.mkdtemp(dir="/tmp", prefix="s"))
    write_text(folder / "text")
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """The same trials without a kill or Ray."""
    folder = tmp_path_factory.mktemp("straight")
    write_text(folder / "text")
    chosen = SweepConfig(
        recipes=tuple(recipe(name) for name in NAMES),
        seeds=(1, 2),
        changes=tuple(change for change in SINGLE if not change.startswith("training.epochs")) + LONG,
        out=folder / "out",
    )
    runs = chosen.trials()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for _ in train_runs(runs, Resources(data=folder / "text"), evaluate_best):
            pass
    finally:
        torch.set_num_threads(threads)
    return folder


def started(folder):
    return subprocess.Popen(
        command(*words(folder, *NAMES, changes=LONG)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment("/tmp"),
        start_new_session=True,
    )


def wait_for(found, seconds=300):
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        result = found()
        if result:
            return result
        time.sleep(0.02)
    raise AssertionError(f"waited {seconds} s in vain")


def begun_trials(folder):
    """Trials that have trained an epoch and have not ended."""
    return [
        trial
        for trial in folder.glob("out/*/*")
        if (trial / "train/records.jsonl").is_file() and not (trial / "trial.jsonl").is_file()
    ]


def worker_of(trial):
    """From what the worker has noted beside its lock."""
    return json.loads((trial / ".lock.json").read_text())["process"]


def is_alive(pid):
    state = Path(f"/proc/{pid}/stat")
    try:
        # A zombie that nobody waits for is dead.
        return state.read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def assert_as_straight(straight, folder):
    for name in NAMES:
        for seed in (1, 2):
            one, other = (where / "out" / name / str(seed) / "train" for where in (straight, folder))
            assert (one / "best.safetensors").read_bytes() == (other / "best.safetensors").read_bytes()
            losses = [[epoch.valid_loss for epoch in epochs_of(path)] for path in (one, other)]
            assert losses[0] == losses[1]
            assert len(losses[0]) == 50


@pytest.mark.slow
def test_a_killed_worker_is_replaced_and_its_trial_goes_on(straight, short_folder):
    pytest.importorskip("ray")
    with started(short_folder) as process:
        [trial, *_] = wait_for(lambda: begun_trials(short_folder))
        os.kill(worker_of(trial), signal.SIGKILL)
        output, error = process.communicate(timeout=600)
    assert process.returncode == 0, error
    assert "its process died; another goes on from its last checkpoint" in output
    assert "raylet" not in output
    assert_as_straight(straight, short_folder)


@pytest.mark.slow
def test_after_a_kill_of_the_command_the_same_one_finishes_the_rest(straight, short_folder):
    pytest.importorskip("ray")
    with started(short_folder) as process:
        wait_for(lambda: list(short_folder.glob("out/*/*/trial.jsonl")))
        [trial, *_] = wait_for(lambda: begun_trials(short_folder))
        worker = worker_of(trial)
        process.kill()
        process.communicate()
    assert (short_folder / "out" / "ray").is_dir()
    ended = {path: path.stat().st_mtime_ns for path in short_folder.glob("out/*/*/trial.jsonl")}
    assert ended
    # At once, while workers of the dead command may still be there.
    with started(short_folder) as again:
        output, error = again.communicate(timeout=600)
    assert again.returncode == 0, error
    # A worker may have ended its trial in the moment before it noticed that it was alone.
    assert int(re.search(r"; (\d) ended before", output)[1]) >= len(ended)
    assert {path: path.stat().st_mtime_ns for path in ended} == ended
    if Path("/proc/self/stat").is_file():
        assert not is_alive(worker)
    assert not (short_folder / "out" / "ray").exists()
    assert_as_straight(straight, short_folder)


@pytest.mark.slow
def test_on_a_cluster_trials_run_and_the_cluster_is_left_as_it_was(short_folder):
    pytest.importorskip("ray")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    variables = {**environment("/tmp"), "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "t" * 64}
    ray = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--port", str(port)]
    ray += ["--num-cpus", "2", "--include-dashboard=false", "--disable-usage-stats"]
    ray += ["--temp-dir", str(short_folder / "ray")]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(ray, env=variables, **quiet) as cluster:
        try:
            wait_for(lambda: answers(port))
            asked = command(*words(short_folder, *NAMES), "--address", f"127.0.0.1:{port}")
            done = subprocess.run(asked, capture_output=True, text=True, timeout=600, env=variables)
            assert done.returncode == 0, done.stderr
            assert len(list(short_folder.glob("out/*/*/trial.jsonl"))) == 4
            assert not (short_folder / "out" / "ray").exists()
            assert cluster.poll() is None
            assert answers(port)
        finally:
            cluster.terminate()


def answers(port):
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.slow
def test_an_interrupt_saves_and_the_same_command_goes_on(straight, short_folder):
    pytest.importorskip("ray")
    with started(short_folder) as process:
        wait_for(lambda: begun_trials(short_folder))
        # As a terminal does it: every process of the group gets it.
        os.killpg(process.pid, signal.SIGINT)
        _, error = process.communicate(timeout=300)
    assert process.returncode == 130
    assert error.splitlines()[-1] == "interrupted; the same command goes on from there"
    assert any((trial / "train/last.safetensors").is_file() for trial in begun_trials(short_folder))
    assert not (short_folder / "out" / "ray").exists()
    with started(short_folder) as again:
        _, error = again.communicate(timeout=600)
    assert again.returncode == 0, error
    assert_as_straight(straight, short_folder)
