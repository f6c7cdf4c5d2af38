"""Sums up blocks of a log-output matrix, in float64, until its singular values are asked for.

What is kept of the blocks is a Gram matrix, a triangular factor, or the rows themselves where they are few.

Shapes: M words, T contexts, B contexts of a block.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from sigsoftmax.analysis.spectrum.blocked_qr import TriangularFactor, singular_values
from sigsoftmax.analysis.spectrum.entry_checks import BadEntries, EntryChecks, dtype_name
from sigsoftmax.analysis.spectrum.gram import WordGram, squared_singular_values
from sigsoftmax.analysis.spectrum.saved_state import StreamState, deferred_interrupt
from sigsoftmax.analysis.spectrum.singular_values import Matrix
from sigsoftmax.records.schemas.spectra import Spectrum

__all__ = ["Method", "SpectrumOptions", "SpectrumStream", "memory_needed"]

Method = Literal["auto", "gram", "exact"]

SMALL = 2**26
"""bytes of a matrix that is simply held in memory"""
EXACT_WORK = 2e10
"""M T min(M, T) up to which ``auto`` is exact: seconds on one core"""
BLOCK_BYTES = {"cpu": 2**28, "cuda": 2**31}
"""of a block in float64"""
MOST_BLOCK_CONTEXTS = 8192


@dataclass(frozen=True, kw_only=True)
class SpectrumOptions:
    """How a spectrum is computed."""

    method: Method = "auto"
    """``gram``: valid down to about 1e-7 sigma_max. ``exact``: to float64's precision, at several times the work.
    ``auto``: exact where that takes seconds"""
    device: torch.device | str = "cpu"
    block_contexts: int | None = None
    """contexts that are worked in at once; None: as many as make a good product"""
    log_probs: bool = True
    """whether rows must hold log-probabilities; False takes any finite matrix"""
    sum_tolerance: float | None = None
    """how far the log of a row's sum of probabilities may be from 0; None: 0.1 for 16-bit entries, else 0.005"""
    precision: torch.dtype | None = None
    """the least precise dtype that the entries went through, if that is not their own: torch.bfloat16 for float32
    log-probabilities of bf16 logits. Entries that are all numbers of a narrower dtype are recognised without it"""
    memory_limit: int | None = None
    """bytes; a matrix that needs more is refused before the work begins"""

    def __post_init__(self) -> None:
        if self.method not in ("auto", "gram", "exact"):
            raise ValueError(f"method must be 'auto', 'gram' or 'exact', got {self.method!r}")
        if self.block_contexts is not None and self.block_contexts < 1:
            raise ValueError(f"block_contexts must be at least 1, got {self.block_contexts}")
        if self.sum_tolerance is not None and not self.sum_tolerance > 0.0:
            raise ValueError(f"sum_tolerance must be positive, got {self.sum_tolerance}")
        if self.precision is not None and not self.precision.is_floating_point:
            raise ValueError(f"precision must be a floating-point dtype, got {self.precision}")
        if torch.device(self.device).type not in BLOCK_BYTES:
            raise ValueError(f"device must be a CPU or a CUDA device, which have float64, got {self.device}")

    def block_contexts_for(self, words: int) -> int:
        if self.block_contexts is not None:
            return self.block_contexts
        fitting = BLOCK_BYTES[torch.device(self.device).type] // (8 * words)
        return max(1, min(fitting, MOST_BLOCK_CONTEXTS))


