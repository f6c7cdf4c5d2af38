"""The spectrum and rank of a trained model's log-output matrix over a split, as in the paper's table 3."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from sigsoftmax.analysis.progress import Progress
from sigsoftmax.analysis.spectrum.matrix_readers import from_blocks
from sigsoftmax.analysis.spectrum.streaming import SpectrumOptions, streamed_spectrum
from sigsoftmax.experiments.runs.folder_locks import FolderLock
from sigsoftmax.experiments.runs.log_outputs import log_output_blocks
from sigsoftmax.experiments.runs.run import Resources, run_folder
from sigsoftmax.lm.data.corpus import Corpus, Split
from sigsoftmax.lm.training.saved_models import check_same_corpus, load_model
from sigsoftmax.lm.training.trainer import resolve_device
from sigsoftmax.records import Environment, Record, append, read
from sigsoftmax.records.schemas.model_spectra import ModelSpectrum

__all__ = ["known_spectrum", "measure_rank"]

FILE = "spectrum.jsonl"
STATE = "spectrum.state"


def measure_rank(
    checkpoint: Path,
    corpus: Corpus,
    resources: Resources,
    *,
    split: Split = "test",
    progress: Callable[[Progress], None] | None = None,
) -> ModelSpectrum:
    """Of a model's log-outputs; taken from its records if it is there, gone on with if it was interrupted."""
    found = known_spectrum(checkpoint, split)
    if found is not None:
        return found
    with FolderLock(run_folder(checkpoint)):
        return _measured(checkpoint, corpus, resources, split, progress)


def _measured(
    checkpoint: Path, corpus: Corpus, resources: Resources, split: Split, progress: Callable[[Progress], None] | None
) -> ModelSpectrum:
    device = resolve_device(resources.device)
    loaded = load_model(checkpoint, device=device)
    check_same_corpus(loaded.meta, corpus, checkpoint)
    ids_L = corpus.split(split)
    source = from_blocks(
        log_output_blocks(loaded.model, ids_L),
        contexts=ids_L.numel() - 1,
        vocabulary=len(corpus.vocabulary),
        description=f"log P of {loaded.run.recipe}, seed {loaded.run.seed}, on {corpus.name} {split}",
    )
    spectrum = streamed_spectrum(
        source, SpectrumOptions(device=device), state=checkpoint.parent / STATE, progress=progress
    )
    found = ModelSpectrum(run=loaded.run, split=split, spectrum=spectrum)
    append(checkpoint.parent / FILE, Record.of(found, Environment.here(device)))
    return found


def known_spectrum(checkpoint: Path, split: Split = "test") -> ModelSpectrum | None:
    """The last on record that is newer than the weights."""
    path = checkpoint.parent / FILE
    if not path.is_file() or path.stat().st_mtime < checkpoint.stat().st_mtime:
        return None
    found = [
        record.payload_as(ModelSpectrum) for record in read(path, malformed="skip") if record.kind == ModelSpectrum.KIND
    ]
    return next((spectrum for spectrum in reversed(found) if spectrum.split == split), None)
