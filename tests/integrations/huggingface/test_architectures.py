"""Every causal architecture of transformers that can be built small: fused, stored or refused, and never wrong."""

import inspect
import warnings
from collections import defaultdict

import pytest

pytest.importorskip("transformers")

import torch
from tests.integrations.huggingface.tiny import phi, plain_loss
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
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
}
LARGEST = 30_000_000
CANNOT_BE_BUILT = (Exception,)


def built(model_type):
    """A small random model, its logits and the tokens; None if these sizes do not make one."""
    try:
        config_class = CONFIG_MAPPING[model_type]
        known = inspect.signature(config_class.__init__).parameters
        config = config_class(**{key: value for key, value in SMALL.items() if key in known})
        with torch.device("meta"):
            skeleton = AutoModelForCausalLM.from_config(config)
        if sum(parameter.numel() for parameter in skeleton.parameters()) > LARGEST:
            return None
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config).eval()
        ids = torch.randint(3, 60, (2, 6))
        with torch.no_grad():
            model(ids, labels=ids)
            return model, ids, model(ids).logits
    except CANNOT_BE_BUILT:
        return None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("function", "of", "why_refused"),
    [
        ("sigsoftmax", phi, ("computes its training loss itself",)),
        # It begins as the model.
        ("mos(K=2)", lambda z: z, ("computes its training loss itself", "which this model does not allow")),
    ],
    ids=["sigsoftmax", "mixture"],
)
def test_every_architecture(function, of, why_refused):
    logging.set_verbosity_error()
    outcomes, reasons = defaultdict(list), []
    for model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            made = built(model_type)
            if made is None:
                outcomes["not built"].append(model_type)
                continue
            model, ids, z = made
            try:
                apply_output_function(model, function, logits_with_labels="never")
            except ValueError as error:
                reasons.append(str(error))
                outcomes["refused"].append(model_type)
                continue
            with torch.no_grad():
                torch.testing.assert_close(model(ids).logits, of(z), rtol=1e-4, atol=1e-4, msg=model_type)
                loss = model(ids, labels=ids).loss
                torch.testing.assert_close(loss, plain_loss(of(z), ids), rtol=2e-5, atol=0, msg=model_type)
        outcomes["fused" if model.examined.why_stored is None else "stored"].append(model_type)
    for outcome, names in outcomes.items():
        print(f"{outcome}: {len(names)}\n  {', '.join(names)}")  # noqa: T201 - with -s it is the list for users
    assert all(any(text in reason for text in why_refused) for reason in reasons)
    assert {"llama", "gpt2", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "granite", "cohere"} <= {
        *outcomes["fused"]
    }
    assert len(outcomes["fused"]) > 100
