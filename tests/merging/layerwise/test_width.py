"""More room than one parent has: the same class with more units, more heads, a wider stream."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers

import models as tiny
from isomerge.architectures import describe
from isomerge.checkpoint import open_checkpoint
from isomerge.errors import RequestError
from isomerge.evaluation.verify import verify
from isomerge.merging.layerwise.joint import choosable
from isomerge.merging.layerwise.parent_views import ParentView
from isomerge.merging.layerwise.single_parent import fits, single_parent
from isomerge.merging.layerwise.width import of_sizes
from isomerge.symmetry.architecture import RESIDUAL
from merging.layerwise.reconstructions import again, data, distance, features, load, reconstruct
from models import mostly_slow
from precision import float64_throughout

TWICE = "units=2,heads=2,stream=2"


@pytest.mark.parametrize("width", [TWICE, "units=1.5,heads=2,stream=1.5", "units=3,heads=3,stream=3"])
@pytest.mark.parametrize("name", mostly_slow(["vit", "llama", "gpt2", "qwen2", "neox", "opt"], "vit", "llama"))
def test_copies_of_a_model_give_its_function_in_any_width(name: str, width: str) -> None:
    model = tiny.model(name, 0)
    batches, unseen = data(model, 1), data(model, 1, seed=9)
    width = width.replace("heads=2,stream=1.5", "heads=2,stream=2") if name not in ("llama", "qwen2") else width
    with float64_throughout():
        expected = features(load(model), unseen)
        merged = reconstruct([model, model], again(batches), features="joint", weights=[0.7, 0.3], width=width)
        got = features(load(model, merged.state_dict(), **merged.config_changes), unseen)
    assert distance(expected, got) < 1e-9


PARTS = {
    "mixtral": "heads=1.5,stream=1.5", "qwen3": "units=2,stream=2", "t5": "units=2", "bert": "units=2",
    "olmo2": "units=2", "gemma2": "units=2,heads=1.5", "distilbert": "units=2", "deberta": "units=2",
}  # fmt: skip


@pytest.mark.parametrize("name", mostly_slow(PARTS, "qwen3"))
def test_families_that_can_grow_in_part_do(name: str) -> None:
    model = tiny.model(name, 0)
    batches, unseen = data(model, 1), data(model, 1, seed=9)
    with float64_throughout():
        merged = reconstruct([model, model], again(batches), features="joint", width=PARTS[name])
        got = features(load(model, merged.state_dict(), **merged.config_changes), unseen)
        assert distance(features(load(model), unseen), got) < 1e-9
    assert merged.config_changes


def test_side_by_side_nothing_is_lost_and_one_width_says_how_much_is() -> None:
    folders = [tiny.model("llama", seed) for seed in range(2)]
    batches = data(folders[0], 2)
    one, two = (reconstruct(folders, again(batches), features="joint", width=w).report() for w in ("1", TWICE))
    shares = {kind: list(of.values()) for kind, of in one["features"]["lost"].items()}
    assert len(shares["stream"]) == 4 and len(shares["chosen"]) == 4  # two layers, with attention and feed-forward each
    assert all(0 < share < 1 for share in [*shares["stream"], *shares["chosen"]])
    assert max(v for of in two["features"]["lost"].values() for v in of.values()) < 1e-6
    assert two["features"]["chosen"] == {s: [sum(counts)] * 2 for s, counts in one["features"]["chosen"].items()}
    assert "width" not in one


def test_the_folder_is_a_stock_model_and_the_price_is_told(tmp_path: Path) -> None:
    folders = [tiny.model("llama", seed, torch.float32) for seed in range(2)]
    merged = reconstruct(folders, again(data(folders[0], 1)), features="joint", width=TWICE)
    out = tmp_path / "wide"
    merged.save(out)
    assert verify(out).verdict == "good"
    model, loading = transformers.AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(loading.values())
    config, first = (json.loads((folder / "config.json").read_text()) for folder in (out, folders[0]))
    for key in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"):
        assert config[key] == 2 * first[key], key
    assert config["head_dim"] == first["head_dim"]
    before, after = (sum(p.numel() for p in m.parameters()) for m in (load(folders[0], dtype=torch.float32), model))
    report = merged.report()
    assert report["width"]["parameters"] == [before, after] and report["width"]["stream"] == [12, 24]
    assert any(f"{before / 1e6:.1f}M -> {after / 1e6:.1f}M parameters" in note for note in report["notes"])


def test_one_factor_is_for_units_and_heads_and_heads_divide_the_stream() -> None:
    """Stock Llama refuses others: 12 coordinates and 4 heads in 2 groups make 12 heads, not 8."""
    folders = [tiny.model("llama", seed) for seed in range(2)]
    merged = reconstruct(folders, again(data(folders[0], 1)), features="auto", width="2")
    assert merged.report()["features"]["stream"] == "joint"  # as nothing else was asked for
    assert merged.config_changes == {"intermediate_size": 14, "num_attention_heads": 12, "num_key_value_heads": 6}


@pytest.mark.parametrize(
    "name, width, why",
    [
        ("bert", "stream=2", "stream=1"), ("gpt2", "2", "stream=2,heads=2"), ("qwen3", "2", "heads=1"),
        ("mixtral", "units=2", "units=1"),
        ("olmo2", "heads=1.5", "heads=1"), ("t5", "stream=2", "stream=1"), ("llama", "0.5", "units=2"),
        ("llama", "wide", "units=2"), ("llama", "layers=2", "units=2"), ("llama", "2,heads=2", "units=2"),
    ],
)  # fmt: skip
def test_what_cannot_be_wider_is_refused_with_the_way_out(name: str, width: str, why: str) -> None:
    folders = [tiny.model(name, seed) for seed in range(2)]
    with pytest.raises(RequestError, match=why) as caught:
        reconstruct(folders, again(data(folders[0], 1)), features="joint", width=width)
    assert caught.value.keys == ("width",)


def test_mean_features_have_one_width() -> None:
    folders = [tiny.model("llama", seed) for seed in range(2)]
    with pytest.raises(RequestError, match="joint features"):
        reconstruct(folders, again(data(folders[0], 1)), features="mean", width="2")


def test_a_parent_in_a_wider_shape_is_itself() -> None:
    """What a start from one parent polishes. Gains of 1 leave nothing to fold."""
    folders = []
    for seed in range(2):
        like = tiny.model("llama", seed)
        ones = {n: torch.ones_like(t) for n, t in tiny.tensors(like).items() if "norm" in n}
        folders.append(tiny.variant(like, ones, "no-gains"))
    bound, unseen = describe(open_checkpoint(folders[0])), data(folders[0], 1)
    wide = of_sizes(bound, {RESIDUAL: 16, **{space: 12 if "ffn" in space else 4 for space in choosable(bound)}})
    views = [ParentView(bound)] * 2
    assert all(fits(wide, view) for view in views) and not fits(bound, ParentView(wide))
    states = [dict(tiny.tensors(folder)) for folder in folders]
    sizes = {"hidden_size": 16, "intermediate_size": 12, "num_attention_heads": 8, "num_key_value_heads": 4}
    for number, folder in enumerate(folders):
        state = single_parent(wide, views, number).state(states)
        assert distance(features(load(folder), unseen), features(load(folder, state, **sizes), unseen)) < 1e-6  # eps
