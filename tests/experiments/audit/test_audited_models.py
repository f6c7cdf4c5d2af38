"""Models that can be audited are told apart, opened and refused."""

import zipfile

import numpy as np
import pytest
import torch

import sigsoftmax
from sigsoftmax.analysis.head_weights import sample_rows
from sigsoftmax.experiments.audit.audited_models import kind_of, open_arrays, open_matrix, read_text
from sigsoftmax.lm.saving import checkpoints

GENERATOR = np.random.default_rng(0)
H, W, B = (GENERATOR.standard_normal(shape).astype("f4") for shape in ((30, 4), (20, 4), (20,)))
MEMORY = 1 << 28


def quiet(text: str) -> None:
    pass


def test_kinds(tmp_path):
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text("{}")
    (tmp_path / "run").mkdir()
    checkpoints.save(tmp_path / "best.safetensors", {"w": torch.zeros(2)}, {})
    named = {
        "x/p.npy": "matrix",
        "x/a.npz": "arrays",
        "x/a.safetensors": "arrays",
        str(tmp_path / "best.safetensors"): "checkpoint",
        str(tmp_path / "hf"): "huggingface",
        str(tmp_path / "run"): "checkpoint",
        "gpt2": "huggingface",
        "org/model-1.5": "huggingface",
    }
    assert {name: kind_of(name) for name in named} == named


@pytest.mark.parametrize("name", ["./nowhere", "a/b/c", "~/model"])
def test_nothing_there(name):
    with pytest.raises(ValueError, match=r"nothing to audit at .*expected a folder with a Hugging Face model"):
        kind_of(name)


@pytest.mark.parametrize("suffix", ["npz", "safetensors"])
def test_arrays(tmp_path, suffix):
    path = tmp_path / f"a.{suffix}"
    if suffix == "npz":
        np.savez(path, H=H, W=W, b=B)
    else:
        safetensors = pytest.importorskip("safetensors.numpy")
        safetensors.save_file({"H": H, "W": W, "b": B}, path)
    source = open_arrays(str(path), memory=MEMORY)
    assert (source.vocabulary, source.available, source.dtype) == (20, 30, "float32")
    assert "assumed" in source.how_known
    contexts = source.contexts(10, quiet)
    assert len(contexts) == 10
    expected = torch.log_softmax(torch.from_numpy(H @ W.T + B).double(), -1)[sample_rows(30, 10, 0)]
    torch.testing.assert_close(source.layer.log_probs(contexts), expected, rtol=0, atol=1e-5)


def test_the_function_of_arrays_is_stated(tmp_path):
    np.savez(tmp_path / "a.npz", h=H, w=W, next=np.arange(30) % 20)
    source = open_arrays(str(tmp_path / "a.npz"), function="sigsoftmax", memory=MEMORY)
    assert str(source.layer.function) == "sigsoftmax"
    assert source.how_known == "stated"
    assert source.contexts(30, quiet).next_tokens_N.tolist() == [i % 20 for i in range(30)]


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"H": H[:, :3], "W": W}, r"a.npz: H has 3 columns, but W has 4 \(H is \(30, 3\), W is \(20, 4\)\)"),
        ({"H": H, "W": W.T.copy()}, r"W looks transposed"),
        ({"H": H, "W": W, "b": B[:3]}, r"one number for each of the 20 rows of W, got torch.float32 of shape \(3,\)"),
        ({"H": H, "W": np.full_like(W, np.nan)}, r"output matrix W must be finite, but holds nan at \(0, 0\)"),
        (
            {"H": H[None, None], "W": W},
            r"must be a matrix \(contexts, width\), or of a mixture .* shape \(1, 1, 30, 4\)",
        ),
        ({"H": H[None], "W": W}, r"a mixture of 30 components needs prior logits of shape \(1, 30\)"),
        ({"H": H, "W": W, "prior": H}, r"and a single component none; got \(30, 4\)"),
        ({"W": W, "prior": H, "next": np.arange(30)}, r"next and prior belong to hidden vectors, and there is no H"),
        ({"H": H, "W": W, "lm_head.weight": W}, r"expected arrays named H"),
        ({"a.weight": W, "b.weight": W}, r"expected arrays named H .* or an output layer alone as lm_head.weight"),
        ({"lm_head.weight": W, "a.bias": B}, r"got a.bias, lm_head.weight\. A part of a Hugging Face model"),
        ({"H": H.astype("i8"), "W": W}, r"H must hold floating-point numbers, got torch.int64"),
        ({"H": H, "W": W, "next": B}, r"next must hold the numbers of tokens"),
        ({"H": H, "W": W, "next": np.full(30, 20)}, r"next tokens must be between 0 and 19"),
        (
            {"X": H},
            r"expected arrays named H .* got X\. A part of a Hugging Face model is audited by naming its folder",
        ),
        ({}, r"got none"),
    ],
)
def test_arrays_that_make_no_sense(tmp_path, arrays, message):
    np.savez(tmp_path / "a.npz", **arrays)
    with pytest.raises(ValueError, match=message):
        open_arrays(str(tmp_path / "a.npz"), memory=MEMORY)


