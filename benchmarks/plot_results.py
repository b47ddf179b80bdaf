"""A picture of results/: each workload as a share of the card's limit, Headrace beside its peers, as one SVG file.

    python benchmarks/plot_results.py [--results benchmarks/results] [--out docs/speed.svg] [--workloads REGEX]

A file that `headrace bench ... --out` wrote is ours: its results carry the limit. A file with an "engine" is a peer's:
{"engine": "vllm 0.26.0", "card": ..., "model": ..., "results": [{"workload", "temperature", "value", "unit"}]}. Where a peer
names no model, the name of its file does (vllm-qwen3-8b.json). A peer's figure is measured against its own "limit", else the
one that our run found, and only where card, model, workload, temperature and unit are the same; what has no partner is named
on stderr.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

OURS = "headrace"
COLORS = ("#1f6f8b", "#c8893a", "#7a7a7a", "#8a5a83")
WIDTH, LEFT, RIGHT, BAR, GAP = 840, 190, 150, 13, 12
Key = tuple[str, float, str]  # workload, temperature, unit


@dataclass(slots=True)
class Panel:
    """One model on one card: the limit of each workload that we ran, and each engine's values beside their limits."""

    model: str
    card: str
    limits: dict[Key, float] = field(default_factory=dict)
    values: dict[str, dict[Key, tuple[float, float]]] = field(default_factory=dict)  # engine -> workload -> value, limit

    def share(self, engine: str, key: Key) -> float | None:
        """Of the limit, 1 = reached: the speed where more is better, the inverse of the time where less is."""
        if key not in self.values.get(engine, {}):
            return None
        value, limit = self.values[engine][key]
        return value / limit if key[2].endswith("/s") else limit / value


def main() -> int:
    parser = argparse.ArgumentParser(description="Results as a picture.")
    root = Path(__file__).parents[1]
    parser.add_argument("--results", type=Path, default=root / "benchmarks" / "results")
    parser.add_argument("--out", type=Path, default=root / "docs" / "speed.svg")
    parser.add_argument("--workloads", default="", help="only those that this regular expression is found in")
    args = parser.parse_args()
    panels = read_panels(args.results, re.compile(args.workloads))
    if not panels:
        print(f"no results with a limit in {args.results}: run `headrace bench all --out FILE` first", file=sys.stderr)
        return 1
    args.out.write_text(draw(panels))
    print(args.out)
    return 0


def read_panels(directory: Path, wanted: re.Pattern[str]) -> list[Panel]:
    """Our files make the panels, the peers' files fill them."""
    panels: dict[tuple[str, str], Panel] = {}
    peers: list[tuple[Path, dict[str, Any]]] = []
    for path in sorted(directory.glob("*.json")):
        document = json.loads(path.read_text())
        if not isinstance(document, dict) or not isinstance(document.get("results"), list):
            continue
        if "engine" in document:
            peers.append((path, document))
            continue
        limited = [r for r in document["results"] if "limit" in r and wanted.search(r["workload"])]
        if not limited:
            continue
        model, card = model_name(document.get("model")) or path.stem, document["machine"]["name"]
        panel = panels.setdefault((model, card), Panel(model, card))
        for r in limited:
            panel.limits[key_of(r)] = r["limit"]
            panel.values.setdefault(OURS, {})[key_of(r)] = r["value"], r["limit"]
    for path, document in peers:
        add_peer(panels, path, document, wanted)
    return list(panels.values())


def add_peer(panels: dict[tuple[str, str], Panel], path: Path, document: dict[str, Any], wanted: re.Pattern[str]) -> None:
    model = model_name(document.get("model")) or max((m for m, _ in panels if m in path.stem), key=len, default="")
    panel = panels.get((model, document.get("card", "")))
    if panel is None:
        print(f"{path.name}: no result of ours for model {model!r} on card {document.get('card')!r}", file=sys.stderr)
        return
    for r in document["results"]:
        if key_of(r) in panel.limits:
            limit = r.get("limit", panel.limits[key_of(r)])
            panel.values.setdefault(document["engine"], {})[key_of(r)] = r["value"], limit
        elif wanted.search(r["workload"]):
            print(f"{path.name}: no result of ours beside {key_of(r)}", file=sys.stderr)


def key_of(result: dict[str, Any]) -> Key:
    return result["workload"], float(result.get("temperature", 0.0)), result["unit"]


def model_name(model: str | None) -> str:
    """`benchmarks/shapes/qwen3-8b.json`, `Qwen/Qwen3-8B` and `qwen3-8b` are the same model."""
    return "" if model is None else model.removesuffix(".json").rsplit("/", 1)[-1].lower()


def draw(panels: list[Panel]) -> str:
    engines = [OURS, *sorted({e for p in panels for e in p.values if e != OURS})]
    colors = {e: COLORS[i % len(COLORS)] for i, e in enumerate(engines)}
    parts: list[str] = []
    y = 34
    for i, engine in enumerate(engines):
        x = LEFT + 170 * i
        parts.append(f'<rect x="{x}" y="{y - 11}" width="12" height="12" fill="{colors[engine]}"/>')
        parts.append(text(x + 18, y, engine))
    y += 30
    for panel in panels:
        y = draw_panel(panel, y, engines, colors, parts)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y}" width="{WIDTH}" height="{y}" '
        f'font-family="system-ui, sans-serif" font-size="13" role="img">\n'
        f"<title>Share of the card's limit, by workload</title>\n"
        f'<rect width="{WIDTH}" height="{y}" rx="8" fill="#ffffff"/>\n'
    )
    return head + "\n".join(parts) + "\n</svg>\n"


def draw_panel(panel: Panel, y: int, engines: list[str], colors: dict[str, str], parts: list[str]) -> int:
    """Appends a panel that begins at `y`; returns where the next one begins."""
    scale = WIDTH - LEFT - RIGHT  # pixels for the whole limit
    parts.append(text(20, y, f"{panel.model}, {panel.card}", weight="bold"))
    top = y = y + 14
    bars: list[str] = []
    for key in panel.limits:
        there = [(e, s) for e in engines if (s := panel.share(e, key)) is not None]
        middle = y + BAR * len(there) / 2 + 5
        bars.append(text(LEFT - 10, middle, f"{key[0]}{f', t={key[1]:g}' if key[1] else ''}", anchor="end"))
        for engine, share in there:
            width = scale * min(share, 1.0)
            bars.append(f'<rect x="{LEFT}" y="{y}" width="{width:.1f}" height="{BAR - 1}" fill="{colors[engine]}"/>')
            value = panel.values[engine][key][0]
            label = f"{100 * share:.0f} %   {value:,.{0 if value >= 100 else 2}f} {key[2]}"
            bars.append(text(LEFT + width + 6, y + BAR - 3, label, size=11))
            y += BAR
        y += GAP
    for percent in range(0, 101, 25):
        x = LEFT + scale * percent / 100
        parts.append(f'<line x1="{x:.1f}" y1="{top}" x2="{x:.1f}" y2="{y - 4}" stroke="#dddddd"/>')
        parts.append(text(x, y + 10, f"{percent} %", anchor="middle", size=11))
    parts += bars
    return y + 44


def text(x: float, y: float, words: str, *, anchor: str = "start", size: int = 13, weight: str = "normal") -> str:
    style = f'text-anchor="{anchor}" font-size="{size}" font-weight="{weight}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {style} fill="#222222" xml:space="preserve">{escape(words)}</text>'


if __name__ == "__main__":
    sys.exit(main())
