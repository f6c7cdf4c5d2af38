"""The spectrum of a log-output matrix that does not fit in memory.

Blocks of contexts are checked and summed up; the singular values come from the sum. Blocks are cut at the same
contexts however the source delivers them, so that a run that was interrupted and resumed gives the same bits as one
that was not.

Shapes: M words, T contexts, B contexts of a block.
"""

from __future__ import annotations

import hashlib
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
from sigsoftmax.analysis.spectrum.matrix_files import as_source
from sigsoftmax.analysis.spectrum.matrix_readers import MatrixSource, regrouped, tensors
from sigsoftmax.analysis.spectrum.saved_state import (
    StreamState,
    check_same_matrix,
    check_writable,
    load_state,
    save_state,
)
from sigsoftmax.records.schemas.spectra import Spectrum

__all__ = ["IncompleteMatrix", "Method", "SpectrumOptions", "SpectrumStream", "memory_needed", "streamed_spectrum"]


READING = "reading"


class IncompleteMatrix(ValueError):
    """A matrix went wrong on the way; what came before is valid, and ``partial()`` gives its spectrum."""

    def __init__(self, message: str, stream: SpectrumStream) -> None:
        super().__init__(message)
        self._stream = stream

    @property
    def contexts(self) -> int:
        """how many contexts were valid"""
        return self._stream.valid_contexts

    def partial(self) -> Spectrum:
        return self._stream.spectrum()


def streamed_spectrum(
    source: Any,
    options: SpectrumOptions | None = None,
    *,
    state: str | Path | None = None,
    save_every: float = 600.0,
    progress: OnProgress | None = None,
) -> Spectrum:
    """The spectrum of a matrix of any length.

    ``source`` is a MatrixSource, a matrix, the path of a file, or an iterable of matrices with a context a row.
    ``state`` names a file: the sum is saved there every ``save_every`` seconds and on any interruption, and a later
    call with the same matrix goes on from it. It is removed at the end.

    A matrix that goes wrong on the way raises IncompleteMatrix, which can give the spectrum of what came before.
    """
    options = options or SpectrumOptions()
    source = as_source(source)
    run = _Run(source, options, None if state is None else Path(state), progress)
    try:
        for block_BM in run.blocks():
            run.stream.add(block_BM)
            run.report(READING)
            if run.seconds_since_save >= save_every:
                run.save()
        run.check_complete()
        run.save()
    except ValueError as error:
        run.save()
        if not run.has_begun or not run.stream.consistent or not run.stream.valid_contexts:
            raise
        raise IncompleteMatrix(
            f"{error}. The {run.stream.valid_contexts} contexts before are valid: partial() of this error gives their "
            "spectrum",
            run.stream,
        ) from error
    except BaseException as error:
        run.save()
        error.add_note(run.what_is_kept())
        raise
    run.report("singular values")
    try:
        found = run.stream.spectrum()
    except KeyboardInterrupt as error:
        error.add_note(run.what_is_kept())
        raise
    run.forget()
    return found


