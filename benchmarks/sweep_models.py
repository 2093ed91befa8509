"""Traces every class of transformers that people train, from its config class's defaults, and counts what comes of it.

    python -m benchmarks.sweep_models [--only TEXT] [--task causal-lm] [--seconds 60] [--json FILE]

A class is *traced*, or *refused*: its plans are of formula depth, and one line says why. One micro batch is traced, with as
many blocks as show the pattern of the depth; nothing has weights. A refusal without a line is a fault.
"""

from __future__ import annotations

import argparse
import json
import signal
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from zeroplan.core.errors import BadInput
from zeroplan.core.tape_options import TraceOptions
from zeroplan.core.workload import Attention
from zeroplan.models.attention import eager_only
from zeroplan.models.from_config import spec_from_config

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


def main() -> int:
    """Run the command line; 0 where every class is traced or refused with a reason."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", help="model types that contain this")
    parser.add_argument("--task", choices=tuple(TABLES), action="append", help="of these tasks alone")
    parser.add_argument("--seconds", type=int, default=60, help="give a class up after this")
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args()
    found: list[Outcome] = []
    for task in args.task or TABLES:
        for model_type, architecture in classes(task):
            if args.only in model_type:
                found.append(sweep_one(task, model_type, architecture, args.seconds))
                one = found[-1]
                print(f"{one.outcome:8} {task:24} {one.architecture} {one.seconds:.1f} s {one.why}", flush=True)
    counts = Counter((one.task, one.outcome) for one in found)
    for (task, outcome), number in sorted(counts.items()):
        print(f"{task:24} {outcome:8} {number}")
    path = args.json or (None if args.only or args.task else RESULT)
    if path is not None:
        path.write_text(json.dumps([asdict(one) for one in found], indent=1) + "\n")
    return 0 if all(one.outcome == "traced" or one.why for one in found) else 1


if __name__ == "__main__":
    raise SystemExit(main())
