"""The table and the words of a comparison: they follow the numbers, and claim no more than these resolve."""

import numpy as np
import pytest

from sigsoftmax.experiments.comparison_words import Difference, Measured, findings, table
from sigsoftmax.records.model_spectra import ModelSpectrum
from sigsoftmax.records.spectra import Spectrum
from sigsoftmax.records.training import ComparisonRecord, RunIdentity

POSITIONS = 400


def measured(head, level, *, seed=1, rank=14, noise=0.01, truth=True):
    around_zero = np.random.default_rng(seed).standard_normal(POSITIONS)
    values = level + noise * (around_zero - around_zero.mean())
    run = RunIdentity(
        recipe=f"language-{head}",
        phase="finetune",
        head=head,
        corpus="language",
        corpus_checksum="x",
        seed=seed,
        precision="float32",
        parameters=1234,
    )
    mean = float(values.mean())
    record = ComparisonRecord(
        run=run,
        epochs=3,
        updates=30,
        valid_loss=4.0,
        test_loss=3.5 + mean,
        entropy_rate=3.5 if truth else None,
        kl=mean if truth else None,
        kl_standard_error=0.002 if truth else None,
        rank=rank,
        rank_bound=14 if head.startswith("softmax") else 200,
        words=200,
        contexts=400,
        seconds=75.0,
    )
    spectrum = Spectrum(source="x", words=200, contexts=400, singular_values=(1.0,))
    return Measured(record=record, spectrum=ModelSpectrum(run=run, split="test", spectrum=spectrum), values_L=values)


def test_a_difference_of_one_seed_is_over_positions():
    # Both have the same noise at the same positions: the pairs differ by exactly 0.1.
    difference = Difference.of([measured("mos(K=4)", 0.3)], [measured("softmax", 0.4)])
    assert difference.mean == pytest.approx(-0.1)
    assert difference.standard_error == pytest.approx(0.0, abs=1e-12)
    assert (difference.seeds, difference.is_resolved) == (1, True)


def test_a_difference_of_several_seeds_is_over_seeds():
    softmax = [measured("softmax", 0.4, seed=seed) for seed in (1, 2, 3)]
    other = [measured("gss(k=0.0)", 0.4 + shift, seed=seed) for seed, shift in ((1, -0.1), (2, -0.2), (3, 0.0))]
    difference = Difference.of(other, softmax)
    assert difference.mean == pytest.approx(-0.1)
    assert difference.standard_error == pytest.approx(0.1 / 3**0.5)
    # Student's factor for two degrees of freedom is 4.30: an interval of 0.25 either way.
    assert not difference.is_resolved


def test_pairs_are_matched_by_seed_and_not_by_order():
    softmax = [measured("softmax", 0.1 * seed, seed=seed) for seed in (1, 2, 3)]
    other = [measured("sigsoftmax", 0.1 * seed - 0.05, seed=seed) for seed in (3, 1, 2)]
    difference = Difference.of(other, softmax)
    assert difference.mean == pytest.approx(-0.05)
    assert difference.standard_error == pytest.approx(0.0, abs=1e-12)


def test_the_table_has_a_row_a_head_worst_first():
    results = [measured("softmax", 0.4), measured("sigsoftmax", 0.41, rank=200), measured("mos(K=4)", 0.3, rank=200)]
    lines = table(results).splitlines()
    heads = [line.split()[0] for line in lines if line.startswith(("softmax", "sigsoftmax", "mos"))]
    assert heads == ["sigsoftmax", "softmax", "mos(K=4)"]
    assert "perplexity 33.12" in lines[-3]
    assert "1,234" in lines[4]
    assert "1 min 15 s" in lines[4]


def test_one_seed_is_said_to_be_one_seed():
    text = "\n".join(findings([measured("softmax", 0.4), measured("mos(K=4)", 0.3, rank=200)]))
    assert "mos(K=4): 0.1000 nats below (25.0% of it), more than the test text leaves open" in text
    assert "One seed: nothing here tells how far another seed would move a head" in text
    assert "resolved by" not in text


def test_what_seeds_do_not_resolve_is_not_claimed():
    softmax = [measured("softmax", level, seed=seed) for seed, level in ((1, 0.40), (2, 0.45), (3, 0.35))]
    near = [measured("sigsoftmax", level, seed=seed, rank=200) for seed, level in ((1, 0.42), (2, 0.41), (3, 0.36))]
    far = [measured("mos(K=4)", level, seed=seed, rank=200) for seed, level in ((1, 0.20), (2, 0.25), (3, 0.15))]
    text = "\n".join(findings([*softmax, *near, *far]))
    assert "sigsoftmax: 0.0033 nats below (0.8% of it), not resolved by 3 seeds" in text
    assert "mos(K=4): 0.2000 nats below (50.0% of it), resolved by 3 seeds" in text
    assert "The 2 heads of full or almost full rank have KL from 0.2000 to 0.3967" in text


def test_the_control_for_scale_is_compared():
    control = measured("softmax(alpha=1.5)", 0.39)
    text = "\n".join(findings([measured("softmax", 0.4), control, measured("sigsoftmax", 0.395, rank=200)]))
    assert "Against the control for scale, softmax(alpha=1.5), sigsoftmax has 0.0050 nats of KL above" in text


def test_without_a_truth_losses_are_compared():
    results = [measured("softmax", 0.4, truth=False), measured("mos(K=4)", 0.3, truth=False)]
    assert "KL" not in table(results)
    assert "loss minus" in table(results)
    assert "- loss against softmax's 0.4" in "\n".join(findings(results))


def test_heads_without_softmax_have_no_baseline():
    results = [measured("sigsoftmax", 0.4), measured("mos(K=4)", 0.3)]
    assert "minus" not in table(results)
    assert "against softmax" not in "\n".join(findings(results))
