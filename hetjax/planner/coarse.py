"""Which slot sizes, microbatch counts and repeats are worth a closer look: a formula over all at once.

It takes every group's share of the model in proportion to speed, a pipeline's filling and draining, the
recompute that memory asks for on average, the end of the step and the load of the widest links. Layouts that
it ranks high are cut and simulated; nothing is decided by it alone.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import operator
from collections.abc import Callable, Sequence

import numpy as np

from hetjax.devices import DTYPE_BYTES
from hetjax.memory import ADAM_BYTES_PER_PARAM
from hetjax.planner.pricer import INF, Load, Pricer

NUM_WAYS = 12
"""Ways to run on a slot that the formula looks at: `dp`, `fsdp`, tensor parallel, one device, each
also with its state in host memory."""


@dataclasses.dataclass(frozen=True)
class Shape:
    """How groups are cut, order apart.

    Attributes:
        groups: Names, in file order.
        num_slots: Of each of them.
        num_microbatches: Of one step.
        repeats: Stages of each slot.
        score_s: Step time by formula.
    """

    groups: tuple[str, ...]
    num_slots: tuple[int, ...]
    num_microbatches: int
    repeats: int
    score_s: float


@dataclasses.dataclass(frozen=True)
class _Figures:
    """One group cut into slots at one number of microbatches: what the formula needs, for the whole model."""

    seconds: float
    end_s: float
    fixed_bytes: float
    kept_bytes: tuple[float, ...]
    repeat_s: tuple[float, ...]
    capacity: float


def shapes(
    pricer: Pricer, groups: Sequence[str], counts: Sequence[int], repeats: Sequence[int], keep: int
) -> list[Shape]:
    """The best shapes of some groups by formula.

    Args:
        pricer: Of the program and cluster.
        groups: That all take part.
        counts: Numbers of microbatches.
        repeats: Numbers of stages that each slot may run.
        keep: How many to return for each number of repeats.
    """
    options = [slot_counts(pricer, name, len(groups)) for name in groups]
    combos = np.array(list(itertools.product(*options)), dtype=int)
    combos = combos[combos.sum(axis=1) <= pricer.num_segments]
    found: list[Shape] = []
    for M in counts:
        columns = [
            [_figures(pricer, name, k, M) for k in ks] for name, ks in zip(groups, options, strict=True)
        ]
        picked = [np.searchsorted(np.array(ks), combos[:, i]) for i, ks in enumerate(options)]
        for v in repeats:
            if v > 1 and len(groups) == 1 and max(options[0]) == 1:
                continue
            scores = _scores(pricer, groups, combos, columns, picked, M, v)
            if v > 1:
                lanes = combos.sum(axis=1)
                scores = np.where((lanes * v > pricer.num_segments) | (lanes == 1), INF, scores)
            for i in np.argsort(scores, kind="stable")[:keep]:
                if np.isfinite(scores[i]):
                    found.append(Shape(tuple(groups), tuple(map(int, combos[i])), M, v, float(scores[i])))
    found.sort(key=lambda s: s.score_s)
    return [s for v in repeats for s in [f for f in found if f.repeats == v][:keep]]


def slot_counts(pricer: Pricer, name: str, num_groups: int) -> list[int]:
    """Into how many equal slots a group may be cut, few enough to try them all."""
    group = pricer.groups[name]
    n = group.num_devices
    divisors = [d for d in range(1, n + 1) if n % d == 0 and d <= pricer.num_segments]
    most = 8 if num_groups <= 3 else 6 if num_groups == 4 else 4
    if len(divisors) > most:
        hosts = (
            n // group.devices_per_host if group.devices_per_host and n % group.devices_per_host == 0 else 1
        )
        # Whole hosts and their halves first, then whatever is near them.
        divisors = sorted(divisors, key=lambda d: (abs(np.log2(d / (1.5 * hosts))), d))[: most - 1]
        divisors = sorted({1, *divisors})
    return divisors


def _figures(pricer: Pricer, name: str, num_slots: int, num_microbatches: int) -> list[_Figures]:
    """For each way to run on a slot of the group; ways that a small slot lacks repeat the first."""
    group = pricer.groups[name]
    rows = pricer.program.global_batch // num_microbatches
    size = group.num_devices // num_slots
    params = float(pricer.params[-1])
    state = float(pricer.num_params[-1]) * ADAM_BYTES_PER_PARAM
    found = []
    for table in pricer.tables(name, size, Load(rows, num_microbatches, 1, 0, 0, 1)):
        found.append(
            _Figures(
                seconds=float(table.work[-1] + table.repeat[0][-1]),
                end_s=float(table.end(params)),
                fixed_bytes=params * table.static + state * table.state,
                kept_bytes=tuple(float(pricer.kept[p][-1] * table.per_row) for p in pricer.policies),
                repeat_s=tuple(float(r[-1]) for r in table.repeat),
                capacity=table.capacity,
            )
        )
    return [*found, *[found[0]] * (NUM_WAYS - len(found))][:NUM_WAYS]


def _scores(
    pricer: Pricer,
    groups: Sequence[str],
    combos: np.ndarray,
    columns: Sequence[Sequence[Sequence[_Figures]]],
    picked: Sequence[np.ndarray],
    num_microbatches: int,
    repeats: int,
) -> np.ndarray:
    """Step time by formula of every combination of slot counts, each group in its best way."""
    M = num_microbatches

    def column(read: Callable[[_Figures], float]) -> np.ndarray:
        """Figures by way, combination and group."""
        tables = [np.array([[read(f) for f in ways] for ways in options], float) for options in columns]
        return np.stack([t[p].T for t, p in zip(tables, picked, strict=True)], axis=2)

    base, fixed, capacity = (column(operator.attrgetter(x)) for x in ("seconds", "fixed_bytes", "capacity"))
    end = column(operator.attrgetter("end_s"))
    num_policies = len(pricer.policies)
    kept = [column(lambda f, i=i: f.kept_bytes[i]) for i in range(num_policies)]
    repeat = [column(lambda f, i=i: f.repeat_s[i]) for i in range(num_policies)]
    lanes = combos.sum(axis=1, keepdims=True)
    in_flight = np.minimum((lanes + 1) / 2 if repeats == 1 else lanes, M)
    seconds = np.maximum(base[0], 1e-30)
    with np.errstate(divide="ignore", invalid="ignore"):
        # The largest share of the model that a slot has memory for, in its most frugal way.
        most = (capacity / (fixed + functools.reduce(np.minimum, kept) * in_flight)).max(axis=0) * 0.999
    with np.errstate(divide="ignore", invalid="ignore"):
        for _ in range(3):
            _, share = _shares(combos, seconds, most)
            room = np.where(share > 0, capacity / share - fixed, -INF)
            extra = _repeat_s(room, [k * in_flight for k in kept], repeat)
            ways = np.maximum(base - repeat[0] + extra, 1e-30)
            best = ways.argmin(axis=0)[None]
            seconds = np.take_along_axis(ways, best, axis=0)[0]
        period, share = _shares(combos, seconds, most)
    finish = (share * np.take_along_axis(end, best, axis=0)[0]).max(axis=1)
    # A stage has whole segments: half a segment too many in the lane that has the fewest.
    fewest = (share * pricer.num_segments).min(axis=1)
    period = period * (1 + 0.25 / np.maximum(fewest, 1.0))
    message = _message_s(pricer, groups, M)
    if repeats > 1:  # as in `Stages.waiting_s`: between groups, so of few of the boundaries
        part = len(groups) / lanes[:, 0] * message
        period = np.maximum(period, 1e-30)
        period = period * (1 + 3 * 2 * part / (2 * part + period / repeats))
    pipeline = period * (M + (lanes[:, 0] - 1) / repeats) + 2 * message * len(groups)
    return np.maximum(pipeline, M * repeats * message) + finish


def _shares(combos: np.ndarray, seconds: np.ndarray, most: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Each slot's share of the model, in proportion to speed where memory lets it, and the longest time.

    Args:
        combos: Slots of each group, by combination and group.
        seconds: Of the whole model on one of them.
        most: Largest share that each has memory for.

    Returns:
        Seconds by combination, infinite where memory is too small, and shares by combination and group.
    """
    full = np.zeros(combos.shape, bool)
    period, share = np.zeros(len(combos)), most
    for _ in range(combos.shape[1]):
        left = 1 - (combos * most * full).sum(axis=1)
        speed = (combos / seconds * ~full).sum(axis=1)
        period = np.where(left > 0, left / speed, 0.0)
        share = np.where(full, most, period[:, None] / seconds)
        full |= share > most
    fits = ~(share > most).any(axis=1)
    return np.where(fits, period, INF), np.minimum(share, most)


