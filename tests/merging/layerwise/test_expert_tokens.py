"""Which tokens an expert of a mixture is given: the same as its rows show."""

from __future__ import annotations

import contextlib

import torch

import models as tiny
from isomerge.merging.layerwise.goals import Beliefs, GoalData
from isomerge.merging.layerwise.stage_runner import ExpertRouting, StageRunner
from isomerge.merging.layerwise.stages import Stage
from isomerge.running.blocks import BlockCache, BlockStacks
from isomerge.running.passes import DataPass
from merging.layerwise.reconstructions import again, data, load


def test_numbers_of_tokens_name_the_rows_that_an_expert_reads() -> None:
    folder = tiny.model("mixtral")
    model, batch = load(folder), data(folder, 1)[0]
    names = [name for name, p in model.named_parameters() if ".experts." in name and p.ndim == 3]
    stages = [Stage("experts", (name,), 0, False, (0, 0)) for name in names]
    runner = StageRunner(model, "the model", 0, BlockCache(BlockStacks(), 0))
    owner = names[0].rpartition(".")[0]
    hidden: list[torch.Tensor] = []
    watching = model.get_submodule(owner).register_forward_pre_hook(lambda module, args: hidden.append(args[0]))
    with watching, contextlib.suppress(Exception), torch.no_grad():
        model(**batch)
    features = hidden[0].reshape(-1, hidden[0].shape[-1])
    routing = ExpertRouting(batch)
    calls = runner.run([stages[0]], batch, 0, routing)[stages[0]]
    for stage in stages[:2]:  # of both maps of an expert
        tokens = routing.tokens_of(runner, stages, stage, batch, 0)
        assert len(tokens) == len(calls) > 1
        for call in calls:
            valid = routing.valid(call)
            rows = call.input.reshape(-1, call.input.shape[-1])
            kept = torch.ones(len(rows), dtype=torch.bool) if valid is None else valid
            torch.testing.assert_close(rows[kept], features[tokens[call.expert or 0]][kept])


def test_who_is_not_believed_in_a_batch_is_not_asked() -> None:
    examples = DataPass(again([{"input_ids": torch.zeros(2, 3, dtype=torch.int64)}] * 2), labels=False, hashed=False)
    beliefs = Beliefs([torch.tensor([[1.0, 1.0], [0.0, 0.0]]), torch.tensor([[1.0, 0.5], [0.0, 0.5]])])
    assert [GoalData(examples, beliefs).heard(number, 2) for number in (0, 1)] == [[0], [0, 1]]
    assert GoalData(examples, None).heard(0, 2) == [0, 1]
