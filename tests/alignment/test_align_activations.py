"""Alignment from activations: what two models make of the same data decides, and no weight is looked at."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from scipy.optimize import linear_sum_assignment
from torch import Tensor

import isomerge
from isomerge.alignment import activations
from isomerge.architectures import describe
from isomerge.checkpoint import open_checkpoint
from isomerge.errors import IsomergeError, RequestError
from isomerge.symmetry.moved import scrambled
from models import (
    WIDE,
    difference,
    fingerprint,
    logits,
    model,
    mostly_slow,
    noisy,
    read_config,
    same_bytes,
    scratch,
    tensors,
    variant,
)
from precision import float64_throughout
from samples import Batches, batches

FAMILIES = ["vit", "bert", "gpt2", "llama"]


@cache
def scrambled_copy(folder: Path, seed: int = 3) -> Path:
    """The model moved by a random symmetry of every space."""
    move = scrambled(describe(open_checkpoint(folder), untie=True), seed)
    return variant(folder, dict(move.produce(move.plan(None), lambda *_: None)), f"scrambled-{seed}")


def largest_relative(found: dict[str, Tensor], truth: dict[str, Tensor]) -> float:
    assert found.keys() == truth.keys()
    return max(float((found[n] - t).norm() / t.norm()) for n, t in truth.items())


def seen_at(folder: Path, modules: list[str], data: Batches, *, output: bool) -> list[np.ndarray]:
    """What a module of the stock class reads or makes, stacked over all tokens."""
    stock = getattr(transformers, read_config(folder)["architectures"][0])
    loaded = stock.from_pretrained(folder, dtype=torch.float64, local_files_only=True).eval()
    rows: dict[str, list[Tensor]] = {name: [] for name in modules}
    for name in modules:
        loaded.get_submodule(name).register_forward_hook(
            lambda _, given, made, name=name: rows[name].append((made if output else given[0]).flatten(0, 1))
        )
    with torch.no_grad(), float64_throughout():
        for batch in data():
            loaded(**batch)
    return [torch.cat(rows[name]).numpy() for name in modules]


# --- recovery ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("evidence", ["activations", "mix", None])
@pytest.mark.parametrize("family", mostly_slow(FAMILIES, "vit"))
def test_a_scrambled_model_is_recovered(family: str, evidence: str | None) -> None:
    anchor = model(family, 0)
    source = scrambled_copy(anchor)
    assert largest_relative(tensors(source), tensors(anchor)) > 0.5
    alignment = isomerge.align(source, anchor, data=batches(anchor), evidence=evidence)
    assert largest_relative(alignment.state_dict(), tensors(anchor)) <= 1e-5


@pytest.mark.parametrize(
    ("measure", "site"), [("covariance", "post"), ("correlation", "pre"), ("information", "pre"), ("l2", "post")]
)
@pytest.mark.parametrize("family", mostly_slow(FAMILIES, "vit"))
def test_activations_alone_recover_it_without_a_look_at_the_weights(
    family: str, measure: str, site: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights, which otherwise settle ties, have no say at all here."""
    monkeypatch.setattr(activations, "TIE", 0.0)
    anchor = model(family, 0)
    found = isomerge.align(
        scrambled_copy(anchor), anchor, data=batches(anchor), evidence="activations", measure=measure, site=site
    )
    assert largest_relative(found.state_dict(), tensors(anchor)) <= 1e-5


@pytest.mark.parametrize("evidence", ["activations", "mix"])
@pytest.mark.parametrize("family", mostly_slow([*FAMILIES, "qwen3", "gemma2", "opt", "neox"], "vit", "llama"))
def test_the_function_never_changes_and_every_element_belongs_to_its_group(family: str, evidence: str | None) -> None:
    source, anchor = model(family, 1), model(family, 0)
    alignment = isomerge.align(source, anchor, data=batches(anchor), evidence=evidence)
    assert alignment.transform.elements
    for space, element in alignment.transform.elements.items():
        assert alignment.transform.spaces[space].contains(element), space
    untied = {"tie_word_embeddings": False} if alignment.untied else {}
    assert difference(logits(source), logits(source, alignment.state_dict(), **untied)) <= 1e-10


@pytest.mark.parametrize("family", FAMILIES)
def test_too_little_data_to_span_the_stream_is_completed_by_the_weights(family: str) -> None:
    anchor = model(family, 0)
    found = isomerge.align(scrambled_copy(anchor), anchor, data=batches(anchor, count=1, size=1), limit=1)
    assert largest_relative(found.state_dict(), tensors(anchor)) <= 1e-5


