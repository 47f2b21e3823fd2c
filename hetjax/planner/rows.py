"""Several groups in one stage: the rows of each microbatch shared out in proportion to speed."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

from hetjax.cluster import Cluster
from hetjax.cost import Costs, ProgramLike
from hetjax.devices import Number
from hetjax.plan import Member, Plan, Stage
from hetjax.planner.stages import Pricer, Way
from hetjax.workload import timed


def split_plans(
    program: ProgramLike, cluster: Cluster, costs: Costs, pricer: Pricer, counts: Sequence[int]
) -> Iterator[tuple[str, Plan]]:
    """Data parallelism over groups: one stage, its rows shared out exactly, for each way to keep parameters.

    Args:
        program: Must allow its rows to be split.
        cluster: All of its subsets of two groups and more are tried, up to four groups; beyond that all of
            them.
        costs: Seconds of segments.
        pricer: Of the same program and cluster.
        counts: Numbers of microbatches to try.

    Yields:
        A label and a plan whose memory has not been checked.
    """
    names = [g.name for g in cluster.groups]
    sizes = range(2, len(names) + 1) if len(names) <= 4 else [len(names)]
    for subset in (s for n in sizes for s in itertools.combinations(names, n)):
        for M in counts:
            rows = program.global_batch // M
            for policy, sharded in itertools.product(pricer.policies, (False, True)):
                ways = {}
                for name in subset:
                    n = cluster.group(name).num_devices
                    ways[name] = Way((("fsdp" if sharded and n > 1 else "dp", n),), policy)
                shares = share_rows(pricer, ways, rows)
                if shares is not None:
                    label = "rows over " + " + ".join(subset)
                    yield label, _plan(program, cluster, costs, ways, shares, M)


def share_rows(pricer: Pricer, ways: Mapping[str, Way], rows: int) -> dict[str, int] | None:
    """The rows of each group that make the slowest one as fast as can be.

    Each group gets a positive multiple of its device count; exact, by a dynamic program over the groups.

    Returns:
        Rows by group, or None where the rows cannot be shared so.
    """
    # By rows handed out so far: (longest seconds, rows of each group).
    best: dict[int, tuple[Number, tuple[int, ...]]] = {0: (0.0, ())}
    for name, way in ways.items():
        step = dict(way.axes)[way.axes[0][0]]
        seconds = {n: _member_s(pricer, name, n, way) for n in range(step, rows + 1, step)}
        reached: dict[int, tuple[Number, tuple[int, ...]]] = {}
        for done, (longest, shares) in best.items():
            for n, s in seconds.items():
                if done + n <= rows:
                    option = max(longest, s), (*shares, n)
                    if done + n not in reached or option < reached[done + n]:
                        reached[done + n] = option
        best = reached
    return dict(zip(ways, best[rows][1], strict=True)) if rows in best else None


def _member_s(pricer: Pricer, name: str, rows: int, way: Way) -> Number:
    forward, backward, _, _ = pricer.seconds(name, rows, way)
    return float(forward[-1] + backward[-1])


def _plan(
    program: ProgramLike,
    cluster: Cluster,
    costs: Costs,
    ways: Mapping[str, Way],
    shares: Mapping[str, int],
    num_microbatches: int,
) -> Plan:
    members, start = [], 0
    for name, way in ways.items():
        devices = tuple(range(cluster.group(name).num_devices))
        stop = start + shares[name]
        remat = (way.remat,) * program.num_segments
        members.append(Member(name, devices, dict(way.axes), (start, stop), remat))
        start = stop
    plan = Plan(
        cluster=cluster,
        fingerprint=program.fingerprint,
        num_segments=program.num_segments,
        global_batch=program.global_batch,
        num_microbatches=num_microbatches,
        schedule="1f1b",
        stages=(Stage((0, program.num_segments), tuple(members)),),
    )
    return timed(plan, program, costs)
