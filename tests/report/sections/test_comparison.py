"""The section of comparisons: the seeds of every head, drawn, and the ranks of their matrices."""

import dataclasses
import math

from tests.report import synthetic_runs
from tests.report.sections.making import rows_of, section_of, table_of

from sigsoftmax.report.sections import comparison


def test_the_section_shows_one_comparison_of_all_seeds(tmp_path):
    made = section_of(comparison, synthetic_runs.comparisons(seeds=3), tmp_path)
    assert len(made.figures) == 1
    rows = rows_of(made.figures[0].table)
    assert rows[0][0] == "MoS(K=4)"
    details = rows_of(table_of(made, "Perplexity and rank"))
    assert details[0][:2] == ["the truth", f"{math.exp(3.30):.2f}"]
    assert details[1][3] == "199"
    assert made.findings[0].startswith("The 2 heads of full or almost full rank have a KL to the truth from 0.1")
    # The mean, and a dot for each seed.
    assert len(made.figures[0].traces[0].data["x"]) == 4


def test_comparisons_without_a_truth_compare_perplexities(tmp_path):
    payloads = [
        dataclasses.replace(p, kl=None, kl_standard_error=None, entropy_rate=None) for p in synthetic_runs.comparisons()
    ]
    made = section_of(comparison, payloads, tmp_path)
    assert made.figures[0].title == "Test perplexity, by head"


def test_two_comparisons_are_told_apart(tmp_path):
    some = synthetic_runs.comparisons()
    longer = [dataclasses.replace(p, epochs=2 * p.epochs) for p in some]
    made = section_of(comparison, [*some, *longer], tmp_path)
    assert len(made.figures) == 2
    assert all("epochs" in text.partition(":")[0] for text in made.findings)
