"""Merge LoRA adapters in the space of their updates ΔW, and write the result as one adapter again."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from isomerge.adapters.adapter import BIAS, Adapter, Target, open_adapter
from isomerge.adapters.applied import WholeUpdates
from isomerge.adapters.layout import ModuleLayout
from isomerge.adapters.lowrank import choose_rank, decompose, factorise, halves, squared_error
from isomerge.adapters.write import lora_config, write_adapter
from isomerge.arguments import require_choice
from isomerge.checkpoint import Checkpoint, refuse_overwrite, require_finite
from isomerge.checkpoint.base import Progress
from isomerge.errors import RequestError
from isomerge.merging.methods import METHODS, Method
from isomerge.merging.run.rows import InMemory, LowRankUpdate, TensorGroup, TensorSource
from isomerge.results import Result

# Methods whose result is Σ c_k ΔW_k with the same c_k for every element: the sum of products is a product again.
LINEAR = {"linear", "task_arithmetic"}
ZERO = "an update that is zero"


@dataclass(frozen=True)
class AdaptedLayer:
    """One layer of the result, and its target in each adapter; None where an adapter leaves it alone: ΔW = 0."""

    module: str
    targets: tuple[Target | None, ...]

    @property
    def like(self) -> Target:
        return next(target for target in self.targets if target is not None)


@dataclass
class AdapterMerge(Result):
    """The adapter that was written, and what cutting it to its rank has lost, relative to the merged update."""

    out: Path
    method: str
    targets: list[dict[str, Any]]
    """Name, rank and relative error of each layer."""
    relative_error: float
    notes: list[str]
    tensors: int
    bytes: int
    files: tuple[Path, ...]
    sha256: str | None
    seconds: float


@dataclass
class _MergedAdapter:
    tensors: dict[str, Tensor] = field(default_factory=dict)
    ranks: dict[str, int] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)
    squares: list[float] = field(default_factory=lambda: [0.0, 0.0])
    notes: list[str] = field(default_factory=list)


def merge_adapters(
    adapters: Sequence[str | os.PathLike[str] | Checkpoint | Adapter],
    *,
    out: str | os.PathLike[str],
    method: str = "linear",
    options: Mapping[str, Any] | None = None,
    base: Checkpoint | None = None,
    rank: int | None = None,
    seed: int = 0,
    force: bool = False,
    progress: Progress | None = None,
) -> AdapterMerge:
    """Merge adapters of one base into one adapter; ranks, scales and targets may differ.

    Each layer's updates ΔW = scale · B A are merged by `method` with its `options` ({"weight": [0.7, 0.3]}), then cut
    to `rank`, by default the largest rank the layer has in any adapter. The record says what the cut lost, relative to
    the merged update, per layer and in total; a rank of the sum of the ranks loses nothing for `linear`.
    `base` is needed where adapters store whole tensors that not all of them have, and for DoRA, whose updates depend on
    the base's weights.
    """
    start = time.perf_counter()
    opened = [open_adapter(adapter) for adapter in adapters]
    chosen = _check_request(opened, method, base, rank)
    refuse_overwrite(out, [adapter.checkpoint for adapter in opened])
    result = _MergedAdapter(notes=_notes(opened))
    layers = _match(opened, base)
    merge = _Merging(opened, base, chosen, dict(options or {}), seed)
    whole = _whole_tensors(opened, base, layers, merge)
    for count, layer in enumerate(layers, start=1):
        twin = _twin(layer, layers[: count - 1], opened)
        if twin is not None:
            _copy_twin(layer, twin, result)
        else:
            _merge_layer(layer, merge, rank, result)
        if progress:
            progress(count, len(layers), "merging")
    result.tensors |= whole
    written = write_adapter(
        out,
        result.tensors,
        _config(opened, layers, result),
        force=force,
        inputs=[adapter.checkpoint for adapter in opened],
    )
    total, lost = result.squares
    return AdapterMerge(
        out=written.out,
        method=method,
        targets=result.rows,
        relative_error=math.sqrt(lost / total) if total else 0.0,
        notes=result.notes,
        tensors=written.tensors,
        bytes=written.bytes,
        files=written.files,
        sha256=written.sha256,
        seconds=time.perf_counter() - start,
    )


def _check_request(adapters: list[Adapter], method: str, base: Checkpoint | None, rank: int | None) -> Method:
    require_choice("method", method, METHODS)
    chosen = METHODS[method]
    problems = []
    own = len(adapters) - _from_first(chosen)
    if own < chosen.least or (chosen.most is not None and own > chosen.most):
        bounds = f"at least {chosen.least}" if chosen.most is None else f"{chosen.least} to {chosen.most}"
        extra = " beside the first" if _from_first(chosen) else ""
        problems.append(f"{method} takes {bounds} adapters{extra}, and {len(adapters)} are named")
    if rank is not None and rank < 1:
        problems.append(f"the rank cannot be {rank}: give a positive whole number")
    scaled = [adapter.name for adapter in adapters if _is_dora(adapter)] if base is None else []
    if scaled:
        problems.append(
            f"{', '.join(scaled)}: what a DoRA adapter adds depends on the base's weights, so name the base (base=…)"
        )
    if problems:
        raise RequestError(f"Merging adapters: {'; '.join(problems)}.", keys=("base",) if scaled else ())
    return chosen


def _is_dora(adapter: Adapter) -> bool:
    return any(target.magnitude for target in adapter.targets.values())


def _from_first(method: Method) -> bool:
    """Whether the method goes from one model to another (slerp): the first adapter is then where it starts."""
    return method.base == "required" and method.most == 1


def _notes(adapters: list[Adapter]) -> list[str]:
    bases = {str(adapter.config.get("base_model_name_or_path")) for adapter in adapters}
    notes = []
    if len(bases) > 1:
        notes.append(
            f"the adapters name different bases ({', '.join(sorted(bases))}): their updates only add up if these are "
            "the same model"
        )
    scaled = [adapter.name for adapter in adapters if _is_dora(adapter)]
    if scaled:
        notes.append(
            f"{', '.join(scaled)}: DoRA scales whole rows of the base, which has no low rank. The error says what "
            "the cut to the rank loses; a higher `rank` keeps more, and models merge without a loss"
        )
    if len(adapters) > 1:
        shared = set.intersection(*(set(adapter.targets) for adapter in adapters))
        if not shared and any(adapter.targets for adapter in adapters):
            notes.append("the adapters have no layer in common: each layer comes from one of them")
    return notes


def _match(adapters: list[Adapter], base: Checkpoint | None) -> list[AdaptedLayer]:
    """The layers of all adapters. With a base, two names of one layer (on disk and in memory) are one."""
    layout = ModuleLayout(base) if base is not None else None
    rows: dict[str, list[Target | None]] = {}
    problems = []
    for index, adapter in enumerate(adapters):
        for module, target in sorted(adapter.targets.items()):
            known = (layout.find(f"{module}.weight") or module) if layout else module
            row = rows.setdefault(known, [None] * len(adapters))
            like = next((other for other in row if other is not None), target)
            if (like.kind, like.inputs, like.outputs) != (target.kind, target.inputs, target.outputs):
                problems.append(
                    f"'{module}' is {(target.outputs, *target.inputs)} in {adapter.name} and "
                    f"{(like.outputs, *like.inputs)} in another"
                )
            row[index] = target
    if problems:
        raise RequestError(f"Merging adapters: {'; '.join(problems[:8])}. Merge adapters of one base.")
    layers = [AdaptedLayer(next(t for t in row if t is not None).module, tuple(row)) for row in rows.values()]
    # Embeddings first: a head that shares its embedding's tensor takes over what became of it.
    return sorted(layers, key=lambda layer: (layer.like.kind != "embedding", layer.module))


class _Merging:
    """A method with its options, run on one tensor of every adapter."""

    def __init__(
        self, adapters: list[Adapter], base: Checkpoint | None, method: Method, options: dict[str, Any], seed: int
    ) -> None:
        self.adapters, self.method, self._options, self._seed = adapters, method, options, seed
        self._whole = {a.name: WholeUpdates(base, a) for a in adapters if base is not None and _is_dora(a)}
        self.coefficients = self._probe() if method.name in LINEAR else None

    def update(self, layer: AdaptedLayer, adapter: Adapter, target: Target | None) -> TensorSource:
        """What one adapter adds to a layer: a product of factors, but for DoRA."""
        label = f"the update of '{layer.module}' in {adapter.name}"
        if target is None:
            zeros = torch.zeros(layer.like.outputs, 1), torch.zeros(1, math.prod(layer.like.inputs))
            return LowRankUpdate(*zeros, label)
        if target.magnitude is not None:
            return InMemory(self._whole[adapter.name].of(target), label)
        left, right = adapter.factors(target)
        return LowRankUpdate(left * target.scale, right, label)

    def run(self, name: str, sources: Sequence[TensorSource], zero: TensorSource | None) -> Tensor:
        """The merged tensor; `zero` is the base of methods that add to one."""
        if _from_first(self.method):
            group = TensorGroup(name, sources[1:], sources[0], seed=self._seed)
        else:
            group = TensorGroup(name, sources, zero if self.method.base == "required" else None, seed=self._seed)
        try:
            combine = self.method(group, **self._options)
        except RequestError as error:
            raise RequestError(f"Merging adapters, '{name}': {error}") from error
        return torch.cat([combine(block).reshape(-1) for block in group.blocks()]).reshape(group.shape)

    def _probe(self) -> list[float]:
        """What a linear method multiplies each adapter by: it shows when the adapters are unit vectors."""
        unit = torch.eye(len(self.adapters), dtype=torch.float64)
        units = [InMemory(row[None], "a unit vector") for row in unit]
        merged = self.run("coefficients", units, InMemory(torch.zeros_like(unit[:1]), ZERO))
        return [float(value) for value in merged[0]]


def _merge_layer(layer: AdaptedLayer, merging: _Merging, rank: int | None, result: _MergedAdapter) -> None:
    like, adapters = layer.like, merging.adapters
    updates = [merging.update(layer, adapter, target) for adapter, target in zip(adapters, layer.targets, strict=True)]
    products = [update for update in updates if isinstance(update, LowRankUpdate)]
    limit = rank or max(target.rank for target in layer.targets if target is not None)
    if merging.coefficients is not None and len(products) == len(updates):
        weighted = [product.left * c for product, c in zip(products, merging.coefficients, strict=True)]
        u, values, vt = factorise(torch.cat(weighted, 1), torch.cat([product.right for product in products]))
        total = float(values.square().sum())
        keep = choose_rank(values, total, limit, None)
        left, right = halves(u, values, vt, keep)
        lost = float(values[keep:].square().sum())
    else:
        zero = LowRankUpdate(torch.zeros(like.outputs, 1), torch.zeros(1, math.prod(like.inputs)), ZERO)
        merged = merging.run(f"{layer.module}.weight", updates, zero)
        total = float(merged.square().sum(dtype=torch.float64))
        u, values, vt = decompose(merged, limit, None)
        keep = choose_rank(values, total, limit, None)
        left, right = halves(u, values, vt, keep)
        lost = squared_error(merged, left, right)
    result.squares[0] += total
    result.squares[1] += lost
    result.ranks[layer.module] = keep
    result.rows.append({"name": layer.module, "rank": keep, "error": math.sqrt(lost / total) if total else 0.0})
    result.tensors |= _named(layer.module, like, left, right)
    biases = [target.bias if target is not None else None for target in layer.targets]
    if any(adapter.config.get("lora_bias") for adapter in adapters):
        result.tensors[f"{layer.module}.lora_B.bias"] = _merged_bias(layer, biases, adapters, merging)


def _twin(layer: AdaptedLayer, earlier: list[AdaptedLayer], adapters: list[Adapter]) -> AdaptedLayer | None:
    """The embedding that shares its tensor, and so its update, with this layer in every adapter."""
    if layer.like.kind != "linear" or not all(adapter.config.get("ensure_weight_tying") for adapter in adapters):
        return None
    for other in earlier:
        pairs = list(zip(adapters, layer.targets, other.targets, strict=True))
        if other.like.kind == "embedding" and all(
            (own is None and twin is None) or (own is not None and twin is not None and _are_tied(adapter, own, twin))
            for adapter, own, twin in pairs
        ):
            return other
    return None


def _are_tied(adapter: Adapter, own: Target, twin: Target) -> bool:
    """Whether the one update is the other, transposed. DoRA's lengths are of outputs, which the two do not share."""
    if own.magnitude or twin.magnitude:
        return False
    (b, a), (other_b, other_a) = adapter.factors(own), adapter.factors(twin)
    return torch.equal(b, other_a.T) and torch.equal(a, other_b.T)


