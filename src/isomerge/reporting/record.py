"""isomerge.json: what a run has measured and decided, kept beside the weights for `isomerge report`."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from isomerge import __version__
from isomerge.errors import CheckpointError, RequestError
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
    """Write aside, then rename: a reader sees the old text or the new one, and two writers do not meet."""
    aside = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        aside.write_text(text, encoding="utf-8")
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)


def read_record(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """The record of an output; every way in which there is none has its own words."""
    folder = Path(folder).expanduser()
    act = f"While reading the record of {folder}"
    if not folder.is_dir():
        raise RequestError(f"{act}: there is no such folder. Name a folder that isomerge has written.")
    path = folder / RECORD
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise RequestError(f"{act}: there is no {RECORD} in it{_instead(folder)}") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{act}: {path} is cut off or not JSON ({error}). Copy it again, or write the model again."
        ) from error
    if not isinstance(record, dict) or record.get("kind") not in KINDS:
        raise CheckpointError(f"{act}: {path} is not a record of isomerge. Copy it again, or write the model again.")
    if type(record.get("format")) is not int or record["format"] > FORMAT:
        raise CheckpointError(
            f"{act}: it has format {record.get('format')} and this isomerge reads up to {FORMAT}. "
            "Install a newer isomerge."
        )
    return record


def _instead(folder: Path) -> str:
    """What the folder seems to be, and what to do."""
    inside = sorted(path.name for path in folder.iterdir() if (path / RECORD).is_file())
    if inside:
        return f", but in {', '.join(inside[:5])}. Name one of these."
    if (folder / "isomerge.lock.json").is_file():
        return "; it was merged with report=False or by an older isomerge. Merge again, or see isomerge reproduce."
    return ", so it is no output of isomerge merge or align, or was written with report=False. Name another folder."
