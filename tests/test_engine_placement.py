"""How a machine is divided among several cores: cards, the CPU's cores and threads, memory; and what cannot be divided."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.config import EngineConfig
from headrace.engine import placement as subject
from headrace.engine.build import build_engine
from headrace.engine.placement import Placement
from headrace.engine.wire import Place
from headrace.errors import ParameterError
from headrace.llm import LLM
from headrace.machine import usable_cpus


@pytest.fixture(autouse=True)
def no_cards_named(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def on_cards(count: int, cores: int, ranks: int = 1) -> Placement:
    return Placement(EngineConfig(data_parallel_size=cores, tensor_parallel_size=ranks), lambda: count)


@pytest.mark.parametrize(("named", "cards"), [("", "0 1 2 3"), ("7,3, GPU-8a ,1", "7 3 GPU-8a 1"), ("2,3,0,1,9,9", "2 3 0 1")])
def test_each_core_sees_its_cards_and_no_others(monkeypatch, named, cards):
    """By the names that the server's own environment has for them; CUDA's count says how many of those are there."""
    if named:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
    names = cards.split()
    assert [on_cards(4, 2, 2).of(n) for n in range(2)] == [Place("core 0", names[:2]), Place("core 1", names[2:])]
    assert [on_cards(4, 4).of(n) for n in range(4)] == [Place(f"core {n}", [name]) for n, name in enumerate(names)]


def test_more_cores_than_cards_are_refused_at_once():
    with pytest.raises(ParameterError, match="data_parallel_size: got 5, allowed: at most 4: CUDA sees 4 cards here"):
        on_cards(4, 5)
    with pytest.raises(ParameterError, match=r"data_parallel_size: got 2, allowed: at most 1: .*3 cards here, 2 for each core"):
        on_cards(3, 2, 2)
    with pytest.raises(ParameterError, match="device: got 'cuda', allowed: auto or cpu here: CUDA sees no card"):
        Placement(EngineConfig(data_parallel_size=2, device="cuda"), lambda: 0)
    placement = on_cards(4, 2)
    assert placement.of(3) == Place("core 3", ["3"])
    with pytest.raises(ParameterError, match="core: got 4, allowed: at most 3"):
        placement.of(4)


def test_a_core_that_is_alone_has_the_machine():
    def asked() -> int:
        raise AssertionError("nobody need know")

    assert Placement(EngineConfig(tensor_parallel_size=2), asked).of(0) == Place()


@given(
    cores=st.integers(1, 40), siblings=st.integers(1, 2), quota=st.integers(1, 40), replicas=st.integers(2, 12),
    asked=st.none() | st.integers(1, 80),
)  # fmt: skip
def test_a_cpu_is_divided_without_remainder(cores, siblings, quota, replicas, asked):
    cpus = [[i + k * cores for k in range(siblings)] for i in range(cores)]
    usable = min(cores, quota)
    threads = None if asked is None else max(replicas, min(asked, cores * siblings))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subject, "usable_cpus", lambda: cpus)
        patch.setattr(subject, "usable_cores", lambda: usable)
        patch.setattr(subject, "available_memory", lambda: 1000 * replicas)
        placement = Placement(EngineConfig(device="cpu", data_parallel_size=replicas, threads=threads))
        places = [placement.of(n) for n in range(replicas)]
        later = placement.of(replicas)
    mine = [cpu for place in places for cpu in place.cpus or ()]
    assert sorted(mine) == sorted(cpu for core in cpus for cpu in core), "each belongs to one"
    for place in places:
        assert place.cards is None and place.memory == 1000 and 1 <= place.threads <= len(place.cpus or [0])
    if cores >= replicas:
        assert sum(place.threads for place in places) <= max(replicas, threads or usable)
        assert max(len(p.cpus) for p in places) - min(len(p.cpus) for p in places) <= siblings
    assert later.cpus is None and later.threads >= 1


def test_fewer_threads_than_cores_are_refused():
    with pytest.raises(ParameterError, match="threads: got 1, allowed: at least 2"):
        Placement(EngineConfig(device="cpu", data_parallel_size=2, threads=1))


def test_cores_of_a_socket_come_after_one_another(tmp_path, monkeypatch):
    """Two sockets whose CPUs are numbered in turn, two threads each."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    for i in range(8):
        topology = tmp_path / f"sys/devices/system/cpu/cpu{i}/topology"
        topology.mkdir(parents=True)
        (topology / "thread_siblings_list").write_text(f"{i % 4},{i % 4 + 4}\n")
        (topology / "physical_package_id").write_text(f"{i % 2}\n")
    assert usable_cpus(tmp_path) == [[0, 4], [2, 6], [1, 5], [3, 7]]


def test_one_process_runs_one_core(model):
    for make in (lambda: LLM(model, data_parallel_size=2), lambda: build_engine(EngineConfig(model=model, data_parallel_size=2))):
        with pytest.raises(ParameterError, match="data_parallel_size: got 2, allowed: 1 here: several cores need `headrace serve`"):
            make()
    for wrong in (0, -1, 257, True, 1.5):
        with pytest.raises(ParameterError, match="data_parallel_size"):
            EngineConfig(data_parallel_size=wrong)  # type: ignore[arg-type]
