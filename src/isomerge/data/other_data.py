"""Data to test on: what is named, or the part of the same data that is called test."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from isomerge.data.base import Data, DataSource
from isomerge.data.open import open_data
from isomerge.errors import RequestError

READ_ALIKE = ("text", "label", "kind", "length")


def open_named_test(test: DataSource, data: DataSource, tokenizer: Any = None) -> Data:
    """Other data, read in the same columns and lengths as `data` unless it names its own."""
    if isinstance(test, (str, os.PathLike)):
        test = {"path": test}
    if isinstance(data, Mapping) and isinstance(test, Mapping) and "path" in test:
        test = {**{key: data[key] for key in READ_ALIKE if key in data}, **test}
    return open_data(test, tokenizer=tokenizer, prefer="test")


def open_own_test(data: DataSource, opened: Data, tokenizer: Any = None) -> Data | None:
    """The part called test, if there is one and it is not what is `opened`."""
    own: Mapping[str, Any] = data if isinstance(data, Mapping) else {"path": data}
    if not isinstance(own.get("path"), (str, os.PathLike)):
        return None
    try:
        part = open_data({**own, "split": "test"}, tokenizer=tokenizer)
    except RequestError:  # there is no such part
        return None
    return part if part.sha256 != opened.sha256 else None
