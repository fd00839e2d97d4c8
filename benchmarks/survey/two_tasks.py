"""Two tasks in one body

Two image classifiers, one of the digits 0 to 4 and one of 5 to 9, trained apart or fine-tuned from one base. Merged,
each image is classified among the five digits of its task: with outputs apart by the labels of its own model, else by
the mean classifier, which has five labels for both tasks. The control has the mean of the bodies and the outputs apart,
and zips nothing. Data: the training images, without labels.

When to use it: for several tasks of one base in one body, `zipit` with `outputs: apart` writes a native model that
keeps most of both. What helps is that the outputs stay apart; zipping itself is within the errors of the control.
Fine-tunes of one base are better left unaligned, models trained apart aligned.
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
        moved = models.folder / "moved"
        isomerge.align(str(pair[1]), str(pair[0]), data=batches).save(moved, force=True)
        yield {"row": f"{kind}: plain mean, outputs apart (control)", **control(models, pair)}
        yield {"row": f"{kind}: aligned mean, outputs apart (control)", **control(models, (pair[0], moved))}
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


def control(models: Models, pair: Sequence[Path]) -> dict[str, float]:
    """The mean of two bodies, with the classifier of each."""
    states = [loaded(folder).state_dict() for folder in pair]
    scores = []
    for task, own in enumerate(states):
        model = loaded(pair[task])
        mean_body = {n: (states[0][n] + states[1][n]) / 2 for n in own if not n.startswith("classifier")}
        model.load_state_dict({**own, **mean_body})
        scores.append(measured(models, models.logits(model), task))
    return mean(scores)


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
