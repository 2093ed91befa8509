"""The options that several verbs share, each defined once, and the decorator that adds them to a verb."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from copy import copy
from dataclasses import Field, fields, replace
from functools import wraps
from typing import Annotated, Any

import typer

from zeroplan.cli import complete
from zeroplan.core.cluster import Cluster
from zeroplan.core.errors import BadInput
from zeroplan.core.units import parse_count, parse_tokens
from zeroplan.engines.registry import BUILT_IN, DEFAULT_ENGINE, find_engine
from zeroplan.planner.request import Request


def _require_one_form(as_json: bool, style: str) -> None:
    if as_json and style != "plain":
        raise BadInput("cannot stand beside --json", where=f"--format {style}", remedy="use one of the two")


def _json(context: typer.Context, as_json: bool) -> bool:
    """Refuse JSON in another format; whichever of the two is read second meets the first."""
    _require_one_form(as_json, context.params.get("style") or "plain")
    return as_json


Json = Annotated[bool, typer.Option("--json", callback=_json, help="Print JSON.")]


def writable(path: str | None) -> str | None:
    """Refuse, before the work starts, a file that could not be written after it: the callback of options that name one."""
    if path is not None:
        from zeroplan.core.files import require_writable

        require_writable(path)
    return path


_MARKDOWN = dict.fromkeys(("markdown", "md"), "github")


def _style(context: typer.Context, style: str) -> str:
    """Refuse an unknown format before the work starts."""
    from zeroplan.report.table import FORMATS

    style = _MARKDOWN.get(style.lower(), style)

    if style not in FORMATS:
        raise BadInput(f"unknown format {style[:40]!r}", where="--format", remedy=f"use one of {', '.join(FORMATS)}")
    _require_one_form(bool(context.params.get("as_json")), style)
    return style


Style = Annotated[str, typer.Option("--format", callback=_style, help="plain, github, html or csv.")]

Wide = Annotated[bool, typer.Option("--wide", help="Show all columns, in lines of any length.")]


#: Of the verbs that search.
SearchedCompile = Annotated[
    str | None,
    typer.Option(
        "--compile",
        rich_help_panel="Workload",
        metavar="PARTS",
        help="What torch.compile is called on: blocks, checkpointed-blocks, model; auto: blocks where that is faster.",
    ),
]


def _quiet(quiet: bool) -> bool:
    """Show no progress either."""
    if quiet:
        from zeroplan.core.progress import watch

        watch(None)
    return quiet


Quiet = Annotated[bool, typer.Option("--quiet", "-q", callback=_quiet, help="Print the verdict alone, and no progress.")]

_WORK, _CLUSTER, _MESH, _ZERO, _FROM = "Workload", "Cluster", "Parallelism", "Sharding", "Files"
#: Fields of what programs call for long sequences, and no file turns on.
ALST = ("tiled_mlp", "tiled_loss", "offload_checkpoints")
#: Fields of what the training loops of ``verify`` and ``tune`` do not do, and no one tape holds.
NOT_LOOPED = (
    "images",
    "image_size",
    "set_to_none",
    "lengths",
    "eval_batch",
    "eval_logits",
    "save",
    "save_by",
    "save_only_model",
    "fp8",
    *ALST,
    "reduce_dtype",
)
#: Fields of a layout, for verbs that take data parallelism alone.
DEGREES = ("tp", "sp", "cp", "ulysses", "pp", "vpp", "ep", "etp", "schedule", "partition", "dp_replicate")
#: Fields that ``recommend`` and ``scale`` do not take: they have their own way to say them, or search no such run.
NOT_SEARCHED = ("ds_config", "checkpoint_policy", "files", "program", "zero_init", "fp8", *ALST, "reduce_dtype")
#: Degrees that the search over layouts does not take, since its engine has none.
NOT_LAID_OUT = ("ulysses", "partition")
#: Fields with a default that may be said outright, so that no file and no search says otherwise (:attr:`Request.ones`).
_SAID = ("gpus", "nodes", "engine", *(name for name in DEGREES if name != "partition"))


def _option(
    kind: Any,
    flag: str,
    help_text: str,
    panel: str | None = None,
    metavar: str | None = None,
    names: Callable[[str], list[str]] | None = None,
) -> Any:
    """Return an option of type ``kind`` as the annotation of a verb's parameter; shells complete it from `names`."""
    option = typer.Option(flag, metavar=metavar, rich_help_panel=panel, help=help_text, autocompletion=names)
    return Annotated[kind, option]


