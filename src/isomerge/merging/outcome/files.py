"""What is written beside the weights: tokenizer, lock, model card, record; and the name under which a run goes on."""

from __future__ import annotations

import contextlib
import hashlib
import json
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from isomerge import __version__, system
from isomerge.checkpoint import Checkpoint, TensorInfo
from isomerge.checkpoint.hashing import hash_file, hash_tensors
from isomerge.checkpoint.lock import Lock, LockedInput, current_versions, locked_input, locked_tensors
from isomerge.checkpoint.side_files import files_below
from isomerge.checkpoint.writer import CheckpointWriter, side_copies
from isomerge.merging.data_methods import ALL_METHODS
from isomerge.merging.recipe.document import public_yaml
from isomerge.merging.run.rows import BLOCK_ELEMENTS
from isomerge.merging.vocabulary import is_tokenizer_file, write_chat_template
from isomerge.merging.vocabulary.files import read_json, tokenizer_files
from isomerge.reporting.card import card_data, card_page
from isomerge.reporting.record import RECORD, record_text
from isomerge.running.stock import run_versions
from isomerge.threads import thread_count

if TYPE_CHECKING:
    from isomerge.merging.outcome.merged import Merged


def resume_key(
    merged: Merged, plan: Mapping[str, TensorInfo], copies: Mapping[str, Path], options: Mapping[str, Any]
) -> str | None:
    """Names exactly this work, by all that decides a byte of the result: what a killed run has finished may be kept if
    the name is the same. None where an input cannot be told from a changed one."""
    inputs = {reference: checkpoint.identity() for reference, checkpoint in merged.inputs.items()}
    if None in inputs.values():
        return None
    if not options["hashed"]:
        # Without hashes nothing tells what a power cut took from the disk's cache; a kill takes nothing.
        boot = system.boot()
        if boot is None:
            return None
        options = {**options, "boot": boot}
    work = {
        "versions": run_versions() if merged.data else current_versions(),
        "recipes": [recipe.to_yaml() for recipe in merged.recipes],
        "inputs": inputs,
        "config": merged.config,
        "side_files": {name: hash_file(path) for name, path in copies.items()},
        "plan": {name: [list(info.shape), str(info.dtype)] for name, info in plan.items()},
        "seed": merged.seed,
        "device": merged.device,
        "block": BLOCK_ELEMENTS,
        **_data_options(merged),
        **options,
    }
    return hashlib.sha256(json.dumps(work, sort_keys=True, default=str).encode()).hexdigest()


def _data_options(merged: Merged) -> dict[str, Any]:
    """The data that models were run on, and in how many threads: sums over activations are rounded in their order."""
    if not merged.data:
        return {}
    return {"data": [data.locked() for data in merged.data], "torch_threads": torch.get_num_threads()}


@contextlib.contextmanager
def side_files(merged: Merged, *, tokenizer: bool = True) -> Iterator[dict[str, Path]]:
    """Everything the result has beside the weights and config.json: the donor's, with the new tokenizer's instead of
    its own, and the chat template in its place. Without `tokenizer` the donor's is left out."""
    # The donor's card describes the donor.
    files = {name: path for name, path in side_copies(merged.donor).items() if name != "README.md"}
    if not tokenizer and merged.vocabulary is None:
        yield {name: path for name, path in files.items() if not is_tokenizer_file(name)}
        return
    if merged.vocabulary is None and merged.tensor_plans.tokens_of is not None:
        longest = merged.inputs.get(str(merged.tensor_plans.tokens_of), merged.donor)
        if theirs := tokenizer_files(longest):  # its tables have rows for tokens that the donor may lack
            files = {name: path for name, path in files.items() if not is_tokenizer_file(name)} | theirs
    if merged.vocabulary is None and merged.chat_template is None:
        yield files
        return
    with tempfile.TemporaryDirectory(prefix="isomerge-") as scratch:
        folder = Path(scratch)
        if merged.vocabulary is not None:
            files = {name: path for name, path in files.items() if not is_tokenizer_file(name)}
            merged.vocabulary.save(folder)
            _renumber_generation(merged, files, folder)
        elif merged.chat_template is not None:
            for name, path in files.items():
                if is_tokenizer_file(name):
                    (folder / name).parent.mkdir(parents=True, exist_ok=True)
                    (folder / name).write_bytes(path.read_bytes())
        if merged.chat_template is not None:
            write_chat_template(folder, merged.chat_template)
        made = {p.relative_to(folder).as_posix(): p for p in files_below(folder)}
        yield {**files, **made}


def _renumber_generation(merged: Merged, files: Mapping[str, Path], folder: Path) -> None:
    assert merged.vocabulary is not None
    changes = merged.vocabulary.generation_config_changes()
    if changes and "generation_config.json" in files:
        config = read_json(files["generation_config.json"])
        text = json.dumps({**config, **changes}, indent=2, ensure_ascii=False) + "\n"
        (folder / "generation_config.json").write_text(text, encoding="utf-8")


