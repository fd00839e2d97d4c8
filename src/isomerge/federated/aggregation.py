"""`aggregate`: a global model and what clients made of it in, the next global model out."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from isomerge.alignment.api import align_family
from isomerge.arguments import require_choice, require_types
from isomerge.checkpoint.memory import as_tensors
from isomerge.checkpoint.open import open_checkpoint
from isomerge.choices import FEDERATED_ALIGN, FEDERATED_GUARDS, FEDERATED_STEPS
from isomerge.data.base import DataSource
from isomerge.errors import RequestError
from isomerge.federated.clients import (
    ClientUpdate,
    Refusal,
    State,
    accepted,
    difference,
    moved_by,
    shares,
    squared_norm,
)
from isomerge.federated.guards import GUARDS
from isomerge.merging.api import merge
from isomerge.merging.data_methods import ALL_METHODS
from isomerge.merging.methods import METHODS
from isomerge.merging.state_dicts import merge_state_dicts
from isomerge.name_patterns import NamePattern
from isomerge.results import Result

HEADS = r"(.*\.)?(classifier|score|lm_head|qa_outputs|pre_classifier|pooler)(\..*)?"
"""Tensors of task heads, as the stock classes call them: what FedBABU leaves as it started."""
GROWING = ("pfnm", "fedma")
"""Methods that may add units, so that the config changes with the model."""


@dataclass
class Aggregated(Result):
    """The next global model, and how it came about."""

    state: dict[str, Tensor]
    config: dict[str, Any] | None
    """Of the new model, where the method changed it (pfnm may add units)."""
    clients: list[str]
    """Those that count."""
    refused: list[Refusal]
    step: float
    """What the mean update was multiplied by."""
    notes: list[str] = field(default_factory=list)


def aggregate(
    model: Mapping[str, Any],
    clients: Sequence[ClientUpdate],
    *,
    method: str = "linear",
    options: Mapping[str, Any] | None = None,
    config: Mapping[str, Any] | None = None,
    align: str = "none",
    level: str = "full",
    guard: str = "none",
    hostile: int = 0,
    step: str = "one",
    frozen: str | None = None,
    data: DataSource | None = None,
    seed: int = 0,
) -> Aggregated:
    """The next global model from the clients' models.

    `method` is any merge method: "linear" is FedAvg, the mean by examples, and other methods that take weights get
    the shares of the examples as theirs; "ties" and its kin work on the updates, "fedma" and "pfnm" match units,
    "regmean" and "fisher" take the clients' `statistics` or `importance` in `options`, in the order of `clients`;
    "reconstruct" and "distill" (FedDF, whose student starts from the mean) the server's unlabelled `data`. Methods that
    run models, and alignment, need `config`, the config.json.

    `align` moves the clients first, without changing what they compute: "global" next to the global model, "common" to
    their common mean, as for clients that started apart; updates then count from that mean, hostile clients' share of
    it included. `guard` protects from hostile clients ("clip", "median", "krum"; `hostile` is how many of them krum
    expects). `step` is what the mean update is multiplied by: "one", or "fedexp", max(1, Σ p_i ‖Δ_i‖² / 2‖Σ p_i Δ_i‖²).
    `frozen` is a pattern of tensors that stay as the global model has them; "head" stands for task heads, which is
    FedBABU.

    Tensors have the names of save_pretrained, as `saved_state` gives a module's. A client with tensors of other names
    or shapes, with NaN, or without examples is left out with a note.
    """
    require_types(model=(model, Mapping), options=(options, Mapping, None), level=(level, str), seed=(seed, int))
    require_sense(method, config, align, guard, hostile, step, frozen)
    start = as_tensors(model, "Aggregating")
    stays = _frozen(frozen)
    good, refused = accepted(clients, start)
    kept = {name for name in start if stays is not None and stays.fullmatch(name)}
    good = [ClientUpdate(one.name, {**one.state, **{n: start[n] for n in kept}}, one.examples) for one in good]
    notes = [str(refusal) for refusal in refused]
    left_out = {refusal.number for refusal in refused}
    places = [number for number in range(len(clients)) if number not in left_out]
    if align != "none":
        good, start = _aligned(good, start, config, align, level, notes)
    states: list[State] = [client.state for client in good]
    weights = shares(good)
    names = [client.name for client in good]
    if guard != "none":
        guarded = GUARDS[guard]([difference(s, start) for s in states], weights, names, hostile)
        states = [moved_by(start, update) for update in guarded.updates]
        weights, names = guarded.shares, [names[number] for number in guarded.kept]
        places = [places[number] for number in guarded.kept]
        notes += guarded.notes
    own = _of_those_that_count(options or {}, len(clients), places, guard)
    merged, changed = _merged(start, states, weights, method, own, config, data, seed)
    scale = 1.0
    if step == "fedexp":
        scale = _fedexp(start, states, weights)
        merged = moved_by(start, difference(merged, start), scale)
    for name in kept & merged.keys():
        merged[name] = start[name].clone()
    return Aggregated(merged, changed, names, refused, scale, notes)


def require_sense(
    method: str = "linear",
    config: Mapping[str, Any] | None = None,
    align: str = "none",
    guard: str = "none",
    hostile: int = 0,
    step: str = "one",
    frozen: str | None = None,
) -> None:
    """Refuse arguments of `aggregate` that no round could be aggregated with."""
    require_types(
        method=(method, str), config=(config, Mapping, None), align=(align, str), guard=(guard, str),
        hostile=(hostile, int), step=(step, str), frozen=(frozen, str, None),
    )  # fmt: skip
    require_choice("method", method, ALL_METHODS)
    require_choice("align", align, FEDERATED_ALIGN)
    require_choice("guard", guard, FEDERATED_GUARDS)
    require_choice("step", step, FEDERATED_STEPS)
    _frozen(frozen)
    if align != "none" and config is None:
        raise RequestError("Aggregating: align needs config, the content of the model's config.json.", keys=("config",))
    if hostile < 0:
        raise RequestError(f"Aggregating: hostile is {hostile}. Write 0 or more.", keys=("hostile",))
    if step == "fedexp" and method in GROWING:
        raise RequestError(
            f"Aggregating: {method} may add units, so there is no update that fedexp could multiply. Use step='one'.",
            keys=("method", "step"),
        )
    for key, asked in (("step", step == "fedexp"), ("frozen", frozen is not None)):
        if align == "common" and asked:
            raise RequestError(
                f"Aggregating: {key} goes by the global model, from which align='common' does not start: updates count "
                "from the clients' own mean. Use align='global'.",
                keys=("align", key),
            )


def _of_those_that_count(options: Mapping[str, Any], clients: int, places: Sequence[int], guard: str) -> dict[str, Any]:
    """The options, whose lists have something for each client of the round, left out or not."""
    lists = [key for key, value in options.items() if isinstance(value, (list, tuple)) and len(value) == clients]
    if lists and guard == "median":
        raise RequestError(
            f"Aggregating: guard='median' makes one model of all clients, so {lists[0]} cannot have a value for each. "
            "Use another guard, or one value.",
            keys=("guard", "options"),
        )
    return {key: [value[n] for n in places] if key in lists else value for key, value in options.items()}


def _frozen(pattern: str | None) -> NamePattern | None:
    if pattern is None:
        return None
    try:
        return NamePattern(HEADS if pattern == "head" else pattern)
    except ValueError as error:
        raise RequestError(
            f"Aggregating: frozen='{pattern}' is no pattern of names ({error}).", keys=("frozen",)
        ) from None


def _aligned(
    clients: list[ClientUpdate],
    start: State,
    config: Mapping[str, Any] | None,
    align: str,
    level: str,
    notes: list[str],
) -> tuple[list[ClientUpdate], dict[str, Tensor]]:
    """The clients next to the global model, which may have to be written in another form too; or at their own mean."""
    opened = [open_checkpoint(dict(one.state), config=config, name=f"client {one.name}") for one in clients]
    anchor = open_checkpoint(dict(start), config=config, name="the global model")
    if align == "global":
        family = align_family(opened, anchor=anchor, level=level)
    elif len(clients) == 1:
        return clients, dict(start)
    else:
        family = align_family(opened, many="universe", level=level)
    family.require_one_gauge()
    notes += family.solver_notes()
    moved = [
        ClientUpdate(one.name, family.moved(checkpoint).state_dict(), one.examples)
        for one, checkpoint in zip(clients, opened, strict=True)
    ]
    if align == "common":  # the global model of before is of another gauge: updates count from the clients' mean
        return moved, merge_state_dicts([one.state for one in moved], weight=shares(moved))
    return moved, family.moved(anchor).state_dict()


def _merged(
    start: State,
    states: list[State],
    weights: list[float],
    method: str,
    options: dict[str, Any],
    config: Mapping[str, Any] | None,
    data: DataSource | None,
    seed: int,
) -> tuple[dict[str, Tensor], dict[str, Any] | None]:
    chosen = ALL_METHODS[method]
    if "weight" in {option.name for option in chosen.options} and "weight" not in options:
        options["weight"] = weights
    base = dict(start) if chosen.base == "required" else None
    if method == "distill":  # whose student is, in FedDF, the clients' mean
        base = merge_state_dicts([dict(state) for state in states], weight=weights)
    if method in METHODS and data is None and config is None:
        return merge_state_dicts([dict(s) for s in states], method=method, base=base, seed=seed, **options), None
    merged = merge(
        [dict(state) for state in states], method=method, base=base, config=config, data=data, seed=seed, **options
    )
    own = None if config is None else {**config, **merged.config_changes}
    return merged.state_dict(), own if own != config else None


def _fedexp(start: State, states: Sequence[State], weights: Sequence[float]) -> float:
    """The step of FedExp (Jhunjhunwala et al. 2023), with the clients' shares in the place of 1 / M."""
    updates = [difference(state, start) for state in states]
    mean = {name: sum(p * update[name] for p, update in zip(weights, updates, strict=True)) for name in updates[0]}
    below = squared_norm(mean)  # type: ignore[arg-type]
    above = math.fsum(p * squared_norm(update) for p, update in zip(weights, updates, strict=True))
    return max(1.0, above / (2 * below)) if below > 0 else 1.0
