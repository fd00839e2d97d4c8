"""Outputs of every kind, made once by the command line from tiny stock models, and their pages as they are parsed."""

from __future__ import annotations

import atexit
import json
import shutil
import tempfile
from dataclasses import dataclass, field
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import torch
from typer.testing import Result

import commands
from adapters.peft_adapters import save_adapter
from models import model, save_base
from samples import digits

VOID = {"meta", "link", "input", "br", "img", "wbr"}


def verb(*arguments: Any, folder: Path | None = None) -> Result:
    """Run a verb beside the models of the workshop, so that they have short names."""
    return commands.verb(*arguments, folder=folder or workshop())


def said(*arguments: Any, folder: Path | None = None) -> dict[str, Any]:
    """The record that a verb prints; it must have gone well."""
    return commands.said(*arguments, folder=folder or workshop())


@cache
def workshop() -> Path:
    """A folder with three models; outputs are made beside them."""
    folder = Path(tempfile.mkdtemp(prefix="isomerge-report-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    for name, seed in (("first", 0), ("second", 1), ("third", 2)):
        shutil.copytree(model("vit", seed, torch.float32), folder / name)
    return folder


@cache
def made(kind: str) -> Path:
    """An output: `ties` (with a base), `aligned-merge`, `align`, `reconstruct` or `adapters`."""
    out = workshop() / f"out-{kind}"
    if kind == "ties":
        said("merge", "second", "third", "--method", "ties", "--base", "first", "-o", out)
    elif kind == "aligned-merge":
        said("merge", "first", "second", "--align", "-o", out)
    elif kind == "align":
        said("align", "second", "first", "-o", out)
    elif kind == "reconstruct":
        said("merge", "first", "second", "--method", "reconstruct", "--align", "--data", digits(), "-o", out)
    elif kind == "adapters":
        said("merge", *adapters(), "-o", out)
    return out


@cache
def adapters() -> list[str]:
    from peft import LoraConfig

    base = save_base("llama", workshop() / "base")
    config = LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "up_proj"])
    return [save_adapter(base, workshop() / f"adapter-{seed}", config, seed=seed).name for seed in (1, 2)]


def record_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "isomerge.json").read_text())


@dataclass
class Page(HTMLParser):
    """What a browser would see: elements with their attributes, the text of tables, the embedded record."""

    text: str
    elements: list[tuple[str, dict[str, str | None]]] = field(default_factory=list)
    words: list[str] = field(default_factory=list)
    embedded: str = ""
    tables: dict[str, list[list[str]]] = field(default_factory=dict)
    open: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()
        self._table: list[list[str]] = []
        self._data = False
        self.feed(self.text)

    @property
    def record(self) -> dict[str, Any]:
        return json.loads(self.embedded)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        known = dict(attrs)
        self.elements.append((tag, known))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "table":
            self._table = self.tables.setdefault(str(known.get("aria-label")), [])
        elif tag == "tr":
            self._table.append([])
        elif tag in ("td", "th"):
            self._table[-1].append("")
        self._data = tag == "script" and known.get("id") == "record"

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, f"</{tag}> closes another element"
        self._data = False

    def handle_data(self, data: str) -> None:
        if self._data:
            self.embedded += data
        elif self.open and self.open[-1] not in ("script", "style"):
            self.words.append(data)
            if any(tag in ("td", "th") for tag in self.open):
                self._table[-1][-1] += data.strip()


def page_of(folder: Path) -> Page:
    return Page((folder / "report.html").read_text(encoding="utf-8"))
