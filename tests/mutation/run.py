"""`make mutation`: changes one place of the source at a time and asks whether a test notices. Writes what it found to a JSON file.

    python tests/mutation/run.py [--sample N] [--seed N] [--workers N] [--only PART...] [--out FILE]

The tree is copied; nothing is written into the checkout. First each test file runs once under coverage: which test runs which
line, and how long it takes (kept beside the results while neither source nor tests change). Then each mutant of a seeded sample
runs the tests that run its line, quickest first, up to the first failure, in a process forked from one that has imported the
libraries. A mutant that hangs, or that cannot be imported, counts as noticed. Results are kept: a run that was stopped goes on.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path

from lines import Coverage, coverage_map
from mutants import Mutant, mutants
from trees import PARTS, Pool, copy_tree, import_libraries, pytest_main

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
VERDICTS = {0: "survived", 1: "killed", 2: "killed on import", 4: "killed on import", None: "killed by time"}  # by pytest's exit code


def sampled(tree: Path, parts: list[str], count: int, seed: int) -> list[Mutant]:
    """`count` mutants of each part at most, in a random order that a larger count only extends."""
    chosen = []
    for part in parts:
        path = tree / "src/headrace" / part
        files = sorted(path.rglob("*.py")) if path.is_dir() else [path.with_suffix(".py")]
        found = [m for f in files for m in mutants(str(f.relative_to(tree)), f.read_bytes())]
        random.Random(f"{seed}/{part}").shuffle(found)
        chosen += found[:count]
    return chosen


def judged(mutants: list[Mutant], pool: Pool, seen: Coverage, results: dict[str, dict], save: Callable[[], None]) -> None:
    """Fill `results` with the verdict on each mutant that has none yet, or that other tests have not noticed."""
    for n, mutant in enumerate(mutants):
        chosen, cut = seen.tests(mutant)
        known = results.get(mutant.key, {"verdict": ""})
        if known["verdict"].startswith("killed") or known.get("tests") == seen.digest:
            continue

        def judge(verdict: str, mutant=mutant, cut=cut, n=n) -> None:
            place = f"{mutant.module}:{mutant.lines[0]}"
            results[mutant.key] = {"verdict": verdict, "place": place, "diff": mutant.diff, "cut": cut, "tests": seen.digest}
            save()
            print(f"{n + 1}/{len(mutants)} {verdict:<14} {place} {mutant.kind}", flush=True)

        def prepare(tree: Path, mutant=mutant) -> None:
            (tree / mutant.module).write_bytes(mutant.mutated)

        def done(tree: Path, code: int | None, mutant=mutant, judge=judge) -> None:
            (tree / mutant.module).write_bytes(mutant.source)
            judge(VERDICTS.get(code, f"exit code {code}"))

        if chosen:
            limit = 30 + 5 * sum(seen.seconds[t] for t in chosen)
            pool.start(lambda chosen=chosen: pytest_main("-x", "--timeout=60", *chosen), limit, done, prepare)
        else:
            judge("no test")
    pool.finish()


def report(mutants: list[Mutant], results: dict[str, dict], equivalent: dict[str, str]) -> float:
    """Print the survivors and the score of each part; the score of all."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for mutant in mutants:
        result = results[mutant.key]
        verdict = "killed" if result["verdict"].startswith("killed") else "survived"
        if verdict == "survived":
            reason = equivalent.get(changed(result["diff"]))
            verdict = "equivalent" if reason else verdict
            print(f"\n{reason or result['verdict']}{' (some tests left out for time)' * result['cut']}\n{result['diff']}")
        part = mutant.module.split("/")[2]
        counts[part][verdict] += 1
        counts["all"][verdict] += 1
    print(f"\n{'part':<10}{'mutants':>9}{'noticed':>9}{'survived':>10}{'equivalent':>12}{'score':>8}")
    score = 0.0
    for part in [*sorted(counts.keys() - {"all"}), "all"]:
        killed, survived, same = (counts[part][v] for v in ("killed", "survived", "equivalent"))
        score = killed / max(1, killed + survived)
        print(f"{part:<10}{killed + survived + same:>9}{killed:>9}{survived:>10}{same:>12}{score:>8.1%}")
    return score


def changed(diff: str) -> str:
    """What identifies a mutant in equivalent.json: its file, and the lines that differ."""
    head, *lines = diff.splitlines()
    return "\n".join([head.removeprefix("--- "), *(line for line in lines[2:] if line.startswith(("-", "+")))])


def main() -> int:
    parser = argparse.ArgumentParser(description="Change one place of the source at a time; does a test notice?")
    parser.add_argument("--sample", type=int, default=60, help="mutants of each part (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument(
        "--only", nargs="*", default=PARTS, help="parts or modules below src/headrace, such as cache scheduler/scheduler"
    )
    parser.add_argument("--tests", default="", metavar="PATTERN", help="only test files whose name this matches")
    parser.add_argument("--out", type=Path, default=ROOT / ".mutation/results.json")
    args = parser.parse_args()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    results = json.loads(args.out.read_text()) if args.out.exists() else {}
    equivalent = {
        changed_lines: reason
        for reason, group in json.loads((HERE / "equivalent.json").read_text()).items()
        for changed_lines in group
    }
    import_libraries()
    with tempfile.TemporaryDirectory(prefix="mutation-") as folder:
        tree = copy_tree(ROOT, Path(folder) / "tree")  # as it was when this began
        chosen = sampled(tree, list(args.only), args.sample, args.seed)
        trees = [Path(shutil.copytree(tree, Path(folder) / str(i))) for i in range(args.workers)]
        pool = Pool(trees)
        try:
            seen = coverage_map(pool, tree, args.out.parent / "coverage", args.tests)
            judged(chosen, pool, seen, results, lambda: args.out.write_text(json.dumps(results, indent=1)))
        finally:
            for child in pool.busy:
                os.killpg(child, signal.SIGKILL)
    return 0 if report(chosen, results, equivalent) >= 0.85 else 1


if __name__ == "__main__":
    sys.exit(main())
