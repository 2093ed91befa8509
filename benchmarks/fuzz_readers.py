"""Throws mutated files at every reader: ``python -m benchmarks.fuzz_readers --count 100000``.

Each input is a real file, changed by bytes or by values. A reader may answer, or refuse in one line (``BadInput``), within
:data:`PATIENCE` seconds of processor time and :data:`ROOM` bytes; anything else is a finding. An input follows from its
reader, the seed and its number, so ``--reader NAME --seed S --first I --count 1`` repeats it.

Torch and transformers are as if not installed: what is fuzzed is zeroplan's own code.
"""

from __future__ import annotations

import argparse
import json
import lzma
import random
import resource
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from zeroplan.core.errors import BadInput

#: Seconds of processor time and bytes of address space, beside those of the start, that one input may take.
PATIENCE = 5.0
ROOM = 500 << 20

_FIXTURES = Path(__file__).resolve().parent.parent / "tests" / "fixtures" / "ds_configs"
_CORPUS = _FIXTURES.parent.parent / "corpus"
_LLAMA = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}


class TooSlowError(BaseException):
    """An input that takes more than :data:`PATIENCE`. It is no ``Exception``, so that no reader catches it."""


@dataclass(frozen=True, slots=True)
class Reader:
    """A reader: the ending of its files, real ones, and the call that reads one (and plans what it holds)."""

    ending: str
    files: Callable[[], list[bytes]]
    read: Callable[[str], object]


@dataclass(frozen=True, slots=True)
class Finding:
    """An input that was neither answered nor refused in one line."""

    reader: str
    seed: int
    number: int
    what: str
    data: bytes


# What is read, by which call


def _ds_configs() -> list[bytes]:
    zero = {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/nvme"}, "offload_param": {"device": "cpu"}}
    own = {
        "train_batch_size": 64,
        "gradient_accumulation_steps": 2,
        "bf16": {"enabled": True},
        "zero_optimization": {**zero, "sub_group_size": 10**9, "stage3_max_live_parameters": 10**9, "zenflow": None},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-5, "betas": [0.9, 0.95]}},
        "aio": {"block_size": 1048576, "queue_depth": 8, "thread_count": 1},
        "zeroplan": {"ring": 2, "delayed_update": 0},
    }
    return [path.read_bytes() for path in sorted(_FIXTURES.glob("*.json"))] + [json.dumps(own, indent=1).encode()]


def _plan(ds_config: str, engine: str) -> None:
    from zeroplan.planner.estimate import estimate_report
    from zeroplan.run.ask import Ask

    estimate_report(Ask(model=_LLAMA, ds_config=ds_config, engine=engine, gpus=2, vram="24G", depth="formula")).to_json()


def _read_ds_config(path: str) -> None:
    from zeroplan.ds_config.reader import inspect_ds_config
    from zeroplan.ds_config.writer import dump_ds_config, write_ds_config
    from zeroplan.report.check import check_json, findings_text, verdict_text

    config = inspect_ds_config(path)
    f"{verdict_text(config)}\n{findings_text(config)}".encode()
    json.dumps(check_json(config), allow_nan=False)
    if not config.errors:
        dump_ds_config(write_ds_config(config.zero, source=config.raw))
    _plan(path, "deepspeed")


_SETUPS = {
    "accelerate": "compute_environment: LOCAL_MACHINE\ndistributed_type: DEEPSPEED\nnum_machines: 1\nnum_processes: 8\n"
    "mixed_precision: bf16\ndeepspeed_config:\n  zero_stage: 3\n  offload_optimizer_device: cpu\n"
    "  gradient_accumulation_steps: 4\n  gradient_clipping: 1.0\n",
    "fsdp": "distributed_type: FSDP\nnum_processes: 4\nfsdp_config: {fsdp_version: 2, fsdp_offload_params: false}\n",
    "axolotl": "base_model: openai-community/gpt2\nadapter: lora\nlora_r: 8\nlora_target_modules: [c_attn]\nbf16: auto\n"
    "sequence_len: 512\nmicro_batch_size: 2\ngradient_accumulation_steps: 4\noptimizer: adamw_bnb_8bit\n",
    "llama-factory": "model_name_or_path: openai-community/gpt2\nfinetuning_type: lora\nlora_rank: 8\nlora_target: all\n"
    "cutoff_len: 1024\nper_device_train_batch_size: 1\nbf16: true\n",
    "anchors": "base: &b {micro_batch_size: 1, lr: 1e-4}\nbase_model: m\n<<: *b\nsequence_len: 0x200\n",
}


