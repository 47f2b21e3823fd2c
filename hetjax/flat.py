"""One trace of a loss at one row count and compute dtype, cut into segments.

A `Flat` is what `program.Program` keeps for every (rows, dtype, training or evaluation) that a plan needs;
cuts, edges and parameters agree between them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Mapping, Sequence
from typing import Any

import jax
import jax.extend.core as jex

from hetjax import jaxprs
from hetjax import rows as row_analysis


@dataclasses.dataclass(frozen=True, order=True)
class Piece:
    """A parameter leaf, or one slice of a leaf that a scan over layers stacks.

    Attributes:
        leaf: Index of the leaf in the flattened parameters.
        axis: Dim along which the leaf is stacked; None for a whole leaf.
        index: Which slice; None for a whole leaf.
    """

    leaf: int
    axis: int | None = None
    index: int | None = None

    @property
    def position(self) -> int:
        """The slice's index; 0 for a whole leaf."""
        return self.index or 0


@dataclasses.dataclass(frozen=True)
class Data:
    """What a segment reads that no parameter influences.

    Attributes:
        kind: `batch` (a leaf of the batch), `rng` (the microbatch's key), `const` (a captured array),
            `literal` (an integer folded into a key).
        index: Which batch leaf or constant; the value itself for a literal.
        dtype: Of a literal.
    """

    kind: str
    index: int = 0
    dtype: str = ""


@dataclasses.dataclass(frozen=True)
class Unit:
    """Neighbouring segments as one function `(params, inputs, data) -> (outputs, results)`.

    Attributes:
        start: First segment.
        stop: One past the last segment.
        eqns: The function's equations.
        params: Parameter pieces that it reads.
        param_vars: Their variables.
        inputs: Ids of the boundary values that it reads.
        input_vars: Their variables.
        data: Batch leaves, keys, constants.
        data_vars: Their variables.
        outputs: Ids of the boundary values that it makes for later segments.
        output_vars: Their variables.
        results: Names of the loss and metric sums that it makes.
        result_atoms: Their variables or literals.
        key: Class key: units with equal keys compute the same function and share executables.
    """

    start: int
    stop: int
    eqns: tuple[Any, ...]
    params: tuple[Piece, ...]
    param_vars: tuple[Any, ...]
    inputs: tuple[int, ...]
    input_vars: tuple[Any, ...]
    data: tuple[Data, ...]
    data_vars: tuple[Any, ...]
    outputs: tuple[int, ...]
    output_vars: tuple[Any, ...]
    results: tuple[str, ...]
    result_atoms: tuple[Any, ...]
    key: str


@dataclasses.dataclass(frozen=True)
class Value:
    """A value that crosses a cut.

    Attributes:
        var: Its variable.
        producer: The segment that makes it.
        consumers: The segments that read it, in order.
        follows: How it follows the rows (`hetjax.rows`).
    """

    var: Any
    producer: int
    consumers: tuple[int, ...]
    follows: Any


def _resolve_marks(eqns: Sequence[Any], outvars: Sequence[Any]) -> tuple[list[Any], list[int], list[Any]]:
    """Drop the cuts. Returns the equations, the positions that a cut stands before, and the outputs."""
    alias: dict[Any, Any] = {}

    def resolve(atom: Any) -> Any:
        return atom if jaxprs.is_literal(atom) else alias.get(atom, atom)

    kept: list[Any] = []
    cuts: list[int] = []
    for eqn in eqns:
        if jaxprs.is_cut(eqn):
            alias[eqn.outvars[0]] = resolve(eqn.invars[0])
            cuts.append(len(kept))
        else:
            kept.append(eqn.replace(invars=[resolve(a) for a in eqn.invars]))
    return kept, sorted(set(cuts)), [resolve(a) for a in outvars]


def _stacked_root(
    var: Any, defined: Mapping[Any, Any], params: Mapping[Any, int]
) -> tuple[Any, int, list] | None:
    """(parameter variable, stacked axis, casts to repeat in order) of what a slice is taken from."""
    axis, casts = 0, []
    while var not in params:
        eqn = defined.get(var)
        if eqn is None or not eqn.invars or jaxprs.is_literal(eqn.invars[0]):
            return None
        if eqn.primitive.name == "transpose":
            permutation = eqn.params["permutation"]
            rest = [d for d in permutation if d != permutation[axis]]
            if axis != 0 or rest != sorted(rest):
                return None
            axis = permutation[0]
        elif eqn.primitive.name in ("convert_element_type", "copy"):
            casts.append(eqn)
        else:
            return None
        var = eqn.invars[0]
    return var, axis, casts[::-1]


