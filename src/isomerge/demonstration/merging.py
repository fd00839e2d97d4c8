"""Every way in which the demo makes one model out of several, each written, loaded again and measured.

And the commands that make all of it again.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from isomerge.checkpoint import open_checkpoint
from isomerge.checkpoint.base import Progress
from isomerge.checkpoint.hashing import hash_tensors, tensors_digest
from isomerge.checkpoint.lock import current_versions
from isomerge.checkpoint.memory import quiet_transformers
from isomerge.demonstration import digits as task
from isomerge.demonstration.digits import Digits, accuracy, loss, predict
from isomerge.errors import CheckpointError
from isomerge.merging.api import merge

BATCH = 200  # images at a time where features are looked at


@dataclass(frozen=True)
class Way:
    label: str
    options: Mapping[str, Any]
    """Of `isomerge.merge`."""
    data: bool = False
    """It looks at the images that the models were trained on, without their labels."""


WAYS: dict[str, Way] = {
    "none": Way("plain average", {}),
    "permutation": Way("aligned: permutation", {"align": True, "level": "permutation"}),
    "rotation": Way("aligned: rotation (published)", {"align": True, "level": "rotation"}),
    "full": Way("aligned: full", {"align": True}),
    "reconstruct": Way("aligned: full, then reconstruct", {"align": True, "method": "reconstruct"}, data=True),
    "joint": Way("reconstruct, joint features", {"method": "reconstruct", "features": "joint"}, data=True),
}  # fmt: skip


@dataclass
class MergedGroup:
    """Models that are merged together, and what came of it."""

    seeds: list[int]
    folder: str
    rows: list[dict[str, Any]]
    """One per way to predict: the models, their ensemble, every merged model."""
    layers: dict[str, list[dict[str, Any]]]
    """Of merges by features: the residual before and after of every map that was solved."""

    def accuracy(self, way: str) -> float:
        return float(next(row["accuracy"] for row in self.rows if row["way"] == way))

    def record(self) -> dict[str, Any]:
        return {"seeds": self.seeds, "folder": self.folder, "rows": self.rows, "layers": self.layers}


def merge_group(
    seeds: Sequence[int],
    models: Mapping[int, Path],
    out: Path,
    folder: str,
    digits: Digits,
    progress: Progress,
) -> MergedGroup:
    """Merge the models of these seeds in every way into folders below `out / folder`."""
    own = [str(models[seed]) for seed in seeds]
    predicted = [predict(load(path), digits) for path in own]
    rows = [
        _row(f"seed {seed}", f"model {seed}", path.relative_to(out).as_posix(), own_predictions, digits)
        for seed, path, own_predictions in zip(seeds, (models[s] for s in seeds), predicted, strict=True)
    ]
    mean = sum(predicted[1:], predicted[0]) / len(predicted)
    rows.append({**_row("ensemble", f"ensemble of {len(seeds)} models", None, mean, digits), "models": len(seeds)})
    group = MergedGroup(list(seeds), folder, rows, {})
    for done, (name, way) in enumerate(WAYS.items()):
        progress(done, len(WAYS), f"merging models {', '.join(map(str, seeds))}: {way.label}")
        target = f"{folder}/{name}"
        layers, sha256 = _merge(own, way, out / target, digits)
        if layers:
            group.layers[name] = layers
        row = _row(name, way.label, target, predict(load(out / target), digits), digits)
        rows.append({**row, "data": way.data, "sha256": sha256})
    return group


def _merge(models: Sequence[str], way: Way, out: Path, digits: Digits) -> tuple[list[dict[str, Any]], str | None]:
    """The residuals of a merge by features, and the hash of what was written."""

    def images() -> Iterator[dict[str, Tensor]]:
        return ({"pixel_values": batch} for batch in torch.split(digits.train_images, BATCH))

    merged = merge(models, data=images if way.data else None, **way.options)
    written = merged.save(out, force=True)
    return merged.report().to_dict().get("layers") or [], written.sha256


def load(folder: Path | str) -> Any:
    """The model in its stock class, as anybody would load it; an error if anything is missing or left over."""
    from transformers import ViTForImageClassification

    stock: Any = ViTForImageClassification
    with quiet_transformers():
        model, info = stock.from_pretrained(str(folder), output_loading_info=True, trust_remote_code=False)
    problems = {kind: sorted(map(str, names)) for kind, names in info.items() if names}
    if problems:
        raise CheckpointError(f"Loading {folder} in its stock class: {problems}. This is a bug: report it.")
    return model.eval()


def _row(way: str, label: str, folder: str | None, predicted: Tensor, digits: Digits) -> dict[str, Any]:
    return {
        "way": way, "label": label, "folder": folder, "models": 1, "data": False,
        "accuracy": accuracy(predicted, digits), "loss": loss(predicted, digits),
    }  # fmt: skip


# --- how to make everything in the demo's folder again ----------------------------------------------------------------
AGAIN = "again"
"""The folder that the commands write into; like every path in them it is inside the demo's own."""


