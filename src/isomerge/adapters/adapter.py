"""An adapter folder, opened: which layers it changes, with which scale, and which tensors it replaces."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from isomerge.addresses import is_url
from isomerge.arguments import usable_path
from isomerge.checkpoint import Checkpoint, open_checkpoint, require_finite
from isomerge.checkpoint.base import failure, first_line, name_some
from isomerge.checkpoint.hub import looks_like_hub_id
from isomerge.checkpoint.local import SINGLE_OR_INDEX
from isomerge.errors import CheckpointError, RequestError
from isomerge.json_files import JsonError, faults, read_json
from isomerge.name_patterns import NamePattern

CONFIG = "adapter_config.json"
WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")  # in the order in which PEFT looks for them
PREFIX = "base_model.model."

FACTOR = re.compile(r"(?P<module>.+)\.lora_(?P<part>A|B)(\.default)?\.(?P<what>weight|bias)")
EMBEDDING = re.compile(r"(?P<module>.+)\.lora_embedding_(?P<part>A|B)(\.default)?")
MAGNITUDE = re.compile(r"(?P<module>.+)\.lora_magnitude_vector(\.default)?(\.weight)?")
WRAPPER = re.compile(r"\.(base_layer|modules_to_save(\.default)?)(?=\.[^.]+$|\.)")

Kind = Literal["linear", "embedding", "convolution"]


@dataclass(frozen=True)
class Target:
    """One adapted layer. Its update is scale · B A with A (rank, in) and B (out, rank)."""

    module: str
    """The layer's name in the model in memory, without PEFT's prefix."""
    kind: Kind
    a: str
    b: str
    """The names of the factors in the adapter's file."""
    rank: int
    scale: float
    inputs: tuple[int, ...]
    """(in,), or (in, height, width) for a convolution."""
    outputs: int
    magnitude: str | None = None
    """The lengths that DoRA gives the outputs."""
    bias: str | None = None
    """What is added to the layer's bias, before scaling."""


class Adapter:
    """A LoRA adapter: targets and replaced tensors by name, from headers only; factors when asked."""

    def __init__(self, checkpoint: Checkpoint, config: dict[str, Any]) -> None:
        self.name, self.checkpoint, self.config = checkpoint.name, checkpoint, config
        act = f"opening adapter {self.name}"
        problems = not_exact(config)
        if problems:
            raise failure(act, problems, "Use a plain LoRA adapter.")
        self.targets: dict[str, Target] = {}
        self.replaced: dict[str, str] = {}
        """Tensors stored whole (modules_to_save, trained biases): their name in the model, and in the file."""
        self._sort_tensors(problems)
        if problems:
            raise failure(act, problems, "Use an intact copy of the adapter.")

    def read(self, key: str) -> Tensor:
        """One tensor of the file, finite."""
        tensor = self.checkpoint.read(key)
        require_finite(key, tensor, self.checkpoint)
        return tensor

    def factors(self, target: Target) -> tuple[Tensor, Tensor]:
        """B (out, rank) and A (rank, in) in float32 at least, convolutions flattened."""
        b, a = self.read(target.b).flatten(1), self.read(target.a).flatten(1)
        return (b.double(), a.double()) if b.dtype.itemsize == 8 else (b.float(), a.float())

    def _sort_tensors(self, problems: list[str]) -> None:
        factors: dict[str, dict[str, str]] = {}
        unknown: list[str] = []
        for key in self.checkpoint.tensors:
            name = key.removeprefix(PREFIX)
            if match := FACTOR.fullmatch(name):
                part = match["part"] if match["what"] == "weight" else f"bias of {match['part']}"
                factors.setdefault(match["module"], {})[part] = key
            elif match := EMBEDDING.fullmatch(name):
                factors.setdefault(match["module"], {})["embedding " + match["part"]] = key
            elif match := MAGNITUDE.fullmatch(name):
                factors.setdefault(match["module"], {})["magnitude"] = key
            elif ".original_module." in name:
                continue  # the base's own tensor, which old versions of PEFT saved along
            elif "lora_" in name or "token_adapter" in name or "." not in name:
                unknown.append(key)
            else:
                self.replaced[WRAPPER.sub("", name)] = key
        if unknown:
            problems.append(f"isomerge knows no meaning for {name_some(unknown)}")
        for module, parts in factors.items():
            self._enter_target(module, parts, problems)
        if not factors and not self.replaced:
            problems.append("it holds no tensor of a LoRA adapter")

    def _enter_target(self, module: str, parts: dict[str, str], problems: list[str]) -> None:
        embedding = "embedding A" in parts or "embedding B" in parts
        a, b = (parts.get(f"embedding {side}" if embedding else side) for side in "AB")
        if a is None or b is None:
            problems.append(f"'{module}' has {'no A' if a is None else 'no B'} factor")
            return
        if "bias of A" in parts or ".base_layer" in module:
            problems.append(f"'{module}' is adapted in a way isomerge does not know")
            return
        shape_a, shape_b = self.checkpoint.tensors[a].shape, self.checkpoint.tensors[b].shape
        kind: Kind = "embedding" if embedding else "linear" if len(shape_a) == 2 else "convolution"
        flat_b = shape_b[:2] if all(n == 1 for n in shape_b[2:]) else shape_b
        if len(shape_a) < 2 or len(flat_b) != 2 or 0 in shape_a + flat_b or shape_a[0] != flat_b[1]:
            problems.append(
                f"'{module}' has factors A {shape_a} and B {shape_b}, which have no rank in common"
                + (" (a grouped convolution?)" if kind == "convolution" else "")
            )
            return
        rank = shape_a[0]
        promised = by_pattern(self.config.get("rank_pattern"), module, self.config["r"])
        if promised != rank:
            problems.append(f"'{module}' has rank {rank}, and {CONFIG} says {promised}, so its scale is unknown")
            return
        if self.config.get("use_dora") and "magnitude" not in parts:
            problems.append(f"'{module}' has no lora_magnitude_vector, though use_dora is set")
            return
        self.targets[module] = Target(
            module, kind, a, b, rank, scale_of(self.config, module, rank), shape_a[1:], shape_b[0],
            parts.get("magnitude"), parts.get("bias of B"),
        )  # fmt: skip


