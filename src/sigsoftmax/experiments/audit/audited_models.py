"""Models that can be audited: a pair of arrays, a matrix of log-probabilities, a checkpoint, a Hugging Face model.

Each is opened into an :class:`AuditedModel`: the output layer where there is one, and a way to get contexts.
Checkpoints and Hugging Face models have files of their own.

Shapes: N contexts, V vocabulary, d width.
"""

from __future__ import annotations

import re
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from sigsoftmax._version import install_extra
from sigsoftmax.analysis.head_weights import Contexts, HeadWeights
from sigsoftmax.analysis.spectrum.entry_checks import dtype_name
from sigsoftmax.experiments.distribution_sources import StoredDistributions
from sigsoftmax.family import OutputFunction
from sigsoftmax.family.heads import Head
from sigsoftmax.lm.training.checkpoints import VERSION_KEY
from sigsoftmax.records.schemas.audits import LayerDescription

__all__ = ["AuditedModel", "Progress", "kind_of", "open_arrays", "open_matrix", "read_text", "sample_rows"]

Progress = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class AuditedModel:
    """A model to audit: an output layer with contexts, or a matrix of log-probabilities."""

    name: str
    layer: HeadWeights | None = None
    matrix: StoredDistributions | None = None
    """log-probabilities, one row per context, where no layer is known"""
    how_known: str = ""
    """origin of the knowledge of the output function"""
    scale: float = 1.0
    """factor of the model's logits; contained in the hidden vectors and the bias of ``layer``"""
    available: int | None = None
    """number of contexts; None for as many as are asked for"""
    contexts: Callable[[int, Progress], Contexts] | None = None
    """hidden vectors of at most so many contexts; None if there are none to get"""
    truth: Callable[[int], Tensor] | None = None
    """true log-probabilities in the first so many contexts, (N, V); None where they are not known"""
    operations_per_context: float = 0.0
    """additions and multiplications that the model needs for one context"""
    notes: tuple[str, ...] = ()

    @property
    def words(self) -> int:
        """The size of the vocabulary."""
        if self.layer is not None:
            return self.layer.vocabulary
        assert self.matrix is not None
        return self.matrix.words

    @property
    def dtype(self) -> str:
        if self.layer is not None:
            return dtype_name(self.layer.weight_Vd.dtype)
        assert self.matrix is not None
        return self.matrix.dtype

    def described_layer(self) -> LayerDescription:
        layer = self.layer
        return LayerDescription(
            words=self.words,
            width=None if layer is None else layer.width,
            has_bias=layer is not None and layer.bias_V is not None,
            components=1 if layer is None else layer.components,
            head="" if layer is None else layer.head_text,
            scale=self.scale,
            how_known=self.how_known,
            dtype=self.dtype,
        )


def kind_of(model: str) -> str:
    """``matrix``, ``arrays``, ``checkpoint`` or ``huggingface``, from the name and what lies there."""
    path = Path(model)
    if path.suffix == ".npy":
        return "matrix"
    if path.suffix == ".npz":
        return "arrays"
    if path.suffix == ".safetensors":
        return "checkpoint" if _is_checkpoint(path) else "arrays"
    if path.is_dir():
        return "huggingface" if (path / "config.json").is_file() else "checkpoint"
    if path.is_file() or path.suffix in (".pt", ".ckpt"):
        return "checkpoint"
    if re.fullmatch(r"[\w.-]+(/[\w.-]+)?", model) and not model.startswith("."):
        return "huggingface"
    raise ValueError(
        f"nothing to audit at {model!r}: expected a folder with a Hugging Face model, its name on the hub, a "
        "checkpoint of a run, an .npz or .safetensors file with the arrays H, W and b, or an .npy file of "
        "log-probabilities"
    )


