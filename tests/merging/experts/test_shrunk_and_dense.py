"""Mixtures with fewer experts, and mixtures made dense: exact where experts are alike, measured where they are not."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor

import isomerge
from isomerge.errors import RequestError
from isomerge.merging.experts.recalibrating import fitted_rows, mean_rows
from isomerge.merging.experts.uniting import apart_on_data, groups, in_order_of
from merging.experts.counting import family, ids, recipe, text_file
from merging.experts.test_moe import far, lines, scores, stock
from models import model, read_config, tensors

ACT = torch.nn.functional.silu


def shuffled(folder: Path, out: Path, seed: int = 0) -> Path:
    """The same mixture with the units of every expert in another order, and some signs of up and down turned."""
    state, draw = tensors(folder), torch.Generator().manual_seed(seed)
    for name in [name for name in state if ".experts." in name and name.endswith(("w1.weight", "gate_proj.weight"))]:
        gate = name
        up = name.replace("w1", "w3").replace("gate_proj", "up_proj")
        down = name.replace("w1", "w2").replace("gate_proj", "down_proj")
        order = torch.randperm(len(state[gate]), generator=draw)
        sign = torch.randint(0, 2, (len(order),), generator=draw).to(state[gate].dtype) * 2 - 1
        state[gate] = state[gate][order].contiguous()
        state[up] = (state[up][order] * sign[:, None]).contiguous()
        state[down] = (state[down][:, order] * sign).contiguous()
    out.mkdir()
    save_file(state, out / "model.safetensors", {"format": "pt"})
    (out / "config.json").write_text((folder / "config.json").read_text())
    for file in folder.glob("tokenizer*"):
        (out / file.name).write_text(file.read_text())
    return out


def doubled(tmp_path: Path, name: str = "llama", chosen: int = 4) -> tuple[Path, Path]:
    """A mixture of two experts, and one where each of them is there twice with units in another order: four chosen of
    four and two of two have the same function, if the router has the same row for copies."""
    models = family(name)
    small = recipe(models, "cheap_embed", chosen=2)
    large = {**small, "experts": [small["experts"][k] for k in (0, 1, 0, 1)], "experts_per_token": chosen}
    isomerge.moe(small).save(tmp_path / "two", out_dtype="float64")
    isomerge.moe(large).save(tmp_path / "copies", out_dtype="float64")
    return tmp_path / "two", shuffled(tmp_path / "copies", tmp_path / "four")


@pytest.mark.parametrize("name", ["llama", "qwen3", "qwen2"])
@pytest.mark.parametrize("with_data", [False, True])
def test_copies_of_experts_become_one_without_a_trace(tmp_path: Path, name: str, with_data: bool) -> None:
    two, four = doubled(tmp_path, name)
    words = ids(0, 6, 3)
    assert far(scores(four, words), scores(two, words)) < 1e-12
    data = lines(text_file(tmp_path, 0))[0] if with_data else None
    merged = isomerge.moe(four, keep=2, data=data)
    merged.verify(merged.save(tmp_path / "out"))
    assert merged.details["shrunk"]["layers"][0]["groups"] == [[0, 2], [1, 3]]
    experts = [key for key in tensors(tmp_path / "out") if ".experts." in key]
    assert max(apart_in_order(tmp_path / "out", two, expert) for expert in (0, 1)) < 1e-12 and len(experts) == 12
    if with_data:  # the ridge pulls the fitted rows a little
        assert far(scores(tmp_path / "out", words), scores(two, words)) < 2e-2
        loss = merged.details["shrunk"]["loss"]
        assert loss["after"] == pytest.approx(loss["before"], rel=1e-2)
    else:
        assert far(scores(tmp_path / "out", words), scores(two, words)) < 1e-12


def apart_in_order(first: Path, second: Path, expert: int) -> float:
    """Of an expert's outputs on random inputs, which no order of units changes."""
    found = []
    for folder in (first, second):
        experts = stock(folder).model.layers[1].mlp.experts
        x = torch.randn(7, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        gate, up = (x @ experts.gate_up_proj[expert].T).chunk(2, -1)
        found.append((ACT(gate) * up) @ experts.down_proj[expert].T)
    return far(*(one.detach() for one in found))


def test_all_experts_kept_is_the_same_mixture(tmp_path: Path) -> None:
    _, four = doubled(tmp_path, chosen=2)
    isomerge.moe(four, keep=4, data=lines(text_file(tmp_path, 0))[0]).save(tmp_path / "out")
    before, after = tensors(four), tensors(tmp_path / "out")
    assert before.keys() == after.keys() and all(torch.allclose(before[key], after[key], atol=1e-14) for key in before)


def test_the_router_is_the_ridge_solution() -> None:
    """Against least squares written out with rows for the penalty."""
    draw = torch.Generator().manual_seed(0)
    router, x = (torch.randn(shape, generator=draw, dtype=torch.float64) for shape in ((4, 6), (50, 6)))
    found = fitted_rows(router, [[0, 2], [1], [3]], x)
    target = torch.stack([(x @ router.T)[:, k].exp().sum(1).log() for k in ([0, 2], [1], [3])], 1)
    target = target - target.mean(1, keepdim=True)
    start = torch.stack([(router[0] + router[2]) / 2, router[1], router[3]])
    start = start - start.mean(0)
    root = (1e-3 * (x.T @ x).diagonal().mean()) ** 0.5
    stacked = torch.cat([x, root * torch.eye(6, dtype=torch.float64)])
    wanted = torch.linalg.lstsq(stacked, torch.cat([target, root * start.T])).solution.T
    assert torch.allclose(found, wanted, atol=1e-10)
    plain = mean_rows(router, [[0, 2], [1], [3]], [3.0, 1.0, 1.0, 1.0])
    assert torch.allclose(plain[0], (3 * router[0] + router[2]) / 4)

    def wrong(rows: Tensor) -> float:
        scores = x @ rows.T
        return float((scores - scores.mean(1, keepdim=True) - target).square().mean())

    assert wrong(found) < 0.8 * wrong(start)


def test_units_are_put_into_the_order_of_the_other_expert() -> None:
    draw = torch.Generator().manual_seed(0)
    shapes = {"gate": (9, 5), "up": (9, 5), "down": (5, 9)}
    maps = {part: torch.randn(shape, generator=draw, dtype=torch.float64) for part, shape in shapes.items()}
    order, sign = torch.randperm(9, generator=draw), torch.tensor([1.0, -1.0] * 4 + [1.0], dtype=torch.float64)
    moved = {
        "gate": maps["gate"][order],
        "up": maps["up"][order] * sign[:, None],
        "down": maps["down"][:, order] * sign,
    }
    back = in_order_of(moved, maps)
    assert all(torch.equal(back[part], maps[part]) for part in maps)
    x = torch.randn(20, 5, generator=draw, dtype=torch.float64)
    assert float(apart_on_data([maps, moved], x, ACT)[0, 1]) < 1e-12


def test_groups_are_those_of_equal_distances_too() -> None:
    distances = torch.ones(5, 5).fill_diagonal_(0)
    for keep in range(1, 6):
        found = groups(distances, keep)
        assert len(found) == keep and sorted(one for group in found for one in group) == [*range(5)]


# --- dense ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("how", ["average", "most_used", "by_use"])
def test_a_dense_model_made_a_mixture_and_dense_again_is_the_same_function(tmp_path: Path, name: str, how: str) -> None:
    dense = family(name)["0"]
    isomerge.moe(dense, copies=3).save(tmp_path / "mixture", out_dtype="float64")
    four = shuffled(tmp_path / "mixture", tmp_path / "shuffled")
    data = None if how == "average" else lines(text_file(tmp_path, 0))[0]
    merged = isomerge.moe(four, to_dense=how, data=data)
    merged.verify(merged.save(tmp_path / "out"))
    words = ids(0, 6, 3)
    assert far(scores(tmp_path / "out", words), scores(dense, words)) < 1e-12
    expected = "mistral" if name == "llama" else name
    assert read_config(tmp_path / "out")["model_type"] == expected
    assert read_config(tmp_path / "out")["intermediate_size"] == 24
    assert isomerge.reproduce(tmp_path / "out").verdict == "identical"


def test_what_a_dense_model_loses_is_said(tmp_path: Path) -> None:
    models = family()
    known = lines(*(text_file(tmp_path, skill) for skill in (0, 1)))
    isomerge.moe(recipe(models, "data"), data=known).save(tmp_path / "mixture")
    file = text_file(tmp_path, 0, 20, seed=5)
    merged = {
        how: isomerge.moe(tmp_path / "mixture", to_dense=how, data=lines(file)[0]) for how in ("average", "by_use")
    }
    for how, one in merged.items():
        details = one.details["made_dense"]
        one.save(tmp_path / how)
        with torch.no_grad():
            loss = stock(tmp_path / how, torch.float32)(input_ids=ids(0, 20, 5), labels=ids(0, 20, 5)).loss.item()
        assert details["loss"]["after"] == pytest.approx(loss, rel=1e-5)
        assert 0 < details["layers"][0]["missed"] < 1 and any("cannot choose" in note for note in one.notes)
    # Nearly all tokens of this skill go to its expert, so the mean by use keeps more of it than the plain mean.
    lost = {how: one.details["made_dense"]["loss"]["after"] for how, one in merged.items()}
    assert lost["by_use"] < lost["average"]


def test_the_weights_of_unnormalised_routers_are_measured(tmp_path: Path) -> None:
    isomerge.moe(family("qwen3")["0"], copies=4, experts_per_token=2).save(tmp_path / "mixture")
    config = tmp_path / "mixture" / "config.json"
    config.write_text(config.read_text().replace('"norm_topk_prob": true', '"norm_topk_prob": false'))
    with pytest.raises(RequestError, match="has to be measured") as caught:
        isomerge.moe(tmp_path / "mixture", to_dense="average")
    assert "data" in caught.value.keys
    merged = isomerge.moe(tmp_path / "mixture", to_dense="average", data=lines(text_file(tmp_path, 0))[0])
    loss = merged.details["made_dense"]["loss"]
    assert loss["after"] == pytest.approx(loss["before"], abs=0.15)


def test_the_expert_of_all_tokens_stays_beside_the_others(tmp_path: Path) -> None:
    """With a gate that is always half open, the sum of both feed-forwards is exact."""
    models = family("qwen2")
    asked = recipe(models, "random", shared_experts=[{"source_model": str(models["1"])}])
    asked["experts"] = [{"source_model": str(models["0"])}] * 2
    isomerge.moe(asked).save(tmp_path / "mixture", out_dtype="float64")
    state = tensors(tmp_path / "mixture")
    state |= {key: torch.zeros_like(one) for key, one in state.items() if "shared_expert_gate" in key}
    save_file(state, tmp_path / "mixture" / "model.safetensors", {"format": "pt"})
    isomerge.moe(tmp_path / "mixture", to_dense="average").save(tmp_path / "out")
    words = ids(1, 6, 3)
    assert far(scores(tmp_path / "out", words), scores(tmp_path / "mixture", words)) < 1e-12
    assert read_config(tmp_path / "out")["intermediate_size"] == 48


# --- aligning, mistakes -----------------------------------------------------------------------------------------------
def test_mixtures_are_merged_by_matched_experts(tmp_path: Path) -> None:
    """A copy with experts and units in another order: aligned, the mean is the model itself; as it is, it is not."""
    first = model("mixtral", 0)
    state = tensors(first)
    other = {"0": "2", "1": "1", "2": "0"}
    swapped = {re.sub(r"experts\.(\d)", lambda m: f"experts.{other[m[1]]}", name): one for name, one in state.items()}
    for name in [name for name in state if name.endswith("block_sparse_moe.gate.weight")]:
        swapped[name] = state[name][[2, 1, 0]].contiguous()
    (tmp_path / "other").mkdir()
    save_file(swapped, tmp_path / "other" / "model.safetensors", {"format": "pt"})
    (tmp_path / "other" / "config.json").write_text((first / "config.json").read_text())
    words = torch.randint(0, 29, (4, 12), generator=torch.Generator().manual_seed(1))
    assert far(scores(tmp_path / "other", words), scores(first, words)) < 1e-12
    for align in (True, False):
        isomerge.merge([first, tmp_path / "other"], align=align).save(tmp_path / str(align))
    assert far(scores(tmp_path / "True", words), scores(first, words)) < 1e-9
    assert far(scores(tmp_path / "False", words), scores(first, words)) > 1e-2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"keep": 0}, "keep is 0"),
        ({"keep": 5}, "has 3 experts"),
        ({"keep": 2, "experts_per_token": 3}, "experts_per_token is 3"),
        ({"to_dense": "by_use"}, "Name data"),
        ({"to_dense": "average", "experts_per_token": 1}, "no experts to choose"),
    ],
)
def test_a_mistake_is_named(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestError, match=words):
        isomerge.moe(model("mixtral"), **arguments)


