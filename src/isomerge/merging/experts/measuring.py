"""A mixture on data: where it sends each data set, its loss beside that of its models, and routers fitted to data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from isomerge.architectures.expert_classes import BLOCK
from isomerge.checkpoint import Checkpoint
from isomerge.data.base import floating
from isomerge.errors import RequestError
from isomerge.merging.experts.configs import loaded_config
from isomerge.merging.experts.layers import ExpertLayers
from isomerge.merging.experts.uniting import Activation
from isomerge.merging.experts.watching import Watched, mean_shares, watch
from isomerge.merging.merge_inputs import MergeInputs
from isomerge.merging.mixture.router import fit_posterior
from isomerge.merging.run.rows import TensorSource
from isomerge.running.padding import PaddingMask
from isomerge.running.passes import DataPass
from isomerge.running.predictions import rows_of
from isomerge.running.stock import StockModel, inputs_of, load_stock, run_module

ROWS = 8192
"""Tokens of each data set that routers are fitted to."""
KEPT = 4096
"""Tokens of which it is kept, for every layer, what the router reads."""


def whole(source: TensorSource | Tensor) -> Tensor:
    """All rows of a tensor. The next read may take the same memory."""
    return source if isinstance(source, Tensor) else source.rows(0, source.info.shape[0]).clone()


def measured(
    inputs: MergeInputs, base: Checkpoint, config: Mapping[str, Any], sources: Mapping[str, TensorSource]
) -> list[dict[str, Any]]:
    """For each data set: the share of choices that fall on each expert, and the losses of mixture and models."""
    mixture = loaded_with(config, sources, base, inputs.device)
    rows: list[dict[str, Any]] = []
    for number, data in enumerate(inputs.data):
        seen = watch(mixture, examples(inputs, number))
        layers = seen.shares()
        rows.append(
            {"data": data.data.name, "models": list(inputs.owners[number]), "tokens": seen.predicted,
             "routing": mean_shares(layers), "layers": layers, "loss": {"mixture": seen.loss}}
        )  # fmt: skip
    del mixture
    for model in dict.fromkeys([base, *inputs.models]):
        stock = StockModel.load(model, inputs.device)
        for number, row in enumerate(rows):
            row["loss"][model.name] = watch(stock.module, examples(inputs, number)).loss
    return rows


def examples(inputs: MergeInputs, number: int) -> DataPass:
    """One of the data sets, in the tokens of the first model."""
    batches = inputs.data[number].passes(inputs.base or inputs.models[0])
    return DataPass(batches, device=inputs.device, labels=False, hashed=False)


def data_rows(inputs: MergeInputs, base: Checkpoint, places: Sequence[int]) -> Tensor:
    """(layers, experts, width): softmax of the router is the posterior of whose data a token is from, given what the
    router reads; `places` are the models that the experts come from. Copies of one model share its texts."""
    owned = [[place in owners for place in places] for owners in inputs.owners]
    if len(owned) < 2 or any(not any(own) for own in owned) or any(sum(own) == len(own) for own in owned):
        raise RequestError(
            "Building a mixture of experts: gate_mode data needs data for each model, to tell them apart. Name data "
            "beside each model, or choose another gate_mode.",
            keys=("gate_mode", "data"),
        )
    model = StockModel.load(base, inputs.device).module
    read = [_block_inputs(model, examples(inputs, number)) for number in range(len(inputs.data))]
    believed = [torch.tensor(own, dtype=torch.float64) / sum(own) for own in owned]
    found = []
    for layer in read[0]:
        rows = torch.cat([one[layer] for one in read])
        goal = torch.cat([
            own[:, None].expand(-1, len(one[layer])) for own, one in zip(believed, read, strict=True)
        ], 1)  # fmt: skip
        found.append(fit_posterior(rows.double(), goal))
    return torch.stack(found)


@torch.no_grad()
def _block_inputs(model: nn.Module, batches: DataPass) -> dict[int, Tensor]:
    """(rows, width) what each feed-forward of a dense model reads, of the first tokens."""
    seen: dict[int, list[Tensor]] = {}
    blocks = {number: block for number, block in _blocks(model)}
    count = 0
    for batch in batches:
        mask = PaddingMask(batch, model)
        hooks = [block.register_forward_hook(_reader(seen, number, mask)) for number, block in blocks.items()]
        try:
            run_module(model, inputs_of(batch, model))
        finally:
            for hook in hooks:
                hook.remove()
        count += int(batch["input_ids"].numel())
        if count >= ROWS:
            break
    return {number: torch.cat(rows)[:ROWS].cpu() for number, rows in seen.items()}


def _reader(seen: dict[int, list[Tensor]], number: int, mask: PaddingMask) -> Any:
    def hook(module: nn.Module, given: tuple[Tensor, ...], made: Tensor) -> None:
        inputs = given[0].reshape(-1, given[0].shape[-1])
        seen.setdefault(number, []).append(rows_of(inputs, mask.of_side(len(inputs), encoder=False)))

    return hook


def _blocks(model: nn.Module) -> Iterator[tuple[int, nn.Module]]:
    for name, module in model.named_modules():
        head, _, tail = name.rpartition("layers.")
        number, _, rest = tail.partition(".")
        if head and rest == BLOCK:
            yield int(number), module


# --- models that are mixtures already ---------------------------------------------------------------------------------
def watched_mixture(inputs: MergeInputs, known: ExpertLayers) -> Watched:
    """The mixture over its data, with what its routers read."""
    stock = StockModel.load(known.checkpoint, inputs.device)
    seen = watch(stock.module, examples(inputs, 0), keep=KEPT)
    if seen.layers.keys() != set(known.layers):
        raise RequestError(
            f"Running {known.checkpoint.name}: its class has routers in {len(seen.layers)} layers, and its files in "
            f"{len(known.layers)}. Get weights and config.json of one and the same model."
        )
    return seen


def loaded_with(
    config: Mapping[str, Any], sources: Mapping[str, TensorSource | Tensor], like: Checkpoint, device: str
) -> Any:
    """The stock model that these tensors make, as precise as another one is."""
    state = {name: whole(source) for name, source in sources.items()}
    return load_stock(config, state, dtype=floating(like)).to(device).requires_grad_(False)


def activation_of(checkpoint: Checkpoint) -> Activation:
    """What the experts of a mixture apply to their gates."""
    from transformers.activations import ACT2FN

    found: Activation = ACT2FN[loaded_config(checkpoint).hidden_act]
    return found
