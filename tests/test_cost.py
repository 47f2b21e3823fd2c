import dataclasses
import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetjax import collectives, cost, devices
from hetjax.cluster import Group
from hetjax.program import SegmentInfo

COSTS = cost.AnalyticCosts()
AXES = collectives.AXES
AN_AXIS = st.sampled_from(AXES)
OPERATIONS = (
    collectives.all_gather_s,
    collectives.reduce_scatter_s,
    collectives.all_reduce_s,
    collectives.all_to_all_s,
)
SIZES = st.integers(1, 2**34)
CURVE = ((1e4, 0.5), (1e6, 4.0), (1e8, 9.0))


def group(kind: str = "a100-80", num_devices: int = 64, **fields: Any) -> Group:
    return Group.model_validate({"name": "g", "kind": kind, "num_devices": num_devices, **fields})


def hosts(devices_per_host: int, intra: float, inter: float, **fields) -> Group:
    links: dict[str, Any] = {"intra_bandwidth_gb_per_s": intra, "inter_host_bandwidth_gb_per_s": inter}
    latencies: dict[str, Any] = {"intra_latency_us": 0.0, "inter_host_latency_us": 0.0}
    return group(devices_per_host=devices_per_host, **links, **(latencies | fields))


# ---- collectives ----


@st.composite
def submeshes(draw) -> dict[str, int]:
    return {axis: draw(st.integers(1, 5)) for axis in AXES}


@settings(deadline=None)
@given(st.sampled_from(OPERATIONS), SIZES, submeshes(), AN_AXIS, st.integers(1, 9), st.booleans(), st.data())
def test_more_bandwidth_never_makes_a_collective_slower(op, num_bytes, axes, axis, per_host, curved, data):
    rates = st.floats(0.1, 500)
    intra, inter, more = data.draw(rates), data.draw(rates), data.draw(st.floats(1, 10))
    curve = {"inter_host_curve": CURVE} if curved else {}
    faster = {"inter_host_curve": tuple((size, rate * more) for size, rate in CURVE)} if curved else {}
    before = op(num_bytes, hosts(per_host, intra, inter, **curve), axes, axis)
    for a, b, c in ((more, 1, curve), (1, more, faster), (more, more, faster)):
        assert op(num_bytes, hosts(per_host, intra * a, inter * b, **c), axes, axis) <= before * (1 + 1e-9)


@pytest.mark.parametrize("op", OPERATIONS)
@pytest.mark.parametrize("axis", AXES)
def test_a_collective_of_one_device_is_free(op, axis):
    others = {a: 4 for a in AXES if a != axis}
    assert op(1e9, hosts(4, 100.0, 1.0, intra_latency_us=50.0), {**others, axis: 1}, axis) == 0
    assert op(1e9, hosts(4, 100.0, 1.0), {}, axis) == 0


@given(st.integers(2, 64), SIZES, st.floats(0.1, 500))
def test_inside_a_host_each_device_sends_the_least_bytes_that_the_operation_can_do_with(n, num_bytes, rate):
    g, axes = group(intra_bandwidth_gb_per_s=rate, intra_latency_us=0.0), {"dp": n}
    sent = {op: op(num_bytes, g, axes, "dp") * rate * 1e9 for op in OPERATIONS}
    once = (n - 1) / n * num_bytes
    assert sent[collectives.all_reduce_s] == pytest.approx(2 * once)
    for op in (collectives.all_gather_s, collectives.reduce_scatter_s, collectives.all_to_all_s):
        assert sent[op] == pytest.approx(once)


def played_ring(num_bytes: float, g: Group, axes: dict[str, int], axis: str) -> float:
    """One pass round all rings along an axis, message by message."""
    sizes = [axes.get(a, 1) for a in AXES]
    at, n = AXES.index(axis), axes[axis]
    per_host, intra, inter = g.devices_per_host, g.intra_bandwidth_gb_per_s, g.inter_host_bandwidth_gb_per_s
    assert per_host and intra and inter
    numbers = {
        index: sum(i * _product(sizes[:d]) for d, i in enumerate(index))
        for index in itertools.product(*map(range, sizes))
    }
    leaving: dict[int, int] = {}
    inside = False
    for index, number in numbers.items():
        after = numbers[(*index[:at], (index[at] + 1) % n, *index[at + 1 :])]
        here, there = number // per_host, after // per_host
        if here == there:
            inside = True
        else:
            leaving[here] = leaving.get(here, 0) + 1
    part = num_bytes / n
    step = part / (intra * 1e9) if inside else 0.0
    if leaving:
        step = max(step, max(leaving.values()) * part / (inter * 1e9))
    return (n - 1) * step


