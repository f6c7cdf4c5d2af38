"""Bounds on the numerical rank of a log-output matrix that is too large for its spectrum.

From below: the singular values of a block of rows and columns do not exceed those of the whole matrix, one by one. So
the block's values above the whole matrix's absolute threshold are no more than the rank. The threshold is relative to
sigma_max of the whole, for which any upper bound will do; the Frobenius norm is one. Entries that are computed here are
rounded: some contexts are computed with more precision as well, and what they differ by raises norm and threshold.

From above: for a linear phi, log f = h W^T + bias - a number per context has rank at most d + 1, with a bias d + 2. For
any other phi or a mixture theory knows no bound but the number of different rows of W and of different contexts.

Shapes: N contexts, V vocabulary, B contexts that are read at once, R contexts and C tokens of the block, S contexts
that are computed in two dtypes, K components, d width.
"""

from __future__ import annotations

import hashlib
import math
import time
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sigsoftmax.analysis.head_weights import Contexts, HeadWeights
from sigsoftmax.analysis.progress import OnProgress, Progress
from sigsoftmax.analysis.spectrum.entry_checks import SIXTEEN_BITS, EntryChecks
from sigsoftmax.analysis.spectrum.factorizations import exact_values, gram_values
from sigsoftmax.analysis.spectrum.matrix_readers import MatrixReader, from_head, tensors
from sigsoftmax.family.heads import Head
from sigsoftmax.family.parameters import ParameterKind
from sigsoftmax.records.schemas.spectra import RULES, RankBounds

__all__ = ["matrix_rank_bounds", "rank_bounds", "upper_bound"]

BLOCK_CONTEXTS, BLOCK_TOKENS = 2, 8
"""sides of the block, in units of d + 2: more tokens raise every singular value, and cost less than more contexts"""
LEAST_BLOCK = 256
NORM_FLOPS = 5e12
"""work on the rows of full length by default: half a minute on two cores"""
ROUNDING_SHARE = 0.25
"""share of the threshold that rounding may take before float64, which takes twice as long, is worth it"""
COMPARED_CONTEXTS = 32
"""computed in float32 and float64, to see what rounding does to this head"""
ENTRY_MARGIN = 2.0
"""An entry may be off by so much more than those that were compared. Errors are taken to be of this size everywhere and
of the worst signs; those of independent signs make a matrix of a norm that is smaller by sqrt(R C) / (sqrt R + sqrt C).
"""
SMALLER_SIDE = "the smaller side of the matrix"
ROWS_AT_ONCE = 2**12
"""rows of W that are compared with all others at once"""
SINGLE_MARGIN, DOUBLE_MARGIN = 1e-4, 1e-9
"""relative, by the dtype of the entries; far above the rounding of a sum of squares"""


def rank_bounds(
    layer: HeadWeights,
    contexts: Contexts,
    *,
    rule: str = "press32",
    block_contexts: int | None = None,
    block_tokens: int | None = None,
    norm_contexts: int | None = None,
    seed: int = 0,
    source: str | None = None,
    progress: OnProgress | None = None,
) -> RankBounds:
    """Bounds on the rank of a layer's log-output matrix over all contexts, from the layer's tensors alone.

    The rows of ``norm_contexts`` contexts, drawn at random, are computed over all tokens; the block is cut out of them.
    Their norms enter the bound on sigma_max as they are. Further contexts enter with what Cauchy and Schwarz allow,
    which is much more. By default as many are computed as take half a minute on two cores. The arithmetic is float32
    where its rounding, which is measured, is far below the threshold, and else float64.
    """
    began = time.perf_counter()
    layer.check(contexts)
    _check_rule(rule)
    size = _block_size(block_contexts, block_tokens, layer.width, len(contexts), layer.vocabulary)
    affordable = int(NORM_FLOPS / (2.0 * layer.components * layer.vocabulary * layer.width))
    computed = min(len(contexts), max(size[0], affordable if norm_contexts is None else norm_contexts))

    generator = torch.Generator().manual_seed(seed)
    order_N = torch.randperm(len(contexts), generator=generator)
    chosen = contexts if computed == len(contexts) else contexts[order_N[:computed].sort().values]
    dtype, entry_error = _arithmetic(layer, chosen, len(contexts), size, rule)
    reader = from_head(layer, chosen, dtype=dtype, quick=True, description=source)
    # They are normalised by construction.
    block = _cut_block(reader, size, generator, EntryChecks(log_probs=False), began, progress)
    squares = block.sum_of_squares + _bounded_squares(layer, contexts, order_N[computed:])
    return _bounds(
        block.values_RC,
        *upper_bound(layer, contexts),
        rounding=entry_error * math.sqrt(block.values_RC.numel()),
        rule=rule,
        norm_bound=math.sqrt(squares) + entry_error * math.sqrt(computed * layer.vocabulary),
        source=reader.description,
        head=layer.head_text,
        width=layer.width,
        words=layer.vocabulary,
        contexts=len(contexts),
        norm_contexts=computed,
        seed=seed,
        began=began,
    )


