"""The suppressed share of the gradient, against autograd and a projector made by a QR decomposition."""

import math

import pytest
import torch

from sigsoftmax.analysis.audit.gradient_share import gradient_share
from sigsoftmax.analysis.head_weights import Contexts, HeadWeights
from sigsoftmax.family import OutputFunction
from sigsoftmax.family.heads import Head
from sigsoftmax.losses import functional

V, D, N = 50, 4, 9


def setup(text="softmax", components=1, rank=D):
    generator = torch.Generator().manual_seed(0)
    weight_Vd = torch.randn(V, rank, generator=generator) @ torch.randn(rank, D, generator=generator)
    layer = HeadWeights(
        weight_Vd=weight_Vd,
        bias_V=torch.randn(V, generator=generator),
        head=Head(OutputFunction.parse(text), components),
    )
    contexts = Contexts(
        hidden_NKd=torch.randn(N, components, D, generator=generator),
        prior_logits_NK=torch.randn(N, components, generator=generator) if components > 1 else None,
        next_tokens_N=torch.randint(V, (N,), generator=generator),
    )
    return layer, contexts


def expected_share(layer, contexts):
    z_NKV = layer.logits(contexts.hidden_NKd.flatten(0, 1)).view(N, layer.components, V).requires_grad_()
    if contexts.prior_logits_NK is None:
        log_q = functional.log_probs(z_NKV[:, 0], function=layer.function)
    else:
        # With the identity for the output matrix, hidden vectors are logits.
        eye = torch.eye(V, dtype=torch.float64)
        prior = contexts.prior_logits_NK.double()
        log_q = functional.mixture_log_probs(z_NKV, prior, eye, function=layer.function)
    loss = -log_q.gather(1, contexts.next_tokens_N[:, None]).sum()
    (gradient_NKV,) = torch.autograd.grad(loss, z_NKV)
    u, s, _ = torch.linalg.svd(layer.weight_Vd.double(), full_matrices=False)
    basis_Vr = u[:, s > 1e-6 * s[0]]
    kept_N = (gradient_NKV @ basis_Vr).square().sum((-1, -2))
    return 1.0 - kept_N / gradient_NKV.square().sum((-1, -2))


@pytest.mark.parametrize(
    ("text", "components"),
    [("softmax", 1), ("sigsoftmax", 1), ("gss(k=0)", 1), ("softcap(c=2)", 1), ("softmax", 3), ("sigsoftmax", 2)],
)
def test_against_autograd(text, components):
    layer, contexts = setup(text, components)
    share_N = expected_share(layer, contexts)
    found = gradient_share(layer, contexts, memory=1)
    assert found.mean == pytest.approx(float(share_N.mean()), rel=1e-9)
    assert found.median == pytest.approx(float(share_N.quantile(0.5)), rel=1e-9)
    assert found.low <= found.median <= found.high
    assert (found.contexts, found.next_words) == (N, "given with the contexts")


def test_an_output_matrix_of_lower_rank_loses_more():
    layer, contexts = setup(rank=2)
    found = gradient_share(layer, contexts)
    assert found.rank_of_weight == 2
    assert found.of_a_random_direction == pytest.approx(1.0 - 2 / V)
    assert found.mean == pytest.approx(float(expected_share(layer, contexts).mean()), rel=1e-6)


def test_nothing_is_lost_where_the_width_is_the_number_of_words():
    layer = HeadWeights(weight_Vd=torch.eye(6))
    found = gradient_share(layer, Contexts.of_rows(torch.randn(5, 6), description=""))
    assert found.mean == pytest.approx(0.0, abs=1e-9)
    assert found.next_words == "drawn from the layer's own output"


def test_drawn_words_are_the_same_for_the_same_seed():
    layer, contexts = setup()
    unknown = Contexts(hidden_NKd=contexts.hidden_NKd)
    one, same, other = (gradient_share(layer, unknown, seed=seed).mean for seed in (0, 0, 1))
    assert one == same != other


def test_without_any_gradient_there_is_no_share():
    """A word of probability 1 is predicted with certainty: f - 1 is 0 in float64."""
    layer = HeadWeights(weight_Vd=torch.tensor([[1e4], [-1e4], [-1e4]]))
    contexts = Contexts.of_rows(torch.ones(3, 1), next_tokens_N=torch.zeros(3, dtype=torch.int64), description="")
    found = gradient_share(layer, contexts)
    assert found.contexts == 0
    assert math.isnan(found.mean)