def test_a_mixture_that_is_not_whole_is_refused(tmp_path: Path) -> None:
    first = model("mixtral")
    for place, (change, words) in enumerate([
        (lambda s: s.pop("model.layers.0.block_sparse_moe.experts.1.w2.weight"), "lacks"),
        (lambda s: [s.pop(n) for n in list(s) if n.endswith("moe.gate.weight")], "has no router"),
    ]):  # fmt: skip
        state = tensors(first)
        change(state)
        folder = tmp_path / str(place)
        folder.mkdir()
        save_file(state, folder / "model.safetensors", {"format": "pt"})
        (folder / "config.json").write_text((first / "config.json").read_text())
        with pytest.raises(isomerge.IsomergeError, match=words):
            isomerge.moe(folder, keep=2)


def test_stock_classes_are_what_the_table_says() -> None:
    """A mixture of every known class has the tensors that this package looks for."""
    from isomerge.architectures.expert_classes import WITH_EXPERTS
    from isomerge.merging.experts.layers import read_layers

    for family_name, held_by in WITH_EXPERTS.items():
        kind: Any = getattr(transformers, held_by.config["architectures"][0])  # type: ignore[index]
        config = kind.config_class(
            vocab_size=20, hidden_size=8, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
            intermediate_size=6, moe_intermediate_size=5, shared_expert_intermediate_size=4,
            **{held_by.experts_key: 3, held_by.chosen_key: 2},
        )  # fmt: skip
        known = read_layers(isomerge.open_checkpoint(kind(config)), "Testing")
        assert (known.experts, known.chosen, known.layers) == (3, 2, (0, 1)), family_name
