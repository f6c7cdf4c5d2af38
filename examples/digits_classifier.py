"""If there are at most d + 1 classes, softmax has no bottleneck, and another output function has nothing to lift.

Digits have 10 classes, so there is one below 9 units in the last hidden layer. Here it has 2: a small network looks at
the 8 x 8 images that come with scikit-learn, squeezes each to a point in the plane, and a head turns the point into 10
probabilities. Heads are compared on equal terms: for each seed the same split, first weights, order of the images
and learning rates, the same number of epochs; rate and epoch are chosen by the validation loss, and the test images are
looked at once.

    python examples/digits_classifier.py
    python examples/digits_classifier.py --heads "gss(k=learned:1)" "moss(K=3)" --widths 1 2 4 --seeds 5

docs/classifiers.md shows the whole study. Needs scikit-learn: pip install '.[examples]'.

Shapes: N images, P pixels, V classes.
"""

from __future__ import annotations

import argparse
import copy
import math
import statistics
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from sigsoftmax import MixtureOutputLayer, OutputLayer
from sigsoftmax.analysis.calibration import calibration
from sigsoftmax.family.heads import Head
from sigsoftmax.records.schemas.classifiers import Calibration

CLASSES, PIXELS, HIDDEN = 10, 64, 64
EPOCHS, BATCH = 40, 128


class LinearMixture(MixtureOutputLayer):
    """A mixture whose components see linear maps of the hidden units, as a plain head does.

    The published mixtures take the tanh of them, so that each component places its images in a square, and training
    drives most of them into its four corners.
    """

    def latent_vectors(self, hidden: Tensor) -> Tensor:
        return self.latent(hidden).unflatten(-1, (self.components, self.latent_features))


class Classifier(nn.Module):
    """Pixels to hidden units, to the ``width`` units that the head sees, to classes.

    A head is written as ``Head.parse`` reads it. A mixture sits behind the same units as any other head; a
    "wide mos(K=4)" sits before them, so that each component has ``width`` units of its own, as in the papers on
    mixtures; and "tanh mos(K=4)" is ``MixtureOutputLayer`` as it is.
    """

    def __init__(self, head: str, width: int) -> None:
        super().__init__()
        variant, _, member = head.partition(" ") if head.startswith(("wide ", "tanh ")) else ("", "", head)
        parsed = Head.parse(member)
        is_mixture = member.startswith(("mos", "mixture"))
        if variant and not is_mixture:
            raise ValueError(f"only a mixture can be {variant}, got {head!r}; write it like '{variant} mos(K=4)'")
        self.body = nn.Sequential(nn.Linear(PIXELS, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN), nn.ReLU())
        squeeze = nn.Linear(HIDDEN, width)  # always made, so that a seed gives every head the same first weights
        self.squeeze = nn.Identity() if variant == "wide" else squeeze
        self.head: OutputLayer | MixtureOutputLayer
        if is_mixture:
            layer = MixtureOutputLayer if variant == "tanh" else LinearMixture
            units = HIDDEN if variant == "wide" else width
            self.head = layer(units, width, CLASSES, parsed.components, function=parsed.function)
        else:
            self.head = OutputLayer(width, CLASSES, function=parsed.function)

    def features(self, images_NP: Tensor) -> Tensor:
        return self.squeeze(self.body(images_NP))

    def loss(self, images_NP: Tensor, labels_N: Tensor) -> Tensor:
        return self.head.loss(self.features(images_NP), labels_N)

    @torch.no_grad()
    def log_probs(self, images_NP: Tensor) -> Tensor:
        return self.head.log_probs(self.features(images_NP))


@dataclass(frozen=True, kw_only=True)
class Split:
    """Images with their labels, for one purpose."""

    images_NP: Tensor
    labels_N: Tensor


@dataclass(frozen=True, kw_only=True)
class Digits:
    train: Split
    valid: Split
    test: Split


@dataclass(frozen=True, kw_only=True)
class Fit:
    """A classifier at its best epoch."""

    model: Classifier
    learning_rate: float
    valid_loss: float
    """inf if no epoch had a finite one"""
    best_epoch: int
    """from 1; 0 if there was none"""


@dataclass(frozen=True, kw_only=True)
class Scores:
    nats: float
    accuracy: float
    calibration: Calibration


