"""One output as several files: how the plan is cut, and where each tensor goes in its file."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch

from isomerge.checkpoint.base import TensorInfo
from isomerge.checkpoint.header import build_header
from isomerge.errors import CheckpointError

NUMBERED = re.compile(r"-\d{5}-of-\d{5}\.safetensors$")


def split_shards(
    plan: Mapping[str, TensorInfo], shard_size: int, stems: Mapping[str, str] | None = None
) -> dict[str, dict[str, TensorInfo]]:
    """The plan cut into named files, in its own order; `stems` has the name of the files in every folder, of which a
    pipeline has one for each component.

    huggingface_hub's greedy rule, except that a tensor larger than a shard does not jump ahead of its predecessors:
    a stream can fill only one file at a time.
    """
    if stems is not None and "" not in stems:
        every: dict[str, dict[str, TensorInfo]] = {}
        for folder, stem in stems.items():
            inside = {name: info for name, info in plan.items() if name.startswith(f"{folder}/")}
            cut = split_shards(inside, shard_size, {"": stem}) if inside else {}
            every |= {f"{folder}/{file}": shard for file, shard in cut.items()}
        return every
    stem = (stems or {}).get("", "model")
    shards: list[dict[str, TensorInfo]] = [{}]
    size = 0
    for name, info in plan.items():
        if shards[-1] and size + info.nbytes > shard_size:
            shards.append({})
            size = 0
        shards[-1][name] = info
        size += info.nbytes
    if len(shards) == 1:
        return {f"{stem}.safetensors": shards[0]}
    return {f"{stem}-{i:05d}-of-{len(shards):05d}.safetensors": shard for i, shard in enumerate(shards, start=1)}


def index_texts(shards: Mapping[str, Mapping[str, TensorInfo]]) -> dict[str, bytes]:
    """By file name: the index of every folder whose weights are several files."""
    texts = {}
    for folder in dict.fromkeys(name.rpartition("/")[0] for name in shards):
        inside = {name: shard for name, shard in shards.items() if name.rpartition("/")[0] == folder}
        if len(inside) > 1:
            stem = NUMBERED.sub("", next(iter(inside)))
            texts[f"{stem}.safetensors.index.json"] = _index_text(inside, f"{folder}/" if folder else "")
    return texts


def _index_text(shards: Mapping[str, Mapping[str, TensorInfo]], front: str) -> bytes:
    total = sum(info.nbytes for shard in shards.values() for info in shard.values())
    weight_map = {
        tensor.removeprefix(front): name.removeprefix(front) for name, shard in shards.items() for tensor in shard
    }
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

    def __init__(self, plan: Mapping[str, TensorInfo], folder: str = "") -> None:
        """`folder`: of a component, whose tensors are called without it in their file."""
        front = f"{folder}/" if folder else ""
        self.header, starts = build_header({name.removeprefix(front): info for name, info in plan.items()})
        self.starts = {front + name: start for name, start in starts.items()}
        self.nbytes = len(self.header) + sum(info.nbytes for info in plan.values())
