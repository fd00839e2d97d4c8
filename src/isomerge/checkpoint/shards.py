"""One output as several files: how the plan is cut, and where each tensor goes in its file."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch

from isomerge.checkpoint.base import TensorInfo
from isomerge.checkpoint.header import build_header
from isomerge.errors import CheckpointError


def split_shards(plan: Mapping[str, TensorInfo], shard_size: int) -> dict[str, dict[str, TensorInfo]]:
    """The plan cut into named files, in its own order.

    huggingface_hub's greedy rule, except that a tensor larger than a shard does not jump ahead of its predecessors:
    a stream can fill only one file at a time.
    """
    shards: list[dict[str, TensorInfo]] = [{}]
    size = 0
    for name, info in plan.items():
        if shards[-1] and size + info.nbytes > shard_size:
            shards.append({})
            size = 0
        shards[-1][name] = info
        size += info.nbytes
    if len(shards) == 1:
        return {"model.safetensors": shards[0]}
    return {f"model-{i:05d}-of-{len(shards):05d}.safetensors": shard for i, shard in enumerate(shards, start=1)}


def index_text(shards: Mapping[str, Mapping[str, TensorInfo]]) -> bytes:
    """The JSON of model.safetensors.index.json."""
    total = sum(info.nbytes for shard in shards.values() for info in shard.values())
    weight_map = {tensor: name for name, shard in shards.items() for tensor in shard}
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    return (json.dumps(index, indent=2, ensure_ascii=False) + "\n").encode("utf-8")


class TensorStream:
    """The produced tensors, held against the plan one by one."""

    def __init__(self, produce: Iterable[tuple[str, torch.Tensor]], out: Path) -> None:
        self._stream = iter(produce)
        self._out = out

    def take(self, name: str, info: TensorInfo) -> torch.Tensor:
        act = f"While writing tensor '{name}' to {self._out}"
        try:
            given, tensor = next(self._stream)
        except StopIteration:
            raise CheckpointError(f"{act}: the tensors ended before it. Produce every tensor of the plan.") from None
        if given != name:
            raise CheckpointError(f"{act}: '{given}' was produced in its place. Produce tensors in the plan's order.")
        if TensorInfo.of(tensor) != info:
            raise CheckpointError(
                f"{act}: a {tuple(tensor.shape)} tensor of {tensor.dtype} was produced where the plan has {info.shape} "
                f"of {info.dtype}. Make plan and tensors agree."
            )
        return tensor

    def end(self) -> None:
        for name, _ in self._stream:
            raise CheckpointError(
                f"While writing {self._out}: tensor '{name}' was produced but is not in the plan. Add it to the plan."
            )


class Shard:
    """One safetensors file to come: its header, and so the place of every tensor, is known before any tensor is."""

    def __init__(self, plan: Mapping[str, TensorInfo]) -> None:
        self.header, self.starts = build_header(plan)
        self.nbytes = len(self.header) + sum(info.nbytes for info in plan.values())
