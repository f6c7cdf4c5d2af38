"""Needs of Ray before it starts: its folder, its leftovers, room for a trial."""

import socket
import sys
import tempfile
import threading
from pathlib import Path

import pytest

from sigsoftmax.experiments.runs import ray_executor
from sigsoftmax.experiments.runs.ray_executor import (
    Share,
    check_ray,
    ray_folder,
    ray_session,
    remove_leftovers,
    trials_at_once,
)

LONG = "a-folder-of-a-sweep-with-a-name-that-is-rather-long"


def test_without_ray_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr(ray_executor, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"a sweep needs ray and safetensors: pip install '\.\[sweep\]'"):
        check_ray()


def test_ray_stays_in_the_folder_of_the_sweep_where_sockets_have_room():
    assert ray_folder(Path("/tmp/sweep")) == Path("/tmp/sweep/ray")
    assert ray_folder(Path("/tmp") / LONG) is None
    # Bytes count, not letters.
    assert ray_folder(Path("/tmp/" + "a" * 20)) is not None
    assert ray_folder(Path("/tmp/" + "å" * 20)) is None


def test_a_long_folder_is_replaced_by_a_short_one(tmp_path, monkeypatch):
    folder = ray_executor._make_folder(tmp_path / LONG)
    try:
        assert folder.is_dir()
        assert folder.name.startswith("sigsoftmax-ray-")
        assert len(str(folder)) + ray_executor.SOCKET_NAME_LENGTH <= ray_executor.SOCKET_PATH_LIMIT
        assert not (tmp_path / LONG).exists()
    finally:
        folder.rmdir()
    monkeypatch.setattr(ray_executor, "SOCKET_PATH_LIMIT", 60)
    with pytest.raises(ValueError, match=r"may have 60 bytes.*choose a shorter --out"):
        ray_executor._make_folder(tmp_path / LONG)


def test_leftovers_are_removed_and_nothing_else(tmp_path):
    (tmp_path / "ray" / "session").mkdir(parents=True)
    fallback = Path(tempfile.mkdtemp(prefix="sigsoftmax-ray-"))
    (fallback / "session").mkdir()
    mine = tmp_path / "mine"
    mine.mkdir()
    remove_leftovers(tmp_path, str(fallback))
    assert not fallback.exists()
    assert not (tmp_path / "ray").exists()
    link = tmp_path / "sigsoftmax-ray-link"
    link.symlink_to(mine)
    for noted in ("", str(mine), str(link), "sigsoftmax-ray-relative"):
        remove_leftovers(tmp_path, noted)
    assert mine.is_dir()
    assert link.is_symlink()


def test_a_cluster_that_does_not_answer_is_told_at_once(tmp_path):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        # Bound, but nobody listens.
        with (
            pytest.raises(OSError, match=f"the Ray at {address} cannot be reached"),
            ray_session(address, tmp_path, str),
        ):
            pass


@pytest.mark.parametrize(
    ("cpus", "gpus", "resources", "count"),
    [
        (1, 0.0, {"CPU": 8.0}, 8),
        (3, 0.0, {"CPU": 8.0}, 2),
        (1, 0.25, {"CPU": 16.0, "GPU": 2.0}, 8),
        (1, 0.3, {"CPU": 16.0, "GPU": 2.0}, 6),
        (4, 0.25, {"CPU": 8.0, "GPU": 1.0}, 2),
        (1, 1.0, {"CPU": 8.0}, 0),
        (0.5, 0.0, {"CPU": 2.0}, 4),
    ],
)
def test_how_many_trials_a_machine_has_room_for(cpus, gpus, resources, count):
    assert Share(cpus=cpus, gpus=gpus).fits(resources) == count


class Nodes:
    def __init__(self, *machines):
        self._machines = machines

    def nodes(self):
        return [{"Alive": alive, "Resources": resources} for alive, resources in self._machines]


def test_a_trial_that_fits_nowhere_is_refused_here_and_waited_for_on_a_cluster():
    share = Share(cpus=64, gpus=0.5)
    assert str(share) == "64 CPUs and 0.5 GPU"
    with pytest.raises(
        ValueError, match=r"a trial asks for 64 CPUs and 0\.5 GPU, and this machine has 2 CPUs and 0 GPUs"
    ):
        trials_at_once(Nodes((True, {"CPU": 2.0})), share, is_local=True)
    assert trials_at_once(Nodes((True, {"CPU": 2.0})), share, is_local=False) == 1
    machines = Nodes((True, {"CPU": 128.0, "GPU": 8.0}), (False, {"CPU": 128.0, "GPU": 8.0}), (True, {"CPU": 4.0}))
    assert trials_at_once(machines, share, is_local=False) == 2


def test_what_threads_of_ray_print_is_not_shown(capsys):
    stream = ray_executor._OneThread(sys.stdout)
    other = threading.Thread(target=print, args=("(raylet) a worker died",), kwargs={"file": stream})
    other.start()
    other.join()
    print("ours", file=stream, flush=True)
    assert capsys.readouterr().out == "ours\n"
