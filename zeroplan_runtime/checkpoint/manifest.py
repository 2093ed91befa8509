"""The manifest of a checkpoint, which tells whether it is whole and of one piece: its state, its files' names and checksums.

Note [Chain of checksums]
    ``state.json`` ends with the checksum of all else that it holds. It also holds that of ``checksums.json``, which holds those
    of ``.metadata`` (torch.distributed.checkpoint's) and of every piece in the ranks' files. So a change to any of them shows,
    and so does a file of another checkpoint in place of one of them. Each rank's file begins with a line that says which
    checkpoint and rank it is of, so that the message can say so, too.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zeroplan.core.errors import BadInput
from zeroplan.core.plumbing.documents import Limits, parse_json, text_of
from zeroplan.core.plumbing.files import read_bytes, read_head
from zeroplan_runtime.checkpoint.atomic_files import STATE, another, write_durably

CHECKSUMS = "checksums.json"
METADATA = ".metadata"
#: Of the files' layout. A checkpoint of another is refused.
FORMAT = 2
#: Bytes at the start of a rank's file that say what it is of.
HEADER_BYTES = 256
_LIMITS = Limits(size=1 << 30, depth=64, nodes=50_000_000)


@dataclass(frozen=True, slots=True)
class SaveId:
    """One call of ``save_checkpoint``: a name that no other has, and the step."""

    name: str
    step: int

    def header(self, rank: int) -> bytes:
        """Returns the first bytes of the rank's file."""
        text = json.dumps({"zeroplan_checkpoint": self.name, "step": self.step, "rank": rank})
        text = f"{text:<{HEADER_BYTES - 9}}"
        return f"{text}{zlib.crc32(text.encode()):08x}\n".encode()


@dataclass(frozen=True, slots=True)
class RankFile:
    """A rank's file.

    Attributes:
        rank: who wrote it.
        bytes: its size.
        pieces: by the offset of a piece its length and checksum.
    """

    rank: int
    bytes: int
    pieces: Mapping[int, tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Manifest:
    """``checksums.json``: every file of a checkpoint but ``state.json`` and itself.

    Attributes:
        metadata: size and checksum of ``.metadata``.
        files: the ranks' files by name.
    """

    metadata: tuple[int, int]
    files: Mapping[str, RankFile]

    def to_json(self) -> bytes:
        """Returns the file's contents."""
        files = {
            name: {"rank": one.rank, "bytes": one.bytes, "pieces": [[at, *rest] for at, rest in one.pieces.items()]}
            for name, one in self.files.items()
        }
        return json.dumps({"metadata": self.metadata, "files": files}).encode()

    @classmethod
    def from_json(cls, data: Any) -> Manifest:
        """Reads the manifest that :meth:`to_json` wrote.

        Raises:
            KeyError, TypeError, ValueError: for anything else.
        """
        files = {
            name: RankFile(int(one["rank"]), int(one["bytes"]), {int(at): (int(n), int(c)) for at, n, c in one["pieces"]})
            for name, one in data["files"].items()
            if name == Path(name).name
        }
        size, checksum = data["metadata"]
        return cls((int(size), int(checksum)), files)


def damaged(path: Path, what: str) -> BadInput:
    """The error for a file of a checkpoint; the remedy names another checkpoint, if there is one."""
    other = another(path.parent)
    return BadInput(what, where=str(path), remedy=f"load another checkpoint, such as tag={other!r}" if other else "save anew")


def read_whole(path: Path, size: int = _LIMITS.size) -> bytes:
    """Reads a file of a checkpoint, of at most `size` bytes.

    Raises:
        BadInput: when it is no regular file, cannot be read, or is larger.
    """
    try:
        return read_bytes(str(path), size)
    except BadInput as fault:
        raise damaged(path, fault.what) from None


def write_manifest(folder: Path, manifest: Manifest, state: dict[str, Any]) -> None:
    """Writes ``checksums.json`` and then ``state.json``, the last file of a checkpoint.

    Raises:
        BadInput: when the state is more than could be read back.
        OSError: when the system does not take it.
    """
    data = manifest.to_json()
    write_durably(folder / CHECKSUMS, data)
    state = {"format": FORMAT, **state, "checksums": zlib.crc32(data)}
    text = json.dumps({**state, "checksum": _checksum(state)}, indent=1)
    parse_json(text, "save_checkpoint", _LIMITS, where="client_state and the schedule's state")
    write_durably(folder / STATE, text.encode())


def read_state(folder: Path) -> dict[str, Any]:
    """Reads ``state.json``.

    Raises:
        BadInput: when it is damaged, changed, of another format, or not of this runtime.
    """
    path = folder / STATE
    data = read_whole(path)
    try:
        state = parse_json(text_of(data, str(path)), str(path), _LIMITS)
    except BadInput as fault:
        raise damaged(path, f"is damaged: {fault.what}") from None
    if not isinstance(state, dict) or "format" not in state:
        raise damaged(path, "is not the state of a checkpoint of this runtime")
    if state["format"] != FORMAT:
        raise damaged(path, f"has format {state['format']}, not {FORMAT}, which this version of the runtime reads")
    checksum = state.pop("checksum", None)
    if checksum != _checksum(state):
        raise damaged(path, "is damaged, or was changed after it was saved: its checksum is not that of its contents")
    return state


def read_manifest(folder: Path, state: Mapping[str, Any]) -> Manifest:
    """The checksums of the checkpoint that `state` is of.

    Raises:
        BadInput: when the file is missing, damaged or of another checkpoint.
    """
    path = folder / CHECKSUMS
    data = read_whole(path)
    if zlib.crc32(data) != state["checksums"]:
        raise damaged(path, f"is damaged, or of another checkpoint than {STATE}")
    return Manifest.from_json(parse_json(text_of(data, str(path)), str(path), _LIMITS))


def read_metadata(folder: Path, manifest: Manifest) -> bytes:
    """The contents of ``.metadata``, which are a pickle.

    Raises:
        BadInput: when the file is missing, damaged or of another checkpoint.
    """
    path = folder / METADATA
    data = read_whole(path)
    if (len(data), zlib.crc32(data)) != manifest.metadata:
        raise damaged(path, f"is damaged, or of another checkpoint than {STATE}")
    return data


def require_rank_file(path: Path, file: RankFile, save: SaveId) -> None:
    """Checks a rank's file, all but the checksums of its pieces.

    Raises:
        BadInput: when it is missing, not a file, of another size, or of another checkpoint.
    """
    try:
        head, size = read_head(str(path), HEADER_BYTES)
    except BadInput as fault:
        raise damaged(path, f"{fault.what}; rank {file.rank} wrote it") from None
    if head != save.header(file.rank) and size >= HEADER_BYTES:
        raise damaged(path, f"is not what rank {file.rank} wrote at step {save.step}: {_origin(head)}")
    if size != file.bytes:
        how = "cut off" if size < file.bytes else "too long"
        raise damaged(path, f"is {how}: it has {size:,} bytes, rank {file.rank} wrote {file.bytes:,}")


def _origin(head: bytes) -> str:
    """Returns the origin that a file's first bytes state."""
    try:
        text = head[:-9]
        if int(head[-9:], 16) != zlib.crc32(text):
            return "its beginning is damaged"
        found = json.loads(text)
        return f"it is of rank {int(found['rank'])} at step {int(found['step'])} of another checkpoint"
    except (ValueError, KeyError, TypeError):
        return "its beginning is damaged"


def _checksum(state: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(state, sort_keys=True, separators=(",", ":")).encode())