def _yaml_setups() -> list[bytes]:
    return [text.encode() for text in _SETUPS.values()]


def _json_setups() -> list[bytes]:
    arguments = {"output_dir": "o", "per_device_train_batch_size": 4, "bf16": True, "optim": "adamw_torch", "fsdp": ""}
    return [json.dumps(one).encode() for one in (arguments, {**arguments, "deepspeed": json.loads(_ds_configs()[-1])})]


def _toml_setups() -> list[bytes]:
    return [b'output_dir = "o"\nper_device_train_batch_size = 4\nbf16 = true\n[deepspeed.zero_optimization]\nstage = 2\n']


@cache
def _corpus() -> list[dict[str, Any]]:
    rows = (path.read_text(encoding="utf-8").splitlines() for path in sorted(_CORPUS.glob("*.jsonl")))
    return [json.loads(line) for lines in rows for line in lines]


def _scripts() -> list[bytes]:
    return [row["script"].encode() for row in _corpus() if "script" in row]


def _recipes() -> list[bytes]:
    """Every fourth public file of each program, as JSON, which YAML is, too: its values can be changed as well as its bytes."""
    return [json.dumps(row["keys"]).encode() for row in _corpus()[::4] if "keys" in row]


def _read_setup(path: str) -> None:
    from zeroplan.interop.readers import read_setup

    read_setup(path)


def _model_configs() -> list[bytes]:
    from zeroplan.models.families import FAMILIES

    return [json.dumps({**_LLAMA, "vocab_size": 100, "model_type": kind}).encode() for kind in sorted(FAMILIES)]


def _headers() -> list[bytes]:
    names = ["model.embed_tokens.weight", *(f"model.layers.{i}.mlp.up_proj.weight" for i in range(3)), "lm_head.weight"]
    header = {n: {"dtype": "F16", "shape": [4, 8], "data_offsets": [64 * i, 64 * i + 64]} for i, n in enumerate(names)}
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    return [len(text).to_bytes(8, "little") + text + bytes(64 * len(names))]


def _indices() -> list[bytes]:
    return [json.dumps({"metadata": {"total_size": 1}, "weight_map": {"a.weight": "a.safetensors", "b": "b"}}).encode()]


def _plan_model(path: str) -> None:
    from zeroplan.planner.estimate import estimate_report
    from zeroplan.run.ask import Ask

    estimate_report(Ask(model=path, gpus=2, vram="24G", depth="formula", offline=True)).to_json()


def _candidate_files() -> list[bytes]:
    config = json.loads(_ds_configs()[-1])
    lines = [{"ds_config": config}, {"ds_config": config, "gradient_checkpointing": True, "alloc_conf": "max_split_size_mb:64"}]
    return ["\n".join(map(json.dumps, lines)).encode()]


@cache
def _problem() -> tuple[Any, Any]:
    from zeroplan.run.ask import Ask
    from zeroplan.search.search_options import SearchOptions, resolve_search

    request = Ask(model=_LLAMA, gpus=2, vram="24G")
    return resolve_search(request, SearchOptions()), request


def _read_candidates(path: str) -> None:
    from zeroplan.search.candidates_file import read_candidates

    read_candidates(path, *_problem())


def _profiles() -> list[bytes]:
    from zeroplan.core.gpus import GPUS
    from zeroplan.core.rates import rates_of

    rates = {name: value for name, value in rates_of(next(iter(GPUS.values()))).as_dict().items() if name != "source"}
    return [json.dumps({"schema": 1, "gpu": "H100", "rates": rates}).encode()]


def _read_profile(path: str) -> None:
    from zeroplan.core.gpus import GPUS
    from zeroplan.core.rates import rates_of, read_profile

    rates_of(next(iter(GPUS.values()))).with_profile(read_profile(path)["rates"], path)


def _tapes() -> list[bytes]:
    from zeroplan.core.workload import Workload
    from zeroplan.models.load import load_model
    from zeroplan.tape.codec import to_json
    from zeroplan.tape.options import options_for
    from zeroplan.tapes.shipped import find

    tape = find(load_model("openai-community/gpt2"), options_for(Workload()))
    assert tape is not None
    return [json.dumps(to_json(tape)).encode()]


