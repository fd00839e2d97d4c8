"""Language models trained on WikiText-2 from different seeds, merged: the table of every way to do it.

    python benchmarks/lm_wikitext2.py --data wikitext-2 --work DIR --arch llama --device cuda --together
    python benchmarks/lm_wikitext2.py --tiny --arch gpt2                  # two CPU cores, no data needed

Stock `LlamaForCausalLM` (rotary positions, 8 query and 4 key-value heads, SwiGLU) or `GPT2LMHeadModel` (8 heads), 6
layers of width 256. Both with `tie_word_embeddings=False`; GPT-2's stock default ties the output table to the input.
The tokenizer is a byte-level BPE trained on the training text, with `<unk>` as one token, so a loss is per token of it
and not comparable with other vocabularies. Text is cut into sequences of --context tokens that see nothing of each
other. Of every model the weights of the best validation loss are kept. Rows with data see training text, no labels
(Fisher: tokens drawn from the model). Columns: test loss in nats per token, perplexity, loss minus the mean of the
parents', seconds of aligning and of merging; mean and standard error over pairs. Nothing is tuned on the test text, but
for the rates of learned alignment, which were chosen on part of it with smaller models.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from fusing import BARRIER, SECONDS, Column, State, run, shared_arguments, standard_rows, train_all, trained
from torch import Tensor

from isomerge.checkpoint.memory import quiet_transformers
from isomerge.running.stock import load_stock

SPLITS = ("train", "valid", "test")
COLUMNS = [
    Column("test loss", lambda row: row["loss"], 3),
    Column("perplexity", lambda row: row["perplexity"]),
    BARRIER,
    *SECONDS,
]


@dataclass(frozen=True)
class Plan:
    """The size of the models and how they are trained."""

    arch: str
    width: int = 256
    layers: int = 6
    heads: int = 8
    groups: int = 4
    hidden: int = 688
    vocabulary: int = 4096
    context: int = 256
    epochs: int = 12
    batch: int = 64
    rate: float = 1e-3
    decay: float = 0.5
    dropout: float = 0.1
    patience: int = 4


# Llama has dropout on attention weights alone; weight decay has to do the rest.
PLANS = {
    "llama": Plan("llama"),
    "gpt2": Plan("gpt2", epochs=30, decay=0.1, dropout=0.2),
}
TINY: dict[str, Any] = {
    "width": 64, "layers": 2, "heads": 4, "groups": 2, "hidden": 172, "vocabulary": 1024, "context": 64,
    "epochs": 4, "batch": 16, "rate": 3e-3,
}  # fmt: skip


# --- text -------------------------------------------------------------------------------------------------------------
def read_texts(data: Path | None, tiny: bool) -> dict[str, str]:
    """The text of each split; tiny: the beginning of it. Without data: the manual pages that Python brings along."""
    limits = {"train": 300_000, "valid": 50_000, "test": 50_000} if tiny else {}
    if data is None:
        from pydoc_data.topics import topics

        pages = [f"{name}\n\n{topics[name]}\n" for name in sorted(topics)]
        parts = {"train": [p for n, p in enumerate(pages) if n % 5 > 1], "valid": pages[1::5], "test": pages[0::5]}
        return {split: "".join(parts[split])[: limits.get(split)] for split in SPLITS}
    found = {}
    for split in SPLITS:
        files = sorted(path for path in data.iterdir() if split in path.name)
        if len(files) != 1:
            raise SystemExit(f"{data} holds {len(files)} files with '{split}' in their name; there should be one.")
        found[split] = files[0].read_text(encoding="utf-8")[: limits.get(split)]
    return found


def open_tokenizer(path: Path, text: str, vocabulary: int) -> Any:
    """The tokenizer at the path; trained on the text if there is none."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    if not path.exists():
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocabulary, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            special_tokens=[AddedToken("<unk>", lstrip=True, normalized=False)],
        )  # fmt: skip
        tokenizer.train_from_iterator(text.splitlines(keepends=True), trainer)
        path.parent.mkdir(parents=True, exist_ok=True)
        tokenizer.save(str(path))
    return Tokenizer.from_file(str(path))


def encoded(tokenizer: Any, text: str) -> Tensor:
    lines = tokenizer.encode_batch(text.splitlines(keepends=True))
    return torch.tensor([token for line in lines for token in line.ids])


