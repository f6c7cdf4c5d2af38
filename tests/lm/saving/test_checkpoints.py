"""A checkpoint comes back bit for bit, or is refused by name; a killed writer leaves the last good one."""

import errno
import fcntl
import io
import json
import os
import pickle
import resource
import subprocess
import sys
import textwrap

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.lm.crafted import write_crafted

from sigsoftmax.lm.saving.checkpoints import VERSION_KEY, load, save

TENSORS = {
    "weight": torch.randn(5, 3),
    "transposed": torch.randn(4, 6).t(),
    "part": torch.randn(8, 8)[::2, 1],
    "half": torch.randn(7).bfloat16(),
    "float16": torch.randn(3).half(),
    "double": torch.randn((), dtype=torch.float64),
    "step": torch.tensor(2**62),
    "random state": torch.randint(256, (5057,), dtype=torch.uint8),
    "mask": torch.tensor([True, False, True]),
    "small": torch.tensor([-3], dtype=torch.int8),
    "empty": torch.empty(0, 4),
    "strange": torch.tensor([float("nan"), float("inf"), -0.0, 1e-45]),
    "parameter": torch.nn.Parameter(torch.randn(2)),
}
META = {
    "epoch": 3,
    "best": float("inf"),
    "losses": [0.1, 5e-324, 1.7976931348623157e308],
    "words": ["<eos>", "naïve", '"checksum":"00000000"'],
    "nested": {"none": None, "flag": True, "big": 2**80},
}


def bits(tensor):
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].shape == tensor.shape
        assert torch.equal(bits(found[name]), bits(tensor)), name


def header_of(path):
    data = path.read_bytes()
    return data[8 : 8 + int.from_bytes(data[:8], "little")]


def test_everything_comes_back_bit_for_bit(tmp_path):
    path = tmp_path / "run" / "last.safetensors"
    save(path, TENSORS, META)
    checkpoint = load(path)
    assert_same(checkpoint.tensors, TENSORS)
    assert list(checkpoint.tensors) == [name for name in json.loads(header_of(path)) if name != "__metadata__"]
    assert checkpoint.meta == META
    assert [entry.name for entry in path.parent.iterdir()] == ["last.safetensors"]
    checkpoint.tensors["weight"].zero_()
    assert_same(load(path).tensors, TENSORS)


def test_others_can_read_it_as_safetensors(tmp_path):
    save(tmp_path / "x", TENSORS, META)
    assert_same(load_file(tmp_path / "x"), TENSORS)


def test_tensors_begin_where_memory_can_be_mapped(tmp_path):
    """The format asks for a header whose length is a multiple of 8."""
    for length in range(9):
        save(tmp_path / "a", {"weight": torch.ones(3)}, {"note": "x" * length})
        assert int.from_bytes((tmp_path / "a").read_bytes()[:8], "little") % 8 == 0


@pytest.mark.parametrize("slack", [0, 1])
def test_a_header_may_be_as_long_as_its_limit(tmp_path, monkeypatch, slack):
    save(tmp_path / "a", {"weight": torch.ones(3)}, {})
    length = int.from_bytes((tmp_path / "a").read_bytes()[:8], "little")
    monkeypatch.setattr("sigsoftmax.lm.saving.checkpoints.HEADER_LIMIT", length - slack)
    if slack:
        with pytest.raises(ValueError, match=f"may take {length - 1:,} bytes, got {length:,}"):
            save(tmp_path / "b", {"weight": torch.ones(3)}, {})
    else:
        save(tmp_path / "b", {"weight": torch.ones(3)}, {})
        assert load(tmp_path / "b").tensors["weight"].equal(torch.ones(3))


def test_nothing_at_all_is_a_checkpoint_too(tmp_path):
    save(tmp_path / "x", {}, {})
    assert load(tmp_path / "x").tensors == load(tmp_path / "x").meta == {}


def test_the_same_content_makes_the_same_file(tmp_path):
    save(tmp_path / "a", TENSORS, META)
    save(tmp_path / "b", dict(reversed(TENSORS.items())), META)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_permissions_are_those_of_any_new_file(tmp_path):
    save(tmp_path / "x", {}, {})
    (tmp_path / "y").touch()
    assert (tmp_path / "x").stat().st_mode == (tmp_path / "y").stat().st_mode


