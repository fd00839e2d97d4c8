"""The model card of a merged model: README.md, with the metadata that the hub reads at its top."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from isomerge.checkpoint.base import Checkpoint
from isomerge.checkpoint.hub import looks_like_hub_id
from isomerge.json_files import read_text
from isomerge.reporting.method_sections import features_words
from isomerge.reporting.record import TEXT, Record
from isomerge.text import code, inert, visible
from isomerge.yaml_files import load

LICENCE_KEYS = ("license", "license_name", "license_link")


def card_page(record: Record) -> str:
    """The whole text of README.md.

    The record has `inputs`, a list of tables with `reference`, `revision` (the commit of a hub model, else None),
    `role` ("model", "base", "adapter", …) and `card` (what `card_data` read); `donor`, the reference whose config was
    taken; `name`; `method`, `summary`, `paper`; `features`, which units follow which model, of methods that choose;
    `recipe`; `alignment` (a table of facts, or None); `data`, a list of tables with `name`, `sha256`, `size`, `kind`
    and `examples` where models were run on data; `tables`, sentences on tables of different length; `sha256`;
    `version`.
    """
    notes = [inert(note) for note in record.get("tables", ())]
    metadata = card_metadata(record, notes)
    return f"---\n{metadata.to_yaml()}\n---\n\n{card_text(record, notes)}"


def card_data(checkpoint: Checkpoint) -> dict[str, Any]:
    """The metadata of an input's own card: {} where it has none, or where it cannot be had."""
    path = checkpoint.folder / "README.md" if checkpoint.folder and not checkpoint.in_memory else None
    try:
        if path is not None and not path.is_file() and checkpoint.revision and looks_like_hub_id(checkpoint.name):
            from huggingface_hub import hf_hub_download

            path = Path(hf_hub_download(checkpoint.name, "README.md", revision=checkpoint.revision))
        text = read_text(path) if path is not None and path.is_file() else ""
        if not text.startswith("---"):
            return {}
        load(text.split("---", 2)[1])  # bounded, before others read it
        from huggingface_hub import ModelCard  # its HTTP client is a tenth of what a merge imports

        data: Any = ModelCard(text, ignore_metadata_errors=True).data
        return dict(data.to_dict())
    except Exception:  # no network, no such file, front matter that is no YAML: a merge does not fail for a card
        return {}


def card_metadata(record: Record, notes: list[str]) -> Any:
    """huggingface_hub's ModelCardData; what has to be said about it in words is added to `notes`."""
    from huggingface_hub import ModelCardData

    inputs: Sequence[Record] = [entry for entry in record["inputs"] if entry.get("role") != "file"]
    cards: list[Record] = [entry.get("card") or {} for entry in inputs]
    donor = next((card for entry, card in zip(inputs, cards, strict=True) if entry["reference"] == record["donor"]), {})
    bases = hub_ids(inputs)
    return ModelCardData(
        base_model=bases or None,
        base_model_relation="merge" if bases else None,
        library_name="transformers",
        pipeline_tag=donor.get("pipeline_tag"),
        tags=["merge", "isomerge"],
        language=_union(card.get("language") for card in cards) or None,
        datasets=_union(card.get("datasets") for card in cards) or None,
        **licence(inputs, notes),
    )


def hub_ids(inputs: Iterable[Record]) -> list[str]:
    """The inputs that are on the hub. A folder is not, even where its path looks like an id.

    >>> hub_ids([{"reference": "org/a", "revision": "0" * 40}, {"reference": "runs/b", "revision": None}])
    ['org/a']
    """
    named = [str(entry["reference"]).partition("+")[0] for entry in inputs if entry.get("revision")]
    names = [name.partition("@")[0] for name in named]
    return [name for name in dict.fromkeys(names) if looks_like_hub_id(name)]


def licence(inputs: Sequence[Record], notes: list[str]) -> dict[str, Any]:
    """The licence that all inputs state. Where they differ it is "other"; where one states none, nobody can say.

    >>> licence([{"reference": "a", "card": {"license": "mit"}}, {"reference": "b", "card": {"license": "mit"}}], [])
    {'license': 'mit'}
    """
    stated = {e["reference"]: (e.get("card") or {}).get("license") for e in inputs}
    values = {tuple(value) if isinstance(value, list) else value for value in stated.values()}
    if values == {None} or not values:
        return {}
    listing = ", ".join(f"{code(name)}: {inert(str(value or 'not stated'))}" for name, value in sorted(stated.items()))
    if None in values:
        notes.append(f"Not every input states its licence, so none is stated here ({listing}).")
        return {}
    if len(values) > 1:
        notes.append(f"The inputs have different licences ({listing}); all of them have to be kept.")
        return {"license": "other"}
    first = inputs[0]["card"]
    agreed = {key: first[key] for key in LICENCE_KEYS if first.get(key)}
    return {key: value for key, value in agreed.items() if all(e["card"].get(key) == value for e in inputs)}