#: The flag of each field of a Request, in the order of the help. The defaults are those of the Request.
OPTIONS: dict[str, Any] = {
    "model": Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="A hub id, a folder, a config.json, a safetensors file or index.",
            autocompletion=complete.models,
        ),
    ],
    "params": _option(str | None, "--params", "A bare count instead of MODEL: 7.5B.", metavar="COUNT"),
    "task": _option(
        str | None,
        "--task",
        "The head: causal-lm, sequence-classification, …; or the training: sft, dpo, kto, orpo, … [by the config, or the file]",
        metavar="TASK",
    ),
    "micro_batch": _option(int | None, "--micro-batch", "Samples a GPU and pass. [1]", _WORK),
    "seq_len": _option(
        str | None, "--seq-len", "Tokens a sample: 4096 or 4k. [2048, or the model's most]", _WORK, metavar="TOKENS"
    ),
    "source_len": _option(
        str | None,
        "--source-len",
        "Tokens of an encoder-decoder's source, where the target has others.",
        _WORK,
        metavar="TOKENS",
    ),
    "target_len": _option(str | None, "--target-len", "Tokens of its target. [--seq-len]", _WORK, metavar="TOKENS"),
    "grad_accum": _option(int | None, "--grad-accum", "Passes a step. [1]", _WORK),
    "dtype": _option(str | None, "--dtype", "bf16, fp16 or fp32. [bf16]", _WORK),
    "reduce_dtype": _option(
        str | None, "--reduce-dtype", "In which gradients are reduced: fp32, or that of --dtype (--engine fsdp2). [fp32]", _WORK
    ),
    "optimizer": _option(str | None, "--optimizer", "adamw, lion, sgd, … [adamw]", _WORK, names=complete.optimizers),
    "transformers_version": _option(
        str | None,
        "--transformers-version",
        "Before 5 --quantize took experts, too, FSDP 1 found the base on the host, and checkpoints were reentrant. [5.17.0]",
        _WORK,
        metavar="VERSION",
    ),
    "set_to_none": _option(
        bool, "--set-to-none/--no-set-to-none", "zero_grad frees gradients, or keeps them as zeros (--engine ddp).", _WORK
    ),
    "gradient_checkpointing": _option(bool, "--gradient-checkpointing/--no-gradient-checkpointing", "Recompute blocks.", _WORK),
    "checkpoint_policy": _option(
        str, "--checkpoint-policy", "What that recomputes: full, selective (not products, attention), op or every:K.", _WORK
    ),
    "attn": _option(str, "--attn", "sdpa, flash or eager.", _WORK),
    "lora_rank": _option(int | None, "--lora-rank", "Train LoRA adapters of this rank only.", _WORK),
    "lora_targets": _option(str | None, "--lora-targets", "Layers to adapt, by comma. [all linear layers]", _WORK),
    "quantize": _option(
        str | None,
        "--quantize",
        "Keep the frozen base in nf4, fp4 (or nf4-single, fp4-single), int8, gptq-4-128 or torchao-8-row.",
        _WORK,
    ),
    "fp8": _option(
        str | None,
        "--fp8",
        "Linear layers multiply in 8 bits (torchao): tensorwise, rowwise or rowwise_with_gw_hp (--engine fsdp2 or ddp).",
        _WORK,
        metavar="RECIPE",
    ),
    "tiled_mlp": _option(
        int,
        "--tiled-mlp",
        "MLPs run in so many tiles of tokens (DeepSpeed's TiledMLP; --engine deepspeed). [0]",
        _WORK,
        metavar="TILES",
    ),
    "tiled_loss": _option(
        int,
        "--tiled-loss",
        "Head and loss run in so many tiles of tokens (DeepSpeed's TiledFusedLogitsLoss; --engine deepspeed). [0]",
        _WORK,
        metavar="TILES",
    ),
    "offload_checkpoints": _option(
        bool,
        "--offload-checkpoints",
        "Inputs of recomputed blocks wait on the host (DeepSpeed's CheckpointHiddenStatesOffload; --engine deepspeed).",
        _WORK,
    ),
    "compile": _option(
        str | None,
        "--compile",
        "Parts of the model that torch.compile makes graphs of: blocks, checkpointed-blocks (which recompute within their "
        "graphs) or model (--engine zeroplan, fsdp2 or ddp).",
        _WORK,
        metavar="PARTS",
    ),
    "images": _option(int, "--images", "Images of each sample, for vision-language models. [0]", _WORK),
    "image_size": _option(int | None, "--image-size", "Pixels of an image's side. [by the config]", _WORK, metavar="PIXELS"),
    "labelled_share": _option(
        float | None,
        "--labelled-share",
        "Share of tokens with a label, if the head computes those alone (--engine zeroplan, TRL): 0.15.",
        _WORK,
    ),
    "lengths": _option(
        str | None, "--lengths", "Samples' lengths, padded batch by batch: a file, or mean,max.", _WORK, metavar="FILE|MEAN,MAX"
    ),
    "eval_batch": _option(int | None, "--eval-batch", "Evaluate between steps, with so many samples a GPU and pass.", _WORK),
    "eval_logits": _option(
        int, "--eval-logits", "Batches whose logits the evaluation keeps on the GPU (eval_accumulation_steps). [0]", _WORK
    ),
    "save": _option(
        str | None,
        "--save",
        "Save between steps: sharded, full (gathered on the first rank), or full-gpu (FSDP 1, on every GPU).",
        _WORK,
        metavar="FORM",
    ),
    "save_by": _option(
        str | None,
        "--save-by",
        "Whose code saves: loop (your own), accelerate, trainer or lightning. [loop]",
        _WORK,
        metavar="WHO",
    ),
    "save_only_model": _option(bool, "--save-only-model", "Save no optimizer states.", _WORK),
    "from_scratch": _option(bool, "--from-scratch", "Weights are initialised: no host reads pretrained ones.", _WORK),
    "gpus": _option(int | None, "--gpus", "GPUs a node. [1, or as the file says]", _CLUSTER),
    "nodes": _option(int | None, "--nodes", "Nodes. [1, or as the file says]", _CLUSTER),
    "gpu": _option(
        str | None, "--gpu", "A preset, with a count if you like: H100, 4xA100-80G, …", _CLUSTER, names=complete.gpus
    ),
    "vram": _option(str | None, "--vram", "Memory of one GPU: 24G, or 24 (GiB).", _CLUSTER),
    "cpu_ram": _option(str | None, "--cpu-ram", "Memory of one node's host: 256G.", _CLUSTER),
    "nvme": _option(str | None, "--nvme", "Disk of one node: 2T.", _CLUSTER),
    "network": _option(
        str | None, "--network", "Between nodes: 8x400G, 25G, 4x100G:efa, aws-p5, … [as usual for the GPU]", _CLUSTER
    ),
    "host": _option(str | None, "--host", "server or desktop: what its system keeps of --cpu-ram. [by the GPU]", _CLUSTER),
    "tp": _option(int, "--tp", "GPUs that share each matrix (tensor parallelism). [1]", _MESH),
    "sp": _option(bool, "--sp/--no-sp", "They share the tokens between matrices, too (sequence parallelism).", _MESH),
    "cp": _option(int, "--cp", "GPUs that share each sample's tokens (context parallelism: ring attention). [1]", _MESH),
    "ulysses": _option(
        int,
        "--ulysses",
        "GPUs that share each sample's tokens by exchanging heads (DeepSpeed's sequence_parallel_size). [1]",
        _MESH,
    ),
    "pp": _option(
        int, "--pp", "Stages of consecutive blocks (pipeline parallelism); --grad-accum micro batches pass. [1]", _MESH
    ),
    "vpp": _option(int, "--vpp", "Chunks of blocks a pipeline rank has (interleaved schedules). [1]", _MESH),
    "ep": _option(int, "--ep", "GPUs that share the experts of a layer (expert parallelism). [1]", _MESH),
    "etp": _option(
        int, "--etp", "GPUs that share each expert's matrices: 1, or as many as --tp; any under megatron. [1]", _MESH
    ),
    "schedule": _option(
        str, "--schedule", "The order of a stage's micro batches: 1f1b, gpipe, zero-bubble, zbv or dualpipev. [1f1b]", _MESH
    ),
    "partition": _option(
        str | None,
        "--partition",
        "How DeepSpeed's PipelineModule divides layers: parameters, uniform or type:decoder. [parameters]",
        _MESH,
    ),
    "dp_replicate": _option(int, "--dp-replicate", "Replicas of the group of GPUs that shards (HSDP). [1]", _MESH),
    "engine": _option(
        str, "--engine", f"{', '.join(BUILT_IN)}, or one of your own. [{DEFAULT_ENGINE}]", _ZERO, names=complete.engines
    ),
    "deepspeed_version": _option(
        str | None,
        "--deepspeed-version",
        "The DeepSpeed that runs: 0.14.2, a file that says it, or installed. [by --from's project, else 0.19.8]",
        _ZERO,
        metavar="VERSION",
    ),
    "stage": _option(int | None, "--stage", "0 to 3. [all]", _ZERO),
    "offload_optimizer": _option(str | None, "--offload-optimizer", "none, cpu or nvme. [all]", _ZERO),
    "offload_param": _option(str | None, "--offload-param", "none, cpu or nvme. [all]", _ZERO),
    "zero_init": _option(
        bool | None, "--zero-init/--no-zero-init", "Stage 3 builds the model sharded. [yes, or as --from says]", _ZERO
    ),
    "ds_config": _option(str | None, "--ds-config", "A ds_config.json: exactly one plan.", _ZERO),
    "files": _option(
        list[str] | None, "--from", "What a program's files say: recipes, TrainingArguments, accelerate, … Repeats.", _FROM
    ),
    "program": _option(str | None, "--program", "The program that owns the file, where two could.", _FROM),
    "depth": _option(str | None, "--depth", "formula or simulated. [simulated where a tape is at hand]"),
    "alloc_conf": _option(str, "--alloc-conf", "PYTORCH_ALLOC_CONF: expandable_segments:True,…"),
    "token": _option(str | None, "--token", "The hub's token, for gated models."),
    "trust_remote_code": _option(bool, "--trust-remote-code", "Let an unknown architecture run its own code."),
}
#: Fields whose flag takes text, and the function that reads it.
_READERS: dict[str, Callable[[Any], Any]] = {
    "params": lambda text: None if text is None else parse_count(text, where="--params"),
    "seq_len": lambda text: None if text is None else parse_tokens(text, where="--seq-len"),
    "source_len": lambda text: None if text is None else parse_tokens(text, where="--source-len"),
    "target_len": lambda text: None if text is None else parse_tokens(text, where="--target-len"),
    "files": lambda paths: tuple(paths or ()),
    "lora_targets": lambda text: tuple(name.strip() for name in (text or "").split(",") if name.strip()),
}


