"""An accelerator gives what the CPU gives. Most of it needs one."""

from __future__ import annotations

import pytest
import torch

import isomerge
from models import MODELS, model


@pytest.mark.parametrize("family", MODELS)
def test_one_batch_of_all_layers_finds_what_layer_by_layer_finds(family: str) -> None:
    """As on an accelerator, which is what any device that is not named "cpu" passes for."""
    source, anchor = model(family, 1), model(family, 0)
    expected = isomerge.align(source, anchor, level="rotation", only="attention").transform.elements
    found = isomerge.align(source, anchor, level="rotation", only="attention", device="cpu:0").transform.elements
    assert found and found.keys() == expected.keys()
    for space, element in found.items():
        assert torch.allclose(element, expected[space], rtol=0, atol=1e-10), space


@pytest.mark.cuda
@pytest.mark.parametrize("level", ["permutation", "rotation", "full"])
@pytest.mark.parametrize("family", MODELS)
def test_the_device_does_not_change_the_result(family: str, level: str) -> None:
    source, anchor = model(family, 1), model(family, 0)
    expected = isomerge.align(source, anchor, level=level).state_dict()
    found = isomerge.align(source, anchor, level=level, device="cuda").state_dict()
    for name, tensor in found.items():
        assert tensor.device.type == "cpu"
        assert torch.allclose(tensor, expected[name], rtol=1e-7, atol=1e-9), name
