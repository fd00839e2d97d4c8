"""How everything in the demo's folder was made: which models from which seeds, and commands that make it again."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from itertools import groupby
from pathlib import Path
from typing import Any

from isomerge.demonstration.merging import BATCH, WAYS, Group, Way

AGAIN = "again"
"""The folder that the commands write into; like every path in them it is inside the demo's own."""


def how(groups: Sequence[Group], models: Mapping[int, Path], pairs: int) -> dict[str, Any]:
    """`training`, the facts; `models[]`, each with its seed and hash; `commands` for a shell, and `python` for merges
    by features, whose images no file holds."""
    from isomerge.checkpoint.lock import current_versions
    from isomerge.demonstration import digits

    merged = [(group, name, way) for group in groups for name, way in WAYS.items()]
    trained = [_trained(seed, path) for seed, path in models.items()]
    return {
        "training": {
            "command": f"isomerge demo --seeds {pairs}",
            "data": f"scikit-learn's digits: {digits.TRAIN} images to train, the others to test, the same for all",
            "seed": "draws the weights of a model, and the order of its images",
            "epochs": digits.EPOCHS, "batch": digits.BATCH, "learning_rate": digits.LEARNING_RATE,
            "weight_decay": digits.WEIGHT_DECAY,
            "versions": {**current_versions(), **{name: version(name) for name in ("transformers", "scikit-learn")}},
        },
        "models": trained,
        "commands": [
            *(f"isomerge merge {' '.join(_models(group))} {_flags(way)}-o {AGAIN}/{group.folder}/{name}"
              for group, name, way in merged if not way.data),
            *(f"isomerge align {second} {first} -o {AGAIN}/{group.folder}/aligned"
              for group in groups if len(group.seeds) == 2 for first, second in [_models(group)]),
        ],
        "python": _python([(group, name, way) for group, name, way in merged if way.data]),
    }  # fmt: skip


def _trained(seed: int, path: Path) -> dict[str, Any]:
    from isomerge.checkpoint import open_checkpoint
    from isomerge.checkpoint.hashing import hash_tensors, tensors_digest

    checkpoint = open_checkpoint(path)
    digest = tensors_digest(hash_tensors(checkpoint, sorted(checkpoint.tensors), threads=1))
    return {"model": f"model {seed}", "seed": seed, "folder": f"models/{path.name}", "sha256": digest}


def _models(group: Group) -> list[str]:
    return [f"models/seed-{seed}" for seed in group.seeds]


def _flags(way: Way) -> str:
    """
    >>> _flags(WAYS["rotation"])
    '--align --level rotation '
    """
    words = [f"--{name}" if value is True else f"--{name} {value}" for name, value in way.options.items()]
    return "".join(f"{word} " for word in words)


def _python(merged: Sequence[tuple[Group, str, Way]]) -> str:
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
