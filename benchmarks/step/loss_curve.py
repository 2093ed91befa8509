r"""The loss of a model in 8-bit products beside that in bf16, on the same real text in the same order.

    python -m benchmarks.step.loss_curve --text FOLDER --tokens tokens.npy                      # once: text to tokens
    python -m benchmarks.step.loss_curve --tokens tokens.npy --ranks 2 --out curves.jsonl [--cases zeroplan:3+compile,…]

Text is the Python sources of a folder, each once; its tokens are those of a byte-level BPE of 4,096 made of the text itself.
Samples are stretches of it in a drawn order, so that a batch is of many files. The first case is the reference. A gap is that
of two losses averaged over the last :data:`WINDOW` steps, as a part of the reference's, from step :data:`SETTLED` on.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.forked import failure, run_ranks
from benchmarks.measure.worker import versions
from benchmarks.step.case import SHAPES, Case
from benchmarks.step.timing import command, join, warm

WINDOW, SETTLED = 50, 100
_VOCAB = 4096
#: Bytes of the shortest and the longest file: longer ones are tables.
_SHORTEST, _LONGEST = 512, 256 << 10
_WARM = 50


def prepare(folder: Path, target: Path, size: int) -> None:
    """Write the token ids of up to `size` bytes of text below `folder`."""
    import numpy
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    seen: set[bytes] = set()
    texts: list[str] = []
    total = 0
    for file in sorted(folder.rglob("*.py"), key=lambda file: hashlib.sha1(str(file).encode(), usedforsecurity=False).digest()):
        if total >= size:
            break
        try:
            text = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        digest = hashlib.sha1(text.encode(), usedforsecurity=False).digest()
        if not _SHORTEST <= len(text) <= _LONGEST or digest in seen:
            continue
        seen.add(digest)
        texts.append(text)
        total += len(text)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        texts[:: max(1, len(texts) // 400)],
        trainers.BpeTrainer(vocab_size=_VOCAB, initial_alphabet=alphabet, special_tokens=[], show_progress=False),
    )
    ids = numpy.concatenate([numpy.array(one.ids, dtype=numpy.int32) for one in tokenizer.encode_batch(texts)])
    numpy.save(target, ids)
    print(f"{len(texts)} files, {total / 1e6:.1f} MB, {len(ids) / 1e6:.2f} M tokens of a vocabulary of {_VOCAB}", flush=True)


def curve(case: Case, arguments: argparse.Namespace, rank: int) -> list[float]:
    """Train; returns this rank's losses."""
    import numpy
    import torch

    from benchmarks.step.engines import build

    device = join(rank)
    ids = torch.from_numpy(numpy.load(arguments.tokens)) % SHAPES[arguments.shape]["vocab_size"]  # toys have fewer
    rows = ids[: len(ids) // arguments.seq * arguments.seq].view(-1, arguments.seq)
    rows = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))]
    step, keep = build(case, arguments.shape, arguments.micro, device)
    losses = []
    for number in range(arguments.steps):
        first = (number * arguments.ranks + rank) * arguments.micro % (len(rows) - arguments.micro)
        rate = arguments.rate * min(1.0, (number + 1) / _WARM) * (0.55 + 0.45 * math.cos(math.pi * number / arguments.steps))
        for group in keep.optimizer.param_groups:
            group["lr"] = rate
        losses.append(step(rows[first : first + arguments.micro].long().to(device)))
    return [round(float(loss), 5) for loss in losses]


def smoothed(losses: list[float]) -> list[float]:
    """Return the mean of each step and the steps before it, :data:`WINDOW` at most."""
    sums = [0.0]
    for loss in losses:
        sums.append(sums[-1] + loss)
    return [(b - sums[max(0, n + 1 - WINDOW)]) / min(n + 1, WINDOW) for n, (_, b) in enumerate(pairwise(sums))]


def gap(losses: list[float], reference: list[float]) -> dict[str, float]:
    """Return the largest and the last gap of smoothed losses, as parts of the reference's."""
    pairs = list(zip(smoothed(losses), smoothed(reference), strict=True))[SETTLED:]
    gaps = [(a - b) / b for a, b in pairs] or [math.nan]
    return {"largest": max(gaps, key=abs), "last": gaps[-1]}


def main() -> int:
    """Make tokens, or train every case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=Path, required=True)
    parser.add_argument("--text", type=Path)
    parser.add_argument("--megabytes", type=float, default=32)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--shape", default="llama-1b")
    parser.add_argument("--seq", type=int, default=1024)
    parser.add_argument("--micro", type=int, default=4)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--rate", type=float, default=4e-4, help="the highest learning rate, behind the first 50 steps")
    parser.add_argument("--cases", default="zeroplan:3+compile,zeroplan:3+tensorwise+gathers+compile")
    parser.add_argument("--timeout", type=float, default=200)
    arguments = parser.parse_args()
    if arguments.text is not None:
        prepare(arguments.text, arguments.tokens, int(arguments.megabytes * 1e6))
        return 0
    warm(arguments.cases)
    reference: list[float] | None = None
    faults = 0
    for case in map(Case.parse, arguments.cases.split(",")):
        found = run_ranks(partial(curve, case, arguments), arguments.ranks, timeout=arguments.timeout)
        fault = failure(found)
        row: dict[str, Any] = {"case": str(case), "shape": arguments.shape, "ranks": arguments.ranks, "steps": arguments.steps}
        row |= {"micro": arguments.micro, "seq": arguments.seq, "rate": arguments.rate, "versions": versions()}
        row["command"] = command("benchmarks.step.loss_curve")
        if fault:
            faults += 1
            row["fault"] = fault
        else:
            each = [answer["value"] for answer in found]
            losses = [sum(step) / len(step) for step in zip(*each, strict=True)]
            reference = losses if reference is None else reference
            row |= {"losses": [round(loss, 5) for loss in losses], "end": smoothed(losses)[-1], "gap": gap(losses, reference)}
        if arguments.out is not None:
            with arguments.out.open("a") as out:
                out.write(json.dumps(row) + "\n")
        print(json.dumps({key: row[key] for key in ("case", "end", "gap", "fault") if key in row}), flush=True)
    return int(faults > 0)


if __name__ == "__main__":
    raise SystemExit(main())
