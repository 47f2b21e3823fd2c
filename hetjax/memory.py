"""Bytes per device of a member of a stage: what stays, what each microbatch keeps, what comes and goes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from hetjax.cluster import Group
from hetjax.cost import ProgramLike, SegmentLike
from hetjax.devices import DTYPE_BYTES, Number
from hetjax.graph import Bounds, StageGraph, Unit, in_flight_bounds, stage_edges

if TYPE_CHECKING:
    from hetjax.plan import Member, Plan, Stage

ADAM_BYTES_PER_PARAM = 8
"""Two float32 moments; other optimizers keep less."""


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes per device of one member of a stage.

    Attributes:
        master_bytes: Float32 parameters, sharded over `fsdp` and `tp`, and over the members where the state
            is sharded; 0 where they are in host memory.
        optimizer_bytes: Two float32 moments, sharded alike.
        copy_bytes: Compute-dtype copy, gathered over `fsdp`; 0 where the masters serve.
        accumulator_bytes: Unreduced float32 gradients.
        kept_bytes_per_part: What one microbatch (or part of one) keeps from forward to backward.
        in_flight: How many of them do so at once.
        waiting_bytes: Boundary values that have arrived and wait.
        workspace_bytes: Temporaries of the largest segment, or of the reduction at the end of the step.
        comes_and_goes: Copy and accumulators are there only while the stage runs; the reduced shard of the
            gradients stays.
        reduced_bytes: That shard.
        host_bytes: State in host memory.
        host_kept_bytes_per_part: What one part keeps in host memory from forward to backward.
    """

    master_bytes: Number
    optimizer_bytes: Number
    copy_bytes: Number
    accumulator_bytes: Number
    kept_bytes_per_part: Number
    in_flight: int
    waiting_bytes: Number
    workspace_bytes: Number
    comes_and_goes: bool = False
    reduced_bytes: Number = 0.0
    host_bytes: Number = 0.0
    host_kept_bytes_per_part: Number = 0.0

    @property
    def static_bytes(self) -> Number:
        """What stays for the whole step."""
        stays = self.master_bytes + self.optimizer_bytes + self.reduced_bytes
        return stays if self.comes_and_goes else stays + self.copy_bytes + self.accumulator_bytes

    @property
    def total_bytes(self) -> Number:
        """Peak, were the member alone on its devices."""
        kept = self.in_flight * self.kept_bytes_per_part + 2 * self.host_kept_bytes_per_part
        passing = self.copy_bytes + self.accumulator_bytes if self.comes_and_goes else 0.0
        return self.static_bytes + passing + kept + self.waiting_bytes + self.workspace_bytes


