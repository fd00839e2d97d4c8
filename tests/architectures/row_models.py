"""Build the models of the table, run them, and write moved tensors into them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from architectures.rows import ROWS, VOCABULARY, Row
from isomerge.architectures import FAMILIES, describe
from isomerge.checkpoint import TensorInfo, open_checkpoint, write_checkpoint
from isomerge.symmetry.binding import BoundModel
from isomerge.symmetry.canonical import Canonical
from isomerge.symmetry.transform import Transform
from models import off_special_values, scratch

STATES = ("past_key_values", "hidden_states", "attentions")
LANGUAGE_MODELS = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")


# --- stock models ----------------------------------------------------------------------------------------------------
def model_class(row: Row) -> Any:
    return getattr(transformers, row.model)


def make_config(row: Row) -> Any:
    return model_class(row).config_class(**row.config)


def implementations(row: Row) -> dict[str, str]:
    """The ones that compute in the dtype of the weights."""
    return {
        "attn_implementation": "sdpa" if model_class(row)._supports_sdpa else "eager",
        "experts_implementation": "eager",
    }


@cache
def build(row_id: str, seed: int = 0) -> Any:
    """A randomly initialised model in float64; gains, biases and weights all away from their special values."""
    row = ROWS[row_id]
    torch.manual_seed(seed)
    model = model_class(row)._from_config(make_config(row), dtype=torch.float64, **implementations(row)).eval()
    generator = torch.Generator().manual_seed(2000 + seed)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):  # of zeros, in any order
            buffer += 0.05 * torch.randn(buffer.shape, generator=generator, dtype=torch.float64)
    return off_special_values(model, seed)


@cache
def saved(row_id: str, seed: int = 0) -> Path:
    """The folder the stock class writes."""
    folder = scratch() / f"{row_id}-{seed}"
    if not folder.exists():  # the cache takes saved(x) and saved(x, 0) for two, and who has opened it would notice
        build(row_id, seed).save_pretrained(folder)
    return folder


@cache
def bound(row_id: str, seed: int = 0, untie: bool = False) -> BoundModel:
    return describe(open_checkpoint(saved(row_id, seed)), untie=untie)


def inputs(row: Row, seed: int = 0, batch: int = 3, length: int = 9) -> dict[str, Tensor]:
    """Random images, or sentences of which one is padded."""
    generator = torch.Generator().manual_seed(seed)
    config = make_config(row)
    if row.kind == "sound":
        shape = (batch, config.num_mel_bins, 2 * config.max_source_positions)
        features = {"input_features": torch.randn(shape, generator=generator, dtype=torch.float64)}
        words = torch.randint(3, VOCABULARY, (batch, length), generator=generator)
        return features | ({} if row.model.endswith("AudioClassification") else {"decoder_input_ids": words})
    if row.kind == "image":
        return {"pixel_values": images(config, batch, generator)}
    if row.kind == "image and text":
        return seen_and_read(config, generator, batch, length)
    shape = (batch, 2, length) if row.kind == "choice" else (batch, length)
    tokens = torch.randint(3, VOCABULARY, shape, generator=generator)
    mask = torch.ones_like(tokens)
    tokens[-1, ..., -2:], mask[-1, ..., -2:] = 0, 0
    if config.is_encoder_decoder:  # its sequence classifiers read the state at the one end-of-sequence token
        tokens[..., length // 2] = config.eos_token_id
    found = {"input_ids": tokens, "attention_mask": mask}
    if row.kind == "seq2seq":
        found["decoder_input_ids"] = torch.randint(3, VOCABULARY, (batch, length - 2), generator=generator)
    wanted = inspect.signature(model_class(row).forward).parameters
    if "token_type_ids" in wanted and getattr(config, "type_vocab_size", 0) > 1:
        found["token_type_ids"] = torch.randint(0, 2, shape, generator=generator)
    return found | ({"pixel_values": images(config, batch, generator)} if row.kind == "towers" else {})


def images(config: Any, batch: int, generator: torch.Generator) -> Tensor:
    seen = getattr(config, "vision_config", config)
    size = getattr(seen, "image_size", 16)
    return torch.randn(batch, seen.num_channels, size, size, generator=generator, dtype=torch.float64)


def seen_and_read(config: Any, generator: torch.Generator, batch: int, length: int) -> dict[str, Tensor]:
    """Sentences with an image in each: its tokens stand for what the projector makes of it."""
    size, token = config.vision_config.image_size, config.image_token_id
    tokens = torch.randint(3, token, (batch, length), generator=generator)
    tokens[:, 2 : 2 + IMAGE_TOKENS] = token
    pixels = torch.randn(batch, 3, size, size, generator=generator, dtype=torch.float64)
    found = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "pixel_values": pixels}
    if config.model_type == "gemma3":
        return {**found, "token_type_ids": (tokens == token).long()}
    return {**found, "image_sizes": torch.tensor([[size, size]] * batch)}


IMAGE_TOKENS = 4
"""Of the images in the rows of `image and text`."""


def outputs(model: Any, row: Row) -> dict[str, Tensor]:
    """Everything the model gives its user."""
    given = inputs(row)
    given = {name: value.to(model.dtype) if value.is_floating_point() else value for name, value in given.items()}
    with torch.no_grad():
        result = model(**given)
    skipped = [*STATES, "image_hidden_states", *([] if row.model.endswith("Model") else ["encoder_last_hidden_state"])]
    return {
        name: value
        for name, value in result.items()
        if isinstance(value, Tensor) and not any(name.endswith(s) and name != "last_hidden_state" for s in skipped)
    }


def difference(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> float:
    """The largest relative difference between two sets of outputs."""
    assert first.keys() == second.keys() and first
    return max(float((first[k] - second[k]).abs().max() / first[k].abs().max()) for k in first)


# --- cases -----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Case:
    """A row, with its output table as it is or untied."""

    row: Row
    untie: bool = False

    @property
    def id(self) -> str:
        return self.row.id + "-and-untied" * self.untie

    def bound(self, seed: int = 0) -> BoundModel:
        return bound(self.row.id, seed, self.untie)


@lru_cache(maxsize=1)
@cache
def cases() -> list[Case]:
    """Every row, and every tied language model a second time, untied."""
    found = []
    for row in ROWS.values():
        config = make_config(row)
        if config.model_type not in FAMILIES:
            continue
        found.append(Case(row))
        tied = row.model.endswith(LANGUAGE_MODELS) and config.tie_word_embeddings
        if tied and FAMILIES[config.model_type].can_untie:
            found.append(Case(row, untie=True))
    return found


@cache
def one_of_each_family() -> list[Case]:
    """The first row of every family, as it is and untied."""
    return list({(make_config(case.row).model_type, case.untie): case for case in reversed(cases())}.values())[::-1]


def every_case(*, untied: bool = True) -> Any:
    """Every case of the table; one of each family is quick, the others are slow."""
    import pytest  # what attacks the program makes models without it

    quick = {case.id for case in one_of_each_family()}
    chosen = [case for case in cases() if untied or not case.untie]
    marked = [pytest.param(case, id=case.id, marks=[] if case.id in quick else pytest.mark.slow) for case in chosen]
    return pytest.mark.parametrize("case", marked)


# --- moving a model --------------------------------------------------------------------------------------------------
Provider = Callable[[str], Tensor]


def moving(model: BoundModel, spaces: list[str] | None = None) -> Canonical:
    """The canonical form for some spaces, by default all that move."""
    return Canonical(model, model.architecture.movable() if spaces is None else spaces)


def moved(form: Canonical, transform: Transform) -> Provider:
    return cache(lambda name: transform.act(form.tensor(name), form.model.layouts[name]))


def state(model: BoundModel, provider: Provider) -> dict[str, Tensor]:
    """All tensors of a checkpoint by their names on disk."""
    found = {name: model.checkpoint.read(name) for name in model.extra}
    for name in model.layouts:
        found |= model.split(name, provider(name))
    return found


def load(case: Case, tensors: Mapping[str, Tensor], dtype: torch.dtype = torch.float64) -> Any:
    """The stock class with these tensors; every one of them must have been asked for."""
    config = make_config(case.row)
    if case.untie:
        config = type(config).from_dict({**config.to_dict(), **case.bound().architecture.untied_config})
    loaded, info = model_class(case.row).from_pretrained(
        None,
        config=config,
        state_dict=dict(tensors),
        dtype=dtype,
        output_loading_info=True,
        **implementations(case.row),
    )
    assert not any(info.values()), info
    return loaded.eval()


def load_folder(case: Case, folder: Path) -> Any:
    """The stock class from a folder, as a user loads it; no key may be missing, unexpected or of another shape."""
    loaded, info = model_class(case.row).from_pretrained(
        folder, dtype=torch.float64, output_loading_info=True, **implementations(case.row)
    )
    assert not any(info.values()), info
    return loaded.eval()


def write(case: Case, model: BoundModel, provider: Provider, folder: Path) -> Path:
    """The moved checkpoint as a folder, through isomerge's own writer."""
    tensors = state(model, provider)
    plan = {name: TensorInfo(tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
    changes = dict(model.architecture.untied_config)
    write_checkpoint(folder, plan, ((name, tensors[name]) for name in plan), config=changes, donor=model.checkpoint)
    return folder