def _read_tape(path: str) -> None:
    """The input is a tape's text or, every other time, a packed file of it with its bytes changed."""
    from unittest.mock import patch

    from zeroplan.core.workload import Workload
    from zeroplan.tape.options import options_for
    from zeroplan.tapes import cache as tapes

    data = Path(path).read_bytes()
    Path(path).write_bytes(lzma.compress(data, preset=0) if len(data) % 2 else b"\xfd7zXZ\x00" + data)
    with patch.object(tapes, "path_of", lambda *_: path):
        tapes.read({}, options_for(Workload()))


READERS: dict[str, Reader] = {
    "ds_config": Reader("json", _ds_configs, _read_ds_config),
    "ds_config of the runtime": Reader("json", _ds_configs, lambda path: _plan(path, "zeroplan")),
    "YAML setup": Reader("yaml", _yaml_setups, _read_setup),
    "JSON setup": Reader("json", _json_setups, _read_setup),
    "TOML setup": Reader("toml", _toml_setups, _read_setup),
    "recipe": Reader("yaml", _recipes, _read_setup),
    "script": Reader("sh", _scripts, _read_setup),
    "config.json": Reader("json", _model_configs, _plan_model),
    "safetensors": Reader("safetensors", _headers, _plan_model),
    "index": Reader("json", _indices, _plan_model),
    "candidates": Reader("jsonl", _candidate_files, _read_candidates),
    "profile": Reader("json", _profiles, _read_profile),
    "tape": Reader("xz", _tapes, _read_tape),
}

# How files are changed

_VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 3, 7, 2**31, 2**63, 2**64, -(2**63) - 1, 10**40, 10**400, 0.0, 0.5, 1e-300, 1e300, -0.0,
    "", "auto", "none", "cpu", "nvme", "2e8", "1_000", "nan", "x" * 5000, "\0", "\ud800", "\u2028", "é", "../../etc/passwd",
    [], {}, [[]], [None], {"": None}, {"enabled": True}, {"a": {"b": {"c": {}}}}, list(range(50)),
)  # fmt: skip
_TOKENS = (
    b'"', b"{", b"}", b"[", b"]", b",", b":", b"\\", b"/*", b"*/", b"//", b"#", b"\n", b"\0", b"\xff", b"\xef\xbb\xbf", b"NaN",
    b"1e999", b"9" * 50, b"9" * 5000, b"0x" + b"f" * 500, b"1" + b":1" * 500, b"&a ", b"*a", b"<<: *a\n", b"? ", b"- ",
    b"!!int ", b"!!python/name:os.system ", b"---\n", b"\t",
    b"[" * 500, b'{"a":' * 200, b"<<: [*b, *b, *b]\n", b"true", b"null", b"a.a.",
)  # fmt: skip


def mutated(rng: random.Random, files: list[bytes]) -> bytes:
    """Return one of `files` with a few of its values or bytes changed."""
    data = rng.choice(files)
    if rng.random() < 0.6:
        changed = _with_other_values(rng, data, files)
        if changed is not None and rng.random() < 0.8:
            return changed
        data = data if changed is None else changed
    for _ in range(rng.choice((1, 1, 2, 4, 16))):
        data = _with_other_bytes(rng, data, files)
    return data[: 2 << 20]


def _with_other_bytes(rng: random.Random, data: bytes, files: list[bytes]) -> bytes:
    at, to = sorted(rng.randint(0, len(data)) for _ in range(2))
    to = min(to, at + rng.choice((1, 8, 64, 4096)))
    kind = rng.randrange(7)
    if kind == 0:
        return data[:at] + data[to:]
    if kind == 1:
        return data[:at] + rng.choice(_TOKENS) + data[at:]
    if kind == 2:
        return data[:at] + rng.choice(_TOKENS) + data[to:]
    if kind == 3:
        return data[:at] + data[at:to] * rng.choice((2, 3, 50, 2000 if rng.random() < 0.1 else 5)) + data[to:]
    if kind == 4:
        return data[:at] + bytes(rng.randrange(256) for _ in range(rng.randint(1, 8))) + data[to:]
    if kind == 5:
        return data[:at]
    other = rng.choice(files)
    return data[:at] + other[rng.randint(0, len(other)) :]


def _with_other_values(rng: random.Random, data: bytes, files: list[bytes]) -> bytes | None:
    """Return the JSON or safetensors header with other values; None for a file of another kind."""
    head = len(data) > 8 and int.from_bytes(data[:8], "little") <= len(data) - 8
    end = 8 + int.from_bytes(data[:8], "little") if head else len(data)
    lines = (data[8:end] if head else data).split(b"\n{")
    try:
        holders = [json.loads(line if i == 0 else b"{" + line) for i, line in enumerate(lines)]
    except ValueError:
        return None
    for _ in range(rng.choice((1, 1, 2, 5))):
        _change(rng, rng.choice(holders))
    text = b"\n".join(json.dumps(holder).encode() for holder in holders)
    return len(text).to_bytes(8, "little") + text + data[end:] if head else text


