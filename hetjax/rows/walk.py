"""Walk a jaxpr, or two traces of one in step, and apply the row rules: calls, loops and branches included."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Generator, Sequence
from typing import Any

import numpy as np
from jax.extend.core import JaxprEqn, Literal, Var

from hetjax.jaxprs import open_jaxpr
from hetjax.rows.rules import RANDOM, RULES
from hetjax.rows.source import describe
from hetjax.rows.values import (
    COUNT,
    PLACE,
    SUM_TO_ROWS,
    Call,
    Kind,
    Mixes,
    Origin,
    RowDim,
    Value,
    causes_of,
    joined,
    kinds,
    meet,
    unindexed,
)

CALLS = frozenset(
    "jit pjit closed_call core_call call remat remat2 remat_opt checkpoint custom_jvp_call custom_vjp_call"
    " custom_vjp_call_jaxpr custom_vmap_call composite eval_jaxpr".split()
)
BODIES = ("jaxpr", "call_jaxpr", "fun_jaxpr", "call")
MAX_PASSES = 12


@dataclasses.dataclass(frozen=True)
class Mixture:
    """A place where a program combines different rows of the batch.

    Attributes:
        primitive: Name of the JAX primitive.
        reason: What it does, as a clause that starts with "it" or a noun.
        where: File, line and function of the user's code, as far as they can be found.
        shapes: Shapes of its inputs and outputs.
        known: False where hetjax has no rule for the primitive, and it may be harmless.
    """

    primitive: str
    reason: str
    where: str
    shapes: str
    known: bool = True

    def __str__(self) -> str:
        return f"{self.where}: {self.reason} ({self.primitive}, {self.shapes})"


class Misaligned(Exception):
    """Two traces at different numbers of rows are not the same program."""


class Walk:
    """One pass of the analysis.

    Args:
        rows: Number of rows of the trace.
        other_rows: That of a second trace, or None.
    """

    def __init__(self, rows: int, other_rows: int | None):
        self.rows, self.other_rows = rows, other_rows
        self.mixtures: dict[Any, Mixture] = {}
        self.draws: dict[Any, tuple[Var, RowDim]] = {}
        self.stack: list[JaxprEqn] = []

    def run(self, jaxpr: Any, other: Any, ins: Sequence[Value], env: dict | None = None) -> list[Value]:
        """Values of the outputs of a jaxpr.

        Args:
            jaxpr: A Jaxpr or ClosedJaxpr.
            other: Its second trace, or None.
            ins: Values of its inputs.
            env: Filled with the value of every variable.

        Raises:
            Misaligned: The two traces are not the same program.
        """
        env = {} if env is None else env
        (jaxpr, consts), (other, other_consts) = open_jaxpr(jaxpr), open_jaxpr(other)
        partners: list[Any] = [None] * len(jaxpr.eqns)
        if other is not None:
            if len(other.eqns) != len(jaxpr.eqns) or len(other.constvars) != len(jaxpr.constvars):
                raise Misaligned(f"{len(jaxpr.eqns)} equations and {len(other.eqns)}")
            partners = other.eqns
        for i, var in enumerate(jaxpr.constvars):
            pair = (consts[i], other_consts[i]) if i < min(len(consts), len(other_consts)) else None
            env[var] = self.constant(var.aval, other.constvars[i].aval if other else None, pair)
        env.update(zip(jaxpr.invars, ins, strict=True))
        for eqn, partner in zip(jaxpr.eqns, partners, strict=True):
            atoms = [None] * len(eqn.invars) if partner is None else partner.invars
            same = partner is None or (
                partner.primitive is eqn.primitive
                and len(atoms) == len(eqn.invars)
                and len(partner.outvars) == len(eqn.outvars)
            )
            if not same:
                raise Misaligned(
                    f"{eqn.primitive.name} and {partner.primitive.name} in {describe([*self.stack, eqn])}"
                )
            values = [self.read(env, a, b) for a, b in zip(eqn.invars, atoms, strict=True)]
            env.update(zip(eqn.outvars, self.step(eqn, partner, values), strict=True))
        results = [None] * len(jaxpr.outvars) if other is None else other.outvars
        return [self.read(env, a, b) for a, b in zip(jaxpr.outvars, results, strict=True)]

    def read(self, env: dict[Var, Value], atom: Any, other: Any) -> Value:
        """Value of a variable or a literal."""
        if not isinstance(atom, Literal):
            return env[atom]
        if other is not None and not isinstance(other, Literal):
            raise Misaligned(f"a constant {atom.val} and a computed value")
        return self.constant(
            atom.aval, *(None, None) if other is None else (other.aval, (atom.val, other.val)), atom.val
        )

    def constant(self, aval: Any, other: Any, pair: tuple[Any, Any] | None, only: Any = None) -> Value:
        """Value of a constant, from the constants of both traces where they are known."""
        follow = self.follow(aval, other)
        if follow:
            return self.verify(self.call("constant", {}, [], [], [aval], [follow]), 0, Value())
        if pair is None:
            return Value(zero=only is not None and bool(np.all(np.asarray(only) == 0)))
        try:
            a, b = (np.asarray(x, dtype=np.float64) for x in pair)
        except (TypeError, ValueError):
            return Value()
        coarse = np.dtype(aval.dtype).itemsize <= 2
        return Value(growth=self.power(a, b, 2e-2 if coarse else 1e-4), zero=bool(np.all(a == 0)))

    def power(self, a: np.ndarray, b: np.ndarray, tolerance: float) -> int | None:
        """The power of the number of rows that leads from one constant to the other."""
        if np.array_equal(a, b, equal_nan=True):
            return 0
        where = a != 0
        if not np.array_equal(where, b != 0) or not np.all(np.isfinite(a[where]) & np.isfinite(b[where])):
            return None
        ratios = a[where] / b[where]
        if ratios.min() <= 0 or ratios.max() > ratios.min() * (1 + tolerance):
            return None
        assert self.other_rows is not None, "constants are compared where there are two traces"
        power = math.log(ratios.max()) / math.log(self.rows / self.other_rows)
        return round(power) if abs(power - round(power)) < tolerance and round(power) else None

    def follow(self, aval: Any, other: Any) -> tuple[RowDim, ...] | None:
        """The dims whose size differs between the traces; None where there is one trace."""
        if other is None:
            return None
        shape, shape_other = getattr(aval, "shape", ()), getattr(other, "shape", ())
        if len(shape) != len(shape_other):
            raise Misaligned(f"shapes {shape} and {shape_other}")
        dims = []
        for dim, (size, size_other) in enumerate(zip(shape, shape_other, strict=True)):
            if size != size_other:
                whole = size * self.other_rows == size_other * self.rows and size % self.rows == 0
                dims.append(RowDim(dim, 1, size // self.rows if whole else 0))
        return tuple(dims)

    def call(self, name: str, params: Any, ins: Any, avals: Any, out_avals: Any, follow: Any) -> Call:
        """A `Call` of this trace."""
        return Call(name, params, ins, avals, out_avals, follow, self.rows)

    def step(self, eqn: JaxprEqn, other: JaxprEqn | None, ins: Sequence[Value]) -> list[Value]:
        """Values of the outputs of one equation; a mixture in it is recorded."""
        if not eqn.outvars:
            return []
        name = eqn.primitive.name
        others = [None] * len(eqn.outvars) if other is None else [v.aval for v in other.outvars]
        out_avals = [v.aval for v in eqn.outvars]
        follow = [self.follow(a, b) for a, b in zip(out_avals, others, strict=True)]
        call = self.call(name, eqn.params, ins, [v.aval for v in eqn.invars], out_avals, follow)
        with self.inside(eqn):
            try:
                if other is not None and any(v.data for v in ins):
                    _same_numbers(eqn.params, other.params)
                outs = self.apply(call, other)
            except Mixes as mixes:
                return self.mixed(call, mixes)
            outs = list(outs) if isinstance(outs, list) else [outs] * len(out_avals)
            for i, value in enumerate(outs):
                try:
                    outs[i] = self.verify(call, i, value)
                except Mixes as mixes:
                    outs[i] = self.mixed(call, mixes)[i]
            return outs

    @contextlib.contextmanager
    def inside(self, eqn: JaxprEqn) -> Generator[None]:
        """Note the equation for the source location of what is found in it."""
        self.stack.append(eqn)
        try:
            yield
        finally:
            self.stack.pop()

    def apply(self, c: Call, other: JaxprEqn | None) -> Value | list[Value]:
        """Apply the rule of a primitive."""
        found = kinds(c.ins)
        if Kind.OPAQUE in found:
            if any(v.kind is Kind.OPAQUE and not v.data for v in c.ins):
                raise Mixes(PLACE)
            return self.recover(c, causes_of(c.ins))
        if c.name in CALLS:
            key = next((k for k in BODIES if k in c.params), None)
            if key is not None and len(open_jaxpr(c.params[key])[0].invars) == len(c.ins):
                return self.run(c.params[key], other and other.params[key], c.ins)
        if Kind.ROW in found:
            return one_row(c)
        if c.name in ("scan", "while", "cond"):
            return getattr(self, f"{c.name}_")(c, other)
        if c.name in RULES:
            return RULES[c.name](c)
        if all(v.kind is Kind.CONST and v.growth == 0 for v in c.ins):
            return Value()
        raise Mixes(f"hetjax does not know how {c.name!r} treats rows", known=False)

    def verify(self, c: Call, i: int, value: Value) -> Value:
        """Hold what a rule said against the shapes of the two traces."""
        follow = c.follow[i]
        if follow is None or value.kind in (Kind.OPAQUE, Kind.ROW):
            return value
        if value.kind is Kind.ROWS:
            row = value.row
            if len(follow) != 1 or follow[0].dim != row.dim or not follow[0].inner:
                raise Mixes("the rows come out in other dims than one whole dim")
            assert row.size(self.rows) == c.out_avals[i].shape[row.dim], f"rule of {c.name}: {row}"
            return value
        if not follow:
            return value
        if value.kind is Kind.SUM:
            raise Mixes(SUM_TO_ROWS)
        if len(follow) > 1 or not follow[0].inner:
            return Value(Kind.OPAQUE, origin=Origin.POSITION)
        if c.name in RANDOM:
            self.draws[tuple(map(id, self.stack))] = (self.stack[-1].outvars[i], follow[0])
            return Value(Kind.ROWS, follow[0], Origin.DRAWN)
        origin = Origin.FLAT if c.name == "broadcast_in_dim" else Origin.POSITION
        return dataclasses.replace(value, kind=Kind.ROWS, row=follow[0], origin=origin)

    def mixed(self, c: Call, mixes: Mixes) -> list[Value]:
        """What comes out of a mixture, which is recorded if it depends on the batch."""
        if not any(v.data for v in c.ins):
            return self.beside(c)
        key = tuple(map(id, self.stack))
        shapes = " ".join(_short(a) for a in c.avals) + " -> " + " ".join(_short(a) for a in c.out_avals)
        self.mixtures[key] = Mixture(c.name, mixes.why, describe(self.stack), shapes, mixes.known)
        return self.recover(c, causes_of(c.ins) | {key})

    def recover(self, c: Call, causes: frozenset[Any]) -> list[Value]:
        """The likeliest layout of what comes out of a mixture."""
        outs = []
        for aval, follow in zip(c.out_avals, c.follow, strict=True):
            out = Value(Kind.OPAQUE, causes=causes)
            for value, source in zip(c.ins, c.avals, strict=True):
                dims = None if follow is None else [f.dim for f in follow]
                if value.kind is Kind.ROWS and source.shape == aval.shape and dims in (None, [value.row.dim]):
                    out = Value(Kind.ROWS, value.row, causes=causes)
            if out.kind is Kind.OPAQUE and follow is not None:
                if not follow:
                    out = Value(Kind.SUM, linear=False, causes=causes)
                elif len(follow) == 1 and follow[0].inner == 1:
                    out = Value(Kind.ROWS, follow[0], causes=causes)
            outs.append(out)
        return outs

    def beside(self, c: Call) -> list[Value]:
        """What comes out where a rule does not apply, and nothing depends on the batch."""
        outs = []
        for follow in c.follow:
            if not follow:
                outs.append(Value(growth=None if c.counted else 0))
            elif len(follow) == 1 and follow[0].inner:
                outs.append(Value(Kind.ROWS, follow[0], Origin.POSITION))
            else:
                outs.append(Value(Kind.OPAQUE, origin=Origin.POSITION))
        return outs

    def join(self, a: Value, b: Value) -> Value:
        """One value for what is either of two."""
        if a == b:
            return a
        for kind in (Kind.OPAQUE, Kind.ROW):
            if kind in (a.kind, b.kind):
                return Value(
                    kind, origin=max(v.origin for v in (a, b) if v.kind is kind), causes=a.causes | b.causes
                )
        return joined(
            self.call("select_n", {}, [], [], [], [None if self.other_rows is None else ()]), [a, b]
        )

    def settle(self, step: Callable[[list[Value]], list[Value]], carry: list[Value]) -> list[Value]:
        """Join a loop's carry with what its body makes of it until nothing changes.

        Args:
            step: From the carry to the outputs of the body, of which the first are the next carry.
            carry: What the loop starts with.

        Returns:
            The carry, then what else comes out of the body.
        """
        for _ in range(MAX_PASSES):
            outs = step(carry)
            new = [self.join(a, b) for a, b in zip(carry, outs, strict=False)]
            if new == carry:
                return carry + outs[len(carry) :]
            carry = new
        raise Mixes("what the loop carries was not understood", known=False)

    def scan_(self, c: Call, other: JaxprEqn | None) -> list[Value]:
        """Values of a scan: over layers or time a fixed point, over the rows row by row."""
        body, body_other = c.params["jaxpr"], other and other.params["jaxpr"]
        num_consts, num_carry = _scan_sizes(c, open_jaxpr(body)[0])
        consts, carry = list(c.ins[:num_consts]), list(c.ins[num_consts : num_consts + num_carry])
        xs = list(c.ins[num_consts + num_carry :])
        slices = [_slice(v) for v in xs]
        over_rows = other is not None and other.params["length"] != c.params["length"]
        by_row = [v for v in xs if v.kind is Kind.ROWS and v.row.dim == 0]
        if over_rows or by_row:
            row = meet(by_row).row if by_row else RowDim(0)
            outs = self.scan_rows(body, body_other, consts, carry, slices, num_consts)
            return outs[:num_carry] + [_stacked_rows(v, row) for v in outs[num_carry:]]
        outs = self.settle(lambda carry: self.run(body, body_other, consts + carry + slices), carry)
        return outs[:num_carry] + [_stacked(v) for v in outs[num_carry:]]

    def scan_rows(
        self, body: Any, other: Any, consts: Any, carry: Any, slices: Any, num_consts: int
    ) -> list[Value]:
        """Values of a scan whose iterations are the rows: what it carries may not depend on them."""
        jaxpr = open_jaxpr(body)[0]
        inputs = jaxpr.invars[num_consts : num_consts + len(carry)]
        kept = [a is b for a, b in zip(inputs, jaxpr.outvars, strict=False)]
        # A carry that changes counts the rows: it is the row's place in the batch.
        if any(v.data and not keep for v, keep in zip(carry, kept, strict=True)):
            raise Mixes("the scan over the rows carries a value from row to row")
        carry = [v if keep else Value(growth=None) for v, keep in zip(carry, kept, strict=True)]
        saved = dict(self.mixtures)
        outs = self.run(body, other, [*consts, *carry, *slices])
        for value, keep in zip(outs, kept, strict=False):
            if value.data and not keep:
                self.mixtures = saved
                raise Mixes("the scan over the rows carries a value from row to row")
        return [*carry, *outs[len(carry) :]]

    def while_(self, c: Call, other: JaxprEqn | None) -> list[Value]:
        """Values of a while loop."""
        num_cond, num_body = c.params["cond_nconsts"], c.params["body_nconsts"]
        of_cond, of_body = list(c.ins[:num_cond]), list(c.ins[num_cond : num_cond + num_body])
        cond, body = (c.params[k] for k in ("cond_jaxpr", "body_jaxpr"))
        cond_other, body_other = (other and other.params[k] for k in ("cond_jaxpr", "body_jaxpr"))
        carry = list(c.ins[num_cond + num_body :])
        carry = self.settle(lambda carry: self.run(body, body_other, of_body + carry), carry)
        (goes_on,) = self.run(cond, cond_other, of_cond + carry)
        if goes_on.data:
            raise Mixes("the number of iterations depends on the rows of the batch")
        if goes_on.growth != 0 and any(v.data for v in carry):
            raise Mixes("the number of iterations follows the number of rows")
        return carry

    def cond_(self, c: Call, other: JaxprEqn | None) -> list[Value]:
        """Values of a choice between branches."""
        chosen, ins = c.ins[0], list(c.ins[1:])
        branches = c.params["branches"]
        others = other.params["branches"] if other is not None else [None] * len(branches)
        results = [self.run(a, b, ins) for a, b in zip(branches, others, strict=True)]
        outs = results[0]
        for result in results[1:]:
            outs = [self.join(a, b) for a, b in zip(outs, result, strict=True)]
        if chosen.data:
            raise Mixes("the choice of a branch depends on the rows of the batch")
        if chosen.growth != 0 and any(v.data for v in outs):
            raise Mixes(COUNT)
        return outs


def one_row(c: Call) -> Value:
    """Value of whatever a scan over the rows computes from the row that it is at."""
    if kinds(c.ins) & {Kind.SUM, Kind.ROWS}:
        raise Mixes(SUM_TO_ROWS)
    if c.counted and any(v.kind is Kind.CONST and v.growth != 0 for v in c.ins):
        raise Mixes(COUNT)
    return Value(Kind.ROW, causes=causes_of(c.ins))


def _scan_sizes(c: Call, body: Any) -> tuple[int, int]:
    """Number of constants and of carried values, by their ranks: jax 0.12 has other parameters than 0.10."""

    def whole(atoms: Any, avals: Any) -> int:  # how many a scan does not take or stack along a new dim
        return sum(len(a.aval.shape) == len(b.shape) for a, b in zip(atoms, avals, strict=True))

    num_carry = whole(body.outvars, c.out_avals)
    return whole(body.invars, c.avals) - num_carry, num_carry


def _moved(value: Value, by: int) -> Value:
    return unindexed(value.at(value.row.dim + by))


def _slice(value: Value) -> Value:
    if value.kind is not Kind.ROWS:
        return value
    if value.row.dim:
        return unindexed(value.at(value.row.dim - 1))
    if value.data:
        return Value(Kind.ROW, growth=value.growth, causes=value.causes)
    return Value(growth=None if value.placed else value.growth)


def _stacked(value: Value) -> Value:
    if value.kind is not Kind.ROWS:
        return value
    return _moved(value, 1)


def _stacked_rows(value: Value, row: RowDim) -> Value:
    if value.kind is Kind.CONST:
        origin = Origin.POSITION if value.growth is None else Origin.TILED
        return Value(Kind.ROWS, row, origin, value.growth)
    if value.kind is not Kind.ROW:
        raise Mixes(SUM_TO_ROWS)
    return Value(Kind.ROWS, row, growth=value.growth, causes=value.causes)


def _same_numbers(params: Any, other: Any) -> None:
    """Raise `Mixes` where a number among the parameters, such as an exponent, follows the number of rows."""
    for key, value in params.items():
        unlike = isinstance(value, int | float) and value == value and value != other.get(key)
        if unlike and key != "length":
            raise Mixes(COUNT)


def _short(aval: Any) -> str:
    return f"{getattr(aval, 'dtype', '?')}[{','.join(map(str, getattr(aval, 'shape', ())))}]"
