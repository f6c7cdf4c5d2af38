"""Bounds on the numerical rank of a log-output matrix that is too large for its spectrum.

From below: the singular values of a block of rows and columns do not exceed those of the whole matrix, one by one. So
the block's values above the whole matrix's absolute threshold are no more than the rank. The threshold is relative to
sigma_max of the whole, for which any upper bound will do; the Frobenius norm is one. Entries that are computed here are
rounded: some contexts are computed with more precision as well, and what they differ by raises norm and threshold.

From above: what theory knows, see rank_theory.

Shapes: M words, T contexts, R contexts and C words of the block, K components, d features.
"""

from __future__ import annotations

import dataclasses
import math
import time

import torch
from torch import Tensor

from sigsoftmax.analysis.log_outputs import OutputHead
from sigsoftmax.analysis.progress import OnProgress, Progress
from sigsoftmax.analysis.spectrum.blocked_qr import singular_values, svd_error
from sigsoftmax.analysis.spectrum.entry_checks import SIXTEEN_BITS, EntryChecks
from sigsoftmax.analysis.spectrum.gram import gram_error, squared_singular_values
from sigsoftmax.analysis.spectrum.matrix_readers import MatrixSource, tensors
from sigsoftmax.analysis.spectrum.rank_theory import linear_reason, upper_bound
from sigsoftmax.family.heads import Head
from sigsoftmax.records.schemas.spectra import RULES, RankBounds

__all__ = ["matrix_rank_bounds", "rank_bounds"]

BLOCK_CONTEXTS, BLOCK_WORDS = 2, 8
"""sides of the block, in units of d + 2: more words raise every singular value, and cost less than more contexts"""
LEAST_BLOCK = 256
NORM_FLOPS = 5e12
"""what the rows of full length may cost by default: half a minute on two cores"""
ROUNDING_SHARE = 0.25
"""of the threshold that rounding may take before float64, which takes twice as long, is worth it"""
COMPARED_CONTEXTS = 32
"""computed in float32 and float64, to see what rounding does to this head"""
ENTRY_MARGIN = 2.0
"""An entry may be off by so much more than those that were compared. Errors are taken to be of this size everywhere and
of the worst signs; those of independent signs make a matrix of a norm that is smaller by sqrt(R C) / (sqrt R + sqrt C).
"""
SINGLE_MARGIN, DOUBLE_MARGIN = 1e-4, 1e-9
"""relative, by the dtype of the entries; far above the rounding of a sum of squares"""


def rank_bounds(
    head: OutputHead,
    *,
    rule: str = "press32",
    block_contexts: int | None = None,
    block_words: int | None = None,
    norm_contexts: int | None = None,
    seed: int = 0,
    source: str | None = None,
    progress: OnProgress | None = None,
) -> RankBounds:
    """Bounds on the rank of a head's log-output matrix over all its contexts, from the head's tensors alone.

    The rows of ``norm_contexts`` contexts, drawn at random, are computed over all words; the block is cut out of them.
    Their norms enter the bound on sigma_max as they are. Further contexts enter with what Cauchy and Schwarz allow,
    which is much more. By default as many are computed as take half a minute on two cores. The arithmetic is float32
    where its rounding, which is measured, is far below the threshold, and else float64.
    """
    began = time.perf_counter()
    _check_rule(rule)
    parsed, words, contexts = head.parsed_head, head.words, head.contexts
    rows, columns = _block_size(block_contexts, block_words, head.width, contexts, words)
    affordable = int(NORM_FLOPS / (2.0 * parsed.components * words * head.width))
    computed = min(contexts, max(rows, affordable if norm_contexts is None else norm_contexts))

    generator = torch.Generator().manual_seed(seed)
    order_T = torch.randperm(contexts, generator=generator)
    computed_T = order_T[:computed].sort().values
    dtype, entry_error = _arithmetic(head, computed_T, (rows, columns), rule)
    block = _cut_block(
        head.source(None if computed == contexts else computed_T, dtype=dtype, quick=True),
        _drawn(rows, computed, generator),
        _drawn(columns, words, generator),
        began,
        progress,
        # They are normalised by construction.
        EntryChecks(log_probs=False),
    )
    squares = block.sum_of_squares + _bounded_squares(head, order_T[computed:])
    upper, reason = upper_bound(head)
    claim = _Claim(
        norm_bound=math.sqrt(squares) + entry_error * math.sqrt(computed * words),
        rounding=entry_error * math.sqrt(block.values_RC.numel()),
        rule=rule,
        upper=upper,
        upper_reason=reason,
        source=source or f"log-probabilities of a {parsed} head, d = {head.width}",
        head=str(parsed),
        width=head.width,
        words=words,
        contexts=contexts,
        norm_contexts=computed,
        seed=seed,
    )
    return claim.bounds(block, began)


