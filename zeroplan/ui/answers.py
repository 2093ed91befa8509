"""The page's one function: a question in JSON to an answer in JSON, with the words and figures of the command line.

Both back ends call it: the server of ``zeroplan ui`` and the worker in the browser. It reads no clock, asks no network unless
it is allowed to ask the hub, and keeps nothing between two questions.
"""

from __future__ import annotations

import base64
import io
import json
import shlex
import tempfile
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from zeroplan.capturing.kept import card_of, kept_capture, kept_run
from zeroplan.core.errors import BadInput
from zeroplan.core.plan import MemoryPlan, Relief, Report
from zeroplan.core.plumbing.documents import parse_json, text_of
from zeroplan.core.zero_config import ZeroConfig
from zeroplan.ds_config.writer import dump_ds_config
from zeroplan.engines.words import engine_title, sharding_text
from zeroplan.planner.estimate import Estimate, estimate_runs
from zeroplan.report.timeline import DrawnRun, drawn, drawn_capture, layers, phase_name
from zeroplan.report.verdict import largest_item, name_of, peak_sentence, reserved_sentence, stages_sentence, verdict
from zeroplan.run.ask import Ask
from zeroplan.tapes.shipped import NotFetchedError
from zeroplan.ui.asked import PLAN_KEYS, Question, plan_words, read_question

if TYPE_CHECKING:
    from zeroplan.capturing.answer import CapturedRun
    from zeroplan.search.results import Recommendation

#: Points of a timeline. A phone has about as many pixels, and a wide window three times as many.
_POINTS = 400
#: Where messages go: ``{"plan": …, "at": 0, "of": 10}`` as the first of ten plans is done, by its formulas and then
#: simulated; and ``{"so_far": …}``, the answer without its knobs and later plans, once the plan that it is about is done.
Say = Callable[[dict[str, Any]], None]


def answer_text(data: bytes, say: Say | None = None, *, hub: bool = False) -> str:
    """Return the answer to one question as JSON text; bad input is an answer, too: ``{"error": {…}}``. Where tapes are
    fetched, ``{"fetch": "NAME"}`` names a file that is to be put into ``tapes/data`` before the question is asked again.

    Args:
        data: the question as UTF-8, an object of :func:`zeroplan.ui.asked.read_question`.
        say: is told what is done so far.
        hub: whether a model that is not shipped may be asked of the hub.
    """
    try:
        found = answer(parse_json(text_of(data, "the question"), "the question"), say, hub=hub)
    except NotFetchedError as missing:
        found = {"fetch": missing.name}
    except BadInput as error:
        found = {"error": {"text": str(error), "what": error.what, "where": error.where, "remedy": error.remedy}}
    return json.dumps(found, separators=(",", ":"))


def answer(question: Any, say: Say | None = None, *, hub: bool = False) -> dict[str, Any]:
    """Answer one question; arguments as of :func:`answer_text`, but the question as an object.

    Raises:
        BadInput: a value that cannot be used.
    """
    with tempfile.TemporaryDirectory(prefix="zeroplan-") as folder:
        try:
            asked = read_question(question, folder)
            asked = replace(asked, request=asked.request.replace(offline=None if hub else True))

            def whole(found: dict[str, Any]) -> dict[str, Any]:
                return {"schema": 1, "verb": asked.verb, "read": list(asked.read), **_without(found, folder)}

            def tell(message: dict[str, Any]) -> None:
                if say is not None:
                    say({key: whole(one) if key == "so_far" else _without(one, folder) for key, one in message.items()})

            if asked.verb not in ("estimate", "read") and kept_capture(asked.sources) is not None:
                what = "is a captured run, of which the page varies the card alone"
                raise BadInput(what, where=asked.read[0]["name"], remedy=_command(asked).replace("estimate", "recommend", 1))
            return whole(_VERBS[asked.verb](asked, None if say is None else tell))
        except BadInput as error:
            told = (_without(text, folder) for text in (error.what, error.where, error.remedy))
            what, where, remedy = told
            raise BadInput(what, where=where, remedy=remedy) from None


def _without(value: Any, folder: str) -> Any:
    """Return the same data without the folder's path in any text: users know their files by name."""
    if isinstance(value, str):
        return value.replace(f"{folder}/", "")
    if isinstance(value, dict):
        return {key: _without(one, folder) for key, one in value.items()}
    if isinstance(value, list) and value and not isinstance(value[0], int | float):  # a timeline's columns hold no text
        return [_without(one, folder) for one in value]
    return value


