"""The paper's tables beside ours: means, spreads, settings kept apart, and verdicts that follow from the seeds."""

import dataclasses
import math

import pytest
from tests.report import synthetic_runs
from tests.report.sections.making import material_of, rows_of, section_of, table_of

from sigsoftmax.records import Payload
from sigsoftmax.records.published import paper
from sigsoftmax.records.schemas.training import DynamicEvaluationRecord, EpochRecord, EvaluationRecord
from sigsoftmax.records.statistics import Sample
from sigsoftmax.report.sections import reproduction, spectra
from sigsoftmax.report.sections.perplexities import collect, perplexity_table
from sigsoftmax.report.tables import Table


def run_of(head: str, seed: int, valid: float, test: float) -> list[Payload]:
    """A finetuned model with its two evaluations."""
    return [
        EvaluationRecord(
            run=synthetic_runs.identity(head, seed, phase="finetune"),
            split=split,
            batch=10 if split == "valid" else 1,
            loss=math.log(value),
            loss_over_rows=0.0,
            tokens=1,
            epoch=1,
            seconds=1.0,
        )
        for split, value in (("valid", valid), ("test", test))
    ]


def test_ours_stand_under_the_papers_with_mean_and_spread(tmp_path):
    seeds = {1: (59.0, 57.0), 2: (59.4, 57.2), 3: (59.8, 57.7)}
    payloads = [p for seed, (valid, test) in seeds.items() for p in run_of("softmax", seed, valid, test)]
    made = section_of(reproduction, payloads, tmp_path)
    rows = rows_of(table_of(made, "Table 4."))
    assert rows[0] == ["softmax"]
    assert rows[1][:7] == ["paper", "10", "–", "61.1 ± 0.4", "58.8 ± 0.4", "59.2 ± 0.4", "57.0 ± 0.6"]
    assert ["ours", "3", "–", "–", "–", "59.40 ± 0.40", "57.30 ± 0.36", "–", "–"] in rows
    assert not [b for b in made.blocks if isinstance(b, Table) and b.caption.startswith("Table 1.")]
    assert "No records for tables 1, 2 and 5 of the paper." in "".join(b for b in made.blocks if isinstance(b, str))


def test_heads_without_a_run_may_say_so(tmp_path):
    material = material_of(run_of("softmax", 1, 59.0, 57.0), tmp_path)
    variants, looks = collect(material)["ptb"], material.looks()
    rows = rows_of(perplexity_table(paper.TABLES[3], "ptb", "", variants, looks, missing="not run yet"))
    assert sum(row[0] == "ours: not run yet" for row in rows) == len(paper.HEADS) - 1
    (ranks,) = spectra.tables(material, looks, missing="not run yet")
    assert sum(row[0] == "ours: not run yet" for row in rows_of(ranks)) == len(paper.HEADS)


def test_what_differs_from_the_recipe_is_kept_apart_and_said(tmp_path):
    usual = run_of("softmax", 1, 59.0, 57.0)
    changed = [dataclasses.replace(p, run=dataclasses.replace(p.run, overrides=("training.epochs=22",))) for p in usual]
    fast = [dataclasses.replace(p, run=dataclasses.replace(p.run, precision="bf16")) for p in usual]
    rows = rows_of(table_of(section_of(reproduction, [*usual, *changed, *fast], tmp_path), "Table 4."))
    ours = [row[0] for row in rows if row[0].startswith("ours")]
    assert ours == ["ours", "ours, training.epochs=22", "ours, bf16"]


def test_the_published_batch_is_preferred(tmp_path):
    (valid, _) = run_of("softmax", 1, 59.0, 57.0)
    other = dataclasses.replace(valid, batch=1, loss=math.log(70.0))
    for payloads in ([valid, other], [other, valid]):
        rows = rows_of(table_of(section_of(reproduction, payloads, tmp_path), "Table 4."))
        assert next(row for row in rows if row[0] == "ours")[5] == "59.00"


