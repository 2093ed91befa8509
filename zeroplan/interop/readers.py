"""Reads files as the programs that own them do, and puts the Setups of several files together into one."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from zeroplan.core.errors import BadInput
from zeroplan.core.plumbing.files import is_capture
from zeroplan.core.unmodelled import Effect, Unmodelled
from zeroplan.core.versions import Version, parse_version
from zeroplan.core.zero_config import DEEPSPEED_VERSION
from zeroplan.interop.deepspeed_version import pinned_version
from zeroplan.interop.programs.accelerate import launch_document
from zeroplan.interop.programs.document import Document, PrintedAnswer, find_named_file, load_document
from zeroplan.interop.programs.program import Program
from zeroplan.interop.programs.registry import PROGRAMS, owner_of, program_named, version_of
from zeroplan.interop.programs.shell import RECIPE_FLAGS, RECIPES, Command
from zeroplan.interop.setups import Setup
from zeroplan.techniques.checkpointing import CheckpointingTechnique
from zeroplan.techniques.older_transformers import OLDEST

#: Programs that decide the engine and the machine, and leave the rest to another file.
_LAUNCHERS = ("accelerate", "ds_config")
#: Programs whose arguments scripts of one's own take by ``HfArgumentParser``.
_OF_SCRIPTS = ("hf-trainer", "trl")
#: Programs whose models are transformers'.
_ON_TRANSFORMERS = (*_OF_SCRIPTS, "axolotl", "llama-factory", "ms-swift", "open-instruct")
#: Where torch looks for the allocator's settings; the older name is still read.
ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
#: The first bitsandbytes whose products keep no input of a frozen weight.
_BITSANDBYTES = (0, 43, 2)
#: Fields that a launcher's file decides where both say them.
_LAUNCHERS_OWN = (
    "engine",
    "fsdp_version",
    "state_dict",
    "accelerate_units",
    "reduce_dtype",
    "one_unit",
    "gpus",
    "nodes",
    "ds_config",
    "zero_init",
    "stage",
    "offload_optimizer",
    "offload_param",
)


def read_setup(source: Any, program: str | None = None, task: str | None = None) -> Setup:
    """Read what a file or an object says of a run.

    Args:
        source: a path, a mapping, or a ``transformers.TrainingArguments``.
        program: the name of the program that owns it; None to find out.
        task: what the run does, such as ``kto``; None to find out.

    Raises:
        BadInput: when it cannot be read, holds values of wrong types, is nobody's, or could be several programs'.
    """
    version = "" if program is None else version_of(program)
    document = replace(load_document(source), task=task or "", version=version)
    script, recipe = document.name, _recipe(document)
    named = [path for path in _named_files(document) if recipe is None or str(path) != recipe.name]
    if recipe is not None:
        document = replace(recipe, version=version)
    owner = program_named(program) if program is not None else _owner(document, named)
    setups = [] if owner is None else [_with_command(_with_script(_read(owner, document), document), document.command)]
    if recipe is not None:
        setups = [replace(one, files=(script, *one.files)) for one in setups]
    setups += [read_setup(path) for path in named]
    flags = None if document.command is None else launch_document(document.command, document)
    if flags is not None:
        setups.append(program_named("accelerate").read(flags))
    joined = join(setups)
    return joined if owner is not None else _with_unread(joined, document)


def _read(owner: Program, document: Document) -> Setup:
    """Read a document, with the defaults of its script's own dataclasses beneath where its program takes such scripts."""
    defaults, given = document.defaults, document.data
    if document.unread and document.command is not None:
        setup = owner.read(document)
        return setup if owner.starts_own(document) else _with_unread(setup, document)
    if defaults is None or owner.name not in _OF_SCRIPTS:
        return owner.read(document)
    beneath = defaults.beneath(given)
    setup = owner.read(replace(document, data={**beneath, **given}))
    told = (f"the defaults of {defaults.name}: {', '.join(sorted(beneath)[:6])}",) if beneath else ()
    unsure = list(defaults.unsure(given))
    if "lora_rank" in setup.ask:
        unsure += defaults.adapters
    if not setup.value("gradient_checkpointing"):
        unsure += defaults.checkpoints
    return replace(setup, assumed=(*setup.assumed, *told), unmodelled=(*setup.unmodelled, *unsure))


def _with_unread(setup: Setup, document: Document) -> Setup:
    """Return the setup with the script that a command starts and that is not read, or with nothing more."""
    if not document.unread or document.command is None:
        return setup
    left_out = Unmodelled(document.command.program[:60], Effect.UNKNOWN, document.unread[:160])
    return replace(setup, unmodelled=(left_out, *setup.unmodelled))


