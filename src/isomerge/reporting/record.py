"""isomerge.json: what a run has measured and decided, kept beside the weights for `isomerge report`."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from isomerge import __version__, system
from isomerge.arguments import usable_path
from isomerge.checkpoint.local import broken_link
from isomerge.checkpoint.permissions import restrict_like
from isomerge.errors import CheckpointError, RequestError
from isomerge.json_files import JsonError, checked, read_json
from isomerge.results import plain

Record = Mapping[str, Any]
RECORD = "isomerge.json"
PAGE = "report.html"
FORMAT = 1
TEXT = "corpus"  # the kind of data that is cut anew for every model, so that its size counts no examples
KINDS = ("merge", "align", "adapters", "demo")


def record_text(record: Record) -> str:
    """The text of isomerge.json. Without a `run` nothing in it depends on the moment or the machine."""
    whole = {"format": FORMAT, "isomerge": __version__, **record}
    return json.dumps(plain(whole, strict=True), indent=1, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n"


def write_text(path: Path, text: str) -> None:
    """Write aside, then rename: a reader sees the old text or the new one, also after a power cut, and two writers do
    not meet."""
    aside = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with aside.open("wb") as file:
            file.write(text.encode("utf-8"))
            system.sync(file)
        restrict_like(aside, path, *(path.with_name(name) for name in (RECORD, "config.json", "adapter_config.json")))
        os.replace(aside, path)
        system.sync_folder(path.parent)
    finally:
        aside.unlink(missing_ok=True)


def read_record(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """The record of an output; every way in which there is none has its own words."""
    folder = usable_path(folder, "reading the record of")
    act = f"While reading the record of {folder}"
    if not folder.is_dir():
        why = "it is a file and not a folder" if folder.exists() else "there is no such folder"
        why = broken_link(folder) if folder.is_symlink() and not folder.exists() else why
        raise RequestError(f"{act}: {why}. Name a folder that isomerge has written.")
    path = folder / RECORD
    try:
        record = read_json(path)
    except FileNotFoundError as error:
        raise RequestError(f"{act}: there is no {RECORD} in it{_instead(folder)}") from error
    except (OSError, JsonError) as error:
        raise CheckpointError(
            f"{act}: {path} is cut off or not JSON ({error}). Copy it again, or write the model again."
        ) from error
    if not isinstance(record, dict) or record.get("kind") not in [*KINDS]:
        raise CheckpointError(f"{act}: {path} is not a record of isomerge. Copy it again, or write the model again.")
    if type(record.get("format")) is not int or record["format"] > FORMAT:
        raise CheckpointError(
            f"{act}: it has format {record.get('format')} and this isomerge reads up to {FORMAT}. "
            "Install a newer isomerge."
        )
    try:
        checked(RecordFile, record)
    except JsonError as error:
        raise CheckpointError(
            f"{act}: {path} is not as isomerge writes it: {error}. Copy it again, or write the model again."
        ) from error
    return record


class RecordFile(BaseModel):
    """What every kind of record has; the sections of the page read the rest."""

    isomerge: str
    notes: list[str] | None = None
    run: dict[str, Any] | None = None
    measured: dict[str, Any] | None = None
    inputs: list[dict[str, Any]] | None = None
    alignment: dict[str, Any] | None = None
    request: dict[str, Any] | None = None


@contextlib.contextmanager
def of_our_form(path: Path) -> Iterator[None]:
    """For code that reads a record as isomerge writes it: where something else stands in it, the record is damaged."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, ArithmeticError) as error:
        raise CheckpointError(
            f"While reading {path}: it is not as isomerge writes it ({type(error).__name__}: {first_line(error)}). "
            "Copy it again, or write the model again."
        ) from error


def first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [""])[0][:200]


def _instead(folder: Path) -> str:
    """What the folder seems to be, and what to do."""
    inside = sorted(path.name for path in folder.iterdir() if (path / RECORD).is_file())
    if inside:
        return f", but in {', '.join(inside[:5])}. Name one of these."
    if (folder / "isomerge.lock.json").is_file():
        return "; it was merged with report=False or by an older isomerge. Merge again, or see isomerge reproduce."
    return ", so it is no output of isomerge merge or align, or was written with report=False. Name another folder."
