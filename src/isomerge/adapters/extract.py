"""What a fine-tuned model added to its base, as a LoRA adapter."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from isomerge.adapters.adapter import BIAS, holds_adapter, into_its_base, require_model
from isomerge.adapters.layout import TRANSPOSED, ModuleLayout
from isomerge.adapters.lowrank import choose_rank, decompose, halves, squared_error
from isomerge.adapters.write import lora_config, write_adapter
from isomerge.arguments import require_shared_types, require_types
from isomerge.checkpoint import (
    Checkpoint,
    CheckpointSource,
    is_harmless_buffer,
    open_checkpoint,
    refuse_overwrite,
    require_finite,
    require_floating,
)
from isomerge.checkpoint.base import Progress, name_some
from isomerge.checkpoint.checks import differences_in_size
from isomerge.choices import DEFAULT_RANK
from isomerge.errors import RequestError
from isomerge.name_patterns import NamePattern
from isomerge.progress_bars import Shown, callback, shows_progress
from isomerge.results import Result


@dataclass
class Extraction:
    """The adapter in the making. Names are those in memory, without PEFT's prefix."""

    base: Checkpoint
    finetuned: Checkpoint
    layout: ModuleLayout
    pattern: NamePattern | None
    """Layers to adapt; None: all."""
    rank: int | None
    energy: float | None
    tensors: dict[str, Tensor] = field(default_factory=dict)
    ranks: dict[str, int] = field(default_factory=dict)
    whole: set[str] = field(default_factory=set)
    """Modules stored as they are: norms, and whatever else is not a matrix."""
    bias: str = "none"
    rows: list[dict[str, Any]] = field(default_factory=list)
    left_out: list[dict[str, Any]] = field(default_factory=list)
    squares: list[float] = field(default_factory=lambda: [0.0, 0.0])
    """Of everything that changed, and of what the adapter misses of it."""
    kept_whole: frozenset[str] = frozenset()
    """Tensors, by name on disk, of modules that are stored as they are whatever their shape."""
    factors: torch.dtype = torch.float32
    """What factors are stored in."""
    about: Mapping[str, Any] = field(default_factory=dict)
    """What else the adapter's config says."""

    def add(self, name: str) -> None:
        if name in self.kept_whole:
            self.add_whole(name)
        elif _is_matrix(self.base, name):
            self.add_matrix(name)
        else:
            self.add_vector(name)

    def add_whole(self, name: str) -> None:
        """A trained tensor that replaces the base's."""
        memory = self.layout.in_memory.get(name, name)
        self.squares[0] += float(self._difference(name).square().sum(dtype=torch.float64))
        self.tensors[memory] = self._trained(name)
        self.whole.add(memory.rpartition(".")[0])

    def add_matrix(self, name: str) -> None:
        difference = self._difference(name)
        changed = float(difference.square().sum(dtype=torch.float64))
        if changed == 0:
            return
        self.squares[0] += changed
        module = self.layout.in_memory.get(name, "").removesuffix(".weight")
        kind = _kind(self.layout.modules.get(module))
        if kind is None or not self._wants(module):
            self._leave_out(name, changed, "not a layer that LoRA adapts" if kind is None else "not among the targets")
            return
        matrix = difference.flatten(1)
        u, values, vt = decompose(matrix, self.rank, self.energy)
        rank = choose_rank(values, changed, self.rank, self.energy)
        left, right = halves(u, values, vt, rank, self.factors)
        missed = squared_error(matrix, left, right)
        self.squares[1] += missed
        self.ranks[module] = rank
        self.rows.append({"name": name, "rank": rank, "error": math.sqrt(missed / changed), "norm": math.sqrt(changed)})
        self.tensors |= named_factors(module, kind, left, right, difference.shape)
        for tied, source in self.layout.ties.items():
            if source == f"{module}.weight":  # PEFT adapts the layer that shares the tensor with the same factors
                self.tensors |= named_factors(tied.removesuffix(".weight"), "linear", left, right, difference.shape)

    def add_vector(self, name: str) -> None:
        """A trained bias, or part of a layer that is stored whole."""
        changed = float(self._difference(name).square().sum(dtype=torch.float64))
        if changed == 0:
            return
        self.squares[0] += changed
        memory = self.layout.in_memory.get(name, "")
        module, _, parameter = memory.rpartition(".")
        layer = self.layout.modules.get(module) if module else None
        if module in self.ranks:
            self.tensors[f"{module}.base_layer.{parameter}"] = self._trained(name)
            self.bias = max(self.bias, "lora_only", key=BIAS.index)
        elif not self._wants(module):
            self._leave_out(name, changed, "not among the targets")
        elif layer is not None and parameter == "bias":
            self.tensors[memory] = self._trained(name)
            self.bias = "all"
        elif layer is not None and all(p.dim() < 2 for p in layer.parameters()) and not list(layer.children()):
            self.whole.add(module)
            for parameter, _ in layer.named_parameters():
                stored = self.layout.on_disk[f"{module}.{parameter}"]
                self.tensors[f"{module}.{parameter}"] = self._trained(stored)
        else:
            self._leave_out(name, changed, "a parameter outside of any layer")

    def _trained(self, name: str) -> Tensor:
        """A tensor to be stored whole; what was computed in float64, as the base stores it."""
        tensor = self.finetuned.read(name)
        return tensor.to(self.base.tensors[name].dtype) if tensor.dtype == torch.float64 else tensor

    def _difference(self, name: str) -> Tensor:
        before, after = self.base.read(name), self.finetuned.read(name)
        require_finite(name, before, self.base)
        require_finite(name, after, self.finetuned)
        wide = torch.float64 if torch.float64 in (before.dtype, after.dtype) else torch.float32
        return after.to(wide).sub_(before.to(wide))

    def _wants(self, module: str) -> bool:
        return self.pattern is None or self.pattern.fullmatch(module)

    def _leave_out(self, name: str, changed: float, why: str) -> None:
        self.squares[1] += changed
        self.left_out.append({"name": name, "norm": math.sqrt(changed), "why": why})

    def config(self) -> dict[str, Any]:
        tied = {source.removesuffix(".weight") for source in self.layout.ties.values()} & self.ranks.keys()
        about = {
            "base_model_name_or_path": self.base.name,
            "revision": self.base.revision,
            "fan_in_fan_out": any(self.layout.is_transposed(module) for module in self.ranks),
            "bias": self.bias,
            "modules_to_save": sorted(self.whole) or None,
            "ensure_weight_tying": bool(tied),
            **self.about,
        }
        return lora_config(self.ranks, _short_names(self.layout, self.ranks.keys()), about)

    def notes(self) -> list[str]:
        notes = []
        if self.left_out:
            worst = sorted(self.left_out, key=lambda row: -row["norm"])
            shown = ", ".join(f"{row['name']} (norm {row['norm']:.3g}, {row['why']})" for row in worst[:5])
            more = f" and {len(worst) - 5} more" if len(worst) > 5 else ""
            notes.append(f"{len(worst)} changed tensors are not in the adapter: {shown}{more}")
        if self.whole:
            notes.append(f"{len(self.whole)} layers without a matrix are stored whole (modules_to_save)")
        return notes


