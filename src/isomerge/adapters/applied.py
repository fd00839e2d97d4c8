"""A base model seen through an adapter: the same tensors, with the adapter's updates added when they are read."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from isomerge.adapters.adapter import Adapter, Target, open_adapter
from isomerge.adapters.layout import ModuleLayout
from isomerge.checkpoint import Checkpoint, TensorInfo
from isomerge.errors import RequestError, near_miss

BLOCK_ROWS = 4096


@dataclass(frozen=True)
class Change:
    """What becomes of one tensor: base or stored values, plus an update, times DoRA's lengths."""

    source: str
    """The base's tensor it starts from; another one's name where a tied tensor gets values of its own."""
    stored: str | None = None
    """The adapter's tensor that replaces it."""
    target: Target | None = None
    transposed: bool = False
    """The tensor is (in, out): a Conv1D or an embedding."""
    added: tuple[str, float] | None = None
    """The adapter's tensor that is added, and its scale: LoRA's own bias."""


class AdaptedCheckpoint(Checkpoint):
    """W + ΔW in float32 (float64 where W is), never rounded to the stored dtype; the rest as the base has it."""

    def __init__(
        self, base: Checkpoint, adapter: Adapter, changes: Mapping[str, Change], *, untied: bool, name: str | None
    ) -> None:
        self.name = name or f"{base.name} with {adapter.name}"
        self.config, self.folder, self.revision = base.config, base.folder, base.revision
        self.tensors: Mapping[str, TensorInfo] = base.tensors
        if untied:  # a head that shared the embedding's tensor has its own from now on
            every = {**base.tensors, **{name: base.tensors[change.source] for name, change in changes.items()}}
            self.tensors = {name: every[name] for name in sorted(every)}
            self.config = {**base.config, "tie_word_embeddings": False}
        self._base, self._adapter, self._changes = base, adapter, dict(changes)
        self._last = threading.local()  # what each thread has read last

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_last": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= {**state, "_last": threading.local()}

    def side_files(self) -> list[Path]:
        return self._base.side_files()

    def identity(self) -> Any:
        parts = [part.identity() for part in self.parts()]
        return None if None in parts else parts

    def parts(self) -> list[Checkpoint]:
        """What it is made of: the base and the adapter, as they are stored."""
        return [self._base, self._adapter.checkpoint]

    def read(self, name: str) -> Tensor:
        if name not in self._changes:
            return self._base.read(name)
        info = self.tensors[name]
        whole = torch.empty(info.shape, dtype=_computed(info))
        if len(info.shape) < 2:
            return whole.copy_(self.read_rows(name, 0, 0))
        for start in range(0, info.shape[0], BLOCK_ROWS):
            stop = min(start + BLOCK_ROWS, info.shape[0])
            whole[start:stop] = self.read_rows(name, start, stop)
        return whole

    def peek(self, name: str) -> Tensor:
        return self.read(name) if name in self._changes else self._base.peek(name)

    def read_rows(self, name: str, start: int, stop: int) -> Tensor:
        change = self._changes.get(name)
        if change is None:
            return self._base.read_rows(name, start, stop)
        rows = self._updated(change, start, stop)
        if change.target is None or change.target.magnitude is None:
            return rows
        lengths = self._lengths(name, change)
        if change.transposed:  # each output is a column here
            return rows * lengths
        return rows * lengths[start:stop].reshape(-1, *[1] * (rows.dim() - 1))

    def _updated(self, change: Change, start: int, stop: int) -> Tensor:
        """Rows of W + ΔW, in memory of their own."""
        dtype = _computed(self._base.tensors[change.source])
        if change.stored is not None:
            rows = self._stored_rows(change.stored, start, stop)
        else:
            rows = self._base.read_rows(change.source, start, stop)
        rows = rows.to(dtype, copy=True)
        if change.added is not None:
            key, scale = change.added
            rows.add_(self._adapter.read(key).to(dtype), alpha=scale)
        if change.target is not None:
            left, right = self._factors(change, dtype)
            rows += (left[start:stop] @ right).mul_(change.target.scale).reshape(rows.shape)
        return rows

    def _stored_rows(self, key: str, start: int, stop: int) -> Tensor:
        if getattr(self._last, "stored", None) != key:
            self._adapter.read(key)  # once, to know that it is finite
            self._last.stored = key
        return self._adapter.checkpoint.read_rows(key, start, stop)

    def _factors(self, change: Change, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """(rows, rank) and (rank, columns) of the tensor as stored; this thread keeps those of the last tensor."""
        target = change.target
        assert target is not None
        if getattr(self._last, "module", None) != (target.module, dtype):
            b, a = (factor.to(dtype) for factor in self._adapter.factors(target))
            self._last.factors = (a.T.contiguous(), b.T.contiguous()) if change.transposed else (b, a)
            self._last.module = (target.module, dtype)
        factors: tuple[Tensor, Tensor] = self._last.factors
        return factors

    def _lengths(self, name: str, change: Change) -> Tensor:
        """DoRA: the trained length of each output's weights, over the length that W + ΔW gives it."""
        if getattr(self._last, "scaled", None) != name:
            target, info = change.target, self.tensors[name]
            assert target is not None and target.magnitude is not None
            parts = []
            for start in range(0, info.shape[0], BLOCK_ROWS):
                rows = self._updated(change, start, min(start + BLOCK_ROWS, info.shape[0])).double().flatten(1)
                parts.append(rows.square().sum(dim=0 if change.transposed else 1))
            squares = torch.stack(parts).sum(0) if change.transposed else torch.cat(parts)
            trained = self._adapter.read(target.magnitude).double().flatten()
            self._last.lengths = (trained / squares.sqrt()).to(_computed(info))
            self._last.scaled = name
        lengths: Tensor = self._last.lengths
        return lengths


def apply_adapter(
    base: Checkpoint,
    adapter: str | PathLike[str] | Checkpoint | Adapter,
    *,
    revision: str | None = None,
    name: str | None = None,
) -> Checkpoint:
    """The base with the adapter's updates added, as a checkpoint to read from; nothing is computed before it is read.

    Where the base's output head shares the embedding's tensor and the adapter changes only one of the two, the view
    has a head of its own and its config says that they are no longer tied: that is what the adapter was trained as.
    """
    opened = open_adapter(adapter, revision=revision)
    changes, untied = plan_changes(base, opened)
    return AdaptedCheckpoint(base, opened, changes, untied=untied, name=name)


class WholeUpdates:
    """What an adapter adds to each layer of a base, as whole matrices (outputs, inputs): of DoRA it has no low rank."""

    def __init__(self, base: Checkpoint, adapter: Adapter) -> None:
        self._base, self._layout = base, ModuleLayout(base)
        self._changes, untied = plan_changes(base, adapter)
        self._view = AdaptedCheckpoint(base, adapter, self._changes, untied=untied, name=None)

    def of(self, target: Target) -> Tensor:
        """(outputs, inputs), in float32 or, where the base is, float64; convolutions flattened."""
        name = self._layout.find(f"{target.module}.weight")
        assert name is not None  # plan_changes refuses a layer that the base has not
        change = self._changes[name]
        before = self._base.read(change.source).to(_computed(self._base.tensors[change.source]))
        added = (self._view.read(name) - before).flatten(1)
        return added.T.contiguous() if change.transposed else added


def plan_changes(base: Checkpoint, adapter: Adapter) -> tuple[dict[str, Change], bool]:
    """Every tensor of the base that the adapter changes, and whether tied ones part. All misfits are told at once."""
    layout = ModuleLayout(base)
    plan = _ChangePlan(base, adapter, layout)
    for target in adapter.targets.values():
        plan.add_target(target)
    for tensor, key in adapter.replaced.items():
        plan.add_stored(tensor, key)
    untied = plan.part_tied()
    if plan.problems:
        more = len(plan.problems) - 8
        shown = "; ".join(plan.problems[:8]) + (f"; and {more} more" if more > 0 else "")
        raise RequestError(
            f"While applying adapter {adapter.name} to {base.name}: {shown}. "
            f"Name the base it was trained on ({adapter.config.get('base_model_name_or_path') or 'not recorded'})."
        )
    return plan.changes, untied


class _ChangePlan:
    def __init__(self, base: Checkpoint, adapter: Adapter, layout: ModuleLayout) -> None:
        self.base, self.adapter, self.layout = base, adapter, layout
        self.problems: list[str] = []
        self.changes: dict[str, Change] = {}
        self._flagged = bool(adapter.config.get("fan_in_fan_out"))

    def add_target(self, target: Target) -> None:
        name = self._place(f"{target.module}.weight")
        if name is None:
            return
        change = self.changes.get(name) or Change(self._source(name))
        shape = self.base.tensors[change.source].shape
        straight, turned = (target.outputs, *target.inputs), (*target.inputs, target.outputs)
        transposed = self._is_transposed(target, shape)
        if shape != (turned if transposed else straight):
            self.problems.append(
                f"'{target.module}' changes a weight of shape {turned if transposed else straight}, and "
                f"'{change.source}' is {shape}"
            )
            return
        self._check_magnitude(target)
        self.changes[name] = replace(change, target=target, transposed=transposed)
        if target.bias is not None:
            bias = self._place(f"{target.module}.bias")
            if bias is not None and self._fits(bias, target.bias):
                change = self.changes.get(bias) or Change(bias)
                self.changes[bias] = replace(change, added=(target.bias, target.scale))

    def add_stored(self, tensor: str, key: str) -> None:
        name = self._place(tensor)
        if name is not None and self._fits(name, key):
            change = self.changes.get(name) or Change(self._source(name))
            self.changes[name] = replace(change, stored=key)

    def part_tied(self) -> bool:
        """A tensor that two layers share stays one only where both are changed alike. Whether any was parted."""
        parted = False
        for tied, source in self._ties().items():
            own, shared = self.changes.get(tied), self.changes.get(source)
            if own is None and shared is None:
                continue
            if own is not None and shared is not None and self._alike(own, shared):
                del self.changes[tied]
                if tied in self.base.tensors:
                    self.changes[tied] = shared
                continue
            parted = True
            if own is None and shared is not None:
                # A stored base layer lies in the shared tensor itself; a stored module is the embedding's alone.
                self.changes[tied] = Change(source, stored=shared.stored if shared.target else None)
        return parted

    def _ties(self) -> dict[str, str]:
        touched = [
            name for name, change in self.changes.items()
            if name not in self.base.tensors or (change.target is not None and change.target.kind == "embedding")
            or (len(self.base.tensors[change.source].shape) == 2 and self._has_vocabulary(change.source))
        ]  # fmt: skip
        if not touched:
            return {}  # no need to import transformers
        if self.layout.model is None and self.base.config.get("tie_word_embeddings"):
            self.problems.append(
                f"'{touched[0]}' may be shared with another layer, and without a class of transformers for this "
                "architecture it is not known with which"
            )
        disk = self.layout.on_disk
        return {disk.get(tied, tied): disk[source] for tied, source in self.layout.ties.items()}

    def _has_vocabulary(self, name: str) -> bool:
        sizes = [self.base.config.get("vocab_size")]
        sizes += [part.get("vocab_size") for part in self.base.config.values() if isinstance(part, dict)]
        return self.base.tensors[name].shape[0] in sizes

    def _alike(self, own: Change, shared: Change) -> bool:
        """Whether two layers get the same values, the one seeing them as (out, in) and the other as (in, out)."""
        if not self._equal(own.stored, shared.stored):
            return False
        if own.target is None or shared.target is None:
            return own.target is shared.target
        if own.target.magnitude or shared.target.magnitude or own.target.scale != shared.target.scale:
            return False
        (b, a), (other_b, other_a) = self.adapter.factors(own.target), self.adapter.factors(shared.target)
        return torch.equal(b, other_a.T) and torch.equal(a, other_b.T)

    def _equal(self, key: str | None, other: str | None) -> bool:
        if key is None or other is None:
            return key is other
        return torch.equal(self.adapter.read(key), self.adapter.read(other))

    def _place(self, tensor: str) -> str | None:
        """The name of the tensor among the base's, or that of a tied tensor, which is not on disk."""
        on_disk = self.layout.find(tensor)
        if on_disk is None and tensor in self.layout.ties:
            return tensor
        if on_disk is None:
            hint = near_miss(tensor, self.base.tensors)
            self.problems.append(f"the base has no '{tensor}'" + (f" ({hint.rstrip('?.')}?)" if hint else ""))
        return on_disk

    def _source(self, name: str) -> str:
        return name if name in self.base.tensors else self.layout.on_disk[self.layout.ties[name]]

    def _fits(self, name: str, key: str) -> bool:
        shape, stored = self.base.tensors[self._source(name)].shape, self.adapter.checkpoint.tensors[key].shape
        if shape != stored:
            grown = " (trained with a resized vocabulary? Resize the base the same way first)" if shape[1:] else ""
            self.problems.append(f"'{key}' is {stored}, and '{name}' of the base is {shape}{grown}")
        return shape == stored

    def _is_transposed(self, target: Target, shape: tuple[int, ...]) -> bool:
        """A rectangle shows its orientation. For a square, the stock class is asked; without one, the adapter."""
        if target.kind != "linear":
            return target.kind == "embedding"
        if len(shape) == 2 and target.outputs != target.inputs[0]:
            return shape == (*target.inputs, target.outputs)
        return self._flagged and self.layout.is_transposed(target.module) is not False

    def _check_magnitude(self, target: Target) -> None:
        if target.magnitude is not None:
            info = self.adapter.checkpoint.tensors[target.magnitude]
            if max(info.shape, default=1) != target.outputs or info.nbytes != target.outputs * info.dtype.itemsize:
                self.problems.append(f"'{target.magnitude}' is {info.shape} for {target.outputs} outputs")


def _computed(info: TensorInfo) -> torch.dtype:
    return torch.float64 if info.dtype == torch.float64 else torch.float32
