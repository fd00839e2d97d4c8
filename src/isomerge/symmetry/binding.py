"""A checkpoint bound to its specification: every tensor on disk gets a layout, or a reason why not."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from isomerge.checkpoint.base import Checkpoint, TensorInfo
from isomerge.errors import CheckpointError, SpecificationError
from isomerge.symmetry.architecture import RESIDUAL, Architecture, part_of
from isomerge.symmetry.patterns import Layout, bind

# Buffers old versions of transformers saved; models make them anew, so they are copied and never moved.
BUFFERS = re.compile(
    r"(\battn\.bias|\.attention\.bias|masked_bias|inv_freq|position_ids|token_type_ids|num_batches_tracked)$"
)
OLD_NAMES = (("LayerNorm.weight", "LayerNorm.gamma"), ("LayerNorm.bias", "LayerNorm.beta"))


@dataclass(frozen=True)
class BoundModel:
    """A checkpoint seen through its architecture, by the specification's tensor names."""

    checkpoint: Checkpoint
    architecture: Architecture
    files: Mapping[str, tuple[str, ...]]  # specification name -> names on disk (several for stacked experts)
    layouts: Mapping[str, Layout]
    extra: tuple[str, ...] = ()  # on disk, not described: copied
    stale: tuple[str, ...] = ()  # on disk, but the model reads the tied table instead
    notes: tuple[str, ...] = ()
    memory: dict[str, Tensor] = field(default_factory=dict, compare=False)

    @property
    def name(self) -> str:
        return self.checkpoint.name

    def raw(self, name: str) -> Tensor:
        """A tensor in float64, stacked and untied as the specification says."""
        if name in self.memory:
            return self.memory[name]
        source, factor = self.architecture.tied.get(name, (name, 1.0)) if name not in self.files else (name, 1.0)
        parts = [self._read(file) for file in self.files[source]]
        tensor = torch.stack(parts) if self.is_stacked(source) else parts[0]
        return tensor * factor if factor != 1.0 else tensor

    def _read(self, file: str) -> Tensor:
        tensor = self.checkpoint.read(file).to(torch.float64)
        if not torch.isfinite(tensor).all():
            bad = int((~torch.isfinite(tensor)).sum())
            raise CheckpointError(
                f"Reading tensor {file} of {self.name}: {bad} of {tensor.numel()} values are NaN or infinite, so the "
                "model computes nothing useful and cannot be aligned. Find a sound copy of the checkpoint."
            )
        return tensor

    def is_stacked(self, name: str) -> bool:
        return "{" in name

    def bias_of(self, weight: str) -> str | None:
        bias = weight.removesuffix("weight") + "bias"
        return bias if weight.endswith("weight") and bias in self.layouts else None

    def touching(self, space: str) -> list[str]:
        return [name for name, layout in self.layouts.items() if space in layout.spaces()]

    def parameters(self) -> int:
        return sum(torch.Size(layout.shape).numel() for layout in self.layouts.values())


def bind_model(checkpoint: Checkpoint, architecture: Architecture) -> BoundModel:
    """Fit the specification to the tensors of a checkpoint; all misfits are listed at once."""
    spec = architecture.expanded()
    files: dict[str, tuple[str, ...]] = {}
    layouts: dict[str, Layout] = {}
    missing, problems = [], []
    for template, pattern in spec.tensors.items():
        name, optional = template.removesuffix("?"), template.endswith("?")
        found = _find(name, checkpoint, spec)
        if found is None and name in spec.tied:
            source = _find(spec.tied[name][0], checkpoint, spec)
            shape = _shape(source, checkpoint, spec.tied[name][0]) if source else None
        else:
            shape = _shape(found, checkpoint, name) if found else None
        if shape is None:
            missing += [] if optional else [name]
            continue
        try:
            layouts[name] = bind(pattern, shape, spec.spaces, name)
        except SpecificationError as error:
            problems.append(str(error))
            continue
        if found:
            files[name] = found
    if missing or problems:
        lines = [f"missing: {', '.join(missing[:6])}{' …' if len(missing) > 6 else ''}"] if missing else []
        raise SpecificationError(
            f"Binding {checkpoint.name} to the specification of '{spec.family}': " + "; ".join(lines + problems[:4])
            + ". The weights are not those of the architecture config.json names, or the checkpoint is incomplete."
        )  # fmt: skip
    spec, extra, stale, notes = _account_for_the_rest(checkpoint, spec, files, layouts)
    return BoundModel(checkpoint, spec, files, layouts, extra, stale, notes)


def _account_for_the_rest(
    checkpoint: Checkpoint, spec: Architecture, files: Mapping[str, tuple[str, ...]], layouts: Mapping[str, Layout]
) -> tuple[Architecture, tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    """Tensors without a pattern: buffers and stale copies are harmless, anything else may read the stream."""
    used = {file for names in files.values() for file in names}
    rest = [name for name in checkpoint.tensors if name not in used]
    absent_ties = {t for t in spec.tied if t not in layouts}
    stale = tuple(n for n in rest if any(n in _spellings(t, spec) for t in absent_ties))
    extra = tuple(name for name in rest if name not in stale)
    notes = [f"{name} is a copy of a tied table that the model never reads; it is left out" for name in stale]
    unknown = [name for name in extra if not BUFFERS.search(name)]
    if unknown:
        held = [s for s in spec.spaces if part_of(s) in (RESIDUAL, "head")]
        shown = ", ".join(unknown[:3]) + (" …" if len(unknown) > 3 else "")
        note = f"residual stream held at the identity: {len(unknown)} tensor(s) without a pattern may read it ({shown})"
        spec, notes = spec.frozen(held), [*notes, note]
    return spec, extra, stale, tuple(notes)


def _spellings(name: str, spec: Architecture) -> list[str]:
    """The specification's name, without its prefix, and with the old LayerNorm names."""
    found = [name]
    if spec.prefix and name.startswith(spec.prefix):
        found.append(name.removeprefix(spec.prefix))
    for new, old in OLD_NAMES:
        found += [n.replace(new, old) for n in found if n.endswith(new)]
    return found


def _find(name: str, checkpoint: Checkpoint, spec: Architecture) -> tuple[str, ...] | None:
    letter = next((x for x in spec.stack if "{" + x + "}" in name), None)
    numbers = range(spec.stack[letter]) if letter else [0]
    for spelling in _spellings(name, spec):
        names = tuple(spelling.replace("{" + str(letter) + "}", str(k)) for k in numbers)
        if all(n in checkpoint.tensors for n in names):
            return names
    return None


def _shape(files: tuple[str, ...], checkpoint: Checkpoint, name: str) -> tuple[int, ...]:
    shape = checkpoint.tensors[files[0]].shape
    return (len(files), *shape) if "{" in name else shape


def planned(model: BoundModel) -> dict[str, TensorInfo]:
    """What a checkpoint like this one contains on disk, stale copies left out and untied tables added."""
    plan = {name: info for name, info in model.checkpoint.tensors.items() if name not in model.stale}
    for name, (source, _) in model.architecture.tied.items():
        if name in model.layouts and name not in model.files:
            plan[name] = model.checkpoint.tensors[model.files[source][0]]
    return plan
