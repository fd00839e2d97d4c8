"""Ids of special tokens in config.json and generation_config.json, renumbered for another vocabulary."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from isomerge.merging.vocabulary.files import declared_rows

ID_KEY = re.compile(r"(?P<role>\w+)_token_(ids?|index)|(begin_)?suppress_tokens")


@dataclass(frozen=True)
class TokenIds:
    """How to read an id of the old vocabulary and what it is in the new one."""

    old: Mapping[int, str]
    """Id → token in the vocabulary the config was written for."""
    new: Mapping[str, int]
    """Token → id in the output."""
    roles: Mapping[str, int]
    """`eos_token` → its id in the output's tokenizer: who plays the part if the old token is gone."""

    def renumbered(self, key: str, value: Any) -> Any:
        """One entry of a config. An id without a successor becomes None, or leaves the list it is in."""
        if isinstance(value, list):
            ids = [self._one(key, entry) for entry in value]
            return [id for id in dict.fromkeys(ids) if id is not None]
        return self._one(key, value)

    def _one(self, key: str, value: Any) -> Any:
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            return value  # None, or the −1 that some configs write for it
        token = self.old.get(value)
        if token is not None and token in self.new:
            return self.new[token]
        match = ID_KEY.fullmatch(key)
        return self.roles.get(f"{match['role']}_token") if match else None


def config_changes(config: Mapping[str, Any], ids: TokenIds, size: int) -> dict[str, Any]:
    """vocab_size and special ids, at the top and in each part that describes the same vocabulary.

    >>> config_changes({"vocab_size": 3, "eos_token_id": 2}, TokenIds({2: "end"}, {"end": 0}, {}), 5)
    {'vocab_size': 5, 'eos_token_id': 0}
    """
    rows = declared_rows(config)
    unsaid = rows is None  # left out because it is the class's default
    nested = isinstance(config.get("text_config"), Mapping)
    changes = _changes(config, ids, rows, size)
    if unsaid and not nested:
        changes["vocab_size"] = size
    for key, part in config.items():
        # A part about images or sound may have a vocabulary of its own.
        if isinstance(part, Mapping) and (key == "text_config" or (not unsaid and part.get("vocab_size") == rows)):
            inner = _changes(part, ids, rows, size)
            if unsaid and key == "text_config":
                inner["vocab_size"] = size
            if inner:
                changes[key] = {**part, **inner}  # whole, so that replacing the part loses nothing of it
    return changes


def generation_changes(config: Mapping[str, Any], ids: TokenIds) -> dict[str, Any]:
    return _changes(config, ids, None, 0)


def _changes(part: Mapping[str, Any], ids: TokenIds, rows: int | None, size: int) -> dict[str, Any]:
    changes = {}
    for key, value in part.items():
        if key == "vocab_size" and value == rows:
            new = size
        elif ID_KEY.fullmatch(key):
            new = ids.renumbered(key, value)
        else:
            continue
        if new != value:
            changes[key] = new
    return changes
