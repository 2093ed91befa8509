"""A shell script is followed to the flags that it starts with, or what no text tells is unknown and named."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from random import Random

import pytest

from zeroplan.core.errors import BadInput
from zeroplan.interop.programs.shell import Command, training_command

RUN = "torchrun t.py --per_device_train_batch_size"


def command_of(text: str, folder: Path | None = None) -> Command:
    """The command of a script; files that it sources are sought in a folder."""

    def find(name: str) -> Path | None:
        return folder / name if folder is not None and (folder / name).is_file() else None

    return training_command(text, "run.sh", find)


#: Scripts whose text tells the batch; all give 4.
TOLD = {
    "an if": f'B=8\nif [ "$B" -gt 4 ]; then B=4; else B=16; fi\n{RUN} $B\n',
    "an elif": f"M=llama\nif [[ $M == gpt* ]]; then B=1\nelif [[ $M == llama ]]; then\n  B=4\nelse B=2\nfi\n{RUN} $B\n",
    "a condition before &&": f"B=2\nN=8\n[ $N = 8 ] && B=4\n{RUN} $B\n",
    "a condition before ||": f"N=8\nB=4\n[[ $N -eq 8 ]] || B=2\n{RUN} $B\n",
    "a case": f"S=7b\ncase $S in\n  13b|70b) B=1 ;;\n  7*) B=4;;\n  *) B=2\nesac\n{RUN} $B\n",
    "a loop over one word": f"for B in 4; do\n{RUN} $B\ndone\n",
    "a loop that counts": f"B=1\nwhile [ $B -lt 4 ]; do B=$((B * 2)); done\n{RUN} $B\n",
    "a loop over arguments that are not there": (
        f'B=4\nwhile [[ $# -gt 0 ]]; do case $1 in -b) B="$2"; shift 2;; esac; done\n{RUN} $B\n'
    ),
    "a function": f"start() {{\n  local B=$1\n  {RUN} $B\n}}\nstart 4\n",
    "a function that is not called": f"other() {{ {RUN} 16; }}\n{RUN} 4\n",
    "a default of an argument": f"{RUN} ${{1:-4}}\n",
    "arithmetic in brackets": f"A=64 B=2 C=8\n{RUN} $((A / (B * C)))\n",
    "arithmetic of old": f"{RUN} $[64/(2*8)]\n",
    "expr": f"{RUN} $(expr 64 / 16)\n",
    "let": f"let B=2+2\n{RUN} $B\n",
    "an increment": f"B=3\n((B++))\n{RUN} $B\n",
    "a hash inside a word": f"{RUN} 4 --dataset org/set#500\n",
    "a comment": f"{RUN} 4 # --per_device_train_batch_size 8\n",
    "a hash that is commented out amid lines": f"{RUN} 4 \\\n  # --bf16 True \\\n  --fp16 True\n",
    "a backslash at the end": f"{RUN} \\\n  4 \\",
    "a text that is evaluated": f'cmd="{RUN} 4"\necho $cmd\neval $cmd\n',
    "a text that grows and is evaluated": f'cmd="{RUN}"\ncmd+=" 4"\neval "$cmd"\n',
    "an array": 'A=(\n  --bf16 True  # a comment (of one)\n  --per_device_train_batch_size 4\n)\ntorchrun t.py "${A[@]}"\n',
    "an array that grows": 'A=(torchrun t.py)\nA+=(--per_device_train_batch_size 4)\n"${A[@]}"\n',
    "a shell of its own": f'srun --jobid $J bash -c "{RUN} 4"\n',
    "a subshell": f"B=4\n(B=8)\n{RUN} $B\n",
    "a count that a pipe prints": f"{RUN.replace('torchrun', 'torchrun --nproc_per_node $(nvidia-smi -L | wc -l)')} 4\n",
    "a pipe": f"{RUN} 4 2>&1 | tee log.txt\n",
    "a redirection before": f">log 2>&1 {RUN} 4 &\nwait\n",
    "a here-document": f"cat <<EOF > c.json\n{RUN} 16\nEOF\n{RUN} 4\n",
    "a cut name": f"N=run_b4\nB=${{N##*b}}\n{RUN} $B\n",
    "an unset variable's default by if": f'if [ -z "$BATCH" ]; then BATCH=4; fi\n{RUN} $BATCH\n',
    "usage where arguments are missing": f"if [ $# -lt 1 ]; then echo usage; exit 1; fi\n{RUN} 4 --output_dir $1\n",
    "an exit that is not reached": f"[ 1 -eq 2 ] && exit 1\n{RUN} 4\n",
    "a single quote": f"{RUN} 4 --system 'It is \"so\" $B'\n",
    "windows": f"{RUN} ^\r\n 4\r\n",
}


@pytest.mark.parametrize("kind", TOLD)
def test_what_a_script_tells_is_followed(kind: str) -> None:
    command = command_of(TOLD[kind])
    assert (command.program, command.flags["per_device_train_batch_size"]) == ("t.py", 4)


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
@pytest.mark.parametrize("kind", [kind for kind in TOLD if kind != "windows"])
def test_bash_starts_the_same(kind: str, tmp_path: Path) -> None:
    """The oracle: bash itself, with a torchrun and an srun that print what they get."""
    for name, body in {"torchrun": 'printf "%s\\n" "RUN $*" >> "$OUT"', "srun": 'shift 2; exec "$@"'}.items():
        path = tmp_path / name
        path.write_text(f"#!/bin/bash\n{body}\n")
        path.chmod(0o755)
    words = ["x"] if kind.startswith("usage") else []
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "OUT": str(tmp_path / "out"), "J": "1"}
    subprocess.run(
        ["bash", "-c", TOLD[kind], "run.sh", *words], cwd=tmp_path, env=environment, check=False, capture_output=True
    )
    (line,) = (tmp_path / "out").read_text().splitlines()
    said = line.split()
    assert said[said.index("--per_device_train_batch_size") + 1] == "4"


#: Scripts whose text does not tell the batch, and what is named.
UNKNOWN = {
    "an if": (f"B=4\nif nvidia-smi | grep A100; then\n  B=16\nfi\n{RUN} $B\n", "line 2: an if decides it"),
    "a test of a variable that is set elsewhere": (f'B=4\n[ "$KIND" = big ] && B=16\n{RUN} $B\n', "line 2: a test decides it"),
    "a case": (f"B=1\ncase $(hostname) in\n a*) B=4;;\nesac\n{RUN} $B\n", "line 2: a case decides it"),
    "a loop": (f"for B in 1 2 4; do\n  {RUN} $B\ndone\n", "line 2: it differs between the 3 runs"),
    "a loop over files": (f"for B in *.txt; do B=$(cat $B); done\n{RUN} $B\n", "a command prints it"),
    "a loop over lines": (f"B=2\nwhile read B; do echo; done < f\n{RUN} $B\n", "line 2"),
    "read": (f"B=2\nread -p 'batch' B\n{RUN} $B\n", "line 2: read sets it"),
    "an argument": (f"B=$1\n{RUN} $B\n", "line 1: the script's argument $1"),
    "a program": (f"B=$(python pick.py)\n{RUN} $B\n", "line 1: a command prints it"),
    "arithmetic": (f"N=$(nproc)\nB=$((64 / N))\n{RUN} $B\n", "line 2: its arithmetic"),
    "what follows from it": (f"if foo; then A=1; else A=2; fi\nB=$A\n{RUN} $B\n", "line 1: an if decides it"),
}


@pytest.mark.parametrize("kind", UNKNOWN)
def test_what_a_script_does_not_tell_is_unknown_by_its_line(kind: str, tmp_path: Path) -> None:
    from zeroplan.interop.readers import read_setup

    text, why = UNKNOWN[kind]
    path = tmp_path / "run.sh"
    path.write_text(text.replace("t.py", "t.py --output_dir o --num_train_epochs 1"))
    with pytest.raises(BadInput, match="is a variable") as caught:
        read_setup(str(path))
    assert why in str(caught.value)


def test_sourced_files_are_followed_or_said_to_be_missing(tmp_path: Path) -> None:
    (tmp_path / "env.sh").write_text("B=4\nexport MORE='--bf16 True'\n")
    found = command_of(f"B=2\nsource env.sh\n{RUN} $B $MORE\n", tmp_path)
    assert (found.flags["per_device_train_batch_size"], found.flags["bf16"], found.unread) == (4, True, ())
    missing = command_of(f"B=2\n. other.sh\n{RUN} $B\n", tmp_path)
    assert [name for name, _ in missing.unread] == ["line 2: other.sh"]
    assert command_of(f"source ~/.bashrc\nsource venv/bin/activate\n{RUN} 4\n").unread == ()


def test_words_that_may_be_any_arguments_are_named() -> None:
    command = command_of(f"{RUN} 4 --bf16 True\n".replace("t.py", 't.py "$MORE"'))
    assert [word for word, _ in command.unread] == ["$MORE"]
    assert command_of(f"{RUN.replace('t.py', 't.py $@')} 4\n").assumed == ("the script is started without arguments",)


def test_a_command_runs_where_its_script_goes() -> None:
    folders = {
        f"cd train\n{RUN} 4\n": "train",
        f"cd train/..\ncd ..\n{RUN} 4\n": "..",
        f'cd "$(dirname "$0")/.."\n{RUN} 4\n': str(Path.cwd()),
        f"cd $SOMEWHERE\n{RUN} 4\n": None,
    }
    for text, folder in folders.items():
        found = command_of(text.replace('$0")/..', '$0")'))
        assert found.folder == folder, text


def test_runs_of_a_loop_that_differ_in_more_than_flags() -> None:
    gpus = command_of(f"for N in 2 4; do\n{RUN.replace('torchrun', 'torchrun --nproc_per_node $N')} 4\ndone\n")
    assert (gpus.gpus, gpus.open_machine) == (None, "another number in each of 2 runs")
    with pytest.raises(BadInput, match="holds 2 commands"):
        command_of(f"for T in a b; do\n{RUN.replace('t.py', '$T.py')} 4\ndone\n")


def test_a_script_that_merges_what_was_trained_is_not_the_run() -> None:
    command = command_of(f"{RUN} 4 --lora_rank 8\npython merge_lora.py --lora_rank 8 --output_dir o\n")
    assert command.program == "t.py"


PIECES = (
    *(
        "if",
        "then",
        "else",
        "elif",
        "fi",
        "for",
        "in",
        "do",
        "done",
        "while",
        "case",
        "esac",
        ";;",
        "{",
        "}",
        "(",
        ")",
        "((",
        "))",
    ),
    *(
        "[",
        "]",
        "[[",
        "]]",
        "&&",
        "||",
        "|",
        ";",
        "\n",
        "<<E",
        "E",
        ">",
        "$(",
        "${",
        "$((",
        "`",
        '"',
        "'",
        "\\",
        "#",
        "=",
        "+=",
        "$X",
    ),
    *("X=1", "A=(", "f()", "f", "eval", "source", "exit", "$@", "${X:-", "${X%", "python t.py", "--a", "1", "*", "$'", "^"),
)


def test_no_text_ends_otherwise_than_in_one_line() -> None:
    """Pieces of shell in any order are followed or refused."""
    draw = Random(34)
    outcomes = set()
    for _ in range(3_000):
        text = "".join(draw.choice(PIECES) + draw.choice(("", " ", " ", "\n")) for _ in range(draw.randrange(1, 40)))
        try:
            command_of(text + f"\n{RUN} 4\n")
            outcomes.add("followed")
        except BadInput as error:
            assert "\n" not in str(error)
            outcomes.add("refused")
    assert outcomes == {"followed", "refused"}


BAD = {
    "a branch that does not close": f"if true; then\n{RUN} 4\n",
    "a loop within itself": "f() { f; }\nf\n",
    "many rounds": "for a in " + "x " * 64 + "; do\n" + "for b in " + "y " * 64 + "; do\n" + ":\n" * 8 + "done\ndone\n",
    "many brackets": "(" * 5_000,
    "many substitutions that do not close": "python t.py" + "".join(f" \\\n --a{i} ${{B" for i in range(200)),
    "arithmetic without end": f"{RUN} $((9**9**9**9))\n",
    "an expression that searches long": f"[[ {'a' * 300} =~ (a+)+b ]] && B=2\n{RUN} $B\n",
}


@pytest.mark.parametrize("kind", BAD)
def test_no_script_takes_long_or_ends_in_a_traceback(kind: str, tmp_path: Path) -> None:
    from zeroplan.interop.readers import read_setup

    path = tmp_path / "run.sh"
    path.write_text(BAD[kind])
    with pytest.raises(BadInput) as caught:
        read_setup(str(path))
    assert "\n" not in str(caught.value)
