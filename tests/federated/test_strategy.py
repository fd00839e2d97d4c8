"""`MergeStrategy` on Flower's own messages: what its server gets is what `aggregate` and Flower's FedAvg say."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAvg
from flwr.supercore.task_identity import TaskIdentity

from isomerge.errors import RequestError
from isomerge.federated import ClientUpdate, aggregate, compress
from isomerge.federated.strategy import MergeStrategy

State = dict[str, torch.Tensor]


@pytest.fixture(autouse=True)
def _a_task_of_flower(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages carry the numbers of the process that makes them, which Flower's runtime sets."""
    for name in ("_task_id", "_run_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)


class Nodes:
    """As much of Flower's grid as a strategy asks before a round."""

    def __init__(self, count: int) -> None:
        self.ids = list(range(1, count + 1))

    def get_node_ids(self) -> list[int]:
        return self.ids


def drawn(seed: int) -> State:
    generator = torch.Generator().manual_seed(seed)
    return {"w": torch.randn(6, 5, generator=generator), "b": torch.randn(6, generator=generator)}


def replies(strategy: FedAvg, model: State, answers: list[tuple[State, Any]]) -> list[Message]:
    """What the clients answer to the messages of a round."""
    sent = strategy.configure_train(1, ArrayRecord(model), ConfigRecord(), Nodes(len(answers)))
    made = []
    for message, (state, examples) in zip(sent, answers, strict=True):
        content = RecordDict({
            "arrays": ArrayRecord(state), "metrics": MetricRecord({"num-examples": examples, "loss": float(examples)}),
        })  # fmt: skip
        made.append(Message(content, reply_to=message))
    return made


def test_without_settings_it_is_flowers_own_fedavg() -> None:
    answers = [(drawn(seed), seed) for seed in (1, 2, 3)]
    ours, theirs = MergeStrategy(), FedAvg()
    arrays, metrics = ours.aggregate_train(1, replies(ours, drawn(0), answers))
    expected, measured = theirs.aggregate_train(1, replies(theirs, drawn(0), answers))
    assert arrays is not None and expected is not None and metrics is not None and measured is not None
    for name, tensor in expected.to_torch_state_dict().items():
        assert torch.allclose(arrays.to_torch_state_dict()[name], tensor.float(), atol=1e-6)
    assert metrics["loss"] == pytest.approx(measured["loss"])
    assert ours.bytes_received[1] >= 3 * 36 * 4


def test_settings_are_those_of_aggregate() -> None:
    answers = [(drawn(seed), seed) for seed in (1, 2, 3, 4)]
    settings: dict[str, Any] = {"guard": "median", "frozen": "b"}
    strategy = MergeStrategy(settings)
    arrays, _ = strategy.aggregate_train(1, replies(strategy, drawn(0), answers))
    clients = [ClientUpdate(str(n), state, count) for n, (state, count) in enumerate(answers)]
    truth = aggregate(drawn(0), clients, **settings).state
    assert arrays is not None
    assert all(torch.allclose(t, truth[n]) for n, t in arrays.to_torch_state_dict().items())
    assert torch.equal(arrays.to_torch_state_dict()["b"], drawn(0)["b"])


def test_a_broken_client_does_not_end_the_round() -> None:
    good = [(drawn(1), 1), (drawn(2), 3)]
    broken = [({"w": torch.full((6, 5), float("nan")), "b": torch.zeros(6)}, 5), ({"other": torch.zeros(1)}, 5)]
    strategy = MergeStrategy()
    arrays, _ = strategy.aggregate_train(1, replies(strategy, drawn(0), [*good, *broken]))
    assert arrays is not None
    expected = (drawn(1)["w"] + 3 * drawn(2)["w"]) / 4
    assert torch.allclose(arrays.to_torch_state_dict()["w"], expected, atol=1e-6)
    assert len(strategy.notes[1]) == 2 and all("is left out" in note for note in strategy.notes[1])
    arrays, metrics = strategy.aggregate_train(2, replies(strategy, drawn(0), broken))
    assert arrays is None and metrics is None and strategy.notes[2][0].startswith("the round is left out")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"gaurd": "median"}, "settings has 'gaurd'.*Did you mean"),
        ({"guard": "medain"}, "Did you mean"),
        ({"align": "global"}, "align needs config"),
        ({"step": "fedexp", "align": "common", "config": {}}, "goes by the global model"),
    ],
)
def test_settings_that_no_round_could_use_are_refused_before_the_first(settings: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        MergeStrategy(settings)
    with pytest.raises(RequestError, match="settings has 'guard', and aggregate_adapters takes"):
        MergeStrategy({"guard": "median"}, adapter_config={})


def test_compressed_answers_are_expanded() -> None:
    sent, lost = compress(drawn(0), drawn(1), 5)
    assert lost < 1e-6
    strategy = MergeStrategy()
    arrays, _ = strategy.aggregate_train(1, replies(strategy, drawn(0), [(sent, 1), (drawn(1), 1)]))
    assert arrays is not None
    assert torch.allclose(arrays.to_torch_state_dict()["w"], drawn(1)["w"], atol=1e-5)
