"""A task over data, prepared once: how a module is scored, wherever its weights come from."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from isomerge.checkpoint import Checkpoint
from isomerge.checkpoint.base import Progress
from isomerge.data.base import Batch, Batches, Data
from isomerge.data.corpus import LONGEST
from isomerge.data.tokenizer import POSITIONS
from isomerge.errors import CheckpointError, RequestError
from isomerge.evaluation.example_scores import EveryNth, ExampleScores
from isomerge.evaluation.external_tasks import HARNESS, call_function, find_function, is_custom
from isomerge.evaluation.task_choice import choose_task, require_fitting, task_name
from isomerge.evaluation.tasks import ScoredRows, Task, TaskScore
from isomerge.running.passes import DataPass
from isomerge.running.stock import StockModel

BATCH = 64
LOGITS = 1 << 29  # bytes of logits that one batch of a language model may take

MEASURE_FACTS = ("metric_name", "higher_is_better", "examples", "data")
"""What a measure knows once something was scored, as far as it applies."""
Numbers = dict[str, float | None]
"""`loss` and `metric`; None where there is none."""


class LossMeasure:
    """Scores modules by a function that gives the loss."""

    task = "loss"

    def __init__(self, loss: Callable[[Any], Any]) -> None:
        self._loss = loss
        self.facts: dict[str, Any] = {}
        self.notes: list[str] = []

    def at(self, module: Any) -> Numbers:
        return {"loss": float(self._loss(module)), "metric": None}

    def scored(self, module: Any) -> tuple[Numbers, None]:
        """A function tells nothing of single examples."""
        return self.at(module), None

    def combined(self, modules: Sequence[Callable[[], Any]]) -> Numbers | None:
        """A loss says nothing about the mean prediction."""
        return None


class DataMeasure:
    """Scores modules of one class on data, read by one model's tokenizer or image settings."""

    def __init__(
        self,
        data: Data,
        task: str | None,
        checkpoint: Checkpoint,
        *,
        batch_size: int | None = None,
        limit: int | None = None,
        seed: int = 0,
        device: str = "cpu",
        part: EveryNth | None = None,
    ) -> None:
        if (task or "").startswith(HARNESS):
            raise RequestError(
                "Measuring between models: the tasks of lm-eval take too long for every point. Pass data instead.",
                keys=("data",),
            )
        custom = is_custom(task)
        self.task = task if custom and task else task_name(checkpoint.config, task, checkpoint.name)
        if not custom:
            require_fitting(data, self.task, checkpoint.name)
        self._function = find_function(self.task) if custom else None
        self._data, self._checkpoint, self._limit, self._device = data, checkpoint, limit, device
        size = batch_size or (BATCH if custom else usual_batch(checkpoint.config, self.task))
        self._batches = data.passes(
            checkpoint, batch_size=size, limit=limit, labels=True, seed=seed, device=device,
            task=None if custom else self.task,
        )  # fmt: skip
        if part is not None:
            self._batches = part.of(self._batches)
        self.facts: dict[str, Any] = {}
        """Some of MEASURE_FACTS."""
        self.notes = data.notes
        """What a reader of the numbers should know of the data; complete once it has been read."""

    def at(self, module: Any) -> Numbers:
        """Loss and metric of one module; NaN where it computes no numbers, which is an answer about a mixture."""
        if self._function is None:
            return self._numbers([lambda: module])
        score = call_function(self._function, self.task, module, self._batches())
        self.facts |= {"metric_name": score.metric_name, "higher_is_better": score.higher_is_better}
        return {"loss": score.loss, "metric": score.metric}

    def scored(self, module: Any) -> tuple[Numbers, ExampleScores | None]:
        """The same, and what every example scored; None where the task is a function."""
        if self._function is not None:
            return self.at(module), None
        rows: list[ScoredRows] = []
        counts: list[Tensor] = []
        numbers = self._numbers([lambda: module], rows, counts)
        return numbers, ExampleScores.of(rows, counts)

    def hold(self) -> None:
        """Prepare all batches now and keep them, for passes that run at the same time."""
        batches = list(self._batches())
        self._batches = lambda: iter(batches)

    def combined(self, modules: Sequence[Callable[[], Any]]) -> Numbers | None:
        """The same for the mean prediction of several, each asked for its module batch by batch; None where the task
        is a function, which has no predictions."""
        return None if self._function is not None else self._numbers(modules)

    def _numbers(
        self,
        modules: Sequence[Callable[[], Any]],
        rows: list[ScoredRows] | None = None,
        counts: list[Tensor] | None = None,
    ) -> Numbers:
        task, examples = self._scored(modules, rows=rows, counts=counts)
        score = task.result()
        self.facts |= {
            "metric_name": score.metric_name, "higher_is_better": score.higher_is_better, "examples": examples,
            "data": self.facts.get("data") or self._data.describe(),
        }  # fmt: skip
        if task.broken:
            return {"loss": math.nan, "metric": math.nan}
        return {"loss": score.loss, "metric": score.metric}

    def evaluate(self, module: Any, progress: Progress | None = None) -> tuple[TaskScore, int]:
        """Every metric of one module, and the number of examples; a module that computes no numbers is an error."""
        if self._function is not None:
            return call_function(self._function, self.task, module, self._batches()), self._data.used(self._limit)
        task, examples = self._scored([lambda: module], progress)
        require_numbers(task, self._checkpoint)
        return task.result(), examples

    def _scored(
        self,
        modules: Sequence[Callable[[], Any]],
        progress: Progress | None = None,
        rows: list[ScoredRows] | None = None,
        counts: list[Tensor] | None = None,
    ) -> tuple[Task, int]:
        def runner(module: Callable[[], Any]) -> Callable[[Batch], Any]:
            return lambda batch: StockModel(self._checkpoint, module(), self._device).run(batch)

        task = choose_task(self._checkpoint.config, self.task)()
        task.rows = rows
        runs = [runner(module) for module in modules]
        return score_batches(runs, task, self._batches, self._data, self._limit, progress, counts)


