"""Siblings that know different things

One image classifier is trained for a short time on scikit-learn's digits as they are, turned by a quarter, mirrored and
shifted, and three copies of it are fine-tuned, each on one of the last three kinds. One merged model has to know all
three. Below, the same with LoRA adapters of rank 8 on every linear layer, which are merged as adapters and not cut.
Columns: accuracy on the three kinds, averaged, of the method as it is by default (ties, consensus_ties, knots and
core_space keep the largest 20 % of the changes, as TIES does in its paper), and with the best of five values of
`lambda` on validation data (for LiNeS: of its slope); how far the latter is above the base, seed by seed; accuracy on
upright digits. Task arithmetic at its best weight costs the same and is the control. ESM and RegMean see 32 unlabelled
images of each kind. The rows called "each model again" write one model for each kind and test it on its kind: they need
to know the kind, as the models alone do.

In short: what one model for all kinds gains over the base is a third at most of what each model gains on its own kind.
RegMean with 32 images of each kind gains most (3.6 points; the control 0.8), and loses most on upright digits. ESM with
the same images gains 2.0. Without data wudi gains 2.6 at a tuned `lambda`, and iso_c 1.8 without tuning. By default the
sums (task_arithmetic, svc, emr, core_space) go too far: take a smaller `lambda`. Of adapters no method gains more than
iso_c. LiNeS gains nothing over four layers, LARV no more than noise over the same method without it. Where the kind is
known, `task` writes models that keep seven to eight tenths of the gain.
How long the base and its copies are trained was chosen by a look at the first seed, so that merging gains anything: of
a base that was trained for 8 epochs instead of 5 (86.6 %), no method gained more than 0.7 points but RegMean (1.4).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from setting import Models, Row, fit, loaded, main, new_model, rows_of, trained
from torch import Tensor
from transformers import ViTConfig, ViTForImageClassification

import isomerge
from isomerge.merging.adapters import merge_adapters

KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "turned": lambda images: images.rot90(1, (2, 3)),
    "mirrored": lambda images: images.flip(3),
    "shifted": lambda images: images.roll(2, 3),
}
STRENGTHS = (0.2, 0.35, 0.5, 0.7, 1.0)
TRIMMED = {"density": 0.2}
METHODS: dict[str, dict[str, Any]] = {
    "task_arithmetic": {},
    "task_arithmetic, LiNeS": {"method": "task_arithmetic"},
    "task_arithmetic, LARV": {"method": "task_arithmetic", "layer_scale": "larv"},
    "ties": TRIMMED,
    "ties, LARV": {"method": "ties", "layer_scale": "larv", **TRIMMED},
    "geometric_median": {},
    "consensus_ties": TRIMMED,
    "localize_and_stitch": {},
    "emr": {},
    "iso_c": {},
    "tsv": {},
    "svc": {},
    "dc_merge": {},
    "ortho_merge": {},
    "wudi": {},
    "wudi, not normalized": {"method": "wudi", "normalize": False},
    "ace": {},
    "knots": TRIMMED,
    "core_space": TRIMMED,
    "esm": {},
    "regmean": {},
}
WITH_DATA = ("esm", "regmean")
WITHOUT_BASE = ("geometric_median", "regmean")
ADAPTERS: dict[str, dict[str, Any]] = {
    "task_arithmetic": {},
    "ties": TRIMMED,
    "tsv": {},
    "iso_c": {},
    "knots": TRIMMED,
    "core_space": TRIMMED,
}


Options = dict[str, Any]
State = dict[str, Tensor]


@dataclass(frozen=True)
class Siblings:
    """What was fine-tuned from one base, and how good a model is."""

    models: Models
    base: Path
    tuned: list[Path]

    def accuracies(self, model: Path | State, split: str = "test") -> dict[str, float]:
        """By kind, and on upright images."""
        network, pixels = self.network(model), self.models.pixels[split]
        kinds = {kind: network(turn(pixels)).logits for kind, turn in KINDS.items()}
        every = kinds | {"upright": network(pixels).logits}
        return {kind: self.models.accuracy(logits, split) for kind, logits in every.items()}

    def network(self, model: Path | State) -> Any:
        if isinstance(model, Path):
            return loaded(model)
        config = ViTConfig.from_pretrained(self.base)
        return ViTForImageClassification.from_pretrained(None, config=config, state_dict=model).eval()

    def mean(self, model: Path | State, split: str = "test") -> float:
        found = self.accuracies(model, split)
        return sum(found[kind] for kind in KINDS) / len(KINDS)

    def alone(self, name: str, model: Path | State) -> Row:
        return {"row": name, "default": self.mean(model), "upright": self.accuracies(model)["upright"]}

    def on_own_kind(self, name: str, models: Iterable[Path | State]) -> Row:
        own = [self.accuracies(model)[kind] for kind, model in zip(KINDS, models, strict=True)]
        return {"row": name, "default": sum(own) / len(own)}

    def tried(self, name: str, merge: Callable[..., State], default: Options, others: list[Options]) -> Row:
        """As it is by default, and with what is best on validation data."""
        best = max(others, key=lambda options: self.mean(merge(**options), "validation"))
        found = self.alone(name, merge(**best))
        return {**found, "default": self.mean(merge(**default)), "best": found["default"], "options": best}


@torch.no_grad()
def rows(models: Models, seed: int) -> Iterator[Row]:
    base, labels = models.folder / "pretrained", models.labels["train"]
    images = {kind: turn(models.pixels["train"]) for kind, turn in KINDS.items()}
    with torch.enable_grad():
        everything = torch.cat([models.pixels["train"], *images.values()])
        start = new_model(100 * seed, num_hidden_layers=4)
        trained(start, everything, labels.repeat(len(KINDS) + 1), 5, 1e-3, seed, base)
        tuned = [trained(loaded(base), own, labels, 5, 3e-4, seed, base.parent / kind) for kind, own in images.items()]
        adapters = [adapter(base, own, labels, seed, base.parent / f"{kind}-adapter") for kind, own in images.items()]
    whole, low = Siblings(models, base, tuned), Siblings(models, base, adapters)
    alone = whole.mean(base)
    for row in (*of_models(whole), *of_adapters(low)):
        yield {**row, "gain": row.get("best", row["default"]) - alone}


def adapter(base: Path, pixels: Tensor, labels: Tensor, seed: int, home: Path) -> Path:
    torch.manual_seed(seed)
    layers = r".*\.(query|key|value|q_proj|k_proj|v_proj|o_proj|dense|fc1|fc2)"
    model = get_peft_model(loaded(base), LoraConfig(r=8, lora_alpha=16, target_modules=layers))
    fit(model, rows_of({"pixel_values": pixels, "labels": labels}, 32), 5, 1e-3, seed).save_pretrained(home)
    return home


def of_models(siblings: Siblings) -> Iterator[Row]:
    base, tuned = siblings.base, siblings.tuned
    yield siblings.alone("the base alone", base)
    for kind, folder in zip(KINDS, tuned, strict=True):
        yield siblings.alone(f"the model for {kind} digits alone", folder)
    yield siblings.on_own_kind("each model on its own kind", tuned)
    yield siblings.alone("linear (the plain mean)", isomerge.merge(tuned).state_dict())
    unlabelled = [[{"pixel_values": turn(siblings.models.pixels["train"][:32])}] for turn in KINDS.values()]
    for name, options in METHODS.items():
        given = {"method": name, **options} | ({"data": unlabelled} if name in WITH_DATA else {})
        if name in WITHOUT_BASE:
            yield siblings.alone(name, isomerge.merge(tuned, **given).state_dict())
            continue

        def merge(_given: Options = given, **strength: Any) -> State:
            return isomerge.merge(tuned, base=base, **_given, **strength).state_dict()

        tried: list[Options] = [{"lambda": strength} for strength in STRENGTHS]
        default: Options = {}
        if name.endswith("LiNeS"):
            shallow = 1 / len(tuned)
            tried = [{"lambda": [shallow, shallow + slope]} for slope in STRENGTHS]
            default = {"lambda": [shallow, 1.0]}
        yield siblings.tried(name, merge, default, tried)
    for name, options in (("emr", {}), ("consensus_ties", {"elect": False})):
        again = [
            isomerge.merge(tuned, method=name, base=base, task=task, **options).state_dict()
            for task in range(1, len(tuned) + 1)
        ]
        yield siblings.on_own_kind(f"{name}, each model again", again)


def of_adapters(siblings: Siblings) -> Iterator[Row]:
    def adapted(adapter: Path) -> State:
        return isomerge.merge([f"{siblings.base}+{adapter}"]).state_dict()

    yield siblings.on_own_kind("LoRA: each adapter on its own kind", map(adapted, siblings.tuned))
    for name, options in ADAPTERS.items():

        def merge(_name: str = name, _options: Options = options, **strength: float) -> State:
            out = siblings.base.parent / "merged-adapter"
            merge_adapters(siblings.tuned, out=out, method=_name, options={**_options, **strength}, rank=64, force=True)
            return adapted(out)

        yield siblings.tried(f"LoRA: {name}", merge, {}, [{"lambda": strength} for strength in STRENGTHS])


if __name__ == "__main__":
    columns = (("default", 1), ("best", 1), ("gain", 1), ("upright", 1))
    main(__doc__, rows, columns, strangers=0, siblings=0)
