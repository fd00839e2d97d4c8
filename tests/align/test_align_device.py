"""An accelerator gives what the CPU gives. Needs one; says so where there is none."""

from __future__ import annotations

import pytest
import torch

import isomerge
from align.tiny import MODELS, model

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device")


@pytest.mark.parametrize("level", ["permutation", "rotation", "full"])
@pytest.mark.parametrize("family", MODELS)
def test_the_device_does_not_change_the_result(family: str, level: str) -> None:
    source, anchor = model(family, 1), model(family, 0)
    expected = isomerge.align(source, anchor, level=level).state_dict()
    found = isomerge.align(source, anchor, level=level, device="cuda").state_dict()
    for name, tensor in found.items():
        assert tensor.device.type == "cpu"
        assert torch.allclose(tensor, expected[name], rtol=1e-7, atol=1e-9), name
