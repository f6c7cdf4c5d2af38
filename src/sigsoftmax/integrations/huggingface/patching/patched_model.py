"""The class of a patched model: its own forward pass, with the output function at its two ends.

Without labels, ``.logits`` is phi of the model's logits. With labels, the loss takes the input of the output layer and
computes logits a slab at a time. Everything between is the model's.

Shapes: B sequences of L tokens, d features, V classes.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor, nn

from sigsoftmax.family import OutputFunction
from sigsoftmax.integrations.huggingface.logits_processor import OutputFunctionLogitsProcessor
from sigsoftmax.integrations.huggingface.patching import receipts
from sigsoftmax.integrations.huggingface.patching.causal_loss import (
    Count,
    LossOptions,
    LossRequest,
    loss_of_hidden,
    loss_of_logits,
    targets,
)
from sigsoftmax.integrations.huggingface.patching.examination import (
    Examined,
    described_layer,
    linear_layer,
    output_layer,
)
from sigsoftmax.integrations.huggingface.patching.head_function import HeadFunction, transformed
from sigsoftmax.integrations.huggingface.patching.outputs import without_logits
from sigsoftmax.integrations.huggingface.storage import adapters, checkpoints
from sigsoftmax.integrations.huggingface.trainers import fused_head, known_libraries
from sigsoftmax.integrations.huggingface.trainers.known_libraries import FusedHead


@dataclass
class _Waiting:
    """A loss that waits for the input of the output layer."""

    of_hidden: Callable[[nn.Linear, Tensor], Tensor]
    of_logits: Callable[[Tensor], Tensor] | None = None
    """What computes it of phi of the logits, if the output layer is one that has to run."""
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
        waiting.loss = waiting.of_hidden(layer, arguments[0])
        return (arguments[0][..., :0, :], *arguments[1:])


class PatchedModel:
    """What a patched model has beyond its own class; the second base of :func:`patched_class`."""

    output_function: HeadFunction
    loss_options: LossOptions
    examined: Examined
    waiting_loss: _Waiting | None = None
    scores: Scores | None = None
    fused_head: FusedHead | None = None
    """What TRL asked for when it gave the model a fused output layer."""
    has_receipt: bool = False
    """Whether the call that ran last went through the output function (``receipts``)."""
    has_loss_of_function: bool = False
    """Whether the model's own forward pass took its loss from :attr:`loss_function`."""
    is_in_forward: bool = False
    trained_past: str | None = None
    """What the last training step went through, if that left no receipt."""

    def __init__(self, config: Any, *arguments: Any, **options: Any) -> None:
        """A model from a configuration that remembers its output function, as loading makes it."""
        super().__init__(config, *arguments, **options)  # type: ignore[call-arg]
        known = checkpoints.Remembered.of(config)
        examined = Examined(num_classes=known.num_classes, adjustment=known.adjustment, why_stored=known.why_stored)
        attach(self, HeadFunction(known.function, known.num_classes, frozen=known.frozen), examined, LossOptions())
        if checkpoints.is_being_filled(config):
            checkpoints.expect_stored_shapes(cast("nn.Module", self), known.reshaped)

    @classmethod
    def from_pretrained(cls, name_or_path: Any, *, config: Any = None, **options: Any) -> Any:
        """Load a saved model of this class with its output function, as :func:`loading.from_pretrained` does."""
        if checkpoints.is_marked(config):
            return super().from_pretrained(name_or_path, config=config, **options)  # type: ignore[misc]
        # Imported here: loading builds on this module.
        from sigsoftmax.integrations.huggingface.storage import loading

        result = loading.SigsoftmaxForCausalLM.from_pretrained(name_or_path, config=config, **options)
        model = result[0] if isinstance(result, tuple) else result
        if not isinstance(model, cls):
            raise ValueError(
                f"{name_or_path} holds a {type(model).__name__}, not a {cls.__name__}; load it with "
                "sigsoftmax.integrations.huggingface.from_pretrained, which finds the class itself"
            )
        return result

    @property
    def loss_function(self) -> Any:
        """The loss of this output function, unless one was set."""
        own = getattr(self, "_loss_function", None)
        return self.loss_of_output_function if own is None else functools.partial(self.loss_of_user, own)

    @loss_function.setter
    def loss_function(self, value: Any) -> None:
        self._loss_function = value

    def loss_of_output_function(
        self, logits: Tensor, labels: Tensor | None = None, *rest: Any, **options: Any
    ) -> Tensor:
        """What the model calls with its logits; these have no rows if the loss was computed in their place."""
        self.has_loss_of_function = True
        if self.waiting_loss is None:
            request = self.loss_request(labels, **options)
            # Whoever calls this from outside holds what the model returned, which is phi already.
            function = self.output_function.function if self.is_in_forward else OutputFunction("softmax")
            loss = loss_of_logits(logits, request, function, self.loss_options)
        elif self.waiting_loss.loss is None:
            assert self.waiting_loss.of_logits is not None
            loss = self.waiting_loss.of_logits(transformed(logits, self.output_function.function))
        else:
            loss = self.waiting_loss.loss
        if self.scores is None:
            return loss
        self.scores.losses_BL = loss
        return loss.sum()

    def loss_of_user(self, loss: Callable[..., Tensor], logits: Tensor, *rest: Any, **options: Any) -> Tensor:
        """A loss that somebody set: its softmax is right if it sees phi, as everybody does outside."""
        self.has_loss_of_function = True
        # Not in place: the model returns its logits afterwards, and they are transformed then.
        is_raw = self.is_in_forward and not self.output_function.is_plain_softmax
        return loss(transformed(logits, self.output_function.function) if is_raw else logits, *rest, **options)

    @property
    def needs_receipts(self) -> bool:
        """Whether a loss of plain softmax would be another one than this model's."""
        options = self.loss_options
        return not self.output_function.is_plain_softmax or options.z_loss > 0.0 or options.label_smoothing > 0.0

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

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "forward":
            receipts.assign(self, value)
        else:
            super().__setattr__(name, value)

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
            adapters.guard_configs(configs, self.output_function.described())

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
        if not is_patched(self):
            # The patch was removed, and somebody kept this method.
            return own.forward(self, *arguments, **options)
        if options.pop("fused_lm_head", False):
            return _fused_output(self, own, arguments, options)
        labels = options.get("labels")
        if labels is None and len(arguments) > labels_position:
            labels = arguments[labels_position]
        asked = options.pop("return_dict", None)
        wants_tuple = not (getattr(self.config, "return_dict", True) if asked is None else asked)
        layer = _layer_of_waiting_loss(self, needed=labels is not None and not wants_tuple)
        if layer is None:
            output = _own_output(self, own, arguments, options)
            output["logits"] = self.output_function(output["logits"])
        else:
            request = self.loss_request(**{**options, "labels": labels})
            waiting = _Waiting(functools.partial(self.loss_at_output_layer, request))
            with _waiting_loss(self, layer, waiting):
                output = _own_output(self, own, arguments, options)
            # No logits rather than none of their rows: whoever needs them should hear of it at once.
            output = without_logits(output)
        receipts.leave(self)
        return output.to_tuple() if wants_tuple else output

    # The signature without `__wrapped__`: accelerate follows that when it takes its wrappers off, past this function.
    del patched_forward.__wrapped__
    patched_forward.__signature__ = inspect.signature(own.forward)  # type: ignore[attr-defined]

    attributes = {
        "forward": patched_forward,
        # As of `own`, too: conversions of stored weights are looked up for classes of transformers alone.
        "__module__": own.__module__,
        "__qualname__": own.__qualname__,
        # A shift or an exponent keeps its digits when a model is loaded in half precision.
        "_keep_in_fp32_modules_strict": {*(own._keep_in_fp32_modules_strict or ()), "output_function"},
    }
    kind: Any = type(own)
    return receipts.metaclass_for(kind)(own.__name__, (PatchedModel, own), attributes)


