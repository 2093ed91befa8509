"""Traces every class of transformers that people train, from its config class's defaults, and counts what comes of it.

    python -m benchmarks.sweep_models [--only TEXT] [--task causal-lm] [--seconds 60] [--json FILE] [--resume]

``--resume`` keeps what FILE holds already, which is written after each task. A class is *traced*, or *refused*: its plans are
of formula depth, and one line says why. One micro batch is traced, with as many blocks as show the pattern of the depth;
nothing has weights. A refusal without a line is a fault.
"""

from __future__ import annotations

import argparse
import json
import signal
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from zeroplan.core.errors import BadInput
from zeroplan.core.workload import Attention
from zeroplan.models.attention import eager_only
from zeroplan.models.from_config import spec_from_config
from zeroplan.tape.options import TraceOptions

RESULT = Path(__file__).resolve().parent / "results" / "sweep_models.json"
#: transformers' tables of classes, by what is trained.
TABLES = {
    "causal-lm": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "masked-lm": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "seq2seq": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "sequence-classification": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
    "token-classification": "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES",
    "question-answering": "MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES",
    "image-classification": "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
    "image-text-to-text": "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
    "speech-seq2seq": "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
    "ctc": "MODEL_FOR_CTC_MAPPING_NAMES",
    "audio-classification": "MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES",
}
_BATCH, _LENGTH = 2, 128


@dataclass(frozen=True)
class Outcome:
    """What became of one class; `why` is the one line of a refusal."""

    task: str
    model_type: str
    architecture: str
    outcome: str
    why: str = ""
    seconds: float = 0.0


def classes(task: str) -> Iterator[tuple[str, str]]:
    """Yield each model type with the name of its class for the task; of several, the first."""
    from transformers.models.auto import modeling_auto

    for model_type, name in getattr(modeling_auto, TABLES[task]).items():
        yield model_type, name if isinstance(name, str) else name[0]


def sweep_one(task: str, model_type: str, architecture: str, seconds: int = 60) -> Outcome:
    """Return what becomes of one class."""
    began = time.perf_counter()

    def late(signum: int, frame: Any) -> None:
        raise TimeoutError(f"more than {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        outcome, why = _trace(model_type, architecture)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    return Outcome(task, model_type, architecture, outcome, why, round(time.perf_counter() - began, 1))


def _trace(model_type: str, architecture: str) -> tuple[str, str]:
    from zeroplan.core.model_config import auto_class_of
    from zeroplan.models.families import FAMILIES
    from zeroplan.trace.api import trace_at
    from zeroplan.trace.fit import TracePoint

    config = {"model_type": model_type, "architectures": [architecture]}
    try:
        spec = spec_from_config(config, name=architecture, source="config")
        auto = auto_class_of(config) if model_type in FAMILIES else spec.auto_class
        attn = Attention.EAGER if eager_only(model_type) else Attention.SDPA
        tape = trace_at(config, auto, TraceOptions(attn=attn), TracePoint(_BATCH, _LENGTH, 0))
        tape.expand(_BATCH, _LENGTH, None)
    except BadInput as error:
        return "refused", " ".join(str(error).split())[:200]
    except Exception as error:  # a model's own code raises anything; the planner says it in one line
        return "refused", f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
    return "traced", ""


def counts_of(found: Iterable[Outcome]) -> dict[str, dict[str, int]]:
    """Return the number of classes by task and outcome."""
    counted: dict[str, dict[str, int]] = {}
    for one in found:
        by_outcome = counted.setdefault(one.task, {"traced": 0, "refused": 0})
        by_outcome[one.outcome] += 1
    return counted


def write(path: Path, found: Iterable[Outcome]) -> None:
    """Write the outcomes with their counts; seconds are of the machine and stay out."""
    found = list(found)
    rows = [{name: value for name, value in asdict(one).items() if name != "seconds" and value} for one in found]
    lines = ",\n  ".join(json.dumps(row) for row in rows)
    path.write_text(f'{{\n "counts": {json.dumps(counts_of(found))},\n "classes": [\n  {lines}\n ]\n}}\n')


def read(path: Path) -> list[Outcome]:
    """Return the outcomes of a file that :func:`write` wrote; none where there is no file."""
    return [Outcome(**row) for row in json.loads(path.read_text())["classes"]] if path.exists() else []


def main() -> int:
    """Run the command line; 0 where every class is traced or refused with a reason."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", help="model types that contain this")
    parser.add_argument("--task", choices=tuple(TABLES), action="append", help="of these tasks alone")
    parser.add_argument("--seconds", type=int, default=60, help="give a class up after this")
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--resume", action="store_true", help="keep what the file holds already")
    args = parser.parse_args()
    path = args.json or (None if args.only or args.task else RESULT)
    found = read(path) if args.resume and path is not None else []
    known = {(one.task, one.model_type) for one in found}
    for task in args.task or TABLES:
        for model_type, architecture in classes(task):
            if args.only in model_type and (task, model_type) not in known:
                found.append(sweep_one(task, model_type, architecture, args.seconds))
                one = found[-1]
                print(f"{one.outcome:8} {task:24} {one.architecture} {one.seconds:.1f} s {one.why}", flush=True)
        if path is not None:
            write(path, found)
    for task, by_outcome in counts_of(found).items():
        print(f"{task:24} {', '.join(f'{number} {outcome}' for outcome, number in by_outcome.items())}")
    return 0 if all(one.outcome == "traced" or one.why for one in found) else 1


if __name__ == "__main__":
    raise SystemExit(main())
