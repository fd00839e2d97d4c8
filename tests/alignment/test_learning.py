"""Learned alignment: the symmetry is moved by gradients, and stays one. The truth is the stock class in float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor

import isomerge
from commands import said, verb
from isomerge.alignment.learning import steps
from isomerge.alignment.learning.orders import Cosines, LearnedOrder
from isomerge.alignment.learning.parameters import KINDS
from isomerge.architectures import describe
from isomerge.checkpoint import open_checkpoint
from isomerge.errors import RequestError
from isomerge.symmetry.canonical import Canonical
from isomerge.symmetry.groups import GROUPS, Permutation, Rotary, SignedPermutation
from isomerge.symmetry.transform import Transform, random_transform
from models import (
    MODELS,
    difference,
    image_pair,
    logits,
    mean,
    model,
    mostly_slow,
    noisy,
    read_config,
    same_bytes,
    tensors,
)
from samples import batches, digits

STEPS = 6
FAMILIES = [name for name in MODELS if name != "t5"]  # random batches have no inputs for a decoder


def learned(name: str, **options: Any) -> isomerge.Alignment:
    source, anchor = model(name, 1), model(name, 0)
    return isomerge.align(source, anchor, data=batches(anchor), learn=STEPS, **options)


def stock_scores(like: Path, weights: dict[str, Tensor], batch: dict[str, Tensor]) -> Tensor:
    """(examples or tokens, classes) of the stock class in float64, made of files."""
    config = read_config(like)
    kind = getattr(transformers, config["architectures"][0])
    loaded = kind.from_pretrained(
        None, config=kind.config_class.from_dict(config), state_dict=weights, dtype=torch.float64,
        experts_implementation="eager",
    )  # fmt: skip
    given = {k: v.double() if v.is_floating_point() else v for k, v in batch.items()}
    with torch.no_grad():
        return loaded.eval()(**given).logits.double().flatten(0, -2)


def midpoint_divergence(source: Path, anchor: Path, moved: dict[str, Tensor], inputs: list[dict[str, Tensor]]) -> float:
    """Of stock models, the midpoint made of files: Σ p̄ log(p̄ / q), a mean over tokens."""
    a, b, found = tensors(anchor), tensors(source), []
    for batch in inputs:
        goal = (stock_scores(anchor, a, batch).softmax(-1) + stock_scores(anchor, b, batch).softmax(-1)) / 2
        own = stock_scores(anchor, mean(a, moved), batch).log_softmax(-1)
        found.append(F.kl_div(own, goal, reduction="batchmean"))
    return float(torch.stack(found).mean())


# --- the result is a symmetry, and better -----------------------------------------------------------------------------
@pytest.mark.parametrize("name", mostly_slow(FAMILIES, "llama", "vit"))
def test_learning_leaves_the_source_computing_the_same(name: str) -> None:
    alignment = learned(name)
    start = isomerge.align(model(name, 1), model(name, 0), data=batches(model(name, 0)))
    assert alignment.learned is not None and alignment.learned["kept"], alignment.learned
    for space, element in alignment.transform.elements.items():
        assert alignment.transform.spaces[space].contains(element), space
    assert any(not torch.equal(e, start.transform.elements[s]) for s, e in alignment.transform.elements.items())
    changes = alignment.source.architecture.untied_config
    found = logits(model(name, 1), alignment.state_dict(), **changes)
    assert difference(logits(model(name, 1)), found) <= 1e-9


@pytest.mark.parametrize("name", mostly_slow(["llama", "vit", "gpt2", "qwen3", "mixtral"], "llama", "vit"))
def test_loss_in_the_record_is_that_of_the_mean_of_the_files(name: str) -> None:
    source, anchor = model(name, 1), model(name, 0)
    alignment = learned(name)
    held_out = [{k: v[:1] for k, v in batch.items()} for batch in batches(anchor)()]
    found = midpoint_divergence(source, anchor, alignment.state_dict(), held_out)
    before = isomerge.align(source, anchor, data=batches(anchor)).state_dict()
    assert alignment.learned is not None
    assert alignment.learned["loss_after"] == pytest.approx(found, rel=1e-3)
    assert alignment.learned["loss_before"] == pytest.approx(
        midpoint_divergence(source, anchor, before, held_out), rel=1e-3
    )
    assert found < alignment.learned["loss_before"]


def test_learning_towards_labels_lowers_the_loss_on_them_and_changes_no_end() -> None:
    source, anchor = model("vit", 1), model("vit", 0)
    draw = torch.Generator().manual_seed(0)
    labelled = [b | {"labels": torch.randint(0, 5, (8,), generator=draw)} for b in batches(anchor)()]
    alignment = isomerge.align(source, anchor, data=labelled, learn=STEPS, learn_towards="labels")
    moved = alignment.state_dict()

    def loss(weights: dict[str, Tensor]) -> float:  # what is held out: one example of each batch
        scores = [stock_scores(anchor, weights, {"pixel_values": b["pixel_values"][:1]}) for b in labelled]
        return float(F.cross_entropy(torch.cat(scores), torch.cat([b["labels"][:1] for b in labelled])))

    record = alignment.learned
    assert record is not None and record["kept"] and record["towards"] == "labels"
    assert record["loss_after"] == pytest.approx(loss(mean(tensors(anchor), moved)), rel=1e-3)
    assert record["loss_after"] < record["loss_before"]
    assert difference(logits(source), logits(source, moved)) <= 1e-9


def test_gains_far_from_one_leave_the_loss_in_the_record_that_of_the_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """The means of a LayerNorm's readers read nothing in two models, and something in their mean if gains differ."""

    def far_from_one(search: steps.Search, train: Any) -> tuple[float, float]:
        draw = torch.Generator().manual_seed(0)
        for _, kind, parameter in search.transform.parameters():
            if kind == "gain":
                parameter.data = torch.randn(parameter.shape, generator=draw)
        return float("inf"), search._look()

    monkeypatch.setattr(steps.Search, "run", far_from_one)
    alignment = learned("vit")
    held_out = [{k: v[:1] for k, v in batch.items()} for batch in batches(model("vit", 0))()]
    found = midpoint_divergence(model("vit", 1), model("vit", 0), alignment.state_dict(), held_out)
    assert alignment.learned is not None and alignment.learned["kept"]
    assert alignment.learned["loss_after"] == pytest.approx(found, rel=1e-5)
    assert difference(logits(model("vit", 1)), logits(model("vit", 1), alignment.state_dict())) <= 1e-9


