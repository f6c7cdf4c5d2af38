"""Matrices on disk: every format gives the same spectrum, and a damaged file says what is missing."""

import json
import struct

import numpy as np
import pytest
import torch

from sigsoftmax.analysis.spectrum.matrix_files import from_file
from sigsoftmax.analysis.spectrum.matrix_readers import concatenated, tensors
from sigsoftmax.analysis.spectrum.streaming import SpectrumOptions, streamed_spectrum

CONTEXTS, WORDS = 50, 12


def log_probs(dtype=torch.float64):
    generator = torch.Generator().manual_seed(1)
    return torch.log_softmax(torch.randn(CONTEXTS, WORDS, dtype=torch.float64, generator=generator), -1).to(dtype)


def save_safetensors(path, arrays):
    """The format is simple enough to write without its package."""
    header, data = {"__metadata__": {"made": "here"}}, b""
    for name, (kind, array) in arrays.items():
        bits = array.tobytes()
        header[name] = {"dtype": kind, "shape": array.shape, "data_offsets": [len(data), len(data) + len(bits)]}
        data += bits
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def rows(source, start=0):
    return torch.cat([piece.clone() for piece in tensors(source, start)])


def saved_files(folder):
    matrix = log_probs().numpy()
    np.save(folder / "c.npy", matrix)
    np.save(folder / "fortran.npy", np.asfortranarray(matrix))
    np.savez(folder / "plain.npz", other=np.zeros(3), log_p=matrix)
    np.savez_compressed(folder / "packed.npz", matrix)
    save_safetensors(folder / "m.safetensors", {"log_p": ("F64", matrix), "other": ("F32", np.zeros(3, np.float32))})
    torch.save(torch.from_numpy(matrix), folder / "m.pt")
    torch.save({"log_p": torch.from_numpy(matrix), "step": 3}, folder / "dictionary.pth")
    (folder / "m.f64").write_bytes(matrix.tobytes())


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("c.npy", {}),
        ("fortran.npy", {}),
        ("plain.npz", {"name": "log_p"}),
        ("packed.npz", {}),
        ("m.safetensors", {"name": "log_p"}),
        ("m.pt", {}),
        ("dictionary.pth", {}),
        ("m.f64", {"dtype": torch.float64, "shape": (None, WORDS)}),
        ("m.f64", {"dtype": torch.float64, "shape": (CONTEXTS, WORDS)}),
    ],
)
def test_formats(name, arguments, tmp_path):
    saved_files(tmp_path)
    source = from_file(tmp_path / name, **arguments)
    assert (source.contexts, source.vocabulary, source.description) == (CONTEXTS, WORDS, name)
    assert torch.equal(rows(source), log_probs())
    assert torch.equal(rows(source, 37), log_probs()[37:])
    assert streamed_spectrum(source).contexts == CONTEXTS


@pytest.mark.parametrize("name", ["words_first.npy", "words_first.f64"])
def test_contexts_may_be_columns(name, tmp_path):
    transposed = np.ascontiguousarray(log_probs().numpy().T)
    np.save(tmp_path / "words_first.npy", transposed)
    (tmp_path / "words_first.f64").write_bytes(transposed.tobytes())
    raw = {} if name.endswith("npy") else {"dtype": torch.float64, "shape": (WORDS, CONTEXTS)}
    source = from_file(tmp_path / name, contexts_axis=1, **raw)
    assert (source.contexts, source.vocabulary) == (CONTEXTS, WORDS)
    assert torch.equal(rows(source, 5), log_probs()[5:])


@pytest.mark.filterwarnings("ignore:the entries have the precision")
def test_narrow_dtypes(tmp_path):
    brain = log_probs(torch.bfloat16)
    save_safetensors(tmp_path / "m.safetensors", {"p": ("BF16", brain.view(torch.int16).numpy())})
    (tmp_path / "m.bf16").write_bytes(brain.view(torch.int16).numpy().tobytes())
    np.save(tmp_path / "half.npy", log_probs(torch.float16).numpy())
    for source in (
        from_file(tmp_path / "m.safetensors"),
        from_file(tmp_path / "m.bf16", dtype=torch.bfloat16, shape=(None, WORDS)),
    ):
        assert torch.equal(rows(source), brain)
        assert streamed_spectrum(source).precision == "bfloat16"
    assert torch.equal(rows(from_file(tmp_path / "half.npy")), log_probs(torch.float16))


