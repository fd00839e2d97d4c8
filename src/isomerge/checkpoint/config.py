"""config.json: which of its settings must have which type, whoever reads them, and how large counts may be.

Sizes that only a specification reads are checked where it reads them (`isomerge.symmetry.architecture.Facts`): a merge
needs none of them, and families write some of them in their own way.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from isomerge.json_files import JsonError, checked

MOST = 1024
"""Layers or experts of a model with fewer tensors than that."""
MOST_LABELS = 1_000_000
COUNTED = ("layers", "layer", "blocks", "depth", "depths", "experts")
"""How settings end that say how often something is built."""


def config_problems(config: Mapping[str, Any], tensors: int) -> list[str]:
    """What is wrong with a config.json beside weights with so many tensors."""
    if not config:
        return []
    from isomerge.checkpoint.config_model import ModelConfig  # pydantic, which merging state_dicts does without

    try:
        checked(ModelConfig, dict(config))
    except JsonError as error:
        return [f"config.json: {error}"]
    problems = [
        f"config.json: {key} is {value:,}, and the weights hold {tensors:,} tensors"
        for key, value in _counts(config)
        if value > max(MOST, tensors)
    ]
    labels = config.get("num_labels")
    if isinstance(labels, int) and labels > MOST_LABELS:
        problems.append(f"config.json: num_labels is {labels:,}, more than {MOST_LABELS:,}")
    return problems


def _counts(value: Any, key: str = "") -> Iterator[tuple[str, int]]:
    if isinstance(value, Mapping):
        for inner, one in value.items():
            yield from _counts(one, str(inner))
    elif key.endswith(COUNTED):
        for one in value if isinstance(value, list) else (value,):
            if isinstance(one, int) and not isinstance(one, bool):
                yield key, one