# --- against an independent truth -------------------------------------------------------------------------------------
def normalised(rows: np.ndarray, kind: str, eps: float) -> np.ndarray:
    if kind == "layer":
        rows = rows - rows.mean(1, keepdims=True)
    return rows / np.sqrt((rows**2).mean(1, keepdims=True) + eps)


@pytest.mark.parametrize("measure", ["covariance", "l2"])
@pytest.mark.parametrize("family", ["vit", "gpt2", "llama"])
def test_the_rotation_of_the_stream_is_procrustes_on_stacked_activations(family: str, measure: str) -> None:
    names = {
        "vit": [f"vit.layers.{i}.layernorm_{x}" for i in range(2) for x in ("before", "after")] + ["vit.layernorm"],
        "gpt2": [f"transformer.h.{i}.ln_{x}" for i in range(2) for x in (1, 2)] + ["transformer.ln_f"],
        "llama": [
            f"model.layers.{i}.{x}_layernorm" for i in range(2) for x in ("input", "post_attention")
        ] + ["model.norm"],
    }[family]  # fmt: skip
    kind = "rms" if family == "llama" else "layer"
    eps = {"vit": 1e-12, "gpt2": 1e-5, "llama": 1e-6}[family]
    anchor, source = model(family, 0), model(family, 1)
    data = batches(anchor)
    total = np.zeros((12, 12))
    sides = [seen_at(folder, names, data, output=False) for folder in (source, anchor)]
    for b, a in zip(*sides, strict=True):
        b, a = normalised(b, kind, eps), normalised(a, kind, eps)
        if measure == "covariance":
            b, a = b - b.mean(0), a - a.mean(0)
        total = total + b.T @ a / (np.linalg.norm(b) * np.linalg.norm(a))
    if kind == "layer":  # rotations that keep the ones vector
        total = total + np.ones_like(total) * np.linalg.norm(total)
    u, _, vt = np.linalg.svd(total)
    found = isomerge.align(source, anchor, data=data, measure=measure)
    tolerance = 1e-5 if family == "llama" else 1e-9  # its norms go down to float32 inside
    assert np.abs(found.transform.elements["residual"].numpy() - (u @ vt).T).max() <= tolerance


def signed_information(table: np.ndarray) -> np.ndarray:
    """Of two Gaussian variables, in nats, with the sign of their correlation; here no two units are equal."""
    return -np.sign(table) * np.log(1 - table**2) / 2


@pytest.mark.parametrize("measure", ["covariance", "correlation", "information"])
def test_the_order_of_units_is_the_best_assignment_of_stacked_activations(measure: str) -> None:
    anchor, source = model("vit", 0), model("vit", 1)
    data = batches(anchor)
    found = isomerge.align(source, anchor, data=data, evidence={"ffn": "activations"}, measure=measure, site="pre")
    names = [f"vit.layers.{i}.mlp.fc1" for i in range(2)]
    for i, (b, a) in enumerate(zip(*(seen_at(f, names, data, output=True) for f in (source, anchor)), strict=True)):
        table = np.cov(b.T, a.T) if measure == "covariance" else np.corrcoef(b.T, a.T)
        half = table.shape[0] // 2
        table = signed_information(table[:half, half:]) if measure == "information" else table[:half, half:]
        rows, columns = linear_sum_assignment(table, maximize=True)
        order = rows[np.argsort(columns)]
        element = found.transform.elements.get(f"ffn.{i}", torch.arange(half))
        assert element.tolist() == order.tolist()