def card_text(record: Record, notes: Sequence[str]) -> str:
    """The page under the metadata."""
    models = sum(entry.get("role") != "file" for entry in record["inputs"])
    rows = [f"| {_cell(code(e['reference']))} | {e.get('role') or 'model'} | {_commit(e)} |" for e in record["inputs"]]
    method = f"**{record['method']}**: {record['summary'].rstrip('.')}."
    if record.get("paper"):
        method += f" Reference: {record['paper']}."
    if record.get("features"):
        method += f"\n\n{features_words(record['features'])}"
    trained = f"by {steps} gradient steps without labels" if (steps := record.get("steps")) else "without training"
    parts = [
        f"# {inert(record['name'])}",
        f"Made from {models} models with isomerge {record['version']}, {trained}.",
        "\n".join(["## Inputs", "", "| model | role | commit |", "|---|---|---|", *rows]),
        f"Config and side files come from {code(record['donor'])}.",
        f"## Method\n\n{method}",
        f"## Recipe\n\n{_fenced(visible(record['recipe']), 'yaml')}",
    ]
    if record.get("alignment"):
        facts = [f"| {inert(str(key))} | {inert(str(value))} |" for key, value in record["alignment"].items()]
        parts.append("\n".join(["## Alignment", "", "| | |", "|---|---|", *facts]))
    if record.get("data"):
        sets = [f"| {inert(str(d['name']))} | {_used(d)} | `{d['sha256']}` |" for d in record["data"]]
        parts.append("\n".join(["## Data", "", "| data | examples used | sha256 |", "|---|---|---|", *sets]))
    # Whoever copies a command does not read it: the folder's name must not become more than a name.
    name = shlex.quote(visible(record["name"], keep=""))
    version = record["version"]
    parts += [
        f'## Reproduce\n\nWith isomerge {version} (`pip install "isomerge=={version}"` where a package index has it, '
        f"else `pip install .` in its source of that version):\n\n{_fenced(f'isomerge reproduce {name}', 'bash')}",
        f"The weights have sha256 `{record['sha256']}` ({code('isomerge verify ' + name)} checks it).",
    ]
    if notes:
        parts.append("\n".join(["## Notes", "", *(f"- {note}" for note in notes)]))
    return "\n\n".join(parts) + "\n"


def adapter_card(name: str, base: str, record: Record | None) -> str:
    """README.md of an adapter: what it belongs to and, where it was merged, from which adapters and how."""
    from huggingface_hub import ModelCardData

    known = base if looks_like_hub_id(base) and not Path(base).exists() else None
    metadata = ModelCardData(
        base_model=known,
        base_model_relation="adapter" if known else None,
        library_name="peft",
        tags=["lora", "isomerge"] + (["merge"] if record else []),
    )
    parts = [f"# {inert(name)}", f"A LoRA adapter of {code(base) if base else 'a base that it does not name'}."]
    if record is not None:
        rows = [f"| {_cell(code(str(e['reference'])))} | {_commit(e)} |" for e in record.get("inputs") or ()]
        lost = f"{float(record.get('relative_error') or 0):.2%}"
        way = f"with isomerge {record['isomerge']}, by **{inert(str(record['method']))}** on their updates ΔW"
        parts += [
            f"Made from {len(rows)} adapters {way}. To keep the rank, {lost} of the merged update was cut off.",
            "\n".join(["## Inputs", "", "| adapter | commit |", "|---|---|", *rows]),
        ]
    return f"---\n{metadata.to_yaml()}\n---\n\n" + "\n\n".join(parts) + "\n"


def _commit(entry: Record) -> str:
    return code(str(entry["revision"])) if entry.get("revision") else "local"


def _used(data: Record) -> str:
    return f"text of {data['size']} lines" if data.get("kind") == TEXT else str(data["examples"])


def _cell(value: Any) -> str:
    """Text that stays in its cell of a table, also in letters of one width."""
    return str(value).replace("|", "\\|")


def _fenced(text: str, language: str) -> str:
    """A code block that nothing inside the text can close."""
    fence = "```"
    while fence in text:
        fence += "`"
    return f"{fence}{language}\n{text.rstrip()}\n{fence}"


def _union(values: Iterable[Any]) -> list[str]:
    items = [item for value in values for item in (value if isinstance(value, list) else [value])]
    return list(dict.fromkeys(str(item) for item in items if item))
