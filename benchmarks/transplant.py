"""A language model with another tokenizer: bits per byte before and after, by every way to make the rows of new tokens.

    python benchmarks/transplant.py --texts train.txt --test test.txt [--seeds 3] [--json record.json]

Two stock `LlamaForCausalLM`s for each seed, both trained on the same texts: one with a byte-level BPE of 512 tokens,
and a wider donor with one of 1,024 tokens. The first gets the donor's tokenizer. Controls: new tokens with the mean
row, or with zeros; and the loss of the model with its own tokenizer, which nothing without training can reach.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import torch
from tokenizers import ByteLevelBPETokenizer
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import isomerge

WAYS = ("omp", "subword", "mean", "zero")
MOST = (1, 4, 16, 64)
CONTEXT = 64


def tokenizer(texts: Path, size: int) -> PreTrainedTokenizerFast:
    made = ByteLevelBPETokenizer()
    made.train([str(texts)], vocab_size=size, min_frequency=2, special_tokens=["<s>", "</s>"], show_progress=False)
    return PreTrainedTokenizerFast(tokenizer_object=made._tokenizer, bos_token="<s>", eos_token="</s>")


def trained(texts: Path, reader: PreTrainedTokenizerFast, width: int, steps: int, seed: int, folder: Path) -> Path:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(reader), hidden_size=width, intermediate_size=3 * width, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=CONTEXT, tie_word_embeddings=False,
        bos_token_id=0, eos_token_id=1, use_cache=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    ids = torch.tensor(reader(texts.read_text())["input_ids"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps)
    for _ in range(steps):
        starts = torch.randint(0, len(ids) - CONTEXT, (16,)).tolist()
        batch = torch.stack([ids[start : start + CONTEXT] for start in starts])
        optimizer.zero_grad()
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        schedule.step()
    model.save_pretrained(folder)
    reader.save_pretrained(folder)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=Path, required=True)
    parser.add_argument("--test", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    readers = [tokenizer(given.texts, size) for size in (512, 1024)]
    rows: dict[str, list[float]] = {}
    for seed in range(given.seeds):
        with tempfile.TemporaryDirectory() as scratch:
            model = trained(given.texts, readers[0], 48, given.steps, seed, Path(scratch) / "model")
            donor = trained(given.texts, readers[1], 64, given.steps, 100 + seed, Path(scratch) / "donor")
            for way in WAYS:
                for most in MOST if way == "omp" else (64,):
                    made = isomerge.transplant(
                        model, donor, how=way, k=most, data={"path": str(given.test), "limit": 100}
                    )
                    loss = made.details["transplant"]["loss"]
                    name = f"{way}, k = {most}" if way == "omp" else way
                    rows.setdefault("before", [])[seed:] = [loss["before"]["bits_per_byte"]]
                    rows.setdefault(name, []).append(loss["after"]["bits_per_byte"])
    for name, losses in rows.items():
        spread = torch.tensor(losses)
        print(f"{name:20} {spread.mean():.3f} ± {spread.std(unbiased=False):.3f}")
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
