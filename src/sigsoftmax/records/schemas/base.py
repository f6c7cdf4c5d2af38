"""The base of all payloads: what was measured, and how much of it."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from operator import attrgetter
from typing import Any, ClassVar

__all__ = ["Extent", "MeasuredPayload"]

Extent = Mapping[Hashable, float]
"""the amount measured of each part of a subject; a part that was not measured is left out"""


class MeasuredPayload:
    """A payload that tells what it measured, and how much of it. Payloads are frozen dataclasses."""

    KIND: ClassVar[str]
    VERSION: ClassVar[int]
    SUBJECT: ClassVar[tuple[str, ...]]
    """fields that say what was measured: payloads that agree in all of them are measurements of the same thing"""
    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def subject(self) -> Hashable:
        return attrgetter(*self.SUBJECT)(self)

    @property
    def extent(self) -> Extent:
        """Nothing to compare, unless a kind says otherwise: then a later measurement replaces an earlier one."""
        return {}
