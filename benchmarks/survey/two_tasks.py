"""Two tasks in one body

Two image classifiers, one of the digits 0 to 4 and one of 5 to 9, trained apart or fine-tuned from one base. Merged, each
image is classified among the five digits of its task: by the labels of its own model where the outputs stay apart
(`zipit`), else by the mean classifier, which has five labels for both tasks. Data: the training images, without labels.

When to use it: merge models of different tasks by `zipit` with `outputs: apart` where they come from one base. Of models
trained apart, alignment and zipping keep only a part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from setting import Models, Row, loaded, main, new_model, trained
from torch import Tensor

import isomerge

WAYS: Mapping[str, Mapping[str, Any]] = {
    "plain mean": {"method": "linear"},
    "aligned mean": {"method": "linear", "align": True},
    "zipit, outputs apart": {"method": "zipit", "outputs": "apart"},
    "aligned, zipit, outputs apart": {"method": "zipit", "outputs": "apart", "align": True},
    "aligned, zipit without zips within a model, outputs apart": {
        "method": "zipit", "outputs": "apart", "align": True, "within": 0, "repeats": 0,
    },
}  # fmt: skip


def rows(models: Models, seed: int) -> Iterator[Row]:
    def batches() -> Iterator[dict[str, Tensor]]:
        yield from ({"pixel_values": part} for part in models.pixels["train"].split(64))

    for kind in ("trained apart", "fine-tuned from one base"):
        pair = [expert(models, kind, task, seed) for task in range(2)]
        alone = [measured(models, models.logits(folder), task) for task, folder in enumerate(pair)]
        yield {"row": f"{kind}: each model on its own task", **mean(alone)}
        for name, options in WAYS.items():
            yield {"row": f"{kind}: {name}", **merged(models, pair, options, batches)}


def expert(models: Models, kind: str, task: int, seed: int) -> Path:
    """A classifier of five digits."""
    names = {str(label + 5 * task): label for label in range(5)}
    labels = {"label2id": names, "id2label": {label: name for name, label in names.items()}}
    model = new_model(100 * seed + 70 + task, **labels)
    if kind != "trained apart":
        body = {n: t for n, t in loaded(models.base).state_dict().items() if not n.startswith("classifier")}
        model.load_state_dict(body, strict=False)
    own = models.labels["train"] // 5 == task
    home = models.folder / f"{kind} {task}"
    return trained(model, models.pixels["train"][own], models.labels["train"][own] % 5, 40, 2e-3, seed, home)


def merged(
    models: Models, pair: Sequence[Path], options: Mapping[str, Any], batches: Callable[[], Iterator[dict[str, Tensor]]]
) -> dict[str, float]:
    out = models.folder / "merged"
    data = None if options == {"method": "linear"} else batches
    isomerge.merge([str(f) for f in pair], data=data, **options).save(out, report=False, lock=False, force=True)
    scores = models.logits(out)
    own = [scores[:, 5 * task : 5 * task + 5] if scores.shape[1] == 10 else scores for task in range(2)]
    return mean([measured(models, one, task) for task, one in enumerate(own)])


def measured(models: Models, scores: Tensor, task: int) -> dict[str, float]:
    """Of the test images of a task."""
    own = models.labels["test"] // 5 == task
    labels = models.labels["test"][own] % 5
    loss = float(torch.nn.functional.cross_entropy(scores[own].double(), labels))
    return {"accuracy": 100 * float((scores[own].argmax(-1) == labels).double().mean()), "loss": loss}


def mean(scores: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {key: sum(score[key] for score in scores) / len(scores) for key in scores[0]}


if __name__ == "__main__":
    main(__doc__, rows, strangers=0, siblings=1)
