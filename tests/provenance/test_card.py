"""The model card: metadata that huggingface_hub reads back, and a page that says what was done."""

from __future__ import annotations

import pytest
import torch
import yaml
from huggingface_hub import ModelCard
from safetensors.torch import save_file

import isomerge
from isomerge.checkpoint import open_checkpoint
from isomerge.reporting.card import card_data, card_page, licence

COMMIT = "0123456789abcdef0123456789abcdef01234567"
RECIPE = "merge_method: ties\nmodels:\n- model: org/a\n- model: ./runs/b\n"


@pytest.fixture
def record():
    return {
        "inputs": [
            {"reference": "org/a", "revision": COMMIT, "role": "model", "card": {
                "license": "mit", "language": "en", "datasets": ["squad"], "pipeline_tag": "text-generation"}},
            {"reference": "./runs/b", "revision": None, "role": "model", "card": {
                "license": "mit", "language": ["de", "en"], "pipeline_tag": "fill-mask"}},
            {"reference": "org/base@main", "revision": COMMIT, "role": "base", "card": {"license": "mit"}},
        ],
        "donor": "org/a", "method": "ties", "summary": "trim, elect sign, merge", "paper": "arXiv:2306.01708",
        "recipe": RECIPE, "alignment": {"level": "full", "distance before": 1.5}, "sha256": "ab" * 32,
        "version": "0.1.0",
    }  # fmt: skip


def write_card(folder, record):
    """As a merge writes it."""
    path = folder / "README.md"
    path.write_text(card_page({"name": folder.name, **record}), encoding="utf-8")
    return path


def test_the_metadata_is_what_the_hub_expects(tmp_path, record):
    data = ModelCard.load(write_card(tmp_path, record)).data
    assert data.base_model == ["org/a", "org/base"], "a local path is no hub id"
    assert data.to_dict()["base_model_relation"] == "merge"
    assert data.tags == ["merge", "isomerge"] and data.library_name == "transformers"
    assert data.pipeline_tag == "text-generation", "the donor's"
    assert data.license == "mit" and data.language == ["en", "de"] and data.datasets == ["squad"]


def test_the_page_says_what_was_merged_and_how_to_do_it_again(tmp_path, record):
    folder = tmp_path / "my-merge"
    folder.mkdir()
    text = ModelCard.load(write_card(folder, record)).text
    for said in (
        "# my-merge", f"| `org/a` | model | `{COMMIT}` |", "| `./runs/b` | model | local |",
        "| `org/base@main` | base |",
        "**ties**: trim, elect sign, merge. Reference: arXiv:2306.01708.", f"```yaml\n{RECIPE}```",
        "| level | full |", "| distance before | 1.5 |", "ab" * 32, 'pip install "isomerge==0.1.0"',
        "isomerge reproduce my-merge", "isomerge verify my-merge",
    ):  # fmt: skip
        assert said in text, said


def test_the_recipe_in_the_card_parses_even_with_fences_in_it(tmp_path, record):
    record["recipe"] = 'chat_template: "```{{x}}```"\n'
    text = write_card(tmp_path, record).read_text()
    block = text.split("````yaml\n")[1].split("\n````")[0]
    assert yaml.safe_load(block) == {"chat_template": "```{{x}}```"}


def test_the_donors_own_card_is_replaced_or_left_out(tmp_path):
    """A real merge, with and without a card of its own."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        save_file({"w": torch.ones(2, 2)}, tmp_path / name / "model.safetensors")
        (tmp_path / name / "config.json").write_text("{}")
        (tmp_path / name / "README.md").write_text("---\nlicense: mit\n---\n# The donor, which won every benchmark\n")
    isomerge.merge([tmp_path / "a", tmp_path / "b"]).save(tmp_path / "out")
    text = (tmp_path / "out" / "README.md").read_text()
    assert "won every benchmark" not in text and "license: mit" in text
    assert "merge_method: linear" in (tmp_path / "out" / "mergekit_config.yml").read_text()
    isomerge.merge([tmp_path / "a", tmp_path / "b"]).save(tmp_path / "plain", report=False)
    assert not (tmp_path / "plain" / "README.md").exists()


def test_local_models_alone_have_no_base_model(record):
    record["inputs"] = [record["inputs"][1]]
    data = ModelCard(card_page({**record, "name": "x"})).data.to_dict()
    assert "base_model" not in data and "base_model_relation" not in data


def test_nothing_is_said_that_is_not_known(record):
    for entry in record["inputs"]:
        entry["card"] = {}
    page = card_page({**record, "name": "x", "alignment": None, "paper": None})
    data = ModelCard(page).data.to_dict()
    assert set(data) == {"base_model", "base_model_relation", "library_name", "tags"}
    assert "Alignment" not in page and "Reference:" not in page and "None" not in page


@pytest.mark.parametrize(
    ("stated", "expected", "noted"),
    [
        (["mit", "mit"], {"license": "mit"}, False),
        (["mit", "apache-2.0"], {"license": "other"}, True),
        (["mit", None], {}, True),
        ([None, None], {}, False),
    ],
)
def test_a_licence_is_stated_only_where_all_inputs_agree(stated, expected, noted):
    notes = []
    cards = [{"license": value} if value else {} for value in stated]
    inputs = [{"reference": f"org/{i}", "card": card} for i, card in enumerate(cards)]
    assert licence(inputs, notes) == expected
    assert bool(notes) is noted
    if noted:
        assert "`org/0`: mit" in notes[0] and "`org/1`" in notes[0]


def test_a_named_licence_keeps_its_name():
    card = {"license": "other", "license_name": "community", "license_link": "LICENSE"}
    inputs = [{"reference": "a", "card": card}, {"reference": "b", "card": {**card, "license_link": "elsewhere"}}]
    assert licence(inputs[:1] * 2, []) == card
    assert licence(inputs, []) == {"license": "other", "license_name": "community"}


def test_the_card_is_the_same_every_time(record):
    assert card_page({**record, "name": "x"}) == card_page({**record, "name": "x"})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("---\nlicense: mit\nlanguage:\n- en\n---\n# A model\n", {"license": "mit", "language": ["en"]}),
        ("# no front matter\n", {}),
        ("---\nlicense: [broken\n---\n", {}),
        (None, {}),
    ],
)
def test_the_metadata_of_an_input_is_read_from_its_own_card(text, expected, save):
    folder = save("vit")
    (folder / "README.md").unlink(missing_ok=True)
    if text is not None:
        (folder / "README.md").write_text(text)
    assert card_data(open_checkpoint(folder)) == expected
