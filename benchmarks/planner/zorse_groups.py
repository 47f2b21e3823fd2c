"""Which machines work as one, as Zorse's planner groups them: a cut of the graph of machines by bandwidth."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence

from hetjax.cluster import Cluster


@dataclasses.dataclass(frozen=True)
class Machine:
    """One host.

    Attributes:
        group: Of the cluster.
        devices: Their indices in the group.
        kind: Of each.
    """

    group: str
    devices: tuple[int, ...]
    kind: str


Machines = tuple[Machine, ...]
"""What Zorse calls a group: it runs its chunks with fully sharded data parallelism."""


def machines_of(cluster: Cluster) -> Machines:
    """The hosts of a cluster, group after group."""
    found = []
    for group in cluster.groups:
        by_host: dict[int, list[int]] = {}
        for device in range(group.num_devices):
            by_host.setdefault(group.host(device), []).append(device)
        found += [Machine(group.name, tuple(devices), group.kind) for devices in by_host.values()]
    return tuple(found)


def bandwidth_gb_per_s(cluster: Cluster, a: Machine, b: Machine) -> float:
    """What one device of a machine reaches to one of another; inside one where both are the same."""
    group = cluster.group(a.group)
    if a == b:
        return group.intra_link.bandwidth_gb_per_s
    if a.group == b.group:
        return group.inter_host_link.bandwidth_gb_per_s
    return cluster.link(a.group, b.group).bandwidth_gb_per_s


def cut_weights(cluster: Cluster, machines: Machines) -> list[list[float]]:
    """Weights between machines: whole GB/s, at least 1, of every pair of their devices.

    Devices of a machine stay together, so their graph is contracted to one of machines.
    """
    return [
        [
            0.0
            if a == b
            else len(a.devices) * len(b.devices) * float(max(1, int(bandwidth_gb_per_s(cluster, a, b))))
            for b in machines
        ]
        for a in machines
    ]


def minimum_cut(weights: Sequence[Sequence[float]], nodes: Sequence[int]) -> tuple[float, frozenset[int]]:
    """The lightest way to part a complete graph in two (Stoer and Wagner 1997).

    Args:
        weights: Symmetric.
        nodes: Of the component; at least two.

    Returns:
        Weight of the cut, and the nodes of one side.
    """
    merged = {n: frozenset((n,)) for n in nodes}
    between = {a: {b: weights[a][b] for b in nodes if b != a} for a in nodes}
    best: tuple[float, frozenset[int]] = (math.inf, frozenset())
    while len(merged) > 1:
        start = next(iter(merged))
        tied = dict(between[start])
        order = [start]
        weight = 0.0
        while tied:
            last = max(tied, key=lambda n: tied[n])
            weight = tied.pop(last)
            order.append(last)
            for n in tied:
                tied[n] += between[last][n]
        s, t = order[-2:]
        if weight < best[0]:
            best = weight, merged[t]
        merged[s] = merged[s] | merged.pop(t)
        for n, more in between.pop(t).items():
            del between[n][t]
            if n != s:
                between[s][n] += more
                between[n][s] += more
    return best


def split_groupings(weights: Sequence[Sequence[float]]) -> list[list[frozenset[int]]]:
    """SPLIT's approximation of a minimum k-cut, for every k from 1 to the number of nodes."""
    components = [frozenset(range(len(weights)))]
    found = [list(components)]
    while len(components) < len(weights):
        cuts = [(*minimum_cut(weights, sorted(c)), i) for i, c in enumerate(components) if len(c) > 1]
        _, side, i = min(cuts, key=lambda cut: (cut[0], cut[2]))
        components[i : i + 1] = [components[i] - side, side]
        found.append(list(components))
    return found


def groupings(cluster: Cluster, *, joined: bool = True) -> list[tuple[Machines, ...]]:
    """Zorse's groupings, k falling.

    Args:
        cluster: Groups and links.
        joined: Add (in Zorse's favour) every way to join whole groups of the cluster.
    """
    machines = machines_of(cluster)
    found = [
        tuple(tuple(machines[i] for i in sorted(part)) for part in parts)
        for parts in reversed(split_groupings(cut_weights(cluster, machines)))
    ]
    for names in partitions([g.name for g in cluster.groups]) if joined else ():
        found.append(tuple(tuple(m for m in machines if m.group in part) for part in names))
    return list({frozenset(grouping): grouping for grouping in reversed(found)}.values())[::-1]


def partitions(names: Sequence[str]) -> Iterator[list[list[str]]]:
    """Every way to part names into sets."""
    if not names:
        yield []
        return
    first = names[0]
    for rest in partitions(names[1:]):
        yield [[first], *rest]
        for i, part in enumerate(rest):
            yield [*rest[:i], [first, *part], *rest[i + 1 :]]
