"""Compute the results of some parts and print them as JSON: `python -m recorded.compute methods align`.

`running.py` starts this in a process of its own, with an environment that leaves the processor little choice.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
import time
import warnings
from collections.abc import Iterable
from typing import Any

import torch

from recorded.fingerprint import fingerprint, machine


def part(name: str) -> Any:
    """(name, function) of every result of a part."""
    from recorded import part_align, part_data, part_files, part_methods, part_other

    return {
        "architectures": part_align.architectures,
        "variants": part_align.variants,
        "align": part_align.others,
        "methods": part_methods.results,
        "data": part_data.results,
        "more-data": part_data.others,
        "files": part_files.results,
        "other": part_other.results,
    }[name]()


def compute(parts: Iterable[str]) -> dict[str, Any]:
    torch.set_num_threads(1)
    results: dict[str, Any] = {}
    seconds: dict[str, float] = {}
    for group in parts:
        for name, function in part(group):
            full = f"{group}/{name}"
            assert full not in results, full
            start = time.process_time()
            torch.manual_seed(0)
            try:
                results[full] = fingerprint(function())
            except Exception as error:  # one result that fails must not hide the others
                results[full] = {"error": f"{type(error).__name__}: {error}"}
            seconds[full] = time.process_time() - start
    return {"machine": machine(), "results": results, "seconds": seconds}


if __name__ == "__main__":
    said = io.StringIO()
    with contextlib.redirect_stdout(said), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = compute(sys.argv[1:])
    json.dump(found, sys.stdout)
