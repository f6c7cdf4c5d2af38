"""A cursor reads a text window by window, each token with the one below it as its target."""

import torch

from sigsoftmax.lm.data.text_cursor import TextCursor


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
