"""Strategies for Flower: its own FedAvg with isomerge's `aggregate` in the place of the mean."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.common.logger import log
from flwr.serverapp.strategy import FedAvg

from isomerge.errors import RequestError
from isomerge.federated.adapters import aggregate_adapters
from isomerge.federated.aggregation import Aggregated, aggregate
from isomerge.federated.clients import ClientUpdate, State
from isomerge.federated.compression import expand

__all__ = ["MergeStrategy"]

INFO = 20


class MergeStrategy(FedAvg):
    """FedAvg of Flower, whose clients' models are brought together by `isomerge.federated.aggregate`.

    `settings` are the arguments of `aggregate`: `method`, `options`, `config`, `align`, `guard`, `step`, `frozen`,
    `data` and so on; `flower` are those of Flower's FedAvg (`fraction_train`, `min_available_nodes`, …). With
    `adapter_config`, clients send LoRA factors only. Clients may answer with what `compress` gives, instead of a model.

    A round in which no client sent a model that can be used leaves the global model as it is.

    ```
    strategy = MergeStrategy({"align": "global", "config": config}, fraction_train=0.5)
    result = strategy.start(grid, initial_arrays=ArrayRecord(state), num_rounds=10)
    ```
    """

    def __init__(
        self,
        settings: Mapping[str, Any] | None = None,
        *,
        adapter_config: Mapping[str, Any] | None = None,
        align_rounds: int | None = None,
        **flower: Any,
    ) -> None:
        """`align_rounds` aligns in the first rounds only: clients that started apart are near each other after them."""
        super().__init__(**flower)
        self.settings = dict(settings or {})
        self.adapter_config, self.align_rounds = adapter_config, align_rounds
        self.notes: dict[int, list[str]] = {}
        """What was noted in each round: clients left out or clipped."""
        self.bytes_received: dict[int, int] = {}
        """The size of all clients' answers, by round."""
        self._model: State | None = None

    def summary(self) -> None:
        """Log the settings beside Flower's own."""
        shown = {name: value for name, value in self.settings.items() if name not in ("config", "data")}
        log(INFO, "\t├──> isomerge: %s", shown or "the mean by examples")
        super().summary()

    def configure_train(self, server_round: int, arrays: ArrayRecord, config: Any, grid: Any) -> Iterable[Message]:
        self._model = arrays.to_torch_state_dict()
        return list(super().configure_train(server_round, arrays, config, grid))

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        # Not validated by Flower, which ends the run where one client has other names than the rest.
        answers, _ = self._check_and_log_replies(list(replies), is_train=True, validate=False)
        self.bytes_received[server_round] = sum(_size(answer.content) for answer in answers)
        if not answers or self._model is None:
            return None, None
        clients = [self._client(answer) for answer in answers]
        try:
            result = self._aggregated(clients, server_round)
        except RequestError as error:
            self.notes[server_round] = [f"the round is left out: {error}"]
            log(INFO, "\t└──> %s", self.notes[server_round][0])
            return None, None
        self.notes[server_round] = result.notes
        for note in result.notes:
            log(INFO, "\t└──> %s", note)
        if result.config is not None:
            self.settings["config"] = result.config
        counted = [a.content for a, c in zip(answers, clients, strict=True) if c.name in set(result.clients)]
        return ArrayRecord(result.state), self._metrics(counted)

    def _aggregated(self, clients: Sequence[ClientUpdate], server_round: int) -> Aggregated:
        assert self._model is not None
        if self.adapter_config is not None:
            return aggregate_adapters(self._model, clients, self.adapter_config, **self.settings)
        settings = dict(self.settings)
        if self.align_rounds is not None and server_round > self.align_rounds:
            settings["align"] = "none"
        return aggregate(self._model, clients, **settings)

    def _client(self, answer: Message) -> ClientUpdate:
        """A client's answer; whatever is wrong with it is found, and noted, where clients are accepted."""
        content, name = answer.content, str(answer.metadata.src_node_id)
        arrays = next(iter(content.array_records.values()), ArrayRecord())
        metrics: Mapping[str, Any] = next(iter(content.metric_records.values()), {})
        examples = metrics.get(self.weighted_by_key, 0)
        state: State
        try:
            state = arrays.to_torch_state_dict()
            if any(":" in key for key in state) and self._model is not None:
                state = expand(self._model, state)
        except Exception:  # bytes that are no arrays, factors that do not fit: numpy, torch and expand have their own
            state = {}
        return ClientUpdate(name, state, examples if isinstance(examples, (int, float)) else 0)

    def _metrics(self, contents: list[RecordDict]) -> MetricRecord | None:
        """Flower's own mean of what the clients measured, where all that count measured the same."""
        keys = {frozenset(next(iter(content.metric_records.values()), {})) for content in contents}
        return self.train_metrics_aggr_fn(contents, self.weighted_by_key) if len(keys) == 1 else None


def _size(content: RecordDict) -> int:
    return sum(len(array.data) for record in content.array_records.values() for array in record.values())
