"""How every value of a program follows the rows of the batch, and where a program mixes them.

A batch can be split over devices and microbatches if the parts' sums add up to the sums of the whole.
`analyse` shows this from the jaxpr alone, or names the equations that stand in the way; `check` words it for
the model's author. The analysis errs on one side: what it doesn't report is sound, what it reports may be
harmless. It can't see into hand-written derivatives (`custom_vjp`), nor into kernels.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Var

from hetjax.errors import UserError
from hetjax.jaxprs import open_jaxpr
from hetjax.rows.values import Kind, RowDim, Value
from hetjax.rows.walk import Misaligned, Mixture, Walk

__all__ = [
    "Follows",
    "Independent",
    "Mixture",
    "Opaque",
    "PerRows",
    "RowDim",
    "RowsReport",
    "analyse",
    "check",
]


@dataclasses.dataclass(frozen=True)
class Independent:
    """A value that does not depend on the batch.

    Attributes:
        growth: k where the value is proportional to rows**k: 0 for a plain constant, 1 for a count of rows.
            None where it changes with the rows in another way, or where only one trace was given.
    """

    growth: int | None


@dataclasses.dataclass(frozen=True)
class PerRows:
    """A value that was reduced over the rows it was computed from, such as a sum.

    Attributes:
        linear: It is a linear function of sums over the rows. False: parts can't be put together.
        growth: 1 where the parts of a batch add up to the whole; 0 where the whole is the mean of parts with
            equal rows. None where rows are mixed, or where only one trace was given.
    """

    linear: bool
    growth: int | None


@dataclasses.dataclass(frozen=True)
class Opaque:
    """A value that depends on the rows in a layout that is not known."""


Follows = Independent | RowDim | PerRows | Opaque


@dataclasses.dataclass(frozen=True)
class RowsReport:
    """What `analyse` found.

    Attributes:
        mixtures: Everything that mixes rows, in the order of the program, also where no output depends on it.
        random_rows: Random bits drawn in the shape of the rows by a key that is the same for all rows: parts
            of a batch draw others than the whole. The variable may be of an inner jaxpr.
        counted: Whether two traces were compared, so that growths are known.
        misaligned: Why the second trace could not be used, if so.
    """

    mixtures: tuple[Mixture, ...]
    random_rows: tuple[tuple[Var, RowDim], ...]
    counted: bool
    misaligned: str | None
    _values: dict[Any, Value]
    _keys: tuple[Any, ...]

    def of(self, var: Any) -> Follows:
        """How a variable of the analysed jaxpr, not of an inner one, follows the rows.

        Args:
            var: A variable or a literal. A literal counts as a plain constant: see `analyse` for outputs.
        """
        value, growth = self._value(var), self.growth(var)
        if value.kind is Kind.CONST:
            return Independent(growth)
        if value.kind is Kind.ROWS:
            return value.row
        if value.kind is Kind.SUM:
            return PerRows(value.linear, growth)
        return Opaque()

    def growth(self, var: Any) -> int | None:
        """The power of the number of rows with which a variable scales.

        Args:
            var: A variable or a literal of the analysed jaxpr.

        Returns:
            See `Independent` and `PerRows`. For a `RowDim` 0, or k where each row's part is proportional to
            rows**k, as in `x / rows`: such a value holds only for the number of rows it was computed with,
            and may not be split or put together anew. None where rows are mixed, where it depends on the
            place in the batch, or for one trace.
        """
        value = self._value(var)
        unknown = not self.counted or value.causes or value.placed or value.kind is Kind.OPAQUE
        return None if unknown else value.growth

    def causes(self, var: Any) -> tuple[Mixture, ...]:
        """The mixtures that a variable depends on.

        Args:
            var: A variable or a literal of the analysed jaxpr.
        """
        causes = self._value(var).causes
        return tuple(m for key, m in zip(self._keys, self.mixtures, strict=True) if key in causes)

    def depends_on_batch(self, var: Any) -> bool:
        """Whether a variable depends on the values of the batch, or on bits drawn for each row.

        Args:
            var: A variable or a literal of the analysed jaxpr. `zeros((rows, d))` has a `RowDim` and gives
                False.
        """
        return self._value(var).data

    def _value(self, var: Any) -> Value:
        if isinstance(var, Literal):
            return self._values.get(id(var), Value())
        assert var in self._values, f"{var} is not a variable of the analysed jaxpr"
        return self._values[var]


def analyse(
    jaxpr: Jaxpr | ClosedJaxpr,
    rows: int,
    input_rows: Sequence[RowDim | None],
    *,
    other: Jaxpr | ClosedJaxpr | None = None,
    other_rows: int | None = None,
) -> RowsReport:
    """Tell how every variable of a jaxpr follows the rows of the batch.

    With a second trace at another number of rows, sizes that follow the rows can be told from those that
    don't, and constants that hold the number of rows (`1 / rows`) are recognised. Choose numbers of rows that
    are at least 2 and some way apart, such as 6 and 10.

    Args:
        jaxpr: The program; with a ClosedJaxpr its constants are compared, too.
        rows: Number of rows that it was traced with, at least 2.
        input_rows: Where the rows lie in each input; None for what does not depend on the batch.
        other: The same program traced with another number of rows.
        other_rows: That number.

    Returns:
        The report. Without a usable `other`, sums that were divided by a number of rows look like sums, and
        what depends on a row's place in the batch may go unnoticed.
    """
    assert rows >= 2, f"analyse needs a trace with at least 2 rows, not {rows}: dims of size 1 are ambiguous."
    assert (other is None) == (other_rows is None), "analyse needs both of other and other_rows, or none."
    inner = open_jaxpr(jaxpr)[0]
    assert len(inner.invars) == len(input_rows), f"{len(input_rows)} entries for {len(inner.invars)} inputs"
    for var, row in zip(inner.invars, input_rows, strict=True):
        shape = getattr(var.aval, "shape", ())
        assert row is None or shape[row.dim] == row.size(rows), f"input {var.aval} and {row}"
    ins = [Value() if row is None else Value(Kind.ROWS, row) for row in input_rows]
    misaligned = None
    if other is not None and other_rows is not None:
        assert other_rows >= 2 and other_rows != rows, f"a second trace with {other_rows} rows, not {rows}"
        try:
            return _report(Walk(rows, other_rows), jaxpr, other, ins, None)
        except Misaligned as error:
            misaligned = f"the traces with {rows} and {other_rows} rows are different programs: {error}"
    return _report(Walk(rows, None), jaxpr, None, ins, misaligned)


def _report(walk: Walk, jaxpr: Any, other: Any, ins: list[Value], misaligned: str | None) -> RowsReport:
    env: dict[Any, Value] = {}
    outs = walk.run(jaxpr, other, ins, env)
    for var, value in zip(open_jaxpr(jaxpr)[0].outvars, outs, strict=True):
        if isinstance(var, Literal):
            env[id(var)] = value
    return RowsReport(
        mixtures=tuple(walk.mixtures.values()),
        random_rows=tuple(walk.draws.values()),
        counted=other is not None,
        misaligned=misaligned,
        _values=env,
        _keys=tuple(walk.mixtures),
    )


WAYS_OUT = """\
Ways out:
  - return hetjax.Mean(total, weight) with two sums over the examples; hetjax divides once, over all parts;
  - normalise within an example: GroupNorm or LayerNorm instead of BatchNorm;
  - hetjax.trace(..., rows="whole") keeps the whole batch together: exact, but no plan splits its rows;
  - hetjax.trace(..., rows="split") if the value of each part by itself is what you mean."""


def check(report: RowsReport, total: Any, weight: Any | None = None, what: str = "The loss") -> None:
    """Raise unless parts of a batch put together give a value of the whole batch.

    Args:
        report: What `analyse` found.
        total: The scalar output: `total` of a `hetjax.Mean`, or a plain scalar.
        weight: `weight` of a `hetjax.Mean`; None for a plain scalar, which means a mean over equal rows.
        what: What the outputs are, at the head of the message.

    Raises:
        UserError: Rows are mixed, or the value does not grow with the rows as it has to; with the ways out.
    """
    parts = [("", total)] if weight is None else [("total", total), ("weight", weight)]
    found = list(dict.fromkeys(m for _, var in parts for m in report.causes(var)))
    if found:
        shown = [f"  - {m}" for m in found[:5]]
        more = [f"  - and {len(found) - 5} more"] if len(found) > 5 else []
        sure = any(m.known for m in found)
        mixes = "mixes" if sure else "may mix"
        head = f"{what} {mixes} the rows of the batch, so it can't be computed part by part:"
        raise UserError("\n".join([head, *shown, *more, WAYS_OUT]))
    for name, var in parts:
        follows = report.of(var)
        label = f"{what}'s {name}" if name else what
        if isinstance(follows, RowDim | Opaque):
            raise UserError(
                f"{label} is not reduced over the rows of the batch. Return a sum or a mean over them."
            )
        if not report.counted or report._value(var).zero:
            continue
        if problem := _growth_problem(label, name, follows.growth):
            raise UserError(problem)


def _growth_problem(label: str, name: str, growth: int | None) -> str | None:
    if growth == (1 if name else 0):
        return None
    if not name:
        return (
            f"{label} is a plain scalar, which hetjax reads as a mean over the rows, and this one "
            f"{'is a sum over them' if growth == 1 else 'changes with their number in another way'}. "
            "Divide it by the number of rows, or return hetjax.Mean(total, weight)."
        )
    kind = "does not grow with the rows" if growth == 0 else "does not grow as the number of rows"
    return (
        f"{label} {kind}, so those of parts don't add up to that of the whole. Return the sum over the "
        "examples, not their mean, as total, and how many there were as weight: "
        "hetjax.Mean(losses.sum(), losses.size)."
    )
