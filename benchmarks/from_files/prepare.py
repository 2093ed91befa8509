"""Makes what the cases' files name: models with random weights under their hub ids, tokenizers, and data sets of known lengths.

``python -m benchmarks.from_files.prepare FOLDER [--tiny]``: with ``--tiny`` the models keep their architecture and have two
narrow layers, so that every case runs on a CPU.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

MODELS = ("meta-llama/Llama-3.2-1B", "Qwen/Qwen2.5-0.5B")
#: What a model keeps of its shape where nothing is measured.
TINY = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "layer_types": None,
    "vocab_size": 1200,
    "max_window_layers": 2,
}
_WORDS = 1000
_PAD, _BEGIN, _END = "<pad>", "<s>", "</s>"
#: Words of a long text: above every length that a case asks for, so that all samples are cut to that length.
_LONG = 2600
_ROWS = 64
#: Tokens of a prompt to be completed: what a plan assumes where nothing bounds them.
_PROMPT = 512
#: Tokens of a text to be scored, to which the reward trainer adds an end; it drops what is longer than ``max_length``.
_SCORED = 1023


def main(folder: Path, tiny: bool) -> None:
    """Write all of it below `folder`."""
    for name in MODELS:
        make_model(name, folder / name, bytes_tokenizer() if name.startswith("Qwen") else words_tokenizer(), tiny)
    rng = random.Random(0)

    def text(words: int) -> str:
        return " ".join(f"w{rng.randrange(_WORDS)}" for _ in range(words))

    def long() -> str:
        return text(_LONG)

    def short() -> str:
        return text(rng.randrange(100, 900))

    write_rows(folder / "data/sft", ({"text": long()} for _ in range(_ROWS)))
    write_rows(folder / "data/short", ({"text": short()} for _ in range(16 * _ROWS)))
    write_rows(folder / "data/dpo", (pair(text(100), long) for _ in range(_ROWS)))
    write_rows(folder / "data/pairs", (pair(text(2), long) for _ in range(_ROWS)))
    write_rows(folder / "data/reward", ({"chosen": text(_SCORED), "rejected": text(_SCORED)} for _ in range(_ROWS)))
    cut = ({"chosen": long()[:_SCORED], "rejected": long()[:_SCORED]} for _ in range(_ROWS))
    write_rows(folder / "data/reward_bytes", cut)
    write_rows(folder / "data/judged", (judged(lambda _: text(2), long, index) for index in range(_ROWS)))
    write_rows(folder / "data/prompts", ({"prompt": text(_PROMPT)} for _ in range(_ROWS)))
    write_rows(folder / "data/kto", (judged(text, long, index) for index in range(_ROWS)))


def pair(prompt: str, long: Callable[[], str]) -> dict[str, str]:
    """Return a prompt with a chosen and a rejected answer, both longer than any length that a case asks for."""
    return {"prompt": prompt + " ", "chosen": long(), "rejected": long()}


def judged(text: Callable[[int], str], long: Callable[[], str], index: int) -> dict[str, Any]:
    """Return a prompt with one answer and whether it is wanted."""
    return {"prompt": text(100) + " ", "completion": long(), "label": index % 2 == 0}


def write_rows(folder: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Write one JSON line a row, in the file that ``load_dataset(folder)`` takes as the training split."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def bytes_tokenizer() -> Any:
    """Make Qwen's tokenizer without merges, one token a byte: transformers reads no other with a config of Qwen's."""
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import Qwen2Tokenizer

    symbols = [_PAD, _BEGIN, _END, *sorted(ByteLevel.alphabet())]
    vocabulary = {symbol: index for index, symbol in enumerate(symbols)}
    return Qwen2Tokenizer(vocab=vocabulary, merges=[], unk_token=_PAD, pad_token=_PAD, bos_token=_BEGIN, eos_token=_END)


def words_tokenizer() -> Any:
    """Make a tokenizer of whole words, one token each."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    words = [_PAD, _BEGIN, _END, "<unk>", *(f"w{index}" for index in range(_WORDS))]
    backend = Tokenizer(WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token=_PAD, bos_token=_BEGIN, eos_token=_END, unk_token="<unk>"
    )


def make_model(name: str, folder: Path, tokenizer: Any, tiny: bool) -> None:
    """Save random bf16 weights, as published checkpoints have them, with the tokenizer beside them."""
    import torch
    from transformers import AutoModelForCausalLM

    from benchmarks.measure.models import build_config

    torch.set_default_device("cuda" if torch.cuda.is_available() else "cpu")
    config = build_config(name, TINY if tiny else {})
    config.pad_token_id, config.bos_token_id, config.eos_token_id = 0, 1, 2
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    torch.set_default_device("cpu")


if __name__ == "__main__":
    main(Path(sys.argv[1]), "--tiny" in sys.argv)
