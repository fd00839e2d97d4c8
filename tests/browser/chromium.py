"""A headless Chromium as Debian packages it, at a given width and with a given preference for light or dark."""

from __future__ import annotations

import base64
import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HEIGHT = 900


def require(program: str) -> str:
    """Where a program is. Missing, it is a failure: these tests are asked for by name."""
    found = shutil.which(program)
    assert found, f"{program} is missing: apt-get install chromium chromium-driver"
    return found


@contextlib.contextmanager
def chromium(width: int, scheme: str) -> Iterator[Any]:
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = require("chromium")
    # Inside a container Chromium may have neither the rights for its sandbox nor a large /dev/shm.
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(require("chromedriver")))
    try:
        resize(driver, width, HEIGHT)
        show_on(driver, "screen", scheme)
        yield driver
    finally:
        driver.quit()


def resize(driver: Any, width: int, height: int, *, scale: float = 1) -> None:
    """A phone's page is laid out as on a phone; `scale` has that many pixels for each."""
    size = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": width < 600}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)


def show_on(driver: Any, media: str, scheme: str) -> None:
    """Lay the page out for a screen or for paper."""
    preference = [{"name": "prefers-color-scheme", "value": scheme}]
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": media, "features": preference})


def printed(driver: Any, attempts: int = 3) -> bytes:
    """The page as a PDF. On a busy machine Chromium's printing process sometimes gives up; it is started again then."""
    from selenium.common.exceptions import WebDriverException

    for left in reversed(range(attempts)):
        try:
            return base64.b64decode(driver.execute_cdp_cmd("Page.printToPDF", {"printBackground": False})["data"])
        except WebDriverException as error:
            if not left or "Printing failed" not in str(error):
                raise
            driver.refresh()
    raise AssertionError("no attempt was made")


def picture(driver: Any, width: int, path: Path) -> None:
    """The whole page as a PNG, to be looked at."""
    height = driver.execute_script("return document.documentElement.scrollHeight")
    resize(driver, width, min(height, 8000))
    driver.save_screenshot(str(path))
    resize(driver, width, HEIGHT)
