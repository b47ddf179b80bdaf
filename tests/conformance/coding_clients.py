"""Claude Code and Codex, as their users install them, at work on the scripted model: they read, change and run a file by their own
tools over several turns; once in peace, and once while the connection of every stream is cut in its middle.

    python coding_clients.py FOLDER WORK     the npm packages are fetched into FOLDER, unless they lie there; WORK is empty

Neither is told of anything but this machine's server; their settings lie in WORK, and what they run is what the script says.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import coding_agents as play

PACKAGES = ("@anthropic-ai/claude-code", "@openai/codex")
CODEX = """
model_provider = "headrace"
approval_policy = "never"
sandbox_mode = "danger-full-access"

[model_providers.headrace]
name = "headrace"
base_url = "{url}/v1"
wire_api = "responses"
env_key = "HEADRACE_API_KEY"

[analytics]
enabled = false
"""


def fetched(folder: Path) -> Path:
    """Where the commands lie."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / ".installed").exists():
        run = {"cwd": folder, "check": True, "timeout": 600, "stdout": subprocess.DEVNULL}
        subprocess.run(["npm", "install", "--no-audit", "--no-fund", "--prefix", ".", *PACKAGES], **run)  # type: ignore[call-overload]
        subprocess.run(["node", f"node_modules/{PACKAGES[0]}/install.cjs"], **run)  # type: ignore[call-overload]
        (folder / ".installed").touch()
    return folder / "node_modules/.bin"


def claude(bin: Path, home: Path, url: str, model: str) -> tuple[list[str], dict[str, str]]:
    own = {
        "ANTHROPIC_BASE_URL": url, "ANTHROPIC_API_KEY": "x", "ANTHROPIC_MODEL": model, "ANTHROPIC_DEFAULT_HAIKU_MODEL": model,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "DISABLE_AUTOUPDATER": "1", "DISABLE_TELEMETRY": "1",
    }  # fmt: skip
    return [str(bin / "claude"), "-p", play.TASK, "--allowedTools", "Read", "Edit", "Bash"], own


def codex(bin: Path, home: Path, url: str, model: str) -> tuple[list[str], dict[str, str]]:
    (home / "config.toml").write_text(CODEX.format(url=url))
    return [str(bin / "codex"), "exec", "-m", model, "--skip-git-repo-check", play.TASK], {"CODEX_HOME": str(home), "HEADRACE_API_KEY": "x"}


def main(folder: Path, work: Path) -> int:
    bin, failed, passed = fetched(folder / "coding-clients"), 0, 0
    # Codex offers a model the tools that its own list gives it: commands alone, apply_patch beside them, one tool that runs scripts
    kinds = [
        ("Claude Code", claude, "scripted", play.claude_lines), ("Codex", codex, "scripted", lambda _: play.codex_lines(patch=False)),
        ("Codex with apply_patch", codex, "gpt-5.5", lambda _: play.codex_lines()),
        ("Codex with scripts", codex, "gpt-6.2-sol", lambda _: play.codex_script_lines()),
    ]  # fmt: skip
    for (name, client, model, lines), cut in itertools.product(kinds, (False, True)):
        here, home = (work / f"{passed + failed}-{part}" for part in ("work", "home"))
        here.mkdir(), home.mkdir()
        (here / "a.py").write_text(play.FILE)
        with play.served(lines(here), itertools.cycle((1, 4, 9, 16) if cut else (-1,)).__next__) as (url, app):
            command, own = client(bin, home, url, model)
            environment = {"PATH": os.environ["PATH"], "HOME": str(home), "LANG": "C.UTF-8", **own}
            ran = subprocess.run(command, cwd=here, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300)
        right = (here / "a.py").read_text() == play.WANTED and f"Done: it prints {play.SAYS}" in ran.stdout and app.times >= 2 * cut
        print(f"{name}{f', cut {app.times} times' if cut else ''}: {'right' if right else 'WRONG'}", flush=True)
        if not right:
            print(ran.stdout[-3000:], ran.stderr[-3000:])
        passed, failed = passed + right, failed + (not right)
    print(f"{passed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
