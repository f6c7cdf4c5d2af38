"""Tiny random Hugging Face models, saved without a network."""

from pathlib import Path

import pytest
import torch

WORDS, WIDTH = 60, 8


def save_model(kind: str, folder: Path, *, seed: int = 0, **settings) -> Path:
    """A random model of some kind in ``folder``, with logits that are neither tiny nor huge."""
    transformers = pytest.importorskip("transformers")
    from tests.integrations.huggingface.tiny import config

    torch.manual_seed(seed)
    sizes = {
        "vocab_size": WORDS,
        "hidden_size": WIDTH,
        "num_hidden_layers": 1,
        "initializer_range": 0.02,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
        **settings,
    }
    if kind == "headless":
        transformers.LlamaModel(config("llama", **sizes)).save_pretrained(folder)
    elif kind == "classifier":
        small = {"num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8, "image_size": 32}
        transformers.ViTModel(transformers.ViTConfig(hidden_size=8, **small)).save_pretrained(folder)
    else:
        model = transformers.AutoModelForCausalLM.from_config(config(kind, **sizes))
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
