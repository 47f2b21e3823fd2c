"""A loss function, traced on shapes alone and divided at the cuts into a chain of segments."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np

from hetjax import jaxprs, modelstate, segments
from hetjax import rows as row_analysis
from hetjax.errors import UserError
from hetjax.flat import Flat, Piece, RowModel, Unit
from hetjax.marks import Mean

RowsMode = Literal["auto", "split", "whole"]


@dataclasses.dataclass(frozen=True)
class SegmentInfo:
    """What the planner needs to know of a segment; plain numbers.

    Attributes:
        index: Its place in the model.
        name: From the paths of its parameters.
        segment_class: Segments with equal classes compute the same function.
        num_params: Parameters that it reads.
        param_bytes: Their bytes as stored.
        forward_flops_per_row: FLOPs of the forward pass for one example.
        boundary_bytes_per_row: Bytes that leave it forward for one example.
        activation_bytes_per_row: By remat policy, bytes kept for the backward pass for one example.
    """

    index: int
    name: str
    segment_class: str
    num_params: int
    param_bytes: int
    forward_flops_per_row: float
    boundary_bytes_per_row: float
    activation_bytes_per_row: dict[str, float]


@dataclasses.dataclass(frozen=True)
class Edge:
    """A dependency: `bytes_per_row` go from segment `producer` to segment `consumer` in the forward."""

    producer: int
    consumer: int
    bytes_per_row: float


def path_string(path: Sequence[Any]) -> str:
    """A parameter's path as `a/b/0/kernel`, alike for linen, nnx and plain dicts."""
    parts = []
    for key in path:
        for attribute in ("key", "name", "idx"):
            if hasattr(key, attribute):
                parts.append(str(getattr(key, attribute)))
                break
    if parts and parts[-1] == "value" and len(parts) > 1:
        parts.pop()
    return "/".join(parts)


class Traced(NamedTuple):
    """A flattened jaxpr whose outputs are sums, their names, and which came as plain scalars."""

    closed: Any
    names: list[str]
    plain: list[str]


def _result_list(out: Any, num_rows: int) -> tuple[list[Any], list[str], list[str]]:
    """Flatten what a loss function returned into float32 sums, their names, and which were plain scalars."""
    loss, extra = out if isinstance(out, tuple) and len(out) == 2 else (out, {})
    if isinstance(extra, Mean) or not isinstance(extra, Mapping):
        raise UserError(
            f"loss_fn returned a pair whose second part is a {type(extra).__name__}. It has to be a dict of "
            f"metrics, each a scalar or a hetjax.Mean. {_STATE}"
        )
    taken = [n for n in extra if n in ("loss", "grad_norm") or not isinstance(n, str)]
    if taken:
        raise UserError(
            f"loss_fn returned a metric named {taken[0]!r}. The names of metrics are strings, and hetjax "
            "itself reports 'loss' and 'grad_norm': choose another."
        )
    values, names, plain = [], [], []
    for name, value in {"loss": loss, **extra}.items():
        mean = value if isinstance(value, Mean) else Mean(value, num_rows)
        total, weight = (_scalar(part, name) for part in (mean.total, mean.weight))
        if not isinstance(value, Mean):
            total = total * num_rows
            plain.append(name)
        values += [total, weight]
        names += [f"{name}.total", f"{name}.weight"]
    return values, names, plain


_STATE = (
    "Model state that changes (BatchNorm statistics, caches) is not carried between steps: use GroupNorm or "
    "LayerNorm, or run BatchNorm with use_running_average=True, and return the loss and metrics alone."
)


def _scalar(value: Any, name: str) -> jax.Array:
    """One of the sums that a loss function returned, float32."""
    kind = type(value).__name__
    if isinstance(value, jax.Array | np.ndarray | np.generic | int | float) and not isinstance(value, bool):
        array = jnp.asarray(value)
        real = jnp.issubdtype(array.dtype, jnp.floating) or jnp.issubdtype(array.dtype, jnp.integer)
        if array.shape == () and real:
            return array.astype(jnp.float32)
        kind = f"{array.dtype} of shape {array.shape}"
    raise UserError(
        f"loss_fn returned {name!r} as a {kind}. The loss and every metric have to be a real scalar or a "
        f"hetjax.Mean(total, weight) of two: sum over the examples, or drop it. {_STATE}"
    )


