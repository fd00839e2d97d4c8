"""The handwritten digits of scikit-learn on many clients, and a small stock image classifier that they train."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from isomerge.checkpoint.memory import load_into_module, saved_state
from isomerge.demonstration.digits import Digits
from isomerge.federated import compress

SERVER = 200  # of the 1297 training images; the server has them without labels, and no client has them
BATCH = 16
RATE = 4e-3
State = dict[str, Tensor]
DEFAULTS: dict[str, Any] = {
    "clients": 10, "alpha": 1.0, "seed": 0, "steps": 20, "apart": False, "body-only": False, "hostile": 0, "flip": 1.0,
    "rank": 0,
}  # fmt: skip
"""What the server writes beside the model that it sends: how many clients there are and how unlike their data, whether
each starts from weights of its own, whether heads stay, how many flip the sign of their updates and times what, and the
rank of what they send (0: the whole model)."""


def new_model(seed: int) -> Any:
    """1 layer of width 32, 4 heads, 4 patches and a class token: 9,700 parameters."""
    from transformers import ViTConfig, ViTForImageClassification

    shape: dict[str, Any] = {
        "image_size": 8, "patch_size": 4, "num_channels": 1, "num_labels": 10, "hidden_size": 32,
        "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 64, "attn_implementation": "eager",
        "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "architectures": ["ViTForImageClassification"],
    }  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return ViTForImageClassification(ViTConfig(**shape))


def model_of(state: Mapping[str, Tensor]) -> Any:
    """The stock class with these tensors; pfnm may have added units to its feed-forwards."""
    model = new_model(0)
    width = next(len(t) for name, t in state.items() if name.endswith("intermediate.dense.weight"))
    if width != model.config.intermediate_size:
        model.config.intermediate_size = width
        model = type(model)(model.config)
    load_into_module(model, state)
    return model


def sent(model: Any) -> State:
    """A model's tensors under the names that `save_pretrained` gives them, which is what isomerge goes by."""
    return {name: tensor.detach().clone() for name, tensor in saved_state(model, "the client's model").items()}


def split(digits: Digits, clients: int, alpha: float, seed: int) -> list[Tensor]:
    """The numbers of each client's images: of every class, shares drawn from a Dirichlet distribution.

    A small `alpha` gives clients that know few classes; with a large one all clients are alike.
    """
    generator = torch.Generator().manual_seed(seed)
    parts: list[list[Tensor]] = [[] for _ in range(clients)]
    for label in range(10):
        places = SERVER + (digits.train_labels[SERVER:] == label).nonzero()[:, 0]
        places = places[torch.randperm(len(places), generator=generator)]
        drawn = torch._standard_gamma(torch.full((clients,), alpha), generator=generator).double() + 1e-12
        ends = (drawn.cumsum(0) / drawn.sum() * len(places)).round().long()
        for part, start, end in zip(parts, [0, *ends.tolist()], ends.tolist(), strict=False):
            part.append(places[start:end])
    found = [torch.cat(part) for part in parts]
    for number, part in enumerate(found):  # nobody has nothing to train on
        if not len(part):
            richest = max(range(clients), key=lambda n: len(found[n]))
            found[number], found[richest] = found[richest][:1], found[richest][1:]
    return found


def answers(
    model: State, server_round: int, digits: Digits, partitions: Sequence[int], given: Mapping[str, Any]
) -> list[tuple[State, int]]:
    """What these clients send back in a round, and how many images each has."""
    about = {**DEFAULTS, **given}
    parts = split(digits, int(about["clients"]), float(about["alpha"]), int(about["seed"]))
    own = [parts[number] for number in partitions]
    first = int(about["seed"]) * 100_000
    starts: list[State] = [model] * len(own)
    if about["apart"] and server_round == 1:
        starts = [sent(new_model(first + 1 + number)) for number in partitions]
    seeds = [first + 100 * server_round + number for number in partitions]
    trained = train(starts, digits, own, seeds, steps=int(about["steps"]), body_only=bool(about["body-only"]))
    found = []
    for number, state in zip(partitions, trained, strict=True):
        if number < int(about["hostile"]):
            state = {
                name: model[name] - float(about["flip"]) * (tensor - model[name]) for name, tensor in state.items()
            }
        if about["rank"]:
            state = compress(model, state, int(about["rank"]))[0]
        found.append((state, len(parts[number])))
    return found


def train(
    states: Sequence[Mapping[str, Tensor]],
    digits: Digits,
    parts: Sequence[Tensor],
    seeds: Sequence[int],
    *,
    steps: int,
    body_only: bool = False,
) -> list[State]:
    """Each client's model after so many steps on its own images. All train side by side, and none sees another."""
    loaded = {id(state): model_of(state) for state in states}  # which costs as much as a step; most start as one
    models = [copy.deepcopy(loaded[id(state)]) for state in states]
    module, own = models[0].train(), [dict(model.named_parameters()) for model in models]
    frozen = {name for name in own[0] if body_only and name.startswith("classifier")}
    stacked = {name: torch.stack([one[name].detach() for one in own]) for name in own[0]}
    weights = {name: tensor.requires_grad_(name not in frozen) for name, tensor in stacked.items()}
    optimizer = torch.optim.AdamW(
        [w for w in weights.values() if w.requires_grad], lr=RATE, weight_decay=0.01, fused=True
    )
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]

    def logits(one: State, images: Tensor) -> Tensor:
        return torch.func.functional_call(module, one, (images,)).logits  # type: ignore[no-any-return]

    for _ in range(steps):
        chosen = [
            part[torch.randint(len(part), (BATCH,), generator=g)] for part, g in zip(parts, generators, strict=True)
        ]
        batch = torch.stack(chosen)  # (clients, BATCH)
        scores = torch.func.vmap(logits)(weights, digits.train_images[batch])
        loss = F.cross_entropy(scores.flatten(0, 1), digits.train_labels[batch].flatten(), reduction="sum") / BATCH
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        for number, one in enumerate(own):
            for name, parameter in one.items():
                parameter.copy_(weights[name][number])
    return [sent(model) for model in models]


@torch.no_grad()
def accuracy(state: Mapping[str, Tensor], digits: Digits) -> float:
    """On the test images, as a share."""
    model = model_of(state).eval()
    return float((model(digits.test_images).logits.argmax(-1) == digits.test_labels).double().mean())
