"""Learning curves for TensorBoard, which is optional."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from sigsoftmax._version import install_extra
from sigsoftmax.experiments.runs.run import Run
from sigsoftmax.lm.training.progress import Progress

__all__ = ["TensorBoard"]


class TensorBoard:
    """Writes one set of curves a run, into ``tensorboard`` in the run's folder."""

    FOLDER = "tensorboard"

    def __init__(self) -> None:
        try:
            from torch.utils import tensorboard
        except ImportError:
            raise ValueError(
                f"--tensorboard needs the package tensorboard: {install_extra('tensorboard')}, or leave it out"
            ) from None
        self._make_writer: Any = tensorboard.SummaryWriter
        self._writers: dict[Path, Any] = {}

    def watch(self, run: Run, progress: Progress) -> None:
        record = progress.record
        if record is None:
            return
        folder = run.path / self.FOLDER
        if folder not in self._writers:
            # What a killed run drew after its last checkpoint is drawn again.
            self._writers[folder] = self._make_writer(str(folder), purge_step=record.epoch)
        writer = self._writers[folder]
        curves = {
            "loss/training": record.train_loss,
            "loss/validation": record.valid_loss,
            "perplexity/training": math.exp(min(record.train_loss, 700.0)),
            "perplexity/validation": math.exp(min(record.valid_loss, 700.0)),
            "speed/tokens a second": progress.tokens_per_second,
            "speed/seconds per epoch": record.seconds,
        }
        for name, value in curves.items():
            writer.add_scalar(name, value, record.epoch)
        writer.flush()
