"""`isomerge.generate`: several language models write every token together, or each its own and the best is taken."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from isomerge.arguments import require_shared_types, require_types
from isomerge.checkpoint import Checkpoint, open_checkpoint
from isomerge.data.encode import Encoder
from isomerge.data.tokenizer import padding_id
from isomerge.ensembling.api import EnsembleRequest
from isomerge.ensembling.manifest import named_ensemble
from isomerge.ensembling.module import Ensemble
from isomerge.ensembling.ranking import LIKELIHOOD, Ranker
from isomerge.errors import RequestError
from isomerge.progress_bars import Shown, callback, shows_progress
from isomerge.results import Result


@dataclass
class GeneratedTexts(Result):
    """What several models wrote after each prompt."""

    outputs: list[dict[str, Any]]
    """Each with `prompt` and `text`; where answers were ranked also `model`, whose answer it is, and `candidates`, all
    answers with `model`, `text`, `wins` over the others and `score`."""
    rank: str | None
    combination: str
    notes: list[str]
    seconds: float


@shows_progress
def generate(
    models: Sequence[Any] | Ensemble,
    prompts: Sequence[str],
    *,
    rank: Any = None,
    tokens: int = 64,
    combination: str = "probability",
    weights: Sequence[float] | None = None,
    snapshots: int | None = None,
    tokenizer: Any = None,
    device: str | None = None,
    progress: Shown = None,
) -> GeneratedTexts:
    """Continue each prompt by at most `tokens` tokens, greedily.

    Without `rank` the models choose every token together (`combination`, `weights`). With it each model writes an
    answer of its own, every two answers are compared, and the one with most wins is returned. `rank` is "likelihood"
    (the models themselves judge, each by how likely it finds an answer per byte) or a model: a language model, or a
    classifier of texts with one output (a score) or two (which of two is better). A model likes what it has written, so
    another judge is better. For sampling or beam search call `generate` of what `isomerge.make_ensemble` returns.
    """
    start, progress = time.perf_counter(), callback(progress)
    require_types(
        prompts=(prompts, Sequence), tokens=(tokens, int), tokenizer=(tokenizer, str, os.PathLike, Callable, None)
    )  # fmt: skip
    require_shared_types(progress=progress)
    if isinstance(prompts, str) or not prompts or not all(isinstance(one, str) and one for one in prompts):
        raise RequestError("Generating: prompts must be a list of texts that are not empty.", keys=("prompts",))
    if tokens < 1:
        raise RequestError(f"Generating {tokens} tokens: at least one is needed.", keys=("tokens",))
    judge = None if rank is None or rank == LIKELIHOOD else open_checkpoint(rank)
    made = _made(models, combination, weights, snapshots, tokenizer, device)
    if made.task != "causal-lm":
        raise RequestError(f"Generating with models for '{made.task}': only causal language models write texts here.")
    ranker = (
        None if rank is None else Ranker(made.stock, LIKELIHOOD) if judge is None else Ranker.of(rank, judge, device)
    )
    writers = [(one.checkpoint, one.module) for one in made.stock] if ranker else [(made.stock[0].checkpoint, made)]
    encoders = [
        Encoder.of(checkpoint, tokenizer if n == 0 else None, None) for n, (checkpoint, _) in enumerate(writers)
    ]
    outputs = []
    for number, prompt in enumerate(prompts, start=1):
        pairs = zip(writers, encoders, strict=True)
        texts = [_continued(checkpoint, writer, encoder, prompt, tokens) for (checkpoint, writer), encoder in pairs]
        names = [checkpoint.name for checkpoint, _ in writers]
        outputs.append(_ranked(ranker, prompt, names, texts) if ranker else {"prompt": prompt, "text": texts[0]})
        if progress:
            progress(number, len(prompts), "generating")
    return GeneratedTexts(
        outputs, ranker.name if ranker else None, made.combination.name, list(made.notes), time.perf_counter() - start
    )


def _made(
    models: Any, combination: str, weights: Sequence[float] | None, snapshots: int | None, tokenizer: Any,
    device: str | None,
) -> Ensemble:  # fmt: skip
    if isinstance(models, Ensemble):
        return models
    if (named := named_ensemble(models, device)) is not None:
        return named
    return EnsembleRequest(
        models, combination, weights, snapshots=snapshots, tokenizer=tokenizer, device=device
    ).build()  # fmt: skip


def _ranked(ranker: Ranker, prompt: str, names: Sequence[str], texts: Sequence[str]) -> dict[str, Any]:
    verdicts = ranker(prompt, texts)
    scores = [None] * len(texts) if verdicts.scores is None else verdicts.scores.tolist()
    rows = zip(names, texts, verdicts.totals().tolist(), scores, strict=True)
    candidates = [{"model": name, "text": text, "wins": won, "score": score} for name, text, won, score in rows]
    best = candidates[verdicts.best]
    return {"prompt": prompt, "text": best["text"], "model": best["model"], "candidates": candidates}


def _continued(checkpoint: Checkpoint, writer: Any, encoder: Encoder, prompt: str, tokens: int) -> str:
    """What the greedy continuation adds to the prompt."""
    ids = encoder.tokenizer(prompt)["input_ids"]
    room = encoder.limit - len(ids)
    if not ids or room < 1:
        raise RequestError(
            f"Generating with {checkpoint.name}: the prompt has {len(ids)} tokens, and the model takes 1 to "
            f"{encoder.limit - 1} and writes on. Shorten it."
        )
    given = torch.tensor([ids], device=writer.device)
    with torch.no_grad():
        found = writer.generate(
            input_ids=given, attention_mask=torch.ones_like(given), max_new_tokens=min(tokens, room), do_sample=False,
            num_beams=1, pad_token_id=padding_id(encoder.config, encoder.tokenizer),
        )  # fmt: skip
    # Decoded with the prompt, as some tokenizers leave out the space before the first word.
    whole, given_text = (encoder.tokenizer.decode(one, skip_special_tokens=True) for one in (found[0], ids))
    return str(whole)[len(given_text) :]
