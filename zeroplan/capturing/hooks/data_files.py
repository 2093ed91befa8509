"""``--samples N,LENGTH``: files and folders of data that the command names and that are not there.

Note [Invented files]
    An option's value that is a data file by its name's end (:data:`_WRITERS`), or a folder by its option's name, is made in the
    temporary folder as the script starts; a file that the script's own code opens by another way, as it is opened. Options that
    name where to write are left out. Rows have the columns that the script's text has as literals; a folder holds pictures
    where that text reads pictures, else one file of those kinds that the text names.
"""

from __future__ import annotations

import csv
import io
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zeroplan.capturing.hooks.published import PUBLISHED
from zeroplan.capturing.hooks.samples import columns_of, invented_rows, literals_of, program_text
from zeroplan.capturing.source import callers_file, is_users

if TYPE_CHECKING:
    from zeroplan.capturing.state import Capture

Rows = Sequence[dict[str, Any]]
_WRITES = re.compile(r"out|save|log|checkpoint|ckpt|config|cache|resume|model|tokenizer|deepspeed|result")
_FOLDER = re.compile(r"(^|[_.])(images|imgs)$|(dir|folder|root|path)$")
_DATA = re.compile(r"data|train|valid|images")
_READS_PICTURES = ("ImageFolder", "Image.open", ".jpg", ".png", "read_image", "imread")
_PICTURES = (".jpg", ".jpeg", ".png")
_SIDE = 256
#: Files that open pictures for a script.
_OPENS_PICTURES = ("/PIL/", "/torchvision/")


def _lines(rows: Rows) -> str:
    return "\n".join(json.dumps(row) for row in rows) + "\n"


def _table(rows: Rows, separator: str) -> str:
    made = io.StringIO()
    writer = csv.DictWriter(made, list(rows[0]), delimiter=separator)
    writer.writeheader()
    writer.writerows(rows)
    return made.getvalue()


_WRITERS: dict[str, Callable[[Rows, int], str]] = {
    ".txt": lambda rows, length: "\n".join(["the " * length] * len(rows)) + "\n",
    ".jsonl": lambda rows, _: _lines(rows),
    ".json": lambda rows, _: json.dumps(list(rows)),
    ".csv": lambda rows, _: _table(rows, ","),
    ".tsv": lambda rows, _: _table(rows, "\t"),
}


def install(capture: Capture) -> None:
    """Make what the command names, and let the overlay make what is opened later."""
    if capture.job.samples is None or capture.overlay is None:
        return
    maker = _Maker(capture)
    for option, value in _options(capture.job.arguments):
        if value and not _WRITES.search(option) and not os.path.lexists(value):
            maker.named(option, value)
    capture.overlay.missing = maker.opened
    _downloads(maker)


def _downloads(maker: _Maker) -> None:
    """Let data files of an address be invented, too, however a script asks for them."""
    import email.message
    import urllib.request
    import urllib.response

    from zeroplan.capturing.hooks.imports import changes, when_imported

    retrieve: Any = urllib.request
    changes(retrieve)
    own_retrieve = retrieve.urlretrieve

    def urlretrieve(url: str, filename: Any = None, *args: Any, **kwargs: Any) -> Any:
        place = maker.fetched(url)
        if place is None:
            return own_retrieve(url, filename, *args, **kwargs)
        if filename is None:
            return place, {}
        Path(filename).write_bytes(Path(place).read_bytes())
        return filename, {}

    retrieve.urlretrieve = urlretrieve

    own_open = retrieve.urlopen

    def urlopen(url: Any, *args: Any, **kwargs: Any) -> Any:
        place = maker.fetched(getattr(url, "full_url", url))
        if place is None:
            return own_open(url, *args, **kwargs)
        return urllib.response.addinfourl(open(place, "rb"), email.message.Message(), str(url), 200)

    retrieve.urlopen = urlopen

    def by_requests(module: Any) -> None:
        own = module.get

        def get(url: str, *args: Any, **kwargs: Any) -> Any:
            place = maker.fetched(url)
            if place is None:
                return own(url, *args, **kwargs)
            answer = module.Response()
            answer.status_code, answer._content, answer.url, answer.encoding = 200, Path(place).read_bytes(), url, "utf-8"
            answer._content_consumed, answer.raw = True, io.BytesIO(answer._content)
            return answer

        module.get = get

    def by_fsspec(module: Any) -> None:
        own = module.open

        def opened(url: Any, *args: Any, **kwargs: Any) -> Any:
            return own(maker.fetched(url) or url, *args, **kwargs)

        module.open = opened

    when_imported("requests", by_requests)
    when_imported("fsspec", by_fsspec)