@pytest.mark.parametrize(
    ("tensors", "meta", "message"),
    [
        ({"__metadata__": torch.zeros(1)}, {}, r"cannot be called '__metadata__'"),
        ({"z": torch.zeros(1, dtype=torch.complex64)}, {}, r"cannot hold 'z', a tensor of torch\.complex64"),
        ({"s": torch.zeros(2, 2).to_sparse()}, {}, r"cannot hold 's', .*torch\.sparse_coo"),
        ({}, {"path": io.StringIO()}, r"what JSON can hold: .*StringIO.*convert it"),
        ({}, {"text": "x" * 100_000_001}, r"may take 100,000,000 bytes, got 100,000,"),
    ],
)
def test_what_cannot_be_kept_is_refused_before_anything_is_written(tmp_path, tensors, meta, message):
    with pytest.raises(ValueError, match=message):
        save(tmp_path / "x", tensors, meta)
    assert not list(tmp_path.iterdir())


# --- files that are no good -----------------------------------------------------------------------------------------


def test_a_flipped_bit_anywhere_is_noticed(tmp_path):
    path = tmp_path / "x.safetensors"
    save(path, {"a": torch.arange(4), "b": torch.zeros(3, dtype=torch.uint8)}, {"epoch": 3})
    good = path.read_bytes()
    for position in range(len(good)):
        for bit in (0, 5):
            bad = bytearray(good)
            bad[position] ^= 1 << bit
            path.write_bytes(bad)
            with pytest.raises(ValueError, match=r"x\.safetensors (is|cannot)"):
                load(path)


def test_a_file_cut_short_anywhere_is_noticed(tmp_path):
    path = tmp_path / "x.safetensors"
    save(path, {"a": torch.arange(4)}, {"epoch": 3})
    good = path.read_bytes()
    for size in range(len(good)):
        path.write_bytes(good[:size])
        with pytest.raises(ValueError, match=r"x\.safetensors is .*(cut short|damaged|0 bytes|bytes of tensors)"):
            load(path)
    path.write_bytes(good + b"\0")
    with pytest.raises(ValueError, match=r"damaged: 33 bytes of tensors, and 32 were written; choose an earlier"):
        load(path)


class Bomb:
    def __reduce__(self):
        return os._exit, (1,)


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_pickles_are_refused_and_not_run(tmp_path, protocol):
    path = tmp_path / "model.pt"
    path.write_bytes(pickle.dumps(Bomb(), protocol=protocol))
    with pytest.raises(ValueError, match=r"model\.pt is a pickle, as torch\.save writes it"):
        load(path)
    torch.save({"a": torch.zeros(2)}, path)
    with pytest.raises(ValueError, match=r"model\.pt is a pickle"):
        load(path)


def test_safetensors_of_others_and_of_later_versions_are_refused(tmp_path):
    path = tmp_path / "x.safetensors"
    save_file({"a": torch.zeros(2)}, path)
    with pytest.raises(ValueError, match=r"x\.safetensors is a safetensors file of something else"):
        load(path)
    save_file({"a": torch.zeros(2)}, path, {VERSION_KEY: "2", "checksum": "0", "bytes": "8", "meta": "{}"})
    with pytest.raises(ValueError, match=r"x\.safetensors is a checkpoint of version 2, .* reads version 1; upgrade"):
        load(path)
    path.write_bytes(json.dumps([1, 2]).encode().rjust(100))
    with pytest.raises(ValueError, match=r"x\.safetensors is no safetensors file"):
        load(path)
    with pytest.raises(ValueError, match=r"no checkpoint at .*none"):
        load(tmp_path / "none")
    with pytest.raises(ValueError, match=r"no checkpoint at"):
        load(tmp_path)


def test_the_package_is_asked_for_where_it_is_missing(tmp_path, monkeypatch):
    save(tmp_path / "x", {}, {})
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(ValueError, match=r"pip install '\.\[lm\]' in the folder of sigsoftmax"):
        load(tmp_path / "x")


F32 = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
DEEP = "[" * 5000 + "]" * 5000


