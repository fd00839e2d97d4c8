"""Where a forward pass over many examples uses its parameters, and each example's gradient at every such place.

Autograd adds up gradients over the examples of a batch. To square them one by one, every call of torch that mixes a
parameter with the data is remembered. Its output has one part for each example, and the gradient there is known after
one backward pass for the whole batch; from it and the call's other inputs follow the examples' gradients of the
parameter. What is made of parameters alone (a normalised table, a gain plus one) counts as a parameter of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

SPREADS = (Tensor.expand, Tensor.expand_as, Tensor.repeat, torch.broadcast_to)
"""Give a parameter to every example, without any data."""


class Unseen(Exception):
    """A parameter meets the data in a way that does not tell the examples apart."""


@dataclass(frozen=True)
class ParameterUse:
    """One call that mixes something shared (a parameter, or made of parameters) with the examples."""

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    place: int | str
    """Where in the arguments the shared tensor stands."""
    roots: tuple[Tensor, ...]
    """The parameters that it is made of."""
    made: Tensor
    data: tuple[int | str, ...]
    """Where in the arguments the data stand."""
    examples: int

    @property
    def shared(self) -> Tensor:
        return self._argument(self.place)

    def ids(self) -> Tensor | None:
        """The rows that each example picks, (examples, …), where the call looks them up in a whole parameter."""
        looks_up = self.function is functional.embedding and self.place == 1 and self.shared is self.roots[0]
        return self._of_examples(self._argument(0), slice(None)) if looks_up else None

    def gradients(self, grad: Tensor, parameter: Tensor, part: slice) -> Tensor:
        """The gradients of a parameter, (examples in the part, *its shape), from that of the call's output."""
        with torch.no_grad():
            gradients = self._gradients(self._of_examples(grad, part), part)
        if self.shared is parameter:
            return gradients
        (pulled,) = torch.autograd.grad(
            self.shared, [parameter], gradients, retain_graph=True, allow_unused=True, is_grads_batched=True
        )
        return gradients.new_zeros(len(gradients), *parameter.shape) if pulled is None else pulled

    def _gradients(self, grad: Tensor, part: slice) -> Tensor:
        shape = self.shared.shape
        if self.function is functional.linear and self.place in (1, 2):
            grad = grad.flatten(1, -2)
            if self.place == 2:
                return grad.sum(1)
            return torch.bmm(grad.transpose(1, 2), self._of_examples(self.args[0], part).flatten(1, -2))
        if not self.data:  # each example has a copy, perhaps along more axes
            return torch.stack([one.sum_to_size(shape) for one in grad])
        inputs = [self._of_examples(self._argument(place), part) for place in self.data]

        def one(grad: Tensor, *inputs: Tensor) -> Tensor:
            back: Any = torch.func.vjp(lambda shared: self._call(shared, inputs), self.shared.detach())[1]
            return back(grad)[0]  # type: ignore[no-any-return]

        return torch.vmap(one)(grad, *inputs)

    def _of_examples(self, values: Tensor, part: slice) -> Tensor:
        return torch.unflatten(values.detach(), 0, (self.examples, -1))[part]

    def _call(self, shared: Tensor, inputs: Sequence[Tensor]) -> Tensor:
        given = dict(zip(self.data, inputs, strict=True)) | {self.place: shared}
        args = [given[i] if i in given else _detached(value) for i, value in enumerate(self.args)]
        kwargs = {name: given[name] if name in given else _detached(value) for name, value in self.kwargs.items()}
        return self.function(*args, **kwargs)  # type: ignore[no-any-return]

    def _argument(self, place: int | str) -> Tensor:
        return self.args[place] if isinstance(place, int) else self.kwargs[place]  # type: ignore[no-any-return]


class ParameterUses(TorchFunctionMode):
    """Remembers, while a model runs, every use of its parameters on the examples of a batch."""

    def __init__(self, parameters: Sequence[Tensor], batch: dict[str, Tensor], examples: int) -> None:
        super().__init__()
        self.uses: list[ParameterUse] = []
        self._examples = examples
        self._roots: Any = WeakIdKeyDictionary({p: (p,) for p in parameters})
        self._data: Any = WeakIdKeyDictionary({tensor: True for tensor in batch.values()})

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        made = func(*args, **kwargs)
        given = list(_tensors((args, kwargs)))
        if func is functional.embedding and args[0].ndim > 1 and args[0].shape[0] == self._examples:
            self._data[args[0]] = True  # numbers that are the same for every example, and written out for each
        roots = _unique(root for tensor in given for root in self._roots.get(tensor, ()))
        with_data = any(tensor in self._data for tensor in given)
        if with_data and roots and _differentiable(made):
            self._remember(func, args, kwargs, made)
        elif roots and func in SPREADS and self._is_spread(args[0], made):
            self.uses.append(ParameterUse(func, args, kwargs, 0, roots, made, (), self._examples))
            with_data = True
        changed = args[0] if func is Tensor.__setitem__ else made
        for tensor in _tensors(changed):
            if with_data:
                self._data[tensor] = True
            elif roots and tensor.requires_grad and tensor not in self._roots:
                self._roots[tensor] = roots
        return made

    def _is_spread(self, shared: Tensor, made: Tensor) -> bool:
        same = shared.ndim == made.ndim
        return made.shape[0] == self._examples * (shared.shape[0] if same else 1)

    def _remember(self, func: Any, args: Any, kwargs: Any, made: Any) -> None:
        flat: dict[int | str, Any] = dict(enumerate(args)) | kwargs
        data = tuple(place for place, value in flat.items() if isinstance(value, Tensor) and value in self._data)
        shared = [place for place, value in flat.items() if isinstance(value, Tensor) and value in self._roots]
        met = [made, *(flat[place] for place in data)]
        known = all(isinstance(t, Tensor) and t.ndim and t.shape[0] % self._examples == 0 for t in met)
        inside = sum(t in self._roots for t in _tensors((args, kwargs)))
        if func is Tensor.__setitem__ or not data or not known or inside != len(shared):
            raise Unseen(f"{getattr(func, '__name__', func)}")
        for place in shared:
            roots = self._roots[flat[place]]
            self.uses.append(ParameterUse(func, tuple(args), dict(kwargs), place, roots, made, data, self._examples))


def _tensors(values: Any) -> Iterator[Tensor]:
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, (list, tuple)):
        for value in values:
            yield from _tensors(value)
    elif isinstance(values, dict):
        yield from _tensors(list(values.values()))


def _unique(tensors: Iterator[Tensor]) -> tuple[Tensor, ...]:
    return tuple({id(tensor): tensor for tensor in tensors}.values())


def _differentiable(made: Any) -> bool:
    return made is None or any(tensor.requires_grad for tensor in _tensors(made))


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) and value.requires_grad else value
