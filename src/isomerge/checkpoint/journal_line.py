"""One line of a journal as it is read: anything but what isomerge writes counts as never written."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from isomerge.checkpoint.journal import Commit, JournalLine, checksum
from isomerge.json_files import JsonError, parse_json


def _inside(name: str) -> str:
    """A journal names files of one folder: nobody can make a rename leave it."""
    path = PurePosixPath(name)
    if not name or path.is_absolute() or ".." in path.parts or "\0" in name or "\\" in name:
        raise ValueError(f"{name!r} is not a file of the folder")
    return name


FileName = Annotated[str, AfterValidator(_inside)]
Count = Annotated[int, Field(ge=0, lt=2**63)]


class StoredCommit(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")
    files: Annotated[list[FileName], Field(min_length=1)]
    old: list[FileName] = []


class StoredJournalLine(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")
    key: str | None = None
    tensor: str | None = None
    hash: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] | None = None
    vanished: Count = 0
    overflow: Count = 0
    commit: StoredCommit | None = None
    undone: bool = False


def read_line(line: bytes) -> JournalLine | None:
    try:
        entry = parse_json(line)
        if not isinstance(entry, dict) or entry.pop("check", None) != checksum(entry):
            return None
        stored = StoredJournalLine.model_validate(entry)
    except (JsonError, ValidationError):
        return None
    commit = Commit(**stored.commit.model_dump()) if stored.commit is not None else None
    return JournalLine(**stored.model_dump(exclude={"commit"}), commit=commit)