def sequences(tokens: Tensor, length: int) -> Tensor:
    return tokens[: len(tokens) // length * length].view(-1, length)


# --- training ---------------------------------------------------------------------------------------------------------
def new_model(plan: Plan, vocabulary: int) -> Any:
    import transformers

    ends: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    shared: dict[str, Any] = {"vocab_size": vocabulary, "tie_word_embeddings": False, "use_cache": False, **ends}
    if plan.arch == "llama":
        return transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                hidden_size=plan.width, num_hidden_layers=plan.layers, num_attention_heads=plan.heads,
                num_key_value_heads=plan.groups, intermediate_size=plan.hidden,
                max_position_embeddings=plan.context, attention_dropout=plan.dropout, **shared,
            )
        )  # fmt: skip
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            n_embd=plan.width, n_layer=plan.layers, n_head=plan.heads, n_positions=plan.context,
            resid_pdrop=plan.dropout, embd_pdrop=plan.dropout, attn_pdrop=plan.dropout, **shared,
        )
    )  # fmt: skip


def train(
    folder: Path, plan: Plan, tokens: Tensor, valid: Tensor, vocabulary: int, tokenizer: Path, seed: int, device: str
) -> None:
    """AdamW, warm-up and cosine; every token once an epoch, cut at other places each time; bfloat16 on a GPU."""
    torch.manual_seed(seed)
    start = time.perf_counter()
    model = new_model(plan, vocabulary).to(device)
    tokens, valid = tokens.to(device), valid.to(device)
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    settings = [{"params": matrices, "weight_decay": plan.decay}, {"params": vectors, "weight_decay": 0.0}]
    kind = torch.device(device).type
    optimizer = torch.optim.AdamW(settings, lr=plan.rate, betas=(0.9, 0.95), fused=kind == "cuda")
    steps = plan.epochs * ((len(tokens) - plan.context) // plan.context // plan.batch)
    warm = max(1, steps // 20)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1, (step + 1) / warm) * 0.5 * (1 + math.cos(math.pi * step / steps))
    )
    generator = torch.Generator().manual_seed(seed + 100)
    losses: list[float] = []
    best: State = {}
    for epoch in range(plan.epochs):
        model.train()
        shift = int(torch.randint(plan.context, (), generator=generator))
        rows = sequences(tokens[shift:], plan.context)
        order = torch.randperm(len(rows), generator=generator)
        for chosen in order[: steps // plan.epochs * plan.batch].to(device).split(plan.batch):
            with torch.autocast(kind, dtype=torch.bfloat16, enabled=kind == "cuda"):
                logits = model(input_ids=rows[chosen]).logits
            optimizer.zero_grad(set_to_none=True)
            next_token_loss(logits.float().log_softmax(-1), rows[chosen]).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
        losses.append(mean_loss([model.eval()], valid, device))
        seconds = time.perf_counter() - start
        print(f"{plan.arch} seed {seed} epoch {epoch + 1}: valid {losses[-1]:.4f}, {seconds:.0f} s", flush=True)
        if losses[-1] == min(losses):
            best = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
        elif len(losses) - losses.index(min(losses)) > plan.patience:
            break
    model.load_state_dict(best)
    save(folder, model, tokenizer, {**asdict(plan), "valid": losses, "seconds": seconds, "device": device})


def save(folder: Path, model: Any, tokenizer: Path, training: dict[str, Any]) -> None:
    """A stock folder; the weights last, since they say that it is finished."""
    import transformers

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "training.json").write_text(json.dumps(training))
    transformers.PreTrainedTokenizerFast(tokenizer_file=str(tokenizer), unk_token="<unk>").save_pretrained(folder)
    with quiet_transformers():
        model.float().cpu().save_pretrained(folder)


# --- measuring --------------------------------------------------------------------------------------------------------
def next_token_loss(scores: Tensor, ids: Tensor) -> Tensor:
    """Mean over all tokens but the first of each sequence; scores are log-probabilities."""
    return torch.nn.functional.nll_loss(scores[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


@torch.no_grad()
def mean_loss(models: Sequence[Any], rows: Tensor, device: str, batch: int = 32) -> float:
    """Of the mean probability of the models, in float32."""
    total = 0.0
    for ids in rows.split(batch):
        ids = ids.to(device)
        scores = torch.stack([model(input_ids=ids).logits.float().log_softmax(-1) for model in models])
        total += len(ids) * float(next_token_loss(scores.logsumexp(0) - math.log(len(models)), ids))
    return total / len(rows)


def judge_on(config: dict[str, Any], rows: Tensor, device: str) -> Callable[[Sequence[State]], dict[str, float]]:
    def judge(states: Sequence[State]) -> dict[str, float]:
        loss = mean_loss([load_stock(config, state).to(device) for state in states], rows, device)
        return {"loss": loss, "perplexity": math.exp(loss)}

    return judge


def calibration(rows: Tensor, batch: int) -> Callable[[int], Callable[[], Iterator[dict[str, Tensor]]]]:
    """Training sequences in an order drawn once; a count is of tokens."""
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))

    def batches(count: int) -> Callable[[], Iterator[dict[str, Tensor]]]:
        if count > rows.numel():
            raise ValueError(f"{count:,} tokens were asked for, and the training text has {rows.numel():,}")
        chosen = rows[order[: max(1, count // rows.shape[1])]]
        return lambda: ({"input_ids": part} for part in chosen.split(batch))

    return batches


def arguments() -> argparse.Namespace:
    parser = shared_arguments(__doc__.split("\n")[0])
    parser.add_argument("--data", type=Path, help="a folder with one file of text for each of train, valid and test")
    parser.add_argument("--arch", choices=sorted(PLANS), default="llama")
    parser.add_argument("--tokens", help="tokens that reconstruct sees, as in 32768,262144,1500000")
    parser.add_argument("--stream", type=int, help="tokens that the residual stream is aligned from (65536)")
    parser.add_argument("--learn", type=int, nargs="+", help="steps that an alignment learns (400 3000; --tiny: 50)")
    for name in ("epochs", "batch", "vocabulary", "context"):
        parser.add_argument(f"--{name}", type=int)
    for name in ("rate", "decay", "dropout"):
        parser.add_argument(f"--{name}", type=float)
    given = parser.parse_args()
    if not given.tiny and (given.data is None or given.work is None):
        parser.error("--data and --work are needed, unless --tiny is given")
    return given


def main() -> None:
    given = arguments()
    plan = replace(PLANS[given.arch], **TINY) if given.tiny else PLANS[given.arch]
    own = {name: getattr(given, name) for name in asdict(plan) if getattr(given, name, None) is not None}
    plan = replace(plan, **own)
    with tempfile.TemporaryDirectory() as forgotten:
        given.work = given.work or Path(forgotten)
        benchmark(given, plan)


def benchmark(given: argparse.Namespace, plan: Plan) -> None:
    home = given.work / (f"{plan.arch}-tiny" if given.tiny else plan.arch)
    texts = read_texts(given.data, given.tiny)
    tokenizer = open_tokenizer(home / "tokenizer.json", texts["train"], plan.vocabulary)
    tokens = {split: encoded(tokenizer, texts[split]) for split in SPLITS}
    rows = {split: sequences(tokens[split], plan.context) for split in SPLITS}
    print({split: f"{len(tokens[split]):,} tokens" for split in SPLITS}, flush=True)
    folders = [home / str(seed) for seed in range(given.seeds or (2 if given.tiny else 3))]
    size, file = tokenizer.get_vocab_size(), home / "tokenizer.json"
    missing = [(seed, folder) for seed, folder in enumerate(folders) if not (folder / "model.safetensors").exists()]
    train_all(
        train,
        [(folder, plan, tokens["train"], rows["valid"], size, file, seed, given.device) for seed, folder in missing],
        given.together,
    )
    if given.train_only:
        return
    config = json.loads((folders[0] / "config.json").read_text())
    judge = judge_on(config, rows["test"][: given.limit], given.device)
    counts = [int(n) for n in (given.tokens or ("2048,8192" if given.tiny else "32768,262144,1500000")).split(",")]
    stream = given.stream or (4096 if given.tiny else 65536)
    learn = given.learn or ([50] if given.tiny else [400, 3000])
    every = standard_rows(
        "tokens", stream=stream, counts=counts, all_at_once=counts[len(counts) // 2], cache=given.cache,
        start={"level": "full", "count": stream}, polish=200, learn=learn, learn_from=counts[-1],
    )  # fmt: skip
    about = {"benchmark": "lm_wikitext2", "arch": plan.arch, "tiny": given.tiny, "data": str(given.data or "pydoc"),
             "test_sequences": len(rows["test"][: given.limit]),
             "training": trained(folders)}  # fmt: skip
    run(folders, every, judge, calibration(rows["train"], 32), COLUMNS, given, about)


if __name__ == "__main__":
    main()
