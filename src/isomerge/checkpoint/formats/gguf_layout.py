"""Which tensors of a GGUF file are which of the stock class: asked of the class, and of the gguf package's name map."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from isomerge.checkpoint.formats.gguf_families import GgufFamily
from isomerge.checkpoint.memory import quiet_transformers
from isomerge.checkpoint.stock_classes import class_config, not_built
from isomerge.errors import RequestError
from isomerge.packages import require_version, why_not_imported

EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(.*)")
TURNED = re.compile(r"\.attn_(q|k)\.(weight|bias)$")


@dataclass(frozen=True)
class GgufPlace:
    """Where a tensor of a config's class lies in a GGUF file."""

    tensor: str
    """GGUF's name."""
    expert: int | None = None
    """Its place in a stack of experts."""


def gguf_package(act: str) -> Any:
    try:
        import gguf
    except ImportError as error:
        raise RequestError(f"While {act}: {why_not_imported('gguf', error)}.") from error
    return gguf


def stock_shapes(family: GgufFamily, config: Mapping[str, Any], act: str) -> dict[str, tuple[int, ...]]:
    """Names on disk and shapes of the stock class of a config; nothing is allocated."""
    try:
        require_version("transformers")
        import transformers
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError as error:
        raise RequestError(f"While {act}: {why_not_imported('transformers', error)}.") from error
    kind = getattr(transformers, family.class_name)
    try:
        with quiet_transformers(), torch.device("meta"):
            model = kind(class_config(kind, config))
            state = revert_weight_conversion(model, dict(model.state_dict()))
    except Exception as error:  # whatever numbers the class cannot be built from
        raise not_built(kind, error) from error
    return {name: tuple(tensor.shape) for name, tensor in state.items()}


def places(family: GgufFamily, names: list[str], layers: int, act: str) -> dict[str, GgufPlace | None]:
    """By the class's name of a tensor; None for one that GGUF has no name for."""
    gguf = gguf_package(act)
    arch = next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == family.arch)
    table = gguf.get_tensor_name_map(arch, layers)

    def place(name: str) -> GgufPlace | None:
        stem, _, suffix = name.rpartition(".")
        expert = None
        if found := EXPERT.fullmatch(stem):
            stem, expert = f"{found[1]}.{found[3]}", int(found[2])
        known = table.get_name(stem)
        return GgufPlace(f"{known}.{suffix}", expert) if known else None

    return {name: place(name) for name in names}


def heads_turned(family: GgufFamily, tensor: str, config: Mapping[str, Any]) -> int:
    """How many heads of a query or key tensor are stored as rotary pairs; 0 for any other tensor.

    >>> from isomerge.checkpoint.formats.gguf_families import FAMILIES
    >>> heads_turned(FAMILIES[0], "blk.0.attn_k.weight", {"num_attention_heads": 4, "num_key_value_heads": 2})
    2
    """
    found = TURNED.search(tensor) if family.pairs else None
    if found is None:
        return 0
    return int(config["num_attention_heads" if found[1] == "q" else "num_key_value_heads"])


def is_shifted(family: GgufFamily, tensor: str) -> bool:
    """Whether 1 is added to a tensor when it is stored."""
    return family.shifted and tensor.endswith("norm.weight")
