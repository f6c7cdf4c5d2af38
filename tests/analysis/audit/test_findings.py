"""The parts of an audit together: what is measured for whom, what a refusal costs, and what survives an interrupt."""

import pytest
import torch

from sigsoftmax.analysis.audit import findings as audit
from sigsoftmax.analysis.audit.findings import AuditSettings, Findings, Subject, contexts_within, log_probs_of, measure
from sigsoftmax.analysis.head_weights import Contexts, HeadWeights
from sigsoftmax.family import OutputFunction
from sigsoftmax.family.heads import Head

SETTINGS = AuditSettings(memory=1 << 28, argmax_tokens=20, argmax_seconds=30.0)
V, D, N = 70, 5, 40


def subject(text="softmax", components=1, contexts=N):
    generator = torch.Generator().manual_seed(0)
    layer = HeadWeights(
        weight_Vd=torch.randn(V, D, generator=generator),
        bias_V=torch.randn(V, generator=generator),
        head=Head(OutputFunction.parse(text), components),
    )
    seen = Contexts(
        hidden_NKd=torch.randn(contexts, components, D, generator=generator),
        prior_logits_NK=torch.zeros(contexts, components) if components > 1 else None,
    )
    log_p_NV = log_probs_of(layer, seen, memory=1, progress=lambda _: None)
    return Subject(name="a test", layer=layer, contexts=seen, log_p_NV=log_p_NV)


def findings_of(given, settings=SETTINGS):
    findings = Findings()
    measure(given, settings, findings)
    return findings


def test_every_part_of_a_softmax_layer():
    found = findings_of(subject())
    assert found.pending == []
    assert found.notes == []
    assert found.bounds.lower == found.bounds.upper == D + 2
    assert found.spectrum.press32_rank == D + 2
    assert next(point.kl for point in found.truncation.points if point.width == D) == pytest.approx(0.0, abs=1e-12)
    assert found.bend.kl_to_nearest_softmax == 0.0
    assert found.gradient.contexts == N
    assert found.argmax.in_question == 20


def test_log_probabilities_do_not_depend_on_the_memory():
    given = subject()
    whole = given.layer.log_probs(given.contexts)
    torch.testing.assert_close(given.log_p_NV, whole, rtol=1e-12, atol=1e-12)


def test_few_contexts_do_not_hide_the_width():
    """The bounds then come from Gaussian vectors like the contexts, and say so."""
    found = findings_of(subject(contexts=3))
    assert found.bounds.lower == found.bounds.upper == D + 2
    assert "Gaussian vectors of the mean and deviation" in found.bounds.source
    assert found.spectrum.press32_rank <= 3


def test_a_matrix_alone_has_a_spectrum_and_a_truncation():
    matrix = Subject(name="a matrix", layer=None, contexts=None, log_p_NV=subject().log_p_NV)
    found = findings_of(matrix)
    assert found.spectrum is not None
    assert found.truncation is not None
    assert (found.bounds, found.bend, found.gradient, found.argmax) == (None, None, None, None)


def test_bounds_alone():
    given = subject()
    found = findings_of(
        Subject(name="a head", layer=given.layer, contexts=None, log_p_NV=None),
        AuditSettings(memory=1 << 28, bounds_only=True),
    )
    assert found.bounds.lower == found.bounds.upper == D + 2
    assert (found.spectrum, found.argmax) == (None, None)


@pytest.mark.parametrize(("text", "components"), [("sigsoftmax", 2), ("relu", 1)])
def test_what_is_not_covered_is_said(text, components):
    found = findings_of(subject(text, components))
    assert found.argmax is None
    assert any("one rising phi shared by all tokens" in note for note in found.notes)


def test_a_learned_parameter_is_recorded_as_learned():
    given = subject()
    layer = HeadWeights(weight_Vd=given.layer.weight_Vd, head=Head(OutputFunction("gss", k=torch.tensor(0.5))))
    found = findings_of(Subject(name="", layer=layer, contexts=None, log_p_NV=None), SETTINGS)
    assert found.bounds.head == "gss(k=learned:0.5)"


def test_low_precision_is_noted_with_its_noise_floor():
    log_p = subject().log_p_NV.to(torch.bfloat16).double()
    log_p -= log_p.logsumexp(1, keepdim=True)
    found = findings_of(Subject(name="", layer=None, contexts=None, log_p_NV=log_p, precision=torch.bfloat16))
    assert any("bfloat16" in note for note in found.notes)
    assert found.spectrum.count("press32").rank is None


def test_a_part_that_refuses_leaves_the_others():
    log_p = subject().log_p_NV.clone()
    log_p[3, 4] = -torch.inf
    given = subject()
    found = findings_of(Subject(name="", layer=given.layer, contexts=given.contexts, log_p_NV=log_p))
    assert found.spectrum is None
    assert found.truncation is None
    assert any(note.startswith("The spectrum could not be measured: ") for note in found.notes)
    assert found.bend is not None
    assert found.pending == []


def test_what_was_finished_before_an_interrupt_is_kept(monkeypatch):
    def interrupted(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(audit, "use_of_nonlinearity", interrupted)
    findings = Findings()
    with pytest.raises(KeyboardInterrupt):
        measure(subject(), SETTINGS, findings)
    assert findings.truncation is not None
    assert findings.pending == ["the nonlinearity of phi", "the gradient", "the tokens that can come first"]


def test_contexts_follow_from_the_memory():
    layer = subject().layer
    assert contexts_within(1 << 30, V, layer, wanted=100) == 100
    few = contexts_within(10**6, V, layer, wanted=10**6)
    assert few * V * 8 * audit.COPIES <= 10**6
    with pytest.raises(ValueError, match=r"GiB are too few: .* raise --memory"):
        contexts_within(2000, V, layer, wanted=100)


def test_words_that_came_first_came_first_alone():
    tied = torch.tensor([[0.5, 0.5, 0.0], [0.2, 0.3, 0.5]]).log()
    assert audit._first_tokens(tied).tolist() == [2]