def _estimate(asked: Question, say: Say | None) -> dict[str, Any]:
    request = asked.request.replace(files=asked.sources)
    captured = kept_run(request)
    if captured is not None:
        return _captured(asked, captured)
    charts: dict[int, dict[str, Any] | None] = {}
    if say is None:
        found = estimate_runs(request)
    else:
        if request.depth is None:  # the formulas answer at once; each row's own figures take its place as it is done
            estimate_runs(request.replace(depth="formula"), lambda so_far, total: say(_message_of(so_far, total)))
        found = estimate_runs(request, _teller(asked, say, charts))
    keys = [_key(plan) for plan in found.report.plans]
    if asked.show is not None and keys and asked.show not in keys:
        engine = found.report.plans[0].engine
        missing = f"{engine_title(engine)} has no row for {sharding_text(engine, *asked.show)}"
        says = f"No such plan: {missing}. Choose one of the table, or auto."
        return _without_a_plan(asked, found.report, says)
    at = _chosen(found.report, asked.show)
    if at is None:  # an engine that runs none of these
        return _without_a_plan(asked, found.report, verdict(found.report))
    several = len(found.report.plans) > 1
    reliefs = _reliefs(found, at, request) if asked.show is not None and several else found.report.reliefs
    return _shown(asked, found, at, reliefs, charts, several=several)


def _captured(asked: Question, run: CapturedRun) -> dict[str, Any]:
    """Return the answer of a script that was captured: as it starts, or another of its engine's stages and offloads."""
    keys = [_key(plan) for plan in run.report.plans]
    at = keys.index(asked.show) if asked.show in keys else 0
    found = Estimate(run.report, run.runs or (None,))
    charts: dict[int, dict[str, Any] | None] = {} if run.runs else {0: timeline_data(drawn_capture(run))}
    shown = _shown(replace(asked, show=keys[at]), found, at, (), charts, several=len(keys) > 1)
    return {**shown, "command": _command(asked)}


def _without_a_plan(asked: Question, report: Report, says: str) -> dict[str, Any]:
    """Return an answer that is about no plan."""
    return {"report": json.loads(report.to_json()), "chosen": None, **_words_of(says), "command": _command(asked)}


def _teller(asked: Question, say: Say, charts: dict[int, dict[str, Any] | None]) -> Callable[[Estimate, int], None]:
    """Return what tells of each plan as it is done, and once of the one that the answer is about; `charts` as in `_shown`."""
    pictured = False

    def tell(found: Estimate, total: int) -> None:
        nonlocal pictured
        say(_message_of(found, total))
        at = None if pictured else _settled(found.report, asked.show, total)
        if at is not None:
            pictured = True
            say({"so_far": _shown(asked, found, at, None, charts, several=total > 1)})

    return tell


def _message_of(found: Estimate, total: int) -> dict[str, Any]:
    """Return the message of the plan that was done last."""
    plans = found.report.plans
    return {"plan": plans[-1].model_dump(mode="json", exclude={"lines"}), "at": len(plans) - 1, "of": total}


def _settled(report: Report, show: tuple[int, str, str] | None, total: int) -> int | None:
    """Return the plan that the answer will be about, by its index, as soon as the plans done so far tell."""
    if show is None and report.plans[-1].fits:
        return len(report.plans) - 1  # the first that fits, since it is asked until one does
    keys = [_key(plan) for plan in report.plans]
    if show in keys or (show is None and len(keys) == total):
        return _chosen(report, show)
    return None


def _shown(
    asked: Question,
    found: Estimate,
    at: int,
    reliefs: Sequence[Relief] | None,
    charts: dict[int, dict[str, Any] | None],
    *,
    several: bool,
) -> dict[str, Any]:
    """Return the answer about one plan.

    Args:
        found: the estimate, perhaps of the first plans only.
        at: the plan's index.
        reliefs: what would lower it; None while that is not known.
        charts: the timelines that were made so far, by index.
        several: whether the whole estimate has more plans than this one.
    """
    report, plan, run = found.report, found.report.plans[at], found.runs[at]
    pinned = asked.show is not None and several
    if at not in charts:
        charts[at] = None if run is None else timeline_data(drawn(run))
    return {
        "report": json.loads(report.to_json()),
        "chosen": at,
        "pinned": pinned,
        "name": name_of(plan),
        **_words_of(verdict(report.model_copy(update={"plans": (plan,)}) if pinned else report)),
        "peak": peak_sentence(plan) or largest_item(plan),
        "stages": stages_sentence(plan),
        "reserved": reserved_sentence(plan),
        "knobs": None if reliefs is None else [_knob(one) for one in reliefs],
        "timeline": charts[at],
        "command": _command(asked, plan_words(_key(plan)) if pinned else ()),
    }


