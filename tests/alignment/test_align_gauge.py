"""OUT is written in the anchor's gauge: the plain mean of two files is the mean of the two canonical forms."""

from __future__ import annotations

import numpy as np
import pytest

import isomerge
from alignment.canonical import canonical, head_balances, llama_balances, without_bias_gauges
from alignment.layers import read_layer, read_llama, torch_state
from models import arrays, difference, logits, mean, model, mostly_slow, tensors, variant

FAMILIES = ["vit", "gpt2", "llama", "bert"]


def aligned(family: str, **options: str) -> dict[str, np.ndarray]:
    return arrays(isomerge.align(model(family, 1), anchor=model(family, 0), **options).state_dict())


@pytest.mark.parametrize("family", FAMILIES)
def test_the_canonical_form_of_these_tests_changes_nothing(family: str) -> None:
    folder = model(family, 0)
    form = canonical(family, arrays(folder))
    assert difference(logits(folder), logits(folder, torch_state(form))) <= 1e-11
    assert any(np.abs(form[n] - x).max() > 0.1 for n, x in arrays(folder).items())


@pytest.mark.parametrize("share", [0.25, 0.5])
@pytest.mark.parametrize("family", mostly_slow(FAMILIES, "vit", "llama"))
def test_the_mean_of_the_files_is_the_mean_of_the_canonical_forms(family: str, share: float) -> None:
    folder = model(family, 0)
    a, out = arrays(folder), aligned(family)
    plain = logits(folder, mean(torch_state(a), torch_state(out), share))
    forms = [torch_state(canonical(family, x)) for x in (a, out)]
    assert difference(plain, logits(folder, mean(*forms, share))) <= 1e-10


@pytest.mark.parametrize("family", FAMILIES)
def test_without_the_anchors_gauge_the_mean_would_be_another_model(family: str) -> None:
    """The comparison above has teeth: it fails for the raw source, and for a canonical OUT with a raw anchor."""
    folder = model(family, 0)
    a, b, out = arrays(folder), arrays(model(family, 1)), aligned(family)
    for x, y in ((a, b), (a, canonical(family, out))):
        plain = logits(folder, mean(torch_state(x), torch_state(y)))
        forms = [torch_state(canonical(family, z)) for z in (x, y)]
        assert difference(plain, logits(folder, mean(*forms))) > 1e-3


@pytest.mark.parametrize("family", FAMILIES)
def test_the_ends_of_the_interpolation_are_the_parents(family: str) -> None:
    anchor, source = model(family, 0), model(family, 1)
    a, out = tensors(anchor), isomerge.align(source, anchor=anchor).state_dict()
    assert difference(logits(anchor), logits(anchor, mean(a, out, 0.0))) <= 1e-12
    assert difference(logits(source), logits(anchor, mean(a, out, 1.0))) <= 1e-10


@pytest.mark.parametrize("family", ["vit", "gpt2", "llama"])
def test_out_has_the_norms_of_the_anchor(family: str) -> None:
    a, out = tensors(model(family, 0)), isomerge.align(model(family, 1), anchor=model(family, 0)).state_dict()
    norms = [n for n in a if "norm" in n.lower() or ".ln_" in n]
    norms = [n for n in norms if n != "transformer.ln_f.bias"]  # its reader has no bias, so β/γ is the source's own
    assert len(norms) >= 5 and all(a[n].equal(out[n]) for n in norms)


@pytest.mark.parametrize("family", ["vit", "gpt2", "bert"])
def test_out_has_the_key_and_value_biases_and_the_balance_of_the_anchor(family: str) -> None:
    """The balancing element of a head is unique among symmetric positive ones, so it tells the gauge of its factors."""
    a, out = arrays(model(family, 0)), aligned(family)
    for i in range(2):
        raw = [read_layer(family, x, i) for x in (a, out)]
        for bias in ("bk", "bv"):
            if family == "bert":  # its norms are not folded, so the biases are the stored ones
                assert np.abs(raw[0][bias] - raw[1][bias]).max() <= 1e-12
        folded = [read_layer(family, canonical(family, x, balance=False), i) for x in (a, out)]
        for mine, theirs in zip(*(head_balances(without_bias_gauges(x)) for x in folded), strict=True):
            assert np.abs(np.stack(mine) - np.stack(theirs)).max() <= 1e-9


def test_rotary_pairs_values_and_gated_units_have_the_balance_of_the_anchor() -> None:
    a, out = arrays(model("llama", 0)), aligned("llama")
    for i in range(2):
        mine, theirs = (llama_balances(read_llama(canonical("llama", x, balance=False), i)) for x in (a, out))
        for name, value in mine.items():
            assert np.abs(value - theirs[name]).max() <= 1e-9, name


@pytest.mark.parametrize("family", ["vit", "gpt2"])
def test_out_has_the_writer_means_of_the_anchor(family: str) -> None:
    a, out = arrays(model(family, 0)), aligned(family)
    for i in range(2):
        mine, theirs = (read_layer(family, x, i) for x in (a, out))
        assert np.abs(mine["O"].mean(1) - theirs["O"].mean(1)).max() <= 1e-12
        assert np.abs(mine["Wo"].mean(0) - theirs["Wo"].mean(0)).max() <= 1e-12


@pytest.mark.parametrize("family", FAMILIES)
def test_full_brings_the_canonical_forms_nearer(family: str) -> None:
    a, b = (canonical(family, arrays(model(family, s))) for s in (0, 1))
    out = canonical(family, aligned(family))
    assert sum(np.sum((out[n] - a[n]) ** 2) for n in a) < 0.9 * sum(np.sum((b[n] - a[n]) ** 2) for n in a)


@pytest.mark.parametrize("side", ["source", "anchor"])
def test_a_gain_of_zero_over_a_bias_that_no_reader_takes_holds_the_stream(side: str) -> None:
    """The head of this model has no bias, so the last norm's bias would have to be divided by its gain."""
    first, second = model("gpt2", 1), model("gpt2", 0)
    name = "transformer.ln_f.weight"
    changed = second if side == "anchor" else first
    gains = tensors(changed)[name].clone()
    gains[0] = 0
    changed = variant(changed, {name: gains}, f"no-gain-{side}")
    source, anchor = (first, changed) if side == "anchor" else (changed, second)
    alignment = isomerge.align(source, anchor=anchor)
    out = alignment.state_dict()
    assert all(bool(tensor.isfinite().all()) for tensor in out.values())
    assert difference(logits(source), logits(source, out)) <= 1e-10
    assert any("ln_f" in note and "held at the identity" in note for note in alignment.report()["notes"])
