"""What has to hold of the planner whatever the program and the cluster, as properties over drawn instances.

`python -m tests.planner_properties [NAME ...]` tries them (all, or those named) and prints a JSON object on
one line: for each the message of its failure, or null. `--shrink` looks for a smaller instance that fails,
which takes minutes. In a process of its own the planner runs without the type checks of the test run, ten
times as fast.
"""

import copy
import dataclasses
import json
import math
import sys
from collections.abc import Callable
from typing import Any

import hypothesis
import hypothesis.strategies as st

from hetjax.cluster import Cluster
from hetjax.cost import AnalyticCosts
from hetjax.errors import UserError
from hetjax.plan import Plan
from hetjax.planner import compute_limit, make_plan
from hetjax.program import Edge
from hetjax.simulate import simulate
from tests.fake_program import FakeProgram, segment

MOST = 8
"""Examples of each property."""

SEARCHED = 1.005
"""What is not found by bounds may be off by this much."""

KINDS = ("a100-80", "v100-16", "l4", "t4", "cpu")


@st.composite
def programs(draw) -> FakeProgram:
    """Chains of 2 to 6 unlike segments; the first may be a table without arithmetic, the last a wide head."""
    n = draw(st.integers(2, 6))
    parts = []
    for i in range(n):
        params, flops = draw(st.integers(1, 40)) * 1e6, draw(st.integers(1, 50)) * 1e9
        boundary = draw(st.integers(1, 20)) * 1e5
        kept = boundary * draw(st.integers(1, 20))
        if i == 0 and draw(st.booleans()):
            flops, kept = 0.0, boundary
        parts.append(segment(i, int(params), flops, boundary, kept))
    edges = tuple(Edge(i, i + 1, p.boundary_bytes_per_row) for i, p in enumerate(parts[:-1]))
    return FakeProgram(tuple(parts), edges, global_batch=draw(st.sampled_from([4, 6, 8, 12])))


@st.composite
def clusters(draw, least: int = 1) -> dict[str, Any]:
    """The structure of a cluster file: up to three groups, a link for each pair."""
    count = draw(st.integers(least, 3))
    groups: dict[str, dict[str, Any]] = {}
    for i in range(count):
        table = {
            "kind": draw(st.sampled_from(KINDS)),
            "num_devices": draw(st.integers(1, 4 if count < 3 else 2)),
        }
        memory = draw(st.sampled_from([None, 1.0, 2.0, 4.0]))
        groups[f"g{i}"] = table | ({"memory_gib": memory} if memory else {})
    links = [
        {
            "between": [f"g{i}", f"g{j}"],
            "bandwidth_gb_per_s": draw(st.sampled_from([0.1, 0.5, 2.0, 20.0])),
            "latency_us": draw(st.sampled_from([5.0, 50.0])),
        }
        for j in range(count)
        for i in range(j)
    ]
    return {"name": "drawn", "groups": groups, "links": links}


def planned(program: FakeProgram, data: dict[str, Any], **options: Any) -> Plan | None:
    """The planner's answer; None where nothing fits."""
    try:
        return make_plan(program, Cluster.from_dict(data), **options)
    except UserError as error:
        assert "No plan fits" in str(error), error
        return None


def step_s(plan: Plan | None) -> float:
    """Predicted seconds; infinite where there is no plan."""
    return math.inf if plan is None else float(plan.predicted["step_time_s"])


def told(plan: Plan | None) -> str:
    """A plan's table, for a failure's message."""
    return "no plan" if plan is None else str(plan).split("\n\nrejected")[0]


def never_slower(program: FakeProgram, data: dict[str, Any], better: dict[str, Any]) -> None:
    """The second cluster's plan takes no longer than the first's."""
    before = planned(program, data)
    if before is None:
        hypothesis.reject()
    after = planned(program, better)
    # Of plans nearly as fast as the fastest the simplest is taken.
    assert step_s(after) <= step_s(before) * SEARCHED * (1 + 1e-9), (
        f"{step_s(after) / step_s(before):.4f} times as long on {better} as on {data}, for {program}\n"
        f"before: {told(before)}\nafter: {told(after)}"
    )


def with_devices(data: dict[str, Any], which: int, change: Callable[[int], int]) -> dict[str, Any]:
    """The cluster with another number of devices in one group."""
    changed = copy.deepcopy(data)
    table = changed["groups"][f"g{which % len(changed['groups'])}"]
    table["num_devices"] = change(table["num_devices"])
    return changed


@hypothesis.given(programs(), clusters(), st.integers(0, 2))
def twice_the_devices_never_make_the_plan_slower(program, data, which):
    never_slower(program, data, with_devices(data, which, lambda n: 2 * n))