class Program:
    """A traced loss: segments, classes, edges and parameters. Made by `trace`; holds no array of a device."""

    def __init__(
        self,
        loss_fn: Callable,
        init_fn: Callable,
        batch_spec: Any,
        *,
        rows: RowsMode,
        frozen: Callable[[str], bool] | None,
        eval_loss_fn: Callable | None,
    ) -> None:
        """See `trace`."""
        self.loss_fn, self.init_fn, self.eval_loss_fn = loss_fn, init_fn, eval_loss_fn or loss_fn
        wrong = [s for s in jax.tree.leaves(batch_spec) if not (hasattr(s, "shape") and hasattr(s, "dtype"))]
        if wrong:
            raise UserError(
                f"batch_spec holds {wrong[0]!r}. Each of its leaves has to be a jax.ShapeDtypeStruct or an "
                "array."
            )
        self.batch_spec = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype), batch_spec)
        self.batch_leaves, self.batch_treedef = jax.tree.flatten(self.batch_spec)
        self.global_batch = self._leading_rows()
        self.key_spec = jax.eval_shape(lambda: jax.random.key(0))
        self._init_closed, self.params_spec = jax.make_jaxpr(init_fn, return_shape=True)(self.key_spec)
        with_path, self.params_treedef = jax.tree_util.tree_flatten_with_path(self.params_spec)
        self.leaf_specs = [leaf for _, leaf in with_path]
        self.leaf_paths = [path_string(path) for path, _ in with_path]
        if not with_path or len(set(self.leaf_paths)) != len(with_path):
            raise UserError(
                "init_fn has to return a pytree of arrays, each under a path of its own; it returned "
                f"{len(with_path)} arrays under {len(set(self.leaf_paths))} paths."
            )
        for path, leaf in zip(self.leaf_paths, self.leaf_specs, strict=True):
            if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
                raise UserError(
                    f"Parameter {path!r} is {leaf.dtype}, which hetjax does not train. Hold its real and "
                    "imaginary parts as two real parameters."
                )
        self._kinds = modelstate.leaf_kinds(self.params_spec, self.leaf_paths)
        self.frozen = [
            kind != "param" or not jnp.issubdtype(leaf.dtype, jnp.floating) or bool(frozen and frozen(path))
            for path, leaf, kind in zip(self.leaf_paths, self.leaf_specs, self._kinds, strict=True)
        ]
        self._flats: dict[tuple, Flat] = {}
        self.rows_mode = "whole" if rows == "whole" else "split"
        self._mode: RowsMode = rows
        self._mains = {True: self._analyse(rows, training=True)}
        self.main = self._mains[True]
        self._flats[self.main.rows, None, True] = self.main
        self._check_results()
        self._place_params()

    def _analyse(self, mode: RowsMode, *, training: bool) -> Flat:
        """Trace at two numbers of rows, tell how values follow them, and hold the results against `mode`."""
        first = max(self.global_batch, 2)
        traced = self._closed(first, None, training, cast_batch=False)
        closed = traced.closed
        flat = self._flat(traced, first, None)
        if not flat.num_segments:
            raise UserError(
                "loss_fn never combines its parameters with its batch, so there is nothing to train."
            )
        if training:
            self._check_state(closed)
        try:
            other = self._closed(2 * first, None, training, cast_batch=False).closed
        except Exception:  # a model may be written for one number of rows; then one trace has to do
            other = None
        inner, _ = jaxprs.open_jaxpr(closed)
        num_params = len(self.leaf_specs)
        led = [row_analysis.RowDim(0, 1, 1) if leaf.shape else None for leaf in self.batch_leaves]
        leading = [None] * num_params + led + [None] * (len(inner.invars) - num_params - len(led))
        report = row_analysis.analyse(
            closed, first, leading, other=other, other_rows=2 * first if other else None
        )
        if mode == "auto":
            self._check_rows(report, traced, "" if training else " in evaluation")
        return self._flat(traced, first, flat.read_report(report))

    def _check_rows(self, report: row_analysis.RowsReport, traced: Traced, when: str) -> None:
        """Refuse results that can't be put together from those of parts of the batch."""
        inner, _ = jaxprs.open_jaxpr(traced.closed)
        scaled = {e.outvars[0]: e.invars[0] for e in inner.eqns if e.primitive.name == "mul"}
        for i in range(0, len(traced.names), 2):
            name, total, weight = traced.names[i].rsplit(".", 1)[0], inner.outvars[i], inner.outvars[i + 1]
            what = ("The loss" if name == "loss" else f"The metric {name!r}") + when
            if name in traced.plain and total in scaled:
                total, weight = scaled[total], None
            row_analysis.check(report, total, weight, what)

    def _check_state(self, closed: Any) -> None:
        """Refuse a model that relies on state that hetjax does not carry."""
        inner, _ = jaxprs.open_jaxpr(closed)
        read = set(jaxprs.prune(inner.eqns, inner.outvars)[1])
        params = inner.invars[: len(self.leaf_specs)]
        modelstate.check(self.leaf_paths, self._kinds, {i for i, v in enumerate(params) if v in read})

    # ---- tracing ----

    @property
    def tokens_per_row(self) -> int | None:
        """Length of a row of token numbers, an integer leaf (rows, length) of the batch; None without one."""
        lengths = [
            s.shape[1]
            for s in self.batch_leaves
            if len(s.shape) == 2 and jnp.issubdtype(s.dtype, jnp.integer)
        ]
        return max(lengths, default=None)

    def _leading_rows(self) -> int:
        sizes = {leaf.shape[0] for leaf in self.batch_leaves if leaf.shape}
        if len(sizes) != 1 or 0 in sizes:
            raise UserError(
                f"The leaves of batch_spec lead with {sorted(sizes)} rows. Every leaf has to lead with the "
                "same number of rows, the global batch; scalars may be among them."
            )
        return sizes.pop()

    @functools.cached_property
    def uses_rng(self) -> bool:
        """Whether the loss takes a key as its third argument."""
        return _takes_rng(self.loss_fn)

    def flat(self, rows: int, dtype: str | None = None, training: bool = True) -> Flat:
        """Trace at a number of rows and a compute dtype; traces are kept.

        Args:
            rows: Leading dim of every batch leaf.
            dtype: Floating parameters are given to the loss in this dtype; None or `"float32"` leaves them as
                they are.
            training: False traces the evaluation loss, without a key.

        Raises:
            UserError: The cuts of this trace differ from the first one's.
        """
        dtype = None if dtype == "float32" else dtype
        training = training or (self.eval_loss_fn is self.loss_fn and not self.uses_rng)
        key = (rows, dtype, training)
        if key not in self._flats:
            flat = self._trace_again(rows, dtype, training, cast_batch=False)
            if dtype and not any(v.var.aval.dtype == jnp.dtype(dtype) for v in flat.values):
                flat = self._trace_again(rows, dtype, training, cast_batch=True)
            self._check_same_cuts(flat, rows, dtype, training)
            self._flats[key] = flat
        return self._flats[key]

    def _main(self, training: bool) -> Flat:
        """The trace that all others of training, or of evaluation, agree with."""
        if training not in self._mains:
            flat = self._analyse(self._mode, training=training)
            if flat.num_segments != self.num_segments:
                raise UserError(
                    f"In evaluation the model has {flat.num_segments} segments and in training "
                    f"{self.num_segments}. Each segment has to compute something in both: let no cuts stand "
                    "around a dropout alone, and give eval_loss_fn the cuts of loss_fn."
                )
            self._mains[training] = flat
        return self._mains[training]

    def _trace_again(self, rows: int, dtype: str | None, training: bool, *, cast_batch: bool) -> Flat:
        try:
            return self._trace(rows, dtype, training, cast_batch=cast_batch)
        except UserError:
            raise
        except Exception as error:  # whatever a user's model raises
            what = f" and its parameters in {dtype}" if dtype else ""
            raise UserError(
                f"The loss can't be traced with {rows} rows{what}, as the plan asks "
                f"({type(error).__name__}: {error}). Take the number of rows from the batch's shape and "
                "dtypes from the parameters, or choose a plan that does not split the rows, in float32."
            ) from error

    def _trace(self, num_rows: int, dtype: str | None, training: bool, *, cast_batch: bool) -> Flat:
        row_model = self._main(training).row_model
        traced = self._closed(num_rows, dtype, training, cast_batch=cast_batch)
        return self._flat(traced, num_rows, row_model)

    def _flat(self, traced: Traced, num_rows: int, row_model: RowModel | None) -> Flat:
        return Flat(
            traced.closed,
            num_params=len(self.leaf_specs),
            num_batch=len(self.batch_leaves),
            result_names=traced.names,
            frozen=self.frozen,
            rows=num_rows,
            row_model=row_model,
        )

    def _closed(self, num_rows: int, dtype: str | None, training: bool, *, cast_batch: bool) -> Traced:
        """The flattened jaxpr of the loss at a number of rows."""

        def cast(leaf: Any) -> Any:
            return leaf.astype(dtype) if dtype and jnp.issubdtype(leaf.dtype, jnp.floating) else leaf

        loss_fn = self.loss_fn if training else self.eval_loss_fn
        takes_rng = _takes_rng(loss_fn)
        names: list[str] = []
        plain: list[str] = []

        def function(params: Any, batch: Any, *key: Any) -> list[Any]:
            batch = jax.tree.map(cast, batch) if cast_batch else batch
            rng = (key or (None,)) if takes_rng else ()
            values, names[:], plain[:] = _result_list(loss_fn(params, batch, *rng), num_rows)
            return values

        def at_compute_dtype(leaf: Any) -> Any:
            floating = jnp.issubdtype(leaf.dtype, jnp.floating)
            return jax.ShapeDtypeStruct(leaf.shape, dtype if dtype and floating else leaf.dtype)

        params = jax.tree.unflatten(self.params_treedef, [at_compute_dtype(leaf) for leaf in self.leaf_specs])
        batch = jax.tree.unflatten(
            self.batch_treedef,
            [
                jax.ShapeDtypeStruct((num_rows, *b.shape[1:]) if b.shape else (), b.dtype)
                for b in self.batch_leaves
            ],
        )
        key = (self.key_spec,) if takes_rng and training else ()
        return Traced(jaxprs.inline(jax.make_jaxpr(function)(params, batch, *key)), names, plain)

    def _check_same_cuts(self, flat: Flat, num_rows: int, dtype: str | None, training: bool) -> None:
        def shape(f: Flat) -> list:
            return [(v.producer, v.consumers) for v in f.values]

        main = self._main(training)
        if flat.num_segments != main.num_segments or shape(flat) != shape(main):
            raise UserError(
                f"Traced with {num_rows} rows in {dtype or 'the dtype of the parameters'}, the model has "
                f"{flat.num_segments} segments and {len(flat.values)} values across cuts; with {main.rows} "
                f"rows it has {main.num_segments} and {len(main.values)}. The cuts may not depend on the "
                "number of rows or on the dtype of the parameters: cut values of one dtype, and don't branch "
                "on the batch's shape."
            )

    def _check_results(self) -> None:
        for name, atom in self.main.results.items():
            if name == "loss.weight" and self.main.depends_on_params(atom):
                raise UserError(
                    "The weight of the loss's hetjax.Mean depends on the parameters. It has to be a count "
                    "(of examples, of tokens): compute it from the batch, or wrap it in "
                    "jax.lax.stop_gradient and a constant."
                )
        if not self.main.depends_on_params(self.main.results["loss.total"]):
            raise UserError(
                "The loss depends on no parameter that is trained: nothing would change. Check `frozen`."
            )

    # ---- parameters ----

    def _place_params(self) -> None:
        """List the pieces, and for each the segments that read it; the first reader owns it."""
        self.readers: dict[Piece, list[int]] = {}
        for segment in range(self.num_segments):
            for piece in self.main.unit(segment, segment + 1).params:
                self.readers.setdefault(piece, []).append(segment)
        stacked = {p.leaf: p.axis for p in self.readers if p.axis is not None}
        for leaf, spec in enumerate(self.leaf_specs):
            if leaf in stacked:
                axis = stacked[leaf]
                missing = [Piece(leaf, axis, i) for i in range(spec.shape[axis])]
            else:
                missing = [Piece(leaf)]
            for piece in missing:
                self.readers.setdefault(piece, [])
        self.pieces = sorted(self.readers, key=lambda p: (p.leaf, p.index or 0))

    def owner(self, piece: Piece) -> int:
        """The segment that owns a piece: its first reader, or segment 0 if no segment reads it."""
        readers = self.readers[piece]
        return readers[0] if readers else 0

    def piece_spec(self, piece: Piece) -> jax.ShapeDtypeStruct:
        """Stored shape and dtype of a piece."""
        spec = self.leaf_specs[piece.leaf]
        if piece.axis is None:
            return spec
        return jax.ShapeDtypeStruct(tuple(n for d, n in enumerate(spec.shape) if d != piece.axis), spec.dtype)

    def piece_name(self, piece: Piece) -> str:
        """Path of a piece; a slice of a stacked leaf ends in its index in brackets."""
        path = self.leaf_paths[piece.leaf]
        return path if piece.axis is None else f"{path}[{piece.index}]"

    def trainable(self, piece: Piece) -> bool:
        """Whether a piece gets a gradient."""
        return not self.frozen[piece.leaf]

    @property
    def tied(self) -> list[tuple[int, int, int]]:
        """(owner segment, reader segment, bytes) of each parameter that a later segment reads too."""
        return [
            (readers[0], reader, _num_bytes(self.piece_spec(piece)))
            for piece, readers in self.readers.items()
            for reader in readers[1:]
        ]

    @functools.cached_property
    def init_jaxpr(self) -> Any:
        """The flattened jaxpr of `init_fn`: a key in, every parameter leaf out."""
        return jaxprs.inline(self._init_closed)

    # ---- what the planner reads ----

    @property
    def num_segments(self) -> int:
        """How many segments the cuts make."""
        return self.main.num_segments

    @functools.cached_property
    def fingerprint(self) -> str:
        """Changes when the segments or the parameters change; not with the batch's size."""
        specs = [(p, s.shape, str(s.dtype)) for p, s in zip(self.leaf_paths, self.leaf_specs, strict=True)]
        edges = [(v.producer, v.consumers) for v in self.main.values]
        return jaxprs.text_key(specs, edges, self.num_segments)

    def edges(self) -> list[Edge]:
        """Which segments feed which, skip connections too."""
        total: dict[tuple[int, int], float] = {}
        for value in self.main.values:
            for consumer in value.consumers:
                pair = (value.producer, consumer)
                total[pair] = total.get(pair, 0.0) + _num_bytes(value.var.aval) / self.main.rows
        return [Edge(p, c, b) for (p, c), b in sorted(total.items())]

    def segments(self) -> list[SegmentInfo]:
        """The segments as plain numbers, in model order."""
        return list(self._segments)

    @functools.cached_property
    def _segments(self) -> list[SegmentInfo]:
        infos, by_class = [], {}
        for index in range(self.num_segments):
            unit = self.main.unit(index, index + 1)
            if unit.key not in by_class:
                kept = segments.kept_bytes(self.main, unit, ("none", "dots", "full"))
                by_class[unit.key] = {k: v / self.main.rows for k, v in kept.items()}
            specs = [self.piece_spec(p) for p in unit.params]
            infos.append(
                SegmentInfo(
                    index,
                    self._segment_name(unit),
                    unit.key,
                    sum(math.prod(s.shape) for s in specs),
                    sum(map(_num_bytes, specs)),
                    jaxprs.count_flops(unit.eqns) / self.main.rows,
                    sum(_num_bytes(v.aval) for v in unit.output_vars) / self.main.rows,
                    by_class[unit.key],
                )
            )
        return infos

    def _segment_name(self, unit: Unit) -> str:
        """The longest path that the segment's own parameters share, or the first one's."""
        own = [p for p in unit.params if self.owner(p) == unit.start] or list(unit.params)
        if not own:
            return f"segment {unit.start}"
        paths = [self.piece_name(p).removeprefix("params/").split("/") for p in own]
        common = []
        for column in zip(*paths, strict=False):
            if len(set(column)) > 1:
                break
            common.append(column[0])
        if common and len(common) < len(paths[0]):
            name = "/".join(common)
        else:
            name = "+".join(dict.fromkeys("/".join(p[:-1] or p) for p in paths))
        indices = {p.position for p in own if p.axis is not None}
        return f"{name[:40]}[{min(indices)}]" if indices and "[" not in name else name[:44]

    def __str__(self) -> str:
        """A table: segment, class, parameters, boundary bytes, FLOPs."""
        letters: dict[str, str] = {}
        lines = [
            f"{self.num_segments} segments, {sum(math.prod(s.shape) for s in self.leaf_specs):,} parameters, "
            f"{self.global_batch} rows a step"
        ]
        lines.append(
            f"{'':>3} {'segment':<44} {'class':<6} {'parameters':>13} {'boundary KiB/row':>17} "
            f"{'forward MFLOP/row':>18}"
        )
        for s in self._segments:
            letter = letters.setdefault(s.segment_class, _letters(len(letters)))
            lines.append(
                f"{s.index:>3} {s.name:<44} {letter:<6} {s.num_params:>13,} "
                f"{s.boundary_bytes_per_row / 1024:>17,.1f} {s.forward_flops_per_row / 1e6:>18,.2f}"
            )
        return "\n".join(lines)

    # ---- trees ----

    def tree(self, leaves: Sequence[Any]) -> Any:
        """Put leaves (arrays, or anything) into the user's parameter structure."""
        return jax.tree.unflatten(self.params_treedef, leaves)

    def assemble(self, pieces: dict[Piece, np.ndarray]) -> list[np.ndarray]:
        """Join host arrays of all pieces into leaves, in order."""
        leaves: list[Any] = [None] * len(self.leaf_specs)
        stacks: dict[tuple[int, int], dict[int, np.ndarray]] = {}
        for piece, array in pieces.items():
            if piece.axis is None:
                leaves[piece.leaf] = array
            else:
                stacks.setdefault((piece.leaf, piece.axis), {})[piece.position] = array
        for (leaf, axis), slices in stacks.items():
            leaves[leaf] = np.stack([slices[i] for i in range(len(slices))], axis=axis)
        return leaves


