"""The nonlinearity of phi: which lines it has, how much lies on them, and the nearest softmax."""

import math

import pytest
import torch

from sigsoftmax.analysis.audit.nonlinearity import lines_of, nearest_slope, use_of_nonlinearity
from sigsoftmax.analysis.head_weights import Contexts, HeadWeights
from sigsoftmax.family import OutputFunction, register_function


def layer_and_contexts(text: str, shift: float = 0.0, scale: float = 1.0) -> tuple[HeadWeights, Contexts]:
    generator = torch.Generator().manual_seed(0)
    weight_Vd, hidden_Nd = (torch.randn(n, 5, generator=generator) for n in (60, 20))
    bias_V = torch.full((60,), shift)
    layer = HeadWeights(weight_Vd=scale * weight_Vd, bias_V=bias_V, head=text)
    return layer, Contexts.of_rows(hidden_Nd, description="")


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("softmax(alpha=1.5)", [("left", 1.5), ("right", 1.5)]),
        ("sigsoftmax", [("left", 2.0), ("right", 1.0)]),
        ("sigmoid", [("left", 1.0), ("right", 0.0)]),
        ("gss(k=0.2)", [("left", 0.2), ("right", 1.0)]),
        ("softcap(c=3)", [("left", 0.0), ("centre", 1.0), ("right", 0.0)]),
        ("softcap(c=1000)", [("left", 0.0), ("centre", 1.0), ("right", 0.0)]),
        ("shifted_sigsoftmax(b=-5000)", [("left", 2.0), ("right", 1.0)]),
        ("gss(k=-0.5)", [("left", -0.5), ("right", 1.0)]),
        ("relu", [("left", 0.0)]),
    ],
)
def test_the_lines_of_the_family(text, lines):
    found = lines_of(OutputFunction.parse(text), 4)
    assert [(line.name, pytest.approx(float(line.slope[0]), abs=1e-9)) for line in found] == lines


def test_the_lines_of_a_function_with_a_shift_for_each_class():
    found = lines_of(OutputFunction("gss", k=torch.tensor(0.3), c=torch.tensor([-9.0, 0.0, 9.0])), 3)
    assert [line.name for line in found] == ["left", "right"]
    assert [line.slope.tolist() for line in found] == [pytest.approx([0.3] * 3), [1.0] * 3]


def test_the_lines_of_a_function_of_the_users_own():
    register_function("steep_left", lambda z: torch.where(z < 0, 3.0 * z, z))
    assert [float(line.slope[0]) for line in lines_of(OutputFunction("steep_left"), 2)] == [3.0, 1.0]
    register_function("capped", lambda z: 2.0 * torch.tanh(z))
    found = lines_of(OutputFunction("capped"), 2)
    assert [(line.name, line.slope.tolist()) for line in found] == [
        ("left", [0.0, 0.0]),
        ("centre", [2.0, 2.0]),
        ("right", [0.0, 0.0]),
    ]


def test_a_softmax_has_no_bend():
    found = use_of_nonlinearity(*layer_and_contexts("softmax(alpha=1.5)"))
    assert (found.lines, found.logits_in_bend, found.kl_to_nearest_softmax) == ((), 0.0, 0.0)
    assert found.nearest_slope == 1.5


@pytest.mark.parametrize(("shift", "line", "slope"), [(200.0, "right", 1.0), (-200.0, "left", 2.0)])
def test_a_sigsoftmax_far_from_its_bend_has_collapsed(shift, line, slope):
    found = use_of_nonlinearity(*layer_and_contexts("sigsoftmax", shift))
    shares = {share.name: share for share in found.lines}
    assert shares[line].logits == pytest.approx(1.0)
    assert shares[line].probability == pytest.approx(1.0)
    assert found.logits_in_bend == 0.0
    assert found.nearest_slope == pytest.approx(slope, rel=1e-4)
    assert found.kl_to_nearest_softmax < 1e-9


def test_a_sigsoftmax_in_its_bend_has_not():
    found = use_of_nonlinearity(*layer_and_contexts("sigsoftmax"))
    assert found.logits_in_bend > 0.5
    assert 1.0 < found.nearest_slope < 2.0
    assert found.kl_to_nearest_softmax > 1e-3
    assert sum(share.logits for share in found.lines) + found.logits_in_bend == pytest.approx(1.0)
    assert sum(share.probability for share in found.lines) + found.probability_in_bend == pytest.approx(1.0)


def test_shares_are_counted_by_the_slope():
    layer, contexts = layer_and_contexts("sigsoftmax", scale=3.0)
    z = layer.logits(contexts.hidden_NKd[:, 0])
    # sigmoid(z) <= 0.05 and >= 0.95 are the ends of the lines.
    edge = math.log(0.95 / 0.05)
    found = use_of_nonlinearity(layer, contexts, memory=1)
    assert found.lines[0].logits == pytest.approx(float((z <= -edge).double().mean()))
    assert found.lines[1].logits == pytest.approx(float((z >= edge).double().mean()))
    assert (found.lowest_logit, found.highest_logit) == (z.min().item(), z.max().item())


@pytest.mark.parametrize("text", ["sigsoftmax", "gss(k=0)", "softcap(c=2)", "sigmoid"])
def test_no_other_slope_is_nearer(text):
    layer, contexts = layer_and_contexts(text, scale=2.0)
    slope, kl = nearest_slope(layer, contexts)
    z, log_f = layer.logits(contexts.hidden_NKd[:, 0]), layer.log_probs(contexts)

    def kl_at(a: float) -> float:
        return float((log_f.exp() * (log_f - torch.log_softmax(a * z, -1))).sum(1).mean())

    assert kl == pytest.approx(kl_at(slope), rel=1e-9)
    assert kl <= min(kl_at(slope * factor) for factor in (0.5, 0.99, 1.01, 2.0)) + 1e-12


def test_components_of_a_mixture_count_by_their_prior():
    generator = torch.Generator().manual_seed(0)
    layer = HeadWeights(weight_Vd=torch.randn(40, 3, generator=generator), head="moss(K=2)")
    near, far = torch.zeros(9, 3), 1000.0 * torch.ones(9, 3)
    hidden_NKd = torch.stack([near, far], 1)
    sure = Contexts(hidden_NKd=hidden_NKd, prior_logits_NK=torch.tensor([[50.0, -50.0]]).repeat(9, 1))
    found = use_of_nonlinearity(layer, sure)
    # All logits of the first component are 0: in the middle of the nonlinearity.
    assert found.probability_in_bend == pytest.approx(1.0)
    assert found.logits_in_bend == pytest.approx(0.5)
