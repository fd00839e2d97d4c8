"""The settings of config.json that must have one type, whoever reads them."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict


class ModelConfig(BaseModel):
    """What several readers rely on. Everything else may be anything."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    model_type: str | None = None
    architectures: list[str] | None = None
    text_config: dict[str, Any] | None = None
    tie_word_embeddings: bool | None = None
    id2label: dict[Any, Any] | list[Any] | None = None
    problem_type: str | None = None