@dataclass
class ExtractedAdapter(Result):
    """The adapter that was written, and how much of the change between the two models it misses."""

    out: Path
    targets: list[dict[str, Any]]
    """Name, rank, relative error and norm of each adapted layer."""
    whole: list[str]
    """Layers that are stored whole."""
    left_out: list[dict[str, Any]]
    """Changed tensors that are not in the adapter, with the reason."""
    relative_error: float
    notes: list[str]
    tensors: int
    bytes: int
    files: tuple[Path, ...]
    sha256: str | None
    seconds: float


@shows_progress
def extract(
    base: CheckpointSource,
    finetuned: CheckpointSource,
    out: str | os.PathLike[str],
    *,
    rank: int | None = None,
    energy: float | None = None,
    targets: str | None = None,
    force: bool = False,
    progress: Shown = None,
) -> ExtractedAdapter:
    """Write the best LoRA adapter for what fine-tuning added to a base, and report how much of it is missed.

    `rank` is the most a layer may have, `energy` the share of its squared change to keep (0.99), whatever rank that
    takes; without either, the rank is 16. `targets` is a regular expression for the ends of layers' names:
    "q_proj|v_proj". Layers without a matrix (norms) are stored whole; what PEFT cannot hold is listed in the result.

    >>> isomerge.extract("base", "finetuned", "adapter-of-rank-16", rank=16).relative_error < 1
    True
    """
    progress = callback(progress)
    start = time.perf_counter()
    require_types(
        out=(out, str, os.PathLike), rank=(rank, int, None), energy=(energy, float, None), targets=(targets, str, None),
    )  # fmt: skip
    require_shared_types(force=force, progress=progress)
    base, finetuned = open_checkpoint(base), open_checkpoint(finetuned)
    rank = DEFAULT_RANK if rank is None and energy is None else rank
    pattern = _check_request(rank, energy, targets)
    refuse_overwrite(out, [base, finetuned])
    extraction = Extraction(base, finetuned, common_layout(base, finetuned), pattern, rank, energy)
    return written_adapter(extraction, out, force=force, progress=progress, start=start)


def written_adapter(
    extracted: Extraction, out: str | os.PathLike[str], *, force: bool, progress: Progress | None, start: float
) -> ExtractedAdapter:
    """Go through the tensors of both models, and write what was found."""
    base, finetuned = extracted.base, extracted.finetuned
    floating = [n for n, info in base.tensors.items() if info.dtype.is_floating_point and not is_harmless_buffer(n)]
    total, done = sum(base.tensors[name].nbytes for name in floating), 0
    # Vectors come last: where a bias goes depends on what became of its layer's matrix.
    for name in sorted(floating, key=lambda name: (not _is_matrix(base, name), name)):
        extracted.add(name)
        done += base.tensors[name].nbytes
        if progress:
            progress(done, total, "extracting")
    if not extracted.tensors:
        raise RequestError(
            f"While extracting an adapter from {finetuned.name}: nothing that an adapter can hold differs from "
            f"{base.name}{' in the named layers' if extracted.pattern else ''}. Check that these are two models."
        )
    written = write_adapter(out, extracted.tensors, extracted.config(), force=force, inputs=[base, finetuned])
    changed, missed = extracted.squares
    return ExtractedAdapter(
        out=written.out,
        targets=extracted.rows,
        whole=sorted(extracted.whole),
        left_out=extracted.left_out,
        relative_error=math.sqrt(missed / changed) if changed else 0.0,
        notes=extracted.notes(),
        tensors=written.tensors,
        bytes=written.bytes,
        files=written.files,
        sha256=written.sha256,
        seconds=time.perf_counter() - start,
    )


