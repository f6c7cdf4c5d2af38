"""A training step of a small Llama with a large vocabulary, patched and plain, on a CPU.

Every figure is forward + backward in float32. Times are CPU time of the process, which other processes on the machine
disturb less than they disturb the clock; with one thread, the default, it is what the step takes on a machine of its
own.
"Memory" is the peak of the step beyond the gradients of the parameters; the body of the model is small, so that nearly
all of it is the output layer's, and for a wide model the second gradient of the tied weight. A full run writes records
to benchmarks/records/huggingface, from which

    python benchmarks/write_docs.py --records benchmarks/records/huggingface --page docs/huggingface.md

makes the tables of docs/huggingface.md.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from measuring import RECORDS, Case, Measurement, Step, cpu_peak_mib, show_and_store, take_turns
from torch import Tensor
from torch.nn import functional as F

from sigsoftmax.integrations.huggingface import apply_output_function

FUNCTIONS = ("softmax", "sigsoftmax", "gss(k=0.2)", "shifted_sigsoftmax(b=8)")


def llama(classes: int, features: int) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=classes,
        hidden_size=features,
        intermediate_size=2 * features,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
    )
    return transformers.LlamaForCausalLM(config).train()


def naive_sigsoftmax(model: Any) -> Any:
    """The loss function that a user writes without this package: the plain formula."""

    def loss(logits: Tensor, labels: Tensor, vocab_size: int, **options: Any) -> Tensor:
        shifted = F.pad(labels, (0, 1), value=-100)[..., 1:]
        phi = logits + F.logsigmoid(logits)
        return F.cross_entropy(phi.view(-1, vocab_size), shifted.reshape(-1))

    model.loss_function = loss
    return model


def step_case(batch: int, length: int, features: int, classes: int) -> Case:
    ids = torch.randint(classes, (batch, length))
    models = {"transformers softmax": llama(classes, features)}
    models["transformers naive sigsoftmax"] = naive_sigsoftmax(llama(classes, features))
    for function in FUNCTIONS:
        models[f"ours {function}"] = apply_output_function(llama(classes, features), function)

    def step(model: Any) -> Step:
        leaves = [parameter for parameter in model.parameters() if parameter.requires_grad]
        return Step(lambda: model(input_ids=ids, labels=ids).loss, leaves)

    return Case(
        suite="huggingface",
        name=f"training step of a small Llama, {batch} x {length} tokens, d={features} V={classes}",
        baseline="transformers softmax",
        implementations={name: step(model) for name, model in models.items()},
        targets=dict.fromkeys(("ours softmax", "ours sigsoftmax"), "<= 1.0x, <= 1/4 of the memory"),
    )


def own_milliseconds(run: Callable[[], object]) -> float:
    start = time.process_time()
    run()
    return 1e3 * (time.process_time() - start)


def measured(case: Case, rounds: int) -> list[Measurement]:
    peaks = {name: cpu_peak_mib(step) for name, step in case.implementations.items()}
    return take_turns(case, rounds=rounds, milliseconds_of=own_milliseconds, peak_mib=peaks)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9, help="timed rounds (default: 9)")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch (default: 1)")
    parser.add_argument("--smoke", action="store_true", help="a tiny case: shows that the command works")
    parser.add_argument("--out", type=Path, help="records are written here")
    options = parser.parse_args()
    if options.out is None and not options.smoke:
        options.out = RECORDS / "huggingface" / "steps.jsonl"
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    warnings.filterwarnings("ignore", message=".*TF32.*")
    sizes = [(2, 8, 16, 96)] if options.smoke else [(4, 128, 64, 128_256), (4, 128, 256, 128_256)]
    rounds = 2 if options.smoke else options.rounds
    show_and_store((measured(step_case(*size), rounds) for size in sizes), options.out)


if __name__ == "__main__":
    main()
