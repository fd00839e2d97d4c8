"""What a proof on random weights needs: weights that hide nothing, elements that move something, and a broken control.

Random weights prove more than the real ones, where a head that attends to nothing hides a mistake: what holds for
generic weights holds for all. A control moves one tensor only; it must change the outputs, or the proof says nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from isomerge.checkpoint.base import Checkpoint
from isomerge.symmetry.groups import Group
from isomerge.symmetry.patterns import Layout
from isomerge.symmetry.transform import Transform, batch_sizes


class Unprovable(Exception):
    """Why the model cannot be run."""


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
