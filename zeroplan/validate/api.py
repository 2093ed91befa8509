"""verify(): predicts and runs a request's configurations on this machine, and compares the plans with the measurements."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any, Unpack

from zeroplan.core.errors import BadInput
from zeroplan.core.parallel import DEGREES, least_ranks
from zeroplan.core.plan import ModelInfo
from zeroplan.core.preferences import PLAIN_TASKS
from zeroplan.core.tasks import training_of
from zeroplan.core.unmodelled import Effect
from zeroplan.core.versions import parse_version, version_text
from zeroplan.core.workload import Compilation
from zeroplan.core.zero_config import OffloadDevice
from zeroplan.ds_config.source import load_source
from zeroplan.engines.base import Engine
from zeroplan.engines.case import Case
from zeroplan.engines.registry import DEFAULT_VERIFIED, engine_names, find_engine
from zeroplan.interop.readers import read_setups
from zeroplan.interop.setups import Setup
from zeroplan.planner.describe import describe_workload
from zeroplan.planner.merge import with_files
from zeroplan.planner.options import VerifyOptions, require_known
from zeroplan.planner.resolve import resolve
from zeroplan.planner.tapes import ExpandedTapes
from zeroplan.run.ask import Ask
from zeroplan.techniques.chunked_head import ChunkedHeadTechnique
from zeroplan.techniques.compiled import CompiledTechnique
from zeroplan.techniques.float8 import Float8Technique
from zeroplan.techniques.lora import LoraTechnique
from zeroplan.techniques.older_transformers import OlderTransformersTechnique
from zeroplan.validate.job import STEPS, job_of
from zeroplan.validate.machine import VerifyMachine, find_machine, ranks_to_use
from zeroplan.validate.results import Drift
from zeroplan.validate.runs import Runs, Say, to_stderr

if TYPE_CHECKING:
    from zeroplan.validate.live import LiveModule


def at_installed(request: Ask) -> Ask:
    """Return the request with the version of the engine's package that is installed here, by which it is then planned.

    Raises:
        BadInput: another version is asked for, or the package is not installed.
    """
    _require_installed("transformers", request[OlderTransformersTechnique.transformers_version], "--transformers-version")
    package, where = find_engine(request.engine).package, "--deepspeed-version"
    if not package:
        return request
    asked = request.deepspeed_version
    if asked is not None:
        from zeroplan.interop.deepspeed_version import requested_version

        asked, _ = requested_version(asked)
    return request.replace(deepspeed_version=_require_installed(package, asked, where))


def _require_installed(package: str, asked: str | None, where: str) -> str | None:
    """Return the installed version of a package; None where the package is missing and no version is asked for.

    Raises:
        BadInput: another version is asked for.
    """
    try:
        here = version_text(parse_version(version(package), where))
    except PackageNotFoundError:
        here = None  # whoever imports it says so
    if asked is not None and here != version_text(parse_version(asked, where)):
        what = f"{package} {here} is installed here and would run" if here else f"{package} is not installed here"
        raise BadInput(what, where=where, remedy=f"leave it out, or install {package} {asked}")
    return here


#: On GPUs: every stage of this shape that the machine holds.
GPU_MODEL = "meta-llama/Llama-3.2-1B"
GPU_WORKLOAD = {"micro_batch": 1, "seq_len": 1024}

#: On a CPU: a Llama of 10 M parameters, of an odd width and vocabulary. Heads and lengths are such that CUDA's attention, for
#: which the plan is made, pads nothing, so that a CPU's tensors can be held against it.
CPU_MODEL: dict[str, Any] = {
    "model_type": "llama",
    "_name_or_path": "Llama, 10 M parameters",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 256,
    "intermediate_size": 717,
    "num_hidden_layers": 10,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 4997,
    "max_position_embeddings": 512,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
CPU_WORKLOAD = {"micro_batch": 2, "seq_len": 128}


def builtin_request(machine: VerifyMachine) -> dict[str, Any]:
    """Return the request's fields for this machine."""
    if machine.device == "cuda":
        return {"model": GPU_MODEL, **GPU_WORKLOAD}
    return {"model": dict(CPU_MODEL), **CPU_WORKLOAD}