def _find_slices(eqns: Sequence[Any], params: Mapping[Any, int]) -> dict[Any, tuple[Any, int, int, list]]:
    """What is one slice of a stacked parameter: by variable, (parameter variable, axis, index, casts)."""
    defined = {v: e for e in eqns for v in e.outvars}
    found = {}
    for eqn in eqns:
        if eqn.primitive.name != "squeeze" or tuple(eqn.params["dimensions"]) != (0,):
            continue
        taken = defined.get(eqn.invars[0])
        if taken is None or taken.primitive.name != "slice":
            continue
        starts, limits, shape = (
            *(taken.params[k] for k in ("start_indices", "limit_indices")),
            taken.invars[0].aval.shape,
        )
        one = limits[0] == starts[0] + 1 and taken.params["strides"] in (None, (1,) * len(shape))
        root = (
            _stacked_root(taken.invars[0], defined, params)
            if one and tuple(limits[1:]) == shape[1:]
            else None
        )
        if root:
            found[eqn.outvars[0]] = (root[0], root[1], starts[0], root[2])
    return found


def expose_pieces(
    eqns: Sequence[Any], outvars: Sequence[Any], params: Mapping[Any, int]
) -> tuple[list[Any], dict[Any, Piece]]:
    """Turn `slice i of a stacked parameter` (what an unrolled scan reads) into a parameter of its own.

    A cast or a transposition between the parameter and the slice is moved behind the slice. A leaf that is
    also read whole, or of which not every slice is taken, stays whole.

    Args:
        eqns: Equations in order.
        outvars: What the program returns.
        params: Leaf index by parameter variable.

    Returns:
        The equations with the exposed slices in place, and the piece of each new parameter variable.
    """
    found = _find_slices(eqns, params)
    taken: dict[Any, set[tuple[int, int]]] = {}
    for root, axis, index, _ in found.values():
        taken.setdefault(root, set()).add((axis, index))
    stacks = {
        v for v, t in taken.items() for a, _ in [min(t)] if t == {(a, i) for i in range(v.aval.shape[a])}
    }
    found = {v: f for v, f in found.items() if f[0] in stacks}
    _, read = jaxprs.prune(eqns, outvars, found)
    found = {v: f for v, f in found.items() if f[0] not in read}
    made: dict[Piece, Any] = {}
    renamed: dict[Any, Any] = {}
    out = []
    for eqn in eqns:
        target = eqn.outvars[0] if eqn.outvars else None
        eqn = eqn.replace(invars=[a if jaxprs.is_literal(a) else renamed.get(a, a) for a in eqn.invars])
        if target in found:
            root, axis, index, casts = found[target]
            piece = Piece(params[root], axis, index)
            shape = tuple(n for d, n in enumerate(root.aval.shape) if d != axis)
            var = made.setdefault(piece, jex.Var(root.aval.update(shape=shape)))
            for cast in casts[:-1]:
                step = jex.Var(cast.outvars[0].aval.update(shape=shape))
                out.append(cast.replace(invars=[var], outvars=[step]))
                var = step
            if casts:
                eqn = casts[-1].replace(invars=[var], outvars=[target])
            else:
                renamed[target] = var
        out.append(eqn)
    return out, {v: p for p, v in made.items()}


_DRAWS = ("random_", "rng_", "threefry")


@dataclasses.dataclass(frozen=True)
class RowModel:
    """How a program's values follow the rows; found once, and the same at every number of rows.

    Attributes:
        follows: By boundary value.
        draws: By number among the program's drawing equations, the row dim of those drawn for the rows.
        inner_draws: Whether rows are drawn for inside a loop or another inner function.
    """

    follows: tuple[Any, ...]
    draws: Mapping[int, row_analysis.RowDim]
    inner_draws: bool


