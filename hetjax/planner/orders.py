"""What is there to try: numbers of microbatches, sets of groups, and orders of the groups of a set."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from hetjax.cluster import Cluster
from hetjax.cost import ProgramLike
from hetjax.errors import UserError


def microbatch_counts(program: ProgramLike, wanted: int | None) -> list[int]:
    """Allowed numbers of microbatches; no more than about a dozen."""
    batch = program.global_batch
    divisors = [m for m in range(1, batch + 1) if batch % m == 0]
    if wanted is not None:
        if wanted not in divisors:
            raise UserError(
                f"num_microbatches is {wanted} and has to divide the global batch, which is {batch} rows. "
                f"Allowed: {', '.join(map(str, divisors[:12]))}{', ...' if len(divisors) > 12 else ''}."
            )
        divisors = [wanted]
    if program.rows_mode == "whole":
        if wanted not in (None, 1):
            raise UserError(
                f"num_microbatches is {wanted}, and the program mixes the rows of a batch (rows='whole'), "
                "so it has to be 1."
            )
        return [1]
    if len(divisors) <= 12:
        return divisors
    return sorted({min(divisors, key=lambda d: abs(d - batch ** (i / 11))) for i in range(12)})


def subsets(cluster: Cluster, names: Sequence[str]) -> list[tuple[str, ...]]:
    """Sets of groups that are tried: all of up to five groups, the likely ones of more; in file order."""
    if len(names) <= 5:
        return [s for n in range(1, len(names) + 1) for s in itertools.combinations(names, n)]
    groups = {name: cluster.group(name) for name in names}
    speed = {n: g.achieved_tflops * g.num_devices for n, g in groups.items()}
    memory = {n: (g.memory_bytes or 0.0) * g.num_devices for n, g in groups.items()}
    found: list[tuple[str, ...]] = [(n,) for n in names]
    for key in (speed, memory):
        ranked = sorted(names, key=lambda n: (-key[n], n))
        found += [tuple(n for n in names if n in ranked[:size]) for size in range(2, len(names) + 1)]
    return list(dict.fromkeys(found))


def orders(cluster: Cluster, names: Sequence[str], *, thorough: bool) -> list[tuple[str, ...]]:
    """Orders of some groups: all of up to three (four where it is worth it), else the likely ones.

    Likely are: by speed, by memory, and along the widest links from each group on.
    """
    if len(names) <= 3 or (len(names) == 4 and thorough):
        return list(itertools.permutations(names))
    groups = {name: cluster.group(name) for name in names}
    result: list[tuple[str, ...]] = []
    for key in (
        {n: g.achieved_tflops * g.num_devices for n, g in groups.items()},
        {n: g.memory_bytes or 0.0 for n, g in groups.items()},
    ):
        order = sorted(names, key=lambda n: (-key[n], n))
        result += [tuple(order), tuple(reversed(order))]
    if thorough:
        result += [near(cluster, names, first) for first in names]
    else:
        result += [near(cluster, names, result[0][0]), near(cluster, names, result[0][-1])]
    return list(dict.fromkeys(result))


def near(cluster: Cluster, names: Iterable[str], first: str) -> tuple[str, ...]:
    """From a first group always on to the one with the widest link."""
    left = [n for n in names if n != first]
    order = [first]
    while left:
        order.append(max(left, key=lambda n: (cluster.link(order[-1], n).bandwidth_gb_per_s, n)))
        left.remove(order[-1])
    return tuple(order)
