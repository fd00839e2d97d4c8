"""Every way in which the demo makes one model out of several, each written, loaded again and measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from isomerge.demonstration.digits import Digits, accuracy, loss, predict

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
class Group:
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
    progress: Callable[[int, int, str], None],
) -> Group:
    """Merge the models of these seeds in every way into folders below `out / folder`."""
    own = [str(models[seed]) for seed in seeds]
    predicted = [predict(load(path), digits) for path in own]
    rows = [
        _row(f"seed {seed}", f"model {seed}", path.relative_to(out).as_posix(), found, digits)
        for seed, path, found in zip(seeds, (models[s] for s in seeds), predicted, strict=True)
    ]
    mean = sum(predicted[1:], predicted[0]) / len(predicted)
    rows.append({**_row("ensemble", f"ensemble of {len(seeds)} models", None, mean, digits), "models": len(seeds)})
    group = Group(list(seeds), folder, rows, {})
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
    from isomerge.merging.api import merge

    def images() -> Iterator[dict[str, Tensor]]:
        return ({"pixel_values": batch} for batch in digits.train_images.split(BATCH))

    merged = merge(models, data=images if way.data else None, **way.options)
    written = merged.save(out, force=True)
    return merged.report().to_dict().get("layers") or [], written.sha256


def load(folder: Path | str) -> Any:
    """The model in its stock class, as anybody would load it; an error if anything is missing or left over."""
    from transformers import ViTForImageClassification

    from isomerge.checkpoint.memory import quiet_transformers
    from isomerge.errors import CheckpointError

    stock: Any = ViTForImageClassification
    with quiet_transformers():
        model, info = stock.from_pretrained(str(folder), output_loading_info=True)
    wrong = {kind: sorted(map(str, names)) for kind, names in info.items() if names}
    if wrong:
        raise CheckpointError(f"Loading {folder} in its stock class: {wrong}. This is a defect of isomerge: report it.")
    return model.eval()


def _row(way: str, label: str, folder: str | None, found: Tensor, digits: Digits) -> dict[str, Any]:
    return {
        "way": way, "label": label, "folder": folder, "models": 1, "data": False,
        "accuracy": accuracy(found, digits), "loss": loss(found, digits),
    }  # fmt: skip