def _copy_twin(layer: AdaptedLayer, twin: AdaptedLayer, result: _MergedAdapter) -> None:
    a, b = (result.tensors[f"{twin.module}.lora_embedding_{side}"] for side in "AB")
    result.tensors |= _named(layer.module, layer.like, a.T.contiguous(), b.T.contiguous())
    result.ranks[layer.module] = result.ranks[twin.module]
    row = next(row for row in result.rows if row["name"] == twin.module)
    result.rows.append({**row, "name": layer.module})


def _merged_bias(layer: AdaptedLayer, keys: list[str | None], adapters: list[Adapter], merging: _Merging) -> Tensor:
    added = []
    for adapter, target, key in zip(adapters, layer.targets, keys, strict=True):
        bias = torch.zeros(layer.like.outputs)
        if key is not None and target is not None:
            bias = adapter.read(key).float() * target.scale
        added.append(InMemory(bias, f"the bias added to '{layer.module}' in {adapter.name}"))
    return merging.run(f"{layer.module}.bias", added, InMemory(torch.zeros(layer.like.outputs), ZERO))


def _named(module: str, like: Target, b: Tensor, a: Tensor) -> dict[str, Tensor]:
    if like.kind == "embedding":
        return {f"{module}.lora_embedding_A": a, f"{module}.lora_embedding_B": b}
    if like.kind == "convolution":
        a, b = a.reshape(-1, *like.inputs), b.reshape(*b.shape, *[1] * (len(like.inputs) - 1))
    return {f"{module}.lora_A.weight": a, f"{module}.lora_B.weight": b}


