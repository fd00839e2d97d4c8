"""A folder with tiny models, the page over it, and how a person goes about it."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from models import plain_tokenizer, save_model


def make_models(folder: Path) -> Path:
    """A base, two fine-tunes of it, a stranger, and texts to measure on."""
    tokenizer = plain_tokenizer()
    base = save_model(folder / "base", tokenizer, seed=0)
    for seed, name in enumerate(("tuned-for-code", "tuned-for-prose"), start=1):
        shutil.copytree(folder / "base", folder / name)
        _stir(folder / name / "model.safetensors", seed)
    save_model(folder / "stranger", tokenizer, seed=3)
    (folder / "texts.txt").write_text("the cat sat on the mat\n" * 40)
    assert base.tensors
    return folder


def _stir(weights: Path, seed: int) -> None:
    from safetensors.torch import load_file, save_file

    generator = torch.Generator().manual_seed(seed)
    found = load_file(weights)
    stirred = {
        name: tensor + 0.01 * tensor.std(correction=0) * torch.randn(tensor.shape, generator=generator)
        for name, tensor in sorted(found.items())
    }
    save_file(stirred, weights, metadata={"format": "pt"})


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[str]:
    """The link of a page that `isomerge studio` serves meanwhile."""
    command = [sys.executable, "-m", "isomerge", "studio", str(folder), "--no-browser", "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield json.loads(process.stdout.readline())["url"]
    finally:
        process.terminate()
        assert process.wait(60) == 0


def until(holds: Callable[[], Any], what: str, seconds: float = 300) -> Any:
    """What `holds` gives, as soon as it is something."""
    from selenium.common.exceptions import StaleElementReferenceException

    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with contextlib.suppress(StaleElementReferenceException):
            if found := holds():
                return found
        time.sleep(0.05)
    raise AssertionError(f"this did not happen: {what}")


def one(driver: Any, query: str) -> Any:
    """The visible element, once it is there."""
    from selenium.webdriver.common.by import By

    def shown() -> Any:
        return next((e for e in driver.find_elements(By.CSS_SELECTOR, query) if e.is_displayed()), None)

    return until(shown, f"{query} is shown")


def text_of(driver: Any, query: str) -> str:
    return driver.execute_script("return document.querySelector(arguments[0])?.innerText ?? ''", query)


def ended(driver: Any, out: str) -> Any:
    """The row of a run that is over."""
    query = ", ".join(f"#jobs > [data-state={state}]" for state in ("done", "failed", "cancelled"))

    def over() -> Any:
        return next((row for row in driver.find_elements("css selector", query) if f" → {out}" in row.text), None)

    return until(over, f"the run of {out} ends")
