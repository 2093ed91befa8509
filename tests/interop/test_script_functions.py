"""Values that pass through functions of a script: read where one call gives them, unknown where anything may change them.

What each would do was taken from running it with recorders in place of transformers.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from zeroplan.interop.readers import read_setup
from zeroplan.interop.setups import Setup

HEAD = "import argparse, torch\nfrom transformers import AutoModelForCausalLM, Trainer, TrainingArguments\n"
PARSE = (
    "def parse_args():\n    p = argparse.ArgumentParser()\n    p.add_argument('--bs', type=int, default=4)\n"
    "    args = p.parse_args()\n    return args\n"
)
TRAIN = (
    "def train({}):\n{}    model = AutoModelForCausalLM.from_pretrained('openai-community/gpt2', torch_dtype=torch.bfloat16)\n"
    "    a = TrainingArguments(output_dir='o', per_device_train_batch_size={})\n    Trainer(model=model, args=a).train()\n"
)
BATCH, FIELD, ITEM = TRAIN.format("batch", "", "batch"), TRAIN.format("cfg", "", "cfg.bs"), TRAIN.format("cfg", "", "cfg['bs']")


def setup_of(folder: Path, source: str, line: str = "") -> Setup:
    (folder / "train.py").write_text(HEAD + source)
    (folder / "run.sh").write_text(line + "\n")
    return read_setup(str(folder / ("run.sh" if line else "train.py")))


SURE: dict[str, tuple[str, str, int]] = {
    "by place": (BATCH + "train(16)\n", "", 16),
    "by name": (BATCH + "train(batch=16)\n", "", 16),
    "through two": ("def run(batch):\n    train(batch)\n" + BATCH + "run(16)\n", "", 16),
    "a returned parser": (PARSE + BATCH + "def main():\n    args = parse_args()\n    train(batch=args.bs)\nmain()\n", "", 4),
    "its flag": (
        PARSE + BATCH + "args = parse_args()\ntrain(batch=args.bs)\n",
        "torchrun --nproc_per_node 2 train.py --bs 16",
        16,
    ),
    "a parser by another name": (PARSE + FIELD + "args = parse_args()\ntrain(args)\n", "", 4),
    "another field is assigned": (PARSE + FIELD + "args = parse_args()\nargs.seed = 1\ntrain(args)\n", "", 4),
    "another key of its dict": (PARSE + FIELD + "args = parse_args()\nd = vars(args)\nd['seed'] = 1\ntrain(args)\n", "", 4),
    "a dict": (ITEM + "c = {'bs': 16}\ntrain(c)\n", "", 16),
    "twice the same": ("bs = 16\n" + BATCH + "bs = 8 * 2\ntrain(bs)\n", "", 16),
}


@pytest.mark.parametrize("kind", SURE)
def test_what_one_call_gives(kind: str, tmp_path: Path) -> None:
    source, line, expected = SURE[kind]
    setup = setup_of(tmp_path, source, line)
    assert setup.ask.micro_batch == expected
    assert not setup.unmodelled


ARGS = PARSE + FIELD + "args = parse_args()\n{}train(args)\n"
DICT = "c = {{'bs': 4, 't': {{'bs': 4}}}}\n{}" + ITEM + "{}train(c)\n"
UNSURE: dict[str, str] = {
    "two calls": BATCH + "train(16)\ntrain(2)\n",
    "handed on": BATCH + "f = train\nf(16)\n",
    "a decorator": BATCH.replace("def train", "@g\ndef train") + "train(16)\n",
    "a list of arguments": BATCH + "x = (16,)\ntrain(*x)\n",
    "bound anew": TRAIN.format("batch", "    batch = batch * 2\n", "batch") + "train(16)\n",
    "a method": "class T:\n    " + BATCH.replace("\n", "\n    ").replace("(batch):", "(self, batch):") + "\nT().train(16)\n",
    "assigned inside": TRAIN.format("cfg", "    cfg.bs = 32\n", "cfg.bs") + PARSE + "args = parse_args()\ntrain(args)\n",
    "another function": ARGS.format("def fix(o):\n    o.bs = 32\nfix(args)\n"),
    "two deep": ARGS.format("def fix(o):\n    o.bs = 32\ndef do(q):\n    fix(q)\ndo(args)\n"),
    "a returned object": ARGS.format("def same(o):\n    return o\nz = same(args)\nz.bs = 32\n"),
    "changed before it returns": ARGS.format("").replace("    return args", "    args.bs *= 8\n    return args"),
    "vars": ARGS.format("vars(args).update(bs=32)\n"),
    "vars by name": ARGS.format("d = vars(args)\nd['bs'] = 32\n"),
    "vars in a function": ARGS.format("def fix(d):\n    d['bs'] = 32\nfix(vars(args))\n"),
    "vars by a key that is computed": ARGS.format("d = vars(args)\nd['b' + 's'] = 32\n"),
    "a list": ARGS.format("for o in [args]:\n    o.bs = 32\n"),
    "an unknown function": ARGS.format("import other\nother.fix(args)\n"),
    "a dict that a function changes": DICT.format("", "def fix(d):\n    d['bs'] = 32\nfix(c)\n"),
    "a dict under another name": DICT.format("", "def fix(d):\n    e = d\n    e['bs'] = 32\nfix(c)\n"),
    "a part of a dict": DICT.format("", "def fix(d):\n    d['bs'] = 32\nfix(c['t'])\n").replace("cfg['bs']", "cfg['t']['bs']"),
    "an object's field": "class C:\n    bs = 4\n" + FIELD + "c = C()\nc.bs = 32\ntrain(c)\n",
    "an object's method": "class C:\n    bs = 4\n    def up(self):\n        self.bs = 32\n"
    + FIELD
    + "c = C()\nc.up()\ntrain(c)\n",
}


@pytest.mark.parametrize("kind", UNSURE)
def test_what_may_change_on_the_way_is_said(kind: str, tmp_path: Path) -> None:
    setup = setup_of(tmp_path, UNSURE[kind])
    (one,) = [one for one in setup.unmodelled if one.key == "per_device_train_batch_size"]
    assert one.effect == "unknown"
    assert one.says.endswith("is not told")