def _whole_tensors(
    adapters: list[Adapter], base: Checkpoint | None, layers: list[AdaptedLayer], merging: _Merging
) -> dict[str, Tensor]:
    """Tensors that adapters store whole, merged as in models; one that an adapter lacks is the base's."""
    layout = ModuleLayout(base) if base is not None else None
    adapted = {layer.module for layer in layers}
    names = sorted({name for adapter in adapters for name in adapter.replaced})
    problems = []
    result = {}
    for name in names:
        module, _, parameter = name.rpartition(".")
        on_disk = layout.find(name) if layout else None
        holders = [adapter for adapter in adapters if name in adapter.replaced]
        if module in adapted and parameter == "weight":
            stored = [adapter.read(adapter.replaced[name]) for adapter in holders]
            if not all(torch.equal(stored[0], other) for other in stored[1:]) or not all(
                module in adapter.targets for adapter in holders
            ):
                problems.append(f"'{name}' is stored whole in one adapter and adapted in another, or differs")
            result[f"{module}.base_layer.weight"] = stored[0]  # the base's own, kept with an adapted embedding
            continue
        needs_base = len(holders) < len(adapters) or (
            merging.method.base == "required" and not _from_first(merging.method)
        )
        if needs_base and (base is None or on_disk is None):
            problems.append(f"'{name}' is stored whole, and merging it needs the base's tensor")
            continue
        shapes = {adapter.checkpoint.tensors[adapter.replaced[name]].shape for adapter in holders}
        if on_disk is not None and base is not None:
            shapes.add(base.tensors[on_disk].shape)
        if len(shapes) > 1:
            problems.append(f"'{name}' has the shapes {sorted(shapes)}")
            continue
        result[f"{module}.base_layer.{parameter}" if module in adapted else name] = _merge_whole(
            name, on_disk, adapters, base, merging
        )
    if problems:
        raise RequestError(
            f"Merging adapters: {'; '.join(problems[:8])}. Name the base (base=…), or merge the models themselves."
        )
    return result