class SpectrumStream:
    """Sums up blocks of contexts. :func:`streamed_spectrum` feeds one from a source; a loop of one's own may too.

    Two runs agree bit for bit if their blocks do.
    """

    def __init__(
        self,
        *,
        words: int,
        dtype: torch.dtype,
        contexts: int | None = None,
        options: SpectrumOptions | None = None,
        description: str = "log-probabilities",
    ) -> None:
        self.options = options or SpectrumOptions()
        self.words, self.dtype, self.contexts_expected, self.description = words, dtype, contexts, description
        self.device = torch.device(self.options.device)
        self.checks = EntryChecks(log_probs=self.options.log_probs, tolerance=self.options.sum_tolerance)
        self.contexts = 0
        """summed up so far"""
        self.consistent = True
        """False if an update broke off in the middle, so that nothing can be told from the sum"""
        self._began = time.perf_counter()
        self._held: list[Tensor] = []
        self._sum: WordGram | TriangularFactor | None = None
        self._valid_rest: Tensor | None = None
        self._check_memory()

    @property
    def valid_contexts(self) -> int:
        return self.contexts + (0 if self._valid_rest is None else len(self._valid_rest))

    def add(self, block_BM: Tensor) -> None:
        """Check a block and work it in. BadEntries says what is wrong; rows before the wrong one count all the same."""
        if block_BM.ndim != 2 or block_BM.shape[1] != self.words or block_BM.dtype != self.dtype:
            raise ValueError(
                f"expected a block of {dtype_name(self.dtype)} with {self.words} words a row, got "
                f"{dtype_name(block_BM.dtype)} of shape {tuple(block_BM.shape)}"
            )
        if self.contexts_expected is not None and self.contexts + len(block_BM) > self.contexts_expected:
            raise ValueError(
                f"expected {self.contexts_expected} contexts, got at least {self.contexts + len(block_BM)}; give the "
                "true number, or None"
            )
        if not len(block_BM):
            return
        block_BM = block_BM.detach().to(self.device)
        try:
            self.checks.check(block_BM, self.contexts)
        except BadEntries as error:
            self._valid_rest = block_BM[: error.row].clone() if error.row else None
            raise
        with deferred_interrupt():
            self.consistent = False
            self._work_in(block_BM)
            self.contexts += len(block_BM)
            self.consistent = True

    def spectrum(self) -> Spectrum:
        """Of all contexts so far."""
        if not self.consistent:
            raise ValueError("an update broke off in the middle; the sum is lost, begin anew or resume a saved state")
        if self._valid_rest is not None:
            rest, self._valid_rest = self._valid_rest, None
            self._work_in(rest)
            self.contexts += len(rest)
        if not self.contexts:
            raise ValueError("expected at least one context, got none; the matrix is empty")
        complete = self.contexts_expected in (None, self.contexts)
        matrix = Matrix(
            source=self.description if complete else f"the first {self.contexts} contexts of {self.description}",
            words=self.words,
            contexts=self.contexts,
            dtype=self.dtype,
            checks=self.checks,
            precision=self.options.precision,
            contexts_expected=None if complete else self.contexts_expected,
        )
        if isinstance(self._sum, WordGram):
            return matrix.gram_spectrum(self._sum.squared_singular_values(), began=self._began)
        if isinstance(self._sum, TriangularFactor):
            return matrix.spectrum(self._sum.singular_values(), method="qr", began=self._began)
        if _resolved(self.options.method, self.words, self.contexts) == "gram":
            return matrix.gram_spectrum(squared_singular_values(self._held), began=self._began)
        rows_TM = torch.cat([block.to(torch.float64) for block in self._held])
        return matrix.spectrum(singular_values(rows_TM), method="svd", began=self._began)

    def state(self) -> StreamState:
        """All that ``restore`` needs to go on."""
        about: dict[str, Any] = {"contexts_done": self.contexts, "checks": self.checks.state()}
        if self._sum is not None:
            return StreamState({**about, "holds": self._sum.KIND}, self._sum.arrays())
        rows = torch.cat(self._held).cpu()
        # numpy has no bfloat16.
        bits = rows.view(torch.int16) if rows.dtype == torch.bfloat16 else rows
        return StreamState({**about, "holds": "rows"}, {"rows": bits.numpy()})

    def restore(self, state: StreamState, block_contexts: int) -> None:
        if state.about["holds"] == "rows":
            rows = torch.from_numpy(state.arrays["rows"])
            rows = rows.view(torch.bfloat16) if self.dtype == torch.bfloat16 else rows
            self._held = list(rows.to(self.device).split(block_contexts))
        else:
            self._sum = self._new_sum("gram" if state.about["holds"] == WordGram.KIND else "exact")
            self._sum.restore(state.arrays)
        self.checks.restore(state.about["checks"])
        self.contexts = int(state.about["contexts_done"])

    def _work_in(self, block_BM: Tensor) -> None:
        if self._sum is None:
            # A source may fill the same memory again for its next block.
            self._held.append(block_BM.clone())
            if sum(block.nbytes for block in self._held) <= self._most_held():
                return
            self._sum = self._new_sum(_resolved(self.options.method, self.words, self.contexts_expected))
            held, self._held = self._held, []
            for block in held:
                self._sum.add(block)
        else:
            self._sum.add(block_BM)

    def _new_sum(self, method: Method) -> WordGram | TriangularFactor:
        return (WordGram if method == "gram" else TriangularFactor)(self.words, self.device)

    def _most_held(self) -> float:
        """Bytes of rows to keep before they are summed up."""
        contexts, itemsize = self.contexts_expected, self.dtype.itemsize
        is_gram = _resolved(self.options.method, self.words, contexts) == "gram"
        if contexts is None:
            return max(SMALL, 2 * self.words**2) if is_gram else SMALL
        if contexts * self.words * itemsize <= SMALL or (is_gram and _few_contexts(self.words, contexts, itemsize)):
            return math.inf
        return 0

    def _check_memory(self) -> None:
        limit = self.options.memory_limit
        needed = memory_needed(self.words, self.contexts_expected, self.dtype.itemsize, self.options)
        if limit is not None and needed > limit:
            raise ValueError(
                f"the spectrum of {self.words} words x {self.contexts_expected or 'any number of'} contexts needs "
                f"about {needed / 2**30:.1f} GiB, more than memory_limit = {limit / 2**30:.1f} GiB; take fewer words "
                "or contexts, or bound the rank from a block instead (rank_bounds)"
            )


def memory_needed(words: int, contexts: int | None, itemsize: int, options: SpectrumOptions) -> int:
    """About the most bytes that a spectrum holds at once, beside what the source holds."""
    rows = options.block_contexts_for(words) if contexts is None else min(options.block_contexts_for(words), contexts)
    # The block as it came, cut to size, a copy inside the checks, and in float64.
    block = rows * words * (3 * itemsize + 8)
    if _resolved(options.method, words, contexts) == "gram":
        if contexts is not None and _few_contexts(words, contexts, itemsize):
            return block + contexts * words * itemsize + 2 * 8 * contexts**2
        # The Gram matrix, and the copy in which its eigenvalues are found.
        return block + 2 * 8 * words**2 + (2 * words**2 if contexts is None else 0)
    stacked = 2 * words if contexts is None else min(contexts, 2 * words)
    # The stack, its copy in the factorisation, and the factor.
    return block + 8 * words * (2 * stacked + min(stacked, words))


def _resolved(method: Method, words: int, contexts: int | None) -> Method:
    if method != "auto":
        return method
    return "exact" if contexts is not None and words * contexts * min(words, contexts) <= EXACT_WORK else "gram"


def _few_contexts(words: int, contexts: int, itemsize: int) -> bool:
    """Whether all rows and a T x T Gram matrix take less memory than one of M x M."""
    return contexts * words * itemsize + 8 * contexts**2 < 8 * words**2
