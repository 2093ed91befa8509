"""What transformers before 5 did otherwise: checkpoints were reentrant, and a quantised base lay and reached elsewhere."""

from __future__ import annotations

from zeroplan.core.errors import BadInput
from zeroplan.core.option import WORK, Option
from zeroplan.core.versions import TRANSFORMERS, parse_version, version_text
from zeroplan.techniques.base import OptionValues, TakesTechniques, Technique

#: The first transformers that takes quantised weights to the host where FSDP or ZeRO shards them (``modeling_utils.py`` of
#: 4.40.0, ``_load_state_dict_into_meta_model``).
_OLDEST = (4, 39, 0)


class OlderTransformersTechnique(Technique[bool]):
    """A transformers before 5. No workload carries it: other techniques read the option."""

    name = "older transformers"
    kind = bool
    where = "--transformers-version"
    transformers_version = Option[str | None](
        str,
        None,
        "Before 5 --quantize took experts, too, FSDP 1 found the base on the host, and checkpoints were reentrant. [5.17.0]",
        WORK,
        metavar="VERSION",
        wins=True,
    )

    def value(self, asked: OptionValues, engine: TakesTechniques) -> bool | None:
        """Refuse a version that is not known, also where nothing depends on it."""
        before_5(asked)
        return None


def before_5(asked: OptionValues) -> bool:
    """Return whether transformers is one before 5.

    Raises:
        BadInput: a version that is not known.
    """
    said, where = asked[OlderTransformersTechnique.transformers_version], OlderTransformersTechnique.where
    if said is None:
        return False
    version, known = parse_version(said, where), parse_version(TRANSFORMERS)
    if not _OLDEST <= version <= known:
        oldest = version_text(_OLDEST)
        raise BadInput(
            f"of transformers {oldest} to {TRANSFORMERS} are known", where=where, remedy=f"use {oldest} or {TRANSFORMERS}"
        )
    return version < (5, 0, 0)
