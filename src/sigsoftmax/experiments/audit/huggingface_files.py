"""The files of Hugging Face models: configuration, weights, tokenizer, or the output layer alone.

transformers and safetensors are imported where they are needed: both are extras.
"""

from __future__ import annotations

import contextlib
import importlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sigsoftmax._version import install_extra

__all__ = [
    "loading_dtype",
    "note_on_missing",
    "output_module",
    "quiet",
    "read_config",
    "read_tokenizer",
    "reading_errors",
    "refuse_code_of_others",
    "skeleton_of",
    "stored_tensor",
    "text_config",
    "transformers_library",
]


def transformers_library(name: str) -> Any:
    try:
        import transformers

        # Makes transformers load models that were stored with an output function.
        importlib.import_module("sigsoftmax.integrations.huggingface")
    except ImportError:
        raise ValueError(f"auditing the Hugging Face model {name} needs transformers: {install_extra('hf')}") from None
    return transformers


def refuse_code_of_others(name: str, error: Exception) -> None:
    """Raises in words of ours where transformers would not run the code that a model brings along.

    Left to itself, transformers asks the user at the terminal and runs it after a `y`; here it is told yes or no.
    """
    if "trust_remote_code" in str(error):
        raise ValueError(
            f"{name} brings Python code of its own (its files name it under `auto_map`), and code of others is not run "
            "unasked. Read that code; if you trust it, --trust-remote-code runs it (in Python: trust_remote_code=True)"
        ) from None


def read_config(transformers: Any, name: str, *, trust_remote_code: bool = False) -> Any:
    try:
        return transformers.AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        refuse_code_of_others(name, error)
        kind = "folder" if Path(name).is_dir() else "name"
        raise ValueError(f"no model can be read from the {kind} {name!r}: {_first_line(error)}") from None


def text_config(config: Any) -> Any:
    """The part of a configuration that concerns text; a model for text alone has no other."""
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def skeleton_of(transformers: Any, name: str, settings: Any, *, trust_remote_code: bool = False) -> Any:
    from sigsoftmax.integrations.huggingface.storage.loading import SigsoftmaxConfig, SigsoftmaxForCausalLM

    saved_with_function = isinstance(settings, SigsoftmaxConfig)
    build = SigsoftmaxForCausalLM._from_config if saved_with_function else transformers.AutoModelForCausalLM.from_config
    try:
        with torch.device("meta"):
            return build(settings, trust_remote_code=trust_remote_code)
    except (ValueError, KeyError) as error:
        refuse_code_of_others(name, error)
        raise ValueError(
            f"{name} is not a causal language model, so it has no output layer over words: {_first_line(error)}"
        ) from None


def output_module(name: str, model: Any) -> Any:
    output = model.get_output_embeddings()
    weight = getattr(output, "weight", None)
    if not isinstance(weight, Tensor) or weight.ndim != 2 or not weight.is_floating_point():
        found = "none" if output is None else type(output).__name__
        raise ValueError(
            f"{name} has no output layer that can be read: expected a module with a floating-point matrix `weight`, "
            f"got {found}. Store H, W and b in an .npz file and audit that"
        )
    return output


def note_on_missing(name: str, model: Any, missing: Iterable[str]) -> list[str]:
    """A note on parameters that the files lack and that were drawn at random; ValueError if the head is among them."""
    lacking = sorted(missing)
    of_head = [key for key in lacking if not key.startswith(f"{model.base_model_prefix}.")]
    if of_head:
        raise ValueError(
            f"{name} has no whole output layer: its files lack {', '.join(of_head[:4])}. It was stored without its "
            "language-model head"
        )
    if not lacking:
        return []
    named = ", ".join(lacking[:3]) + (", ..." if len(lacking) > 3 else "")
    random = "were drawn at random: this is not the model that was trained"
    return [f"The files lack {len(lacking)} of the model's parameters ({named}), which {random}."]


def loading_dtype(name: str, settings: Any, numbers: int, memory: int) -> torch.dtype:
    """float32 if that takes less than half of the memory, else what the files hold."""
    if 4 * numbers <= memory // 2:
        return torch.float32
    stored = getattr(settings, "dtype", None)
    stored = stored if isinstance(stored, torch.dtype) else torch.float32
    if stored.itemsize * numbers > memory:
        raise ValueError(
            f"{name} has {numbers / 1e9:.2f} billion parameters, {stored.itemsize * numbers / 2**30:.1f} GiB, more "
            f"than the {memory / 2**30:.1f} GiB of --memory; raise it, or read the output layer alone with "
            "--bounds-only"
        )
    return stored


def read_tokenizer(transformers: Any, name: str, *, trust_remote_code: bool = False) -> Any | None:
    folder = Path(name)
    known = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
    if folder.is_dir() and not any((folder / file).is_file() for file in known):
        return None
    try:
        return transformers.AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, ImportError) as error:
        refuse_code_of_others(f"the tokenizer of {name}", error)
        if folder.is_dir():
            raise ValueError(f"the tokenizer in {name} cannot be read: {_first_line(error)}") from None
        return None


def stored_tensor(name: str, keys: set[str]) -> Tensor:
    from safetensors import SafetensorError, safe_open
    from transformers.utils.hub import cached_file

    def located(file: str) -> str | None:
        return cached_file(name, file, _raise_exceptions_for_missing_entries=False)

    file, index = located("model.safetensors"), located("model.safetensors.index.json")
    if index is not None:
        shards = json.loads(Path(index).read_text(encoding="utf-8"))["weight_map"]
        file = next((located(shards[key]) for key in keys if key in shards), None)
    if file is None:
        raise ValueError(
            f"{name} has no output layer in its safetensors files (looked for {', '.join(sorted(keys))}); it may be "
            "stored in another format: audit it without --bounds-only"
        )
    try:
        with safe_open(file, framework="pt") as tensors:
            for key in sorted(keys & set(tensors.keys())):
                return tensors.get_tensor(key)
    except SafetensorError as error:
        raise ValueError(f"{file} cannot be read, it may be truncated: {error}") from None
    raise ValueError(f"{name} has no output layer: {file} lacks {', '.join(sorted(keys))}")


def reading_errors() -> tuple[type[Exception], ...]:
    from safetensors import SafetensorError

    return (OSError, EOFError, RuntimeError, SafetensorError)


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


@contextlib.contextmanager
def quiet(transformers: Any) -> Iterator[None]:
    """No bars and no reports of the library's own."""
    logging = transformers.utils.logging
    before, had_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(before)
        if had_bars:
            logging.enable_progress_bar()