def test_a_file_is_mapped_and_never_written(tmp_path):
    saved_files(tmp_path)
    before = (tmp_path / "c.npy").read_bytes()
    block = next(tensors(from_file(tmp_path / "c.npy"), 0))
    block[0, 0] = 7.0
    assert (tmp_path / "c.npy").read_bytes() == before


def test_parts_in_several_files(tmp_path):
    for number, part in enumerate(log_probs().split(20)):
        np.save(tmp_path / f"{number}.npy", part.numpy())
    source = concatenated([from_file(tmp_path / f"{number}.npy") for number in range(3)])
    assert (source.contexts, source.description) == (50, "0.npy and 1.npy and 2.npy")
    assert torch.equal(rows(source), log_probs())
    for start in (0, 19, 20, 33, 40, 49, 50):
        assert sum(map(len, source.blocks(start))) == 50 - start


# --- damage ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["c.npy", "m.safetensors", "m.f64"])
def test_a_truncated_file_names_expected_and_found_bytes(name, tmp_path):
    saved_files(tmp_path)
    path = tmp_path / name
    if name == "m.safetensors":
        save_safetensors(path, {"log_p": ("F64", log_probs().numpy())})
    arguments = {"dtype": torch.float64, "shape": (CONTEXTS, WORDS)} if name == "m.f64" else {}
    whole = path.read_bytes()
    kept = len(whole) - 3 * 8 * WORDS - 8
    path.write_bytes(whole[:kept])
    message = (
        f"is truncated: expected {len(whole)} bytes for 50 x 12 numbers of torch.float64, found {kept}; truncated="
    )
    with pytest.raises(ValueError, match=message):
        from_file(path, **arguments)
    with pytest.warns(UserWarning, match="46 whole contexts are kept"):
        source = from_file(path, truncated="keep", **arguments)
    assert torch.equal(rows(source), log_probs()[:46])
    with pytest.raises(ValueError, match="is truncated"):
        # Contexts that are columns are all cut.
        from_file(path, truncated="keep", contexts_axis=1, **arguments)


def test_raw_files_of_a_wrong_size(tmp_path):
    path = tmp_path / "m.f32"
    path.write_bytes(b"\0" * (4 * WORDS * 5 + 7))
    with pytest.raises(ValueError, match=r"not a whole number of rows of 48 bytes .*: 5 rows and 7 bytes"):
        from_file(path, dtype=torch.float32, shape=(None, WORDS))
    with pytest.raises(ValueError, match="has 247 bytes, more than the 192 that 4 x 12 numbers"):
        from_file(path, dtype=torch.float32, shape=(4, WORDS))
    with pytest.raises(ValueError, match=r"raw numbers, for which dtype and shape must be given"):
        from_file(path)
    with pytest.raises(ValueError, match=r"shape must be \(rows or None, columns\)"):
        from_file(path, dtype=torch.float32, shape=(4, 0))
    with pytest.raises(ValueError, match="dtype must be one of"):
        from_file(path, dtype=torch.int32, shape=(4, 3))


@pytest.mark.parametrize("name", ["plain.npz", "m.pt"])
def test_truncated_archives(name, tmp_path):
    saved_files(tmp_path)
    path = tmp_path / name
    size = path.stat().st_size // 2
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(ValueError, match=rf"cannot be read .*{size} bytes.*truncated"):
        from_file(path)


def test_an_archive_that_was_altered_fails_where_it_is_read(tmp_path):
    saved_files(tmp_path)
    path = tmp_path / "packed.npz"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    path.write_bytes(data)
    with pytest.raises(ValueError, match="is damaged after context 0"):
        streamed_spectrum(from_file(path))


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("missing.npy", {}, "no file at"),
        ("plain.npz", {}, "holds several arrays; choose one with name=: other, log_p"),
        ("plain.npz", {"name": "q"}, "holds no array 'q'; choose one with name=: other, log_p"),
        ("plain.npz", {"name": "other"}, r"shape \(3,\); expected a matrix"),
        ("m.safetensors", {"name": "other"}, r"shape \(3,\); expected a matrix"),
        ("c.npy", {"dtype": torch.float32}, "says its own dtype and shape"),
        ("c.npy", {"contexts_axis": 2}, "contexts_axis must be 0 .* or 1 .*, got 2"),
        ("packed.npz", {"contexts_axis": 1}, "is stored row by row, .* save it as .npy"),
        ("whole_numbers.npy", {}, "holds int64; expected float64, float32 or float16"),
        ("big.npy", {}, "big-endian"),
        ("empty.npy", {}, "is not a .npy file, or is cut off in its header"),
        ("text.npy", {}, "is not a .npy file"),
        ("text.safetensors", {}, "is truncated, or not a .safetensors file"),
        ("list.pt", {}, "holds a list; expected a tensor"),
        ("objects.npy", {}, "holds object"),
    ],
)
def test_files_that_are_something_else(name, arguments, message, tmp_path):
    saved_files(tmp_path)
    np.save(tmp_path / "whole_numbers.npy", np.zeros((3, 3), np.int64))
    np.save(tmp_path / "big.npy", np.zeros((3, 3), ">f8"))
    np.save(tmp_path / "objects.npy", np.array([[{}]], dtype=object))
    (tmp_path / "empty.npy").touch()
    for suffix in ("npy", "safetensors"):
        (tmp_path / f"text.{suffix}").write_text("some text that is no matrix")
    torch.save([1, 2], tmp_path / "list.pt")
    with pytest.raises(ValueError, match=message):
        from_file(tmp_path / name, **arguments)


