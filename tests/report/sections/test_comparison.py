"""Comparisons: differences with their errors, seeds, and what follows."""

import dataclasses
import math

from tests.report import synthetic_runs
from tests.report.sections.making import rows_of, section_of

from sigsoftmax.records import Payload
from sigsoftmax.report.sections import comparison


def test_comparisons_speak_of_errors_and_seeds(tmp_path):
    made = section_of(comparison, synthetic_runs.comparisons(), tmp_path)
    assert made.findings[0].startswith("KL to the truth against softmax: sigsoftmax")
    assert "standard errors of the difference" in made.findings[0]
    assert "With one seed, what another would change" in made.findings[0]
    rows = rows_of(made.figures[0].table)
    assert rows[0][:3] == ["the truth", "–", f"{math.exp(3.30):.2f}"]
    assert rows[1][0] == "MoS(K=4)"
    several = section_of(comparison, synthetic_runs.comparisons(seeds=3), tmp_path)
    assert not any("With one seed" in text for text in several.findings)
    assert rows_of(several.figures[0].table)[1][1] == "3"


def test_rank_is_not_nats_only_if_the_data_show_it(tmp_path):
    def changed(rank: int, kl: float) -> list[Payload]:
        softmax, sigsoftmax = synthetic_runs.comparisons()[:2]
        return [softmax, dataclasses.replace(sigsoftmax, rank=rank, kl=kl)]

    worse = section_of(comparison, changed(200, 0.2), tmp_path)
    assert any(text.startswith("Rank is not nats: sigsoftmax has rank 200") for text in worse.findings)
    better = section_of(comparison, changed(200, 0.1), tmp_path)
    assert not any("Rank is not nats" in text for text in better.findings)


def test_comparisons_without_a_truth_compare_perplexities(tmp_path):
    payloads = [
        dataclasses.replace(p, kl=None, kl_standard_error=None, entropy_rate=None) for p in synthetic_runs.comparisons()
    ]
    made = section_of(comparison, payloads, tmp_path)
    assert made.findings[0].startswith("Test perplexity against softmax: sigsoftmax")
    assert "one seed: nothing follows" in made.findings[0]
    assert made.figures[0].title == "Test perplexity, by head"
