"""The picture of the results: shares of the limits."""

from __future__ import annotations

import json
import re

from plot_results import draw, read_panels


def test_a_peer_is_measured_by_its_own_limit_or_else_by_ours(tmp_path) -> None:
    ours = [{"workload": "batch 1", "temperature": 0.6, "value": 2.0, "unit": "ms", "limit": 1.0},
            {"workload": "offline", "temperature": 0.6, "value": 80.0, "unit": "tok/s", "limit": 100.0}]  # fmt: skip
    theirs = [{"workload": "batch 1", "temperature": 0.6, "value": 4.0, "unit": "ms"},
              {"workload": "offline", "temperature": 0.6, "value": 60.0, "unit": "tok/s", "limit": 120.0},
              {"workload": "unknown", "temperature": 0.6, "value": 1.0, "unit": "ms"}]  # fmt: skip
    (tmp_path / "ours.json").write_text(json.dumps({"machine": {"name": "card"}, "model": "m", "results": ours}))
    (tmp_path / "peer.json").write_text(json.dumps({"engine": "peer", "card": "card", "model": "m", "results": theirs}))
    (panel,) = read_panels(tmp_path, re.compile(""))
    one, all_at_once = panel.limits
    assert (panel.share("headrace", one), panel.share("headrace", all_at_once)) == (0.5, 0.8)
    assert (panel.share("peer", one), panel.share("peer", all_at_once)) == (0.25, 0.5)
    picture = draw([panel])
    assert "25 %   4.00 ms" in picture and "50 %   60.00 tok/s" in picture
