"""What the tasks of a plan cost: seconds, messages and bytes, as the simulator plays them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from hetjax.cluster import Link
from hetjax.cost import Costs, ProgramLike
from hetjax.devices import DTYPE_BYTES, Number
from hetjax.graph import Unit, stage_edges, stage_of_segment
from hetjax.memory import Memory, state_share
from hetjax.plan import WEIGHT_SHARE, Member, Plan, Stage


@dataclasses.dataclass(frozen=True)
class Message:
    """What one member sends to another.

    Attributes:
        channel: Messages with the same channel go one after the other.
        link: What they go over.
        num_bytes: Size; of boundary values, of all rows of a microbatch that the two have in common.
    """

    channel: tuple[object, object]
    link: Link
    num_bytes: Number


@dataclasses.dataclass(frozen=True)
class Workload:
    """Everything that the tasks of a schedule cost.

    Attributes:
        seconds: By (op, stage, member).
        recompute_s: Part of a member's `B` that repeats the forward.
        forward: Message from producer to consumer, one a microbatch; none where they share their devices.
        backward: The same in the other direction, keyed (consumer, producer).
        reductions: Sent after a member's `R`: to the other members of its stage, to the owner of tied
            parameters.
        updates: Sent after a member's `U`: from the owner of tied parameters to a reader.
        barrier_s: Between the last reduction and the first update: the global norm goes round.
        memory: Bytes per device of each member.
        input_bytes: Per device, of one microbatch's inputs from another member, keyed as `forward`.
        cotangent_bytes: Per device, of one microbatch's cotangents, keyed as `backward`.
        host_copy_s: Copy of what one part keeps in host memory, out after `F` and back before `B`.
    """

    seconds: Mapping[tuple[str, int, int], Number]
    recompute_s: Mapping[Unit, Number] = dataclasses.field(default_factory=dict)
    forward: Mapping[tuple[Unit, Unit], Message] = dataclasses.field(default_factory=dict)
    backward: Mapping[tuple[Unit, Unit], Message] = dataclasses.field(default_factory=dict)
    reductions: Mapping[Unit, Sequence[Message]] = dataclasses.field(default_factory=dict)
    updates: Mapping[Unit, Sequence[Message]] = dataclasses.field(default_factory=dict)
    barrier_s: Number = 0.0
    memory: Mapping[Unit, Memory] = dataclasses.field(default_factory=dict)
    input_bytes: Mapping[tuple[Unit, Unit], Number] = dataclasses.field(default_factory=dict)
    cotangent_bytes: Mapping[tuple[Unit, Unit], Number] = dataclasses.field(default_factory=dict)
    host_copy_s: Mapping[Unit, Number] = dataclasses.field(default_factory=dict)


def member_seconds(plan: Plan, program: ProgramLike, costs: Costs) -> dict[tuple[str, int, int], Number]:
    """Seconds of every (op, stage, member); of `F` and `B`, of one part."""
    segments = program.segments()
    result: dict[tuple[str, int, int], Number] = {}
    for s, stage in enumerate(plan.stages):
        inside = segments[slice(*stage.segments)]
        params = float(sum(x.param_bytes for x in inside))
        for k, member in enumerate(stage.members):
            group, axes, rows = plan.cluster.group(member.group), member.axes, member.part_rows
            result["F", s, k] = sum(costs.forward_s(x, group, rows, axes) for x in inside)
            result["B", s, k] = sum(
                costs.backward_s(x, group, rows, axes, r) for x, r in zip(inside, member.remat, strict=True)
            )
            if plan.weight_share(member):
                result["W", s, k] = WEIGHT_SHARE * sum(
                    costs.backward_s(x, group, rows, axes, r)
                    for x, r in zip(inside, member.remat, strict=True)
                    if r == "none"
                )
                result["B", s, k] -= result["W", s, k]
            result["R", s, k] = costs.reduce_s(params, group, axes)
            result["G", s, k] = costs.gather_s(params, group, axes)
            result["U", s, k] = costs.update_s(params * state_share(stage, member), group, axes)
            if member.residency == "offloaded":
                shard = params / (member.axis("tp") * member.axis("fsdp"))
                result["G", s, k] += costs.offload_s(shard * DTYPE_BYTES[group.dtype] / 4, group)
                result["R", s, k] += costs.offload_s(shard, group)
                # Masters and two moments in and out again; the copies of one direction hide the other's.
                result["U", s, k] = max(result["U", s, k], costs.offload_s(3 * shard, group))
    return result


def _pair(seconds: Mapping[tuple[str, int, int], Number], stage: int, member: int) -> tuple[float, float]:
    """`F` and the whole backward."""
    backward = seconds["B", stage, member] + seconds.get(("W", stage, member), 0.0)
    return float(seconds["F", stage, member]), float(backward)


def timed(plan: Plan, program: ProgramLike, costs: Costs) -> Plan:
    """The plan with each member's expected seconds, by which its schedule orders the tasks."""
    seconds = member_seconds(plan, program, costs)
    stages = tuple(
        dataclasses.replace(
            stage,
            members=tuple(
                dataclasses.replace(m, seconds=_pair(seconds, s, k)) for k, m in enumerate(stage.members)
            ),
        )
        for s, stage in enumerate(plan.stages)
    )
    return dataclasses.replace(plan, stages=stages)