def _fused_output(model: Any, own: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """What TRL asks for with ``fused_lm_head=True``; see ``fused_head``."""
    labels, shift_labels = options.pop("labels", None), options.pop("shift_labels", None)
    count = options.pop("num_items_in_batch", None)
    request = fused_head.request(model, model.examined.adjustment, labels, shift_labels, count)
    # Whatever the options say about logits: nobody gets any here.
    layer = _layer_that_hands_over(model) if model.examined.why_stored is None else None
    with _waiting_loss(model, layer, _Waiting(request.of_hidden, request.of_logits)), _without_loss_of_user(model):
        options = {**options, "use_cache": False, "labels": shift_labels if labels is None else labels}
        output = _own_output(model, own, arguments, options)
    if request.statistics is None:
        raise RuntimeError(
            f"{receipts.described(own.forward)} computed a loss without its output layer and without "
            f"model.loss_function, so nothing is known of single tokens. {known_libraries.remedy(own.forward)}"
        )
    receipts.leave(model)
    return fused_head.answer(request, output, is_shifted=shift_labels is not None)


def _own_output(model: Any, own: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """What the forward pass of the model's own class returns; a loss in it must have come from ``loss_function``."""
    model.has_loss_of_function = False
    model.is_in_forward = True
    try:
        output = own.forward(model, *arguments, return_dict=True, **options)
    finally:
        model.is_in_forward = False
    if output.get("loss") is not None and not model.has_loss_of_function:
        # Somebody replaced the forward pass of that class.
        receipts.check_result(model, own.forward, output)
    return output


def _layer_of_waiting_loss(model: Any, *, needed: bool) -> nn.Linear | None:
    """The output layer, if the loss is to be computed from its input; None if logits are to be stored."""
    if not needed or model.examined.why_stored is not None or getattr(model, "_loss_function", None) is not None:
        return None
    if model.loss_options.keep_logits(is_training=model.training):
        return None
    return _layer_that_hands_over(model)


def _layer_that_hands_over(model: Any) -> nn.Linear | None:
    layer = linear_layer(output_layer(model))
    if layer is None:
        found = described_layer(output_layer(model))
        warn_of_stored_logits(model, f"its output layer is now {found}, something other than a plain linear map")
    elif not _has_hook(layer):
        layer.register_forward_pre_hook(HandOver())
    return layer


@contextmanager
def _waiting_loss(model: Any, layer: Any, waiting: _Waiting) -> Iterator[None]:
    """``layer`` None: the loss waits for logits, not for the input of the output layer."""
    model.waiting_loss = waiting
    if layer is not None:
        layer.waiting_loss = waiting
    try:
        yield
    finally:
        model.waiting_loss = None
        if layer is not None:
            layer.waiting_loss = None


@contextmanager
def _without_loss_of_user(model: Any) -> Iterator[None]:
    own_loss = model.__dict__.pop("_loss_function", None)
    try:
        yield
    finally:
        if own_loss is not None:
            model.loss_function = own_loss


def _has_hook(layer: nn.Module) -> bool:
    return any(isinstance(hook, HandOver) for hook in layer._forward_pre_hooks.values())


def warn_of_stored_logits(model: Any, reason: str) -> None:
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


def attach(model: Any, function: HeadFunction, examined: Examined, options: LossOptions) -> None:
    """Give a model of a patched class what that class needs."""
    model.output_function = function
    model.loss_options, model.examined = options, examined
    layer = linear_layer(output_layer(model))
    if layer is not None:
        layer.register_forward_pre_hook(HandOver())
    if "forward" in model.__dict__:
        receipts.keep_checked(model, model.__dict__["forward"])
    checkpoints.read_guarded_checkpoints(model)
    model.register_state_dict_pre_hook(_guard_adapters)
    adapters.explain_to_peft(even_if_not_imported=True)


def detach(model: Any) -> None:
    """Undo :func:`attach`."""
    receipts.release(model)
    for module in model.modules():
        for key, hook in list(module._forward_pre_hooks.items()):
            if isinstance(hook, HandOver):
                del module._forward_pre_hooks[key]
                module.__dict__.pop("waiting_loss", None)
    for key, hook in list(model._state_dict_pre_hooks.items()):
        if hook is _guard_adapters:
            del model._state_dict_pre_hooks[key]
    del model.output_function
    for name in (*PatchedModel.__annotations__, "warned_of_stored_logits"):
        model.__dict__.pop(name, None)


def _guard_adapters(model: Any, prefix: str, keep_vars: bool) -> None:
    """An adapter that was added later is guarded when it is stored, since PEFT then asks for the state dict."""
    if "adapter_configs" in model.__dict__:
        receipts.refuse_to_save(model)
        model.peft_config = model.peft_config