def is_adapter(path: str | os.PathLike[str]) -> bool:
    """Whether a folder holds an adapter and no model of its own."""
    folder = Path(path).expanduser()
    return (folder / CONFIG).is_file() and not any((folder / name).is_file() for name in SINGLE_OR_INDEX)


def open_adapter(source: str | os.PathLike[str] | Checkpoint | Adapter, *, revision: str | None = None) -> Adapter:
    """Open an adapter: a folder as PEFT writes it, its URL, a hub id `org/name`, or a checkpoint opened from either."""
    if isinstance(source, Adapter):
        return source
    if isinstance(source, Checkpoint):
        if "peft_type" in source.config:
            return Adapter(source, source.config)
        if source.folder is None:
            raise RequestError(
                f"While opening adapter {source.name}: it is in memory and brings no {CONFIG}. "
                "Open it with open_checkpoint(tensors, config=…), the config being that file's content."
            )
        return Adapter(source, _read_config(source.folder / CONFIG, source.name))
    text = os.fspath(source)
    if is_url(source):
        return open_adapter(open_checkpoint(source, revision=revision))
    folder = usable_path(source, "opening adapter")
    if folder.is_file() and folder.name in WEIGHTS:
        folder = folder.parent
    found_revision = None
    if not folder.exists() and isinstance(source, str) and looks_like_hub_id(text):
        folder = _fetch(text, revision)
        found_revision = folder.name
    config = _read_config(folder / CONFIG, text)
    weights = next((folder / name for name in WEIGHTS if (folder / name).is_file()), None)
    if weights is None:
        raise CheckpointError(
            f"While opening adapter {text}: the folder has no {' and no '.join(WEIGHTS)}. Copy or download it again."
        )
    checkpoint = open_checkpoint(weights, name=text)
    checkpoint.revision = found_revision
    return Adapter(checkpoint, config)


def _read_config(path: Path, name: str) -> dict[str, Any]:
    try:
        config = read_json(path)
    except FileNotFoundError:
        raise CheckpointError(
            f"While opening adapter {name}: there is no {CONFIG} in {path.parent}, without which the rank's scale is "
            "unknown. Name the folder that PEFT's save_pretrained wrote."
        ) from None
    except (OSError, JsonError) as error:
        raise CheckpointError(f"While opening adapter {name}: {CONFIG}: {error}. Copy or download it again.") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"While opening adapter {name}: {CONFIG} holds no object. Copy or download it again.")
    return config


