"""Draws classes of transformers at random, from all whose forward is traced, and runs them from their config class's defaults.

    python -m benchmarks.measure.classes --seed 20261124 --count 40 --out benchmarks/measure/specs/classes_1gpu.jsonl

The first names of a shuffle of the sorted names are taken (``benchmarks/results/sweep_models.json``). What the defaults make
too large for one GPU is cut to fewer blocks; a class that stays too large has its line, with the reason as ``skipped``, in a
file beside the others'. No layer is dropped at random. Engine, stage, micro batch and length are drawn by the same seed.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.measure.models import CLASS, build_config
from benchmarks.measure.spec import Spec
from benchmarks.sweep_models import RESULT, read
from zeroplan.core.errors import BadInput

#: Parameters up to which a model is run as it is, and its blocks where it is not.
_MOST, _BLOCKS = 1_500_000_000, (8, 4, 2)
#: Parameters beyond which a class is skipped: 18 bytes of each, and what it computes, have to fit into 80 GB beside others.
_TOO_MANY = 2_700_000_000
_AUTO = {
    "causal-lm": "AutoModelForCausalLM",
    "masked-lm": "AutoModelForMaskedLM",
    "seq2seq": "AutoModelForSeq2SeqLM",
    "sequence-classification": "AutoModelForSequenceClassification",
    "token-classification": "AutoModelForTokenClassification",
    "question-answering": "AutoModelForQuestionAnswering",
    "image-classification": "AutoModelForImageClassification",
    "image-text-to-text": "AutoModelForImageTextToText",
    "speech-seq2seq": "AutoModelForSpeechSeq2Seq",
    "ctc": "AutoModelForCTC",
    "audio-classification": "AutoModelForAudioClassification",
}


def auto_class_of(architecture: str) -> str:
    """Return the auto class in whose table of transformers an architecture stands."""
    return next(_AUTO[one.task] for one in read(RESULT) if one.architecture == architecture)


def build(spec: Spec, dtype: Any) -> Any:
    """Return the model of a spec of a class, with random weights, in training mode."""
    import transformers

    config = config_of(spec)
    made = getattr(transformers, spec.model.removeprefix(CLASS))
    try:
        model = made._from_config(config, dtype=dtype, attn_implementation=spec.attn)
    except ValueError:  # eager is all that some have
        model = made._from_config(config, dtype=dtype, attn_implementation="eager")
    return model.train()


def config_of(spec: Spec) -> Any:
    """Return the config of a spec's class, with the tokens that its forward asks for."""
    config = build_config(spec.model, spec.model_overrides)
    if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = 0
    if getattr(config, "pad_token_id", None) is None:
        config.pad_token_id = 0
    return config


def batch(spec: Spec, dtype: Any, device: Any) -> dict[str, Any]:
    """Return one micro batch of the inputs that a class takes, in the shapes that are traced, with random values."""
    import torch

    from zeroplan.tape.options import Arithmetic, TraceOptions
    from zeroplan.trace.build import build_inputs, ends_samples, full_config, vocabulary_of
    from zeroplan.trace.fit import TracePoint

    config = full_config(spec.model_overrides)
    auto = auto_class_of(spec.model.removeprefix(CLASS))
    half = Arithmetic.HALF if dtype != torch.float32 else Arithmetic.FP32
    shapes = build_inputs(config, auto, TraceOptions(arithmetic=half), TracePoint(spec.micro_batch, spec.seq_len))
    words = max(4, min(vocabulary_of(config) or 4, 30000))
    classes = auto in (_AUTO["sequence-classification"], _AUTO["image-classification"], _AUTO["audio-classification"])
    made: dict[int, Any] = {}

    def filled(name: str, tensor: Any) -> Any:
        if tensor.is_floating_point():
            return torch.randn(tensor.shape, dtype=dtype, device=device)
        flat = name.endswith("positions") or name == "token_type_ids" or (name == "labels" and classes)
        if flat or (name == "labels" and auto == _AUTO["token-classification"]):
            return torch.zeros(tensor.shape, dtype=torch.int64, device=device)
        return torch.randint(3, words, tensor.shape, device=device)

    for name, tensor in shapes.items():
        made.setdefault(id(tensor), filled(name, tensor))
    found = {name: made[id(tensor)] for name, tensor in shapes.items()}
    if auto == _AUTO["token-classification"]:
        found["labels"] = torch.zeros_like(found["input_ids"])
    if auto == _AUTO["sequence-classification"] and ends_samples(config):
        end = config.get("eos_token_id")
        end = end[0] if isinstance(end, list) else end if isinstance(end, int) else 0
        found["input_ids"][found["input_ids"] == end] = 4 if end != 4 else 5
        found["input_ids"][:, -1] = end
    return found


