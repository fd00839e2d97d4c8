"""The demo's claims: alignment opens the line between two models, its ends are the parents, the outputs are native."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
import torch

import isomerge

pytest.importorskip("sklearn")
transformers = pytest.importorskip("transformers")

MODELS = ("model-a", "model-b", "model-b-aligned", "merged")


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("demo")


@pytest.fixture(scope="module")
def record(out: Path) -> dict[str, Any]:
    """One pair, trained for fewer epochs than the demo does."""
    from isomerge.demo import digits

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(digits, "EPOCHS", 15)
        before = torch.get_num_threads(), torch.random.get_rng_state()
        result = isomerge.demo(out)
        assert torch.get_num_threads() == before[0]
        assert torch.equal(torch.random.get_rng_state(), before[1])
    return result


@pytest.fixture(scope="module")
def loaded(record: dict[str, Any], out: Path) -> dict[str, Any]:
    """The four models, each in the stock class, nothing missing, unexpected or reshaped."""
    found = {}
    for name in MODELS:
        model, info = transformers.ViTForImageClassification.from_pretrained(
            out / "pair-0" / name, output_loading_info=True
        )
        assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), name
        found[name] = model.eval()
    return found


def logits(model: Any) -> torch.Tensor:
    from isomerge.demo.digits import load_digits

    with torch.no_grad():
        return model(load_digits().test_images).logits


def test_full_alignment_beats_the_plain_average_by_far(record: dict[str, Any]) -> None:
    (pair,) = record["pairs"]
    assert min(pair["parents"]) > 0.9
    assert pair["full"] > pair["none"] + 0.2
    assert pair["full"] > pair["rotation"] + 0.2
    assert record["curves"][0]["barrier"]["full"] < 0.5 * record["curves"][0]["barrier"]["none"]


def test_the_aligned_model_computes_what_the_source_computes(loaded: dict[str, Any]) -> None:
    before, after = logits(loaded["model-b"]), logits(loaded["model-b-aligned"])
    assert torch.allclose(before, after, atol=1e-4)


def test_the_merged_model_is_the_mean_of_anchor_and_aligned(loaded: dict[str, Any]) -> None:
    a, b, merged = (loaded[name].state_dict() for name in ("model-a", "model-b-aligned", "merged"))
    for name, tensor in merged.items():
        assert torch.allclose(tensor, (a[name] + b[name]) / 2, atol=1e-6), name


def test_the_accuracies_are_those_of_the_models_on_disk(record: dict[str, Any], loaded: dict[str, Any]) -> None:
    from isomerge.demo.digits import load_digits

    labels = load_digits().test_labels.numpy()
    truth = {name: (logits(model).numpy().argmax(1) == labels).mean() for name, model in loaded.items()}
    (pair,) = record["pairs"]
    assert pair["parents"] == pytest.approx([truth["model-a"], truth["model-b"]])
    assert pair["full"] == pytest.approx(truth["merged"])


def test_both_ends_of_every_line_are_the_parents(record: dict[str, Any]) -> None:
    (pair,), (curve,) = record["pairs"], record["curves"]
    assert curve["t"][0] == 0 and curve["t"][-1] == 1 and len(curve["t"]) >= 11
    for level, line in curve["accuracy"].items():
        assert [line[0], line[-1]] == pytest.approx(pair["parents"], abs=0.0021), level  # one image of 500 may tip over
    for level, line in curve["loss"].items():
        assert [line[0], line[-1]] == pytest.approx([curve["loss"]["none"][0], curve["loss"]["none"][-1]], abs=1e-4), (
            level
        )


def test_the_files_hold_the_record_and_a_picture(record: dict[str, Any], out: Path) -> None:
    assert json.loads((out / "demo.json").read_text()) == record
    assert ElementTree.parse(out / "curve.svg").getroot().tag.endswith("svg")


def test_training_depends_on_the_seed_alone() -> None:
    from isomerge.demo.digits import load_digits, new_model, train

    digits = load_digits()
    torch.manual_seed(1)
    first = train(new_model(3), 3, digits, epochs=1).state_dict()
    torch.manual_seed(2)
    again = train(new_model(3), 3, digits, epochs=1).state_dict()
    other = new_model(4).state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)


def test_the_barrier_is_the_height_above_the_chord() -> None:
    from isomerge.demo.run import _barrier

    assert _barrier([0.0, 1.0, 2.0]) == 0
    assert _barrier([2.0, 5.0, 0.0, 0.0]) == pytest.approx(5 - 4 / 3)


def test_no_pairs_is_a_request_that_cannot_be_met(tmp_path: Path) -> None:
    with pytest.raises(isomerge.IsomergeError, match="at least one"):
        isomerge.demo(tmp_path, seeds=0)


@pytest.mark.slow
def test_five_pairs_of_seeds_all_merge(tmp_path: Path) -> None:
    record = isomerge.demo(tmp_path, seeds=5)
    assert len(record["pairs"]) == 5
    for pair in record["pairs"]:
        assert pair["full"] > 0.85
        assert pair["full"] > pair["none"] + 0.3 and pair["full"] > pair["rotation"] + 0.3
    barriers = [curve["barrier"] for curve in record["curves"]]
    assert sum(b["full"] for b in barriers) < 0.25 * sum(b["none"] for b in barriers)
