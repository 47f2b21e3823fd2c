"""What is known of one array, and how several come together: the lattice behind `hetjax.rows`.

Each value carries a growth: it is rows**(growth - 1) times a sum over the rows. A sum over the rows has
growth 1 (parts of a batch add up), a mean over them and a plain constant have growth 0, `1 / rows` has -1.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True)
class RowDim:
    """Where the rows lie in an array: dim `dim` has size outer * rows * inner, row-major.

    With `outer == 1` a contiguous range of rows is a contiguous slice of the array.
    """

    dim: int
    outer: int = 1
    inner: int = 1

    def size(self, rows: int) -> int:
        """Size of the dim for a number of rows."""
        return self.outer * rows * self.inner


NOWHERE = RowDim(-1)  # the row of a value that has none


class Kind(enum.Enum):
    """What a value has to do with the rows."""

    CONST = "does not depend on the rows"
    ROWS = "has one part for each row"
    ROW = "belongs to the one row that a scan is at"
    SUM = "was reduced over the rows"
    OPAQUE = "depends on the rows in an unknown layout"


class Origin(enum.IntEnum):
    """Why a value has rows; the later one wins where two meet."""

    FLAT = 0  # the same along the whole dim, such as zeros((rows, d))
    TILED = 1  # the same for every row
    POSITION = 2  # follows the place in the batch, such as arange(rows)
    DRAWN = 3  # random bits in the shape of the rows
    DATA = 4


WHOLE = frozenset({-1})  # Value.index of an array that everywhere equals the place along its row dim
MOVED = frozenset({-2})  # Value.index of an array that holds such places, where is no longer followed


@dataclasses.dataclass(frozen=True)
class Value:
    """What is known of one array.

    Attributes:
        kind: What it has to do with the rows.
        row: Where its rows lie, for `Kind.ROWS`; else `NOWHERE`.
        origin: Why it has rows.
        growth: See the module; None where it follows the number of rows in no power of it.
        zero: It is zero everywhere.
        linear: For `Kind.SUM`, whether it is a linear function of sums over the rows.
        index: The columns of the last dim that hold the place along the row dim, or `WHOLE`, or `MOVED`.
        causes: Keys of the mixtures that it comes from.
    """

    kind: Kind = Kind.CONST
    row: RowDim = NOWHERE
    origin: Origin = Origin.DATA
    growth: int | None = 0
    zero: bool = False
    linear: bool = True
    index: frozenset[int] = frozenset()
    causes: frozenset[Any] = frozenset()

    def at(self, dim: int) -> Value:
        """The value with its rows in another dim."""
        return dataclasses.replace(self, row=dataclasses.replace(self.row, dim=dim))

    @property
    def data(self) -> bool:
        """Whether it depends on the batch or on random bits drawn for each row."""
        return self.kind is not Kind.CONST and self.origin >= Origin.DRAWN

    @property
    def flexible(self) -> bool:
        """Whether any layout of the rows within its dim describes it."""
        return self.origin in (Origin.FLAT, Origin.DRAWN)

    @property
    def placed(self) -> bool:
        """Whether it depends on the place of a row in the batch."""
        return bool(self.index) or (self.kind in (Kind.ROWS, Kind.OPAQUE) and self.origin is Origin.POSITION)


class Mixes(Exception):
    """A primitive combines different rows (`known`), or is not known not to."""

    def __init__(self, why: str, known: bool = True):
        super().__init__(why)
        self.why, self.known = why, known


@dataclasses.dataclass(frozen=True)
class Call:
    """One equation as a rule sees it.

    Attributes:
        name: Name of the primitive.
        params: Its parameters.
        ins: What is known of each input.
        avals: Shapes and dtypes of the inputs.
        out_avals: Shapes and dtypes of the outputs.
        follow: For each output the dims whose sizes differ between two traces (`inner` 0: not in proportion),
            or None where there is only one trace.
        rows: Number of rows of the trace.
    """

    name: str
    params: Mapping[str, Any]
    ins: Sequence[Value]
    avals: Sequence[Any]
    out_avals: Sequence[Any]
    follow: Sequence[tuple[RowDim, ...] | None]
    rows: int

    @property
    def counted(self) -> bool:
        """Whether growths are known, that is whether there are two traces."""
        return None not in self.follow

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the first input."""
        return tuple(self.avals[0].shape)

    @property
    def out_shape(self) -> tuple[int, ...]:
        """Shape of the first output."""
        return tuple(self.out_avals[0].shape)