def _repeat_s(room: np.ndarray, kept: Sequence[np.ndarray], repeat: Sequence[np.ndarray]) -> np.ndarray:
    """Recompute of the whole model where its activations may take so much room; infinite where none fits."""
    result = np.full(room.shape, INF)
    for i in range(len(kept) - 1, -1, -1):
        fits = kept[i] <= room
        result = np.where(fits, repeat[i], result)
        if i:
            between = (kept[i] <= room) & (room < kept[i - 1]) & (kept[i - 1] > kept[i])
            with np.errstate(divide="ignore", invalid="ignore"):
                part = (kept[i - 1] - room) / (kept[i - 1] - kept[i])
            mixed = repeat[i - 1] + part * (repeat[i] - repeat[i - 1])
            result = np.where(between, mixed, result)
    return result


def _message_s(pricer: Pricer, groups: Sequence[str], num_microbatches: int) -> float:
    """Seconds of a boundary's message over the best of the links of the group whose best is the slowest."""
    if len(groups) < 2:
        return 0.0
    rows = pricer.program.global_batch // num_microbatches
    size = float(pricer.crossing[1:-1].min(initial=math.inf))
    size *= rows * min(DTYPE_BYTES[pricer.groups[g].dtype] for g in groups) / 4
    if not 0 < size < math.inf:
        return 0.0
    return max(min(pricer.cluster.link(a, b).occupied_s(size) for b in groups if b != a) for a in groups)
