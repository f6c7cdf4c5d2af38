"""A folder has one holder; a dead one holds nothing."""

import subprocess
import sys

import pytest

from sigsoftmax.experiments.sweep_locks import Busy, FolderLock

HOLD = """
import sys, time
from pathlib import Path
from sigsoftmax.experiments.sweep_locks import FolderLock
with FolderLock(Path(sys.argv[1])) as lock:
    lock.note("process 7")
    print("held", flush=True)
    time.sleep(600)
"""


def test_a_second_holder_is_refused_until_the_first_is_done(tmp_path):
    path = tmp_path / "folder" / ".lock"
    with FolderLock(path) as first:
        first.note("process 1\nmore")
        with pytest.raises(Busy, match=r"another process is at work in .*folder \(process 1\)$"), FolderLock(path):
            pass
    with FolderLock(path) as second:
        assert second.before == "process 1\nmore"


def test_the_lock_of_a_killed_process_is_free(tmp_path):
    path = tmp_path / ".lock"
    with subprocess.Popen([sys.executable, "-c", HOLD, str(path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "held\n"
        with pytest.raises(Busy, match="process 7"), FolderLock(path):
            pass
        process.kill()
    with FolderLock(path, patience=60.0) as lock:
        assert lock.before == "process 7"