def score_batches(
    runs: Sequence[Callable[[Batch], Any]],
    task: Task,
    batches: Batches,
    data: Data,
    limit: int | None,
    progress: Progress | None = None,
    counts: list[Tensor] | None = None,
) -> tuple[Task, int]:
    """All batches through one model, or through several whose predictions are combined; and how many examples. Into
    `counts` goes how many predictions each of them has."""
    reading = DataPass(batches, hashed=False, progress=progress, total=data.used(limit), what="evaluating")
    for batch in reading:
        labels = labels_of(batch, data)
        predictions = []
        for run in runs:
            predicted, targets = task.predict(run(batch), labels)
            predictions.append(predicted)
        task.add(predictions[0] if len(predictions) == 1 else task.combine(predictions), targets)
        if counts is not None:
            counts.append(task.counts(labels))
    return task, reading.examples


def labels_of(batch: Batch, data: Data) -> Any:
    if batch.get("labels") is None:
        raise RequestError(
            f"Evaluating on {data.name}: it has no labels. Name their column with label, or use labelled data.",
            keys=("label",),
        )
    return batch["labels"]


def require_numbers(task: Task, checkpoint: Checkpoint) -> None:
    """Raise where some predictions are not a number."""
    if task.broken:
        raise CheckpointError(
            f"Evaluating {checkpoint.name}: {task.broken} of {task.count} predictions are not a number (NaN). "
            "Its weights hold NaN or numbers too large for their dtype; 'isomerge verify' says which tensor."
        )


def usual_batch(config: dict[str, Any], task: str) -> int:
    """As many examples as make logits of a bounded size."""
    if task not in ("causal-lm", "masked-lm", "seq2seq"):
        return BATCH
    positions = next((int(config[key]) for key in POSITIONS if config.get(key)), LONGEST)
    row = 4 * int(config.get("vocab_size") or 32000) * min(positions, LONGEST)
    return max(1, min(BATCH, LOGITS // row))
