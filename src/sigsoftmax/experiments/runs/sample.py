"""Text from a checkpoint, token by token.

Shapes: V vocabulary.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from sigsoftmax.contract.spec import check_positive
from sigsoftmax.experiments.runs.run import checkpoint_file
from sigsoftmax.lm.data.corpus import EOS
from sigsoftmax.lm.model.language_model import LanguageModel
from sigsoftmax.lm.saving.saved_models import load_model
from sigsoftmax.lm.training.trainer import resolve_device

__all__ = ["SampleConfig", "run", "sampled_ids"]


@dataclass(frozen=True, kw_only=True)
class SampleConfig:
    checkpoint: Path
    """``best.safetensors``, or the folder of a run"""
    words: int = 100
    """number of words"""
    prompt: str = ""
    """words that the model reads first; empty: the end of a sentence, or any word where the text has none"""
    temperature: float = 1.0
    """log-probabilities are divided by it; 0 always takes the likeliest word"""
    seed: int = 0
    """seed of the draws"""
    device: str = "cpu"

    def __post_init__(self) -> None:
        check_positive(words=self.words)
        if not (math.isfinite(self.temperature) and self.temperature >= 0.0):
            raise ValueError(f"temperature must be a number of at least 0, got {self.temperature}")


def run(config: SampleConfig) -> Iterator[str]:
    """The prompt and the words that follow it, in pieces to be printed one after another."""
    loaded = load_model(checkpoint_file(config.checkpoint), device=resolve_device(config.device))
    vocabulary = loaded.vocabulary
    generator = torch.Generator().manual_seed(config.seed)
    prompt = vocabulary.encode(config.prompt.split()).tolist()
    if prompt:
        first = prompt
    elif EOS in vocabulary:
        first = vocabulary.encode([EOS]).tolist()
    else:
        first = prompt = [int(torch.randint(len(vocabulary), (), generator=generator))]
    ids = sampled_ids(loaded.model, first, temperature=config.temperature, generator=generator)
    at_line_start = True
    for identity in itertools.chain(prompt, itertools.islice(ids, config.words)):
        word = vocabulary.words[identity]
        if word == EOS:
            yield "\n"
        else:
            yield word if at_line_start else f" {word}"
        at_line_start = word == EOS
    yield "" if at_line_start else "\n"


@torch.no_grad()
def sampled_ids(
    model: LanguageModel, first: list[int], *, temperature: float, generator: torch.Generator
) -> Iterator[int]:
    """Words that follow the ``first`` ones, without end; draws are made on the CPU, so that a seed means one text."""
    device = model.embedding.device
    states = model.zero_state(1)
    read = torch.tensor(first, device=device).unsqueeze(1)
    while True:
        features = model.features(read, states)
        states = features.states
        last = features._replace(raw_TBH=features.raw_TBH[-1:], dropped_TBH=features.dropped_TBH[-1:])
        log_probs_V: Tensor = model.log_probs(last)[0, 0].double().cpu()
        if temperature == 0.0:
            word = int(log_probs_V.argmax())
        else:
            word = int(torch.multinomial(torch.softmax(log_probs_V / temperature, 0), 1, generator=generator))
        yield word
        read = torch.tensor([[word]], device=device)
