"""The functions, named, placed and meant as in torch.nn.functional, plus ``function``: which output function.

What an option means is decided here, once, for every backend: which tokens count, how weights and reductions go
together, which dtype comes back. Shapes and dtypes are checked here too.

Shapes: N tokens (the product of all leading dimensions), K components, V classes, d features.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, Required, TypedDict, Unpack, get_args, overload

import torch
from torch import Tensor
from torch.nn import functional as F

from sigsoftmax import validation
from sigsoftmax.backends import dispatch, ops, reference
from sigsoftmax.backends.chunks import scaled, token_scales
from sigsoftmax.family import OutputFunction

Function = str | OutputFunction
Reduction = Literal["none", "mean", "sum"]
WeightGradient = Literal["auto", "fast", "buffered", "exact"]
EXTRAS = ("log_normalizer", "argmax", "entropy")


class Extras(NamedTuple):
    """What a loss can tell besides, detached, in the shape of the targets; None where it was not asked for."""

    log_normalizer: Tensor | None = None
    """log sum_j g(z_j); for a mixture one per component, (..., K)"""
    argmax: Tensor | None = None
    entropy: Tensor | None = None


# Probabilities


def sigsoftmax(input: Tensor, dim: int = -1) -> Tensor:
    """exp(z) sigmoid(z), normalised over ``dim``. The counterpart of ``torch.softmax``.

    >>> sigsoftmax(torch.tensor([0.0, 0.0]))
    tensor([0.5000, 0.5000])
    """
    return probs(input, function="sigsoftmax", dim=dim)


def log_sigsoftmax(input: Tensor, dim: int = -1) -> Tensor:
    """The logarithm of :func:`sigsoftmax`, without rounding it to -inf. The counterpart of ``torch.log_softmax``."""
    return log_probs(input, function="sigsoftmax", dim=dim)


def probs(logits: Tensor, *, function: Function, dim: int = -1, backend: str | None = None) -> Tensor:
    """Probabilities of every class along ``dim``."""
    return log_probs(logits, function=function, dim=dim, backend=backend).exp()


def log_probs(logits: Tensor, *, function: Function, dim: int = -1, backend: str | None = None) -> Tensor:
    """Log-probabilities of every class along ``dim``, in the dtype of ``logits``; -inf masks a class."""
    _check_floating("logits", logits)
    _check_dim(logits, dim)
    if logits.ndim == 0:
        return log_probs(logits.unsqueeze(0), function=function, backend=backend).squeeze(0)
    rows = logits.movedim(dim, -1)
    _check_classes("logits", rows.shape[-1])
    member = OutputFunction.parse(function)
    arguments = member.arguments(rows.shape[-1])
    if dispatch.choose(backend, member.form, logits.dtype, (logits, *arguments)) == "reference":
        out = reference.log_probs(rows, member.form, arguments).to(logits.dtype)
    else:
        hidden = rows.reshape(-1, 1, rows.shape[-1])
        needs = [_needs(t) for t in (logits, None, None, None)] + [any(map(_needs, arguments))]
        flat = ops.log_probs(hidden, None, None, None, arguments, member.form.name, 0.0, 0, logits.dtype, needs)
        out = flat.view(rows.shape)
    return out.movedim(-1, dim)


def mixture_log_probs(
    input: Tensor,
    prior_logits: Tensor,
    linear_weight: Tensor,
    *,
    function: Function,
    prior_function: Function | None = None,
    linear_bias: Tensor | None = None,
    floor: float = 0.0,
    chunk_bytes: int | None = None,
    backend: str | None = None,
) -> Tensor:
    """Log-probabilities of a mixture of K output functions that share one output matrix, (..., V).

    ``input`` is (..., K, d), one hidden vector per component, ``prior_logits`` (..., K). The mixture is exact in log
    space; ``floor`` adds a constant to every probability, as the published MoS code does with 1e-8 (the result is then
    not normalised). ``prior_function`` None means ``function`` if that has no parameters, else softmax.
    """
    member = OutputFunction.parse(function)
    product = _Product.of(input, linear_weight, linear_bias, components=True)
    _check_prior(input, prior_logits)
    _check_nonnegative("floor", floor)
    arguments = member.arguments(product.num_classes)
    log_prior_NK = product.flat(log_prior(prior_logits, member, prior_function))
    tensors = (input, prior_logits, linear_weight, linear_bias, *arguments)
    if dispatch.choose(backend, member.form, product.dtype, tensors) == "reference":
        logits_NKV = product.logits(input, linear_weight, linear_bias)
        flat = reference.mixture_log_probs(logits_NKV, log_prior_NK, member.form, arguments, floor).to(product.dtype)
    else:
        needs = [_needs(t) for t in (input, linear_weight, linear_bias, log_prior_NK)] + [any(map(_needs, arguments))]
        flat = ops.log_probs(
            product.hidden(input),
            linear_weight,
            linear_bias,
            log_prior_NK,
            arguments,
            member.form.name,
            floor,
            _chunk_bytes(chunk_bytes, input.device),
            product.dtype,
            needs,
        )
    return flat.view(*product.leading, product.num_classes)


# Losses


class LossOptions(TypedDict, total=False):
    """The keywords that all losses share."""

    function: Required[Function]
    ignore_index: int
    reduction: Reduction
    label_smoothing: float
    z_loss: float
    token_weights: Tensor | None
    chunk_bytes: int | None
    backend: str | None


class LinearLossOptions(LossOptions, total=False):
    linear_bias: Tensor | None
    weight: Tensor | None
    weight_gradient: WeightGradient


class MixtureLossOptions(LinearLossOptions, total=False):
    prior_function: Function | None
    floor: float


@overload
def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = ...,
    *,
    dim: int | None = ...,
    extras: None = ...,
    **options: Unpack[LossOptions],
) -> Tensor: ...


@overload
def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = ...,
    *,
    dim: int | None = ...,
    extras: Sequence[str],
    **options: Unpack[LossOptions],
) -> tuple[Tensor, Extras]: ...


def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    function: Function,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    label_smoothing: float = 0.0,
    dim: int | None = None,
    z_loss: float = 0.0,
    token_weights: Tensor | None = None,
    chunk_bytes: int | None = None,
    backend: str | None = None,
    extras: Sequence[str] | None = None,
) -> Tensor | tuple[Tensor, Extras]:
    """Cross-entropy of logits; with ``function="softmax"`` it is ``torch.nn.functional.cross_entropy``.

    The classes are dimension 1 of ``input`` (0 if it has one dimension); ``dim`` overrides that. ``target`` holds class
    indices or probabilities, as in torch. Beyond torch: ``z_loss`` adds ``z_loss * n^2`` per token with n the log
    normaliser, ``token_weights`` (in the shape of index targets) count each token, ``extras`` returns
    ``(loss, Extras)``. ``chunk_bytes`` has no effect here, since the caller holds the logits.
    """
    _check_floating("input", input)
    if input.ndim == 0:
        raise ValueError("input must have a dimension of classes, got a scalar; logits are (C,), (N, C) or (N, C, ...)")
    class_dim = (0 if input.ndim == 1 else 1) if dim is None else dim
    _check_dim(input, class_dim)
    rows = input.movedim(class_dim, -1)
    _check_classes("input", rows.shape[-1])
    _check_tensor("target", target)
    if target.is_floating_point() and target.shape == input.shape:
        target = target.movedim(class_dim, -1)
    hidden = rows.reshape(-1, 1, rows.shape[-1])
    return _Loss(
        leading=rows.shape[:-1],
        num_classes=rows.shape[-1],
        dtype=torch.float32 if _autocasts(input) and input.dtype != torch.float64 else input.dtype,
        product_dtype=input.dtype,
        function=function,
        target=target,
        class_weight=weight,
        token_weights=token_weights,
        ignore_index=ignore_index,
        reduction=reduction,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
        extras=extras,
        backend=backend,
        chunk_bytes=_chunk_bytes(chunk_bytes, input.device),
        device=input.device,
    ).compute(hidden, None, None, None)


@overload
def linear_cross_entropy(
    input: Tensor, linear_weight: Tensor, target: Tensor, *, extras: None = ..., **options: Unpack[LinearLossOptions]
) -> Tensor: ...


@overload
def linear_cross_entropy(
    input: Tensor, linear_weight: Tensor, target: Tensor, *, extras: Sequence[str], **options: Unpack[LinearLossOptions]
) -> tuple[Tensor, Extras]: ...


def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    function: Function,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    reduction: Reduction = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    token_weights: Tensor | None = None,
    chunk_bytes: int | None = None,
    weight_gradient: WeightGradient = "auto",
    backend: str | None = None,
    extras: Sequence[str] | None = None,
) -> Tensor | tuple[Tensor, Extras]:
    """Cross-entropy of ``input @ linear_weight.T + linear_bias`` without ever holding these N x V logits.

    ``input`` is (..., d), ``linear_weight`` (V, d), ``target`` (...) of class indices or (..., V) of probabilities.
    ``weight_gradient`` says how the gradient of a weight of low precision is summed over chunks: ``fast`` in its own
    dtype, ``buffered`` in a float32 buffer, ``exact`` by one product for each range of classes, at the price of a
    fourth product; float32 weights are summed in place. ``auto`` is exact on a GPU and buffered on a CPU.

    Logits exist a chunk of ``chunk_bytes`` at a time (32 MiB by default on a CPU). Input and weight may differ in
    dtype: the products run in the input's (under autocast in autocast's), the weight keeps a gradient of its own.
    """
    product = _Product.of(input, linear_weight, linear_bias, components=False)
    return _Loss(
        leading=product.leading,
        num_classes=product.num_classes,
        dtype=torch.float32 if _autocasts(input) and product.dtype != torch.float64 else product.dtype,
        product_dtype=product.dtype,
        function=function,
        target=target,
        class_weight=weight,
        token_weights=token_weights,
        ignore_index=ignore_index,
        reduction=reduction,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
        extras=extras,
        backend=backend,
        chunk_bytes=_chunk_bytes(chunk_bytes, input.device),
        device=input.device,
        weight_gradient=weight_gradient,
    ).compute(product.hidden(input), linear_weight, linear_bias, None)


@overload
def mixture_cross_entropy(
    input: Tensor,
    prior_logits: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    extras: None = ...,
    **options: Unpack[MixtureLossOptions],
) -> Tensor: ...


@overload
def mixture_cross_entropy(
    input: Tensor,
    prior_logits: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    extras: Sequence[str],
    **options: Unpack[MixtureLossOptions],
) -> tuple[Tensor, Extras]: ...


def mixture_cross_entropy(
    input: Tensor,
    prior_logits: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    function: Function,
    prior_function: Function | None = None,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    reduction: Reduction = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    floor: float = 0.0,
    z_loss: float = 0.0,
    token_weights: Tensor | None = None,
    chunk_bytes: int | None = None,
    weight_gradient: WeightGradient = "auto",
    backend: str | None = None,
    extras: Sequence[str] | None = None,
) -> Tensor | tuple[Tensor, Extras]:
    """Cross-entropy of a mixture (MoS, MoSS) without ever holding N x K x V; see :func:`mixture_log_probs`.

    ``z_loss`` weighs the squared log normaliser of each component by its prior, which it does not train. Label
    smoothing, probability targets, argmax and entropy need the mixed probability of every class and cost more.
    """
    product = _Product.of(input, linear_weight, linear_bias, components=True)
    _check_prior(input, prior_logits)
    _check_nonnegative("floor", floor)
    member = OutputFunction.parse(function)
    return _Loss(
        leading=product.leading,
        num_classes=product.num_classes,
        dtype=torch.float32 if _autocasts(input) and product.dtype != torch.float64 else product.dtype,
        product_dtype=product.dtype,
        function=member,
        target=target,
        class_weight=weight,
        token_weights=token_weights,
        ignore_index=ignore_index,
        reduction=reduction,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
        extras=extras,
        backend=backend,
        chunk_bytes=_chunk_bytes(chunk_bytes, input.device),
        device=input.device,
        floor=floor,
        weight_gradient=weight_gradient,
    ).compute(
        product.hidden(input),
        linear_weight,
        linear_bias,
        product.flat(log_prior(prior_logits, member, prior_function)),
    )


class _Loss:
    """One call of a loss: its options checked, then computed by a backend and reduced."""

    def __init__(
        self,
        *,
        leading: torch.Size,
        num_classes: int,
        dtype: torch.dtype,
        product_dtype: torch.dtype,
        function: Function,
        target: Tensor,
        class_weight: Tensor | None,
        token_weights: Tensor | None,
        ignore_index: int,
        reduction: Reduction,
        label_smoothing: float,
        z_loss: float,
        extras: Sequence[str] | None,
        backend: str | None,
        chunk_bytes: int,
        device: torch.device,
        floor: float = 0.0,
        weight_gradient: WeightGradient = "auto",
    ) -> None:
        self.leading, self.num_classes = leading, num_classes
        self.dtype, self.product_dtype = dtype, product_dtype
        self.member = OutputFunction.parse(function)
        self.arguments = self.member.arguments(num_classes)
        self.ignore_index, self.reduction = ignore_index, reduction
        self.label_smoothing, self.z_loss, self.floor = float(label_smoothing), float(z_loss), float(floor)
        self.extras, self.backend, self.chunk_bytes = extras or (), backend, chunk_bytes
        self.class_weight, self.token_weights = class_weight, token_weights
        self.wants_extras = extras is not None
        if weight_gradient not in get_args(WeightGradient):
            choices = ", ".join(map(repr, get_args(WeightGradient)))
            raise ValueError(f"weight_gradient must be one of {choices}, got {weight_gradient!r}")
        if weight_gradient == "auto":
            # Chunks of a GPU can be walked by classes; on a CPU the buffer costs less than a product.
            weight_gradient = "buffered" if device.type == "cpu" else "exact"
        self.weight_gradient = weight_gradient
        if reduction not in ("none", "mean", "sum"):
            raise ValueError(f"reduction must be 'none', 'mean' or 'sum', got {reduction!r}")
        if not 0.0 <= label_smoothing <= 1.0:
            raise ValueError(f"label_smoothing must lie in [0, 1], got {label_smoothing}")
        _check_nonnegative("z_loss", z_loss)
        if isinstance(extras, str):
            raise ValueError(f"extras must be a sequence of names, like ('argmax',), got {extras!r}")
        for name in self.extras:
            if name not in EXTRAS:
                raise ValueError(f"unknown extra {name!r}; known: {', '.join(EXTRAS)}")
        self.target = self._flat_target(target, device)
        if class_weight is not None:
            _check_floating("weight", class_weight)
            if class_weight.shape != (num_classes,):
                raise ValueError(
                    f"weight must hold one number per class, shape ({num_classes},), got {tuple(class_weight.shape)}"
                )
        if token_weights is not None:
            _check_floating("token_weights", token_weights)
            if token_weights.shape != leading:
                raise ValueError(
                    f"token_weights must have the shape {tuple(leading)}, one number per token, "
                    f"got {tuple(token_weights.shape)}"
                )
        for name, tensor in (("target", target), ("weight", class_weight), ("token_weights", token_weights)):
            if tensor is not None and tensor.device != device:
                raise ValueError(f"{name} is on {tensor.device}, but the input is on {device}; move it there")

    def _flat_target(self, target: Tensor, device: torch.device) -> Tensor:
        _check_tensor("target", target)
        dense_shape = (*self.leading, self.num_classes)
        if target.is_floating_point():
            if target.shape != dense_shape:
                raise ValueError(
                    f"probability targets must have a number per token and class, shape {dense_shape} (classes last), "
                    f"got {tuple(target.shape)}; class indices must be integers, got {target.dtype}"
                )
            if self.ignore_index >= 0:
                raise ValueError("ignore_index goes with class indices, not with probability targets")
            return target.reshape(-1, self.num_classes)
        if target.dtype == torch.bool or target.is_complex():
            raise ValueError(f"target must hold class indices (int64) or probabilities (floating), got {target.dtype}")
        if target.shape != self.leading:
            raise ValueError(
                f"target must hold one class index per token, shape {tuple(self.leading)}, got {tuple(target.shape)}"
            )
        return target.reshape(-1).long()

    def compute(
        self,
        hidden_NKd: Tensor,
        linear_weight: Tensor | None,
        linear_bias: Tensor | None,
        log_prior_NK: Tensor | None,
    ) -> Tensor | tuple[Tensor, Extras]:
        tensors = (hidden_NKd, linear_weight, linear_bias, log_prior_NK, *self.arguments)
        probabilities = self.target if self.target.is_floating_point() else None
        rare = next((t for t in (probabilities, self.class_weight) if _needs(t)), None)
        everything = (*tensors, self.target, self.class_weight, self.token_weights)
        backend = dispatch.choose(
            self.backend, self.member.form, self.product_dtype, everything, needs_autograd_of=rare
        )
        is_none, is_mean = self.reduction == "none", self.reduction == "mean"
        scale_N = is_empty = None
        if self.token_weights is not None or backend == "reference":
            scale_N, is_empty = token_scales(
                self.target,
                None if self.token_weights is None else self.token_weights.reshape(-1),
                self.class_weight,
                self.ignore_index,
                reference.compute_dtype(self.product_dtype),
                is_mean=is_mean,
            )
        if backend == "reference":
            results = self._reference(hidden_NKd, linear_weight, linear_bias, log_prior_NK)
            losses_N, log_normalizer_NK, argmax_N, entropy_N = results
            total = None
        else:
            needs = [_needs(t) for t in tensors[:4]] + [any(map(_needs, self.arguments))]
            has_gradients = any(needs) and not is_none
            total, losses_N, log_normalizer_NK, argmax_N, entropy_N = ops.token_loss(
                hidden_NKd,
                linear_weight,
                linear_bias,
                log_prior_NK,
                self.arguments,
                self.target,
                self.class_weight,
                scale_N if scale_N is None or has_gradients else scale_N.detach(),
                is_mean,
                self.member.form.name,
                backend,
                self.label_smoothing,
                self.z_loss,
                self.floor,
                self.ignore_index,
                self.chunk_bytes,
                self.weight_gradient,
                self.product_dtype,
                "argmax" in self.extras,
                "entropy" in self.extras,
                has_gradients,
                needs,
            )
            if not has_gradients and _needs(scale_N):
                total = None
        if is_none:
            loss = losses_N if scale_N is None else scaled(losses_N, scale_N)
            loss = loss.view(self.leading)
        else:
            if total is None:
                assert scale_N is not None
                total = scaled(losses_N, scale_N).sum()
            loss = total if is_empty is None else torch.where(is_empty, torch.full_like(total, torch.nan), total)
        loss = loss.to(self.dtype)
        if not self.wants_extras:
            return loss
        return loss, self._extras(log_normalizer_NK, argmax_N, entropy_N, is_mixture=log_prior_NK is not None)

    def _reference(
        self,
        hidden_NKd: Tensor,
        linear_weight: Tensor | None,
        linear_bias: Tensor | None,
        log_prior_NK: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        if not torch.compiler.is_compiling() and not torch._C._functorch.is_functorch_wrapped_tensor(self.target):
            validation.check_target(self.target, self.num_classes, self.ignore_index)
            if self.class_weight is not None:
                validation.check_class_weight(self.class_weight)
        if linear_weight is None:
            logits_NKV = hidden_NKd
        else:
            logits_NKV = _linear(hidden_NKd, linear_weight, linear_bias, self.product_dtype)
        results = reference.token_losses(
            logits_NKV,
            log_prior_NK,
            self.member.form,
            self.arguments,
            self.target,
            class_weight_V=self.class_weight,
            label_smoothing=self.label_smoothing,
            z_loss=self.z_loss,
            floor=self.floor,
            ignore_index=self.ignore_index,
        )
        log_p = results.log_probs_NV
        return results.losses_N, results.log_normalizer_NK, log_p.argmax(-1), reference.entropy(log_p)

    def _extras(self, log_normalizer_NK: Tensor, argmax_N: Tensor, entropy_N: Tensor, *, is_mixture: bool) -> Extras:
        normalizer_shape = (*self.leading, log_normalizer_NK.shape[1]) if is_mixture else self.leading
        return Extras(
            log_normalizer_NK.detach().view(normalizer_shape) if "log_normalizer" in self.extras else None,
            argmax_N.detach().view(self.leading) if "argmax" in self.extras else None,
            entropy_N.detach().view(self.leading) if "entropy" in self.extras else None,
        )


# The border


class _Product(NamedTuple):
    """The shapes and the dtype of hidden vectors times an output matrix."""

    leading: torch.Size
    num_classes: int
    dtype: torch.dtype
    components: bool

    @classmethod
    def of(cls, input: Tensor, weight: Tensor, bias: Tensor | None, *, components: bool) -> _Product:
        _check_floating("input", input)
        _check_floating("linear_weight", weight)
        least = 2 if components else 1
        wanted = "(..., components, features)" if components else "(..., features)"
        if input.ndim < least:
            raise ValueError(f"input must have the shape {wanted}, got {tuple(input.shape)}")
        if weight.ndim != 2:
            raise ValueError(f"linear_weight must have the shape (classes, features), got {tuple(weight.shape)}")
        if input.shape[-1] != weight.shape[1]:
            raise ValueError(
                f"input has {input.shape[-1]} features but linear_weight has {weight.shape[1]}: expected {wanted} and "
                f"(classes, features), got {tuple(input.shape)} and {tuple(weight.shape)}"
            )
        _check_classes("linear_weight", weight.shape[0])
        if bias is not None:
            _check_floating("linear_bias", bias)
            if bias.shape != weight.shape[:1]:
                raise ValueError(
                    f"linear_bias must hold one number per class, shape ({weight.shape[0]},), got {tuple(bias.shape)}"
                )
        for name, tensor in (("linear_weight", weight), ("linear_bias", bias)):
            if tensor is not None and tensor.device != input.device:
                raise ValueError(f"{name} is on {tensor.device}, but the input is on {input.device}; move it there")
        dtype = input.dtype
        if _autocasts(input) and dtype != torch.float64:
            dtype = torch.get_autocast_dtype(input.device.type)
        return cls(input.shape[:-least], weight.shape[0], dtype, components)

    def hidden(self, input: Tensor) -> Tensor:
        """(N, K, d)"""
        components = input.shape[-2] if self.components else 1
        return input.reshape(self.leading.numel(), components, input.shape[-1])

    def flat(self, log_prior: Tensor) -> Tensor:
        """(N, K)"""
        return log_prior.reshape(self.leading.numel(), log_prior.shape[-1]).contiguous()

    def logits(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return _linear(self.hidden(input), weight, bias, self.dtype)


def _linear(hidden: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    return F.linear(hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))


def log_prior(prior_logits: Tensor, member: OutputFunction, prior_function: Function | None) -> Tensor:
    """Log-probabilities of the components, in the arithmetic's dtype; K is small, so this is plain torch."""
    if prior_function is None:
        prior_function = "softmax" if member.definition.parameters else member
    prior = OutputFunction.parse(prior_function)
    return reference.log_probs(prior_logits, prior.form, prior.arguments(prior_logits.shape[-1]))