Rule = Callable[[Call], Value | list[Value]]

IDENTITY = frozenset(
    "copy copy_p name stop_gradient optimization_barrier device_put sharding_constraint mesh_cast reshard"
    " pvary pcast layout_constraint preduced with_memory_space_constraint create_linear custom_lin pin unpin"
    " relayout reduced_vary_cast vary_unreduced_cast".split()
)
LINEAR = IDENTITY | frozenset("neg real imag conj reduce_precision".split())
ADDS = frozenset("add sub add_any add_jaxvals complex".split())
SCALES = (
    ADDS | LINEAR | frozenset("convert_element_type max min abs select_n".split())
)  # f(c * x) == c * f(x), c > 0
COMPARES = frozenset("eq ne lt le gt ge eq_to lt_to le_to sign is_finite".split())

SUM_TO_ROWS = "it combines each row with a value that was computed from all rows"
SUM_NONLINEAR = "it applies a non-linear function to a value that is summed over the rows"
SUM_PRODUCT = "it multiplies values that are each summed over the rows"
PLACE = "it combines rows with their place in the batch, which changes when the batch is split"
COUNT = "it uses the number of rows for more than to scale its result"
UNLIKE = "it adds up values of which some grow with the number of rows and others don't"


def kinds(values: Iterable[Value]) -> set[Kind]:
    """The kinds that occur."""
    return {v.kind for v in values}


def causes_of(values: Iterable[Value]) -> frozenset[Any]:
    """All mixtures that any of the values comes from."""
    return frozenset().union(*(v.causes for v in values))


def inexact(aval: Any) -> bool:
    """Whether an array is of floating or complex dtype."""
    return np.dtype(aval.dtype).kind in "fcV"  # bfloat16 and float8 are of kind 'V' to numpy


def meet(values: Iterable[Value]) -> Value:
    """Bring several arrays of equal shape to one row layout.

    Args:
        values: Values of kind `ROWS`.

    Returns:
        Their common layout and origin, with growth 0.

    Raises:
        Mixes: Their rows lie differently, or some depend on the place in the batch and others on the batch.
    """
    values = list(values)
    if any(v.data for v in values) and any(v.placed for v in values):
        raise Mixes(PLACE)
    base = max([v for v in values if not v.flexible] or values, key=lambda v: v.origin)
    for v in values:
        if v.row.dim != base.row.dim or not (v.flexible or v.row == base.row):
            raise Mixes("it combines rows with other rows")
    origin = max(v.origin for v in values)
    if origin is Origin.DRAWN and not base.flexible:
        origin = Origin.DATA
    return Value(Kind.ROWS, base.row, origin, causes=causes_of(values))