def lock_text(merged: Merged, writer: CheckpointWriter, options: Mapping[str, Any]) -> str:
    """The lock file: the hashes taken on the way, and those of input tensors that no pass read from end to end."""
    hashes = {name: digest for name, digest in writer.finished.items() if digest is not None}
    files = {name: writer.file_of(name) for name in hashes}
    lock = Lock(
        recipe=recipe_text(merged),
        documents=tuple(json.loads(recipe.model_dump_json(exclude_none=True)) for recipe in merged.recipes),
        inputs=tuple(entry for item in sorted(merged.inputs.items()) for entry in _locked(merged, *item)),
        tensors=locked_tensors(writer.plan, hashes, files),
        side_files=writer.side_hashes(),
        seed=merged.seed,
        versions=run_versions() if merged.data else current_versions(),
        options={"device": merged.device.partition(":")[0], "block_elements": BLOCK_ELEMENTS,
                 **_data_options(merged), **options},
    )  # fmt: skip
    return lock.to_json()


def _locked(merged: Merged, reference: str, checkpoint: Checkpoint) -> list[LockedInput]:
    """An input, and the adapter on top of it as another."""
    threads = thread_count(merged.threads)
    entries = []
    for part in checkpoint.parts():
        known = merged.hashes.of(part)
        missing = [name for name in part.tensors if name not in known]
        entries.append(locked_input(reference, part, {**known, **hash_tensors(part, missing, threads=threads)}))
    return entries


def recipe_text(merged: Merged) -> str:
    """All documents, written out."""
    return "---\n".join(recipe.to_yaml().rstrip("\n") + "\n" for recipe in merged.recipes)


def card_files(merged: Merged, writer: CheckpointWriter, sha256: str | None) -> dict[str, str]:
    """README.md, and mergekit_config.yml where mergekit could run the recipe."""
    record = {
        **_facts(merged),
        "name": writer.out.resolve().name,
        "inputs": [{**entry, "card": card_data(merged.inputs[entry["reference"]])} for entry in _inputs(merged)],
        "recipe": "---\n".join(public_yaml(one) for one in merged.recipes),
        "data": [data.record() for data in merged.data],
        "features": merged.details.get("features"),
        "steps": (merged.details.get("distilled") or merged.details.get("polished") or {}).get("steps"),
        "alignment": _alignment_facts(merged),
        "tables": merged.tensor_plans.tables,
        "sha256": sha256,
        "version": __version__,
    }
    files = {"README.md": card_page(record)}
    texts = [one.mergekit_yaml() for one in merged.recipes]
    on_disk = not any(checkpoint.in_memory for checkpoint in merged.inputs.values())
    if on_disk and all(text is not None for text in texts):
        files["mergekit_config.yml"] = "---\n".join(str(text).rstrip("\n") + "\n" for text in texts)
    return files


def record_files(merged: Merged, measured: Mapping[str, Any] | None, sha256: str | None) -> dict[str, str]:
    """isomerge.json, for `isomerge report`: what was merged, how, and how the models relate."""
    moment = (
        "seconds",
        "peak_memory_bytes",
        "peak_anonymous_bytes",
        "threads",
        "models",
        "aligned",
    )  # of this run, or told otherwise
    record = {
        **{key: value for key, value in merged.report().to_dict().items() if key not in moment},
        **_facts(merged),
        "kind": "merge",
        "inputs": _inputs(merged),
        "alignment": _alignment(merged),
        "strangers": merged.strangers,
        "recipe": "---\n".join(public_yaml(one) for one in merged.recipes),
        "measured": measured,
        "sha256": sha256,
    }
    return {RECORD: record_text(record)}


def _facts(merged: Merged) -> dict[str, Any]:
    method = ALL_METHODS[merged.recipe.merge_method]
    donor = next((name for name, c in merged.inputs.items() if c is merged.donor), merged.donor.name)
    return {"method": method.name, "summary": method.summary, "paper": method.reference, "donor": donor}


def _inputs(merged: Merged) -> list[dict[str, Any]]:
    base = str(merged.recipe.base_model) if merged.recipe.base_model else None
    return [
        {
            "reference": reference,
            "revision": checkpoint.revision,
            "role": "file" if reference in merged.files else "base" if reference == base else "model",
        }
        for reference, checkpoint in merged.inputs.items()
    ]


def _alignment(merged: Merged) -> dict[str, Any] | None:
    """With the names that the recipe has for the models."""
    if merged.alignment is None:
        return None
    names = {checkpoint.name: reference for reference, checkpoint in merged.inputs.items()}
    alignment = merged.alignment
    models = [{**model, "model": names.get(model["model"], model["model"])} for model in alignment["models"]]
    return {**alignment, "anchor": names.get(alignment["anchor"], alignment["anchor"]), "models": models}


def _alignment_facts(merged: Merged) -> dict[str, str] | None:
    if merged.alignment is None:
        return None
    return {"anchor": merged.alignment["anchor"]} | {m["model"]: m["verdict"] for m in merged.alignment["models"]}
