"""An accelerator gives what the CPU gives. Needs one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from merging.methods.cases import CASE_NAMES, CASES, count, merge, tensors

pytestmark = pytest.mark.cuda


@pytest.mark.parametrize("shape", [(40, 30), (7,), (), (0, 4), (3, 2, 2)], ids=str)
@pytest.mark.parametrize(("name", "options"), CASES, ids=CASE_NAMES)
def test_the_device_does_not_change_the_result(name: str, options: dict[str, Any], shape: tuple[int, ...]) -> None:
    *models, base = tensors(shape, count(name), torch.float64)
    expected = merge(name, models, base, block_elements=300, **options)
    found = merge(name, models, base, block_elements=300, device="cuda", **options)
    torch.testing.assert_close(found.cpu(), expected, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("name", ["dare_linear", "dare_ties", "della", "della_linear"])
def test_the_device_does_not_change_what_is_drawn(name: str) -> None:
    *models, base = tensors((40, 30), 2, torch.float64)
    expected = merge(name, models, base, density=0.6)
    found = merge(name, models, base, device="cuda", density=0.6)
    torch.testing.assert_close(found.cpu(), expected, atol=1e-9, rtol=1e-9)
