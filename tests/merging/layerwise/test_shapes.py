"""Parents of other widths, numbers of heads, and depths than the merged model, which is like the first."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import isomerge
import models as tiny
from isomerge.errors import RequestError
from isomerge.merging.layerwise.layer_matching import linear_cka, match_layers
from merging.layerwise import shapes
from merging.layerwise.reconstructions import again, data, distance, features, load, reconstruct
from models import mostly_slow
from precision import float64_throughout

SHAPES = {
    "wider stream": lambda like: shapes.wider(like, stream=2),
    "more units": lambda like: shapes.wider(like, units=2),
    "more heads": lambda like: shapes.wider(like, stream=2, heads=2),
    "all": lambda like: shapes.wider(like, stream=3, heads=3, units=2),
    "no groups": shapes.ungrouped,
    "deeper at the front": lambda like: shapes.deeper(like, 0),
    "deeper at the end": lambda like: shapes.deeper(like, 1),
}


@pytest.mark.parametrize("order", [1, -1], ids=["into the first", "into the other"])
@pytest.mark.parametrize("shape", mostly_slow(SHAPES, "all", "no groups", "deeper at the front"))
def test_a_model_and_its_copy_of_another_shape_give_its_function(shape: str, order: int, tmp_path: Path) -> None:
    """To 1e-6: directions without evidence are drawn by a millionth."""
    like = tiny.model("llama", 0)
    torch.manual_seed(0)
    other = shapes.saved(like, tmp_path / "other", SHAPES[shape](like))
    batches, unseen = data(like, 1), data(like, 1, seed=9)
    with float64_throughout():
        expected = features(load(like), unseen)
        assert distance(expected, features(load(other), unseen)) < 1e-12
        merged = reconstruct([like, other][::order], again(batches), align=False, features="auto", weights=[0.7, 0.3])
        got = features(load([like, other][::order][0], merged.state_dict(), **merged.config_changes), unseen)
    assert distance(expected, got) < 1e-6
    assert merged.report()["features"]["stream"] == "joint"
    assert ("matched" in merged.report()) == ("deeper" in shape)


def test_layers_are_matched_in_order_by_the_similarity_of_their_streams() -> None:
    torch.manual_seed(0)
    streams = [torch.randn(200, 6) for _ in range(4)]
    streams[1] = streams[0] + 0.5 * streams[1]
    turned = [x @ torch.linalg.qr(torch.randn(9, 6)).Q.T for x in streams]  # another width and basis
    assert linear_cka(streams[0], turned[0]) == pytest.approx(1)
    assert match_layers(streams, turned) == [[0], [1], [2], [3]]
    assert match_layers([streams[k] for k in (0, 2, 3)], turned) == [[0], [1, 2], [3]]
    assert match_layers(streams, [turned[k] for k in (0, 2, 3)]) == [[0], [], [1], [2]]


def test_strangers_of_other_shapes_make_a_stock_model_of_the_first_ones(tmp_path: Path) -> None:
    first, second = tiny.model("llama", 0), tiny.model("llama", 1)
    torch.manual_seed(0)
    wide = shapes.saved(second, tmp_path / "wide", shapes.wider(second, stream=2, heads=2, units=2))
    deep = shapes.saved(second, tmp_path / "deep", shapes.deeper(second, 0))
    merged = reconstruct([first, wide, deep], again(data(first, 2)), align=True, features="auto", refine=2, polish=2)
    assert tiny.logits(first, merged.state_dict(), **merged.config_changes).isfinite().all()
    report = merged.report()
    assert report["matched"] == [{"model": str(deep), "layers": report["matched"][0]["layers"]}]
    assert [j for own in report["matched"][0]["layers"] for j in own] == [0, 1, 2]
    assert any("not aligned" in note for note in report["notes"])
    for layer in report["layers"]:
        assert layer["residual_after"] <= layer["residual_before"] * (1 + 1e-9), layer


def test_plan_takes_other_shapes_for_this_method_and_names_it_for_the_others(tmp_path: Path) -> None:
    first = tiny.model("llama", 0)
    other = shapes.saved(first, tmp_path / "other", shapes.wider(first, stream=2))
    recipe = {"models": [{"model": str(first)}, {"model": str(other)}], "merge_method": "reconstruct"}
    texts = tmp_path / "texts.txt"
    texts.write_text("text\n")
    with pytest.raises(RequestError, match="reconstruct"):
        isomerge.plan({**recipe, "merge_method": "linear"})
    with pytest.raises(RequestError, match="joint"):
        reconstruct([first, other], again(data(first, 1)), align=False, features="mean")


def unread() -> Any:
    raise AssertionError("data was read")


def test_heads_of_other_labels_are_refused_before_any_data_is_read(tmp_path: Path) -> None:
    first = tiny.model("vit", 0)
    config = tiny.read_config(first)
    folders = []
    rest = [f"kind {number}" for number in range(2, load(first).config.num_labels)]
    for place, names in enumerate((("cat", "dog"), ("cat", "car"), ("Cat ", "DOG"))):
        folder = tmp_path / str(place)
        shutil.copytree(first, folder)
        (folder / "config.json").write_text(json.dumps({**config, "id2label": dict(enumerate([*names, *rest]))}))
        folders.append(folder)

    with pytest.raises(RequestError, match="output 1 is 'dog' in the first and 'car' in the second"):
        isomerge.merge(folders[:2], method="reconstruct", data=unread)
    with pytest.raises(AssertionError, match="was read"):
        isomerge.merge([folders[0], folders[2]], method="reconstruct", data=unread)


@pytest.mark.parametrize(
    "name, changes, why",
    [
        ("llama", {"head_dim": 8}, "heads are of size"), ("llama", {"vocab_size": 40}, "tokens"),
        ("vit", {"num_labels": 9}, "task heads"), ("qwen3", {"hidden_size": 24}, "shared"),
        ("bert", {"hidden_size": 24}, "shared"),
    ],
)  # fmt: skip
def test_what_cannot_be_merged_is_refused_early(name: str, changes: dict[str, int], why: str, tmp_path: Path) -> None:
    import transformers

    first = tiny.model(name, 0)
    kind = type(load(first))
    config = kind.config_class.from_dict({**tiny.read_config(first), **changes})
    if "num_labels" in changes:
        config.num_labels = changes["num_labels"]
    kind(config).save_pretrained(tmp_path / "other")
    assert isinstance(config, transformers.PretrainedConfig)
    with pytest.raises(RequestError, match=why):
        isomerge.merge([first, tmp_path / "other"], method="reconstruct", data=unread)