def matrix_rank_bounds(
    source: MatrixSource,
    *,
    contexts: int | None = None,
    head: Head | str | None = None,
    width: int | None = None,
    has_bias: bool = True,
    rule: str = "press32",
    block_contexts: int | None = None,
    block_words: int | None = None,
    log_probs: bool = True,
    seed: int = 0,
    progress: OnProgress | None = None,
) -> RankBounds:
    """Bounds on the rank of a matrix of log-probabilities, read once. ``head`` and ``width`` give the upper bound.

    The number of contexts must be known, since the rows of the block are drawn before the matrix is read.
    """
    began = time.perf_counter()
    _check_rule(rule)
    contexts = contexts or source.contexts
    if contexts is None or source.words is None:
        raise ValueError("expected a source that knows how many contexts and words it has; give both to from_blocks")
    parsed = None if head is None else Head.parse(head)
    rows, columns = _block_size(block_contexts, block_words, width or LEAST_BLOCK, contexts, source.words)
    generator = torch.Generator().manual_seed(seed)
    block = _cut_block(
        source,
        _drawn(rows, contexts, generator),
        _drawn(columns, source.words, generator),
        began,
        progress,
        EntryChecks(log_probs=log_probs),
    )
    if block.contexts != contexts:
        raise ValueError(f"{source.description} ended after {block.contexts} contexts, expected {contexts}")
    upper, reason = min(contexts, source.words), "the smaller side of the matrix"
    if parsed is not None and parsed.is_softmax and width is not None and width + 1 + has_bias < upper:
        upper, reason = width + 1 + has_bias, linear_reason(has_bias)
    claim = _Claim(
        norm_bound=math.sqrt(block.sum_of_squares),
        # The entries are the matrix, whatever they were computed from.
        rounding=0.0,
        rule=rule,
        upper=upper,
        upper_reason=reason,
        source=source.description,
        head="" if parsed is None else str(parsed),
        width=width,
        words=source.words,
        contexts=contexts,
        norm_contexts=contexts,
        seed=seed,
    )
    return claim.bounds(block, began)


def _arithmetic(head: OutputHead, contexts_T: Tensor, block: tuple[int, int], rule: str) -> tuple[torch.dtype, float]:
    """The dtype to compute the given contexts in, and how far an entry may be off then.

    float32 where its rounding is far below the threshold. That depends on how large logits are beside their
    differences; the longest hidden vectors have the largest, and are computed both ways.
    """
    length_T = head.hidden.detach()[contexts_T.to(head.hidden.device)].flatten(1).float().norm(dim=1).cpu()
    compared_T = contexts_T[length_T.topk(min(COMPARED_CONTEXTS, len(contexts_T))).indices]
    exact_SM, rounded_SM = (
        torch.cat(list(tensors(head.source(compared_T, dtype=dtype, quick=True), 0)))
        for dtype in (torch.float64, torch.float32)
    )
    # Entries that happen to be numbers of float32 show no difference, and others are rounded all the same.
    eps32, eps64 = (torch.finfo(dtype).eps for dtype in (torch.float32, torch.float64))
    error = ENTRY_MARGIN * max(float((exact_SM - rounded_SM).abs().max()), eps32 * float(exact_SM.abs().max()))
    if not math.isfinite(error):
        raise ValueError("the logits overflow float32, and log-probabilities of such logits say little; scale H or W")
    norm = float(exact_SM.norm()) * math.sqrt(head.contexts / len(compared_T))
    allowed = ROUNDING_SHARE * RULES[rule].relative(head.words, head.contexts) * norm
    if error * math.sqrt(block[0] * block[1]) <= allowed:
        return torch.float32, error
    return torch.float64, error * eps64 / eps32


@dataclasses.dataclass(frozen=True)
class _Block:
    values_RC: Tensor
    sum_of_squares: float
    """of all entries of the rows that were read, and a little more"""
    contexts: int