def _key(plan: MemoryPlan) -> tuple[int, str, str]:
    return plan.stage, plan.offload_optimizer, plan.offload_param


def _chosen(report: Report, show: tuple[int, str, str] | None) -> int | None:
    """Return the index of the plan that the answer is about: the one asked for, else the one that any answer shows."""
    keys = [_key(plan) for plan in report.plans]
    return keys.index(show) if show in keys else report.opened


def _reliefs(found: Estimate, at: int, request: Ask) -> tuple[Relief, ...]:
    """Return the knobs of one plan of a table; those of the decisive one are known, another's take a run of its own."""
    plan = found.report.plans[at]
    if plan is found.report.decisive:
        return found.report.reliefs
    one = request.replace(stage=plan.stage, offload_optimizer=plan.offload_optimizer, offload_param=plan.offload_param)
    return estimate_runs(one).report.reliefs


def _words_of(sentence: str) -> dict[str, str]:
    """Return a verdict as its first words and the figures behind them."""
    head, _, figures = sentence.partition(": ")
    return {"verdict": head, "figures": figures}


def _command(asked: Question, more: Sequence[str] = ()) -> str:
    return shlex.join([*asked.words, *more])


def _knob(one: Relief) -> dict[str, Any]:
    """Return a knob with the fields of the question that turn it."""
    return {**one.model_dump(mode="json"), "change": _changed_by(one.flags)}


def _changed_by(flags: str) -> dict[str, Any]:
    """Return the fields that these flags set: ``--stage 3`` is ``{"stage": 3}``."""
    found: dict[str, Any] = {}
    name = ""
    for word in shlex.split(flags):
        if word.startswith("--"):
            name = word[2:].replace("-", "_")
            found[name] = True
        else:
            found[name] = int(word) if word.isdigit() else word
    return found


def timeline_data(run: DrawnRun) -> dict[str, Any]:
    """Return a run's curve as plain data: positions from 0 to 1 and, lowest first, layers of bytes that add up to allocated."""
    curve = run.timeline.curve(_POINTS)
    return {
        "positions": [round(position, 5) for position in curve.positions],
        "allocated": list(curve.allocated),
        "reserved": list(curve.reserved),
        "layers": [{"name": one.name, "color": one.color, "bytes": list(one.bytes)} for one in layers(run, curve)],
        "marks": [[round(position, 5), phase_name(name)] for position, name in curve.marks],
        "peak": max(range(len(curve.allocated)), key=curve.allocated.__getitem__),
    }


def _map(asked: Question, say: Say | None) -> dict[str, Any]:
    """Return one row of a map: what the plan `show` needs at each of the micro batches asked for, and whether it fits."""
    if asked.show is None or not asked.batches:
        raise BadInput("names no plan or no micro batches", where="map", remedy="give show and batches")
    stage, optimizer, param = asked.show
    request = asked.request.replace(files=asked.sources)
    if not asked.sources:  # a file says which plan it is
        request = request.replace(stage=stage, offload_optimizer=optimizer, offload_param=param)
    cells = []
    for batch in asked.batches:
        (plan,) = estimate_runs(request.replace(micro_batch=batch), relief=False).report.plans
        cells.append({"batch": batch, "bytes": plan.gpu.at_most, "depth": plan.depth, "verdict": plan.verdict.value})
    return {"cells": cells}


def _recommend(asked: Question, say: Say | None) -> dict[str, Any]:
    from zeroplan.report.recommendation import verdict as search_verdict
    from zeroplan.search.api import run_search
    from zeroplan.search.search_options import SearchOptions

    options = SearchOptions(global_batch=asked.global_batch, source=asked.sources or None, program=asked.request.program)
    found = run_search(asked.request.replace(program=None), options)
    return {
        "report": found.to_dict(),
        **_words_of(search_verdict(found)),
        "choices": [_choice(one) for one in found.ranking],
        "command": _command(asked),
    }


def _choice(one: Recommendation) -> dict[str, Any]:
    """Return what a question says to be about a configuration that a search found.

    Where the engine takes a ds_config that file says it, since a search also chooses buckets, for which there is no field.
    """
    from zeroplan.report.recommendation import described

    config, found = one.ds_config(), one.to_dict()
    kept = ["gradient_checkpointing", "alloc_conf"]
    change: dict[str, Any] = {}
    if config is None:
        kept += ["micro_batch", "grad_accum"]
        change = {key: found["plan"][key] for key in PLAN_KEYS}
    file = [] if config is None else [{"name": "ds_config.json", "text": dump_ds_config(config)}]
    return {"label": described(one), "change": change | {key: found[key] for key in kept}, "files": file}


