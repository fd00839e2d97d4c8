"""A base model's layers: their names in memory, their kinds, and which of them share one tensor.

Adapters name layers as they are in memory. transformers 5 renames tensors when it loads, and a layer's kind is not in
the file, so both are asked of the stock class, built without any weights.
"""

from __future__ import annotations

from collections import Counter
from functools import cached_property
from typing import Any

import torch
from torch import nn

from isomerge.checkpoint import Checkpoint
from isomerge.checkpoint.memory import quiet_transformers
from isomerge.checkpoint.stock_classes import class_config, named_class, not_built

TRANSPOSED = "Conv1D"
"""transformers' linear layer that stores its weight as (in, out)."""


class ModuleLayout:
    """What the stock class says about a checkpoint. Without a class that is known, names stand for themselves."""

    def __init__(self, base: Checkpoint) -> None:
        self.base = base

    @cached_property
    def model(self) -> Any:
        """The stock class without weights, None where there is none."""
        try:
            kind = named_class(self.base.config)
        except ImportError:
            return None
        if kind is None:
            return None
        try:
            with quiet_transformers(), torch.device("meta"):
                return kind(class_config(kind, self.base.config))
        except Exception as error:  # whatever transformers meets in numbers that no model has
            raise not_built(kind, error) from error

    @cached_property
    def modules(self) -> dict[str, nn.Module]:
        return dict(self.model.named_modules()) if self.model is not None else {}

    @cached_property
    def in_memory(self) -> dict[str, str]:
        """From each tensor's name on disk to its name in memory; tensors that are stacked or cut on loading are left
        out."""
        renamed = {name: self._rename(name) for name in self.base.tensors}
        count = Counter(renamed.values())
        return {name: new for name, new in renamed.items() if new is not None and count[new] == 1}

    @cached_property
    def on_disk(self) -> dict[str, str]:
        return {memory: disk for disk, memory in self.in_memory.items()}

    @cached_property
    def ties(self) -> dict[str, str]:
        """Tensors in memory that are another one: {'lm_head.weight': 'model.embed_tokens.weight'}."""
        known = getattr(self.model, "all_tied_weights_keys", None)
        if known is None:  # transformers 4 lists only the names that are tied
            return {}
        return {tied: source for tied, source in known.items() if source in self.on_disk}

    def find(self, name: str) -> str | None:
        """The tensor on disk that an adapter means: by its name there, in memory, or its only possible ending."""
        if name in self.base.tensors:
            return name
        for alias in (name, self._rename(name)):
            if alias is not None and alias in self.on_disk:
                return self.on_disk[alias]
        # A bare model and the same model below a head differ by a prefix.
        near = [disk for disk in self.base.tensors if disk.endswith("." + name) or name.endswith("." + disk)]
        return near[0] if len(near) == 1 else None

    def is_transposed(self, module: str) -> bool | None:
        """Whether the layer's weight is stored as (in, out); None where the class is not known."""
        layer = self.modules.get(module)
        return None if layer is None else type(layer).__name__ == TRANSPOSED

    @cached_property
    def _conversions(self) -> tuple[list[Any], list[Any], dict[str, Any]]:
        try:
            from transformers.conversion_mapping import get_model_conversion_mapping
            from transformers.core_model_loading import WeightConverter, WeightRenaming
        except ImportError:
            return [], [], {}  # transformers 4 renames nothing
        mapping = get_model_conversion_mapping(self.model)
        renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
        converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
        return renamings, converters, self.model.state_dict() if self.model is not None else {}

    def _rename(self, name: str) -> str | None:
        """The name in memory; None for a tensor that is stacked, cut or turned when it is loaded."""
        if self.model is None:
            return name
        renamings, converters, state = self._conversions
        if not state:
            return name
        from transformers.core_model_loading import rename_source_key

        renamed, converted = rename_source_key(name, renamings, converters, self.model.base_model_prefix, state)
        return None if converted else renamed
