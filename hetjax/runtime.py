"""The trainer: places a program by a plan and takes optimizer steps."""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
import optax

from hetjax import canonical
from hetjax.compile import compiled
from hetjax.errors import UserError
from hetjax.flat import Piece
from hetjax.optimizer import LossScale, Pieces, UpdateFunctions, UpdateUnit, next_scale
from hetjax.placement import Place, Placement
from hetjax.plan import Plan
from hetjax.play import Step, Watcher
from hetjax.program import Program
from hetjax.schedule import Schedule, plan_schedule
from hetjax.simulate import covered
from hetjax.transfer import Carrier, arrived, relayout


@dataclasses.dataclass
class TrainState:
    """Parameters and optimizer state where they live. A step uses its arrays up; keep only the newest.

    Attributes:
        masters: Every parameter piece on its owner.
        optimizer: State leaves of each update unit.
        step: Steps taken.
        seed: Of initialisation and of the model's random draws.
        scale: Loss scale and good steps since it last changed; None without scaling.
    """

    masters: dict[Piece, jax.Array]
    optimizer: list[list[jax.Array]]
    step: int
    seed: int
    scale: tuple[jax.Array, jax.Array] | None = None


class Metrics(Mapping[str, float]):
    """Results of a step; a value is fetched from the devices when it is read.

    Attributes:
        timeline: (group, task, start_s, end_s) rows of a step taken with `timeline=True`.
    """

    def __init__(
        self, sums: Mapping[str, Sequence[tuple[Any, Any]]], squares: Sequence[Any], watcher: Watcher | None
    ) -> None:
        """Hold device scalars.

        Args:
            sums: By metric, (total, weight) of each place.
            squares: Sums of squared gradients.
            watcher: Of a step with a timeline.
        """
        self._sums, self._squares = dict(sums), list(squares)
        self.timeline = watcher.finish() if watcher else None

    def __getitem__(self, name: str) -> float:
        """The mean of a metric over the batch, or `grad_norm`."""
        if name == "grad_norm" and self._squares:
            return float(np.sqrt(sum(float(s) for s in self._squares)))
        total, weight = (sum(float(pair[i]) for pair in self._sums[name]) for i in (0, 1))
        return total / weight if weight else 0.0

    def __iter__(self) -> Any:
        return iter([*self._sums, *(["grad_norm"] if self._squares else [])])

    def __len__(self) -> int:
        return len(self._sums) + bool(self._squares)

    def weight(self, name: str) -> float:
        """The total weight of a metric: how many examples or tokens it is the mean of."""
        return sum(float(w) for _, w in self._sums[name])

    def fetch(self) -> dict[str, float]:
        """All values as plain numbers."""
        return {name: self[name] for name in self}

    @property
    def busy(self) -> dict[str, float]:
        """Share of the timeline in which each group had a task running; empty without a timeline."""
        if not self.timeline:
            return {}
        span = max(end for *_, end in self.timeline) - min(start for *_, start, _ in self.timeline)
        return {
            group: covered([(a, b) for g, _, a, b in self.timeline if g == group]) / span
            for group in dict.fromkeys(g for g, *_ in self.timeline)
        }


@jax.jit
def _totals(parts: dict[str, list[jax.Array]]) -> dict[str, jax.Array]:
    return {name: sum((a.sum() for a in arrays[1:]), arrays[0].sum()) for name, arrays in parts.items()}


