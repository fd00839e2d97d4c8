"""A merged model: computed tensor by tensor when it is written or asked for."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from isomerge.checkpoint import (
    CastReport,
    Checkpoint,
    TensorInfo,
    Written,
    cast,
    parse_dtype,
    refuse_overwrite,
    require_finite,
    write_checkpoint,
)
from isomerge.checkpoint.saving import counted, dtype_entry
from isomerge.merge.methods import METHODS


@dataclass(frozen=True)
class Output:
    """One tensor of the result (several on disk where experts are stacked) and the functions that give its inputs."""

    plan: Mapping[str, TensorInfo]
    inputs: list[Any]


@dataclass
class Merged:
    """The result of `isomerge.merge`. Nothing is computed until `save`, `state_dict` or `module`."""

    donor: Checkpoint
    inputs: list[Checkpoint]
    method: str
    weights: list[float]
    outputs: list[Output]
    config_changes: dict[str, Any]
    aligned: bool
    notes: list[str]
    started: float
    progress: Callable[[int, int, str], None] | None = None
    seconds: float | None = None
    _lost: dict[str, CastReport] = field(default_factory=dict)

    def tensors(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """Merged tensors under their names on disk, in the order they are written."""
        method = METHODS[self.method]
        for output in self.outputs:
            parts = [read() for read in output.inputs]
            for name, info in output.plan.items():
                if len(parts) == 1:  # an integer buffer, or a tensor only the donor has
                    only = parts[0][name]
                    yield name, only.to(dtype or info.dtype) if info.dtype.is_floating_point else only
                    continue
                for part, checkpoint in zip(parts, self.inputs, strict=True):
                    require_finite(name, part[name], checkpoint)
                merged, self._lost[name] = cast(
                    method([p[name] for p in parts], weights=self.weights), dtype or info.dtype
                )
                yield name, merged.cpu()

    def state_dict(self) -> dict[str, Tensor]:
        return dict(self.tensors())

    def save(
        self, out: str | Path, *, shard_size: int | str = "5GB", out_dtype: str | None = None, force: bool = False
    ) -> Written:
        """Write the merged model with the donor's config and side files."""
        refuse_overwrite(out, [*self.inputs, self.donor])
        dtype = parse_dtype(out_dtype) if out_dtype else None
        plan = {
            name: TensorInfo(info.shape, dtype if dtype and info.dtype.is_floating_point else info.dtype)
            for output in self.outputs
            for name, info in output.plan.items()
        }
        changes = {**self.config_changes, **dtype_entry(self.donor.config, dtype)}
        written = write_checkpoint(
            out, plan, self.tensors(dtype), config=changes, donor=self.donor, shard_size=shard_size, force=force,
            progress=counted(self.progress, plan, f"writing {Path(out).name}"),
        )  # fmt: skip
        self.seconds = time.perf_counter() - self.started
        return written

    def report(self) -> dict[str, Any]:
        """The JSON record of the merge."""
        notes = list(self.notes)
        for name, lost in self._lost.items():
            if not lost.lossless:
                what = f"{lost.overflow} values overflowed, {lost.underflow} became zero"
                notes.append(f"{name}: {what} in the written dtype")
        return {
            "method": self.method,
            "weights": self.weights,
            "aligned": self.aligned,
            "models": [c.name for c in self.inputs],
            "donor": self.donor.name,
            "peak_memory_bytes": peak_memory(),
            "notes": notes,
            "seconds": self.seconds if self.seconds is not None else time.perf_counter() - self.started,
        }


def peak_memory() -> int:
    """Largest resident size of this process so far, in bytes (kilobytes on Linux, bytes on macOS)."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(peak if sys.platform == "darwin" else peak * 1024)
