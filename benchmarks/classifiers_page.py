"""Tables and pictures of docs/classifiers.md, from the records of benchmarks/classifiers.py.

Differences are paired: each head is compared with softmax on the same split and first weights. Test sets of different
seeds overlap, and so do training sets, so that the differences are not independent; their interval is that of the
corrected resampled t-test (Nadeau and Bengio 2003), with the variance multiplied by 1/n + test/train instead of 1/n.

Shapes: N points, V classes.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from bars import DIGEST, drawn_from
from classifiers import HEADS, SWEPT, WIDTH, WIDTHS
from examples.digits_classifier import CLASSES, Classifier, digits, fitted
from write_docs import NO_RECORDS, PART, markdown_table

from sigsoftmax.records.schemas.classifiers import ClassifierResult, ConfidenceBin
from sigsoftmax.records.statistics import LEAST_SEEDS, Sample, student_quantile

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PAGE = Path(__file__).parents[1] / "docs" / "classifiers.md"
BASELINE = "softmax"
CURVES, REGIONS = "classifiers-curves.png", "classifiers-regions.png"
FEWEST = 20
"""predictions in a bin that is drawn"""
REGION_HEADS = ("softmax", "sigsoftmax", "gss(k=0.2)", "mos(K=4)", "moss(K=4)", "tanh mos(K=4)")
# Okabe and Ito's colours; softmax is broad, so that what lies on it can be seen.
LOOKS = {"softmax": ("#000000", 3.6), "sigsoftmax": ("#E69F00", 1.8), "gss(k=0.2)": ("#56B4E9", 1.8)}
LOOKS |= {"mos(K=4)": ("#009E73", 1.8)}
STYLE = {
    "font.size": 10.5,
    "axes.titlesize": 11.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": "#E6E6E6",
    "figure.facecolor": "white",
}

Measure = Callable[[ClassifierResult], float]


def nats(r: ClassifierResult) -> float:
    return r.test_loss


def right(r: ClassifierResult) -> float:
    """In percent."""
    return 100.0 * r.accuracy


def calibration_error(r: ClassifierResult) -> float:
    return r.calibration.expected_error


def brier(r: ClassifierResult) -> float:
    return r.calibration.brier


@dataclass(frozen=True)
class Difference:
    """A head's mean less that of softmax, over the same seeds."""

    sample: Sample
    half_interval: float | None
    """interval of 95 %; None with too few seeds for one"""

    @classmethod
    def of(cls, values: Sequence[float], test_over_train: float) -> Difference:
        sample = Sample.of(values)
        if sample.deviation is None or sample.count < LEAST_SEEDS:
            return cls(sample, None)
        error = sample.deviation * math.sqrt(1.0 / sample.count + test_over_train)
        return cls(sample, student_quantile(0.975, sample.count - 1) * error)

    @property
    def is_resolved(self) -> bool:
        return self.half_interval is not None and abs(self.sample.mean) > self.half_interval


class Study:
    """The seeds that every head at every width has, so that all are compared on equal terms."""

    def __init__(self, results: Iterable[ClassifierResult]) -> None:
        self.by_point: dict[tuple[str, int, int], ClassifierResult] = {}
        for result in results:
            point = (result.head, result.width, result.seed)
            if point in self.by_point:
                raise ValueError(f"{result.head!r} at width {result.width} is there twice for seed {result.seed}")
            self.by_point[point] = result
        wanted = {(head, WIDTH) for head in HEADS} | {(head, width) for head in SWEPT for width in WIDTHS}
        seeds = {seed for _, _, seed in self.by_point}
        self.seeds = sorted(
            seed for seed in seeds if all((head, width, seed) in self.by_point for head, width in wanted)
        )

    def of(self, head: str, width: int = WIDTH) -> list[ClassifierResult]:
        return [self.by_point[head, width, seed] for seed in self.seeds]

    def sample(self, measure: Measure, head: str, width: int = WIDTH) -> Sample:
        return Sample.of([measure(result) for result in self.of(head, width)])

    def difference(self, measure: Measure, head: str, width: int = WIDTH) -> Difference:
        pairs = list(zip(self.of(head, width), self.of(BASELINE, width), strict=True))
        return Difference.of(
            [measure(own) - measure(base) for own, base in pairs], pairs[0][0].test / pairs[0][0].train
        )


