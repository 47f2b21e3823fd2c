"""Seconds of collectives along one axis of a submesh: rings inside hosts and between them.

Devices are numbered from the first of a host, neighbours along the innermost axis next to each other
(`AXES`). All rings along an axis run at once, so those that leave a host share its link to the others. Of the
flat ring and the hierarchical one (inside the hosts, then between them) the faster counts. The time of each
step is that of its slowest message, at the link's rate for a message of that size.

A group whose file gives no bandwidth between hosts is joined by one interconnect: each device has a link of
its own to any other.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping

from hetjax.cluster import Group, Link
from hetjax.devices import Number

AXES = ("tp", "ep", "fsdp", "dp")
"""Axes of a submesh, the innermost first."""


@dataclasses.dataclass(frozen=True)
class Spread:
    """How the rings along an axis lie over hosts; the worst of them where they differ.

    Attributes:
        num_devices: Of one ring.
        num_hosts: That one ring touches.
        per_host: Most devices that one ring has on a host.
        sharing: Most rings that leave one host.
        fewest: Least devices that a ring over several hosts has on one of them.
    """

    num_devices: int
    num_hosts: int
    per_host: int
    sharing: int
    fewest: int


@functools.lru_cache(maxsize=4096)
def spread(inner: int, size: int, outer: int, devices_per_host: int | None) -> Spread:
    """How an axis lies over hosts.

    Args:
        inner: Product of the axes inside it.
        size: Devices along it.
        outer: Product of the axes outside it.
        devices_per_host: Any number; None means one host (or one interconnect) for all.
    """
    if devices_per_host is None or inner * size * outer <= devices_per_host:
        return Spread(size, 1, size, 0, size)
    most_hosts, most_on_host, fewest = 1, 1, size
    leaving: dict[int, int] = {}
    for block in range(outer):
        for lane in range(inner):
            on: dict[int, int] = {}
            for i in range(size):
                host = ((block * size + i) * inner + lane) // devices_per_host
                on[host] = on.get(host, 0) + 1
            most_hosts, most_on_host = max(most_hosts, len(on)), max(most_on_host, *on.values())
            if len(on) > 1:
                fewest = min(fewest, *on.values())
            for host in on if len(on) > 1 else ():
                leaving[host] = leaving.get(host, 0) + 1
    return Spread(size, most_hosts, most_on_host, max(leaving.values(), default=0), fewest)


def axis_spread(group: Group, axes: Mapping[str, int], axis: str) -> Spread:
    """How an axis of a submesh of a group lies over the group's hosts."""
    at = AXES.index(axis)
    inner = math.prod(axes.get(name, 1) for name in AXES[:at])
    outer = math.prod(axes.get(name, 1) for name in AXES[at + 1 :])
    joined = group.inter_host_bandwidth_gb_per_s is None
    return spread(inner, axes.get(axis, 1), outer, None if joined else group.devices_per_host)


def all_gather_s(num_bytes: Number, group: Group, axes: Mapping[str, int], axis: str) -> Number:
    """Seconds until every device along the axis has all of an array of `num_bytes` that lay in parts."""
    if axes.get(axis, 1) <= 1 or not num_bytes:
        return 0.0
    on, link, narrow = _ways(group, axes, axis)
    if on.num_hosts == 1:
        return _ring_s(num_bytes, on.num_devices, link)
    # The host with the fewest parts has to be sent all the others.
    between = (on.num_devices - on.fewest) / on.num_devices
    return min(flat_ring_s(num_bytes, on, link, narrow), _by_hosts_s(num_bytes, on, link, narrow, between))


def reduce_scatter_s(num_bytes: Number, group: Group, axes: Mapping[str, int], axis: str) -> Number:
    """Seconds until each device along the axis has its part of the sum of their arrays of `num_bytes`.

    The mirror image of `all_gather_s`: as many bytes over the same links; the additions are hidden.
    """
    return all_gather_s(num_bytes, group, axes, axis)


def all_reduce_s(num_bytes: Number, group: Group, axes: Mapping[str, int], axis: str) -> Number:
    """Seconds until every device along the axis has the sum of their arrays of `num_bytes`.

    A reduce-scatter and an all-gather: each device sends 2 (n - 1) / n times `num_bytes`. Between hosts they
    go in parts of one size, however many devices each has.
    """
    if axes.get(axis, 1) <= 1 or not num_bytes:
        return 0.0
    on, link, narrow = _ways(group, axes, axis)
    if on.num_hosts == 1:
        return 2 * _ring_s(num_bytes, on.num_devices, link)
    flat = flat_ring_s(num_bytes, on, link, narrow)
    return 2 * min(flat, _by_hosts_s(num_bytes, on, link, narrow, 1 - 1 / on.num_hosts))


def all_to_all_s(num_bytes: Number, group: Group, axes: Mapping[str, int], axis: str) -> Number:
    """Seconds until each device along the axis has sent an equal part of its `num_bytes` to each other one.

    A device sends its messages back to back, and those inside the host at the same time as those that leave
    it. The better of one message to each device, and one to each host after an exchange inside the host.
    """
    size = axes.get(axis, 1)
    if size <= 1 or not num_bytes:
        return 0.0
    on, link, narrow = _ways(group, axes, axis)
    part = num_bytes / size
    if on.num_hosts == 1:
        return link.latency_us * 1e-6 + (size - 1) * link.occupied_s(part)
    # The messages of one host to the other devices, and what a device sends inside.
    leaving = on.per_host * (size - on.per_host)
    inside = (on.per_host - 1) * link.occupied_s(part) + link.latency_us * 1e-6
    direct = max(inside, leaving * narrow.occupied_s(on.sharing * part) + narrow.latency_us * 1e-6)
    exchange = _ring_s(num_bytes, on.per_host, link)
    per_host = leaving * part * on.sharing / (on.num_hosts - 1)
    between = (on.num_hosts - 1) * narrow.occupied_s(per_host) + narrow.latency_us * 1e-6
    return min(direct, exchange + between)


def flat_ring_s(num_bytes: Number, on: Spread, link: Link, narrow: Link) -> Number:
    """Seconds of one pass of an array round a ring over several hosts.

    Args:
        num_bytes: Of the whole array; each step passes on one part of `on.num_devices`.
        on: How the ring lies.
        link: Between two devices of a host.
        narrow: Between two hosts, shared by the rings that leave one.
    """
    part = num_bytes / on.num_devices
    step = narrow.latency_us * 1e-6 + narrow.occupied_s(on.sharing * part)
    if on.per_host > 1:
        step = max(step, link.transfer_s(part))
    return (on.num_devices - 1) * step


def _by_hosts_s(num_bytes: Number, on: Spread, link: Link, narrow: Link, share: Number) -> Number:
    """One pass of an array inside the hosts and of a share of it round them."""
    steps = on.num_hosts - 1
    message = on.sharing * share * num_bytes / steps
    between = steps * (narrow.latency_us * 1e-6 + narrow.occupied_s(message))
    return _ring_s(num_bytes, on.per_host, link) + between


def _ways(group: Group, axes: Mapping[str, int], axis: str) -> tuple[Spread, Link, Link]:
    return axis_spread(group, axes, axis), group.intra_link, group.inter_host_link


def _ring_s(num_bytes: Number, count: int, link: Link) -> Number:
    """One pass round a ring of `count` like links."""
    if count <= 1:
        return 0.0
    return (count - 1) * (link.latency_us * 1e-6 + link.occupied_s(num_bytes / count))