def _product(values) -> int:
    result = 1
    for value in values:
        result *= value
    return result


@settings(deadline=None)
@given(submeshes(), AN_AXIS, st.integers(1, 9), st.floats(1, 500), st.floats(0.1, 500))
def test_the_flat_ring_takes_as_long_as_its_messages_played_one_by_one(axes, axis, per_host, intra, inter):
    if axes[axis] == 1:
        return
    g, num_bytes = hosts(per_host, intra, inter), 1e9
    on = collectives.axis_spread(g, axes, axis)
    if on.num_hosts == 1:
        flat = collectives.all_gather_s(num_bytes, g, axes, axis)
    else:
        flat = collectives.flat_ring_s(num_bytes, on, g.intra_link, g.inter_host_link)
        assert collectives.all_gather_s(num_bytes, g, axes, axis) <= flat
    assert flat == pytest.approx(played_ring(num_bytes, g, axes, axis))


@pytest.mark.parametrize("per_host", [4, 6, 8])
def test_over_a_narrow_way_between_hosts_each_byte_passes_as_few_times_as_there_are_other_hosts(per_host):
    n, num_bytes = 4 * per_host, 1e9
    g = hosts(per_host, 1e6, 10.0)
    seconds = collectives.all_gather_s(num_bytes, g, {"fsdp": n}, "fsdp")
    assert seconds == pytest.approx(3 / 4 * num_bytes / 10e9, rel=1e-3)
    on = collectives.axis_spread(g, {"fsdp": n}, "fsdp")
    assert seconds < collectives.flat_ring_s(num_bytes, on, g.intra_link, g.inter_host_link)


def test_rings_that_leave_a_host_together_share_its_way_out():
    g = hosts(6, 100.0, 10.0)
    lone = collectives.all_gather_s(1e9, g, {"dp": 12}, "dp")
    assert collectives.axis_spread(g, {"tp": 6, "dp": 2}, "dp").sharing == 6
    # Six rings of two, each with a whole array, over one way.
    assert collectives.all_gather_s(1e9, g, {"tp": 6, "dp": 2}, "dp") == pytest.approx(6 * 0.5e9 / 10e9)
    assert lone < collectives.all_gather_s(1e9, g, {"tp": 6, "dp": 2}, "dp")


def test_axes_lie_over_uneven_hosts_as_their_devices_are_numbered():
    # Three sets of 4 on hosts of 6: 0-3 | 4-7 over both hosts | 8-11.
    assert collectives.spread(1, 4, 3, 6) == collectives.Spread(4, 2, 4, 1, 2)
    assert collectives.spread(1, 3, 2, 6) == collectives.Spread(3, 1, 3, 0, 3)
    assert collectives.spread(1, 10, 1, 6) == collectives.Spread(10, 2, 6, 1, 4)
    assert collectives.spread(6, 2, 1, 6) == collectives.Spread(2, 2, 1, 6, 1)


def test_without_a_bandwidth_between_hosts_one_interconnect_joins_all_devices():
    joined = group("tpu-v4", devices_per_host=4)
    alone = group("tpu-v4")
    for op in OPERATIONS:
        assert op(1e9, joined, {"tp": 2, "dp": 16}, "dp") == op(1e9, alone, {"tp": 2, "dp": 16}, "dp")


def test_an_all_to_all_over_hosts_takes_as_long_as_what_leaves_the_host():
    seconds = collectives.all_to_all_s(1e9, hosts(4, 1e6, 10.0), {"ep": 8}, "ep")
    assert seconds == pytest.approx(4 * 4 * 1e9 / 8 / 10e9, rel=1e-3)


