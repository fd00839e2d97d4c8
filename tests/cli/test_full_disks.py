"""Files and disks that refuse: what was being done is named, and nothing that looks finished is left."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from cli.invoke import MERGE, MODELS, told


@pytest.mark.parametrize("encoding", ["utf-16", "utf-8-sig"])
def test_a_recipe_as_editors_and_shells_write_it_is_read(here: Path, encoding: str) -> None:
    """With a mark of its encoding in front, and lines that end as on another system."""
    text = f"merge_method: linear\n{MODELS}".replace("\n", "\r\n")
    Path("recipe.yml").write_bytes(text.encode(encoding))
    code, message = told("merge recipe.yml -o out")
    assert code == 0, message
    half = [load_file(here / name / "model.safetensors")["lm_head.weight"] for name in "ab"]
    assert torch.allclose(load_file(here / "out" / "model.safetensors")["lm_head.weight"], (half[0] + half[1]) / 2)


def test_a_recipe_that_may_not_be_read_is_named(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by taking rights away: who runs as root has them all the same."""
    Path("recipe.yml").write_text(f"merge_method: linear\n{MODELS}")
    opened = Path.open

    def refuse(path: Path, *how: Any, **more: Any) -> Any:
        if path.name == "recipe.yml":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return opened(path, *how, **more)

    monkeypatch.setattr(Path, "open", refuse)
    code, message = told("merge recipe.yml -o out")
    assert code == 2 and "recipe.yml: it may not be read. Give yourself the right to (chmod u+r)" in message


def test_a_disk_too_small_is_told_before_anything_is_written(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(here)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    code, message = told(MERGE)
    assert code == 1 and not (here / "out").exists()
    assert all(part in message for part in ("out", "disk is full or too small", "1,000 bytes", "Make room"))


def test_a_disk_that_fills_up_leaves_nothing_that_looks_finished(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit on the size of files stands for the disk's: the system refuses in the middle of a write."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        code, message = told(MERGE)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert code == 1 and "While writing out" in message and "then run again" in message
    assert not (here / "out").exists()


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS])
def test_a_folder_that_cannot_be_written_is_named(here: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Not by taking rights away: who runs as root has them all the same."""
    made = Path.mkdir

    def refuse(path: Path, *args: Any, **kwargs: Any) -> None:
        if path.name == "out":
            raise OSError(number, os.strerror(number), str(path))
        made(path, *args, **kwargs)

    monkeypatch.setattr(Path, "mkdir", refuse)
    code, message = told(MERGE)
    assert code == 1 and os.strerror(number) in message and "(out)" in message
    assert "Check that the folder can be written to, or name another" in message
