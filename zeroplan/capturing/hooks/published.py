"""Data sets that scripts fetch by an address, invented in the size and the form in which they were published.

Of a text the words that differ are as many as published, too: a script's embedding has so many rows.

Source: Cora and its citations, linqs.org (2,708 papers of 1,433 words and 7 classes, 5,429 citations); BSDS300, Berkeley (200
pictures to train and 100 to test, 481 x 321); WikiText-2, Merity et al. 2016, as torch's examples hold it (2,051,910, 213,886
and 241,211 words, 33,277 that differ beside the end of a line, in 36,718, 3,760 and 4,358 lines); Karpathy's char-rnn
(1,115,394 letters, 65 that differ).
"""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable, Iterator
from itertools import cycle, islice
from pathlib import Path

_LETTERS = "\n !$&',-.3:;?ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"


def _archive(place: str, files: Iterator[tuple[str, bytes]]) -> None:
    with tarfile.open(place, "w:gz", compresslevel=1) as archive:
        for name, content in files:
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))


def _cora(place: str) -> None:
    papers, cited, words = 2708, 5429, "\t0" * 1433
    kinds = ("Case_Based", "Genetic_Algorithms", "Neural_Networks", "Probabilistic_Methods", "Reinforcement_Learning",
             "Rule_Learning", "Theory")  # fmt: skip
    content = "".join(f"{at}{words}\t{kinds[at % len(kinds)]}\n" for at in range(papers))
    pairs = "".join(f"{at % papers}\t{(at * 7 + 1) % papers}\n" for at in range(cited))
    _archive(place, iter((("cora/cora.content", content.encode()), ("cora/cora.cites", pairs.encode()))))


def _bsds300(place: str) -> None:
    from PIL import Image

    made = io.BytesIO()
    Image.new("RGB", (481, 321)).save(made, "JPEG")
    parts = (("train", 200), ("test", 100))
    names = (f"BSDS300/images/{part}/{at}.jpg" for part, count in parts for at in range(count))
    _archive(place, ((name, made.getvalue()) for name in names))


def _wikitext(words: int, lines: int) -> Callable[[str], None]:
    def write(place: str) -> None:
        each = -(-words // lines)
        drawn = cycle([f"w{at}" for at in range(33_277)])
        lengths = [min(each, words - at) for at in range(0, words, each)]
        text = [" ".join(islice(drawn, length)) for length in lengths] + [""] * (lines - len(lengths))
        Path(place).write_text("\n".join(text) + "\n", encoding="utf-8")

    return write


def _shakespeare(place: str) -> None:
    Path(place).write_text("".join(islice(cycle(_LETTERS), 1_115_394)), encoding="utf-8")


#: How an address ends, what is said of the data set, and what writes it.
PUBLISHED: dict[str, tuple[str, Callable[[str], None]]] = {
    "/cora.tgz": ("2708 papers without words, as many as published", _cora),
    "/BSDS300-images.tgz": ("300 blank pictures, as many as published", _bsds300),
    "/wikitext-2/train.txt": ("as many words as published", _wikitext(2_051_910, 36_718)),
    "/wikitext-2/valid.txt": ("as many words as published", _wikitext(213_886, 3_760)),
    "/wikitext-2/test.txt": ("as many words as published", _wikitext(241_211, 4_358)),
    "/tinyshakespeare/input.txt": ("as many letters as published", _shakespeare),
}