def matrix_rank_bounds(
    reader: MatrixReader,
    *,
    head: Head | str | None = None,
    width: int | None = None,
    has_bias: bool = True,
    rule: str = "press32",
    block_contexts: int | None = None,
    block_tokens: int | None = None,
    log_probs: bool = True,
    seed: int = 0,
    progress: OnProgress | None = None,
) -> RankBounds:
    """Bounds on the rank of a matrix of log-probabilities, read once. ``head`` and ``width`` give the upper bound.

    The number of contexts must be known, since the rows of the block are drawn before the matrix is read.
    """
    began = time.perf_counter()
    _check_rule(rule)
    contexts, vocabulary = reader.contexts, reader.vocabulary
    if contexts is None or vocabulary is None:
        raise ValueError("expected a reader that knows its contexts and its vocabulary; give both to from_blocks")
    parsed = None if head is None else Head.parse(head)
    size = _block_size(block_contexts, block_tokens, width or LEAST_BLOCK, contexts, vocabulary)
    generator = torch.Generator().manual_seed(seed)
    block = _cut_block(reader, size, generator, EntryChecks(log_probs=log_probs), began, progress)
    reader.check_end(block.contexts)
    full = min(contexts, vocabulary)
    upper, reason = full, SMALLER_SIDE
    if parsed is not None and parsed.is_softmax and width is not None:
        upper, reason = _linear_bound(width, has_bias, full)
    return _bounds(
        block.values_RC,
        upper,
        reason,
        # The entries are the matrix, whatever they were computed from.
        rounding=0.0,
        rule=rule,
        norm_bound=math.sqrt(block.sum_of_squares),
        source=reader.description,
        head="" if parsed is None else str(parsed),
        width=width,
        words=vocabulary,
        contexts=contexts,
        norm_contexts=contexts,
        seed=seed,
        began=began,
    )


def upper_bound(layer: HeadWeights, contexts: Contexts) -> tuple[int, str]:
    """The upper bound on the rank that theory gives, and its reason in plain text."""
    full = min(layer.vocabulary, len(contexts))
    if layer.is_softmax:
        has_bias = layer.bias_V is not None and bool((layer.bias_V != layer.bias_V[0]).any())
        return _linear_bound(layer.width, has_bias, full)
    per_token = [layer.weight_Vd, layer.bias_V]
    for argument, kind in zip(layer.function.arguments(layer.vocabulary), layer.function.argument_kinds(), strict=True):
        per_token += [argument] if kind is ParameterKind.PER_CLASS else []
    different_tokens = _different_rows(per_token)
    different_contexts = _different_rows([contexts.hidden_NKd, contexts.prior_logits_NK])
    if min(different_tokens, different_contexts) == full:
        why = "the head is a mixture" if layer.components > 1 else "phi is not linear"
        return full, f"{SMALLER_SIDE}: {why}, and theory knows no other bound"
    if different_tokens <= different_contexts:
        return different_tokens, f"{different_tokens} of {layer.vocabulary} tokens differ in W or bias"
    return different_contexts, f"{different_contexts} of {len(contexts)} contexts differ"


