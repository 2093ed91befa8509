"""What older versions of transformers did otherwise: before 5 checkpoints were reentrant, and a quantised base lay and reached
elsewhere; from 4.46 to 4.48 the loss read a copy of the logits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from zeroplan.core.errors import BadInput
from zeroplan.core.option import WORK, Option
from zeroplan.core.versions import TRANSFORMERS, Version, parse_version, version_text
from zeroplan.core.workload import Workload
from zeroplan.techniques.base import OptionValues, TakesTechniques, Technique

if TYPE_CHECKING:
    from zeroplan.tape.expanded import ExpandedTape

#: The first transformers that takes quantised weights to the host where FSDP or ZeRO shards them (``modeling_utils.py`` of
#: 4.40.0, ``_load_state_dict_into_meta_model``).
OLDEST = (4, 39, 0)
#: The first transformers whose loss copied the logits beside those in 16 bits, and the first that did not.
_COPIES, _COPIES_NO_MORE = (4, 46, 0), (4, 49, 0)


@dataclass(frozen=True, slots=True)
class CopiedLogits:
    """The loss reads a copy of the fp32 logits, without the last of each sample.

    Earlier versions copied them as well, but made fp32 logits in place of those in 16 bits before the loss, so that no more was
    alive than in the backward. Source: transformers 4.48, loss/loss_utils.py (ForCausalLMLoss); 4.45, modeling_llama.py
    """


class OlderTransformersTechnique(Technique[CopiedLogits]):
    """An older transformers. A workload carries its loss alone: other techniques read the option."""

    name = "older transformers"
    kind = CopiedLogits
    where = "--transformers-version"
    engines = ("ddp", "fsdp", "fsdp2", "deepspeed")
    in_forms = True  # what a version does no key asks for
    looped = True  # verify runs the version that is installed
    transformers_version = Option[str | None](
        str,
        None,
        "Before 5 checkpoints were reentrant, FSDP 1 found a base on the host, --quantize took experts. [5.17.0]",
        WORK,
        metavar="VERSION",
        wins=True,
    )

    def value(self, asked: OptionValues, engine: TakesTechniques) -> CopiedLogits | None:
        """Return the copy of the logits where the version made one; refuse a version that is not known."""
        copies = _COPIES <= _version(asked) < _COPIES_NO_MORE
        return CopiedLogits() if copies and self.taken_by(engine) else None

    def expanded(self, value: CopiedLogits, tape: ExpandedTape, workload: Workload) -> ExpandedTape:
        """Return the tape with the copy in the forward of the loss, and with what its backward makes of the copy's gradient."""
        from zeroplan.tape.copied_logits import with_copied_logits

        return with_copied_logits(tape, workload.batch.rows, workload.batch.seq_len or 1)


def before_5(asked: OptionValues) -> bool:
    """Return whether transformers is one before 5.

    Raises:
        BadInput: a version that is not known.
    """
    return _version(asked) < (5, 0, 0)


def _version(asked: OptionValues) -> Version:
    said, where = asked[OlderTransformersTechnique.transformers_version], OlderTransformersTechnique.where
    known = parse_version(TRANSFORMERS)
    version = known if said is None else parse_version(said, where)
    if not OLDEST <= version <= known:
        oldest = version_text(OLDEST)
        raise BadInput(
            f"of transformers {oldest} to {TRANSFORMERS} are known", where=where, remedy=f"use {oldest} or {TRANSFORMERS}"
        )
    return version
