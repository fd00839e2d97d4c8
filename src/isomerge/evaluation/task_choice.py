"""From the name of a task, or from a model's class, to the task."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from isomerge.arguments import require_choice
from isomerge.choices import TASKS
from isomerge.data.base import Data
from isomerge.data.task_heads import label_names, task_of
from isomerge.errors import RequestError
from isomerge.evaluation.tasks import (
    ClassificationTask,
    LanguageTask,
    MultiLabelTask,
    RegressionTask,
    TaggingTask,
    Task,
)

OTHERS = ("module:function", "lm-eval:NAME")
KIND_NAMES = {"texts": "texts", "pairs": "pairs of texts", "tokens": "tagged words", "corpus": "running text"}
IMAGES = "a folder or archive of images in class folders"
TEXTS = "texts: .txt, .jsonl, .csv, .tsv or CoNLL, or a folder of those"


def task_name(config: Mapping[str, Any], wanted: str | None, model: str) -> str:
    """The task of the model's class, which `wanted` must agree with."""
    if wanted is not None:
        require_choice("task", wanted, [*TASKS, *OTHERS])
    if not config:
        raise RequestError(
            f"Evaluating {model}: it has no config.json, so no stock class can run it. Name the folder of a whole "
            "model."
        )
    own = task_of(config)
    named = (config.get("architectures") or ["no class at all"])[0]
    if own is None:
        raise RequestError(
            f"Evaluating {model}: config.json names {named}, which has no head for any of {', '.join(TASKS)}. Use the "
            "model with its head, or your own function as the task: module:function.",
            keys=("task",),
        )
    if wanted is not None and wanted != own:
        raise RequestError(
            f"Evaluating {model} as '{wanted}': config.json names {named}, which is for '{own}'. Leave task out, or "
            f"name a model with a head for '{wanted}'.",
            keys=("task",),
        )
    return own


def choose_task(config: Mapping[str, Any], name: str) -> Callable[[], Task]:
    """A fresh task, with all counts at zero, at every call."""
    if name == "image":
        return lambda: ClassificationTask("image")
    if name == "sequence":
        several = config.get("problem_type") == "multi_label_classification"
        return MultiLabelTask if several else lambda: ClassificationTask("sequence")
    if name == "token":
        names = label_names(config)
        return lambda: TaggingTask(names)
    if name == "regression":
        return RegressionTask
    return lambda: LanguageTask(name)


def require_fitting(data: Data, task: str, model: str) -> None:
    """Refuse images for a model of texts and the other way round, before anything is decoded."""
    if data.kind == "batches":
        return
    given = KIND_NAMES.get(data.kind, data.kind)
    if (data.kind == "images") != (task == "image"):
        reads, wanted = ("images", IMAGES) if task == "image" else ("texts", TEXTS)
        raise RequestError(
            f"Evaluating {model} on {data.name}: the model reads {reads} and the data is {given}. Name {wanted}; "
            "or a model that reads this data."
        )
    if task == "token" and data.kind != "tokens":
        raise RequestError(
            f"Evaluating {model} on {data.name}: it needs words with a tag each, and the data is {given}. Use a "
            "CoNLL file, or .jsonl with the fields 'tokens' and 'tags'."
        )
    if task in ("sequence", "regression") and data.kind == "corpus":
        raise RequestError(
            f"Evaluating {model} on {data.name}: the data is running text without labels. Name a table (.csv, .tsv, "
            ".jsonl) with a column of texts and one of labels; the options text and label name them.",
            keys=("text", "label"),
        )
