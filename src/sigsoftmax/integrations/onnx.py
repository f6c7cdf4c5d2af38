"""Export to ONNX of output layers and of language models whose logits hold their output function, with a check.

The exported graph is compared with torch in onnxruntime before it is handed over. Models that contain output functions
or output layers are exported by torch.onnx.export itself.

Shapes: B sequences of L tokens.
"""

from __future__ import annotations

import importlib
import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from sigsoftmax._version import install_extra
from sigsoftmax.layers.mixture import MixtureOutputLayer
from sigsoftmax.layers.output_layer import OutputLayer

TOLERANCE = 1e-4
"""Largest difference from torch, relative to the largest number, beyond which an exported graph is refused."""


class _ModelGraph(nn.Module):
    """The logits of a language model for whole texts."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).logits


def export_onnx(module: nn.Module, path: str | os.PathLike[str], *, check: bool = True) -> None:
    """Write an output layer or a language model of transformers as an ONNX file.

    A layer becomes a graph from ``hidden`` (tokens, d) to ``log_probs`` (tokens, V). A language model becomes a graph
    from ``input_ids`` and ``attention_mask``, both (batch, length), to ``logits`` (batch, length, V); those of a
    patched model are phi(z), of a mixture log P plus a number per token, so that the softmax of every runtime is right.
    There is no key-value cache in it.

    ``check`` runs the file in onnxruntime, on other sizes than it was exported with, and raises if it differs from
    torch.
    """
    _require("onnxscript", "torch.onnx")
    graph, examples, inputs, output, dynamic = _parts(module)
    was_training = module.training
    graph.eval()
    try:
        with _quiet(), torch.no_grad():
            # Without the optimiser of onnxscript, which takes an added 1e-8 (the eps of relu) for nothing and drops it.
            program: Any = torch.onnx.export(
                graph,
                examples[0],
                dynamo=True,
                optimize=False,
                input_names=inputs,
                output_names=[output],
                dynamic_shapes=dynamic,
                verbose=False,
            )
        program.save(os.fspath(path))
        if check:
            _compare(path, graph, examples[1], inputs)
    finally:
        module.train(was_training)


def _parts(module: nn.Module) -> tuple[nn.Module, tuple[tuple[Tensor, ...], ...], list[str], str, Any]:
    """The graph, inputs of two sizes, the names of inputs and output, and the dimensions that may vary."""
    any_size = torch.export.Dim.DYNAMIC
    if isinstance(module, OutputLayer | MixtureOutputLayer):
        features = module.in_features if isinstance(module, OutputLayer) else module.prior.in_features
        vectors = tuple((torch.randn(tokens, features).to(module.weight),) for tokens in (3, 7))
        return module, vectors, ["hidden"], "log_probs", ({0: any_size},)
    if hasattr(module, "get_output_embeddings") and hasattr(module, "config"):
        if getattr(module.config, "is_encoder_decoder", False):
            raise ValueError(
                f"a {type(module).__name__} is an encoder and a decoder, and one graph from token ids to logits does "
                "not hold both; export the patched model with a tool for such models: phi is part of its forward pass"
            )
        device: Any = module.device
        ids = [torch.randint(2, size, device=device) for size in ((2, 5), (3, 9))]
        texts = tuple((ids_BL, torch.ones_like(ids_BL)) for ids_BL in ids)
        return _ModelGraph(module), texts, ["input_ids", "attention_mask"], "logits", ({0: any_size, 1: any_size},) * 2
    raise ValueError(
        "expected an OutputLayer, a MixtureOutputLayer or a language model of transformers, got "
        f"{type(module).__name__}"
    )


def _compare(path: str | os.PathLike[str], graph: nn.Module, example: tuple[Tensor, ...], inputs: list[str]) -> None:
    onnxruntime = _require("onnxruntime", "checking an exported file (check=False leaves that out)")
    session = onnxruntime.InferenceSession(os.fspath(path), providers=["CPUExecutionProvider"])
    fed = {name: tensor.detach().cpu().numpy() for name, tensor in zip(inputs, example, strict=True)}
    got = torch.from_numpy(session.run(None, fed)[0])
    with torch.no_grad():
        want = graph(*example).cpu()
    worst = float((got - want).abs().max() / want.abs().max().clamp(min=1.0))
    if not worst <= TOLERANCE:
        raise RuntimeError(
            f"{os.fspath(path)} differs from torch by {worst:.2g} in onnxruntime, relative to its largest number; the "
            "file is there, but do not use it"
        )


def _require(package: str, purpose: str) -> Any:
    try:
        return importlib.import_module(package)
    except ImportError:
        raise ImportError(f"{purpose} needs {package}: {install_extra('onnx')}") from None


@contextmanager
def _quiet() -> Iterator[None]:
    """The exporter warns of its own internals, and logs each optional package that it could do without."""
    logger = logging.getLogger("torch.onnx._internal.exporter._registration")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
