"""Greedy soup: models join an average while its score on labelled data does not fall."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from isomerge.checkpoint.memory import MemoryCheckpoint
from isomerge.merging.whole.method import Solved, Work, whole_method


@whole_method(
    data="one",
    passes="every model, then every average that is tried",
    labels=True,
    reference="https://arxiv.org/abs/2203.05482",
)
def greedy_soup(work: Work, *, tolerance: float = 0.0) -> Solved:
    """Average the models that help: from the best on labelled data down, each stays unless the score falls.

    Options:
        tolerance: by how much the score may fall
    """
    from isomerge.merging.aligned import align_models
    from isomerge.merging.statistics import greedy_soup as choose

    first, aligned = work.models[0], None
    if work.align is not None:
        aligned = align_models(work.models, first, device=work.device, progress=work.progress, **work.align)
    models = [aligned.as_checkpoint(model) for model in work.models] if aligned else list(work.models)
    changes = aligned.config_changes if aligned else {}
    score = Score(work, {**first.config, **changes})
    soup = choose(models, score, tolerance=tolerance)
    names = [model.name for model in work.models]
    chosen = [names[place] for place in soup.chosen]
    scores = [{"model": name, "score": score.sign * own} for name, own in zip(names, soup.own, strict=True)]
    record = {
        "metric": score.metric,
        "score": score.sign * soup.score,
        "scores": scores,
        "chosen": chosen,
    }
    said = [f"{name} {score.sign * own:.4f}" for name, own in zip(names, soup.own, strict=True)]
    inside = ", ".join(said[place] for place in soup.chosen)
    outside = ", ".join(told for place, told in enumerate(said) if place not in soup.chosen)
    notes = [*(aligned.notes if aligned else ()), f"in the soup, each with its own {score.metric}: {inside}"]
    notes += [f"left out of the soup: {outside}"] if outside else []
    return Solved(
        soup.state, aligned.plan() if aligned else first.tensors, changes, aligned.record if aligned else None, notes,
        record, soup.chosen,
    )  # fmt: skip


class Score:
    """The metric of the models' own task, on the work's data; higher is better."""

    def __init__(self, work: Work, config: Mapping[str, Any]) -> None:
        from isomerge.evaluation.choosing import choose_task, require_fitting, task_name

        first, (self._data,) = work.models[0], work.data
        self._work, self._config = work, dict(config)
        name = task_name(config, None, first.name)
        require_fitting(self._data.data, name, first.name)
        self._task = choose_task(config, name)
        self._batches = self._data.passes(first, labels=True, device=work.device)
        task = self._task()
        self.metric, self.sign = task.metric_name, 1.0 if task.higher_is_better else -1.0
        self._done = 0

    def __call__(self, state: Mapping[str, Tensor]) -> float:
        from isomerge.evaluation.measure import require_numbers, score_batches
        from isomerge.running.stock import load_model

        checkpoint = MemoryCheckpoint("a model of the soup", state, self._config)
        with load_model(checkpoint, self._work.device) as loaded:
            task, _ = score_batches(
                [loaded.run], self._task(), self._batches, self._data.data, self._data.settings.limit
            )
            require_numbers(task, checkpoint)
        self._done += 1
        if self._work.progress:
            self._work.progress(self._done, 2 * len(self._work.models) - 1, "scoring")
        return self.sign * float(task.result()["metric"])
