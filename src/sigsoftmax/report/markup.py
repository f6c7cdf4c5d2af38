"""HTML built from elements, so that whatever came from data is escaped unless it was built here.

tag("p", "a < b ", tag("code", command), class_="note")   ->   <p class="note">a &lt; b <code>...</code></p>
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterable
from typing import Any

from sigsoftmax.terminal import ACTIVE

__all__ = ["Child", "Markup", "join", "plot_text", "script_json", "tag", "visible"]

VOID = frozenset({"br", "hr", "input", "link", "meta"})
NONCHARACTERS = re.compile("[\ufffe\uffff]")
"""HTML and SVG may not hold them"""


class Markup(str):
    """HTML that needs no escaping."""

    __slots__ = ()


Child = str | int | Markup | None | Iterable["Child"]


def visible(text: str) -> str:
    """The text, with a replacement character for what no page may hold, or would act on or hide instead of drawing it.

    Not with an escape, as on a terminal: inside JSON that would be read as the character again.
    """
    return NONCHARACTERS.sub("\ufffd", ACTIVE.sub("\ufffd", text))


def join(*children: Child) -> Markup:
    """Children side by side; a plain text is escaped, None is left out."""
    parts: list[str] = []
    for child in children:
        if child is None:
            continue
        if isinstance(child, Markup):
            parts.append(child)
        elif isinstance(child, str | int):
            parts.append(html.escape(visible(str(child))))
        else:
            parts.append(join(*child))
    return Markup("".join(parts))


def tag(name: str, /, *children: Child, **attributes: str | int | bool | None) -> Markup:
    """An element. Attributes drop a final underscore and write others as hyphens; None and False leave one out."""
    written = ""
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        key = key.rstrip("_").replace("_", "-")
        written += f" {key}" if value is True else f' {key}="{html.escape(visible(str(value)))}"'
    if name in VOID:
        return Markup(f"<{name}{written}>")
    return Markup(f"<{name}{written}>{join(*children)}</{name}>")


def script_json(value: Any) -> Markup:
    """JSON that may stand inside a script element: no text in it can end the element or begin a comment."""
    text = visible(json.dumps(value, allow_nan=False, ensure_ascii=False, separators=(",", ":")))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)


def plot_text(text: str) -> str:
    """A text for plotly, which reads tags and entities in names and labels and %{...} in templates."""
    return html.escape(visible(text), quote=False).replace("%{", "%&#123;")
