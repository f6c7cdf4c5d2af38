"""Sums up blocks of a log-output matrix, in float64, until its singular values are asked for.

What is kept of the blocks is a Gram matrix, a triangular factor, or the rows themselves where they are few.

Shapes: N contexts, V vocabulary, B contexts of a block.
"""

from __future__ import annotations

import math
import time
import warnings
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from sigsoftmax.analysis.spectrum.entry_checks import SIXTEEN_BITS, BadEntries, EntryChecks, dtype_name
from sigsoftmax.analysis.spectrum.factorizations import (
    GramMatrix,
    SingularValues,
    TriangularFactor,
    exact_values,
    gram_values,
)
from sigsoftmax.analysis.spectrum.noise_floor import entry_noise
from sigsoftmax.analysis.spectrum.saved_state import StreamState, deferred_interrupt
from sigsoftmax.contract.spec import check_positive
from sigsoftmax.family.notation import check_choice
from sigsoftmax.records.schemas.spectra import Spectrum

__all__ = ["Method", "SpectrumOptions", "SpectrumStream", "memory_needed"]

Method = Literal["auto", "gram", "exact"]

SMALL = 2**26
"""bytes of a matrix that is simply held in memory"""
EXACT_WORK = 2e10
"""N V min(N, V) up to which ``auto`` is exact: seconds on one core"""
BLOCK_BYTES = {"cpu": 2**28, "cuda": 2**31}
"""bytes of a block in float64"""
MOST_BLOCK_CONTEXTS = 8192


@dataclass(frozen=True, kw_only=True)
class SpectrumOptions:
    """The method of a spectrum and its limits."""

    method: Method = "auto"
    """``gram``: valid down to about 1e-7 sigma_max. ``exact``: to float64's precision, at several times the work.
    ``auto``: exact where that takes seconds"""
    device: torch.device | str = "cpu"
    block_contexts: int | None = None
    """contexts that are worked in at once; None: as many as make a good product"""
    log_probs: bool = True
    """rows must hold log-probabilities; False takes any finite matrix"""
    sum_tolerance: float | None = None
    """distance from 0 that the log of a row's sum of probabilities may have; None: 0.1 for 16-bit entries, else 5e-3"""
    precision: torch.dtype | None = None
    """the least precise dtype that the entries went through, if that is not their own: torch.bfloat16 for float32
    log-probabilities of bf16 logits. Entries that are all numbers of a narrower dtype are recognised without it"""
    memory_limit: int | None = None
    """bytes; a matrix that needs more is refused before the work begins"""

    def __post_init__(self) -> None:
        check_choice("method", self.method, ("auto", "gram", "exact"))
        if self.block_contexts is not None:
            check_positive(block_contexts=self.block_contexts)
        if self.sum_tolerance is not None and not self.sum_tolerance > 0.0:
            raise ValueError(f"sum_tolerance must be positive, got {self.sum_tolerance}")
        if self.precision is not None and not self.precision.is_floating_point:
            raise ValueError(f"precision must be a floating-point dtype, got {self.precision}")
        if torch.device(self.device).type not in BLOCK_BYTES:
            raise ValueError(f"device must be a CPU or a CUDA device, which have float64, got {self.device}")

    def block_contexts_for(self, vocabulary: int) -> int:
        if self.block_contexts is not None:
            return self.block_contexts
        fitting = BLOCK_BYTES[torch.device(self.device).type] // (8 * vocabulary)
        return max(1, min(fitting, MOST_BLOCK_CONTEXTS))

    def resolved_method(self, vocabulary: int, contexts: int | None) -> Method:
        if self.method != "auto":
            return self.method
        is_cheap = contexts is not None and vocabulary * contexts * min(vocabulary, contexts) <= EXACT_WORK
        return "exact" if is_cheap else "gram"