@hypothesis.given(programs(), clusters(), st.integers(0, 2))
def one_more_device_never_makes_the_plan_slower(program, data, which):
    never_slower(program, data, with_devices(data, which, lambda n: n + 1))


@hypothesis.given(programs(), clusters(), st.integers(0, 2), st.floats(1.05, 8))
def more_memory_never_makes_the_plan_slower(program, data, which, factor):
    better = copy.deepcopy(data)
    table = better["groups"][f"g{which % len(better['groups'])}"]
    hypothesis.assume("memory_gib" in table)
    table["memory_gib"] *= factor
    never_slower(program, data, better)


@hypothesis.given(programs(), clusters(least=2), st.integers(0, 2), st.floats(1.05, 50))
def a_faster_link_never_makes_the_plan_slower(program, data, which, factor):
    better = copy.deepcopy(data)
    link = better["links"][which % len(better["links"])]
    link["bandwidth_gb_per_s"] *= factor
    link["latency_us"] /= factor
    never_slower(program, data, better)


@hypothesis.given(programs(), clusters(least=2))
def links_that_carry_a_thousandth_are_noticed_by_a_plan_that_uses_them(program, data):
    before = planned(program, data)
    if before is None or len({m.group for stage in before.stages for m in stage.members}) == 1:
        hypothesis.reject()
    thin = copy.deepcopy(data)
    for link in thin["links"]:
        link["bandwidth_gb_per_s"] /= 1000
    after = planned(program, thin)
    assert step_s(after) > step_s(before), f"{told(before)}\n{told(after)}\n{data} {program}"


@hypothesis.given(programs(), clusters(least=2), st.randoms(use_true_random=False))
def the_order_of_groups_in_the_file_does_not_matter(program, data, random):
    turned = copy.deepcopy(data)
    names = list(data["groups"])
    random.shuffle(names)
    turned["groups"] = {name: data["groups"][name] for name in names}
    turned["links"] = [{**link, "between": link["between"][::-1]} for link in reversed(data["links"])]
    before, after = planned(program, data), planned(program, turned)
    assert (before is None) == (after is None), f"{told(before)}\n{told(after)}\n{data} {turned} {program}"
    if before is not None:
        assert 1 / SEARCHED <= step_s(after) / step_s(before) <= SEARCHED, (
            f"{step_s(after) / step_s(before):.4f} times as long with groups as in {turned} than in {data}, "
            f"for {program}\nbefore: {told(before)}\nafter: {told(after)}"
        )


@hypothesis.given(programs(), clusters())
def what_a_file_leaves_to_defaults_may_be_said_and_whole_numbers_have_no_point(program, data):
    said = copy.deepcopy(data)
    for name, table in said["groups"].items():
        group = Cluster.from_dict(data).group(name)
        table["compute_dtype"], table["tflops"] = group.dtype, float(group.achieved_tflops)
        if group.memory_bytes is not None:
            table["memory_gib"] = group.memory_bytes / 2**30
        table["intra_bandwidth_gb_per_s"] = group.intra_link.bandwidth_gb_per_s
    for link in said["links"]:
        link["latency_us"] = int(link["latency_us"])
    before, after = planned(program, data), planned(program, said)
    assert (before and before.stages) == (after and after.stages)
    assert step_s(before) == step_s(after)


class InUnits(AnalyticCosts):
    """Analytic costs for a cluster and program whose seconds and bytes are counted in other units."""

    def __init__(self, program: FakeProgram, data: dict[str, Any], seconds: float, num_bytes: float) -> None:
        self.parts, self.cluster = program.parts, Cluster.from_dict(data)
        self.seconds, self.num_bytes = seconds, num_bytes

    def __getattribute__(self, name: str) -> Any:
        if not name.endswith("_s") or name.startswith("_"):
            return super().__getattribute__(name)
        plain = getattr(AnalyticCosts(), name)

        def inside(what: Any, group: Any, *rest: Any) -> float:
            own = self.parts[what.index] if hasattr(what, "index") else what / self.num_bytes
            return plain(own, self.cluster.group(group.name), *rest) * self.seconds

        return inside