def _linear_bound(width: int, has_bias: bool, full: int) -> tuple[int, str]:
    """The bound for a linear phi, if that is below the smaller side ``full`` of the matrix."""
    if width + 1 + has_bias >= full:
        return full, SMALLER_SIDE
    reason = "d + 2 (h, bias, normaliser)" if has_bias else "d + 1 (h, normaliser)"
    return width + 1 + has_bias, f"phi is linear: {reason}"


def _different_rows(tensors_N: list[Tensor | None]) -> int:
    """The number of different rows, the tensors taken side by side."""
    digests: set[bytes] = set()
    given = [tensor for tensor in tensors_N if tensor is not None]
    for parts in zip(*(tensor.detach().split(ROWS_AT_ONCE) for tensor in given), strict=True):
        bits = [part.cpu().reshape(len(part), -1).contiguous().view(torch.uint8) for part in parts]
        digests.update(hashlib.blake2b(row.data, digest_size=16).digest() for row in torch.cat(bits, 1).numpy())
    return len(digests)


def _arithmetic(
    layer: HeadWeights, computed: Contexts, contexts: int, block: tuple[int, int], rule: str
) -> tuple[torch.dtype, float]:
    """The dtype to compute some of the contexts in, and the error that an entry may have then.

    It is float32 where its rounding is far below the threshold. That depends on how large logits are beside their
    differences; the longest hidden vectors have the largest, and are computed both ways.
    """
    length_N = computed.hidden_NKd.detach().flatten(1).float().norm(dim=1).cpu()
    compared = computed[length_N.topk(min(COMPARED_CONTEXTS, len(computed))).indices]
    exact_SV, rounded_SV = (layer.log_probs(compared, dtype, quick=True) for dtype in (torch.float64, torch.float32))
    # Entries that happen to be numbers of float32 show no difference, and others are rounded all the same.
    eps32, eps64 = (torch.finfo(dtype).eps for dtype in (torch.float32, torch.float64))
    error = ENTRY_MARGIN * max(float((exact_SV - rounded_SV).abs().max()), eps32 * float(exact_SV.abs().max()))
    if not math.isfinite(error):
        raise ValueError("the logits overflow float32, and log-probabilities of such logits say little; scale H or W")
    norm = float(exact_SV.norm()) * math.sqrt(contexts / len(compared))
    allowed = ROUNDING_SHARE * RULES[rule].relative(layer.vocabulary, contexts) * norm
    if error * math.sqrt(block[0] * block[1]) <= allowed:
        return torch.float32, error
    return torch.float64, error * eps64 / eps32


class _Block(NamedTuple):
    values_RC: Tensor
    sum_of_squares: float
    """the sum over all entries of the rows that were read, and a little more"""
    contexts: int


def _cut_block(
    reader: MatrixReader,
    size: tuple[int, int],
    generator: torch.Generator,
    checks: EntryChecks,
    began: float,
    progress: OnProgress | None,
) -> _Block:
    """Read all rows once: the sum of squares of all entries, and the entries of random rows and columns."""
    rows_R, columns_C = (
        torch.randperm(among, generator=generator)[:count].sort().values
        for count, among in zip(size, (reader.contexts or 0, reader.vocabulary or 0), strict=True)
    )
    values_RC: Tensor | None = None
    squares, done, taken, margin = 0.0, 0, 0, DOUBLE_MARGIN
    for block_BV in tensors(reader):
        checks.check(block_BV, done)
        values_BV = block_BV.float() if block_BV.dtype in SIXTEEN_BITS else block_BV
        squares += float(torch.linalg.vector_norm(values_BV, dim=1).to(torch.float64).square().sum())
        margin = SINGLE_MARGIN if values_BV.dtype == torch.float32 else margin
        inside = rows_R[(rows_R >= done) & (rows_R < done + len(block_BV))] - done
        if values_RC is None:
            values_RC = block_BV.new_empty(len(rows_R), len(columns_C), dtype=torch.float64)
        values_RC[taken : taken + len(inside)] = block_BV[inside.to(block_BV.device)][:, columns_C.to(block_BV.device)]
        taken, done = taken + len(inside), done + len(block_BV)
        if progress is not None:
            progress(Progress.at("norm and block", began, done, reader.contexts))
    assert values_RC is not None
    return _Block(values_RC[:taken], squares * (1.0 + margin), done)


