"""Sizes and counts as people write them. Sizes are binary (24G is 24 GiB), counts are decimal (7.5B is 7.5e9)."""

from __future__ import annotations

import math
import re

from zeroplan.core.errors import BadInput

KIB, MIB, GIB, TIB = 1 << 10, 1 << 20, 1 << 30, 1 << 40

_SIZE = {"": 1, "K": KIB, "M": MIB, "G": GIB, "T": TIB, "P": 1 << 50}
_COUNT = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "G": 10**9, "T": 10**12}
_NUMBER = r"\s*([0-9]+(?:[_,]?[0-9]+)*(?:\.[0-9]+)?(?:[eE][+]?[0-9]{1,3})?)\s*"

#: No size or count that describes hardware or a model goes beyond this; it keeps arithmetic and tables sane.
LARGEST = 1 << 62


def _parse(text: str, pattern: str, factors: dict[str, int], where: str, kind: str, remedy: str) -> int:
    match = re.fullmatch(pattern, text)
    if not match:
        raise BadInput(f"{text[:60]!r} is not a {kind}", where=where, remedy=remedy)
    value = float(match[1].replace("_", "").replace(",", "")) * factors[match[2].upper()]
    if not math.isfinite(value) or value > LARGEST:
        raise BadInput(f"{text[:60]!r} is too large for a {kind}", where=where, remedy=remedy)
    if value < 1:
        raise BadInput(f"{text[:60]!r} is not above zero", where=where, remedy=remedy)
    return round(value)


#: A bare number up to the first is GiB, as people write sizes of memory; from the second on it is bytes, as JSON holds them.
#: Between them it could be either, or MiB as nvidia-smi shows.
_MOST_BARE_GIB, _FEWEST_BARE_BYTES = 10_000, MIB
_WRITE_A_SIZE = "write it as 24G, 512M or 2T"


def parse_size(text: str | int, *, where: str = "") -> int:
    """Bytes from ``"24G"``, ``"24GiB"``, ``"80GB"`` or ``"1.5T"``. All units are binary, as GPU memory is sold.

    A number without a unit is GiB up to 10,000 and bytes from 1,048,576 on: ``"80"`` is 80 GiB, ``85899345920`` as well.

    Raises:
        BadInput: when the text is no size, is zero or negative, or has no unit and could be GiB, MiB or bytes.
    """
    text = str(text)
    if re.fullmatch(r"0?\.[0-9]*[1-9][0-9]*", text):  # less than one GiB: as a count of bytes it would be none
        return round(float(text) * GIB)
    count = _parse(text, _NUMBER + r"([KMGTPkmgtp]?)(?:[iI]?[bB])?", _SIZE, where, "size", _WRITE_A_SIZE)
    if not re.fullmatch(_NUMBER, text) or count >= _FEWEST_BARE_BYTES:
        return count
    if count > _MOST_BARE_GIB:
        remedy = f"write {text.strip()}M if it is MiB, as nvidia-smi shows, or 24G"
        raise BadInput(f"{text.strip()[:60]} has no unit", where=where, remedy=remedy)
    return round(float(text.replace("_", "").replace(",", "")) * GIB)


def parse_tokens(text: str | int, *, where: str = "") -> int:
    """A number of tokens from ``"4096"``, ``"4k"``, ``"128K"`` or ``"1M"``; k is 1024 and M its square, as contexts are named.

    Raises:
        BadInput: when the text is no whole number above zero.
    """
    match = re.fullmatch(r"([0-9]+(?:[_,]?[0-9]+)*)([kKmM]?)", str(text).strip())
    count = int(re.sub("[_,]", "", match[1])) * {"k": KIB, "m": KIB**2}.get(match[2].lower(), 1) if match else 0
    if not 0 < count <= LARGEST:
        raise BadInput(f"{str(text)[:60]!r} is no number of tokens", where=where, remedy="write it as 4096 or 4k")
    return count


def parse_count(text: str, *, where: str = "") -> int:
    """A number of things from ``"7.5B"``, ``"350M"``, ``"1T"`` or ``"1235814400"``. Units are decimal.

    Raises:
        BadInput: when the text is no count, or is zero or negative.
    """
    return _parse(text, _NUMBER + r"([KMBGTkmbgt]?)", _COUNT, where, "count", "write it as 7.5B, 350M or 1235814400")


def format_bytes(count: int | float | None, *, digits: int = 2) -> str:
    """``"24.00 GiB"``: binary units, the largest that leaves at least one whole. None gives a dash."""
    if count is None:
        return "-"
    for unit, factor in (("TiB", TIB), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if abs(count) >= factor:
            return f"{count / factor:.{digits}f} {unit}"
    return f"{count:.0f} B"


def format_gib(count: int | float | None, *, digits: int = 2) -> str:
    """Format bytes as a plain number of GiB, for a column whose heading names the unit."""
    return "-" if count is None else f"{count / GIB:,.{digits}f}"


def format_count(count: int | float) -> str:
    """Format a count in decimal units: ``"1.24 B"``, ``"354.8 M"``."""
    for unit, factor in (("T", 10**12), ("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if abs(count) >= factor:
            return f"{count / factor:.4g} {unit}"
    return f"{count:.0f}"