def _fetch(repo: str, revision: str | None) -> Path:
    """The snapshot folder of a hub adapter, from the cache when offline. The files are small, so they come at once."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    act = f"opening hub adapter {repo}" + (f" at revision '{revision}'" if revision else "")
    try:
        folder = Path(hf_hub_download(repo, CONFIG, revision=revision)).parent
        try:
            hf_hub_download(repo, WEIGHTS[0], revision=folder.name)
        except EntryNotFoundError:  # also when offline and this file was never fetched
            hf_hub_download(repo, WEIGHTS[1], revision=folder.name)
    except Exception as error:  # network, permission and spelling come in many classes
        raise CheckpointError(
            f"While {act}: {first_line(error)}. Check the spelling and the network; offline, run `hf download {repo}` "
            "before."
        ) from error
    return folder


# Each of these makes the adapted layer something else than W + scale · B A, or W itself something else than the base.
NOT_EXACT = {
    "layer_replication": "it repeats layers of the base, so it has no place in the base's own tensors",
    "alora_invocation_tokens": "it acts on some tokens only, which no change of the weights can do",
    "use_qalora": "its factors belong to a quantised base",
    "use_bdlora": "its factors are block diagonal",
    "arrow_config": "it chooses between adapters for each token, which no change of the weights can do",
    "monteclora_config": "its factors are random",
    "kasa_config": "it changes the base's weights when it is loaded",
    "target_parameters": "it adapts stacked parameters and not layers",
    "trainable_token_indices": "it stores single rows of an embedding",
}
# Initialisations that subtract the first factors from the base. Others only choose where training starts.
CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")

BIAS = ("none", "lora_only", "all")
"""Which biases an adapter holds, from the fewest to the most."""


def not_exact(config: Mapping[str, Any]) -> list[str]:
    """Why this adapter is no plain low-rank update; empty when it is one."""
    kind = config.get("peft_type")
    if kind != "LORA":
        return [f"its peft_type is {kind!r}, and only LORA is a change of the weights that can be added and merged"]
    problems = [f"{key} is set: {why}" for key, why in NOT_EXACT.items() if config.get(key)]
    start = config.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(CHANGES_BASE):
        problems.append(
            f"init_lora_weights is '{start}', so it belongs to a changed base: save it again with peft's "
            "save_pretrained(…, path_initial_model_for_weight_conversion=…), which makes it a plain LoRA"
        )
    from isomerge.adapters.config_model import AdapterConfig  # pydantic, which plain merges do without

    return problems + faults(AdapterConfig, dict(config))


def scale_of(config: Mapping[str, Any], module: str, rank: int) -> float:
    """α / r, or α / √r for rank-stabilised LoRA.

    >>> scale_of({"lora_alpha": 16, "alpha_pattern": {"q_proj": 4}}, "layers.0.q_proj", 8)
    0.5
    """
    alpha = float(by_pattern(config.get("alpha_pattern"), module, config.get("lora_alpha", 8)))
    return alpha / math.sqrt(rank) if config.get("use_rslora") else alpha / rank


def by_pattern(patterns: Mapping[str, Any] | None, module: str, otherwise: Any) -> Any:
    """The value of the first pattern that the end of a module's name matches, as PEFT looks them up.

    >>> by_pattern({"layers.0.q_proj": 2, r"v_proj": 3}, "model.layers.0.q_proj", 8)
    2
    """
    for pattern, value in (patterns or {}).items():
        if compiled(pattern).fullmatch(module):
            return value
    return otherwise


@lru_cache(maxsize=1024)
def compiled(pattern: str) -> NamePattern:
    """One for all names, since its time is for all of them together."""
    return NamePattern(rf"(.*\.)?({pattern})")


def require_model(checkpoint: Checkpoint) -> None:
    """Raise if this is an adapter, before anything is said about what it lacks as a model."""
    if holds_adapter(checkpoint):
        raise RequestError(
            f"Opening {checkpoint.name}: it is an adapter and not a model; {into_its_base(checkpoint)}, and name OUT."
        )


def holds_adapter(checkpoint: Checkpoint) -> bool:
    """Whether it was opened from the folder of an adapter."""
    return checkpoint.folder is not None and is_adapter(checkpoint.folder)


def has_adapter_beside(checkpoint: Checkpoint) -> bool:
    """Whether an adapter lies beside a model's own weights: transformers loads both, and isomerge the weights alone."""
    folder = checkpoint.folder
    return folder is not None and (folder / CONFIG).is_file() and not is_adapter(folder)


def into_its_base(checkpoint: Checkpoint) -> str:
    """How a model is made of an adapter, as part of a sentence."""
    return f"merge it into its base first (isomerge merge BASE+{checkpoint.name} -o OUT)"
