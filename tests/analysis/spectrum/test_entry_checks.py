"""Errors in entries: their kind, their place and their size."""

import math

import pytest
import torch

from sigsoftmax.analysis.spectrum.entry_checks import BadEntries, EntryChecks


def uniform(rows=4, words=5):
    return torch.full((rows, words), -math.log(words), dtype=torch.float64)


def changed(row, column, value):
    block = uniform()
    block[row, column] = value
    return block


@pytest.mark.parametrize(
    ("block", "row", "message"),
    [
        (changed(2, 3, math.nan), 2, r"the first is nan at row 102, column 3, one of 1 among 4 rows"),
        (changed(2, 3, math.inf), 2, r"the first is inf at row 102, column 3"),
        (
            changed(1, 0, -math.inf),
            1,
            r"-inf at row 101, column 0, .*Leave masked tokens out of the matrix, or compute",
        ),
        (
            changed(3, 1, 0.25),
            3,
            r"cannot be positive, got 0.25 at row 103, column 1 \(the largest among 4 rows is 0.25\)",
        ),
        (changed(1, 1, -9.0), 1, r"in row 101 the log of the sum is off by 0.223 \(the largest of 1 such rows among 4"),
        (
            uniform() + torch.tensor([[0.0], [0.1], [-0.3], [0.0]]),
            1,
            r"off by 0.1 \(the largest of 2 .* is 0.3, in row 102",
        ),
        (uniform().exp(), 0, r"These are probabilities: pass their logarithm"),
        (
            torch.linspace(2.0, -2.0, 20).view(4, 5),
            0,
            r"log_softmax of logits over the whole vocabulary.*log_probs=False",
        ),
    ],
)
def test_wrong_entries_are_named(block, row, message):
    with pytest.raises(BadEntries, match=message) as caught:
        EntryChecks(log_probs=True).check(block, 100)
    assert caught.value.row == row


def test_masked_words_are_counted():
    block = uniform()
    block[:, 2:4] = -math.inf
    with pytest.raises(BadEntries, match=r"\(2 tokens have probability 0 in every row of this block\)"):
        EntryChecks(log_probs=True).check(block, 0)


def test_a_floor_under_probabilities_is_no_mistake():
    checks = EntryChecks(log_probs=True)
    checks.check((uniform(words=33_278).exp() + 1e-8).log(), 0)
    assert checks.row_sum_error == pytest.approx(math.log1p(33_278e-8))
    with pytest.raises(BadEntries, match="tolerance 1e-05"):
        EntryChecks(log_probs=True, tolerance=1e-5).check((uniform(words=33_278).exp() + 1e-8).log(), 0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_rows_pass(dtype):
    EntryChecks(log_probs=True).check(torch.log_softmax(3 * torch.randn(200, 500), -1).to(dtype), 0)


@pytest.mark.parametrize("narrow", [torch.float32, torch.float16, torch.bfloat16])
def test_entries_that_came_from_a_narrower_dtype_are_recognised(narrow):
    log_p = torch.log_softmax(torch.randn(300, 20, dtype=torch.float64), -1)
    checks = EntryChecks(log_probs=True)
    checks.check(log_p[:100].to(narrow).double(), 0)
    assert checks.precision(torch.float64) == narrow
    restored = EntryChecks(log_probs=True)
    restored.restore(checks.state())
    checks.check(log_p[100:].to(narrow).double(), 100)
    assert checks.precision(torch.float64) == narrow
    # A single block of full precision decides, also after a break.
    restored.check(log_p[100:], 100)
    assert restored.precision(torch.float64) == torch.float64
