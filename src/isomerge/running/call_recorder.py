"""Watching a model run: the inputs and outputs of chosen weights and norms, and what becomes of an output.

Nothing of an architecture is known here. A weight is recognised by its memory when a linear map uses it, wherever the
map stands in the code, and a norm by its module. What is written to the residual stream is recognised by being added
to something of its own size before anything else reads it.

Hooks on modules (`activation_watch`) cannot see either: one expert of a stacked weight is no module, and what becomes
of an output is no call. Norms and the encoder, which are modules, are watched by hooks here too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from isomerge.running.activation_watch import first_tensor
from isomerge.running.padding import encoder_of

# Where a weight stands among the arguments; its input stands before it.
WEIGHT_AT = {"linear": 1, "matmul": 1, "__matmul__": 1, "addmm": 2}
SUMS = {"add", "add_", "__add__", "__radd__", "__iadd__"}


class ForwardDone(Exception):
    """Raised inside a forward pass to end it."""


@dataclass(eq=False)
class WeightCall:
    """One call: the input, the output, and what the output has become (`sum`, once something was added to it)."""

    weight: str
    """The weight or norm that is called, by its name in memory."""
    input: Tensor
    output: Tensor
    sum: Tensor
    expert: int | None = None
    """Which one, of a weight that stacks experts."""
    place: Any = None
    encoded: bool = False
    """The input has the positions of an encoder, in a model that also has a decoder."""
    transposed: bool = False
    """The weight is stored as (in, out)."""
    added: bool = False
    closed: bool = False

    @property
    def rows(self) -> int:
        """One per position."""
        return self.input[..., 0].numel()

    def carries(self, value: Any) -> bool:
        return (
            isinstance(value, Tensor)
            and value.numel() == self.sum.numel()
            and value.data_ptr() == self.sum.data_ptr()
            and value.dtype == self.sum.dtype
        )


@dataclass
class RecordedWeights:
    """What to look for in one model."""

    weights: Mapping[int, tuple[str, nn.Parameter]]
    """By the address of its storage."""
    norms: Mapping[str, nn.Module] = field(default_factory=dict)
    encoder: nn.Module | None = None
    """Of a model that also has a decoder: each side has positions of its own."""

    @classmethod
    def of(cls, model: nn.Module, weights: Iterable[str], norms: Iterable[str] = ()) -> RecordedWeights:
        parameters = dict(model.named_parameters())
        by_address = {parameters[name].untyped_storage().data_ptr(): (name, parameters[name]) for name in weights}
        return cls(by_address, {name: model.get_submodule(name) for name in norms}, encoder_of(model))


class CallRecorder(TorchFunctionMode):
    """Records every call of the given weights and norms while it is active.

    `follow` names those whose output is followed into the sum it is added to. `done(calls)` is asked after each call
    and each sum; when it says yes the forward pass ends with `ForwardDone`.
    """

    def __init__(
        self, recorded: RecordedWeights, done: Callable[[list[WeightCall]], bool], *, follow: set[str]
    ) -> None:
        super().__init__()
        self.calls: list[WeightCall] = []
        self.place: Any = None  # whoever runs the model may say where it is
        self._encoding = False
        self._encoder_output: Tensor | None = None
        self._recorded, self._done, self._follow = recorded, done, follow
        self._open: list[WeightCall] = []
        self._hooks = contextlib.ExitStack()

    def __enter__(self) -> CallRecorder:
        for name, module in self._recorded.norms.items():
            self._hooks.enter_context(module.register_forward_hook(self._norm_hook(name)))
        if self._recorded.encoder is not None:
            self._hooks.enter_context(self._recorded.encoder.register_forward_pre_hook(self._enter_encoder))
            self._hooks.enter_context(self._recorded.encoder.register_forward_hook(self._leave_encoder))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *details: Any) -> None:
        super().__exit__(*details)  # type: ignore[no-untyped-call]
        self._hooks.close()

    def _norm_hook(self, name: str) -> Callable[[nn.Module, tuple[Any, ...], Any], None]:
        def hook(module: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
            self._record(name, arguments[0], output)

        return hook

    def _enter_encoder(self, *_: Any) -> None:
        self._encoding = True

    def _leave_encoder(self, module: nn.Module, arguments: Any, output: Any) -> None:
        self._encoding, self._encoder_output = False, first_tensor(output)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if args and _in_place(func):
            self._save_from_writing(args[0])
        result = func(*args, **kwargs)
        if self._open and isinstance(result, (Tensor, tuple, list)):
            self._follow_on(func, args, kwargs, result)
        at = WEIGHT_AT.get(getattr(func, "__name__", ""))
        if at is not None and len(args) > at:
            self._look_at(args[at - 1], args[at], result, turned=func is F.linear)
        return result

    def _look_at(self, value: Tensor, weight: Tensor, result: Tensor, *, turned: bool) -> None:
        """A product with a recorded weight is a call of it. `turned`: the function itself transposes the weight."""
        known = self._recorded.weights.get(weight.untyped_storage().data_ptr())
        if known is None:
            return
        name, whole = known
        expert = None if whole.dim() == 2 else weight.storage_offset() // whole.stride(0)
        stored_as_out_in = turned or weight.stride()[-2:] != whole.stride()[-2:]
        self._record(name, value, result, expert=expert, transposed=not stored_as_out_in)

    def _record(
        self, weight: str, value: Tensor, output: Tensor, *, expert: int | None = None, transposed: bool = False
    ) -> None:
        encoder = self._encoder_output
        encoded = self._encoding or (encoder is not None and value.data_ptr() == encoder.data_ptr())
        call = WeightCall(weight, value, output, output, expert, self.place, encoded, transposed)
        self.calls.append(call)
        if weight in self._follow:
            self._open.append(call)
        self._ask()

    def _save_from_writing(self, target: Any) -> None:
        """What the model is about to overwrite is copied, except a sum that is still followed."""
        if not isinstance(target, Tensor):
            return
        for call in self.calls:
            if target.data_ptr() == call.output.data_ptr():
                call.output = call.output.clone()
            if call not in self._open and target.data_ptr() == call.sum.data_ptr():
                call.sum = call.sum.clone()

    def _follow_on(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any
    ) -> None:
        changed = False
        for call in list(self._open):
            if not any(call.carries(value) for value in _flat([*args, *kwargs.values()])):
                continue
            if isinstance(result, Tensor) and call.carries(result) and func.__name__ not in SUMS:
                continue  # a view, or a dropout that drops nothing
            changed = True
            if isinstance(result, Tensor) and _is_plain_sum(func, args, kwargs, result):
                call.sum, call.added = result, True
            else:
                call.closed = True
                self._open.remove(call)
        if changed:
            self._ask()

    def _ask(self) -> None:
        if self._done(self.calls):
            raise ForwardDone


def _is_plain_sum(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Tensor) -> bool:
    """Two tensors of one size, neither of them scaled or broadcast."""
    operands = [*args, *(kwargs[k] for k in ("other",) if k in kwargs)]
    return (
        func.__name__ in SUMS
        and "alpha" not in kwargs
        and len(operands) == 2
        and all(isinstance(x, Tensor) and x.numel() == result.numel() for x in operands)
    )


def _in_place(func: Callable[..., Any]) -> bool:
    name = func.__name__
    return name.startswith("__i") or (name.endswith("_") and not name.endswith("__")) or name == "__setitem__"


def _flat(values: Iterable[Any]) -> Iterable[Any]:
    for value in values:
        if isinstance(value, (tuple, list)):
            yield from _flat(value)
        else:
            yield value
