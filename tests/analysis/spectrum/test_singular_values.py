"""Spectra of small matrices against numpy, the rank of log-softmax against theory, and what is refused."""

import math

import numpy as np
import pytest
import torch

from sigsoftmax.analysis.spectrum.singular_values import describe, spectrum
from sigsoftmax.family import OutputFunction
from sigsoftmax.records.schemas.spectra import BelowNoiseFloor


def logits(rank: int, *, bias: bool) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    h, w = (torch.randn(n, rank, dtype=torch.float64, generator=generator) for n in (70, 40))
    return h @ w.T + (torch.randn(40, dtype=torch.float64, generator=generator) if bias else 0.0)


def test_values_and_thresholds_against_numpy():
    matrix = torch.log_softmax(logits(5, bias=False), -1)
    found = spectrum(matrix)
    assert (found.words, found.contexts) == (40, 70)
    expected = np.linalg.svd(matrix.numpy(), compute_uv=False)
    np.testing.assert_allclose(found.singular_values, expected, atol=1e-12)
    assert found.float64_rank == np.linalg.matrix_rank(matrix.numpy())
    assert found.press32_threshold == pytest.approx(0.5 * math.sqrt(111) * expected[0] * 2.0**-23)
    assert found.float64_threshold == pytest.approx(70 * expected[0] * 2.0**-52)


@pytest.mark.parametrize("width", [1, 4, 9])
def test_log_softmax_has_rank_width_plus_one_and_one_more_with_a_bias(width):
    assert spectrum(torch.log_softmax(logits(width, bias=False), -1)).press32_rank == width + 1
    assert spectrum(torch.log_softmax(logits(width, bias=True), -1)).press32_rank == width + 2


def test_log_sigsoftmax_exceeds_the_bound():
    phi = OutputFunction("sigsoftmax").phi(logits(4, bias=True))
    assert spectrum(torch.log_softmax(phi, -1)).press32_rank > 6


def test_a_wide_matrix_and_a_single_entry():
    matrix = torch.log_softmax(logits(4, bias=True), -1)[:10]
    found = spectrum(matrix)
    np.testing.assert_allclose(found.singular_values, np.linalg.svd(matrix.numpy(), compute_uv=False), atol=1e-12)
    one_word = spectrum(torch.zeros(3, 1))
    assert one_word.singular_values == (0.0,)
    assert [count.rank for count in one_word.ranks()] == [0] * 5
    assert one_word.stable_rank == one_word.effective_rank == 0.0


def test_float32_entries_refuse_the_thresholds_of_float64():
    matrix = torch.log_softmax(logits(5, bias=True), -1)
    rounded = spectrum(matrix.float())
    assert rounded.press32_rank == 7
    with pytest.raises(BelowNoiseFloor, match=r"the noise floor of this spectrum .* entries of float32"):
        _ = rounded.float64_rank
    assert rounded.count("numpy64").rank is None
    # The noise is there: above the threshold of float64 lie more singular values than theory allows.
    assert sum(value > rounded.float64_threshold for value in rounded.singular_values) == 40
    # Rounding does not go away by a cast.
    cast = spectrum(matrix.float().double())
    assert cast.precision == "float32"
    assert cast.count("numpy64").rank is None
    assert spectrum(matrix.float().double(), precision=torch.float64).count("numpy64").rank == 40


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_entries_are_warned_of(dtype):
    matrix = torch.log_softmax(logits(5, bias=True), -1).to(dtype)
    name = str(dtype).removeprefix("torch.")
    with pytest.warns(UserWarning, match=rf"precision of {name}, .* not counted: press32 .*"):
        found = spectrum(matrix)
    assert found.count("press32").rank is None
    assert found.singular_values[39] < found.noise_floor
    with pytest.warns(UserWarning, match=f"precision of {name}"):
        assert spectrum(matrix.float()).precision == name
    with pytest.warns(UserWarning, match=f"precision of {name}"):
        # Log-probabilities that were normalised in float32 do not show what their logits were.
        spectrum(torch.log_softmax(matrix.float() + 0.1, -1), precision=dtype)


def test_a_matrix_of_another_kind():
    matrix = torch.arange(12.0).view(4, 3)
    with pytest.raises(ValueError, match="log_probs=False"):
        spectrum(matrix)
    found = spectrum(matrix, log_probs=False)
    np.testing.assert_allclose(found.singular_values, np.linalg.svd(matrix.numpy(), compute_uv=False), atol=1e-5)
    assert found.row_sum_error is None
    # Whole numbers fit in bfloat16 too, and that says nothing.
    assert found.precision == "float32"


def test_description_names_every_rule_and_refusal():
    text = describe(spectrum(torch.log_softmax(logits(5, bias=True), -1).float(), source="forty words"))
    assert "forty words: 40 tokens, 70 contexts" in text
    assert "rank 7 above" in text
    assert "not counted at" in text
    assert all(name in text for name in ("press32", "numpy32", "numpy64", "press64", "noise", "stable", "effective"))


@pytest.mark.parametrize(
    ("matrix", "message"),
    [
        (torch.zeros(3), r"expected a floating-point matrix .* shape \(3,\)"),
        (torch.zeros(3, 0), r"at least one of each"),
        (torch.zeros(3, 3, dtype=torch.int64), r"got torch.int64"),
        (
            torch.tensor([[0.0, 0.0], [0.0, -math.inf]]),
            r"the first is -inf at row 1, column 1, .* Leave masked tokens out",
        ),
    ],
)
def test_bad_input(matrix, message):
    with pytest.raises(ValueError, match=message):
        spectrum(matrix)
