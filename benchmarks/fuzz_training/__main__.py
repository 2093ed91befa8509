"""A campaign of random trainings: ``python -m benchmarks.fuzz_training --cases 10000 --ranks 1-4 --seed 0 --out FILE``.

With ``--jobs N``, N processes share the cases, each with ranks and a file of its own: FILE.0, FILE.1 and so on.
Each line of FILE is a case's seed and outcome: ``equal``, ``refused`` with the reason, ``different``, ``crash``, ``hang``;
where plain torch itself raises, ``both-refuse`` or, if the runtime trains, ``accepted``. A campaign that was ended goes on
where it was. A case that goes wrong is made as small as possible and printed as a script. Ends with 1 if any went wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

from benchmarks.fuzz_training.case import Case, draw
from benchmarks.fuzz_training.compare import WELL, Outcome, judge
from benchmarks.fuzz_training.faults import FAULTS
from benchmarks.fuzz_training.pool import Pool


def smaller(case: Case, outcome: Outcome, pool: Pool, *, tries: int = 60) -> tuple[Case, Outcome]:
    """Return the plainest case found that still goes wrong in the same kind of way."""
    left = tries
    while left:
        for plainer in case.plainer():
            left -= 1
            found = judge(plainer, pool)
            if found.kind == outcome.kind:
                case, outcome = plainer, found
                break
            if not left:
                break
        else:
            break
    return case, outcome


def script(case: Case, outcome: Outcome) -> str:
    """Return a program that runs `case` alone."""
    said = "\n# ".join(outcome.reason.splitlines())
    return (
        f"# {outcome.kind}: {said}\n"
        "from benchmarks.fuzz_training.case import Case\n"
        "from benchmarks.fuzz_training.compare import judge\n"
        "from benchmarks.fuzz_training.pool import Pool\n\n"
        'if __name__ == "__main__":\n'
        f"    print(judge({case}, Pool()))\n"
    )


def _done(out: Path) -> set[int]:
    """The seeds in the file; a line that a kill has cut off is removed."""
    if not out.exists():
        return set()
    text = out.read_text()
    if not text.endswith("\n"):
        text = text[: text.rfind("\n") + 1]
        os.truncate(out, len(text.encode()))
    return {json.loads(line)["seed"] for line in text.splitlines()}


def _write(out: int, seed: int, outcome: Outcome, case: Case) -> None:
    row = {"seed": seed, "outcome": outcome.kind, "reason": outcome.reason}
    if not outcome.is_well:
        row["case"] = str(case)
    os.write(out, (json.dumps(row) + "\n").encode())  # one call, so that lines are whole


def _file_of(out: Path, part: int) -> Path:
    return out.with_name(f"{out.name}.{part}")


def _share(arguments: argparse.Namespace) -> int:
    """Run a campaign in several processes; 1 if anything went wrong."""
    words = [sys.executable, "-m", "benchmarks.fuzz_training", *sys.argv[1:]]
    begin = time.monotonic()
    running = [subprocess.Popen([*words, "--part", str(part)]) for part in range(arguments.jobs)]
    codes = [one.wait() for one in running]
    lines = [line for part in range(arguments.jobs) for line in _file_of(arguments.out, part).read_text().splitlines()]
    counts = Counter(json.loads(line)["outcome"] for line in lines)
    print(f"in all {len(lines)} cases in {arguments.jobs} files, {time.monotonic() - begin:.0f} s: {dict(counts)}")
    return 0 if not any(codes) and set(counts) <= set(WELL) else 1


def main() -> int:
    """Run a campaign; 1 if anything went wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="ends then; call again to go on")
    parser.add_argument("--ranks", default="1-4", help="the least and the most ranks")
    parser.add_argument("--seed", type=int, default=0, help="of the first case")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--jobs", type=int, default=1, help="processes, of four ranks each")
    parser.add_argument(
        "--fault", choices=sorted(FAULTS), default="", help="that the runtime is given, to see how many show it"
    )
    parser.add_argument("--part", type=int, default=-1, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.part < 0 and arguments.jobs > 1:
        return _share(arguments)
    if arguments.part >= 0:
        arguments.out = _file_of(arguments.out, arguments.part)
    least, _, most = arguments.ranks.partition("-")
    bounds = (int(least), int(most or least))
    done = _done(arguments.out)
    pool, counts, begin = Pool(arguments.fault), Counter[str](), time.monotonic()
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    out = os.open(arguments.out, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for seed in range(arguments.seed + max(arguments.part, 0), arguments.seed + arguments.cases, arguments.jobs):
        if seed in done:
            continue
        if time.monotonic() - begin > arguments.seconds:
            break
        case = draw(seed, bounds)
        outcome = judge(case, pool)
        counts[outcome.kind] += 1
        _write(out, seed, outcome, case)
        if not outcome.is_well and not arguments.fault:
            print(f"seed {seed}: {case}\n{script(*smaller(case, outcome, pool))}", flush=True)
    pool.stop()
    took = time.monotonic() - begin
    print(f"{sum(counts.values())} cases in {took:.0f} s, ranks started {pool.starts} times: {dict(counts)}")
    return 0 if set(counts) <= set(WELL) else 1


if __name__ == "__main__":
    sys.exit(main())
