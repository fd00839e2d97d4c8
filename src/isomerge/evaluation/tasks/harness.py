"""Tasks of the lm-evaluation-harness, through its own package."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from isomerge.data.tokenizer import tokenizer_for
from isomerge.errors import RequestError
from isomerge.evaluation.tasks.model import Loaded

# The number a task is usually quoted by, best first.
USUAL = ("acc_norm,none", "acc,none", "exact_match,strict-match", "exact_match,none", "f1,none", "word_perplexity,none")


def run_harness(loaded: Loaded, name: str, *, batch_size: int, limit: int | None, tokenizer: Any) -> dict[str, Any]:
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
        found = simple_evaluate(model=model, tasks=tasks, limit=limit, task_manager=manager)
    except (KeyError, ValueError) as error:
        raise RequestError(f"Evaluating on lm-eval:{name}: the harness refused ({error}).") from error
    results = found["results"]
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
    return {
        "loss": None,
        "metric": numbers[quoted],
        "metric_name": quoted,
        "higher_is_better": "perplexity" not in quoted,
        "metrics": numbers,
    }


def _tasks(given: str) -> tuple[list[str], list[str]]:
    """Names of tasks, and the folders of those that are files of one's own."""
    names, folders = [], []
    for part in given.split(","):
        if not part.endswith((".yaml", ".yml")):
            names.append(part)
            continue
        found = re.search(r"^task:\s*(\S+)", Path(part).read_text(), re.MULTILINE) if Path(part).is_file() else None
        if found is None:
            raise RequestError(f"Evaluating on lm-eval:{part}: there is no such file, or it has no line 'task: NAME'.")
        names.append(found[1].strip("'\""))
        folders.append(str(Path(part).resolve().parent))
    return names, folders
