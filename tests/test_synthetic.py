"""Languages of known truth: what is called exact is compared with brute force, and texts with the truth."""

import math

import pytest
import torch

from sigsoftmax.synthetic import Language, batch_means

SIZES = {"contexts": 30, "words": 12}
KINDS = {
    "rank": lambda seed=0, **more: Language.of_rank(**{**SIZES, "rank": 5, "seed": seed, **more}),
    "dirichlet": lambda seed=0, **more: Language.dirichlet(**{**SIZES, "concentration": 0.1, "seed": seed, **more}),
    "topics": lambda seed=0, **more: Language.topics(**{**SIZES, "topics": 3, "seed": seed, **more}),
    "peaked": lambda seed=0, **more: Language.peaked(**{**SIZES, "peak": 0.95, "seed": seed, **more}),
    "made_by": lambda seed=0, **more: Language.made_by("gss(k=0)", **{**SIZES, "width": 3, "seed": seed, **more}),
}


@pytest.fixture(params=KINDS)
def make(request):
    return KINDS[request.param]


def test_rows_are_distributions_without_zeros(make):
    language = make()
    assert language.log_p_NV.dtype == torch.float64
    torch.testing.assert_close(language.log_p_NV.exp().sum(1), torch.ones(30, dtype=torch.float64))
    assert torch.isfinite(language.log_p_NV).all()


def test_seed_decides(make):
    one, same, other = make(seed=3), make(seed=3), make(seed=4)
    assert torch.equal(one.log_p_NV, same.log_p_NV)
    assert torch.equal(one.next_context_NV, same.next_context_NV)
    assert not torch.equal(one.log_p_NV, other.log_p_NV)
    assert torch.equal(one.sample(50, seed=1).tokens_L, same.sample(50, seed=1).tokens_L)
    assert not torch.equal(one.sample(50, seed=1).tokens_L, one.sample(50, seed=2).tokens_L)


def test_stationary_distribution_is_the_limit_of_powers(make):
    """Powers of the transition matrix converge only if the chain is irreducible and aperiodic: both are tested."""
    language = make()
    limit = torch.linalg.matrix_power(language.transition_NN, 2**16)
    torch.testing.assert_close(limit, language.stationary_N.expand_as(limit), atol=1e-9, rtol=1e-6)


@pytest.mark.parametrize(("memory", "contexts"), [(1, 5), (2, 25), (3, 8)])
def test_memory_makes_the_context_a_function_of_the_last_words(memory, contexts):
    language = Language.of_rank(contexts=contexts, words=11, rank=4, memory=memory)
    text = language.sample(3000, seed=0)
    seen = {}
    for t in range(memory, 3000):
        last = tuple(text.tokens_L[t - memory : t].tolist())
        assert seen.setdefault(last, int(text.contexts_L[t])) == int(text.contexts_L[t])
    assert len(set(seen.values())) == contexts
    limit = torch.linalg.matrix_power(language.transition_NN, 2**12)
    torch.testing.assert_close(limit[0], language.stationary_N, atol=1e-10, rtol=1e-8)


@pytest.mark.parametrize("rank", [1, 2, 7, 12])
def test_log_rank_is_the_rank_asked_for(rank):
    assert Language.of_rank(**SIZES, rank=rank).log_rank == rank


def test_topics_have_low_rank_in_probability_and_high_rank_in_log():
    language = Language.topics(contexts=60, words=40, topics=3)
    assert int(torch.linalg.matrix_rank(language.log_p_NV.exp())) == 3
    assert language.log_rank > 30


def test_a_softmax_language_has_the_rank_of_softmax():
    assert Language.made_by("softmax", contexts=60, words=40, width=5).log_rank == 7
    assert Language.made_by("sigsoftmax", contexts=60, words=40, width=5).log_rank > 7


def test_peaks_have_their_height():
    highest = Language.peaked(**SIZES, peak=0.8).log_p_NV.exp().amax(1)
    assert ((highest >= 0.8) & (highest <= 1.0)).all()


def test_entropy_rate_by_brute_force(make):
    language = make()
    p_NV = language.log_p_NV.exp()
    expected = sum(float(language.stationary_N[n]) * -sum(p * math.log(p) for p in p_NV[n].tolist()) for n in range(30))
    assert language.entropy_rate == pytest.approx(expected, rel=1e-12)


def test_sampled_frequencies_and_loss_agree_with_the_truth():
    language = KINDS["rank"]()
    length = 60_000
    words, contexts = language.sample(length, seed=0)
    frequency_N = torch.bincount(contexts, minlength=30) / length
    torch.testing.assert_close(frequency_N.double(), language.stationary_N, atol=0.006, rtol=0)
    busiest = int(language.stationary_N.argmax())
    here = words[contexts == busiest]
    expected_V = language.log_p_NV[busiest].exp()
    deviation_V = (expected_V * (1 - expected_V) / len(here)).sqrt()
    frequency_V = torch.bincount(here, minlength=12) / len(here)
    assert ((frequency_V - expected_V).abs() < 4.5 * deviation_V).all()
    assert torch.equal(contexts[1:], language.next_context_NV[contexts[:-1], words[:-1]])
    loss = batch_means(-language.log_p_NV[contexts, words])
    assert abs(loss.mean - language.entropy_rate) < 4.0 * loss.standard_error


