"""An accelerator measures what the CPU measures. Needs one."""

from __future__ import annotations

import pytest
import torch

import isomerge
from calibration.hooks import batches, data
from isomerge.calibration import calibrate, cross_statistics
from isomerge.choices import STATISTICS
from isomerge.merging.repair import repair
from models import MODELS, model

pytestmark = pytest.mark.cuda


@pytest.mark.parametrize("name", MODELS)
def test_the_device_does_not_change_what_is_measured(name: str) -> None:
    folders = [model(name, seed) for seed in (0, 1)]
    given = batches(data(folders[0]))
    expected, found = (calibrate(folders[0], given, what=STATISTICS, device=device) for device in ("cpu", "cuda"))
    for tensor in expected.stored.tensors:
        torch.testing.assert_close(found.stored.read(tensor), expected.stored.read(tensor), rtol=1e-4, atol=1e-5)
    pairs = [cross_statistics(*folders, given, device=device).moments for device in ("cpu", "cuda")]
    for site, moments in pairs[0].items():
        # Some norms compute in float32 whatever the model's dtype, and a sum can cancel.
        rounding = 1e-5 * float(moments.cross.abs().max())
        torch.testing.assert_close(pairs[1][site].cross, moments.cross, rtol=1e-4, atol=rounding)


@pytest.mark.parametrize("align", [False, True])
def test_the_device_does_not_change_what_is_merged(align: bool) -> None:
    folders = [model("vit", seed) for seed in (0, 1)]
    files = [calibrate(f, batches(data(f, examples=30))) for f in folders]
    expected, found = (
        isomerge.merge(folders, method="regmean", statistics=files, align=align, device=d).state_dict()
        for d in ("cpu", "cuda")
    )
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-6, atol=1e-7)
    if not align:  # information belongs to the weights as they were measured
        files = [calibrate(f, batches(data(f)), what={"fisher"}, only="vit|classifier", device="cuda") for f in folders]
        expected, found = (
            isomerge.merge(folders, method="fisher", importance=files, device=d).state_dict() for d in ("cpu", "cuda")
        )
        for name, tensor in expected.items():
            torch.testing.assert_close(found[name], tensor, rtol=1e-6, atol=1e-7)
    given = batches(data(folders[0]))
    one, other = (repair(folders[0], folders, given, device=d) for d in ("cpu", "cuda"))
    for name, tensor in one.items():
        torch.testing.assert_close(other[name], tensor, rtol=1e-5, atol=1e-6)
