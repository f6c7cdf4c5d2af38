"""Models that can be audited: a pair of arrays, a matrix of log-probabilities, a checkpoint, a Hugging Face model.

Each is opened into an :class:`AuditedModel`: the output layer where there is one, and a way to get contexts.
Checkpoints and Hugging Face models have files of their own.

Shapes: N contexts, V vocabulary, d width.
"""

from __future__ import annotations

import math
import re
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from sigsoftmax._version import install_extra
from sigsoftmax.analysis.head_weights import Contexts, HeadWeights, sample_rows
from sigsoftmax.analysis.spectrum.entry_checks import dtype_name
from sigsoftmax.analysis.spectrum.matrix_files import read_npy_header
from sigsoftmax.experiments.distribution_sources import StoredDistributions
from sigsoftmax.family.heads import Head
from sigsoftmax.lm.saving.checkpoints import VERSION_KEY
from sigsoftmax.records.schemas.audits import LayerDescription

__all__ = ["AuditedModel", "Progress", "kind_of", "open_arrays", "open_matrix", "read_text"]

Progress = Callable[[str], None]

ONLY_A_MATRIX = (
    "Only an output matrix was given: spectrum, directions, nonlinearity and gradient are those of hidden vectors, and "
    "were not measured. Store these beside it as H (contexts, width)."
)


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
    def vocabulary(self) -> int:
        """The size of the vocabulary."""
        if self.layer is not None:
            return self.layer.vocabulary
        assert self.matrix is not None
        return self.matrix.vocabulary

    @property
    def dtype(self) -> str:
        if self.layer is not None:
            return dtype_name(self.layer.weight_Vd.dtype)
        assert self.matrix is not None
        return self.matrix.dtype

    def described_layer(self) -> LayerDescription:
        layer = self.layer
        return LayerDescription(
            words=self.vocabulary,
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
        "checkpoint of a run, an .npz or .safetensors file with the arrays H, W and b or with an output matrix alone, "
        "or an .npy file of log-probabilities"
    )


