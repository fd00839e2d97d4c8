"""Adversarial configurations of every known architecture, in true float64.

Sizes, head counts, groups of queries, biases and ties are drawn from a seed, and so are weights that hide or break
things: gains of zero and below, dead and equal units, zero matrices, one layer, one head. Each model is moved by random
elements of its groups, and aligned to another; its stock class must compute the same. The control is an element of a
larger group: it must change the outputs, or the comparison would prove nothing.
"""

from __future__ import annotations

import math
import random
import shutil
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import isomerge
from architectures.row_models import difference, implementations, make_config, model_class, outputs
from architectures.rows import ROWS, Row
from isomerge.architectures import FAMILIES, describe
from isomerge.checkpoint import open_checkpoint
from isomerge.errors import IsomergeError, SpecificationError
from isomerge.symmetry.binding import BoundModel
from isomerge.symmetry.canonical import Canonical
from isomerge.symmetry.groups import Group, Invertible, Rotary, Rotation, SignedScale
from isomerge.symmetry.moved import MovedModel, scrambled
from isomerge.symmetry.transform import Transform, batch_sizes
from models import off_special_values
from precision import float64_throughout

EXACT = 1e-10
CHANGED = 1e-6
"""The least that an element of a larger group must change."""
HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
WIDTHS = ("hidden_size", "n_embd", "dim", "d_model")
INNER = ("intermediate_size", "n_inner", "hidden_dim", "ffn_dim", "d_ff")
DEPTHS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_decoder_layers")
SWITCHES = (
    "attention_bias",
    "mlp_bias",
    "qkv_bias",
    "enable_bias",
    "use_parallel_residual",
    "layer_norm_elementwise_affine",
)


@dataclass
class Found:
    """What was tried, and what did not hold."""

    counts: Counter[str] = field(default_factory=Counter)
    families: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    largest: float = 0.0
    smallest_control: float = float("inf")
    failures: list[dict[str, Any]] = field(default_factory=list)

    def record(self) -> dict[str, Any]:
        return {
            **self.counts, "families": dict(self.families), "refused": dict(self.refused),
            "largest_difference": self.largest, "smallest_control": self.smallest_control, "failures": self.failures,
        }  # fmt: skip


def run(minutes: float, seed: int) -> dict[str, Any]:
    """Draw configurations until the time is over; the record counts them and lists what failed."""
    torch.set_num_threads(1)
    found, end, number = Found(), time.monotonic() + 60 * minutes, 0
    while number == 0 or time.monotonic() < end:
        attack(seed * 1_000_000 + number, found)
        number += 1
    return found.record()


def attack(seed: int, found: Found) -> None:
    """One configuration: moved, aligned, and moved wrongly."""
    chance = random.Random(seed)
    row = draw(chance)
    folder = Path(tempfile.mkdtemp(prefix="isomerge-architecture-"))
    level = chance.choice(["permutation", "rotation", "full", "full"])
    try:
        models = [_built(row, seed, k) for k in (0, 1)]
        models[0].save_pretrained(folder / "first")
        _loaded(row, folder / "first")
    except Exception:  # sizes that transformers itself cannot build, or cannot load from its own files
        found.counts["not built by transformers"] += 1
        shutil.rmtree(folder)
        return
    try:
        harm = damage(models[0], chance) + (damage(models[1], chance) if chance.random() < 0.5 else [])
        clean = _built(row, seed, 2)
        for name, model in (("source", models[0]), ("anchor", models[1]), ("clean", clean)):
            model.save_pretrained(folder / name)
        _compare(row, folder, level, found, {"seed": seed, "row": row.id, "config": dict(row.config), "harm": harm})
    except Exception:  # whatever is raised here is what is looked for
        text = traceback.format_exc(limit=-6)
        found.failures.append({"seed": seed, "row": row.id, "config": dict(row.config), "raised": text})
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    found.counts["configurations"] += 1
    found.families[make_config(row).model_type] += 1


