"""The class of `transformers` that a config.json names, and that class' own form of the config.

A config.json comes from strangers: what would make transformers fetch code is left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from isomerge.checkpoint.remote_code import remote_code_allowed
from isomerge.errors import CheckpointError, IsomergeError, ran_out_of_memory

ATTENTION = ("eager", "sdpa")
"""Implementations that every machine has. Others are packages, or kernels that transformers fetches from a hub."""


def named_class(config: Mapping[str, Any]) -> Any | None:
    """The class of a model that `architectures` names first; None if there is none."""
    import transformers

    name = class_name(config)
    kind = getattr(transformers, name, None) if name else None
    is_model = isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel) and bool(kind.config_class)
    return kind if is_model else None


def class_name(config: Mapping[str, Any]) -> str | None:
    names = config.get("architectures")
    return names[0] if isinstance(names, list) and names and isinstance(names[0], str) else None


def class_config(kind: Any, config: Mapping[str, Any]) -> Any:
    """The config as an object of the class, with implementations of attention that it chooses by itself."""
    return kind.config_class.from_dict(dict(config) if remote_code_allowed() else with_own_attention(config))


def not_built(kind: Any, error: Exception) -> Exception:
    """The error for a model that its class cannot be made of; a want of memory stays what it is."""
    if isinstance(error, IsomergeError) or ran_out_of_memory(error):
        return error
    return CheckpointError(
        f"Loading a {kind.__name__}: transformers cannot build it from this config.json "
        f"({type(error).__name__}: {' '.join(str(error).split())[:300]}). Get weights and config.json of one and the "
        "same model, from where it came."
    )


def with_own_attention(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json without the implementations it asks for: transformers takes `org/name` as code to fetch and run."""
    return {
        key: with_own_attention(value) if isinstance(value, Mapping) else value
        for key, value in config.items()
        if "_implementation" not in str(key) or value in ATTENTION
    }
