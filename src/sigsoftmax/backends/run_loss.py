"""A loss computed by a backend: in few launches where there is a way, else by the chunk loop.

Shapes: N tokens, K components, V classes.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from sigsoftmax import validation
from sigsoftmax.backends import dispatch, reference
from sigsoftmax.backends.chunks import LossLoop, LossOptions, TokenLosses, token_scales
from sigsoftmax.backends.sharded_loop import ShardedLossLoop
from sigsoftmax.backends.shards import Shard
from sigsoftmax.backends.sources import Source
from sigsoftmax.forms import Form


def run_loss(
    source: Source,
    form: Form,
    arguments: Sequence[Tensor],
    target: Tensor,
    options: LossOptions,
    backend: str,
    *,
    log_prior_NK: Tensor | None,
    class_weight_V: Tensor | None,
    scale_N: Tensor | None,
    is_mean: bool,
    wants_gradient: bool,
    needs_arguments: bool,
    shard: Shard | None = None,
) -> tuple[Tensor, TokenLosses, Tensor | None, list[Tensor]]:
    """Total, tokens' losses, gradients of prior and arguments; those of the logits go to the source.

    With a shard the source has a part of the classes, and so have arguments per class and probability targets.
    """
    if class_weight_V is not None:
        validation.check_class_weight(class_weight_V)
    make_routines = dispatch.row_routines(backend)
    if backend == "triton" and shard is None and not validation.wants_messages(target.device):
        from sigsoftmax.backends.triton import mixtures, plain, rows

        if log_prior_NK is not None and mixtures.is_served(source, target, options):
            return mixtures.mixture_loss(
                source,
                form,
                arguments,
                target,
                log_prior_NK,
                class_weight_V,
                scale_N,
                options,
                is_mean=is_mean,
                wants_gradient=wants_gradient,
                needs_arguments=needs_arguments,
            )
        if plain.is_plain(source, target, log_prior_NK, options):
            routines = rows.TritonRows(form, arguments, source.logits_like, needs_arguments)
            total, result = plain.plain_loss(
                source,
                routines,
                target,
                class_weight_V,
                scale_N,
                options,
                is_mean=is_mean,
                wants_gradient=wants_gradient,
            )
            return total, result, None, routines.argument_gradients()
    num_classes = source.num_classes if shard is None else shard.num_classes
    validation.check_target(target, num_classes, options.ignore_index)
    dtype = reference.compute_dtype(source.logits_like.dtype)
    is_empty = None
    if scale_N is None:
        scale_N, is_empty = token_scales(target, None, class_weight_V, options.ignore_index, dtype, is_mean=is_mean)
    scale_N = scale_N.to(dtype)
    loop = (LossLoop if shard is None else functools.partial(ShardedLossLoop, shard))(
        source,
        form,
        arguments,
        target,
        options,
        make_routines,
        log_prior_NK=log_prior_NK,
        class_weight_V=class_weight_V,
        scale_N=scale_N if wants_gradient else None,
        needs_arguments=needs_arguments,
    )
    result = loop.run()
    total = reference.scaled(result.losses_N, scale_N).sum()
    if is_empty is not None:
        total = torch.where(is_empty, torch.full_like(total, torch.nan), total)
    return total, result, loop.prior_gradient_NK, loop.argument_gradients()
