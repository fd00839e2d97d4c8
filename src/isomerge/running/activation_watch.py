"""Look at a stock module while it runs: rows of activations, padding left out, handed on as they pass.

Hooks on modules also see what no weight makes, such as units behind their activation function, which `call_recorder`
cannot: it sees products with weights.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from isomerge.data.base import Batch
from isomerge.errors import CheckpointError, IsomergeError
from isomerge.running.padding import PaddingMask, encoder_of
from isomerge.running.stock import StockModel

Look = Callable[[nn.Module, Tensor, Tensor], Tensor | None]
"""Picks what to see out of a module's input and output; None for nothing this time."""
Context = Callable[[Tensor], contextlib.AbstractContextManager[Any]]
Receive = Callable[[Tensor], None]
"""Gets the rows of one call, (rows, width)."""


class ActivationWatch:
    """What to see of which module. Each forward pass calls the listeners once per call of the module."""

    def __init__(self, stock: StockModel) -> None:
        self.stock = stock
        self.modules = stock.modules
        self.encoder = encoder_of(stock.module)
        within = "" if self.encoder is None else next(n for n, m in self.modules.items() if m is self.encoder)
        self._encoder_name = within
        self._listeners: dict[str, list[tuple[str, Look, Receive]]] = {}
        self._around: list[tuple[nn.Module, Context]] = []
        self._padding: PaddingMask | None = None
        self._place = 0
        self._calls: Counter[str] = Counter()
        self._sums: list[tuple[str, Tensor]] = []
        self._tables: set[tuple[str, int]] | None = None

    def listen(self, module: str, label: str, look: Look, receive: Receive) -> None:
        self._listeners.setdefault(module, []).append((label, look, receive))

    def surround(self, module: nn.Module, context: Context) -> None:
        """Run a module inside a context, made of its input at every call."""
        self._around.append((module, context))

    @property
    def padding(self) -> PaddingMask:
        assert self._padding is not None, "asked for outside a forward pass"
        return self._padding

    def run(self, batch: Batch) -> Any:
        """One forward pass, without gradients."""
        if self._tables is None:
            self._tables = self._calls_without_data(batch)
        self._padding = PaddingMask(batch, self.stock.module)
        self._place += 1
        self._calls.clear()
        with torch.no_grad(), self._hooks():
            made = self.stock.forward(batch)
        self._raise_unless_finite()
        self._padding = None
        return made

    def _calls_without_data(self, batch: Batch) -> set[tuple[str, int]]:
        """(module, which call) whose input is not made of the examples, such as a table of relative positions.

        Its length may be that of a batch by chance. What two examples leave as long as one is no data.
        """
        one = {name: tensor[:1] for name, tensor in batch.items()}
        two = {name: torch.cat([tensor, tensor]) for name, tensor in one.items()}
        try:
            lengths = [self._lengths(examples) for examples in (one, two)]
        except CheckpointError:  # a classifier without a padding token takes one example at a time
            return set()
        return {call for call, length in lengths[0].items() if lengths[1].get(call) == length}

    def _lengths(self, batch: Batch) -> dict[tuple[str, int], int]:
        lengths: dict[tuple[str, int], int] = {}
        calls: Counter[str] = Counter()

        def hook(name: str) -> Callable[..., None]:
            def look(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> None:
                given = first_tensor((*args, *kwargs.values()))
                lengths[name, calls[name]] = given.shape[:-1].numel()
                calls[name] += 1

            return look

        with torch.no_grad(), contextlib.ExitStack() as hooks:
            for name in self._listeners:
                hooks.enter_context(self.modules[name].register_forward_hook(hook(name), with_kwargs=True))
            self.stock.forward(batch)
        return lengths

    @contextlib.contextmanager
    def _hooks(self) -> Iterator[None]:
        hooks = contextlib.ExitStack()
        for name in self._listeners:
            hooks.enter_context(self.modules[name].register_forward_hook(self._hook(name), with_kwargs=True))
        if self.encoder is not None:
            hooks.enter_context(self.encoder.register_forward_hook(self._remember))
        entered: list[contextlib.ExitStack] = []

        def enter(context: Context) -> Callable[..., None]:
            def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                entered.append(contextlib.ExitStack())
                entered[-1].enter_context(context(first_tensor((*args, *kwargs.values()))))

            return before

        for around, context in self._around:
            hooks.enter_context(around.register_forward_pre_hook(enter(context), with_kwargs=True))
            hooks.enter_context(around.register_forward_hook(lambda *_: entered.pop().close()))
        try:
            with hooks:
                yield
        finally:
            while entered:  # a module that failed half-way
                entered.pop().close()

    def _remember(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self.padding.encoded = first_tensor(output)

    def _hook(self, name: str) -> Callable[..., None]:
        in_encoder = bool(self._encoder_name) and name.startswith(self._encoder_name + ".")

        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> None:
            call = (name, self._calls[name])
            self._calls[name] += 1
            if self._tables and call in self._tables:
                return
            given, made = first_tensor((*args, *kwargs.values())), first_tensor(output)
            for label, look, receive in self._listeners[name]:
                values = look(module, given, made)
                rows = None if values is None else self.padding.rows(values, in_encoder=in_encoder)
                if rows is not None:
                    self.require_finite(label, rows)
                    receive(rows)

        return hook

    def require_finite(self, label: str, rows: Tensor) -> None:
        """Raise after this forward pass unless the rows are finite: their sum is only if all of them are."""
        self._sums.append((label, rows.sum(dtype=torch.float64)))

    def _raise_unless_finite(self) -> None:
        """Once per forward pass, since asking an accelerator for a number makes it wait."""
        labels, sums = [label for label, _ in self._sums], [total for _, total in self._sums]
        self._sums = []
        finite = torch.stack(sums).isfinite().tolist() if sums else []
        for label in (label for label, good in zip(labels, finite, strict=True) if not good):
            raise IsomergeError(
                f"Running {self.stock.checkpoint.name} on batch {self._place} of the data: the activations at "
                f"'{label}' are not finite. Look for NaN in the data, or for weights that overflow in float32."
            )


def first_tensor(given: Any) -> Tensor:
    """The activations among a module's inputs or outputs, which are the first of them."""
    if isinstance(given, Tensor):
        return given
    values = given.values() if isinstance(given, Mapping) else given
    return next(value for value in values if isinstance(value, Tensor))


class SameInput:
    """Tells which maps read the very same tensor (queries, keys and values), so that it is measured once."""

    def __init__(self) -> None:
        self.owner_of: dict[str, str] = {}
        self._recent: list[tuple[weakref.ref[Tensor], str]] = []

    def owner(self, name: str, values: Tensor) -> str:
        """The first map that read these values in this forward pass: `name` itself, or an earlier one."""
        self._recent = [(ref, other) for ref, other in self._recent if ref() is not None]
        owner = next((other for ref, other in self._recent if ref() is values), name)
        if owner == name:
            self._recent.append((weakref.ref(values), name))
        if self.owner_of.setdefault(name, owner) != owner:
            raise IsomergeError(
                f"Measuring the inputs of '{name}': it shares them with another layer in some batches only. "
                "Please report this model."
            )
        return owner
