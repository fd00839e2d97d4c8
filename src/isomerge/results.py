"""What public functions hand back: small typed values that read like the JSON they become.

>>> from dataclasses import dataclass
>>> @dataclass
... class Distance(Result):
...     before: float
...     after: float
>>> distance = Distance(0.9, 0.4)
>>> distance.after, distance["after"], distance.to_dict()
(0.4, 0.4, {'before': 0.9, 'after': 0.4})
"""

from __future__ import annotations

import importlib
import math
from collections.abc import ItemsView, Iterator, KeysView, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar


@dataclass
class Result:
    """Base of the typed results. Fields are the keys of `--json`; a name that starts with `_` stays out of it."""

    OPTIONAL: ClassVar[tuple[str, ...]] = ()
    """Fields that stay out of it where they are None."""

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts, lists and numbers, as `--json` prints them."""
        values = {each.name: getattr(self, each.name) for each in fields(self) if not each.name.startswith("_")}
        left_out = {name for name in self.OPTIONAL if values[name] is None}
        return {name: plain(value) for name, value in values.items() if name not in left_out}

    def _repr_html_(self) -> str:
        """For notebooks: the table that the command line prints."""
        shown = importlib.import_module("isomerge.reporting.notebook")  # which is above all that has results
        return str(shown.result_html(self.to_dict(), type(self).__name__))

    def __getitem__(self, key: str) -> Any:
        return self.to_dict()[key]

    def __contains__(self, key: object) -> bool:
        return key in self.to_dict()

    def __iter__(self) -> Iterator[str]:
        return iter(self.to_dict())

    def __len__(self) -> int:
        return len(self.to_dict())

    def get(self, key: str, default: Any = None) -> Any:
        return self.to_dict().get(key, default)

    def keys(self) -> KeysView[str]:
        return self.to_dict().keys()

    def items(self) -> ItemsView[str, Any]:
        return self.to_dict().items()


def plain(value: Any, *, strict: bool = False) -> Any:
    """Dicts, lists and texts instead of results, mappings, tuples and paths.

    `strict` leaves only what JSON can hold: infinities and NaN as null, array scalars as numbers, other things as text.

    >>> plain({"at": Path("a"), "loss": math.nan}, strict=True)
    {'at': 'a', 'loss': None}
    """
    if isinstance(value, Result):
        value = value.to_dict()
    if isinstance(value, Mapping):
        return {str(key): plain(one, strict=strict) for key, one in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(one, strict=strict) for one in value]
    if isinstance(value, Path):
        return str(value)
    if not strict or value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return plain(value.item(), strict=True) if hasattr(value, "item") else str(value)