def _check_request(rank: int | None, energy: float | None, targets: str | None) -> NamePattern | None:
    if rank is not None and rank < 1:
        raise RequestError(f"While extracting an adapter: the rank cannot be {rank}. Give a positive whole number.")
    if energy is not None and not 0 < energy <= 1:
        raise RequestError(f"While extracting an adapter: the energy cannot be {energy}. Give a share such as 0.99.")
    try:
        return NamePattern(rf"(.*\.)?({targets})") if targets is not None else None
    except ValueError as error:
        raise RequestError(
            f"While extracting an adapter: targets '{targets}' is no regular expression ({error}). "
            "Write the ends of layer names, as in q_proj|v_proj."
        ) from error


def common_layout(base: Checkpoint, finetuned: Checkpoint) -> ModuleLayout:
    """The layers of two models of one shape, or an error."""
    require_model(base)
    if holds_adapter(finetuned):
        raise RequestError(
            f"While extracting an adapter from {finetuned.name}: it is an adapter already. Use it as it is; for one of "
            f"another rank, {into_its_base(finetuned)}, and name OUT."
        )
    for model in (base, finetuned):
        require_floating(model)
    problems = _differences_in_tensors(base, finetuned)
    if problems:  # the size of the models explains what would be a list of all their tensors
        kinds = [model.config.get("model_type") for model in (base, finetuned)]
        other = [f"they are of type '{kinds[0]}' and '{kinds[1]}'"] if kinds[0] != kinds[1] and all(kinds) else []
        problems = other or differences_in_size(base, finetuned) or problems
    layout = ModuleLayout(base)
    if layout.model is None:
        problems.append(
            "an adapter names layers by their kind and their name in memory, and no class of transformers is known for "
            f"{base.config.get('architectures') or 'this base (its config.json names no architecture)'}"
        )
    if problems:
        shown = "; ".join(problems[:8])
        raise RequestError(
            f"While extracting an adapter from {finetuned.name} and its base {base.name}: {shown}. "
            "Name a model and the base it was fine-tuned from, with the same head and vocabulary."
        )
    return layout


def _differences_in_tensors(base: Checkpoint, finetuned: Checkpoint) -> list[str]:
    problems = []
    differ = [n for n in sorted(base.tensors.keys() ^ finetuned.tensors.keys()) if not is_harmless_buffer(n)]
    if differ:
        problems.append(f"only one of them has {name_some(differ)}")
    for name in sorted(base.tensors.keys() & finetuned.tensors.keys()):
        one, other = base.tensors[name].shape, finetuned.tensors[name].shape
        if one != other:
            problems.append(f"'{name}' is {one} in the base and {other} in the fine-tuned model")
    return problems


def _is_matrix(base: Checkpoint, name: str) -> bool:
    return len(base.tensors[name].shape) > 1


def named_factors(module: str, kind: str, left: Tensor, right: Tensor, shape: tuple[int, ...]) -> dict[str, Tensor]:
    """The factors of a tensor of this shape, left @ right, under the names and in the orientation of PEFT."""
    if kind == "embedding":
        return {
            f"{module}.lora_embedding_A": left.T.contiguous(),
            f"{module}.lora_embedding_B": right.T.contiguous(),
        }
    if kind == "transposed":
        left, right = right.T.contiguous(), left.T.contiguous()
    if kind == "convolution":
        left, right = left.reshape(*left.shape, *[1] * (len(shape) - 2)), right.reshape(-1, *shape[1:])
    return {f"{module}.lora_A.weight": right.clone(), f"{module}.lora_B.weight": left.clone()}


def _kind(layer: nn.Module | None) -> str | None:
    if layer is None:
        return None
    if type(layer).__name__ == TRANSPOSED:
        return "transposed"
    if isinstance(layer, nn.Embedding):
        return "embedding"
    if isinstance(layer, nn.Linear):
        return "linear"
    if isinstance(layer, (nn.Conv1d, nn.Conv2d, nn.Conv3d)) and layer.groups == 1:
        return "convolution"
    return None


def _short_names(layout: ModuleLayout, modules: Any) -> list[str]:
    """Layers by the last part of their name where every layer of that name is meant, by their whole name otherwise."""
    short = []
    for module in modules:
        last = module.rpartition(".")[2]
        alike = [m for m in layout.modules if m.rpartition(".")[2] == last]
        short.append(last if all(m in modules for m in alike) and not last.isdigit() else module)
    return sorted(set(short))
