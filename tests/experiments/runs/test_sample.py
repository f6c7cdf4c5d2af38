"""Text from a checkpoint: a seed means one text, lines end where the model ends them."""

import pytest
import torch
from tests.experiments.small_runs import small_resources, small_runs

from sigsoftmax.experiments.runs.evaluate import evaluate_best
from sigsoftmax.experiments.runs.executors import train_runs
from sigsoftmax.experiments.runs.sample import SampleConfig, run, sampled_ids
from sigsoftmax.lm.saving.saved_models import load_model


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sample")
    [(one, _)] = train_runs(small_runs(folder, "tiny-softmax"), small_resources(folder), evaluate_best)
    return one.best


def text(checkpoint, **options):
    return "".join(run(SampleConfig(checkpoint=checkpoint, **options)))


def test_a_seed_means_one_text(checkpoint):
    first = text(checkpoint, words=50, seed=3)
    assert text(checkpoint, words=50, seed=3) == first
    assert text(checkpoint, words=50, seed=4) != first


def test_so_many_words_and_lines_without_spaces_around(checkpoint):
    found = text(checkpoint, words=60)
    # An end of line is a word of the text and is not printed as one.
    assert 60 - found.count("\n") <= len(found.split()) <= 60
    assert "<eos>" not in found
    assert all(line == line.strip() for line in found.splitlines())


def test_the_prompt_stands_first(checkpoint):
    assert text(checkpoint, words=4, prompt="word3 word14").startswith("word3 word14 ")


def test_an_unknown_word_of_the_prompt_is_named(checkpoint):
    with pytest.raises(ValueError, match=r"'wrod3' is not among .* 'word3'"):
        text(checkpoint, prompt="wrod3")


def test_temperature_zero_takes_the_likeliest(checkpoint):
    assert text(checkpoint, words=20, temperature=0.0, seed=1) == text(checkpoint, words=20, temperature=0.0, seed=2)


def test_draws_follow_the_probabilities(checkpoint):
    model = load_model(checkpoint).model
    generator = torch.Generator().manual_seed(0)
    counts = torch.zeros(model.vocabulary_size)
    for _ in range(400):
        counts[next(sampled_ids(model, [0], temperature=1.0, generator=generator))] += 1
    with torch.no_grad():
        expected = model.log_probs(model.features(torch.zeros(1, 1, dtype=torch.int64), model.zero_state(1)))[
            0, 0
        ].exp()
    # Five standard deviations of a binomial count.
    assert ((counts - 400 * expected).abs() < 5 * (400 * expected * (1 - expected)).sqrt() + 1).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"words": 0}, "words must be a positive integer"),
        ({"temperature": -1.0}, "temperature must be a number of at least 0"),
    ],
)
def test_bad_settings_are_refused(options, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        SampleConfig(checkpoint=tmp_path, **options)
