"""Architectures without a specification: what is proven is exact, the rest stays, and the notes say which and why."""

import sys

import pytest
import torch
import transformers

import isomerge
from architectures.row_models import difference
from isomerge.architectures import FAMILIES, describe, inferred
from isomerge.architectures.inferring import sandbox
from isomerge.architectures.inferring.transfer import Untransferable, transfer
from isomerge.checkpoint import open_checkpoint
from isomerge.symmetry.architecture import Architecture
from isomerge.symmetry.canonical import Canonical
from isomerge.symmetry.groups import (
    Invertible,
    Permutation,
    Rotary,
    Rotation,
    RotationFixingOnes,
    Scale,
    SignedPermutation,
    SignedScale,
    Trivial,
)
from isomerge.symmetry.moved import MovedModel, scrambled
from isomerge.symmetry.transform import random_transform
from precision import float64_throughout

TEXT = {"vocab_size": 37, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 11,
        "max_position_embeddings": 23, "pad_token_id": 0}  # fmt: skip
SHORT = {"vocab_size": 37, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
UNTIED = {"tie_word_embeddings": False}
# What is proven for each, by space; a space of these parts that is not named here is refused.
MODELS = {
    "electra": ("ElectraForTokenClassification", {**TEXT, "embedding_size": 16}, {
        "ffn": Permutation, "head": Permutation, "qk": Invertible, "vo": Invertible, "residual": Permutation}),
    "phi-partial-rotary": ("PhiForCausalLM", {**TEXT, **UNTIED, "partial_rotary_factor": 0.5}, {
        "ffn": Permutation, "head": Permutation, "rotary": Rotary, "qk": Invertible, "vo": Invertible,
        "residual": RotationFixingOnes}),
    "phi3-fused": ("Phi3ForCausalLM", {**TEXT, **UNTIED, "num_key_value_heads": 2}, {
        "ffn": Permutation, "up": SignedScale, "kv": Permutation, "query": Permutation, "qk": Rotary,
        "vo": Invertible, "residual": Rotation}),
    "falcon-fused-by-group": ("FalconForCausalLM", {
        **SHORT, "ffn_hidden_size": 11, "new_decoder_architecture": True, "num_kv_heads": 2}, {
        "ffn": Permutation, "kv": Permutation, "query": Permutation, "qk": Rotary, "vo": Invertible,
        "residual": Permutation}),
    # ALiBi gives every head a slope of its own, so the order of the heads is refused.
    "bloom": ("BloomForCausalLM", {"vocab_size": 37, "hidden_size": 16, "n_layer": 2, "n_head": 4}, {
        "ffn": Permutation, "qk": Invertible, "vo": Invertible, "residual": Permutation}),
    "post-branch-norms": ("Gemma2ForCausalLM", {**TEXT, "num_key_value_heads": 2, "head_dim": 4}, {
        "ffn": Permutation, "up": SignedScale, "kv": Permutation, "query": Permutation, "qk": Rotary,
        "vo": Invertible, "residual": SignedPermutation}),
    "experts": ("MixtralForCausalLM", {**TEXT, **UNTIED, "num_key_value_heads": 2, "num_local_experts": 4}, {
        "ffn": Permutation, "up": SignedScale, "kv": Permutation, "query": Permutation, "qk": Rotary,
        "vo": Invertible, "residual": Rotation}),
}  # fmt: skip
every_model = pytest.mark.parametrize("name", MODELS)


@pytest.fixture(autouse=True)
def no_file_of_their_own(monkeypatch):
    """Some of these families have one by now, which is not what is tested here."""
    for model, *_ in MODELS.values():
        monkeypatch.delitem(FAMILIES, getattr(transformers, model).config_class.model_type, raising=False)


@pytest.fixture(scope="module")
def build():
    made = {}

    def get(name):
        if name not in made:
            model, config, _ = MODELS[name]
            kind = getattr(transformers, model)
            torch.manual_seed(0)
            made[name] = kind._from_config(kind.config_class(**config), dtype=torch.float64).eval()
            with torch.no_grad():
                for parameter in made[name].parameters():
                    parameter += torch.randn_like(parameter) / parameter.shape[-1] ** 0.5
        return made[name]

    return get


@pytest.fixture(autouse=True)
def without_files(monkeypatch):
    """No family has a file here: every model is a stranger."""
    for family in list(FAMILIES):
        monkeypatch.delitem(FAMILIES, family)


def kinds(spaces):
    """The groups that move, by the word before the layer: experts are alike."""
    moving = {s: g for s, g in spaces.items() if not isinstance(g, Trivial)}
    return {s.rstrip("01").rstrip(".").split(".")[-1]: type(g) for s, g in moving.items()}


def changed(before, state):
    """The outputs of the stock class before and after, in float64 from end to end."""
    after, info = type(before).from_pretrained(
        None, config=before.config, state_dict=state, dtype=torch.float64, output_loading_info=True
    )
    assert not any(info.values())
    for model in (before, after):
        model.config._experts_implementation = "eager"
    tokens = torch.randint(1, 37, (2, 9), generator=torch.Generator().manual_seed(0))
    with float64_throughout(), torch.no_grad():
        first, second = ({"logits": m(input_ids=tokens).logits} for m in (before, after.eval()))
    return difference(first, second)


@every_model
def test_exactly_what_is_true_is_proven(build, name):
    assert kinds(describe(open_checkpoint(build(name))).architecture.spaces) == MODELS[name][2]


@every_model
def test_random_elements_of_the_proven_spaces_are_exact(build, name):
    before = build(name)
    model = describe(open_checkpoint(before))
    transform = random_transform(model.architecture.spaces, 3, model.architecture.movable())
    state = MovedModel(model, transform, Canonical(model, transform.elements), None).state_dict()
    assert changed(before, state) <= 1e-10
    assert any(not torch.equal(state[n], model.checkpoint.read(n)) for n in state)


@pytest.mark.parametrize("name", ["phi3-fused", "phi-partial-rotary", "electra", "experts"])
def test_a_scrambled_stranger_is_aligned_back_to_itself(build, name, tmp_path):
    model = describe(open_checkpoint(build(name)))
    start = model.checkpoint
    moved = open_checkpoint(scrambled(model, 11).state_dict(), config=start.config)

    def distance(state):
        squares = sum(float((state[n] - start.read(n)).square().sum()) for n in start.tensors)
        return (squares / sum(float(start.read(n).square().sum()) for n in start.tensors)) ** 0.5

    before = distance({n: moved.read(n) for n in moved.tensors})
    back = isomerge.align(moved, anchor=start, level="full", threads=1).state_dict()
    assert distance(back) <= 1e-5 <= 0.1 < before


@pytest.mark.parametrize("name", ["phi3-fused", "phi-partial-rotary", "experts"])
def test_what_is_proven_of_a_tiny_model_holds_for_a_larger_one(build, name, monkeypatch):
    monkeypatch.setattr(inferred, "PROVEN", {})
    monkeypatch.setattr(inferred, "LARGEST", 100)  # these count as too large to be proven themselves
    before = build(name)
    model = describe(open_checkpoint(before))
    assert kinds(model.architecture.spaces) == MODELS[name][2]
    assert any("tiny model of the same kind" in note for note in model.architecture.notes)
    assert changed(before, scrambled(model, 5, gauges=True).state_dict()) <= 1e-10


def test_sizes_that_contradict_the_config_are_not_guessed():
    spaces = {"head.0": Permutation(4), "vo.0": Invertible(8, per=("head.0",))}
    tiny = Architecture(spaces=spaces, tensors={"layers.0.o.weight": "_ (head.0 vo.0')"})
    small, config = {"layers.0.o.weight": (32, 32)}, {"num_attention_heads": 4}
    real = {"layers.0.o.weight": (96, 96)}
    good = transfer(tiny, small, config, real, {"num_attention_heads": 6})
    assert (good.spaces["head.0"].size, good.spaces["vo.0"].size) == (6, 16)
    with pytest.raises(Untransferable, match=r"head\.0"):
        transfer(tiny, small, config, real, {"num_attention_heads": 7})
    with pytest.raises(Untransferable, match="no tensor of the tiny model"):
        transfer(tiny, small, config, {**real, "layers.0.other.weight": (3, 3)}, {"num_attention_heads": 6})


def test_a_refused_guess_is_named_with_its_effect(build):
    notes = describe(open_checkpoint(build("bloom"))).architecture.notes
    assert any(n.startswith("head.0 in") and "identity: permutation changes the outputs by" in n for n in notes)
    assert any(n.startswith("qk.0 in") and n.endswith("invertible, proven") for n in notes)


def test_a_relu_is_told_from_a_gelu():
    config = transformers.ElectraConfig(**TEXT, hidden_act="relu")
    model = describe(open_checkpoint(transformers.ElectraForTokenClassification(config)))
    assert type(model.architecture.spaces["up.0"]) is Scale


def test_two_attentions_of_one_layer_have_spaces_of_their_own():
    config = transformers.MBartConfig(
        vocab_size=37, d_model=8, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, encoder_ffn_dim=5,
        decoder_attention_heads=2, decoder_ffn_dim=7, max_position_embeddings=23, pad_token_id=0, eos_token_id=1,
        decoder_start_token_id=1, bos_token_id=2, forced_eos_token_id=1,
    )  # fmt: skip
    model = describe(open_checkpoint(transformers.MBartForConditionalGeneration(config)))
    heads = [s for s in model.architecture.movable() if s.endswith("head.0")]
    assert len(heads) == 3 and all(len(model.touching(head)) >= 4 for head in heads)


def nothing_moves(model, reason):
    assert model.architecture.movable() == []
    assert any("nothing is moved" in note and reason in note for note in model.architecture.notes)
    assert set(model.layouts) == set(model.checkpoint.tensors)


@pytest.fixture()
def fresh(monkeypatch):
    monkeypatch.setattr(inferred, "PROVEN", {})
    return monkeypatch


def test_without_transformers_nothing_moves(build, fresh):
    checkpoint = open_checkpoint(build("electra"))
    fresh.setitem(sys.modules, "transformers", None)
    nothing_moves(describe(checkpoint), "the package 'transformers' is not installed")


def test_a_class_transformers_does_not_have_is_never_fetched(build, fresh):
    checkpoint = open_checkpoint(build("electra"))
    config = {**checkpoint.config, "architectures": ["HomeMadeModel"], "auto_map": {"AutoModel": "code.HomeMadeModel"}}
    nothing_moves(describe(open_checkpoint(checkpoint, config=config)), "code that comes with it")


def test_a_model_of_which_no_tiny_one_can_be_made_stays_as_it_is(build, fresh):
    fresh.setattr(inferred, "LARGEST", 10)
    fresh.setattr(sandbox, "LARGEST", 10)
    nothing_moves(describe(open_checkpoint(build("electra"))), "no tiny model of it could be made")


def test_a_config_that_names_no_type_moves_nothing(fresh):
    tensors = {"blocks.0.alpha.weight": torch.zeros(4, 3), "blocks.0.beta.weight": torch.zeros(3, 4)}
    nothing_moves(describe(open_checkpoint(tensors, config={"hidden_size": 3})), "names no model type")


def test_a_file_with_other_tensors_than_its_class_keeps_its_stream(build, fresh):
    checkpoint = open_checkpoint(build("phi3-fused"))
    state = {n: checkpoint.read(n) for n in checkpoint.tensors} | {"reader.weight": torch.zeros(2, 16)}
    found = describe(open_checkpoint(state, config=checkpoint.config)).architecture
    assert not found.moves("residual") and found.moves("ffn.0")


def test_one_proof_serves_every_checkpoint_of_the_same_shape(build, fresh):
    describe(open_checkpoint(build("electra")))
    fresh.setattr(inferred, "infer", None)
    assert describe(open_checkpoint(build("electra"))).architecture.movable()
