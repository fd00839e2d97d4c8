"""Two configs are compared by what they mean: the truth is the stock class that is built from them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import isomerge
from isomerge.checkpoint.config_meaning import TELLING, rope_parameters, unequal
from models import difference, logits, model, read_config, variant

SCALING = {"rope_type": "linear", "factor": 4.0}
PLAIN = {"rope_type": "default"}
# Two ways to write rotary positions; the last word says whether the models compute the same.
PAIRS = {
    "v4 theta, v5 the same": ({"rope_theta": 5e5}, {"rope_parameters": {"rope_theta": 5e5, **PLAIN}}, True),
    "v4 theta, v5 another": ({"rope_theta": 5e5}, {"rope_parameters": {"rope_theta": 1e2, **PLAIN}}, False),
    "a theta, none": ({"rope_theta": 10000}, {}, True),
    "another theta, none": ({"rope_theta": 100}, {}, False),
    "v4 scaling, v5 the same": (
        {"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 4.0}},
        {"rope_parameters": {**SCALING, "rope_theta": 1e4}}, True),
    "v4 scaling, v5 none": (
        {"rope_theta": 1e4, "rope_scaling": SCALING}, {"rope_parameters": {"rope_theta": 1e4}}, False),
    "v4 both": ({"rope_theta": 1e4}, {"rope_theta": 1e4, "rope_scaling": SCALING}, False),
    "v5 both": (
        {"rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}},
        {"rope_parameters": {"rope_theta": 1e2, "rope_type": "default"}}, False),
}  # fmt: skip


def written(seed: int, name: str, rope: dict[str, Any], **like: Any) -> Path:
    """A Llama that writes its rotary positions this way and no other."""
    folder = variant(model("llama", seed, **like), {}, f"rope-{name}")
    config = {key: value for key, value in read_config(folder).items() if not key.startswith("rope_")}
    (folder / "config.json").write_text(json.dumps({**config, **rope}))
    return folder


@pytest.mark.parametrize("case", PAIRS)
def test_merge_check_and_align_tell_exactly_the_differences_that_there_are(case: str) -> None:
    first, second, same = PAIRS[case]
    a, b = written(0, f"{case} 1", first), written(1, f"{case} 2", second)
    # The same weights, with one config and with the other: nothing else can differ.
    with_other = written(0, f"{case} 3", second)
    assert (difference(logits(a), logits(with_other)) < 1e-9) is same
    told = {
        "merge": isomerge.merge([a, b]).notes,
        "check": isomerge.check(a, b).reasons,
        "align": isomerge.align(b, a).report().notes,
    }
    for verb, notes in told.items():
        assert any("rope_parameters is" in note for note in notes) is not same, (verb, notes)


def llava(**text: Any) -> dict[str, Any]:
    size = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 6}
    inner = {**size, "model_type": "llama", "vocab_size": 17, "max_position_embeddings": 19, **text}
    vision = {**size, "model_type": "clip_vision_model", "image_size": 4, "patch_size": 2}
    return {"model_type": "llava", "architectures": ["LlavaForConditionalGeneration"], "image_token_id": 16,
            "text_config": inner, "vision_config": vision}  # fmt: skip


def outputs(config: dict[str, Any]) -> torch.Tensor:
    kind = transformers.LlavaForConditionalGeneration
    torch.manual_seed(0)
    made = kind._from_config(kind.config_class.from_dict(json.loads(json.dumps(config))), dtype=torch.float64)
    made.set_attn_implementation("eager")
    with torch.no_grad():
        return made.eval()(input_ids=torch.arange(12)[None]).logits


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        ({"rope_theta": 5e5}, {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}, True),
        ({"rope_theta": 5e5}, {"rope_parameters": {"rope_theta": 1e2, "rope_type": "default"}}, False),
        ({"rope_theta": 5e5}, {"rope_theta": 1e2}, False),
        ({"rms_norm_eps": 1e-6}, {"rms_norm_eps": 1e-1}, False),
        ({"rms_norm_eps": 1e-6}, {}, True),
    ],
)
def test_a_difference_inside_text_config_is_found(first: dict[str, Any], second: dict[str, Any], same: bool) -> None:
    a, b = llava(**first), llava(**second)
    assert (difference(outputs(a), outputs(b)) < 1e-9) is same
    assert bool(unequal(a, b, TELLING, defaults=True)) is not same


def test_other_sizes_inside_text_config_are_refused() -> None:
    state = {"w": torch.zeros(4, 4)}
    narrow, wide = (isomerge.open_checkpoint(state, config=llava(num_attention_heads=n)) for n in (2, 4))
    with pytest.raises(isomerge.RequestError, match="num_attention_heads is 2 and 4"):
        isomerge.merge([narrow, wide])
    with pytest.raises(isomerge.RequestError, match="num_attention_heads"):
        isomerge.align(narrow, wide)
    assert isomerge.check(narrow, wide).verdict == "incompatible"


def test_a_text_config_of_its_own_and_one_beside_the_rest_mean_the_same() -> None:
    """Qwen2-VL wrote its language model's settings plainly before it had a text_config."""
    nested = {"model_type": "qwen2_vl", "text_config": {"rope_theta": 1e6, "rms_norm_eps": 1e-6}}
    flat = {"model_type": "qwen2_vl", "rope_theta": 1e6, "rms_norm_eps": 1e-6}
    assert unequal(nested, flat, TELLING) == []
    assert unequal(nested, {**flat, "rope_theta": 1e4}, TELLING) != []


@pytest.mark.parametrize("kind", ["LlamaConfig", "GPTNeoXConfig", "Gemma3TextConfig", "MixtralConfig", "PhiConfig"])
@pytest.mark.parametrize("theta", [1e4, 123.0])
def test_a_v4_config_means_what_transformers_makes_of_it(kind: str, theta: float) -> None:
    old = {"GPTNeoXConfig": {"rotary_emb_base": theta, "rotary_pct": 0.5}, "PhiConfig": {"partial_rotary_factor": 0.5},
           "Gemma3TextConfig": {"rope_local_base_freq": 77.0}}.get(kind, {})  # fmt: skip
    old = {**({} if kind == "GPTNeoXConfig" else {"rope_theta": theta}), **old}
    new = getattr(transformers, kind).from_dict(dict(old)).to_dict()
    assert rope_parameters(old) == rope_parameters(new) != {}
