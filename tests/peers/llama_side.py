"""Run by an interpreter that has llama-cpp-python: greedy tokens, logits and tokens of a text for GGUF files."""

from __future__ import annotations

import json
import sys

import llama_cpp


def answer(path: str, prompt: list[int], count: int, text: str) -> dict[str, object]:
    model = llama_cpp.Llama(path, n_ctx=64, n_batch=64, n_threads=1, logits_all=True, verbose=False)
    ids = model.tokenize(text.encode("utf-8"), add_bos=False, special=False)
    model.reset()
    model.eval(prompt)
    logits = model.scores[len(prompt) - 1].tolist()
    tokens: list[int] = []
    for _ in range(count):
        scores = model.scores[model.n_tokens - 1]
        tokens.append(int(scores.argmax()))
        model.eval(tokens[-1:])
    return {"tokens": tokens, "logits": logits, "ids": ids}


if __name__ == "__main__":
    questions = json.load(sys.stdin)
    json.dump([answer(**question) for question in questions], sys.stdout)
