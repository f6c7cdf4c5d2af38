"""Languages in words and distributions in files: what is read, and what is refused and how."""

import numpy as np
import pytest
import torch

from sigsoftmax.experiments.distribution_sources import StoredDistributions, open_distributions, parse_language
from sigsoftmax.synthetic import Language

LOG_P = Language.of_rank(contexts=9, words=7, rank=4, seed=0).log_p_NV


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("of_rank(contexts=9, words=7, rank=4)", Language.of_rank(contexts=9, words=7, rank=4)),
        (" of_rank( contexts = 9,words=7,rank=4, scale=3,seed=2 ) ", None),
        ("dirichlet(contexts=9, words=7, concentration=0.2)", None),
        ("topics(contexts=9, words=7, topics=3)", None),
        ("peaked(contexts=9, words=7, peak=0.8)", None),
        (
            "made_by(function=gss(k=0.2, c=1), contexts=9, words=7, width=2)",
            Language.made_by("gss(k=0.2, c=1)", contexts=9, words=7, width=2),
        ),
    ],
)
def test_languages(text, expected):
    language = parse_language(text)
    assert language.log_p_NV.shape == (9, 7)
    if expected is not None:
        assert torch.equal(language.log_p_NV, expected.log_p_NV)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("of_rnk(contexts=9)", r"cannot read the language .* \(did you mean 'of_rank'\?\)"),
        ("something", r"the kinds are of_rank, dirichlet, topics, peaked, made_by"),
        ("of_rank(contexts=9)", r"lacks words, rank; write them as in words=\.\.\."),
        ("of_rank(contxts=9)", r"cannot read 'contxts=9' .* takes contexts, words, rank, scale=2.0"),
        ("of_rank(contexts=9.5, words=7, rank=4)", r"contexts in .* must be a whole number, got '9.5'"),
        ("of_rank(contexts=9, words=7, rank=4, scale=x)", r"scale in .* must be a number, got 'x'"),
        ("of_rank(contexts=9, words=7, rank=40)", r"rank must be between 1 and"),
    ],
)
def test_languages_that_cannot_be_read(text, message):
    with pytest.raises(ValueError, match=message):
        parse_language(text)


@pytest.mark.parametrize("matrix", [LOG_P, LOG_P.exp(), LOG_P.float()], ids=["logs", "probabilities", "float32"])
def test_files(tmp_path, matrix):
    np.save(tmp_path / "p.npy", matrix.numpy())
    found = open_distributions(str(tmp_path / "p.npy"))
    torch.testing.assert_close(found.log_p_NV, LOG_P, rtol=0, atol=1e-5)
    assert found.description == "distributions of p.npy"
    assert found.weights_N.tolist() == pytest.approx([1 / 9] * 9)


def test_some_rows_of_a_file(tmp_path):
    np.savez(tmp_path / "p.npz", p=LOG_P.numpy())
    stored = StoredDistributions(tmp_path / "p.npz")
    assert (stored.contexts, stored.vocabulary, stored.dtype) == (9, 7, "float64")
    torch.testing.assert_close(stored.log_probs(torch.tensor([1, 4, 8])), LOG_P[[1, 4, 8]])


def test_a_wrong_row_is_named_by_its_place_in_the_file(tmp_path):
    matrix = LOG_P.clone()
    matrix[7, 2] = torch.nan
    np.save(tmp_path / "p.npy", matrix.numpy())
    stored = StoredDistributions(tmp_path / "p.npy")
    assert stored.log_probs(torch.arange(7)).shape == (7, 7)
    with pytest.raises(ValueError, match=r"p.npy: NaN at row 7, column 2"):
        stored.log_probs(torch.tensor([2, 7]))


def test_a_truncated_file(tmp_path):
    path = tmp_path / "p.npy"
    np.save(path, LOG_P.numpy())
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(ValueError, match=r"is truncated: expected .* bytes for 9 x 7 numbers"):
        StoredDistributions(path)
    kept = StoredDistributions(path, truncated="keep")
    assert kept.contexts == 8
    assert "8 whole contexts are kept" in kept.notes[0]


def test_a_file_that_is_not_there():
    with pytest.raises(ValueError, match=r"no file at nowhere.npy"):
        open_distributions("nowhere.npy")