def test_the_spectrum_of_a_path(tmp_path):
    saved_files(tmp_path)
    found = streamed_spectrum(str(tmp_path / "c.npy"), SpectrumOptions(method="exact"))
    assert found.source == "c.npy"


# --- files that others write ------------------------------------------------------------------------------------------


def replace_by_another(folder):
    """Replace :func:`saved_files`, as a writer does, by files of other numbers and of half as many contexts."""
    new = folder / "new"
    new.mkdir()
    other = log_probs()[: CONTEXTS // 2].numpy() - 7.0
    np.save(new / "c.npy", other)
    np.savez(new / "plain.npz", other=np.zeros(3), log_p=other)
    save_safetensors(new / "m.safetensors", {"log_p": ("F64", other)})
    torch.save(torch.from_numpy(other), new / "m.pt")
    (new / "m.f64").write_bytes(other.tobytes())
    for file in new.iterdir():
        file.replace(folder / file.name)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("c.npy", {}),
        ("m.safetensors", {"name": "log_p"}),
        ("m.f64", {"dtype": torch.float64, "shape": (None, WORDS)}),
        ("plain.npz", {"name": "log_p"}),
    ],
)
def test_a_file_that_is_replaced_after_its_header_was_read_is_read_as_it_was(name, arguments, tmp_path, monkeypatch):
    from sigsoftmax.analysis.spectrum import matrix_files

    saved_files(tmp_path)
    mapped = matrix_files._mapped

    def replaced_before(*given):
        replace_by_another(tmp_path)
        return mapped(*given)

    monkeypatch.setattr(matrix_files, "_mapped", replaced_before)
    source = from_file(tmp_path / name, **arguments)
    if name == "plain.npz":
        replace_by_another(tmp_path)
    assert torch.equal(rows(source), log_probs())
    assert torch.equal(rows(source, 30), log_probs()[30:]), "a second time too"


def test_a_file_of_torch_that_is_replaced_while_it_is_read_is_refused(tmp_path, monkeypatch):
    saved_files(tmp_path)
    load = torch.load

    def replaced_after(*given, **options):
        loaded = load(*given, **options)
        replace_by_another(tmp_path)
        return loaded

    monkeypatch.setattr(torch, "load", replaced_after)
    with pytest.raises(ValueError, match=r"m\.pt was replaced while it was read; read it again"):
        from_file(tmp_path / "m.pt")


@pytest.mark.parametrize(
    "header",
    [
        '{"a": ' + "[" * 5000 + "]" * 5000 + "}",
        '[{"a": 1}]',
        '{"a": 3}',
        '{"a": {"dtype": "F64", "shape": ["2", 2], "data_offsets": [0, 32]}}',
        '{"a": {"dtype": "F64", "shape": [2, 2], "data_offsets": [0]}}',
        '{"a": {"dtype": ["F64"], "shape": [2, 2], "data_offsets": [0, 32]}}',
        '{"a": {"dtype": "F64", "shape": [-2, -2], "data_offsets": [0, 32]}}',
        '{"a": {"dtype": "F64", "shape": [2, 2], "data_offsets": [-8, 24]}}',
        '{"a": {"dtype": "F64", "shape": [2, 2], "data_offsets": [0, 8]}}',
    ],
)
def test_crafted_headers_are_refused(header, tmp_path):
    path = tmp_path / "x.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header.encode() + bytes(32))
    with pytest.raises(ValueError, match=r"x\.safetensors is not a \.safetensors file: "):
        from_file(path)
