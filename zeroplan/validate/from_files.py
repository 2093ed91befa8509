"""``verify --from``: what a file says of a run, as far as verify's own training loop can run it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from zeroplan.core.errors import BadInput
from zeroplan.core.parallel import DEGREES, least_ranks
from zeroplan.core.preferences import PLAIN_TASKS
from zeroplan.core.tasks import training_of
from zeroplan.core.unmodelled import Effect
from zeroplan.interop.readers import read_setups
from zeroplan.interop.setups import Setup
from zeroplan.planner.from_files import with_files
from zeroplan.planner.request import Request


def with_runnable_files(request: Request, ranks: int | None) -> tuple[Request, Setup, int | None]:
    """Fill a request from its files, and leave to verify's loop what does not change the model or its sharding.

    The loop loads no pretrained weights, and its optimizer walks its tensors in the engine's own way.

    Args:
        request: names the files.
        ranks: how many will run; None where nothing but the files says it.

    Returns:
        The request, what the files say, and how many ranks to run: those of the files, else as many as their degrees need.

    Raises:
        BadInput: files that cannot be read, or that ask for what the loop does not do.
    """
    setup = read_setups(request.files, request.program, training_of(request.task))
    if ranks is None and setup.gpus is not None:
        ranks = setup.gpus * (setup.nodes or 1)
    elif ranks is None and setup.degrees:
        degrees = {name: int(degree) for name, degree in setup.degrees.items() if name in DEGREES}
        ranks = least_ranks(**degrees) * (setup.dp_shard or 1)
    filled, setup = with_files(replace(request, gpus=ranks) if ranks is not None else request)
    if request.deepspeed_version is None:  # the installed one runs, whatever the project pins
        filled = replace(filled, deepspeed_version=None)
    missing = list(_not_run(filled, setup))
    if missing:
        raise BadInput(
            f"verify trains by a loop of its own, which has no {', no '.join(missing[:3])}",
            where=setup.files[0],
            remedy="put zeroplan.callback.ZeroplanCallback into the program's own run, or give flags in place of --from",
        )
    plain = replace(
        filled, optimizer_kind=None, torch_adam=False, detached_loss=False, moved=False, pads=False, unmodelled=(), task=None
    )
    plain = replace(plain, zero_init=None)
    # Its FSDP2 shards blocks and the root, and reduces in fp32.
    plain = replace(plain, accelerate_units=False, reduce_dtype=None)
    # The loop neither evaluates nor saves.
    plain = replace(plain, eval_batch=None, eval_logits=0, save=None, save_by=None, save_only_model=False)
    return plain, setup, ranks


def _not_run(filled: Request, setup: Setup) -> Iterator[str]:
    if setup.task not in ("", *PLAIN_TASKS):
        yield f"step of {setup.task}"
    if filled.quantize is not None or setup.quantize is not None:
        yield f"quantised base ({setup.keys.get('quantize', 'quantize')})"
    if filled.fp8 is not None or setup.fp8 is not None:
        yield f"8-bit products ({setup.keys.get('fp8', 'fp8')})"
    if setup.compile is not None:
        yield f"compiled graphs ({setup.keys.get('compile', 'compile')})"
    if setup.chunked_head and filled.ds_config is None:
        yield "tiled head of TRL"
    if setup.lora_dropout:
        yield f"dropout of adapters ({setup.keys.get('lora_dropout', 'by default')})"
    if filled.precision is not None:
        yield f"weights in {setup.model_dtype} ({setup.keys.get('model_dtype', 'by default')})"
    yield from (one.key for one in filled.unmodelled if one.effect is not Effect.NONE)
