"""The files of a Hugging Face model: configuration, weights, tokenizer, or the output layer alone."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers.utils.hub import cached_file

from sigsoftmax.integrations.huggingface import SigsoftmaxConfig, SigsoftmaxForCausalLM
from sigsoftmax.records.envelope import from_plain
from sigsoftmax.records.parsing import parse_json

__all__ = ["ModelFiles", "quiet"]

TOKENIZER_FILES = ("tokenizer*", "vocab.*", "spiece.model")


@dataclass(frozen=True)
class ModelFiles:
    """A model in a folder or on the hub; code that it brings along runs only if it is trusted."""

    name: str
    trust_remote_code: bool = False

    def config(self) -> Any:
        kind = "folder" if Path(self.name).is_dir() else "name"
        with self._explained(f"no model can be read from the {kind} {self.name!r}"):
            return transformers.AutoConfig.from_pretrained(self.name, trust_remote_code=self.trust_remote_code)

    def skeleton(self, config: Any) -> Any:
        """The model without memory for its parameters, which tells its size and its names."""
        build: Any = transformers.AutoModelForCausalLM.from_config
        if isinstance(config, SigsoftmaxConfig):
            build = SigsoftmaxForCausalLM._from_config
        message = f"{self.name} is not a causal language model, so it has no output layer over tokens"
        with self._explained(message), torch.device("meta"):
            return build(config, trust_remote_code=self.trust_remote_code)

    def model(self, dtype: torch.dtype) -> tuple[Any, list[str]]:
        """The model, and the parameters that its files lack."""
        load: Any = transformers.AutoModelForCausalLM.from_pretrained
        options = {"dtype": dtype, "output_loading_info": True, "trust_remote_code": self.trust_remote_code}
        try:
            model, report = load(self.name, **options)
        except Exception as error:  # noqa: BLE001 - as in _explained
            raise ValueError(f"the weights of {self.name} cannot be read, a file may be truncated: {error}") from None
        return model, sorted(report["missing_keys"])

    def tokenizer(self) -> Any | None:
        """The tokenizer; None if a folder has none, or the hub."""
        folder = Path(self.name)
        if folder.is_dir() and not any(file for pattern in TOKENIZER_FILES for file in folder.glob(pattern)):
            return None
        message = f"the tokenizer in {self.name} cannot be read"
        try:
            with self._explained(message, owner=f"the tokenizer of {self.name}"):
                return transformers.AutoTokenizer.from_pretrained(self.name, trust_remote_code=self.trust_remote_code)
        except _UnreadableError:
            if folder.is_dir():
                raise
            return None

    def tensor(self, keys: set[str]) -> Tensor:
        """The one of these tensors that is stored, from safetensors files."""
        file, index = self._located("model.safetensors"), self._located("model.safetensors.index.json")
        if index is not None:
            shards = _shards_in(Path(index))
            file = next((self._located(shards[key]) for key in keys if key in shards), None)
        if file is None:
            raise ValueError(
                f"{self.name} has no output layer in its safetensors files (looked for {', '.join(sorted(keys))}); it "
                "may be stored in another format: audit it without --bounds-only"
            )
        try:
            with safe_open(file, framework="pt") as tensors:
                for key in sorted(keys & set(tensors.keys())):
                    return tensors.get_tensor(key)
        except SafetensorError as error:
            raise ValueError(f"{file} cannot be read, it may be truncated: {error}") from None
        raise ValueError(f"{self.name} has no output layer: {file} lacks {', '.join(sorted(keys))}")

    def _located(self, file: str) -> str | None:
        return cached_file(self.name, file, _raise_exceptions_for_missing_entries=False)

    @contextlib.contextmanager
    def _explained(self, message: str, *, owner: str | None = None) -> Iterator[None]:
        """Raise errors of transformers in words of ours, those about code that the model brings along first.

        Files of others may hold anything, and transformers checks little of it before it computes with it.

        Left to itself, transformers asks the user at the terminal and runs it after a `y`; here it is told yes or no.
        """
        try:
            yield
        except Exception as error:  # noqa: BLE001
            if "trust_remote_code" in str(error):
                raise ValueError(
                    f"{owner or self.name} brings Python code of its own (its files name it under `auto_map`), and "
                    "code of others is not run unasked. Read that code; if you trust it, --trust-remote-code runs it "
                    "(in Python: trust_remote_code=True)"
                ) from None
            kind = "" if isinstance(error, OSError | ValueError) else f"{type(error).__name__}: "
            first_line = f"{kind}{next(iter(str(error).strip().splitlines()), '')}" or type(error).__name__
            raise _UnreadableError(f"{message}: {first_line}") from None


def _shards_in(index: Path) -> dict[str, str]:
    """The file that each tensor is in, by an index of safetensors files, which may say anything."""
    try:
        shards: dict[str, str] = from_plain(dict[str, str], parse_json(index.read_bytes())["weight_map"], "weight_map")
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{index} is no index of safetensors files, it may be damaged: {error!s:.200}") from None
    for file in shards.values():
        if Path(file).name != file:
            raise ValueError(f"{index} names {file!r:.80}, which is no file beside it; nothing else is read")
    return shards


class _UnreadableError(ValueError):
    """Files that transformers could not read."""


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Switch off the bars and reports of transformers."""
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
