"""Reading a plan that a person may have written, and saying what is wrong with one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from hetjax import cost
from hetjax.cluster import GIB, Cluster
from hetjax.errors import UserError
from hetjax.plan import AXES, BACKWARDS, FORMAT, RESIDENCIES, SCHEDULES, Member, Plan, Stage


def check_plan(plan: Plan, program: cost.ProgramLike | None) -> None:
    """Verify everything that can be told without devices; see `Plan.check`."""
    _check_order(plan)
    for number, stage in enumerate(plan.stages):
        _check_stage(plan, number, stage)
    if program is not None:
        _check_program(plan, program)
        _check_memory(plan, program)


def _fields(
    data: Any, where: str, required: Mapping[str, type], optional: Mapping[str, type | tuple[type, ...]]
) -> dict[str, Any]:
    """A JSON object with exactly these keys of these types."""
    if not isinstance(data, dict):
        raise UserError(f"{where} has to be a JSON object, and is {data!r:.60}.")
    allowed = {**required, **optional}
    for key, value in data.items():
        if key not in allowed:
            raise UserError(f"{where}: unknown key {key!r}. Allowed: {', '.join(allowed)}.")
        if not isinstance(value, allowed[key]) or isinstance(value, bool):
            kinds = allowed[key]
            names = " or ".join(k.__name__ for k in (kinds if isinstance(kinds, tuple) else (kinds,)))
            raise UserError(f"{where}: {key} has to be of type {names}, and is {value!r:.60}.")
    missing = [key for key in required if key not in data]
    if missing:
        raise UserError(f"{where}: key {missing[0]!r} is missing.")
    return data


def _ints(value: list[Any], where: str, length: int | None = None) -> tuple[int, ...]:
    good = all(isinstance(v, int) and not isinstance(v, bool) for v in value)
    if not good or (length is not None and len(value) != length):
        count = "" if length is None else f"{length} "
        raise UserError(f"{where} has to be a list of {count}integers, and is {value!r:.60}.")
    return tuple(value)


def read_plan(data: Any, origin: str) -> Plan:
    """A validated plan from parsed JSON; see `Plan.from_json`."""
    required = {
        "num_segments": int,
        "global_batch": int,
        "num_microbatches": int,
        "schedule": str,
        "stages": list,
    }
    optional = {"format": str, "predicted": dict, "fingerprint": str, "ahead": int, "backward": str}
    data = _fields(data, origin, {**required, "cluster": dict}, optional)
    if data.get("format", FORMAT) != FORMAT:
        raise UserError(
            f"{origin}: format is {data['format']!r}, and this version reads {FORMAT!r}. Make the plan anew."
        )
    plan = Plan(
        cluster=Cluster.from_dict({"name": "plan", **data["cluster"]}, origin=f"{origin}: cluster"),
        fingerprint=data.get("fingerprint", ""),
        stages=tuple(
            _read_stage(s, f"{origin}: stages[{i}]", data["num_segments"])
            for i, s in enumerate(data["stages"])
        ),
        ahead=data.get("ahead", 0),
        backward=data.get("backward", "whole"),
        predicted=data.get("predicted", {}),
        **{k: data[k] for k in required if k != "stages"},
    )
    try:
        plan.check()
    except UserError as error:
        raise UserError(f"{origin}: {error}") from None
    try:
        str(plan)
    except (TypeError, KeyError, ValueError, AttributeError, ArithmeticError, UserError):
        raise UserError(
            f"{origin}: predicted does not hold what the planner writes there. Nothing is computed from it: "
            "remove it."
        ) from None
    return plan


def _read_stage(data: Any, where: str, num_segments: int) -> Stage:
    data = _fields(data, where, {"segments": list, "members": list}, {"fuse": int})
    start, stop = _ints(data["segments"], f"{where}.segments", 2)
    members = tuple(
        _read_member(m, f"{where}.members[{k}]", min(max(stop - start, 0), max(num_segments, 0)))
        for k, m in enumerate(data["members"])
    )
    return Stage(segments=(start, stop), members=members, fuse=data.get("fuse", 1))


def _read_member(data: Any, where: str, num_segments: int) -> Member:
    if isinstance(data, dict) and isinstance(data.get("remat", "dots"), str):
        data = {**data, "remat": [data.get("remat", "dots")] * num_segments}
    required = {"group": str, "devices": list, "axes": dict, "rows": list}
    optional = {"remat": list, "residency": str, "seconds": list, "splits": int, "state_share": (int, float)}
    data = _fields(data, where, required, optional)
    for policy in data["remat"]:
        if not isinstance(policy, str):
            raise UserError(
                f"{where}.remat has to name one policy, or one for each segment; it has {policy!r}."
            )
    seconds = data.get("seconds")
    if seconds is not None and (
        len(seconds) != 2 or not all(type(x) in (int, float) and 0 <= x < 1e9 for x in seconds)
    ):
        raise UserError(f"{where}.seconds has to be the seconds of F and of B, and is {seconds!r:.60}.")
    start, stop = _ints(data["rows"], f"{where}.rows", 2)
    return Member(
        group=data["group"],
        devices=_ints(data["devices"], f"{where}.devices"),
        axes={axis: _ints([size], f"{where}.axes.{axis}", 1)[0] for axis, size in data["axes"].items()},
        rows=(start, stop),
        remat=tuple(data["remat"]),
        residency=data.get("residency", "resident"),
        splits=data.get("splits", 1),
        state_share=data.get("state_share"),
        seconds=None if seconds is None else (float(seconds[0]), float(seconds[1])),
    )


def _check_order(plan: Plan) -> None:
    if plan.schedule not in SCHEDULES:
        raise UserError(f"schedule is {plan.schedule!r}. Allowed: {', '.join(SCHEDULES)}.")
    if plan.ahead < 0:
        raise UserError(f"ahead is {plan.ahead}. It has to be 0 or more.")
    if plan.backward not in BACKWARDS:
        raise UserError(f"backward is {plan.backward!r}. Allowed: {', '.join(BACKWARDS)}.")
    if plan.global_batch < 1 or plan.num_microbatches < 1 or plan.global_batch % plan.num_microbatches:
        largest = min(plan.global_batch, 10_000)
        fits = [m for m in range(1, largest + 1) if plan.global_batch % m == 0][:12]
        raise UserError(
            f"num_microbatches is {plan.num_microbatches} and has to divide global_batch, which is "
            f"{plan.global_batch}. Allowed: "
            f"{', '.join(map(str, fits))}{', ...' if len(fits) == 12 else ''}."
        )
    if not plan.stages:
        raise UserError("stages is empty. A plan needs at least one stage.")
    expected = 0
    for number, stage in enumerate(plan.stages):
        start, stop = stage.segments
        if stop <= start:
            raise UserError(
                f"Stage {number} has segments [{start}, {stop}], which holds none. Remove it or widen it."
            )
        if start > expected:
            raise UserError(
                f"Segment {expected} is on no stage: stage {number} starts at {start}. Start it at "
                f"{expected}."
            )
        if start < expected:
            raise UserError(
                f"Segment {start} is placed twice: stage {number} starts at {start}, and the stages before "
                f"it end at {expected}. Stages are listed in model order, each starting where the one "
                "before stops."
            )
        expected = stop
    if expected < plan.num_segments:
        raise UserError(
            f"Segment {expected} is on no stage: the last stage ends at {expected} of {plan.num_segments} "
            "segments."
        )
    if expected > plan.num_segments:
        raise UserError(
            f"The last stage ends at segment {expected}, and there are only {plan.num_segments} segments."
        )


def _check_stage(plan: Plan, number: int, stage: Stage) -> None:
    if stage.fuse < 1:
        raise UserError(f"Stage {number} has fuse {stage.fuse}. It has to be 1 or more.")
    if not stage.members:
        raise UserError(f"Stage {number} has no members. A stage needs a member that runs it.")
    expected = 0
    for k, member in enumerate(stage.members):
        who = f"Stage {number}, member {k} (group {member.group!r})"
        group = plan.cluster.group(member.group)
        bad = [d for d in member.devices if not 0 <= d < group.num_devices]
        if bad or len(set(member.devices)) != len(member.devices) or not member.devices:
            raise UserError(
                f"{who} lists devices {list(member.devices)}. It needs at least one, each once, of 0 to "
                f"{group.num_devices - 1}."
            )
        unknown = [a for a in member.axes if a not in AXES]
        if unknown:
            raise UserError(f"{who} has axis {unknown[0]!r}. Allowed: {', '.join(AXES)}.")
        if math.prod(member.axes.values()) != len(member.devices) or min(member.axes.values(), default=1) < 1:
            axes = " x ".join(f"{a}={n}" for a, n in member.axes.items()) or "no axes"
            raise UserError(
                f"{who} lists {len(member.devices)} devices, and {axes} needs "
                f"{math.prod(member.axes.values())}. The product of the axes has to equal the device "
                "count. Change one of them."
            )
        start, stop = member.rows
        if start != expected or stop <= start:
            raise UserError(
                f"{who} has rows [{start}, {stop}], and has to start at {expected} with at least one row. "
                f"The members of a stage share the microbatch's {plan.microbatch_rows} rows in order, "
                "without gaps."
            )
        if not 1 <= member.splits <= member.num_rows:
            raise UserError(
                f"{who} has splits {member.splits}. It has to be between 1 and its rows of a microbatch, "
                f"{member.num_rows}."
            )
        shards = member.axis("dp") * member.axis("fsdp")
        if member.num_rows % shards and member.splits == 1:
            raise UserError(
                f"{who} has {member.num_rows} rows, and dp={member.axis('dp')} x "
                f"fsdp={member.axis('fsdp')} splits them into {shards} parts. "
                f"Give it a multiple of {shards} rows, or fewer devices."
            )
        expected = stop
        if len(member.remat) != stage.num_segments:
            raise UserError(
                f"{who} lists {len(member.remat)} remat policies for {stage.num_segments} segments. Give "
                "one for each."
            )
        fused = [set(member.remat[a : a + stage.fuse]) for a in range(0, stage.num_segments, stage.fuse)]
        mixed = next((policies for policies in fused if len(policies) > 1), None)
        if mixed:
            raise UserError(
                f"{who} has the remat policies {', '.join(sorted(mixed))} for segments that fuse = "
                f"{stage.fuse} compiles as one. Give them one policy, or set fuse to 1."
            )
        if member.residency not in RESIDENCIES:
            raise UserError(f"{who} has residency {member.residency!r}. Allowed: {', '.join(RESIDENCIES)}.")
        if member.state_share is not None and not 0 <= member.state_share <= 1:
            raise UserError(f"{who} has state_share {member.state_share}. It is a share, between 0 and 1.")
    _check_apart(number, stage)
    shares = [m.state_share for m in stage.members if m.state_share is not None]
    if shares and (len(shares) < len(stage.members) or abs(sum(shares) - 1) > 1e-6):
        raise UserError(
            f"The members of stage {number} have state_share {', '.join(map(str, shares))}. Give one to each "
            "of them, with the sum 1, or to none."
        )
    if expected != plan.microbatch_rows:
        raise UserError(
            f"Stage {number} covers rows 0 to {expected} of a microbatch of {plan.microbatch_rows} "
            f"(global_batch {plan.global_batch} / num_microbatches {plan.num_microbatches}). Change the "
            "rows or num_microbatches."
        )


def _check_apart(number: int, stage: Stage) -> None:
    """The members of a stage run at once, so each has devices of its own."""
    owner: dict[tuple[str, int], int] = {}
    for k, member in enumerate(stage.members):
        for device in member.devices:
            other = owner.setdefault((member.group, device), k)
            if other != k:
                raise UserError(
                    f"Stage {number}, members {other} and {k} both list device {device} of group "
                    f"{member.group!r}. The members of a stage run at once: give each devices of its own, or "
                    "one of them the rows of both."
                )


def _check_program(plan: Plan, program: cost.ProgramLike) -> None:
    if plan.num_segments != program.num_segments:
        raise UserError(
            f"The plan is for {plan.num_segments} segments, and the program has {program.num_segments}. "
            "Make it anew."
        )
    if plan.fingerprint and plan.fingerprint != program.fingerprint:
        raise UserError(
            f"The plan was made for another program (fingerprint {plan.fingerprint}, this one is "
            f"{program.fingerprint}). Make it anew, or remove the plan's fingerprint if you know that it "
            "fits."
        )
    if plan.global_batch != program.global_batch:
        raise UserError(
            f"The plan is for a global batch of {plan.global_batch} rows, and the program has "
            f"{program.global_batch}."
        )
    policies = {p for stage in plan.stages for m in stage.members for p in m.remat}
    if policies - {"none", "full", "dots", "offloaded"}:
        from hetjax.segments import checkpoint_policy  # JAX, which a plan of the planner does without

        for policy in sorted(policies - {"offloaded"}):
            checkpoint_policy(policy)
    if program.rows_mode == "whole":
        parts = [m.axis("dp") * m.axis("fsdp") for stage in plan.stages for m in stage.members]
        if (
            plan.num_microbatches > 1
            or max(parts) > 1
            or any(len(stage.members) > 1 for stage in plan.stages)
        ):
            raise UserError(
                "The program mixes the rows of a batch (rows='whole'), so its rows cannot be split: "
                "num_microbatches, dp and fsdp have to be 1, and each stage needs exactly one member."
            )


def _check_memory(plan: Plan, program: cost.ProgramLike) -> None:
    worst: tuple[float, str] | None = None
    for (name, device), need in plan.device_memory(program).items():
        have = plan.cluster.group(name).memory_bytes
        if have is not None and need > have and (worst is None or need - have > worst[0]):
            text = (
                f"Device {device} of group {name!r} needs about {need / GIB:.1f} GiB and has "
                f"{have / GIB:.1f} GiB ({(need - have) / GIB:.1f} GiB too much)."
            )
            worst = need - have, text
    if worst is not None:
        raise UserError(
            f"{worst[1]} Move segments to another group, use remat 'full', more microbatches or fsdp; or "
            "raise memory_gib if the cluster file understates it."
        )
