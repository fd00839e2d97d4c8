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
    to, to_float, to_type, own_softmax = torch.Tensor.to, torch.Tensor.float, torch.Tensor.type, torch.Tensor.softmax
    softmax, torch_softmax = torch.nn.functional.softmax, torch.softmax

    def keep(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if self.dtype == torch.float64 and torch.float32 in (*args[:1], kwargs.get("dtype")):
            return self
        return to(self, *args, **kwargs)

    def keep_type(self: Tensor, *args: Any) -> Any:
        if self.dtype == torch.float64 and torch.float32 in args:
            return self
        return to_type(self, *args)

    def in_its_dtype(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def run(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            if x.dtype == torch.float64:
                kwargs.pop("dtype", None)
            return function(x, *args, **kwargs)

        return run

    with (
        mock.patch.object(torch.Tensor, "to", keep),
        mock.patch.object(torch.Tensor, "float", lambda x: x if x.dtype == torch.float64 else to_float(x)),
        mock.patch.object(torch.Tensor, "type", keep_type),
        mock.patch.object(torch.nn.functional, "softmax", in_its_dtype(softmax)),
        mock.patch.object(torch, "softmax", in_its_dtype(torch_softmax)),
        mock.patch.object(torch.Tensor, "softmax", in_its_dtype(own_softmax)),
    ):
        yield
