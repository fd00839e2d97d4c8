"""Stock models in float64 from end to end."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor


@contextlib.contextmanager
def float64_throughout() -> Iterator[None]:
    """Stock norms, eager softmax and routers go down to float32; here float64 stays float64."""
    to, to_float, softmax, torch_softmax = (
        torch.Tensor.to, torch.Tensor.float, torch.nn.functional.softmax, torch.softmax,
    )  # fmt: skip

    def keep(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if self.dtype == torch.float64 and torch.float32 in (*args[:1], kwargs.get("dtype")):
            return self
        return to(self, *args, **kwargs)

    def in_its_dtype(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def run(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            if x.dtype == torch.float64:
                kwargs.pop("dtype", None)
            return function(x, *args, **kwargs)

        return run

    with (
        mock.patch.object(torch.Tensor, "to", keep),
        mock.patch.object(torch.Tensor, "float", lambda x: x if x.dtype == torch.float64 else to_float(x)),
        mock.patch.object(torch.nn.functional, "softmax", in_its_dtype(softmax)),
        mock.patch.object(torch, "softmax", in_its_dtype(torch_softmax)),
    ):
        yield
