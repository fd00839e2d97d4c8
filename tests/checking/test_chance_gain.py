"""What stands beside a gain: the gain by chance, over the same spaces, and never at the cost of a unit that is real."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

import isomerge
from isomerge.alignment.scope import LEVELS, Scope
from isomerge.architectures import describe
from isomerge.checking import units as judged
from isomerge.checking.stream import judge_stream
from isomerge.checkpoint import open_checkpoint
from isomerge.symmetry.transform import Transform
from models import arrays, model, noisy, tensors, variant

WIDE = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 64}
ATTENTION = [f"self_attn.{x}_proj.weight" for x in "qkvo"]
FEED_FORWARD = [f"mlp.{x}_proj.weight" for x in ("gate", "up", "down")]


def llama(seed: int = 0, **changes: Any) -> Path:
    return model("llama", seed, torch.float32, **{**WIDE, **changes})


def changed(like: Path, change: Any, names: list[str], called: str) -> Path:
    found = {n: change(t) for n, t in tensors(like).items() if any(n.endswith(name) for name in names)}
    return variant(like, found, called)


def test_a_sign_that_was_turned_is_no_chance() -> None:
    """−up and −down of a gated feed-forward compute what up and down do."""
    base = llama()
    negated = noisy(changed(base, torch.neg, FEED_FORWARD[1:], "negated"), 0.005)
    found = isomerge.check(base, negated)
    row = next(s for s in found["spaces"] if s["name"].startswith("ffn"))
    assert row["gain"] > 0.999 and row["by_chance"] < 0.3
    assert found["alignment"]["gain"]["full"] > 0.999 and found["alignment"]["by_chance"] < 0.3
    assert not any("align on data" in reason for reason in found["reasons"])


def test_units_that_are_found_again_need_no_data() -> None:
    base = llama()
    negated = changed(base, torch.neg, FEED_FORWARD[1:], "negated")
    found = isomerge.check(base, negated)
    assert "one model or siblings" in found["summary"]
    for told in (found["why"], found["recipe"]):
        assert "one model or siblings with units in another order" in told
        assert "strangers" not in told and "data" not in told
    assert yaml.safe_load(found["recipe"])["align"] is True
    # One that is really strange among three decides what is said of all.
    three = isomerge.check(base, negated, llama(1))
    assert "are strangers" in three["summary"] and "strangers share no basis" in three["why"]


def test_chance_takes_no_work_from_the_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """All units fit exactly, as counted by hand: each is assigned, and has its chance."""
    models = [llama(seed, num_hidden_layers=3) for seed in (0, 1)]
    width, keys, units = 32, 16, 64
    attention = 2 * width * (width * width) + 2 * keys * (keys * width)
    work = 2 * (attention + 3 * units * (units * width))  # of two layers
    monkeypatch.setattr(judged, "WORK", work)
    found = isomerge.check(*models)
    rows = {s["name"]: s for s in found["spaces"]}
    assert set(rows) == {"residual", "ffn.1", "ffn.2", "kv.1", "kv.2"}
    assert all(row["gain"] > 0 and row["by_chance"] > 0 for row in rows.values())
    assert not any("too large" in reason for reason in found["reasons"])
    monkeypatch.setattr(judged, "WORK", work - 1)
    assert any(reason.startswith("kv.2 is too large") for reason in isomerge.check(*models)["reasons"])


@pytest.mark.parametrize("units", [64, 1100])  # solved as a whole; judged by a sample of its units
def test_gain_and_chance_are_means_over_the_same_spaces(units: int) -> None:
    """Also where one of them gains nothing: attention that is all zero in one of the models."""
    first = llama(0, intermediate_size=units)
    second = changed(llama(1, intermediate_size=units), torch.zeros_like, ATTENTION, "without-attention")
    found = isomerge.check(first, second)
    a, b = arrays(first), arrays(second)
    parts = {"kv.1": ATTENTION, "ffn.1": FEED_FORWARD}
    at = "model.layers.1."
    apart = {s: sum(((a[at + n] - b[at + n]) ** 2).sum() for n in names) for s, names in parts.items()}
    rows = {s["name"]: s for s in found["spaces"]}
    assert rows["kv.1"]["gain"] == rows["kv.1"]["by_chance"] == 0 < rows["ffn.1"]["by_chance"]
    for mean, key in ((found["alignment"]["gain"]["full"], "gain"), (found["alignment"]["by_chance"], "by_chance")):
        expected = sum(apart[s] * rows[s][key] for s in parts) / sum(apart.values())
        assert mean == pytest.approx(expected, rel=1e-4)


def test_a_chance_that_leaves_no_distance_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shuffling two units of two can bring back the other model itself."""
    monkeypatch.setattr(judged, "shuffled_rest", lambda a, b, random: b.clone())
    found = isomerge.check(llama(0), llama(1))
    units = [s["by_chance"] for s in found["spaces"] if s["name"] != "residual"]
    assert units == [0.0, 0.0] and found["alignment"]["by_chance"] == 0


# --- the stream -------------------------------------------------------------------------------------------------------
def moved_stream(first: Path, second: Path) -> tuple[dict[str, Any], Transform]:
    source, anchor = (describe(open_checkpoint(folder)) for folder in (first, second))
    scopes = {level: Scope(level).restrict(source.architecture).spaces for level in LEVELS}
    row, move = judge_stream(source, anchor, source.layouts, scopes, torch.float32)
    assert row is not None
    return row, move


def test_a_rotation_that_fits_noise_moves_nothing() -> None:
    """It would cost the time of turning every tensor."""
    base = llama()
    row, move = moved_stream(base, noisy(base, 0.05))
    assert row["gain"] > 0.25 and row["gain"] < 1.5 * row["by_chance"] and not move.elements
    row, move = moved_stream(base, llama(1))
    assert row["gain"] > 0.25 and row["gain"] < 1.5 * row["by_chance"] and not move.elements


@pytest.mark.parametrize("tokens", [29, 12])  # in short tables chance finds nearly everything, too
def test_a_rotation_that_is_there_moves_the_stream(tokens: int) -> None:
    base = llama(vocab_size=tokens)
    turn = np.linalg.qr(np.random.default_rng(2).normal(size=(32, 32)))[0]
    tables = ["embed_tokens.weight", "lm_head.weight"]
    turned = changed(base, lambda t: t @ torch.tensor(turn, dtype=t.dtype), tables, "turned")
    row, move = moved_stream(base, turned)
    assert row["gain"] > 0.999 and (row["by_chance"] > 0.67) == (tokens == 12)
    assert set(move.elements) == {"residual"}
