"""Tiny encoder-decoder and masked models, and the vectors, weights and biases that make their logits, by hand.

Shapes: B sequences of L tokens, d width, V classes.
"""

from typing import Any

import torch
from tests.integrations.huggingface.tiny import V, tokens
from torch import Tensor
from torch.nn import functional as F
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertForMaskedLM,
    ModernBertConfig,
    ModernBertForMaskedLM,
    T5Config,
    T5ForConditionalGeneration,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

ENCODER_DECODER = ("t5", "t5 untied", "bart", "whisper")
MASKED = ("bert", "modernbert", "modernbert sparse")
KINDS = (*ENCODER_DECODER, *MASKED)
START, PAD = 2, 0
T5: dict[str, Any] = {
    "vocab_size": V,
    "d_model": 16,
    "d_kv": 8,
    "d_ff": 24,
    "num_layers": 2,
    "num_heads": 2,
    "dropout_rate": 0.0,
    "pad_token_id": PAD,
    "eos_token_id": None,
    "decoder_start_token_id": START,
}
BART: dict[str, Any] = {
    "vocab_size": V,
    "d_model": 16,
    **dict.fromkeys(("encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 2),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 24),
    **dict.fromkeys(("dropout", "attention_dropout", "activation_dropout"), 0.0),
    "init_std": 0.4,
    "pad_token_id": PAD,
    "bos_token_id": 1,
    "eos_token_id": None,
    "forced_eos_token_id": None,
    "decoder_start_token_id": START,
}
BERT: dict[str, Any] = {
    "vocab_size": V,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.4,
    "pad_token_id": PAD,
}
SPEECH = {"num_mel_bins": 8, "max_source_positions": 30, "max_target_positions": 20}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def kind(name: str, *, dtype: torch.dtype = torch.float64, **changes: Any) -> Any:
    """A tiny model whose biases differ from 0."""
    torch.manual_seed(0)
    makers = {
        "t5": lambda: T5ForConditionalGeneration(T5Config(**T5 | changes)),
        "t5 untied": lambda: T5ForConditionalGeneration(T5Config(**T5 | changes, tie_word_embeddings=False)),
        "bart": lambda: BartForConditionalGeneration(BartConfig(**BART | {"max_position_embeddings": 64} | changes)),
        "whisper": lambda: WhisperForConditionalGeneration(WhisperConfig(**BART | SPEECH | changes)),
        "bert": lambda: BertForMaskedLM(BertConfig(**BERT | NO_DROPOUT | changes)),
        "modernbert": lambda: ModernBertForMaskedLM(ModernBertConfig(**BERT | changes)),
        "modernbert sparse": lambda: ModernBertForMaskedLM(ModernBertConfig(**BERT | changes, sparse_prediction=True)),
    }
    model = makers[name]().to(dtype)
    with torch.no_grad():
        for key, value in [*model.named_parameters(), *model.named_buffers()]:
            if key.endswith("bias") and value.shape[-1] == model.config.vocab_size:
                value.uniform_(-1.0, 1.0)
    return model


def inputs_of(name: str, dtype: torch.dtype = torch.float64, **options: Any) -> dict[str, Tensor]:
    """The inputs of a model: speech, or tokens of which some are padding."""
    if name == "whisper":
        return {"input_features": torch.randn(3, 8, 60, generator=torch.Generator().manual_seed(2)).to(dtype)}
    mask_BL = torch.ones(3, 7, dtype=torch.long)
    mask_BL[1, 5:] = 0
    return {"input_ids": tokens(**options), "attention_mask": mask_BL}


def labels_of(name: str, **options: Any) -> Tensor:
    labels_BL = tokens(3, 7 if name in MASKED else 5, seed=3, **options)
    labels_BL[0, 1] = labels_BL[2, 0] = labels_BL[2, 4] = -100
    return labels_BL


def shifted_right(labels_BL: Tensor) -> Tensor:
    """The decoder's input, as the papers have it."""
    made_BL = F.pad(labels_BL, (1, 0), value=START)[:, :-1]
    return made_BL.masked_fill(made_BL == -100, PAD)


def head_of(
    name: str, model: Any, inputs: dict[str, Tensor], labels_BL: Tensor | None, decoder_BL: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Vectors, weight and bias whose linear map is the logits."""
    none_V = torch.zeros(model.config.vocab_size, dtype=model.dtype)
    if name in MASKED:
        if name == "bert":
            transform = model.cls.predictions.transform
            states_BLd = F.gelu(F.linear(model.bert(**inputs)[0], transform.dense.weight, transform.dense.bias))
            norm = transform.LayerNorm
            hidden = F.layer_norm(states_BLd, norm.normalized_shape, norm.weight, norm.bias, norm.eps)
            return hidden, model.bert.embeddings.word_embeddings.weight, model.cls.predictions.bias
        hidden = model.head(model.model(**inputs)[0])
        if name == "modernbert sparse" and labels_BL is not None:
            hidden = hidden[labels_BL != -100]
        return hidden, model.model.embeddings.tok_embeddings.weight, model.decoder.bias
    if decoder_BL is None:
        assert labels_BL is not None
        decoder_BL = shifted_right(labels_BL)
    if name.startswith("t5"):
        states_BLd = model.encoder(**inputs)[0]
        mask_BL = inputs["attention_mask"]
        decoded = model.decoder(input_ids=decoder_BL, encoder_hidden_states=states_BLd, encoder_attention_mask=mask_BL)
        if name == "t5 untied":
            return decoded[0], model.lm_head.weight, none_V
        return decoded[0] * model.config.d_model**-0.5, model.shared.weight, none_V
    hidden = model.model(**inputs, decoder_input_ids=decoder_BL)[0]
    if name == "whisper":
        return hidden, model.model.decoder.embed_tokens.weight, none_V
    return hidden, model.model.shared.weight, model.final_logits_bias[0]


def z_of(name: str, model: Any, inputs: dict[str, Tensor], *others: Any) -> Tensor:
    """The logits of softmax."""
    return F.linear(*head_of(name, model, inputs, *others))


def loss_of(logits: Tensor, labels_BL: Tensor, *, reduction: str = "mean") -> Tensor:
    """Softmax cross-entropy of the label of each position that has one."""
    labels = labels_BL[labels_BL != -100] if logits.ndim == 2 else labels_BL.flatten()
    return F.cross_entropy(logits.flatten(0, -2), labels, ignore_index=-100, reduction=reduction)
