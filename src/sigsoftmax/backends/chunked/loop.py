"""The chunk loop above the backends: losses and their gradients without an N x V tensor.

Logits come from a provider, a chunk at a time. The statistics of each block of rows are computed, the coefficients of
the loss follow from a few numbers per row (``contract.tokens``), and the gradient overwrites the block. A plain output
layer is a mixture of one component: K = 1 and no prior. Where the classes are spread over processes, each runs the loop
over its own classes, and the processes exchange the statistics of a chunk before its gradient is written
(``sharded_statistics``).

Shapes: N tokens, K components, V classes, d width; R = n K rows of the n tokens of a block or chunk.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sigsoftmax.backends.chunked.form_rows import FormRows
from sigsoftmax.backends.chunked.logits import Block, LinearLogits, LogitsProvider
from sigsoftmax.backends.chunked.mixture import MixtureBlock
from sigsoftmax.backends.chunked.sharded_statistics import (
    Combined,
    Reduced,
    WholeRows,
    concatenated,
    per_row,
)
from sigsoftmax.backends.chunked.vocabulary_blocks import VocabularyBlocks
from sigsoftmax.contract.rows import FusedRowRoutines, Logarithms, RowCoefficients, RowRoutines, RowStats, RowTargets
from sigsoftmax.contract.tokens import TokenArithmetic, entropy


class TokenLosses(NamedTuple):
    """Per token: its loss before token weights, and the extras (None where not asked for)."""

    losses_N: Tensor
    log_normalizer_NK: Tensor
    argmax_N: Tensor | None
    entropy_N: Tensor | None


class LossLoop:
    """One loss over all rows of a provider, with gradients if ``tokens`` has scales; ``run`` does the work.

    Blocks are many and small, so whatever can be computed for all tokens at once is computed before or after them.
    """

    def __init__(
        self, provider: LogitsProvider, routines: RowRoutines, tokens: TokenArithmetic, rows: WholeRows
    ) -> None:
        self.provider, self.routines, self.tokens, self.rows = provider, routines, tokens, rows
        self.wants_argmax, self.wants_entropy = (name in tokens.wants for name in ("argmax", "entropy"))
        self.wants_gradient = tokens.scale_N is not None
        self.prior_gradient_NK: Tensor | None = None
        if self.wants_gradient and tokens.log_prior_NK is not None:
            self.prior_gradient_NK = tokens.numbers.new_empty(provider.num_tokens, provider.components)
        self.collected: dict[str, list[Tensor]] = {}

    def run(self) -> TokenLosses:
        provider, routines = self.provider, self.routines
        knows_coefficients = not self.tokens.waits_for_rows and not self.rows.is_sharded
        if self.wants_gradient and isinstance(provider, LinearLogits) and provider.tiles_vocabulary:
            if isinstance(routines, FusedRowRoutines) and self.tokens.probabilities_NV is None:
                self._vocabulary_tiled(provider, routines)
                return self._results()
            provider.tiles_vocabulary = False
        compute = self._rows
        if self.tokens.mixes_every_class:
            compute = self._mixed_rows
        elif self.wants_gradient and isinstance(routines, FusedRowRoutines) and knows_coefficients:
            compute = self._fused_rows
        for blocks in provider.blocks(routines.max_rows):
            # Processes exchange the statistics of a whole chunk.
            for unit in [blocks] if self.rows.is_sharded else [[block] for block in blocks]:
                compute(unit)
            if self.wants_gradient:
                provider.backpropagate()
        return self._results()

    def _results(self) -> TokenLosses:
        if "log_normalizer" in self.collected:
            normalizer_NK = self._all("log_normalizer")
        else:
            normalizer_NK = (self._all("normalizer") + self._all("offset")).view(-1, self.provider.components)
        if "losses" in self.collected or not self.provider.num_tokens:
            losses_N = self._all("losses")
        else:
            sums = (self._all(name) if name in self.collected else None for name in ("target", "dense", "mass"))
            losses_N = self.tokens.plain_losses(self._all("normalizer"), *sums)
        argmax_N = self._all("argmax", torch.int64) if self.wants_argmax else None
        entropy_N = self._all("entropy") if self.wants_entropy else None
        return TokenLosses(self.tokens.finished(losses_N, normalizer_NK), normalizer_NK, argmax_N, entropy_N)

    def _collect(self, **values: Tensor | None) -> None:
        for name, value in values.items():
            if value is not None:
                self.collected.setdefault(name, []).append(value)

    def _all(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """The values collected under a name, for all rows; empty if there are none."""
        pieces = self.collected.get(name, [])
        return torch.cat(pieces) if pieces else self.tokens.numbers.new_empty(0, dtype=dtype)

    # A plain row, or a mixture that only needs its rows at the target.

    def _fused_rows(self, blocks: Sequence[Block]) -> None:
        """Statistics and gradient at once."""
        (block,) = blocks
        span, targets = block.tokens, self._targets(block.tokens)
        assert isinstance(self.routines, FusedRowRoutines)
        mass = None if targets.dense is None or targets.dense.ndim == 1 else targets.dense.sum(-1)
        coefficients = self.tokens.coefficients(span, None, mass, None)
        out_RV = self.provider.gradient_rows(block.rows, block.logits_RV)
        z_slope_n = self.tokens.z_slopes(span)
        stats = self.routines.stats_and_gradient(block.logits_RV, targets, coefficients, z_slope_n, out_RV)
        self._collect_stats(stats, mass)

    def _rows(self, blocks: Sequence[Block]) -> None:
        only = self._targets(blocks[0].tokens) if len(blocks) == 1 else None
        own = [self._reduced(block, only) for block in blocks]
        span = slice(blocks[0].tokens.start, blocks[-1].tokens.stop)
        combined, by_log_f_nK = self._combined(span, own)
        if not self.wants_gradient:
            return
        whole = self._coefficients(span, combined, by_log_f_nK)
        for block in blocks:
            targets, stats, coefficients = only, own[0].stats, whole
            if targets is None:
                # A backend writes the gradient of the rows whose statistics it computed last.
                targets = self._targets(block.tokens)._replace(argmax=False, entropy=False)
                stats = self.routines.stats(block.logits_RV, targets)
                parts: list[Any] = [None if part is None else part[block.rows] for part in whole]
                coefficients = RowCoefficients(*parts)
            out_RV = self.provider.gradient_rows(block.rows, block.logits_RV)
            self.routines.gradient(block.logits_RV, targets, self.rows.for_gradient(stats), coefficients, out_RV)

    def _vocabulary_tiled(self, provider: LinearLogits, routines: FusedRowRoutines) -> None:
        """The statistics of all rows first, then the gradient a block of the vocabulary at a time."""
        own = [self._reduced(block) for blocks in provider.blocks(None) for block in blocks]
        if not own:
            return
        everything = slice(0, provider.num_tokens)
        combined, by_log_f_NK = self._combined(everything, own)
        # Routines that take blocks of the vocabulary know unused rows by their coefficients.
        coefficients = self._coefficients(everything, combined, by_log_f_NK)._replace(unused=None)
        stats = self.rows.for_gradient(concatenated([part.stats for part in own]))
        targets = self._targets(everything)
        for first_class, logits_RV, out_RV in VocabularyBlocks(provider).backward():
            block = targets._replace(first_class=first_class)
            routines.gradient(logits_RV, block, stats, coefficients, out_RV)

    def _targets(self, span: slice) -> RowTargets:
        index_R = per_row(self.tokens.index_N, span, self.provider.components)
        return RowTargets(index_R, self.tokens.dense_weights(span), self.wants_argmax, self.wants_entropy)

    def _reduced(self, block: Block, targets: RowTargets | None = None) -> Reduced:
        return self.rows.reduce(self.routines, block.logits_RV, targets or self._targets(block.tokens))

    def _combined(self, span: slice, own: Sequence[Reduced]) -> tuple[Combined, Tensor | None]:
        """Statistics of whole rows, collected for the losses; and what the gradient of a mixture needs."""
        combined = self.rows.combine(concatenated(own), span)
        stats = combined.stats
        self._collect_stats(stats, combined.mass if self.tokens.probabilities_NV is not None else None)
        if self.tokens.log_prior_NK is None:
            return combined, None
        # The losses of a mixture are known at once.
        losses, by_log_f_nK = self.tokens.mixture_losses(span, stats)
        self._collect(losses=losses)
        return combined, by_log_f_nK

    def _collect_stats(self, stats: RowStats, mass: Tensor | None) -> None:
        self._collect(offset=stats.offset, normalizer=stats.normalizer, argmax=stats.argmax, entropy=stats.entropy)
        if self.tokens.log_prior_NK is None:
            self._collect(target=stats.target, dense=stats.dense, mass=mass)

    def _coefficients(self, span: slice, combined: Combined, by_log_f_nK: Tensor | None) -> RowCoefficients:
        whole = self.tokens.coefficients(span, combined.stats, combined.mass, by_log_f_nK)
        if by_log_f_nK is not None and self.prior_gradient_NK is not None and whole.target is not None:
            self.prior_gradient_NK[span] = whole.target.view_as(by_log_f_nK)
        return self.rows.own_coefficients(whole, combined, span)

    # A mixture whose loss or extras need the mixed probability of every class.

    def _mixed_rows(self, blocks: Sequence[Block]) -> None:
        """Pass over the blocks up to three times, for normalisers of whole rows, sums over classes and the gradient."""
        combined = self.rows.normalizers(self.routines, blocks)
        normalizer_R = None if combined is None or combined.gap is None else combined.stats.normalizer - combined.gap
        only = [self._mixed(blocks[0], normalizer_R)] if len(blocks) == 1 else None

        def mixed() -> Iterable[tuple[MixtureBlock, Tensor | None]]:
            return only or (self._mixed(block, normalizer_R) for block in blocks)

        sums = [self._sums_over_classes(*m, block.tokens) for m, block in zip(mixed(), blocks, strict=True)]
        if combined is None:
            assert only is not None
            log_normalizer_nK = only[0][0].log_normalizer_nK
        else:
            log_normalizer_R = combined.stats.normalizer + combined.stats.offset
            log_normalizer_nK = log_normalizer_R.view(-1, self.provider.components)
        parts, best, argmax = (None if p[0] is None else torch.cat(p, -1) for p in zip(*sums, strict=True))
        assert parts is not None
        (losses_n, *others), argmax_n = self.rows.over_classes(parts, best, argmax)
        entropy_n = others.pop(0) if self.wants_entropy else None
        self._collect(log_normalizer=log_normalizer_nK, losses=losses_n, argmax=argmax_n, entropy=entropy_n)
        if self.wants_gradient:
            self._write_mixed_gradient(blocks, mixed(), torch.stack(others, -1), log_normalizer_nK)

    def _mixed(self, block: Block, normalizer_R: Tensor | None) -> tuple[MixtureBlock, Tensor | None]:
        """The mixture of a block, and the gradient of its log f if that is wanted."""
        tokens, routines = self.tokens, self.routines
        assert tokens.log_prior_NK is not None and isinstance(routines, FormRows)
        normalizer_R = None if normalizer_R is None else normalizer_R[block.rows]
        log_prior = Logarithms(tokens.log_prior_NK[block.tokens], tokens.unit)
        mixture = MixtureBlock(routines, block.logits_RV, log_prior, tokens.spec.floor, normalizer_R)
        if not self.wants_gradient:
            return mixture, None
        by_log_p_nV = tokens.by_log_p(block.tokens, self.provider.num_classes, self.rows.owned_weight_N)
        return mixture, mixture.by_log_f(by_log_p_nV)

    def _sums_over_classes(
        self, mixture: MixtureBlock, by_log_f_nKV: Tensor | None, span: slice
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """This process's part of losses, entropies and dL/dlog prior, (C, n); log P of its best class, and which."""
        log_p_nV = mixture.log_p.multiples
        parts = [self.tokens.losses_of_every_class(span, log_p_nV, self.rows.owned_N)]
        if self.wants_entropy:
            parts.append(entropy(mixture.log_p.values))
        if by_log_f_nKV is not None:
            parts += by_log_f_nKV.sum(-1).unbind(-1)
        return torch.stack(parts), *(log_p_nV.max(-1) if self.wants_argmax else (None, None))

    def _write_mixed_gradient(
        self,
        blocks: Sequence[Block],
        mixed: Iterable[tuple[MixtureBlock, Tensor | None]],
        by_log_prior_nK: Tensor,
        log_normalizer_nK: Tensor,
    ) -> None:
        tokens, first = self.tokens, blocks[0].tokens.start
        assert self.prior_gradient_NK is not None and tokens.unused_N is not None
        span = slice(first, blocks[-1].tokens.stop)
        unused_n1 = tokens.unused_N[span].unsqueeze(-1)
        self.prior_gradient_NK[span] = by_log_prior_nK.masked_fill(unused_n1, 0.0)
        by_normalizer_nK = tokens.by_log_normalizer(span, log_normalizer_nK)
        minus_nK = by_log_prior_nK if by_normalizer_nK is None else by_log_prior_nK - by_normalizer_nK
        for block, (mixture, by_log_f_nKV) in zip(blocks, mixed, strict=True):
            part = slice(block.tokens.start - first, block.tokens.stop - first)
            assert by_log_f_nKV is not None
            out_RV = self.provider.gradient_rows(block.rows, block.logits_RV)
            mixture.backpropagate(by_log_f_nKV, minus_nK[part], unused_n1[part], out_RV)