def grown(c: Call, values: Sequence[Value], name: str) -> int | None:
    """Growth of what primitive `name` makes of `values`.

    Args:
        c: The call.
        values: Its operands.
        name: The primitive to act as: `add` for what puts parts together, `mul` for products, empty for any
            other.

    Returns:
        The growth; None where it is in no power of the rows.

    Raises:
        Mixes: It would be None for a value that depends on the batch.
    """
    if not c.counted or causes_of(values):
        return max((v.growth or 0 for v in values), default=0)
    growths = [v.growth for v in values if v.growth is not None]
    found: int | None = None
    if len(growths) == len(values):
        if name == "mul":
            found = sum(growths)
        elif name == "div" and inexact(c.out_avals[0]):
            found = growths[0] - growths[1]
        elif name in ("integer_pow", "square"):
            found = growths[0] * c.params.get("y", 2)
        elif name in SCALES or name in COMPARES:
            unlike = {v.growth for v in values if not v.zero}
            if len(unlike) <= 1:
                found = next(iter(unlike), 0) if name in SCALES else 0
        elif not any(growths):
            found = 0
    if found is None and any(v.data for v in values):
        raise Mixes(UNLIKE if name in ADDS and len(growths) == len(values) else COUNT)
    return found


def joined(c: Call, values: Sequence[Value], layout: Callable[[RowDim], RowDim] = lambda row: row) -> Value:
    """Result of a primitive that moves or puts together its operands without computing.

    Args:
        c: The call.
        values: The operands that are moved.
        layout: Where the rows lie afterwards; may raise `Mixes`.

    Returns:
        The value of each output.

    Raises:
        Mixes: Rows meet other rows or a sum over the rows.
    """
    found, growth = kinds(values), grown(c, values, "add")
    if Kind.SUM in found:
        if Kind.ROWS in found:
            raise Mixes(SUM_TO_ROWS)
        linear = all(v.linear for v in values)
        return Value(Kind.SUM, growth=growth, linear=linear, causes=causes_of(values))
    if Kind.ROWS not in found:
        return Value(growth=growth, zero=all(v.zero for v in values))
    if len(values) == 1:
        (value,) = values
        row = layout(value.row)
        if value.index != WHOLE or row.size(c.rows) != value.row.size(c.rows):
            value = unindexed(value)
        return dataclasses.replace(value, row=row)
    met = meet(v for v in values if v.kind is Kind.ROWS)
    return dataclasses.replace(met, row=layout(met.row), growth=growth)


def summed(value: Value) -> Value:
    """The sum of a value over all its rows."""
    if value.data:
        if value.index:
            raise Mixes(PLACE)
        return Value(Kind.SUM, growth=(value.growth or 0) + 1, causes=value.causes)
    return Value(growth=None if value.placed or value.growth is None else value.growth + 1, zero=value.zero)


def bilinear_sum(sides: Sequence[Value], growth: int | None) -> Value:
    """A product of which one side was summed over the rows.

    Args:
        sides: The two factors, at least one of kind `SUM`.
        growth: Growth of the result.

    Raises:
        Mixes: The other side depends on the rows, too.
    """
    if Kind.ROWS in kinds(sides):
        raise Mixes(SUM_TO_ROWS)
    sums = [v for v in sides if v.kind is Kind.SUM]
    linear = all(v.linear for v in sums)
    if len(sums) > 1 and linear:
        raise Mixes(SUM_PRODUCT)
    return Value(Kind.SUM, growth=growth, linear=linear, causes=causes_of(sides))


def unindexed(value: Value) -> Value:
    """The value without the knowledge of which of its columns hold the place along the row dim."""
    return dataclasses.replace(value, index=MOVED) if value.index else value


def need_no_sum(values: Sequence[Value]) -> None:
    """Raise `Mixes` where a value is a linear function of sums over the rows.

    Args:
        values: What a non-linear function is applied to.
    """
    if any(v.kind is Kind.SUM for v in values) and all(v.linear for v in values):
        raise Mixes(SUM_NONLINEAR)


def need_constant(c: Call, values: Sequence[Value], what: str) -> None:
    """Raise `Mixes` unless the values are independent of the batch.

    Args:
        c: The call.
        values: What is used as an index or a predicate.
        what: Its name in the message.
    """
    if any(v.data or v.placed for v in values):
        raise Mixes(f"its {what} depends on the rows of the batch")
    if c.counted and any(v.growth != 0 for v in values):
        raise Mixes(f"its {what} follows the number of rows")