def test_a_word_of_probability_zero_is_never_drawn():
    p_NV = torch.tensor([[0.5, 0.0, 0.5, 0.0], [0.0, 0.3, 0.0, 0.7]], dtype=torch.float64)
    language = Language(p_NV.log(), torch.tensor([[0, 0, 1, 1], [0, 0, 1, 1]]))
    words, contexts = language.sample(5000, seed=0)
    assert (p_NV[contexts, words] > 0).all()
    assert language.kl(p_NV.log()) == 0.0


def test_kl_of_tables():
    language = KINDS["dirichlet"]()
    other = KINDS["rank"](seed=1).log_p_NV
    p_NV = language.log_p_NV.exp()
    rows = (p_NV * (language.log_p_NV - other)).sum(1)
    assert language.kl(language.log_p_NV) == 0.0
    assert language.kl(other) == pytest.approx(float(rows @ language.stationary_N))
    assert language.kl(other, weights="uniform") == pytest.approx(float(rows.mean()))


def test_position_kl_of_a_table_model_estimates_its_exact_kl():
    language, model = KINDS["rank"](), KINDS["rank"](seed=1).log_p_NV
    contexts_L = language.sample(20_000, seed=0).contexts_L
    found = batch_means(language.position_kl(contexts_L, model[contexts_L].float()))
    assert abs(found.mean - language.kl(model)) < 4.0 * found.standard_error
    assert found.standard_error < 0.05 * found.mean


def test_batch_means_see_correlation():
    """A chain x_t = 0.9 x_{t-1} + e has a mean whose error is sqrt(19) times that of independent values."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(40_000, generator=generator, dtype=torch.float64).tolist()
    values, value = [], 0.0
    for e in noise:
        value = 0.9 * value + e
        values.append(value)
    chain = torch.tensor(values)
    naive = float(chain.std()) / math.sqrt(len(values))
    assert 3.0 < batch_means(chain).standard_error / naive < 5.5


def test_a_trap_is_refused():
    p_NV = torch.full((2, 2), 0.5, dtype=torch.float64)
    trapped = Language(p_NV.log(), torch.tensor([[0, 1], [1, 1]]))
    with pytest.raises(ValueError, match=r"every context leads to every other, got one that can be trapped"):
        _ = trapped.stationary_N
    assert trapped.kl(p_NV.log(), weights="uniform") == 0.0


def test_a_periodic_chain_has_its_stationary_distribution():
    cycle = Language(torch.zeros(3, 1, dtype=torch.float64), torch.tensor([[1], [2], [0]]))
    torch.testing.assert_close(cycle.stationary_N, torch.full((3,), 1 / 3, dtype=torch.float64))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Language.of_rank(**SIZES, rank=13), r"rank must be between 1 and min\(contexts, words\) = 12, got 13"),
        (lambda: Language.of_rank(contexts=0, words=5, rank=1), r"at least 1 context and 2 words, got 0 and 5"),
        (lambda: Language.of_rank(**SIZES, rank=3, scale=-1.0), r"scale must be a positive number, got -1.0"),
        (lambda: Language.dirichlet(**SIZES, concentration=0.0), r"concentration must be a positive number"),
        (lambda: Language.topics(**SIZES, topics=0), r"topics must be at least 1, got 0"),
        (lambda: Language.peaked(**SIZES, peak=1.0), r"strictly between 0 and 1, got 1.0"),
        (lambda: Language.made_by("sotfmax", **SIZES, width=2), r"did you mean 'softmax'"),
        (lambda: Language.made_by("softmax", **SIZES, width=0), r"width must be at least 1, got 0"),
        (lambda: KINDS["rank"](memory=2), r"a power classes \*\* 2 .* got 30 contexts; try contexts=25"),
        (lambda: KINDS["rank"](memory=0), r"memory must be at least 1, or None"),
        (lambda: KINDS["rank"]().sample(-1, seed=0), r"length must not be negative, got -1"),
        (lambda: KINDS["rank"]().kl(torch.zeros(2, 2)), r"one row per context .* \(30, 12\), got \(2, 2\)"),
        (lambda: KINDS["rank"]().kl(torch.zeros(30, 12)), r"must sum to one, .* off by 2.48 in row 0"),
        (lambda: KINDS["rank"]().kl(torch.full((30, 12), math.nan)), r"has NaN, first in row 0"),
        (lambda: KINDS["rank"]().weights_N("even"), r"'stationary' or 'uniform', got 'even'"),
        (lambda: KINDS["rank"]().position_kl(torch.tensor([30]), torch.zeros(1, 12)), r"between 0 and 29"),
        (lambda: KINDS["rank"]().position_kl(torch.tensor([0]), torch.zeros(2, 12)), r"shape \(L, 12\), got \(1,\)"),
        (lambda: batch_means(torch.zeros(3)), r"at least 4 values in one dimension, got shape \(3,\)"),
        (lambda: Language(torch.zeros(1, 1).double(), torch.tensor([[1]])), r"between 0 and 0, got values from 1 to 1"),
        (lambda: Language(torch.zeros(1, 1).double(), torch.tensor([0])), r"int64 of the shape of log_p_NV, \(1, 1\)"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call()
