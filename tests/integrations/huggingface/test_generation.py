"""Logits of a patched model are phi(z) for every way to generate, for scores and for other people's processors."""

import copy
import itertools

import pytest

pytest.importorskip("transformers")

import torch
from tests.integrations.huggingface.tiny import NAMES, V, phi, tiny, tokens
from transformers import LogitsProcessorList
from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor

import sigsoftmax
from sigsoftmax.integrations.huggingface import (
    OutputFunctionLogitsProcessor,
    apply_output_function,
    token_log_likelihoods,
)

PROMPT = tokens(2, 3)


def pair(name="llama", function="sigsoftmax", **options):
    plain = tiny(name).eval()
    return plain, apply_output_function(copy.deepcopy(plain), function, **options).eval()


def next_log_probs(plain, ids):
    """By hand: log-probabilities of the next token under sigsoftmax."""
    with torch.no_grad():
        return torch.log_softmax(phi(plain(ids).logits[:, -1].double()), -1)


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_phi_of_the_models_logits(name):
    plain, patched = pair(name)
    ids = tokens()
    wanted = phi(plain(ids).logits)
    torch.testing.assert_close(patched(ids).logits, wanted)
    torch.testing.assert_close(patched(ids, labels=ids).logits, wanted)
    torch.testing.assert_close(patched(ids, labels=ids, return_dict=False)[1], wanted)
    torch.testing.assert_close(patched(ids, return_dict=False)[0], wanted)
    torch.testing.assert_close(patched(ids, logits_to_keep=1).logits, wanted[:, -1:])


@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen2", "gemma", "gemma2"])
def test_greedy_generation_matches_a_hand_computation(name):
    plain, patched = pair(name)
    output = patched.generate(
        PROMPT, max_new_tokens=5, do_sample=False, output_logits=True, return_dict_in_generate=True
    )
    ids = PROMPT
    for logits in output.logits:
        wanted = next_log_probs(plain, ids)
        torch.testing.assert_close(torch.log_softmax(logits.double(), -1), wanted, rtol=1e-4, atol=1e-4)
        ids = torch.cat([ids, wanted.argmax(-1, keepdim=True)], 1)
    assert torch.equal(output.sequences, ids)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_sampling_draws_from_the_right_probabilities_at_any_temperature(name, temperature):
    plain, patched = pair(name)
    torch.manual_seed(7)
    options = {"do_sample": True, "temperature": temperature, "top_k": 0, "max_new_tokens": 6}
    drawn = patched.generate(PROMPT, output_scores=True, return_dict_in_generate=True, **options)
    torch.manual_seed(7)
    ids = PROMPT
    for scores in drawn.scores:
        # log p / T and phi / T differ by a constant of the row.
        wanted = torch.softmax(next_log_probs(plain, ids) / temperature, -1)
        torch.testing.assert_close(torch.softmax(scores.double(), -1), wanted, rtol=1e-3, atol=1e-5)
        ids = torch.cat([ids, torch.multinomial(wanted.float(), 1)], 1)
    assert torch.equal(drawn.sequences, ids)


def test_beams_find_what_an_exhaustive_search_finds():
    plain, patched = pair()
    prompt = PROMPT[:1]
    found = patched.generate(
        prompt,
        num_beams=V,
        max_new_tokens=2,
        do_sample=False,
        length_penalty=0.0,
        output_scores=True,
        return_dict_in_generate=True,
    )
    first = next_log_probs(plain, prompt)[0]
    after = next_log_probs(plain, torch.cat([prompt.expand(V, -1), torch.arange(V)[:, None]], 1))
    totals = first[:, None] + after
    best = divmod(int(totals.argmax()), V)
    assert tuple(found.sequences[0, -2:].tolist()) == best
    assert found.sequences_scores[0].item() == pytest.approx(totals.max().item(), rel=1e-4)


def test_assisted_generation_is_that_of_the_model_alone():
    plain, patched = pair()
    options = {"max_new_tokens": 8, "do_sample": False}
    alone = patched.generate(PROMPT[:1], **options)
    for assistant in (plain, pair("llama tied")[1]):
        assert torch.equal(patched.generate(PROMPT[:1], assistant_model=assistant, **options), alone)


@pytest.mark.slow
def test_assisted_sampling_has_the_right_distribution():
    plain, patched = pair()
    assistant = apply_output_function(tiny("llama tied").eval(), "sigsoftmax")
    draws = 3000
    counts = torch.zeros(V)
    for _ in range(draws):
        ids = patched.generate(
            PROMPT[:1], assistant_model=assistant, do_sample=True, top_k=0, max_new_tokens=2, num_assistant_tokens=1
        )
        counts[ids[0, 3]] += 1
    wanted = next_log_probs(plain, PROMPT[:1])[0].exp()
    # Five standard deviations of each class, with one count for classes that are hardly ever drawn.
    allowed = 5 * (draws * wanted * (1 - wanted)).sqrt() + 1
    assert ((counts - draws * wanted).abs() <= allowed).all()