def test_the_rotation_of_a_head_is_procrustes_on_its_values_and_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Level `rotation`: heads keep their order and nothing is balanced."""
    monkeypatch.setattr(activations, "TIE", 0.0)
    anchor, source = model("vit", 0), model("vit", 1)
    data = batches(anchor)
    found = elements(source, anchor, data=data, evidence="activations", level="rotation")
    for i in range(2):
        total = np.zeros((3, 4, 4))
        for module, output in (("v_proj", True), ("o_proj", False)):
            (b,), (a,) = (
                seen_at(f, [f"vit.layers.{i}.attention.{module}"], data, output=output) for f in (source, anchor)
            )
            b, a = ((x - x.mean(0)).reshape(-1, 3, 4) for x in (b, a))
            total += np.einsum("nhe,nhf->hef", b, a) / len(b)
        u, _, vt = np.linalg.svd(total)
        assert np.abs(found[f"vo.{i}"].numpy() - (u @ vt).transpose(0, 2, 1)).max() <= 1e-6


# --- who decides what -------------------------------------------------------------------------------------------------
def elements(source: Path, anchor: Path, **options: Any) -> dict[str, Tensor]:
    return dict(isomerge.align(source, anchor, **options).transform.elements)


def test_data_changes_nothing_when_the_weights_decide() -> None:
    anchor, source = model("vit", 0), model("vit", 1)
    plain = isomerge.align(source, anchor).state_dict()
    each = isomerge.align(source, anchor, data=batches(anchor), evidence={"residual": "weights"}).state_dict()
    assert all(same_bytes(plain[n], each[n]) for n in plain)
    with pytest.raises(RequestError, match="data has no use"):
        isomerge.align(source, anchor, data=batches(anchor), evidence="weights")


def test_each_space_obeys_its_own_entry_before_that_of_the_space_around_it() -> None:
    """A scrambled and disturbed copy: weights and activations both find it, and not to the same digit."""
    anchor = model("vit", 0)
    source = noisy(scrambled_copy(anchor), 0.1)
    data = batches(anchor)
    every = elements(source, anchor, data=data, evidence="activations")
    default = elements(source, anchor, data=data)
    assert not any(torch.allclose(every[s], default[s], atol=1e-4) for s in ("qk.0", "vo.0"))
    ffn = elements(source, anchor, data=data, evidence={"ffn": "activations"})
    assert all(torch.equal(ffn[s], every[s]) for s in every if s.startswith(("ffn", "residual")))
    assert all(torch.equal(ffn[s], default[s]) for s in default if s.startswith(("head", "qk", "vo")))
    one = elements(source, anchor, data=data, evidence={"head.0": "activations"})
    assert torch.allclose(one["vo.0"], every["vo.0"], atol=1e-9) and torch.equal(one["vo.1"], default["vo.1"])
    inner = elements(source, anchor, data=data, evidence={"attention": "activations", "qk": "weights"})
    assert torch.allclose(inner["vo.0"], every["vo.0"], atol=1e-9)
    assert torch.allclose(inner["qk.0"], default["qk.0"], atol=1e-9)
    glob = elements(source, anchor, data=data, evidence={"*.0": "activations"})
    assert torch.allclose(glob["vo.0"], every["vo.0"], atol=1e-9) and torch.equal(glob["vo.1"], default["vo.1"])


def test_the_notes_say_what_activations_decided_and_where_there_were_none() -> None:
    anchor, source = model("mixtral", 0), model("mixtral", 1)
    notes = " ".join(isomerge.align(source, anchor, data=batches(anchor), evidence="activations").solver_notes)
    assert "activations of 32 examples decide" in notes and "residual" in notes
    assert "there are no activations for" in notes and "ffn.*" in notes and "the weights decide there" in notes


def test_the_limit_counts_examples_and_several_sources_are_each_seen() -> None:
    anchor = model("vit", 0)
    family = isomerge.align_family([model("vit", 1), model("vit", 2)], anchor=anchor, data=batches(anchor), limit=10)
    for member, seed in zip(family.members, (1, 2), strict=True):
        assert any("activations of 10 examples" in n for n in member.solver_notes)
        alone = elements(model("vit", seed), anchor, data=batches(anchor), limit=10)
        assert torch.equal(alone["residual"], member.transform.elements["residual"])


def test_a_measure_that_compares_nothing_is_noted() -> None:
    """The stream rotates, and only orders can be compared by information."""
    anchor = model("vit", 0)
    notes = isomerge.align(model("vit", 1), anchor, data=batches(anchor), measure="information").solver_notes
    assert any("covariance decides: measure 'information'" in note for note in notes)
    used = isomerge.align(model("vit", 1), anchor, data=batches(anchor), measure="information", level="permutation")
    assert not any("covariance decides" in note for note in used.solver_notes)


# --- siblings ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("evidence", ["activations", "mix", None])
@pytest.mark.parametrize("family", mostly_slow(FAMILIES, "vit"))
def test_a_model_and_its_fine_tune_are_left_alone(family: str, evidence: str | None) -> None:
    anchor = model(family, 0, **WIDE[family])
    for source in (anchor, noisy(anchor, 1e-3)):
        alignment = isomerge.align(source, anchor, data=batches(anchor), evidence=evidence)
        assert alignment.siblings
        found = alignment.state_dict()
        assert all(same_bytes(found[n], t) for n, t in tensors(source).items())


def test_units_that_never_fire_are_placed_by_their_weights() -> None:
    """Activations say nothing about them, and any order of theirs would do; the identity is the right one."""
    like = model("opt", 0, activation_function="relu")
    name = "model.decoder.layers.0.fc1.bias"
    dead = tensors(like)[name].clone()
    dead[:4] = -100
    anchor = variant(like, {name: dead}, "dead")
    source = scrambled_copy(anchor)
    found = isomerge.align(source, anchor, data=batches(anchor), evidence="activations").state_dict()
    assert largest_relative(found, tensors(anchor)) <= 1e-5


# --- bad input --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"evidence": "activations"}, ["no data", "Pass data"]),
        ({"evidence": {"ffn": "mix"}}, ["no data"]),
        ({"limit": 5}, ["no data"]),
        ({"data": "x", "evidence": "activation"}, ["'activation'", "Did you mean 'activations'?"]),
        ({"data": "x", "evidence": {"ffn": "weight"}}, ["'weights'"]),
        ({"data": "x", "site": "before"}, ["site", "'before'", "pre, post"]),
        ({"data": "x", "measure": "covarience"}, ["Did you mean 'covariance'?"]),
        ({"data": "/nowhere/at/all"}, ["/nowhere/at/all"]),
    ],
)
def test_a_request_that_makes_no_sense_is_refused(options: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(RequestError) as caught:
        isomerge.align(model("vit", 1), model("vit", 0), **options)
    assert all(w in str(caught.value) for w in words), str(caught.value)


def test_a_common_mean_has_no_anchor_to_run_on_data() -> None:
    with pytest.raises(RequestError, match="no anchor model to run on data"):
        isomerge.align_family([model("vit", 1), model("vit", 0)], data="x", many="universe")


def test_a_space_that_is_not_there_is_named_with_the_nearest_one() -> None:
    anchor = model("vit", 0)
    with pytest.raises(RequestError, match="'residul'.*Did you mean 'residual'"):
        isomerge.align(model("vit", 1), anchor, data=batches(anchor), evidence={"residul": "mix"})


def test_activations_that_are_not_finite_are_refused_with_the_model_and_the_place() -> None:
    anchor = model("vit", 0)

    def spoilt() -> Iterator[dict[str, Tensor]]:
        for batch in batches(anchor, count=1)():
            batch["pixel_values"][0, 0, 0, 0] = float("nan")
            yield batch

    before = fingerprint(anchor)
    with pytest.raises(IsomergeError, match="layernorm.*not finite"):
        isomerge.align(model("vit", 1), anchor, data=spoilt)
    assert fingerprint(anchor) == before


# --- the command ------------------------------------------------------------------------------------------------------
@pytest.fixture
def images(tmp_path: Path) -> Path:
    image = pytest.importorskip("PIL.Image")
    folder = tmp_path / "images"
    folder.mkdir()
    generator = np.random.default_rng(0)
    for number in range(12):
        pixels = generator.integers(0, 256, (8, 8, 3), dtype=np.uint8)
        image.fromarray(pixels).save(folder / f"{number}.png")
    return folder


def test_the_command_reads_a_folder_of_images(images: Path, tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from isomerge.cli.app import app

    settings = '{"image_processor_type": "ViTImageProcessor", "size": {"height": 8, "width": 8}}'
    sides = []
    for folder in (scrambled_copy(model("vit", 0)), model("vit", 0)):
        sides.append(scratch() / f"{folder.name}-with-settings")
        shutil.copytree(folder, sides[-1], dirs_exist_ok=True)
        (sides[-1] / "preprocessor_config.json").write_text(settings)
    out = tmp_path / "out"
    line = [*map(str, sides), "-o", str(out), "--data", str(images), "--limit", "10"]
    result = CliRunner().invoke(app, ["align", *line, "--json"])
    assert result.exit_code == 0, result.output
    assert "activations of 10 examples decide: residual" in result.output
    assert largest_relative(tensors(out), tensors(sides[1])) <= 1e-5
    for wrong, words in ((["--evidence", "mix"], "--data PATH"), (["--limit", "3"], "--data"),
                         (["--data", str(tmp_path / "none")], "no such file")):  # fmt: skip
        result = CliRunner().invoke(app, ["align", *line[:2], "-o", str(tmp_path / "other"), *wrong])
        assert result.exit_code != 0 and words in result.output + result.stderr
