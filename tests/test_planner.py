import dataclasses
import itertools
import pathlib
import re

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hetjax
from hetjax.cluster import GIB, Cluster
from hetjax.cost import AnalyticCosts
from hetjax.errors import UserError
from hetjax.memory import member_memory
from hetjax.plan import Member, Plan, Stage
from hetjax.planner import compute_limit, make_plan, predict
from hetjax.planner.layout import Layout, Slot, Way
from hetjax.planner.pricer import Load, Pricer, Table
from hetjax.planner.rows import share_rows
from hetjax.planner.stages import Stages
from hetjax.simulate import simulate
from hetjax.workload import timed
from tests.fake_program import FakeProgram, llama, segment

MESHES = pathlib.Path(__file__).parent.parent / "meshes"
SMALL = llama(num_layers=6, hidden=512, seq=256, vocab=4000, global_batch=16)


def cluster(link=10.0, **groups):
    tables = {
        name: {"kind": kind, "num_devices": n, **(more[0] if more else {})}
        for name, (kind, n, *more) in groups.items()
    }
    return Cluster.from_dict({"name": "c", "groups": tables, "default_link": {"bandwidth_gb_per_s": link}})


CPUS = cluster(left=("cpu", 1), right=("cpu", 1))


def groups_of(plan):
    return [m.group for stage in plan.stages for m in stage.members]


def test_two_groups_alike_share_the_work():
    plan = make_plan(SMALL, CPUS)
    assert set(groups_of(plan)) == {"left", "right"}
    alone = [r for r in plan.predicted["rejected"] if "alone" in r["what"]]
    assert len(alone) == 2
    assert all(r["step_time_s"] > 1.5 * plan.predicted["step_time_s"] for r in alone)


def test_a_group_that_only_slows_the_other_stays_idle():
    plan = make_plan(SMALL, cluster(gpu=("a100-80", 4), cpu=("cpu", 1)))
    assert set(groups_of(plan)) == {"gpu"}
    assert plan.predicted["groups"]["cpu"]["busy"] == 0


def test_a_thin_link_keeps_the_work_on_one_group():
    wide = make_plan(SMALL, cluster(link=10.0, a=("t4", 1), b=("t4", 1)))
    thin = make_plan(SMALL, cluster(link=0.001, a=("t4", 1), b=("t4", 1)))
    assert set(groups_of(wide)) == {"a", "b"}
    assert len(set(groups_of(thin))) == 1


def test_the_same_arguments_give_the_same_plan_and_it_survives_json():
    plan = make_plan(SMALL, cluster(a=("a100-80", 2), v=("v100-16", 4)))
    assert plan == make_plan(SMALL, cluster(a=("a100-80", 2), v=("v100-16", 4)))
    assert Plan.from_json(plan.to_json()) == plan
    plan.check(SMALL)


def test_choices_of_the_person_are_kept():
    plan = make_plan(SMALL, CPUS, num_microbatches=4, schedule="gpipe", remat="none")
    assert plan.num_microbatches == 4
    assert plan.schedule == "gpipe"
    assert {r for stage in plan.stages for m in stage.members for r in m.remat} == {"none"}
    plan = make_plan(SMALL, CPUS, num_microbatches=4, schedule="interleaved")
    assert plan.schedule == "interleaved"
    assert len(plan.stages) >= 4
    alone = make_plan(SMALL, cluster(left=("cpu", 1)), schedule="interleaved")
    assert alone.schedule == "interleaved"


def test_choices_that_cannot_be_are_refused():
    with pytest.raises(
        UserError, match="num_microbatches is 5 and has to divide the global batch, which is 16"
    ):
        make_plan(SMALL, CPUS, num_microbatches=5)
    with pytest.raises(UserError, match="schedule is 'zb'. Allowed: gpipe, 1f1b, interleaved"):
        make_plan(SMALL, CPUS, schedule="zb")
    whole = dataclasses.replace(SMALL, rows_mode="whole")
    with pytest.raises(
        UserError, match="num_microbatches is 4, and the program mixes the rows .* has to be 1"
    ):
        make_plan(whole, CPUS, num_microbatches=4)


def test_rows_that_cannot_be_split_stay_whole():
    whole = dataclasses.replace(SMALL, rows_mode="whole")
    plan = make_plan(whole, cluster(a=("t4", 4), b=("t4", 2)), allow_row_split=True)
    assert plan.num_microbatches == 1
    assert set(groups_of(plan)) == {"a"}
    assert all(len(m.devices) == 1 for stage in plan.stages for m in stage.members)
    tight = {"memory_gib": 0.25}
    plan = make_plan(whole, cluster(a=("t4", 4, tight), b=("t4", 2, tight)))
    assert len(plan.stages) > 1
    assert all(len(m.devices) == 1 for stage in plan.stages for m in stage.members)