def takes_request(*without: str, searched: Iterable[str] = ()) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a verb the shared options. Its first parameter gets the :class:`~zeroplan.planner.request.Request` made of them.

    Args:
        without: fields of the Request for which the verb has no option. If the verb has a parameter of an option's name, that
            parameter replaces the option (type, default and help), and its value goes to the verb, not to the Request.
            Arguments of the verb itself stand before MODEL.
        searched: fields that the verb finds out itself, unless they are given.
    """

    def decorate(verb: Callable[..., None]) -> Callable[..., None]:
        own = dict(list(inspect.signature(verb, eval_str=True).parameters.items())[1:])
        defaults = {field.name: field for field in fields(Request)}
        shared = [name for name in OPTIONS if name not in without]
        asked = [own.get(name) or _parameter(defaults[name], searched=name in searched) for name in shared]
        more = [parameter for name, parameter in own.items() if name not in shared]
        asked = [one for one in more if _is_argument(one)] + asked + [one for one in more if not _is_argument(one)]

        @wraps(verb)
        def run(**values: Any) -> None:
            given = {name: values.pop(name) for name in shared if name not in own}
            ones = tuple(name for name in _SAID if name in given and given[name] == defaults[name].default)
            given = {name: value for name, value in given.items() if value is not None or name not in _SAID}
            verb(Request(**{name: _READERS.get(name, _same)(value) for name, value in given.items()}, ones=ones), **values)

        keywords = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in asked]
        run.__signature__ = inspect.Signature(keywords)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in keywords}
        return run

    return decorate


#: What ``recommend`` is asked about what ``estimate`` has answered: all but what it finds out itself.
_FOR_RECOMMEND = (
    *(
        "model",
        "params",
        "task",
        "seq_len",
        "source_len",
        "target_len",
        "dtype",
        "optimizer",
        "attn",
        "lora_rank",
        "lora_targets",
        "quantize",
        "images",
        "image_size",
        "lengths",
        "eval_batch",
        "eval_logits",
        "save",
        "save_by",
        "save_only_model",
        "from_scratch",
        "compile",
        "transformers_version",
        "labelled_share",
        "set_to_none",
        "alloc_conf",
    ),
    *("gpus", "nodes", "gpu", "vram", "cpu_ram", "nvme", "host", "network", "engine", "deepspeed_version", "trust_remote_code"),
)


#: Fields of runs that ``recommend`` does not search.
_ANOTHER_RUN = ("fp8", *ALST, "reduce_dtype")


def recommend_words(request: Request) -> list[str]:
    """Return the words of the ``recommend`` command for the same model, workload and cluster; none where it knows no such run.

    A batch that was asked for stays the global batch, which ``recommend`` splits anew. Degrees of parallelism are kept where
    layouts are searched; elsewhere the words are those without them.
    """
    given = chosen(request)
    degrees = [name for name in DEGREES if name in given]
    if degrees and (not find_engine(request.engine).laid_out or set(degrees) & set(NOT_LAID_OUT) or request.files):
        degrees = []
    if any(name in given for name in _ANOTHER_RUN) or ("checkpoint_policy" in given and request.gradient_checkpointing):
        return []
    ones = {name: 1 for name in ("gpus", "nodes") if name in request.ones and request.files}
    words = ["zeroplan", "recommend", *_words(given | ones, (*_FOR_RECOMMEND, *degrees))]
    if (request.micro_batch or request.grad_accum) and not request.files and request.ds_config is None:
        ranks = Cluster.of(gpus=request.gpus, nodes=request.nodes, gpu=request.gpu).layout.world_size
        data_parallel = ranks // (request.tp * request.cp * request.pp if degrees else 1)
        words += ["--global-batch", str(data_parallel * (request.micro_batch or 1) * (request.grad_accum or 1))]
    for file in request.files:
        words += ["--from", str(file)]
    if request.ds_config is not None:
        words += ["--from", str(request.ds_config)]
    return words if request.gpu or request.vram else [*words, "--gpu", "H100"]


def estimate_words(request: Request, stage: int) -> list[str]:
    """Return the words of the ``estimate`` command for exactly this run."""
    bare = None if request.gpu is None else re.sub(r"^\d+x", "", request.gpu)  # --gpus has the count
    given = chosen(replace(request, stage=stage, gpu=bare, token=None))
    return ["zeroplan", "estimate", *_words(given, [name for name in OPTIONS if name not in ("files", "inputs")])]


def _words(given: Mapping[str, Any], names: Iterable[str]) -> list[str]:
    """Return the flags, with their values, of those fields that were given."""
    words: list[str] = []
    for name in names:
        value = given.get(name)
        if value is None:
            continue
        flag = [] if name == "model" else [f"--{'no-' if value is False else ''}{name.replace('_', '-')}"]
        text = [] if isinstance(value, bool) else [",".join(value) if isinstance(value, tuple) else str(value)]
        words += [*flag, *text]
    return words


def chosen(request: Request) -> dict[str, Any]:
    """Return the fields of the request that differ from their defaults."""
    values = {field.name: (getattr(request, field.name), field.default) for field in fields(request) if field.name != "ones"}
    return {name: value for name, (value, default) in values.items() if value != default}


def _parameter(field: Field[Any], *, searched: bool = False) -> inspect.Parameter:
    """Return the parameter for a field of the Request.

    The default of a field that is read from text, or that may be said outright, is None.
    """
    default = None if field.name in _READERS or field.name in _SAID else field.default
    annotation = OPTIONS[field.name]
    if default != field.default or searched:
        kind, option = annotation.__origin__, copy(annotation.__metadata__[0])
        if searched:
            option.help = f"{option.help.removesuffix('[1]').rstrip()} [searched]"
        annotation = Annotated[kind | None, option]
    return inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _is_argument(parameter: inspect.Parameter) -> bool:
    """Return whether it stands on the command line without a flag."""
    return any(isinstance(one, typer.models.ArgumentInfo) for one in getattr(parameter.annotation, "__metadata__", ()))


def _same(value: Any) -> Any:
    return value
