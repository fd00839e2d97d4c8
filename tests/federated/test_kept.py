"""The model that a server keeps: stock, whole whenever the server dies, and what the next server goes on from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.supercore.task_identity import TaskIdentity
from safetensors.torch import load_file

from isomerge.checkpoint import open_checkpoint
from isomerge.errors import CheckpointError, IsomergeError, RequestError
from isomerge.federated import kept
from isomerge.federated.strategy import MergeStrategy
from models import model

State = dict[str, torch.Tensor]


def stored(folder: str | Path) -> tuple[State, dict[str, Any]]:
    opened = open_checkpoint(folder)
    return {name: opened.read(name) for name in opened.tensors}, opened.config


@pytest.fixture(autouse=True)
def _a_task_of_flower(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_task_id", "_run_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)


class Clients:
    """A grid whose two clients add the number of the round to every weight; it may lose the server in a round."""

    def __init__(self, dies_in: int | None = None) -> None:
        self.dies_in, self.rounds = dies_in, list[int]()

    def get_node_ids(self) -> list[int]:
        return [1, 2]

    def send_and_receive(self, messages: Any, *, timeout: float | None = None) -> list[Message]:
        answers = []
        for message in messages:
            number = int(message.content["config"]["server-round"])
            if number == self.dies_in:
                raise KeyboardInterrupt
            if not self.rounds or self.rounds[-1] != number:
                self.rounds.append(number)
            state = {k: v + number for k, v in message.content["arrays"].to_torch_state_dict().items()}
            content = RecordDict({"arrays": ArrayRecord(state), "metrics": MetricRecord({"num-examples": 1})})
            answers.append(Message(content, reply_to=message))
        return answers


def begin(keep: Path | None, grid: Clients, rounds: int, **more: Any) -> Any:
    start = ArrayRecord({"w": torch.zeros(3, 2), "b": torch.zeros(3)})
    strategy = MergeStrategy(keep=keep, fraction_evaluate=0.0, **more)
    seen: list[int] = []
    result = strategy.start(
        grid, start, num_rounds=rounds, train_config=ConfigRecord(), evaluate_fn=lambda number, _: seen.append(number)
    )
    return result, seen, strategy


def test_a_server_that_is_killed_goes_on_where_it_was(tmp_path: Path) -> None:
    keep = tmp_path / "keep"
    with pytest.raises(KeyboardInterrupt):
        begin(keep, Clients(dies_in=4), 6)
    assert [path.name for path in keep.iterdir()] == ["round-00003"]
    grid = Clients()
    result, seen, strategy = begin(keep, grid, 6)
    assert grid.rounds == [4, 5, 6] and seen == [3, 4, 5, 6]
    assert sorted(result.train_metrics_clientapp) == sorted(strategy.bytes_received) == [4, 5, 6]
    whole, _, _ = begin(None, Clients(), 6)  # a server that nobody killed
    for name, tensor in whole.arrays.to_torch_state_dict().items():
        assert torch.equal(tensor, torch.full_like(tensor, 1 + 2 + 3 + 4 + 5 + 6))
        assert torch.equal(result.arrays.to_torch_state_dict()[name], tensor)


def test_nothing_is_left_to_do_where_all_rounds_are_done(tmp_path: Path) -> None:
    begin(tmp_path, Clients(), 2)
    grid = Clients()
    result, seen, _ = begin(tmp_path, grid, 2)
    assert not grid.rounds and seen == [2]
    assert torch.equal(result.arrays.to_torch_state_dict()["b"], torch.full((3,), 3.0))


def test_what_is_kept_loads_in_the_stock_class(tmp_path: Path) -> None:
    state, config = stored(model("vit"))
    kept.store(tmp_path, 7, state, config)
    loaded, info = transformers.ViTForImageClassification.from_pretrained(
        tmp_path / "round-00007", output_loading_info=True, trust_remote_code=False
    )
    assert not info["missing_keys"] and not info["unexpected_keys"]
    theirs = transformers.ViTForImageClassification.from_pretrained(model("vit"), trust_remote_code=False)
    assert all(torch.equal(t, loaded.state_dict()[n]) for n, t in theirs.state_dict().items())
    found = kept.latest(tmp_path, state)
    assert found is not None and found.round == 7 and found.config == config
    assert all(torch.equal(found.state[name], tensor) for name, tensor in state.items())


def test_an_adapter_is_kept_as_peft_has_it(tmp_path: Path) -> None:
    state = {"base_model.model.q_proj.lora_A.weight": torch.ones(2, 4)}
    kept.store(tmp_path, 1, state, {"peft_type": "LORA"}, adapter=True)
    folder = tmp_path / "round-00001"
    assert sorted(path.name for path in folder.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    assert torch.equal(load_file(folder / "adapter_model.safetensors")[next(iter(state))], torch.ones(2, 4))
    found = kept.latest(tmp_path, state, adapter=True)
    assert found is not None and found.config == {"peft_type": "LORA"}


@pytest.mark.parametrize("dies", ["writing", "renaming", "deleting"])
def test_wherever_the_server_dies_one_whole_model_is_there(
    dies: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = {"w": torch.ones(2)}, {"w": torch.full((2,), 2.0)}
    kept.store(tmp_path, 1, first, None)

    def dying(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(*{
            "writing": (kept, "_write"), "renaming": (Path, "rename"), "deleting": (kept, "_rounds"),
        }[dies], dying)  # fmt: skip
        kept.store(tmp_path, 2, second, None)
    found = kept.latest(tmp_path, first)
    assert found is not None and found.round == (2 if dies == "deleting" else 1)
    assert torch.equal(found.state["w"], (second if dies == "deleting" else first)["w"])
    kept.store(tmp_path, 3, second, None)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("round")] == ["round-00003"]


def test_another_model_or_a_damaged_one_is_refused(tmp_path: Path) -> None:
    state = {"w": torch.ones(3)}
    assert kept.latest(tmp_path / "nothing", state) is None
    kept.store(tmp_path, 1, state, {"model_type": "vit"})
    for other in ({"v": torch.ones(3)}, {"w": torch.ones(4)}):
        with pytest.raises(RequestError, match="another model than the one to start from") as refused:
            kept.latest(tmp_path, other)
        assert refused.value.keys == ("keep",)
    assert kept.latest(tmp_path, {"w": torch.ones(4)}, may_grow=True) is not None
    config = tmp_path / "round-00001" / "config.json"
    for text in ("[1]", "{", '{"a": NaN}'):
        config.write_text(text)
        with pytest.raises(IsomergeError, match="config"):
            kept.latest(tmp_path, state)
    config.write_text(json.dumps({"model_type": "vit"}))
    weights = tmp_path / "round-00001" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4])
    with pytest.raises(CheckpointError):
        kept.latest(tmp_path, state)
    weights.unlink()
    with pytest.raises(CheckpointError, match=r"it has no model\.safetensors"):
        kept.latest(tmp_path, state)
    with pytest.raises(CheckpointError, match="Keeping the model of round 2"):
        kept.store(config, 2, state, None)