def _change(rng: random.Random, value: Any) -> None:
    """Change one value somewhere within an object or a list."""
    places = list(_places(value))
    if not places:
        return
    holder, key = rng.choice(places)
    kind = rng.randrange(6)
    if kind == 0:
        del holder[key]
    elif kind == 1 and isinstance(holder, dict):
        other = rng.choice(places)[1]
        holder[f"{other}"[:-1] if rng.random() < 0.5 else f"{other}"] = holder.pop(key)
    elif kind == 2:
        other_holder, other = rng.choice(places)
        holder[key] = json.loads(json.dumps(other_holder[other]))
    elif kind == 3 and isinstance(holder[key], int | float):
        holder[key] = rng.choice((holder[key] * 1000, -holder[key], holder[key] + 1, holder[key] // 2, str(holder[key])))
    else:
        holder[key] = json.loads(json.dumps(rng.choice(_VALUES)))


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    items = list(value.items()) if isinstance(value, dict) else list(enumerate(value)) if isinstance(value, list) else []
    for key, inner in items:
        yield value, key
        yield from _places(inner)


# The campaign


def _stop(signum: int, frame: object) -> None:
    raise TooSlowError(f"more than {PATIENCE:g} s")


def outcome(reader: Reader, path: str) -> str:
    """``"answered"``, ``"refused"``, or what is wrong with a reader's way with a file."""
    signal.setitimer(signal.ITIMER_VIRTUAL, PATIENCE)
    try:
        reader.read(path)
    except BadInput as fault:
        text = str(fault)
        one_line = text and len(text) <= 600 and all(ch.isprintable() for ch in text)
        return "refused" if one_line else f"a refusal of several lines: {text[:80]!r}"
    except (Exception, TooSlowError) as fault:
        return f"{type(fault).__name__}: {fault}"[:200]
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    return "answered"


def campaign(names: list[str], count: int, seed: int = 0, first: int = 0) -> tuple[Counter[str], list[Finding], float]:
    """`count` inputs, the readers taking turns: how many had which outcome, the findings, the slowest's seconds."""
    signal.signal(signal.SIGVTALRM, _stop)
    files = {name: READERS[name].files() for name in names}
    found: list[Finding] = []
    outcomes: Counter[str] = Counter()
    slowest = 0.0
    with tempfile.TemporaryDirectory() as folder:
        for number in range(first, first + count):
            name = names[number % len(names)]
            data = mutated(random.Random(f"{name} {seed} {number}"), files[name])
            path = Path(folder) / f"file.{READERS[name].ending}"
            path.write_bytes(data)
            begin = time.process_time()
            said = outcome(READERS[name], str(path))
            slowest = max(slowest, time.process_time() - begin)
            outcomes[f"{name}: {said if said in ('answered', 'refused') else 'finding'}"] += 1
            if said not in ("answered", "refused"):
                found.append(Finding(name, seed, number, said, data))
    return outcomes, found, slowest


def _limit_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + ROOM
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))


def main() -> int:
    """Run a campaign and print what came of it; 1 if anything was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--reader", choices=READERS)
    parser.add_argument("--keep", type=Path, help="a folder for the inputs that were found")
    arguments = parser.parse_args()
    for name in ("torch", "transformers", "peft"):
        sys.modules[name] = None  # type: ignore[assignment]
    names = [arguments.reader] if arguments.reader else list(READERS)
    campaign(names, len(names))  # imports what is needed, before memory is limited
    _limit_memory()
    outcomes, found, slowest = campaign(names, arguments.count, arguments.seed, arguments.first)
    for line, times in sorted(outcomes.items()):
        print(f"{times:8,}  {line}")
    for one in found[:50]:
        print(f"FOUND {one.reader}, seed {one.seed}, number {one.number}: {one.what}")
        if arguments.keep:
            arguments.keep.mkdir(parents=True, exist_ok=True)
            (arguments.keep / f"{one.reader.replace(' ', '-')}-{one.seed}-{one.number}").write_bytes(one.data)
    print(f"{sum(outcomes.values()):,} inputs, seed {arguments.seed}, {len(found):,} findings, the slowest {slowest:.2f} s")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