def _shortened(config: Mapping[str, Any], blocks: int) -> dict[str, Any]:
    """Return the values that cut each of a config's stacks to at most so many blocks; nested configs stay nested."""
    from zeroplan.trace.build import depths_of, full_config, shorten

    whole = full_config(config)
    depths = [type(d)(d.path, d.real, min(d.real, blocks)) for d in depths_of(whole)]
    short, changed = shorten(whole, depths), dict(config)
    for depth in depths:
        if len(depth.path) == 1:
            changed |= {key: value for key, value in short.items() if value != whole.get(key)}
        else:
            changed[depth.path[0]] = short[depth.path[0]]
    return changed


def parameters_of(config: Mapping[str, Any]) -> int:
    """Return the number of parameters of a config's class."""
    from zeroplan.models.from_config import spec_from_config

    return spec_from_config(dict(config), name=str(config["architectures"]), source="config").params


def draw(
    seed: int,
    count: int,
    alone: frozenset[str] = frozenset(),
    letter: str = "K",
    drawn: frozenset[str] = frozenset(),
) -> list[dict[str, Any]]:
    """Return the lines of a specs file: what differs from a spec's defaults, or why a class is skipped.

    Those of `alone` are run with one sample, since with those drawn they are predicted to need more than the card has. Ids
    are `letter` and a number. Classes of `drawn` are left out.
    """
    from zeroplan.models.attention import eager_only

    traced = {one.architecture: one for one in read(RESULT) if one.outcome == "traced"}
    source = random.Random(seed)
    names = sorted(traced.keys() - drawn)
    source.shuffle(names)
    lines = []
    for place, name in enumerate(names[:count]):
        one = traced[name]
        engine, stage = source.choice((("deepspeed", 1), ("deepspeed", 2), ("deepspeed", 3), ("ddp", 0)))
        if engine == "ddp" and one.task == "image-text-to-text":  # without images parameters get no gradient, which DDP refuses
            engine, stage = "deepspeed", 1
        seq, samples = source.choice((128, 256, 384, 512)), source.choice((2, 3, 4, 8))
        line: dict[str, Any] = {"id": f"{letter}{place + 1:02}", "model": CLASS + name, "engine": engine, "stage": stage}
        config: dict[str, Any] = {"model_type": one.model_type, "architectures": [name]}
        if "hubert" in name.lower():
            config["layerdrop"] = 0.0
        line |= {"model_overrides": config, "seq_len": seq, "micro_batch": samples, "steps": 4, "limit": 200.0}
        if eager_only(one.model_type):
            line["attn"] = "eager"
        total = parameters_of(config)
        for blocks in _BLOCKS if total > _MOST else ():
            short = _shortened(config, blocks)
            try:
                total = parameters_of(short)
            except BadInput as refused:  # blocks of some kinds come in groups
                line["skipped"] = f"{total / 1e9:.1f} billion parameters, and with fewer blocks: {refused}"
                break
            line["model_overrides"] = short
            if total <= _MOST:
                break
        if "skipped" not in line and total > _TOO_MANY:
            line["skipped"] = f"{total / 1e9:.1f} billion parameters with two blocks a stack"
        if line["id"] in alone:
            line["micro_batch"] = 1
        line["gib"] = round(6 + 20 * total / 2**30, 1)
        lines.append(line)
    return lines


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--alone", nargs="*", default=["K35"], metavar="ID", help="runs of one sample")
    parser.add_argument("--letter", default="K", help="with which ids begin")
    parser.add_argument("--besides", type=Path, nargs="*", default=[], metavar="SPECS", help="classes of these are left out")
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    before = [json.loads(line)["model"].removeprefix(CLASS) for path in asked.besides for line in path.read_text().splitlines()]
    lines = draw(asked.seed, asked.count, frozenset(asked.alone), asked.letter, frozenset(before))
    skipped = asked.out.with_name(f"{asked.out.stem}_skipped.jsonl")
    for path, some in ((asked.out, [x for x in lines if "skipped" not in x]), (skipped, [x for x in lines if "skipped" in x])):
        path.write_text("".join(f"{json.dumps(line)}\n" for line in some))


if __name__ == "__main__":
    main()
