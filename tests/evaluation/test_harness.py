"""The real lm-evaluation-harness, on a task of our own whose answers can be counted by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("lm_eval", reason="the extra 'eval' is not installed")

from transformers import AutoModelForCausalLM, AutoTokenizer

from isomerge.errors import RequestError
from isomerge.evaluation.evaluate import evaluate
from models import gpt2

QUESTIONS = [("the cat sat on the", ["mat", "film", "bird"], 0), ("anna lives in", ["good", "rome", "ran"], 1),
             ("a dog", ["paris", "very", "slept"], 2), ("the film was", ["bad", "hill", "bob"], 0)]  # fmt: skip

TASK = """
task: pick_a_word
dataset_path: json
dataset_kwargs:
  data_files: {{test: {data}}}
output_type: multiple_choice
test_split: test
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
metric_list:
  - metric: acc
"""


def likeliest(folder: Path) -> float:
    """The share of questions whose right word has the largest log-likelihood, by the stock model itself."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    hits = 0
    for question, choices, answer in QUESTIONS:
        scores = []
        for choice in choices:
            start = tokenizer(question, add_special_tokens=False)["input_ids"]
            ids = tokenizer(f"{question} {choice}", add_special_tokens=False)["input_ids"]
            with torch.no_grad():
                logs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
            scores.append(sum(float(logs[i - 1, ids[i]]) for i in range(len(start), len(ids))))
        hits += scores.index(max(scores)) == answer
    return hits / len(QUESTIONS)


@pytest.mark.slow
def test_a_task_file_of_ones_own_counts_what_the_stock_model_finds_likeliest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    gpt2(tmp_path / "model")
    rows = [{"question": q, "choices": c, "answer": a} for q, c, a in QUESTIONS]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "pick.yaml").write_text(TASK.format(data=tmp_path / "rows.jsonl"))
    record = evaluate(tmp_path / "model", task=f"lm-eval:{tmp_path / 'pick.yaml'}")
    assert record["metric_name"] == "pick_a_word/acc,none" and record["higher_is_better"]
    assert record["metric"] == pytest.approx(likeliest(tmp_path / "model"))


def test_tasks_that_do_not_exist_are_told(tmp_path: Path) -> None:
    gpt2(tmp_path / "model")
    with pytest.raises(RequestError, match="there is no such file"):
        evaluate(tmp_path / "model", task="lm-eval:nowhere/x.yaml")
    with pytest.raises(RequestError, match="the harness refused.*no_such_task"):
        evaluate(tmp_path / "model", task="lm-eval:no_such_task")
