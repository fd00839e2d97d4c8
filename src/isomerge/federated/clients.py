"""What arrives from clients, and which of it may count."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from isomerge.checkpoint.base import name_some
from isomerge.checkpoint.memory import as_tensors
from isomerge.errors import CheckpointError, RequestError

State = Mapping[str, Tensor]


@dataclass(frozen=True)
class ClientUpdate:
    """A client's model after its training, and how many examples it trained on."""

    name: str
    state: State
    examples: float = 1.0


@dataclass(frozen=True)
class Refusal:
    """A client whose model does not count in this round, and why."""

    client: str
    reason: str
    number: int
    """The client's place among all of the round, from 0."""

    def __str__(self) -> str:
        return f"client {self.client} is left out: {self.reason}"


def accepted(clients: Sequence[ClientUpdate], like: State) -> tuple[list[ClientUpdate], list[Refusal]]:
    """The clients whose models can be aggregated with `like`; a broken one must not end the round of the others."""
    good: list[ClientUpdate] = []
    refused: list[Refusal] = []
    for number, client in enumerate(clients):
        try:
            state = as_tensors(client.state, f"Reading client {client.name}")
            reason = _misfit(state, like) or _no_count(client.examples)
        except CheckpointError as error:
            state, reason = {}, str(error)
        if reason is None:
            good.append(replace(client, state={name: state[name] for name in like}))
        else:
            refused.append(Refusal(client.name, reason, number))
    if not good:
        raise RequestError(
            f"Aggregating: none of {len(clients)} clients sent a model that can be used"
            + "".join(f"; {refusal.client}: {refusal.reason}" for refusal in refused[:4])
            + ". Ask the clients again."
        )
    return good, refused


def _misfit(state: State, like: State) -> str | None:
    absent, surplus = sorted(like.keys() - state.keys()), sorted(state.keys() - like.keys())
    if absent or surplus:
        return f"it {'lacks' if absent else 'has a surplus'} {name_some(absent or surplus)}"
    for name, tensor in state.items():
        if tensor.shape != like[name].shape:
            return f"'{name}' is {tuple(tensor.shape)} instead of {tuple(like[name].shape)}"
        if tensor.is_floating_point() != like[name].is_floating_point():
            return f"'{name}' holds {tensor.dtype} instead of {like[name].dtype}"
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            return f"'{name}' is not finite"
    return None


def _no_count(examples: float) -> str | None:
    if isinstance(examples, bool) or not isinstance(examples, (int, float)) or not math.isfinite(examples):
        return f"its number of examples is {examples!r}"
    return None if examples > 0 else f"it trained on {examples:g} examples"


def shares(clients: Sequence[ClientUpdate]) -> list[float]:
    """The share of all examples that each client has.

    >>> shares([ClientUpdate("a", {}, 1), ClientUpdate("b", {}, 3)])
    [0.25, 0.75]
    """
    total = math.fsum(client.examples for client in clients)
    return [client.examples / total for client in clients]


def difference(one: State, other: State) -> dict[str, Tensor]:
    """one − other, of the tensors that can change, in float32 at least."""
    return {
        name: tensor.to(_computed(tensor)) - other[name].to(_computed(tensor))
        for name, tensor in one.items()
        if tensor.is_floating_point()
    }


def _computed(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def moved_by(start: State, step: Mapping[str, Tensor], scale: float = 1.0) -> dict[str, Tensor]:
    """start + scale · step, in the dtypes of `start`; tensors without a step stay."""
    return {
        name: (tensor.to(step[name].dtype) + scale * step[name]).to(tensor.dtype) if name in step else tensor.clone()
        for name, tensor in start.items()
    }


def squared_norm(update: Mapping[str, Tensor]) -> float:
    return math.fsum(float(tensor.double().square().sum()) for tensor in update.values())
