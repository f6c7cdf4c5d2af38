"""Curves for TensorBoard: one folder a run, one step an epoch; without the package a word about it."""

import sys
import types

import pytest
from tests.experiments.test_display import RUN, at, epoch

from sigsoftmax.experiments.runs.tensorboard import TensorBoard


class Writer:
    def __init__(self, folder, purge_step):
        self.folder, self.purge_step, self.scalars = folder, purge_step, {}

    def add_scalar(self, name, value, step):
        self.scalars.setdefault(name, {})[step] = value

    def flush(self):
        pass


def test_every_epoch_is_a_step_of_the_runs_curves(monkeypatch):
    made = []
    module = types.SimpleNamespace(SummaryWriter=lambda *a, **k: made.append(Writer(*a, **k)) or made[-1])
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    monkeypatch.setattr("torch.utils.tensorboard", module, raising=False)
    board = TensorBoard()
    board.watch(RUN, at(5))
    for number in (3, 4):
        board.watch(RUN, epoch(number))
    [writer] = made
    # A resumed run draws its epochs again from where it goes on.
    assert (writer.folder, writer.purge_step) == ("runs/ptb-softmax/1/train/tensorboard", 3)
    assert writer.scalars["loss/validation"] == {3: 4.605, 4: 4.605}
    assert writer.scalars["perplexity/validation"][4] == pytest.approx(99.98, abs=0.01)


def test_without_the_package_it_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    monkeypatch.delattr("torch.utils.tensorboard", raising=False)
    with pytest.raises(ValueError, match=r"pip install '\.\[tensorboard\]' in the folder of sigsoftmax"):
        TensorBoard()
