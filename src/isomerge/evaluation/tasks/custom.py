"""A measure of the user's own: `package.module:function`, called with the model and the batches."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from isomerge.data.base import Batch
from isomerge.errors import IsomergeError, RequestError, did_you_mean

Measure = Callable[..., Any]


def is_custom(task: str | None) -> bool:
    return task is not None and ":" in task and not task.startswith("lm-eval:")


def find_function(task: str) -> Measure:
    """`module.path:function`; the module is also looked for in the current folder."""
    place, _, name = task.partition(":")
    here = str(Path.cwd())
    added = here not in sys.path
    if added:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(place)
    except Exception as error:  # whatever the user's own module raises while it is imported
        step = "Correct the module, and see its traceback with --debug."
        if isinstance(error, ModuleNotFoundError) and error.name == place.partition(".")[0]:
            step = f"Run in the folder that holds {error.name}.py, or name its folder in PYTHONPATH."
        raise RequestError(f"Importing '{place}' for --task {task}: {type(error).__name__}: {error}. {step}") from error
    finally:
        if added:
            sys.path.remove(here)
    found = getattr(module, name, None)
    if not callable(found):
        known = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise RequestError(f"--task {task}: module '{place}' has no function '{name}'. {did_you_mean(name, known)}")
    return found  # type: ignore[no-any-return]


def measure(function: Measure, name: str, module: Any, batches: Iterator[Batch] | None) -> dict[str, Any]:
    """Call it as f(model, batches), or f(model) without data. A number is the metric; a mapping may hold more."""
    try:
        found = function(module) if batches is None else function(module, batches)
    except (IsomergeError, MemoryError):  # not the function's own: data is read while it runs
        raise
    except Exception as error:  # whatever the user's own function raises
        called = "f(model)" if batches is None else "f(model, batches)"
        raise RequestError(
            f"--task {name}: the function, called as {called}, failed with {type(error).__name__}: {error}. Correct "
            "it; --debug shows its traceback."
        ) from error
    values = dict(found) if isinstance(found, Mapping) else {"metric": found}
    wrong = [key for key in ("loss", "metric") if values.get(key) is not None and not _is_number(values[key])]
    if wrong or not ({"loss", "metric"} & values.keys()):
        raise RequestError(
            f"--task {name}: the function gave {type(found).__name__}. It must return a number, or a mapping with "
            "'metric' or 'loss' (numbers), and perhaps 'metric_name' and 'higher_is_better'."
        )
    loss, metric = (None if values.get(key) is None else float(values[key]) for key in ("loss", "metric"))
    return {
        "loss": loss,
        "metric": metric,
        "metric_name": str(values.get("metric_name", name.partition(":")[2])),
        "higher_is_better": bool(values.get("higher_is_better", True)),
        "metrics": {k: float(v) for k, v in values.items() if _is_number(v) and k != "higher_is_better"},
    }


def _is_number(value: Any) -> bool:
    """Infinity is one too: a model may be that bad."""
    try:
        float(value)
    except (TypeError, ValueError):
        return False
    return not isinstance(value, (str, bytes))
