"""Federated learning: what a server does with the models of its clients, alone or as strategies of Flower.

`aggregate` needs no framework: a global model and what clients made of it in, the next global model out.

>>> import torch
>>> from isomerge.federated import ClientUpdate, aggregate
>>> clients = [ClientUpdate("a", {"w": torch.tensor([1.0])}, 1), ClientUpdate("b", {"w": torch.tensor([4.0])}, 3)]
>>> aggregate({"w": torch.zeros(1)}, clients).state
{'w': tensor([3.2500])}
"""

from isomerge.checkpoint.memory import load_into_module, saved_state
from isomerge.federated.adapters import aggregate_adapters
from isomerge.federated.aggregation import Aggregated, aggregate
from isomerge.federated.clients import ClientUpdate
from isomerge.federated.compression import compress, expand

__all__ = [
    "Aggregated",
    "ClientUpdate",
    "aggregate",
    "aggregate_adapters",
    "compress",
    "expand",
    "load_into_module",
    "saved_state",
]
