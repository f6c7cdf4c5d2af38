"""Trial runs of a model on a few tokens, in which its output layer gives known numbers.

Shapes: B sequences of L tokens, d width, V classes.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutput

from sigsoftmax.integrations.huggingface.examination.label_convention import (
    IGNORED,
    decoder_input_of,
    is_encoder_decoder,
    without_labels,
)
from sigsoftmax.integrations.huggingface.examination.model_state import evaluating, loss_function_set

SATURATING = 59904.0
"""Far beyond any cap, and representable in half precision."""
PROBE = (SATURATING, 1.0, -2.0, 0.5, 8.0, -30.0, 0.0, 3.0)
OTHER_PROBE = tuple(0.25 * value for value in PROBE[::-1])
"""It has another sum and norm, so that a term that depends on the logits shows in the loss."""
MODERATE_PROBES = ((0.5, 1.0, -2.0, 0.25, 3.0, -1.0, 0.0, 2.0), (2.0, -0.5, 1.0, 1.5, -1.0, 0.0, 0.75, -3.0))
"""Their cross-entropies under labels at one position or the next are far from each other."""
LABELS = (1, IGNORED, 0, 1)
ATTENDED = (1, 1, 1, 0)
"""The label of the last token counts, although no other token attends to it."""


@dataclass
class TrialRun:
    """Observations of one run."""

    loss: float | None
    returned_BLV: Tensor
    to_loss: tuple[Tensor, Tensor] | None
    """Logits and labels with which the model called ``loss_function``; None if it did not."""
    entered: list[Tensor]
    """Vectors that entered the output layer, for each call of it."""


def takes_tokens(model: Any) -> bool:
    """Tell whether a model takes token ids; the encoder of others, of speech or pictures, is left out."""
    return not is_encoder_decoder(model) or model.main_input_name == "input_ids"


def _inputs(model: Any, mask_BL: Tensor | None) -> dict[str, Any]:
    """The keywords of a run on a few tokens."""
    device = model.get_input_embeddings().weight.device
    device = model.device if device.type == "meta" else device
    accepted = inspect.signature(type(model).forward).parameters
    labels_BL = torch.tensor([LABELS], device=device)
    made: dict[str, Any] = {"labels": labels_BL, "return_dict": True}
    if "use_cache" in accepted:
        made["use_cache"] = False
    if takes_tokens(model):
        made["input_ids"] = torch.zeros_like(labels_BL)
    else:
        states_BLd: Any = torch.zeros(1, 2, model.get_encoder().config.hidden_size, device=device, dtype=model.dtype)
        made["encoder_outputs"] = BaseModelOutput(last_hidden_state=states_BLd)
    if mask_BL is not None:
        made["attention_mask"] = mask_BL.to(device)
    return made


def trial_run(
    model: Any,
    layer: nn.Module,
    probe: tuple[float, ...] | None,
    *,
    loss: float | None = None,
    with_labels: bool = True,
    mask_BL: Tensor | None = None,
) -> TrialRun:
    """Run a model with a constant in place of its loss, or with its own; ``probe`` None leaves its logits alone."""
    calls: list[tuple[Tensor, Tensor]] = []
    entered: list[Tensor] = []

    def known_numbers(module: nn.Module, arguments: Any, output: Tensor) -> Tensor | None:
        entered.append(arguments[0].detach().cpu())
        if probe is None:
            return None
        row = torch.zeros(output.shape[-1], dtype=widest_dtype(output.device))
        row[: len(probe)] = torch.tensor(probe, dtype=row.dtype)[: len(row)]
        numbers = row.to(output.device).expand(output.shape).clone()
        if loss is None:
            # Vectors that differ, so that labels in the wrong places show.
            leading = output.shape[:-1]
            numbers *= 1.0 + 0.5 * torch.arange(leading.numel(), device=output.device).reshape(*leading, 1)
        return numbers

    def recorded(logits: Tensor, labels: Tensor | None = None, *arguments: Any, **keywords: Any) -> Any:
        given = keywords.get("shift_labels") if labels is None else labels
        calls.append((logits, logits.new_empty(0) if given is None else given))
        if loss is None:
            return own_loss(logits, labels, *arguments, **keywords)
        return torch.full((), loss, device=logits.device)

    name = type(model).__name__
    with evaluating(model), loss_function_set(model, None), torch.no_grad():
        own_loss: Any = None if loss is not None else model.loss_function
        handle = layer.register_forward_hook(known_numbers)
        try:
            inputs = _inputs(model, mask_BL)
            if not with_labels:
                kind = type(model)
                inputs = without_labels(
                    model, inputs, inspect.signature(kind.forward).parameters, decoder_input_of(kind)
                )
            with loss_function_set(model, recorded):
                output = model(**inputs)
        except (TypeError, ValueError, RuntimeError, KeyError, IndexError, AttributeError) as error:
            raise ValueError(
                f"{name} could not be run on a few tokens, which shows what it does with its logits: {error}"
            ) from error
        finally:
            handle.remove()
    logits, found = getattr(output, "logits", None), getattr(output, "loss", None)
    if logits is None or (with_labels and found is None):
        raise ValueError(
            f"{name} returns {' and '.join(output)} for token ids and labels, but an output function needs a model "
            "that returns `loss` and `logits`"
        )
    return TrialRun(
        loss=None if found is None else float(found),
        returned_BLV=logits.to(widest_dtype(logits.device)).cpu(),
        to_loss=calls[0] if calls else None,
        entered=entered,
    )


def widest_dtype(device: torch.device) -> torch.dtype:
    """Double precision where there is any, which shows a scale and a cap to the last digit in a model of any dtype."""
    return torch.float32 if device.type == "mps" else torch.float64
