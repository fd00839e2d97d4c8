"""Rotary positions of a GGUF file: a base and a kind of scaling in the metadata, factors as tensors of their own."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from isomerge.checkpoint.config_meaning import rope_parameters
from isomerge.checkpoint.formats.gguf_families import GgufFamily
from isomerge.checkpoint.header import HeaderError
from isomerge.errors import CheckpointError

FREQUENCIES, LONG, SHORT = "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"
FACTORS = (FREQUENCIES, LONG, SHORT)
TRAINED = (8192, 4096, 2048, 16384, 32768)
"""Lengths that models with scaled frequencies were trained for, which the file does not say."""


def rotary_read(
    family: GgufFamily, metadata: Mapping[str, Any], values: Callable[[str], np.ndarray | None], head: int
) -> dict[str, Any]:
    """config.json's rope_parameters. `values` gives the factors that the file holds under a name, or None."""

    def said(key: str) -> Any:
        return metadata.get(f"{family.arch}.rope.{key}")

    made: dict[str, Any] = {"rope_theta": float(said("freq_base") or 1e4), "rope_type": "default"}
    kind, factor = said("scaling.type"), said("scaling.factor")
    trained = said("scaling.original_context_length")
    long, short, frequencies = values(LONG), values(SHORT), values(FREQUENCIES)
    if long is not None and short is not None:
        made |= {"rope_type": "longrope", "long_factor": long.tolist(), "short_factor": short.tolist()}
    elif frequencies is not None:
        made |= _frequencies_read(made["rope_theta"], frequencies, head)
    elif kind == "linear" and factor:
        made |= {"rope_type": "linear", "factor": float(factor)}
    elif kind == "yarn":
        made |= {"rope_type": "yarn", "factor": float(factor or 1)}
    if trained and made["rope_type"] in ("yarn", "longrope"):
        made["original_max_position_embeddings"] = int(trained)
    width = said("dimension_count")
    if not family.split_heads and width and width != head:
        made["partial_rotary_factor"] = width / head
    if family.local_theta is None:
        return made
    return {
        "full_attention": made,
        "sliding_attention": {"rope_theta": said("freq_base_swa") or family.local_theta, "rope_type": "default"},
    }


def scaled_frequencies(theta: float, width: int, factor: float, low: float, high: float, trained: int) -> np.ndarray:
    """By how much each rotary frequency is divided: 1 where its wave is short, `factor` where it is long, and between
    the two in between."""
    wave = 2 * math.pi * theta ** (np.arange(0, width, 2, dtype=np.float64) / width)
    smooth = (trained / wave - low) / (high - low)
    between = 1 / ((1 - smooth) / factor + smooth)
    return np.where(wave > trained / low, factor, np.where(wave < trained / high, 1.0, between))


def _frequencies_read(theta: float, stored: np.ndarray, head: int) -> dict[str, Any]:
    factor = float(stored.max())
    for trained in TRAINED:
        made = scaled_frequencies(theta, 2 * len(stored), factor, 1.0, 4.0, trained)
        if 2 * len(stored) == head and np.allclose(made, stored, rtol=1e-5):
            return {
                "rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                "original_max_position_embeddings": trained,
            }  # fmt: skip
    raise HeaderError(
        f"its {FREQUENCIES} scales rotary frequencies in a way that config.json cannot say",
        "Use the safetensors model it was made from.",
    )


def rotary_written(
    family: GgufFamily, config: Mapping[str, Any], head: int, act: str
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The metadata's entries below `ARCH.rope.`, and the tensors of factors."""
    rope = rope_parameters(config)
    if family.local_theta is not None:
        local = rope.get("sliding_attention", {}).get("rope_theta", family.local_theta)
        rope = rope.get("full_attention", rope)
        if local != family.local_theta:
            raise CheckpointError(f"While {act}: its sliding layers have another rotary base than GGUF's programs use.")
    width = round(head * float(rope.get("partial_rotary_factor", 1.0)))
    said: dict[str, Any] = {"freq_base": float(rope.get("rope_theta", 1e4)), "dimension_count": width}
    kind, factor = rope.get("rope_type", "default"), float(rope.get("factor", 1.0))
    trained = int(rope.get("original_max_position_embeddings") or config["max_position_embeddings"])
    known = {"rope_theta", "rope_type", "partial_rotary_factor", "factor", "original_max_position_embeddings"}
    if kind == "default":
        return said, {}
    if kind in ("linear", "yarn") and rope.keys() <= known:
        said |= {"scaling.type": kind, "scaling.factor": factor}
        return said | ({"scaling.original_context_length": trained} if kind == "yarn" else {}), {}
    if kind == "llama3":
        low, high = float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
        factors = scaled_frequencies(said["freq_base"], width, factor, low, high, trained)
        return said, {FREQUENCIES: factors.astype(np.float32)}
    if kind == "longrope" and rope.keys() <= known | {"long_factor", "short_factor"}:
        scale = config["max_position_embeddings"] / trained
        attention = math.sqrt(1 + math.log(scale) / math.log(trained)) if scale > 1 else 1.0
        said |= {"scaling.original_context_length": trained, "scaling.attn_factor": attention}
        stored = {LONG: rope["long_factor"], SHORT: rope["short_factor"]}
        return said, {name: np.array(values, dtype=np.float32) for name, values in stored.items()}
    raise CheckpointError(
        f"While {act}: its rotary positions are scaled by '{kind}' with {', '.join(sorted(rope.keys() - known))}, for "
        "which GGUF has no entries. Write safetensors instead."
    )