def _with_script(setup: Setup, document: Document) -> Setup:
    """Return the setup with what a script's text does not tell, or does beside the arguments that it builds."""
    script = document.script
    if script is None:
        return setup
    return replace(
        setup if script.head is None else setup.saying(head=script.head),
        assumed=(*setup.assumed, *script.assumed),
        unmodelled=(*setup.unmodelled, *script.left_out),
        open={**setup.open, **script.open},
    )


def _with_command(setup: Setup, command: Command | None) -> Setup:
    """Return the setup with what a command line says beside its flags: the allocator's settings that stand before it or are
    exported there, what its script takes for granted, and words that no text tells.
    """
    if command is None:
        return setup
    left_out = tuple(Unmodelled(word, Effect.UNKNOWN, why[:120]) for word, why in command.unread)
    setup = replace(setup, assumed=(*setup.assumed, *command.assumed), unmodelled=(*setup.unmodelled, *left_out))
    environment = command.environment
    said = next((name for name in ALLOCATOR_VARIABLES if environment.get(name)), None)
    return setup if said is None else setup.saying({"alloc_conf": said}, alloc_conf=environment[said])


def read_setups(sources: Sequence[Any], program: str | None = None, task: str | None = None) -> Setup:
    """Read what several files say together. `program` decides for those that no launcher owns; `task` is what the run does.

    Raises:
        BadInput: as :func:`read_setup`; two files that decide the same; or files of another task.
    """
    setups: list[Setup] = []
    for source in sources:
        document = load_document(source)
        launcher = program is not None and _launcher_owns(document)
        setups.append(read_setup(source, None if launcher else program, task))
    setup = join(setups)
    folders = tuple(dict.fromkeys(Path(source).parent for source in sources if isinstance(source, str | Path)))
    if setup.ds_config is not None:
        setup = _with_version(setup, folders, "DeepSpeed", lambda found: found != parse_version(DEEPSPEED_VERSION))
    if setup.program in _ON_TRANSFORMERS:
        setup = _with_version(setup, folders, "transformers", lambda found: OLDEST <= found < (5, 0, 0))
    if "quantize" in setup.ask:
        setup = _with_products(setup, folders)
    if task is not None and setup.task != task:
        said = f"says {setup.task}" if setup.task else f"is a file of {setup.title}, which does not know of tasks"
        raise BadInput(f"{setup.files[0]} {said}", where="--task", remedy="change one of the two")
    return setup


def _with_products(setup: Setup, folders: Sequence[Path]) -> Setup:
    """Return the setup with what an older bitsandbytes keeps, where its project pins one; LitGPT's reader knows its own.

    Source: bitsandbytes 0.43.2, autograd/_functions.py (``MatMul4Bit.forward``), which then saved no input of a frozen weight
    """
    found = next((pinned for folder in folders if (pinned := pinned_version(folder, "bitsandbytes")) is not None), None)
    if found is None or parse_version(found[0]) >= _BITSANDBYTES or setup.program == "litgpt":
        return setup
    says = f"{found[1]} pins it: before 0.43.2 each product of a quantised weight kept its input"
    return replace(setup, unmodelled=(*setup.unmodelled, Unmodelled(f"bitsandbytes {found[0]}", Effect.MORE, says)))


def _with_version(setup: Setup, folders: Sequence[Path], package: str, matters: Callable[[Version], bool]) -> Setup:
    """Return the setup with the version of a package that the project of its files pins, where it `matters`."""
    found = next((pinned for folder in folders if (pinned := pinned_version(folder, package.lower())) is not None), None)
    option = f"{package.lower()}_version"
    if found is None or option in setup.ask or not matters(parse_version(found[0])):
        return setup
    version, name = found
    said = (*setup.assumed, f"{package} {version}, which {name} pins")
    return replace(setup, ask=setup.ask.replace(**{option: version}), assumed=said)


def _launcher_owns(document: Document) -> bool:
    return any(program_named(name).recognises(document) for name in _LAUNCHERS)


def _recipe(document: Document) -> Document | None:
    """Return the one file of arguments that a command line names, with its flags over it; None where it names none."""
    command = document.command
    if command is None or len(found := argument_files(document, command)) != 1:
        return None
    named = load_document(str(found[0]))
    flags = {key: value for key, value in command.flags.items() if key not in RECIPE_FLAGS}
    data = {**named.data, **flags}
    return replace(named, data=data, command=command, task=document.task, defaults=document.defaults, unread=document.unread)


def _owner(document: Document, named: list[Path]) -> Any:
    """Return the owner of a document; None for a command line that only names other files."""
    command = document.command
    if command is not None and named and not document.data:
        return None
    if command is not None and document.data != command.flags:
        # A recipe: the program that the command names, else by the recipe's keys.
        started = [one for one in PROGRAMS.values() if one.recognises(replace(document, data={}))]
        return started[0] if len(started) == 1 else owner_of(replace(document, command=None))
    return owner_of(document)


