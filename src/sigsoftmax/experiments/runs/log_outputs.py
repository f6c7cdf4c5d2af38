"""The log-output matrix of a model over a text: log-probabilities of all words at every position.

Shapes: L words of a text, T positions of a block, V words.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from sigsoftmax.lm.data.corpus import batchify, evaluation_windows
from sigsoftmax.lm.model.language_model import LanguageModel
from sigsoftmax.lm.training.precision import arithmetic

__all__ = ["log_output_blocks"]

BLOCK_BYTES = 2**26
"""of the log-probabilities; a mixture holds as much for each component besides"""
MOST_POSITIONS = 1024


@torch.no_grad()
def log_output_blocks(model: LanguageModel, ids_L: Tensor) -> Iterator[Tensor]:
    """Blocks (T, V) in float32, in order: row t of all L - 1 holds the log-probabilities of word t + 1."""
    device = model.embedding.device
    text_R1 = batchify(ids_L, 1).to(device)
    positions = max(1, min(MOST_POSITIONS, BLOCK_BYTES // (4 * model.vocabulary_size)))
    states = model.zero_state(1)
    for window in evaluation_windows(text_R1.shape[0], positions):
        tokens = text_R1[window.start : window.start + window.length]
        with arithmetic("float32", device):
            features = model.features(tokens, states)
            log_probs_T1V = model.log_probs(features)
        states = features.states
        yield log_probs_T1V[:, 0]