# --- text -------------------------------------------------------------------------------------------------------------


def spread(sample: Sample, digits: int) -> str:
    mean = f"{sample.mean:.{digits}f}"
    return mean if sample.deviation is None else f"{mean} ± {sample.deviation:.{digits}f}"


def against(difference: Difference, digits: int) -> str:
    """The mean difference with its interval, in bold where that leaves out zero."""
    text = f"{difference.sample.mean:+.{digits}f}"
    if difference.half_interval is not None:
        text += f" ± {difference.half_interval:.{digits}f}"
    return f"**{text}**" if difference.is_resolved else text


def setup(study: Study) -> str:
    first = study.of(BASELINE)[0]
    rates = ", ".join(f"{attempt.learning_rate:g}" for attempt in first.attempts)
    return (
        f"{first.train} images to train on, {first.valid} to choose by, {first.test} to test on; {len(study.seeds)} "
        f"seeds, each with a split and first weights of its own; {first.epochs} epochs of AdamW at each of the "
        f"learning rates {rates}.\n"
    )


def likelihood(study: Study) -> str:
    rows = [
        [
            f"`{head}`",
            f"{study.of(head)[0].parameters:,} ({study.of(head)[0].head_parameters})",
            spread(study.sample(nats, head), 3),
            "" if head == BASELINE else against(study.difference(nats, head), 3),
            spread(study.sample(right, head), 1),
            "" if head == BASELINE else against(study.difference(right, head), 1),
        ]
        for head in HEADS
    ]
    header = ["head", "parameters (of the head)", "nats", "less softmax", "right, %", "less softmax"]
    return markdown_table(header, "lrrrrr", rows) + "\n"


def calibrations(study: Study) -> str:
    rows = [
        [
            f"`{head}`",
            spread(study.sample(calibration_error, head), 3),
            "" if head == BASELINE else against(study.difference(calibration_error, head), 3),
            spread(study.sample(brier, head), 3),
            "" if head == BASELINE else against(study.difference(brier, head), 3),
        ]
        for head in HEADS
    ]
    return markdown_table(("head", "ECE", "less softmax", "Brier score", "less softmax"), "lrrrr", rows) + "\n"


def widths(study: Study) -> str:
    others = [head for head in SWEPT if head != BASELINE]
    header = ["d", "bottleneck", "softmax, right %", "softmax, nats", *(f"`{head}` less softmax" for head in others)]
    rows = [
        [
            str(width),
            "no" if study.of(BASELINE, width)[0].classes <= width + 1 else "yes",
            spread(study.sample(right, BASELINE, width), 1),
            spread(study.sample(nats, BASELINE, width), 3),
            *(against(study.difference(nats, head, width), 3) for head in others),
        ]
        for width in WIDTHS
    ]
    return markdown_table(header, "rl" + "r" * (len(header) - 2), rows) + "\n"


def rates(study: Study) -> str:
    tried = [attempt.learning_rate for attempt in study.of(BASELINE)[0].attempts]
    rows = []
    for head, width in [*((head, WIDTH) for head in HEADS), *((BASELINE, width) for width in WIDTHS if width != WIDTH)]:
        results = study.of(head, width)
        chosen = Counter(result.learning_rate for result in results)
        learned = {name: Sample.of([result.learned[name] for result in results]) for name in results[0].learned}
        texts = ", ".join(f"{name} = {spread(sample, 2)}" for name, sample in learned.items())
        rows.append([f"`{head}`, d = {width}", *(str(chosen[rate] or "") for rate in tried), texts])
    header = ("seeds that chose", *(f"{rate:g}" for rate in tried), "learned")
    return markdown_table(header, "l" + "r" * len(tried) + "l", rows) + "\n"


def verdict(study: Study) -> str:
    """Sentences on the intervals at the width where all heads are compared."""
    groups: dict[str, list[str]] = {"lower": [], "higher": [], "neither": []}
    for head in HEADS:
        if head != BASELINE:
            difference = study.difference(nats, head)
            side = "lower" if difference.sample.mean < 0.0 else "higher"
            groups[side if difference.is_resolved else "neither"].append(f"`{head}`")
    parts = {
        "lower": "A lower test loss than softmax, beyond the interval",
        "higher": "A higher one",
        "neither": "Not told apart from softmax",
    }
    return "".join(f"- {text}: {', '.join(groups[group]) or 'none'}.\n" for group, text in parts.items())