class Flat:
    """A traced loss as equations, divided at the cuts.

    Attributes:
        num_segments: How many segments the cuts make.
        values: What crosses cuts, in order of definition.
        results: Atom by result name: `loss.total`, `loss.weight`, `<metric>.total`, `<metric>.weight`.
        result_segment: The segment that makes each result.
        consts: Captured arrays.
        rows: Rows of the batch that it was traced with.
    """

    def __init__(
        self,
        closed: Any,
        *,
        num_params: int,
        num_batch: int,
        result_names: Sequence[str],
        frozen: Sequence[bool],
        rows: int,
        row_model: RowModel | None = None,
    ) -> None:
        """Divide a flattened closed jaxpr whose inputs are parameters, batch leaves and, last, maybe a key.

        Args:
            closed: Result of `jaxprs.inline`; its outputs are the results.
            num_params: How many inputs are parameter leaves.
            num_batch: How many are batch leaves.
            result_names: A name for each output.
            frozen: For each parameter leaf, whether it gets no gradient.
            rows: Rows of the batch.
            row_model: Of an earlier trace of the same loss; None where nothing is to be run with this one.
        """
        inner, consts = jaxprs.open_jaxpr(closed)
        self.rows, self.consts, self._frozen = rows, list(consts), list(frozen)
        params = dict(zip(inner.invars[:num_params], range(num_params), strict=True))
        batch = inner.invars[num_params : num_params + num_batch]
        self._roles: dict[Any, Piece | Data] = {v: Piece(i) for v, i in params.items()}
        self._roles |= {v: Data("batch", i) for i, v in enumerate(batch)}
        self._roles |= {v: Data("rng") for v in inner.invars[num_params + num_batch :]}
        self._roles |= {v: Data("const", i) for i, v in enumerate(inner.constvars)}
        self.row_model = row_model
        # What no result needs must not count as a reader of a value: no cotangent would ever come from it.
        eqns, _ = jaxprs.prune(inner.eqns, inner.outvars)
        eqns, pieces = expose_pieces(eqns, inner.outvars, params)
        eqns, cuts, outvars = _resolve_marks(eqns, inner.outvars)
        self._roles |= pieces
        self.eqns, self._slice = eqns, jaxprs.Slicer(eqns)
        self.results = dict(zip(result_names, outvars, strict=True))
        self._assign(cuts)

    def _assign(self, cuts: Sequence[int]) -> None:
        """Give each equation that depends on parameters and the batch its segment; others (-1) repeat."""
        by_param = {v for v, r in self._roles.items() if isinstance(r, Piece)}
        by_data = {v for v, r in self._roles.items() if isinstance(r, Data) and r.kind != "const"}
        self.segment_of: list[int] = []
        self._made_in: dict[Any, int] = {}
        segment, waiting, remaining = -1, True, list(cuts)
        crossing: dict[Any, set[int]] = {}
        for position, eqn in enumerate(self.eqns):
            while remaining and remaining[0] <= position:
                waiting, _ = True, remaining.pop(0)
            reads = [a for a in eqn.invars if not jaxprs.is_literal(a)]
            param, data = any(a in by_param for a in reads), any(a in by_data for a in reads)
            by_param.update(eqn.outvars if param else ())
            by_data.update(eqn.outvars if data else ())
            if not (param and data):
                self.segment_of.append(-1)
                continue
            segment, waiting = segment + waiting, False
            self.segment_of.append(segment)
            self._made_in.update(dict.fromkeys(eqn.outvars, segment))
            for a in reads:
                if self._made_in.get(a, segment) < segment:
                    crossing.setdefault(a, set()).add(segment)
        self.num_segments, self._by_param = segment + 1, by_param
        last = segment
        self.result_segment = {
            n: last if jaxprs.is_literal(a) else self._made_in.get(a, last) for n, a in self.results.items()
        }
        made = [v for e in self.eqns for v in e.outvars if v in crossing]
        model = self.row_model
        follows = model.follows if model and len(model.follows) == len(made) else (None,) * len(made)
        self.values = [
            Value(v, self._made_in[v], tuple(sorted(crossing[v])), f)
            for v, f in zip(made, follows, strict=True)
        ]
        self._value_ids = {value.var: i for i, value in enumerate(self.values)}

    def depends_on_params(self, atom: Any) -> bool:
        """Whether a result depends on any parameter that is not frozen."""
        if jaxprs.is_literal(atom):
            return False
        _, free = self._slice([atom])
        return any(isinstance(r, Piece) and not self._frozen[r.leaf] for r in map(self._roles.get, free))

    def piece_spec(self, var: Any) -> jax.ShapeDtypeStruct:
        """Shape and dtype of a variable."""
        return jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype)

    def unit(self, start: int, stop: int) -> Unit:
        """Extract segments `start` to `stop` (exclusive) as one function."""
        outputs = [
            i
            for i, v in enumerate(self.values)
            if start <= v.producer < stop and any(c >= stop for c in v.consumers)
        ]
        results = [n for n, s in self.result_segment.items() if start <= s < stop]
        output_vars = [self.values[i].var for i in outputs]
        atoms = [self.results[n] for n in results]
        given = {v.var for v in self.values if v.producer < start}
        eqns, free = self._slice([*output_vars, *atoms], given)
        eqns, literals = lift_literals(eqns, self._by_param)
        inputs = [v for v in free if v in given]
        origins = {v: self._roles.get(v) for v in free}
        pieces = {v: r for v, r in origins.items() if isinstance(r, Piece)}
        sources = {v: r for v, r in origins.items() if isinstance(r, Data)}
        params, data = list(pieces), list(sources)
        assert len(inputs) + len(params) + len(data) == len(free), (
            "a segment reads a variable of unknown origin"
        )
        roles = [*sources.values(), *(r for _, r in literals)]
        data += [v for v, _ in literals]
        key = jaxprs.equations_key(eqns, [*params, *inputs, *data], [*output_vars, *atoms])
        drawn = self.random_rows(eqns)
        traits = (
            [self._frozen[p.leaf] for p in pieces.values()],
            [str(self.values[i].follows) for i in [*(self._value_ids[v] for v in inputs), *outputs]],
            [r.kind for r in roles],
            results,
            [str(drawn.get(v)) for e in eqns if e.primitive.name.startswith(_DRAWS) for v in e.outvars],
        )
        return Unit(
            start,
            stop,
            tuple(eqns),
            tuple(pieces.values()),
            tuple(params),
            tuple(self._value_ids[v] for v in inputs),
            tuple(inputs),
            tuple(roles),
            tuple(data),
            tuple(outputs),
            tuple(output_vars),
            tuple(results),
            tuple(atoms),
            jaxprs.text_key(key, traits),
        )

    def random_rows(self, eqns: Sequence[Any]) -> dict[Any, row_analysis.RowDim]:
        """The variables among some equations that hold random draws with a row dim, each with that dim."""
        if self.row_model is None:
            return {}
        made = {v for e in eqns for v in e.outvars}
        draws = [e for e in self.eqns if e.primitive.name.startswith(_DRAWS)]
        return {
            draws[i].outvars[0]: d for i, d in self.row_model.draws.items() if draws[i].outvars[0] in made
        }

    def read_report(self, report: row_analysis.RowsReport) -> RowModel:
        """Put what the row analysis of this trace found in terms that hold for every trace."""
        numbers: dict[Any, int] = {}
        for eqn in self.eqns:
            if eqn.primitive.name.startswith(_DRAWS):
                numbers[eqn.outvars[0]] = len(numbers)
        found = {numbers[v]: d for v, d in report.random_rows if v in numbers}
        follows = tuple(report.of(v.var) for v in self.values)
        return RowModel(follows, found, len(found) < len(report.random_rows))


