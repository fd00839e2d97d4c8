"""What config.json means, whichever version of transformers wrote it.

Version 4 writes `rope_theta` and `rope_scaling`, version 5 one table `rope_parameters`; some families have names of
their own for the same numbers. A model of several parts keeps the settings of its language model in `text_config`, or,
written by an older version, beside it. Two configs are compared by what they say, not by how.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

ROPE = "rope_parameters"
SCALED = ("llama3", "yarn", "longrope")  # these also need the length that the model was trained for
WRITTEN_AS_ROPE = {
    ROPE, "rope_theta", "rope_scaling", "rotary_emb_base", "rotary_pct", "partial_rotary_factor",
    "rope_local_base_freq",
}  # fmt: skip

# Say how weights are used: fine-tunes may change them on purpose, and a merged model can have only one of them.
TELLING = (
    "hidden_act", "hidden_activation", "activation_function", "feed_forward_proj", ROPE, "sliding_window",
    "rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon",
)  # fmt: skip


def settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Every setting under one name: those of the language model plainly, of other parts after the part's name.

    >>> settings({"text_config": {"hidden_size": 8, "rope_theta": 1e4}, "vision_config": {"depth": 2}})
    {'vision_config.depth': 2, 'hidden_size': 8, 'rope_parameters': {'rope_theta': 10000.0, 'rope_type': 'default'}}
    """
    inner = config.get("text_config")
    text = {**config, **(inner if isinstance(inner, Mapping) else {})}
    found: dict[str, Any] = {}
    for key, value in text.items():
        if key in WRITTEN_AS_ROPE or key == "text_config":
            continue
        if key.endswith("_config") and isinstance(value, Mapping):
            found |= {f"{key}.{name}": part for name, part in settings(value).items()}
        else:
            found[key] = value
    rope = rope_parameters(text)
    return {**found, ROPE: rope} if rope else found


def rope_parameters(config: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary positions as version 5 writes them, or an empty table where nothing is said.

    >>> rope_parameters({"rope_theta": 10000, "rope_scaling": {"type": "linear", "factor": 2.0}})
    {'factor': 2.0, 'rope_theta': 10000.0, 'rope_type': 'linear'}
    """
    table = config.get("rope_scaling") or config.get(ROPE) or {}
    table = table if isinstance(table, Mapping) else {}
    theta = _first(config, "rope_theta", "rotary_emb_base")
    share = _first(config, "partial_rotary_factor", "rotary_pct")
    local = config.get("rope_local_base_freq")
    if local is not None:  # layers of two kinds, of which only the global ones are scaled
        return {
            "full_attention": _plain(table, theta, share, config),
            "sliding_attention": _plain({}, local, share, {}),
        }
    if table and all(value is None or isinstance(value, Mapping) for value in table.values()):
        return {key: _plain(value, theta, share, config) for key, value in sorted(table.items()) if value is not None}
    return _plain(table, theta, share, config) if table or theta is not None or share is not None else {}


def _plain(table: Mapping[str, Any], theta: Any, share: Any, config: Mapping[str, Any]) -> dict[str, Any]:
    made = {key: value for key, value in table.items() if key != "type" and value is not None}
    made["rope_type"] = table.get("rope_type") or table.get("type") or "default"
    made.setdefault("rope_theta", theta)
    made.setdefault("partial_rotary_factor", share)
    if made["rope_type"] in SCALED:
        trained = _first(config, "original_max_position_embeddings")
        made["original_max_position_embeddings"] = trained or made.get(
            "original_max_position_embeddings", config.get("max_position_embeddings")
        )
    numbers = {k: float(v) if isinstance(v, int) and not isinstance(v, bool) else v for k, v in made.items()}
    return {key: numbers[key] for key in sorted(numbers) if numbers[key] is not None}


def _first(config: Mapping[str, Any], *keys: str) -> Any:
    return next((config[key] for key in keys if config.get(key) is not None), None)


def unequal(
    first: Mapping[str, Any], second: Mapping[str, Any], keys: Sequence[str], *, defaults: bool = False
) -> list[str]:
    """The settings among `keys`, of any part, that differ, in words.

    What only one of the two says is no difference; or, with `defaults`, it is compared with what transformers would
    take for the other.
    """
    sides = [settings(first), settings(second)]
    names = [name for name in dict.fromkeys([*sides[0], *sides[1]]) if name.rpartition(".")[2] in keys]
    if defaults and any((name in sides[0]) != (name in sides[1]) or _is_open(sides, name) for name in names):
        sides = [settings(_completed(config)) for config in (first, second)]
        names = [name for name in dict.fromkeys([*sides[0], *sides[1]]) if name.rpartition(".")[2] in keys]
    words = []
    for name in names:
        one, other = (side.get(name) for side in sides)
        if one != other and (None not in (one, other) or (defaults and all(name in side for side in sides))):
            words.append(f"{name} is {_shown(one)} and {_shown(other)}")
    return words


def _is_open(sides: Sequence[Mapping[str, Any]], name: str) -> bool:
    """Rotary positions that differ because one side leaves a number to its class."""
    tables = [side.get(name) for side in sides]
    if tables[0] == tables[1]:
        return False
    return all(isinstance(t, Mapping) for t in tables) and tables[0].keys() != tables[1].keys()  # type: ignore[union-attr]


def _completed(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """With the defaults of its class, where transformers is there and knows it."""
    try:
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING

        made: Mapping[str, Any] = CONFIG_MAPPING[config["model_type"]].from_dict(dict(config)).to_dict()
    except Exception:  # not installed, not known, or not valid: what is said has to do
        return config
    return made


def _shown(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_shown(part)}" for key, part in value.items()) + "}"
    return f"{value:g}" if isinstance(value, float) else str(value)
