"""Runs in fusion_bench's own environment: a request per line as JSON on stdin, weights in and out as safetensors.

Methods work there on modules; a state_dict is wrapped into one whose parameters have its names.
"""

from __future__ import annotations

import contextlib
import json
import operator
import sys
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

METHODS = {
    "simple_average": "SimpleAverageAlgorithm",
    "slerp": "SlerpMergeAlgorithm",
    "task_arithmetic": "TaskArithmeticAlgorithm",
    "ties": "TiesMergingAlgorithm",
    "dare": "dare.DareTaskArithmetic",
}


def module(state: dict[str, torch.Tensor]) -> nn.Module:
    made = nn.Module()
    for name, tensor in state.items():
        made.register_parameter(name.replace(".", "-"), nn.Parameter(tensor))
    return made


def merged(request: dict[str, Any]) -> None:
    import fusion_bench.method  # here and not above: whoever collects tests looks into this file too
    import fusion_bench.method.dare

    method = operator.attrgetter(METHODS[request["method"]])(fusion_bench.method)
    pool = {name: module(load_file(file)) for name, file in request["models"].items()}
    found = method(**request["options"]).run(fusion_bench.BaseModelPool(pool))
    save_file(
        {name.replace("-", "."): tensor.contiguous() for name, tensor in found.state_dict().items()}, request["out"]
    )


if __name__ == "__main__":
    answers = sys.stdout
    with contextlib.redirect_stdout(sys.stderr):  # it prints what it does
        for line in sys.stdin:
            try:
                merged(json.loads(line))
                answer = ""
            except Exception as error:
                answer = f"{type(error).__name__}: {error}"
            print(json.dumps(answer), file=answers, flush=True)
