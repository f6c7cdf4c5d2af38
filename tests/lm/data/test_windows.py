"""Columns of text, the windows that training and evaluation read in them, and the cursor that reads on."""

import json
from itertools import islice

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sigsoftmax.lm.data.windows import TextCursor, WindowLengths, batchify, evaluation_windows


def test_columns_are_text_in_order():
    assert batchify(torch.arange(11), 3).tolist() == [[0, 3, 6], [1, 4, 7], [2, 5, 8]]


@given(words=st.integers(2, 300), batch=st.integers(1, 150))
def test_columns_leave_out_less_than_a_row(words, batch):
    if words < 2 * batch:
        with pytest.raises(ValueError, match=rf"^{batch} columns need at least {2 * batch} words.* are {words};"):
            batchify(torch.arange(words), batch)
        return
    rows = batchify(torch.arange(words), batch)
    assert 0 <= words - rows.numel() < batch
    assert torch.equal(rows.t().reshape(-1), torch.arange(rows.numel()))
    assert rows.is_contiguous()


def test_a_batch_without_columns_is_refused():
    with pytest.raises(ValueError, match=r"at least one column, got 0"):
        batchify(torch.arange(9), 0)


# --- windows --------------------------------------------------------------------------------------------------------

# seed, cap, rows -> the first lengths and the updates of three epochs, as the published scripts draw them.
FIRST_LENGTHS = {
    141: (67, 70, 73, 71, 76, 72, 76, 62, 74, 73, 70, 32),
    1882: (72, 72, 68, 65, 61, 78, 73, 72, 72, 37, 69, 78),
    28: (64, 70, 63, 70, 33, 72, 60, 70, 76, 36, 70, 68),
    331: (71, 66, 73, 70, 65, 75, 72, 59, 26, 71, 41, 37),
}
UPDATES = [
    (141, None, 46_479, (686, 680, 686)),  # AWD on PTB
    (1882, None, 26_107, (386, 381, 385)),  # AWD on WikiText-2
    (1882, 90, 139_241, (2056, 2063, 2058)),  # MoS on WikiText-2
    (28, 110, 77_465, (1143, 1145, 1137)),  # MoS on PTB
    (331, 80, 46_479, (687, 687, 684)),  # finetuning AWD on PTB
]


@pytest.mark.parametrize(("seed", "lengths"), FIRST_LENGTHS.items())
def test_lengths_are_those_of_the_published_scripts(seed, lengths):
    draws = WindowLengths(seed)
    assert tuple(draws.draw() for _ in lengths) == lengths


@pytest.mark.parametrize(("seed", "longest", "rows", "updates"), UPDATES)
def test_epochs_have_the_updates_of_the_published_scripts(seed, longest, rows, updates):
    lengths = WindowLengths(seed, longest=longest)
    assert tuple(sum(1 for _ in lengths.epoch(rows)) for _ in updates) == updates


@given(seed=st.integers(0, 2**32 - 1), rows=st.integers(3, 400), bptt=st.integers(5, 100))
def test_windows_follow_each_other_to_the_end(seed, rows, bptt):
    windows = list(WindowLengths(seed, bptt, longest=bptt + 10).epoch(rows))
    position = 0
    for window in windows:
        assert window.start == position
        assert 2 <= window.length <= window.drawn <= bptt + 10
        position += window.drawn
    # Every target is used, but for a single one that no window can hold.
    assert windows[-1].start + windows[-1].length in (rows - 1, rows - 2)


def test_lengths_go_on_from_a_state_in_the_middle_of_an_epoch():
    lengths = WindowLengths(141)
    windows = list(islice(lengths.epoch(9000), 77))
    state, following = json.loads(json.dumps(lengths.state())), windows[-1].start + windows[-1].drawn
    rest = list(lengths.epoch(9000, following))
    resumed = WindowLengths(0)
    resumed.restore(state)
    assert list(resumed.epoch(9000, following)) == rest
    assert [resumed.draw() for _ in range(9)] == [lengths.draw() for _ in range(9)]


def test_lengths_refuse_what_they_cannot_use():
    with pytest.raises(ValueError, match=r"seed of window lengths must be between 0 and 2\*\*32 - 1, got -1"):
        WindowLengths(-1)
    with pytest.raises(ValueError, match=r"at least 3 rows of text, got 2"):
        list(WindowLengths(1).epoch(2))


@given(rows=st.integers(2, 400), length=st.integers(1, 100))
def test_evaluation_windows_cover_every_target_once(rows, length):
    windows = list(evaluation_windows(rows, length))
    covered = [row for window in windows for row in range(window.start, window.start + window.length)]
    assert covered == list(range(rows - 1))
    assert all(window.length == length for window in windows[:-1])


# --- the published corpora ------------------------------------------------------------------------------------------


# --- the cursor ------------------------------------------------------------------------------------------------------


def test_windows_follow_one_another_and_targets_are_one_row_below():
    text_RB = torch.arange(20).reshape(10, 2)
    cursor = TextCursor(text_RB, longest=4)
    row = cursor.row
    for first, length in ((0, 4), (4, 3), (7, 2)):
        tokens, targets = cursor.window(length)
        assert torch.equal(tokens, text_RB[first : first + length])
        assert torch.equal(targets, text_RB[first + 1 : first + length + 1])
        cursor.advance(length)
    # The tensor stays where it is: a captured call reads and changes this one.
    assert cursor.row is row
    assert int(row) == 9
