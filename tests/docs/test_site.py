"""The site: every page is in it, every public name is explained, and its pictures are what their script draws."""

from __future__ import annotations

import re
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import isomerge
from docs.blocks import ROOT

DOCS = ROOT / "docs"
SETTINGS = yaml.safe_load((ROOT / "mkdocs.yml").read_text())


def entries(nav: list[dict[str, Any]]) -> Iterator[str]:
    for entry in nav:
        for target in entry.values():
            yield from entries(target) if isinstance(target, list) else [target]


def test_every_page_is_in_the_navigation_and_every_entry_is_a_page() -> None:
    named = set(entries(SETTINGS["nav"]))
    pages = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    # A folder with a page of its own is reached from there.
    listing = [page for page in named if page.endswith("/index.md")]
    below = {page for page in pages for index in listing if page.startswith(index.removesuffix("index.md"))}
    assert pages - (below - set(listing)) == named
    for index in listing:
        text, folder = (DOCS / index).read_text(), (DOCS / index).parent
        assert all(f"({page.name})" in text for page in folder.glob("*.md") if page.name != "index.md")


def test_the_build_is_strict_and_fonts_are_not_fetched() -> None:
    assert SETTINGS["strict"] is True
    assert SETTINGS["theme"]["font"] is False


def test_every_public_name_is_on_the_page_about_python() -> None:
    text = (DOCS / "api.md").read_text()
    headings = re.findall(r"^::: (\S+)\n    options: {heading: isomerge\.([\w.]+)", text, re.MULTILINE)
    errors = {"IsomergeError", "RequestError"}  # with all the others, under isomerge.errors
    explained = [name for _, name in headings if name not in ("errors", "results.Result")]
    assert sorted(explained) == sorted(set(isomerge.__all__) - {"__version__"} - errors)
    for place, name in headings:
        if name in explained:
            value = getattr(isomerge, name)
            assert place == f"{value.__module__}.{name}"


@pytest.mark.parametrize("name", ["permutation", "assignment", "invertible", "balanced", "rotary", "stream", "scale"])
def test_a_picture_is_what_its_script_draws(name: str) -> None:
    drawn = runpy.run_path(str(ROOT / "examples" / "symmetry_pictures.py"))["PICTURES"][name]()
    stored = (DOCS / "images" / "symmetry" / f"{name}.svg").read_text()
    assert numbers_apart(drawn, stored) <= 0.11  # one in the last digit: processors round differently
    assert f"images/symmetry/{name}.svg" in (DOCS / "symmetry.md").read_text()


def numbers_apart(first: str, second: str) -> float:
    """The largest difference between the numbers of two texts that are the same otherwise."""
    number = re.compile(r"-?\d+\.\d+")
    assert number.sub("", first) == number.sub("", second)
    pairs = zip(number.findall(first), number.findall(second), strict=True)
    return max((abs(float(a) - float(b)) for a, b in pairs), default=0.0)


def test_pictures_have_a_title_and_stand_on_a_card() -> None:
    for path in (DOCS / "images" / "symmetry").glob("*.svg"):
        text = path.read_text()
        assert 'role="img"' in text and "<title>" in text and 'fill="#ffffff"' in text


@pytest.mark.parametrize("page", ["faq.md", "guides/strangers.md", "guides/llms-on-a-laptop.md"])
def test_measured_numbers_are_those_of_the_benchmarks(page: str) -> None:
    """A page that repeats a number must follow when it is measured again."""
    measured = (DOCS / "benchmarks.md").read_text() + (ROOT / "README.md").read_text()
    own = {"0.6", "0.5"} if page.startswith("guides/llms") else set()  # options of its recipe
    told = set(re.findall(r"(?<![\w.])\d+\.\d+(?![\w.])", (DOCS / page).read_text())) - own
    assert told and not {number for number in told if number not in measured}


def test_examples_are_named_in_the_documents() -> None:
    texts = "".join(path.read_text() for path in DOCS.rglob("*.md"))
    for path in Path(ROOT / "examples").iterdir():
        if path.suffix in (".py", ".ipynb"):
            assert path.name in texts, path.name
