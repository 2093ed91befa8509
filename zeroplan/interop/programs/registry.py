"""The programs by name, and which of them owns a document."""

from __future__ import annotations

from zeroplan.core.errors import BadInput, did_you_mean
from zeroplan.core.versions import parse_version
from zeroplan.interop.programs.accelerate import Accelerate
from zeroplan.interop.programs.axolotl import Axolotl
from zeroplan.interop.programs.document import Document
from zeroplan.interop.programs.ds_config import DsConfigFile
from zeroplan.interop.programs.known import arguments_of
from zeroplan.interop.programs.lightning import Lightning
from zeroplan.interop.programs.litgpt import LitGpt
from zeroplan.interop.programs.llama_factory import LlamaFactory
from zeroplan.interop.programs.megatron_lm import MegatronLm
from zeroplan.interop.programs.ms_swift import MsSwift
from zeroplan.interop.programs.open_instruct import OpenInstruct
from zeroplan.interop.programs.program import Program
from zeroplan.interop.programs.refused_files import MEGATRON, refuse_diffusers, refuse_megatron_deepspeed, refuse_other_file
from zeroplan.interop.programs.torchtitan import Torchtitan
from zeroplan.interop.programs.torchtune import Torchtune
from zeroplan.interop.programs.trainer import HfTrainer
from zeroplan.interop.programs.trl import Trl

_ALL = (
    *(DsConfigFile(), HfTrainer(), Trl(), LlamaFactory(), Axolotl(), Accelerate(), Torchtune(), OpenInstruct(), MsSwift()),
    *(LitGpt(), Torchtitan(), MegatronLm(), Lightning()),
)
#: Every program by the name that ``--program`` takes.
PROGRAMS: dict[str, Program] = {one.name: one for one in _ALL}
#: Programs with a list of their arguments, which says how much of a document each would take.
_LISTED = {
    "hf-trainer": ("hf-trainer",),
    "trl": ("hf-trainer", "trl"),
    "llama-factory": ("hf-trainer", "llama-factory"),
    "axolotl": ("axolotl",),
    "open-instruct": ("open-instruct",),
    "ms-swift": ("hf-trainer", "ms-swift"),
}

_TRAINER = "hf-trainer"
#: So many of a program's arguments make a file one that it could read.
_ENOUGH = 2


def program_named(asked: str) -> Program:
    """Return the program of that name, which a version may follow: ``litgpt==0.4.0``. Raises BadInput: an unknown name."""
    name = asked.partition("==")[0]
    found = PROGRAMS.get(name.strip().lower().replace("_", "-")) or PROGRAMS.get(name.strip().lower())
    if found is None:
        near = did_you_mean(name, PROGRAMS) or f"use one of {', '.join(PROGRAMS)}"
        raise BadInput(f"unknown program {name[:40]!r}", where="--program", remedy=near)
    return found


def version_of(asked: str) -> str:
    """Return the version that a program is asked for in, empty for the one whose defaults are assumed.

    Raises:
        BadInput: no version, or of a program that is known in one alone.
    """
    name, _, version = asked.partition("==")
    if not version:
        return ""
    program = program_named(name)
    if program.first is None:
        raise BadInput(
            f"of {program.title} {program.version} alone is known", where="--program", remedy=f"write {program.name}"
        )
    if not parse_version(program.first) <= parse_version(version, where="--program") <= parse_version(program.version):
        known = f"{program.first} to {program.version}"
        raise BadInput(
            f"of {program.title} {known} are known", where="--program", remedy=f"write {program.name}=={program.version}"
        )
    return version.strip()


def owner_of(document: Document) -> Program:
    """The program that owns a document: by what only it has, else the only one that would take it.

    Raises:
        BadInput: when no program would take it, or several would.
    """
    if document.script is not None:
        return PROGRAMS[document.script.program]
    if document.command is None:
        refuse_other_file(document.data, document.name)
    else:
        refuse_megatron_deepspeed(document.data, document.name, document.command.launcher)
        refuse_diffusers(document.data, document.name)
    showing = [one for one in PROGRAMS.values() if one.recognises(document) and _shows_enough(one, document)]
    if not showing and document.command is not None and document.has(*MEGATRON):
        raise BadInput(
            f"{document.command.program[:60]} trains by Megatron-LM in a way of its own",
            where=document.name,
            remedy="say --program megatron-lm to read Megatron-LM's own arguments, or plan --engine megatron by flags",
        )
    bases = {one.base for one in showing}
    claiming = [one for one in showing if one.name not in bases]
    if len(claiming) > 1:
        claiming = _knows_most(document, claiming)
    if not claiming:
        claiming = [one for one in PROGRAMS.values() if one.could_own(document)]
    if len(claiming) == 1:
        return claiming[0]
    if claiming:
        names = " or ".join(one.title for one in claiming)
        flags = " or ".join(f"--program {one.name}" for one in claiming)
        raise BadInput(f"could be a file of {names}", where=document.name, remedy=f"say which: {flags}")
    near = [name for name, lists in _LISTED.items() if len(document.has(*arguments_of(*lists))) >= _ENOUGH]
    if near:
        flags = " or ".join(f"--program {name}" for name in near[:4])
        raise BadInput("has keys of several programs, and none shows whose it is", where=document.name, remedy=f"say: {flags}")
    titles = ", ".join(one.title for one in PROGRAMS.values())
    raise BadInput("is no configuration that is known", where=document.name, remedy=f"give a file of {titles}")


def _shows_enough(program: Program, document: Document) -> bool:
    """Whether a file of several keys for a program on the Trainer has one of the Trainer's, or a model: the program's own words
    alone are often another's, too.
    """
    if document.command is not None or len(document.data) < _ENOUGH or _TRAINER not in _LISTED.get(program.name, ()):
        return True
    return bool(document.has("model_name_or_path", "model", *arguments_of(_TRAINER)))


def _knows_most(document: Document, programs: list[Program]) -> list[Program]:
    """Return those of the programs that know the most of the document's keys."""
    counts = {
        one.name: len(document.has(*arguments_of(*_LISTED[one.name]))) if one.name in _LISTED else len(one.recognises(document))
        for one in programs
    }
    most = max(counts.values())
    return [one for one in programs if counts[one.name] == most]
