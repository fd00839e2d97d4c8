"""A checkpoint bound to its specification: every tensor on disk gets a layout, or a reason why not."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from isomerge.checkpoint.base import Checkpoint
from isomerge.checkpoint.checks import is_buffer, require_finite, require_floating
from isomerge.errors import SpecificationError
from isomerge.symmetry.architecture import RESIDUAL, Architecture, part_of
from isomerge.symmetry.patterns import Atom, Layout, Node, Product, bind, joined, parse

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
    stacks: Mapping[str, int] = field(default_factory=dict)  # stacked tensor -> axis its parts follow each other on
    joins: Mapping[str, tuple[int, int]] = field(default_factory=dict)  # tensor -> its stored axes worked on as one
    device: str = "cpu"  # where tensors are worked on
    kept: dict[str, Tensor] | None = field(default=None, compare=False)  # on an accelerator: what is there already

    @property
    def name(self) -> str:
        return self.checkpoint.name

    @property
    def stored_precision(self) -> torch.dtype:
        """What loses nothing of the weights: float32, or float64 where some of them are."""
        wide = any(info.dtype == torch.float64 for info in self.checkpoint.tensors.values())
        return torch.float64 if wide else torch.float32

    def raw(self, name: str, dtype: torch.dtype = torch.float64) -> Tensor:
        """A tensor in float64 (or `dtype`), stacked and untied as the specification says."""
        return self._joined(name, [part.to(dtype) for part in self._parts(name, checked=True)])

    def stored(self, name: str) -> Tensor:
        """The same in the dtype it is stored in, as far as it is read: nothing is looked at."""
        return self._joined(name, self._parts(name, checked=False))

    def _joined(self, name: str, parts: list[Tensor]) -> Tensor:
        source, factor = self._source(name)
        tensor = torch.cat(parts, self.stacks[source]) if source in self.stacks else parts[0]
        if source in self.joins:
            outer, inner = self.joins[source]
            tensor = tensor.movedim(outer, inner - 1).flatten(inner - 1, inner)
        tensor = tensor * factor if factor != 1.0 else tensor
        return tensor + self.architecture.added[name] if name in self.architecture.added else tensor

    def _source(self, name: str) -> tuple[str, float]:
        """The tensor that this one is, and the factor that a tie has."""
        return self.architecture.tied.get(name, (name, 1.0)) if name not in self.files else (name, 1.0)

    def _parts(self, name: str, *, checked: bool) -> list[Tensor]:
        source, _ = self._source(name)
        parts = []
        for file in self.files[source]:
            part = self.kept.get(file) if self.kept is not None else None
            if part is None:
                part = self.checkpoint.peek(file).to(self.device)
                if checked:
                    require_finite(file, part, self.checkpoint)
                    if self.kept is not None:
                        self.kept[file] = part
            parts.append(part)
        return parts

    def split(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        """A tensor of the specification as the tensors it is on disk: the inverse of stacking."""
        files = self.files.get(name, (name,))  # a table that has just been untied has no file yet
        if name in self.architecture.added:
            tensor = tensor - self.architecture.added[name]
        if name in self.joins:
            outer, inner = self.joins[name]
            size = self.checkpoint.tensors[files[0]].shape[outer]
            tensor = tensor.unflatten(inner - 1, (size, -1)).movedim(inner - 1, outer)
        parts = tensor.chunk(len(files), self.stacks[name]) if name in self.stacks else (tensor,)
        return {file: part.contiguous() for file, part in zip(files, parts, strict=True)}

    def is_single(self, name: str) -> bool:
        """Stored in float32."""
        stored = self.checkpoint.tensors
        return name in self.files and all(stored[file].dtype == torch.float32 for file in self.files[name])

    def bias_of(self, weight: str) -> str | None:
        bias = weight.removesuffix("weight") + "bias"
        return bias if weight.endswith("weight") and bias in self.layouts else None

    def touching(self, space: str) -> list[str]:
        return [name for name, layout in self.layouts.items() if space in layout.spaces()]

    def parameters(self) -> int:
        return sum(torch.Size(layout.shape).numel() for layout in self.layouts.values())


def _shortened(problems: list[str], most: int = 4) -> list[str]:
    """The first problems, without what the error says once for all of them."""
    every = (" config.json and the weights disagree; compare them.", ".")
    told = [problem.removeprefix("Binding tensor ") for problem in problems[:most]]
    for end in every:
        told = [problem.removesuffix(end) for problem in told]
    return [*told, *([f"and {len(problems) - most} more"] if len(problems) > most else [])]


def bind_model(checkpoint: Checkpoint, architecture: Architecture) -> BoundModel:
    """Fit the specification to the tensors of a checkpoint; all misfits are listed at once."""
    spec = architecture.expanded()
    files: dict[str, tuple[str, ...]] = {}
    layouts: dict[str, Layout] = {}
    stacks: dict[str, int] = {}
    joins: dict[str, tuple[int, int]] = {}
    missing, problems = [], []
    for template, pattern in spec.tensors.items():
        name, optional = template.removesuffix("?"), template.endswith("?")
        stored = find(name, checkpoint, spec)
        if stored is None and name in spec.tied:
            source = find(spec.tied[name][0], checkpoint, spec)
            shape = checkpoint.tensors[source[0]].shape if source else None
        else:
            shape = checkpoint.tensors[stored[0]].shape if stored else None
        if shape is None:
            missing += [] if optional else [name]
            continue
        try:
            if stored and "{" in name:
                stacks[name], shape = _stacked(name, pattern, stored, checkpoint, spec)
            elif (join := joined(pattern, spec.spaces)) and len(shape) == len(parse(pattern)):
                outer, inner, pattern = join
                joins[name] = outer, inner
                shape = _as_one(shape, outer, inner)
            layouts[name] = bind(pattern, shape, spec.spaces, name)
        except SpecificationError as error:
            problems.append(str(error))
            continue
        if stored:
            files[name] = stored
    if missing or problems:
        lines = [f"missing: {', '.join(missing[:6])}{' …' if len(missing) > 6 else ''}"] if missing else []
        raise SpecificationError(
            f"Binding {checkpoint.name} to the specification of '{spec.family}': "
            + "; ".join([*lines, *_shortened(problems)])
            + ". The weights are not those of the architecture config.json names, or the checkpoint is incomplete: "
            "get weights and config.json again from where the model came."
        )  # fmt: skip
    require_floating(checkpoint, weights={file for names in files.values() for file in names})
    touched = {space for layout in layouts.values() for space in layout.spaces()}
    spec = replace(spec, spaces={name: group for name, group in spec.spaces.items() if name in touched})
    spec, extra, stale, notes = _account_for_the_rest(checkpoint, spec, files, layouts)
    return BoundModel(checkpoint, spec, files, layouts, extra, stale, notes, stacks, joins)


def _as_one(shape: Sequence[int], outer: int, inner: int) -> tuple[int, ...]:
    return tuple(shape[outer] * n if axis == inner else n for axis, n in enumerate(shape) if axis != outer)


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
    unknown = [name for name in extra if not is_buffer(checkpoint, name) and not name.startswith(tuple(spec.elsewhere))]
    if unknown:
        held = [s for s in spec.spaces if part_of(spec.root(s)) in (RESIDUAL, "head")]
        shown = ", ".join(unknown[:3]) + (" …" if len(unknown) > 3 else "")
        note = f"residual stream held at the identity: {len(unknown)} tensor(s) without a pattern may read it ({shown})"
        spec, notes = spec.frozen(held), [*notes, note]
    return spec, extra, stale, tuple(notes)


def _spellings(name: str, spec: Architecture) -> list[str]:
    """The specification's name, without its prefix or with another, and with the old LayerNorm names."""
    spellings = [name]
    if spec.prefix and name.startswith(spec.prefix):
        spellings += [other + name.removeprefix(spec.prefix) for other in ("", *spec.other_prefixes)]
    for new, old in OLD_NAMES:
        spellings += [n.replace(new, old) for n in spellings if n.endswith(new)]
    return spellings


