"""What config.json must say when the layers change: their number, and lists with one entry per layer."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from isomerge.merging.plan.model_parts import DEPTH_KEYS, ModelPart

Origin = tuple[Mapping[str, Any], int]
"""An output layer's config.json and number in it."""
Key = tuple[tuple[str, ...], str]
"""Where a key stands in config.json, and the key."""


def depth_changes(
    config: Mapping[str, Any], part: ModelPart, old_depth: int, origins: Sequence[Origin]
) -> tuple[dict[str, Any], list[str]]:
    """The keys of config.json that change, whole top-level values, and what to look at by hand."""
    if not config:
        return {}, []
    changed = copy.deepcopy(dict(config))
    notes: list[str] = []
    keys = _depth_keys(changed, part, old_depth)
    if not keys and len(origins) != old_depth:
        notes.append(
            f"config.json has no key that says {part.prefix} has {old_depth} layers; correct it by hand: the output "
            f"has {len(origins)}"
        )
    for path, key in keys:
        _at(changed, path)[key] = len(origins)
    for path in sorted({path for path, _ in keys}):
        notes += _change_lists(_at(changed, path), path, old_depth, origins)
    return {key: value for key, value in changed.items() if value != config.get(key)}, notes


def _depth_keys(config: Mapping[str, Any], part: ModelPart, depth: int) -> list[Key]:
    """The keys that count this part's layers, of all that have its number."""
    keys: list[Key] = []
    holders: list[tuple[tuple[str, ...], Mapping[str, Any]]] = [((), config)]
    holders += [((key,), value) for key, value in config.items() if isinstance(value, Mapping)]
    for path, holder in holders:
        keys += [(path, key) for key in DEPTH_KEYS if holder.get(key) == depth and type(holder[key]) is int]
    words = set(part.prefix.split("."))
    for side, other in (("encoder", "decoder"), ("decoder", "encoder")):
        if part.name == side or (side in words and part.name not in ("default", "text_decoder")):
            keys = [(p, k) for p, k in keys if other not in k and not any(other in step for step in p)]
            if side == "decoder":  # the keys without a word are the encoder's
                keys = [(p, k) for p, k in keys if side in k or any(side in step for step in p)] or keys
    image = part.name in ("vision_tower", "audio_tower")
    of_images = [(p, k) for p, k in keys if any(w in step for step in p for w in ("vision", "audio", "visual"))]
    return of_images if image else [one for one in keys if one not in of_images]


def _at(config: dict[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
    for step in path:
        config = config[step]
    return config


def _change_lists(
    holder: dict[str, Any], path: tuple[str, ...], old_depth: int, origins: Sequence[Origin]
) -> list[str]:
    """Lists with one entry per layer follow their layers; numbers that count layers are for the user to look at."""
    notes = []
    for key, value in list(holder.items()):
        if "layer" not in key and "pattern" not in key:
            continue
        if isinstance(value, list) and len(value) == old_depth:
            holder[key] = [_entry(config, path, key, layer, value) for config, layer in origins]
        elif isinstance(value, list) and value and all(type(v) is int and v < old_depth for v in value):
            holder[key] = [i for i, (config, layer) in enumerate(origins) if layer in _list(config, path, key, value)]
        elif type(value) is int and key not in DEPTH_KEYS and len(origins) != old_depth:
            notes.append(f"config.json has {key}: {value}, which may count layers; check it for {len(origins)} of them")
    return notes


def _list(config: Mapping[str, Any], path: tuple[str, ...], key: str, otherwise: list[Any]) -> list[Any]:
    value: Any = config
    for step in path:
        value = value.get(step, {})
    value = value.get(key)
    return value if isinstance(value, list) else otherwise


def _entry(config: Mapping[str, Any], path: tuple[str, ...], key: str, layer: int, otherwise: list[Any]) -> Any:
    own = _list(config, path, key, otherwise)
    return own[layer] if layer < len(own) else otherwise[min(layer, len(otherwise) - 1)]