def lift_literals(
    eqns: Sequence[Any], by_param: Container[Any] = ()
) -> tuple[list[Any], list[tuple[Any, Data]]]:
    """Make the integers that layers differ in inputs, so that such layers are of one class.

    Those folded into keys, and which entry of a stack (of keys, of rates) a layer takes.

    Args:
        eqns: Equations in order.
        by_param: Variables that depend on parameters; slices of these stay.

    Returns:
        The equations, and the new variables with their values.
    """
    out, lifted = [], []

    def lift(value: Any, aval: Any) -> Any:
        var = jex.Var(aval)
        lifted.append((var, Data("literal", int(value), str(aval.dtype))))
        return var

    for eqn in eqns:
        name = eqn.primitive.name
        if name.startswith(("random_", "threefry")) and any(map(jaxprs.is_literal, eqn.invars)):
            scalar = [jaxprs.is_literal(a) and a.aval.ndim == 0 for a in eqn.invars]
            invars = [lift(a.val, a.aval) if s else a for a, s in zip(eqn.invars, scalar, strict=True)]
            out.append(eqn.replace(invars=invars))
        elif _takes_one(eqn) and eqn.invars[0] not in by_param:
            entry = jaxprs.entry_eqns(eqn.invars[0].aval)
            index = lift(eqn.params["start_indices"][0], entry.index.aval)
            renamed = {entry.stack: eqn.invars[0], entry.index: index, entry.result: eqn.outvars[0]}
            out += [jaxprs.rename(e, renamed) for e in entry.eqns]
        else:
            out.append(eqn)
    return out, lifted


def _takes_one(eqn: Any) -> bool:
    """Whether an equation takes one entry along the first dim."""
    if eqn.primitive.name != "slice" or jaxprs.is_literal(eqn.invars[0]):
        return False
    start, stop, strides = (eqn.params[k] for k in ("start_indices", "limit_indices", "strides"))
    shape = eqn.invars[0].aval.shape
    whole = not any(start[1:]) and tuple(stop[1:]) == shape[1:] and strides in (None, (1,) * len(shape))
    return bool(whole and shape) and stop[0] == start[0] + 1 and shape[0] > 1
