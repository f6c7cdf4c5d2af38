"""JSON from files, read so that nothing in a file can raise anything but ValueError.

Python's own reader raises RecursionError for brackets inside brackets inside brackets, at a depth that depends on the
version of Python and on who calls, and what it has read may be too deep for those who print or compare it. Files are
therefore refused beyond a fixed depth.
"""

from __future__ import annotations

import json
from typing import Any

__all__ = ["DEEPEST", "TOO_DEEP", "check_nesting", "parse_json"]

DEEPEST = 64
"""levels of lists and objects inside each other; what this package writes has fewer than ten"""
TOO_DEEP = f"it is nested deeper than {DEEPEST} levels"


def parse_json(text: str | bytes) -> Any:
    """The value that a JSON text holds.

    A text that is no JSON raises JSONDecodeError; one that is nested too deeply, or holds a number or bytes that Python
    does not read, raises another ValueError.
    """
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError(TOO_DEEP) from None
    check_nesting(value)
    return value


def check_nesting(value: Any) -> None:
    """Refuse lists and mappings that are nested deeper than anything written here is."""
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(DEEPEST + 1):
        if not level:
            return
        inside = (container.values() if isinstance(container, dict) else container for container in level)
        level = [item for items in inside for item in items if isinstance(item, dict | list)]
    raise ValueError(TOO_DEEP)