def test_small_messages_go_at_their_own_rate():
    curved = group(intra_bandwidth_gb_per_s=9.0, intra_latency_us=0.0, intra_curve=CURVE)
    plain = group(intra_bandwidth_gb_per_s=9.0, intra_latency_us=0.0)
    for op in OPERATIONS:
        assert op(4e9, curved, {"dp": 4}, "dp") == pytest.approx(op(4e9, plain, {"dp": 4}, "dp"))
        # Parts of 1 MB go at 4 GB/s.
        assert op(4e6, curved, {"dp": 4}, "dp") == pytest.approx(9 / 4 * op(4e6, plain, {"dp": 4}, "dp"))


# ---- segments ----

KINDS = st.sampled_from(sorted(devices.CATALOGUE))
POLICIES = st.sampled_from(["none", "dots", "full", "offloaded", "everything_saveable"])


def segment(hidden: int, seq: int, *, embedding: bool = False) -> SegmentInfo:
    boundary = 4.0 * seq * hidden
    if embedding:
        params = 50_000 * hidden
        return SegmentInfo(0, "embed", "embed", params, 4 * params, 0.0, boundary, {"none": 4.0 * seq})
    params = 12 * hidden * hidden
    flops = 2.0 * params * seq + 4.0 * seq * seq * hidden
    return SegmentInfo(0, "layer", "layer", params, 4 * params, flops, boundary, {"none": 16 * boundary})


@st.composite
def placements(draw) -> tuple[SegmentInfo, Group, int, dict[str, int]]:
    axes = {axis: draw(st.integers(1, 4)) for axis in AXES}
    g = group(draw(KINDS), _product(axes.values()) * draw(st.integers(1, 3)))
    part = segment(draw(st.sampled_from([64, 512, 4096])), draw(st.sampled_from([1, 128, 4096])),
                   embedding=draw(st.booleans()))  # fmt: skip
    return part, g, draw(st.integers(1, 200)), axes


@settings(deadline=None)
@given(placements(), POLICIES)
def test_no_member_takes_less_than_the_limit_for_its_rows(placement, remat):
    part, g, rows, axes = placement
    forward, backward = COSTS.forward_s(part, g, rows, axes), COSTS.backward_s(part, g, rows, axes, remat)
    # A member of some of the devices that works its share of the step: so much of the limit at least.
    share = g.num_devices / _product(axes.values())
    assert forward + backward >= share * COSTS.limit_s(part, g, float(rows)) * (1 - 1e-9)
    assert 0 <= COSTS.recompute_s(part, g, rows, axes, remat) < backward


@settings(deadline=None)
@given(placements(), st.integers(1, 50))
def test_more_rows_never_take_less_time_but_less_time_a_row(placement, more):
    part, g, rows, axes = placement
    one = COSTS.forward_s(part, g, rows, axes) + COSTS.backward_s(part, g, rows, axes, "full")
    two = COSTS.forward_s(part, g, rows + more, axes) + COSTS.backward_s(part, g, rows + more, axes, "full")
    assert two >= one
    width = axes["dp"] * axes["fsdp"] * axes["ep"]
    per_row = [COSTS.forward_s(part, g, width * n, {"dp": width}) / n for n in (1, 2, 8)]
    assert per_row == sorted(per_row, reverse=True)


def test_a_device_works_on_whole_rows():
    part, g = segment(512, 128), group()
    for axes in ({"dp": 4}, {"fsdp": 4}, {"dp": 2, "fsdp": 2}):
        assert COSTS.forward_s(part, g, 5, axes) == COSTS.forward_s(part, g, 8, axes)
        assert COSTS.forward_s(part, g, 5, axes) > COSTS.forward_s(part, g, 4, axes)


def test_little_work_a_weight_reaches_a_smaller_share_of_the_peak():
    g = group("a100-80")

    def tflops(hidden: int, seq: int, rows: int) -> float:
        part = segment(hidden, seq)
        seconds = COSTS.forward_s(part, g, rows, {}) + COSTS.backward_s(part, g, rows, {}, "none")
        return 3 * part.forward_flops_per_row * rows / seconds / 1e12

    assert tflops(4096, 512, 1) < tflops(4096, 512, 4) < tflops(4096, 512, 16) < g.achieved_tflops
    assert tflops(1024, 512, 64) < tflops(2048, 512, 64) < tflops(4096, 512, 64)