def test_the_arrays_of_a_mixture(tmp_path):
    hidden, prior = (GENERATOR.standard_normal(shape).astype("f4") for shape in ((30, 3, 4), (30, 3)))
    np.savez(tmp_path / "a.npz", H=hidden, W=W, b=B, prior=prior)
    for function, prior_function in (("moss(K=3)", "sigsoftmax"), ("moss(K=3, prior=softmax)", "softmax")):
        source = open_arrays(str(tmp_path / "a.npz"), function=function, memory=MEMORY)
        expected = sigsoftmax.mixture_log_probs(
            *(torch.from_numpy(array).double() for array in (hidden, prior, W)),
            prior_function=prior_function,
            linear_bias=torch.from_numpy(B).double(),
        )
        contexts = source.contexts(30, quiet)
        torch.testing.assert_close(source.layer.log_probs(contexts), expected, rtol=0, atol=1e-6)
        _, log_f_NKV, log_prior_NK = source.layer.by_component(contexts)
        torch.testing.assert_close((log_f_NKV + log_prior_NK[..., None]).logsumexp(1), expected, rtol=0, atol=1e-6)
        assert source.described_layer().head == "moss(K=3)"
    assert str(open_arrays(str(tmp_path / "a.npz"), memory=MEMORY).layer.parsed_head) == "mos(K=3)"
    with pytest.raises(ValueError, match=r"H has 3 components per context, but the head mos\(K=2\) mixes 2"):
        open_arrays(str(tmp_path / "a.npz"), function="mos(K=2)", memory=MEMORY)


@pytest.mark.parametrize("names", [("W", "b"), ("lm_head.weight", "lm_head.bias"), ("weight", "bias")])
def test_an_output_layer_alone(tmp_path, names):
    safetensors = pytest.importorskip("safetensors.numpy")
    safetensors.save_file(dict(zip(names, (W, B), strict=True)), tmp_path / "head.safetensors")
    source = open_arrays(str(tmp_path / "head.safetensors"), memory=MEMORY)
    assert source.contexts is None
    np.testing.assert_array_equal(source.layer.weight_Vd, W)
    np.testing.assert_array_equal(source.layer.bias_V, B)
    assert "Only an output matrix was given" in source.notes[0]
    with pytest.raises(ValueError, match=r"takes a hidden vector per component and the logits of a prior. Store them"):
        open_arrays(str(tmp_path / "head.safetensors"), function="mos(K=4)", memory=MEMORY)


@pytest.mark.parametrize("suffix", ["npz", "safetensors"])
def test_truncated_arrays(tmp_path, suffix):
    path = tmp_path / f"a.{suffix}"
    if suffix == "npz":
        np.savez(path, H=H, W=W)
    else:
        pytest.importorskip("safetensors.numpy").save_file({"H": H, "W": W}, path)
    path.write_bytes(path.read_bytes()[:300])
    with pytest.raises(ValueError, match=r"cannot be read, it may be truncated"):
        open_arrays(str(path), memory=MEMORY)


