"""Pictures of a report and of an audit for the README: `make screenshots`.

Runs the demo, trains and audits a small model, opens both pages in a headless Chromium and writes
docs/images/report.webp and docs/images/audit.webp. `--report PAGE` and `--audit PAGE` take pages that exist already.
Needs playwright and a Chromium (`make browser`).
"""

from __future__ import annotations

import argparse
import io
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from PIL import Image

IMAGES = Path(__file__).parents[1] / "docs" / "images"
PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
VIEW = {"width": 1200, "height": 1000}
SHOWN_WIDTH = 900
"""pixels of the picture; the README shows two side by side"""
DRAWN = "html[data-drawn=all]"
AUDIT = ("--heads", "softmax,sigsoftmax,gss(k=0),mos(K=4)", "--workers", "1")


def sigsoftmax(folder: Path, *arguments: str) -> None:
    print(f"sigsoftmax {' '.join(arguments)}", flush=True)
    subprocess.run([sys.executable, "-m", "sigsoftmax", *arguments], cwd=folder, check=True, stdout=subprocess.DEVNULL)


def demo_page(folder: Path) -> Path:
    sigsoftmax(folder, "demo", "--out", "demo")
    sigsoftmax(folder, "report", "demo", "-o", "demo.html")
    return folder / "demo.html"


def audit_page(folder: Path) -> Path:
    sigsoftmax(folder, "train", "language-softmax")
    sigsoftmax(folder, "audit", "runs/language-softmax/141", *AUDIT, "--out", "audit")
    sigsoftmax(folder, "report", "audit", "-o", "audit.html")
    return folder / "audit.html"


def picture(page: Path, section: str, out: Path) -> None:
    """The part of a page that a reader sees in a window, from a section on."""
    from playwright.sync_api import sync_playwright

    installed = next(filter(None, map(shutil.which, PROGRAMS)), None)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=installed, args=["--no-sandbox"])
        tab = browser.new_page(viewport=VIEW, color_scheme="light")
        tab.goto(page.resolve().as_uri())
        tab.wait_for_selector(DRAWN, timeout=120_000)
        if section:
            tab.evaluate("id => document.getElementById(id).scrollIntoView()", section)
            tab.wait_for_timeout(1000)
        shot = tab.screenshot()
        browser.close()
    with Image.open(io.BytesIO(shot)) as image:
        height = round(image.height * SHOWN_WIDTH / image.width)
        out.parent.mkdir(parents=True, exist_ok=True)
        image.convert("RGB").resize((SHOWN_WIDTH, height), Image.Resampling.LANCZOS).save(out, "WEBP", quality=85)
    print(f"{out.name}: {out.stat().st_size // 1024} KiB")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--report", type=Path, help="the page of a demo that was run before")
    parser.add_argument("--audit", type=Path, help="a report of an audit that was made before")
    parser.add_argument("--out", type=Path, default=IMAGES, help="folder of the pictures")
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        picture(given.report or demo_page(Path(folder)), "", given.out / "report.webp")
        picture(given.audit or audit_page(Path(folder)), "audits", given.out / "audit.webp")
    return 0


if __name__ == "__main__":
    sys.exit(main())
