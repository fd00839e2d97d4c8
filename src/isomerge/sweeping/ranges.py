"""What a parameter runs over: `t=0:1:0.1`, `merge_method=ties,dare_ties`; for a search `density=0.1:1`,
`lambda=0.01:1:log`, and `t=0:1:gradient4` for four numbers from the first layer to the last."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal, InvalidOperation
from typing import Any

from isomerge.arguments import require_types
from isomerge.errors import RequestError

Value = float | int | bool | str | list[float] | None
MOST = 1000
"""So many points are measured unasked."""
HOW = "Write NAME=START:STOP:STEP, NAME=a,b,c, or NAME=LOW:HIGH for a search"

LONGEST = 100
"""Numbers of a gradient."""

DASHED = re.compile(r"\s*(\d*\.?\d+)\s*(?:-|–|\.\.\.?|to)\s*(\d*\.?\d+)\s*")
"""How a range is written elsewhere."""
GRADIENT = re.compile(r"gradient(\d+)")


@dataclass(frozen=True)
class Axis:
    """One parameter with the values to measure, or with the bounds to search between."""

    name: str
    values: tuple[Value, ...] = ()
    bounds: tuple[float, float] | None = None
    whole: bool = False
    """A search tries whole numbers only."""
    log: bool = False
    """A search steps by factors."""
    gradient: int = 0
    """So many numbers, from the first layer to the last; 0 for one number."""

    def record(self) -> dict[str, Any]:
        more: dict[str, Any] = {"log": True} if self.log else {}
        more |= {"gradient": self.gradient} if self.gradient else {}
        return {"name": self.name} | (
            {"bounds": list(self.bounds), **more} if self.bounds else {"values": list(self.values)}
        )


def read_axes(over: Mapping[str, Any] | Iterable[str], *, search: bool, force: bool = False) -> list[Axis]:
    """As the command line writes them, or a mapping from names to such a text, to a list, or to one value."""
    require_types(over=(over, Iterable))
    if isinstance(over, str):
        over = [over]
    axes = [_named(name, given, force) for name, given in over.items()] if isinstance(over, Mapping) else [
        _read(text, force) for text in over
    ]  # fmt: skip
    if not axes:
        raise RequestError(f"Sweeping: nothing to vary is named. {HOW}, as in t=0:1:0.1.", keys=("over",))
    axes = [replace(axis, name="merge_method") if axis.name == "method" else axis for axis in axes]
    names = [axis.name for axis in axes]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise RequestError(f"Sweeping: '{twice}' is named twice. Write all its values together.", keys=("over",))
    for axis in axes:
        _require_kind(axis, search)
    return axes


def _require_kind(axis: Axis, search: bool) -> None:
    if not search and axis.bounds is not None:
        low, high = axis.bounds
        raise RequestError(
            f"Sweeping over '{axis.name}={low}:{high}': it has no step. Write {axis.name}={low}:{high}:STEP, or search "
            "for the best value in between.",
            keys=("over", "search"),
        )


def _read(text: str, force: bool) -> Axis:
    require_types(over=(text, str))
    name, equals, given = text.partition("=")
    if not equals or not name.strip() or not given.strip():
        raise RequestError(f"over cannot be '{text}'. {HOW}.", keys=("over", "search"))
    return _named(name.strip(), given.strip(), force)


def _named(name: str, given: Any, force: bool) -> Axis:
    if isinstance(given, str):
        parts = given.split(":")
        numbers = [_number(part) for part in parts]
        if len(parts) in (2, 3) and None not in numbers:
            known = [number for number in numbers if number is not None]
            return _bounded(name, given, known) if len(parts) == 2 else Axis(name, _steps(name, given, known, force))
        ends = [number for number in numbers[:2] if number is not None]
        if len(parts) > 2 and len(ends) == 2 and all(word == "log" or GRADIENT.fullmatch(word) for word in parts[2:]):
            return _bounded(name, given, ends, parts[2:])
        if len(parts) > 1 and any(number is not None for number in numbers):
            raise RequestError(f"Sweeping over '{name}={given}': a range is made of numbers. {HOW}.")
        if dashed := DASHED.fullmatch(given):
            low, high = dashed.groups()
            raise RequestError(
                f"Sweeping over '{name}={given}': a range is written with colons. Write {name}={low}:{high}:STEP"
                f" ({name}=0:1:0.1, say), or {name}={low}:{high} for a search.",
                keys=("over", "search"),
            )
        words = [part.strip() for part in given.split(",")]
        if "" in words:
            raise RequestError(f"Sweeping over '{name}={given}': a value is missing between commas. {HOW}.")
        return Axis(name, tuple(read_value(word) for word in words))
    values = tuple(given) if isinstance(given, Iterable) else (given,)
    if not values:
        raise RequestError(f"Sweeping over '{name}': there is no value. Give at least one.")
    return Axis(name, tuple(_plain(value) for value in values))


def _steps(name: str, given: str, numbers: list[Decimal], force: bool) -> tuple[Value, ...]:
    """Decimal, so that the third step of 0.1 is 0.3; the stop belongs to them where a step hits it."""
    start, stop, step = numbers
    if step == 0:
        raise RequestError(f"Sweeping over '{name}={given}': the step is 0. Write one that leads from start to stop.")
    if (stop - start) * step < 0:
        raise RequestError(
            f"Sweeping over '{name}={given}': a step of {step} leads away from {stop}. Turn the sign of the step."
        )
    # A stop that was itself rounded, as in 0:1:0.3333333, is still hit.
    steps = (stop - start) / step + Decimal("1e-6")
    if steps > 10 * MOST**2:
        raise RequestError(f"Sweeping over '{name}={given}': these are too many values. Choose a larger step.")
    count = int(steps) + 1
    if count > MOST and not force:
        raise RequestError(
            f"Sweeping over '{name}={given}': these are {count} values. Choose a larger step, or set force.",
            keys=("force",),
        )
    whole = all(number == number.to_integral_value() and "." not in str(number) for number in numbers)
    return tuple(int(start + n * step) if whole else float(start + n * step) for n in range(count))


def _bounded(name: str, given: str, numbers: list[Decimal], words: Sequence[str] = ()) -> Axis:
    low, high = (int(n) if n == n.to_integral_value() and "." not in str(n) else float(n) for n in numbers)
    if low >= high:
        turned = f"Write {name}={high}:{low}" if low > high else "Write a smaller and a larger number"
        raise RequestError(f"Searching over '{name}={given}': there is nothing between {low} and {high}. {turned}.")
    log, lengths = "log" in words, [int(word[1]) for word in map(GRADIENT.fullmatch, words) if word]
    if log and low <= 0:
        raise RequestError(f"Searching over '{name}={given}': factors lead from numbers above 0 only. Raise {low}.")
    if any(not 2 <= length <= LONGEST for length in lengths):
        raise RequestError(
            f"Searching over '{name}={given}': a gradient has 2 to {LONGEST} numbers. Leave it out for one."
        )
    return Axis(name, bounds=(low, high), log=log, gradient=sum(lengths))


def _number(text: str) -> Decimal | None:
    try:
        number = Decimal(text.strip())
    except InvalidOperation:
        return None
    return number if number.is_finite() else None


def read_value(text: str) -> Value:
    """A word as YAML would read it.

    >>> [read_value(word) for word in ("1", "1e-3", "true", "null", "ties")]
    [1, 0.001, True, None, 'ties']
    """
    known: dict[str, Value] = {"true": True, "false": False, "null": None, "none": None}
    if text.lower() in known:
        return known[text.lower()]
    number = _number(text)
    if number is None:
        return text
    return int(text) if text.strip().lstrip("+-").isdigit() else float(number)


def _plain(value: Any) -> Value:
    """Numbers of numpy and torch as those of Python."""
    value = value.item() if hasattr(value, "item") else value
    if not isinstance(value, (bool, int, float, str, type(None))):
        raise RequestError(f"Sweeping over a {type(value).__name__}: values are numbers, words, true, false or none.")
    return value
