"""Boundaries inside a segment: neighbours share its rows where whole segments leave one of them idle."""

import math

import pytest

from hetjax.cluster import Cluster
from hetjax.cost import AnalyticCosts
from hetjax.planner import make_plan, shared_cuts
from hetjax.planner.layout import Layout
from hetjax.planner.search import Search
from tests.fake_program import llama


def four(kind: str = "v100-16", bandwidth: float = 25.0, **fields) -> Cluster:
    groups = {f"g{i}": {"kind": kind, "num_devices": 1, **fields} for i in range(4)}
    link = {"bandwidth_gb_per_s": bandwidth, "latency_us": 5.0}
    return Cluster.from_dict({"name": "four", "groups": groups, "default_link": link})


def search_of(program, cluster: Cluster) -> Search:
    return Search(program, cluster, AnalyticCosts(), None, None, None)


LLAMA = llama(num_layers=17, hidden=2048, vocab=4000, global_batch=256)
"""17 alike layers over four alike devices: one has to have five."""


def chain_of(search: Search):
    """The four groups one after another."""
    teams = tuple((slot,) for name in search.names for slot in search.slots(name, 1))
    found = search.simulate_first(Layout(teams, 32, "1f1b"))
    assert found is not None
    return found


def test_a_segment_too_many_is_shared_out_over_all_stages():
    search = search_of(LLAMA, four())
    base = chain_of(search)
    plans = [plan for _, plan in shared_cuts.shared(search, base)]
    assert plans
    steps = []
    for plan in plans:
        plan.check(LLAMA)
        assert any(len(stage.members) == 2 for stage in plan.stages)
        found = search.evaluate("shared", plan)
        assert found is not None
        steps.append(found.simulation.step_time_s)
    assert min(steps) < 0.95 * base.simulation.step_time_s


def test_every_row_of_every_segment_is_run_once():
    search = search_of(LLAMA, four())
    for _, plan in shared_cuts.shared(search, chain_of(search)):
        at = 0
        for stage in plan.stages:
            assert stage.segments[0] == at
            at = stage.segments[1]
            rows = [m.rows for m in stage.members]
            assert rows[0][0] == 0 and rows[-1][1] == plan.microbatch_rows
            assert all(a[1] == b[0] for a, b in zip(rows, rows[1:], strict=False))
        assert at == LLAMA.num_segments


def test_neighbours_over_a_thin_link_share_nothing():
    search = search_of(LLAMA, four())
    base = chain_of(search)
    thin = search_of(LLAMA, four(bandwidth=0.05))
    assert not list(shared_cuts.shared(thin, base))


@pytest.mark.parametrize("memory_gib", (5.5, 6.5, 8.0))
def test_plans_with_shared_segments_fit_where_memory_is_short(memory_gib):
    cluster = four(memory_gib=memory_gib)
    plan = make_plan(LLAMA, cluster)
    assert all(x <= memory_gib * 2**30 for x in plan.device_memory(LLAMA).values())
    assert (
        plan.predicted["step_time_s"]
        <= make_plan(LLAMA, cluster, allow_row_split=False).predicted["step_time_s"]
    )
    assert math.isfinite(plan.predicted["step_time_s"])
