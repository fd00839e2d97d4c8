"""Names that are markup, links, commands or orders to a terminal stay names wherever they are shown."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from markdown_it import MarkdownIt
from safetensors.torch import load_file, save_file

import isomerge
from isomerge.errors import IsomergeError
from models import model, noisy

ESCAPES = "\x1b]0;owned\x07\x1b[2J\x9b31m\r\u202e"
MARKUP = "<img src=x onerror=alert(1)>[click](javascript:alert)`|**b**[/red][link=x]y"
NAME = f"a{ESCAPES}{MARKUP}".replace("/", "")  # a folder cannot have a slash in its name
TENSOR = f"extra{ESCAPES}{MARKUP}"
LICENCE = "<script>alert(2)</script> | `x` [l](http://x)"
OUT = "out$(touch pwned);<b>"
CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models with hostile names of their own and of a tensor, merged by the command line."""
    place = tmp_path_factory.mktemp("hostile")
    first = model("llama")
    for source, name in ((first, NAME), (noisy(first), f"b{NAME}")):
        shutil.copytree(source, place / name)
        state = load_file(place / name / "model.safetensors")
        state[TENSOR] = state["lm_head.weight"].clone()
        save_file(state, place / name / "model.safetensors", metadata={"format": "pt"})
        licence = json.dumps(LICENCE + name[0])
        (place / name / "README.md").write_text(f"---\nlicense: {licence}\n---\n", encoding="utf-8")
    return place


def run(folder: Path, *words: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "isomerge", *words], cwd=folder, capture_output=True, text=True, timeout=300
    )
    return done.returncode, done.stdout + done.stderr


@pytest.fixture(scope="module")
def merged(folder: Path) -> tuple[Path, str]:
    code, printed = run(folder, "merge", NAME, f"b{NAME}", "-o", OUT)
    assert code == 0, printed
    return folder / OUT, printed


@pytest.mark.slow
def test_the_terminal_gets_no_orders(folder: Path, merged: tuple[Path, str]) -> None:
    assert not CONTROLS.search(merged[1]) and "\\x1b]0;owned" in merged[1]
    for words in (
        ["check", NAME, f"b{NAME}"],
        ["plan", NAME, f"b{NAME}"],
        ["verify", NAME],
        ["merge", NAME, "-o", OUT],
    ):
        _, printed = run(folder, *words)
        assert not CONTROLS.search(printed), repr(printed)


def test_the_message_of_an_error_has_no_orders(folder: Path) -> None:
    with pytest.raises(IsomergeError) as caught:
        isomerge.open_checkpoint(folder / f"gone{ESCAPES}")
    assert not CONTROLS.search(str(caught.value)) and "\\u202e" in str(caught.value)


def test_the_card_renders_names_as_text(merged: tuple[Path, str]) -> None:
    """As CommonMark with tables renders it, HTML allowed, as on the hub."""
    text = (merged[0] / "README.md").read_text(encoding="utf-8")
    assert not CONTROLS.search(text)
    tags = Tags()
    tags.feed(MarkdownIt("commonmark", {"html": True}).enable("table").render(text.split("---\n", 2)[2]))
    assert not tags.seen & {"img", "script", "a", "b"}, tags.seen
    assert "<img src=x onerror=alert(1)>" in html.unescape(tags.text) and "<b>" in tags.text
    assert "| `" in text and len({row.count(" | ") for row in text.splitlines() if row.startswith("| `")}) == 1


def test_a_command_of_the_card_runs_no_other(merged: tuple[Path, str], tmp_path: Path) -> None:
    text = (merged[0] / "README.md").read_text(encoding="utf-8")
    line = next(line for line in text.splitlines() if line.startswith("isomerge reproduce"))
    done = subprocess.run(["sh", "-c", line.replace("isomerge", "printf %s,", 1)], cwd=tmp_path, capture_output=True)
    assert done.stdout.decode() == f"reproduce,{OUT}," and not list(tmp_path.iterdir())


def test_the_page_shows_names_as_text(merged: tuple[Path, str]) -> None:
    tags = Tags()
    tags.feed((merged[0] / "report.html").read_text(encoding="utf-8"))
    assert "img" not in tags.seen and "onerror" not in tags.attributes
    assert "<img src=x onerror=alert(1)>" in tags.text and not CONTROLS.search(tags.text)


class Tags(HTMLParser):
    """The elements of a page, the names of their attributes, and the text that is shown."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()
        self.attributes: set[str] = set()
        self.text, self._hidden = "", False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)
        self.attributes |= {name for name, _ in attrs}
        self._hidden = tag in ("script", "style")

    def handle_endtag(self, tag: str) -> None:
        self._hidden = False

    def handle_data(self, data: str) -> None:
        if not self._hidden:
            self.text += data