def test_epochs_stand_in_for_a_missing_evaluation_and_are_marked(tmp_path):
    epochs = [p for p in synthetic_runs.training({"softmax": (57.0, 402)}, epochs=5) if isinstance(p, EpochRecord)]
    made = section_of(reproduction, epochs, tmp_path)
    table = table_of(made, "Table 4.")
    ours = next(row for row in rows_of(table) if row[0] == "ours")
    best = Sample.of([math.exp(min(p.valid_loss for p in epochs if p.run.seed == s)) for s in synthetic_runs.SEEDS])
    assert ours[2:4] == ["5", f"{best.mean:.2f} ± {best.deviation:.2f} †"]
    assert any("†" in note for note in table.notes)


def test_only_complete_evaluations_at_the_chosen_point_count(tmp_path):
    every = [p for p in synthetic_runs.training({"softmax": (57.0, 402)}) if isinstance(p, DynamicEvaluationRecord)]
    cut = [dataclasses.replace(p, complete=False) for p in every if p.split == "test"]
    made = section_of(reproduction, [p for p in every if p.split == "valid"] + cut, tmp_path)
    ours = next(row for row in rows_of(table_of(made, "Table 1.")) if row[0] == "ours")
    assert ours[3] != "–"
    assert ours[4] == "–"


@pytest.mark.parametrize(
    ("second", "words"),
    [
        ((56.9, 57.3, 57.2), "too few seeds to tell"),
        ((50.1, 50.2, 50.3), "sigsoftmax is lower than softmax"),
        ((64.1, 64.2, 64.3), "softmax is lower than sigsoftmax"),
    ],
)
def test_the_verdict_on_a_gap_follows_the_seeds(tmp_path, second, words):
    payloads = [p for seed, value in enumerate((57.0, 57.2, 57.4)) for p in run_of("softmax", seed, value, value)]
    payloads += [p for seed, value in enumerate(second) for p in run_of("sigsoftmax", seed, value, value)]
    made = section_of(reproduction, payloads, tmp_path)
    assert len(made.findings) == 1
    assert words in made.findings[0]
    assert "(paper: +0.40)" in made.findings[0]
    row = rows_of(table_of(made, "softmax − sigsoftmax"))[1]
    assert row[0] == "Test, finetuned"
    assert row[1] == "+0.40 ± 0.23"


def test_one_seed_is_not_a_result(tmp_path):
    payloads = [*run_of("softmax", 1, 59.0, 57.0), *run_of("sigsoftmax", 1, 58.0, 56.0)]
    made = section_of(reproduction, payloads, tmp_path)
    assert "fewer than 3 seeds in common: nothing is resolved" in made.findings[0]
    assert "the paper's gap takes about 27 of each" in made.findings[0]


def test_gaps_are_paired_by_seed(tmp_path):
    """The spread over seeds is common to both heads: a gap much smaller than it is resolved."""
    first, gaps = (50.0, 60.0, 70.0), (0.9, 1.0, 1.1)
    payloads = [p for seed, value in enumerate(first) for p in run_of("softmax", seed, value, value)]
    payloads += [p for seed in (0, 1, 2) for p in run_of("sigsoftmax", seed, *[first[seed] - gaps[seed]] * 2)]
    # A seed that the other head does not have is in no pair.
    payloads += run_of("sigsoftmax", 7, 20.0, 20.0)
    row = rows_of(table_of(section_of(reproduction, payloads, tmp_path), "softmax − sigsoftmax"))[1]
    half = 4.302653 * 0.1 / math.sqrt(3.0)
    assert row[2:4] == ["+1.00", f"+{1.0 - half:.2f} to +{1.0 + half:.2f}"]
    assert row[5:] == ["3", "sigsoftmax is lower than softmax"]
    ratios = [(value - gap) / value for value, gap in zip(first, gaps, strict=True)]
    assert row[4] == f"−{100.0 * (1.0 - math.prod(ratios) ** (1 / 3)):.2f} %"


def test_heads_without_a_common_seed_are_not_compared(tmp_path):
    payloads = [*run_of("softmax", 1, 59.0, 57.0), *run_of("sigsoftmax", 2, 58.0, 56.0)]
    assert section_of(reproduction, payloads, tmp_path).findings == []


