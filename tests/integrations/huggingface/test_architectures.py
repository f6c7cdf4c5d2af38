"""Every language model of transformers that can be built small: fused, stored or refused, and never wrong."""

import inspect
import warnings
from collections import defaultdict

import pytest

pytest.importorskip("transformers")

import torch
from tests.integrations.huggingface.kinds import loss_of
from tests.integrations.huggingface.tiny import phi, plain_loss
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSeq2SeqLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
)
from transformers.utils import logging

from sigsoftmax.integrations.huggingface import apply_output_function

# What sizes are called in one configuration or another; each takes those that it knows.
SMALL = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input", "max_position_embeddings", "n_positions"), 64),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "word_embed_proj_dim", "embedding_size"), 32),
    **dict.fromkeys(
        (
            "intermediate_size",
            "ffn_dim",
            "decoder_ffn_dim",
            "encoder_ffn_dim",
            "dim_ff",
            "d_ff",
            "moe_intermediate_size",
        ),
        32,
    ),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers"), 2),
    **dict.fromkeys(
        ("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads", "encoder_attention_heads"),
        4,
    ),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("head_dim", "state_size", "mamba_d_state", "d_kv", "hidden_size_per_layer_input"), 8),
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "unpadded_vocab_size": 60,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}
LARGEST = 30_000_000
CANNOT_BE_BUILT = (Exception,)
OWN_LOSS = "computes its training loss itself"
# The automatic class, the architectures that it knows, those that must be fused, how many at least, and the refusals.
CAUSAL = (
    AutoModelForCausalLM,
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    {"llama", "gpt2", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "granite", "cohere"},
    100,
    (OWN_LOSS,),
)
SEQ2SEQ = (
    AutoModelForSeq2SeqLM,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    {"mt5", "umt5", "bart", "mbart", "marian", "pegasus", "m2m_100", "blenderbot", "plbart"},
    9,
    (OWN_LOSS, "gives other logits when it is given labels", "could not be run on a few tokens"),
)
MASKED = (
    AutoModelForMaskedLM,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    {"bert", "modernbert", "roberta", "distilbert", "electra", "albert", "deberta", "xlm-roberta"},
    20,
    (OWN_LOSS, "could not be run on a few tokens"),
)


def built(auto_class, model_type):
    """A small random model, the tokens, and its output for them; None if these sizes do not make one."""
    try:
        config_class = CONFIG_MAPPING[model_type]
        known = inspect.signature(config_class.__init__).parameters
        config = config_class(**{key: value for key, value in SMALL.items() if key in known})
        with torch.device("meta"):
            skeleton = auto_class.from_config(config)
        if sum(parameter.numel() for parameter in skeleton.parameters()) > LARGEST:
            return None
        torch.manual_seed(0)
        model = auto_class.from_config(config).eval()
        ids = torch.randint(3, 60, (2, 6))
        with torch.no_grad():
            return model, ids, model(ids, labels=ids)
    except CANNOT_BE_BUILT:
        return None


@pytest.mark.slow
@pytest.mark.parametrize("kind", [CAUSAL, SEQ2SEQ, MASKED], ids=["causal", "encoder-decoder", "masked"])
@pytest.mark.parametrize(
    ("function", "of", "also_refused"),
    [
        ("sigsoftmax", phi, ()),
        # It begins as the model.
        ("mos(K=2)", lambda z: z, ("which this model does not allow",)),
    ],
    ids=["sigsoftmax", "mixture"],
)
def test_every_architecture(kind, function, of, also_refused):
    auto_class, known, must_be_fused, least, why_refused = kind
    logging.set_verbosity_error()
    outcomes, reasons = defaultdict(list), []
    for model_type in known:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            made = built(auto_class, model_type)
            if made is None:
                outcomes["not built"].append(model_type)
                continue
            model, ids, (own_loss, z) = made[0], made[1], (made[2].loss, made[2].logits)
            try:
                apply_output_function(model, function)
            except ValueError as error:
                reasons.append(str(error))
                outcomes["refused"].append(model_type)
                continue
            with torch.no_grad():
                output = model(ids, labels=ids)
                apply_output_function(model, logits_with_labels="never")
                loss = model(ids, labels=ids).loss
        torch.testing.assert_close(output.logits, of(z), rtol=1e-4, atol=1e-4, msg=model_type)
        if model.examined.labels.is_shifted:
            assert kind is CAUSAL, model_type
            wanted = plain_loss(of(z), ids)
        else:
            torch.testing.assert_close(loss_of(z, ids), own_loss, rtol=2e-5, atol=0, msg=model_type)
            wanted = loss_of(of(z), ids)
        for found in (output.loss, loss):
            torch.testing.assert_close(found, wanted, rtol=2e-5, atol=0, msg=model_type)
        outcomes["fused" if model.examined.why_stored is None else "stored"].append(model_type)
    for outcome, names in outcomes.items():
        print(f"{outcome}: {len(names)}\n  {', '.join(names)}")  # noqa: T201 - with -s it is the list for users
    for reason in reasons:
        assert any(text in reason for text in (*why_refused, *also_refused)), reason
    assert must_be_fused <= {*outcomes["fused"]}
    assert len(outcomes["fused"]) >= least
