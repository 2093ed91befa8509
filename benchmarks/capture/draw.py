"""Draws training programs of public repositories for a blind measurement: those that import what the GPU machine has.

``python benchmarks/capture/draw.py PROGRAMS HAS.txt SEED``: PROGRAMS is a folder with the repositories as ``owner+name/path``,
HAS a file of the packages that can be imported there. Prints the scripts of each kind in the order of a seeded shuffle. A list
of programs takes them from the top, as many of each kind as it says. A script is passed over for one of the reasons in the list
alone: it was measured before, does not train, needs several GPUs or what the machine cannot get, or ends by its own fault.
"""

from __future__ import annotations

import ast
import random
import sys
from pathlib import Path

KINDS = {
    "transformers": ("macorisd+transformers-qwen3/examples/pytorch/*/run_*.py",),
    "accelerate": ("huggingface+accelerate/examples/*.py", "huggingface+accelerate/examples/by_feature/*.py"),
    "peft": ("huggingface+peft/examples/*/*.py",),
    "trl": ("huggingface+trl/examples/scripts/*.py", "huggingface+trl/examples/scripts/ppo/*.py"),
    "lightning": ("Lightning-AI+pytorch-lightning/examples/fabric/*/*.py",
                  "Lightning-AI+pytorch-lightning/examples/pytorch/*/*.py"),
    "deepspeed": ("deepspeedai+DeepSpeedExamples/training/**/*.py",),
    "pytorch": ("pytorch+examples/*/*.py",),
    "nanochat": ("karpathy+nanochat/scripts/*.py",),
}  # fmt: skip


def missing(path: Path, has: set[str]) -> set[str]:
    """The packages that a script imports and the machine lacks; modules within three folders are the script's own."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {one.name.partition(".")[0] for one in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            names.add(node.module.partition(".")[0])
    homes = list(path.parents)[:3]
    own = {name for name in names if any((home / f"{name}.py").exists() or (home / name).is_dir() for home in homes)}
    return names - own - has - set(sys.stdlib_module_names)


def main() -> None:
    """Print each kind's scripts."""
    source, has, seed = Path(sys.argv[1]), set(Path(sys.argv[2]).read_text().split()), int(sys.argv[3])
    for kind, patterns in KINDS.items():
        found = sorted({str(path) for pattern in patterns for path in source.glob(pattern)})
        found = [path for path in found if kind == "nanochat" or "__main__" in Path(path).read_text()]
        drawn = [path for path in found if not missing(Path(path), has)]
        random.Random(seed).shuffle(drawn)
        print(kind, *(f"  {at} {path}" for at, path in enumerate(drawn)), sep="\n")


if __name__ == "__main__":
    main()
