"""A plan on real devices: submeshes, units with their executables, who owns and who reads each parameter."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from hetjax import jaxprs
from hetjax.compile import UnitExecutables, UnitSetting, compiled, offsets, row_dim
from hetjax.errors import UserError
from hetjax.flat import Data, Flat, Piece, Unit, lift_literals
from hetjax.graph import stage_of_segment
from hetjax.optimizer import Pieces, UpdateUnit
from hetjax.plan import Member, Plan
from hetjax.program import Program
from hetjax.sharding import Submesh, compute_spec, logical_names, make_submesh, stored_spec
from hetjax.transfer import Layout


@dataclasses.dataclass(frozen=True, eq=False)
class Place:
    """A submesh that members share, with what is resident on it.

    Attributes:
        index: Its number.
        group: The group's name.
        submesh: The devices.
        dtype: Compute dtype of the group.
    """

    index: int
    group: str
    submesh: Submesh
    dtype: str


@dataclasses.dataclass(frozen=True, eq=False)
class UnitRun:
    """A unit on a member: the function and what it is given.

    Attributes:
        unit: What is computed.
        functions: Its executables.
        data: For each of `unit.data`: a batch leaf's index, or the placed array.
        moving_params: The pieces that get a gradient, in order.
    """

    unit: Unit
    functions: UnitExecutables
    data: tuple[Data | jax.Array, ...]
    moving_params: tuple[Piece, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class MemberRun:
    """A member of a stage on its place.

    Attributes:
        stage: Stage number.
        member: Member number.
        place: Where.
        rows: Start and stop in the microbatch.
        shard_rows: Rows of one shard.
        shards: Start and stop of each shard's rows.
        units: What it runs, in order.
        offset: Index of each shard's first row, placed.
        flat: The trace that the units are of.
    """

    stage: int
    member: int
    place: Place
    rows: tuple[int, int]
    shard_rows: int
    shards: tuple[tuple[int, int], ...]
    units: tuple[UnitRun, ...]
    offset: jax.Array
    flat: Flat

    def layout(self, value: int) -> Layout:
        """How a boundary value lies here."""
        row = row_dim(self.flat.values[value].follows)
        return Layout(self.place.submesh, row.dim if row else None, row.inner if row else 1, self.shards)

    def dtype(self, value: int) -> str:
        """Dtype of a boundary value here."""
        return str(self.flat.values[value].var.aval.dtype)


class Placement:
    """Everything about a plan that does not change from step to step."""

    def __init__(self, program: Program, plan: Plan, devices: Mapping[str, Sequence[jax.Device]]) -> None:
        """Build submeshes and executables (compiled at first use).

        Args:
            program: The model.
            plan: Checked against the program.
            devices: The devices of each group, in order.

        Raises:
            UserError: The plan needs what the model or the devices can't give.
        """
        self.program, self.plan, self.devices = program, plan, devices
        self.names = logical_names(program.params_spec)
        self.places: list[Place] = []
        self._place_of: dict[Any, Place] = {}
        self._constants: dict[Any, jax.Array] = {}
        self._reads: dict[bool, dict[int, dict[Piece, None]]] = {}
        self.stage_of_segment = stage_of_segment(plan)
        self.members = {
            (s, k): self._place(member)
            for s, stage in enumerate(plan.stages)
            for k, member in enumerate(stage.members)
        }
        self._check_tensor_axes()
        self._check_rows_mode()
        self.training = self._runs(training=True)
        self._check_layouts()
        self._own()

    # ---- places ----

    def _place(self, member: Member) -> Place:
        key = (member.group, tuple(member.devices), *(member.axis(a) for a in ("dp", "fsdp", "tp")))
        if key not in self._place_of:
            group = self.plan.cluster.group(member.group)
            chosen = [self.devices[member.group][i] for i in member.devices]
            place = Place(len(self.places), member.group, make_submesh(chosen, member.axes), group.dtype)
            self.places.append(place)
            self._place_of[key] = place
        return self._place_of[key]

    def _check_tensor_axes(self) -> None:
        if any(p.submesh.tp > 1 for p in self.places) and not any(n for names in self.names for n in names):
            raise UserError(
                "The plan has tp > 1 and the model's parameters carry no logical axis names, so every "
                "device would compute the same. Annotate the parameters (nnx.with_partitioning, "
                "nn.with_logical_partitioning) or use dp or fsdp."
            )

    def _check_rows_mode(self) -> None:
        split = (
            self.plan.num_microbatches > 1
            or any(p.submesh.num_shards > 1 for p in self.places)
            or any(len(stage.members) > 1 for stage in self.plan.stages)
        )
        if split and self.program.main.row_model and self.program.main.row_model.inner_draws:
            raise UserError(
                "The model draws random numbers for its rows inside a loop or an inner function, where "
                "hetjax can't give each part its own. Draw them outside (dropout outside lax.scan), or "
                "trace with rows='whole'."
            )

    # ---- runs ----

    def _runs(self, training: bool) -> dict[tuple[int, int], MemberRun]:
        return {
            (s, k): self._member_run(s, k, member, training)
            for s, stage in enumerate(self.plan.stages)
            for k, member in enumerate(stage.members)
        }

    def evaluation_runs(self) -> dict[tuple[int, int], MemberRun]:
        """The members for forward passes without dropout; made at first use."""
        if not hasattr(self, "_evaluation"):
            self._evaluation = self._runs(training=False)
        return self._evaluation

    def reads(self, training: bool) -> dict[int, dict[Piece, None]]:
        """For each place, the pieces that it computes with; evaluation may read others than training."""
        if training not in self._reads:
            found: dict[int, dict[Piece, None]] = {p.index: {} for p in self.places}
            for run in (self.training if training else self.evaluation_runs()).values():
                for unit_run in run.units:
                    found[run.place.index] |= dict.fromkeys(unit_run.unit.params)
            self._reads[training] = found
        return self._reads[training]

    def _member_run(self, s: int, k: int, member: Member, training: bool) -> MemberRun:
        place, stage = self.members[s, k], self.plan.stages[s]
        num_shards = place.submesh.num_shards
        if member.num_rows % num_shards:
            raise UserError(
                f"Member {k} of stage {s} has {member.num_rows} rows for dp x fsdp = {num_shards} shards "
                f"of group '{member.group}'. The rows have to divide evenly: change the rows, the axes or "
                "num_microbatches."
            )
        rows = member.num_rows // num_shards
        flat = self.program.flat(rows, place.dtype, training)
        start, stop = stage.segments
        units = [
            self._unit_run(flat, flat.unit(a, min(a + stage.fuse, stop)), member.remat[a - start], place)
            for a in range(start, stop, stage.fuse)
        ]
        shards = tuple(
            (member.rows[0] + i * rows, member.rows[0] + (i + 1) * rows) for i in range(num_shards)
        )
        offset = self._constant(place, ("offset", member.rows[0], rows))
        return MemberRun(s, k, place, member.rows, rows, shards, tuple(units), offset, flat)

    def _unit_run(self, flat: Flat, unit: Unit, remat: str, place: Place) -> UnitRun:
        whole = self.plan.microbatch_rows
        flatten = place.submesh.tp == 1 and place.submesh.mesh.devices.flat[0].platform == "cpu"
        setting = UnitSetting(place.submesh, remat, whole, flatten)
        trainable = [self.program.trainable(p) for p in unit.params]
        key = ("unit", unit.key, setting, flat.rows, tuple(trainable))
        functions = compiled.get(key, lambda: UnitExecutables(flat, unit, trainable, setting))
        data: list[Data | jax.Array] = []
        for source in unit.data:
            if source.kind == "const":
                data.append(self._constant(place, ("const", flat, source.index)))
            elif source.kind == "literal":
                data.append(self._constant(place, ("literal", source.index, source.dtype)))
            else:
                data.append(source)
        moving = tuple(p for p, t in zip(unit.params, trainable, strict=True) if t)
        return UnitRun(unit, functions, tuple(data), moving)

    def _constant(self, place: Place, key: tuple) -> jax.Array:
        if (place.index, *key) not in self._constants:
            if key[0] == "offset":
                value = offsets(place.submesh, *key[1:])
            elif key[0] == "one":
                value = jax.device_put(np.float32(1), place.submesh.replicated)
            elif key[0] == "literal":
                value = jax.device_put(np.asarray(key[1], key[2]), place.submesh.replicated)
            else:
                value = jax.device_put(key[1].consts[key[2]], place.submesh.replicated)
            self._constants[place.index, *key] = value
        return self._constants[place.index, *key]

    def one(self, place: Place) -> jax.Array:
        """The float32 scalar 1 on a place."""
        return self._constant(place, ("one",))

    def _check_layouts(self) -> None:
        """Refuse unlike shards where a value without a row dim crosses: it belongs to the rows it is of."""
        for number, value in enumerate(self.program.main.values):
            if row_dim(value.follows) is not None:
                continue
            makers = self._shards_of(self.stage_of_segment[value.producer])
            for consumer in value.consumers:
                readers = self._shards_of(self.stage_of_segment[consumer])
                if readers != makers:
                    raise UserError(
                        f"Value {number}, of shape {value.var.aval.shape}, crosses from segment "
                        f"{value.producer} to segment {consumer} and has no dim that follows the rows, so "
                        "it can't be divided anew. Stages of these two segments need equal rows and equal "
                        f"dp x fsdp; they have shards {makers} and {readers}. Change the axes or rows, or "
                        "place a cut where the value has its rows."
                    )

    def _shards_of(self, stage: int) -> list[tuple[int, int]]:
        return [r for (s, _), run in self.training.items() if s == stage for r in run.shards]

    # ---- parameters ----

    def _own(self) -> None:
        """Decide where each piece's master lives."""
        self.owner_place: dict[Piece, Place] = {}
        self.owner_segment: dict[Piece, int] = {}
        for piece in self.program.pieces:
            self.owner_segment[piece] = self.program.owner(piece)
            self.owner_place[piece] = self.members[self.stage_of_segment[self.owner_segment[piece]], 0]

    def piece_names(self, piece: Piece) -> tuple[str | None, ...]:
        """Logical axis names of a piece's dims."""
        names = self.names[piece.leaf]
        return names if piece.axis is None else tuple(n for d, n in enumerate(names) if d != piece.axis)

    def stored_sharding(self, piece: Piece) -> NamedSharding:
        """How a piece's master lies on its owner."""
        submesh = self.owner_place[piece].submesh
        spec = stored_spec(self.program.piece_spec(piece).shape, self.piece_names(piece), submesh)
        return NamedSharding(submesh.mesh, spec)

    def compute_sharding(self, piece: Piece, place: Place) -> NamedSharding:
        """How a piece lies on a place that computes with it."""
        spec = compute_spec(self.program.piece_spec(piece).shape, self.piece_names(piece), place.submesh)
        return NamedSharding(place.submesh.mesh, spec)

    def compute_dtype(self, piece: Piece, place: Place) -> Any:
        """Dtype of a piece where it is computed with."""
        stored = self.program.piece_spec(piece).dtype
        lowered = place.dtype != "float32" and jnp.issubdtype(stored, jnp.floating)
        return jnp.dtype(place.dtype) if lowered else stored

    def update_units(self, optimizer: Pieces) -> list[UpdateUnit]:
        """The trained pieces by owner segment, no two slices of one leaf together."""
        groups: dict[tuple[int, int], list[Piece]] = {}
        for segment in range(self.program.num_segments):
            seen: dict[int, int] = {}
            for piece in self.program.pieces:
                if self.owner_segment[piece] == segment and self.program.trainable(piece):
                    number = seen[piece.leaf] = seen.get(piece.leaf, -1) + 1
                    groups.setdefault((segment, number), []).append(piece)
        return [
            UpdateUnit(
                pieces, optimizer, self.owner_place[pieces[0]].submesh, [self.piece_names(p) for p in pieces]
            )
            for pieces in groups.values()
        ]

    # ---- initialisation ----

    def init_masters(self, seed: int) -> dict[Piece, jax.Array]:
        """Initialise every piece on its owner, without ever making another group's.

        Equal to jit of the whole init. A leaf whose slices several places own is made whole for a moment on
        each of them.
        """
        owned: dict[tuple[int, int], list[Piece]] = {}
        for piece in self.program.pieces:
            owned.setdefault((self.owner_place[piece].index, piece.leaf), []).append(piece)
        slicer = jaxprs.Slicer(jaxprs.open_jaxpr(self.program.init_jaxpr)[0].eqns)
        keys = {p.index: jax.device_put(jax.random.key(seed), p.submesh.replicated) for p in self.places}
        masters: dict[Piece, jax.Array] = {}
        for (place, _), pieces in owned.items():
            made = self._init_leaf(pieces, self.places[place], keys[place], slicer)
            masters |= zip(pieces, made, strict=True)
        return masters

    def _init_leaf(
        self, pieces: Sequence[Piece], place: Place, key: jax.Array, slicer: jaxprs.Slicer
    ) -> list[jax.Array]:
        """Make one leaf, or some slices of it; leaves that are made alike share the compiled function."""
        inner, consts = jaxprs.open_jaxpr(self.program.init_jaxpr)
        outvar, axis = inner.outvars[pieces[0].leaf], pieces[0].axis
        eqns, literals = lift_literals(slicer([outvar])[0])
        invars = [*inner.invars, *inner.constvars, *(v for v, _ in literals)]
        whole = self.stored_sharding(pieces[0]) if axis is None else place.submesh.replicated

        def init(given: list) -> jax.Array:
            return jnp.asarray(jaxprs.evaluate(eqns, dict(zip(invars, given, strict=True)), [outvar])[0])

        same = ("init", jaxprs.equations_key(eqns, invars, [outvar]), whole)
        function = compiled.get(same, lambda: jax.jit(init, out_shardings=whole))
        made = function([key, *consts, *(np.asarray(d.index, d.dtype) for _, d in literals)])
        if axis is None:
            return [made]
        # Sliced by another function: within one, XLA may round otherwise than in the whole init.
        return [_slice_of(axis, self.stored_sharding(p))(made, np.int32(p.position)) for p in pieces]


@functools.lru_cache(maxsize=256)
def _slice_of(axis: int, sharding: NamedSharding) -> Callable[[jax.Array, np.int32], jax.Array]:
    def take(x: jax.Array, index: Any) -> jax.Array:
        return jax.lax.dynamic_index_in_dim(x, index, axis, keepdims=False)

    return jax.jit(take, out_shardings=sharding)
