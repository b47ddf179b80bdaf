"""`make mutation`: changes one place of the source at a time and asks whether a test notices. Writes what it found to a JSON file.

    python tests/mutation/run.py [--sample N] [--seed N] [--workers N] [--only PART...] [--out FILE]

The tree is copied; nothing is written into the checkout. First each test file runs once under coverage: which test runs which
line, and how long it takes (kept beside the results while neither source nor tests change). Then each mutant of a seeded sample
runs the tests that run its line, quickest first, up to the first failure, in a process forked from one that has imported the
libraries. A mutant that hangs, or that cannot be imported, counts as noticed. Results are kept: a run that was stopped goes on.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path

from mutants import Mutant, mutants

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PARTS = ("scheduler", "cache", "engine", "sampling", "api")
# of other parts, or minutes long
LEFT_OUT = re.compile("kernels|gpu|loader|model_|tokenizer|cuda|fast_decode|attention|plot|smollm2|chat_screen|cli_chat|chaos")
LIBRARIES = "numpy torch tokenizers jinja2 msgspec hypothesis pytest httpx starlette uvicorn prometheus_client llguidance transformers jsonschema"
BUDGET = 90.0  # seconds of tests for one mutant; what is left over is reported as cut
VERDICTS = {0: "survived", 1: "killed", 2: "killed on import", None: "killed by time"}  # by pytest's exit code
INCLUDED = [f"*/headrace/{part}/*" for part in PARTS]


def copy_tree(to: Path) -> Path:
    """The files of the checkout that git knows or would add."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=ROOT, capture_output=True, check=True, text=True
    )
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, to / name)
    # by content: a mutant of the same second and size is not taken for the original
    subprocess.run([sys.executable, "-m", "compileall", "-q", "--invalidation-mode", "checked-hash", to / "src"], check=True)
    (to / "src/sitecustomize.py").write_text("import coverage\n\ncoverage.process_startup()\n")  # idle unless tests are traced
    (to / "coverage.rc").write_text(
        "[run]\nparallel = true\nsigterm = true\ncontext = ${PYTEST_CURRENT_TEST-}\ninclude =\n"
        + "".join(f"  {p}\n" for p in INCLUDED)
    )
    return to


def digest(tree: Path, paths: Iterable[Path]) -> str:
    sums = hashlib.sha256()
    for path in sorted(paths):
        sums.update(str(path.relative_to(tree)).encode() + path.read_bytes())
    return sums.hexdigest()


def forked(tree: Path, work: Callable[[], int], log: Path) -> int:
    """The process id of a child that does `work` in `tree`, as the leader of a group of its own."""
    if (child := os.fork()) != 0:
        return child
    code = 70
    try:
        os.setsid()
        os.chdir(tree)
        out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(out, 1)
        os.dup2(out, 2)
        os.environ["PYTHONPATH"] = str(tree / "src")
        sys.path[:0] = [str(tree / "src"), str(tree / "tests")]
        sys.dont_write_bytecode = True
        code = work()
    finally:
        os._exit(code)


class Pool:
    """Trees, each with at most one child at work in it."""

    def __init__(self, trees: list[Path]):
        self.free, self.busy = list(trees), {}

    def start(
        self, work: Callable[[], int], seconds: float, done: Callable[[Path, int | None], None], prepare=lambda tree: None
    ) -> None:
        """Run `work` in a free tree, waiting for one; `done(tree, exit code or None for too long)` is called when it has ended."""
        while not self.free:
            self.wait()
        tree = self.free.pop()
        prepare(tree)
        self.busy[forked(tree, work, tree.with_suffix(".log"))] = (tree, time.monotonic() + seconds, done)

    def wait(self) -> None:
        """Until one child has ended."""
        while True:
            for child, (tree, until, done) in list(self.busy.items()):
                ended, status = os.waitpid(child, os.WNOHANG)
                late = not ended and time.monotonic() > until
                if ended or late:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(child, signal.SIGKILL)  # also what a test has started and left
                    if late:
                        os.waitpid(child, 0)
                    del self.busy[child]
                    self.free.append(tree)
                    return done(tree, None if late else os.waitstatus_to_exitcode(status))
            time.sleep(0.02)

    def finish(self) -> None:
        while self.busy:
            self.wait()


def pytest_main(*args: str, plugins: list | None = None) -> int:
    import pytest
    from hypothesis import Phase, settings

    # the first example that fails is enough, and none is carried from one mutant to the next
    settings.register_profile("mutation", deadline=None, phases=[Phase.explicit, Phase.generate], database=None)
    settings.load_profile("mutation")
    return int(
        pytest.main(
            ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", "not gpu and not terminal", *args], plugins=plugins
        )
    )


# ---- which test runs which line


