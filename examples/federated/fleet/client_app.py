"""A client: it gets the global model, trains it on its own images, and sends back what came of it."""

from __future__ import annotations

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from fleet import task
from isomerge.demonstration.digits import load_digits

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    given = message.content["config"]
    model = message.content["arrays"].to_torch_state_dict()
    partition = int(context.node_config["partition-id"])
    ((state, examples),) = task.answers(model, int(given["server-round"]), load_digits(), [partition], given)
    metrics = MetricRecord({"num-examples": examples})
    return Message(RecordDict({"arrays": ArrayRecord(state), "metrics": metrics}), reply_to=message)
