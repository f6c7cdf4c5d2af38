"""Files that are whole or absent: what an error, a full disk and a kill leave behind."""

import fcntl

import pytest

from sigsoftmax.records.atomic_write import atomic_write


def names(folder):
    return {entry.name for entry in folder.iterdir()}


def test_the_file_appears_when_the_block_has_ended(tmp_path):
    path = tmp_path / "new folder" / "a"
    with atomic_write(path) as file:
        file.write(b"content")
        assert not path.exists()
    assert path.read_bytes() == b"content"
    assert names(path.parent) == {"a"}


@pytest.mark.parametrize("failing", ["the block", "the disk"])
def test_an_error_leaves_the_old_content(tmp_path, monkeypatch, failing):
    path = tmp_path / "a"
    path.write_bytes(b"old")

    def full(descriptor):
        raise OSError(28, "No space left on device")

    def write():
        with atomic_write(path) as file:
            file.write(b"new")
            if failing == "the block":
                full(0)

    if failing == "the disk":
        monkeypatch.setattr("sigsoftmax.records.atomic_write.os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write()
    assert path.read_bytes() == b"old"
    assert names(tmp_path) == {"a"}


def test_leftovers_of_killed_writers_are_removed_and_those_of_living_ones_are_not(tmp_path):
    path = tmp_path / "x[1]"
    dead, living, other = tmp_path / ".x[1].0123.tmp", tmp_path / ".x[1].4567.tmp", tmp_path / ".y.89.tmp"
    for file in (dead, living, other):
        file.touch()
    with living.open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with atomic_write(path):
            pass
        assert names(tmp_path) == {path.name, living.name, other.name}
    with atomic_write(path):
        pass
    assert names(tmp_path) == {path.name, other.name}


def test_two_writers_of_one_file_do_not_disturb_each_other(tmp_path):
    """The second one removes what killed writers left behind, and the first one's file is none of that."""
    path = tmp_path / "a"
    with atomic_write(path) as first:
        first.write(b"first")
        with atomic_write(path) as second:
            second.write(b"second")
        assert path.read_bytes() == b"second"
    assert path.read_bytes() == b"first"
    assert names(tmp_path) == {"a"}
