"""Clients with real models: aligned before they are averaged, grown, distilled, or as adapters alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from peft.utils import get_peft_model_state_dict
from torch import Tensor

from adapters.peft_adapters import load_base
from isomerge.architectures import describe
from isomerge.checkpoint import open_checkpoint
from isomerge.federated import ClientUpdate, aggregate, aggregate_adapters
from isomerge.symmetry.moved import scrambled
from models import image_pair, model, save_base
from samples import digits


def stored(folder: str | Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    opened = open_checkpoint(folder)
    return {name: opened.read(name) for name in opened.tensors}, opened.config


def outputs(state: dict[str, Tensor], folder: str | Path) -> Tensor:
    """Of the stock class, in float64."""
    stock = transformers.ViTForImageClassification.from_pretrained(
        None, config=transformers.AutoConfig.from_pretrained(folder), state_dict=state, dtype=torch.float64
    ).eval()
    pixels = torch.randn(
        4, 3 if stock.config.num_channels == 3 else 1, 8, 8, generator=torch.Generator().manual_seed(1)
    )
    with torch.no_grad():
        return torch.as_tensor(stock(pixel_values=pixels.double()).logits)


def in_other_clothes(folder: str | Path, seed: int) -> dict[str, Tensor]:
    """The same function in other weights, by a random symmetry."""
    return scrambled(describe(open_checkpoint(folder)), seed).state_dict()


@pytest.mark.parametrize("align", ["global", "common"])
def test_clients_that_are_one_function_average_to_it(align: str) -> None:
    folder = model("vit")
    state, config = stored(folder)
    members = [ClientUpdate(str(seed), in_other_clothes(folder, seed), seed) for seed in (1, 2, 3)]
    truth = outputs(state, folder)
    found = aggregate(state, members, config=config, align=align)
    assert (outputs(found.state, folder) - truth).abs().max() < 1e-6 * truth.abs().max()
    plain = aggregate(state, members, config=config)
    assert (outputs(plain.state, folder) - truth).abs().max() > 0.05 * truth.abs().max()


def test_guards_see_updates_after_the_alignment() -> None:
    folder = model("vit")
    state, config = stored(folder)
    members = [ClientUpdate(str(seed), in_other_clothes(folder, seed), 1) for seed in range(1, 6)]
    hostile = {name: -tensor for name, tensor in state.items()}
    found = aggregate(
        state, [*members, ClientUpdate("hostile", hostile, 9)], config=config, align="global", guard="krum", hostile=1
    )
    truth = outputs(state, folder)
    assert "hostile" not in found.clients
    assert (outputs(found.state, folder) - truth).abs().max() < 1e-6 * truth.abs().max()


def test_the_server_may_distil_or_grow() -> None:
    first, second = image_pair()
    (state, config), (other, _) = stored(first), stored(second)
    members = [ClientUpdate("a", state, 1), ClientUpdate("b", other, 1)]
    taught = aggregate(state, members, method="distill", config=config, data=digits(), options={"steps": 2})
    assert taught.config is None and taught.state.keys() == state.keys()
    assert any(not torch.equal(taught.state[name], state[name]) for name in state)
    least = {"steps": 1, "rate": 1e-9}  # so that the student is where it began, which in FedDF is the mean
    begun = aggregate(state, members, method="distill", config=config, data=digits(), options=least)
    assert all(torch.allclose(begun.state[n], (t + other[n]) / 2, atol=1e-6) for n, t in state.items())
    grown = aggregate(state, members, method="pfnm", config=config, data=None)
    units = next(name for name in state if name.endswith("intermediate.dense.weight"))
    assert grown.config is None or grown.config["intermediate_size"] == len(grown.state[units])
    assert len(grown.state[units]) >= len(state[units])


def test_adapters_are_averaged_by_their_products(tmp_path: Path) -> None:
    base = save_base("llama", tmp_path / "base", tie_word_embeddings=False)
    config = LoraConfig(r=3, lora_alpha=12, target_modules=["q_proj", "down_proj", "embed_tokens"], use_rslora=True)
    settings = config.to_dict()
    members, truth, counts = [], {}, [1.0, 3.0]
    for seed, count in enumerate(counts):
        torch.manual_seed(seed)
        tuned = get_peft_model(load_base(base), config)
        for parameter in tuned.parameters():
            if parameter.requires_grad:
                torch.nn.init.normal_(parameter, std=0.2)
        members.append(ClientUpdate(str(seed), dict(get_peft_model_state_dict(tuned)), count))
        for name, layer in tuned.named_modules():
            if hasattr(layer, "get_delta_weight"):
                truth[name] = truth.get(name, 0) + count / 4 * layer.get_delta_weight("default").detach().double()
    result = aggregate_adapters(members[0].state, members, settings)
    assert {n: t.shape for n, t in result.state.items()} == {n: t.shape for n, t in members[0].state.items()}
    tuned.load_state_dict(_in_peft(result.state), strict=False)
    for name, layer in tuned.named_modules():
        if hasattr(layer, "get_delta_weight"):
            found = layer.get_delta_weight("default").detach().double()
            u, s, vt = torch.linalg.svd(truth[name], full_matrices=False)
            best = u[:, :3] * s[:3] @ vt[:3]
            assert (found - best).norm() < 1e-5 * best.norm(), name
            # The control: the product of the mean factors is something else.
            means = [sum(c / 4 * m.state[_factor(name, side, members[0].state)].double()
                         for c, m in zip(counts, members, strict=True)) for side in "AB"]  # fmt: skip
            wrong = means[1] @ means[0]
            wrong = (wrong.T if wrong.shape != best.shape else wrong) * (12 / 3**0.5)
            assert (wrong - best).norm() > 0.1 * best.norm()
    assert "lost" in result.notes[-1]


def _factor(module: str, side: str, state: Any) -> str:
    return next(name for name in state if name.startswith(module + ".lora_") and f"_{side}" in name)


def _in_peft(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Under the names that the module has in memory, with the adapter's own name."""
    named = {}
    for name, tensor in state.items():
        end = ".weight" if name.endswith(".weight") else ""
        named[name.removesuffix(".weight") + ".default" + end] = tensor
    return named
