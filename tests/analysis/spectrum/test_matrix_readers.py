"""Readers of blocks and their regrouping."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from sigsoftmax.analysis.head_weights import Contexts, HeadWeights
from sigsoftmax.analysis.spectrum.matrix_readers import (
    concatenated,
    from_array,
    from_blocks,
    from_function,
    from_head,
    regrouped,
    tensors,
)
from sigsoftmax.family import OutputFunction
from sigsoftmax.family.heads import Head
from sigsoftmax.losses import functional


@given(st.lists(st.integers(0, 9), max_size=8), st.integers(1, 12))
def test_regrouping_keeps_every_row_in_order(sizes, rows):
    matrix = torch.arange(3.0 * sum(sizes)).view(-1, 3)
    blocks = [block.clone() for block in regrouped(matrix.split(sizes) if sizes else [], rows)]
    assert all(len(block) == rows for block in blocks[:-1])
    assert torch.equal(torch.cat([torch.empty(0, 3), *blocks]), matrix)
    assert all(block.is_contiguous() for block in blocks)


def test_arrays_are_copied_in_pieces(monkeypatch):
    monkeypatch.setattr("sigsoftmax.analysis.spectrum.matrix_readers.PIECE_BYTES", 100)
    array = np.arange(60.0).reshape(20, 3)
    array.flags.writeable = False
    pieces = list(tensors(from_array(array), 0))
    assert [len(piece) for piece in pieces] == [4] * 5
    assert torch.equal(torch.cat(pieces), torch.from_numpy(array.copy()))


def test_orientation():
    matrix = torch.arange(12.0).view(3, 4)
    assert torch.equal(next(from_array(matrix, contexts_axis=1).blocks(0)), matrix.T)
    assert torch.equal(next(from_blocks([matrix], contexts_axis=1).blocks(0)), matrix.T)
    assert torch.equal(next(from_array(matrix).blocks(2)), matrix[2:])
    assert list(from_array(matrix).blocks(3)) == []


def test_parts_of_unknown_length_are_read_from_the_beginning():
    parts = concatenated([from_blocks([torch.zeros(2, 3)], vocabulary=3), from_array(torch.ones(4, 3))])
    assert not parts.can_seek
    assert parts.contexts is None
    assert torch.cat([torch.as_tensor(block) for block in parts.blocks(0)]).sum() == 12.0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: from_array(torch.zeros(3)),
            r"log-probabilities has the shape \(3,\); expected \(contexts, vocabulary\)",
        ),
        (lambda: from_array([[0.0]]), "log-probabilities is a list; expected a tensor"),
        (lambda: from_array(torch.zeros(3, 3), contexts_axis=2), "contexts_axis must be 0 .* or 1"),
        (lambda: from_blocks(torch.zeros(3, 3)), "got one array; use from_array"),
        (lambda: from_function(lambda a, b: torch.zeros(1, 2), 0), "must be at least 1, got 0 and 1024"),
        (lambda: list(tensors(from_function(lambda a, b: torch.zeros(1, 2), 5), 0)), "asked for the 5 contexts from 0"),
        (lambda: concatenated([]), "expected at least one reader"),
        (
            lambda: concatenated([from_array(torch.zeros(2, 3)), from_array(torch.zeros(2, 4))]),
            "part 0 has 3 and part 1 has 4",
        ),
        (lambda: list(tensors(from_array(np.zeros((2, 2), np.longdouble)), 0)), "expected float64, float32"),
    ],
)
def test_bad_sources(make, message):
    with pytest.raises(ValueError, match=message):
        make()


# --- output layers --------------------------------------------------------------------------------------------------

CONTEXTS, VOCABULARY, WIDTH = 30, 11, 4


def numbers(*shape, dtype=torch.float64):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(len(shape))).to(dtype)


def rows(layer, contexts, **arguments):
    return torch.cat([block.clone() for block in tensors(from_head(layer, contexts, **arguments))])


@pytest.fixture
def _small_blocks(monkeypatch):
    monkeypatch.setattr("sigsoftmax.analysis.spectrum.matrix_readers.HEAD_BLOCK_BYTES", 8 * VOCABULARY * 7)


@pytest.mark.usefixtures("_small_blocks")
@pytest.mark.parametrize("name", ["softmax", "sigsoftmax", "gss(k=0.2)", "sigmoid", "relu", "softcap(c=5)"])
@pytest.mark.parametrize("bias", [True, False])
def test_rows_are_log_probabilities_of_the_head(name, bias):
    hidden, weight, bias_V = numbers(CONTEXTS, WIDTH), numbers(VOCABULARY, WIDTH), numbers(VOCABULARY) if bias else None
    layer, contexts = HeadWeights(weight_Vd=weight, bias_V=bias_V, head=name), Contexts.of_rows(hidden)
    expected = functional.log_probs(F.linear(hidden, weight, bias_V), function=name)
    torch.testing.assert_close(rows(layer, contexts), expected)
    chosen = torch.tensor([3, 8, 29])
    torch.testing.assert_close(rows(layer, contexts[chosen]), expected[chosen])
    torch.testing.assert_close(rows(layer, contexts, quick=True), expected)


@pytest.mark.usefixtures("_small_blocks")
def test_mixtures_and_parameters_per_class():
    hidden, prior, weight = numbers(CONTEXTS, 3, WIDTH), numbers(CONTEXTS, 3), numbers(VOCABULARY, WIDTH)
    mixture = HeadWeights(weight_Vd=weight, head="moss(K=3)", floor=1e-8)
    expected = functional.mixture_log_probs(hidden, prior, weight, function="sigsoftmax", floor=1e-8)
    torch.testing.assert_close(rows(mixture, Contexts(hidden_NKd=hidden, prior_logits_NK=prior)), expected)
    shifted = Head(OutputFunction("shifted_sigsoftmax", b=numbers(VOCABULARY)))
    found = rows(HeadWeights(weight_Vd=weight, head=shifted), Contexts.of_rows(hidden[:, 0]))
    torch.testing.assert_close(found, functional.log_probs(hidden[:, 0] @ weight.T, function=shifted.function))


@pytest.mark.usefixtures("_small_blocks")
def test_arithmetic_is_float32_or_more_and_never_autocast():
    layer = HeadWeights(weight_Vd=numbers(VOCABULARY, WIDTH, dtype=torch.bfloat16))
    contexts = Contexts.of_rows(numbers(CONTEXTS, WIDTH, dtype=torch.bfloat16))
    with torch.autocast("cpu", torch.bfloat16):
        found = rows(layer, contexts)
    assert found.dtype == torch.float32
    expected = torch.log_softmax(contexts.hidden_NKd[:, 0].double() @ layer.weight_Vd.double().T, -1)
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-5)
    assert rows(layer, contexts, dtype=torch.float64).dtype == torch.float64
    with pytest.raises(ValueError, match=r"dtype must be torch.float32 or torch.float64"):
        rows(layer, contexts, dtype=torch.bfloat16)


def test_a_layer_of_other_contexts_is_refused():
    layer = HeadWeights(weight_Vd=numbers(VOCABULARY, WIDTH), head="mos(K=2)")
    with pytest.raises(ValueError, match=r"H has 1 components per context, but the head mos\(K=2\) mixes 2"):
        from_head(layer, Contexts.of_rows(numbers(CONTEXTS, WIDTH)))
