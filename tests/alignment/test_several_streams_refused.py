"""What was made for one residual stream refuses models with several, and says what works."""

from __future__ import annotations

import pytest
import torch
import transformers

import isomerge
from isomerge.errors import RequestError


def swin(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    return transformers.SwinForImageClassification(
        transformers.SwinConfig(
            image_size=16, patch_size=2, embed_dim=8, depths=[1, 1], num_heads=[2, 2], window_size=4, num_labels=3
        )
    )


PIXELS = [{"pixel_values": torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(0))} for _ in range(4)]


def test_learning_refuses_stages_of_several_widths() -> None:
    with pytest.raises(RequestError, match=r"this model has 2 \(stage0.residual, stage1.residual\)") as refused:
        isomerge.align(swin(1), anchor=swin(0), learn=2, data=PIXELS)
    assert refused.value.keys == ("learn",)


def test_transport_refuses_stages_of_several_widths_and_alignment_takes_them() -> None:
    models = [swin(0), swin(1)]
    with pytest.raises(RequestError, match="ot_fusion: it works with one residual stream"):
        isomerge.merge(models, method="ot_fusion").state_dict()
    found = isomerge.align(models[1], anchor=models[0])
    assert found.verdict.startswith("aligned") and found.report().distance.after < found.report().distance.before
