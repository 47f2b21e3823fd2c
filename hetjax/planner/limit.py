"""The limit: the step time of a perfectly divisible placement."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np
from scipy import optimize

from hetjax.cluster import Cluster
from hetjax.cost import AnalyticCosts, Costs, ProgramLike
from hetjax.devices import Number


@dataclasses.dataclass(frozen=True)
class Limit:
    """No plan of these devices is faster.

    Attributes:
        step_time_s: Of the perfectly divisible placement.
        group_shares: Share of the step that each group works in it, at most 1.
        segment_shares: For each segment, the share of its rows on each group.
        with_links_s: The same with what the links can carry, and the devices' memory, as constraints.
    """

    step_time_s: Number
    group_shares: Mapping[str, Number]
    segment_shares: tuple[Mapping[str, Number], ...]
    with_links_s: Number = 0.0


def compute_limit(program: ProgramLike, cluster: Cluster, costs: Costs | None = None) -> Limit:
    """Solve the linear program: least T with all rows shared out and no group working longer.

    It prices comparative advantage by itself. Transfers, bubbles, memory and the end of the step are left
    out, so it bounds every plan from below.

    Args:
        program: Its segments and global batch.
        cluster: Its groups.
        costs: Seconds of segments; analytic when None.
    """
    costs = costs or AnalyticCosts()
    segments, groups = program.segments(), cluster.groups
    S, G = len(segments), len(groups)
    seconds = np.array([[costs.limit_s(s, g, float(program.global_batch)) for g in groups] for s in segments])
    scale = float(seconds.min(axis=1).sum()) or 1.0
    # Variables: x[segment, group] in row-major order, then T in units of `scale`.
    busy = np.zeros((G, S * G + 1))
    for g in range(G):
        busy[g, g : S * G : G] = seconds[:, g] / scale
    busy[:, -1] = -1.0
    whole = np.zeros((S, S * G + 1))
    for s in range(S):
        whole[s, s * G : (s + 1) * G] = 1.0
    target = np.zeros(S * G + 1)
    target[-1] = 1.0
    solved = optimize.linprog(
        target, A_ub=busy, b_ub=np.zeros(G), A_eq=whole, b_eq=np.ones(S), bounds=(0, None), method="highs"
    )
    assert solved.status == 0, (
        f"the limit's linear program always has a solution, and HiGHS says: {solved.message}"
    )
    shares = solved.x[:-1].reshape(S, G)
    step = float(solved.x[-1]) * scale
    work = (shares * seconds).sum(axis=0)
    return Limit(
        step_time_s=step,
        group_shares={g.name: float(w / step) if step else 0.0 for g, w in zip(groups, work, strict=True)},
        segment_shares=tuple({g.name: float(x) for g, x in zip(groups, row, strict=True)} for row in shares),
    )