def test_a_logits_processor_does_for_a_plain_model_what_a_patch_does():
    plain, patched = pair(function="gss(k=0.3)")
    processor = LogitsProcessorList([OutputFunctionLogitsProcessor("gss(k=0.3)")])
    options = {"do_sample": True, "temperature": 0.8, "top_k": 5, "max_new_tokens": 6}
    torch.manual_seed(3)
    wanted = patched.generate(PROMPT, **options)
    torch.manual_seed(3)
    assert torch.equal(plain.generate(PROMPT, logits_processor=processor, **options), wanted)


def test_the_processor_keeps_bans_and_precision():
    scores = torch.tensor([[2.0, float("-inf"), -1.0]])
    for function in ("sigsoftmax", "relu", "gss(k=0.2)", "softcap(c=2)"):
        processor = OutputFunctionLogitsProcessor(function)
        log_p = torch.log_softmax(processor(PROMPT, scores), -1)
        torch.testing.assert_close(log_p, sigsoftmax.log_probs(scores, function=function))
        assert processor(PROMPT, scores.bfloat16()).dtype == torch.bfloat16


def test_a_processor_on_a_patched_model_would_act_twice():
    _, patched = pair()
    processors = LogitsProcessorList([OutputFunctionLogitsProcessor("sigsoftmax")])
    with pytest.raises(ValueError, match="already"):
        patched.generate(PROMPT, logits_processor=processors)
    with pytest.raises(ValueError, match="already"):
        patched.generate(PROMPT, None, processors)


def test_penalties_act_on_phi_in_a_patched_model():
    plain, patched = pair()
    output = patched.generate(
        PROMPT,
        max_new_tokens=1,
        do_sample=False,
        repetition_penalty=1.7,
        output_scores=True,
        return_dict_in_generate=True,
    )
    with torch.no_grad():
        penalised = RepetitionPenaltyLogitsProcessor(1.7)(PROMPT, phi(plain(PROMPT).logits[:, -1]))
    torch.testing.assert_close(output.scores[0], penalised)


@pytest.mark.parametrize("name", ["llama", "gemma2", "granite"])
def test_log_likelihoods_of_tokens(name):
    plain, patched = pair(name)
    ids = tokens()
    with torch.no_grad():
        log_p = torch.log_softmax(phi(plain(ids).logits), -1)[:, :-1].gather(-1, ids[:, 1:, None])[..., 0]
    patched.train()
    torch.testing.assert_close(token_log_likelihoods(patched, ids), log_p, rtol=1e-5, atol=1e-5)
    assert patched.training
    assert patched.loss_options.logits_with_labels == "eval"


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_does_not_count_in_log_likelihoods(side):
    _, patched = pair()
    alone = [token_log_likelihoods(patched, row[None]).sum() for row in (PROMPT[0], tokens(1, 5)[0])]
    padding, mask = torch.zeros(1, 2, dtype=torch.long), torch.ones(2, 5, dtype=torch.long)
    order = (padding, PROMPT[:1]) if side == "left" else (PROMPT[:1], padding)
    ids = torch.cat([torch.cat(order, 1), tokens(1, 5)])
    mask[0, :2] = 0 if side == "left" else 1
    mask[0, 3:] = 1 if side == "left" else 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    scores = token_log_likelihoods(patched, ids, mask, position_ids=positions)
    torch.testing.assert_close(scores.sum(-1), torch.stack(alone), rtol=1e-4, atol=1e-4)
    assert (scores[0] == 0).sum() == 2


def test_scoring_refuses_what_it_cannot_score():
    plain, patched = pair()
    with pytest.raises(ValueError, match="apply_output_function"):
        token_log_likelihoods(plain, PROMPT)
    with pytest.raises(ValueError, match="two tokens or more"):
        token_log_likelihoods(patched, PROMPT[:, :1])
    with pytest.raises(ValueError, match="two tokens or more, got a list"):
        token_log_likelihoods(patched, PROMPT.tolist())
    with pytest.raises(ValueError, match="attention_mask must have the shape"):
        token_log_likelihoods(patched, PROMPT, PROMPT[:, :2])


def test_many_logits_are_transformed_in_place_without_another_copy(monkeypatch):
    plain, patched = pair()
    monkeypatch.setattr("sigsoftmax.integrations.huggingface.patching.head_function.CHUNK_NUMBERS", 2 * V)
    ids = tokens(3, 7)
    with torch.no_grad():
        torch.testing.assert_close(patched(ids).logits, phi(plain(ids).logits))
    # Where a gradient is needed, autograd needs the logits as they were.
    patched(ids).logits.sum().backward()


def test_logits_of_training_steps_on_demand():
    ids = tokens()
    for keep, training in itertools.product(("eval", "always", "never"), (True, False)):
        plain, patched = pair(logits_with_labels=keep)
        patched.train(training)
        is_kept = keep == "always" or (keep == "eval" and not training)
        output = patched(ids, labels=ids)
        assert ("logits" in output) == is_kept
        if is_kept:
            torch.testing.assert_close(output.logits, phi(plain(ids).logits))
