"""From a trained softmax model to sigsoftmax: a jump, and a retrofit that starts where the model is.

A small Llama is trained with softmax on a language whose entropy is known. Then it is trained on for as many steps in
three ways: as it is; with sigsoftmax put in its place at once; and with a shifted sigsoftmax that agrees with softmax
to a bound at first, and whose shift a schedule lowers to zero. The numbers are nats a word above the entropy of the
language, on text that was held back. (It shows how a retrofit is done and what happens on the way. One run of a toy
says nothing about what sigsoftmax is worth.)
"""

import copy
import tempfile
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PrinterCallback, Trainer, TrainingArguments
from transformers.utils import logging

from sigsoftmax.integrations.huggingface import (
    AnnealShift,
    apply_output_function,
    retrofit,
    shifted_start,
    smallest_logit,
    token_log_likelihoods,
)
from sigsoftmax.synthetic import Language

WORDS, CONTEXTS, WIDTH, LENGTH = 80, 40, 16, 32
STEPS, EARLY, BOUND = 300, 5, 1e-3


def rows(language: Language, count: int, seed: int) -> Tensor:
    return language.sample(count * LENGTH, seed=seed).tokens_L.view(count, LENGTH)


def train(model: Any, text: Tensor, steps: int, *callbacks: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            max_steps=steps,
            per_device_train_batch_size=32,
            learning_rate=5e-3,
            lr_scheduler_type="constant",
            logging_strategy="no",
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            dataloader_pin_memory=False,
        )
        data = [{"input_ids": row, "labels": row} for row in text]
        trainer = Trainer(model=model, args=arguments, train_dataset=data, callbacks=list(callbacks))
        trainer.remove_callback(PrinterCallback)
        trainer.train()


def excess(model: Any, held_back: Tensor, entropy: float) -> float:
    """Nats a word above what the language needs."""
    return -token_log_likelihoods(model, held_back).mean().item() - entropy


def main() -> None:
    torch.set_num_threads(1)  # The tensors are small: more threads mostly wait for each other.
    logging.set_verbosity_error()
    language = Language.dirichlet(contexts=CONTEXTS, words=WORDS, concentration=0.2, memory=1)
    text, held_back = rows(language, 3000, seed=1), rows(language, 200, seed=2)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=WORDS,
        hidden_size=WIDTH,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=LENGTH,
    )
    trained = apply_output_function(LlamaForCausalLM(config), "softmax")
    train(trained, text, STEPS)
    b = shifted_start(trained, [held_back[:20]], bound=BOUND)
    print(f"{WORDS} words, width {WIDTH}; the language needs {language.entropy_rate:.3f} nats a word")
    lowest = smallest_logit(trained, [held_back[:20]])
    print(f"smallest logit on some text {lowest:.2f}, so b = {b:.2f} for {BOUND:g} nats")

    ways = {
        "softmax, trained on": (trained, []),
        "sigsoftmax at once": (apply_output_function(copy.deepcopy(trained), "sigsoftmax"), []),
        "retrofit": (retrofit(copy.deepcopy(trained), b), [AnnealShift(start=b, end=0.0, steps=STEPS // 2)]),
    }
    print(f"{'nats above the entropy':24s} {'step 0':>9s} {f'step {EARLY}':>9s} {f'step {STEPS}':>9s}")
    for name, (model, callbacks) in ways.items():
        early = copy.deepcopy(model)
        train(early, text, EARLY, *callbacks)
        before = excess(model, held_back, language.entropy_rate)
        train(model, text, STEPS, *callbacks)
        results = (before, *(excess(one, held_back, language.entropy_rate) for one in (early, model)))
        print(f"{name:24s} " + " ".join(f"{value:9.4f}" for value in results))
    print("With b = 0 the retrofit ends as sigsoftmax. One run of each, same data and steps.")


if __name__ == "__main__":
    main()
