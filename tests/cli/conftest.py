"""A stand-in for the Python API: the command line is tested for what it asks of it and how it tells the answer."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

import isomerge
from models import model, noisy


@dataclass
class Written:
    out: Path
    files: tuple[str, ...] = ("model.safetensors",)
    tensors: int = 3
    bytes: int = 1_200_000
    sha256: str = "ab" * 32
    is_finished: bool = False

    def finish(self) -> None:
        self.is_finished = True


class Record(dict[str, Any]):
    """Read as a dict or as a result."""

    def to_dict(self) -> dict[str, Any]:
        return dict(self)


@dataclass
class Api:
    """Records every call; what it returns can be changed by a test."""

    calls: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = field(default_factory=dict)
    failure: BaseException | None = None
    record: dict[str, Any] = field(default_factory=dict)

    def called(self, name: str, *args: Any, **kwargs: Any) -> None:
        print("a library that prints")  # must never reach stdout
        self.calls[name] = (args, kwargs)
        if self.failure:
            raise self.failure

    def report(self) -> Record:
        return Record(self.record)

    def align(self, *args: Any, **kwargs: Any) -> Api:
        self.called("align", *args, **kwargs)
        return self

    def align_family(self, models: list[str], **kwargs: Any) -> Api:
        self.called("align_family", models, **kwargs)
        return self

    @property
    def members(self) -> list[Api]:
        return [self, self]

    def merge_recipe(self, *args: Any, **kwargs: Any) -> Api:
        self.called("merge_recipe", *args, **kwargs)
        return self

    def verify(self, written: Written) -> bool:
        self.called("verify", written)
        return True

    def save(self, out: Path, **kwargs: Any) -> Written:
        self.called("save", out, **kwargs)
        return Written(out)

    def write_report(self, written: Written) -> Path:
        self.called("write_report", written)
        return written.out / "report.html"

    def save_transform(self, path: Path) -> None:
        self.called("save_transform", path)

    def check(self, *models: str, **kwargs: Any) -> dict[str, Any]:
        self.called("check", *models, **kwargs)
        return self.record

    def selftest(self, model: str, **kwargs: Any) -> dict[str, Any]:
        self.called("selftest", model, **kwargs)
        return self.record

    def demo(self, out: Path, **kwargs: Any) -> dict[str, Any]:
        self.called("demo", out, **kwargs)
        return self.record

    def catalogue(self, kind: str) -> list[dict[str, Any]]:
        self.called("catalogue", kind)
        return [{"name": "linear", "summary": "weighted mean"}, {"name": "slerp", "summary": "along the sphere"}]


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> Api:
    fake = Api()
    for name in ("align", "align_family", "merge_recipe", "check", "selftest", "demo", "catalogue"):
        monkeypatch.setattr(isomerge, name, getattr(fake, name), raising=False)
    pages = lambda alignment, written, *_: ([written.out / "report.html"], [])  # noqa: E731
    monkeypatch.setattr("isomerge.alignment.record.write_pages", pages)
    return fake


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Run a command line inside an empty folder."""
    from isomerge.cli.app import app

    monkeypatch.chdir(tmp_path)

    def invoke(line: str) -> Result:
        return CliRunner().invoke(app, line.split())

    return invoke


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with two models that can be merged, `a` and `b`."""
    first = model("llama", 0, torch.float32)
    shutil.copytree(first, tmp_path / "a")
    shutil.copytree(noisy(first, 0.05), tmp_path / "b")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return tmp_path
