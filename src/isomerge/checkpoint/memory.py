"""Checkpoints in memory: a state_dict or an nn.Module."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from isomerge.checkpoint.base import Checkpoint, TensorInfo, name_some
from isomerge.errors import CheckpointError


class MemoryCheckpoint(Checkpoint):
    """Tensors that are already there. Reads are copies, so that no method can write into the caller's model."""

    folder: Path | None = None
    revision: str | None = None

    def __init__(self, name: str, state: Mapping[str, torch.Tensor], config: dict[str, Any]) -> None:
        wrong = sorted(str(key) for key, value in state.items() if not isinstance(value, torch.Tensor))
        if wrong:
            raise CheckpointError(
                f"While opening {name}: {name_some(wrong)} is not a tensor. "
                "Pass a flat state_dict of tensor names to tensors, as module.state_dict() gives."
            )
        absent = sorted(key for key, value in state.items() if value.is_meta)
        if absent:
            raise CheckpointError(
                f"While opening {name}: {name_some(absent)} has no values (device 'meta'), because the model is "
                "offloaded or was never loaded. Load it onto the CPU, or pass its folder instead."
            )
        self.name, self.config = name, config
        self._state = dict(state)
        self.tensors: Mapping[str, TensorInfo] = {key: TensorInfo.of(self._state[key]) for key in sorted(self._state)}

    def peek(self, name: str) -> torch.Tensor:
        if name not in self._state:
            self.unknown_tensor(name)
        return self._state[name].detach()

    def read(self, name: str) -> torch.Tensor:
        tensor = self.peek(name)
        return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)

    def side_files(self) -> list[Path]:
        return []
