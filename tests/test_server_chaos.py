"""A short run of the chaos: 16 clients, the core killed every few seconds, every answer compared with the undisturbed one."""

from __future__ import annotations

from pathlib import Path

from chaos import Chaos
from server_driver import ServerProcess


def test_chaos(model, tmp_path: Path):
    options = ("--served-model-name", "tiny", "--heartbeat-timeout", "3", "--max-restarts", "1000")
    with ServerProcess(model, *options, tmp=tmp_path) as server:
        server.wait_ready()
        report = Chaos(server, seed=1, clients=16, pool=40, seconds=18, kill_every=2.5).run()
        assert not report.faults, "\n".join(report.faults)
        assert report.tokens_lost == 0 and report.tokens_checked > 300, report
        assert report.restarts >= 2 and report.counts["plain"] > 10, report
        assert server.terminate() == 0
        assert not list(tmp_path.glob("headrace-*"))
        print(report.as_dict())
