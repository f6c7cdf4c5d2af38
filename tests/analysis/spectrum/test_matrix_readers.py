"""Sources of blocks and their regrouping."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sigsoftmax.analysis.spectrum.matrix_readers import (
    concatenated,
    from_array,
    from_blocks,
    from_function,
    regrouped,
    tensors,
)


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
    parts = concatenated([from_blocks([torch.zeros(2, 3)], words=3), from_array(torch.ones(4, 3))])
    assert not parts.can_seek
    assert parts.contexts is None
    assert torch.cat([torch.as_tensor(block) for block in parts.blocks(0)]).sum() == 12.0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: from_array(torch.zeros(3)), r"expected a matrix of contexts and words, got shape \(3,\)"),
        (lambda: from_array([[0.0]]), "got list"),
        (lambda: from_array(torch.zeros(3, 3), contexts_axis=2), "contexts_axis must be 0 .* or 1"),
        (lambda: from_blocks(torch.zeros(3, 3)), "got one array; use from_array"),
        (lambda: from_function(lambda a, b: torch.zeros(1, 2), 0), "must be at least 1, got 0 and 1024"),
        (lambda: list(tensors(from_function(lambda a, b: torch.zeros(1, 2), 5), 0)), "asked for the 5 contexts from 0"),
        (lambda: concatenated([]), "expected at least one source"),
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
