"""``verify --from``: what a file says of a run, as far as verify's own training loop can run it."""

from __future__ import annotations

from collections.abc import Iterator

from zeroplan.core.errors import BadInput
from zeroplan.core.parallel import DEGREES, least_ranks
from zeroplan.core.preferences import PLAIN_TASKS
from zeroplan.core.tasks import training_of
from zeroplan.core.unmodelled import Effect
from zeroplan.engines.registry import DEFAULT_VERIFIED
from zeroplan.interop.readers import read_setups
from zeroplan.interop.setups import Setup
from zeroplan.planner.merge import with_files
from zeroplan.run.ask import Ask
from zeroplan.techniques.chunked_head import ChunkedHeadTechnique
from zeroplan.techniques.float8 import Float8Technique
from zeroplan.techniques.lora import LoraTechnique

#: Options of a file that change neither the model nor its sharding: the loop does as its engine does, and neither evaluates nor
#: saves. FSDP2 shards blocks and the root there, and reduces in fp32.
_LEFT_TO_THE_LOOP = (
    *("optimizer_kind", "torch_adam", "detached_loss", "moved", "pads", "unmodelled", "task", "zero_init", "accelerate_units"),
    *("reduce_dtype", "eval_batch", "eval_logits", "save", "save_by", "save_only_model"),
)


def with_runnable_files(request: Ask, ranks: int | None) -> tuple[Ask, Setup, int | None]:
    """Fill a request from its files, and leave to verify's loop what does not change the model or its sharding.

    The loop loads no pretrained weights, and its optimizer walks its tensors in the engine's own way.

    Args:
        ranks: how many will run; None where nothing but the files says it.

    Returns:
        The request, what the files say, and how many ranks to run: those of the files, else as many as their degrees need.

    Raises:
        BadInput: files that cannot be read, or that ask for what the loop does not do.
    """
    setup = read_setups(request.files, request.program, training_of(request.task))
    ranks = ranks or setup.ranks
    if ranks is None and setup.degrees:
        degrees = {name: int(degree) for name, degree in setup.degrees.items() if name in DEGREES}
        ranks = least_ranks(**degrees) * (setup.ask.dp_shard or 1)
    filled, setup = with_files(request.replace(gpus=ranks) if ranks is not None else request, DEFAULT_VERIFIED)
    if request.deepspeed_version is None:  # the installed one runs, whatever the project pins
        filled = filled.replace(deepspeed_version=None)
    missing = list(_not_run(filled, setup))
    if missing:
        raise BadInput(
            f"verify trains by a loop of its own, which has no {', no '.join(missing[:3])}",
            where=setup.files[0],
            remedy="put zeroplan.callback.ZeroplanCallback into the program's own run, or give flags in place of --from",
        )
    return filled.replace(**dict.fromkeys(_LEFT_TO_THE_LOOP)), setup, ranks


def _not_run(filled: Ask, setup: Setup) -> Iterator[str]:
    if setup.task not in ("", *PLAIN_TASKS):
        yield f"step of {setup.task}"
    if "quantize" in filled or "quantize" in setup.ask:
        yield f"quantised base ({setup.key('quantize')})"
    if filled[Float8Technique.fp8] is not None or setup.ask[Float8Technique.fp8] is not None:
        yield f"8-bit products ({setup.key('fp8')})"
    if "compile" in setup.ask:
        yield f"compiled graphs ({setup.key('compile')})"
    if setup.ask[ChunkedHeadTechnique.chunked_head] and filled.ds_config is None:
        yield "tiled head of TRL"
    if setup.ask[LoraTechnique.lora_dropout]:
        yield f"dropout of adapters ({setup.ask.source('lora_dropout') or 'by default'})"
    if filled.precision is not None:
        yield f"weights in {setup.ask.model_dtype} ({setup.ask.source('model_dtype') or 'by default'})"
    yield from (one.key for one in filled.unmodelled if one.effect is not Effect.NONE)
