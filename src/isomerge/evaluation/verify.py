"""`isomerge.verify`: is this folder a complete, working model, and the one that its lock file describes?

Every check passes, fails or could not be made, with one line that says why.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from isomerge.adapters.adapter import CONFIG, has_adapter_beside, holds_adapter, into_its_base
from isomerge.addresses import is_url, usable_url
from isomerge.arguments import require_shared_types, require_types
from isomerge.checkpoint import open_checkpoint
from isomerge.checkpoint.base import Checkpoint, Progress, name_some
from isomerge.checkpoint.checks import FLOATING
from isomerge.checkpoint.files import SpannedFile
from isomerge.checkpoint.formats.pipeline import ComponentFile
from isomerge.checkpoint.hashing import TENSOR_HASH, TENSOR_HASHES, hash_file, hash_tensors, raw_bytes, scan_tensors
from isomerge.checkpoint.journal import Journal
from isomerge.checkpoint.local import (
    ONE_COMPONENT,
    SINGLE_OR_INDEX,
    FileCheckpoint,
    broken_link,
    open_folder,
    read_index,
)
from isomerge.checkpoint.lock import DESCRIPTIONS, LOCK, Lock, LockedTensor, locked_tensors, read_lock
from isomerge.checkpoint.renaming import STALE
from isomerge.checkpoint.staging import SOLVED, is_unfinished, was_interrupted
from isomerge.choices import STAGING
from isomerge.errors import CheckpointError, RequestError
from isomerge.evaluation.stock_class_check import ClassCheck, check_stock_class, same_structure
from isomerge.evaluation.tokens import special_token_problems, tokenizer_problems, vocabulary_rows
from isomerge.json_files import read_json
from isomerge.progress_bars import Shown, callback, shows_progress
from isomerge.results import Result
from isomerge.threads import thread_count


@dataclass
class Check(Result):
    """One question about a folder, with the answer."""

    name: str
    passed: bool | None
    """None: it could not be checked, and `detail` says why."""
    detail: str


@dataclass
class Verification(Result):
    """Everything that was asked of a model folder."""

    folder: str
    verdict: str
    """good or bad"""
    checks: list[Check]
    problems: list[str]
    seconds: float


@shows_progress
def verify(
    folder: str | os.PathLike[str],
    *,
    deep: bool = True,
    same_structure_as: Checkpoint | None = None,
    threads: int | None = None,
    progress: Shown = None,
) -> Verification:
    """Check a model folder: is it complete, does its class load it, is it what its lock file describes?

    `deep` reads every weight, to see that it is finite and to hash it. `same_structure_as` is the model whose config
    and side files the folder got: a folder of the same structure fits the same class, so transformers is not asked, and
    what was already wrong with the tokens of that model is reported, but not counted as a failure.
    """
    progress = callback(progress)
    start = time.perf_counter()
    require_types(
        folder=(folder, str, os.PathLike), deep=(deep, bool), same_structure_as=(same_structure_as, Checkpoint, None)
    )
    require_shared_types(threads=threads, progress=progress)
    url = usable_url(folder, "verifying") if is_url(folder) else None
    folder = Path(folder).expanduser()
    if url is None and folder.is_file():
        if folder.suffix == ".gguf":
            raise RequestError(
                f"While verifying {folder}: it is a file of GGUF, and a model is a folder. Make one of it (isomerge "
                f"convert {folder} -o OUT), and name OUT."
            )
        open_checkpoint(folder)  # raises with the words of all verbs where it is no weight file that can be read
        raise RequestError(
            f"While verifying {folder}: it is a file, and a model is a folder. Name the folder that holds it, "
            f"{folder.absolute().parent}."
        )
    if url is None and not folder.is_dir():
        why = broken_link(folder) if folder.is_symlink() else "there is no such folder"
        raise RequestError(f"While verifying {folder}: {why}. Name the folder of a model.")
    checks = list(_checks(url or folder, deep, same_structure_as, thread_count(threads), progress))
    problems = [f"{check.name}: {check.detail}" for check in checks if check.passed is False]
    verdict = "bad" if problems else "good"
    return Verification(url or str(folder), verdict, checks, problems, time.perf_counter() - start)


def _checks(
    place: Path | str, deep: bool, donor: Checkpoint | None, threads: int, progress: Progress | None
) -> Iterator[Check]:
    yield _complete(place, writing=donor is not None)
    try:
        checkpoint = open_folder(place) if isinstance(place, Path) else _open_url(place)
    except CheckpointError as error:
        yield Check("opens", False, str(error))
        for name in ("index", "format", "structure", "ties", "special tokens", "tokenizer", "finite", "lock"):
            yield Check(name, None, "not checked: the weights do not open")
        return
    size = sum(info.nbytes for info in checkpoint.tensors.values())
    yield Check("opens", True, f"{len(checkpoint.tensors)} tensors, {size:,} bytes")
    folder = checkpoint.folder
    assert folder is not None
    yield _index(folder, checkpoint)
    yield _format(checkpoint)
    fit = _fit(checkpoint, donor)
    yield Check("structure", fit.fits, fit.detail)
    yield _ties(checkpoint, fit)
    yield from _token_checks(folder, checkpoint, donor)
    if not deep:
        yield Check("finite", None, "not checked: the weights were not read")
        yield Check("lock", None, "not checked: the weights were not read")
        return
    lock = _lock_in(folder)
    tensor_hash = lock.tensor_hash if isinstance(lock, Lock) else TENSOR_HASH
    broken, hashes = _read_weights(checkpoint, tensor_hash, threads, progress)
    yield Check("finite", not broken, f"NaN or infinity in {name_some(broken, 8)}" if broken else "every weight is")
    yield _locked(lock, locked_tensors(checkpoint.tensors, hashes), folder) if isinstance(lock, Lock) else lock


def _open_url(url: str) -> FileCheckpoint:
    """With everything that lies beside the weights in its local folder."""
    from isomerge.checkpoint.remote import open_url

    checkpoint = open_url(url)
    checkpoint.side_files()
    checkpoint.fetch([LOCK])
    return checkpoint


def _complete(folder: Path | str, *, writing: bool) -> Check:
    """Of a folder whose writer asks, which comes to its end after this, a journal is no leftover."""
    if isinstance(folder, str):
        return Check("complete", True, "no unfinished upload is left")  # or it does not open
    staged, unfinished = folder / STAGING, is_unfinished(folder)
    if unfinished and not writing:
        detail = f"the model is complete; {STAGING} is left, as the run that wrote it was stopped before its end"
        return Check("complete", True, f"{detail}: run that command again to end it, or delete that folder")
    known = Journal(staged).exists or (staged / SOLVED).is_dir()
    if known and not unfinished and not was_interrupted(folder):
        detail = f"the model is complete; {STAGING} is left of a write that was to replace it and was interrupted"
        return Check("complete", True, f"{detail}: run that command again, or delete that folder")
    if not unfinished and any(staged.glob("*")):
        return Check("complete", False, f"{STAGING} is left of a write that was interrupted; run that command again")
    return Check("complete", True, "no unfinished write is left in the folder")


def _index(folder: Path, checkpoint: FileCheckpoint) -> Check:
    """The reader forgives what an index forgot. Other loaders do not."""
    names = checkpoint.names()
    index = next((name for name in (*SINGLE_OR_INDEX, *ONE_COMPONENT) if name in names), "")
    weight_map = read_index(folder / index, []) if index.endswith(".index.json") else None
    shards = sorted(set(weight_map.values())) if weight_map is not None else [index]
    stray = [name for name in names if _is_weight_file(name) and name not in shards]
    problems = [f"{name_some(stray)} belongs to no index, so some loaders would mix two models"] if stray else []
    if weight_map is None:
        return Check("index", not problems, "; ".join(problems) or "one file, which needs none")
    forgotten = sorted(checkpoint.tensors.keys() - weight_map.keys())
    if forgotten:
        problems.append(f"{index} forgets {name_some(forgotten)}")
    metadata = read_json(folder / index).get("metadata")
    stated = metadata.get("total_size") if isinstance(metadata, dict) else None
    size = sum(info.nbytes for info in checkpoint.tensors.values())
    if stated != size:
        problems.append(f"{index} gives total_size {stated}, the tensors take {size}")
    return Check("index", not problems, "; ".join(problems) or f"{len(shards)} files, and {index} knows every tensor")


def _is_weight_file(name: str) -> bool:
    return STALE.fullmatch(name) is not None and name.endswith(".safetensors") and not name.startswith("adapter_")


def _format(checkpoint: FileCheckpoint) -> Check:
    """transformers refuses a safetensors file that does not say which library wrote it; it reads what MLX wrote."""
    files = [file for file in checkpoint.files() if isinstance(file, (SpannedFile, ComponentFile))]
    said = {file.label: file.metadata().get("format") for file in files}
    wrong = sorted(label for label, word in said.items() if word not in ("pt", "mlx"))
    words = " or ".join(f"'{word}'" for word in sorted({str(word) for word in said.values()})) or "'pt'"
    return Check("format", not wrong, f"no 'format: pt' in {name_some(wrong)}" if wrong else f"every file says {words}")


def _fit(checkpoint: Checkpoint, donor: Checkpoint | None) -> ClassCheck:
    if has_adapter_beside(checkpoint):
        risk = "transformers puts it on top of the model wherever peft is installed"
        step = f"move {CONFIG} and the adapter's weights to a folder of their own"
        return ClassCheck(False, f"an adapter lies beside the model ({CONFIG}): {risk}; {step}")
    if donor is not None and same_structure(checkpoint, donor):
        return ClassCheck(True, f"the same names, shapes and config as {donor.name}", _tied_tables(donor))
    if holds_adapter(checkpoint):
        step = f"to verify the model it makes, {into_its_base(checkpoint)}, and name OUT"
        return ClassCheck(None, f"not checked: this is an adapter and not a model; {step}")
    return check_stock_class(checkpoint)


def _tied_tables(donor: Checkpoint) -> tuple[tuple[str, str], ...]:
    """Without the class: tensors with a row per token that are equal in the donor, unless it says they are two."""
    rows = vocabulary_rows(donor.config)
    if donor.config.get("tie_word_embeddings") is False or rows is None:
        return ()
    tables = [name for name, info in donor.tensors.items() if len(info.shape) == 2 and info.shape[0] == rows]
    if len(tables) < 2:
        return ()
    hashes = hash_tensors(donor, tables, threads=1)
    return tuple((name, tables[0]) for name in tables[1:] if hashes[name] == hashes[tables[0]])


def _ties(checkpoint: Checkpoint, fit: ClassCheck) -> Check:
    if fit.fits is None:
        return Check("ties", None, "not checked: the stock class, which knows them, could not be asked")
    hashes = hash_tensors(checkpoint, sorted({name for pair in fit.ties for name in pair}), threads=1)
    torn = [f"'{a}' and '{b}'" for a, b in fit.ties if hashes[a] != hashes[b]]
    if torn:
        why = "config.json says they are one tensor, so loaders disagree about which one counts"
        return Check("ties", False, f"{', '.join(torn)} differ: {why}")
    stored = f"{len(fit.ties)} stored twice, with the same values" if fit.ties else "nothing is stored twice"
    return Check("ties", True, stored)


def _token_checks(folder: Path, checkpoint: Checkpoint, donor: Checkpoint | None) -> Iterator[Check]:
    for check in _tokens(folder, checkpoint):
        inherited = check.passed is False and donor and donor.folder and check in _tokens(donor.folder, donor)
        yield Check(check.name, True, f"as in {donor.name}: {check.detail}") if donor and inherited else check


def _tokens(folder: Path, checkpoint: Checkpoint) -> list[Check]:
    rows = vocabulary_rows(checkpoint.config)
    if rows is None:
        return [Check(name, None, "the model has no vocabulary") for name in ("special tokens", "tokenizer")]
    wrong = special_token_problems(folder, checkpoint.config, rows)
    detail = f"{'; '.join(wrong)}, and the embedding has {rows} rows" if wrong else f"all below {rows}"
    return [Check("special tokens", not wrong, detail), Check("tokenizer", *tokenizer_problems(folder, rows))]


def _read_weights(
    checkpoint: Checkpoint, tensor_hash: str, threads: int, progress: Progress | None
) -> tuple[list[str], dict[str, str]]:
    """The tensors that are not finite, and the hash of every one: each is read once."""
    broken: list[str] = []
    hashes: dict[str, str] = {}

    def look(name: str, blocks: Iterator[torch.Tensor]) -> None:
        digest = TENSOR_HASHES[tensor_hash]()
        finite = True
        for block in blocks:
            digest.update(raw_bytes(block))
            finite = finite and _finite(block)
        hashes[name] = digest.hexdigest()
        if not finite:
            broken.append(name)

    scan_tensors(checkpoint, None, look, threads=threads, progress=progress, what="verifying")
    return sorted(broken), hashes


def _finite(tensor: torch.Tensor) -> bool:
    """One pass over the values: smallest and largest are NaN if any value is, and infinite if any value is."""
    if tensor.dtype not in FLOATING or not tensor.numel():
        return True
    return all(math.isfinite(float(extreme)) for extreme in torch.aminmax(tensor))


def _lock_in(folder: Path) -> Lock | Check:
    """The lock of a folder, or the answer where nothing can be compared with it."""
    if not (folder / LOCK).exists():
        return Check("lock", None, f"there is no {LOCK} to compare with")
    try:
        return read_lock(folder)
    except CheckpointError as error:
        return Check("lock", False, str(error))


def _locked(lock: Lock, tensors: Mapping[str, LockedTensor], folder: Path) -> Check:
    problems = differences(lock, tensors, folder)
    return Check("lock", not problems, "; ".join(problems) or f"every tensor and file is as written ({lock.sha256})")


def differences(lock: Lock, tensors: Mapping[str, LockedTensor], folder: Path) -> list[str]:
    """How these tensors and the files of a folder differ from what the lock says was written."""
    both = lock.tensors.keys() & tensors.keys()
    written = {name: replace(lock.tensors[name], file=None) for name in both}  # the same in whichever file
    files = {name: digest for name, digest in lock.side_files.items() if name not in DESCRIPTIONS}
    gone = [name for name in files if not (folder / name).is_file()]
    names_by_problem = {
        "changed tensors": sorted(name for name in both if written[name] != tensors[name]),
        "missing tensors": sorted(lock.tensors.keys() - tensors.keys()),
        "extra tensors": sorted(tensors.keys() - lock.tensors.keys()),
        "changed files": sorted(n for n in files if n not in gone and hash_file(folder / n) != files[n]),
        "missing files": sorted(gone),
    }
    return [f"{what}: {name_some(names, 20)}" for what, names in names_by_problem.items() if names]
