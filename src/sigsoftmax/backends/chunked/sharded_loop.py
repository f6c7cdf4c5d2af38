"""The chunk loop where the classes are spread over processes.

Each process runs the loop over its own classes. After the rows of a chunk are measured the processes exchange a few
numbers a row (``shards``); the coefficients of the loss follow from the whole row, as in ``chunks``, and each process
writes the gradient of its own classes. The product of a backend's own probabilities f and this process's share of the
row is the probability among all classes, so backends do not know that there are other classes.

Shapes: N tokens, K components, V classes of this process; R = n K rows of the n tokens of a chunk or block.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sigsoftmax.backends.chunked.loop import LossLoop, Rows, TokenLosses, concatenate
from sigsoftmax.backends.chunked.mixture import MixtureBlock
from sigsoftmax.backends.chunked.providers import LinearLogits, Source
from sigsoftmax.backends.chunked.sharded_rows import Combined, Combiner, Measured, for_gradient
from sigsoftmax.backends.chunked.vocabulary_blocks import ClassWalk
from sigsoftmax.contract.rows import FusedRowRoutines, RowCoefficients, RowStats
from sigsoftmax.contract.shard import Shard
from sigsoftmax.contract.spec import LossSpec
from sigsoftmax.contract.tokens import TokenBatch, entropy, scaled

Block = tuple[slice, slice, Tensor]
"""tokens, rows within the chunk, logits"""


class ShardedLossLoop(LossLoop):
    """One loss over all rows of a source that holds a part of the classes.

    ``target`` and ``class_weight_V`` are those of all classes; probability targets are those of the source's.
    """

    def __init__(
        self, shard: Shard, source: Source, rows: Rows, spec: LossSpec, batch: TokenBatch, scale_N: Tensor | None
    ) -> None:
        super().__init__(source, rows, spec, batch, scale_N, num_classes=shard.num_classes)
        assert isinstance(source, LinearLogits), "logits that a caller holds are not spread over processes"
        self.linear = source
        self.shard = shard
        self.combiner = Combiner(shard, rows.form, rows.arguments, self.numbers)
        self.owner_N = self.owned_N = self.owned_weight_N = None
        tokens = self.tokens
        if tokens.index_N is not None and tokens.target_weight_N is not None:
            self.owner_N = shard.owner(tokens.index_N)
            self.owned_N = self.owner_N == shard.rank
            zeros_N = torch.zeros_like(tokens.index_N)
            tokens.index_N = torch.where(self.owned_N, tokens.index_N - shard.classes.start, zeros_N)
            self.owned_weight_N = torch.where(
                self.owned_N, tokens.target_weight_N, torch.zeros_like(tokens.target_weight_N)
            )
        if tokens.class_weight_V is not None:
            tokens.class_weight_V = shard.own(tokens.class_weight_V)
        if tokens.smoothing_V is not None:
            tokens.smoothing_V = shard.own(tokens.smoothing_V)

    def run(self) -> TokenLosses:
        wants_gradient = self.tokens.scale_N is not None
        if wants_gradient and self.linear.walks_classes:
            if isinstance(self.routines, FusedRowRoutines) and self.tokens.probabilities_NV is None:
                self._walk_classes(self.linear, self.routines)
                return self._results()
            self.linear.walks_classes = False
        compute = self._dense_mixture_chunk if self.tokens.mixes_every_class else self._chunk
        for first_token, chunk_RV in self.linear.chunks():
            compute(self._blocks(first_token, chunk_RV), wants_gradient)
            if wants_gradient:
                self.linear.backpropagate()
        return self._results()

    def _blocks(self, first_token: int, chunk_RV: Tensor) -> list[Block]:
        components = self.source.components
        tokens = chunk_RV.shape[0] // components
        most = self.routines.max_rows
        step = max(1, tokens if most is None else most // components)
        blocks = []
        for begin in range(0, tokens, step):
            end = min(begin + step, tokens)
            rows = slice(begin * components, end * components)
            blocks.append((slice(first_token + begin, first_token + end), rows, chunk_RV[rows]))
        return blocks

    # A plain row, or a mixture that only needs its rows at the target.

    def _chunk(self, blocks: Sequence[Block], wants_gradient: bool) -> None:
        measured = [self._measure_own(span, logits_RV) for span, _, logits_RV in blocks]
        span = slice(blocks[0][0].start, blocks[-1][0].stop)
        combined, by_log_f_nK = self._combine(span, measured)
        if not wants_gradient:
            return
        coefficients = self._own_coefficients(span, combined, by_log_f_nK)
        for block, rows, logits_RV in blocks:
            # A backend writes the gradient of what it measured last.
            stats = measured[0].stats if len(blocks) == 1 else self._measure_own(block, logits_RV, extras=False).stats
            index_R, dense = self._row_index(block), self.tokens.dense_weights(block)
            of_block = RowCoefficients(
                coefficients.normalizer[rows], *(None if c is None else c[rows] for c in coefficients[1:])
            )
            out_RV = self.linear.gradient_rows(rows.start, logits_RV)
            self.routines.gradient(logits_RV, for_gradient(stats), of_block, index_R, dense, out_RV)

    def _walk_classes(self, source: LinearLogits, routines: FusedRowRoutines) -> None:
        """Measure all rows first, then compute the gradient a range of classes at a time; one exchange for all."""
        blocks = source.blocks(None, backpropagate=False)
        measured = [self._measure_own(span, logits_RV) for span, _, logits_RV in blocks]
        if not measured:
            return
        everything = slice(0, source.num_tokens)
        combined, by_log_f_nK = self._combine(everything, measured)
        coefficients = self._own_coefficients(everything, combined, by_log_f_nK)._replace(unused=None)
        stats = for_gradient(concatenate(RowStats, [own.stats for own in measured]))
        index_R, dense = self._row_index(everything), self.tokens.smoothing_V
        for first_class, logits_RV, out_RV in ClassWalk(source).gradients():
            routines.gradient_of_classes(logits_RV, stats, coefficients, index_R, dense, first_class, out_RV)

    def _measure_own(self, span: slice, logits_RV: Tensor, *, extras: bool = True) -> Measured:
        """Rows of this process's classes, with the target's part of those that have it here."""
        argmax = best = mass = None
        if extras and self.wants_argmax:
            argmax = self.routines.stats(logits_RV, None, None, True, False).argmax
            best = self.routines.stats(logits_RV, argmax, None, False, False).target
        dense = self.tokens.dense_weights(span)
        stats = self.routines.stats(
            logits_RV, self._row_index(span), dense, False, extras and self.wants_entropy
        )._replace(argmax=argmax)
        if dense is not None:
            mass = dense.sum(-1).expand_as(stats.normalizer)
        return Measured(stats, mass, best)

    def _combine(self, span: slice, measured: Sequence[Measured]) -> tuple[Combined, Tensor | None]:
        """Rows of all classes, collected for the losses; and what the gradient of a mixture needs."""
        every_stats, masses, bests = zip(*measured, strict=True)
        own = Measured(
            concatenate(RowStats, every_stats),
            None if masses[0] is None else torch.cat(masses),
            None if bests[0] is None else torch.cat(bests),
        )
        combined = self.combiner.combine(own, self._of_rows(self.owner_N, span))
        self._collect_stats(combined.stats, combined.mass if self.tokens.probabilities_NV is not None else None)
        return combined, self._collect_mixture(span, combined.stats)

    def _own_coefficients(self, span: slice, combined: Combined, by_log_f_nK: Tensor | None) -> RowCoefficients:
        whole = self._coefficients(span, combined.stats, combined.mass, by_log_f_nK)
        by_target = whole.target
        if by_target is not None and self.owned_N is not None:
            owned_R = self._of_rows(self.owned_N, span)
            assert owned_R is not None
            by_target = torch.where(owned_R, by_target, torch.zeros_like(by_target))
        return whole._replace(normalizer=scaled(combined.share, whole.normalizer), target=by_target)

    def _of_rows(self, tokens_N: Tensor | None, span: slice) -> Tensor | None:
        """A number per token as one per row."""
        if tokens_N is None or self.source.components == 1:
            return None if tokens_N is None else tokens_N[span]
        return tokens_N[span].repeat_interleave(self.source.components)

    # A mixture whose loss or extras need the mixed probability of every class.

    def _dense_mixture_chunk(self, blocks: Sequence[Block], wants_gradient: bool) -> None:
        """Three rounds over the chunk: normalisers, sums over classes, the gradient."""
        no_target = [self.dense_routines.stats(logits_RV, None, None, False, False) for _, _, logits_RV in blocks]
        combined = self.combiner.combine(Measured(concatenate(RowStats, no_target), None, None), None)
        normalizer_R = combined.stats.normalizer - combined.gap
        components = self.source.components
        log_normalizer_nK = (combined.stats.normalizer + combined.stats.offset).view(-1, components)
        self._collect(log_normalizer=log_normalizer_nK)

        def mixed(block: Block) -> MixtureBlock:
            span, rows, logits_RV = block
            assert self.tokens.log_prior_NK is not None
            prior_nK = self.tokens.log_prior_NK[span]
            return MixtureBlock(self.dense_routines, logits_RV, prior_nK, self.tokens.spec.floor, normalizer_R[rows])

        only = mixed(blocks[0]) if len(blocks) == 1 else None
        sums = [self._sums_over_classes(only or mixed(block), block[0], wants_gradient) for block in blocks]
        parts_Cn, best_n, argmax_n = (torch.cat(pieces, -1) for pieces in zip(*sums, strict=True))
        if self.shard.is_empty:
            parts_Cn = torch.zeros_like(parts_Cn)
        losses_n, *others = self.shard.sum(parts_Cn)
        self._collect(losses=losses_n)
        if self.wants_argmax:
            self._collect(argmax=self.combiner.likeliest(self.shard.gather(best_n), argmax_n))
        if self.wants_entropy:
            self._collect(entropy=others.pop(0))
        if not wants_gradient:
            return
        assert self.prior_gradient_NK is not None and self.tokens.unused_N is not None
        by_log_prior_nK = torch.stack(others, -1)
        chunk_span = slice(blocks[0][0].start, blocks[-1][0].stop)
        unused_n1 = self.tokens.unused_N[chunk_span].unsqueeze(-1)
        self.prior_gradient_NK[chunk_span] = by_log_prior_nK.masked_fill(unused_n1, 0.0)
        by_normalizer_nK = self.tokens.by_log_normalizer(chunk_span, log_normalizer_nK)
        for block in blocks:
            span, rows, logits_RV = block
            tokens = slice(rows.start // components, rows.stop // components)
            mixture = only or mixed(block)
            mixture.backpropagate(
                mixture.by_log_f(self._by_log_p(span)),
                by_log_prior_nK[tokens],
                None if by_normalizer_nK is None else by_normalizer_nK[tokens],
                unused_n1[tokens],
                self.linear.gradient_rows(rows.start, logits_RV),
            )

    def _sums_over_classes(
        self, mixture: MixtureBlock, span: slice, wants_gradient: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """This process's part of losses, entropies and dL/dlog prior, (C, n); log P of its best class, and which."""
        log_p_nV = mixture.log_p_nV
        parts = [self.tokens.losses_of_every_class(span, log_p_nV, self.owned_N)]
        if self.wants_entropy:
            parts.append(entropy(log_p_nV))
        if wants_gradient:
            parts += mixture.by_log_f(self._by_log_p(span)).sum(-1).unbind(-1)
        best_n, argmax_n = log_p_nV.max(-1)
        return torch.stack(parts), best_n, argmax_n

    def _by_log_p(self, span: slice) -> Tensor:
        return self.tokens.by_log_p(span, self.source.num_classes, self.owned_weight_N)
