"""Runs inside mergekit's own environment: reads one request per line, merges as its command would, answers in one line.

One process for many recipes, since importing takes longer than merging tiny models. The options are the defaults of
`mergekit-yaml` and `mergekit-multi`, but for those a request names.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import traceback
from collections.abc import Iterator
from typing import Any


def answer(request: dict[str, Any]) -> dict[str, Any]:
    from click.testing import CliRunner
    from mergekit.merge_methods import registered_methods
    from mergekit.scripts import extract_lora, moe, multimerge, run_yaml, tokensurgeon

    programs = {
        "mergekit-yaml": run_yaml,
        "mergekit-multi": multimerge,
        "mergekit-extract-lora": extract_lora,
        "mergekit-moe": moe,
        "mergekit-tokensurgeon": tokensurgeon,
    }
    if "flags" in request:
        options = programs[request["flags"]].main.params
        names = [name for one in options for name in (*one.opts, *one.secondary_opts)]
        return {"error": None, "flags": [name for name in names if name.startswith("-")]}
    if "words" in request:
        line, command = request["words"], programs[request["program"]].main
    elif "recipe" not in request:
        return {"error": None, "methods": [method.spec.name for method in registered_methods()]}
    elif request.get("intermediate"):
        line = [request["recipe"], "--out-path", request["out"], "--intermediate-dir", request["intermediate"]]
        command = multimerge.main
    else:
        line, command = [request["recipe"], request["out"]], run_yaml.main
    with in_float32() if request.get("float32") else contextlib.nullcontext():
        result = CliRunner().invoke(command, [*line, "--quiet", *request.get("options", [])])
    if result.exception is None or result.exit_code == 0:
        return {"error": None}
    lines = traceback.format_exception(result.exception)
    return {"error": f"{type(result.exception).__name__}: {result.exception}", "traceback": "".join(lines)}


@contextlib.contextmanager
def in_float32() -> Iterator[None]:
    """mergekit-moe runs the base in bfloat16, whatever it is stored in: here in float32, to compare all digits."""
    import torch

    half, torch.bfloat16 = torch.bfloat16, torch.float32
    try:
        yield
    finally:
        torch.bfloat16 = half


def main() -> None:
    # What libraries print must not mix with the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()
