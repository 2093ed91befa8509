"""Asks every verb for one request that is drawn at random, and finds where two of them disagree on what fits, host or speed.

The verbs are asked for JSON, and the texts for their first words. What is compared:

- ``recommend``'s best, asked again as a run that is decided: by ``estimate``, ``check``, ``explain``, ``explain --time``,
  ``doctor`` of a log without figures, ``recommend`` pinned to it, and the page;
- ``scale`` on as many GPUs, and the page's search: the same best at the same speed;
- ``estimate`` of the request as it is: where one of its plans fits, ``recommend`` has one that does, and none slower.
"""

from __future__ import annotations

import json
import random
import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.golden.make import apart
from zeroplan.ui.answers import answer

Cli = Callable[..., tuple[int, str, str]]
MODELS = (
    *("openai-community/gpt2", "Qwen/Qwen2.5-0.5B", "EleutherAI/pythia-160m", "google/gemma-3-270m"),
    *("meta-llama/Llama-3.1-8B", "google-bert/bert-base-uncased", "EleutherAI/pythia-70m", "meta-llama/Llama-3.2-1B"),
)
SMALL = ("openai-community/gpt2", "EleutherAI/pythia-70m", "google-bert/bert-base-uncased")
CARDS = ("H100", "A100-40G", "RTX4090", "L40S", "T4", "V100-32G", "H200")
ENGINES = ("deepspeed", "deepspeed", "fsdp2", "fsdp", "ddp", "zeroplan")
#: What a plan says of itself that no two verbs may say otherwise; all of `gpu`, `cpu` and `nvme` are compared, too.
_SAID = ("engine", "stage", "offload_optimizer", "offload_param", "depth", "verdict", "fits", "decides", "misfits", "settle")
_PINS = ("stage", "offload_optimizer", "offload_param")
#: Options of an engine that takes no file.
_LEAF = ("micro_batch", "grad_accum")


class Asked:
    """One request: the words that every verb takes, and those of the run's batch, which a search may find out itself."""

    def __init__(self, draw: random.Random, models: Sequence[str] = MODELS) -> None:
        self.engine = draw.choice(ENGINES)
        self.gpus, self.nodes = draw.choice((1, 1, 2, 4, 8)), draw.choice((1, 1, 1, 2))
        said: dict[str, Any] = {"gpu": draw.choice(CARDS), "gpus": self.gpus}
        said |= {"nodes": self.nodes} if self.nodes > 1 else {}
        said |= {"engine": self.engine, "seq_len": draw.choice((128, 512, 1000))}
        if draw.random() < 0.3:
            said["cpu_ram"] = draw.choice(("16G", "64G", "1T"))
        if draw.random() < 0.2:
            said["nvme"] = draw.choice(("100G", "4T"))
        if draw.random() < 0.25:
            said["lora_rank"] = draw.choice((4, 16))
        if draw.random() < 0.2:
            said["optimizer"] = draw.choice(("lion", "sgd", "adamw"))
        if draw.random() < 0.15:
            said["dtype"] = draw.choice(("fp16", "fp32"))
        if draw.random() < 0.1:
            said["attn"] = "flash"
        self.model, self.said = draw.choice(models), said
        self.batch: dict[str, Any] = {}
        if draw.random() < 0.5:
            self.batch["micro_batch"] = draw.choice((1, 2, 3, 8, 16))
        if draw.random() < 0.2:
            self.batch["grad_accum"] = draw.choice((2, 4))

    def words(self, verb: str, *leave: str, **more: Any) -> list[str]:
        """The command of a verb, with `more` options said and some left out."""
        said = {name: value for name, value in (self.said | more).items() if name not in leave and value is not None}
        return [verb, self.model, *_flags(said), "--json"]


def _flags(said: dict[str, Any]) -> Iterator[str]:
    for name, value in said.items():
        flag = name.replace("_", "-")
        yield from (f"--{flag}",) if value is True else (f"--no-{flag}",) if value is False else (f"--{flag}", str(value))


def _differing(one: Any, other: Any, at: str) -> list[str]:
    """The paths below `at` where two JSON values differ."""
    if isinstance(one, dict) and isinstance(other, dict):
        return [text for key in {**one, **other} for text in _differing(one.get(key), other.get(key), f"{at}.{key}")]
    return [] if one == other else [f"{at}: {one} → {other}"]


def _on_disk(plan: dict[str, Any]) -> bool:
    return "nvme" in (plan["offload_optimizer"], plan["offload_param"])