def _compare(row: Row, folder: Path, level: str, found: Found, about: dict[str, Any]) -> None:
    with float64_throughout():
        before = outputs(_loaded(row, folder / "source"), row)

    def hold(what: str, made: Callable[[], Path]) -> None:
        try:
            after = made()
        except IsomergeError as error:
            found.refused[f"{what}: {type(error).__name__}: {str(error).partition(': ')[2][:60]}"] += 1
            return
        with float64_throughout():
            apart = difference_or_zero(before, outputs(_loaded(row, after), row))
        found.counts[what] += 1
        found.largest = max(found.largest, apart)
        if not apart <= EXACT:
            found.failures.append({**about, "what": what, "level": level, "difference": apart})

    def moved() -> Path:
        bound = describe(open_checkpoint(folder / "source"))
        return _written(row, scrambled(bound, about["seed"]), folder / "moved")

    def aligned() -> Path:
        alignment = isomerge.align(folder / "source", folder / "anchor", level=level)
        return alignment.save(folder / "aligned", verify=False, report=False).out

    hold("moved", moved)
    hold("aligned", aligned)
    _control(row, folder / "clean", found, about)


# --- drawing ----------------------------------------------------------------------------------------------------------
def draw(chance: random.Random) -> Row:
    """A row of the table of architectures with other sizes and switches."""
    flat = [row for row in ROWS.values() if row.kind != "image and text"]  # sizes of two models, one inside the other
    known = [row for row in flat if make_config(row).model_type in FAMILIES]
    family = chance.choice(sorted({make_config(row).model_type for row in known}))
    row = chance.choice([row for row in known if make_config(row).model_type == family])
    config = dict(row.config)
    heads, inner = chance.choice([1, 1, 2, 3, 4, 5]), chance.choice([2, 4, 4, 6, 8, 12])
    depth = chance.choice([1, 1, 2, 3])
    values: dict[str, Any] = dict.fromkeys(HEADS, heads) | dict.fromkeys(WIDTHS, heads * inner)
    values |= {key: chance.choice([1, 2, 3, 5, 7, 16, 17]) for key in INNER} | dict.fromkeys(DEPTHS, depth)
    values["num_key_value_heads"] = chance.choice([k for k in range(1, heads + 1) if heads % k == 0])
    values |= {"head_dim": chance.choice([2, 4, 6, 10]), "d_kv": chance.choice([1, 2, 3, 5, 8])}
    values |= {"num_local_experts": chance.choice([1, 2, 3, 5]), "sliding_window": chance.choice([2, 4, 64])}
    values |= {"word_embed_proj_dim": chance.choice([1, 3, heads * inner]), "embedding_size": chance.choice([1, 3, 13])}
    values |= {"position_buckets": chance.choice([2, 4, 8]), "num_labels": chance.choice([1, 2, 5])}
    config |= {key: value for key, value in values.items() if key in config}
    if "tie_word_embeddings" in config:
        config["tie_word_embeddings"] = chance.random() < 0.5
    config |= {key: chance.random() < 0.5 for key in SWITCHES if key in config}
    if "num_local_experts" in config:
        config["num_experts_per_tok"] = chance.randint(1, config["num_local_experts"])
    table = config.get("rope_parameters")
    if isinstance(table, dict) and "partial_rotary_factor" in table:
        config["rope_parameters"] = {**table, "partial_rotary_factor": chance.choice([0.25, 0.5, 0.75, 1.0])}
    return replace(row, config=config)


def damage(model: Any, chance: random.Random) -> list[str]:
    """Weights that hide or break things, in place; in words."""
    done = []
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if chance.random() > 0.25:
                continue
            kind = chance.choice(["zero", "negative", "dead", "equal", "large", "small", "some zero", "half dead"])
            _harm(parameter, kind, chance)
            done.append(f"{kind} {name}")
    return done


