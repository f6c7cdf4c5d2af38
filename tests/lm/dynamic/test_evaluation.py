"""Dynamic evaluation: the numbers of a loop written by hand, static numbers at rates of zero, a model left alone."""

import copy
import math
from dataclasses import replace

import pytest
import torch
from tests.lm.dynamic.test_rates import sum_form
from tests.lm.masks import draw_masks
from tests.lm.naive_dynamic_evaluation import NaiveModel
from tests.records import samples

from sigsoftmax.lm.config import DynamicEvaluationConfig, ModelConfig
from sigsoftmax.lm.dynamic import windows as window_gradients
from sigsoftmax.lm.dynamic.adaptation import pull_and_step
from sigsoftmax.lm.dynamic.evaluation import (
    DynamicEvaluation,
    DynamicEvaluator,
    DynamicProgress,
    GradientStatistics,
    adapt,
)
from sigsoftmax.lm.dynamic.rates import Rates
from sigsoftmax.lm.model.language_model import LanguageModel
from sigsoftmax.lm.training.evaluation import evaluate
from sigsoftmax.lm.training.trainer import Diverged
from sigsoftmax.records import Record
from sigsoftmax.records.schemas.training import DynamicEvaluationRecord

WORDS = 13
CONFIG = DynamicEvaluationConfig(window=5, statistics_batch=4)
RATES = Rates(learning_rate=3e-3, decay=2e-2, epsilon=1e-4)
MODELS = {
    "softmax": ModelConfig(head="softmax", embedding=6, hidden=(7, 6)),
    "sigsoftmax": ModelConfig(head="sigsoftmax", embedding=6, hidden=(7, 8, 6)),
    "shifted_sigsoftmax": ModelConfig(head="shifted_sigsoftmax", embedding=6, hidden=(7, 6)),
    "moss": ModelConfig(head="moss(K=3)", embedding=5, hidden=(7, 6), floor=1e-8, dropout_latent=0.3),
}
TRAIN = torch.randint(WORDS, (203,), generator=torch.Generator().manual_seed(1))  # 4 columns: 10 windows, the last of 4
TEXT = torch.randint(WORDS, (43,), generator=torch.Generator().manual_seed(2))  # 9 windows, the last of 2


def build(name="softmax"):
    model = LanguageModel(MODELS[name], WORDS, seed=5)
    with torch.no_grad():
        # Away from the small weights of the beginning, where the gradients of deep layers are next to nothing.
        for parameter in model.parameters():
            parameter.mul_(3.0)
        model.output.bias.normal_(0.0, 0.3)
    return model


def naive(name, model):
    head, components = {"moss": ("sigsoftmax", 3)}.get(name, (name, 1))
    return NaiveModel(model, head, components, model.config.floor)


def weights_of(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def assert_same_bits(model, weights):
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, weights[name]), name


@pytest.fixture(scope="module")
def model():
    return build()


@pytest.fixture(scope="module")
def statistics(model):
    return GradientStatistics.of(model, TRAIN, CONFIG)


# --- the numbers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_statistics_are_those_of_the_naive_loop(name):
    model = build(name).double()
    statistics = GradientStatistics.of(model, TRAIN, CONFIG)
    sums, windows = naive(name, model).sums_of_squares(TRAIN, 4, 5)
    assert statistics.windows == windows == 10
    assert len(statistics.rms) == len(sums) == len(list(model.parameters()))
    for parameter, expected in sums.items():
        torch.testing.assert_close(statistics.rms[parameter], (expected / windows).sqrt(), rtol=1e-9, atol=1e-14)
    assert statistics.mean == pytest.approx(
        sum(float(tensor.mean()) for tensor in statistics.rms.values()) / len(statistics.rms), rel=1e-12
    )


@pytest.mark.parametrize("rates", [RATES, Rates(learning_rate=1e-2, decay=3.0, epsilon=1e-4)], ids=["mild", "clipped"])
@pytest.mark.parametrize("name", MODELS)
def test_adaptation_is_that_of_the_naive_loop(name, rates):
    model = build(name).double()
    statistics = GradientStatistics.of(model, TRAIN, CONFIG)
    result = adapt(model, statistics, TEXT, rates)
    expected = naive(name, model).rms_form(
        TRAIN, TEXT, batch=4, window=5, learning_rate=rates.learning_rate, decay=rates.decay, epsilon=rates.epsilon
    )
    assert result.loss == pytest.approx(expected, rel=1e-9)
    static = adapt(model, statistics, TEXT, replace(rates, learning_rate=0.0))
    assert abs(result.loss - static.loss) > 1e-5  # it does adapt
    without = adapt(model, statistics, TEXT, replace(rates, decay=0.0))
    assert abs(result.loss - without.loss) > 1e-6  # and it does go back