class Disagreements:
    """Asks the verbs one request, and collects where they disagree."""

    def __init__(self, cli: Cli, asked: Asked, folder: Path) -> None:
        self.cli, self.asked, self.folder = cli, asked, folder
        self.found: list[str] = []

    def ask(self, words: list[str]) -> dict[str, Any] | None:
        """The verb's JSON; None where it refuses the request in a line."""
        code, out, err = self.cli(*words)
        self.said = err
        if code == 2:
            return None
        if code not in (0, 1):
            self.note(words, [f"exit {code}: {err}"])
            return None
        found: dict[str, Any] = json.loads(out)
        return found

    def note(self, words: list[str], differing: list[str]) -> None:
        """Keep what differs of a command's answer."""
        self.found += [f"zeroplan {shlex.join(words)}\n    {text}" for text in differing]

    def compare(self, words: list[str], plan: dict[str, Any], like: dict[str, Any]) -> None:
        """Keep where two plans of one run differ."""
        keys = (*_SAID, "gpu", "cpu", "nvme")
        self.note(words, _differing({key: like[key] for key in keys}, {key: plan[key] for key in keys}, "plan"))

    def search(self) -> None:
        """Ask all verbs."""
        batch = self.asked.batch
        words = self.asked.words("recommend", **batch)
        found = self.ask(words)
        if found is None:
            if self.ask(self.asked.words("estimate", **batch)) is not None and self.asked.batch.get("grad_accum") is None:
                self.refused(words)
            return
        ranking = found["ranking"]
        self.scale(found)
        self.page_search(found)
        self.whole_table(ranking)
        if ranking:
            self.decided(ranking[self.asked.gpus % len(ranking)])

    def refused(self, words: list[str]) -> None:
        """A search refuses what estimate plans only where it says that its times are not known of it."""
        if "not modelled" not in self.said and "has no" not in self.said:
            self.note(words, [f"refused: {self.said}"])

    def scale(self, found: dict[str, Any]) -> None:
        """The point of as many GPUs is the search's best."""
        counts = {"gpus": self.asked.gpus * self.asked.nodes, "gpus_per_node": self.asked.gpus}
        words = self.asked.words("scale", "nodes", **self.asked.batch, **counts)
        scaled = self.ask(words)
        if scaled is None:
            self.note(words, [f"refused: {self.said}"])
            return
        (point,) = scaled["points"]
        best = found["ranking"][0] if found["ranking"] else None
        if (best is None) != (point["best"] is None):
            self.note(words, [f"best: {best and best['plan']['verdict']} → {point['best']}"])
        elif best is None:
            self.compare(words, point["nearest"]["plan"], found["nearest"]["plan"])
        else:
            self.same_speed(words, best, point["best"])
            self.compare(words, point["best"]["plan"], best["plan"])

    def same_speed(self, words: list[str], one: dict[str, Any], other: dict[str, Any]) -> None:
        """Two rows of one run."""
        keys = ("tokens_per_second", "step_seconds", "micro_batch", "grad_accum", "gradient_checkpointing", "alloc_conf")
        self.note(words, _differing({key: one[key] for key in keys}, {key: other[key] for key in keys}, "row"))

    def page(self, **more: Any) -> dict[str, Any]:
        """The page's answer to the request."""
        return answer({"model": self.asked.model, **self.asked.said, **self.asked.batch, **more})

    def page_search(self, found: dict[str, Any]) -> None:
        """The page's search is the command line's."""
        paged = self.page(verb="recommend")
        known = {name: value for name, value in found.items() if name != "zeroplan"}
        if self.asked.batch:  # the page leaves the batch to the search
            words = self.asked.words("recommend")
            known = self.ask(words) or {}
            known.pop("zeroplan", None)
        self.note(["the page's search", *shlex.split(paged["command"])], _differing(known, paged["report"], ""))

    def whole_table(self, ranking: list[dict[str, Any]]) -> None:
        """Where a plan of estimate fits, the search has one that does; the page's table is estimate's."""
        words = self.asked.words("estimate", **self.asked.batch)
        table = self.ask(words)
        if table is None:
            self.note(words, [f"refused: {self.said}"])
            return
        paged = self.page()
        self.note(["the page", *words], _differing(table["plans"], paged["report"]["plans"], "plans"))
        first = self.cli(*words[:-1], "--quiet")[1]
        if not " ".join(first.split()).startswith(f"{paged['verdict']}: "):
            self.note(["the page", *words], [f"{paged['verdict']} → {first}"])
        best = ranking[0]["plan"]["verdict"] if ranking else "does not fit"
        ranks = ("fits", "may fit", "unknown", "does not fit")
        most = min((ranks.index(plan["verdict"]) for plan in table["plans"]), default=3)
        if ranks.index(best) > most:
            self.note(words, [f"a plan {ranks[most]}; recommend's best: {best}"])
        elif ranking:
            fitting = [plan for plan in table["plans"] if plan["fits"] and ("nvme" in self.asked.said or not _on_disk(plan))]
            if fitting and self.asked.batch.get("micro_batch"):
                self.not_faster(fitting[len(ranking) % len(fitting)], ranking[0])

    def not_faster(self, plan: dict[str, Any], best: dict[str, Any]) -> None:
        """A plan of estimate that fits is no faster than the search's best."""
        words = self.asked.words("recommend", **self.asked.batch, **{pin: plan[pin] for pin in _PINS})
        pinned = self.ask(words)
        if pinned is None or not pinned["ranking"] or not pinned["ranking"][0]["fits"]:
            self.note(words, [f"estimate: {plan['verdict']} → {self.said or 'nothing fits'}"])
        elif pinned["ranking"][0]["tokens_per_second"] > 1.001 * best["tokens_per_second"]:
            speeds = (best["tokens_per_second"], pinned["ranking"][0]["tokens_per_second"])
            self.note(words, [f"faster than the search without pins: {speeds}"])

    def decided(self, row: dict[str, Any]) -> None:
        """Ask the verbs about one row of the search, as a run that is decided."""
        again = {"gradient_checkpointing": row["gradient_checkpointing"], "alloc_conf": row["alloc_conf"] or None}
        config = row["ds_config"]
        if config is None:
            run = {pin: row["plan"][pin] for pin in _PINS} | {name: row[name] for name in _LEAF} | again
            self.planned(self.asked.words("estimate", **run), row)
            self.diagnosed(self.asked.words("doctor", **run), row)
            self.timed(self.asked.words("explain", **run)[:-1], row)
            words = self.asked.words("recommend", **run)
            self.ranked(words, row)
            return
        file = self.folder / "ds_config.json"
        file.write_text(json.dumps(config))
        run = again | {"ds_config": file}
        free = ("dtype", "optimizer")  # the file says both
        self.planned(self.asked.words("estimate", *free, **run), row)
        self.diagnosed(self.asked.words("doctor", *free, **run), row)
        self.timed(self.asked.words("explain", *free, **run)[:-1], row)
        self.checked(file, again, row)
        self.paged(config, again, row)
        lines = self.folder / "candidates.jsonl"
        entry = {"ds_config": config, "gradient_checkpointing": row["gradient_checkpointing"], "alloc_conf": row["alloc_conf"]}
        lines.write_text(json.dumps(entry))
        self.ranked(self.asked.words("recommend", candidates=lines), row)

    def planned(self, words: list[str], row: dict[str, Any]) -> None:
        """Estimate's one plan is the row's."""
        found = self.ask(words)
        if found is None:
            self.note(words, [f"refused: {self.said}"])
            return
        (plan,) = found["plans"]
        self.compare(words, plan, row["plan"])
        if (self.cli(*words[:-1], "--check", "--quiet")[0] == 0) is not (plan["fits"] is True):
            self.note(words, ["--check says otherwise"])

    def diagnosed(self, words: list[str], row: dict[str, Any]) -> None:
        """Doctor plans the row beside a log that says nothing but that memory ran out."""
        log = self.folder / "oom.log"
        log.write_text("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB.\n")
        words = ["doctor", str(log), *words[1:]]
        found = self.ask(words)
        if found is None:
            self.note(words, [f"refused: {self.said}"])
            return
        self.compare(words, found["plan"]["plan"], row["plan"])

    def checked(self, file: Path, again: dict[str, Any], row: dict[str, Any]) -> None:
        """Check of the row's file has the row's plan."""
        words = self.asked.words("check", "dtype", "optimizer", **again)
        words = ["check", str(file), *words[1:]]
        found = self.ask(words)
        if found is None:
            self.note(words, [f"refused: {self.said}"])
            return
        (plan,) = found["estimate"]["plans"]
        self.compare(words, plan, row["plan"])

    def paged(self, config: dict[str, Any], again: dict[str, Any], row: dict[str, Any]) -> None:
        """The page with the row's file."""
        kept = {name: value for name, value in self.asked.said.items() if name not in ("dtype", "optimizer")}
        file = {"name": "ds_config.json", "text": json.dumps(config)}
        asked = {"model": self.asked.model, **kept, **{k: v for k, v in again.items() if v is not None}, "files": [file]}
        found = answer(asked)
        (plan,) = found["report"]["plans"]
        self.compare(["the page", json.dumps(asked)], plan, row["plan"])

    def timed(self, words: list[str], row: dict[str, Any]) -> None:
        """Explain --time has the row's time."""
        found = self.ask([*words, "--time", "--json"])
        if found is None:
            self.note([*words, "--time"], [f"refused: {self.said}"])
            return
        (plan,) = found["plans"]
        if abs(plan["step_seconds"] / row["step_seconds"] - 1) > 1e-9:
            self.note([*words, "--time"], [f"step_seconds: {row['step_seconds']} → {plan['step_seconds']}"])

    def ranked(self, words: list[str], row: dict[str, Any]) -> None:
        """Recommend, pinned to the row or given it as a candidate, has its plan and speed."""
        found = self.ask(words)
        if found is None or not found["ranking"]:
            self.note(words, [f"refused: {self.said}" if found is None else "nothing fits"])
            return
        self.same_speed(words, row, found["ranking"][0])
        self.compare(words, found["ranking"][0]["plan"], row["plan"])


def disagreements(cli: Cli, seeds: Iterable[int], models: Sequence[str] = MODELS) -> list[str]:
    """What any two verbs say otherwise of the requests that these seeds draw.

    They run in a folder of their own, where nothing is traced: an answer takes the tapes that are shipped, or none.
    """
    found: list[str] = []
    with apart() as folder:
        for seed in seeds:
            run = Disagreements(cli, Asked(random.Random(seed), models), folder)
            run.search()
            found += run.found
    return found