#: The largest error of the total, as a fraction of the plan.
TOLERANCE = 0.02
#: Seconds without progress of any rank after which a run is ended.
TIMEOUT = 300.0


def verify(
    model: Any = None,
    *,
    inputs: Any = None,
    tolerance: float = TOLERANCE,
    timeout: float = TIMEOUT,
    steps: int = STEPS,
    progress: Say | None = None,
    **options: Unpack[VerifyOptions],
) -> Drift:
    """Train for a few steps on this machine, and compare the plan with the measurement.

    Args:
        model: a catalog or hub id, a path, or a config as a dict. Without a model a built-in set runs, which ends within five
            minutes. Weights are random, so only the config is downloaded. With `inputs`, a live ``nn.Module``.
        inputs: one micro batch for a live module: its forward's keyword arguments as a dict, or its positional ones. The
            forward returns the loss, or an object with an attribute `loss`; of any other tensor the mean is taken.
        tolerance: the largest error of the total, as a fraction of the plan. Owned buffers must be equal.
        timeout: seconds without progress of any rank after which the run is ended.
        steps: optimizer steps; peaks repeat from the second applied step on.
        progress: called with a line of text for each thing that begins; None prints the lines to stderr.
        options: :class:`zeroplan.planner.options.VerifyOptions`, such as ``engine="fsdp2"`` (``"zeroplan"`` unless
            given), ``stage=2``, ``gpus=2``, ``ds_config=…``.

    Returns:
        Every configuration's plan and measurement. Running out of memory, and ranks that die or hang, are results, too.

    Raises:
        BadInput: a value that cannot be used, or what the engine refuses to run.
        TypeError: an argument that does not exist, with the nearest name.
    """
    require_known(options, VerifyOptions.__annotations__, "verify")
    say = progress or to_stderr
    if not 0 < tolerance < 1:
        raise BadInput(f"{tolerance} is no fraction", where="--tolerance", remedy="write 2 % as 0.02")
    if not timeout > 0:
        raise BadInput(f"{timeout} is no time", where="--timeout", remedy="give seconds, such as 300")
    if steps < 2:
        raise BadInput(f"{steps} is too few", where="--steps", remedy="use 2 or more: peaks repeat from the second on")
    live = _live(model, inputs, options)
    machine = find_machine()
    asked = options.pop("gpus", None)
    built_in = model is None and not options.get("files")
    given: dict[str, Any] = builtin_request(machine) if built_in else {"model": model}
    if options.get("ds_config") is not None and built_in:
        given.pop("micro_batch")  # the file's to say
    if live is not None:
        given["micro_batch"], given["seq_len"] = live.shape()
    # Models are built with random weights.
    request = Ask(**{"from_scratch": True, **given, **{name: value for name, value in options.items() if value is not None}})
    if not request.files:
        request = request.replace(engine=request.values.get("engine", DEFAULT_VERIFIED))
    else:
        request, setup, asked = with_runnable_files(request, asked or machine.ranks or None)
        say(setup.line)
    if "quantize" in request:
        raise BadInput("verify's loop trains no quantised base", where="--quantize", remedy="leave it out")
    task = training_of(request.task)
    if task not in (None, *PLAIN_TASKS):
        raise BadInput(f"verify's loop does no step of {task}", where="--task", remedy="leave it out")
    degrees = {name: getattr(request, name) for name in DEGREES}
    ranks = ranks_to_use(machine, asked, least_ranks(**degrees))
    cluster = machine.cluster(ranks)
    _require_compilable(request, machine)
    resolved = resolve(at_installed(request).replace(gpus=cluster.gpus, nodes=cluster.nodes))
    cases = [replace(case, cluster=cluster) for case in resolved.cases if not _lacks_path(case)]
    if not cases:
        raise BadInput("NVMe without a folder", where="--offload-optimizer", remedy="give nvme_path in a --ds-config")
    engine, raw = resolved.engine.for_verify(_raw(request.ds_config), device=machine.device, own_module=live is not None)
    runs = Runs(
        engine=engine,
        tapes=_tapes(engine, model, live),
        cases=cases,
        jobs=[job_of(case, engine, raw=raw, steps=steps, timeout=timeout, live=live) for case in cases],
        machine=machine,
        ranks=ranks,
        tolerance=tolerance,
        say=say,
        skip_misfits=built_in,
    )
    comparisons = runs.run()
    spec = resolved.spec
    return Drift(
        model=ModelInfo(name=spec.name, params=spec.params, trainable=spec.trainable, source=spec.source),
        workload=describe_workload(resolved.workload),
        machine={**machine.describe(), "ranks": ranks},
        tolerance=tolerance,
        warnings=(*resolved.warnings, *_without_path(len(resolved.cases) - len(cases)), *runs.skipped),
        within=all(comparison.within for comparison in comparisons),
        comparisons=tuple(comparisons),
    )


