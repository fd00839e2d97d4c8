"""Distillation beside merging: one student for two teachers, without labels

Teachers of one task, trained apart, and teachers that know five digits each. The students see the 600 images of the
validation part, which no teacher was trained on, and no labels: the first teacher, the merge by features, and fresh
models of the teachers' shape and of half of it. Equal steps on the first teacher, on the merge, and in
`reconstruct --polish`; fresh students get four times as many. The control of the small student is the same model
trained on the teachers' own labelled images. With two skills, own goals are told which images are whose, and all others
are not.

Use it where a student may not be larger than one teacher, or has another shape, and there are unlabelled examples that
the teachers have not seen: on those they were trained on, all of them say the same, and there is nothing to learn.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from setting import Models, Row, loaded, main, new_model, trained

import isomerge

STEPS, FRESH_STEPS = 200, 800
SMALL = {"num_hidden_layers": 1, "intermediate_size": 64}


def rows(models: Models, seed: int) -> Iterator[Row]:
    teachers, out = list(models.strangers), models.folder / "out"
    yield from controls(models, teachers, "one task")
    better = min(teachers, key=lambda folder: models.score(folder, "validation")["loss"])
    yield {"row": "one task: better teacher (labels of validation)", **models.score(better)}
    merged = merge(models, teachers, models.folder / "merged")
    yield {"row": "one task: reconstruct", **models.score(merged)}
    polished = merge(models, teachers, out, polish=STEPS, start="merge", rate=0.003)
    yield {"row": f"one task: reconstruct, polish {STEPS}", **models.score(polished)}
    for name, student in (("first teacher", teachers[0]), ("reconstruct", merged)):
        made = distil(models, teachers, student, out, steps=STEPS)
        yield {"row": f"one task: distill into {name}, {STEPS} steps", **models.score(made)}
    for name, sizes, temperature in (("teachers' shape", {}, 1), ("half of it", SMALL, 1), ("half of it", SMALL, 4)):
        student = models.folder / f"fresh {name}"
        new_model(seed, **sizes).save_pretrained(student)
        made = distil(models, teachers, student, out, steps=FRESH_STEPS, fresh=True, seed=seed, temperature=temperature)
        yield {"row": f"one task: distill into a fresh model, {name}, T = {temperature}", **models.score(made)}
    home = models.folder / "small"
    trained(new_model(seed, **SMALL), models.pixels["train"], models.labels["train"], 40, 2e-3, seed, home)
    yield {"row": "one task: the small model trained on labels", **models.score(home)}
    yield from two_skills(models, seed)


def two_skills(models: Models, seed: int) -> Iterator[Row]:
    """Teachers that were fine-tuned on the digits below five, and on the others."""
    labels, out = models.labels["train"], models.folder / "out"
    teachers = []
    for low in (True, False):
        own, home = (labels < 5) == low, models.folder / f"skill-{'low' if low else 'high'}"
        trained(loaded(models.base), models.pixels["train"][own], labels[own], 10, 1e-3, seed, home)
        teachers.append(home)
    yield from controls(models, teachers, "two skills")
    yield {"row": "two skills: reconstruct", **models.score(merge(models, teachers, out))}
    for goals in ("mean", "expert", "own"):
        data = [halves(models, low) for low in (True, False)] if goals == "own" else models.data("validation")
        made = distil(models, teachers, models.base, out, steps=STEPS, rate=0.015, goals=goals, data=data)
        yield {"row": f"two skills: distill into the base, {goals} goals", **models.score(made)}


def controls(models: Models, teachers: Sequence[Path], kind: str) -> Iterator[Row]:
    scores = [models.score(folder) for folder in teachers]
    yield {"row": f"{kind}: one teacher (mean)", **{k: sum(s[k] for s in scores) / len(scores) for k in scores[0]}}
    together = torch.stack([models.logits(folder).softmax(-1) for folder in teachers]).mean(0).log()
    loss = float(torch.nn.functional.nll_loss(together.double(), models.labels["test"]))
    yield {"row": f"{kind}: ensemble", "accuracy": models.accuracy(together), "loss": loss}


def halves(models: Models, low: bool) -> list[dict[str, torch.Tensor]]:
    """The validation images of one half of the digits, without labels."""
    own = (models.labels["validation"] < 5) == low
    return [{"pixel_values": part} for part in models.pixels["validation"][own].split(32)]


def merge(models: Models, teachers: Sequence[Path], out: Path, **options: Any) -> Path:
    made = isomerge.merge(teachers, method="reconstruct", data=models.data("validation"), progress=False, **options)
    made.save(out, report=False, lock=False, force=True)
    return out


def distil(models: Models, teachers: Sequence[Path], student: Path, out: Path, **options: Any) -> Path:
    data = options.pop("data", models.data("validation"))
    size = None if isinstance(data, list) else 32
    made = isomerge.distill(teachers, student, data=data, batch_size=size, progress=False, **options)
    made.save(out, report=False, lock=False, force=True)
    return out


if __name__ == "__main__":
    main(__doc__, rows)