PARTS: Mapping[str, Callable[[Study], str]] = {
    "setup": setup,
    "likelihood": likelihood,
    "verdict": verdict,
    "calibration": calibrations,
    "widths": widths,
    "rates": rates,
}


def page_with(study: Study, text: str) -> str:
    names = [part["suite"] for part in PART.finditer(text)]
    if sorted(names) != sorted(PARTS):
        raise ValueError(f"{PAGE.name} has places for {', '.join(names)}, expected one each for {', '.join(PARTS)}")
    return PART.sub(
        lambda part: f"{part['begin']}\n{PARTS[part['suite']](study) if study.seeds else NO_RECORDS}\n{part['end']}",
        text,
    )


# --- pictures ---------------------------------------------------------------------------------------------------------


def digest(drawn: object) -> str:
    return hashlib.sha256(json.dumps(drawn).encode()).hexdigest()


def curves_data(study: Study) -> dict[str, Any]:
    """Loss by width, and the bins at WIDTH, pooled over seeds."""
    data: dict[str, Any] = {}
    for head in SWEPT:
        samples = [study.sample(nats, head, width) for width in WIDTHS]
        same_bins = zip(*(result.calibration.bins for result in study.of(head)), strict=True)
        data[head] = {
            "nats": [[sample.mean, sample.deviation or 0.0] for sample in samples],
            "bins": [[*pooled(bins)] for bins in same_bins if any(b.count for b in bins)],
        }
    return data


def pooled(bins: Sequence[ConfidenceBin]) -> tuple[float, float, int]:
    """Confidence, accuracy and count of the predictions of several bins together."""
    count = sum(b.count for b in bins)
    confidence, accuracy = (
        sum(b.count * value for b, value in pairs if value is not None) / count
        for pairs in ([(b, b.confidence) for b in bins], [(b, b.accuracy) for b in bins])
    )
    return confidence, accuracy, count


def draw_curves(data: Mapping[str, Any], path: Path, drawn: str) -> None:
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with mpl.rc_context(STYLE):  # type: ignore[arg-type]
        figure = Figure(figsize=(11.0, 4.4), layout="constrained")
        FigureCanvasAgg(figure)
        left, other = figure.subplots(1, 2)
        for number, (head, values) in enumerate(data.items()):
            colour, size = LOOKS[head]
            shifted = [width * (1.0 + 0.025 * (number - 1.5)) for width in WIDTHS]
            means, deviations = zip(*values["nats"], strict=True)
            left.errorbar(
                shifted,
                means,
                yerr=deviations,
                color=colour,
                linewidth=size,
                elinewidth=1.0,
                marker="o",
                markersize=4,
                label=head,
                zorder=2 if head == BASELINE else 3,
            )
            shown = [filled for filled in values["bins"] if filled[2] >= FEWEST]
            confidence, accuracy, _ = zip(*shown, strict=True) if shown else ((), (), ())
            other.plot(
                confidence,
                accuracy,
                color=colour,
                linewidth=size,
                marker="o",
                markersize=4,
                zorder=2 if head == BASELINE else 3,
            )
        left.axvspan(CLASSES - 1, 18.5, color="#F0F0F0", zorder=0)
        left.text(
            1.04 * (CLASSES - 1), 0.97, "no bottleneck", transform=left.get_xaxis_transform(), va="top", fontsize=9
        )
        left.set_xscale("log")
        left.set_yscale("log")
        left.set_xlim(0.9, 18.5)
        left.set_xticks(WIDTHS, [str(width) for width in WIDTHS])
        ticks = [0.1, 0.2, 0.5, 1.0]
        left.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
        left.minorticks_off()
        left.set_xlabel("units d that the head sees")
        left.set_ylabel("test loss (nats)")
        left.set_title("Loss: mean and standard deviation over seeds")
        left.legend(frameon=False, loc="lower left")
        other.plot([0, 1], [0, 1], color="#8A8A8A", linestyle=":", linewidth=1.5, zorder=1)
        other.set_xlabel("confidence")
        other.set_ylabel("share that is right")
        other.set_title(f"Reliability at d = {WIDTH}: bins of {FEWEST} images or more")
        for axes in (left, other):
            axes.grid(visible=True)
        figure.savefig(path, dpi=150, metadata={"Software": None, DIGEST: drawn})


