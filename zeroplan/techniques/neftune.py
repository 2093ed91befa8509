"""NEFTune: uniform noise on the embeddings of each forward (Jain et al. 2023, arXiv 2310.05914).

A hook behind the input embedding draws the noise in a tensor of its output's shape and dtype, and returns their sum: for a
moment there are three such tensors, then one, as before. Neither backward keeps anything of it.
Source: transformers 5.17, integrations/neftune.py (neftune_post_forward_hook)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from zeroplan.core.option import RUNS, WORK, Option
from zeroplan.core.workload import Workload
from zeroplan.techniques.base import OptionValues, TakesTechniques, Technique

if TYPE_CHECKING:
    from zeroplan.tape.expanded import ExpandedTape


@dataclass(frozen=True, slots=True)
class Neftune:
    """Embeddings get noise of this scale."""

    alpha: float


class NeftuneTechnique(Technique[Neftune]):
    """Noise on embeddings."""

    name = "NEFTune"
    kind = Neftune
    where = "--neftune"
    neftune = Option[float | None](
        float, None, "Noise on the embeddings of each forward, of this scale: 5 (NEFTune).", WORK, metavar="ALPHA", without=RUNS
    )
    keys: ClassVar[Mapping[str, Mapping[str, str]]] = {
        **{program: {"neftune_noise_alpha": "neftune"} for program in ("hf-trainer", "trl", "axolotl", "ms-swift")},
        "llama-factory": {"neftune_alpha": "neftune"},
    }
    engines = ("ddp", "fsdp", "fsdp2", "deepspeed", "zeroplan")
    refusal = "noise on embeddings is not modelled under {engine}"
    remedy = "leave it out: three tensors of one layer's size for a moment"
    apart = ("--compile", "--images")
    because = "noise on embeddings beside it is not modelled"

    def value(self, asked: OptionValues, engine: TakesTechniques) -> Neftune | None:
        """Return the noise; none where its scale is 0."""
        alpha = asked[NeftuneTechnique.neftune]
        return Neftune(alpha) if alpha else None

    def expanded(self, value: Neftune, tape: ExpandedTape, workload: Workload) -> ExpandedTape:
        """Return the tape with the noise behind the first embedding, whose output's number the sum takes over."""
        from zeroplan.tape.edit import TapeEdit
        from zeroplan.tape.expanded import Op

        edit = TapeEdit(tape)
        embedding = next((index for index, one in enumerate(tape.modules) if one.type == "Embedding"), None)
        begin = None if embedding is None else edit.first(Op.ENTER, embedding)
        end = None if begin is None or embedding is None else edit.first(Op.EXIT, embedding, begin)
        if begin is None or end is None or embedding is None:
            return tape
        left = edit.left_by(range(begin, end))
        if not left:
            return tape
        output, size = max(left.items(), key=lambda one: one[1])
        at = edit.made[output]
        op, _, _, kind, module = edit.event(at)
        plain = next(edit.storages)
        edit.replace(at, (op, plain, size, kind, module))
        write = edit.before(end, embedding)
        noise = write.alloc(size)
        write.events.append((op, output, size, kind, module))
        write.free(noise, plain)
        return edit.result()

    def setting(self, value: Neftune) -> float:
        """Return the scale."""
        return value.alpha

    def described(self, value: Neftune) -> Mapping[str, Any]:
        """Return its scale."""
        return {"neftune": value.alpha}