def test_arrays_that_are_not_there_or_too_large(tmp_path):
    with pytest.raises(ValueError, match=r"no file at .*a.npz"):
        open_arrays(str(tmp_path / "a.npz"), memory=MEMORY)
    np.savez(tmp_path / "a.npz", H=H, W=W)
    with pytest.raises(ValueError, match=r"raise --memory"):
        open_arrays(str(tmp_path / "a.npz"), memory=1000)


def test_a_small_archive_of_large_arrays_is_refused_before_it_is_unpacked(tmp_path, monkeypatch):
    packed = tmp_path / "packed.npz"
    np.savez_compressed(packed, H=np.zeros((30_000, 64)), W=W)
    assert packed.stat().st_size < 100_000
    claiming = tmp_path / "claiming.npz"
    np.savez(claiming, H=H, W=W)
    shape = str(H.shape).encode()
    huge = b"(99999999, 9999999)"
    with zipfile.ZipFile(claiming) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    # Room in the header is filled with blanks.
    members["H.npy"] = members["H.npy"].replace(shape, huge).replace(b" " * (len(huge) - len(shape)), b"", 1)
    with zipfile.ZipFile(claiming, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    monkeypatch.setattr(np, "load", lambda *_, **__: pytest.fail("unpacked"))
    for path in (packed, claiming):
        with pytest.raises(ValueError, match=r"holds .* GiB, and an audit within .* raise --memory"):
            open_arrays(str(path), memory=2**23)


def test_a_header_with_a_size_below_zero(tmp_path):
    path = tmp_path / "p.npy"
    np.save(path, np.ones((4, 5)))
    path.write_bytes(path.read_bytes().replace(b"(4, 5), } ", b"(-4, 5), }"))
    with pytest.raises(ValueError, match=r"p\.npy holds an array of shape \(-4, 5\)"):
        open_matrix(str(path))


def test_a_matrix(tmp_path):
    log_p = torch.log_softmax(torch.from_numpy(H @ W.T), -1)
    np.save(tmp_path / "p.npy", log_p.numpy())
    source = open_matrix(str(tmp_path / "p.npy"))
    assert (source.vocabulary, source.available, source.dtype, source.layer) == (20, 30, "float32", None)
    found = source.matrix.log_probs(sample_rows(30, 12, 0), quiet)
    torch.testing.assert_close(found, log_p[sample_rows(30, 12, 0)].double(), rtol=0, atol=1e-5)


def test_what_is_left_of_a_truncated_matrix(tmp_path):
    path = tmp_path / "p.npy"
    np.save(path, np.full((30, 20), np.log(0.05)))
    path.write_bytes(path.read_bytes()[: -5 * 20 * 8])
    source = open_matrix(str(path))
    assert source.available == 25
    assert "25 whole contexts are kept" in source.notes[0]


@pytest.mark.parametrize("as_probabilities", [False, True])
def test_entries_that_were_rounded_before_they_were_stored_are_recognised(tmp_path, as_probabilities):
    log_p = torch.log_softmax(torch.from_numpy(H @ W.T), -1)
    for narrow in (torch.bfloat16, torch.float16, torch.float32):
        stored = (log_p.exp() if as_probabilities else log_p).to(narrow)
        np.save(tmp_path / "p.npy", stored.double().numpy())
        source = open_matrix(str(tmp_path / "p.npy"))
        source.matrix.log_probs(torch.arange(30), quiet)
        assert source.matrix.precision == narrow


def test_a_text_in_another_encoding(tmp_path):
    (tmp_path / "t.txt").write_bytes("naïve".encode("latin-1"))
    with pytest.raises(ValueError, match=r"t.txt is no text in UTF-8: byte 2 is 0xef"):
        read_text(tmp_path / "t.txt")


def test_arrays_of_objects(tmp_path):
    np.savez(tmp_path / "a.npz", H=np.array([None, 1], dtype=object), W=W)
    with pytest.raises(ValueError, match="holds arrays of Python objects; store arrays of numbers"):
        open_arrays(str(tmp_path / "a.npz"), memory=MEMORY)
