"""Audits: what was found, and what cannot be known."""

import dataclasses

from tests.report import synthetic_runs
from tests.report.sections.making import section_of

from sigsoftmax.report.sections import audits


def test_an_audit_without_a_target_says_that_the_cost_is_not_known(tmp_path):
    (audit,) = synthetic_runs.audits()
    made = section_of(audits, [audit], tmp_path)
    assert "MoS(K=4) at width 8 can reach" in made.findings[0]
    assert "3 words can never be the first choice" in made.findings[1]
    bare = dataclasses.replace(
        audit, target=None, argmax=None, bend=None, spectrum=None, truncation=None, gradient=None
    )
    made = section_of(audits, [dataclasses.replace(bare, was_interrupted=True)], tmp_path)
    assert made.findings == [
        (
            "What another output layer would buy in nats cannot be known without a target: a softmax model's own "
            "log-probabilities have a rank that its width already allows."
        )
    ]
    assert any("was interrupted" in block for block in made.blocks if isinstance(block, str))
    collapsed = dataclasses.replace(audit.bend, kl_to_nearest_softmax=1e-6)
    made = section_of(audits, [dataclasses.replace(bare, bend=collapsed)], tmp_path)
    assert "has collapsed to softmax(1.3 z)" in made.findings[1]
