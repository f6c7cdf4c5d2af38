"""The simulated cases behind the reading of the paper's ranks, at a reduced size.

A head with a Zipf bias and hidden vectors whose spectrum falls by 100: only the rule of Press et al. with float32's eps
gives exactly d + 2 for softmax, and numbers in between for the others, which depend on where the logits lie.
"""

import pytest
import torch

from sigsoftmax.analysis.head_weights import Contexts, HeadWeights
from sigsoftmax.analysis.spectrum.matrix_readers import from_head
from sigsoftmax.analysis.spectrum.singular_values import spectrum
from sigsoftmax.analysis.spectrum.streaming import SpectrumOptions, streamed_spectrum

CONTEXTS, WORDS, WIDTH = 1600, 400, 40


def simulated(head, *, shift=0.0, dtype=torch.float64, times=1):
    generator = torch.Generator().manual_seed(0)
    contexts, words, width = CONTEXTS * times, WORDS * times, WIDTH * times

    def normal(*shape):
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    hidden = normal(contexts, width) * torch.logspace(0, -2, width, dtype=torch.float64)
    bias = shift - torch.arange(1.0, words + 1, dtype=torch.float64).log()
    layer = HeadWeights(weight_Vd=0.3 * normal(words, width), bias_V=bias, head=head)
    return from_head(layer, Contexts.of_rows(hidden), dtype=dtype)


def ranks(head, method):
    found = streamed_spectrum(head, SpectrumOptions(method=method, block_contexts=256))
    return {count.rule: count.rank for count in found.ranks()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("method", ["gram", "exact"])
def test_softmax_has_exactly_two_more_than_its_width(method, dtype):
    found = ranks(simulated("softmax", dtype=dtype), method)
    assert found["press32"] == found["noise"] == WIDTH + 2
    if (method, dtype) == ("exact", torch.float64):
        assert found["numpy64"] == found["press64"] == WIDTH + 2
    else:
        # A Gram matrix, and float32 entries, hold noise there, and say so.
        assert found["numpy64"] is found["press64"] is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_float64_thresholds_would_count_the_noise_of_float32(dtype):
    matrix = torch.cat(list(simulated("softmax", dtype=dtype).blocks(0)))
    found = spectrum(matrix)
    above = sum(value > found.float64_threshold for value in found.singular_values)
    assert above == (WORDS if dtype == torch.float32 else WIDTH + 2)


@pytest.mark.parametrize("method", ["gram", "exact"])
@pytest.mark.parametrize(
    ("head", "shift", "expected"),
    [
        ("sigsoftmax", 0.0, "between"),
        ("sigsoftmax", 6.0, "full"),
        ("sigmoid", 0.0, "between"),
        ("sigmoid", -8.0, "softmax"),
    ],
)
def test_other_ranks_are_crossings_that_move_with_the_logits(head, shift, expected, method):
    rank = ranks(simulated(head, shift=shift), method)["press32"]
    if expected == "between":
        assert WIDTH + 2 < rank < WORDS
    elif expected == "full":
        assert rank == WORDS
    else:
        # Far below zero log sigmoid(z) is z, and sigmoid is softmax.
        assert rank <= WIDTH + 3


def test_the_full_rank_under_float64_thresholds_is_there_before_any_shift():
    assert ranks(simulated("sigsoftmax"), "exact")["numpy64"] == WORDS


@pytest.mark.slow
def test_at_a_larger_size_numpys_rule_with_float32_misses_directions_of_softmax():
    # 2000 words, 8000 contexts, d = 200: the larger the matrix, the more that rule leaves out.
    found = ranks(simulated("softmax", dtype=torch.float32, times=5), "gram")
    assert found["press32"] == 202
    assert found["numpy32"] < 202
    found = ranks(simulated("sigsoftmax", dtype=torch.float32, times=5), "gram")
    assert 202 < found["press32"] < 2000


def test_16_bit_log_probabilities_pollute_the_count():
    matrix = torch.cat(list(simulated("softmax").blocks(0))).bfloat16()
    with pytest.warns(UserWarning, match="precision of bfloat16"):
        found = spectrum(matrix)
    assert found.count("press32").rank is None
    assert sum(value > found.press32_threshold for value in found.singular_values) == WORDS