@pytest.mark.parametrize("level", ["permutation", "rotation"])
def test_every_level_learns_within_its_groups(level: str) -> None:
    alignment = learned("vit", level=level)
    assert alignment.learned is not None
    groups = {alignment.transform.spaces[s].name for s in alignment.transform.elements}
    assert groups <= {"permutation"} if level == "permutation" else "rotation" in groups
    assert difference(logits(model("vit", 1)), logits(model("vit", 1), alignment.state_dict())) <= 1e-9


def test_orders_learn_straight_through(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(steps.RATES, "scores", 0.3)
    start = isomerge.align(model("vit", 1), model("vit", 0), level="permutation")
    alignment = learned("vit", level="permutation", evidence="weights")
    assert alignment.learned is not None and alignment.learned["kept"]
    assert any(not torch.equal(e, start.transform.elements[s]) for s, e in alignment.transform.elements.items())
    assert alignment.learned["loss_after"] < alignment.learned["loss_before"]


def test_two_sides_reach_no_midpoint_that_one_does_not() -> None:
    """mean(h·A, g·B) computes what mean(A, h⁻¹g·B) computes, for invertible elements as for rotations."""
    bound = [describe(open_checkpoint(model("vit", seed)), untie=True) for seed in (0, 1)]
    spaces = bound[0].architecture.spaces
    h, g = (random_transform(spaces, seed) for seed in (3, 4))

    def moved(number: int, transform: Transform) -> dict[str, Tensor]:
        form = Canonical(bound[number], spaces)
        return {n: transform.act(form.tensor(n), layout) for n, layout in bound[number].layouts.items()}

    both = mean(moved(0, h), moved(1, g))
    one = mean(moved(0, Transform(spaces)), moved(1, g.then(h.inverse())))
    assert difference(both["classifier.weight"], one["classifier.weight"]) > 0.1
    assert difference(logits(model("vit"), both), logits(model("vit"), one)) <= 1e-9


# --- elements ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", sorted(KINDS))
def test_a_learned_element_is_one_of_its_group_and_acts_as_it(name: str) -> None:
    group = GROUPS[name](6, ("head",))
    one = KINDS[name](group, (2,), "cpu")
    draw = torch.Generator().manual_seed(0)
    for parameter in one.parameters.values():
        parameter.data = 0.3 * torch.randn(parameter.shape, generator=draw)
    element = one.exact()
    assert group.contains(element) and not group.is_identity(element)
    x = torch.randn(2, 6, 5, generator=draw, dtype=torch.float64)
    for dual in (False, True):
        torch.testing.assert_close(one.apply(element, x, dual=dual), group.act(element, x, dual=dual))
    loss = one.apply(one.now(), x.float(), dual=True).square().sum() + one.apply(one.now(), x.float(), dual=False).sum()
    if name not in ("rotation", "rotation fixing 1"):  # whose squares do not change
        loss.backward()
        assert all(parameter.grad.abs().max() > 0 for parameter in one.parameters.values())


@pytest.mark.parametrize("phase", ["sign", "none"])
def test_what_a_rotary_space_fixes_does_not_learn(phase: str) -> None:
    one = KINDS["rotary"](Rotary(6, phase=phase, scale=True), (), "cpu")
    assert list(one.parameters) == ["modulus"]
    one.parameters["modulus"].data += 0.2
    assert one.group.contains(one.exact())
    assert not KINDS["rotary"](Rotary(6, phase="sign", scale=False), (), "cpu").parameters


@pytest.mark.parametrize("kind", [Permutation, SignedPermutation])
def test_an_order_follows_its_scores(kind: Any) -> None:
    group = kind(4)
    cosines = Cosines.__new__(Cosines)
    cosines.plain, cosines.signed = torch.zeros(4, 4), torch.eye(4) - 0.1
    one = LearnedOrder(group, (), "cpu", cosines, ())
    assert group.is_identity(one.exact().sign() * one.exact() if group.signed else one.exact())
    wanted = torch.tensor([2, 0, 3, 1])
    one.parameters["scores"].data.zero_()
    one.parameters["scores"].data[wanted, torch.arange(4)] = 1
    one.settle()
    assert torch.equal(group.order(one.exact()), wanted) and group.contains(one.exact())
    x = torch.randn(4, 3)
    torch.testing.assert_close(one.apply(one.now(), x, dual=False, signed=group.signed), group.act(one.exact(), x))
    one.parameters["scores"].data = torch.randn(4, 4) / 10
    (one.apply(one.now(), x, dual=False) * torch.randn(4, 3)).sum().backward()
    assert one.parameters["scores"].grad.abs().min() > 0  # also of pairs that were not chosen


# --- what is asked for ------------------------------------------------------------------------------------------------
def test_same_seed_same_bytes() -> None:
    first, again, other = learned("llama"), learned("llama"), learned("llama", seed=1)
    assert all(same_bytes(t, again.state_dict()[n]) for n, t in first.state_dict().items())
    assert any(not same_bytes(t, other.state_dict()[n]) for n, t in first.state_dict().items())


def test_steps_that_do_not_help_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "RATES", dict.fromkeys(steps.RATES, 30.0))
    alignment = learned("llama")
    start = isomerge.align(model("llama", 1), model("llama", 0), data=batches(model("llama", 0)))
    assert alignment.learned is not None and alignment.learned["kept"] is False
    assert alignment.learned["loss_after"] == alignment.learned["loss_before"]
    assert all(same_bytes(t, start.state_dict()[n]) for n, t in alignment.state_dict().items())
    assert any("the start is kept" in note for note in alignment.notes())


