"""Which architectures are aligned, and how far: every model type of the installed transformers, proven one by one.

    python docs/coverage.py            all types that docs/coverage.json does not have yet, then the page
    python docs/coverage.py --again    all types anew
    python docs/coverage.py llama vit  these types anew, then the page
    python docs/coverage.py --page     only the page, from the JSON

Each type runs in a process of its own with a limit of processor time, and its result is saved at once: a class that
crashes or hangs costs its own row and nothing else.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import resource
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from isomerge.architectures import FAMILIES, describe
from isomerge.architectures.inferring.infer import first_tiny, infer, scrambled_difference
from isomerge.architectures.inferring.proof import EXACT
from isomerge.errors import IsomergeError
from isomerge.evaluation.symmetry_proof import Unprovable
from isomerge.symmetry.architecture import RESIDUAL, Architecture
from isomerge.symmetry.groups import Group

os.environ.setdefault("HF_HUB_OFFLINE", "1")


HERE = Path(__file__).parent
RESULTS, PAGE = HERE / "coverage.json", HERE / "coverage.md"
LIMIT = 15  # seconds of processor time
SPACES = ("feed-forward", "heads", "queries and keys", "values and outputs", "residual stream")


PARTS = {
    "feed-forward": re.compile(r"(^|\.)(ffn|up|unit|expert)(\.|$)"),
    "heads": re.compile(r"(^|\.)(head|kv|query)(\.|$)"),
    "queries and keys": re.compile(r"(^|\.)(qk|rotary)(\.|$)"),
    "values and outputs": re.compile(r"(^|\.)vo(\.|$)"),
    "residual stream": re.compile(rf"^{RESIDUAL}$"),
}


def coverage_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """The row of one model type: what is proven on a tiny model made from this config."""
    try:
        sandbox = first_tiny(config)
    except Unprovable as error:
        return {"failed": str(error)}
    if config["model_type"] in FAMILIES:
        try:
            model = describe(sandbox.checkpoint)
        except IsomergeError as error:
            return {"failed": f"its file does not fit the tiny model: {str(error)[:120]}"}
        difference = scrambled_difference(sandbox, model.architecture, None)
        if difference <= 10 * EXACT:
            return {"by": "hand", "spaces": parts(model.architecture, True)}
    found = infer(sandbox)
    spaces = parts(found.architecture, found.attentions > 0)
    row = {"by": "inferred", "spaces": spaces}
    reasons = [note for note in found.notes if "identity" in note and "as a rotation" not in note] + [
        note for note in found.notes if "no known way" in note or "all spaces" in note or "shares a tensor" in note
    ]
    missing = [part for part, group in spaces.items() if group == "identity"]
    return row | ({"reason": "; ".join(_short(reasons, missing))} if missing else {})


def parts(architecture: Architecture, attention: bool) -> dict[str, str | None]:
    """For every part of a model the groups that move it; None for one it does not have."""
    row: dict[str, str | None] = {}
    for part, pattern in PARTS.items():
        spaces = {name: group for name, group in architecture.spaces.items() if pattern.search(name)}
        moved = sorted({_named(group) for group in spaces.values() if group.movable})
        absent = part in ("heads", "queries and keys", "values and outputs") and not attention and not spaces
        row[part] = ", ".join(moved) if moved else None if absent else "identity"
    return row


def _named(group: Group) -> str:
    """A group in a table: rotary ones with their layout."""
    layout, phase = getattr(group, "layout", ""), getattr(group, "phase", "")
    words = [group.name, *([layout] if layout else []), *(["signs"] if phase == "sign" else [])]
    return " ".join(words)


def _short(reasons: Iterable[str], missing: Iterable[str]) -> list[str]:
    kept = [re.sub(r"\b\d+\b", "N", reason)[:160] for reason in reasons]
    return list(dict.fromkeys(kept))[:3] or [f"{part}: nothing was found to propose" for part in missing]


def model_types() -> dict[str, str]:
    """Every model type with a class for one of the tasks, and that class."""
    from transformers.models.auto import modeling_auto as auto

    found: dict[str, str] = {}
    for names in (
        auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES, auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES, auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    ):  # fmt: skip
        for kind, name in names.items():
            found.setdefault(kind, name if isinstance(name, str) else name[0])
    return dict(sorted(found.items()))


def examined(kind: str, class_name: str) -> dict[str, Any]:
    """The row of one type."""
    import transformers

    stock = getattr(transformers, class_name)
    config = {**stock.config_class().to_dict(), "model_type": kind, "architectures": [class_name]}
    return coverage_of(config)


def warm_up() -> None:
    """What every child needs is imported before there are any."""
    import torch
    import transformers

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    small = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 44}
    config = transformers.LlamaConfig(**small, vocab_size=50).to_dict()
    coverage_of({**config, "architectures": ["LlamaForCausalLM"]})


def in_a_process(kind: str, class_name: str) -> dict[str, Any]:
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        resource.setrlimit(resource.RLIMIT_CPU, (LIMIT, LIMIT + 5))
        try:
            row = examined(kind, class_name)
        except BaseException as error:  # the row says so, and the others go on
            row = {"failed": f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"}
        with os.fdopen(write, "w") as file:
            json.dump(row, file)
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as file:
        text = file.read()
    os.waitpid(child, 0)
    return json.loads(text) if text else {"failed": f"stopped after {LIMIT} s of processor time, or crashed"}


def covered(row: dict[str, Any], *spaces: str) -> bool:
    """Every one of these spaces is proven, or is no part of the model."""
    return "spaces" in row and all(row["spaces"].get(space) not in (None, "identity") for space in spaces)


def counts(rows: dict[str, Any], waiting: Sequence[str] = ()) -> dict[str, int]:
    """The numbers of the page.

    Attention counts where heads, queries and keys, or values and outputs move; a type without attention has none to
    align.
    """
    attention = {k for k, r in rows.items() if any(covered(r, s) for s in SPACES[1:4])}
    units = {k for k, r in rows.items() if covered(r, SPACES[0])}
    return {
        "types": len(rows) + len(waiting),
        "measured": len(rows),
        "run": sum("spaces" in row for row in rows.values()),
        "by hand": sum(row.get("by") == "hand" for row in rows.values()),
        "inferred": sum(row.get("by") == "inferred" for row in rows.values()),
        "heads and feed-forwards": len(attention & units),
        "residual stream": sum(covered(row, SPACES[4]) for row in rows.values()),
    }


def page(rows: dict[str, Any], version: str, waiting: Sequence[str] = ()) -> str:
    number = counts(rows, waiting)
    share = {
        name: f"{count} | {100 * count / number['types']:.0f} % | {100 * count / max(1, number['measured']):.0f} %"
        for name, count in number.items()
    }
    lines = [
        "# Architectures covered",
        "",
        f"The installed transformers {version} has {number['types']} model types with a class for causal or masked "
        "language modelling, or for classifying sequences or images. This page says what isomerge can align in each.",
        "",
        "For every type a tiny model is made from its default configuration. A type with a file in "
        "`src/isomerge/architectures` is described by it (*hand*). For any other, every weight is nudged and the "
        "weights behind it are watched; that proposes the spaces (*inferred*). Every space is then proven: random "
        "elements of its group leave the outputs of the stock class unchanged to 1e-10 in float64, and a change to one "
        "tensor alone does not.",
        "",
        "| | types | of all | of those measured |",
        "|---|---|---|---|",
        f"| all | {number['types']} | 100 % | – |",
        f"| measured | {share['measured']} |",
        f"| a tiny model could be made, run and traced | {share['run']} |",
        f"| described by hand | {share['by hand']} |",
        f"| inferred | {share['inferred']} |",
        f"| **attention heads and feed-forwards align** | {share['heads and feed-forwards']} |",
        f"| **the residual stream aligns** | {share['residual stream']} |",
        "",
        "Attention counts where the order of the heads, queries and keys, or values and outputs can move in at "
        "least one layer. `–`: the traced model has no such part. `identity`: it has one, and nothing is "
        "proven of it, so it stays as it is. Types that could not be run, or are not measured yet, count as not "
        "aligned in the shares of all. To add a type that is not covered, see "
        "[Add an architecture](guides/add-an-architecture.md).",
        "",
        "Run `make coverage-page` to measure again: results are saved after every type, so an interrupted run goes on.",
        "",
        "| type | by | feed-forward | heads | queries and keys | values and outputs | residual stream |",
        "|---|---|---|---|---|---|---|",
    ]
    failed = []
    for kind, row in rows.items():
        if "spaces" not in row:
            failed.append((kind, row["failed"]))
            continue
        cells = [row["spaces"].get(space) or "–" for space in SPACES]
        lines.append(f"| {kind} | {row['by']} | " + " | ".join(cells) + " |")
    lines += ["", "## Not aligned: no tiny model could be made, run or traced", "", "| type | why |", "|---|---|"]
    lines += [f"| {kind} | {reason.replace('|', '/')} |" for kind, reason in failed]
    reasons = [(k, r["reason"]) for k, r in rows.items() if r.get("reason")]
    if waiting:
        lines += ["", "## Not measured yet", "", "Measuring all types takes hours on a busy machine. The types were "]
        lines[-1] += (
            "measured with limits of 15 to 60 seconds of the processor, some by earlier versions of the search, the "
            "first of them in the order of the alphabet: those measured are no fair sample. Still to do: "
            + ", ".join(waiting)
            + "."
        )
    lines += ["", "## Why a part stays as it is", "", "| type | what was found |", "|---|---|"]
    lines += [f"| {kind} | {reason.replace('|', '/')} |" for kind, reason in reasons]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("types", nargs="*", help="only these, anew")
    parser.add_argument("--again", action="store_true", help="all types anew")
    parser.add_argument("--page", action="store_true", help="write the page only")
    parser.add_argument("--results", type=Path, default=RESULTS, help="the JSON")
    chosen = parser.parse_args()
    import transformers

    known = json.loads(chosen.results.read_text())["types"] if chosen.results.is_file() else {}
    types = model_types()
    todo = [k for k in chosen.types or types if chosen.again or chosen.types or k not in known]
    random.Random(0).shuffle(todo)  # what an interrupted run has is no part of the alphabet
    if todo and not chosen.page:
        warm_up()
    for kind in [] if chosen.page else todo:
        known[kind] = in_a_process(kind, types[kind])
        print(kind, json.dumps(known[kind])[:200], flush=True)
        rows = {k: known[k] for k in types if k in known}
        chosen.results.write_text(
            json.dumps({"transformers": transformers.__version__, "types": rows}, indent=1) + "\n"
        )
    rows = {k: known[k] for k in types if k in known}
    waiting = [k for k in types if k not in known]
    kept = {"transformers": transformers.__version__, "waiting": waiting, "types": rows}
    chosen.results.write_text(json.dumps(kept, indent=1) + "\n")
    PAGE.write_text(page(rows, transformers.__version__, waiting))
    print(counts(rows, waiting))


if __name__ == "__main__":
    main()
