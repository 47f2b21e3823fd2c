"""Replicated pipelines of unlike shape: sets of groups that each hold the whole model and share the batch.

Each set is planned as a pipeline of its own for its part of the rows; together they are one plan, whose
stages end wherever one of the pipelines' do, with a member of each pipeline in every stage.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast

from hetjax.cost import ProgramLike
from hetjax.devices import Number
from hetjax.plan import Member, Plan, Stage
from hetjax.planner.layout import Cut, Layout
from hetjax.planner.orders import near
from hetjax.workload import timed

if TYPE_CHECKING:
    from hetjax.planner.search import Search

MOST_PARTITIONS = 6
"""Ways to form pipelines that are tried: those that keep links busy for the least time."""


class Part:
    """A program with another global batch: what one of several pipelines sees of it.

    Args:
        program: The whole.
        global_batch: Rows of one step that pass this pipeline.
    """

    def __init__(self, program: ProgramLike, global_batch: int) -> None:
        self.program, self.global_batch = program, global_batch

    def __getattr__(self, name: str) -> Any:
        return getattr(self.program, name)


def replicated(search: Search, longest_s: Number, num_microbatches: int) -> Iterator[tuple[str, Plan]]:
    """Plans of several pipelines.

    Args:
        search: Its program, cluster and choices.
        longest_s: Partitions that keep links busy for longer are left out.
        num_microbatches: Of the best plan so far; the counts next to it are tried.

    Yields:
        A label and a plan whose memory has not been checked.
    """
    if search.program.rows_mode != "split" or search.schedule not in (None, "1f1b") or search.pricer.pins:
        return
    timed_partitions = sorted(
        (exchange_s(search, blocks) + traffic_s(search, blocks), i, blocks)
        for i, blocks in enumerate(partitions(search.names))
    )
    at = search.counts.index(num_microbatches)
    for seconds, _, blocks in timed_partitions[:MOST_PARTITIONS]:
        if seconds > longest_s:
            return
        for M in search.counts[max(at - 1, 0) : at + 2]:
            plan = combined(search, blocks, M)
            if plan is not None:
                yield " | ".join(" + ".join(block) for block in blocks), plan


def partitions(names: Sequence[str]) -> list[tuple[tuple[str, ...], ...]]:
    """Ways to divide groups into two sets and more (two where there are more than four groups)."""
    found: list[tuple[tuple[str, ...], ...]] = [((names[0],),)]
    for name in names[1:]:
        grown = []
        for blocks in found:
            grown += [(*blocks[:i], (*b, name), *blocks[i + 1 :]) for i, b in enumerate(blocks)]
            grown.append((*blocks, (name,)))
        found = grown
    return [b for b in found if len(b) > 1 and (len(names) <= 4 or len(b) == 2)]


def traffic_s(search: Search, blocks: Sequence[Sequence[str]]) -> Number:
    """Seconds of the boundary values within the pipelines, each along the widest links between its groups."""
    program, crossing = search.program, search.pricer.crossing[1:-1].min(initial=math.inf)
    if not math.isfinite(crossing):
        return 0.0
    longest = 0.0
    for block in blocks:
        num_bytes = float(crossing * program.global_batch / len(blocks))
        along = (
            max(
                (search.cluster.link(a, b).occupied_s(num_bytes) for a, b in itertools.pairwise(order)),
                default=0.0,
            )
            for order in (near(search.cluster, block, first) for first in block)
        )
        longest = max(longest, min(along))
    return longest


def exchange_s(search: Search, blocks: Sequence[Sequence[str]]) -> Number:
    """Seconds of the gradients' way round the pipelines, over the best link of each pair of neighbours."""
    n = len(blocks)
    num_bytes = 2 * (n - 1) / n * float(search.pricer.params[-1])
    longest = 0.0
    for i, block in enumerate(blocks):
        other = blocks[(i + 1) % n]
        longest = max(
            longest, min(search.cluster.link(a, b).occupied_s(num_bytes) for a in block for b in other)
        )
    return longest


def combined(search: Search, blocks: Sequence[Sequence[str]], num_microbatches: int) -> Plan | None:
    """The best pipeline of each block at its share of the rows, as one plan; None where one does not fit."""
    rows = search.program.global_batch // num_microbatches
    shares = rows_of(search, blocks, rows)
    if shares is None:
        return None
    chosen: list[tuple[Layout, Cut]] = []
    for block, own in zip(blocks, shares, strict=True):
        part = cast(ProgramLike, Part(search.program, own * num_microbatches))
        inner = search.within(part, block, num_microbatches)
        fits = [(layout, cut) for _, _, layout, cut in inner.ranked() if set(layout.groups) == set(block)]
        if not fits:
            return None
        layout, cut = fits[0]
        chosen.append((layout, inner.stages.cut_at(layout, cut.bounds) or cut))
    ends = sorted({b for _, cut in chosen for b in cut.bounds})
    stages = []
    for start, stop in zip(ends, ends[1:], strict=False):
        members, row = [], 0
        for _, cut in chosen:
            j = max(i for i, b in enumerate(cut.bounds) if b <= start)
            for run in cut.runs[j]:
                first = start - cut.bounds[j]
                members.append(
                    Member(
                        group=run.slot.group,
                        devices=run.slot.devices[: run.num_devices],
                        axes=dict(run.way.axes),
                        rows=(row, row + run.rows),
                        remat=run.remat[first : first + stop - start],
                        residency=run.way.residency,
                    )
                )
                row += run.rows
        stages.append(Stage((start, stop), tuple(members)))
    plan = Plan(
        cluster=search.cluster,
        fingerprint=search.program.fingerprint,
        num_segments=search.program.num_segments,
        global_batch=search.program.global_batch,
        num_microbatches=num_microbatches,
        schedule="1f1b",
        stages=tuple(stages),
        ahead=min(layout.ahead for layout, _ in chosen),
        backward="split" if all(layout.backward == "split" for layout, _ in chosen) else "whole",
    )
    return timed(plan, search.program, search.costs)


def rows_of(search: Search, blocks: Sequence[Sequence[str]], rows: int) -> list[int] | None:
    """Rows of a microbatch for each block, in proportion to its speed, in multiples that devices share."""
    speeds = [
        sum(1 / search.pricer.model_s(name, search.cluster.group(name).num_devices, rows) for name in block)
        for block in blocks
    ]
    shares, left = [], rows
    for block, speed in list(zip(blocks, speeds, strict=True))[:-1]:
        wanted = rows * speed / sum(speeds)
        devices = max(search.cluster.group(name).num_devices for name in block)
        step = max(d for d in range(1, devices + 1) if devices % d == 0 and d <= max(wanted / 3, 1))
        own = max(step, round(wanted / step) * step)
        shares.append(own)
        left -= own
    return [*shares, left] if left > 0 else None