def member_memory(
    segments: Sequence[SegmentLike],
    group: Group,
    *,
    rows: int,
    axes: Mapping[str, int],
    remat: Sequence[str],
    in_flight: int,
    waiting_bytes: Number = 0.0,
    residency: str = "resident",
    state_share: Number = 1.0,
) -> Memory:
    """Bytes per device of a member.

    Args:
        segments: Of its stage.
        group: Where it runs.
        rows: Rows that the member handles at once.
        axes: Sizes of `dp`, `fsdp`, `tp`.
        remat: Policy of each segment.
        in_flight: Parts between forward and backward at once.
        waiting_bytes: Boundary values that have arrived before they are used.
        residency: As in `plan.Member`.
        state_share: Share of the stage's state that is on this member.
    """
    tp, fsdp = axes.get("tp", 1), axes.get("fsdp", 1)
    size = DTYPE_BYTES[group.dtype] / 4
    local_rows = -(-rows // (axes.get("dp", 1) * fsdp))
    params = float(sum(s.param_bytes for s in segments))
    master = params / (fsdp * tp)
    optimizer = sum(s.num_params for s in segments) * ADAM_BYTES_PER_PARAM / (fsdp * tp)
    if residency == "sharded":
        # Over all devices of the member, also those that `dp` would give replicas.
        master, optimizer = (x * state_share / axes.get("dp", 1) for x in (master, optimizer))
    needs_copy = size < 1 or fsdp > 1 or residency != "resident"
    per_row = local_rows * size / tp
    kept = sum(kept_per_row(s, r) for s, r in zip(segments, remat, strict=True)) * per_row
    on_host = sum(kept_per_row(s, "full") for s, r in zip(segments, remat, strict=True) if r == "offloaded")
    temporaries = max((kept_per_row(s, "none") + 2 * s.boundary_bytes_per_row for s in segments), default=0.0)
    offloaded = residency == "offloaded"
    passing = residency in ("gathered", "offloaded")
    return Memory(
        master_bytes=0.0 if offloaded else master,
        optimizer_bytes=0.0 if offloaded else optimizer,
        copy_bytes=params / tp * size if needs_copy else 0.0,
        accumulator_bytes=params / tp,
        kept_bytes_per_part=kept,
        in_flight=in_flight,
        waiting_bytes=waiting_bytes,
        workspace_bytes=max(temporaries * per_row, params / (fsdp * tp)),
        comes_and_goes=passing,
        reduced_bytes=params / (fsdp * tp) if residency == "gathered" else 0.0,
        host_bytes=master + optimizer + params / (fsdp * tp) if offloaded else 0.0,
        host_kept_bytes_per_part=on_host * per_row,
    )


def kept_per_row(segment: SegmentLike, remat: str) -> Number:
    """Bytes per row kept on the device under a policy.

    A policy that the program does not list counts as `none`, the most.
    """
    if remat == "offloaded":
        return 0.0
    table = segment.activation_bytes_per_row
    return table.get(remat, table.get("none", 0.0))


def state_share(stage: Stage, member: Member) -> Number:
    """Share of a stage's state that one member keeps: all of it unless residency is `sharded`."""
    if member.residency != "sharded":
        return 1.0
    if member.state_share is not None:
        return member.state_share
    return len(member.devices) / sum(len(m.devices) for m in stage.members)


def share_state(plan: Plan, program: ProgramLike) -> Plan:
    """The plan with the state of its `sharded` stages divided by what is free on each member's devices."""
    if not any(m.residency == "sharded" for stage in plan.stages for m in stage.members):
        return plan
    memory = plan_memory(plan, program)
    stages = []
    for s, stage in enumerate(plan.stages):
        if all(m.residency == "sharded" for m in stage.members):
            free = []
            for k, member in enumerate(stage.members):
                capacity = plan.cluster.group(member.group).memory_bytes
                own = memory[s, k]
                other = own.total_bytes - own.master_bytes - own.optimizer_bytes
                room = own.total_bytes if capacity is None else capacity - other
                free.append(max(room, 0.0) * len(member.devices))
            total = sum(free) or 1.0
            members = tuple(
                dataclasses.replace(m, state_share=float(f / total))
                for m, f in zip(stage.members, free, strict=True)
            )
            stage = dataclasses.replace(stage, members=members)
        stages.append(stage)
    return dataclasses.replace(plan, stages=tuple(stages))


def plan_memory(plan: Plan, program: ProgramLike) -> dict[Unit, Memory]:
    """Bytes per device of each (stage, member) of a plan, by the schedule's stated bounds."""
    segments = program.segments()
    crossing = stage_edges(plan, program.edges())
    graph = plan.graph(crossing)
    bounds = in_flight_bounds(plan.schedule, graph, plan.num_microbatches)
    waiting = _waiting_bytes(plan, graph, crossing, bounds)
    return {
        (s, k): member_memory(
            segments[slice(*stage.segments)],
            plan.cluster.group(member.group),
            rows=member.part_rows,
            axes=member.axes,
            remat=member.remat,
            in_flight=bounds.unit[s][k],
            waiting_bytes=waiting[s, k],
            residency=member.residency,
            state_share=state_share(stage, member),
        )
        for s, stage in enumerate(plan.stages)
        for k, member in enumerate(stage.members)
    }


def _waiting_bytes(
    plan: Plan, graph: StageGraph, crossing: Mapping[tuple[int, int], Number], bounds: Bounds
) -> dict[Unit, Number]:
    """Boundary values that have arrived and wait for their task, per device.

    Inputs: as many as the producer may run ahead, and one on its way. Cotangents: two, since a backward that
    can run soon does; under `gpipe` and `ministage` all. A member with activations in host memory lets both
    wait there too, but for the next.
    """
    all_wait = plan.schedule in ("gpipe", "ministage")
    result = dict.fromkeys(graph.units(), 0.0)
    for a in graph.units():
        one = plan.stages[a[0]].members[a[1]]
        dtype = plan.cluster.group(one.group).dtype
        for b in graph.consumers(*a):
            two = plan.stages[b[0]].members[b[1]]
            common = min(one.rows[1], two.rows[1]) - max(one.rows[0], two.rows[0])
            num_bytes = crossing[a[0], b[0]] * common * DTYPE_BYTES[dtype] / 4
            part = max(1 / one.splits, 1 / two.splits)
            in_a, in_b = bounds.unit[a[0]][a[1]] / one.splits, bounds.unit[b[0]][b[1]] / two.splits
            inputs = part if "offloaded" in two.remat else max(in_a - in_b, 0.0) + part
            cotangents = in_a if all_wait and "offloaded" not in one.remat else 2 * part
            result[b] += inputs * num_bytes / (two.axis("dp") * two.axis("fsdp"))
            result[a] += cotangents * num_bytes / (one.axis("dp") * one.axis("fsdp"))
    return result


def device_memory(plan: Plan, program: ProgramLike) -> dict[tuple[str, int], Number]:
    """Peak bytes of each used device of a plan; see `Plan.device_memory`."""
    memory = plan_memory(plan, program)
    graph = plan.graph(stage_edges(plan, program.edges()))
    bounds = in_flight_bounds(plan.schedule, graph, plan.num_microbatches)
    on_device: dict[tuple[str, int], list[Unit]] = {}
    for s, stage in enumerate(plan.stages):
        for k, member in enumerate(stage.members):
            for device in member.devices:
                on_device.setdefault((member.group, device), []).append((s, k))
    known: dict[tuple[Unit, ...], Number] = {}
    for units in map(tuple, on_device.values()):
        if units not in known:
            lane = bounds.lane[graph.lanes[units[0][0]][units[0][1]]]
            known[units] = _shared_bytes(
                [memory[u] for u in units], [bounds.unit[s][k] for s, k in units], lane
            )
    return {device: known[tuple(units)] for device, units in on_device.items()}


def _shared_bytes(members: Sequence[Memory], in_flight: Sequence[int], lane_bound: int) -> Number:
    """Peak bytes of one device that runs several members, in order of their stages."""
    static = sum(m.static_bytes for m in members) + max(m.workspace_bytes for m in members)
    # Of what goes to the host, one part is being made or used while another is on its way.
    static += 2 * max(m.host_kept_bytes_per_part for m in members)
    passing = [(m.copy_bytes, m.accumulator_bytes) if m.comes_and_goes else (0.0, 0.0) for m in members]
    for sizes in zip(*passing, strict=True):
        static += max(sum(sizes[i : i + 2]) for i in range(len(sizes)))
    left, kept = lane_bound, 0.0
    for m, bound in sorted(zip(members, in_flight, strict=True), key=lambda x: -x[0].kept_bytes_per_part):
        count = min(left, bound)
        kept += count * m.kept_bytes_per_part
        left -= count
    return static + kept + sum(m.waiting_bytes for m in members)
