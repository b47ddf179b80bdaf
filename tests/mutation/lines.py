"""Which test runs which line, and how long it takes: each test file once under coverage."""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from mutants import Mutant
from trees import TRACED, Pool, pytest_main

# of other parts, minutes long, or with a tracer of their own (llm_readers)
LEFT_OUT = re.compile(
    "kernels|gpu|loader|model_|tokenizer|cuda|fast_decode|attention|plot|smollm2|chat_screen|cli_chat|chaos|conformance|llm_readers"
)
PASSED = (0, 5)  # exit codes of pytest: all passed, nothing to run here
BUDGET = 90.0  # seconds of tests for one mutant; what is left over is reported as cut


def digest(tree: Path, paths: Iterable[Path]) -> str:
    sums = hashlib.sha256()
    for path in sorted(paths):
        sums.update(str(path.relative_to(tree)).encode() + path.read_bytes())
    return sums.hexdigest()


def traced(test_file: str, out: Path) -> int:
    """In the child: run one test file under coverage; its tests' times and lines to `out`."""
    import coverage

    seconds: dict[str, float] = defaultdict(float)
    data = out.with_suffix(".data")
    os.environ["COVERAGE_PROCESS_START"] = str(Path("coverage.rc").absolute())
    os.environ["COVERAGE_FILE"] = str(data) + ".process"
    tracer = coverage.Coverage(data_file=str(data), include=TRACED, config_file=False)

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
    if code in PASSED:
        out.write_text(json.dumps(plain))
    return code


def coverage_map(pool: Pool, tree: Path, kept: Path, tests: str) -> Coverage:
    """Of all test files that match `tests` and are not left out. SystemExit unless all pass as they are."""
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
                print(f"map {name}: {'passed' if code in PASSED else f'exit code {code}'}", flush=True)
                if code not in PASSED:
                    print(tree.with_suffix(".log").read_text()[-2000:], flush=True)

            pool.start(lambda name=name, out=out: traced(name, out), 3600, done)
    pool.finish()
    if missing := [out.stem for out in outs if not out.exists()]:
        sys.exit(f"tests fail before anything is changed: {', '.join(missing)}")
    return Coverage(
        [json.loads(out.read_text()) for out in outs],
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
        if self.imported[mutant.module].intersection(mutant.lines):
            found = found | self.by_module[mutant.module]  # what was made then is used later
        if not found:  # processes that are killed leave no trace of their lines
            found = {test for test in self.seconds if test.startswith("tests/test_server_")}
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