@pytest.mark.parametrize(
    ("entries", "options", "message"),
    [
        ({"a": 3}, {}, r"its tensor 'a' has the type None, and a checkpoint has F64, F32"),
        ({"a": F32 | {"dtype": "F8_E8M0"}}, {}, r"has the type 'F8_E8M0'"),
        ({"a": F32 | {"dtype": ["F32"]}}, {}, r"has the type \['F32'\]"),
        ({"a": F32 | {"shape": [3]}}, {}, r"its header is malformed \("),
        ({"a": F32 | {"shape": [-2]}}, {}, r"its header is malformed \("),
        ({"a": F32 | {"shape": [2**62, 2**62]}}, {}, r"its header is malformed \("),
        ({"a": F32 | {"data_offsets": [0, 80]}}, {}, r"its header is malformed \("),
        ({"a": F32, "b": F32}, {}, r"its header is malformed \("),
        ({"a": {"dtype": "F32"}}, {}, r"its header is malformed \("),
        ({"a": F32}, {"meta": "[1]"}, r"its meta cannot be read \(it is no JSON object\)"),
        ({"a": F32}, {"meta": "{"}, r"its meta cannot be read \(Expecting"),
        ({"a": F32}, {"meta": f'{{"a": {DEEP}}}'}, r"its meta cannot be read \(it is nested deeper than 64 levels\)"),
        ({"a": F32}, {"meta": f'{{"a": {"[" * 70 + "]" * 70}}}'}, r"nested deeper than 64 levels"),
        ({"a": F32}, {"meta": f'{{"a": {"9" * 5000}}}'}, r"its meta cannot be read \(Exceeds the limit"),
        ({"a": F32}, {"bytes": 8}, r"metadata of its header must be texts"),
        ({"a": F32}, {"bytes": "9"}, r"8 bytes of tensors, and 9 were written"),
        (f'{{"a": {DEEP}}}', {}, r"no safetensors file, or is damaged"),
    ],
)
def test_crafted_files_with_the_right_checksum_are_refused(tmp_path, entries, options, message):
    path = tmp_path / "x.safetensors"
    write_crafted(path, {"a": F32}, bytes(8))
    assert load(path).tensors["a"].tolist() == [0.0, 0.0], "what is crafted here is refused for what it holds"
    write_crafted(path, entries, bytes(8), **options)
    with pytest.raises(ValueError, match=rf"x\.safetensors is.* {message}"):
        load(path)


# --- a file that is replaced while it is read -------------------------------------------------------------------------


SAVER = textwrap.dedent("""
    import sys, torch
    from sigsoftmax.lm.saving.checkpoints import save

    step = 0
    while True:
        step += 1
        values = torch.full((1000 + step % 3,), float(step))
        save(sys.argv[1], {"a": values, "step": torch.tensor(step)}, {"step": step})
        print(step, flush=True)
""")


def test_meta_and_tensors_are_of_one_checkpoint_while_another_process_saves(tmp_path):
    path = tmp_path / "x.safetensors"
    seen = set()
    with subprocess.Popen([sys.executable, "-c", SAVER, str(path)], stdout=subprocess.PIPE, text=True) as saver:
        try:
            assert saver.stdout.readline() == "1\n"
            for _ in range(2000):
                checkpoint = load(path)
                step = checkpoint.meta["step"]
                seen.add(step)
                assert int(checkpoint.tensors["step"]) == step
                assert checkpoint.tensors["a"].shape == (1000 + step % 3,)
                assert bool((checkpoint.tensors["a"] == step).all())
        finally:
            saver.kill()
    assert len(seen) > 10, "the file was replaced while it was read"


def test_a_file_is_opened_once(tmp_path, monkeypatch):
    """A file that is replaced right after it was opened is read as it was then."""
    path = tmp_path / "x.safetensors"
    save(path, {"a": torch.zeros(3)}, {"step": 0})
    real_open = type(path).open

    def replaced_after_opening(self, *arguments, **keywords):
        file = real_open(self, *arguments, **keywords)
        if self == path:
            monkeypatch.setattr(type(path), "open", real_open)
            save(path, {"a": torch.ones(3)}, {"step": 1})
        return file

    monkeypatch.setattr(type(path), "open", replaced_after_opening)
    before = load(path)
    assert before.meta == {"step": 0}
    assert before.tensors["a"].tolist() == [0.0] * 3
    assert load(path).meta == {"step": 1}


