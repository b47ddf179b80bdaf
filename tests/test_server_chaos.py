"""A short run of the chaos: clients, a core killed every few seconds, every answer compared with the undisturbed one."""

from __future__ import annotations

from pathlib import Path

import pytest

from chaos import Chaos
from server_driver import ServerProcess


@pytest.mark.parametrize(("cores", "seconds"), [(1, 6), (2, 6)])
def test_chaos(model, tmp_path: Path, cores, seconds):
    options = ("--served-model-name", "tiny", "--heartbeat-timeout", "3", "--max-restarts", "1000", "--data-parallel-size", str(cores))
    with ServerProcess(model, *options, tmp=tmp_path) as server:
        server.wait_ready()
        report = Chaos(server, seed=1, clients=16, pool=40, seconds=seconds, kill_every=1.2, cores=cores, least=2).run()
        assert not report.faults, "\n".join(report.faults)
        assert report.tokens_lost == 0 and report.tokens_checked > 300, report
        assert report.restarts >= 2 and report.counts["plain"] > 10, report
        assert server.terminate() == 0
        assert not list(tmp_path.glob("headrace-*"))
        print(report.as_dict())
