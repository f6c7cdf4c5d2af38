"""A folder has one holder, who is named to the next; a dead one holds nothing."""

import errno
import fcntl
import json
import os
import platform
import re
import subprocess
import sys
import threading

import pytest

from sigsoftmax.experiments.runs import folder_locks
from sigsoftmax.experiments.runs.folder_locks import Busy, FolderLock

HOLD = """
import sys, time
from pathlib import Path
from sigsoftmax.experiments.runs.folder_locks import FolderLock
with FolderLock(Path(sys.argv[1])) as lock:
    lock.note("something")
    print("held", flush=True)
    time.sleep(600)
"""
SINCE = r"20\d\d-\d\d-\d\dT\d\d:\d\d:\d\dZ"


def held_by_another(folder):
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(folder)], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    return process


def refusal(folder, **options):
    with pytest.raises(Busy) as error, FolderLock(folder, **{"patience": 0.0, **options}):
        pass
    return str(error.value)


def test_a_second_process_is_refused_and_told_who_the_first_is(tmp_path):
    folder = tmp_path / "runs" / "1"
    with held_by_another(folder) as process:
        assert re.fullmatch(
            rf"another process is at work in {folder}: process {process.pid} on {platform.node()}, since {SINCE}; wait "
            "until it has ended or stop it, or choose another folder",
            refusal(folder),
        )
        process.kill()


def test_the_lock_of_a_killed_process_is_free_and_its_word_is_heard(tmp_path):
    with held_by_another(tmp_path) as process:
        process.kill()
    with FolderLock(tmp_path, patience=60.0) as lock:
        assert lock.before.process == process.pid
        assert lock.before.leftovers == "something"
        assert f"process {os.getpid()} on" in refusal(tmp_path), "not the dead one"


def test_a_folder_that_was_given_back_is_free_for_all(tmp_path):
    for _ in range(2):
        with FolderLock(tmp_path, patience=0.0) as lock:
            assert lock.before is None
    assert not (tmp_path / folder_locks.HOLDER_FILE).exists()
    with pytest.raises(ZeroDivisionError), FolderLock(tmp_path, patience=0.0):
        1 / 0  # noqa: B018
    with FolderLock(tmp_path, patience=0.0):
        pass


def test_one_that_ends_soon_is_waited_for(tmp_path):
    with held_by_another(tmp_path) as process:
        timer = threading.Timer(0.5, process.kill)
        timer.start()
        with FolderLock(tmp_path, patience=60.0):
            assert timer.finished.is_set()
        timer.join()


@pytest.mark.parametrize(
    ("text", "who"),
    [
        ("", ""),
        ("{", ""),
        ("[" * 5000, ""),
        ('{"process": "x"}', ""),
        (
            json.dumps({"process": 7, "host": "a\x1b]0;b\x07\u202e", "since": "then"}),
            r": process 7 on a\x1b]0;b\x07\u202e, since then",
        ),
    ],
)
def test_whatever_stands_beside_the_lock_is_no_danger(tmp_path, text, who):
    with FolderLock(tmp_path):
        (tmp_path / folder_locks.HOLDER_FILE).write_text(text)
        assert refusal(tmp_path).startswith(f"another process is at work in {tmp_path}{who}; wait")


def test_a_link_in_place_of_the_lock_is_not_followed(tmp_path):
    (tmp_path / "precious").write_text("text")
    (tmp_path / ".lock").symlink_to(tmp_path / "precious")
    with pytest.raises(OSError, match="cannot be locked"), FolderLock(tmp_path):
        pass
    assert (tmp_path / "precious").read_text() == "text"


def test_a_place_that_is_no_folder(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match=r"the folder \S+file/run cannot be locked: Not a directory"):
        FolderLock(tmp_path / "file" / "run").__enter__()


def without_locks(number):
    def flock(*_):
        raise OSError(number, os.strerror(number))

    return flock


@pytest.mark.filterwarnings("ignore:flock not supported")
@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_file_system_without_locks(tmp_path, monkeypatch, number):
    monkeypatch.setattr(fcntl, "flock", without_locks(number))
    with FolderLock(tmp_path):
        assert re.search(rf"process {os.getpid()} .*, or remove \S+\.lock(\.soft)? if it is dead", refusal(tmp_path))
    with FolderLock(tmp_path, patience=0.0):
        pass


SOFT = """
import errno, fcntl, os
def without(*_):
    raise OSError(errno.ENOLCK, "none")
fcntl.flock = without
"""


def test_without_locks_too_a_killed_process_does_not_block_its_own_machine(tmp_path, monkeypatch):
    process = subprocess.Popen([sys.executable, "-c", SOFT + HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    with process:
        assert process.stdout.readline() == "held\n"
        process.kill()
    assert (tmp_path / folder_locks.SOFT_LOCK_FILE).exists()
    monkeypatch.setattr(fcntl, "flock", without_locks(errno.ENOLCK))
    with FolderLock(tmp_path, patience=30.0) as lock:
        assert lock.before.process == process.pid


def test_a_lock_outlives_the_generator_that_holds_it_no_longer_than_its_end(tmp_path):
    def holding():
        with FolderLock(tmp_path):
            yield

    steps = holding()
    next(steps)
    refusal(tmp_path)
    steps.close()
    with FolderLock(tmp_path, patience=0.0):
        pass
