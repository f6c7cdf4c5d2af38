"""Tiny random language models, and what their losses are when they are written down plainly."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import SequentialSampler
from transformers import (
    CohereConfig,
    Gemma2Config,
    GemmaConfig,
    GPT2Config,
    GraniteConfig,
    LlamaConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

V = 23
TRAINING: dict[str, Any] = {
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 3,
    "lr_scheduler_type": "constant",
    "optim": "sgd",
    "max_grad_norm": 0.0,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": [],
    "use_cpu": True,
    "disable_tqdm": True,
    "dataloader_pin_memory": False,
}
"""Plain gradient descent over accumulated micro-batches, which a loop by hand can follow."""
SIZES: dict[str, Any] = {
    "vocab_size": V,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    # Larger than usual, so that logits differ from each other and from 0.
    "initializer_range": 0.4,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}


class InOrder:
    """A trainer that takes its examples in their order."""

    train_dataset: Any

    def _get_train_sampler(self, *_: Any) -> SequentialSampler:
        return SequentialSampler(self.train_dataset)


def config(name: str, **changes: Any) -> PreTrainedConfig:
    sizes = SIZES | changes
    heads = {"head_dim": 8}
    names_of_gpt2 = {
        "hidden_size": "n_embd",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "max_position_embeddings": "n_positions",
    }
    left_out = ("intermediate_size", "num_key_value_heads")
    gpt2 = {names_of_gpt2.get(key, key): value for key, value in sizes.items() if key not in left_out}
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    makers: dict[str, Callable[[], PreTrainedConfig]] = {
        "llama": lambda: LlamaConfig(**sizes),
        "llama tied": lambda: LlamaConfig(**sizes, tie_word_embeddings=True),
        "gpt2": lambda: GPT2Config(**gpt2, **no_dropout),
        "qwen2": lambda: Qwen2Config(**sizes),
        "qwen3": lambda: Qwen3Config(**sizes, **heads),
        "gemma": lambda: GemmaConfig(**sizes, **heads),
        # A cap that binds: logits of these models lie within some tens.
        "gemma2": lambda: Gemma2Config(**sizes, **heads, final_logit_softcapping=4.0),
        "granite": lambda: GraniteConfig(**sizes, logits_scaling=3.0),
        "cohere": lambda: CohereConfig(**sizes, logit_scale=0.3),
    }
    return makers[name]()


NAMES = ("llama", "llama tied", "gpt2", "qwen2", "qwen3", "gemma", "gemma2", "granite", "cohere")


def tiny(name: str = "llama", *, dtype: torch.dtype = torch.float32, seed: int = 0, **changes: Any) -> Any:
    torch.manual_seed(seed)
    # Not `.to(dtype)`, which would round the frequencies of rotary embeddings, too.
    return AutoModelForCausalLM.from_config(config(name, **changes), dtype=dtype)


def tokens(batch: int = 3, length: int = 7, *, seed: int = 1, classes: int = V) -> Tensor:
    return torch.randint(classes, (batch, length), generator=torch.Generator().manual_seed(seed))


def phi(z: Tensor) -> Tensor:
    return z + F.logsigmoid(z)


def plain_loss(logits_BLV: Tensor, labels_BL: Tensor, *, reduction: str = "mean") -> Tensor:
    """Softmax cross-entropy of the token after each position."""
    return F.cross_entropy(
        logits_BLV[:, :-1].flatten(0, 1), labels_BL[:, 1:].flatten(), ignore_index=-100, reduction=reduction
    )


def assert_same(one: Any, other: Any) -> None:
    """The same logits, and the same numbers under the same names."""
    ids = tokens()
    assert torch.equal(one.eval()(ids).logits, other.eval()(ids).logits)
    state, wanted = other.state_dict(), one.state_dict()
    assert state.keys() == wanted.keys()
    for key, value in wanted.items():
        assert torch.equal(state[key].reshape(value.shape), value), key
        assert state[key].dtype == value.dtype, key
