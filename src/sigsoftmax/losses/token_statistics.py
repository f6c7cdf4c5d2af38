"""Statistics of tokens from hidden vectors, for reinforcement learning and distillation; differentiable.

Shapes: N tokens (the product of all leading dimensions), K components, V classes, d width.
"""

from __future__ import annotations

from torch import Tensor

from sigsoftmax.contract.operands import Operands
from sigsoftmax.contract.spec import Function, WeightGradient, member_of, prior_of, statistics_spec
from sigsoftmax.contract.statistics import TokenStatistics
from sigsoftmax.losses import statistics_op


def linear_token_statistics(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor | None = None,
    *,
    function: Function = "sigsoftmax",
    linear_bias: Tensor | None = None,
    ignore_index: int = -100,
    temperature: float = 1.0,
    entropy: bool = False,
    topk: int = 0,
    argmax: bool = False,
    chunk_bytes: int | None = None,
    weight_gradient: WeightGradient = "auto",
    backend: str | None = None,
) -> TokenStatistics:
    """Log-probabilities of targets, entropies and the likeliest classes, without ever holding the N x V logits.

    ``input`` is (..., d), ``linear_weight`` (V, d), ``target`` (...) of class indices. All results but the indices are
    differentiable by the hidden vectors, the weight, its bias and the learned parameters of ``function``; the backward
    pass computes the logits again, a chunk of ``chunk_bytes`` at a time. They are in float32, or float64 for float64
    input, whatever the dtype of the products.

    ``log_probs`` is 0 for a target of ``ignore_index`` and None without targets; the other statistics do not depend on
    the target. ``temperature`` divides log g before it is normalised, as a sampler does. ``topk`` asks for that many
    classes, largest first; the gradient goes to the classes that were chosen. ``argmax`` asks for the likeliest class
    alone, which costs less. ``weight_gradient`` is that of :func:`linear_cross_entropy` where the log-probabilities of
    targets alone have a gradient; any other gradient of a weight of low precision is summed in a float32 buffer, unless
    it is ``fast``.
    """
    member, arguments = member_of(function)
    spec = statistics_spec(
        member=member,
        ignore_index=ignore_index,
        temperature=temperature,
        entropy=entropy,
        topk=topk,
        argmax=argmax,
        chunk_bytes=chunk_bytes,
        weight_gradient=weight_gradient,
        backend=backend,
    )
    return statistics_op.statistics(
        spec, Operands(input, linear_weight, linear_bias, target=target, arguments=arguments)
    )


def mixture_token_statistics(
    input: Tensor,
    prior_logits: Tensor,
    linear_weight: Tensor,
    target: Tensor | None = None,
    *,
    function: Function = "sigsoftmax",
    prior_function: Function | None = None,
    linear_bias: Tensor | None = None,
    ignore_index: int = -100,
    floor: float = 0.0,
    temperature: float = 1.0,
    entropy: bool = False,
    topk: int = 0,
    argmax: bool = False,
    chunk_bytes: int | None = None,
    weight_gradient: WeightGradient = "auto",
    backend: str | None = None,
) -> TokenStatistics:
    """Statistics of the tokens of a mixture, as :func:`linear_token_statistics`; see :func:`mixture_log_probs`.

    They are differentiable by the prior's logits too. ``temperature`` divides the mixed log-probabilities, which are
    then normalised again; ``log_normalizer`` has one number per component.
    """
    member, arguments = member_of(function)
    prior, prior_arguments = member_of(prior_of(function, prior_function))
    spec = statistics_spec(
        member=member,
        prior=prior,
        ignore_index=ignore_index,
        floor=floor,
        temperature=temperature,
        entropy=entropy,
        topk=topk,
        argmax=argmax,
        chunk_bytes=chunk_bytes,
        weight_gradient=weight_gradient,
        backend=backend,
    )
    operands = Operands(
        *(input, linear_weight, linear_bias, prior_logits, target),
        arguments=arguments,
        prior_arguments=prior_arguments,
    )
    return statistics_op.statistics(spec, operands)
