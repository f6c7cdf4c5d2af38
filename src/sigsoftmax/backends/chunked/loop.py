"""The chunk loop above the backends: losses and their gradients without an N x V tensor.

Logits come from a source, either rows that the caller holds or the product of hidden vectors and an output matrix,
made a slab at a time. Each block of rows is measured, the coefficients of the loss follow from a few numbers a row
(``contract.tokens``), and the gradient overwrites the block. A plain output layer is a mixture of one component: K = 1
and no prior.

Shapes: N tokens, K components, V classes, d features; R = n K rows of the n tokens of a block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from sigsoftmax.backends.chunked.form_rows import FormRows
from sigsoftmax.backends.chunked.mixture import MixtureBlock
from sigsoftmax.backends.chunked.providers import LinearLogits, Source
from sigsoftmax.backends.chunked.vocabulary_blocks import ClassWalk
from sigsoftmax.contract.rows import FusedRowRoutines, RowCoefficients, RowRoutines, RowStats, compute_dtype
from sigsoftmax.contract.spec import LossSpec
from sigsoftmax.contract.tokens import TokenArithmetic, TokenBatch, entropy
from sigsoftmax.family.formulas import Form

Vectors = TypeVar("Vectors", RowStats, RowCoefficients)


class TokenLosses(NamedTuple):
    """Per token: its loss before token weights, and the extras (None where not asked for)."""

    losses_N: Tensor
    log_normalizer_NK: Tensor
    argmax_N: Tensor | None
    entropy_N: Tensor | None


def concatenate(kind: type[Vectors], pieces: Sequence[Vectors]) -> Vectors:
    """Named tuples of vectors joined field by field."""
    columns: list[Any] = [None if c[0] is None else torch.cat(c) for c in zip(*pieces, strict=True)]
    return kind(*columns)


class Rows(NamedTuple):
    """The output function of a loss as row routines are made for it."""

    make: Callable[[Form, Sequence[Tensor], Tensor, bool], RowRoutines]
    form: Form
    arguments: Sequence[Tensor]
    needs_arguments: bool
    """whether gradients of the arguments are wanted"""

    def routines(self, logits_like: Tensor) -> RowRoutines:
        return self.make(self.form, self.arguments, logits_like, self.needs_arguments)

    def dense_routines(self, logits_like: Tensor) -> FormRows:
        """Routines that can tell the log-probability of every class."""
        return FormRows(self.form, self.arguments, logits_like, self.needs_arguments)


class LossLoop:
    """One loss over all rows of a source, with gradients if asked for; ``run`` does the work.

    ``scale_N`` is the weight of each token in the total whose gradient is wanted; without it no gradient is computed.
    Blocks are many and small, so whatever can be computed for all tokens at once is computed before or after them.
    ``num_classes`` is that of the whole loss, where the source has but a part of them (``sharded_loop``).
    """

    def __init__(
        self,
        source: Source,
        rows: Rows,
        spec: LossSpec,
        batch: TokenBatch,
        scale_N: Tensor | None,
        num_classes: int | None = None,
    ) -> None:
        self.source = source
        like = source.logits_like
        self.numbers = torch.empty(0, dtype=compute_dtype(like.dtype), device=like.device)
        num_classes = source.num_classes if num_classes is None else num_classes
        self.tokens = TokenArithmetic(spec, batch, scale_N, num_classes, self.numbers)
        self.wants_argmax, self.wants_entropy = (name in self.tokens.wants for name in ("argmax", "entropy"))
        if self.tokens.mixes_every_class:
            self.dense_routines = rows.dense_routines(like)
            self.routines: RowRoutines = self.dense_routines
        else:
            self.routines = rows.routines(like)
        wants_prior = scale_N is not None and batch.log_prior_NK is not None
        shape_NK = (source.num_tokens, source.components)
        self.prior_gradient_NK = self.numbers.new_empty(shape_NK) if wants_prior else None
        self.collected: dict[str, list[Tensor]] = {}

    def run(self) -> TokenLosses:
        wants_gradient = self.tokens.scale_N is not None
        if wants_gradient and isinstance(self.source, LinearLogits) and self.source.walks_classes:
            if isinstance(self.routines, FusedRowRoutines) and self.tokens.probabilities_NV is None:
                self._walk_classes(self.source, self.routines)
                return self._results()
            self.source.walks_classes = False
        compute = self._dense_mixture_block if self.tokens.mixes_every_class else self._block
        for span, first_row, logits_RV in self.source.blocks(self.routines.max_rows, backpropagate=wants_gradient):
            compute(span, logits_RV, self.source.gradient_rows(first_row, logits_RV) if wants_gradient else None)
        return self._results()

    def _walk_classes(self, source: LinearLogits, routines: FusedRowRoutines) -> None:
        """Measure all rows first, then compute the gradient a range of classes at a time."""
        measured = [self._measure(span, rows_RV) for span, _, rows_RV in source.blocks(None, backpropagate=False)]
        if not measured:
            return
        all_stats, all_coefficients = zip(*measured, strict=True)
        stats, coefficients = concatenate(RowStats, all_stats), concatenate(RowCoefficients, all_coefficients)
        index_R, dense = self._row_index(slice(None)), self.tokens.smoothing_V
        for first_class, logits_RV, out_RV in ClassWalk(source).gradients():
            routines.gradient_of_classes(logits_RV, stats, coefficients, index_R, dense, first_class, out_RV)

    def _measure(self, span: slice, logits_RV: Tensor) -> tuple[RowStats, RowCoefficients]:
        stats = self.routines.stats(
            logits_RV, self._row_index(span), self.tokens.smoothing_V, self.wants_argmax, self.wants_entropy
        )
        self._collect_stats(stats, None)
        coefficients = self._coefficients(span, stats, None, self._collect_mixture(span, stats))
        # Routines that walk classes know unused rows by their coefficients.
        return stats, coefficients._replace(unused=None)

    def _results(self) -> TokenLosses:
        if "log_normalizer" in self.collected:
            normalizer_NK = self._all("log_normalizer")
        else:
            normalizer_NK = (self._all("normalizer") + self._all("offset")).view(-1, self.source.components)
        if "losses" in self.collected or not self.source.num_tokens:
            losses_N = self._all("losses")
        else:
            measured = (self._all(name) if name in self.collected else None for name in ("target", "dense", "mass"))
            losses_N = self.tokens.plain_losses(self._all("normalizer"), *measured)
        argmax_N = self._all("argmax", torch.int64) if self.wants_argmax else None
        entropy_N = self._all("entropy") if self.wants_entropy else None
        return TokenLosses(self.tokens.finished(losses_N, normalizer_NK), normalizer_NK, argmax_N, entropy_N)

    def argument_gradients(self) -> list[Tensor]:
        return self.routines.argument_gradients()

    def _collect(self, **values: Tensor | None) -> None:
        for name, value in values.items():
            if value is not None:
                self.collected.setdefault(name, []).append(value)

    def _all(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """What was collected under a name, for all rows; empty if nothing was."""
        pieces = self.collected.get(name, [])
        return torch.cat(pieces) if pieces else self.numbers.new_empty(0, dtype=dtype)

    # A plain row, or a mixture that only needs its rows at the target.

    def _block(self, span: slice, logits_RV: Tensor, out_RV: Tensor | None) -> None:
        tokens = self.tokens
        index_R, dense = self._row_index(span), tokens.dense_weights(span)
        mass = dense.sum(-1) if tokens.probabilities_NV is not None and dense is not None else None
        extras = (self.wants_argmax, self.wants_entropy)
        if out_RV is not None and not tokens.waits_for_rows and isinstance(self.routines, FusedRowRoutines):
            stats = self.routines.stats_and_gradient(
                logits_RV,
                tokens.coefficients(span, None, mass, None),
                tokens.z_slopes(span),
                index_R,
                dense,
                out_RV,
                *extras,
            )
            self._collect_stats(stats, mass)
            return
        stats = self.routines.stats(logits_RV, index_R, dense, *extras)
        self._collect_stats(stats, mass)
        by_log_f_nK = self._collect_mixture(span, stats)
        if out_RV is not None:
            coefficients = self._coefficients(span, stats, mass, by_log_f_nK)
            self.routines.gradient(logits_RV, stats, coefficients, index_R, dense, out_RV)

    def _collect_stats(self, stats: RowStats, mass: Tensor | None) -> None:
        self._collect(offset=stats.offset, normalizer=stats.normalizer, argmax=stats.argmax, entropy=stats.entropy)
        if self.tokens.log_prior_NK is None:
            self._collect(target=stats.target, dense=stats.dense, mass=mass)

    def _collect_mixture(self, span: slice, stats: RowStats) -> Tensor | None:
        """The losses of a mixture are known at once; returns what their gradient needs."""
        if self.tokens.log_prior_NK is None:
            return None
        assert stats.target is not None
        log_f_nK = (stats.target - stats.normalizer).view(-1, self.source.components)
        losses, by_log_f_nK = self.tokens.mixture_losses(span, log_f_nK)
        self._collect(losses=losses)
        return by_log_f_nK

    def _coefficients(
        self, span: slice, stats: RowStats, mass: Tensor | None, by_log_f_nK: Tensor | None
    ) -> RowCoefficients:
        coefficients = self.tokens.coefficients(span, stats, mass, by_log_f_nK)
        if by_log_f_nK is not None and self.prior_gradient_NK is not None and coefficients.target is not None:
            self.prior_gradient_NK[span] = coefficients.target.view_as(by_log_f_nK)
        return coefficients

    def _row_index(self, span: slice) -> Tensor | None:
        """The target of each row."""
        if self.tokens.index_N is None:
            return None
        index_n = self.tokens.index_N[span]
        return index_n if self.source.components == 1 else index_n.repeat_interleave(self.source.components)

    # A mixture whose loss or extras need the mixed probability of every class.

    def _dense_mixture_block(self, span: slice, logits_RV: Tensor, out_RV: Tensor | None) -> None:
        tokens = self.tokens
        assert tokens.log_prior_NK is not None
        block = MixtureBlock(self.dense_routines, logits_RV, tokens.log_prior_NK[span], tokens.spec.floor)
        log_p_nV = block.log_p_nV
        self._collect(
            log_normalizer=block.log_normalizer_nK,
            losses=tokens.losses_of_every_class(span, log_p_nV),
            argmax=log_p_nV.argmax(-1) if self.wants_argmax else None,
            entropy=entropy(log_p_nV) if self.wants_entropy else None,
        )
        if out_RV is None or tokens.unused_N is None or self.prior_gradient_NK is None:
            return
        by_log_p_nV = tokens.by_log_p(span, log_p_nV.shape[1], tokens.target_weight_N)
        by_normalizer_nK = tokens.by_log_normalizer(span, block.log_normalizer_nK)
        unused_n1 = tokens.unused_N[span].unsqueeze(-1)
        prior_gradient_nK = block.gradient(by_log_p_nV, by_normalizer_nK, unused_n1, out_RV)
        self.prior_gradient_NK[span] = prior_gradient_nK.masked_fill_(unused_n1, 0.0)
