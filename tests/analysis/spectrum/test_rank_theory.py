"""Upper bounds on a rank from theory."""

import pytest
import torch

from sigsoftmax.analysis.head_weights import Contexts, HeadWeights
from sigsoftmax.analysis.spectrum.rank_theory import upper_bound

GENERATOR = torch.Generator().manual_seed(0)
HIDDEN, WEIGHT, BIAS = (torch.randn(*shape, generator=GENERATOR) for shape in ((40, 5), (30, 5), (30,)))
CONTEXTS = Contexts.of_rows(HIDDEN)


@pytest.mark.parametrize("head", ["softmax", "softmax(alpha=2)"])
@pytest.mark.parametrize(("bias", "bound"), [(BIAS, 7), (None, 6), (torch.full((30,), 3.0), 6)])
def test_a_linear_phi(head, bias, bound):
    found, reason = upper_bound(HeadWeights(weight_Vd=WEIGHT, bias_V=bias, head=head), CONTEXTS)
    assert found == bound
    assert "phi is linear" in reason


def test_any_other_phi_is_bounded_by_what_differs():
    assert upper_bound(HeadWeights(weight_Vd=WEIGHT, head="sigsoftmax"), CONTEXTS)[0] == 30
    words = HeadWeights(weight_Vd=WEIGHT[:4].repeat(8, 1), head="sigsoftmax")
    assert upper_bound(words, CONTEXTS) == (4, "4 of 32 words differ in W or bias")
    told_apart = HeadWeights(weight_Vd=WEIGHT[:1].repeat(30, 1), bias_V=BIAS, head="sigsoftmax")
    assert upper_bound(told_apart, CONTEXTS)[0] == 30
    contexts = Contexts.of_rows(HIDDEN[:3].repeat(9, 1))
    assert upper_bound(HeadWeights(weight_Vd=WEIGHT, head="sigsoftmax"), contexts) == (3, "3 of 27 contexts differ")


def test_priors_tell_contexts_of_a_mixture_apart():
    same = HIDDEN[:1, None].repeat(20, 2, 1)
    for prior, bound in ((torch.randn(20, 2, generator=GENERATOR), 20), (torch.zeros(20, 2), 1)):
        mixture = Contexts(hidden_NKd=same, prior_logits_NK=prior)
        assert upper_bound(HeadWeights(weight_Vd=WEIGHT, head="mos(K=2)"), mixture)[0] == bound
