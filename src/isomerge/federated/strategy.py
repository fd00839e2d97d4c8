"""Strategies for Flower: its own FedAvg with isomerge's `aggregate` in the place of the mean."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.common.logger import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg, Result

from isomerge.arguments import require_choice
from isomerge.errors import IsomergeError, RequestError, near_miss
from isomerge.federated.adapters import aggregate_adapters
from isomerge.federated.aggregation import GROWING, Aggregated, aggregate, require_sense
from isomerge.federated.clients import ClientUpdate, State
from isomerge.federated.compression import PARTS, expand
from isomerge.federated.kept import latest, store
from isomerge.merging.data_methods import ALL_METHODS

__all__ = ["MergeStrategy"]

INFO = 20


class MergeStrategy(FedAvg):
    """FedAvg of Flower, whose clients' models are brought together by `isomerge.federated.aggregate`.

    `settings` are the arguments of `aggregate`: `method`, `options`, `config`, `align`, `guard`, `step`, `frozen`,
    `data` and so on; `flower` are those of Flower's FedAvg (`fraction_train`, `min_available_nodes`, …). With
    `adapter_config`, clients send LoRA factors only. Clients may answer with what `compress` gives, instead of a model.

    With `keep`, the global model is in this folder after every round, as save_pretrained would write it, and a server
    that was killed goes on from there: rounds that it has done count among `num_rounds`, and keep their numbers.

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
        keep: str | Path | None = None,
        **flower: Any,
    ) -> None:
        """`align_rounds` aligns in the first rounds only: clients that started apart are near each other after them."""
        super().__init__(**flower)
        self.settings = dict(settings or {})
        _require_known(self.settings, aggregate if adapter_config is None else aggregate_adapters)
        self.adapter_config, self.align_rounds = adapter_config, align_rounds
        self.keep = None if keep is None else Path(keep).expanduser()
        self.notes: dict[int, list[str]] = {}
        """What was noted in each round: clients left out or clipped."""
        self.bytes_received: dict[int, int] = {}
        """The size of all clients' answers, by round."""
        self._model: State | None = None
        self._done = 0  # rounds of an earlier server, which Flower does not count

    def summary(self) -> None:
        """Log the settings beside Flower's own."""
        shown = {name: value for name, value in self.settings.items() if name not in ("config", "data")}
        log(INFO, "\t├──> isomerge: %s", shown or "the mean by examples")
        super().summary()

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
    ) -> Result:
        """Flower's own, from the model in `keep` where there is one."""
        arrays = self._go_on(initial_arrays)
        done = self._done
        evaluate = None if evaluate_fn is None else lambda number, now: evaluate_fn(number + done, now)
        left = max(0, num_rounds - done)
        result = super().start(grid, arrays, left, timeout, train_config, evaluate_config, evaluate)
        for name in ("train_metrics_clientapp", "evaluate_metrics_clientapp", "evaluate_metrics_serverapp"):
            setattr(result, name, {number + done: metrics for number, metrics in getattr(result, name).items()})
        if done and not len(result.arrays):
            result.arrays = arrays  # no round was left, or none had an answer
        return result

    def _go_on(self, initial: ArrayRecord) -> ArrayRecord:
        self._done = 0
        if self.keep is None:
            return initial
        grows = self.settings.get("method") in GROWING
        kept = latest(self.keep, initial.to_torch_state_dict(), adapter=self.adapter_config is not None, may_grow=grows)
        if kept is None:
            return initial
        log(INFO, "Going on after round %s, from %s", kept.round, self.keep)
        self._done = kept.round
        if grows and kept.config is not None:
            self.settings["config"] = kept.config
        return ArrayRecord(kept.state)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        self._model = arrays.to_torch_state_dict()
        return list(super().configure_train(server_round + self._done, arrays, config, grid))

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        return super().configure_evaluate(server_round + self._done, arrays, config, grid)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        # Not validated by Flower, which ends the run where one client has other names than the rest.
        server_round += self._done
        answers, _ = self._check_and_log_replies(list(replies), is_train=True, validate=False)
        self.bytes_received[server_round] = sum(_size(answer.content) for answer in answers)
        if not answers or self._model is None:
            return None, None
        clients = [self._client(answer) for answer in answers]
        try:
            result = self._aggregated(clients, server_round)
        except IsomergeError as error:
            self.notes[server_round] = [f"the round is left out: {error}"]
            log(INFO, "\t└──> %s", self.notes[server_round][0])
            return None, None
        self.notes[server_round] = result.notes
        for note in result.notes:
            log(INFO, "\t└──> %s", note)
        if result.config is not None:
            self.settings["config"] = result.config
        if self.keep is not None:
            config = self.adapter_config or self.settings.get("config")
            store(self.keep, server_round, result.state, config, adapter=self.adapter_config is not None)
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
            if any(key.startswith(PARTS) for key in state) and self._model is not None:
                state = expand(self._model, state)
        except Exception:  # bytes that are no arrays, factors that do not fit: numpy, torch and expand have their own
            state = {}
        return ClientUpdate(name, state, examples if isinstance(examples, (int, float)) else 0)

    def _metrics(self, contents: list[RecordDict]) -> MetricRecord | None:
        """Flower's own mean of what the clients measured, where all that count measured the same."""
        keys = {frozenset(next(iter(content.metric_records.values()), {})) for content in contents}
        return self.train_metrics_aggr_fn(contents, self.weighted_by_key) if len(keys) == 1 else None


def _require_known(settings: Mapping[str, Any], function: Callable[..., Aggregated]) -> None:
    """Refuse now what no round could be aggregated with: in a round it would be taken for a fault of the clients."""
    known = [name for name, one in inspect.signature(function).parameters.items() if one.kind is one.KEYWORD_ONLY]
    for name in settings:
        if name not in known:
            raise RequestError(
                f"MergeStrategy: settings has '{name}', and {function.__name__} takes {', '.join(known)}. "
                + near_miss(name, known),
                keys=("settings",),
            )
    if function is aggregate:
        checked = inspect.signature(require_sense).parameters
        require_sense(**{name: value for name, value in settings.items() if name in checked})
    else:
        require_choice("method", settings.get("method", "linear"), ALL_METHODS)


def _size(content: RecordDict) -> int:
    return sum(len(array.data) for record in content.array_records.values() for array in record.values())