def _needs(tensor: Tensor | None) -> bool:
    return tensor is not None and tensor.requires_grad and torch.is_grad_enabled()


def _autocasts(tensor: Tensor) -> bool:
    return torch.is_autocast_enabled(tensor.device.type)


def _chunk_bytes(chunk_bytes: int | None, device: torch.device) -> int:
    if chunk_bytes is None:
        return 32 * 2**20 if device.type == "cpu" else 512 * 2**20
    if isinstance(chunk_bytes, bool) or not isinstance(chunk_bytes, int) or chunk_bytes <= 0:
        raise ValueError(f"chunk_bytes must be a positive number of bytes, got {chunk_bytes!r}")
    return chunk_bytes


def _check_tensor(name: str, tensor: Tensor) -> None:
    if not isinstance(tensor, Tensor):
        raise ValueError(f"{name} must be a tensor, got {type(tensor).__name__}")


def _check_floating(name: str, tensor: Tensor) -> None:
    _check_tensor(name, tensor)
    if not tensor.is_floating_point():
        raise ValueError(f"{name} must be floating point, got {tensor.dtype}; convert it with .float()")


def _check_dim(tensor: Tensor, dim: int) -> None:
    rank = max(1, tensor.ndim)
    if not -rank <= dim < rank:
        raise ValueError(
            f"dim must lie in [{-rank}, {rank - 1}] for a tensor of shape {tuple(tensor.shape)}, got {dim}"
        )


def _check_classes(name: str, classes: int) -> None:
    if classes == 0:
        raise ValueError(f"{name} has no classes; the dimension of classes must not be empty")


def _check_prior(input: Tensor, prior_logits: Tensor) -> None:
    _check_floating("prior_logits", prior_logits)
    if prior_logits.shape != input.shape[:-1]:
        raise ValueError(
            f"prior_logits must hold one number per token and component, shape {tuple(input.shape[:-1])} for an input "
            f"of shape {tuple(input.shape)} (..., components, features), got {tuple(prior_logits.shape)}"
        )
    if prior_logits.shape[-1] == 0:
        raise ValueError("a mixture needs at least one component, got an input with none")
    if prior_logits.device != input.device:
        raise ValueError(f"prior_logits is on {prior_logits.device}, but the input is on {input.device}; move it there")


def _check_nonnegative(name: str, value: float) -> None:
    if not 0.0 <= value < float("inf"):
        raise ValueError(f"{name} must be a finite number >= 0, got {value}")
