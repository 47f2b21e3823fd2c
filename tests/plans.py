"""Short ways to clusters, plans and comparisons for the tests of the core."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

import hetjax
from hetjax.cluster import Cluster
from hetjax.plan import Member, Plan, Stage


def cluster_of(sizes: Sequence[int], dtypes: Sequence[str] = (), **fields: Sequence[Any]) -> Cluster:
    """Groups `g0`, `g1`, ... of CPU devices; `fields` gives a value of some key for each group."""
    groups: dict[str, dict[str, Any]] = {}
    for i, size in enumerate(sizes):
        groups[f"g{i}"] = {
            "kind": "cpu",
            "num_devices": size,
            "compute_dtype": (*dtypes, *["float32"] * 9)[i],
        }
        groups[f"g{i}"] |= {k: v[i] for k, v in fields.items() if v[i] is not None}
    link = {"bandwidth_gb_per_s": 1.0, "latency_us": 10.0}
    return Cluster.from_dict({"name": "drawn", "groups": groups, "default_link": link})


def member(
    group: int, start: int, stop: int, *, remat: str = "dots", first: int = 0, **axes: int
) -> dict[str, Any]:
    """A member with rows `start` to `stop` on as many devices, from `first` on, as its axes need."""
    axes = {"dp": 1, "fsdp": 1, "tp": 1} | axes
    count = axes["dp"] * axes["fsdp"] * axes["tp"]
    devices = tuple(range(first, first + count))
    return {"group": f"g{group}", "devices": devices, "axes": axes, "rows": (start, stop), "remat": remat}


def plan_of(
    program: hetjax.Program,
    cluster: Cluster,
    borders: Sequence[int],
    members: Sequence[Any],
    *,
    microbatches: int = 1,
    schedule: str = "1f1b",
    fuse: int = 1,
) -> Plan:
    """A plan whose stages end at `borders` and at the last segment.

    Each stage has one entry of `members`: a group's number (one device, all rows), or a list of what `member`
    makes.
    """
    rows, count = program.global_batch // microbatches, program.num_segments
    stages = []
    for start, stop, own in zip([0, *borders], [*borders, count], members, strict=True):
        own = [member(own, 0, rows)] if isinstance(own, int) else own
        repeated: list[dict[str, Any]] = [m | {"remat": (m["remat"],) * (stop - start)} for m in own]
        made = [Member(**m) for m in repeated]
        stages.append(Stage((start, stop), tuple(made), fuse))
    return Plan(
        cluster, program.fingerprint, count, program.global_batch, microbatches, schedule, tuple(stages)
    )


def alone(program: hetjax.Program, **options: Any) -> Plan:
    """The whole model on one device."""
    return plan_of(program, cluster_of([1]), [], [0], **options)


def halves(program: hetjax.Program, dtypes: Sequence[str] = (), **options: Any) -> Plan:
    """Two groups of one device, each with half of the segments."""
    return plan_of(program, cluster_of([1, 1], dtypes), [program.num_segments // 2], [0, 1], **options)


def spec_of(batch: Any) -> Any:
    """Shapes and dtypes of a host batch."""
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), batch)


def distance(got: Any, expected: Any) -> float:
    """Relative norm of the difference of two trees of arrays, worst leaf."""
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True)
    worst = 0.0
    for a, b in pairs:
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        scale = np.linalg.norm(b)
        worst = max(worst, float(np.linalg.norm(a - b) / (scale if scale > 1e-6 else 1.0)))
    return worst


def equal(got: Any, expected: Any) -> bool:
    """Whether two trees hold the same bits."""
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True)
    return all(np.array_equal(np.asarray(a), np.asarray(b), equal_nan=True) for a, b in pairs)