def _require_compilable(request: Ask, machine: VerifyMachine) -> None:
    if "compile" not in request:
        return
    if machine.device == "cpu":
        raise BadInput("compiled plans are of a GPU's graphs", where="--compile", remedy="leave it out on a CPU")
    if request[CompiledTechnique.compile] == Compilation.MODEL:
        raise BadInput(
            f"verify compiles blocks, no {request[CompiledTechnique.compile]}", where="--compile", remedy="use --compile blocks"
        )


def _live(model: Any, inputs: Any, options: VerifyOptions) -> LiveModule | None:
    """The user's module and batch, where there is a batch."""
    if inputs is None:
        return None
    if not hasattr(model, "named_parameters"):
        raise BadInput("inputs are for a live nn.Module", where="inputs", remedy="leave them out: others get random tokens")
    for name in ("micro_batch", "seq_len"):
        if options.get(name) is not None:
            raise BadInput("the batch says it", where=name, remedy="leave it out, or give another batch")
    for name in ("lora_rank", "gradient_checkpointing"):
        if options.get(name):
            raise BadInput("is not done to a live module", where=name, remedy="give the module as it is to be trained")
    from zeroplan.validate.live import live_module, require_no_rank

    require_no_rank()
    engine = find_engine(options.get("engine") or DEFAULT_VERIFIED, where="engine")
    if not engine.takes_modules:
        others = [name for name in engine_names() if find_engine(name).takes_modules]
        what = f"{engine.name} builds its models itself, which a live module is not for"
        raise BadInput(what, where="engine", remedy=f"use {' or '.join(others)}")
    return live_module(model, inputs)


def _tapes(engine: Engine, model: Any, live: LiveModule | None) -> ExpandedTapes:
    if live is None:
        return ExpandedTapes(engine)
    from zeroplan.validate.live import LiveTapes

    return LiveTapes(engine, live, model)


def _lacks_path(case: Case) -> bool:
    """Return whether a table's option goes to NVMe without saying where."""
    parts = (case.zero.offload_optimizer, case.zero.offload_param)
    return any(part.device is OffloadDevice.NVME and part.nvme_path is None for part in parts)


def _without_path(count: int) -> list[str]:
    """A warning about the configurations that are left out, if any."""
    which = "1 configuration with NVMe is" if count == 1 else f"{count} configurations with NVMe are"
    return [f"{which} left out: give nvme_path in a --ds-config"] if count else []


def _raw(source: Any) -> Mapping[str, Any] | None:
    if source is None or isinstance(source, dict):
        return source
    return load_source(source)[0]  # once more, as resolve keeps what it makes of it


#: Options of a file that change neither the model nor its sharding: the loop does as its engine does, and neither evaluates nor
#: saves. FSDP2 shards blocks and the root there, and reduces in fp32.
_LEFT_TO_THE_LOOP = (
    *("optimizer_kind", "torch_adam", "detached_loss", "moved", "dynamic_padding", "unmodelled", "task", "zero_init"),
    *("accelerate_units", "reduce_dtype", "eval_batch", "eval_logits", "save", "save_by", "save_only_model"),
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
