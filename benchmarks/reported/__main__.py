"""Runs that strangers reported, each planned with the facts that the report gives, verdict beside outcome.

    python -m benchmarks.reported [--only RE] [--json FILE]

Complete runs are those whose report tells every fact that decides, or names the program whose default it is; runs with a
missing fact are planned with an assumption and counted apart. Exits with 1 when a complete run was said to fit and did not.
"""

from __future__ import annotations

import argparse
import json
import re
from dataclasses import asdict
from pathlib import Path

from benchmarks.reported.cases import load_cases
from benchmarks.reported.score import CaseScore, Verdict, by_source, score, summary

RESULT = Path(__file__).resolve().parent.parent / "results" / "reported.json"
#: The first scores: the facts stood, no plan had been made, and nothing was mended.
BLIND = RESULT.with_name("reported_blind.json")


def main() -> int:
    """Print the table; keep it as JSON if that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="RE", help="runs whose id matches")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the scores")
    arguments = parser.parse_args()
    scores: list[CaseScore] = []
    for run in load_cases():
        if re.search(arguments.only, run.id):
            scores.append(score(run))
            print(_line(scores[-1]), flush=True)
    complete = [one for one in scores if one.complete]
    content = {
        "made_by": "python -m benchmarks.reported",
        "complete": summary(complete),
        "complete_by_source": by_source(complete),
        "with_assumptions": summary(one for one in scores if not one.complete),
        "runs": [{key: value for key, value in asdict(one).items() if key != "seconds"} for one in scores],
    }
    print()
    for name in ("complete", "with_assumptions"):
        print(name.replace("_", " "), json.dumps(content[name]))
    if arguments.json:
        arguments.json.write_text(json.dumps(content, indent=1) + "\n")
    return int(any(one.verdict is Verdict.FALSE_SAFE for one in complete))


def _line(one: CaseScore) -> str:
    outcome = "ran" if one.fits else "ran out"
    figures = " ".join(f"{f.what} {f.reported / 2**30:.1f} → {f.planned / 2**30:.1f} ({f.error:+.1%})" for f in one.figures)
    verdict = one.verdict.value if one.verdict else "no limit"
    told = "" if one.complete else " [assumed]"
    return f"{one.id:34} {outcome:7} {verdict:11}{told} {figures or ''} {one.said[:150]} {one.seconds:.1f}s"


if __name__ == "__main__":
    raise SystemExit(main())
