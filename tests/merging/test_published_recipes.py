"""Recipes and command lines as people publish them, through `mergekit-yaml`. tests/peers compares with mergekit."""

from __future__ import annotations

import json
from pathlib import Path
from string import Template
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from models import mostly_slow, tensors, vocabulary_of
from peers.real_world import PUBLISHED
from peers.side_by_side import mergekit_yaml, write_recipe
from peers.stage import set_stage

UP, QUERY, TABLE = "model.layers.{}.mlp.up_proj.weight", "model.layers.{}.self_attn.q_proj.weight", "lm_head.weight"


def merged(name: str, folder: Path) -> dict[str, dict[str, Tensor]]:
    """The result under the name `out`, and every model that was there, in float64."""
    published = PUBLISHED[name]
    names = set_stage(published, folder)
    recipe = write_recipe(published.recipe, folder / "models", folder / "recipe.yml", **names)
    out = mergekit_yaml(recipe, folder / "out", *Template(published.flags).substitute(names).split())
    assert {str(tensor.dtype) for tensor in tensors(out).values()} == {f"torch.{published.dtype}"}
    assert json.loads((out / "config.json").read_text())["num_hidden_layers"] == published.layers
    found = {place.name: tensors(place) for place in (folder / "models").iterdir()} | {"out": tensors(out)}
    return {model: {key: one.double() for key, one in state.items()} for model, state in found.items()}


def near(found: Tensor, expected: Tensor) -> bool:
    """To one rounding in bfloat16."""
    return bool((found - expected).abs().max() <= 2**-8 * expected.abs().max())


def arc(a: Tensor, b: Tensor, t: float) -> Tensor:
    angle = torch.acos((a * b).sum() / (a.norm() * b.norm()))
    return (torch.sin((1 - t) * angle) * a + torch.sin(t * angle) * b) / torch.sin(angle)


FIRST, LAST = 0, 3
SLERPS = {
    "slerp of two Mistrals": {UP.format(FIRST): 1.0, UP.format(LAST): 0.0, QUERY.format(LAST): 1.0, TABLE: 0.5},
    "slerp of two Qwen2 along the layers": {UP.format(FIRST): 0.0, UP.format(1): 2 / 3, UP.format(LAST): 0.0},
    "slerp of two Qwen3": {UP.format(2): 0.35, QUERY.format(FIRST): 0.1, QUERY.format(LAST): 0.6, TABLE: 0.5},
}


@pytest.mark.parametrize("name", mostly_slow(SLERPS, "slerp of two Mistrals"))
def test_a_published_slerp_is_the_arc_with_the_t_of_each_layer(tmp_path: Path, name: str) -> None:
    found = merged(name, tmp_path)
    start, end = ("b", "a") if "base_model: $b" in PUBLISHED[name].recipe else ("a", "b")
    for tensor, t in SLERPS[name].items():
        assert near(found["out"][tensor], arc(found[start][tensor], found[end][tensor], t)), tensor


STACKS = {
    "a stack of two Llamas": [("a", 0), ("a", 1), ("b", 1), ("b", 2), ("a", 2), ("a", 3)],
    "depth up-scaling": [("base", 0), ("base", 1), ("base", 2), ("base", 1), ("base", 2), ("base", 3)],
}


@pytest.mark.parametrize("name", mostly_slow(STACKS, "a stack of two Llamas"))
def test_a_published_stack_has_the_layers_it_names(tmp_path: Path, name: str) -> None:
    found = merged(name, tmp_path)
    for layer, (model, source) in enumerate(STACKS[name]):
        for tensor in (UP, QUERY):
            assert torch.equal(found["out"][tensor.format(layer)], found[model][tensor.format(source)])


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in PUBLISHED if "TIES" in name and "DARE" not in name])
def test_a_published_ties_stays_among_the_changes(tmp_path: Path, name: str) -> None:
    """The mean of changes that agree in sign lies between the smallest and the largest, and some are zero."""
    found = merged(name, tmp_path)
    models = "abc" if "$c" in PUBLISHED[name].recipe else "ab"
    for tensor, base in found["base"].items():
        changes = torch.stack([found[model][tensor] - base for model in models] + [torch.zeros_like(base)])
        change, slack = found["out"][tensor] - base, 2**-10 * base.abs().max()
        assert (change <= changes.amax(0) + slack).all() and (change >= changes.amin(0) - slack).all()
    change = found["out"][UP.format(3)] - found["base"][UP.format(3)]
    assert 0.02 < (change == 0).double().mean() < 0.9


@pytest.mark.slow
def test_a_published_dare_drops_what_it_says(tmp_path: Path) -> None:
    found = merged("DARE-TIES", tmp_path)
    same = torch.cat([(found["out"][name] == base).flatten() for name, base in found["base"].items() if base.dim() > 1])
    assert abs(same.double().mean() - 0.47**3) < 0.02  # dropped in all three


@pytest.mark.slow
def test_a_published_model_stock_is_between_base_and_mean(tmp_path: Path) -> None:
    found = merged("model stock", tmp_path)
    base = found["base"][UP.format(1)]
    mean, out = sum(found[model][UP.format(1)] for model in "abc") / 3 - base, found["out"][UP.format(1)] - base
    cosine, share = (mean * out).sum() / (mean.norm() * out.norm()), out.norm() / mean.norm()
    assert cosine > 0.99 and 0 < share < 1  # but for the rounding to bfloat16


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "mixture"),
    [("a LoRA in its model", {"base": 1.0, "lora": 1.0}),
     ("task arithmetic with a LoRA", {"base": 0.5, "a": 1.0, "b": -0.5, "lora": -0.5})],
)  # fmt: skip
def test_a_published_lora_is_added_to_its_model(tmp_path: Path, name: str, mixture: dict[str, float]) -> None:
    found = merged(name, tmp_path)
    factors: Any = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    prefix = "base_model.model." + QUERY.format(1).removesuffix("weight")
    lora = 6 / 4 * factors[f"{prefix}lora_B.weight"].double() @ factors[f"{prefix}lora_A.weight"].double()
    parts = {"lora": lora, **{model: state[QUERY.format(1)] for model, state in found.items()}}
    assert near(found["out"][QUERY.format(1)], sum(share * parts[part] for part, share in mixture.items()))


def test_a_published_union_has_a_row_for_every_token(tmp_path: Path) -> None:
    found = merged("a union of tokenizers", tmp_path)
    known = {name: vocabulary_of(tmp_path / "models" / name) for name in ("a", "larger")}
    united = vocabulary_of(tmp_path / "out")
    assert united.keys() == known["a"].keys() | known["larger"].keys()
    rows = {name: state[TABLE] for name, state in found.items()}
    for token, row in united.items():
        (a, larger) = (rows[name][ids[token]] if token in ids else None for name, ids in known.items())
        assert larger is not None
        expected = larger if a is None else 0.6 * a + 0.4 * larger
        assert near(rows["out"][row], expected), token