def test_an_embedding_is_priced_by_the_rows_that_it_looks_up_and_by_the_gradient_of_its_table():
    part, g = segment(4096, 2048, embedding=True), group("a100-80")
    rate = 2039e9 * cost.BANDWIDTH_SHARE
    looked_up = 3 * 2048 * 4096 * 2
    written_and_read = 3 * 2 * 2 * 2048 * 4
    forward = COSTS.forward_s(part, g, 3, {}) - cost.DISPATCH_S
    assert forward == pytest.approx((2 * looked_up + written_and_read / 2) / rate, rel=1e-3)
    # Written and read, and added to the sum: float32.
    backward = COSTS.backward_s(part, g, 3, {}, "none") - cost.DISPATCH_S
    assert backward == pytest.approx(
        (16 * part.num_params + 3 * looked_up + written_and_read) / rate, rel=1e-3
    )
    update = COSTS.update_s(part.param_bytes, g, {}) - cost.DISPATCH_S
    assert update == pytest.approx(7 * 4 * part.num_params / rate)


@given(KINDS, st.sampled_from([1, 3, 8]), st.sampled_from([1, 2, 6]))
def test_the_update_moves_the_bytes_of_each_devices_own_shard(kind, fsdp, tp):
    g, num_bytes = group(kind), 4e9
    whole = COSTS.update_s(num_bytes, g, {"dp": 2}) - cost._dispatch_s(g, {"dp": 2})
    axes = {"fsdp": fsdp, "tp": tp}
    assert COSTS.update_s(num_bytes, g, axes) - cost._dispatch_s(g, axes) == pytest.approx(whole / fsdp / tp)


def test_tensor_parallelism_reduces_boundary_values_and_experts_send_them_there_and_back():
    part, slow = segment(512, 128), hosts(2, 1.0, 0.01)
    fast = hosts(2, 1e6, 1e6)
    boundary = 3 * part.boundary_bytes_per_row / 2
    for axes, expected in (
        ({"tp": 4}, 2 * collectives.all_reduce_s(boundary, slow, {"tp": 4}, "tp")),
        ({"ep": 3}, 2 * collectives.all_to_all_s(boundary / 3, slow, {"ep": 3}, "ep")),
    ):
        extra = COSTS.forward_s(part, slow, 3, axes) - COSTS.forward_s(part, fast, 3, axes)
        assert extra == pytest.approx(expected, rel=1e-3)
        back = COSTS.backward_s(part, slow, 3, axes, "none") - COSTS.backward_s(part, fast, 3, axes, "none")
        assert back == pytest.approx(expected, rel=1e-3)


def test_gradients_are_scattered_over_shards_and_reduced_over_replicas():
    g = hosts(8, 100.0, 10.0)
    axes = {"tp": 2, "fsdp": 4, "dp": 2}
    scatter = collectives.reduce_scatter_s(1e9, g, axes, "fsdp")
    reduce = collectives.all_reduce_s(0.25e9, g, axes, "dp")
    assert COSTS.reduce_s(2e9, g, axes) == pytest.approx(scatter + reduce)
    assert COSTS.reduce_s(2e9, g, {"tp": 2}) == 0


def test_host_copies_take_the_way_to_the_host():
    assert COSTS.offload_s(0, group()) == 0
    assert COSTS.offload_s(25e9, group("a100-80")) == pytest.approx(1.0, rel=1e-3)


def test_each_time_says_where_it_comes_from():
    part = segment(64, 8)
    assert "fitted to Zorse's released profile" in COSTS.source(part, group("a100-80"))
    assert COSTS.source(part, group("h200")) == "analytic, 65% of h200's peak in bfloat16"
    assert "the cluster file's tflops" in COSTS.source(part, group("h200", tflops=1.0))


def test_analytic_costs_are_costs_and_tell_apart_policies():
    assert isinstance(COSTS, cost.Costs)
    part, g = segment(512, 128), group()
    seconds = [COSTS.backward_s(part, g, 4, {}, remat) for remat in ("none", "dots", "full")]
    assert seconds == sorted(set(seconds))
    assert COSTS.backward_s(part, g, 4, {}, "offloaded") == seconds[-1]


def test_more_kept_values_take_more_time():
    part, g = segment(512, 128), group()
    wider = dataclasses.replace(part, activation_bytes_per_row={"none": 1e9})
    assert COSTS.forward_s(wider, g, 1, {}) > COSTS.forward_s(part, g, 1, {})