def digits(seed: int) -> Digits:
    """Three fifths to train, a fifth to choose by, a fifth to test, each with the classes in equal shares."""
    try:
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split
    except ModuleNotFoundError as error:
        raise SystemExit(f"this example needs scikit-learn ({error}); run: pip install '.[examples]'") from None
    images_NP, labels_N = load_digits(return_X_y=True)
    train, rest = train_test_split(range(len(labels_N)), test_size=0.4, stratify=labels_N, random_state=seed)
    valid, test = train_test_split(rest, test_size=0.5, stratify=labels_N[rest], random_state=seed)
    images, labels = torch.from_numpy(images_NP).float() / 16.0, torch.from_numpy(labels_N).long()
    return Digits(
        train=Split(images_NP=images[train], labels_N=labels[train]),
        valid=Split(images_NP=images[valid], labels_N=labels[valid]),
        test=Split(images_NP=images[test], labels_N=labels[test]),
    )


def fitted(head: str, width: int, data: Digits, *, learning_rate: float, seed: int, epochs: int = EPOCHS) -> Fit:
    """Train for a number of epochs, and go back to the one with the lowest validation loss."""
    torch.manual_seed(seed)
    model = Classifier(head, width)
    order = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, fused=True)
    updates = epochs * math.ceil(len(data.train.labels_N) / BATCH)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, learning_rate, total_steps=updates, pct_start=0.1, cycle_momentum=False
    )
    best = Fit(model=copy.deepcopy(model), learning_rate=learning_rate, valid_loss=math.inf, best_epoch=0)
    for epoch in range(1, epochs + 1):
        for chosen in torch.randperm(len(data.train.labels_N), generator=order).split(BATCH):
            optimizer.zero_grad()
            model.loss(data.train.images_NP[chosen], data.train.labels_N[chosen]).backward()
            optimizer.step()
            schedule.step()
        with torch.no_grad():
            valid_loss = model.loss(data.valid.images_NP, data.valid.labels_N).item()
        if valid_loss < best.valid_loss:
            best = replace(best, model=copy.deepcopy(model), valid_loss=valid_loss, best_epoch=epoch)
    return best


def scores(model: Classifier, split: Split) -> Scores:
    log_probs_NV = model.log_probs(split.images_NP)
    right_N = log_probs_NV.argmax(-1) == split.labels_N
    nats_N = -log_probs_NV.gather(1, split.labels_N.unsqueeze(1))
    return Scores(
        nats=nats_N.mean().item(),
        accuracy=right_N.float().mean().item(),
        calibration=calibration(log_probs_NV, split.labels_N),
    )


def spread(values: list[float], form: str) -> str:
    deviation = statistics.stdev(values) if len(values) > 1 else math.nan
    return f"{format(statistics.fmean(values), form)} ± {format(deviation, form.lstrip('+'))}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", nargs="+", default=["sigsoftmax", "gss(k=0.2)", "mos(K=4)"], help="beside softmax")
    parser.add_argument("--widths", nargs="+", type=int, default=[2, 9], help="units that the head sees (default: 2 9)")
    parser.add_argument("--seeds", type=int, default=2, help="splits and first weights (default: 2)")
    parser.add_argument("--rates", nargs="+", type=float, default=[3e-2, 1e-1], help="learning rates to choose from")
    options = parser.parse_args()
    if options.seeds < 1:
        parser.error(f"argument --seeds: expected at least 1, got {options.seeds}")
    heads = list(dict.fromkeys(["softmax", *options.heads]))
    try:
        numbers_of = {
            (head, width): sum(parameter.numel() for parameter in Classifier(head, width).parameters())
            for head in heads
            for width in options.widths
        }
    except ValueError as error:
        parser.error(str(error))
    torch.set_num_threads(1)  # The tensors are small: more threads mostly wait for each other.
    columns = f"{'numbers':>7s} {'nats':>16s} {'less softmax':>17s} {'right':>7s} {'ECE':>6s} {'Brier':>6s}"
    print(f"{'d':>2s} {'head':20s} {columns}")
    for width in options.widths:
        nats_of: dict[str, list[float]] = {}
        for head in heads:
            found = []
            for seed in range(options.seeds):
                data = digits(seed)
                fits = [fitted(head, width, data, learning_rate=rate, seed=seed) for rate in options.rates]
                found.append(scores(min(fits, key=lambda fit: fit.valid_loss).model, data.test))
            nats_of[head] = [score.nats for score in found]
            paired = [own - base for own, base in zip(nats_of[head], nats_of["softmax"], strict=True)]
            right, ece, brier = (
                statistics.fmean(values)
                for values in zip(
                    *((s.accuracy, s.calibration.expected_error, s.calibration.brier) for s in found), strict=True
                )
            )
            losses = f"{spread(nats_of[head], '.3f'):>16s} {spread(paired, '+.3f'):>17s}"
            rest = f"{right:7.1%} {ece:6.3f} {brier:6.3f}"
            print(f"{width:2d} {head:20s} {numbers_of[head, width]:7d} {losses} {rest}", flush=True)
    print("Means and standard deviations over seeds. So few seeds show how it is done, not which head is better.")


if __name__ == "__main__":
    main()