def test_the_planner_is_as_good_as_trying_every_cut_of_two_groups():
    machines = cluster(a=("t4", 1), b=("l4", 1))
    ours = make_plan(SMALL, machines).predicted["step_time_s"]
    best = np.inf
    n = SMALL.num_segments
    for M in (1, 2, 4, 8, 16):
        rows = 16 // M
        for order in (("a", "b"), ("b", "a")):
            for cut in range(1, n):
                for schedule in ("gpipe", "1f1b"):
                    stages = tuple(
                        Stage((i, j), (Member(name, (0,), {"dp": 1}, (0, rows), ("dots",) * (j - i)),))
                        for name, i, j in zip(order, (0, cut), (cut, n), strict=True)
                    )
                    plan = Plan(machines, "fake", n, 16, M, schedule, stages)
                    plan = timed(plan, SMALL, AnalyticCosts())
                    best = min(best, simulate(plan, SMALL).step_time_s)
    assert ours <= best * 1.005


@st.composite
def instances(draw):
    n = draw(st.integers(2, 6))
    parts = [
        segment(
            i,
            draw(st.integers(1, 40)) * 1_000_000,
            draw(st.integers(1, 50)) * 1e9,
            draw(st.integers(1, 20)) * 1e5,
            draw(st.integers(1, 30)) * 1e6,
        )
        for i in range(n)
    ]
    edges = tuple(
        dataclasses.replace(
            llama(1).links[0], producer=i, consumer=i + 1, bytes_per_row=p.boundary_bytes_per_row
        )
        for i, p in enumerate(parts[:-1])
    )
    program = FakeProgram(tuple(parts), edges, global_batch=draw(st.sampled_from([4, 6, 8])))
    kinds = st.sampled_from(["a100-80", "v100-16", "t4", "cpu", "l4"])
    memory = st.sampled_from([{}, {"memory_gib": 1.0}, {"memory_gib": 4.0}])
    groups = {
        f"g{i}": (draw(kinds), draw(st.integers(1, 4)), draw(memory)) for i in range(draw(st.integers(1, 3)))
    }
    return program, cluster(draw(st.sampled_from([0.1, 1.0, 20.0])), **groups)


@hypothesis.given(instances(), st.booleans())
@hypothesis.settings(max_examples=12, deadline=None)
def test_plans_are_whole_fit_their_devices_and_stay_above_the_limit(instance, allow_row_split):
    program, machines = instance
    try:
        plan = make_plan(program, machines, allow_row_split=allow_row_split)
    except UserError as error:
        assert "No plan fits" in str(error)
        return
    plan.check(program)
    result = simulate(plan, program)
    assert result.step_time_s == plan.predicted["step_time_s"]
    assert 0 < plan.predicted["efficiency"] <= 1
    for (name, _), peak in result.peak_bytes.items():
        capacity = machines.group(name).memory_bytes
        assert capacity is None or peak <= capacity
    for other in plan.predicted["rejected"]:
        assert other["step_time_s"] is None or other["step_time_s"] * 1.005 >= result.step_time_s


def test_parameters_are_sharded_and_activations_recomputed_where_memory_asks_for_it():
    program = llama(num_layers=4, hidden=2048, seq=512, vocab=4000, global_batch=8)

    def plan_with(memory_gib):
        return make_plan(program, cluster(a=("a100-80", 4, {"memory_gib": memory_gib})), num_microbatches=1)

    def axes(plan):
        return {axis for stage in plan.stages for m in stage.members for axis in m.axes}

    def remat(plan):
        return {r for stage in plan.stages for m in stage.members for r in m.remat}

    roomy, tighter, tightest = plan_with(40), plan_with(3.2), plan_with(1.75)
    assert remat(roomy) == {"none"}
    assert axes(tighter) & {"fsdp", "tp"} or len(tighter.stages) > 1
    assert remat(tightest) - {"none"} or len(tightest.stages) > 1


def test_when_nothing_fits_the_error_says_by_how_much_where_and_what_would_help():
    program = llama(num_layers=12, hidden=4096, global_batch=16)
    with pytest.raises(UserError) as caught:
        make_plan(program, cluster(t=("t4", 2), v=("v100-16", 1)))
    text = str(caught.value)
    assert re.search(r"No plan fits on cluster 'c'. The closest one \(.*, \d+ stages, \d+ microbatch", text)
    assert re.search(r"of stage \d, in group '[tv]', where 15.0\d GiB can be used: [\d.]+ GiB too much", text)
    enough = dict(re.findall(r"([tv]) = ([\d.]+)", text))
    more = {name: {"memory_gib": float(enough[name])} if name in enough else {} for name in "tv"}
    make_plan(program, cluster(t=("t4", 2, more["t"]), v=("v100-16", 1, more["v"])))


