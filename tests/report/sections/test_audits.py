"""Audits: what was found, and what cannot be known."""

import dataclasses

from tests.report import synthetic_runs
from tests.report.sections.making import section_of

from sigsoftmax.records.schemas.audits import HeadAtWidth, TruncationPoint
from sigsoftmax.report.sections import audits


def test_an_audit_without_a_target_says_that_the_cost_is_not_known(tmp_path):
    (audit,) = synthetic_runs.audits()
    made = section_of(audits, [audit], tmp_path)
    assert "MoS(K=4) does best at width 32 against the teacher big-model" in made.findings[0]
    assert "3 of the 2,000 tokens asked about (0.1%) can never be ranked first" in made.findings[1]
    bare = dataclasses.replace(
        audit, target=None, argmax=None, bend=None, spectrum=None, truncation=None, gradient=None
    )
    made = section_of(audits, [dataclasses.replace(bare, was_interrupted=True)], tmp_path)
    assert made.findings == [
        (
            "What this output layer costs in nats cannot be known from the model alone: its own log-probabilities are "
            "what the layer can make. That takes a truth to compare with: --teacher MODEL, or --target with known "
            "distributions or a language."
        )
    ]
    assert any("was interrupted" in block for block in made.blocks if isinstance(block, str))
    collapsed = dataclasses.replace(audit.bend, kl_to_nearest_softmax=1e-6)
    made = section_of(audits, [dataclasses.replace(bare, bend=collapsed)], tmp_path)
    assert "has collapsed to softmax: it is within 1.00 × 10⁻⁶ nats of softmax of 1.3 z" in made.findings[1]


def test_a_softmax_has_not_collapsed_to_softmax(tmp_path):
    (audit,) = synthetic_runs.audits()
    line = dataclasses.replace(
        audit.bend, lines=(), logits_in_bend=0.0, probability_in_bend=0.0, kl_to_nearest_softmax=0.0, nearest_slope=1.0
    )
    made = section_of(audits, [dataclasses.replace(audit, bend=line)], tmp_path)
    assert not any("collapsed" in finding for finding in made.findings)
    facts = made.blocks[0].to_text()
    assert "is a line: it has no nonlinearity" in facts
    assert "The nearest softmax has the slope" not in facts
    assert "The nearest softmax has the slope" in section_of(audits, [audit], tmp_path).blocks[0].to_text()


def test_the_words_of_the_audit_are_shown(tmp_path):
    (audit,) = synthetic_runs.audits()
    made = section_of(audits, [dataclasses.replace(audit, meaning=("It <is> so.",), notes=("A note.",))], tmp_path)
    shown = "".join(block for block in made.blocks if isinstance(block, str))
    assert "<h4>What it means</h4>" in shown
    assert "<li>It &lt;is&gt; so.</li>" in shown
    assert "<li>A note.</li>" in shown
    assert "What it means" not in "".join(
        block for block in section_of(audits, [audit], tmp_path).blocks if isinstance(block, str)
    )


def test_zeros_have_no_place_on_a_logarithmic_axis(tmp_path):
    (audit,) = synthetic_runs.audits()
    kls = {0: 2.0, 1: 1.0, 2: 1.5, 4: 5e-4, 8: 1e-17}
    bounds = {0: 2.0, 1: 1.0, 2: 1.0, 4: 5e-4, 8: 1e-17}
    points = tuple(TruncationPoint(width=k, kl=kls[k], bound=bounds[k]) for k in kls)
    truncation = dataclasses.replace(audit.truncation, points=points)
    made = section_of(audits, [dataclasses.replace(audit, truncation=truncation)], tmp_path)
    (figure,) = (block for block in made.blocks if getattr(block, "id", "").endswith("truncation"))
    assert figure.traces[0].data["x"] == [1, 2, 4, 8]
    assert figure.traces[0].data["y"] == [1.0, 1.0, 5e-4, None]
    assert figure.traces[1].data["y"] == [1.0, 1.5, 5e-4, None]
    assert "2.00 nats at rank 0, and below 0.001 from rank 4 on" in figure.summary
    same = tuple(dataclasses.replace(point, kl=point.bound) for point in points)
    truncation = dataclasses.replace(audit.truncation, points=same)
    made = section_of(audits, [dataclasses.replace(audit, truncation=truncation)], tmp_path)
    (figure,) = (block for block in made.blocks if getattr(block, "id", "").endswith("truncation"))
    assert len(figure.traces) == 1


def test_heads_are_compared_at_a_width_that_they_share(tmp_path):
    (audit,) = synthetic_runs.audits()
    alone = HeadAtWidth(head="softmax", width=64, kl=1e-6, spread=0.0, softmax_width=64.0)
    target = dataclasses.replace(audit.target, heads=(*audit.target.heads, alone))
    made = section_of(audits, [dataclasses.replace(audit, target=target)], tmp_path)
    (figure,) = (block for block in made.blocks if getattr(block, "id", "").endswith("target"))
    assert "At width 32: softmax 0.0312, sigsoftmax 0.0312, MoS(K=4) 0.00937 nats." in figure.summary


def test_what_holds_for_several_models_is_said_once(tmp_path):
    (audit,) = synthetic_runs.audits()
    bare = dataclasses.replace(audit, target=None, argmax=None)
    made = section_of(audits, [bare, dataclasses.replace(bare, source="another")], tmp_path)
    (finding,) = made.findings
    assert finding.startswith("a tiny model, another: What this output layer costs")