def regions_data(study: Study) -> dict[str, list[float]]:
    """Seed and learning rate of each classifier that is drawn."""
    first = study.seeds[0]
    return {head: [first, study.by_point[head, WIDTH, first].learning_rate] for head in REGION_HEADS}


def draw_regions(data: Mapping[str, Sequence[float]], path: Path, drawn: str) -> None:
    """The most probable class at each point of the plane, and the places of the test images."""
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with mpl.rc_context(STYLE):  # type: ignore[arg-type]
        figure = Figure(figsize=(11.0, 7.4), layout="constrained")
        FigureCanvasAgg(figure)
        for axes, (head, (seed, rate)) in zip(figure.subplots(2, 3).flat, data.items(), strict=True):
            images = digits(int(seed))
            fit = fitted(head, WIDTH, images, learning_rate=rate, seed=int(seed))
            _draw_plane(axes, fit.model, images.test.images_NP, images.test.labels_N)
            axes.set_title(head)
        figure.savefig(path, dpi=130, metadata={"Software": None, DIGEST: drawn})


@torch.no_grad()
def _draw_plane(axes: Axes, model: Classifier, images_NP: torch.Tensor, labels_N: torch.Tensor) -> None:
    import matplotlib as mpl

    # Ten colours that lie apart; saturation shows confidence.
    palette = torch.tensor(mpl.colormaps["tab10"].colors)  # type: ignore[attr-defined]
    # A tanh mixture squeezes the units itself; what it sees is what is drawn.
    points_N2 = model.features(images_NP)
    low, high = points_N2.quantile(0.01, 0), points_N2.quantile(0.99, 0)
    margin = 0.12 * (high - low)
    low, high = low - margin, high + margin
    x, y = (torch.linspace(float(low[i]), float(high[i]), 300) for i in range(2))
    grid = torch.cartesian_prod(x, y)
    probability, first = model.head.log_probs(grid).exp().max(-1)
    colour = 1.0 - (1.0 - palette[first]) * (0.15 + 0.5 * probability).unsqueeze(1)
    axes.imshow(
        colour.view(300, 300, 3).transpose(0, 1).numpy(),
        origin="lower", extent=(float(low[0]), float(high[0]), float(low[1]), float(high[1])), aspect="auto",
    )  # fmt: skip
    axes.scatter(points_N2[:, 0], points_N2[:, 1], s=9, c=palette[labels_N].numpy(), edgecolors="white", linewidths=0.4)
    for label in range(len(palette)):
        x_label, y_label = points_N2[labels_N == label].median(0).values.tolist()
        axes.text(x_label, y_label, str(label), fontsize=12, fontweight="bold", ha="center", va="center")
    axes.set_xlim(float(low[0]), float(high[0]))
    axes.set_ylim(float(low[1]), float(high[1]))
    axes.set_xticks([])
    axes.set_yticks([])


# --- the page ---------------------------------------------------------------------------------------------------------


def update(results: Sequence[ClassifierResult], *, check: bool, page: Path = PAGE) -> list[str]:
    """Bring page and pictures up to date, or only look; returns what was, or is, out of date."""
    study = Study(results)
    text = page.read_text(encoding="utf-8")
    stale = []
    wanted = page_with(study, text)
    if wanted != text:
        stale.append(page.name)
        if not check:
            page.write_text(wanted, encoding="utf-8")
    if not study.seeds:
        return stale
    pictures: dict[str, tuple[Any, Callable[[Any, Path, str], None]]] = {
        CURVES: (curves_data(study), draw_curves),
        REGIONS: (regions_data(study), draw_regions),
    }
    for name, (data, draw) in pictures.items():
        path = page.parent / "images" / name
        if drawn_from(path) != digest(data):
            stale.append(f"images/{name}")
            if not check:
                draw(data, path, digest(data))
    return stale
