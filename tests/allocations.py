"""Memory that an action allocates, temporaries inside operations included."""

from collections.abc import Callable
from itertools import accumulate
from typing import NamedTuple

from torch.profiler import ProfilerActivity, profile


class Allocations(NamedTuple):
    """Bytes on the CPU."""

    largest: int
    """bytes of the largest single allocation"""
    peak: int
    """bytes of all that was held at once, beyond what was held before"""


def allocations_of(action: Callable[[], object]) -> Allocations:
    # The profiler counts at the allocator; a dispatch mode would not see into operations of torch.library.
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiled:
        result = action()
    assert profiled.profiler is not None
    events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    changes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    del result
    assert changes, "the profiler recorded no allocation"
    return Allocations(max(changes), max(accumulate(changes)))
