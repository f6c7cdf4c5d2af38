"""The least KL that each output head can reach at a width, on distributions that are known."""

from sigsoftmax.analysis.capacity.curves import CapacityConfig, capacity_curves
from sigsoftmax.analysis.capacity.fits import fit

__all__ = ["CapacityConfig", "capacity_curves", "fit"]
