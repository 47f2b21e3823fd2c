"""Zorse's planner, written anew from its description, as the plan that ours has to beat.

Zorse (arXiv 2507.10392) groups machines by bandwidth, gives each group several ministages (chunks of layers)
in turn, runs all microbatches through one ministage before the next, gathers its parameters once in forward
and once in backward, recomputes every layer, and keeps the layers' inputs in host memory. Its planner:

1. Grouping. For k from the number of machines to 1: cut the complete graph of machines, weighted by bandwidth
   and by the lightest of all components' minimum cuts (Stoer-Wagner) until there are k of them (SPLIT).
2. Configuration, for every grouping, microbatch size 2, 4, 8, ... and number d of chunks: microbatches to the
   devices of a group in proportion to their speed, layers to the groups likewise, d equal chunks each, and a
   score in seconds by which the best is chosen.

What is done here in its favour, beyond a score in consistent units:

- Every way to join whole groups of the cluster is tried too: SPLIT peels single machines off.
- The best configurations by its score, and by its score corrected for links that many devices share, are
  played by hetjax's simulator, and the one that is fastest there counts.
- Its own test of memory does not reject: the simulated memory does, and what fails there is tried again with
  parameters and optimizer's state in host memory.
- Where several kinds share a group, each kind gathers among its like instead of over the slowest link.

Run alone it prints the baseline of each cluster and model, in thousands of tokens per second: what its score
expects, what hetjax's simulator finds, and what the simulator finds for the choice of the score alone.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Annotated, Any

import typer

from benchmarks.planner import zorse_program
from benchmarks.planner.zorse_groups import Machines, bandwidth_gb_per_s, groupings
from benchmarks.planner.zorse_program import LlamaProgram
from hetjax.cluster import GIB, Cluster
from hetjax.cost import Costs
from hetjax.devices import lookup
from hetjax.plan import Member, Plan, Stage
from hetjax.simulate import Simulation, simulate
from hetjax.workload import timed, workload

GATHER_OVERHEAD = 1.15
"""Zorse's factor on its time of a ring."""

REFERENCE_BYTES = 10e6
"""Message that Zorse measured; smaller ones take 0.8 to 1 times its time."""

RESERVE_BYTES = 2 * GIB


@dataclasses.dataclass(frozen=True)
class Configuration:
    """Zorse's answer.

    Attributes:
        groups: In the order of the pipeline.
        microbatch_rows: Rows of a microbatch on one device.
        counts: Microbatches of each device of each group; devices in order of machines.
        chunks: Layers of each chunk, by group and turn: `chunks[g][c]`.
        fits: Whether it passes Zorse's test of memory.
        score_s: Zorse's estimate of a step.
    """

    groups: tuple[Machines, ...]
    microbatch_rows: int
    counts: tuple[tuple[int, ...], ...]
    chunks: tuple[tuple[int, ...], ...]
    fits: bool = True
    score_s: float = math.inf

    @property
    def degree(self) -> int:
        """Chunks of each group."""
        return len(self.chunks[0])

    def __str__(self) -> str:
        parts = []
        for machines, chunks in zip(self.groups, self.chunks, strict=True):
            names = [m.group for m in machines]
            text = "+".join(f"{names.count(n)}x{n}" for n in dict.fromkeys(names))
            parts.append(f"{text} {'/'.join(map(str, chunks))}")
        return f"microbatch {self.microbatch_rows}, d={self.degree}: " + ", ".join(parts)


# ---- configuration ----


def share_out(total: int, speeds: Sequence[float]) -> tuple[int, ...]:
    """Whole parts in proportion to speeds: rounded down, what is left one each to the fastest."""
    whole = sum(speeds)
    parts = [int(total * speed / whole + 1e-9) for speed in speeds]
    fastest = sorted(range(len(speeds)), key=lambda i: -speeds[i])
    for i in itertools.islice(itertools.cycle(fastest), total - sum(parts)):
        parts[i] += 1
    return tuple(parts)


