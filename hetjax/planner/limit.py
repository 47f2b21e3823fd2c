"""The limit: the step time of a perfectly divisible placement, and with what links and memory allow."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np
from scipy import optimize, sparse

from hetjax.cluster import Cluster
from hetjax.cost import AnalyticCosts, Costs, ProgramLike
from hetjax.devices import Number
from hetjax.planner import relaxation


@dataclasses.dataclass(frozen=True)
class Limit:
    """No plan of these devices is faster.

    Attributes:
        step_time_s: Of the perfectly divisible placement.
        group_shares: Share of the step that each group works in it, at most 1.
        segment_shares: For each segment, the share of its rows on each group.
        with_links_s: The same with what the links between groups carry, and without groups on which a segment
            fits in no way, as constraints; see `relaxation`. It bounds plans of every residency and remat
            policy: with state in host memory, no more of a model than one segment has to be on a device.
        resident_s: Of plans whose members are all `resident` (`plan.Member.residency`), which is what
            `Trainer` runs: a group also holds the state of all that it computes. Infinite where no such plan
            fits.
    """

    step_time_s: Number
    group_shares: Mapping[str, Number]
    segment_shares: tuple[Mapping[str, Number], ...]
    with_links_s: Number = 0.0
    resident_s: Number = 0.0


def compute_limit(program: ProgramLike, cluster: Cluster, costs: Costs | None = None) -> Limit:
    """Solve the linear program: least T with all rows shared out and no group working longer.

    It prices comparative advantage by itself. Bubbles, latencies, collectives inside groups, updates and
    activations are left out, so it bounds every plan from below; of transfers and memory, the bounds with
    links count what no plan avoids.

    Args:
        program: Its segments and global batch.
        cluster: Its groups.
        costs: Seconds of segments; analytic when None.
    """
    kinds = relaxation.find_kinds(program, cluster, costs or AnalyticCosts())
    groups = cluster.groups
    # Each segment wholly on its fastest group: about a step, in which the solver counts.
    unit_s = float((kinds.counts * kinds.seconds.min(axis=1)).sum()) or 1.0
    step, shares = _divisible(kinds.counts[:, None] * kinds.seconds / unit_s)
    step *= unit_s
    work = (shares * kinds.counts[:, None] * kinds.seconds).sum(axis=0)
    names = [g.name for g in groups]
    by_kind = [{name: float(x) for name, x in zip(names, row, strict=True)} for row in shares]
    bound = relaxation.bounds(program, cluster, kinds, unit_s)
    with_links = max(step, bound["any"])
    return Limit(
        step_time_s=step,
        group_shares={name: float(w / step) if step else 0.0 for name, w in zip(names, work, strict=True)},
        segment_shares=tuple(by_kind[k] for k in kinds.of_segment),
        with_links_s=with_links,
        resident_s=max(with_links, bound["resident"]),
    )


def _divisible(seconds: np.ndarray) -> tuple[float, np.ndarray]:
    """The least step and the shares `[kind, group]`, from the seconds of each kind on each group."""
    K, G = seconds.shape
    # Variables: the shares in row-major order, then T.
    busy = sparse.hstack(
        [sparse.coo_array((seconds.ravel(), (np.tile(np.arange(G), K), np.arange(K * G)))), -np.ones((G, 1))]
    )
    whole = sparse.hstack([sparse.kron(sparse.eye_array(K), np.ones((1, G))), sparse.coo_array((K, 1))])
    target = np.zeros(K * G + 1)
    target[-1] = 1.0
    solved = optimize.linprog(
        target, A_ub=busy, b_ub=np.zeros(G), A_eq=whole, b_eq=np.ones(K), bounds=(0, None), method="highs"
    )
    assert solved.status == 0, (
        f"the limit's linear program always has a solution, and HiGHS says: {solved.message}"
    )
    return float(solved.x[-1]), solved.x[:-1].reshape(K, G)
