"""Giving a causal language model of transformers another output function, and taking it away again.

A patched model is the same object, of a class that stands between it and its own class. Its forward pass is its own;
what is changed are the two ends of it that concern the output function:

- without labels, ``.logits`` is phi of the logits, so that the softmax of every caller gives the right probabilities;
- with labels, the loss takes the input of the output layer and computes logits a slab at a time.

Shapes: B sequences of L tokens, d features, V classes.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from torch import Tensor, nn
from transformers import PreTrainedModel

from sigsoftmax.border import Function
from sigsoftmax.family import OutputFunction
from sigsoftmax.integrations.huggingface import adapters, checkpoints
from sigsoftmax.integrations.huggingface.causal_loss import (
    Count,
    KeepLogits,
    LossOptions,
    LossRequest,
    loss_of_hidden,
    loss_of_logits,
    targets,
)
from sigsoftmax.integrations.huggingface.examination import Examined, examine, linear_layer, output_layer
from sigsoftmax.integrations.huggingface.head_function import HeadFunction, LogitAdjustment, is_plain_softmax
from sigsoftmax.integrations.huggingface.logits_processor import OutputFunctionLogitsProcessor
from sigsoftmax.loss import WeightGradient

Model = TypeVar("Model", bound=nn.Module)


@dataclass
class _Waiting:
    """A loss that waits for the input of the output layer."""

    compute: Callable[[nn.Linear, Tensor], Tensor]
    loss: Tensor | None = None


@dataclass
class Scores:
    """Losses of single tokens, kept while texts are scored."""

    losses_BL: Tensor | None = None


class HandOver:
    """A hook before the output layer: the loss that waits for its input is computed, and the layer gets no rows.

    It is computed here rather than after the model's forward pass because a sharded weight is whole only while its
    layer runs.
    """

    def __call__(self, layer: Any, arguments: tuple[Any, ...]) -> tuple[Any, ...] | None:
        waiting = getattr(layer, "waiting_loss", None)
        if waiting is None:
            return None
        waiting.loss = waiting.compute(layer, arguments[0])
        return (arguments[0][..., :0, :], *arguments[1:])


class PatchedModel:
    """What a patched model has beyond its own class; the second base of :func:`patched_class`."""

    output_function: HeadFunction
    loss_options: LossOptions
    examined: Examined
    waiting_loss: _Waiting | None = None
    scores: Scores | None = None

    def __init__(self, config: Any, *arguments: Any, **options: Any) -> None:
        """A model from a configuration that remembers its output function, as loading makes it."""
        super().__init__(config, *arguments, **options)  # type: ignore[call-arg]
        known = checkpoints.Remembered.of(config)
        examined = Examined(num_classes=known.num_classes, adjustment=known.adjustment, why_stored=known.why_stored)
        _attach(self, HeadFunction(known.function, known.num_classes, frozen=known.frozen), examined, LossOptions())
        if checkpoints.is_being_filled(config):
            checkpoints.expect_stored_shapes(cast("nn.Module", self), known.reshaped)

    @property
    def loss_function(self) -> Any:
        """The loss of this output function, unless one was set."""
        own = getattr(self, "_loss_function", None)
        return self.loss_of_output_function if own is None else own

    @loss_function.setter
    def loss_function(self, value: Any) -> None:
        self._loss_function = value

    def loss_of_output_function(
        self, logits: Tensor, labels: Tensor | None = None, *rest: Any, **options: Any
    ) -> Tensor:
        """What the model calls with its logits; these have no rows if the loss was computed in their place."""
        if self.waiting_loss is None:
            request = self.loss_request(labels, **options)
            loss = loss_of_logits(logits, request, self.output_function.function, self.loss_options)
        else:
            assert self.waiting_loss.loss is not None
            loss = self.waiting_loss.loss
        if self.scores is None:
            return loss
        self.scores.losses_BL = loss
        return loss.sum()

    def loss_request(
        self,
        labels: Tensor | None,
        *,
        num_items_in_batch: Count = None,
        ignore_index: int = -100,
        shift_labels: Tensor | None = None,
        **others: Any,
    ) -> LossRequest:
        """What the keywords of a call say of its loss, as the loss of transformers reads them."""
        return LossRequest(
            targets_BL=targets(labels, shift_labels, ignore_index),
            count=num_items_in_batch,
            ignore_index=ignore_index,
            by_token=self.scores is not None,
            is_training=self.training,  # type: ignore[attr-defined]
        )

    def loss_at_output_layer(self, request: LossRequest, layer: nn.Linear, hidden_BLd: Tensor) -> Tensor:
        adjustment = self.examined.adjustment
        function = self.output_function.of_raw_logits(adjustment)
        return loss_of_hidden(hidden_BLd, layer, adjustment.scale, request, function, self.loss_options)

    @property
    def peft_config(self) -> Any:
        """The adapters on this model; PEFT sets it."""
        if "adapter_configs" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__} has no adapters, so no attribute 'peft_config'")
        return self.__dict__["adapter_configs"]

    @peft_config.setter
    def peft_config(self, configs: Any) -> None:
        self.__dict__["adapter_configs"] = configs
        if not self.output_function.is_plain_softmax:
            adapters.guard_configs(configs)

    @peft_config.deleter
    def peft_config(self) -> None:
        del self.__dict__["adapter_configs"]

    def generate(self, *arguments: Any, **options: Any) -> Any:
        processors = [*(options.get("logits_processor") or ()), *(x for x in arguments if isinstance(x, list))]
        flat = [one for entry in processors for one in (entry if isinstance(entry, list) else [entry])]
        if any(isinstance(one, OutputFunctionLogitsProcessor) for one in flat):
            raise ValueError(
                "the logits of this model hold its output function already, and OutputFunctionLogitsProcessor would "
                "apply another; leave the processor out, or undo the patch with remove_output_function(model)"
            )
        return super().generate(*arguments, **options)  # type: ignore[misc]

    def resize_token_embeddings(self, *arguments: Any, **options: Any) -> Any:
        embeddings = super().resize_token_embeddings(*arguments, **options)  # type: ignore[misc]
        num_classes = output_layer(self).weight.shape[0]
        self.output_function.resize(num_classes)
        self.examined = Examined(
            num_classes=num_classes, adjustment=self.examined.adjustment, why_stored=self.examined.why_stored
        )
        checkpoints.remember(self)
        return embeddings

    def save_pretrained(self, save_directory: Any, *arguments: Any, **options: Any) -> Any:
        return checkpoints.save(self, super().save_pretrained, save_directory, *arguments, **options)  # type: ignore[misc]

    def __reduce_ex__(self, protocol: Any) -> Any:
        # By its own class: the patched one is made anew in each process.
        return _empty_patched, (own_class(self),), self.__dict__


@functools.cache
def patched_class(own: Any) -> Any:
    """The class of a patched model; it keeps the name of ``own``, by which transformers knows what it is."""
    forward = inspect.unwrap(own.forward)
    names = list(inspect.signature(forward).parameters)
    labels_position = names.index("labels") - 1

    @functools.wraps(own.forward)
    def patched_forward(self: Any, *arguments: Any, **options: Any) -> Any:
        labels = options.get("labels")
        if labels is None and len(arguments) > labels_position:
            labels = arguments[labels_position]
        asked = options.pop("return_dict", None)
        wants_tuple = not (getattr(self.config, "return_dict", True) if asked is None else asked)
        layer = _layer_of_waiting_loss(self, needed=labels is not None and not wants_tuple)
        if layer is None:
            output = own.forward(self, *arguments, return_dict=True, **options)
            output["logits"] = self.output_function(output["logits"])
        else:
            request = self.loss_request(**{**options, "labels": labels})
            with _waiting_loss(self, layer, request):
                output = own.forward(self, *arguments, return_dict=True, **options)
            # No logits rather than none of their rows: whoever needs them should hear of it at once.
            output = type(output)(**{key: value for key, value in output.items() if key != "logits"})
        return output.to_tuple() if wants_tuple else output

    attributes = {
        "forward": patched_forward,
        # As of `own`, too: conversions of stored weights are looked up for classes of transformers alone.
        "__module__": own.__module__,
        "__qualname__": own.__qualname__,
        # A shift or an exponent keeps its digits when a model is loaded in half precision.
        "_keep_in_fp32_modules_strict": {*(own._keep_in_fp32_modules_strict or ()), "output_function"},
    }
    return type(own.__name__, (PatchedModel, own), attributes)


def _layer_of_waiting_loss(model: Any, *, needed: bool) -> nn.Linear | None:
    """The output layer, if the loss is to be computed from its input; None if logits are to be stored."""
    if not needed or model.examined.why_stored is not None or getattr(model, "_loss_function", None) is not None:
        return None
    if model.loss_options.keep_logits(is_training=model.training):
        return None
    layer = linear_layer(output_layer(model))
    if layer is None:
        _warn_once(model, "its output layer was replaced by something other than a plain linear map")
    elif not _has_hook(layer):
        layer.register_forward_pre_hook(HandOver())
    return layer


@contextmanager
def _waiting_loss(model: Any, layer: Any, request: LossRequest) -> Iterator[None]:
    compute = functools.partial(model.loss_at_output_layer, request)
    model.waiting_loss = layer.waiting_loss = _Waiting(compute)
    try:
        yield
    finally:
        model.waiting_loss = layer.waiting_loss = None


def _has_hook(layer: nn.Module) -> bool:
    return any(isinstance(hook, HandOver) for hook in layer._forward_pre_hooks.values())


def _warn_once(model: Any, reason: str) -> None:
    if not getattr(model, "warned_of_stored_logits", False):
        model.warned_of_stored_logits = True
        warnings.warn(
            f"the loss of {type(model).__name__} needs its logits stored, since {reason}; the results are right, but "
            "the memory grows with tokens times vocabulary",
            stacklevel=3,
        )


def _empty_patched(own: type) -> Any:
    made = patched_class(own)
    return made.__new__(made)


def own_class(model: Any) -> Any:
    """The class that a patched model had before."""
    return type(model).__mro__[type(model).__mro__.index(PatchedModel) + 1]


def is_patched(model: Any) -> bool:
    return isinstance(model, PatchedModel)


def language_model(model: Any) -> PreTrainedModel:
    """The transformers model in what a user passes: itself, or the base of a PEFT model."""
    inner = model
    if not isinstance(inner, PreTrainedModel) and hasattr(inner, "get_base_model"):
        inner = inner.get_base_model()
    if isinstance(inner, PreTrainedModel):
        return inner
    wrapped = getattr(inner, "module", getattr(inner, "_orig_mod", None))
    if isinstance(wrapped, nn.Module):
        raise ValueError(
            f"a model wrapped in {type(model).__name__} cannot be patched; patch the model first, then wrap or compile "
            "it"
        )
    raise ValueError(f"expected a causal language model of transformers, got {type(model).__name__}")


def apply_output_function(
    model: Model,
    function: Function | None = None,
    *,
    logits_with_labels: KeepLogits = "eval",
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
    chunk_bytes: int | None = None,
    weight_gradient: WeightGradient = "auto",
    backend: str | None = None,
) -> Model:
    """Give a causal language model of transformers another output function, in place; returns the same model.

    ``function`` is a member of the family, such as ``"sigsoftmax"``, ``"gss(k=learned)"`` or ``"softmax"``, which keeps
    the probabilities and brings the loss that stores no logits. Left out, it is the one that the model's configuration
    remembers; on a model that is patched already, only the keywords change. Learned parameters live in
    ``model.output_function``.

    From then on ``.logits`` is phi of the logits: sampling, beams, scoring and other people's losses are right without
    a change. A training step with labels returns no logits (``logits_with_labels="always"`` keeps them, ``"never"``
    drops them in evaluation, too). ``z_loss`` and ``label_smoothing`` act in training mode; the rest is for the linear
    loss.
    """
    options = LossOptions(
        logits_with_labels=logits_with_labels,
        z_loss=z_loss,
        label_smoothing=label_smoothing,
        chunk_bytes=chunk_bytes,
        weight_gradient=weight_gradient,
        backend=backend,
    )
    inner: Any = language_model(model)
    frozen: tuple[str, ...] = ()
    if function is None and is_patched(inner):
        inner.loss_options = options
        return model
    if function is None:
        known = checkpoints.Remembered.of(inner.config)
        function, frozen = known.function, known.frozen
    member = OutputFunction.parse(function)
    _warn_of_a_jump(inner, member)
    patch(inner, member, options, frozen=frozen)
    return model


def patch(
    model: Any, member: OutputFunction, options: LossOptions | None = None, *, frozen: tuple[str, ...] = ()
) -> None:
    """Patch without a word about step zero."""
    if is_patched(model):
        remove_output_function(model)
    examined = examine(model)
    function = HeadFunction(member, examined.num_classes, frozen=frozen)
    configs = model.__dict__.pop("peft_config", None)
    own: Any = type(model)
    model.__class__ = patched_class(own)
    _attach(model, function.to(output_layer(model).weight.device), examined, options or LossOptions())
    if configs is not None:
        model.peft_config = configs
    checkpoints.remember(model)
    checkpoints.rename(model)
    if examined.why_stored is not None:
        _warn_once(model, examined.why_stored)


def remove_output_function(model: Model) -> Model:
    """Undo :func:`apply_output_function`: the model is of its own class again, and its logits mean softmax."""
    inner: Any = language_model(model)
    if not is_patched(inner):
        raise ValueError(f"{type(inner).__name__} has no output function to remove; it was not patched")
    own: Any = own_class(inner)
    if type(inner) is not patched_class(own):
        raise ValueError(
            f"{type(inner).__name__} was given another class after it was patched (fully_shard does that); undo that "
            "first"
        )
    for module in inner.modules():
        for key, hook in list(module._forward_pre_hooks.items()):
            if isinstance(hook, HandOver):
                del module._forward_pre_hooks[key]
                module.__dict__.pop("waiting_loss", None)
    for key, hook in list(inner._state_dict_pre_hooks.items()):
        if hook is _guard_adapters:
            del inner._state_dict_pre_hooks[key]
    configs = inner.__dict__.pop("adapter_configs", None)
    adapters.release_configs(configs)
    checkpoints.forget(inner)
    del inner.output_function
    for name in ("loss_options", "examined", "waiting_loss", "scores", "warned_of_stored_logits"):
        inner.__dict__.pop(name, None)
    inner.__class__ = own
    if configs is not None:
        inner.peft_config = configs
    return model


def _attach(model: Any, function: HeadFunction, examined: Examined, options: LossOptions) -> None:
    model.output_function = function
    model.loss_options, model.examined = options, examined
    checkpoints.read_guarded_checkpoints(model)
    model.register_state_dict_pre_hook(_guard_adapters)


def _guard_adapters(model: Any, prefix: str, keep_vars: bool) -> None:
    """An adapter that was added later is guarded when it is stored, since PEFT then asks for the state dict."""
    if "adapter_configs" in model.__dict__:
        model.peft_config = model.peft_config


def _warn_of_a_jump(model: Any, member: OutputFunction) -> None:
    """A trained model means its logits for the function that it has now."""
    is_trained = bool(getattr(model.config, "_name_or_path", ""))
    now = model.output_function.function if is_patched(model) else OutputFunction("softmax")
    remembered = getattr(model.config, checkpoints.KEY, None)
    is_same = str(now) == str(member) or (remembered is not None and not is_patched(model))
    if is_trained and not is_same and not (is_plain_softmax(now) and is_plain_softmax(member)):
        warnings.warn(
            f"{model.config._name_or_path!r} was trained with {now}: with {member} every one of its probabilities "
            "changes before the first training step. To start from the probabilities it has, use retrofit(model, b), "
            "which begins with a shifted sigsoftmax that agrees with softmax to a bound you choose (shifted_start)",
            stacklevel=3,
        )


__all__ = [
    "LogitAdjustment",
    "PatchedModel",
    "apply_output_function",
    "is_patched",
    "language_model",
    "own_class",
    "patch",
    "patched_class",
    "remove_output_function",
]