def instructions(groups: Sequence[MergedGroup], models: Mapping[int, Path], pairs: int) -> dict[str, Any]:
    """`training`, the facts; `models[]`, each with its seed and hash; `commands` for a shell, and `python` for merges
    by features, whose images no file holds."""
    merged = [(group, name, way) for group in groups for name, way in WAYS.items()]
    return {
        "training": {
            "command": f"isomerge demo --seeds {pairs}",
            "data": f"scikit-learn's digits: {task.TRAIN} images to train, the others to test, the same for all",
            "seed": "draws the weights of a model, and the order of its images",
            "epochs": task.EPOCHS, "batch": task.BATCH, "learning_rate": task.LEARNING_RATE,
            "weight_decay": task.WEIGHT_DECAY,
            "versions": {**current_versions(), **{name: version(name) for name in ("transformers", "scikit-learn")}},
        },
        "models": [_trained(seed, path) for seed, path in models.items()],
        "commands": [
            *(f"isomerge merge {' '.join(_models(group))} {_flags(way)}-o {AGAIN}/{group.folder}/{name}"
              for group, name, way in merged if not way.data),
            *(f"isomerge align {second} {first} -o {AGAIN}/{group.folder}/aligned"
              for group in groups if len(group.seeds) == 2 for first, second in [_models(group)]),
        ],
        "python": _python([(group, name, way) for group, name, way in merged if way.data]),
    }  # fmt: skip


def _trained(seed: int, path: Path) -> dict[str, Any]:
    checkpoint = open_checkpoint(path)
    digest = tensors_digest(hash_tensors(checkpoint, sorted(checkpoint.tensors), threads=1))
    return {"model": f"model {seed}", "seed": seed, "folder": f"models/{path.name}", "sha256": digest}


def _models(group: MergedGroup) -> list[str]:
    return [f"models/seed-{seed}" for seed in group.seeds]


def _flags(way: Way) -> str:
    """
    >>> _flags(WAYS["rotation"])
    '--align --level rotation '
    """
    words = [f"--{name}" if value is True else f"--{name} {value}" for name, value in way.options.items()]
    return "".join(f"{word} " for word in words)


def _python(merged: Sequence[tuple[MergedGroup, str, Way]]) -> str:
    text = f"""\
import isomerge
from isomerge.demonstration.digits import load_digits

images = load_digits().train_images  # without their labels

def data():
    return ({{"pixel_values": batch}} for batch in images.split({BATCH}))
"""
    for group, ways in groupby(merged, key=lambda one: one[0].folder):
        own = list(ways)
        text += f"\nmodels = {json.dumps(_models(own[0][0]))}\n"
        for _, name, way in own:
            options = "".join(f", {key}={value!r}" for key, value in way.options.items()).replace("'", '"')
            text += f'isomerge.merge(models, data=data{options}).save("{AGAIN}/{group}/{name}")\n'
    return text
