"""MixtureOutputLayer against the plain computation of a mixture, and what a mixture allocates.

Shapes: N tokens (T steps x B sequences where both count), h input features, K components, d latent features, V classes.
"""

import copy
import io
import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.allocations import allocations_of
from torch import Tensor, nn
from torch.nn import functional as F

import sigsoftmax
from sigsoftmax import Learned, MixtureOutputLayer, OutputFunction
from sigsoftmax.family.heads import Latent

H, D, V, K = 6, 5, 11, 4
assert_close = torch.testing.assert_close


def plain_softmax(z: Tensor) -> Tensor:
    return torch.exp(z) / torch.exp(z).sum(-1, keepdim=True)


def plain_sigsoftmax(z: Tensor) -> Tensor:
    g = torch.exp(z) * torch.sigmoid(z)
    return g / g.sum(-1, keepdim=True)


PLAIN = {"softmax": plain_softmax, "sigsoftmax": plain_sigsoftmax}


def plain_log_probs(
    layer: MixtureOutputLayer,
    output: Tensor,
    function: Callable[[Tensor], Tensor],
    prior_function: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """The mixture as the published code writes it, in probabilities, all N x K x V of them."""
    tokens = output.shape[:-1].numel()
    components, features = layer.components, layer.latent_features
    latent = torch.tanh(output @ layer.latent.weight.T + layer.latent.bias)
    latent = layer.latent_dropout(latent)
    logits = latent.reshape(-1, features) @ layer.weight.T
    if layer.bias is not None:
        logits = logits + layer.bias
    prior_logits = (output @ layer.prior.weight.T).reshape(-1, components)
    prior = (prior_function or function)(prior_logits)
    probs = function(logits).view(tokens, components, -1)
    mixed = (probs * prior.unsqueeze(2)).sum(1)
    return torch.log(mixed + layer.floor).view(*output.shape[:-1], -1)


def a_layer(function: str | OutputFunction = "sigsoftmax", **options: Any) -> MixtureOutputLayer:
    layer = MixtureOutputLayer(H, D, V, K, function=function, **options).double()
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    return layer


def an_input(*leading: int) -> tuple[Tensor, Tensor]:
    """The output of a recurrent network, (T, B, h), and targets."""
    shape = leading or (3, 2)
    return torch.randn(*shape, H, dtype=torch.float64, requires_grad=True), torch.randint(V, shape)


def saved_and_loaded(module: nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


class LockedDropout(nn.Module):
    """One mask for all steps, the same at every call, so that two computations can be compared."""

    def __init__(self, batch: int, features: int) -> None:
        super().__init__()
        keep = 0.71
        self.register_buffer("mask", torch.bernoulli(torch.full((1, batch, features), keep)) / keep)
        self.seen: list[torch.Size] = []

    def forward(self, input: Tensor) -> Tensor:
        self.seen.append(input.shape)
        return input * self.mask


class TestAgainstThePlainComputation:
    @pytest.mark.parametrize("floor", [0.0, 1e-8])
    @pytest.mark.parametrize("bias", [True, False])
    @pytest.mark.parametrize("function", ["softmax", "sigsoftmax"])
    def test_log_probs_loss_and_gradients(self, function: str, bias: bool, floor: float) -> None:
        layer = a_layer(function, bias=bias, floor=floor)
        output, target = an_input()
        inputs = [output, *layer.parameters()]
        plain = plain_log_probs(layer, output, PLAIN[function])
        plain_loss = F.nll_loss(plain.flatten(0, 1), target.flatten())
        log_probs = layer.log_probs(output)
        loss = layer.loss(output, target)
        assert_close(log_probs, plain)
        assert_close(layer(output), plain)
        assert_close(loss, plain_loss)
        expected = torch.autograd.grad(plain_loss, inputs, retain_graph=True)
        assert all(gradient.any() for gradient in expected)
        assert_close(torch.autograd.grad(loss, inputs), expected)
        by_log_p = torch.randn_like(plain)
        assert_close(torch.autograd.grad(log_probs, inputs, by_log_p), torch.autograd.grad(plain, inputs, by_log_p))

    @pytest.mark.parametrize("function", ["softmax", "sigsoftmax"])
    def test_in_float32_at_the_size_of_a_language_model(self, function: str) -> None:
        layer = MixtureOutputLayer(40, 28, 1000, 15, function=function, floor=1e-8)
        output, target = torch.randn(7, 3, 40), torch.randint(1000, (7, 3))
        plain = plain_log_probs(layer, output, PLAIN[function])
        assert_close(layer.log_probs(output), plain)
        assert_close(layer.loss(output, target), F.nll_loss(plain.flatten(0, 1), target.flatten()))

    def test_latent_dropout_acts_on_all_components_of_a_token_at_once(self) -> None:
        dropout = LockedDropout(2, K * D)
        layer = a_layer("softmax", latent_dropout=dropout)
        output, target = an_input(3, 2)
        plain = plain_log_probs(layer, output, plain_softmax)
        dropout.seen.clear()
        loss = layer.loss(output, target)
        assert dropout.seen == [(3, 2, K * D)]
        plain_loss = F.nll_loss(plain.flatten(0, 1), target.flatten())
        assert_close(loss, plain_loss)
        inputs = [output, *layer.parameters()]
        assert_close(torch.autograd.grad(loss, inputs), torch.autograd.grad(plain_loss, inputs))

    def test_dropout_follows_the_mode_of_the_module(self) -> None:
        layer = a_layer(latent_dropout=nn.Dropout(0.5))
        output, target = an_input()
        assert layer.loss(output, target) != layer.loss(output, target)
        layer.eval()
        assert layer.loss(output, target) == layer.loss(output, target)

    def test_the_prior_is_of_the_same_kind_unless_told_otherwise(self) -> None:
        output, _ = an_input()
        moss = a_layer("sigsoftmax")
        assert_close(moss.log_probs(output), plain_log_probs(moss, output, plain_sigsoftmax))
        mixed = a_layer("sigsoftmax", prior_function="softmax")
        assert_close(mixed.log_probs(output), plain_log_probs(mixed, output, plain_sigsoftmax, plain_softmax))
        member = OutputFunction("gss", k=0.3)
        gss = a_layer(member)
        expected = plain_log_probs(gss, output, lambda z: torch.softmax(member.phi(z), -1), plain_softmax)
        assert_close(gss.log_probs(output), expected)

    def test_one_component_is_a_plain_layer(self) -> None:
        layer = MixtureOutputLayer(H, D, V, 1).double()
        output, target = an_input()
        loss = sigsoftmax.linear_cross_entropy(
            layer.latent_vectors(output).squeeze(-2),
            layer.weight,
            target,
            function="sigsoftmax",
            linear_bias=layer.bias,
        )
        assert_close(layer.loss(output, target), loss)

    def test_options_of_the_loss(self) -> None:
        layer = a_layer(floor=1e-8)
        output, target = an_input()
        loss, extras = layer.loss(output, target, reduction="none", floor=0.0, extras=("argmax", "log_normalizer"))
        plain = -plain_log_probs(layer, output, plain_sigsoftmax).gather(-1, target.unsqueeze(-1)).squeeze(-1)
        assert_close(loss, plain, rtol=1e-5, atol=0.0)
        assert torch.equal(extras.argmax, layer.topk(output, 1).indices.squeeze(-1))
        assert extras.log_normalizer.shape == (3, 2, K)

    def test_the_floor_bounds_the_loss(self) -> None:
        layer = a_layer("softmax", floor=1e-8)
        assert layer.bias is not None
        layer.bias.data[0] = -1e4
        output, target = an_input()
        loss = layer.loss(output, torch.zeros_like(target))
        assert loss.item() == pytest.approx(-math.log(1e-8))
        layer.floor = 0.0
        assert layer.loss(output, torch.zeros_like(target)).item() > 9e3
        # With a floor every class gets 1e-8 more: the result is not normalised.
        layer.floor = 1e-2
        assert_close(layer.log_probs(output).exp().sum(-1), torch.full((3, 2), 1.0 + V * 1e-2, dtype=torch.float64))


class TestTheLayer:
    def test_its_parameters(self) -> None:
        shapes = {name: tuple(parameter.shape) for name, parameter in MixtureOutputLayer(H, D, V, K).named_parameters()}
        assert shapes == {
            "prior.weight": (K, H),
            "latent.weight": (K * D, H),
            "latent.bias": (K * D,),
            "weight": (V, D),
            "bias": (V,),
        }
        without_bias = dict(MixtureOutputLayer(H, D, V, K, bias=False).named_parameters())
        assert "bias" not in without_bias

    def test_a_tied_weight_is_shared(self) -> None:
        embedding = nn.Embedding(V, D)
        layer = MixtureOutputLayer(H, D, V, K, weight=embedding.weight)
        assert layer.weight is embedding.weight
        model = nn.ModuleDict({"embedding": embedding, "head": layer})
        assert sum(parameter is embedding.weight for parameter in model.parameters()) == 1

    @pytest.mark.parametrize(
        ("function", "shape"), [("shifted_sigsoftmax", ()), ("shifted_sigsoftmax(b=per_class:1)", (V,))]
    )
    def test_learned_parameters(self, function: str, shape: tuple[int, ...]) -> None:
        layer = a_layer(function)
        shift = layer.function_parameters["b"]
        assert shift.shape == shape
        output, target = an_input()
        plain = plain_log_probs(
            layer, output, lambda z: torch.softmax(z + F.logsigmoid(z + shift), -1), prior_function=plain_softmax
        )
        plain_loss = F.nll_loss(plain.flatten(0, 1), target.flatten())
        loss = layer.loss(output, target)
        assert_close(loss, plain_loss)
        assert_close(torch.autograd.grad(loss, shift), torch.autograd.grad(plain_loss, shift))

    @pytest.mark.parametrize("leading", [(), (3,), (2, 3), (0,)])
    def test_shapes(self, leading: tuple[int, ...]) -> None:
        layer = MixtureOutputLayer(H, D, V, K)
        output = torch.randn(*leading, H)
        assert layer.sample(output, K + 2).shape == (*leading, K + 2)
        assert layer.latent_vectors(output).shape == (*leading, K, D)
        assert layer.log_probs(output).shape == (*leading, V)
        assert layer.loss(output, torch.zeros(leading, dtype=torch.long), reduction="none").shape == leading
        assert layer.sample(output).shape == leading
        assert layer.sample(output, 3).shape == (*leading, 3)
        assert [part.shape for part in layer.topk(output, 2)] == [(*leading, 2)] * 2

    def test_training_lowers_the_loss(self) -> None:
        layer = MixtureOutputLayer(H, D, V, K)
        output, target = torch.randn(40, H), torch.randint(V, (40,))
        optimizer = torch.optim.Adam(layer.parameters(), lr=0.05)
        losses = []
        for _ in range(40):
            optimizer.zero_grad()
            loss = layer.loss(output, target)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert losses[-1] < 0.5 * losses[0]

    @pytest.mark.parametrize("copied", [copy.deepcopy, saved_and_loaded], ids=["deepcopy", "pickle"])
    def test_copies(self, copied: Callable[[MixtureOutputLayer], MixtureOutputLayer]) -> None:
        layer = a_layer("gss(k=learned:0.5)", prior_function="softmax(alpha=0.5)", floor=1e-8)
        other = copied(layer)
        output, target = an_input()
        loss = layer.loss(output, target)
        assert torch.equal(other.loss(output, target), loss)
        nn.init.normal_(other.weight)
        assert torch.equal(layer.loss(output, target), loss)
        assert not torch.equal(other.loss(output, target), loss)
        other.load_state_dict(layer.state_dict())
        assert torch.equal(other.loss(output, target), loss)

    @pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
    def test_another_dtype(self, dtype: torch.dtype) -> None:
        layer = MixtureOutputLayer(H, D, V, K)
        output, target = torch.randn(8, H), torch.randint(V, (8,))
        expected = layer.loss(output, target)
        layer.to(dtype)
        loss = layer.loss(output.to(dtype), target)
        loss.backward()
        assert loss.dtype == layer.log_probs(output.to(dtype)).dtype == dtype
        assert all(parameter.grad is not None for parameter in layer.parameters())
        tolerance = 32 * torch.finfo(dtype if dtype != torch.float64 else torch.float32).eps
        assert_close(loss.float(), expected, rtol=tolerance, atol=tolerance)

    @pytest.mark.parametrize("function", ["softmax", "sigsoftmax", "shifted_sigsoftmax"])
    def test_the_loss_compiles_whole(self, function: str) -> None:
        torch._dynamo.reset()
        layer = a_layer(function, floor=1e-8)
        output, target = an_input()
        inputs = [output, *layer.parameters()]
        loss = layer.loss(output, target)
        compiled_loss = torch.compile(layer.loss, fullgraph=True, backend="aot_eager")(output, target)
        assert_close(compiled_loss, loss)
        assert_close(torch.autograd.grad(compiled_loss, inputs), torch.autograd.grad(loss, inputs))

    def test_what_print_shows(self) -> None:
        text = MixtureOutputLayer(H, D, V, K, function="gss(k=0.2)").extra_repr()
        assert text == "components=4, num_classes=11, latent='tanh', function='gss(k=0.2)'"


class TestLatentVectors:
    @pytest.mark.parametrize("latent", ["tanh", "linear", "residual"])
    def test_they_are_those_of_the_formula(self, latent: Latent) -> None:
        layer = MixtureOutputLayer(D, D, V, K, function="softmax", latent=latent).double()
        for parameter in layer.parameters():
            nn.init.normal_(parameter)
        hidden = torch.randn(3, 2, D, dtype=torch.float64)
        rows = torch.einsum("tbh,kdh->tbkd", hidden, layer.latent.weight.view(K, D, D))
        if latent == "residual":
            assert layer.latent.bias is None
            wanted = hidden[:, :, None] + rows
        else:
            wanted = rows + layer.latent.bias.view(K, D)
            wanted = torch.tanh(wanted) if latent == "tanh" else wanted
        assert_close(layer.latent_vectors(hidden), wanted)
        log_f = torch.log_softmax(F.linear(wanted, layer.weight, layer.bias), -1)
        log_p = torch.logsumexp(torch.log_softmax(layer.prior(hidden), -1)[..., None] + log_f, -2)
        assert_close(layer.log_probs(hidden), log_p)

    def test_residual_ones_begin_as_a_layer_without_mixture(self) -> None:
        plain = sigsoftmax.OutputLayer(D, V, function="sigsoftmax")
        layer = MixtureOutputLayer(D, D, V, K, function="sigsoftmax", weight=plain.weight, latent="residual")
        layer.bias = plain.bias
        hidden = torch.randn(7, D)
        assert_close(layer.log_probs(hidden), plain.log_probs(hidden))

    def test_the_default_keeps_its_names(self) -> None:
        names = ["weight", "bias", "prior.weight", "latent.weight", "latent.bias"]
        assert sorted(MixtureOutputLayer(H, D, V, K).state_dict()) == sorted(names)

    def test_what_does_not_fit_is_refused(self) -> None:
        with pytest.raises(ValueError, match=r"latent_features must be in_features, 6; got 5: make them equal"):
            MixtureOutputLayer(H, D, V, K, latent="residual")
        with pytest.raises(ValueError, match="latent must be one of 'tanh', 'linear', 'residual', got 'cubic'"):
            MixtureOutputLayer(H, D, V, K, latent="cubic")  # type: ignore[arg-type]

    def test_under_autocast_log_probabilities_are_float32(self) -> None:
        layer, hidden = MixtureOutputLayer(H, D, V, K, function="softmax"), torch.randn(7, H)
        exact = layer.log_probs(hidden)
        for backend in ("reference", None):
            with torch.autocast("cpu", torch.bfloat16):
                found = sigsoftmax.mixture_log_probs(
                    *(layer.latent_vectors(hidden), layer.prior(hidden), layer.weight),
                    function="softmax",
                    linear_bias=layer.bias,
                    backend=backend,
                )
            assert found.dtype == torch.float32
            assert_close(found, exact, rtol=0.02, atol=0.02)
            assert_close(found.exp().sum(-1), torch.ones(7))
            found.sum().backward()


class TestSampling:
    @pytest.mark.parametrize("num_samples", [None, 1, K - 1, 40_000])
    def test_frequencies_are_the_mixed_probabilities(self, num_samples: int | None) -> None:
        layer = a_layer("sigsoftmax")
        output = torch.randn(H, dtype=torch.float64)
        draws = 39_999 if num_samples == K - 1 else 40_000
        rows = output.expand(draws // (num_samples or 1), H)
        drawn = layer.sample(rows, num_samples, generator=torch.Generator().manual_seed(1))
        assert drawn.numel() == draws
        counts = torch.bincount(drawn.flatten(), minlength=V)
        probs = plain_log_probs(layer, output, plain_sigsoftmax).exp().detach()
        assert probs.sum().item() == pytest.approx(1.0)
        expected = probs * draws
        statistic = ((counts - expected) ** 2 / expected).sum().item()
        assert statistic < V - 1 + 5 * math.sqrt(2 * (V - 1))

    def test_components_are_drawn_by_the_prior(self) -> None:
        # Each component has a class of its own.
        layer = MixtureOutputLayer(H, 2, 2, 2, function="sigsoftmax")
        nn.init.zeros_(layer.latent.weight)
        layer.latent.bias.data = torch.tensor([5.0, -5.0, -5.0, 5.0])
        layer.weight.data = 40.0 * torch.eye(2)
        output = torch.randn(H)
        prior = sigsoftmax.sigsoftmax(layer.prior(output)).detach()
        drawn = layer.sample(output, 20_000, generator=torch.Generator().manual_seed(1))
        share = (drawn == 0).double().mean().item()
        assert abs(share - prior[0].item()) < 4 * math.sqrt(prior[0].item() * prior[1].item() / 20_000)

    def test_samples_of_one_token_are_independent(self) -> None:
        # With one component drawn for all samples of a token they would always agree: the first half of the four
        # components gives class 0, the other half class 1.
        layer = MixtureOutputLayer(H, 2, 2, 4, function="softmax")
        nn.init.zeros_(layer.latent.weight)
        nn.init.zeros_(layer.prior.weight)
        layer.latent.bias.data = torch.tensor([5.0, -5.0, 5.0, -5.0, -5.0, 5.0, -5.0, 5.0])
        layer.weight.data = 40.0 * torch.eye(2)
        for num_samples in (2, 6):
            drawn = layer.sample(torch.randn(2000, H), num_samples, generator=torch.Generator().manual_seed(1))
            agree = (drawn[:, 0] == drawn[:, 1]).double().mean().item()
            assert abs(agree - 0.5) < 4 * math.sqrt(0.25 / 2000)

    def test_a_generator_repeats_the_draw(self) -> None:
        layer, (output, _) = a_layer(), an_input(30)
        first, second = (layer.sample(output, generator=torch.Generator().manual_seed(4)) for _ in range(2))
        assert torch.equal(first, second)


@pytest.mark.parametrize(
    ("action", "text"),
    [
        (lambda: MixtureOutputLayer(H, D, V, 0), "components must be a positive integer, got 0"),
        (lambda: MixtureOutputLayer(H, D, V, 2, floor=-1.0), "floor must be a finite number >= 0, got -1.0"),
        (lambda: MixtureOutputLayer(H, 0, V, K), "latent_features must be a positive integer, got 0"),
        (
            lambda: MixtureOutputLayer(H, D, V, K, weight=nn.Parameter(torch.randn(V, H))),
            "a tied weight must have the shape (num_classes, features) = (11, 5), got (11, 6)",
        ),
        (lambda: MixtureOutputLayer(H, D, V, K, prior_function="soft"), "unknown output function 'soft'"),
        (
            lambda: MixtureOutputLayer(H, D, V, K, prior_function="gss(k=learned)"),
            "parameter 'k' of the prior's 'gss' must be a plain number, got Learned",
        ),
        (
            lambda: MixtureOutputLayer(H, D, V, K, prior_function=OutputFunction("gss", k=torch.tensor(0.5))),
            "parameter 'k' of the prior's 'gss' must be a plain number, got Tensor",
        ),
        (
            lambda: MixtureOutputLayer(H, D, V, K, function=OutputFunction("gss", k=Learned(per_class=True))),
            "parameter 'k' of output function 'gss' cannot differ by class",
        ),
        (
            lambda: MixtureOutputLayer(H, D, V, K, floor=-1.0).loss(torch.randn(2, H), torch.zeros(2).long()),
            "floor must be a finite number >= 0, got -1.0",
        ),
        (
            lambda: MixtureOutputLayer(H, D, V, K).loss(torch.randn(2, H), torch.full((2,), V)),
            "target 11 at row 0 is out of range",
        ),
        (lambda: MixtureOutputLayer(H, D, V, K).sample(torch.randn(H), 0), "num_samples must be a positive integer"),
    ],
)
def test_errors(action: Callable[[], object], text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        action()


class TestMemory:
    """Nothing of the size of tokens x components x classes is allocated, not even with one byte for each."""

    TOKENS, COMPONENTS, CLASSES, FEATURES = 100, 5, 700, 16
    CHUNK_BYTES = 4 * 5 * 700 * 4
    """four tokens"""

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        latent = torch.randn(self.TOKENS, self.COMPONENTS, self.FEATURES, requires_grad=True)
        prior_logits = torch.randn(self.TOKENS, self.COMPONENTS, requires_grad=True)
        weight = torch.randn(self.CLASSES, self.FEATURES, requires_grad=True)
        return latent, prior_logits, weight, torch.randint(self.CLASSES, (self.TOKENS,))

    def loss_and_gradients(self, **options: Any) -> Callable[[], object]:
        latent, prior_logits, weight, target = self.tensors()

        def action() -> None:
            result = sigsoftmax.mixture_cross_entropy(latent, prior_logits, weight, target, **options)
            loss = result[0] if isinstance(result, tuple) else result
            loss.sum().backward()

        action()  # Gradients exist afterwards, as in the second step of training.
        return action

    @pytest.mark.grid
    @pytest.mark.parametrize("function", ["softmax", "sigsoftmax", "gss(k=0.2)", "softcap"])
    @pytest.mark.parametrize(
        "options",
        [
            {},
            {"reduction": "none", "floor": 1e-8},
            {"label_smoothing": 0.1, "z_loss": 1e-3},
            {"extras": ("argmax", "entropy", "log_normalizer")},
        ],
        ids=str,
    )
    def test_the_loss_does_not_even_hold_tokens_x_classes(self, function: str, options: dict[str, Any]) -> None:
        action = self.loss_and_gradients(function=function, chunk_bytes=self.CHUNK_BYTES, **options)
        assert self.CHUNK_BYTES <= allocations_of(action).largest < self.TOKENS * self.CLASSES
        assert str(sigsoftmax.explain()).startswith("blocked")

    def test_the_measurement_sees_them_where_they_are_held(self) -> None:
        action = self.loss_and_gradients(function="sigsoftmax", backend="reference")
        assert allocations_of(action).largest >= 4 * self.TOKENS * self.COMPONENTS * self.CLASSES

    def test_log_probs_hold_their_result_and_a_chunk(self) -> None:
        latent, prior_logits, weight, _ = self.tensors()

        def action() -> None:
            sigsoftmax.mixture_log_probs(
                latent, prior_logits, weight, function="sigsoftmax", chunk_bytes=self.CHUNK_BYTES
            ).sum().backward()

        result = 4 * self.TOKENS * self.CLASSES
        assert result <= allocations_of(action).largest < self.TOKENS * self.COMPONENTS * self.CLASSES

    def test_sampling_computes_the_drawn_component_alone(self) -> None:
        layer = MixtureOutputLayer(H, self.FEATURES, self.CLASSES, self.COMPONENTS)
        output = torch.randn(self.TOKENS, H)
        for num_samples in (None, 3, 50):
            allocated = allocations_of(lambda count=num_samples: layer.sample(output, count))
            assert allocated.largest < self.TOKENS * self.COMPONENTS * self.CLASSES

    def test_the_layer_by_default(self) -> None:
        tokens, components, classes = 120, 8, 10_000
        layer = MixtureOutputLayer(H, 4, classes, components, floor=1e-8)
        output, target = torch.randn(tokens, H), torch.randint(classes, (tokens,))

        def action() -> None:
            layer.loss(output, target).backward()

        action()
        allocated = allocations_of(action)
        assert allocated.largest <= 32 * 2**20 < 4 * tokens * components * classes
        assert allocated.peak <= 40 * 2**20