class _Run:
    """One pass over a source: where it begins, what has been saved, how far it has come."""

    def __init__(
        self, source: MatrixSource, options: SpectrumOptions, state: Path | None, progress: OnProgress | None
    ) -> None:
        self.source, self.options, self.state, self.progress = source, options, state, progress
        if state is not None:
            check_writable(state)
        self.began = self.saved_at = time.perf_counter()
        self.stream: SpectrumStream
        self.has_begun = False
        self.saved_contexts = 0
        self.first_contexts = 0
        """done in an earlier run"""
        self.block_contexts = 0
        self.identity: dict[str, Any] = {}

    def blocks(self) -> Iterator[Tensor]:
        """Blocks of a fixed number of contexts, those of an earlier run left out."""
        saved = load_state(self.state) if self.state is not None and self.state.exists() else None
        pieces = tensors(self.source, 0)
        first = next(pieces, None)
        if first is None:
            raise ValueError(f"expected at least one context, got none; {self.source.description} is empty")
        self.stream = SpectrumStream(
            words=first.shape[1],
            dtype=first.dtype,
            contexts=self.source.contexts,
            options=self.options,
            description=self.source.description,
        )
        self.has_begun = True
        self.block_contexts = self.options.block_contexts_for(first.shape[1])
        if saved is not None and self.options.block_contexts is None:
            self.block_contexts = int(saved.about.get("block_contexts", self.block_contexts))
        whole = regrouped(_chained(first, pieces), self.block_contexts)
        if self.state is None:
            yield from whole
            return
        first_block = next(whole)
        self.identity = self._identity(first_block)
        if saved is None:
            yield first_block
            yield from whole
            return
        check_same_matrix(self.state, saved.about, self.identity)
        self.stream.restore(saved, self.block_contexts)
        self.saved_contexts = self.first_contexts = self.stream.contexts
        if self.source.can_seek:
            whole = regrouped(tensors(self.source, self.stream.contexts), self.block_contexts)
        else:
            skipped = len(first_block)
            while skipped < self.stream.contexts:
                skipped += len(next(whole, ())) or self._ended_early(skipped)
        yield from whole

    def report(self, phase: str) -> None:
        if self.progress is None:
            return
        done, total, seconds = self.stream.contexts, self.source.contexts, time.perf_counter() - self.began
        new = done - self.first_contexts
        self.progress(
            Progress(
                phase=phase,
                blocks=-(-done // self.block_contexts),
                total_blocks=None if total is None else -(-total // self.block_contexts),
                contexts=done,
                total_contexts=total,
                seconds=seconds,
                seconds_left=None if total is None or not new or phase != READING else seconds / new * (total - done),
            )
        )

    @property
    def seconds_since_save(self) -> float:
        return time.perf_counter() - self.saved_at

    def save(self) -> None:
        if self.state is None or not self.has_begun or not self.stream.consistent:
            return
        if self.stream.contexts > self.saved_contexts and self.identity:
            kept = self.stream.state()
            try:
                save_state(self.state, StreamState({**self.identity, **kept.about}, kept.arrays))
                self.saved_contexts = self.stream.contexts
            except OSError as error:
                # A full disk must not cost the hours that a state is there to save.
                warnings.warn(f"the state was not saved to {self.state}: {error}; the run goes on", stacklevel=3)
        self.saved_at = time.perf_counter()

    def forget(self) -> None:
        if self.state is not None:
            self.state.unlink(missing_ok=True)

    def what_is_kept(self) -> str:
        if self.state is None:
            return "nothing is kept of this spectrum; with state= a run can be resumed"
        return f"{self.saved_contexts} contexts are kept in {self.state}; the same call goes on from there"

    def check_complete(self) -> None:
        expected = self.source.contexts
        if expected is not None and self.stream.contexts < expected:
            raise ValueError(
                f"{self.source.description} ended after {self.stream.contexts} contexts, expected {expected}"
            )

    def _identity(self, first_block: Tensor) -> dict[str, Any]:
        bits = first_block.detach().cpu().contiguous().view(torch.uint8).numpy()
        return {
            "words": first_block.shape[1],
            "contexts": self.source.contexts,
            "dtype": dtype_name(first_block.dtype),
            "method": self.options.method,
            "log_probs": self.options.log_probs,
            "sum_tolerance": self.options.sum_tolerance,
            "device": torch.device(self.options.device).type,
            "block_contexts": self.block_contexts,
            "sha256 of the first block": hashlib.sha256(bits.data).hexdigest(),
        }

    def _ended_early(self, contexts: int) -> int:
        raise ValueError(
            f"the state in {self.state} has {self.stream.contexts} contexts, but {self.source.description} ended after "
            f"{contexts}; give the whole iterable again to resume"
        )


def _chained(first: Tensor, rest: Iterator[Tensor]) -> Iterator[Tensor]:
    yield first
    yield from rest