def _merge_whole(
    name: str, on_disk: str | None, adapters: list[Adapter], base: Checkpoint | None, merging: _Merging
) -> Tensor:
    original = None
    if base is not None and on_disk is not None:
        original = base.read(on_disk)
        require_finite(on_disk, original, base)
    sources = []
    for adapter in adapters:
        tensor = adapter.read(adapter.replaced[name]) if name in adapter.replaced else original
        assert tensor is not None
        sources.append(InMemory(tensor.float(), f"tensor '{name}' of {adapter.name}"))
    return merging.run(name, sources, InMemory(original.float(), f"'{on_disk}'") if original is not None else None)


def _config(adapters: list[Adapter], layers: list[AdaptedLayer], result: _MergedAdapter) -> dict[str, Any]:
    first = adapters[0].config
    stored = {name.rpartition(".")[0] for adapter in adapters for name in adapter.replaced}
    kept = {
        name
        for adapter in adapters
        for name in adapter.config.get("modules_to_save") or []
        if any(module == name or module.endswith("." + name) or f".{name}." in f".{module}." for module in stored)
    }
    about = {
        **{key: first.get(key) for key in ("base_model_name_or_path", "revision", "task_type", "auto_mapping")},
        "fan_in_fan_out": any(adapter.config.get("fan_in_fan_out") for adapter in adapters),
        "bias": max((adapter.config.get("bias", "none") for adapter in adapters), key=BIAS.index),
        "modules_to_save": sorted(kept) or None,
        "lora_bias": any(adapter.config.get("lora_bias") for adapter in adapters),
        "ensure_weight_tying": all(adapter.config.get("ensure_weight_tying") for adapter in adapters),
    }
    return lora_config(result.ranks, _target_modules(adapters, layers), about)


def _target_modules(adapters: list[Adapter], layers: list[AdaptedLayer]) -> list[str]:
    """The adapters' own short names where they cover every layer, the layers' whole names otherwise."""
    short: set[str] = set()
    for adapter in adapters:
        given = adapter.config.get("target_modules")
        short |= set(given) if isinstance(given, list) else set()
    if all(any(layer.module == s or layer.module.endswith("." + s) for s in short) for layer in layers):
        return sorted(short)
    return [layer.module for layer in layers]
