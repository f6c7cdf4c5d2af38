"""The numbers of a sweep: means over seeds, differences seed by seed, and the table that shows them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from sigsoftmax.experiments.display import perplexity_text
from sigsoftmax.experiments.sweep.plan import Point, SweepConfig, Trial
from sigsoftmax.records.durations import duration_text
from sigsoftmax.records.schemas.sweeps import PairedDifferenceRecord, Quantity, TrialRecord
from sigsoftmax.records.statistics import LEAST_SEEDS, PairedDifference
from sigsoftmax.report.number_text import DASH, counted
from sigsoftmax.report.sections.sweeps import Trials, mean_fields
from sigsoftmax.report.tables import Cell, Column, Fields, Table

__all__ = ["Group", "differences", "groups_of", "results_table", "trial_line"]

QUANTITY_NAMES: Mapping[Quantity, str] = {"test_loss": "test loss", "kl": "KL"}


@dataclass(frozen=True, kw_only=True)
class Group:
    """The trials that differ in their seed alone."""

    recipe: str
    point: Point
    planned: int
    records: Mapping[int, TrialRecord]
    """records of the trials that have ended, by seed"""

    def values(self, quantity: Quantity) -> dict[int, float]:
        return {seed: _value(record, quantity) for seed, record in self.records.items()}

    def overrides(self) -> set[str]:
        """Changes to the recipe that are no alternatives of the sweep."""
        return {change for record in self.records.values() for change in record.run.overrides} - {*self.point}

    def texts(self) -> set[str]:
        return {record.run.corpus_checksum for record in self.records.values()}


def _value(record: TrialRecord, quantity: Quantity) -> float:
    value = record.kl if quantity == "kl" else record.test_loss
    assert value is not None
    return value


def difference_text(difference: PairedDifference) -> str:
    interval = difference.interval
    if interval is None:
        return f"{difference.mean:+.4f}"
    low, high = interval
    return f"{difference.mean:+.4f} [{low:+.4f}, {high:+.4f}]{' *' if difference.is_resolved else '  '}"


def groups_of(trials: Sequence[Trial], records: Mapping[Trial, TrialRecord]) -> list[Group]:
    """The groups in the order of the plan. Trials on different texts are refused: nothing could be said about them."""
    texts: dict[str, dict[str, Trial]] = {}
    for trial, record in records.items():
        texts.setdefault(trial.recipe.corpus, {}).setdefault(record.run.corpus_checksum, trial)
    for corpus, found in texts.items():
        if len(found) > 1:
            names = " and ".join(trial.name for trial in found.values())
            raise ValueError(f"the text {corpus!r} changed during the sweep: {names} had different ones; start again")
    keys = dict.fromkeys((trial.recipe.name, trial.point) for trial in trials)
    groups = []
    for recipe, point in keys:
        own = [trial for trial in trials if (trial.recipe.name, trial.point) == (recipe, point)]
        ended = {trial.seed: records[trial] for trial in own if trial in records}
        groups.append(Group(recipe=recipe, point=point, planned=len(own), records=ended))
    return groups


def quantity_of(groups: Sequence[Group]) -> Quantity:
    """The quantity that recipes are compared by: the distance to the truth wherever it is known."""
    records = [record for group in groups for record in group.records.values()]
    return "kl" if records and all(record.kl is not None for record in records) else "test_loss"


def baseline_of(group: Group, groups: Sequence[Group], config: SweepConfig) -> Group:
    """The group that this one is compared with: itself, for a baseline."""
    recipe, fields = config.baseline_choice()
    point = tuple(fields.get(change.partition("=")[0], change) for change in group.point)
    wanted = (recipe or group.recipe, point)
    return next(other for other in groups if (other.recipe, other.point) == wanted)


def differences(groups: Sequence[Group], config: SweepConfig) -> list[PairedDifferenceRecord]:
    """Differences of groups from their baselines, where both have the text and at least one seed in common."""
    quantity = quantity_of(groups)
    found = []
    for group in groups:
        baseline = baseline_of(group, groups, config)
        difference = _difference(group, baseline, quantity, config)
        if group is baseline or difference is None:
            continue
        low, high = difference.interval or (None, None)
        found.append(
            PairedDifferenceRecord(
                recipe=group.recipe,
                point=group.point,
                baseline_recipe=baseline.recipe,
                baseline_point=baseline.point,
                quantity=quantity,
                seeds=difference.seeds,
                mean=difference.mean,
                deviation=difference.sample.deviation,
                low=low,
                high=high,
                confidence=config.confidence,
                corpus_checksum=next(iter(group.texts())),
                changes=tuple(sorted(group.overrides() | baseline.overrides())),
            )
        )
    return found


def _difference(group: Group, baseline: Group, quantity: Quantity, config: SweepConfig) -> PairedDifference | None:
    if group.texts() != baseline.texts():
        return None
    return PairedDifference.of(group.values(quantity), baseline.values(quantity), config.confidence)


# --- the table --------------------------------------------------------------------------------------------------------


def results_table(groups: Sequence[Group], failures: Mapping[Trial, str], config: SweepConfig) -> str:
    """Mean and standard deviation over seeds, differences with their intervals, and what failed."""
    quantity = quantity_of(groups)
    compared = len(groups) > 1
    axes = [axis.field for axis in config.axes()]
    fields: Fields[Group] = {
        Column("Recipe", "label"): lambda group: group.recipe,
        **{Column(axis): _alternative(place) for place, axis in enumerate(axes)},
        "Seeds": lambda group: _count_text(len(group.records), group.planned),
        **{column: _of_records(cell) for column, cell in mean_fields(has_truth=quantity == "kl").items()},
    }
    if compared:
        fields[Column(f"{QUANTITY_NAMES[quantity]} minus baseline's")] = lambda group: _compared_text(
            group, baseline_of(group, groups, config), quantity, config
        )
    failed = [
        f"failed: {'; '.join(trial.name for trial in failures if failures[trial] == reason)}: {reason}"
        for reason in dict.fromkeys(failures.values())
    ]
    notes = _notes(groups, config, quantity) if compared else []
    caption = "Perplexity, mean ± standard deviation over seeds"
    return "\n".join([Table.of(groups, fields, caption=caption).to_text(), *notes, *failed])


def _alternative(place: int) -> Callable[[Group], str]:
    return lambda group: group.point[place].partition("=")[2]


def _count_text(ended: int, planned: int) -> str:
    return str(planned) if ended == planned else f"{ended} of {planned}"


def _of_records(cell: Callable[[Trials], Cell | str]) -> Callable[[Group], Cell | str]:
    return lambda group: cell(list(group.records.values()))


def _compared_text(group: Group, baseline: Group, quantity: Quantity, config: SweepConfig) -> str:
    if group is baseline:
        return "baseline  "
    difference = _difference(group, baseline, quantity, config)
    return DASH if difference is None else difference_text(difference)


def _notes(groups: Sequence[Group], config: SweepConfig, quantity: Quantity) -> list[str]:
    recipe, fields = config.baseline_choice()
    baseline = ", ".join([*([recipe] if recipe else ["the same recipe"]), *fields.values()])
    if recipe and config.axes() and len(fields) < len(config.axes()):
        baseline += " at the same point"
    found = differences(groups, config)
    lines = [f"Differences in nats of {QUANTITY_NAMES[quantity]} on the test text from {baseline}, seed by seed."]
    if any(difference.low is not None for difference in found):
        lines.append(f"In brackets Student's {100 * config.confidence:g} % interval, * where it leaves out zero.")
    else:
        lines.append(f"With fewer than {LEAST_SEEDS} seeds nothing can be resolved, and no interval is given.")
    if len(found) > 1 and any(difference.low is not None for difference in found):
        lines.append(
            f"Each interval stands for itself: of many, {100 * (1 - config.confidence):.3g} % leave out zero by "
            "chance. Choose on validation."
        )
    return lines


def trial_line(trial: Trial, record: TrialRecord, count: str) -> str:
    """One line about a trial that has ended."""
    parts = [f"validation perplexity {perplexity_text(record.valid_loss)}", f"test {perplexity_text(record.test_loss)}"]
    if record.kl is not None:
        parts.append(f"KL to the truth {record.kl:.4f}")
    length = f"{counted(record.epochs, 'epoch')}, {duration_text(record.seconds)}"
    return f"{trial.name}: {', '.join(parts)} ({length}; {count})"