class Trainer:
    """Trains a program as a plan says."""

    def __init__(
        self,
        program: Program,
        plan: Plan,
        tx: optax.GradientTransformation,
        *,
        clip_norm: float | None = None,
        loss_scale: LossScale | None = None,
        devices: Mapping[str, Sequence[jax.Device]] | None = None,
    ) -> None:
        """Place a program.

        Args:
            program: From `hetjax.trace`.
            plan: From `hetjax.make_plan` or `Plan.load`.
            tx: Any optax transformation that treats each parameter by itself.
            clip_norm: Clip the gradients' global norm to this.
            loss_scale: Dynamic loss scaling; on by default where a group computes in float16.
            devices: The devices of each group; attached ones in the order of the cluster file where None.

        Raises:
            UserError: The plan does not fit the program or the devices, or `tx` needs the whole parameter
                tree.
        """
        if clip_norm is not None and not 0 < clip_norm < np.inf:
            raise UserError(f"clip_norm is {clip_norm}. Give a positive number, or None not to clip.")
        plan.check(program)
        unknown = plan.beyond_runtime()
        if unknown:
            raise UserError(
                f"The plan uses {', '.join(unknown)}, which this version plans and simulates but does not "
                "run yet. Make it with features='runtime' (the default of make_plan), or edit it."
            )
        self.program, self.plan, self.clip_norm = program, plan, clip_norm
        self.optimizer = Pieces(program, tx)
        self.placement = Placement(program, plan, devices or plan.cluster.attach())
        self.schedule: Schedule = plan_schedule(plan, program.edges())
        self.carrier = Carrier()
        halves = any(p.dtype == "float16" for p in self.placement.places)
        self.loss_scale = loss_scale or (LossScale() if halves else None)
        self._units: list[UpdateUnit] = self.placement.update_units(self.optimizer)
        scaled = self.loss_scale is not None
        self._functions = [
            compiled.get(
                ("update", *u.class_key(), clip_norm, scaled),
                lambda u=u: UpdateFunctions(u, clip_norm, scaled),
            )
            for u in self._units
        ]
        self._two_phases = clip_norm is not None or scaled
        self._home = self.placement.places[-1]

    # ---- state ----

    def init(self, seed: int = 0) -> TrainState:
        """Fresh parameters, equal to a single-device init, and optimizer state, each on its owner."""
        masters = self.placement.init_masters(seed)
        optimizer = [u.init_state([masters[p] for p in u.pieces]) for u in self._units]
        return TrainState(masters, optimizer, 0, seed, self._fresh_scale())

    def _fresh_scale(self) -> tuple[jax.Array, jax.Array] | None:
        if self.loss_scale is None:
            return None
        values = (np.float32(self.loss_scale.initial), np.int32(0))
        return tuple(jax.device_put(v, self._home.submesh.replicated) for v in values)

    def params(self, state: TrainState) -> Any:
        """All parameters as host arrays, in the structure that `init_fn` returns."""
        self._check_state(state)
        return canonical.host_tree(self.program, state.masters)

    def export(self, state: TrainState) -> dict[str, Any]:
        """The state on the host, in a layout that no plan shows through.

        Returns:
            `params` and `opt_state`: arrays by path, as in the user's tree and in plain `tx.init(params)`
            (frozen parameters have no optimizer state); `step`, `seed`; and `loss_scale`, a pair of numbers
            or None.
        """
        self._check_state(state)
        return {
            "params": canonical.export_params(self.program, state.masters),
            "opt_state": canonical.export_optimizer(self.optimizer, self._units, state.optimizer),
            "step": state.step,
            "seed": state.seed,
            "loss_scale": None if state.scale is None else [float(state.scale[0]), int(state.scale[1])],
        }

    def canonical_spec(self) -> dict[str, dict[str, jax.ShapeDtypeStruct]]:
        """Shapes and dtypes of the arrays that `export` returns."""
        specs = map(canonical.saved_spec, self.program.leaf_specs)
        state = {k: canonical.saved_spec(v) for k, v in self.optimizer.whole_specs().items()}
        params = dict(zip(self.program.leaf_paths, specs, strict=True))
        return {"params": params, "opt_state": state}

    def import_(self, saved: Mapping[str, Any]) -> TrainState:
        """Place an exported state, whatever plan it was made under.

        Raises:
            UserError: It is of another model or optimizer.
        """
        masters = canonical.import_params(self.program, self.placement, saved["params"])
        optimizer = canonical.import_optimizer(self.optimizer, self._units, saved["opt_state"])
        scale = self._fresh_scale()
        if scale is not None and saved.get("loss_scale"):
            values = (np.float32(saved["loss_scale"][0]), np.int32(saved["loss_scale"][1]))
            scale = tuple(jax.device_put(v, self._home.submesh.replicated) for v in values)
        return TrainState(masters, optimizer, int(saved["step"]), int(saved["seed"]), scale)

    # ---- stepping ----

    def _check_state(self, state: TrainState) -> None:
        """Refuse a state whose arrays a step has used up, or of other parameters than this trainer's."""
        if len(state.masters) != len(self.placement.owner_place):
            raise UserError(
                "The state is not of this program. Give one of this trainer's init, step or import_."
            )
        for unit in self._units[:1]:
            if any(state.masters[piece].is_deleted() for piece in unit.pieces[:1]):
                raise UserError(
                    f"The state after {state.step} steps was used up by the step that followed. Keep only "
                    "the state that Trainer.step returned last; Trainer.export copies one."
                )

    def _host_batch(self, batch: Any, *, exact: bool) -> list[np.ndarray]:
        leaves, treedef = jax.tree.flatten(batch)
        if treedef != self.program.batch_treedef:
            raise UserError(
                f"The batch is {treedef}; the program was traced with {self.program.batch_treedef}."
            )
        # A copy: dispatch goes on when the caller is back, and may then write the next batch into its arrays.
        arrays = [np.array(leaf) for leaf in leaves]
        rows = {a.shape[0] for a in arrays if a.ndim}
        unit = self.plan.global_batch if exact else self.plan.microbatch_rows
        for array, spec in zip(arrays, self.program.batch_leaves, strict=True):
            if (
                array.shape[1:] != spec.shape[1:]
                or array.ndim != len(spec.shape)
                or array.dtype != spec.dtype
            ):
                raise UserError(
                    f"A leaf of the batch has shape {array.shape} and dtype {array.dtype}; the program was "
                    f"traced with {spec.shape} and {spec.dtype}."
                )
        if len(rows) != 1 or (rows != {unit} if exact else min(rows) % unit or not min(rows)):
            wanted = f"{unit} rows" if exact else f"a multiple of {unit} rows (the plan's microbatch)"
            raise UserError(f"The leaves of the batch have {sorted(rows)} rows. Give {wanted} in every leaf.")
        return arrays

    def _gather(self, masters: Mapping[Piece, jax.Array], training: bool) -> dict[int, dict[Piece, Any]]:
        """For each place, the pieces that it computes with: in its dtype and layout, once a step."""
        out: dict[int, dict[Piece, Any]] = {}
        for place in self.placement.places:
            here: dict[Piece, Any] = {}
            for piece in self.placement.reads(training)[place.index]:
                owner, master = self.placement.owner_place[piece], masters[piece]
                layout = self.placement.compute_sharding(piece, place)
                dtype = self.placement.compute_dtype(piece, place)
                if master.dtype != dtype:
                    target = layout if owner is place else owner.submesh.replicated
                    master = relayout(target, str(dtype))(master)
                here[piece] = self.carrier.replicate(master, owner.submesh, place.submesh, layout)
            out[place.index] = here
        return out

    def _everywhere(self, scalar: jax.Array, source: Place, places: Sequence[Place]) -> dict[int, Any]:
        return {
            p.index: self.carrier.replicate(scalar, source.submesh, p.submesh, p.submesh.replicated)
            for p in places
        }

    def _pass(
        self,
        state: TrainState,
        batch: Sequence[np.ndarray],
        *,
        training: bool,
        watcher: Watcher | None = None,
    ) -> tuple[Step, dict[str, list[tuple[Any, Any]]], list[tuple[Place, jax.Array]]]:
        """Forward (and backward). Returns the step, (total, weight) by metric, loss weights by place."""
        self._check_state(state)
        places = self.placement.places
        scale = self._everywhere(state.scale[0], self._home, places) if state.scale and training else None
        step = Step(
            self.placement,
            self.schedule,
            self.carrier,
            batch,
            self._gather(state.masters, training),
            training=training,
            key=(state.seed, state.step),
            seed_scale=scale,
            on_dispatch=watcher,
        )
        step.play()
        by_place: dict[Place, dict[str, list]] = collections.defaultdict(
            lambda: collections.defaultdict(list)
        )
        for name, parts in step.results.items():
            for place, array in parts:
                by_place[place][name].append(array)
        totals = {place: _totals(dict(parts)) for place, parts in by_place.items()}
        names = dict.fromkeys(n.rsplit(".", 1)[0] for n in step.results)
        sums: dict[str, list[tuple[Any, Any]]] = {
            name: [
                (here.get(f"{name}.total", 0.0), here.get(f"{name}.weight", 0.0))
                for here in totals.values()
                if f"{name}.total" in here or f"{name}.weight" in here
            ]
            for name in names
        }
        weights: list[tuple[Place, Any]] = [
            (place, t["loss.weight"]) for place, t in totals.items() if "loss.weight" in t
        ]
        return step, sums, weights

    def _contributions(self, step: Step, unit: UpdateUnit, place: Place) -> tuple[list, list]:
        """For each piece of a unit: the owner's gradient sum (or None), and the readers' brought here."""
        own, foreign = [], []
        for piece in unit.pieces:
            own.append(step.sums.get((place.index, piece)))
            others = []
            for other in self.placement.places:
                sums = step.sums.get((other.index, piece))
                if other is not place and sums is not None:
                    reduced = _sum_shards(other.submesh.replicated)(sums)
                    moved = self.carrier.replicate(
                        reduced, other.submesh, place.submesh, place.submesh.replicated
                    )
                    others.append(arrived(moved))
            foreign.append(others)
        return own, foreign

    def _update_inputs(
        self, step: Step, weights: list[tuple[Place, jax.Array]]
    ) -> list[tuple[UpdateUnit, UpdateFunctions, tuple]]:
        """What each unit's reduction reads: own and foreign gradients, weights, loss scale."""
        copies = [self._everywhere(w, p, self.placement.places) for p, w in weights]
        scale = step.seed_scale
        out = []
        for unit, functions in zip(self._units, self._functions, strict=True):
            place = self.placement.owner_place[unit.pieces[0]]
            own, foreign = self._contributions(step, unit, place)
            here = [arrived(c[place.index]) for c in copies]
            out.append(
                (unit, functions, (own, foreign, here, [arrived(scale[place.index])] if scale else []))
            )
        return out

    def step(self, state: TrainState, batch: Any, *, timeline: bool = False) -> tuple[TrainState, Metrics]:
        """Take one optimizer step; returns before the devices are done.

        Args:
            state: Used up.
            batch: Pytree of host arrays with the rows of the global batch.
            timeline: Whether to measure when each task runs; waits for the step.

        Returns:
            The new state, and metrics that are fetched when read.

        Raises:
            UserError: The batch is not what the program was traced with; the state is as before.
        """
        leaves = self._host_batch(batch, exact=True)
        watcher = Watcher(self.placement, self.schedule) if timeline else None
        step, sums, weights = self._pass(state, leaves, training=True, watcher=watcher)
        inputs = self._update_inputs(step, weights)
        step.sums.clear()
        update = self._two_phase_update if self._two_phases else self._fused_update
        new, squares = update(state, inputs)
        return new, Metrics(sums, squares, watcher)

    def _fused_update(self, state: TrainState, inputs: Sequence[tuple]) -> tuple[TrainState, list[jax.Array]]:
        """Reduce and update unit by unit."""
        masters, optimizer, squares = dict(state.masters), [], []
        for (unit, functions, given), old in zip(inputs, state.optimizer, strict=True):
            new, leaves, square = functions.fused([masters[p] for p in unit.pieces], old, *given[:3])
            masters.update(zip(unit.pieces, new, strict=True))
            optimizer.append(leaves)
            squares.append(square)
        return TrainState(masters, optimizer, state.step + 1, state.seed, None), squares

    def _two_phase_update(
        self, state: TrainState, inputs: Sequence[tuple]
    ) -> tuple[TrainState, list[jax.Array]]:
        """Reduce every unit, then update with the global norm known everywhere."""
        reduced = [functions.reduce(*given) for _, functions, given in inputs]
        places = [self.placement.owner_place[unit.pieces[0]] for unit, *_ in inputs]
        squares = [s for _, s in reduced]
        shared = self._share(squares, places)
        masters, optimizer = dict(state.masters), []
        for i, (unit, functions, _) in enumerate(inputs):
            old = [masters[p] for p in unit.pieces]
            given = (old, state.optimizer[i], reduced[i][0], shared[places[i].index])
            new, leaves = functions.apply(*given)
            masters.update(zip(unit.pieces, new, strict=True))
            optimizer.append(leaves)
        scale = state.scale
        if scale is not None and self.loss_scale is not None:
            scale = _next_scale(*scale, shared[self._home.index], self.loss_scale)
        return TrainState(masters, optimizer, state.step + 1, state.seed, scale), squares

    def _share(self, squares: Sequence[jax.Array], owners: Sequence[Place]) -> dict[int, list[Any]]:
        """Every unit's sum of squares on every place, summed place by place first."""
        grouped: dict[Place, list] = collections.defaultdict(list)
        for place, square in zip(owners, squares, strict=True):
            grouped[place].append(square)
        local = {place: _sum(values) for place, values in grouped.items()}
        copies = [self._everywhere(value, place, self.placement.places) for place, value in local.items()]
        return {p.index: [arrived(c[p.index]) for c in copies] for p in self.placement.places}

    def evaluate(self, state: TrainState, batch: Any) -> Metrics:
        """The loss and metrics of a batch, without dropout and without gradients.

        Args:
            state: Is left as it is.
            batch: Any multiple of the plan's microbatch rows.
        """
        _, sums, _ = self._pass(state, self._host_batch(batch, exact=False), training=False)
        return Metrics(sums, [], None)

    def loss_and_grads(self, state: TrainState, batch: Any) -> tuple[float, Any]:
        """The loss and its gradients as host arrays in the parameters' structure, zeros where frozen."""
        step, sums, weights = self._pass(state, self._host_batch(batch, exact=True), training=True)
        pieces: dict[Piece, np.ndarray] = {}
        for unit, functions, given in self._update_inputs(step, weights):
            gradients, _ = functions.reduce(*given)
            pieces.update(zip(unit.pieces, map(np.asarray, gradients), strict=True))
        for piece in self.program.pieces:
            spec = self.program.piece_spec(piece)
            if piece not in pieces:
                pieces[piece] = np.zeros(spec.shape, np.float32)
        return Metrics(sums, [], None)["loss"], self.program.tree(self.program.assemble(pieces))

    def close(self) -> None:
        """Let worker threads end."""
        self.carrier.close()


@functools.lru_cache(maxsize=64)
def _sum_shards(sharding: Any) -> Any:
    return jax.jit(lambda x: x.sum(0), out_shardings=sharding)


@jax.jit
def _sum(values: list[jax.Array]) -> jax.Array:
    return sum(values[1:], values[0])


@functools.partial(jax.jit, static_argnums=3)
def _next_scale(scale: jax.Array, good_steps: jax.Array, squares: list, config: LossScale) -> tuple[Any, Any]:
    return next_scale(scale, good_steps, squares, config)
