"""`isomerge.convert`: one model in another format, GGUF or a folder of safetensors."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from isomerge.adapters.adapter import require_model
from isomerge.addresses import is_url
from isomerge.arguments import require_choice, require_shared_types, require_types
from isomerge.checkpoint import (
    Checkpoint,
    CheckpointSource,
    TensorInfo,
    cast,
    parse_dtype,
    refuse_overwrite,
    write_checkpoint,
)
from isomerge.checkpoint.checks import require_floating
from isomerge.checkpoint.dtypes import dtype_entry
from isomerge.checkpoint.hashing import blocks_of
from isomerge.checkpoint.writer import counted
from isomerge.choices import GGUF_TYPES
from isomerge.errors import CheckpointError, RequestError
from isomerge.merging.plan.models import open_model
from isomerge.merging.recipe import ModelReference
from isomerge.progress_bars import Shown, callback, shows_progress
from isomerge.results import Result

SUFFIX = ".gguf"


@dataclass
class Conversion(Result):
    """One model in another format."""

    model: str
    out: Path
    format: str
    """gguf or safetensors"""
    type: str
    """How most weights are stored: the type of a GGUF file's matrices, or a dtype."""
    tensors: int
    bytes: int
    notes: list[str]
    seconds: float

    def __fspath__(self) -> str:
        return os.fspath(self.out)


@shows_progress
def convert(
    model: CheckpointSource,
    out: str | os.PathLike[str],
    *,
    type: str | None = None,
    dtype: str | torch.dtype | None = None,
    shard_size: int | str = "5GB",
    force: bool = False,
    progress: Shown = None,
) -> Conversion:
    """Write a model, or a base with an adapter, in another format: a GGUF file where `out` ends in .gguf, else a folder
    of safetensors, in which FP8, MXFP4 and GGUF are dequantised.

    `type` is how a GGUF file stores matrices: f32, f16 (the default), bf16, q8_0, q5_1, q5_0, q4_1 or q4_0; vectors are
    always f32. `dtype` is that of a folder's floating-point tensors, by default as they are.

    >>> isomerge.convert("model-a", "model-a.gguf", type="q8_0").format
    'gguf'
    """
    start = time.perf_counter()
    require_types(
        out=(out, str, os.PathLike),
        type=(type, str, None),
        dtype=(dtype, str, torch.dtype, None),
        shard_size=(shard_size, int, str),
    )
    require_shared_types(force=force, progress=progress)
    target = Path(out).expanduser()
    is_gguf = target.suffix == SUFFIX
    if is_gguf:
        require_choice("type", type or "f16", GGUF_TYPES)
        require_free(target, force)
    if (dtype if is_gguf else type) is not None:
        key, other = ("dtype", "type") if is_gguf else ("type", "dtype")
        what = "a GGUF file" if is_gguf else "a folder of safetensors"
        raise RequestError(f"Converting to {out}: {key} is not for {what}. Use {other}.", keys=(key, other))
    checkpoint = opened(model)
    if not is_gguf:
        refuse_overwrite(out, [checkpoint])
    shown, act = callback(progress), (f"{checkpoint.name} is stored as {checkpoint.read_as}",)
    notes = list(act) if checkpoint.read_as else []
    if is_gguf:
        from isomerge.checkpoint.formats.gguf_write import write_gguf

        kind = type or "f16"
        tensors, size, more = write_gguf(checkpoint, target, kind.upper(), progress=shown)
        return Conversion(
            checkpoint.name, target, "gguf", kind, tensors, size, notes + more, time.perf_counter() - start
        )
    chosen = parse_dtype(dtype) if dtype is not None else None
    plan = {name: _planned(info, chosen) for name, info in checkpoint.tensors.items()}
    written = write_checkpoint(
        out, plan, _tensors(checkpoint, plan), config=dtype_entry(checkpoint.config, chosen), donor=checkpoint,
        shard_size=shard_size, force=force, progress=counted(shown, plan, "writing"), inputs=[checkpoint],
    )  # fmt: skip
    main = chosen or max((info.dtype for info in plan.values()), key=lambda one: _size(plan, one))
    name = str(main).removeprefix("torch.")
    return Conversion(
        checkpoint.name, written.out, "safetensors", name, written.tensors, written.bytes, notes,
        time.perf_counter() - start,
    )  # fmt: skip


def opened(model: Any) -> Checkpoint:
    """A model or base+adapter by its headers."""
    reference = ModelReference.parse(str(model)) if isinstance(model, (str, Path)) else ModelReference("the model")
    checkpoint = open_model(reference, None if isinstance(model, (str, Path)) else model)
    require_model(checkpoint)
    require_floating(checkpoint)
    return checkpoint


def require_free(out: Path, force: bool) -> None:
    """Raise, before any work, where the file cannot be written or would replace another unasked."""
    if is_url(os.fspath(out)):
        raise RequestError(f"Converting to {out}: a GGUF file is written here, not to an address. Name a path.")
    if out.is_dir():
        raise RequestError(f"Converting to {out}: it is a folder. Name a file that ends in {SUFFIX}.")
    if out.exists() and not force:
        raise RequestError(
            f"Converting to {out}: the file is there, and nothing is overwritten unasked. Name a new file, or set "
            "force to replace it.",
            keys=("force",),
        )


def _planned(info: TensorInfo, dtype: torch.dtype | None) -> TensorInfo:
    return TensorInfo(info.shape, dtype) if dtype is not None and info.dtype.is_floating_point else info


def _size(plan: dict[str, TensorInfo], dtype: torch.dtype) -> int:
    return sum(info.nbytes for info in plan.values() if info.dtype == dtype)


def _tensors(checkpoint: Checkpoint, plan: dict[str, TensorInfo]) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor in the written dtype, rounded once from what is read, block by block."""
    for name, info in plan.items():
        whole = torch.empty(info.shape, dtype=info.dtype)
        flat, place = whole.reshape(-1), 0
        for block in blocks_of(checkpoint, name):
            rounded = cast(block, info.dtype)[0] if info.dtype.is_floating_point else block
            if info.dtype.is_floating_point and not bool(rounded.isfinite().all()):
                raise CheckpointError(
                    f"Converting tensor '{name}' of {checkpoint.name}: it has values that are not finite in "
                    f"{str(info.dtype).removeprefix('torch.')}. Choose a wider dtype, or use an intact copy."
                )
            flat[place : place + rounded.numel()] = rounded.reshape(-1)
            place += rounded.numel()
        yield name, whole
