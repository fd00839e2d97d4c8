"""The pieces that infer symmetries: tiny configs, patterns of axes, kinds of norms, and no names of models."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

import isomerge
from isomerge.architectures.inferring.patterns import Role, describe_axis
from isomerge.architectures.inferring.stream import norm_kind
from isomerge.architectures.inferring.tiny import kept_layers, tiny_config

FOLDER = Path(isomerge.__file__).parent / "architectures"
# Model types that are words of their own.
WORDS = {"beam", "bit", "clip", "git", "mask", "vision"}


def test_no_model_type_stands_in_the_algorithm():
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    text = "\n".join(p.read_text(encoding="utf-8") for p in [FOLDER / "inferred.py", *FOLDER.glob("inferring/*.py")])
    words = set(re.findall(r"[a-z][a-z0-9_-]+", text.lower()))
    assert len(CONFIG_MAPPING_NAMES) > 200
    assert words & set(CONFIG_MAPPING_NAMES) <= WORDS


def test_a_tiny_config_keeps_a_layer_of_every_kind():
    config = {
        "num_hidden_layers": 8, "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8,
        "intermediate_size": 11008, "layer_types": ["near"] * 5 + ["far"] + ["near"] * 2, "eos_token_id": 128001,
        "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "rope": {"head_dim": 128},
    }  # fmt: skip
    assert kept_layers(config) == [0, 5]
    small = tiny_config(config)
    assert small["layer_types"] == ["near", "far"] and small["num_hidden_layers"] == 2
    assert small["hidden_size"] < 64 and small["num_attention_heads"] > small["num_key_value_heads"]
    assert small["eos_token_id"] < 67 and small["rope"]["head_dim"] == 8
    assert (small["rms_norm_eps"], small["tie_word_embeddings"]) == (1e-6, False)
    assert tiny_config(config, all_layers=True)["layer_types"] == config["layer_types"]


ROLES = {
    "q": Role((2, 3), "(head qk)", "qk", "head"),
    "k": Role((2, 3), "(head qk')", "qk'", "head"),
}


def rows(*roles):
    return [(r, (h, c)) for r in roles for h in range(2) for c in range(3)]


def test_fused_projections_are_told_apart():
    by_head = [(r, (h, c)) for h in range(2) for r in "qk" for c in range(3)]
    assert describe_axis(rows("q", "k"), ROLES, {}) == "[(head qk) | (head qk')]"
    assert describe_axis(by_head, ROLES, {}) == "(head [qk | qk'])"
    assert describe_axis([*rows("k"), None, None], ROLES, {2: "still2"}) == "[(head qk') | still2]"
    assert describe_axis(list(reversed(rows("q"))), ROLES, {}) is None


class OnePlus(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(0.3 * torch.randn(24, dtype=torch.float64))

    def forward(self, x):
        return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * (1 + self.weight)


class Times(OnePlus):
    def forward(self, x):
        return x * self.weight


def perturbed(module):
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    return module.double()


@pytest.mark.parametrize(
    ("module", "kind"),
    [(nn.LayerNorm(24), ("layer", 0.0)), (nn.RMSNorm(24, eps=1e-6), ("rms", 0.0)), (OnePlus(), ("rms", 1.0)),
     (Times(), None)],
)  # fmt: skip
def test_the_kind_of_a_norm_is_found_by_numbers(module, kind):
    torch.manual_seed(0)
    assert norm_kind(perturbed(module)) == kind
