"""Branch, train, merge: one seed model, a branch trained on each domain of a corpus, and one model again.

    python examples/branch_train_merge.py wiki.txt plays.txt --work btm            # two minutes on one core
    python examples/branch_train_merge.py wiki.txt plays.txt --work btm --steps 2  # only to see that it runs

One text file per domain; the last tenth of each is the test. A small stock Llama (width 64, 2 layers) is trained on all
domains for a while: the seed. Each branch goes on from it on its own domain alone, for `--steps` steps, so the branches
can be trained on different machines at different times. The control goes on from the seed on all domains, for as many
steps as the branches together. At the end the branches become one model, as their mean and by `reconstruct` with own
goals, or stay an ensemble weighted by the posterior. The table has the test loss per token in nats, on each domain.
Reference: Li et al., "Branch-Train-Merge" (2022, https://arxiv.org/abs/2208.03306).
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

import isomerge

CONTEXT, BATCH, VOCABULARY, RATE = 64, 16, 1024, 3e-3
LARGEST = 1_000_000  # characters of a domain


def split(files: list[Path], work: Path) -> dict[str, tuple[Path, Path]]:
    """Training and test text of each domain."""
    parts = {}
    for file in files:
        text = file.read_text(encoding="utf-8")[:LARGEST]
        cut = len(text) * 9 // 10
        parts[file.stem] = (work / f"{file.stem}-train.txt", work / f"{file.stem}-test.txt")
        for path, part in zip(parts[file.stem], (text[:cut], text[cut:]), strict=True):
            path.write_text(part, encoding="utf-8")
    return parts


def tokenizer_of(texts: list[str]) -> Any:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=VOCABULARY, show_progress=False, initial_alphabet=alphabet)
    )
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made)


def new_model(vocabulary: int) -> Any:
    torch.manual_seed(0)
    shape: dict[str, Any] = {
        "vocab_size": vocabulary, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 172, "max_position_embeddings": CONTEXT, "use_cache": False,
        "tie_word_embeddings": False, "bos_token_id": None, "eos_token_id": None,
    }  # fmt: skip
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape))


def batches(tokens: Tensor, seed: int) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(tokens) - CONTEXT, (BATCH,), generator=generator)
        yield torch.stack([tokens[start : start + CONTEXT] for start in starts.tolist()])


def train(model: Any, source: Iterator[Tensor], steps: int) -> Any:
    """AdamW at a rate that falls to zero, so that every stage ends in a finished model."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=steps + 1, pct_start=0.1)
    model.train()
    for ids in itertools.islice(source, steps):
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return model.eval()


def make_models(parts: dict[str, tuple[Path, Path]], work: Path, steps: int) -> dict[str, Path]:
    """The seed, a branch per domain and the control, as folders."""
    texts = {name: train_file.read_text(encoding="utf-8") for name, (train_file, _) in parts.items()}
    tokenizer = tokenizer_of(list(texts.values()))
    sources = {
        name: batches(torch.tensor(tokenizer(text, verbose=False)["input_ids"]), number)
        for number, (name, text) in enumerate(texts.items())
    }

    def in_turn() -> Iterator[Tensor]:
        yield from (next(source) for source in itertools.cycle(sources.values()))

    folders: dict[str, Path] = {}

    def keep(name: str, model: Any) -> None:
        folders[name] = work / name.replace(" ", "-")
        model.save_pretrained(folders[name])
        tokenizer.save_pretrained(folders[name])
        print(f"trained {name}", flush=True)

    def seed_model() -> Any:
        return transformers.LlamaForCausalLM.from_pretrained(folders["seed"])

    keep("seed", train(new_model(len(tokenizer)), in_turn(), steps))
    for name, source in sources.items():
        keep(f"branch {name}", train(seed_model(), source, steps))
    keep("trained on all", train(seed_model(), in_turn(), steps * len(sources)))
    return folders


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+", help="one text file per domain")
    parser.add_argument("--work", type=Path, required=True, help="a folder for the models")
    parser.add_argument("--steps", type=int, default=600, help="of the seed and of each branch")
    parser.add_argument("--limit", type=int, default=64, help="stretches of each domain that reconstruct sees")
    given = parser.parse_args()
    given.work.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    parts = split(given.files, given.work)
    folders = make_models(parts, given.work, given.steps)
    branches = [str(folders[f"branch {name}"]) for name in parts]

    folders["mean"] = given.work / "mean"
    isomerge.merge(branches).save(folders["mean"], force=True)
    folders["reconstruct, own goals"] = given.work / "reconstruct"
    seen = [{"path": str(train_file), "limit": given.limit} for train_file, _ in parts.values()]
    merged = isomerge.merge(branches, method="reconstruct", goals="own", data=seen)
    merged.save(folders["reconstruct, own goals"], force=True)

    rows = {name: [isomerge.evaluate(str(folder), str(test)).loss for _, test in parts.values()]
            for name, folder in folders.items()}  # fmt: skip
    rows["ensemble, posterior"] = [
        isomerge.ensemble(branches, str(test), combination="posterior").ensemble["loss"] for _, test in parts.values()
    ]
    print("\n| model | " + " | ".join([*parts, "mean"]) + " |\n" + "|---" * (len(parts) + 2) + "|")
    for name, losses in rows.items():
        known = [float(loss or 0) for loss in losses]
        print(f"| {name} | " + " | ".join(f"{loss:.3f}" for loss in [*known, sum(known) / len(known)]) + " |")


if __name__ == "__main__":
    main()