def workload(plan: Plan, program: ProgramLike, costs: Costs) -> Workload:
    """What the tasks of a plan cost."""
    segments = program.segments()
    forward, backward, inputs, cotangents = _boundaries(plan, program)
    memory = plan.member_memory(program)
    recompute, host_copy = {}, {}
    for s, stage in enumerate(plan.stages):
        for k, member in enumerate(stage.members):
            group = plan.cluster.group(member.group)
            recompute[s, k] = sum(
                costs.recompute_s(x, group, member.part_rows, member.axes, r)
                for x, r in zip(segments[slice(*stage.segments)], member.remat, strict=True)
            )
            if memory[s, k].host_kept_bytes_per_part:
                host_copy[s, k] = costs.offload_s(memory[s, k].host_kept_bytes_per_part, group)
    used = sorted({m.group for stage in plan.stages for m in stage.members})
    latencies = [plan.cluster.link(a, b).latency_us for a in used for b in used if a != b]
    reductions, updates = _end_of_step(plan, program)
    return Workload(
        seconds=member_seconds(plan, program, costs),
        recompute_s=recompute,
        forward=forward,
        backward=backward,
        reductions=reductions,
        updates=updates,
        barrier_s=2e-6 * max(latencies, default=0.0),
        memory=memory,
        input_bytes=inputs,
        cotangent_bytes=cotangents,
        host_copy_s=host_copy,
    )


def _message(plan: Plan, a: Unit, b: Unit, num_bytes: Number) -> Message | None:
    """From one member to another; None where both are on the same devices."""
    one, two = plan.stages[a[0]].members[a[1]], plan.stages[b[0]].members[b[1]]
    if (one.group, one.devices) == (two.group, two.devices):
        return None
    same = one.group == two.group
    channel = ((one.group, one.devices), (two.group, two.devices)) if same else (one.group, two.group)
    link = plan.cluster.link_between(one.group, one.devices, two.group, two.devices)
    return Message(channel, link, num_bytes)


def _boundaries(
    plan: Plan, program: ProgramLike
) -> tuple[
    dict[tuple[Unit, Unit], Message],
    dict[tuple[Unit, Unit], Message],
    dict[tuple[Unit, Unit], Number],
    dict[tuple[Unit, Unit], Number],
]:
    """Forward and backward messages, and the bytes per device that they fill where they arrive.

    Where activations go to host memory, so do boundary values that wait: there is room for the next alone,
    which the member's memory counts.
    """
    forward: dict[tuple[Unit, Unit], Message] = {}
    backward: dict[tuple[Unit, Unit], Message] = {}
    inputs: dict[tuple[Unit, Unit], Number] = {}
    cotangents: dict[tuple[Unit, Unit], Number] = {}
    for (s, t), per_row in stage_edges(plan, program.edges()).items():
        for k, a in enumerate(plan.stages[s].members):
            for j, b in enumerate(plan.stages[t].members):
                num_rows = min(a.rows[1], b.rows[1]) - max(a.rows[0], b.rows[0])
                if num_rows <= 0:
                    continue
                # A value keeps its producer's dtype, and its cotangent has the same.
                size = per_row * num_rows * DTYPE_BYTES[plan.cluster.group(a.group).dtype] / 4
                there, back = _message(plan, (s, k), (t, j), size), _message(plan, (t, j), (s, k), size)
                if there is not None and back is not None:
                    forward[(s, k), (t, j)] = there
                    backward[(t, j), (s, k)] = back
                    if "offloaded" not in b.remat:
                        inputs[(s, k), (t, j)] = size / (b.axis("dp") * b.axis("fsdp"))
                    if "offloaded" not in a.remat:
                        cotangents[(t, j), (s, k)] = size / (a.axis("dp") * a.axis("fsdp"))
    return forward, backward, inputs, cotangents


def _end_of_step(
    plan: Plan, program: ProgramLike
) -> tuple[dict[Unit, list[Message]], dict[Unit, list[Message]]]:
    """Gradients between the members of a stage; gradients and values of tied parameters."""
    segments = program.segments()
    reductions: dict[Unit, list[Message]] = {}
    updates: dict[Unit, list[Message]] = {}

    def add(table: dict[Unit, list[Message]], a: Unit, b: Unit, num_bytes: Number) -> None:
        message = _message(plan, a, b, num_bytes)
        if message is not None:
            table.setdefault(a, []).append(message)

    for s, stage in enumerate(plan.stages):
        n = len(stage.members)
        params = float(sum(x.param_bytes for x in segments[slice(*stage.segments)]))
        for k in range(n if n > 1 else 0):
            after, later = _exchange(plan, stage, stage.members[k], params)
            add(reductions, (s, k), (s, (k + 1) % n), after)
            if later:
                add(updates, (s, k), (s, (k + 1) % n), later)
    stage_of = stage_of_segment(plan)
    for owner, reader, num_bytes in program.tied:
        a, b = stage_of[owner], stage_of[reader]
        if a != b:
            add(reductions, (b, 0), (a, 0), num_bytes)
            for k in range(len(plan.stages[b].members)):
                add(updates, (a, 0), (b, k), num_bytes)
    return reductions, updates


def _exchange(plan: Plan, stage: Stage, member: Member, params: Number) -> tuple[Number, Number]:
    """Bytes that a member passes on in a ring of the stage's members: of gradients, of updated parameters."""
    ring = (len(stage.members) - 1) / len(stage.members)
    if member.residency != "sharded":
        return 2 * ring * params, 0.0
    # Each value is summed where its state is, and its new value goes to the others.
    return ring * params, ring * params * DTYPE_BYTES[plan.cluster.group(member.group).dtype] / 4
