"""A few of the adversarial configurations that `make fuzz` draws by the thousand."""

from __future__ import annotations

import pytest
import torch

from fuzz import architectures
from isomerge.symmetry.groups import Permutation, Rotary, Rotation, RotationFixingOnes, Scale


@pytest.mark.parametrize("seed", range(8))
def test_adversarial_configurations_keep_their_function_and_controls_do_not(seed: int) -> None:
    found = architectures.Found()
    architectures.attack(seed, found)
    assert found.failures == []
    assert sum(found.counts.values()) > 0


@pytest.mark.parametrize(
    "group", [Permutation(4), Rotation(4), RotationFixingOnes(4), Scale(4), Rotary(4), Rotary(4, phase="sign")]
)
def test_a_control_lies_outside_the_group(group: architectures.Group) -> None:
    wide = architectures.larger(group)
    assert wide is not None
    element = wide.random((), torch.Generator().manual_seed(1))
    inside = element.dtype == group.identity().dtype and element.shape == group.identity().shape
    assert not (inside and group.contains(element))