def _bounds(
    values_RC: Tensor, upper: int, reason: str, *, rounding: float, began: float, rule: str, **about: Any
) -> RankBounds:
    """Count the block's singular values; ``rounding`` bounds the norm of what its entries are off by."""
    threshold = RULES[rule].relative(about["words"], about["contexts"]) * about["norm_bound"]
    counting = threshold + rounding
    found = gram_values([values_RC])
    if counting < 2.0 * math.sqrt(found.squared_error):
        found = exact_values(values_RC)
    least_R = (found.values_R - found.value_error).clamp(min=0.0)
    lower = int((least_R.square() - found.squared_error > counting**2).sum())
    if lower > upper:
        raise ValueError(
            f"the block has {lower} singular values above {counting:.3g}, more than the {upper} that theory allows "
            f"({reason}): the matrix is not what it was said to be, check head, width and bias"
        )
    return RankBounds(
        lower=lower,
        upper=upper,
        upper_reason=reason,
        rule=rule,
        threshold_bound=threshold,
        counting_threshold=counting,
        block_contexts=values_RC.shape[0],
        block_words=values_RC.shape[1],
        block_singular_values=tuple(found.values_R.tolist()),
        seconds=time.perf_counter() - began,
        **about,
    )


def _bounded_squares(layer: HeadWeights, contexts: Contexts, rows_R: Tensor) -> float:
    """An upper bound on the sum of squares of the log-probabilities in some of the contexts.

    With every logit of a context in [low, high] and phi not decreasing, each probability is at least
    exp(phi(low) - phi(high)) / V. Logits are within |h| max_j |w_j - mean w| of those of the mean row of W.
    """
    if not len(rows_R):
        return 0.0
    member, vocabulary = layer.function, layer.vocabulary
    if not member.is_increasing:
        raise ValueError(
            f"nothing is known of the size of log-probabilities of {layer.parsed_head} without computing them; ask for "
            f"norm_contexts={len(contexts)}, or give fewer contexts"
        )
    weight_Vd = layer.weight_Vd.detach()
    mean_d = sum(part.to(torch.float64).sum(0) for part in weight_Vd.split(2**14)) / vocabulary
    radius = max(float((part.to(torch.float64) - mean_d).norm(dim=1).max()) for part in weight_Vd.split(2**14))
    bias_V = torch.zeros(1) if layer.bias_V is None else layer.bias_V.detach().to(torch.float64)
    bias_mean = float(bias_V.mean())
    bias_radius = float((bias_V - bias_mean).abs().max())
    total = 0.0
    for part_R in rows_R.split(2**14):
        hidden_NKd = contexts[part_R].hidden_NKd.detach().to(weight_Vd.device, torch.float64)
        middle_NK = hidden_NKd @ mean_d + bias_mean
        reach_NK = hidden_NKd.norm(dim=-1) * radius + bias_radius
        # A mixture's log-probability lies among those of its components.
        span_N = (member.phi(middle_NK + reach_NK) - member.phi(middle_NK - reach_NK)).amax(1)
        total += vocabulary * float((math.log(vocabulary) + layer.floor + span_N).square().sum())
    return total * (1.0 + DOUBLE_MARGIN)


def _check_rule(rule: str) -> None:
    if rule not in RULES:
        raise ValueError(f"unknown rule {rule!r} for a rank; the known ones are {', '.join(RULES)}")


def _block_size(rows: int | None, columns: int | None, width: int, contexts: int, vocabulary: int) -> tuple[int, int]:
    least_rows, least_columns = (max(LEAST_BLOCK, times * (width + 2)) for times in (BLOCK_CONTEXTS, BLOCK_TOKENS))
    for name, asked in (("block_contexts", rows), ("block_tokens", columns)):
        if asked is not None and asked < 1:
            raise ValueError(f"{name} must be at least 1, got {asked}")
    return min(contexts, rows or least_rows), min(vocabulary, columns or least_columns)
