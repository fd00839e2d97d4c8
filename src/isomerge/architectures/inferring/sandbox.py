"""A stock class with random weights, written to and run many times: its parameters as a rearrangement of the disk's.

Loading renames, stacks, cuts and transposes tensors. Which number on disk becomes which in memory is found by loading
numbered tensors once; after that a state is written by one `take` per parameter, without loading anything.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from isomerge.checkpoint import open_checkpoint
from isomerge.checkpoint.base import Checkpoint
from isomerge.checkpoint.memory import quiet_transformers, saved_state
from isomerge.checkpoint.stock_classes import class_config
from isomerge.evaluation.probe import outputs, random_inputs
from isomerge.evaluation.symmetry_proof import Unprovable, random_state
from isomerge.packages import require_version, why_not_imported
from isomerge.running.stock import load_stock, stock_class

LARGEST = 3_000_000
"""Parameters of a model that is still tiny."""


class Float64Throughout(TorchFunctionMode):
    """Stock norms, softmax and routers go down to float32; here float64 stays float64, so that exact means 1e-10."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return in_float64(func, args, kwargs or {})


def in_float64(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A function's result, without the way down to float32 that it may ask for."""
    first = args[0] if args else None
    if isinstance(first, Tensor) and first.dtype == torch.float64:
        if func is torch.Tensor.float:
            return first
        if func in (torch.Tensor.to, torch.Tensor.type) and torch.float32 in (*args[1:], kwargs.get("dtype")):
            return first
        if kwargs.get("dtype") == torch.float32:
            kwargs = {**kwargs, "dtype": torch.float64}
    return func(*args, **kwargs)


class Sandbox:
    """One model, its random weights as they would stand on disk, and where each of them goes in memory."""

    def __init__(self, config: Mapping[str, Any], *, batch: int = 6, folder: Path | None = None) -> None:
        self.config, self.folder = dict(config), folder
        if self.config.get("pad_token_id") is None:
            self.config["pad_token_id"] = 0  # else classifiers take one text at a time
        try:
            require_version("transformers")
            kind = stock_class(self.config, folder)
            with quiet_transformers():
                with torch.device("meta"):
                    count = sum(p.numel() for p in kind(class_config(kind, self.config)).parameters())
                if count > LARGEST:
                    raise Unprovable(f"its tiny model has {count:,} parameters")
                torch.manual_seed(0)
                made = kind(class_config(kind, self.config)).double().eval()
            drawn = open_checkpoint(saved_state(made, "the tiny model"), config=self.config)
            self.state = random_state(drawn, torch.float64)
            self.model, self.places = self._placed()
            self.inputs = repeated(random_inputs(self.model), batch)
            self.expected = self.run(self.state)
        except Unprovable:
            raise
        except ImportError as error:
            why = why_not_imported("transformers", error)
            raise Unprovable(f"finding symmetries needs transformers: {why}") from error
        except Exception as error:  # whatever stops transformers means the same here
            raise Unprovable(f"{type(error).__name__}: {' '.join(str(error).split())[:200]}") from error
        if not torch.isfinite(self.expected).all():
            raise Unprovable("on random weights its outputs are not finite")

    @property
    def checkpoint(self) -> Checkpoint:
        return open_checkpoint(self.state, config=self.config)

    def _placed(self) -> tuple[Any, dict[str, Tensor]]:
        """The model, and for every parameter where each of its numbers stands among all numbers on disk."""
        sizes = [tensor.numel() for tensor in self.state.values()]
        self.offsets = dict(zip(self.state, itertools.accumulate([0, *sizes]), strict=False))
        floats = {n for n, t in self.state.items() if t.is_floating_point()}
        numbered = {
            name: torch.arange(t.numel(), dtype=torch.float64).reshape(t.shape) + self.offsets[name]
            if name in floats else t for name, t in self.state.items()
        }  # fmt: skip
        model = load_stock(self.config, numbered, dtype=torch.float64, folder=self.folder)
        stored = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        places = {}
        loaded = load_stock(
            self.config, {n: t.clone() for n, t in self.state.items()}, dtype=torch.float64, folder=self.folder
        )
        everything = self._flat(self.state)
        for name, tensor in {**dict(loaded.named_parameters()), **dict(loaded.named_buffers())}.items():
            if not tensor.is_floating_point():
                continue
            place = stored[name].detach().round().long()
            inside = bool(((place >= 0) & (place < len(everything))).all())
            if inside and torch.equal(everything[place], tensor.detach().to(torch.float64)):
                places[name] = place.clone()
            elif isinstance(tensor, torch.nn.Parameter):
                raise Unprovable(f"{name} is computed, not copied, from what is stored")
        return loaded.requires_grad_(False), places

    def _flat(self, state: Mapping[str, Tensor]) -> Tensor:
        return torch.cat([state[name].flatten().to(torch.float64) for name in self.offsets])

    def write(self, state: Mapping[str, Tensor]) -> None:
        everything = self._flat(state)
        tensors = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
        for name, place in self.places.items():
            tensors[name].data.copy_(everything[place])

    def run(self, state: Mapping[str, Tensor]) -> Tensor:
        """All outputs as one vector, in float64 from end to end."""
        self.write(state)
        with Float64Throughout():
            return outputs(self.model, self.inputs)

    def difference(self, state: Mapping[str, Tensor]) -> float:
        try:
            got = self.run({**self.state, **state})
        except RuntimeError:  # an index out of range, say
            return float("inf")
        distance = float((got - self.expected).abs().max() / self.expected.abs().max())
        return distance if distance == distance else float("inf")

    @contextmanager
    def batch_of(self, rows: int) -> Iterator[None]:
        """Other inputs, this many examples."""
        kept = self.inputs
        self.inputs = repeated(random_inputs(self.model, seed=1, batch=rows), rows)
        try:
            yield
        finally:
            self.inputs = kept


def repeated(inputs: Mapping[str, Tensor], rows: int) -> dict[str, Tensor]:
    """At least `rows` examples: those there are, over and over."""
    return {
        name: value.repeat(-(-rows // len(value)), *[1] * (value.ndim - 1))[:rows] for name, value in inputs.items()
    }