def _is_checkpoint(path: Path) -> bool:
    """Tell whether a safetensors file names itself a checkpoint of this package, in the JSON text at its beginning."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        return VERSION_KEY.encode() in file.read(min(length, path.stat().st_size))


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


def check_length(tokens: int) -> None:
    """Refuse a text in which nothing follows anything."""
    if tokens < 2:
        raise ValueError(f"the text has {tokens} tokens; an audit needs at least 2, and better some thousands")


def open_arrays(path: str, *, function: str | None = None, memory: int, seed: int = 0) -> AuditedModel:
    """An output matrix W (vocabulary, width), perhaps a bias b (vocabulary,), and hidden vectors H (contexts, width).

    H of a mixture is (contexts, components, width), beside the logits ``prior`` (contexts, components) of its prior.
    ``next`` may hold the tokens that followed. Without H the output matrix alone is audited.
    """
    tensors = _by_role(path, _read_arrays(Path(path), memory))
    hidden, prior, following = (tensors.get(role) for role in ("h", "prior", "next"))
    components = hidden.shape[1] if hidden is not None and hidden.ndim == 3 else 1
    head = Head.parse(function or "softmax", allow_options=True)
    if function is None and components > 1:
        head = Head(head.function, components)
    if hidden is None and head.components > 1:
        raise ValueError(
            f"{path} holds an output matrix alone, and the output of {head} is no function of it and one hidden "
            "vector: it takes a hidden vector per component and the logits of a prior. Store them as H (contexts, "
            "components, width) and prior (contexts, components), or leave --function out"
        )
    try:
        layer = HeadWeights(weight_Vd=tensors["w"], bias_V=tensors.get("b"), head=head)
        contexts = None
        if hidden is not None:
            contexts = Contexts(
                hidden_NKd=hidden[:, None] if hidden.ndim == 2 else hidden,
                prior_logits_NK=prior,
                next_tokens_N=None if following is None else following.to(torch.int64),
                description=f"the {len(hidden):,} hidden vectors of {Path(path).name}",
            )
            layer.check(contexts)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    known = AuditedModel(
        name=path,
        layer=layer,
        how_known="stated" if function else "assumed, since arrays do not say: --function states another",
    )
    if contexts is None:
        return replace(known, notes=(ONLY_A_MATRIX,))
    return replace(
        known,
        available=len(contexts),
        contexts=lambda count, progress: contexts[sample_rows(len(contexts), count, seed)],
    )


def _by_role(path: str, stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The arrays of a file as ``h``, ``w``, ``b``, ``prior`` and ``next``.

    An output layer may be named as a module stores it, ``lm_head.weight`` and ``lm_head.bias``.
    """
    matrices = [name for name in stored if re.fullmatch(r"(.*\.)?weight", name)]
    roles = {name: name.lower() for name in stored}
    if len(matrices) == 1:
        roles |= {matrices[0]: "w", matrices[0].removesuffix("weight") + "bias": "b"}
    found = {roles[name]: tensor for name, tensor in stored.items()}
    unknown = found.keys() - {"h", "w", "b", "prior", "next"}
    if unknown or "w" not in found or len(found) < len(stored):
        part_of_model = " A part of a Hugging Face model is audited by naming its folder." if unknown else ""
        raise ValueError(
            f"{path}: expected arrays named H (contexts, width), W (vocabulary, width) and perhaps b (vocabulary,) and "
            "next (contexts,), or an output layer alone as lm_head.weight, got "
            f"{', '.join(sorted(stored)[:8]) or 'none'}.{part_of_model}"
        )
    for name, tensor in stored.items():
        is_next = roles[name] == "next"
        if tensor.is_floating_point() == is_next:
            expected = "the numbers of tokens" if is_next else "floating-point numbers"
            raise ValueError(f"{path}: {name} must hold {expected}, got {tensor.dtype}")
    if "h" in found and found["h"].ndim not in (2, 3):
        raise ValueError(
            f"{path}: hidden vectors H must be a matrix (contexts, width), or of a mixture (contexts, components, "
            f"width), got shape {tuple(found['h'].shape)}"
        )
    if "h" not in found and (without := found.keys() & {"prior", "next"}):
        raise ValueError(f"{path}: {' and '.join(sorted(without))} belong to hidden vectors, and there is no H")
    return found


def _read_arrays(path: Path, memory: int) -> Mapping[str, Tensor]:
    if not path.is_file():
        raise ValueError(f"no file at {path}; expected an .npz or .safetensors file with the arrays H, W and b")
    if path.suffix != ".npz":
        _check_fits(path, path.stat().st_size, memory)
    else:
        try:
            _check_fits(path, _unpacked_bytes(path), memory)
            with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
                return {name: torch.from_numpy(np.array(arrays[name])) for name in arrays.files}
        except _TooLarge:
            raise
        except (ValueError, EOFError, OSError, KeyError, zipfile.BadZipFile, TypeError) as error:
            if "allow_pickle" in str(error):
                raise ValueError(f"{path} holds arrays of Python objects; store arrays of numbers") from None
            raise ValueError(f"{path} cannot be read, it may be truncated ({error!s:.200}); write it again") from None
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


class _TooLarge(ValueError):
    """A file has more than the memory that an audit may use."""


def _check_fits(path: Path, size: int, memory: int) -> None:
    if size > memory // 2:
        raise _TooLarge(
            f"{path} holds {size / 2**30:.1f} GiB, and an audit within {memory / 2**30:.1f} GiB can hold half of "
            "that; raise --memory, or store fewer contexts"
        )


def _unpacked_bytes(path: Path) -> int:
    """The memory that the arrays of an archive take: a small file may be packed from anything, and say anything."""
    total = 0
    with zipfile.ZipFile(path) as archive:
        for member in archive.infolist():
            total += max(member.file_size, _claimed_bytes(archive, member))
    return total


def _claimed_bytes(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> int:
    """The bytes that numpy would allocate for a member, before it reads any."""
    with archive.open(member) as file:
        if file.read(6) != b"\x93NUMPY":
            return 0
    with archive.open(member) as file:
        shape, _, kind = read_npy_header(file)
    return math.prod(shape) * kind.itemsize
