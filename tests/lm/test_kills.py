"""SIGKILL at random moments, many of them inside the writing of a checkpoint: the run ends as if none had happened.

A child is forked for each life of the run. Half of the kills come from outside after a random time, half from inside at
a random one of the moments around a checkpoint: before and after its bytes, its flush to the disk, its rename.
"""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.lm.runs import assert_same_end, small_recipe, small_trainer

ROOT = Path(__file__).parents[2]


def kill_at_a_moment_of_a_checkpoint(chosen):
    """SIGKILL this process at the ``chosen``-th moment around and inside checkpoint writes."""
    from sigsoftmax.lm.saving import checkpoints

    moments = iter(range(10**9))

    def moment():
        if next(moments) == chosen:
            os.kill(os.getpid(), signal.SIGKILL)

    def around(function):
        def wrapped(*arguments, **keywords):
            moment()
            result = function(*arguments, **keywords)
            moment()
            return result

        return wrapped

    bytes_of = checkpoints._bytes_of
    checkpoints._bytes_of = lambda tensor: (moment(), bytes_of(tensor))[1]
    os.fsync = around(os.fsync)
    Path.replace = around(Path.replace)


def live(folder, recipe, kill_at):
    if kill_at is not None:
        kill_at_a_moment_of_a_checkpoint(kill_at)
    small_trainer(folder, recipe=recipe, checkpoint_updates=4).run()


def kill_often(folder, kills, seed, epochs):
    """Forks lives of the run until it has been killed so often, then lets it end; prints the kills it took."""
    rng = random.Random(seed)
    recipe = small_recipe(epochs=epochs)
    deaths = inside = 0
    while True:
        kill_at = rng.randrange(8, 220) if rng.random() < 0.5 and deaths < kills else None
        child = os.fork()
        if child == 0:
            try:
                live(folder, recipe, kill_at)
            finally:
                os._exit(0)
        if deaths < kills and kill_at is None:
            time.sleep(rng.uniform(0.02, 0.4))
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        if os.WIFSIGNALED(status):
            deaths += 1
            inside += kill_at is not None
        elif deaths < kills:
            raise SystemExit(f"the run ended after {deaths} kills; make it longer")
        else:
            break
    sys.stdout.write(f"{deaths} {inside}")


def run_killed(folder, kills, seed, epochs):
    # A process of its own: forking this one would copy its threads' locks.
    script = (
        "from pathlib import Path; from tests.lm.test_kills import kill_often; "
        f"kill_often(Path({str(folder)!r}), {kills}, {seed}, {epochs})"
    )
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [int(number) for number in done.stdout.split()]


def check_kills(tmp_path, kills, seed):
    epochs = 3 * kills  # long enough to be killed so often
    deaths, inside = run_killed(tmp_path / "killed", kills, seed, epochs)
    assert deaths == kills
    assert inside >= kills // 4
    assert run_killed(tmp_path / "whole", 0, seed, epochs) == [0, 0]
    assert_same_end(tmp_path / "whole", tmp_path / "killed")
    assert not list((tmp_path / "killed").glob(".*")), "nothing half-written is left"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="lives of the run are forked")
@pytest.mark.parametrize(("kills", "seed"), [(6, 0), pytest.param(20, 1, marks=pytest.mark.thorough)])
def test_a_run_killed_often_ends_as_if_it_had_not_been(tmp_path, kills, seed):
    check_kills(tmp_path, kills, seed)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="lives of the run are forked")
def test_a_run_killed_two_hundred_times_ends_as_if_it_had_not_been(tmp_path):
    check_kills(tmp_path, kills=200, seed=2)
