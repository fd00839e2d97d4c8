"""Code that lies beside a model: refused, unless the user asked for it.

`config.json` and `tokenizer_config.json` may name Python files of their own under `auto_map`. transformers runs them if
it is told to, and left alone it asks on the terminal. isomerge always tells it: no, except inside

    with isomerge.trust_remote_code():
        isomerge.evaluate("model-with-code", data)
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from isomerge.errors import CheckpointError

_TRUSTED: ContextVar[bool] = ContextVar("trust_remote_code", default=False)
_LOADED: dict[str, Any] = {}
"""Classes by their reference: a merged model is run by the code of its parents, and has none beside it."""


@contextlib.contextmanager
def trust_remote_code() -> Iterator[None]:
    """Inside this block, code that comes with a model or its tokenizer is run. Use it only for models you trust."""
    token = _TRUSTED.set(True)
    try:
        yield
    finally:
        _TRUSTED.reset(token)


def remote_code_allowed() -> bool:
    """What to pass to transformers as `trust_remote_code`."""
    return _TRUSTED.get()


def own_class(config: Mapping[str, Any], folder: Path | None) -> Any | None:
    """The class that a model brings along for its own `architectures`, where that is allowed; None if it has none."""
    reference = _reference(config)
    if reference is None or not remote_code_allowed():
        return None
    if folder is not None and (folder / f"{reference.split('.')[0]}.py").is_file():
        from transformers.dynamic_module_utils import get_class_from_dynamic_module

        _LOADED[reference] = get_class_from_dynamic_module(reference, str(folder))
    return _LOADED.get(reference)


def needs_own_code(config: Mapping[str, Any], what: str) -> CheckpointError | None:
    """The error for a model or tokenizer that no stock class can load and that names code of its own."""
    named = config.get("auto_map")
    if not named or remote_code_allowed():
        return None
    return CheckpointError(
        f"{what}: it needs Python code that comes with it (auto_map), and such code is not run unasked. Read that "
        "code, and if you trust it, allow it with trust_remote_code.",
        keys=("trust_remote_code",),
    )


def tokenizer_settings(folder: Path) -> dict[str, Any]:
    """tokenizer_config.json, as far as it can be read: what cannot is an error of whoever needs it."""
    try:
        settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return settings if isinstance(settings, dict) else {}


def _reference(config: Mapping[str, Any]) -> str | None:
    """`module.Class` of the first class in `architectures`."""
    named, names = config.get("auto_map"), config.get("architectures")
    if not isinstance(named, Mapping) or not (isinstance(names, list) and names):
        return None
    references = [value for value in named.values() if isinstance(value, str) and "--" not in value]
    return next((reference for reference in references if reference.split(".")[-1] == names[0]), None)
