import dataclasses

import hypothesis
import hypothesis.strategies as st
import pytest

from hetjax.errors import UserError
from hetjax.planner import compute_limit, make_plan
from hetjax.simulate import simulate
from tests.fake_program import llama
from tests.test_planner import cluster, instances


@hypothesis.given(instances(), st.sampled_from(["runtime", "all"]))
@hypothesis.settings(max_examples=10, deadline=None)
def test_no_plan_is_faster_than_its_limits(instance, features):
    program, machines = instance
    limit = compute_limit(program, machines)
    assert limit.step_time_s <= limit.with_links_s * (1 + 1e-6) <= limit.resident_s * (1 + 2e-6)
    try:
        plan = make_plan(program, machines, features=features)
    except UserError:
        return
    step = simulate(plan, program).step_time_s
    assert limit.with_links_s <= step
    if all(m.residency == "resident" for stage in plan.stages for m in stage.members):
        assert limit.resident_s <= step


def test_a_link_that_carries_nothing_leaves_each_group_alone():
    program = dataclasses.replace(llama(4, 1024, 512, 1000), global_batch=32)
    both = {"a": ("a100-80", 2), "b": ("a100-80", 2)}
    wide = compute_limit(program, cluster(link=1e6, **both))
    thin = compute_limit(program, cluster(link=1e-6, **both))
    alone = compute_limit(program, cluster(a=both["a"]))
    assert wide.with_links_s == pytest.approx(wide.step_time_s, rel=1e-4)
    assert thin.step_time_s == wide.step_time_s == pytest.approx(alone.step_time_s / 2)
    assert thin.with_links_s == pytest.approx(alone.step_time_s, rel=1e-3)


@hypothesis.given(instances(), st.floats(1.1, 8))
@hypothesis.settings(max_examples=10, deadline=None)
def test_wider_links_and_more_memory_never_raise_a_limit_and_the_order_of_groups_does_not_matter(
    instance, factor
):
    program, machines = instance
    data = machines.to_dict()
    before = compute_limit(program, machines)

    def limit_of(changed):
        return compute_limit(program, type(machines).from_dict(changed))

    wider = {**data, "default_link": {**data["default_link"]}}
    wider["default_link"]["bandwidth_gb_per_s"] *= factor
    roomier = {**data, "groups": {k: {**g, "memory_gib": 1000.0} for k, g in data["groups"].items()}}
    for better in (wider, roomier):
        after = limit_of(better)
        assert after.with_links_s <= before.with_links_s * (1 + 1e-5)
        assert after.resident_s <= before.resident_s * (1 + 1e-5)
    turned = limit_of({**data, "groups": dict(reversed(data["groups"].items()))})
    assert turned.with_links_s == pytest.approx(before.with_links_s, rel=1e-4)
