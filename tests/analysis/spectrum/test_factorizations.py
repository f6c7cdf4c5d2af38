"""Gram matrices and blocked QR against a direct SVD, wherever they claim to be valid."""

from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sigsoftmax.analysis.spectrum import accumulator as spectrum_stream
from sigsoftmax.analysis.spectrum.factorizations import (
    GramMatrix,
    TriangularFactor,
    add_product,
    exact_values,
    gram_values,
)
from sigsoftmax.analysis.spectrum.singular_values import spectrum
from sigsoftmax.analysis.spectrum.streaming import SpectrumOptions, streamed_spectrum
from sigsoftmax.records.schemas.spectra import RULES

CPU = torch.device("cpu")


def matrix_with(values, contexts, words, seed):
    generator = torch.Generator().manual_seed(seed)
    left, right = (
        torch.linalg.qr(torch.randn(n, len(values), dtype=torch.float64, generator=generator)).Q
        for n in (contexts, words)
    )
    return (left * torch.as_tensor(values, dtype=torch.float64)) @ right.T


@st.composite
def matrices(draw):
    contexts, words = draw(st.integers(1, 90)), draw(st.integers(1, 40))
    number = draw(st.integers(1, min(contexts, words)))
    exponents = draw(st.lists(st.floats(-14.0, 3.0), min_size=number, max_size=number))
    repeated = draw(st.booleans())
    values = [10.0 ** (exponents[0] if repeated and i < number // 2 else e) for i, e in enumerate(exponents)]
    return matrix_with(values, contexts, words, draw(st.integers(0, 99)))


@settings(max_examples=60)
@given(matrices(), st.sampled_from(["gram", "exact"]), st.integers(1, 30), st.booleans())
def test_ranks_agree_with_a_direct_svd_wherever_they_are_counted(matrix, method, block_contexts, held):
    options = SpectrumOptions(method=method, log_probs=False, block_contexts=block_contexts)
    with mock.patch.object(spectrum_stream, "SMALL", 2**26 if held else 0):
        found = streamed_spectrum(matrix, options)
    expected = np.linalg.svd(matrix.numpy(), compute_uv=False)
    assert len(found.singular_values) == len(expected)
    valid = expected > found.noise_floor
    np.testing.assert_allclose(np.array(found.singular_values)[valid], expected[valid], rtol=0.15)
    # Largest values are good to far more digits than those at the floor.
    large = expected > 1e-3 * expected[0]
    np.testing.assert_allclose(np.array(found.singular_values)[large], expected[large], rtol=1e-8)
    for rule in (*RULES, "noise"):
        count = found.count(rule)
        if count.rank is not None:
            assert count.at_least <= int((expected > count.threshold).sum()) <= count.at_most


def test_the_gram_matrix_refuses_what_the_exact_path_counts():
    generator = torch.Generator().manual_seed(0)
    h, w = (torch.randn(n, 30, dtype=torch.float64, generator=generator) for n in (900, 200))
    matrix = torch.log_softmax(h @ w.T + torch.randn(200, dtype=torch.float64, generator=generator), -1)
    gram = streamed_spectrum(matrix, SpectrumOptions(method="gram"))
    exact = streamed_spectrum(matrix, SpectrumOptions(method="exact"))
    assert [count.rank for count in gram.ranks()] == [32, 32, None, None, 32]
    assert [count.rank for count in exact.ranks()] == [32] * 5
    # What it refuses to count is noise indeed: far above the threshold, and far more than theory allows.
    assert sum(value > gram.float64_threshold for value in gram.singular_values) > 60
    assert 1e-8 < gram.noise_floor / gram.largest < 2e-7
    assert exact.noise_floor / exact.largest < 1e-13


def test_the_sum_over_blocks_is_the_product():
    matrix = torch.randn(50, 17, dtype=torch.float64)
    gram = GramMatrix(17, CPU)
    for block in matrix.split(7):
        gram.add(block)
    upper = torch.triu(torch.ones(17, 17, dtype=torch.bool))
    torch.testing.assert_close(gram.gram_VV[upper], (matrix.T @ matrix)[upper])


def test_an_update_takes_about_half_of_the_full_product():
    multiplied = []

    class Counted(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function is torch.ops.aten.addmm_.default:
                multiplied.append(args[1].shape[0] * args[1].shape[1] * args[2].shape[1])
            return function(*args, **(kwargs or {}))

    gram = torch.zeros(64, 64, dtype=torch.float64)
    with Counted():
        add_product(gram, torch.randn(64, 10, dtype=torch.float64))
    assert 0.5 < sum(multiplied) / (64 * 64 * 10) < 0.6


@pytest.mark.parametrize(("contexts", "words"), [(7, 30), (30, 7), (1, 5), (5, 1)])
def test_the_smaller_side_is_taken(contexts, words):
    matrix = torch.randn(contexts, words, dtype=torch.float64)
    values = gram_values(list(matrix.split(4))).values_R
    assert len(values) == min(contexts, words)
    torch.testing.assert_close(values, torch.linalg.svdvals(matrix))
    torch.testing.assert_close(exact_values(matrix).values_R, torch.linalg.svdvals(matrix))


def test_a_factor_takes_the_place_of_its_rows():
    matrix = torch.randn(100, 8, dtype=torch.float64)
    factor = TriangularFactor(8, CPU)
    for block in matrix.split(5):
        factor.add(block)
        assert sum(map(len, factor.pending)) < 8 + 8 + 5
    assert factor.factor_VV is not None
    values = factor.singular_values(100).values_R
    torch.testing.assert_close(values, torch.linalg.svdvals(matrix), rtol=1e-13, atol=1e-13)


def test_squares_that_overflow_are_refused_and_the_exact_path_helps():
    matrix = 1e200 * torch.eye(3, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"overflow float64.*method='exact'"):
        streamed_spectrum(matrix, SpectrumOptions(method="gram", log_probs=False))
    assert spectrum(matrix, log_probs=False).largest == 1e200
