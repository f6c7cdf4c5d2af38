"""The share of the loss gradient that an output layer cannot pass on.

The gradient of the loss by the logits is a vector g of V numbers; what goes on to the rest of the model is W^T g, d
numbers. The part of g that is orthogonal to the columns of W is lost on the way: no change of h can follow it. Its
share is 1 - ||P_W g||^2 / ||g||^2, with P_W the projector on the columns of W. Gradients by W itself are not concerned.

Shapes: N contexts, K components, V vocabulary, C tokens of a part of it, d width.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sigsoftmax.analysis.head_weights import TOKENS_AT_ONCE, Contexts, HeadWeights, blocks_of
from sigsoftmax.analysis.progress import Say, nothing_said
from sigsoftmax.analysis.spectrum.factorizations import add_product
from sigsoftmax.records.schemas.audits import GradientShare

__all__ = ["gradient_share"]


def gradient_share(
    layer: HeadWeights,
    contexts: Contexts,
    *,
    memory: int = 1 << 30,
    seed: int = 0,
    progress: Say = nothing_said,
) -> GradientShare:
    """The suppressed share of the gradient of -log f(next token), averaged over contexts.

    Where the next token is not known it is drawn from the layer's own output.
    """
    layer.check(contexts)
    progress("the columns of W")
    root_dr = _whitening(layer)
    generator = torch.Generator().manual_seed(seed)
    shares: list[Tensor] = []
    for stop, chosen in layer.blocks(contexts, memory):
        progress(f"gradients: context {stop} of {len(contexts)}")
        gradient_NKV = _gradient(layer, chosen, generator)
        # W's columns receive g of each component apart; a context's gradient is that of all its components.
        passed = torch.zeros(*gradient_NKV.shape[:2], layer.width).to(gradient_NKV)
        for tokens in blocks_of(layer.vocabulary, TOKENS_AT_ONCE):
            passed += gradient_NKV[..., tokens] @ layer.weight_Vd[tokens].to(gradient_NKV)
        kept_N = (passed @ root_dr).square().sum((-1, -2))
        whole_N = gradient_NKV.square().sum((-1, -2))
        # A token predicted with certainty leaves no gradient to lose.
        live = whole_N > 0.0
        shares.append((1.0 - kept_N[live] / whole_N[live]).clamp(0.0, 1.0).cpu())
    share_N = torch.cat(shares)
    low = median = high = math.nan
    if share_N.numel():
        low, median, high = share_N.quantile(torch.tensor([0.05, 0.5, 0.95], dtype=torch.float64)).tolist()
    is_given = contexts.next_tokens_N is not None
    return GradientShare(
        contexts=share_N.numel(),
        next_words="given with the contexts" if is_given else "drawn from the layer's own output",
        mean=float(share_N.mean()),
        median=median,
        low=low,
        high=high,
        of_a_random_direction=1.0 - root_dr.shape[1] / layer.vocabulary,
        rank_of_weight=root_dr.shape[1],
    )


def _whitening(layer: HeadWeights) -> Tensor:
    """R with R R^T the pseudo-inverse of W^T W, so that ||R^T W^T g|| = ||P_W g||. (d, rank of W)

    The Gram matrix halves the digits: directions of W below 1e-7 of its largest count as absent.
    """
    gram_dd = torch.zeros(layer.width, layer.width, dtype=torch.float64, device=layer.weight_Vd.device)
    for part_Cd in layer.weight_Vd.detach().split(TOKENS_AT_ONCE):
        add_product(gram_dd, part_Cd.to(torch.float64).T)
    values_d, vectors_dd = torch.linalg.eigh(gram_dd, UPLO="U")
    kept = values_d > 1e-14 * layer.width * values_d[-1]
    return vectors_dd[:, kept] * values_d[kept].rsqrt()


def _gradient(layer: HeadWeights, contexts: Contexts, generator: torch.Generator) -> Tensor:
    """dL/dz of L = -log f(next token), (N, K, V), from the family's formula."""
    z_NKV, log_f_NKV, log_prior_NK = layer.by_component(contexts)
    joint_NKV = log_f_NKV + log_prior_NK[..., None]
    next_N = contexts.next_tokens_N
    if next_N is None:
        next_N = torch.multinomial(torch.logsumexp(joint_NKV, 1).exp().cpu(), 1, generator=generator)[:, 0]
    index_NK1 = next_N.to(z_NKV.device).view(-1, 1, 1).expand(-1, layer.components, 1)
    # The loss of a mixture falls on its components by their responsibility for the next token.
    share_NK1 = torch.softmax(joint_NKV.gather(-1, index_NK1), 1)
    error_NKV = log_f_NKV.exp_().mul_(share_NK1).scatter_add_(-1, index_NK1, -share_NK1)
    return error_NKV.mul_(layer.function.slope(z_NKV))
