"""The server: it sends the global model to all clients, and makes the next one of their answers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp

from fleet import task
from fleet.strategies import STRATEGIES, arguments_of
from isomerge.demonstration.digits import load_digits
from isomerge.federated.strategy import MergeStrategy


def make(given: Mapping[str, Any]) -> ServerApp:
    """A server with these settings; what a run is started with (`flwr run --run-config`) goes before them."""
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        serve(grid, {**given, **context.run_config})

    return app


def serve(grid: Grid, given: Mapping[str, Any]) -> None:
    """Run the rounds, and write the accuracy after each to the file `out`, a line of JSON for each."""
    digits = load_digits()
    name = str(given.get("strategy", "fedavg"))
    about = STRATEGIES[name]
    clients = {**task.DEFAULTS, **about.get("clients", {})}
    clients |= {key: given[key] for key in task.DEFAULTS if key in given and key not in about.get("clients", {})}
    start = task.new_model(int(clients["seed"]))
    strategy = MergeStrategy(
        arguments_of(name, start.config.to_dict(), digits),
        align_rounds=about.get("align_rounds"),
        keep=given.get("keep") or None,
        fraction_evaluate=0.0,
        min_train_nodes=1,  # who is not there misses a round
        min_available_nodes=int(given.get("least", clients["clients"])),
    )
    out = Path(str(given["out"]))

    def evaluate(number: int, arrays: ArrayRecord) -> MetricRecord:
        share = task.accuracy(arrays.to_torch_state_dict(), digits)
        line = {"round": number, "accuracy": share, "bytes": strategy.bytes_received.get(number, 0)}
        with out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        return MetricRecord({"accuracy": share})

    strategy.start(
        grid,
        initial_arrays=ArrayRecord(task.sent(start)),
        num_rounds=int(given.get("rounds", 3)),
        timeout=float(given.get("timeout", 3600)),
        train_config=ConfigRecord(clients),
        evaluate_fn=evaluate,
    )


app = make({"out": "rounds.jsonl"})