def _files(asked: Question, say: Say | None) -> dict[str, Any]:
    """Write the files of one plan: the configuration, a training script, and the command that starts it."""
    from zeroplan.interop.training import NO_TRAINING
    from zeroplan.planner.merge import with_files
    from zeroplan.planner.resolve import resolve
    from zeroplan.search.api import run_search
    from zeroplan.search.files import Target, files_of, form_of
    from zeroplan.search.from_setup import training_settings
    from zeroplan.search.search_options import SearchOptions
    from zeroplan.search.space import Candidate

    request, training = asked.request, NO_TRAINING
    if asked.sources:
        request, setup = with_files(request.replace(files=asked.sources))
        training = training_settings(setup)
    if max(request.tp, request.cp, request.ulysses, request.pp, request.dp_replicate) > 1:
        raise BadInput("no files are written for such a layout", where="--tp, --cp, --pp", remedy="leave them at 1")
    resolved = resolve(request)
    case = next((one for one in resolved.cases if _sharded_as(one.zero) == asked.show), None)
    if case is None:
        raise BadInput("names no plan of the table", where="show", remedy="choose one of its rows")
    candidate = Candidate(case.zero, case.workload, request.alloc_conf, engine=resolved.engine, unmodelled=case.unmodelled)
    open_ = request.replace(stage=None, offload_optimizer=None, offload_param=None, ds_config=None)
    found = run_search(open_, SearchOptions(candidates=[candidate], explain=False))
    one = found.ranking[0]
    forms = one.engine.forms()
    name = asked.form or next(iter(forms), None)
    form = form_of(one.engine, Target(form=name, new_script="train.py"))
    target = Target(form=name, new_script="train.py" if form.script is not None else None)
    files = files_of(one, found.cluster, target, found.loaded, training)
    return {
        "files": [{"name": path, "text": text} for path, text in files.texts.items()],
        "archive": _archive(files.texts),
        "start": files.start.shell(),
        "must": list(files.program_must),
        "notes": list(files.notes),
        "form": name,
        "forms": list(forms),
    }


def _archive(texts: Mapping[str, str]) -> str:
    """Return a zip of the files, in base64; equal files make an equal archive."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as packed:
        for path, text in texts.items():
            packed.writestr(zipfile.ZipInfo(path), text)
    return base64.b64encode(buffer.getvalue()).decode()


def _sharded_as(zero: ZeroConfig) -> tuple[int, str, str]:
    return zero.stage, zero.offload_optimizer.device, zero.offload_param.device


def _read(asked: Question, say: Say | None) -> dict[str, Any]:
    """Return which of model, GPUs and nodes the question's files say: there the page's own values make way. A captured run
    says its machine, too, whose card the page takes over.
    """
    from zeroplan.interop.readers import read_setups

    held = kept_capture(asked.sources)
    if held is not None:
        return {"says": ["gpu", "gpus", "model", "nodes", "nvme", "vram"], "values": card_of(held)}
    says = {"model"} if any(one["as"] == "model" for one in asked.read) else set()
    if asked.sources:
        setup = read_setups(asked.sources, asked.request.program, None)
        says |= {name for name in ("model", "gpus", "nodes") if setup.value(name) is not None}
    return {"says": sorted(says)}


_VERBS: dict[str, Callable[[Question, Say | None], dict[str, Any]]] = {
    "estimate": _estimate,
    "map": _map,
    "recommend": _recommend,
    "files": _files,
    "read": _read,
}


def names(*, hub: bool = False) -> dict[str, Any]:
    """Return what the page offers: models, GPUs, engines and optimizers by name, the version, whether simulations run in
    compiled code, and whether the hub is asked.
    """
    from zeroplan import __version__
    from zeroplan.core.gpus import GPUS
    from zeroplan.core.optimizers import OPTIMIZERS
    from zeroplan.engines.registry import BUILT_IN
    from zeroplan.models.catalog import entries
    from zeroplan.report.names import gpus_json, models_json
    from zeroplan.simulate.allocator import native

    return {
        "models": models_json(list(entries()))["models"],
        "gpus": gpus_json(list(GPUS.values()))["gpus"],
        "engines": list(BUILT_IN),
        "optimizers": list(OPTIMIZERS),
        "version": __version__,
        "compiled": native.available(),
        "hub": hub,
    }
