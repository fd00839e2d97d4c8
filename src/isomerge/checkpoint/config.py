"""config.json: which of its settings must have which type, whoever reads them, and how large counts may be.

Sizes that only a specification reads are checked where it reads them (`isomerge.symmetry.architecture.Facts`): a merge
needs none of them, and families write some of them in their own way.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict

from isomerge.json_files import JsonError, checked

MOST = 1024
"""Layers or experts of a model with fewer tensors than that."""
MOST_LABELS = 1_000_000
COUNTED = ("layers", "layer", "blocks", "depth", "depths", "experts")
"""How settings end that say how often something is built."""


class ModelConfig(BaseModel):
    """What several readers rely on. Everything else may be anything."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    model_type: str | None = None
    architectures: list[str] | None = None
    text_config: dict[str, Any] | None = None
    tie_word_embeddings: bool | None = None
    id2label: dict[Any, Any] | list[Any] | None = None
    problem_type: str | None = None


def config_problems(config: Mapping[str, Any], tensors: int) -> list[str]:
    """What is wrong with a config.json beside weights with so many tensors."""
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