def test_a_group_that_is_too_small_alone_says_so_among_the_rejected():
    program = llama(num_layers=8, hidden=2048, global_batch=16)
    plan = make_plan(program, cluster(a=("a100-80", 1), t=("t4", 1, {"memory_gib": 4})))
    reasons = {r["what"]: r["why"] for r in plan.predicted["rejected"]}
    assert "does not fit: needs" in reasons["t alone"]


def test_six_devices_take_rows_that_divide_by_what_is_used():
    plan = make_plan(SMALL, cluster(a=("t4", 6)))
    for stage in plan.stages:
        for member in stage.members:
            assert member.num_rows % len(member.devices) == 0
    even = llama(num_layers=2, hidden=1024, seq=4096, vocab=1000, global_batch=24)
    plan = make_plan(even, cluster(a=("t4", 6)), num_microbatches=1)
    assert len(plan.stages[0].members[0].devices) == 6


def test_shared_stages_are_offered_unless_declined_and_rows_follow_speed():
    machines = cluster(link=100.0, a=("a100-80", 1), v=("v100-16", 1))
    program = dataclasses.replace(llama(1, 1024, 512, 1000), global_batch=32)
    plan = make_plan(program, machines, allow_row_split=False)
    assert all(len(stage.members) == 1 for stage in plan.stages)
    plan = make_plan(program, machines)
    assert len(plan.stages[0].members) == 2
    a, v = (m.num_rows for m in plan.stages[0].members)
    assert a > 2 * v > 0


@hypothesis.given(
    st.lists(st.tuples(st.integers(1, 4), st.floats(0, 3), st.floats(0.1, 9)), min_size=1, max_size=3),
    st.integers(1, 24),
)
@hypothesis.settings(max_examples=60, deadline=None)
def test_rows_are_shared_as_well_as_trying_every_share(slots, rows):
    multiples = [m for m, _, _ in slots]
    seconds = [lambda n, a=a, b=b: a + b * n for _, a, b in slots]
    options = [
        share
        for share in itertools.product(*(range(m, rows + 1, m) for m in multiples))
        if sum(share) == rows
    ]
    shares = share_rows(multiples, seconds, rows)
    if shares is None:
        assert not options
        return
    assert shares in options

    def longest(share):
        return max(time(n) for time, n in zip(seconds, share, strict=True))

    assert longest(shares) == min(map(longest, options))


class ByFlops(AnalyticCosts):
    """Arithmetic alone."""

    def limit_s(self, segment, group, rows):
        return 3 * segment.forward_flops_per_row * rows / (group.achieved_tflops * 1e12 * group.num_devices)


def test_the_limit_of_two_groups_is_that_of_their_summed_speed():
    machines = cluster(a=("a100-80", 1), v=("v100-16", 2))
    limit = compute_limit(SMALL, machines, ByFlops())
    flops = sum(s.forward_flops_per_row for s in SMALL.segments()) * 3 * SMALL.global_batch
    a, v = (machines.group(g).achieved_tflops for g in "av")
    assert limit.step_time_s == pytest.approx(flops / ((a + 2 * v) * 1e12))
    assert limit.group_shares == {"a": pytest.approx(1), "v": pytest.approx(1)}
    assert all(sum(shares.values()) == pytest.approx(1) for shares in limit.segment_shares)


class ByName(AnalyticCosts):
    """Attention ten times slower on old devices, experts nearly as fast."""

    def limit_s(self, segment, group, rows):
        old = {"attention": 10.0, "experts": 1.25}[segment.name]
        return rows * (old if group.name == "old" else 1.0)


def test_the_limit_prices_comparative_advantage():
    names = ("attention", "experts") * 2
    parts = tuple(dataclasses.replace(segment(i, 1, 1.0, 1.0, 1.0), name=n) for i, n in enumerate(names))
    program = FakeProgram(parts, (), global_batch=1)
    limit = compute_limit(program, cluster(new=("a100-80", 1), old=("t4", 1)), ByName())
    # All attention on the new group, which also takes the share x of the experts: 2 + 2x = 2.5 (1 - x).
    x = 0.5 / 4.5
    assert limit.step_time_s == pytest.approx(2 + 2 * x)
    assert limit.segment_shares[0] == {"new": pytest.approx(1), "old": pytest.approx(0)}


