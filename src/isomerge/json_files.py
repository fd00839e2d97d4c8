"""The one way to read JSON and short text: bounded, and what is no JSON is a `JsonError` with its cause.

What it lets through can be copied, compared and written again: it nests at most 64 deep, whole numbers fit a float, and
text can be encoded.
"""

from __future__ import annotations

import errno
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from pydantic import BaseModel, ValidationError

LARGEST = 256 << 20
"""Bytes of a file. The vocabularies of the largest tokenizers take 40 MB."""
DEEPEST = 64
DIGITS = 300
"""Of a whole number, so that it can be made a float."""

Model = TypeVar("Model", bound="BaseModel")


class JsonError(ValueError):
    """Why something is no JSON that can be used, as the end of a sentence."""


def read_json(path: Path, *, infinite: bool = False) -> Any:
    """The content of a JSON file; raises OSError where it cannot be read, and JsonError.

    `infinite` lets Infinity through, which no JSON has and some configs mean.
    """
    return parse_json(_content(path), infinite=infinite)


def read_text(path: Path, *, errors: str = "strict") -> str:
    """Other text, with a newline at the ends of lines. What is larger, or has no end, is an OSError."""
    content = _content(path)
    if len(content) > LARGEST:
        raise OSError(errno.EFBIG, f"it is larger than {LARGEST >> 20} MiB", str(path))
    return content.decode("utf-8", errors).replace("\r\n", "\n").replace("\r", "\n")


def _content(path: Path) -> bytes:
    """At most one byte more than is allowed. A pipe would be waited for, and a device has no end."""
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise OSError(errno.EINVAL, "it is a pipe or a device and not a file", str(path))
    with path.open("rb") as file:
        return file.read(LARGEST + 1)


def parse_json(content: bytes | str, *, infinite: bool = False, unique: bool = False) -> Any:
    """
    >>> parse_json('{"a": [1, 2]}')
    {'a': [1, 2]}
    >>> parse_json("[" * 100_000)
    Traceback (most recent call last):
    isomerge.json_files.JsonError: it is nested more than 64 deep

    `unique` refuses a name that occurs twice in one object; otherwise the last one counts, as everywhere else.
    """
    if len(content) > LARGEST:
        raise JsonError(f"it is larger than {LARGEST >> 20} MiB")
    try:
        text = content if isinstance(content, str) else content.decode("utf-8-sig")
        value = json.loads(
            text,
            parse_constant=_infinite if infinite else _no_constant,
            parse_int=_whole,
            parse_float=float if infinite else _finite,
            object_pairs_hook=_without_duplicates if unique else None,
        )
    except UnicodeDecodeError as error:
        raise JsonError(f"it is not JSON (byte {error.start} is not UTF-8)") from error
    except RecursionError as error:
        raise JsonError(f"it is nested more than {DEEPEST} deep") from error
    except JsonError:
        raise
    except ValueError as error:
        raise JsonError(f"it is not valid JSON ({error})") from error
    _require_shallow(value)
    if "\\ud" in text.lower():
        _require_encodable(value)
    return value


def checked(model: type[Model], value: Any) -> Model:
    """The value as a pydantic model; a JsonError names the first place that is wrong, and what is there."""
    from pydantic import ValidationError

    try:
        return model.model_validate(value, strict=True)
    except ValidationError as error:
        raise JsonError(first_fault(error)) from error


def faults(model: type[BaseModel], value: Any) -> list[str]:
    """Everything that keeps a value from being this model; nothing if it is one."""
    from pydantic import ValidationError

    try:
        model.model_validate(value, strict=True)
    except ValidationError as error:
        return [_fault(one) for one in error.errors(include_url=False)]
    return []


def first_fault(error: ValidationError) -> str:
    """The first complaint of pydantic, as the end of a sentence."""
    return _fault(error.errors(include_url=False)[0])


def _fault(one: Any) -> str:
    shown = repr(one["input"])
    where = ".".join(str(step) for step in one["loc"]) or "it"
    if one["type"] == "missing":
        return f"'{where}' is missing"
    cause = one["msg"].removeprefix("Value error, ").replace("Input should be", "it must be")
    return f"'{where}' is {shown if len(shown) <= 60 else shown[:57] + '…'}: {cause}"


def _require_shallow(value: Any) -> None:
    level = [value]
    for _ in range(DEEPEST + 1):
        level = [
            child
            for one in level
            for child in (one.values() if isinstance(one, dict) else one if isinstance(one, list) else ())
            if isinstance(child, (dict, list))
        ]
        if not level:
            return
    raise JsonError(f"it is nested more than {DEEPEST} deep")


def _require_encodable(value: Any) -> None:
    """JSON can spell half of a character that takes two; no file could hold it."""
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        raise JsonError("a text in it holds half a surrogate pair, which is no character") from error


def _whole(digits: str) -> int | float:
    if len(digits) > DIGITS:
        raise JsonError(f"a number in it has {len(digits)} digits")
    return int(digits) if digits != "-0" else -0.0  # which is no whole number to other readers of JSON


def _finite(digits: str) -> float:
    if not math.isfinite(value := float(digits)):
        raise JsonError(f"the number {digits[:20]} in it is too large")
    return value


def _no_constant(word: str) -> float:
    raise JsonError(f"it is not valid JSON (it holds {word})")


def _infinite(word: str) -> float:
    if word == "NaN":
        raise JsonError("a setting is NaN: correct it")
    return float(word)


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise JsonError("it is not valid JSON (a name occurs twice)")
    return result