def _letters(index: int) -> str:
    name = ""
    while True:
        name = chr(ord("A") + index % 26) + name
        index = index // 26 - 1
        if index < 0:
            return name


def _num_bytes(spec: Any) -> int:
    return math.prod(spec.shape) * spec.dtype.itemsize


def _takes_rng(loss_fn: Callable) -> bool:
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    try:
        parameters = inspect.signature(loss_fn).parameters.values()
    except (TypeError, ValueError):
        return False
    return sum(p.kind in positional for p in parameters) >= 3


def trace(
    loss_fn: Callable,
    init_fn: Callable,
    batch_spec: Any,
    *,
    rows: RowsMode = "auto",
    frozen: Callable[[str], bool] | None = None,
    eval_loss_fn: Callable | None = None,
) -> Program:
    """Trace a loss without devices and divide it at its cuts.

    Args:
        loss_fn: `loss_fn(params, batch)` or `loss_fn(params, batch, rng)`; pure. Returns a `hetjax.Mean`, or
            a scalar that is the mean over equal rows, or a pair of that and a dict of metrics of the same two
            forms. `rng` is a key folded from seed, step and microbatch; in evaluation it is None.
        init_fn: `init_fn(key) -> params`, any pytree of arrays (linen variables, an nnx.State, dicts).
        batch_spec: Pytree of `jax.ShapeDtypeStruct`; every leaf leads with the rows of the global batch.
        rows: `"auto"` refuses a loss that mixes the rows of a batch; `"whole"` says that it does and must not
            be split; `"split"` says that the value of each part is what is meant.
        frozen: Says of a parameter's path (`"blocks/0/kernel"`) whether it is kept as it is: no gradient, no
            optimizer state.
        eval_loss_fn: Another loss for evaluation, over the same parameters.

    Returns:
        The program; `print` it to see the segments.

    Raises:
        UserError: What the loss returns, its cuts or its mixing of rows can't be trained over groups; the
            text says why.
    """
    if rows not in get_args(RowsMode):
        raise UserError(f"rows is {rows!r}. Allowed: {', '.join(map(repr, get_args(RowsMode)))}.")
    return Program(loss_fn, init_fn, batch_spec, rows=rows, frozen=frozen, eval_loss_fn=eval_loss_fn)
