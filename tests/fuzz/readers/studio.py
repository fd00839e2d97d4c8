"""What studio reads in its folder, and what a page may ask of it."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from fuzz import mutators as m
from fuzz.readers.checkpoints import with_few_tensors
from fuzz.readers.registry import Seed, content_of, reader

RECIPE = """merge_method: ties
base_model: a
models:
- model: b
  parameters: {weight: 0.5}
parameters: {density: 0.5}
"""
FORM = {
    "method": "ties", "base": "a", "align": "", "options": {"density": "0.3"},
    "models": [{"model": "b", "weight": "0.5"}],
}  # fmt: skip
POINTS = {"models": ["a", "b"], "points": [{"parameters": {"t": 0.0}, "loss": 1.0}], "best": {"t": 0.0}}


def _folder() -> Seed:
    from models import model

    files: Seed = {}
    for name, seed in (("a", 0), ("b", 1)):
        content = with_few_tensors(content_of(model("llama", seed, torch.float32)))
        files |= {f"{name}/{file}": data for file, data in content.items()}
    made = {"kind": "merge", "method": "linear", "inputs": [{"reference": name, "role": "model"} for name in "ab"]}
    return {
        **files, "out/isomerge.json": json.dumps(made).encode(), "out/sweep.json": json.dumps(POINTS).encode(),
        "out/model.safetensors": files["a/model.safetensors"], "out.yml": RECIPE.encode(),
    }  # fmt: skip


def _asked() -> list[Seed]:
    """Requests as the page makes them."""
    asked: list[dict[str, Any]] = [
        {"do": "recipe", "text": RECIPE}, {"do": "recipe", "text": RECIPE, "form": FORM},
        {"do": "open", "path": "out.yml"},
        {"do": "check", "models": ["a", "b"]}, {"do": "points", "path": "out"}, {"do": "lineage", "path": "out"},
        {"do": "cancel", "number": 1}, {"do": "merge", "text": RECIPE, "out": "new/x"}, {"do": "again", "out": "out"},
        {"do": "sweep", "text": RECIPE, "out": "new", "over": "density=0:1:0.5", "data": "a"}, {"do": "listing"},
    ]  # fmt: skip
    return [{"request.json": json.dumps(one).encode(), **_folder()} for one in asked]


@contextlib.contextmanager
def _inside(folder: Path) -> Iterator[Any]:
    from isomerge.studio.actions import Actions
    from isomerge.studio.folder import Folder
    from isomerge.studio.guard import FileLinks

    before = Path.cwd()
    os.chdir(folder)  # recipes name models relative to it
    try:
        yield Actions(Folder(folder), FileLinks("token"), NoJobs())  # type: ignore[arg-type]
    finally:
        os.chdir(before)


class NoJobs:
    """Instead of those that start programs."""

    def add(self, words: list[str], out: str | None = None) -> Any:
        assert all(isinstance(word, str) for word in words)
        return type("Job", (), {"number": 1})

    def cancel(self, number: int) -> None:
        assert isinstance(number, int)


@reader("studio", lambda: [_folder()], {
    "a/config.json": m.mutate_json, "out/isomerge.json": m.mutate_json, "out/sweep.json": m.mutate_json,
    "out.yml": m.mutate_yaml,
})  # fmt: skip
def read_folder(folder: Path) -> None:
    """Whatever lies there, the rest is listed."""
    from isomerge.errors import IsomergeError

    with _inside(folder) as actions:
        listing = actions.listing({})
        json.dumps(listing, allow_nan=False)
        assert [one["path"] for one in listing["models"]][-1] == "b"
        actions.lineage({"path": "out"})
        for do, given in (("points", {"path": "out"}), ("recipe", {"text": (folder / "out.yml").read_text("latin-1")})):
            with contextlib.suppress(IsomergeError):
                json.dumps(getattr(actions, do)(given), allow_nan=False)


@reader("request", _asked, {"request.json": m.mutate_json})
def read_request(folder: Path) -> None:
    from isomerge.json_files import parse_json
    from isomerge.studio.app import READING, WRITING

    try:
        given = parse_json((folder / "request.json").read_bytes())
    except ValueError:
        return  # the page answers so before any action
    do = given.pop("do", None) if isinstance(given, dict) else None
    if isinstance(do, str) and do in (*READING, *WRITING) and do != "runs":
        with _inside(folder) as actions, contextlib.suppress(OSError):  # which the page answers too
            json.dumps(getattr(actions, do)(given), allow_nan=False)
