"""Architectures without a specification: what is proven is exact, the rest stays, and the notes say which and why."""

import sys

import pytest
import torch
import transformers

from architectures.row_models import difference
from isomerge.architectures import FAMILIES, describe, inferred
from isomerge.checkpoint import open_checkpoint
from isomerge.evaluation import symmetry_proof
from isomerge.symmetry.groups import Invertible, Permutation, Rotary, Scale, SignedScale, Trivial
from isomerge.symmetry.transform import random_transform
from precision import float64_throughout

TEXT = {"vocab_size": 37, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 11,
        "max_position_embeddings": 23, "pad_token_id": 0}  # fmt: skip
SHORT = {"vocab_size": 37, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
# What is proven for each, by space; a space of these parts that is not named here is refused.
MODELS = {
    "ernie": ("ErnieForTokenClassification", TEXT, {
        "ffn": Permutation, "head": Permutation, "qk": Invertible, "vo": Invertible}),
    "phi-partial-rotary": ("PhiForCausalLM", {**TEXT, "partial_rotary_factor": 0.5}, {
        "ffn": Permutation, "head": Permutation, "rotary": Rotary, "qk": Invertible, "vo": Invertible}),
    "phi3-fused": ("Phi3ForCausalLM", {**TEXT, "num_key_value_heads": 2}, {
        "ffn": Permutation, "up": SignedScale, "kv": Permutation, "query": Permutation, "qk": Rotary,
        "vo": Invertible}),
    "falcon-fused-by-group": ("FalconForCausalLM", {
        **SHORT, "ffn_hidden_size": 11, "new_decoder_architecture": True, "num_kv_heads": 2}, {
        "ffn": Permutation, "kv": Permutation, "query": Permutation, "qk": Rotary, "vo": Invertible}),
    # ALiBi gives every head a slope of its own, so the order of the heads is refused.
    "bloom": ("BloomForCausalLM", {"vocab_size": 37, "hidden_size": 16, "n_layer": 2, "n_head": 4}, {
        "ffn": Permutation, "qk": Invertible, "vo": Invertible}),
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


@every_model
def test_exactly_what_is_true_is_proven(build, name):
    spaces = describe(open_checkpoint(build(name))).architecture.spaces
    proven = {s.rstrip(".01"): type(g) for s, g in spaces.items() if not isinstance(g, Trivial)}
    assert build(name).config.model_type not in FAMILIES
    assert proven == MODELS[name][2]


@every_model
def test_random_elements_of_the_proven_spaces_are_exact(build, name):
    before = build(name)
    model = describe(open_checkpoint(before))
    transform = random_transform(model.architecture.spaces, 3, model.architecture.movable())
    state = {file: model.checkpoint.read(file) for file in model.extra}
    for tensor, layout in model.layouts.items():
        state |= model.split(tensor, transform.act(model.raw(tensor), layout))
    after, info = type(before).from_pretrained(
        None, config=before.config, state_dict=state, dtype=torch.float64, output_loading_info=True
    )
    assert not any(info.values())
    tokens = torch.randint(1, 37, (2, 9), generator=torch.Generator().manual_seed(0))
    with float64_throughout(), torch.no_grad():
        first, second = ({"logits": m(input_ids=tokens).logits} for m in (before, after.eval()))
    assert difference(first, second) <= 1e-10
    assert any(not torch.equal(state[n], model.checkpoint.read(n)) for n in state)


def test_a_refused_guess_is_named_with_its_effect(build):
    notes = describe(open_checkpoint(build("bloom"))).architecture.notes
    assert any(n.startswith("head in") and "identity: permutation changes the outputs by" in n for n in notes)
    assert any(n.startswith("qk in") and n.endswith("invertible, proven") for n in notes)
    assert "residual stream stays as it is" in notes[0]


def test_a_relu_is_told_from_a_gelu():
    config = transformers.ElectraConfig(**TEXT, hidden_act="relu")
    model = describe(open_checkpoint(transformers.ElectraForTokenClassification(config)))
    assert type(model.architecture.spaces["unit.0"]) is Scale


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
    assert any(note.startswith("nothing else is moved") and reason in note for note in model.architecture.notes)
    assert set(model.layouts) == set(model.checkpoint.tensors)


@pytest.fixture()
def fresh(monkeypatch):
    monkeypatch.setattr(inferred, "PROVEN", {})
    return monkeypatch


def test_without_transformers_nothing_moves(build, fresh):
    checkpoint = open_checkpoint(build("ernie"))
    fresh.setitem(sys.modules, "transformers", None)
    nothing_moves(describe(checkpoint), "the package 'transformers' is not installed")


def test_a_class_transformers_does_not_have_is_never_fetched(build, fresh):
    checkpoint = open_checkpoint(build("ernie"))
    config = {**checkpoint.config, "architectures": ["HomeMadeModel"], "auto_map": {"AutoModel": "code.HomeMadeModel"}}
    nothing_moves(describe(open_checkpoint(checkpoint, config=config)), "code that comes with it")


def test_a_model_too_large_to_run_stays_as_it_is(build, fresh):
    fresh.setattr(symmetry_proof, "LARGEST", {torch.float64: 10})
    nothing_moves(describe(open_checkpoint(build("ernie"))), "too large")


def test_unknown_names_stay_as_they_are(fresh):
    tensors = {"blocks.0.alpha.weight": torch.zeros(4, 3), "blocks.0.beta.weight": torch.zeros(3, 4)}
    nothing_moves(describe(open_checkpoint(tensors, config={"model_type": "home-made"})), "recognised by its names")


def test_one_proof_serves_every_checkpoint_of_the_same_shape(build, fresh):
    describe(open_checkpoint(build("ernie")))
    fresh.setattr(inferred, "Prover", None)
    assert describe(open_checkpoint(build("ernie"))).architecture.movable()