class SpectrumStream:
    """Sums up blocks of contexts. :func:`streamed_spectrum` feeds one from a reader; a loop of one's own may too.

    Two runs agree bit for bit if their blocks do.
    """

    def __init__(
        self,
        *,
        vocabulary: int,
        dtype: torch.dtype,
        contexts: int | None = None,
        options: SpectrumOptions | None = None,
        description: str = "log-probabilities",
    ) -> None:
        self.options = options or SpectrumOptions()
        self.vocabulary, self.dtype, self.contexts_expected, self.description = vocabulary, dtype, contexts, description
        self.device = torch.device(self.options.device)
        self.checks = EntryChecks(log_probs=self.options.log_probs, tolerance=self.options.sum_tolerance)
        self.contexts = 0
        """summed up so far"""
        self.consistent = True
        """False if an update broke off in the middle, so that nothing can be told from the sum"""
        self._began = time.perf_counter()
        self._held: list[Tensor] = []
        self._sum: GramMatrix | TriangularFactor | None = None
        self._valid_rest: Tensor | None = None
        limit = self.options.memory_limit
        needed = memory_needed(vocabulary, contexts, dtype.itemsize, self.options)
        if limit is not None and needed > limit:
            raise ValueError(
                f"the spectrum of {contexts or 'any number of'} contexts x {vocabulary} tokens needs about "
                f"{needed / 2**30:.1f} GiB, more than memory_limit = {limit / 2**30:.1f} GiB; take fewer tokens or "
                "contexts, or bound the rank from a block instead (rank_bounds)"
            )

    @property
    def valid_contexts(self) -> int:
        return self.contexts + (0 if self._valid_rest is None else len(self._valid_rest))

    def add(self, block_BV: Tensor) -> None:
        """Check a block and work it in. BadEntries says what is wrong; rows before the wrong one count all the same."""
        if block_BV.ndim != 2 or block_BV.shape[1] != self.vocabulary or block_BV.dtype != self.dtype:
            raise ValueError(
                f"expected a block of {dtype_name(self.dtype)} with {self.vocabulary} columns, got "
                f"{dtype_name(block_BV.dtype)} of shape {tuple(block_BV.shape)}"
            )
        if self.contexts_expected is not None and self.contexts + len(block_BV) > self.contexts_expected:
            raise ValueError(
                f"expected {self.contexts_expected} contexts, got at least {self.contexts + len(block_BV)}; give the "
                "true number, or None"
            )
        if not len(block_BV):
            return
        block_BV = block_BV.detach().to(self.device)
        try:
            self.checks.check(block_BV, self.contexts)
        except BadEntries as error:
            self._valid_rest = block_BV[: error.row].clone() if error.row else None
            raise
        with deferred_interrupt():
            self._work_in(block_BV)

    def spectrum(self) -> Spectrum:
        """The spectrum of all contexts so far."""
        if not self.consistent:
            raise ValueError("an update broke off in the middle; the sum is lost, begin anew or resume a saved state")
        if self._valid_rest is not None:
            rest, self._valid_rest = self._valid_rest, None
            self._work_in(rest)
        if not self.contexts:
            raise ValueError("expected at least one context, got none; the matrix is empty")
        is_complete = self.contexts_expected in (None, self.contexts)
        precision = self.options.precision or self.checks.precision(self.dtype)
        values = self._singular_values()
        found = Spectrum(
            source=self.description if is_complete else f"the first {self.contexts} contexts of {self.description}",
            words=self.vocabulary,
            contexts=self.contexts,
            singular_values=tuple(values.values_R.tolist()),
            method=values.method,
            dtype=dtype_name(self.dtype),
            precision=dtype_name(precision),
            squared_error=values.squared_error,
            value_error=values.value_error + entry_noise(values.values_R, self.contexts, self.vocabulary, precision),
            row_sum_error=self.checks.row_sum_error if self.checks.log_probs else None,
            contexts_expected=None if is_complete else self.contexts_expected,
            seconds=time.perf_counter() - self._began,
        )
        if precision in SIXTEEN_BITS:
            _warn_of_noise(found)
        return found

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
            kind = GramMatrix if state.about["holds"] == GramMatrix.KIND else TriangularFactor
            self._sum = kind(self.vocabulary, self.device)
            self._sum.restore(state.arrays)
        self.checks.restore(state.about["checks"])
        self.contexts = int(state.about["contexts_done"])

    def _singular_values(self) -> SingularValues:
        if self._sum is not None:
            return self._sum.singular_values(self.contexts)
        if self.options.resolved_method(self.vocabulary, self.contexts) == "gram":
            return gram_values(self._held)
        return exact_values(torch.cat([block.to(torch.float64) for block in self._held]))

    def _work_in(self, block_BV: Tensor) -> None:
        self.consistent = False
        if self._sum is not None:
            self._sum.add(block_BV)
        else:
            # A reader may fill the same memory again for its next block.
            self._held.append(block_BV.clone())
            method = self.options.resolved_method(self.vocabulary, self.contexts_expected)
            if sum(block.nbytes for block in self._held) > self._most_held(method):
                self._sum = (GramMatrix if method == "gram" else TriangularFactor)(self.vocabulary, self.device)
                held, self._held = self._held, []
                for block in held:
                    self._sum.add(block)
        self.contexts += len(block_BV)
        self.consistent = True

    def _most_held(self, method: Method) -> float:
        """The bytes of rows to keep before they are summed up."""
        contexts, itemsize = self.contexts_expected, self.dtype.itemsize
        if contexts is None:
            return max(SMALL, 2 * self.vocabulary**2) if method == "gram" else SMALL
        is_small = contexts * self.vocabulary * itemsize <= SMALL
        if is_small or (method == "gram" and _few_contexts(self.vocabulary, contexts, itemsize)):
            return math.inf
        return 0


def memory_needed(vocabulary: int, contexts: int | None, itemsize: int, options: SpectrumOptions) -> int:
    """About the most bytes that a spectrum holds at once, beside what the reader holds."""
    rows = options.block_contexts_for(vocabulary)
    rows = rows if contexts is None else min(rows, contexts)
    # The block as it came, cut to size, a copy inside the checks, and in float64.
    block = rows * vocabulary * (3 * itemsize + 8)
    if options.resolved_method(vocabulary, contexts) == "gram":
        if contexts is not None and _few_contexts(vocabulary, contexts, itemsize):
            return block + contexts * vocabulary * itemsize + 2 * 8 * contexts**2
        # The Gram matrix, and the copy in which its eigenvalues are found.
        return block + 2 * 8 * vocabulary**2 + (2 * vocabulary**2 if contexts is None else 0)
    stacked = 2 * vocabulary if contexts is None else min(contexts, 2 * vocabulary)
    # The stack, its copy in the factorisation, and the factor.
    return block + 8 * vocabulary * (2 * stacked + min(stacked, vocabulary))


def _few_contexts(vocabulary: int, contexts: int, itemsize: int) -> bool:
    """True if all rows and an N x N Gram matrix take less memory than one of V x V."""
    return contexts * vocabulary * itemsize + 8 * contexts**2 < 8 * vocabulary**2


def _warn_of_noise(found: Spectrum) -> None:
    refused, counted = (
        ", ".join(f"{c.rule} ({c.threshold:.3g})" for c in found.ranks() if (c.rank is None) is is_refused)
        for is_refused in (True, False)
    )
    warnings.warn(
        f"the entries have the precision of {found.precision}, whose rounding makes singular values of up to "
        f"{found.noise_floor:.3g} ({found.noise_floor / found.largest if found.largest else 0.0:.2g} sigma_max). "
        f"Thresholds below that are not counted: {refused or 'none'}; above it lie {counted}",
        stacklevel=4,
    )