@hypothesis.given(
    st.sampled_from(["a100-80", "t4", "cpu"]),
    st.sampled_from([1, 2, 4]),
    st.sampled_from(["dp", "fsdp"]),
    st.sampled_from(["none", "dots", "full"]),
    st.integers(1, 4),
)
@hypothesis.settings(max_examples=30, deadline=None)
def test_the_planners_memory_is_that_of_the_cost_model(kind, num_devices, axis, policy, in_flight):
    machines = cluster(g=(kind, 4, {"memory_gib": 1000.0}))
    pricer = Pricer(SMALL, machines, AnalyticCosts(), (policy,))
    load = Load(8, 4, in_flight, 0, 0, 1, input_size=1.0 if kind == "cpu" else 0.5)
    table = Table(pricer, machines.group("g"), Way(((axis, num_devices),)), load)
    matrix = table.capacity - table.room() + table.kept(0)
    for start in range(SMALL.num_segments):
        for stop in range(start + 1, SMALL.num_segments + 1):
            memory = member_memory(
                SMALL.segments()[start:stop],
                machines.group("g"),
                rows=8,
                axes={axis: num_devices},
                remat=(policy,) * (stop - start),
                in_flight=in_flight,
            )
            local_rows = 8 // num_devices
            waiting = pricer.crossing[start] * local_rows * (1.0 if kind == "cpu" else 0.5)
            assert matrix[start, stop] == pytest.approx(memory.total_bytes + waiting)


def test_cuts_are_as_good_as_trying_all_of_them():
    machines = cluster(a=("a100-80", 1), b=("t4", 1), c=("l4", 1))
    stages = Stages(Pricer(SMALL, machines, AnalyticCosts(), ("dots",)))
    teams = tuple((Slot(name, (0,)),) for name in "bac")
    n = SMALL.num_segments
    for M in (1, 4, 16):
        layout = Layout(teams, M, "1f1b")
        cut = stages.cut(layout)
        members = stages.stages(layout)
        assert cut is not None
        assert members is not None
        prices = [m.price for (m,) in members]

        def longest(bounds, prices=prices):
            return max(p[a, b] for p, a, b in zip(prices, bounds, bounds[1:], strict=False))

        best = min(longest((0, i, j, n)) for i in range(1, n - 1) for j in range(i + 1, n))
        assert longest(cut.bounds) <= best * (1 + 1e-3)


def test_remat_goes_segment_by_segment_as_far_as_memory_asks_for_it():
    program = llama(num_layers=12, hidden=1024, seq=2048, vocab=1000, global_batch=8)
    seen = set()
    for gib in (40, 9.5, 8.5, 7.5, 7.0):
        plan = make_plan(
            program, cluster(a=("a100-80", 1, {"memory_gib": gib})), num_microbatches=1, schedule="1f1b"
        )
        policies = plan.stages[0].members[0].remat
        seen.add(frozenset(policies))
        again = predict(program, plan)
        assert again.predicted["step_time_s"] == plan.predicted["step_time_s"]
    assert frozenset({"none"}) in seen
    assert any(len(policies) == 2 for policies in seen)


@pytest.mark.parametrize("path", sorted(MESHES.glob("*.toml")), ids=lambda p: p.stem)
def test_every_cluster_file_gets_a_plan(path):
    program = llama(num_layers=4, hidden=1024, seq=256, vocab=8000, global_batch=24)
    plan = make_plan(program, Cluster.load(path), num_microbatches=4)
    plan.check(program)
    text = str(plan)
    assert "Predicted: " in text
    assert "rejected" in text or len(plan.cluster.groups) == 1


def test_the_print_tells_where_the_step_goes_and_what_was_rejected():
    plan = make_plan(SMALL, cluster(a=("a100-80", 2), v=("v100-16", 4, {"memory_gib": 0.05})))
    text = str(plan)
    for word in ("limit", "efficiency", "What binds: ", "busy", "bubble", "transfer", "of 75.2 GiB"):
        assert word in text
    assert "v alone" in text
    assert "does not fit: needs" in text


def test_a_traced_program_is_planned_like_any_other():
    def init_fn(key):
        return [jax.random.normal(k, (64, 64)) for k in jax.random.split(key, 4)]

    def loss_fn(params, batch):
        x = batch["x"]
        for w in params:
            x = hetjax.cut(jnp.tanh(x @ w))
        return (x**2).mean()

    spec = {"x": jax.ShapeDtypeStruct((8, 64), jnp.float32)}
    program = hetjax.trace(loss_fn, init_fn, spec)
    plan = make_plan(program, CPUS)
    plan.check(program)
    assert plan.num_segments == program.num_segments


def test_predicted_memory_is_given_for_each_member():
    plan = make_plan(SMALL, CPUS)
    memory = plan.predicted["memory_gib"]
    assert [len(members) for members in memory] == [len(stage.members) for stage in plan.stages]
    total = plan.member_memory(SMALL)[0, 0].total_bytes / GIB
    assert memory[0][0] == pytest.approx(total)
