"""Soups: which models, how much of each, and how to find out

Settings on the digits, each with models of its own. From the shared base, which is trained for a moment only: three
fine-tunes and two more that went too fast, chosen and weighed on labelled validation images; and three that know other
classes, whose changes are weighed on validation images. From a base that is trained to the end: three pruned alike;
two trained on clean and two on perturbed images; fine-tunes that went through another task first; and LoRA adapters for
images turned by other angles than those of the task.

`evaluations` are merges measured on the 600 validation images (100 for adapters). A hundred gradient steps on 32 images
cost about as much as 16 of them, which is what a learned soup takes; AdaMerging takes 200 steps on three data sets,
about 100 of them. "perturbed": accuracy under the worst change of each pixel by at most 0.1 (pixels are from -1 to 1)
that ten gradient steps find. "turned": accuracy on images turned by 30 degrees. "zeros": of the weights of matrices, in
percent.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from setting import Models, Row, fit, loaded, main, new_model, rows_of, trained
from torch import Tensor
from torch.nn.functional import cross_entropy

import isomerge

CLASSES = (range(4), range(4, 7), range(7, 10))
RADIUS = 0.1
ANGLES = (-40, -20, 20, 40)
ASKED = 30
EVALUATIONS = 30
FEW = 100
"""Labelled images for the search over adapters."""
COLUMNS = (("accuracy", 1), ("loss", 3), ("perturbed", 1), ("turned", 1), ("zeros", 1))


def rows(models: Models, seed: int) -> Iterator[Row]:
    images, labels = models.pixels["train"], models.labels["train"]
    ready = trained(new_model(100 * seed + 60), images, labels, 25, 2e-3, seed, models.folder / "ready")
    yield {"row": "trained base", **models.score(ready), "perturbed": robustness(models, ready)}
    for part in (choosing, other_classes):
        yield from part(models, seed)
    for part in (pruned, robust, recycled, adapters):
        yield from part(replace(models, base=ready), seed)


# --- the settings -----------------------------------------------------------------------------------------------------
def choosing(models: Models, seed: int) -> Iterator[Row]:
    """Five fine-tunes, chosen and weighed on labelled validation images."""
    parents = list(models.siblings)
    for number in range(2):
        own, home = slice(number, None, 3), models.folder / f"fast-{number}"
        images, labels = models.pixels["train"][own], models.labels["train"][own]
        parents.append(trained(loaded(models.base), images, labels, 10, 5e-3, seed, home))
    name, data = "fine-tunes", models.data("validation")
    best = max(parents, key=lambda parent: models.score(parent, "validation")["accuracy"])
    yield {"row": f"{name}: best on validation", **models.score(best)}
    yield measured(models, f"{name}: plain mean", parents)
    yield measured(models, f"{name}: greedy soup", parents, method="greedy_soup", data=data)
    yield measured(models, f"{name}: DiWA (strict)", parents, method="greedy_soup", data=data, strict=True)
    for by in ("model", "layer"):
        yield measured(models, f"{name}: learned soup, by {by}", parents, method="learned_soup", data=data, by=by)
    yield {
        "row": f"{name}: weights searched, {EVALUATIONS} evaluations",
        **searched(models, {"merge_method": "linear", "models": entries(parents)}, data, seed),
    }


def other_classes(models: Models, seed: int) -> Iterator[Row]:
    """Each model was fine-tuned on some of the classes only."""
    parents = []
    for number, classes in enumerate(CLASSES):
        images, labels = of_classes(models, "train", classes)
        home = models.folder / f"classes-{number}"
        parents.append(trained(loaded(models.base), images, labels, 10, 1e-3, seed + number, home))
    unlabelled = [stored({"pixel_values": of_classes(models, "validation", own)[0]}) for own in CLASSES]
    name = "other classes"
    yield {"row": f"{name}: base", **models.score(models.base)}
    yield mean_of(f"{name}: one model (mean)", [models.score(parent) for parent in parents])
    yield measured(models, f"{name}: plain mean", parents)
    yield measured(models, f"{name}: task arithmetic, 0.3", parents, models.base, method="task_arithmetic", weight=0.3)
    recipe = {"merge_method": "task_arithmetic", "base_model": str(models.base), "models": entries(parents)}
    yield {
        "row": f"{name}: weights searched with labels, {EVALUATIONS} evaluations",
        **searched(models, recipe, models.data("validation"), seed),
    }
    for objective in ("entropy", "predictions"):
        for by in ("model", "layer"):
            yield measured(
                models, f"{name}: AdaMerging, {objective}, by {by}", parents, models.base, method="adamerging",
                data=unlabelled, objective=objective, by=by,
            )  # fmt: skip
    for by in ("model", "layer"):
        yield measured(
            models, f"{name}: learned with labels, by {by}", parents, models.base, method="learned_soup",
            data=models.data("validation"), by=by, weight=0.3, steps=200, rate=0.02,
        )  # fmt: skip


def pruned(models: Models, seed: int) -> Iterator[Row]:
    """One model pruned to a fifth of its weights, and trained on three times with its mask."""
    start = models.folder / "pruned"
    isomerge.merge([models.base], method="sparse_soup", density=0.2).save(start, report=False, lock=False)
    parents = []
    for number in range(3):
        module = loaded(start)
        for parameter in module.parameters():
            hold_zeros(parameter)
        home = models.folder / f"sparse-{number}"
        parents.append(trained(module, models.pixels["train"], models.labels["train"], 10, 1e-3, seed + number, home))
    name = "pruned to 20 %"
    yield {"row": f"{name}: before training on", **models.score(start), "zeros": zeros(start)}
    best = max(parents, key=lambda parent: models.score(parent, "validation")["accuracy"])
    yield {"row": f"{name}: best on validation", **models.score(best), "zeros": zeros(best)}
    yield measured(models, f"{name}: sparse soup", parents, start, method="sparse_soup", count_zeros=True)


def robust(models: Models, seed: int) -> Iterator[Row]:
    """Two fine-tunes of clean and two of perturbed images; the coefficients are learned on a mix."""
    images, labels, parents = models.pixels["train"], models.labels["train"], []
    for number in range(4):
        module = loaded(models.base)
        for epoch in range(6):
            seen = images if number < 2 else attacked(module, images, labels, steps=3)
            rate = 1e-3 * (1 - epoch / 6)
            fit(module, rows_of({"pixel_values": seen, "labels": labels}, 32), 1, rate, 10 * number + epoch)
        parents.append(models.folder / f"robust-{number}")
        module.save_pretrained(parents[-1])
    name = "clean and perturbed"

    def row(what: str, model: Any) -> Row:
        return {"row": f"{name}: {what}", **models.score(model), "perturbed": robustness(models, model)}

    yield mean_of(f"{name}: trained on clean images", [dict(row("", parent)) for parent in parents[:2]])
    yield mean_of(f"{name}: trained on perturbed images", [dict(row("", parent)) for parent in parents[2:]])
    yield row("plain mean", merged(models, parents))
    for share in (0.0, 0.5, 1.0):
        out = merged(models, parents, method="learned_soup", data=models.data("validation"), perturbed=share,
                     radius=RADIUS)  # fmt: skip
        yield row(f"learned soup, {share:.0%} perturbed", out)


def recycled(models: Models, seed: int) -> Iterator[Row]:
    """Ratatouille: fine-tunes of the task that began from fine-tunes of other tasks, beside as many from the base."""
    images, labels = models.pixels["train"], models.labels["train"]
    noise = torch.randn(images.shape, generator=torch.Generator().manual_seed(seed))
    auxiliary = (images.roll(1, -1), images.roll(1, -2), (images + 0.5 * noise).clamp(-1, 1))
    plain, through = [], []
    for number, other in enumerate(auxiliary):
        place = models.folder / f"auxiliary-{number}"
        trained(loaded(models.base), other, labels, 4, 1e-3, seed + number, place)
        own = [models.folder / f"{kind}-{number}" for kind in ("plain", "recycled")]
        for start, home in zip((models.base, place), own, strict=True):
            trained(loaded(start), images, labels, 6, 1e-3, seed + number, home)
        plain.append(own[0])
        through.append(own[1])
    name = "recycled"

    def row(what: str, model: Path) -> dict[str, Any]:
        with torch.no_grad():
            elsewhere = loaded(model)(turned(models.pixels["test"], ASKED)).logits
        return {"row": f"{name}: {what}", **models.score(model), "turned": models.accuracy(elsewhere)}

    for what, some in (("from the base", plain), ("through other tasks", through)):
        yield mean_of(f"{name}: one model {what} (mean)", [row("", one) for one in some])
        yield row(f"mean of those {what}", merged(models, some))


def adapters(models: Models, seed: int) -> Iterator[Row]:
    """LoRA adapters for images turned by some angles, and a task of another angle."""
    from peft import LoraConfig, get_peft_model

    images, labels, base = models.pixels["train"], models.labels["train"], models.base
    named, data = [], []
    for angle in ANGLES:
        adapted = get_peft_model(loaded(base), LoraConfig(r=4, target_modules="all-linear"))
        fit(adapted, rows_of({"pixel_values": turned(images, angle), "labels": labels}, 32), 10, 5e-3, seed)
        home = models.folder / f"turned {angle}"
        adapted.save_pretrained(home)
        named.append(f"{base}+{home}")
        data.append(stored({"pixel_values": turned(images[:FEW], angle)}))
    asked = {split: turned(models.pixels[split], ASKED) for split in ("validation", "test")}
    task = stored({"pixel_values": asked["validation"][:FEW]})
    few = stored({"pixel_values": asked["validation"][:FEW], "labels": models.labels["validation"][:FEW]})
    test = stored({"pixel_values": asked["test"], "labels": models.labels["test"]})
    name = f"adapters, {ASKED}°"

    def row(what: str, model: Any) -> Row:
        with torch.no_grad():
            logits = loaded(model)(asked["test"]).logits
        loss = float(cross_entropy(logits.double(), models.labels["test"]))
        return {"row": f"{name}: {what}", "accuracy": models.accuracy(logits), "loss": loss}

    yield row("base", base)
    yield row("mean of all", merged(models, named))
    for top, what in ((1, "most similar adapter"), (2, "adapter soup of 2")):
        yield row(what, merged(models, named, base, method="adapter_soup", data=[*data, task], top=top))
    recipe = {
        "merge_method": "task_arithmetic", "base_model": str(base),
        "models": [{"model": one, "parameters": {"weight": 1 / len(named)}} for one in named],
    }  # fmt: skip
    over = {f"models[{number}].weight": "-1.5:1.5" for number in range(len(named))}
    for l1 in (0.0, 0.05):
        found = isomerge.search(recipe, over, data=few, test=test, evaluations=EVALUATIONS, l1=l1, seed=seed)
        out = models.folder / f"searched {l1}"
        isomerge.merge_recipe([found.recipe]).save(out, report=False, lock=False)
        yield row(f"LoRAHub, {FEW} labels, {EVALUATIONS} evaluations, L1 {l1:g}", out)


# --- merging and measuring --------------------------------------------------------------------------------------------
def merged(models: Models, parents: Sequence[Any], base: Path | None = None, **how: Any) -> Path:
    out = models.folder / "merged"
    given = isomerge.merge([str(parent) for parent in parents], base=None if base is None else str(base), **how)
    given.save(out, report=False, lock=False, force=True)
    return out


def measured(
    models: Models,
    name: str,
    parents: Sequence[Any],
    base: Path | None = None,
    *,
    count_zeros: bool = False,
    **how: Any,
) -> Row:
    out = merged(models, parents, base, **how)
    return {"row": name, **models.score(out), **({"zeros": zeros(out)} if count_zeros else {})}


def searched(models: Models, recipe: dict[str, Any], data: Any, seed: int) -> dict[str, float]:
    over = {f"models[{number}].weight": "0.01:1" for number in range(len(recipe["models"]))}
    found = isomerge.search(recipe, over, data=data, evaluations=EVALUATIONS, seed=seed)
    out = models.folder / "searched"
    isomerge.merge_recipe([found.recipe]).save(out, report=False, lock=False, force=True)
    return models.score(out)


def entries(parents: Sequence[Path]) -> list[dict[str, Any]]:
    return [{"model": str(parent), "parameters": {"weight": 0.3}} for parent in parents]


def stored(tensors: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    """In batches of 32."""
    parts = {name: tensor.split(32) for name, tensor in tensors.items()}
    return [dict(zip(parts, batch, strict=True)) for batch in zip(*parts.values(), strict=True)]


def mean_of(name: str, scores: Sequence[dict[str, Any]]) -> Row:
    keys = [key for key in scores[0] if key != "row"]
    return {"row": name, **{key: sum(score[key] for score in scores) / len(scores) for key in keys}}


def of_classes(models: Models, split: str, classes: Sequence[int]) -> tuple[Tensor, Tensor]:
    kept = torch.isin(models.labels[split], torch.tensor(list(classes)))
    return models.pixels[split][kept], models.labels[split][kept]


def hold_zeros(parameter: Tensor) -> None:
    """Zeros of a matrix get no gradient, and stay zeros."""
    if parameter.dim() > 1:
        kept = parameter.detach().ne(0)
        parameter.register_hook(lambda slope: slope * kept)


def zeros(model: Path) -> float:
    """In percent of all weights of matrices."""
    matrices = [p for p in loaded(model).parameters() if p.dim() > 1]
    return 100 * sum(int(p.eq(0).sum()) for p in matrices) / sum(p.numel() for p in matrices)


def attacked(module: Any, images: Tensor, labels: Tensor, steps: int = 10) -> Tensor:
    """The images, each pixel moved by at most RADIUS against the model."""
    module.eval()
    moved = images.clone()
    for _ in range(steps):
        moved.requires_grad_(True)
        (slope,) = torch.autograd.grad(cross_entropy(module(moved).logits, labels), moved)
        step = moved.detach() + 2.5 * RADIUS / steps * slope.sign()
        moved = torch.min(torch.max(step, images - RADIUS), images + RADIUS)
    return moved


def robustness(models: Models, model: Any) -> float:
    module = loaded(model)
    images = attacked(module, models.pixels["test"], models.labels["test"])
    with torch.no_grad():
        return models.accuracy(module(images).logits)


def turned(images: Tensor, angle: float) -> Tensor:
    from scipy.ndimage import rotate

    return torch.from_numpy(
        np.asarray(rotate(images.numpy(), angle, axes=(2, 3), reshape=False, order=1, cval=-1.0))
    ).float()


if __name__ == "__main__":
    main(__doc__, rows, COLUMNS, strangers=0)