@hypothesis.given(programs(), clusters(), st.sampled_from([(64.0, 1.0), (1.0, 32.0), (0.25, 8.0)]))
def units_of_time_and_of_bytes_do_not_matter(program, data, units):
    seconds, num_bytes = units
    other = copy.deepcopy(data)
    for name, table in other["groups"].items():
        group = Cluster.from_dict(data).group(name)
        if group.memory_bytes is not None:
            table["memory_gib"] = group.memory_bytes / 2**30 * num_bytes
        table["intra_bandwidth_gb_per_s"] = group.intra_link.bandwidth_gb_per_s * num_bytes / seconds
        table["intra_latency_us"] = group.intra_latency_us * seconds
    for link in other["links"]:
        link["bandwidth_gb_per_s"] *= num_bytes / seconds
        link["latency_us"] *= seconds
    parts = tuple(
        dataclasses.replace(
            p,
            num_params=int(p.num_params * num_bytes),
            param_bytes=int(p.param_bytes * num_bytes),
            boundary_bytes_per_row=p.boundary_bytes_per_row * num_bytes,
            activation_bytes_per_row={k: v * num_bytes for k, v in p.activation_bytes_per_row.items()},
        )
        for p in program.parts
    )
    edges = tuple(dataclasses.replace(e, bytes_per_row=e.bytes_per_row * num_bytes) for e in program.links)
    counted = dataclasses.replace(program, parts=parts, links=edges)
    before = planned(program, data)
    after = planned(counted, other, costs=InUnits(program, data, seconds, num_bytes))
    assert (before is None) == (after is None), f"{told(before)}\n{told(after)}\n{data} {program}"
    if before is not None:
        ratio = step_s(after) / seconds / step_s(before)
        assert abs(ratio - 1) < 1e-6, (
            f"{ratio} in units {units}: {told(before)}\n{told(after)}\n{data} {program}"
        )


@hypothesis.given(programs(), clusters(), st.sampled_from(["runtime", "all"]))
def plans_run_every_segment_once_fit_their_devices_and_stay_above_the_limit(program, data, features):
    plan = planned(program, data, features=features)
    if plan is None:
        hypothesis.reject()
    run = [i for stage in plan.stages for i in range(*stage.segments)]
    assert run == list(range(program.num_segments)), told(plan)
    for stage in plan.stages:
        rows = [r for m in stage.members for r in range(*m.rows)]
        assert rows == list(range(plan.microbatch_rows)), told(plan)
        assert all(len(m.remat) == stage.num_segments for m in stage.members), told(plan)
    plan.check(program)
    result = simulate(plan, program)
    assert result.step_time_s == plan.predicted["step_time_s"], told(plan)
    for (name, device), peak in result.peak_bytes.items():
        capacity = plan.cluster.group(name).memory_bytes
        assert capacity is None or peak <= capacity, (
            f"{name}[{device}] needs {peak} of {capacity}: {told(plan)}"
        )
    limit = compute_limit(program, plan.cluster)
    members = [m for stage in plan.stages for m in stage.members]
    least = limit.resident_s if all(m.residency == "resident" for m in members) else limit.with_links_s
    assert limit.step_time_s <= least * (1 + 1e-6), limit
    assert least <= step_s(plan) * (1 + 1e-9), f"limit {least}: {told(plan)}\n{data} {program}"


PROPERTIES = {
    f.__name__: f
    for f in (
        twice_the_devices_never_make_the_plan_slower,
        one_more_device_never_makes_the_plan_slower,
        more_memory_never_makes_the_plan_slower,
        a_faster_link_never_makes_the_plan_slower,
        links_that_carry_a_thousandth_are_noticed_by_a_plan_that_uses_them,
        the_order_of_groups_in_the_file_does_not_matter,
        what_a_file_leaves_to_defaults_may_be_said_and_whole_numbers_have_no_point,
        units_of_time_and_of_bytes_do_not_matter,
        plans_run_every_segment_once_fit_their_devices_and_stay_above_the_limit,
    )
}


def outcomes(names: list[str], *, shrink: bool, num_examples: int) -> dict[str, str | None]:
    """For each property the message of its failure, or None."""
    phases = [hypothesis.Phase.generate, *([hypothesis.Phase.shrink] if shrink else [])]
    settings = hypothesis.settings(
        max_examples=num_examples,
        derandomize=True,
        database=None,
        deadline=None,
        phases=phases,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    result: dict[str, str | None] = {}
    for name in names:
        try:
            settings(PROPERTIES[name])()
            result[name] = None
        except Exception as error:
            result[name] = f"{type(error).__name__}: {error}"
    return result


if __name__ == "__main__":
    numbers = [int(word) for word in sys.argv[1:] if word.isdigit()]
    wanted = [word for word in sys.argv[1:] if word in PROPERTIES] or list(PROPERTIES)
    found = outcomes(wanted, shrink="--shrink" in sys.argv, num_examples=(numbers or [MOST])[0])
    print(json.dumps(found), flush=True)
