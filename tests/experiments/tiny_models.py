"""Tiny random Hugging Face models, saved without a network."""

from pathlib import Path

import pytest
import torch

WORDS, WIDTH = 60, 8


def save_model(kind: str, folder: Path, *, seed: int = 0, width: int = WIDTH, **settings) -> Path:
    """A random model of some kind in ``folder``, with logits that are neither tiny nor huge."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(seed)
    common = {"vocab_size": WORDS, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    decoder = {
        **common,
        "hidden_size": width,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 64,
    }
    makers = {
        "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**decoder, **settings})),
        "gemma2": lambda: transformers.Gemma2ForCausalLM(
            transformers.Gemma2Config(**{**decoder, "head_dim": 4, "final_logit_softcapping": 3.0, **settings})
        ),
        "granite": lambda: transformers.GraniteForCausalLM(
            transformers.GraniteConfig(**{**decoder, "logits_scaling": 4.0, **settings})
        ),
        "gpt2": lambda: transformers.GPT2LMHeadModel(
            transformers.GPT2Config(
                **{**common, "n_embd": width, "n_layer": 1, "n_head": 2, "n_positions": 32, **settings}
            )
        ),
        "headless": lambda: transformers.LlamaModel(transformers.LlamaConfig(**decoder)),
        "classifier": lambda: transformers.ViTModel(
            transformers.ViTConfig(
                hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, image_size=32
            )
        ),
    }
    model = makers[kind]()
    if kind not in ("headless", "classifier"):
        with torch.no_grad():
            model.get_output_embeddings().weight.normal_(std=1.0)
    model.save_pretrained(folder)
    return folder


def save_tokenizer(folder: Path, words: tuple[str, ...] = ()) -> None:
    """A tokenizer of single words; those it does not know are one token."""
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    vocabulary = {word: i for i, word in enumerate(("<s>", "</s>", "<pad>", "<unk>", *words))}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<s>", eos_token="</s>", pad_token="<pad>", unk_token="<unk>"
    ).save_pretrained(folder)
