"""Is a guessed symmetry true? The stock class runs before and after it, on random weights.

Random weights prove more than the real ones, where a head that attends to nothing hides a mistake: what holds for
generic weights holds for all. A control moves one tensor only; it must change the outputs, or the proof says nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from isomerge.checkpoint.base import Checkpoint
from isomerge.evaluation.probe import outputs, random_inputs
from isomerge.packages import require_version, why_not_imported
from isomerge.running.stock import load_stock
from isomerge.symmetry.groups import Group, Trivial
from isomerge.symmetry.patterns import Layout, bind
from isomerge.symmetry.transform import Transform, batch_sizes

LARGEST = {torch.float64: 250e6, torch.float32: 2e9}  # parameters that are still run; the more exact dtype if possible
TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-4}  # stock norms and softmax compute in float32
CONTROL = 100  # how many times the tolerance a broken symmetry must show


class Unprovable(Exception):
    """Why the model cannot be run."""


@dataclass
class Part:
    """One guess at the structure of a part of every layer: patterns, and per space the groups to try, largest first."""

    where: str
    tensors: dict[str, str]  # template of the name -> template of the pattern, both with {i} for the layer
    options: dict[str, tuple[Group, ...]]
    layers: list[int] = field(default_factory=list)

    def spaces(self, proven: Mapping[str, Group]) -> dict[str, Group]:
        """The spaces of all layers; one that is not proven stays at the identity."""
        groups: dict[str, Group] = {}
        for space, (first, *_) in self.options.items():
            group = proven.get(space) or Trivial(first.size, first.per)
            for i in map(str, self.layers):
                groups[space.replace("{i}", i)] = replace(group, per=tuple(p.replace("{i}", i) for p in group.per))
        return groups

    def named(self) -> Iterator[tuple[str, str]]:
        """Name and pattern of every tensor."""
        for i in map(str, self.layers):
            for name, pattern in self.tensors.items():
                yield name.replace("{i}", i), pattern.replace("{i}", i)


class Prover:
    """The stock class of a checkpoint on random weights, and what it computes after a change."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        count = sum(math.prod(info.shape) for info in checkpoint.tensors.values())
        dtype = next((dtype for dtype, most in LARGEST.items() if count <= most), None)
        if dtype is None:
            raise Unprovable(f"with {count / 1e9:.1f} billion parameters it is too large to be run for a proof")
        self.dtype, self.tolerance = dtype, TOLERANCE[dtype]
        self.config, self.folder = checkpoint.config, checkpoint.folder
        self.state = random_state(checkpoint, dtype)
        self.expected = self._run(self.state)
        if not torch.isfinite(self.expected).all():
            raise Unprovable("on random weights its outputs are not finite")

    def best(self, alternatives: Sequence[Part]) -> tuple[Part, dict[str, Group], list[str]]:
        """The structure with the most proven spaces, those, and what was found out about every space."""
        tried: list[tuple[Part, dict[str, Group], list[str]]] = []
        for part in alternatives:
            tried.append((part, *self.prove(part)))
            if len(tried[-1][1]) == len(part.options):
                break
        return max(tried, key=lambda result: len(result[1]))

    def prove(self, part: Part) -> tuple[dict[str, Group], list[str]]:
        proven: dict[str, Group] = {}
        notes = []
        for space, groups in part.options.items():
            failures = []
            for group in groups:
                failure = self._refutation(part, space, group)
                if failure is None:
                    proven[space] = group
                    break
                failures.append(f"{group.name} {failure}")
            outcome = f"{proven[space].name}, proven" if space in proven else f"identity: {', '.join(failures)}"
            notes.append(f"{space.removesuffix('.{i}')} in {part.where}: {outcome}")
        return proven, notes

    def _refutation(self, part: Part, space: str, group: Group) -> str | None:
        """Why a space does not carry a group, or None when it provably does."""
        if group.reorders and not group.signed and group.size == 1:
            return "of one unit moves nothing"
        spaces = part.spaces({space: group})
        moving = {space.replace("{i}", str(i)) for i in part.layers}
        transform = Transform(spaces, {s: some_element(spaces, s) for s in sorted(moving)})
        moved, broken = {}, {}
        seen: set[str] = set()
        for name, pattern in part.named():
            layout = bind(pattern, self.state[name].shape, spaces, name)
            here = layout.spaces() & moving
            if here:
                moved[name] = transform.act(self.state[name], layout)
            if here - seen:
                broken[name] = act_once(transform, self.state[name], layout)
            seen |= here
        try:
            if (difference := self._difference(moved)) > self.tolerance:
                return f"changes the outputs by {difference:.0e}"
            if (control := self._difference(broken)) < CONTROL * self.tolerance:
                return f"cannot be told from a mistake, which changes the outputs by {control:.0e} only"
        except Unprovable as error:
            return f"failed, because {error}"
        return None

    def _difference(self, changes: Mapping[str, Tensor]) -> float:
        got = self._run({**self.state, **changes})
        difference = float((got - self.expected).abs().max() / self.expected.abs().max())
        return difference if math.isfinite(difference) else math.inf

    def _run(self, state: Mapping[str, Tensor]) -> Tensor:
        try:
            require_version("transformers")
            model = load_stock(self.config, state, dtype=self.dtype, folder=self.folder)
            return outputs(model, random_inputs(model))
        except ImportError as error:
            raise Unprovable(
                f"finding symmetries needs transformers: {why_not_imported('transformers', error)}"
            ) from error
        except Exception as error:  # whatever stops transformers means the same here
            raise Unprovable(f"transformers cannot run it ({type(error).__name__}: {str(error)[:200]})") from error


def random_state(checkpoint: Checkpoint, dtype: torch.dtype) -> dict[str, Tensor]:
    """Weights of unit gain, gains around 1, biases around 0, by the names on disk; only headers are read."""
    generator = torch.Generator().manual_seed(0)
    state = {}
    for name, info in checkpoint.tensors.items():
        if not info.dtype.is_floating_point:
            state[name] = checkpoint.read(name)
            continue
        noise = torch.randn(info.shape, generator=generator, dtype=dtype)
        gain = noise.ndim == 1 and name.endswith("weight")
        state[name] = noise / noise.shape[-1] ** 0.5 if noise.ndim > 1 else 0.3 * noise + float(gain)
        if name.endswith("running_var"):
            state[name] = state[name].abs() + 0.5
    return state


def some_element(spaces: Mapping[str, Group], space: str) -> Tensor:
    """An element that is not the identity, which a random permutation of few units may well be."""
    group, batch = spaces[space], batch_sizes(spaces, space)
    generator = torch.Generator().manual_seed(len(space))
    element = group.random(batch, generator)
    while group.is_identity(element):
        element = group.random(batch, generator)
    return element


def act_once(transform: Transform, tensor: Tensor, layout: Layout) -> Tensor:
    """Move only the first segment that moves: what a forgotten counterpart would look like."""
    for axis, segments in enumerate(layout.axes):
        for segment in segments:
            if any(transform.moves(atom.space) for atom in segment.atoms):
                result = tensor.clone()
                segment.put(result, axis, transform.act_on_segment(segment.take(tensor, axis), segment))
                return result
    return tensor
