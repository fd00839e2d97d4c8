"""The pictures of docs/studio.md: python tests/browser/studio_picture.py docs/images."""

from __future__ import annotations

import io
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from browser.chromium import chromium, resize
from browser.studio_page import ended, make_models, one, serving, text_of, until

COLOURS = 48  # flat areas and text need no more, and the files stay small
LARGEST = 200_000


def main(target: Path) -> None:
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "models"
        folder.mkdir()
        with serving(make_models(folder)) as link:
            with chromium(1180, "light") as driver:
                _choose(driver, link)
                one(driver, "#merge").click()
                one(driver, "#jobs [data-state=running] progress[max]")
                _save(driver, 1180, "run", target / "studio.png")
                ended(driver, "merged")
            with chromium(390, "dark") as driver:
                _choose(driver, link)
                _save(driver, 390, "choose", target / "studio-phone.png")


def _choose(driver: Any, link: str) -> None:
    driver.get(link)
    for name in ("tuned-for-code", "tuned-for-prose"):
        one(driver, f"#models input[value={name}]").click()
    one(driver, "#check").click()
    one(driver, ".verdict")
    until(lambda: "Ready" in text_of(driver, "#judgement"), "the recipe is judged")


def _save(driver: Any, width: int, last: str, path: Path) -> None:
    """From the heading to the end of a section."""
    from PIL import Image

    bottom = f"return document.getElementById('{last}').getBoundingClientRect().bottom + scrollY + 14"
    resize(driver, width, int(driver.execute_script(bottom)), scale=1.5)
    driver.execute_script("scrollTo(0, 0); document.activeElement.blur()")
    shot = Image.open(io.BytesIO(driver.get_screenshot_as_png())).convert("RGB")
    shot.quantize(COLOURS, dither=Image.Dither.NONE).save(path, optimize=True)
    size = path.stat().st_size
    assert size <= LARGEST, f"{path} has {size} bytes; at most {LARGEST} are to be committed"
    print(f"{path}: {shot.width} × {shot.height}, {size} bytes")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
