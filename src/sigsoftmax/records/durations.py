"""Lengths of time as text, in one form for terminal, pages and logs."""

__all__ = ["duration_text"]


def duration_text(seconds: float) -> str:
    """A length of time in two units at most, as ``2 h 5 min``; below ten seconds with two digits."""
    whole = round(seconds)
    if whole < 60:
        if seconds == 0.0 or seconds >= 9.95:
            return f"{whole} s"
        return f"{seconds:.2g} s" if seconds >= 0.01 else "<0.01 s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    if whole < 48 * 3600:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"
