"""The outcome of a reconstruction: weights under the names of the first model, to look at or to save."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from isomerge.checkpoint import (
    CastReport,
    Checkpoint,
    TensorInfo,
    Written,
    cast,
    load_into_module,
    parse_dtype,
    refuse_overwrite,
    write_checkpoint,
)
from isomerge.checkpoint.base import Progress
from isomerge.checkpoint.dtypes import dtype_entry
from isomerge.checkpoint.memory import require_config
from isomerge.checkpoint.writer import counted


@dataclass
class Reconstructed:
    """A merged model, solved and in memory."""

    tensors: dict[str, Tensor]
    """By name on disk, in the precision they were solved in."""
    plan: dict[str, TensorInfo]
    """Shapes and dtypes as they are written."""
    models: list[Checkpoint]
    config_changes: dict[str, Any]
    record: dict[str, Any]
    progress: Progress | None = None
    _lost: dict[str, CastReport] = field(default_factory=dict)

    @property
    def config(self) -> dict[str, Any]:
        return {**self.models[0].config, **self.config_changes}

    def state_dict(self) -> dict[str, Tensor]:
        """Names and dtypes of the first model."""
        return self._cast({name: info.dtype for name, info in self.plan.items()})

    def load_into(self, module: nn.Module) -> nn.Module:
        """Put the weights into a module of the same architecture, in place, and return it."""
        require_config(module, self.config_changes)
        load_into_module(module, self.tensors)
        return module

    def save(
        self, out: str | Path, *, shard_size: int | str = "5GB", out_dtype: str | None = None, force: bool = False
    ) -> Written:
        """Write the model with the config and side files of the first one."""
        refuse_overwrite(out, self.models)
        dtype = parse_dtype(out_dtype) if out_dtype else None
        plan = {
            name: TensorInfo(info.shape, dtype if dtype and info.dtype.is_floating_point else info.dtype)
            for name, info in self.plan.items()
        }
        state = self._cast({name: info.dtype for name, info in plan.items()})
        changes = {**self.config_changes, **dtype_entry(self.config, dtype)}
        return write_checkpoint(
            out, plan, iter(state.items()), config=changes, donor=self.models[0], shard_size=shard_size, force=force,
            progress=counted(self.progress, plan, f"writing {Path(out).name}"),
        )  # fmt: skip

    def report(self) -> dict[str, Any]:
        """Per solved layer: the relative residual before and after, ridge and samples; then warnings and notes."""
        notes = list(self.record["notes"])
        for name, lost in sorted(self._lost.items()):
            if not lost.lossless:
                what = f"{lost.overflow} values overflowed, {lost.underflow} became zero"
                notes.append(f"{name}: {what} in the written dtype")
        return {**self.record, "notes": notes}

    def _cast(self, dtypes: dict[str, torch.dtype]) -> dict[str, Tensor]:
        found = {}
        for name, dtype in dtypes.items():
            tensor = self.tensors[name]
            if tensor.is_floating_point():
                tensor, self._lost[name] = cast(tensor, dtype)
            found[name] = tensor.contiguous()
        return found
