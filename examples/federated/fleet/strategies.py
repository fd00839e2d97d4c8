"""The strategies of this example by name: the arguments of `isomerge.federated.aggregate`, and what clients do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from fleet.task import SERVER
from isomerge.demonstration.digits import Digits

STRATEGIES: dict[str, dict[str, Any]] = {
    "fedavg": {},
    "compressed": {"clients": {"rank": 8}},
    "aligned-global": {"aggregate": {"align": "global"}, "align_rounds": 3},
    "aligned-common": {"aggregate": {"align": "common"}, "align_rounds": 1},
    "fedexp": {"aggregate": {"step": "fedexp"}},
    "fedbabu": {"aggregate": {"frozen": "head"}, "clients": {"body-only": True}},
    "fedma": {"aggregate": {"method": "fedma", "options": {"largest": 1.25}}},
    "pfnm": {"aggregate": {"method": "pfnm", "options": {"largest": 1.25}}},
    "ties": {"aggregate": {"method": "ties", "options": {"density": 0.5}}},
    "feddf": {"aggregate": {"method": "distill", "options": {"steps": 20}}, "images": True},
    "reconstruct": {"aggregate": {"method": "reconstruct", "options": {"goals": "mean"}}, "images": True},
    "clip": {"aggregate": {"guard": "clip"}},
    "median": {"aggregate": {"guard": "median"}},
    "krum": {"aggregate": {"guard": "krum", "hostile": 2}},
}


def server_images(digits: Digits) -> Callable[[], Iterator[dict[str, Tensor]]]:
    """The server's own images, in batches without labels."""
    return lambda: ({"pixel_values": batch} for batch in digits.train_images[:SERVER].split(50))


def arguments_of(name: str, config: dict[str, Any], digits: Digits) -> dict[str, Any]:
    """The arguments of `aggregate`."""
    about = STRATEGIES[name]
    found = {"config": config, **about.get("aggregate", {})}
    return {**found, "data": server_images(digits)} if about.get("images") else found