@pytest.mark.parametrize("name", MODELS)
def test_float32_is_near_float64(name):
    model = build(name)
    double = copy.deepcopy(model).double()
    losses = [adapt(m, GradientStatistics.of(m, TRAIN, CONFIG), TEXT, RATES).loss for m in (model, double)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_the_two_scalings_agree_after_conversion(name):
    model = build(name).double()
    statistics = GradientStatistics.of(model, TRAIN, CONFIG)
    given = {"learning_rate": 8e-3, "decay": 0.3, "epsilon": 3e-4}
    expected = naive(name, model).sum_form(TRAIN, TEXT, batch=4, window=5, **given)
    rates = Rates.from_sum_form(**given, windows=statistics.windows, tensors=len(statistics.rms))
    assert adapt(model, statistics, TEXT, rates).loss == pytest.approx(expected, rel=1e-9)
    back = sum_form(rates, windows=statistics.windows, tensors=len(statistics.rms))
    assert naive(name, model).sum_form(TRAIN, TEXT, batch=4, window=5, **back) == pytest.approx(expected)


@pytest.mark.parametrize("name", MODELS)
def test_rates_of_zero_give_the_static_loss(name):
    model = build(name)
    statistics = GradientStatistics.of(model, TRAIN, CONFIG)
    static = evaluate(model, TEXT.unsqueeze(1))
    result = adapt(model, statistics, TEXT, Rates(learning_rate=0.0, decay=0.0))
    assert result.tokens == static.scored == 42
    assert result.loss == pytest.approx(static.loss, rel=1e-6)
    # Without learning there is nothing to go back from.
    assert adapt(model, statistics, TEXT, Rates(learning_rate=0.0, decay=5.0)).loss == result.loss


def test_learning_helps_on_text_that_repeats_itself(model, statistics):
    text = TEXT[:20].repeat(12)
    static = adapt(model, statistics, text, Rates(learning_rate=0.0, decay=0.0))
    assert adapt(model, statistics, text, Rates(learning_rate=2e-2, decay=1e-3)).loss < static.loss - 0.1


def test_no_dropout_whatever_the_rates_and_whatever_was_drawn_before():
    model = build("moss")
    undropped = LanguageModel(
        replace(
            MODELS["moss"],
            dropout_words=0.0,
            dropout_input=0.0,
            dropout_hidden=0.0,
            dropout_output=0.0,
            dropout_latent=0.0,
            weight_drop=0.0,
        ),
        WORDS,
    )
    undropped.load_state_dict(model.state_dict())
    masks = draw_masks(model.config, words=WORDS, batch=1, generator=torch.Generator().manual_seed(0))
    model.features(TEXT[:3].unsqueeze(1), model.zero_state(1), masks)
    losses = [adapt(m, GradientStatistics.of(m, TRAIN, CONFIG), TEXT, RATES).loss for m in (model, undropped)]
    assert losses[0] == losses[1]


@pytest.mark.parametrize(
    ("head", "tensors"), [("softmax", 14), ("shifted_sigsoftmax", 15), ("gss(k=learned)", 15), ("moss(K=3)", 17)]
)
def test_every_tensor_counts_once_the_tied_matrix_and_what_the_function_learns_too(head, tensors):
    model = LanguageModel(ModelConfig(head=head, embedding=6, hidden=(7, 7, 6)), WORDS)
    statistics = GradientStatistics.of(model, TRAIN, CONFIG)
    assert len(statistics.rms) == tensors
    assert statistics.mean == pytest.approx(
        sum(float(tensor.double().mean()) for tensor in statistics.rms.values()) / tensors
    )


def test_what_the_function_learns_adapts():
    model = build("shifted_sigsoftmax")
    statistics = GradientStatistics.of(model, TRAIN, CONFIG)
    of_b = "output.function_parameters.b"
    # With a huge MS everywhere else, b alone moves. The order of the statistics does not matter.
    frozen = {name: torch.full_like(tensor, 1e12) for name, tensor in statistics.rms.items() if name != of_b}
    only_b = replace(statistics, rms={of_b: statistics.rms[of_b], **frozen})
    static = adapt(model, statistics, TEXT, Rates(learning_rate=0.0, decay=0.0))
    moved = adapt(model, only_b, TEXT, Rates(learning_rate=0.05, decay=0.0))
    assert abs(moved.loss - static.loss) > 1e-4


# --- the way back ---------------------------------------------------------------------------------------------------


def pulls(statistics, decay, **clipped):
    rates_14 = statistics.rates_of_steps([Rates(learning_rate=0.0, decay=decay)], **clipped)
    return [pull_and_step(rms, rates_14)[0][0] for rms in statistics.rms.values()]


@pytest.mark.parametrize("decay", [0.0, 1e-3, 0.2, 3.0, 1e6])
def test_the_way_back_is_never_overshot(statistics, decay):
    shares = pulls(statistics, decay)
    for share, rms in zip(shares, statistics.rms.values(), strict=True):
        assert share.max() <= 1.0
        torch.testing.assert_close(share, (decay * rms / statistics.mean).clamp(max=1.0))
    largest = max(float(rms.max()) for rms in statistics.rms.values()) / statistics.mean
    assert any((share == 1.0).any() for share in shares) == (decay * largest >= 1.0)


def test_a_clip_that_stays(statistics):
    free, kept = pulls(statistics, 0.5), pulls(statistics, 0.5, clipped_for=2.0)
    for share, rms in zip(kept, statistics.rms.values(), strict=True):
        torch.testing.assert_close(share, 0.5 * (rms / statistics.mean).clamp(max=1.0 / 2.0))
    assert not all(torch.equal(a, b) for a, b in zip(free, kept, strict=True))
    kept = pulls(statistics, 0.5, clipped_for=0.1)  # a smaller decay had clipped less
    assert all(torch.equal(a, b) for a, b in zip(free, kept, strict=True))


# --- a model left alone ---------------------------------------------------------------------------------------------


def test_the_model_is_the_same_bit_for_bit_and_a_run_can_be_repeated(model, statistics):
    weights = weights_of(model)
    evaluator = DynamicEvaluator(model, statistics, TEXT)
    losses = []
    for rates in (RATES, replace(RATES, learning_rate=1e-2), RATES):
        assert len(list(evaluator.launch(rates))) == 9
        losses.append(evaluator.results()[0].loss)
        assert_same_bits(model, weights)
    assert losses[0] == losses[2] != losses[1]
    assert all(parameter.grad is None for parameter in model.parameters())


def test_the_model_survives_an_interruption(model, statistics):
    weights = weights_of(model)

    def interrupt(_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        adapt(model, statistics, TEXT, RATES, progress=interrupt)
    with pytest.raises(KeyboardInterrupt):
        GradientStatistics.of(model, TRAIN, CONFIG, progress=interrupt)
    assert_same_bits(model, weights)

    evaluator = DynamicEvaluator(model, statistics, TEXT)
    run = evaluator.launch(RATES)
    next(run)
    run.close()
    assert_same_bits(model, weights)
    with pytest.raises(ValueError, match="no result before a run has ended"):
        evaluator.results()
    for _ in evaluator.launch(RATES):
        pass
    assert evaluator.results()[0].loss == adapt(model, statistics, TEXT, RATES).loss


def test_a_run_on_a_cpu_asks_for_no_stream(model, monkeypatch):
    def refuse(stream):
        raise AssertionError("it would initialise CUDA")

    monkeypatch.setattr(torch.cuda, "stream", refuse)
    statistics = GradientStatistics.of(model, TRAIN, CONFIG)
    assert adapt(model, statistics, TEXT, RATES, limit=2).tokens


def test_a_run_that_diverges_says_where_and_changes_nothing(model, statistics):
    weights = weights_of(model)
    evaluator = DynamicEvaluator(model, statistics, TEXT, split="valid")
    with pytest.raises(Diverged, match=r"window 2 of 9 of the valid text with learning_rate=1e\+38"):
        for _ in evaluator.launch(replace(RATES, learning_rate=1e38)):
            pass
    assert_same_bits(model, weights)
    [result] = evaluator.results()
    assert (result.loss, result.tokens, result.complete) == (math.inf, 5, False)


def test_runs_that_take_turns_are_the_runs_alone_even_if_one_diverges(model, statistics):
    several = (RATES, replace(RATES, learning_rate=1e38), replace(RATES, learning_rate=1e-2))
    evaluator = DynamicEvaluator(model, statistics, TEXT, at_once=3)
    assert len(list(evaluator.launch(*several))) == 9
    first, diverged, last = evaluator.results()
    assert (diverged.loss, diverged.tokens, diverged.complete) == (math.inf, 5, False)
    for result, rates in ((first, several[0]), (last, several[2])):
        assert replace(result, chosen=True, seconds=0.0) == replace(adapt(model, statistics, TEXT, rates), seconds=0.0)
    with pytest.raises(ValueError, match="as many rates as runs are made at once, 3, got 1"):
        next(evaluator.launch(RATES))
    with pytest.raises(ValueError, match="at_once must be a positive integer, got 0"):
        DynamicEvaluator(model, statistics, TEXT, at_once=0)


def test_a_broken_model_has_no_statistics():
    model = build()
    with torch.no_grad():
        model.embedding[3] = torch.nan
    with pytest.raises(Diverged, match="not finite at window 1 of the training text"):
        GradientStatistics.of(model, TRAIN, CONFIG)


# --- partial runs, progress, records --------------------------------------------------------------------------------


def test_a_limit_makes_it_the_evaluation_of_the_beginning(model, statistics):
    partial = adapt(model, statistics, TEXT, RATES, limit=3)
    assert (partial.tokens, partial.complete) == (15, False)
    beginning = adapt(model, statistics, TEXT[:16], RATES)
    assert beginning.complete
    assert partial.loss == beginning.loss
    assert adapt(model, statistics, TEXT, RATES, limit=9).complete
    assert adapt(model, statistics, TEXT, RATES, limit=1000).tokens == 42


def test_progress_tells_the_time_before_the_run_goes_on(model, statistics, monkeypatch):
    # However slow the machine is.
    monkeypatch.setattr(window_gradients, "SECONDS_BETWEEN_REPORTS", math.inf)
    seen: list[DynamicProgress] = []
    result = adapt(model, statistics, TEXT.repeat(3), RATES, progress=seen.append)
    first, last = seen[0], seen[-1]
    assert (first.window, first.windows) == (10, 26)
    assert first.seconds_per_window > 0.0
    assert first.seconds_left == pytest.approx(16 * first.seconds_per_window)
    assert first.seconds_left_in_all == first.seconds_left
    assert (last.window, last.loss, last.seconds_left) == (26, result.loss, 0.0)
    assert result.perplexity == math.exp(result.loss)
    assert replace(result, loss=1e5).perplexity == math.inf

    of_statistics: list[DynamicProgress] = []
    GradientStatistics.of(model, TRAIN, CONFIG, progress=of_statistics.append)
    assert (of_statistics[-1].split, of_statistics[-1].window, of_statistics[-1].rates) == ("train", 10, None)


def test_progress_of_several_runs_counts_those_that_wait():
    at = DynamicProgress(
        split="valid", rates=RATES, window=20, windows=100, loss=1.0, seconds_per_window=0.5, waiting=300, at_once=2
    )
    assert at.seconds_left == 40.0
    assert at.seconds_left_in_all == 40.0 + 75.0


def test_results_go_through_records(model, statistics):
    run = samples.identity("softmax", 1)
    result = adapt(model, statistics, TEXT, RATES, split="valid")
    diverged = replace(result, loss=math.inf, complete=False, chosen=False)
    for each in (result, diverged, replace(result, clip_in_place=True)):
        read = Record.from_json(Record.of(each.record(run)).to_json()).payload_as(DynamicEvaluationRecord)
        assert DynamicEvaluation.of_record(read) == each
    assert result.chosen  # the only one


# --- bad input ------------------------------------------------------------------------------------------------------


def test_texts_that_are_refused(model, statistics):
    with pytest.raises(ValueError, match="at least 2 tokens"):
        adapt(model, statistics, TEXT[:1], RATES)
    with pytest.raises(ValueError, match="between 0 and 12"):
        adapt(model, statistics, torch.tensor([1, WORDS]), RATES)
    with pytest.raises(ValueError, match="4 columns need at least 8 words"):
        GradientStatistics.of(model, TRAIN[:7], CONFIG)
    with pytest.raises(ValueError, match="between 0 and 12"):
        GradientStatistics.of(model, TRAIN + 5, CONFIG)


@pytest.mark.parametrize(
    "other",
    [
        replace(MODELS["softmax"], hidden=(8, 6)),
        replace(MODELS["softmax"], hidden=(6,)),
        replace(MODELS["softmax"], head="shifted_sigsoftmax"),
    ],
    ids=["wider", "shallower", "learned"],
)
def test_statistics_of_another_model_are_refused(statistics, other):
    with pytest.raises(ValueError, match=r"the statistics are of another model: '.*' has the shape"):
        adapt(LanguageModel(other, WORDS), statistics, TEXT, RATES)


def test_a_model_that_learns_nothing_from_the_text_is_refused():
    model = build()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.output.bias[4] = 1e4
    with pytest.raises(ValueError, match=r"must be a positive number, got 0\.0"):
        GradientStatistics.of(model, torch.full((40,), 4), CONFIG)


# --- on a GPU -------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", MODELS)
def test_captured_windows_are_those_of_the_cpu(name):
    model = build(name)
    text = TEXT.repeat(5)
    expected = adapt(model, GradientStatistics.of(model, TRAIN, CONFIG), text, RATES).loss
    on_gpu = copy.deepcopy(model).cuda()
    weights = weights_of(on_gpu)
    for capture in (False, True):
        statistics = GradientStatistics.of(on_gpu, TRAIN, CONFIG, capture=capture)
        evaluator = DynamicEvaluator(on_gpu, statistics, text, capture=capture)
        for _ in range(2):
            for _ in evaluator.launch(RATES):
                pass
            assert evaluator.results()[0].loss == pytest.approx(expected, rel=1e-3)
    assert_same_bits(on_gpu, weights)
