"""The pictures of docs/architecture.md: the layers of the package and the road of a loss.

    python benchmarks/architecture_pictures.py            # writes docs/images/layers.svg and docs/images/road.svg

The layers are those of the import-linter contract in pyproject.toml, so that the picture cannot show others than those
that are enforced; a test compares the files with what this script makes.
"""

from __future__ import annotations

import re
import textwrap
import tomllib
from html import escape
from pathlib import Path

ROOT = Path(__file__).parents[1]
IMAGES = ROOT / "docs/images"
FONT = "font-family='system-ui, Segoe UI, Helvetica, Arial, sans-serif'"
INK, SOFT, LINE, PAPER = "#1d2433", "#5a6478", "#c3cad6", "#ffffff"
FILLS = ("#e8effc", "#eaf6ee", "#fdf3e1", "#f6ecf7")

SENTENCES = {
    "cli": "the commands; no logic",
    "experiments": "whole jobs: train, compare, reproduce, sweep, audit, demo",
    "report": "one page from records",
    "analysis": "spectra, capacity, audits",
    "lm": "language models",
    "integrations": "Hugging Face, ONNX",
    "layers": "OutputLayer, MixtureOutputLayer",
    "distributed": "vocabulary-parallel losses",
    "losses": "the road of every call: specify, lower, run",
    "backends": "how it is computed: reference, blocked, triton",
    "contract": "what losses and backends share: specification, operands, token arithmetic",
    "family": "what an output function is: phi, its slope, its properties",
    "terminal": "printing for people",
    "torch_internals": "interfaces of torch that are not public, with fallbacks",
    "records": "what runs write",
    "synthetic": "languages of known truth",
}

ROAD = (
    ("Public function", "losses/functional.py", "linear_cross_entropy(...)", "signature and docstring"),
    ("Specify", "contract/spec.py", "LossSpec + Operands", "options without tensors, interned"),
    ("Lower", "losses/lowering.py", "backend and path, once", "cached by (spec, signature); explain() tells why"),
    ("Run", "losses/op.py", "autograd function or op", "torch.compile keeps it whole"),
    ("Path", "backends/*/", "chunks, fused or reference", "a path refuses an option that it does not compute"),
    ("Kernel", "backends/triton/kernels/", "row statistics, gradient", "phi and token arithmetic transcribed once"),
)


def layers() -> list[list[str]]:
    """The layers of the contract, highest first; modules that share one are in one list."""
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]
    contracts = {contract["name"]: contract for contract in tools["importlinter"]["contracts"]}
    rows = contracts["imports go one way"]["layers"]
    return [re.findall(r"\w+", row) for row in rows if "__main__" not in row]


def _text(x: float, y: float, content: str, size: int, colour: str = INK, weight: int = 400) -> str:
    style = f"font-size='{size}' font-weight='{weight}' fill='{colour}' text-anchor='middle'"
    return f"<text x='{x:g}' y='{y:g}' {FONT} {style}>{escape(content)}</text>"


def _box(x: float, y: float, width: float, height: float, fill: str) -> str:
    place = f"x='{x:g}' y='{y:g}' width='{width:g}' height='{height:g}'"
    return f"<rect {place} rx='8' fill='{fill}' stroke='{LINE}'/>"


def _picture(width: int, height: int, title: str, parts: list[str]) -> str:
    head = f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width} {height}' role='img'>"
    # A background of its own: the page may be dark.
    background = _box(1, 1, width - 2, height - 2, PAPER)
    return "\n".join([head, f"<title>{escape(title)}</title>", background, *parts, "</svg>\n"])


def layers_picture() -> str:
    """Each layer is a row of boxes, the highest first; what stands beside the layers is a column."""
    rows, step, left, width = layers(), 64, 24, 700
    parts = []
    for number, row in enumerate(rows):
        y, each = 24 + step * number, (width - 12 * (len(row) - 1)) / len(row)
        for place, name in enumerate(row):
            x = left + place * (each + 12)
            parts.append(_box(x, y, each, 50, FILLS[number * len(FILLS) // len(rows)]))
            parts.append(_text(x + each / 2, y + 21, name, 15, weight=600))
            parts.append(_text(x + each / 2, y + 39, SENTENCES[name], 12, SOFT))
    bottom = 24 + step * len(rows)
    beside, from_y = left + width + 24, 24 + step * 2
    for place, name in enumerate(("records", "synthetic")):
        y = from_y + place * 150
        parts.append(_box(beside, y, 176, 138, FILLS[3]))
        parts.append(_text(beside + 88, y + 62, name, 15, weight=600))
        parts.append(_text(beside + 88, y + 82, SENTENCES[name], 12, SOFT))
    return _picture(beside + 200, bottom + 10, "The layers of the package", parts)


def road_picture() -> str:
    """The steps of a call from left to right, with the file that each stands in."""
    width, gap, top = 208, 28, 24
    parts = []
    for number, (step, file, what, note) in enumerate(ROAD):
        column, line = number % 3, number // 3
        x, y = 24 + column * (width + gap), top + line * 140
        middle = x + width / 2
        parts.append(_box(x, y, width, 108, FILLS[number // 2]))
        parts += [_text(middle, y + 25, f"{number + 1}. {step}", 15, weight=600), _text(middle, y + 47, what, 13)]
        for place, piece in enumerate(textwrap.wrap(note, 32)):
            parts.append(_text(middle, y + 68 + 14 * place, piece, 11, SOFT))
        parts.append(_text(middle, y + 100, file, 11, "#3457a6"))
        if column < 2:
            parts.append(_arrow(x + width + 4, y + 54, x + width + gap - 4, y + 54))
    first, last = 24 + width / 2, 24 + 2 * (width + gap) + width / 2
    parts.append(f"<path d='M {last:g} 136 V 148 H {first:g} V 158' fill='none' stroke='{SOFT}' stroke-width='1.5'/>")
    parts.append(_head(first, 162, down=True))
    return _picture(48 + 3 * width + 2 * gap, top + 272, "The road of a loss: specify, lower, run", parts)


def _arrow(x: float, y: float, to_x: float, to_y: float) -> str:
    return f"<path d='M {x:g} {y:g} L {to_x - 6:g} {to_y:g}' stroke='{SOFT}' stroke-width='1.5'/>" + _head(to_x, to_y)


def _head(x: float, y: float, *, down: bool = False) -> str:
    back, aside = 7, 4
    corners = [(x - aside, y - back), (x + aside, y - back)] if down else [(x - back, y - aside), (x - back, y + aside)]
    points = " ".join(f"{a:g},{b:g}" for a, b in [(x, y), *corners])
    return f"<polygon points='{points}' fill='{SOFT}'/>"


PICTURES = {"layers.svg": layers_picture, "road.svg": road_picture}


def main() -> None:
    for name, draw in PICTURES.items():
        (IMAGES / name).write_text(draw(), encoding="utf-8")


if __name__ == "__main__":
    main()