def _named_files(document: Document) -> Iterable[Path]:
    """Yield the recipe and the accelerate config that a command line names."""
    command = document.command
    if command is None:
        return
    yield from argument_files(document, command)
    if command.config_file is not None:
        yield find_named_file(command.config_file, document, "--config_file")


def argument_files(document: Document, command: Command) -> list[Path]:
    """List the files of arguments that stand behind the program's name or its ``--config``."""
    found = [
        find_named_file(word, document, command.program)
        for word in command.files
        if word.lower().endswith((".yaml", ".yml", ".json"))
    ]
    for flag in RECIPE_FLAGS:
        recipe = command.flags.get(flag)
        if isinstance(recipe, str) and recipe.lower().endswith(RECIPES):
            found.append(find_named_file(recipe, document, f"--{flag}"))
    return found


def join(setups: Sequence[Setup]) -> Setup:
    """Join the Setups of several files: the program's own, with the engine and machine of the launchers' files.

    Raises:
        BadInput: when two files describe a run by themselves, or two launchers disagree.
    """
    if len(setups) == 1:
        return setups[0]
    runs = [one for one in setups if one.program not in _LAUNCHERS]
    if len(runs) > 1:
        names = " and ".join(f"{one.files[0]} ({one.program})" for one in runs[:2])
        raise BadInput(f"{names} each describe a run", where="--from", remedy="give one of them, beside launchers' files")
    launchers = [one for one in setups if one.program in _LAUNCHERS]
    result = runs[0] if runs else launchers[0]
    for one in launchers if runs else launchers[1:]:
        result = _with_launcher(result, one)
    return replace(result, files=tuple(dict.fromkeys(name for one in setups for name in one.files)))


def _with_launcher(run: Setup, launcher: Setup) -> Setup:
    """Return the run with what a launcher's file decides; what the run itself says of batches and precision stays."""
    own, theirs = run.ask, launcher.ask
    if "ds_config" in own and theirs.ds_config not in (None, own.ds_config):
        raise BadInput(
            f"{run.files[0]} and {launcher.files[0]} bring two ds_configs", where="--from", remedy="leave one of them out"
        )
    taken = [name for name in _LAUNCHERS_OWN if name in theirs]
    taken += [name for name in ("micro_batch", "grad_accum", "dtype") if name in theirs and name not in own]
    if theirs.dtype in ("bf16", "fp16") and own.dtype == "fp32" and not own.source("dtype"):
        taken.append("dtype")
    if "ulysses" in theirs:
        taken += [*launcher.degrees, *(["attn"] if "attn" in theirs and "attn" not in own else [])]
    changes = {name: theirs.values[name] for name in taken}
    if theirs.dtype in ("bf16", "fp16") and not own.autocast and not own.source("autocast"):
        changes["autocast"] = True  # accelerate's mixed precision, over weights in 16 bits
    if theirs[CheckpointingTechnique.gradient_checkpointing]:
        changes["gradient_checkpointing"] = True
    keys = {name: key for name in theirs.values if not own.source(name) and (key := theirs.source(name))}
    return replace(
        run.saying(keys, **changes),
        assumed=(*run.assumed, *launcher.assumed),
        unmodelled=(*run.unmodelled, *launcher.unmodelled),
        unknown=(*run.unknown, *launcher.unknown),
    )


def is_ds_config(file: str, program: str | None = None, *, by_keys: bool = False) -> bool:
    """Return whether a file is DeepSpeed's own.

    Args:
        file: its path, or its text in base64.
        program: the program that a user says owns it.
        by_keys: whether only the file's keys can say so; else JSON that no program owns is DeepSpeed's, whose reader says what
            is wrong with it.

    Raises:
        BadInput: a capture, or a file of another syntax that cannot be read.
    """
    if program is not None:
        return program_named(program).name == "ds_config"
    if not os.path.lexists(file.replace("\0", "")):
        return not by_keys
    try:
        document = load_document(file)
    except PrintedAnswer:
        raise
    except BadInput:
        if not by_keys and (is_capture(file) or file.lower().endswith((".yaml", ".yml", ".toml", ".sh", ".slurm", ".py"))):
            raise
        return not by_keys
    if document.pipeline is not None:
        return False
    if by_keys:
        return bool(program_named("ds_config").recognises(document))
    owners = [one.name for one in PROGRAMS.values() if one.recognises(document) or one.could_own(document)]
    return owners == ["ds_config"] or (not owners and not file.lower().endswith((".yaml", ".yml", ".toml")))