def _options(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Options and their values, as ``--data_path x``, ``--data-path=x`` and ``data.path=x`` have them."""
    option = ""
    for word in words:
        name, joined, value = word.partition("=")
        if joined:
            yield name.lstrip("-").replace("-", "_").lower(), value
        elif word.startswith("-"):
            option = word.lstrip("-").replace("-", "_").lower()
            continue
        elif option:
            yield option, word
        option = ""


class _Maker:
    def __init__(self, capture: Capture) -> None:
        assert capture.job.samples is not None
        self._capture = capture
        self._count, self._length = capture.job.samples

    def named(self, option: str, path: str) -> None:
        """Make what an option names, where it is a file or a folder of data."""
        end = os.path.splitext(path)[1].lower()
        if end in _WRITERS or end in _PICTURES:
            self._file(path, end)
        elif end or path in literals_of(program_text()):  # a kind that the script knows, as --dataset fake
            return
        elif _FOLDER.search(option) or (_DATA.search(option) and "ImageFolder" in program_text()):
            self._folder(path)

    def opened(self, path: str) -> bool:
        """Make a file that is opened for reading and is not there; returns whether it was made."""
        file, end = callers_file(), os.path.splitext(path)[1].lower()
        by_script = end in (*_WRITERS, *_PICTURES) and is_users(file)
        if not by_script and not (end in _PICTURES and any(part in file for part in _OPENS_PICTURES)):
            return False
        self._file(path, end)
        return True

    def fetched(self, url: Any) -> str | None:
        """Make the data file of an address; None for another address."""
        text = str(url)
        name = text.partition("?")[0]
        end = os.path.splitext(name)[1].lower()
        published = next((PUBLISHED[one] for one in PUBLISHED if name.endswith(one)), None)
        if not text.startswith(("http://", "https://")) or (published is None and end not in _WRITERS):
            return None
        overlay = self._capture.overlay
        assert overlay is not None
        place = os.path.join(overlay.folder, "fetched", os.path.basename(name))
        os.makedirs(os.path.dirname(place), exist_ok=True)
        if published is None:
            told = self._written(place, end)
        else:
            told, write = published
            write(place)
        self._say(text, f"the file {text} is invented: {told}")
        return place

    def _place(self, path: str) -> str:
        overlay = self._capture.overlay
        assert overlay is not None
        place = str(overlay.of(path))
        overlay._make(os.path.dirname(place))
        return place

    def _file(self, path: str, end: str) -> None:
        self._say(path, f"the file {path} is invented: " + self._written(self._place(path), end))

    def _folder(self, path: str) -> None:
        program, place = program_text(), self._place(os.path.join(path, "x"))
        folder = os.path.dirname(place)
        if any(word in program for word in _READS_PICTURES):
            for at in range(self._count):  # by their names, or by their folders
                for name in (f"picture{at % 2}_{at}.jpg", os.path.join(f"kind{at % 2}", f"{at}.jpg")):
                    os.makedirs(os.path.dirname(os.path.join(folder, name)), exist_ok=True)
                    _picture(os.path.join(folder, name))
            self._say(path, f"the folder {path} is invented: {self._count} blank pictures")
            return
        end = next((one for one in _WRITERS if one in program), ".txt")
        self._say(path, f"the folder {path} is invented: " + self._written(os.path.join(folder, "train" + end), end))

    def _written(self, place: str, end: str) -> str:
        if end in _PICTURES:
            _picture(place)
            return "a blank picture"
        columns = columns_of("", None, program_text())
        held = invented_rows(columns, self._count, self._length)
        rows = [dict(zip(held, values, strict=True)) for values in zip(*held.values(), strict=True)]
        Path(place).write_text(_WRITERS[end](rows, self._length), encoding="utf-8")
        told = "" if end == ".txt" else f", columns {', '.join(columns)}"
        return f"{self._count} rows of {self._length} tokens{told}"

    def _say(self, path: str, says: str) -> None:
        self._capture.invented[path] = says


def _picture(place: str) -> None:
    from PIL import Image

    Image.new("RGB", (_SIDE, _SIDE)).save(place)
