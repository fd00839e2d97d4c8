"""A picture of the top of a demo's report, for the README: make picture."""

from __future__ import annotations

import io
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from browser.chromium import chromium, resize

WIDTH = 1180
COLOURS = 64  # flat areas and text need no more, and the file stays small
LARGEST = 200_000


def main(page: Path, target: Path) -> None:
    """From the heading to the end of the table that compares the merged models, light, as on a desk."""
    from PIL import Image

    with chromium(WIDTH, "light") as driver:
        driver.get(page.resolve().as_uri())
        bottom = driver.execute_script("return document.getElementById('ways').getBoundingClientRect().bottom + 20")
        resize(driver, WIDTH, int(bottom), scale=2)
        picture = Image.open(io.BytesIO(driver.get_screenshot_as_png())).convert("RGB")
    target.parent.mkdir(parents=True, exist_ok=True)
    picture.quantize(COLOURS, dither=Image.Dither.NONE).save(target, optimize=True)
    size = target.stat().st_size
    assert size <= LARGEST, f"{target} has {size} bytes; at most {LARGEST} are to be committed"
    print(f"{target}: {picture.width} × {picture.height}, {size} bytes")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
