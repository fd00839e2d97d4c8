"""What headers and side files say against a merge before it starts: other architectures, settings, vocabularies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from isomerge.adapters.adapter import CONFIG
from isomerge.adapters.refuse import has_adapter_beside
from isomerge.checkpoint import Checkpoint
from isomerge.checkpoint.base import name_some
from isomerge.errors import RequestError
from isomerge.merging.data_methods import DATA_METHODS
from isomerge.merging.recipe import Recipe
from isomerge.merging.vocabulary.ids import other_ids

# Weights of the same shape mean something else when these differ.
DECISIVE = ("num_attention_heads", "num_key_value_heads", "n_head", "num_heads", "head_dim", "d_kv")
# Say how weights are used: fine-tunes may change them on purpose, and the output has the donor's.
TELLING = (
    "hidden_act", "hidden_activation", "activation_function", "feed_forward_proj", "rope_theta", "rope_scaling",
    "rope_parameters", "sliding_window", "rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon",
)  # fmt: skip


def differences(models: Sequence[Checkpoint], documents: Sequence[Recipe], *, ids: bool = True) -> list[str]:
    """Notes on what differs from the first model; what cannot be merged at all is an error with every reason.

    Without `ids`, that of tokens is left to somebody else: reading large vocabularies takes a while.
    """
    described = [model for model in models if model.config.get("model_type")]
    bare = [m.name for m in models if not m.config and m.folder is not None and m.folder == Path(m.name)]
    if described and bare:
        raise RequestError(
            f"Merging: {name_some(bare)} has no config.json, so nothing says what its weights are. Copy it from where "
            "the model came; or name the weight file itself to merge it as it is."
        )
    if len(described) < 2:
        return []
    first = described[0]
    lenient = {"passthrough", *(name for name, method in DATA_METHODS.items() if method.any_width)}
    stacked = all(document.merge_method in lenient for document in documents)
    problems: list[str] = []
    notes: list[str] = []
    for other in described[1:]:
        kinds = [str(c.config["model_type"]) for c in (first, other)]
        if kinds[0] != kinds[1]:
            problems.append(f"{first.name} is of type '{kinds[0]}' and {other.name} of type '{kinds[1]}'")
            continue
        decisive = _unequal(first.config, other.config, DECISIVE)
        (notes if stacked else problems).extend(f"{text} in {first.name} and {other.name}" for text in decisive)
        notes += [
            f"{text} in {first.name} and {other.name}; the result has that of its config's donor"
            for text in _unequal(first.config, other.config, TELLING)
        ]
    if problems:
        raise RequestError(
            f"Merging: {'; '.join(problems)}. Only models of one architecture have weights that mean the same; merge "
            "fine-tunes of one base, or models trained alike."
        )
    if ids and not any(document.tokenizer for document in documents):
        notes += [
            f"{text}: their rows are merged with those of other tokens. Add 'tokenizer: {{source: union}}' "
            "(--tokenizer union) to match them by text"
            for text in other_ids(described)
        ]
    return notes


def left_out_adapters(models: Sequence[Checkpoint]) -> list[str]:
    """A word on adapters that lie beside a model's weights: whoever looks at the model in transformers sees both."""
    return [
        f"{name} has an adapter beside its weights ({CONFIG}), which is not merged; for that, move it to a folder of "
        f"its own and name {name}+FOLDER"
        for name in [model.name for model in models if has_adapter_beside(model)]
    ]


def _unequal(one: Mapping[str, Any], other: Mapping[str, Any], keys: Sequence[str]) -> list[str]:
    pairs = {key: (one.get(key), other.get(key)) for key in keys}
    return [f"{key} is {a} and {b}" for key, (a, b) in pairs.items() if None not in (a, b) and a != b]
