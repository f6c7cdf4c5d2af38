"""The spectrum and rank of a trained model's log-output matrix over the test text, as in the paper's table 3.

The matrix holds the log-probabilities of the whole vocabulary at every position of the text.

Shapes: L tokens of a text, R rows of its only column, T positions of a block, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from sigsoftmax.analysis.progress import Progress
from sigsoftmax.analysis.spectrum.matrix_readers import from_blocks
from sigsoftmax.analysis.spectrum.streaming import SpectrumOptions, streamed_spectrum
from sigsoftmax.experiments.runs.folder_locks import FolderLock
from sigsoftmax.experiments.runs.run import Resources, measured_on, run_folder
from sigsoftmax.lm.data.corpus import Corpus
from sigsoftmax.lm.data.windows import batchify, evaluation_windows
from sigsoftmax.lm.model.language_model import LanguageModel
from sigsoftmax.lm.saving.saved_models import check_same_corpus, load_model
from sigsoftmax.lm.training.precision import arithmetic
from sigsoftmax.lm.training.trainer import resolve_device
from sigsoftmax.records import Environment, Record, append
from sigsoftmax.records.schemas.model_spectra import ModelSpectrum

__all__ = ["known_spectrum", "log_output_blocks", "measure_rank"]

FILE = "spectrum.jsonl"
STATE = "spectrum.state"
BLOCK_BYTES = 2**26
"""size of a block of log-probabilities; a mixture holds as much for each component besides"""
MOST_POSITIONS = 1024


def measure_rank(
    checkpoint: Path,
    corpus: Corpus,
    resources: Resources,
    *,
    progress: Callable[[Progress], None] | None = None,
) -> ModelSpectrum:
    """The spectrum of a model's log-outputs: from its records if it is there, gone on with if interrupted."""
    found = known_spectrum(checkpoint)
    if found is not None:
        return found
    with FolderLock(run_folder(checkpoint)):
        device = resolve_device(resources.device)
        loaded = load_model(checkpoint, device=device)
        check_same_corpus(loaded.meta, corpus, checkpoint)
        reader = from_blocks(
            log_output_blocks(loaded.model, corpus.test),
            contexts=corpus.test.numel() - 1,
            vocabulary=len(corpus.vocabulary),
            description=f"log P of {loaded.run.recipe}, seed {loaded.run.seed}, on {corpus.name} test",
        )
        state = checkpoint.parent / STATE
        spectrum = streamed_spectrum(reader, SpectrumOptions(device=device), state=state, progress=progress)
        found = ModelSpectrum(run=loaded.run, split="test", spectrum=spectrum, epoch=loaded.epoch)
        append(checkpoint.parent / FILE, Record.of(found, Environment.here(device)))
        return found


def known_spectrum(checkpoint: Path) -> ModelSpectrum | None:
    """The last spectrum on record of the weights as they are."""
    found = measured_on(checkpoint, FILE, ModelSpectrum)
    return next((spectrum for spectrum in reversed(found) if spectrum.split == "test"), None)


@torch.no_grad()
def log_output_blocks(model: LanguageModel, ids_L: Tensor) -> Iterator[Tensor]:
    """Blocks (T, V) in float32, in order: row t of all L - 1 holds the log-probabilities of token t + 1."""
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
