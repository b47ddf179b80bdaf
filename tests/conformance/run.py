"""Installs the judges, starts the servers that they judge, lets every one judge, prints a table. Started by run.sh."""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from judges import CLIENTS, JUDGES, Judge, Verdict, run_judge, server


class Place:
    """Where the judges are installed."""

    def __init__(self, root: Path):
        self.root, self.uv, self.node = root, root / "uv" / "bin" / "uv", root / "node"
        self.logs = root / "logs"
        shutil.rmtree(self.logs, ignore_errors=True)
        self.logs.mkdir(parents=True)

    def install(self, judge: Judge) -> dict[str, str]:
        """What the command's {bin} and {site} are, and the folder that it needs to run in. Raises CalledProcessError."""
        if not judge.packages and not judge.node:
            return {}
        if judge.node:
            if not (self.node / "node_modules").exists():
                self.node.mkdir(exist_ok=True)
                shutil.copy(CLIENTS / "package.json", self.node)
                self._quiet("npm", "install", "--no-audit", "--no-fund", "--silent", cwd=self.node)
            for script in CLIENTS.glob("*.mjs"):
                shutil.copy(script, self.node)  # modules are looked for beside the script
            return {"folder": str(self.node)}
        name = re.sub(r"\W+", "-", "-".join(judge.packages))
        venv = self.root / name
        if not (venv / ".installed").exists():
            self._quiet(self.uv, "venv", "-q", "--clear", "--python", sys.executable, venv)
            self._quiet(self.uv, "pip", "install", "-q", "--python", venv / "bin" / "python", *judge.packages)
            # the judge's own files, importable beside any other environment; of schemathesis, what it reads of llm-comply
            self._quiet(self.uv, "pip", "install", "-q", "--no-deps", "--target", venv / "site", judge.packages[judge.files])
            (venv / ".installed").touch()
        return {"bin": str(venv / "bin"), "site": str(venv / "site")}

    def work(self) -> Path:
        """An empty folder."""
        shutil.rmtree(self.root / "work", ignore_errors=True)
        (self.root / "work").mkdir()
        return self.root / "work"

    def _quiet(self, *command: object, cwd: Path | None = None) -> None:
        with open(self.logs / "install.log", "a") as log:
            subprocess.run([str(c) for c in command], check=True, stdout=log, stderr=log, cwd=cwd, timeout=900)


def verdicts(judges: list[Judge], place: Place) -> Iterator[Verdict]:
    """Of every judge, server after server; what cannot be installed or started has failed."""
    for kind in dict.fromkeys(judge.server for judge in judges):
        mine = [judge for judge in judges if judge.server == kind]
        done = 0
        try:
            with server(kind, place.logs) as running:
                for judge in mine:
                    log = place.logs / (re.sub(r"\W+", "-", judge.name) + ".log")
                    try:
                        installed = place.install(judge)
                    except (subprocess.SubprocessError, OSError) as error:
                        yield Verdict(judge.name, failed=1, why=f"not installed ({type(error).__name__}): see install.log")
                    else:
                        values = running | installed | {"fetched": str(place.root / "fetched")}
                        yield run_judge(judge, values, place.work(), log)
                    done += 1
        except (RuntimeError, OSError) as error:
            for judge in mine[done:]:
                yield Verdict(judge.name, failed=1, why=str(error))


def row(name: object, passed: object, failed: object, skipped: object, seconds: object, why: object) -> str:
    return f"{name:<26}{passed:>8}{failed:>8}{skipped:>9}{seconds:>9}  {why}".rstrip()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="only judges whose name contains one of these")
    parser.add_argument("--judges", type=Path, required=True, help="where they are installed")
    args = parser.parse_args()
    chosen = [j for j in JUDGES if not args.names or any(n in j.name for n in args.names)]
    rows = [row("judge", "passed", "failed", "skipped", "seconds", "")]
    all_good = bool(chosen)
    for verdict in verdicts(chosen, Place(args.judges.absolute())):
        rows.append(row(verdict.name, verdict.passed, verdict.failed, verdict.skipped, f"{verdict.seconds:.0f}", verdict.why))
        print(rows[-1], flush=True)
        all_good &= not verdict.why
    print("\n" + "\n".join(rows))
    return 0 if all_good else 1


if __name__ == "__main__":
    sys.exit(main())