def deal_chunks(layers: Sequence[int], speeds: Sequence[float], degree: int) -> tuple[tuple[int, ...], ...]:
    """Cut each group's layers into equal chunks; what is left goes one to a chunk.

    The left-over layers of all groups are handed out in order of (chunk + 1) / the group's speed.
    """
    chunks = [[n // degree] * degree for n in layers]
    left = sum(layers) - degree * sum(c[0] for c in chunks)
    places = [(g, c) for g in range(len(layers)) for c in range(degree)]
    places.sort(key=lambda place: ((place[1] + 1) / speeds[place[0]], place))
    for g, c in places[:left]:
        chunks[g][c] += 1
    return tuple(map(tuple, chunks))


class Scorer:
    """Zorse's cost model of one program on one cluster; times of a layer from `costs`."""

    def __init__(self, program: LlamaProgram, cluster: Cluster, costs: Costs) -> None:
        """Keep what the score reads.

        Args:
            program: With whole layers.
            cluster: Groups and links.
            costs: Forward and backward of a layer on one device of each group.
        """
        assert not program.halves, "Zorse cuts between whole layers"
        self.program, self.cluster, self.costs = program, cluster, costs
        self.layer = program.segments()[1]
        self.num_layers = program.sizes.num_layers
        self._known: dict[tuple[str, int], tuple[float, float]] = {}
        self.bandwidth = functools.cache(lambda a, b: bandwidth_gb_per_s(cluster, a, b))
        self.slowest = functools.cache(self._slowest)
        self.narrowest = functools.cache(self._narrowest)

    def layer_s(self, group: str, rows: int) -> tuple[float, float]:
        """Forward, and backward without recompute, of a layer on one device."""
        key = group, rows
        if key not in self._known:
            where = self.cluster.group(group)
            self._known[key] = (
                float(self.costs.forward_s(self.layer, where, rows, {})),
                float(self.costs.backward_s(self.layer, where, rows, {}, "none")),
            )
        return self._known[key]

    def _slowest(self, machines: Machines) -> float:
        """GB/s of the slowest link of a ring over a group's devices."""
        inside = [self.bandwidth(m, m) for m in machines if len(m.devices) > 1]
        ring = zip(machines, machines[1:] + machines[:1], strict=True) if len(machines) > 1 else ()
        return min([*inside, *(self.bandwidth(a, b) for a, b in ring)], default=math.inf)

    def _narrowest(self, a: Machines, b: Machines) -> float:
        """GB/s of the slowest link between two groups' machines."""
        return min(self.bandwidth(x, y) for x in a for y in b)

    def ring_s(self, machines: Machines, num_bytes: float) -> float:
        """All-gather of `num_bytes` over a group: n - 1 steps of 1/n of it over the ring's slowest link."""
        n = sum(len(m.devices) for m in machines)
        return GATHER_OVERHEAD * (n - 1) / n * num_bytes / (self.slowest(machines) * 1e9)

    def gather_s(self, machines: Machines) -> float:
        """All-gather of one layer in float16."""
        return self.ring_s(machines, 2.0 * self.layer.num_params)

    def reduce_s(self, machines: Machines) -> float:
        """Reduce-scatter of one layer's gradients in float32."""
        return self.ring_s(machines, 4.0 * self.layer.num_params)

    def send_s(self, a: Machines, b: Machines, rows: int) -> float:
        """A microbatch's boundary between two groups, over the slowest link between their machines."""
        if a == b:
            return 0.0
        rate = 1e9 * self.narrowest(a, b)
        num_bytes = 2.0 * rows * self.program.seq_len * self.program.sizes.hidden
        if num_bytes >= REFERENCE_BYTES:
            return num_bytes / rate
        return (0.8 + 0.2 * num_bytes / REFERENCE_BYTES) * REFERENCE_BYTES / rate

    def ordered(self, grouping: Sequence[Machines]) -> tuple[Machines, ...]:
        """From the group that gathers fastest, each time the one with the best mean bandwidth to the last."""
        left = list(grouping)
        order = [min(left, key=self.gather_s)]
        left.remove(order[0])
        while left:

            def mean(other: Machines, last: Machines = order[-1]) -> float:
                rates = [self.bandwidth(a, b) for a in last for b in other]
                return sum(rates) / len(rates)

            order.append(max(left, key=mean))
            left.remove(order[-1])
        return tuple(order)

    def configurations(self, grouping: Sequence[Machines]) -> Iterator[Configuration]:
        """All of one grouping, up to the first microbatch size of which none passes the test of memory."""
        groups = self.ordered(grouping)
        rows = 2
        while rows <= self.program.global_batch:
            found = list(self._of_rows(groups, rows))
            yield from found
            if not any(config.fits for config in found) and rows >= 8:
                return
            rows *= 2

    def _of_rows(self, groups: tuple[Machines, ...], rows: int) -> Iterator[Configuration]:
        """All of one microbatch size: one for each number of chunks."""
        num_microbatches = self.program.global_batch // rows
        counts, layer_times = [], []
        for machines in groups:
            times = [sum(self.layer_s(m.group, rows)) for m in machines for _ in m.devices]
            counts.append(share_out(num_microbatches, [1 / t for t in times]))
            layer_times.append(max(n * t for n, t in zip(counts[-1], times, strict=True)))
        speeds = [1 / t for t in layer_times]
        layers = share_out(self.num_layers, speeds)
        for degree in range(1, min(self.num_layers // 2, len(groups)) + 3):
            config = Configuration(groups, rows, tuple(counts), deal_chunks(layers, speeds, degree))
            yield dataclasses.replace(config, fits=self.fits(config), score_s=self.score_s(config))

    def fits(self, config: Configuration) -> bool:
        """Zorse's test of nominal memory: no embedding, no head, no gradients."""
        boundary = 2.0 * config.microbatch_rows * self.program.seq_len * self.program.sizes.hidden
        params = self.layer.num_params
        for machines, chunks in zip(config.groups, config.chunks, strict=True):
            n = sum(len(m.devices) for m in machines)
            two = max(a + b for a, b in zip(chunks, (*chunks[1:], 0), strict=True))
            state = 2 * params * (two + (sum(chunks) - two) / n) + 12 * params * sum(chunks) / n
            smallest = min(lookup(m.kind).memory_gib or math.inf for m in machines) * GIB
            if state + 3 * boundary + RESERVE_BYTES > smallest:
                return False
        return True

    def score_s(self, config: Configuration) -> float:
        """Zorse's estimate of a step: filling the pipeline, the busiest group's work, draining it."""
        rows, groups = config.microbatch_rows, config.groups
        forward, both = [], []
        for machines in groups:
            times = [self.layer_s(m.group, rows) for m in machines]
            forward.append(max(f for f, _ in times))
            # The backward recomputes the forward: 2 f + b a layer in all.
            both.append(max(f + b for f, b in times))
        order = [(c, g) for c in range(config.degree) for g in range(len(groups))]
        sends = [self.send_s(groups[a[1]], groups[b[1]], rows) for a, b in itertools.pairwise(order)]
        after, before = [*sends, 0.0], [0.0, *sends]
        first, last = order[: len(groups)], order[-len(groups) :]
        fill = sum(forward[g] * config.chunks[g][c] + after[i] for i, (c, g) in enumerate(first))
        offset = len(order) - len(last)
        drain = sum(both[g] * config.chunks[g][c] + before[offset + i] for i, (c, g) in enumerate(last))
        core = [0.0] * len(groups)
        for i, (c, g) in enumerate(order):
            core[g] += self._chunk_s(config, c, g, after[i], before[i])
        return fill + max(core) + drain

    def _chunk_s(self, config: Configuration, c: int, g: int, after: float, before: float) -> float:
        """One chunk's forward and backward of all microbatches, or its collectives where they take longer."""
        machines, layers = config.groups[g], config.chunks[g][c]
        devices = (m.group for m in machines for _ in m.devices)
        there, back = 0.0, 0.0
        for group, n in set(zip(devices, config.counts[g], strict=True)):
            f, b = self.layer_s(group, config.microbatch_rows)
            there = max(there, n * max(f * layers, after))
            back = max(back, n * max((f + b) * layers, before))
        gather, reduce = self.gather_s(machines) * layers, self.reduce_s(machines) * layers
        return max(there, gather) + max(back, gather + reduce)


def best_configurations(
    program: LlamaProgram,
    cluster: Cluster,
    costs: Costs,
    *,
    groupings_of: Iterable[Sequence[Machines]] | None = None,
) -> list[Configuration]:
    """Everything that Zorse's planner scores, best score first.

    Args:
        program: With whole layers.
        cluster: Groups and links.
        costs: Of a layer.
        groupings_of: Groupings to try; `groupings(cluster)` when None.
    """
    scorer = Scorer(program, cluster, costs)
    tried = groupings(cluster) if groupings_of is None else groupings_of
    found = [config for grouping in tried for config in scorer.configurations(grouping)]
    return sorted(found, key=lambda config: config.score_s)


# ---- as a plan of hetjax ----


def to_plan(
    config: Configuration, program: LlamaProgram, cluster: Cluster, *, offloaded: Collection[str] = ()
) -> Plan:
    """A configuration as a plan: one stage a chunk, in ministage order.

    The embedding goes with the first chunk and the head with the last. A member is what a group has of one
    kind: its devices shard the parameters and run its rows in as many parts as the busiest of them has
    microbatches. Every layer is recomputed, its input in host memory.

    Args:
        config: Its microbatches cover the global batch.
        program: With whole layers.
        cluster: Groups and links.
        offloaded: Groups of the cluster that keep shards and optimizer's state in host memory, where the
            others have them on the devices.
    """
    members = [
        _members(machines, counts, config.microbatch_rows, offloaded)
        for machines, counts in zip(config.groups, config.counts, strict=True)
    ]
    order = [(c, g) for c in range(config.degree) for g in range(len(config.groups))]
    order = [(c, g) for c, g in order if config.chunks[g][c]]
    stages, start = [], 0
    for i, (c, g) in enumerate(order):
        size = config.chunks[g][c] + (i == 0) + (i == len(order) - 1)
        remat = ("offloaded",) * size
        stages.append(
            Stage((start, start + size), tuple(dataclasses.replace(m, remat=remat) for m in members[g]))
        )
        start += size
    return Plan(
        cluster=cluster,
        fingerprint=program.fingerprint,
        num_segments=program.num_segments,
        global_batch=program.global_batch,
        num_microbatches=1,
        schedule="ministage",
        stages=tuple(stages),
    )


def _members(
    machines: Machines, counts: Sequence[int], rows: int, offloaded: Collection[str]
) -> list[Member]:
    """A group's devices by the cluster's group, without those that have no microbatch."""
    devices = [(m.group, d) for m in machines for d in m.devices]
    busy = [(group, d, n) for (group, d), n in zip(devices, counts, strict=True) if n]
    members, start = [], 0
    for name in dict.fromkeys(group for group, _, _ in busy):
        mine = sorted((d, n) for group, d, n in busy if group == name)
        stop = start + rows * sum(n for _, n in mine)
        members.append(
            Member(
                group=name,
                devices=tuple(d for d, _ in mine),
                axes={"fsdp": len(mine)},
                rows=(start, stop),
                remat=(),
                residency="offloaded" if name in offloaded else "gathered",
                splits=max(n for _, n in mine),
            )
        )
        start = stop
    return members


def links_s(plan: Plan, program: LlamaProgram, costs: Costs) -> float:
    """Seconds for which the busiest link is taken by a step's boundary values."""
    work = workload(plan, program, costs)
    busy: dict[object, float] = {}
    for message in (*work.forward.values(), *work.backward.values()):
        taken = busy.get(message.channel, 0.0) + message.link.occupied_s(message.num_bytes)
        busy[message.channel] = taken
    return max(busy.values(), default=0.0)


def simulated(
    config: Configuration, program: LlamaProgram, cluster: Cluster, costs: Costs
) -> Simulation | None:
    """A configuration played by hetjax's simulator.

    Groups whose devices lack the memory keep their state in host memory.

    Returns:
        The step, or None where the memory does not do even so.
    """
    have = {g.name: g.memory_bytes or math.inf for g in cluster.groups}
    offloaded: set[str] = set()
    while True:
        plan = timed(to_plan(config, program, cluster, offloaded=offloaded), program, costs)
        result = simulate(plan, program, costs)
        over = {name for (name, _), peak in result.peak_bytes.items() if peak > have[name]}
        if not over:
            return result
        if over <= offloaded:
            return None
        offloaded |= over


def candidates(
    scored: Sequence[Configuration], program: LlamaProgram, cluster: Cluster, costs: Costs, count: int
) -> list[Configuration]:
    """Configurations worth simulating, of all by rising score.

    The `count` best that pass Zorse's test of memory; and of each grouping and number of chunks the best one,
    three times `count` of them by their score or the time of the busiest link, whichever is more.
    """
    first: dict[tuple[tuple[Machines, ...], int], Configuration] = {}
    for config in scored:
        first.setdefault((config.groups, config.degree), config)
    taken = {c: links_s(to_plan(c, program, cluster), program, costs) for c in first.values()}
    by_links = sorted(taken, key=lambda c: max(c.score_s, taken[c]))
    chosen = [c for c in scored if c.fits][:count] + by_links[: 3 * count]
    return list(dict.fromkeys(chosen))


def baseline_plan(
    program: LlamaProgram, cluster: Cluster, costs: Costs, model: str = "", *, num_simulated: int = 20
) -> tuple[Plan, dict[str, Any]]:
    """Zorse's plan, at its best: of its best configurations the one that hetjax's simulator finds fastest.

    Args:
        program: One of Zorse's Llamas; cut into whole layers if it is not.
        cluster: Groups and links.
        costs: Of its segments.
        model: Its name, for the error.
        num_simulated: As `count` of `candidates`.

    Returns:
        The plan, with its expected seconds, for the program with whole layers, and what was found:
        `program`, `configuration`, `score_tokens_per_s`, `tokens_per_s`, `step_time_s`, `offloaded` (groups),
        `num_scored`, `num_simulated`, `own_choice` and `own_tokens_per_s` (the configuration that Zorse
        would have chosen by score and memory test; its tokens/s, None where it does not fit).

    Raises:
        ValueError: No configuration fits the devices' memory.
    """
    program = dataclasses.replace(program, halves=False)
    scored = best_configurations(program, cluster, costs)
    tokens = program.global_batch * program.seq_len
    true_groupings = {frozenset(grouping) for grouping in groupings(cluster, joined=False)}
    own = next((c for c in scored if c.fits and frozenset(c.groups) in true_groupings), None)
    chosen = candidates(scored, program, cluster, costs, num_simulated)
    best: tuple[Simulation, Configuration] | None = None
    own_s: float | None = None
    for config in dict.fromkeys([*chosen, own] if own else chosen):
        result = simulated(config, program, cluster, costs)
        if result is not None and config is own:
            own_s = float(result.step_time_s)
        if result is not None and (best is None or result.step_time_s < best[0].step_time_s):
            best = result, config
    if best is None:
        raise ValueError(
            f"None of Zorse's configurations for {model or program.fingerprint} fits the memory."
        )
    result, config = best
    return result.plan, {
        "program": program,
        "configuration": config,
        "score_tokens_per_s": tokens / config.score_s,
        "tokens_per_s": tokens / float(result.step_time_s),
        "step_time_s": float(result.step_time_s),
        "offloaded": sorted(
            {m.group for stage in result.plan.stages for m in stage.members if m.residency == "offloaded"}
        ),
        "num_scored": len(scored),
        "num_simulated": len({*chosen, own} if own else chosen),
        "own_choice": own,
        "own_tokens_per_s": None if own_s is None else tokens / own_s,
    }


def main(
    cluster: Annotated[str, typer.Option(help="a, b or c; all of them when empty.")] = "",
    model: Annotated[str, typer.Option(help="7b, 13b, 33b or 65b; all of them when empty.")] = "",
    num_simulated: Annotated[int, typer.Option(min=1, help="As in `baseline_plan`.")] = 20,
    as_json: Annotated[bool, typer.Option("--json", help="Figures as JSON.")] = False,
) -> None:
    """Print Zorse's plans and their tokens per second."""
    figures = []
    for name in (cluster,) if cluster else zorse_program.MODELS:
        where, costs = zorse_program.cluster(name), zorse_program.zorse_costs(name)
        for size, program in zorse_program.programs(name).items():
            if model in ("", size):
                _, info = baseline_plan(program, where, costs, size, num_simulated=num_simulated)
                keys = ("score_tokens_per_s", "tokens_per_s", "own_tokens_per_s", "offloaded")
                figures.append({"cluster": name, "model": size, **{key: info[key] for key in keys}})
                figures[-1] |= {key: str(info[key]) for key in ("configuration", "own_choice")}
                if not as_json:
                    typer.echo(_line(figures[-1]))
    if as_json:
        typer.echo(json.dumps(figures))


def _line(figure: dict[str, Any]) -> str:
    keys = ("score_tokens_per_s", "tokens_per_s", "own_tokens_per_s")
    rates = ", ".join(
        f"{what} {'-' if figure[key] is None else format(figure[key] / 1e3, '.1f')}"
        for what, key in zip(("score", "simulated", "own choice"), keys, strict=True)
    )
    offloaded = f" (state in host memory: {', '.join(figure['offloaded'])})" if figure["offloaded"] else ""
    name = f"{figure['cluster']} {figure['model']}".upper()
    return f"{name}: {rates}; {figure['configuration']}{offloaded}"


if __name__ == "__main__":
    typer.run(main)