# --- disks that are no good -----------------------------------------------------------------------------------------


@pytest.fixture
def good_one(tmp_path):
    path = tmp_path / "x.safetensors"
    save(path, TENSORS, META)
    return path


def assert_untouched(path):
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]
    assert_same(load(path).tensors, TENSORS)


def test_a_full_disk_leaves_the_last_good_one_and_nothing_else(good_one):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    try:
        with pytest.raises(OSError, match=r"could not write the checkpoint .*x\.safetensors of 4\.0 MiB: .*as it was"):
            save(good_one, {"a": torch.zeros(1 << 20)}, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert_untouched(good_one)


@pytest.mark.parametrize("failing", ["fsync", "replace"])
def test_the_error_of_the_disk_keeps_its_number(good_one, monkeypatch, failing):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, failing, full)
    with pytest.raises(OSError, match=r"No space left on device; .* is as it was\. Free space") as error:
        save(good_one, {"a": torch.zeros(3)}, {})
    assert error.value.errno == errno.ENOSPC
    monkeypatch.undo()
    assert_untouched(good_one)


def test_an_interruption_leaves_the_last_good_one_and_nothing_else(good_one, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save(good_one, {"a": torch.zeros(3)}, {})
    assert_untouched(good_one)


def test_a_folder_that_cannot_be(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match=r"could not write the checkpoint .*: (Not a directory|File exists)"):
        save(tmp_path / "file" / "x", {}, {})


# --- kills ----------------------------------------------------------------------------------------------------------


def test_leftovers_of_dead_writers_are_swept_and_those_of_living_ones_are_not(tmp_path):
    path = tmp_path / "x[1].safetensors"
    dead, living = tmp_path / f".{path.name}.0123.tmp", tmp_path / f".{path.name}.4567.tmp"
    other = tmp_path / ".y.safetensors.89.tmp"
    for file in (dead, living, other):
        file.touch()
    with living.open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        save(path, {}, {})
        assert {entry.name for entry in tmp_path.iterdir()} == {path.name, living.name, other.name}
    save(path, {}, {})
    assert {entry.name for entry in tmp_path.iterdir()} == {path.name, other.name}


# Forks, so that torch is imported once: a child writes one checkpoint after another and says which are done.
KILLER = textwrap.dedent("""
    import json, os, random, signal, sys, time
    from pathlib import Path
    import torch
    from sigsoftmax.lm.saving.checkpoints import load, save

    torch.set_num_threads(1)
    path, kills, megabytes = Path(sys.argv[1]), int(sys.argv[2]), 4
    random.seed(int(sys.argv[3]))
    step, torn = 0, 0
    save(path, {"a": torch.zeros(1)}, {"step": 0})
    for _ in range(kills):
        reader, writer = os.pipe()
        child = os.fork()
        if not child:
            while True:
                step += 1
                save(path, {"a": torch.full((megabytes << 18,), float(step))}, {"step": step})
                os.write(writer, step.to_bytes(4, "little"))
        os.close(writer)
        time.sleep(random.uniform(0.0, 0.06))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        said = b"".join(iter(lambda: os.read(reader, 4096), b""))
        os.close(reader)
        torn += len(list(path.parent.iterdir())) > 1
        checkpoint = load(path)
        done = int.from_bytes(said[-4:], "little") if said else step
        assert checkpoint.meta["step"] in (done, done + 1), (checkpoint.meta, done)
        assert bool((checkpoint.tensors["a"] == checkpoint.meta["step"]).all())
        step = checkpoint.meta["step"]
    save(path, {}, {"step": step})
    left = [entry.name for entry in path.parent.iterdir()]
    print(json.dumps({"torn": torn, "steps": step, "left": left}))
""")


@pytest.mark.parametrize("kills", [20, pytest.param(200, marks=pytest.mark.slow)])
def test_a_writer_killed_at_any_moment_leaves_a_good_checkpoint(tmp_path, kills):
    path = tmp_path / "x.safetensors"
    done = subprocess.run(
        [sys.executable, "-c", KILLER, str(path), str(kills), "1"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    outcome = json.loads(done.stdout)
    assert outcome["torn"] >= kills // 4, "some were killed inside a write"
    assert outcome["steps"] > 0
    assert outcome["left"] == [path.name]
