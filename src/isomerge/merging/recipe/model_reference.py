"""How a recipe names a model: a path or hub id, with a revision, with an adapter on top."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from isomerge.addresses import require_no_secrets


@dataclass(frozen=True, eq=False)
class ModelReference:
    """`path@revision+adapter@revision`, of which only the path must be there.

    >>> ModelReference.parse("org/model@main+org/adapter")
    ModelReference(path='org/model', revision='main', adapter='org/adapter', adapter_revision=None)
    """

    path: str
    revision: str | None = None
    adapter: str | None = None
    adapter_revision: str | None = None
    _places: tuple[str | None, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        places = (_place(self.path), self.revision, _place(self.adapter), self.adapter_revision)
        object.__setattr__(self, "_places", places)

    def __eq__(self, other: object) -> bool:
        """Two ways to write the same folder are one model."""
        return isinstance(other, ModelReference) and self._places == other._places

    def __hash__(self) -> int:
        return hash(self._places)

    @classmethod
    def parse(cls, text: str) -> ModelReference:
        """Read a reference. What exists on this machine is a path, whatever characters are in it."""
        require_no_secrets(text, "reading model")
        model, adapter = _at_plus(text)
        path, revision = _at_sign(model)
        if adapter is None:
            return cls(path, revision)
        return cls(path, revision, *_at_sign(adapter))

    @classmethod
    def read(cls, value: object) -> ModelReference | None:
        """What a recipe says, as it was written or as it was read; None where it names no model."""
        if isinstance(value, ModelReference):
            return value
        try:
            return cls.parse(value.strip()) if isinstance(value, str) and value.strip() else None
        except ValueError:
            return None

    def __str__(self) -> str:
        text = f"{self.path}@{self.revision}" if self.revision else self.path
        if self.adapter:
            text += f"+{self.adapter}" + (f"@{self.adapter_revision}" if self.adapter_revision else "")
        return text


def _place(text: str | None) -> str | None:
    """Where a path on this machine leads; anything else is its own name."""
    return os.path.realpath(os.path.expanduser(text)) if text and _exists(text) else text


def _exists(text: str) -> bool:
    try:
        return bool(text) and Path(text).expanduser().exists()
    except (OSError, ValueError, RuntimeError):  # too long for a path, a zero in it, or no such user's home
        return False


def _at_plus(text: str) -> tuple[str, str | None]:
    """The model and the adapter. Of several plus signs, the one after which a folder's name ends."""
    if "+" not in text or _exists(text):
        return text, None
    signs = [i for i, letter in enumerate(text) if letter == "+"]
    known = [i for i in signs if _exists(text[:i])]
    if len(signs) > 1 and not known:
        raise ValueError(
            f"'{text}' has {len(signs)} plus signs and none of them follows a folder that exists; write model+adapter"
        )
    sign = known[-1] if known else signs[0]
    model, adapter = text[:sign], text[sign + 1 :]
    if not model or not adapter:
        raise ValueError(f"'{text}' has nothing {'before' if not model else 'after'} the plus; write model+adapter")
    return model, adapter


def _at_sign(text: str) -> tuple[str, str | None]:
    """The path and the revision."""
    if "@" not in text or _exists(text):
        return text, None
    path, _, revision = text.rpartition("@")
    if not path or not revision or ("@" in path and not _exists(path)):
        raise ValueError(f"'{text}' is not of the form path@revision")
    return path, revision
