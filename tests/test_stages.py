"""What a cut promises about its step: bounds from below, slots in given ways, state in host memory."""

import dataclasses
import itertools
import random

import pytest

from benchmarks.planner.optimality import instance
from hetjax.cluster import Cluster
from hetjax.cost import AnalyticCosts
from hetjax.planner import exhaustive, make_plan
from hetjax.planner.layout import Layout
from hetjax.planner.search import Search
from tests.fake_program import llama


def search_of(number: int) -> Search:
    program, cluster = instance(1, number)
    return Search(program, cluster, AnalyticCosts(), None, None, None)


@pytest.mark.parametrize("number", range(12))
def test_no_step_is_shorter_than_the_bound_of_its_cut(number):
    search, draw = search_of(number), random.Random(number)
    layouts = list(itertools.islice(exhaustive._layouts(search), 2000))
    of_all_cuts = exhaustive._Bounds(search)
    checked = 0
    for layout in draw.sample(layouts, min(len(layouts), 60)):
        n = search.stages.n
        bounds = (0, *sorted(draw.sample(range(1, n), len(layout.teams) - 1)), n)
        variant = draw.choice(list(exhaustive._variants(search, layout)))
        cut = search.stages.cut_at(variant, bounds)
        found = None if cut is None else search.evaluate("", search.plan_of(variant, cut))
        if cut is None or found is None:
            continue
        checked += 1
        step_s = found.simulation.step_time_s
        assert cut.lower_s <= step_s * (1 + 1e-9), (variant.label, bounds)
        row = [tuple(c) for c in exhaustive._cuts(n, len(layout.teams))].index(bounds)
        assert of_all_cuts.lower_s(layout)[row] <= step_s * (1 + 1e-9), (variant.label, bounds)
    assert checked > 5 or len(layouts) < 10


def test_a_slot_runs_in_the_way_it_is_given_and_the_others_in_their_cheapest():
    table = {"kind": "a100-80", "num_devices": 8}
    cluster = Cluster.from_dict({"name": "one", "groups": {"a": table}})
    search = Search(llama(), cluster, AnalyticCosts(), None, None, None)
    layout = Layout(tuple((slot,) for slot in search.slots("a", 4)), 8, "1f1b")
    bounds, members = (0, 3, 5, 8, search.stages.n), search.stages.stages(layout)
    free = search.stages.cut_at(layout, bounds)
    assert free is not None and members is not None
    for stage, way in itertools.product(range(4), range(3)):
        cut = search.stages.cut_at(layout.with_way(stage, 0, way), bounds)
        assert cut is not None
        wanted = [run[0].way for run in free.runs]
        wanted[stage] = members[stage][0].tables[way].way
        assert [run[0].way for run in cut.runs] == wanted


def tight(memory_gib: float) -> Cluster:
    table = {"kind": "a100-80", "num_devices": 1, "memory_gib": memory_gib}
    groups = {"a": table, "b": {**table, "kind": "v100-16"}}
    link = {"bandwidth_gb_per_s": 25.0, "latency_us": 5.0}
    return Cluster.from_dict({"name": "tight", "groups": groups, "default_link": link})


def test_state_goes_to_host_memory_where_that_lets_a_plan_without_ministages_fit():
    program = llama(num_layers=16, hidden=2048, global_batch=64)
    cluster = tight(9.0)
    plan = make_plan(program, cluster, features="all", schedule="1f1b")
    members = [m for stage in plan.stages for m in stage.members]
    assert any(m.residency == "offloaded" for m in members)
    memory = plan.device_memory(program)
    assert all(memory[m.group, d] <= 9.0 * 2**30 for m in members for d in m.devices)
    resident = dataclasses.replace(
        plan,
        stages=tuple(
            dataclasses.replace(
                stage, members=tuple(dataclasses.replace(m, residency="resident") for m in stage.members)
            )
            for stage in plan.stages
        ),
    )
    assert max(resident.device_memory(program).values()) > 9.0 * 2**30
    # What `Trainer` runs keeps its state on the devices.
    ample = make_plan(program, tight(60.0))
    assert all(m.residency == "resident" for stage in ample.stages for m in stage.members)