def find(name: str, checkpoint: Checkpoint, spec: Architecture) -> tuple[str, ...] | None:
    """The names on disk of a tensor of the specification, in any spelling we accept; None when it is not there."""
    letter = _stack_letter(name, spec)
    for spelling in _spellings(name, spec):
        if letter is None:
            names: tuple[str, ...] = (spelling,)
        else:
            count = math.prod(
                next(g.size for s, g in spec.spaces.items() if _shape_of(s) == _shape_of(space))
                for space in spec.stack[letter].split()
            )
            names = tuple(spelling.replace("{" + letter + "}", str(k)) for k in range(count))
        if all(n in checkpoint.tensors for n in names):
            return names
    return None


def _stack_letter(name: str, spec: Architecture) -> str | None:
    return next((x for x in spec.stack if "{" + x + "}" in name), None)


def _shape_of(template: str) -> str:
    """A space's name without its numbers, so that expert.3 matches expert.{i}."""
    return re.sub(r"\d+|\{\w+\}", "#", template)


def _stacked(
    name: str, pattern: str, files: tuple[str, ...], checkpoint: Checkpoint, spec: Architecture
) -> tuple[int, tuple[int, ...]]:
    """The axis along which the parts follow each other (the one that starts with the stack's space), and the shape."""
    shapes = {checkpoint.tensors[file].shape for file in files}
    if len(shapes) > 1:
        raise SpecificationError(
            f"Stacking {name} of {checkpoint.name}: its {len(files)} parts have the shapes {sorted(shapes)} and should "
            "all have one. Experts of different sizes are not supported."
        )
    stack = _shape_of(spec.stack[_stack_letter(name, spec) or ""].split()[0])
    axes = [k for k, node in enumerate(parse(pattern)) if _shape_of(_first_space(node)) == stack]
    if len(axes) != 1:
        raise SpecificationError(f'Stacking {name}: "{pattern}" needs one axis that starts with the space {stack}.')
    shape = list(shapes.pop())
    shape[axes[0]] *= len(files)
    return axes[0], tuple(shape)


def _first_space(node: Node) -> str:
    while isinstance(node, Product):
        node = node.factors[0]
    return node.space if isinstance(node, Atom) else ""
