"""Tasks from elsewhere: a function of the user's own, `module:function`, and those of the lm-evaluation-harness."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from isomerge.data.base import Batch
from isomerge.data.tokenizer import tokenizer_for
from isomerge.errors import IsomergeError, RequestError, did_you_mean
from isomerge.evaluation.tasks import TaskScore
from isomerge.running.stock import StockModel

HARNESS = "lm-eval:"
# The number that a task of the harness is usually quoted by, best first.
USUAL = ("acc_norm,none", "acc,none", "exact_match,strict-match", "exact_match,none", "f1,none", "word_perplexity,none")


def is_external(task: str | None) -> bool:
    """Whether a task is a function or one of the harness's, and not one that the model's class names."""
    return is_custom(task) or (task or "").startswith(HARNESS)


def is_custom(task: str | None) -> bool:
    return task is not None and ":" in task and not task.startswith(HARNESS)


def find_function(task: str) -> Callable[..., Any]:
    """`module.path:function`; the module is also looked for in the current folder."""
    place, _, name = task.partition(":")
    here = str(Path.cwd())
    added = here not in sys.path
    if added:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(place)
    except Exception as error:  # whatever the user's own module raises while it is imported
        step, keys = "Correct the module; the traceback shows where.", ["debug"]
        if isinstance(error, ModuleNotFoundError) and error.name == place.partition(".")[0]:
            step, keys = f"Run in the folder that holds {error.name}.py, or name its folder in PYTHONPATH.", []
        message = f"Importing '{place}' for the task {task}: {type(error).__name__}: {error}. {step}"
        raise RequestError(message, keys=keys) from error
    finally:
        if added:
            sys.path.remove(here)
    function = getattr(module, name, None)
    if not callable(function):
        known = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        message = f"Task {task}: module '{place}' has no function '{name}'. {did_you_mean(name, known)}"
        raise RequestError(message, keys=("task",))
    return function  # type: ignore[no-any-return]


def call_function(function: Callable[..., Any], name: str, module: Any, batches: Iterator[Batch] | None) -> TaskScore:
    """Call it as f(model, batches), or f(model) without data. A number is the metric; a mapping may hold more."""
    try:
        answer = function(module) if batches is None else function(module, batches)
    except (IsomergeError, MemoryError):  # not the function's own: data is read while it runs
        raise
    except Exception as error:  # whatever the user's own function raises
        called = "f(model)" if batches is None else "f(model, batches)"
        raise RequestError(
            f"Task {name}: the function, called as {called}, failed with {type(error).__name__}: {error}. Correct it; "
            "the traceback shows where.",
            keys=("debug",),
        ) from error
    values = dict(answer) if isinstance(answer, Mapping) else {"metric": answer}
    wrong = [key for key in ("loss", "metric") if values.get(key) is not None and not _is_number(values[key])]
    if wrong or not ({"loss", "metric"} & values.keys()):
        raise RequestError(
            f"Task {name}: the function gave {type(answer).__name__}. It must return a number, or a mapping with "
            "'metric' or 'loss' (numbers), and perhaps 'metric_name' and 'higher_is_better'."
        )
    loss, metric = (None if values.get(key) is None else float(values[key]) for key in ("loss", "metric"))
    metric_name = str(values.get("metric_name", name.partition(":")[2]))
    metrics = {k: float(v) for k, v in values.items() if _is_number(v) and k != "higher_is_better"}
    return TaskScore(loss, metric, metric_name, bool(values.get("higher_is_better", True)), metrics)


def _is_number(value: Any) -> bool:
    """Infinity is one too: a model may be that bad."""
    try:
        float(value)
    except (TypeError, ValueError):
        return False
    return not isinstance(value, (str, bytes))


def run_harness(loaded: StockModel, name: str, *, batch_size: int, limit: int | None, tokenizer: Any) -> TaskScore:
    """`lm-eval:hellaswag`, or the harness's own file for a task; several with commas between.

    The data comes from the harness.
    """
    try:
        from lm_eval import simple_evaluate
        from lm_eval.models.huggingface import HFLM
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise RequestError(
            f"Evaluating {loaded.checkpoint.name} on lm-eval:{name}: the package 'lm-eval' is not installed, or a part "
            f"of it is missing ({error}). Install it with pip install isomerge[eval]."
        ) from error
    words = tokenizer_for(loaded.checkpoint, tokenizer)
    model = HFLM(pretrained=loaded.module, tokenizer=words, batch_size=batch_size)
    tasks, folders = _tasks(name)
    try:
        manager = TaskManager(include_path=folders or None)
        answer = simple_evaluate(model=model, tasks=tasks, limit=limit, task_manager=manager)
    except (KeyError, ValueError) as error:
        raise RequestError(f"Evaluating on lm-eval:{name}: the harness refused ({error}).") from error
    results = answer["results"]
    numbers = {
        f"{task}/{key}": float(value)
        for task, values in results.items()
        for key, value in values.items()
        if isinstance(value, (int, float)) and "stderr" not in key
    }
    first = tasks[0]
    quoted = next((f"{first}/{key}" for key in USUAL if f"{first}/{key}" in numbers), next(iter(numbers), None))
    if quoted is None:
        raise RequestError(f"Evaluating on lm-eval:{name}: the harness gave no number.")
    return TaskScore(None, numbers[quoted], quoted, "perplexity" not in quoted, numbers)


def _tasks(given: str) -> tuple[list[str], list[str]]:
    """Names of tasks, and the folders of those that are files of one's own."""
    names, folders = [], []
    for part in given.split(","):
        if not part.endswith((".yaml", ".yml")):
            names.append(part)
            continue
        named = re.search(r"^task:\s*(\S+)", Path(part).read_text(), re.MULTILINE) if Path(part).is_file() else None
        if named is None:
            raise RequestError(f"Evaluating on lm-eval:{part}: there is no such file, or it has no line 'task: NAME'.")
        names.append(named[1].strip("'\""))
        folders.append(str(Path(part).resolve().parent))
    return names, folders
