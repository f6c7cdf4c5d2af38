"""The spectrum of a log-output matrix that does not fit in memory.

Blocks of contexts are checked and summed up; the singular values come from the sum. Blocks are cut at the same
contexts however the reader delivers them, so that a run that was interrupted and resumed gives the same bits as one
that was not.

Shapes: N contexts, V vocabulary, B contexts of a block.
"""

from __future__ import annotations

import hashlib
import itertools
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sigsoftmax.analysis.progress import OnProgress, Progress
from sigsoftmax.analysis.spectrum.accumulator import Method, SpectrumOptions, SpectrumStream, memory_needed
from sigsoftmax.analysis.spectrum.entry_checks import dtype_name
from sigsoftmax.analysis.spectrum.matrix_files import as_reader
from sigsoftmax.analysis.spectrum.matrix_readers import MatrixReader, regrouped, tensors
from sigsoftmax.analysis.spectrum.saved_state import (
    StreamState,
    check_same_matrix,
    check_writable,
    load_state,
    save_state,
)
from sigsoftmax.records.schemas.spectra import Spectrum

__all__ = ["IncompleteMatrix", "Method", "SpectrumOptions", "SpectrumStream", "memory_needed", "streamed_spectrum"]


class IncompleteMatrix(ValueError):
    """A matrix went wrong on the way; what came before is valid, and ``partial()`` gives its spectrum."""

    def __init__(self, message: str, stream: SpectrumStream) -> None:
        super().__init__(message)
        self._stream = stream

    @property
    def contexts(self) -> int:
        """The number of valid contexts."""
        return self._stream.valid_contexts

    def partial(self) -> Spectrum:
        """The spectrum of the valid contexts."""
        return self._stream.spectrum()


def streamed_spectrum(
    matrix: Any,
    options: SpectrumOptions | None = None,
    *,
    state: str | Path | None = None,
    save_every: float = 600.0,
    progress: OnProgress | None = None,
) -> Spectrum:
    """The spectrum of a matrix of any length.

    ``matrix`` is a MatrixReader, a matrix, the path of a file, or an iterable of matrices with a context per row.
    ``state`` names a file: the sum is saved there every ``save_every`` seconds and on any interruption, and a later
    call with the same matrix goes on from it. It is removed at the end.

    A matrix that goes wrong on the way raises IncompleteMatrix, which can give the spectrum of what came before.
    """
    run = _Run(as_reader(matrix), options or SpectrumOptions(), None if state is None else Path(state), progress)
    stream = run.stream
    try:
        for block_BV in run.blocks:
            stream.add(block_BV)
            run.report("reading")
            if time.perf_counter() - run.saved_at >= save_every:
                run.save()
        run.reader.check_end(stream.contexts)
        run.save()
    except ValueError as error:
        run.save()
        if not stream.consistent or not stream.valid_contexts:
            raise
        raise IncompleteMatrix(
            f"{error}. The {stream.valid_contexts} contexts before are valid: partial() of this error gives their "
            "spectrum",
            stream,
        ) from error
    except BaseException as error:
        run.save()
        error.add_note(run.what_is_kept())
        raise
    run.report("singular values", is_reading=False)
    try:
        found = stream.spectrum()
    except KeyboardInterrupt as error:
        error.add_note(run.what_is_kept())
        raise
    if run.state is not None:
        run.state.unlink(missing_ok=True)
    return found


class _Run:
    """One pass over a reader: where it begins, what has been saved, how far it has come."""

    def __init__(
        self, reader: MatrixReader, options: SpectrumOptions, state: Path | None, progress: OnProgress | None
    ) -> None:
        self.reader, self.options, self.state, self.progress = reader, options, state, progress
        if state is not None:
            check_writable(state)
        self.began = self.saved_at = time.perf_counter()
        saved = load_state(state) if state is not None and state.exists() else None
        pieces = tensors(reader)
        first = next(pieces)
        self.stream = SpectrumStream(
            vocabulary=first.shape[1],
            dtype=first.dtype,
            contexts=reader.contexts,
            options=options,
            description=reader.description,
        )
        self.block_contexts = options.block_contexts_for(first.shape[1])
        if saved is not None and options.block_contexts is None:
            self.block_contexts = int(saved.about.get("block_contexts", self.block_contexts))
        self.blocks = regrouped(itertools.chain([first], pieces), self.block_contexts)
        """Blocks of a fixed number of contexts, without those of an earlier run."""
        if state is not None:
            first_block = next(self.blocks)
            self.identity = self._identity(first_block)
            if saved is None:
                self.blocks = itertools.chain([first_block], self.blocks)
            else:
                check_same_matrix(state, saved.about, self.identity)
                self.stream.restore(saved, self.block_contexts)
                self.blocks = self._blocks_after_saved(self.blocks, len(first_block))
        self.saved_contexts = self.first_contexts = self.stream.contexts

    def report(self, phase: str, *, is_reading: bool = True) -> None:
        if self.progress is not None:
            done = self.stream.contexts
            earlier = self.first_contexts if is_reading else done
            self.progress(Progress.at(phase, self.began, done, self.reader.contexts, earlier))

    def save(self) -> None:
        if self.state is None or not self.stream.consistent:
            return
        if self.stream.contexts > self.saved_contexts:
            kept = self.stream.state()
            try:
                save_state(self.state, StreamState({**self.identity, **kept.about}, kept.arrays))
                self.saved_contexts = self.stream.contexts
            except OSError as error:
                # A full disk must not cost the hours that a state is there to save.
                warnings.warn(f"the state was not saved to {self.state}: {error}; the run goes on", stacklevel=3)
        self.saved_at = time.perf_counter()

    def what_is_kept(self) -> str:
        if self.state is None:
            return "nothing is kept of this spectrum; with state= a run can be resumed"
        return f"{self.saved_contexts} contexts are kept in {self.state}; the same call goes on from there"

    def _blocks_after_saved(self, rest: Iterator[Tensor], read: int) -> Iterator[Tensor]:
        """The blocks that an earlier run did not sum up; ``rest`` are those after the ``read`` contexts."""
        if self.reader.can_seek:
            yield from regrouped(tensors(self.reader, self.stream.contexts), self.block_contexts)
            return
        done = self.stream.contexts
        while read < done:
            block = next(rest, None)
            if block is None:
                raise ValueError(
                    f"the state in {self.state} has {done} contexts, but {self.reader.description} ended after {read}; "
                    "give the whole iterable again to resume"
                )
            read += len(block)
        yield from rest

    def _identity(self, first_block: Tensor) -> dict[str, Any]:
        bits = first_block.detach().cpu().contiguous().view(torch.uint8).numpy()
        return {
            "words": first_block.shape[1],
            "contexts": self.reader.contexts,
            "dtype": dtype_name(first_block.dtype),
            "method": self.options.method,
            "log_probs": self.options.log_probs,
            "sum_tolerance": self.options.sum_tolerance,
            "device": torch.device(self.options.device).type,
            "block_contexts": self.block_contexts,
            "sha256 of the first block": hashlib.sha256(bits.data).hexdigest(),
        }