def _harm(parameter: Tensor, kind: str, chance: random.Random) -> None:
    row, other = (chance.randrange(parameter.shape[0]) for _ in range(2)) if parameter.ndim else (0, 0)
    if kind == "zero":
        parameter.zero_()
    elif kind == "negative":
        parameter.neg_()
    elif kind == "dead":
        parameter[row] = 0
    elif kind == "equal":
        parameter[row] = parameter[other]
    elif kind == "half dead":
        parameter[: parameter.shape[0] // 2] = 0
    elif kind == "some zero":
        parameter[parameter.abs() < parameter.abs().median()] = 0
    else:
        parameter.mul_(30.0 if kind == "large" else 1 / 30)


# --- a larger group ---------------------------------------------------------------------------------------------------
def larger(group: Group) -> Group | None:
    """A group that contains this one and more; None where there is none that changes something."""
    if group.size == 1 or not group.movable:
        return None
    if group.element == "order":
        return Rotation(group.size, group.per)
    if isinstance(group, Rotary):
        freed = replace(group, phase="any", scale=True)
        return Invertible(group.size, group.per) if freed == group else freed
    if group.fixes_ones:
        return Rotation(group.size, group.per)
    if group.rotates:
        return Invertible(group.size, group.per)
    return SignedScale(group.size, group.per) if group.name == "scale" else None


def _control(row: Row, folder: Path, found: Found, about: dict[str, Any]) -> None:
    bound = describe(open_checkpoint(folder))
    spaces = {s: wide for s, g in bound.architecture.spaces.items() if (wide := larger(g)) is not None}
    width = next((row.config[key] for key in WIDTHS if key in row.config), 4)
    if not spaces or width < 4:  # a LayerNorm of two units gives two signs, whatever comes in
        return
    space = random.Random(about["seed"]).choice(sorted(spaces))
    wrong = _wrongly_moved(bound, space, spaces[space], about["seed"])
    found.counts["controls"] += 1
    try:
        written = _written(row, wrong, folder / "wrong")
    except SpecificationError:  # a norm's gain refuses to be rotated
        return
    with float64_throughout():
        apart = difference_or_zero(outputs(_loaded(row, folder), row), outputs(_loaded(row, written), row))
    found.smallest_control = min(found.smallest_control, apart)
    if apart < CHANGED:
        found.failures.append(
            {**about, "what": f"{spaces[space].name} of {space} changes nothing", "difference": apart}
        )


def _wrongly_moved(bound: BoundModel, space: str, group: Group, seed: int) -> MovedModel:
    spaces = {**bound.architecture.spaces, space: group}
    element = group.random(batch_sizes(spaces, space), torch.Generator().manual_seed(seed))
    transform = Transform(spaces, {space: element})
    return MovedModel(bound, transform, Canonical(bound, transform.elements), None)


# --- stock models -----------------------------------------------------------------------------------------------------
def _built(row: Row, seed: int, number: int) -> Any:
    torch.manual_seed(seed + number)
    made = model_class(row)._from_config(make_config(row), dtype=torch.float64, **implementations(row)).eval()
    off_special_values(made, seed + number)
    with float64_throughout():
        outputs(made, row)
    return made


def _loaded(row: Row, folder: Path) -> Any:
    loaded, info = model_class(row).from_pretrained(
        folder, dtype=torch.float64, output_loading_info=True, **implementations(row)
    )
    assert not any(info.values()), info
    return loaded.eval()


def _written(row: Row, moved: MovedModel, folder: Path) -> Path:
    """By safetensors itself, under the source's config.json."""
    from safetensors.torch import save_file

    folder.mkdir()
    shutil.copy(moved.model.checkpoint.folder / "config.json", folder)
    tensors = {name: tensor.contiguous() for name, tensor in moved.state_dict().items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def difference_or_zero(first: dict[str, Tensor], second: dict[str, Tensor]) -> float:
    """`difference`, for outputs that may be zero throughout (a head of zeros), or no numbers where damaged weights make
    none (a vector of zeros that is brought to length one); NaN where only one of the two has no number."""
    lost = {name: tensor.isnan() for name, tensor in first.items()}
    if any(not torch.equal(mask, second[name].isnan()) for name, mask in lost.items()):
        return math.nan
    first, second = ({n: made[n].masked_fill(mask, 0) for n, mask in lost.items()} for made in (first, second))
    alive = [name for name in first if bool(first[name].any())]
    apart = [float(second[name].abs().max()) for name in first if name not in alive]
    apart += [difference({n: first[n] for n in alive}, {n: second[n] for n in alive})] if alive else []
    # max() of numbers drops a NaN that does not come first.
    return math.nan if any(math.isnan(one) for one in apart) else max(apart, default=0.0)
