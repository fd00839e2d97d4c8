"""Polishing: gradient steps on the whole model, towards what its parents say together."""

from __future__ import annotations

import pytest
import torch
import transformers

import models as tiny
from isomerge.merging.layerwise import gradient_steps
from isomerge.merging.layerwise.goals import GoalData
from isomerge.merging.layerwise.stage_runner import StageRunner
from isomerge.running.blocks import BlockCache, BlockStacks
from isomerge.running.passes import DataPass
from merging.layerwise.reconstructions import again, data, load, reconstruct
from models import mostly_slow

TEXT = {**tiny.TEXT, "hidden_size": 12}
TASKS = {
    "classes": ("BertForSequenceClassification", {"num_labels": 5}),
    "several at once": (
        "BertForSequenceClassification", {"num_labels": 5, "problem_type": "multi_label_classification"}),
    "regression": ("BertForSequenceClassification", {"num_labels": 1}),
    "tokens": ("BertForTokenClassification", {"num_labels": 5}),
    "masked language model": ("BertForMaskedLM", {}),
    "question answering": ("BertForQuestionAnswering", {}),
    "pretraining": ("BertForPreTraining", {}),
    "hidden states": ("BertModel", {}),
    "language model": ("GPT2LMHeadModel", tiny.GPT2),
    "encoder and decoder": tiny.MODELS["t5"],
}  # fmt: skip


def pair(task: str, monkeypatch):
    kind, config = TASKS[task]
    monkeypatch.setitem(tiny.MODELS, task, (kind, {**({} if kind.startswith(("GPT", "T5")) else TEXT), **config}))
    return [tiny.model(task, seed) for seed in range(2)]


@pytest.mark.parametrize("task", mostly_slow(TASKS, "classes", "language model"))
def test_the_loss_is_lower_for_every_task(task: str, monkeypatch) -> None:
    folders = pair(task, monkeypatch)
    merged = reconstruct(folders, again(data(folders[0], 2, size=8)), align=False, polish=25, rate=0.003)
    told = merged.report()["polished"]
    assert told["steps"] == 25 and told["loss_after"] < told["loss_before"]


def by_hand(task: str, outputs: list) -> torch.Tensor:
    """The loss of the first model against the mean of the others, written out."""
    own, *given = outputs
    if task == "hidden states":
        return ((own[0] - sum(g[0] for g in given) / 2) ** 2).mean()
    if task == "regression":
        return ((own.logits - sum(g.logits for g in given) / 2) ** 2).mean()
    total = torch.zeros(())
    for field in ("start_logits", "end_logits") if task == "question answering" else ("logits",):
        p = sum(g[field].softmax(-1) for g in given) / 2
        total = total + (p * (p.log() - own[field].log_softmax(-1))).sum(-1).mean()
    return total


@pytest.mark.parametrize("task", ["classes", "regression", "question answering", "hidden states", "language model"])
def test_the_loss_is_the_distance_to_the_mean_of_the_parents(task: str, monkeypatch) -> None:
    folders = pair(task, monkeypatch)
    batches = [{"input_ids": b["input_ids"], "attention_mask": torch.ones_like(b["input_ids"])}
               for b in data(folders[0], 2, size=8)]  # fmt: skip
    merged = reconstruct(folders, again(batches), align=False, polish=3, rate=0.003)
    models = [load(folders[0], merged.state_dict()), *(load(f) for f in folders)]
    with torch.no_grad():
        losses = [by_hand(task, [model(**batch) for model in models]) for batch in batches]
    assert merged.report()["polished"]["loss_after"] == pytest.approx(float(sum(losses) / 2), rel=1e-6)


def runner(model, who: int) -> StageRunner:
    return StageRunner(model.requires_grad_(False), f"model {who}", who, BlockCache(BlockStacks(), 0))


def polished(folders, batches, steps: int = 6, rate: float = 0.003):
    models = [load(folder) for folder in folders]
    merged = load(folders[0])
    examples = DataPass(again(batches))
    list(examples)
    parents = [runner(m, 1 + k) for k, m in enumerate(models)]
    loss = gradient_steps.PredictionLoss(runner(merged, 0), parents, [0.5, 0.5], GoalData(examples, None))
    told = gradient_steps.polish(loss, steps, rate, lambda n: None)
    return merged, models, told


def test_no_gradients_are_left_behind_and_the_parents_are_not_touched() -> None:
    folders = [tiny.model("vit", seed) for seed in range(2)]
    merged, parents, told = polished(folders, data(folders[0], 1))
    assert told["loss_after"] < told["loss_before"]
    for model in (merged, *parents):
        assert all(not p.requires_grad and p.grad is None for p in model.parameters())
    for model, folder in zip(parents, folders, strict=True):
        assert all(torch.equal(t, load(folder).state_dict()[n]) for n, t in model.state_dict().items())


def test_the_old_weights_come_back_where_steps_do_not_help() -> None:
    folders = [tiny.model("vit", seed) for seed in range(2)]
    merged, _, told = polished(folders, data(folders[0], 1), rate=1e4)
    assert told["loss_after"] == told["loss_before"]
    before = load(folders[0]).state_dict()
    assert all(torch.equal(tensor, before[name]) for name, tensor in merged.state_dict().items())


def test_few_steps_are_spread_over_all_batches() -> None:
    """Two steps on six batches see the first and the fourth."""
    spread = gradient_steps.spread
    steps = spread("abcdef", 6, 2)
    assert [next(steps) for _ in range(3)] == ["a", "d", "a"]
    steps = spread("abc", 3, 7)
    assert "".join(next(steps) for _ in range(7)) == "abcabca"


def test_dropout_stays_off() -> None:
    config = transformers.ViTConfig(
        hidden_size=12, num_hidden_layers=1, num_attention_heads=3, intermediate_size=7, image_size=8, patch_size=4,
        num_labels=5, hidden_dropout_prob=0.5,
    )  # fmt: skip
    torch.manual_seed(0)
    models = [transformers.ViTForImageClassification(config) for _ in range(2)]
    batches = [{"pixel_values": torch.randn(8, 3, 8, 8)}]
    first, second = (
        reconstruct(models, again(batches), align=False, refine=3, polish=3).state_dict() for _ in range(2)
    )
    assert all(tiny.same_bytes(first[name], second[name]) for name in first)