def test_siblings_stay_as_they_are() -> None:
    anchor = model("llama", 0, hidden_size=48, num_attention_heads=4, intermediate_size=64, head_dim=12)
    alignment = isomerge.align(noisy(anchor), anchor, data=batches(anchor), learn=2)
    assert alignment.siblings and alignment.learned is None
    assert any("nothing was learned" in note for note in alignment.notes())


def test_a_stored_transform_has_what_was_learned(tmp_path: Path) -> None:
    alignment = learned("llama")
    alignment.save_transform(tmp_path / "g.safetensors")
    again = isomerge.align(model("llama", 1), transform=tmp_path / "g.safetensors")
    assert all(same_bytes(t, again.state_dict()[n]) for n, t in alignment.state_dict().items())


def test_a_call_that_is_made_again_does_not_learn_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, anchor = open_checkpoint(model("llama", 1)), open_checkpoint(model("llama", 0))
    data = list(batches(model("llama", 0))())
    first = isomerge.align(source, anchor, data=data, learn=STEPS, resume=tmp_path / "out")
    monkeypatch.setattr(steps.Search, "run", lambda *_: pytest.fail("it learned again"))
    again = isomerge.align(source, anchor, data=data, learn=STEPS, resume=tmp_path / "out")
    assert again.learned == first.learned
    assert all(same_bytes(t, again.state_dict()[n]) for n, t in first.state_dict().items())


