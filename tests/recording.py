"""Results that a function of the package returned while a test ran."""

from typing import Any

import pytest


def record_results(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> list[Any]:
    """The results, from now on, of the function or method that ``owner`` has under a name; it does what it did."""
    results: list[Any] = []
    original = getattr(owner, name)

    def record(*arguments: Any, **options: Any) -> Any:
        results.append(original(*arguments, **options))
        return results[-1]

    monkeypatch.setattr(owner, name, record)
    return results