def test_the_control_for_scale_is_compared_with_both(tmp_path):
    payloads = [p for head in ("softmax", "softmax(alpha=1.5)", "sigsoftmax") for p in run_of(head, 1, 59.0, 57.0)]
    captions = [b.caption for b in section_of(reproduction, payloads, tmp_path).blocks if isinstance(b, Table)]
    assert sum("softmax(alpha=1.5)" in caption for caption in captions) == 2


def test_heads_under_different_settings_are_not_compared(tmp_path):
    first = run_of("softmax", 1, 59.0, 57.0)
    second = [
        dataclasses.replace(p, run=dataclasses.replace(p.run, precision="bf16"))
        for p in run_of("sigsoftmax", 1, 58, 56)
    ]
    assert section_of(reproduction, [*first, *second], tmp_path).findings == []


def test_a_head_far_off_is_not_shown_at_first(tmp_path):
    made = section_of(reproduction, synthetic_runs.training(epochs=2), tmp_path)
    figure = made.figures[0]
    assert {switch.label: switch.on for switch in figure.legend}["ReLU"] is False
    assert sum(switch.on for switch in figure.legend) == 5


def test_other_corpora_have_a_table_of_their_own(tmp_path):
    payloads = [
        dataclasses.replace(p, run=dataclasses.replace(p.run, corpus="my-folder"))
        for p in run_of("softmax", 1, 59.0, 57.0)
    ]
    made = section_of(reproduction, payloads, tmp_path)
    table = table_of(made, "Perplexity on my-folder")
    assert [column.title for column in table.columns] == ["Source", "Seeds", "Epochs", "Validation", "Test"]
    assert "paper" not in [row[0] for row in rows_of(table)]
    assert made.title == "Perplexities"


def test_points_on_the_edge_of_the_grid_are_named(tmp_path):
    every = [p for p in synthetic_runs.training({"softmax": (57.0, 402)}) if isinstance(p, DynamicEvaluationRecord)]
    table = table_of(section_of(reproduction, every, tmp_path), "Dynamic evaluation on Penn Treebank")
    rates, decays = ({point[i] for point in synthetic_runs.GRID} for i in (0, 1))
    for row in rows_of(table):
        rate, decay = float(row[3]), float(row[4])
        edges = [
            name
            for name, value, values in (("η", rate, rates), ("λ", decay, decays))
            if any(math.isclose(value, edge, rel_tol=1e-3) for edge in (min(values), max(values)))
        ]
        assert row[-1] == (" and ".join(edges) or "no")
        assert row[-2] == "24"


def test_dynamic_evaluation_of_a_model_that_was_not_finetuned_is_marked(tmp_path):
    every = [p for p in synthetic_runs.training({"softmax": (57.0, 402)}) if isinstance(p, DynamicEvaluationRecord)]
    finetuned = [p for p in every if p.split == "test" and p.run.seed == synthetic_runs.SEEDS[0]]
    bare = [
        dataclasses.replace(p, run=dataclasses.replace(p.run, phase="train"), loss=math.log(60.0)) for p in finetuned
    ]

    def shown(*payloads: Payload) -> str:
        table = table_of(section_of(reproduction, payloads, tmp_path), "Table 1.")
        assert any("‡" in note for note in table.notes) is (payloads == tuple(bare))
        return next(row for row in rows_of(table) if row[0] == "ours")[4]

    assert shown(*bare) == "60.00 ‡"
    assert shown(*finetuned) == shown(*finetuned, *bare) == shown(*bare, *finetuned) != "60.00"


def test_the_sentence_is_about_what_has_seeds(tmp_path):
    payloads = []
    for head, values in (("softmax", (57.0, 57.2, 57.1)), ("sigsoftmax", (50.0, 50.2, 50.1))):
        for seed, value in enumerate(values):
            payloads += run_of(head, seed, value, value)[:1]
        payloads += run_of(head, 0, 55.0, 55.0)[1:]
    (finding,) = section_of(reproduction, payloads, tmp_path).findings
    assert finding.startswith("Penn Treebank, validation, finetuned: softmax minus sigsoftmax is +7.00")
