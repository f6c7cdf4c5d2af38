"""Retrofit: a trained softmax model becomes one with sigsoftmax in small steps.

The shifted member z + log sigmoid(z + b) tends to softmax as b grows. If no logit lies below z_min, every
log-probability differs from softmax's by at most exp(-(z_min + b)), so that a large b starts training where the model
is. A schedule then lowers b, and with b = 0 the function is sigsoftmax.

Shapes: B sequences of L tokens, d width, V classes.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import TrainerCallback

from sigsoftmax.contract.spec import number
from sigsoftmax.family import Learned, OutputFunction
from sigsoftmax.integrations.huggingface.examination.label_convention import (
    IGNORED,
    decoder_input_of,
    is_encoder_decoder,
    without_labels,
)
from sigsoftmax.integrations.huggingface.examination.model_state import evaluating
from sigsoftmax.integrations.huggingface.patching.apply import Model, language_model, patch
from sigsoftmax.integrations.huggingface.patching.causal_loss import CausalLossOptions
from sigsoftmax.integrations.huggingface.patching.patched_model import is_patched

Batch = Tensor | Mapping[str, Any]
Schedule = Literal["linear", "cosine"] | Callable[[float], float]

MEMBER = "shifted_sigsoftmax"


def smallest_logit(model: nn.Module, batches: Iterable[Batch]) -> float:
    """The smallest logit that a softmax model gives on some text, a sequence at a time.

    A batch is a tensor of token ids (B, L), or the keywords of the model, for an encoder-decoder model with labels.
    Positions that ``attention_mask`` leaves out do not count, nor do those of a decoder without a label.
    """
    inner: Any = language_model(model)
    if is_patched(inner) and not inner.output_function.is_plain_softmax:
        raise ValueError(
            f"the logits of this model are those of {inner.output_function.described()}; measure it before you patch it"
        )
    smallest = math.inf
    with evaluating(model), torch.no_grad():
        for batch in batches:
            inputs, counts_BL = _without_labels(inner, {"input_ids": batch} if isinstance(batch, Tensor) else batch)
            rows = next(x.shape[0] for x in inputs.values() if isinstance(x, Tensor))
            for row in range(rows):
                one = {key: x[row : row + 1] if isinstance(x, Tensor) else x for key, x in inputs.items()}
                logits_LV = model(**one).logits[0]
                if counts_BL is not None:
                    logits_LV = logits_LV[counts_BL[row].bool()]
                if logits_LV.numel():
                    smallest = min(smallest, float(logits_LV.min()))
    if smallest == math.inf:
        raise ValueError("batches held no token, so there is no smallest logit; pass some text that the model knows")
    return smallest


def _without_labels(inner: Any, batch: Mapping[str, Any]) -> tuple[dict[str, Any], Tensor | None]:
    """The keywords of a call that returns logits, and where these count; None if they count everywhere."""
    kind, labels_BL = type(inner), batch.get("labels")
    made_input = decoder_input_of(kind)
    if is_encoder_decoder(inner) and labels_BL is None and "decoder_input_ids" not in batch:
        raise ValueError(
            f"{kind.__name__} is an encoder-decoder model: a batch must hold its keywords, such as input_ids, and "
            "labels or decoder_input_ids"
        )
    inputs = without_labels(inner, {"labels": None, **batch}, inspect.signature(kind.forward).parameters, made_input)
    if not is_encoder_decoder(inner):
        return inputs, batch.get("attention_mask")
    return inputs, batch.get("decoder_attention_mask") if labels_BL is None else labels_BL != IGNORED


def shifted_start(model: nn.Module, batches: Iterable[Batch], *, bound: float = 1e-3) -> float:
    """A shift b with which every log-probability on this text stays within ``bound`` nats of softmax.

    b = log(1 / bound) - z_min. On other text a logit may be smaller than z_min, and the difference greater: take text
    of the kind you train on, and some margin in the bound.
    """
    if not 0.0 < bound < math.inf:
        raise ValueError(f"bound must be a number of nats greater than 0, got {bound}")
    return math.log(1.0 / bound) - smallest_logit(model, batches)


def retrofit(model: Model, b: float, **options: Any) -> Model:
    """Give a trained softmax model, in place, the shifted sigsoftmax of a large ``b`` (see :func:`shifted_start`).

    b is a parameter that no optimiser trains and that is saved with the model; :class:`AnnealShift` lowers it.
    ``options`` are the keywords of :func:`apply_output_function`.
    """
    if not math.isfinite(number("b", b)):
        raise ValueError(f"b must be a finite number, got {b}")
    member = OutputFunction(MEMBER, b=Learned(initial=float(b)))
    patch(language_model(model), member, CausalLossOptions(**options), frozen=("b",))
    return model


class AnnealShift(TrainerCallback):
    """A callback of the Trainer that moves b from ``start`` to ``end`` over the first ``steps`` optimiser steps.

    ``start`` None is the b that the model has when training begins; a run that is resumed needs it given. ``steps``
    None is all of training. ``schedule`` is ``"linear"``, ``"cosine"`` or a function from [0, 1] to [0, 1]. Without a
    Trainer, call :meth:`set` before each step.
    """

    def __init__(
        self, *, start: float | None = None, end: float = 0.0, steps: int | None = None, schedule: Schedule = "linear"
    ) -> None:
        for name, value in (("start", start), ("end", end)):
            if value is not None and not math.isfinite(value):
                raise ValueError(f"{name} must be a finite number, got {value}")
        if steps is not None and steps < 1:
            raise ValueError(f"steps must be 1 or more, got {steps}")
        if schedule not in ("linear", "cosine") and not callable(schedule):
            raise ValueError(f"schedule must be 'linear', 'cosine' or a function, got {schedule!r}")
        self.start, self.end, self.steps, self.schedule = start, end, steps, schedule

    def at(self, step: int) -> float:
        """b after ``step`` optimiser steps."""
        if self.start is None or self.steps is None:
            raise ValueError("start and steps are not known before training begins; give them to AnnealShift")
        part = min(1.0, step / self.steps)
        if callable(self.schedule):
            part = self.schedule(part)
        elif self.schedule == "cosine":
            part = 0.5 - 0.5 * math.cos(math.pi * part)
        # Weighted, so that both ends are met exactly.
        return (1.0 - part) * self.start + part * self.end

    def set(self, model: nn.Module, step: int) -> float:
        """Give the model the b of a step, and return it."""
        value = self.at(step)
        with torch.no_grad():
            shift_of(model).fill_(value)
        return value

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **others: Any) -> None:
        shift = shift_of(model)
        if self.start is None:
            if state.global_step > 0:
                raise ValueError(
                    f"this run is resumed at step {state.global_step}, where b has moved already; give AnnealShift the "
                    "start that it had at first"
                )
            self.start = float(shift.detach())
        if self.steps is None:
            self.steps = max(1, state.max_steps)
        self.set(model, state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **others: Any) -> None:
        # After the optimiser, which trains b where an adapter keeps it, and before the step is evaluated and stored.
        self.set(model, state.global_step)


def shift_of(model: Any) -> nn.Parameter:
    """The parameter b of a model that was given to :func:`retrofit`."""
    inner: Any = language_model(getattr(model, "module", model))
    function = inner.output_function if is_patched(inner) else None
    shift = None if function is None else dict(function.function_parameters.items()).get("b")
    if shift is None or shift.numel() != 1:
        found = "none" if function is None else function.described()
        raise ValueError(
            f"expected a model with one shift b, as retrofit(model, b) makes it; its output function is {found}"
        )
    is_kept_by_adapter = hasattr(function, "modules_to_save")
    if getattr(inner, "peft_config", None) and not is_kept_by_adapter:
        raise ValueError(
            "an adapter stores neither the model nor its shift b, so the shift would be lost; create the adapter with "
            "modules_to_save=['output_function']"
        )
    if shift.requires_grad and not is_kept_by_adapter:
        raise ValueError("b is trained by the optimiser, so a schedule would fight with it; use retrofit(model, b)")
    return shift