def _is_checkpoint(path: Path) -> bool:
    """Tell whether a safetensors file names itself a checkpoint of this package, in the JSON text at its beginning."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        return VERSION_KEY.encode() in file.read(min(length, path.stat().st_size))


def sample_rows(total: int, count: int, seed: int) -> Tensor:
    """Rows that a sample takes, the same for every file of so many rows, so that files can be compared row by row."""
    if count >= total:
        return torch.arange(total)
    return torch.randperm(total, generator=torch.Generator().manual_seed(seed))[:count].sort().values


def read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} is no text in UTF-8: byte {error.start:,} is {error.object[error.start]:#04x}; convert it first"
        ) from None


def open_matrix(path: str) -> AuditedModel:
    """A .npy file of log-probabilities or probabilities, one row per context."""
    # Rows are contexts, and those before a cut are as good as ever; the notes say what is missing.
    stored = StoredDistributions(Path(path), truncated="keep")
    return AuditedModel(
        name=path,
        matrix=stored,
        how_known="not known: only log-probabilities were given",
        available=stored.contexts,
        notes=stored.notes,
    )


# --- arrays ---------------------------------------------------------------------------------------------------------


def open_arrays(path: str, *, function: str | None = None, memory: int, seed: int = 0) -> AuditedModel:
    """H (contexts, width), W (words, width) and, if there is one, b (words,); ``next`` may hold the next words."""
    stored = _read_arrays(Path(path), memory)
    tensors = {name.lower(): tensor for name, tensor in stored.items()}
    unknown = tensors.keys() - {"h", "w", "b", "next"}
    if unknown or not {"h", "w"} <= tensors.keys():
        part_of_model = " A part of a Hugging Face model is audited by naming its folder." if unknown else ""
        raise ValueError(
            f"{path}: expected arrays named H (contexts, width), W (words, width) and perhaps b (words,) and next "
            f"(contexts,), got {', '.join(sorted(stored)[:8]) or 'none'}.{part_of_model}"
        )
    for name, tensor in stored.items():
        is_next = name.lower() == "next"
        if tensor.is_floating_point() == is_next:
            expected = "the numbers of words" if is_next else "floating-point numbers"
            raise ValueError(f"{path}: {name} must hold {expected}, got {tensor.dtype}")
    following = tensors.get("next")
    member = OutputFunction.parse(function or "softmax")
    try:
        layer = HeadWeights(weight_Vd=tensors["w"], bias_V=tensors.get("b"), head=Head(member))
        contexts = Contexts.of_rows(
            tensors["h"],
            next_tokens_N=None if following is None else following.to(torch.int64),
            description=f"the {len(tensors['h']):,} hidden vectors of {Path(path).name}",
        )
        layer.check(contexts)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return AuditedModel(
        name=path,
        layer=layer,
        how_known="stated" if function else "assumed, since arrays do not say: --function states another",
        available=len(contexts),
        contexts=lambda count, progress: contexts[sample_rows(len(contexts), count, seed)],
    )


def _read_arrays(path: Path, memory: int) -> Mapping[str, Tensor]:
    if not path.is_file():
        raise ValueError(f"no file at {path}; expected an .npz or .safetensors file with the arrays H, W and b")
    size = path.stat().st_size
    if size > memory // 2:
        raise ValueError(
            f"{path} holds {size / 2**30:.1f} GiB, and an audit within {memory / 2**30:.1f} GiB can hold half of "
            "that; raise --memory, or store fewer contexts"
        )
    if path.suffix == ".npz":
        try:
            with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
                return {name: torch.from_numpy(np.array(arrays[name])) for name in arrays.files}
        except (ValueError, EOFError, OSError, KeyError, zipfile.BadZipFile, TypeError) as error:
            if "allow_pickle" in str(error):
                raise ValueError(f"{path} holds arrays of Python objects; store arrays of numbers") from None
            raise ValueError(f"{path} cannot be read, it may be truncated ({error}); write it again") from None
    try:
        from safetensors import SafetensorError
        from safetensors.torch import load_file
    except ImportError:
        raise ValueError(
            f"reading {path} needs safetensors: {install_extra('audit')}, or store the arrays as .npz"
        ) from None
    try:
        return load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path} cannot be read, it may be truncated ({error}); write it again") from None