def test_the_report_and_the_written_record_say_what_was_learned(tmp_path: Path) -> None:
    alignment = learned("llama")
    alignment.save(tmp_path / "out")
    assert alignment.report().to_dict()["learned"]["steps"] == STEPS
    assert '"learned"' in (tmp_path / "out" / "isomerge.json").read_text()


@pytest.mark.parametrize(
    ("options", "about"),
    [
        ({"learn": 5}, "no data"),
        ({"learn": -1}, "number of steps"),
        ({"learn": "x"}, "learn"),
        ({"learn_towards": "labels"}, "nothing is learned"),
        ({"learn_towards": "truth"}, "learn_towards"),
    ],
)
def test_requests_that_cannot_be_met(options: dict[str, Any], about: str) -> None:
    with pytest.raises(RequestError, match=about):
        isomerge.align(model("llama", 1), model("llama", 0), **options)


def test_too_few_examples_are_refused() -> None:
    anchor = model("llama", 0)
    with pytest.raises(RequestError, match="too few"):
        isomerge.align(model("llama", 1), anchor, data=batches(anchor, count=1), learn=2)


def test_labels_that_are_not_there_are_not_learned_from() -> None:
    anchor = model("llama", 0)
    with pytest.raises(RequestError, match="the data have none"):
        isomerge.align(model("llama", 1), anchor, data=batches(anchor), learn=2, learn_towards="labels")


def test_half_of_a_batch_list_is_never_both_learned_from_and_judged_by() -> None:
    given = [{"x": torch.arange(n * 4, n * 4 + 4)} for n in range(20)]
    for some in (given, given[:5]):
        train, held_out = steps.divided(some)
        parts = [torch.cat([b["x"] for b in part]).tolist() for part in (train, held_out)]
        assert sorted(parts[0] + parts[1]) == torch.cat([b["x"] for b in some]).tolist()
        assert parts[0] and parts[1]


# --- the command line and recipes -------------------------------------------------------------------------------------
def test_flags_and_recipe_learn_the_same_model(tmp_path: Path) -> None:
    a, b = image_pair()
    recipe = tmp_path / "recipe.yml"
    recipe.write_text(
        f"merge_method: linear\nmodels: [{{model: {a}}}, {{model: {b}}}]\nseed: 1\n"
        f"data: {{path: {digits()}, limit: 40}}\nalign: {{evidence: weights, learn: 3, learn_towards: labels}}\n"
    )
    flags = ["--align", "--evidence", "weights", "--data", digits(), "--limit", 40, "--learn", 3, "--seed", 1]
    flags += ["--learn-towards", "labels"]
    by_flags = said("merge", a, b, *flags, "-o", tmp_path / "flags")
    by_recipe = said("merge", recipe, "-o", tmp_path / "recipe")
    assert by_flags["sha256"] == by_recipe["sha256"] and by_flags["verified"]
    learned = by_recipe["alignment"]["models"][0]["learned"]
    assert (learned["steps"], learned["towards"]) == (3, "labels")
    assert any("learned for 3 steps" in note for note in by_recipe["notes"])


def test_the_align_verb_learns(tmp_path: Path) -> None:
    a, b = image_pair()
    record = said("align", b, a, "-o", tmp_path / "out", "--data", digits(), "--limit", 40, "--learn", 3)
    assert record["learned"]["steps"] == 3 and record["max_output_difference"] <= 1e-3
    assert "--learn 3" in (tmp_path / "out" / "isomerge.json").read_text()


@pytest.mark.parametrize(
    ("words", "about"),
    [
        (["align", "b", "a", "-o", "OUT", "--learn", "3"], "--learn needs data"),
        (["merge", "a", "b", "-o", "OUT", "--align", "--learn", "3"], "learned on data"),
        (["merge", "a", "b", "-o", "OUT", "--learn", "3", "--data", "DIGITS"], "--learn has no effect without --align"),
        (["align", "b", "a", "-o", "OUT", "--learn-towards", "labels"], "no effect without --learn"),
        (["merge", "a", "b", "-o", "OUT", "--align", "--learn-towards", "labels"], "no effect without --learn"),
    ],
)
def test_wrong_requests_say_what_to_write(words: list[str], about: str, tmp_path: Path) -> None:
    a, b = image_pair()
    places = {"a": a, "b": b, "OUT": tmp_path / "out", "DIGITS": digits()}
    told = verb(*(places.get(word, word) for word in words))
    assert told.exit_code == 2 and about in told.stderr
