"""Collectives against values computed by hand and against what no algorithm can do faster."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetjax.cluster import Group
from hetjax.collectives import AXES, all_gather_s, all_reduce_s, all_to_all_s, axis_spread, flat_ring_s
from hetjax.collectives import reduce_scatter_s as scatter_s

GB = 10**9
OPERATIONS = (all_gather_s, scatter_s, all_reduce_s, all_to_all_s)
RATES = st.floats(0.1, 500)
BYTES = st.integers(1, 2**34)
PER_HOST = st.integers(1, 9)


def hosts(per_host: int | None, intra: float = 60.0, inter: float | None = 10.0, **fields: Any) -> Group:
    """Links without latency unless it is given; 60 GB/s inside a host, 10 between them."""
    table = {"name": "g", "kind": "a100-80", "num_devices": 240, "devices_per_host": per_host}
    table |= {"intra_bandwidth_gb_per_s": intra, "inter_host_bandwidth_gb_per_s": inter}
    return Group.model_validate(
        table | {"intra_latency_us": 0.0, "inter_host_latency_us": 0.0, "inter_host_curve": ()} | fields
    )


def seconds(num_bytes: float, group: Group, **axes: int) -> dict[str, float]:
    """All four along `dp`, else along the only axis."""
    axis = "dp" if "dp" in axes else next(iter(axes))
    return {op.__name__.removesuffix("_s"): op(num_bytes, group, axes, axis) for op in OPERATIONS}


def test_a_ring_of_four_takes_three_steps_of_a_quarter():
    found = seconds(12 * GB, hosts(8, intra_latency_us=1e5), dp=4)
    step = 0.1 + 3 / 60
    assert found["all_gather"] == found["reduce_scatter"] == pytest.approx(3 * step)
    assert found["all_reduce"] == pytest.approx(6 * step)
    # Messages to three others leave back to back; the latency is waited for once.
    assert found["all_to_all"] == pytest.approx(0.1 + 3 * 3 / 60)


def test_two_hosts_of_six_exchange_between_them_and_then_inside():
    found = seconds(12 * GB, hosts(6), dp=12)
    between, inside = 6 / 10, 5 * 2 / 60  # six parts of 1 GB over one way; then five times two parts
    assert found["all_gather"] == found["reduce_scatter"] == pytest.approx(between + inside)
    assert found["all_reduce"] == pytest.approx(2 * (between + inside))
    assert found["all_to_all"] == pytest.approx(6 * 6 / 10)  # each of six sends 1 GB to each of six


def test_the_latency_of_the_way_between_hosts_is_paid_once_a_step_of_the_hosts():
    slow: dict[str, Any] = {"intra_latency_us": 1e4, "inter_host_latency_us": 1e6}
    found = seconds(18 * GB, hosts(6, **slow), dp=18)
    assert found["all_gather"] == pytest.approx(2 * (1.0 + 6 / 10) + 5 * (0.01 + 3 / 60))


def test_the_flat_ring_is_taken_where_it_is_the_faster():
    # A way between hosts as wide as those inside, with one ring over it: nothing is gained by two passes.
    found = seconds(12 * GB, hosts(6, inter=60.0), dp=12)
    assert found["all_gather"] == pytest.approx(11 / 60)


def test_seven_devices_on_hosts_of_six_send_the_seventh_all_that_it_lacks():
    found = seconds(7 * GB, hosts(6, intra=1e6), dp=7)
    assert found["all_gather"] == found["reduce_scatter"] == pytest.approx(6 / 10, rel=1e-3)
    # Partial sums of the whole array, half of it each way at a time: the seventh is as good as a host.
    assert found["all_reduce"] == pytest.approx(7 / 10, rel=1e-3)
    assert found["all_to_all"] == pytest.approx(6 / 10, rel=1e-3)


def test_axes_of_four_on_hosts_of_six_cost_no_more_than_the_flat_ring_and_no_less_than_what_crosses():
    group, axes = hosts(6), {"fsdp": 4, "dp": 3}
    found = all_gather_s(4 * GB, group, axes, "fsdp")  # devices 4 to 7 lie half and half
    assert 2 / 10 <= found < 3 / 10
    assert found == pytest.approx(2 / 10 + 3 / 60)


def test_small_messages_between_hosts_go_together():
    curve = ((1e6, 1.0), (36e6, 10.0))
    found = seconds(12e6, hosts(6, inter_host_curve=curve), ep=12)
    together = 36e6 / 10e9 + 5 * 2e6 / 60e9
    assert found["all_to_all"] == pytest.approx(together)
    assert together < 36 * 1e6 / 1e9


@given(BYTES, st.integers(2, 40), PER_HOST, RATES, RATES)
def test_nothing_is_faster_than_what_has_to_pass_into_a_host(num_bytes, n, per_host, intra, inter):
    found = seconds(num_bytes, hosts(per_host, intra, inter), dp=n)
    last = n % per_host or per_host
    if n <= per_host:
        assert found["all_gather"] == pytest.approx((n - 1) / n * num_bytes / intra / 1e9)
        return
    num_hosts, rate = -(-n // per_host), inter * 1e9 * (1 + 1e-9)
    assert found["all_gather"] >= (n - last) / n * num_bytes / rate
    assert found["reduce_scatter"] == found["all_gather"]
    assert found["all_reduce"] >= 2 * (num_hosts - 1) / num_hosts * num_bytes / rate
    assert found["all_to_all"] >= min(per_host, n) * (n - min(per_host, n)) / n * num_bytes / rate


@given(BYTES, st.sampled_from(AXES), st.integers(1, 6), st.integers(1, 6), PER_HOST, RATES, RATES)
@settings(deadline=None)
def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather(
    num_bytes, axis, size, others, per_host, intra, inter
):
    axes = dict.fromkeys(AXES, 1) | {"tp": others, axis: size}
    for group in (hosts(None, intra, None), hosts(per_host, intra, inter)):
        both = scatter_s(num_bytes, group, axes, axis) + all_gather_s(num_bytes, group, axes, axis)
        one = all_reduce_s(num_bytes, group, axes, axis)
        on = axis_spread(group, axes, axis)
        # Over uneven hosts its partial sums can go in even parts, so it may be the faster.
        even = on.num_hosts == 1 or on.fewest * on.num_hosts == on.num_devices
        assert one == pytest.approx(both) if even else one <= both * (1 + 1e-9)


@given(BYTES, st.integers(1, 4), st.integers(2, 12), PER_HOST, RATES, st.floats(0.01, 1))
def test_two_passes_by_hosts_are_never_slower_than_one_ring_over_a_thin_way(
    num_bytes, tp, dp, per_host, intra, share
):
    group, axes = hosts(per_host, intra, intra * share), {"tp": tp, "dp": dp}
    on = axis_spread(group, axes, "dp")
    if on.num_hosts > 1:
        flat = flat_ring_s(num_bytes, on, group.intra_link, group.inter_host_link)
        assert all_gather_s(num_bytes, group, axes, "dp") <= flat
        assert all_reduce_s(num_bytes, group, axes, "dp") <= 2 * flat


@given(
    st.sampled_from(OPERATIONS),
    BYTES,
    st.integers(1, 2**30),
    st.tuples(*[st.integers(1, 4)] * len(AXES)),
    st.sampled_from(AXES),
    PER_HOST,
    st.booleans(),
)
@settings(deadline=None)
def test_more_bytes_never_take_less_time(op, num_bytes, more, sizes, axis, per_host, curved):
    axes = dict(zip(AXES, sizes, strict=True))
    curve: dict[str, Any] = {"inter_host_curve": ((1e4, 0.5), (1e6, 4.0), (1e8, 9.0))} if curved else {}
    group = hosts(per_host, inter_host_latency_us=30.0, **curve)
    assert op(num_bytes + more, group, axes, axis) >= op(num_bytes, group, axes, axis)


@given(st.sampled_from(OPERATIONS), st.integers(1, 5), st.integers(2, 6), RATES, RATES)
def test_one_device_or_nothing_to_send_is_free(op, others, size, intra, inter):
    group = hosts(6, intra, inter, intra_latency_us=50.0, inter_host_latency_us=50.0)
    assert op(GB, group, {"tp": others, "dp": 1}, "dp") == 0
    assert op(0, group, {"dp": size}, "dp") == 0
