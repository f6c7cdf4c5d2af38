"""Estimates of time: they grow with the work, name its long parts, and cover every fit."""

from sigsoftmax.analysis.audit.effort import Machine, Step, audit_steps, fit_seconds, listed, measure_machine
from sigsoftmax.analysis.capacity.curves import CapacityConfig
from sigsoftmax.analysis.capacity.distributions import Distributions
from sigsoftmax.analysis.capacity.lbfgs import Budget
from sigsoftmax.synthetic import Language

MACHINE = Machine(products32=1e11, products64=5e10, elements=5e8)


def total(**changes):
    given = {"contexts": 1000, "vocabulary": 50_000, "width": 1024, "sampled": 256, "truncated": 10, **changes}
    return sum(step.seconds for step in audit_steps(MACHINE, **given))


def test_more_work_takes_longer():
    usual = total()
    for changes in (
        {"contexts": 2000},
        {"vocabulary": 100_000},
        {"width": 2048},
        {"components": 4},
        {"is_softmax": False},
        {"operations_per_context": 1e10},
        {"argmax_tokens": 1000, "argmax_seconds": 60.0},
    ):
        assert total(**changes) > usual


def test_bounds_alone_take_less():
    assert total(contexts=0) < total()
    assert [step.name for step in audit_steps(MACHINE, contexts=0, vocabulary=1000, width=64)] == [
        "log-probabilities",
        "rank bounds",
    ]


def test_a_matrix_has_no_layer_to_look_at():
    names = [step.name for step in audit_steps(MACHINE, contexts=10, vocabulary=100, width=None, truncated=3)]
    assert names == ["spectrum", "truncation"]


def test_the_machine_is_measured():
    machine = measure_machine()
    assert min(machine.products32, machine.products64, machine.elements) > 1e5


def test_the_time_of_fits_counts_starts_heads_and_workers():
    target = Distributions.of_language(Language.of_rank(contexts=30, words=20, rank=8, seed=0))

    def seconds(**changes):
        return fit_seconds(target, CapacityConfig(**{"heads": ("softmax",), "widths": (2, 4), **changes}))

    assert seconds(budget=Budget(iterations=200)) > 5.0 * seconds(budget=Budget(iterations=10))
    assert seconds(heads=("mos(K=8)",), least_starts=8) > seconds()


def test_long_parts_are_named():
    steps = [Step("short", 0.2), Step("long", 50.0), Step("longer", 100.0)]
    assert listed(steps) == "about 2 min 30 s (long 50 s, longer 1 min 40 s)"
    assert listed([Step("short", 0.2)]) == "about 0.2 s"
