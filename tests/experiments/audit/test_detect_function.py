"""The output function of a model, recognised from what goes into and comes out of its logits."""

import pytest
import torch

pytest.importorskip("transformers")

from sigsoftmax.experiments.audit.detect_function import declared_by, detect
from sigsoftmax.family import OutputFunction
from sigsoftmax.integrations.huggingface.examination.output_layers import LogitAdjustment

RAW = 4.0 * torch.randn(6, 40, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_plain_softmax(dtype):
    found = detect(RAW, RAW.to(dtype), {})
    assert (str(found.function), found.scale) == ("softmax", 1.0)
    assert found.error < 0.01


def test_a_number_per_row_changes_nothing():
    assert str(detect(RAW, RAW + torch.arange(6)[:, None], {}).function) == "softmax"


def test_a_scale_is_named_by_the_setting_that_has_its_value():
    divided = detect(RAW, RAW / 8.0, {"logits_scaling": 8.0, "hidden_size": 8}, probed=LogitAdjustment(scale=1 / 8.0))
    assert (str(divided.function), divided.scale) == ("softmax", 1 / 8.0)
    assert "logits are divided by `logits_scaling` = 8" in divided.explanation
    multiplied = detect(RAW, RAW * 0.3, {"logit_scale": 0.3}, probed=LogitAdjustment(scale=0.3))
    assert "logits are multiplied by `logit_scale` = 0.3" in multiplied.explanation
    assert (
        "logits are multiplied by 0.3"
        in detect(RAW, RAW * 0.3, {"n": 0.3}, probed=LogitAdjustment(scale=0.3)).explanation
    )


def test_a_scale_that_no_probe_has_shown_is_measured():
    found = detect(RAW, RAW * 2.5, {})
    assert found.scale == pytest.approx(2.5)
    assert "measured" in found.explanation


def test_a_softcap():
    capped = 5.0 * torch.tanh(RAW / 5.0)
    named = detect(RAW, capped, {"final_logit_softcapping": 5.0}, probed=LogitAdjustment(cap=5.0))
    assert str(named.function) == "softcap(c=5.0)"
    assert "`final_logit_softcapping` = 5 of its configuration" in named.explanation
    assert "capped at 5" in detect(RAW, capped, {}, probed=LogitAdjustment(cap=5.0)).explanation


def test_a_member_of_the_family():
    found = detect(RAW, OutputFunction("sigsoftmax").phi(RAW), {})
    assert str(found.function) == "sigsoftmax"
    assert found.error < 1e-12


def test_what_is_stated_is_taken_and_compared():
    gss = OutputFunction("gss", k=0.3)
    right = detect(RAW, gss.phi(RAW), {}, stated=gss)
    assert "which agrees" in right.explanation
    wrong = detect(RAW, RAW, {}, stated=gss)
    assert str(wrong.function) == "gss(k=0.3)"
    assert "which differs by" in wrong.explanation


def test_an_unknown_function_is_refused_with_the_nearest():
    with pytest.raises(ValueError, match=r"no known function .* \(nearest: .*, off by .*\). State it with --function"):
        detect(RAW, RAW + 3.0 * torch.sin(RAW), {})


def test_what_a_configuration_declares():
    assert str(declared_by({"final_logit_softcapping": 30.0})[0]) == "softcap(c=30.0)"
    for nothing in ({}, {"final_logit_softcapping": None}, {"final_logit_softcapping": True}):
        function, how = declared_by(nothing)
        assert str(function) == "softmax"
        assert "not checked" in how
