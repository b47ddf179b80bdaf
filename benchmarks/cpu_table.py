"""Markdown tables from what cpu_peers.py wrote: medians and spread of the rounds, ratios, share of the read bandwidth.

    python benchmarks/cpu_table.py benchmarks/results/cpu-peers-*.json
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

Rounds = list[dict[str, float]]


def shown(values: list[float], what: str) -> str:
    """The median, and how far the rounds lie apart where they are more than one."""
    if what == "rss":
        return f"{statistics.median(values) / 1e6:,.0f} MB"
    form = {"start": "{:.2f} s", "busy": "{:.0%}"}.get(what, "{:,.0f}" if statistics.median(values) >= 100 else "{:.1f}")
    text = form.format(statistics.median(values))
    if len(values) > 1 and what not in ("start", "busy"):
        text += f" ({form.format(min(values))}-{form.format(max(values))})"
    return text


def ratio(mine: Rounds, other: Rounds, what: str) -> str:
    """The median of the rounds' ratios; of times and memory the inverse, so that more than 1 is always for `mine`."""
    theirs = {figures["round"]: figures for figures in other if figures.get(what)}
    pairs = [(m[what], theirs[m["round"]][what]) for m in mine if what in m and m["round"] in theirs]
    if not pairs:
        return ""
    return f"{statistics.median(t / m if what in ('start', 'rss') else m / t for m, t in pairs):.2f}"


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def of_file(document: dict[str, Any]) -> str:
    rounds: dict[str, Rounds] = document["rounds"]
    kinds = list(dict.fromkeys(what for of_engine in rounds.values() for figures in of_engine for what in figures))
    kinds.remove("round")
    bandwidth = document["bandwidth"]
    rows = []
    for name, of_engine in rounds.items():
        row = [name]
        for what in kinds:
            values = [figures[what] for figures in of_engine if what in figures]
            row.append(shown(values, what) if values else "")
        rate = [f["decode 1"] for f in of_engine if "decode 1" in f]
        share = statistics.median(rate) * document["step_bytes"][name] / bandwidth["median"] if rate else 0.0
        row.append(f"{share:.0%}" if share and holds_file(document["options"][name]) else "")
        rows.append(row)
    ratios = [
        [f"{mine} / {other}", *(ratio(rounds[mine], rounds[other], what) for what in kinds)]
        for mine in rounds
        if mine.startswith("headrace") and not mine.endswith("server")
        for other in rounds
        if not other.startswith("headrace")
    ]
    when = ", ".join(f"{key} {value[:12]}" for key, value in document["versions"].items())
    title = (
        f"{document['model']}, {document['cpu']}, {document['threads']} threads; {len(bandwidth['rounds'])} rounds, "
        f"read bandwidth {bandwidth['low'] / 1e9:.0f}-{bandwidth['high'] / 1e9:.0f} GB/s; {when}"
    )
    result = f"{title}\n\n{table(['tokens/s', *kinds, 'weights read at batch 1 / bandwidth'], rows)}\n"
    return result + (f"\n{table(['ratio', *kinds], ratios)}\n" if ratios else "")


def holds_file(options: dict[str, Any]) -> bool:
    """Whether an engine with these options reads the file's own bytes."""
    return options.get("quantization") is None and options.get("dtype") is None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    for path in parser.parse_args().files:
        print(of_file(json.loads(path.read_text())))


if __name__ == "__main__":
    main()