def _cut_block(
    source: MatrixSource,
    rows_R: Tensor,
    columns_C: Tensor,
    began: float,
    progress: OnProgress | None,
    checks: EntryChecks,
) -> _Block:
    """Read all rows once: the sum of squares of all entries, and the entries of some rows and columns."""
    values_RC: Tensor | None = None
    squares, done, taken, single = 0.0, 0, 0, False
    for number, block_BM in enumerate(tensors(source, 0), start=1):
        checks.check(block_BM, done)
        values_BM = block_BM.float() if block_BM.dtype in SIXTEEN_BITS else block_BM
        squares += float(torch.linalg.vector_norm(values_BM, dim=1).to(torch.float64).square().sum())
        single |= values_BM.dtype == torch.float32
        inside = rows_R[(rows_R >= done) & (rows_R < done + len(block_BM))] - done
        if len(inside):
            chosen = block_BM.index_select(1, columns_C.to(block_BM.device))
            if values_RC is None:
                values_RC = chosen.new_empty(len(rows_R), len(columns_C), dtype=torch.float64)
            values_RC[taken : taken + len(inside)] = chosen.index_select(0, inside.to(block_BM.device))
            taken += len(inside)
        done += len(block_BM)
        if progress is not None:
            seconds = time.perf_counter() - began
            left = None if source.contexts is None else seconds / done * (source.contexts - done)
            progress(
                Progress(
                    phase="norm and block",
                    blocks=number,
                    total_blocks=None,
                    contexts=done,
                    total_contexts=source.contexts,
                    seconds=seconds,
                    seconds_left=left,
                )
            )
    if values_RC is None:
        raise ValueError(f"expected at least one context, got none; {source.description} is empty")
    return _Block(values_RC[:taken], squares * (1.0 + (SINGLE_MARGIN if single else DOUBLE_MARGIN)), done)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Claim:
    """What is bounded, and what is known of it; the fields are those of RankBounds."""

    source: str
    head: str
    width: int | None
    words: int
    contexts: int
    rule: str
    upper: int
    upper_reason: str
    norm_bound: float
    norm_contexts: int
    seed: int
    rounding: float
    """bound on the norm of what the block's entries are off by"""

    def bounds(self, block: _Block, began: float) -> RankBounds:
        threshold = RULES[self.rule].relative(self.words, self.contexts) * self.norm_bound
        values, lower = _count(block.values_RC, threshold + self.rounding)
        if lower > self.upper:
            raise ValueError(
                f"the block has {lower} singular values above {threshold + self.rounding:.3g}, more than the "
                f"{self.upper} that theory allows ({self.upper_reason}): the matrix is not what it was said to be, "
                "check head, width and bias"
            )
        return RankBounds(
            source=self.source,
            head=self.head,
            width=self.width,
            words=self.words,
            contexts=self.contexts,
            lower=lower,
            upper=self.upper,
            upper_reason=self.upper_reason,
            rule=self.rule,
            norm_bound=self.norm_bound,
            norm_contexts=self.norm_contexts,
            threshold_bound=threshold,
            counting_threshold=threshold + self.rounding,
            block_contexts=block.values_RC.shape[0],
            block_words=block.values_RC.shape[1],
            block_singular_values=tuple(values.tolist()),
            seed=self.seed,
            seconds=time.perf_counter() - began,
        )


def _count(block_RC: Tensor, threshold: float) -> tuple[Tensor, int]:
    """The singular values, and how many exceed the threshold by more than their error."""
    rows, columns = block_RC.shape
    squared = squared_singular_values([block_RC])
    error = gram_error(squared, rows, columns)
    if threshold >= 2.0 * math.sqrt(error):
        return squared.clamp(min=0.0).sqrt(), int((squared - error > threshold**2).sum())
    values = singular_values(block_RC)
    return values, int((values - svd_error(float(values[0]), rows, columns) > threshold).sum())


# --- bounds on the norm ---------------------------------------------------------------------------------------------


def _bounded_squares(head: OutputHead, contexts_T: Tensor) -> float:
    """An upper bound on the sum of squares of the log-probabilities in the given contexts.

    With every logit of a context in [low, high] and phi not decreasing, each probability is at least
    exp(phi(low) - phi(high)) / M. Logits are within |h| max_j |w_j - mean w| of those of the mean word.
    """
    if not len(contexts_T):
        return 0.0
    member, words = head.parsed_head.function, head.words
    if not member.is_increasing:
        raise ValueError(
            f"nothing is known of the size of log-probabilities of {head.parsed_head} without computing them; ask for "
            f"norm_contexts={head.contexts}, or give fewer contexts"
        )
    weight_Md = head.weight_Md.detach()
    mean_d = sum(part.to(torch.float64).sum(0) for part in weight_Md.split(2**14)) / words
    radius = max(float((part.to(torch.float64) - mean_d).norm(dim=1).max()) for part in weight_Md.split(2**14))
    bias_M = torch.zeros(1) if head.bias_M is None else head.bias_M.detach().to(torch.float64)
    bias_mean = float(bias_M.mean())
    bias_radius = float((bias_M - bias_mean).abs().max())
    total = 0.0
    for part in contexts_T.split(2**14):
        hidden = head.hidden[part.to(head.hidden.device)].detach().to(mean_d.device, torch.float64)
        middle = hidden @ mean_d + bias_mean
        reach = hidden.norm(dim=-1) * radius + bias_radius
        span = member.phi(middle + reach) - member.phi(middle - reach)
        # A mixture's log-probability lies among those of its components.
        most = math.log(words) + head.floor + (span.amax(1) if span.ndim == 2 else span)
        total += words * float(most.square().sum())
    return total * (1.0 + DOUBLE_MARGIN)


# --- the border -----------------------------------------------------------------------------------------------------


def _check_rule(rule: str) -> None:
    if rule not in RULES:
        raise ValueError(f"unknown rule {rule!r} for a rank; the known ones are {', '.join(RULES)}")


def _block_size(rows: int | None, columns: int | None, width: int, contexts: int, words: int) -> tuple[int, int]:
    least_rows, least_columns = (max(LEAST_BLOCK, times * (width + 2)) for times in (BLOCK_CONTEXTS, BLOCK_WORDS))
    for name, asked in (("block_contexts", rows), ("block_words", columns)):
        if asked is not None and asked < 1:
            raise ValueError(f"{name} must be at least 1, got {asked}")
    return min(contexts, rows or least_rows), min(words, columns or least_columns)


def _drawn(count: int, among: int, generator: torch.Generator) -> Tensor:
    return torch.randperm(among, generator=generator)[:count].sort().values
