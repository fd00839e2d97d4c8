"""What `check` says a merge would lose: beside losses of stock models by hand, and siblings far apart."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import isomerge
from commands import verb
from isomerge.checking import trial
from isomerge.checking.mergeability import expected_loss
from isomerge.checking.zoo_quantiles import KNOTS, PAIRS
from isomerge.errors import RequestError
from isomerge.running.stock import load_stock
from models import model, noisy, tensors, variant

WIDE = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
Source = Callable[[], Iterator[dict[str, Tensor]]]


def llama(seed: int = 0) -> Path:
    return model("llama", seed, torch.float32, **WIDE, intermediate_size=64)


def words(seed: int, count: int = 64, length: int = 6) -> tuple[Source, list[Tensor]]:
    rows = torch.randint(1, 29, (count, length), generator=torch.Generator().manual_seed(seed))
    parts = list(rows.split(8))
    return (lambda: ({"input_ids": part} for part in parts)), parts


def loss_by_hand(folder_or_state: Any, config: dict[str, Any], parts: list[Tensor]) -> float:
    """Of every eighth example, next token by next token."""
    module = load_stock(config, folder_or_state)
    rows = torch.cat(parts)[7::8]
    with torch.no_grad():
        return float(module(input_ids=rows, labels=rows).loss)


def far_siblings(size: float) -> list[Path]:
    """Fine-tunes that share tables and most of their layers, and of whose last attention nothing is left."""
    base = model("llama", 0, torch.float32, **{**WIDE, "num_key_value_heads": 4}, intermediate_size=64)
    draw = torch.Generator().manual_seed(1)
    found = []
    for name in ("one", "two"):
        state = {}
        for key, tensor in tensors(base).items():
            state[key] = tensor
            if "layers" in key and tensor.ndim > 1:
                noise = tensor.std() * torch.randn(tensor.shape, generator=draw)
                state[key] = 0.05 * noise if "layers.1.self_attn" in key else tensor + size * noise
        found.append(variant(base, state, f"far-{size}-{name}"))
    return found


def test_siblings_far_apart_are_no_strangers_where_alignment_gains_nothing() -> None:
    found = isomerge.check(*far_siblings(0.5))
    assert found.verdict == "siblings" and not found.alignment_helps
    assert found.cosine is not None and 0.7 < found.cosine < 0.9
    assert any(space["moved"] and space["gain"] > 0.05 for space in found.spaces)  # a little, as random units would
    assert found.alignment is not None and found.alignment.gain["full"] < 0.05
    assert found.mergeability is not None and found.mergeability.expected is not None
    assert not found.mergeability.expected.safe and "far enough apart" in found.summary


def test_siblings_at_a_cosine_of_0_99_are_not_called_safe() -> None:
    found = isomerge.check(*far_siblings(0.1))
    assert found.verdict == "siblings" and found.cosine is not None and found.cosine > 0.98
    assert found.mergeability is not None and found.mergeability.expected is not None
    assert not found.mergeability.expected.safe and "far enough apart" in found.summary


def test_siblings_next_to_each_other_are() -> None:
    base = llama()
    found = isomerge.check(base, noisy(base, 1e-4))
    assert found.mergeability is not None and found.mergeability.expected is not None
    assert found.mergeability.expected.safe and "fail" not in found.summary


def test_the_range_rises_with_the_distance_and_scales_with_the_outputs() -> None:
    assert PAIRS > 100 and [knot[0] for knot in KNOTS] == sorted(knot[0] for knot in KNOTS)
    ranges = [expected_loss(distance, 1.0) for distance in (0.001, 0.03, 0.1, 0.5, 1.0, 1.41, 3.0)]
    for one, two in itertools.pairwise(ranges):
        assert one is not None and two is not None
        assert one.low <= one.middle <= one.high <= two.high and one.low <= two.low and one.middle <= two.middle
    one, ten = expected_loss(0.5, 1.0), expected_loss(0.5, 10.0)
    assert one is not None and ten is not None and ten.middle == pytest.approx(10 * one.middle)
    assert expected_loss(None, 1.0) is None


@pytest.mark.parametrize("seconds", [0.0, pytest.param(60.0, marks=pytest.mark.slow)])
def test_losses_on_data_of_each_are_those_of_the_stock_models(seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "SECONDS", seconds)
    first, second = llama(0), llama(1)
    config = json.loads((first / "config.json").read_text())
    (one, ones), (two, twos) = words(1), words(2)
    found = isomerge.check(first, second, data=[one, two])
    assert found.mergeability is not None
    measured = found.mergeability.measured
    assert measured is not None and measured.goals == "own" and measured.examples == [8, 8]
    by_hand = [[loss_by_hand(tensors(m), config, rows) for rows in (ones, twos)] for m in (first, second)]
    for told, right in zip(measured.parents, by_hand, strict=True):
        assert told == pytest.approx(right, abs=1e-5)
    average = {name: (tensor + tensors(second)[name]) / 2 for name, tensor in tensors(first).items()}
    mean = measured.named("mean")
    right = [loss_by_hand(average, config, rows) for rows in (ones, twos)]
    assert mean is not None and mean.loss == pytest.approx(right, abs=1e-5)
    assert mean.lost == pytest.approx((right[0] - by_hand[0][0] + right[1] - by_hand[1][1]) / 2, abs=1e-5)
    tried = [merge.name for merge in measured.merges]
    assert tried[:3] == ["mean", "aligned mean", "reconstruct, not leaning"][: 3 if seconds else 1]
    assert measured.best in tried and bool(measured.notes) == (len(tried) < 4)
    assert json.loads(json.dumps(found.to_dict()["mergeability"]))["measured"]["unit"] == "nats per token"
    assert found.mergeability.says in found.reasons and "the mean " in found.mergeability.says


def test_classifiers_are_compared_with_their_parents_predictions() -> None:
    first, second = model("vit", 0), model("vit", 1)
    config = json.loads((first / "config.json").read_text())
    size, channels = config["image_size"], config["num_channels"]
    images = torch.randn(32, channels, size, size, generator=torch.Generator().manual_seed(0))
    found = isomerge.check(first, second, data=lambda: ({"pixel_values": part} for part in images.split(8)))
    assert found.mergeability is not None
    measured = found.mergeability.measured
    assert measured is not None and measured.goals in ("mean", "expert")
    with torch.no_grad():
        given = [load_stock(config, tensors(m))(pixel_values=images[7::8]).logits.softmax(-1) for m in (first, second)]
        average = {name: (tensor + tensors(second)[name]) / 2 for name, tensor in tensors(first).items()}
        own = load_stock(config, average)(pixel_values=images[7::8]).logits.log_softmax(-1)
    target = sum(given) / 2
    mean = measured.named("mean")
    assert mean is not None and mean.agreement is not None and measured.goals == "mean"
    assert mean.lost == pytest.approx(float((target * (target.log() - own)).sum(-1).mean()), abs=1e-5)


def test_what_takes_too_long_is_left_out_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "SECONDS", 0.0)
    found = isomerge.check(llama(0), llama(1), data=[words(1)[0], words(2)[0]])
    assert found.mergeability is not None and found.mergeability.measured is not None
    assert [merge.name for merge in found.mergeability.measured.merges] == ["mean"]
    notes = found.mergeability.measured.notes
    assert len(notes) == 3 and all("left out" in note and note in found.reasons for note in notes)
    assert all(note.endswith("0 s of 0 are left") for note in notes)


def test_a_mean_that_loses_much_is_not_suggested_for_want_of_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "SECONDS", 0.0)
    monkeypatch.setattr(trial.Trial, "_loss", lambda *_: (9.0, None))
    monkeypatch.setattr(trial.Trial, "_believed_loss", lambda *_: 1.0)
    found = isomerge.check(llama(0), llama(1), data=[words(1)[0], words(2)[0]])
    assert found.mergeability is not None and "the mean loses 8.00" in found.mergeability.says
    assert found.recipe is not None and "align" in found.recipe  # data in memory have no place in a recipe


def test_data_that_does_not_fit_is_a_reason_and_no_failure(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some words\n" * 40)
    found = isomerge.check(model("vit", 0), model("vit", 1), data=tmp_path / "a.txt")
    assert found.mergeability is not None and found.mergeability.measured is None
    assert "nothing was measured" in found.mergeability.says


def test_data_sets_are_one_or_one_for_each() -> None:
    with pytest.raises(RequestError, match="3 data sets for 2 models") as caught:
        isomerge.check(llama(0), llama(1), data=[words(k)[0] for k in range(3)])
    assert caught.value.keys == ("data",)


@pytest.mark.slow
def test_the_command_measures_and_suggests_data_for_each(tmp_path: Path) -> None:
    from models import word_tokenizer

    folders = [variant(llama(seed), tensors(llama(seed)), f"spoken-{seed}") for seed in (0, 1)]
    for folder in folders:
        word_tokenizer(["<unk>", "<s>", "</s>", *(f"w{k}" for k in range(20))]).save_pretrained(folder)
    for name in "ab":
        draw = torch.randint(20, (60, 12), generator=torch.Generator().manual_seed(ord(name)))
        (tmp_path / f"{name}.txt").write_text("\n".join(" ".join(f"w{k}" for k in row) for row in draw.tolist()))
    shown = verb("check", *folders, "--data", tmp_path / "a.txt", "--data", tmp_path / "b.txt", "--json").stdout
    record = json.loads(shown)
    assert record["mergeability"]["measured"]["merges"] and record["mergeability"]["says"] in record["reasons"]