def traced(test_file: str, out: Path) -> int:
    """In the child: run one test file under coverage; its tests' times and lines to `out`."""
    import coverage

    seconds: dict[str, float] = defaultdict(float)
    data = out.with_suffix(".data")
    os.environ["COVERAGE_PROCESS_START"] = str(Path("coverage.rc").absolute())
    os.environ["COVERAGE_FILE"] = str(data) + ".process"
    tracer = coverage.Coverage(data_file=str(data), include=INCLUDED, config_file=False)

    class Contexts:
        def pytest_runtest_logstart(self, nodeid: str) -> None:
            tracer.switch_context(nodeid.split("[")[0])

        def pytest_runtest_logreport(self, report) -> None:
            seconds[report.nodeid.split("[")[0]] += report.duration

    tracer.start()
    code = pytest_main(test_file, plugins=[Contexts()])
    tracer.stop()
    tracer.save()
    lines: dict[str, dict[str, set[int]]] = defaultdict(lambda: defaultdict(set))
    for path in [data, *data.parent.glob(data.name + ".process*")]:
        found = coverage.CoverageData(str(path))
        found.read()
        for name in found.measured_files():
            for line, contexts in found.contexts_by_lineno(name).items():
                # a process of its own may serve several tests of the file: its lines belong to all of them
                for test in contexts if path == data else seconds:
                    lines[test]["src/" + name.partition("/src/")[2]].add(line)
        path.unlink()
    # the context "" is what importing runs
    plain = {t: {"seconds": seconds.get(t, 0.0), "lines": {m: sorted(n) for m, n in lines[t].items()}} for t in ["", *seconds]}
    out.write_text(json.dumps({"code": code, "tests": plain}))
    return code


def coverage_map(pool: Pool, tree: Path, kept: Path, tests: str) -> Coverage:
    """Of all test files that match `tests` and are not left out."""
    kept.mkdir(parents=True, exist_ok=True)
    sources = digest(tree, tree.glob("src/headrace/**/*.py"))
    support = digest(tree, [p for p in tree.glob("tests/*.py") if not p.name.startswith("test_")])
    outs = []
    for path in sorted(tree.glob("tests/test_*.py")):
        if LEFT_OUT.search(path.name) or not re.search(tests, path.name):
            continue
        key = hashlib.sha256((sources + support).encode() + path.read_bytes()).hexdigest()[:16]
        out = kept / f"{path.stem}-{key}.json"
        outs.append(out)
        if not out.exists():
            name = f"tests/{path.name}"

            def done(tree: Path, code: int | None, name: str = name) -> None:
                print(f"map {name}: {'passed' if code == 0 else f'exit code {code}'}", flush=True)

            pool.start(lambda name=name, out=out: traced(name, out), 3600, done)
    pool.finish()
    return Coverage(
        [json.loads(out.read_text())["tests"] for out in outs],
        hashlib.sha256(str([o.name for o in outs]).encode()).hexdigest()[:16],
    )


class Coverage:
    def __init__(self, files: list[dict[str, dict]], digest: str):
        self.digest = digest  # of the tests
        self.seconds = {test: fields["seconds"] for file in files for test, fields in file.items() if test}
        self.imported: dict[str, set[int]] = defaultdict(set)
        self.by_line: dict[tuple[str, int], set[str]] = defaultdict(set)
        self.by_module: dict[str, set[str]] = defaultdict(set)
        for file in files:
            for test, fields in file.items():
                for module, lines in fields["lines"].items():
                    if not test:
                        self.imported[module].update(lines)
                        continue
                    self.by_module[module].add(test)
                    for line in lines:
                        self.by_line[module, line].add(test)

    def tests(self, mutant: Mutant) -> tuple[list[str], bool]:
        """The tests that run a mutant's line, file by file, the quickest first; whether the budget left some out."""
        found = next((f for line in mutant.lines if (f := self.by_line.get((mutant.module, line)))), set())
        if not found and self.imported[mutant.module].intersection(mutant.lines):
            found = self.by_module[mutant.module]
        files: dict[str, list[str]] = defaultdict(list)
        for test in sorted(found, key=self.seconds.__getitem__):
            files[test.partition("::")[0]].append(test)
        chosen, spent = [], 0.0
        for tests in sorted(files.values(), key=lambda tests: sum(map(self.seconds.__getitem__, tests))):
            for test in tests:
                if not chosen or spent + self.seconds[test] <= BUDGET:
                    chosen.append(test)
                    spent += self.seconds[test]
        return chosen, len(chosen) < len(found)


# ---- the mutants


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
        "--only", nargs="*", default=PARTS, help="parts or modules below src/headrace, such as cache engine/scheduler"
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
    os.environ["TRITON_INTERPRET"] = "1"
    for library in LIBRARIES.split():
        with contextlib.suppress(ImportError):
            __import__(library)
    with tempfile.TemporaryDirectory(prefix="mutation-") as folder:
        tree = copy_tree(Path(folder) / "tree")  # as it was when this began
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
