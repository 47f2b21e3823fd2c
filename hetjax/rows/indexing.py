"""Rules of the primitives that put together or take apart: concatenate, pad, slices, gather, scatter."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from hetjax.rows.values import (
    PLACE,
    SUM_NONLINEAR,
    WHOLE,
    Call,
    Kind,
    Mixes,
    Origin,
    RowDim,
    Value,
    causes_of,
    grown,
    joined,
    kinds,
    meet,
    need_constant,
    summed,
)


def concatenate(c: Call) -> Value:
    """Rule of concatenate; along the rows it puts copies of all rows after each other."""
    axis = int(c.params["dimension"])
    rows = [v for v in c.ins if v.kind is Kind.ROWS]
    if Kind.SUM not in kinds(c.ins) and any(v.row.dim == axis for v in rows):
        return _after_each_other(c, rows, axis)
    if axis != len(c.out_shape) - 1 or all(v.index != WHOLE for v in rows):
        return joined(c, c.ins)
    # An index such as x[arange(rows), labels]: remember which columns are the row's own place.
    at, values, columns = 0, [], set()
    for v, aval in zip(c.ins, c.avals, strict=True):
        if v.index == WHOLE:
            columns.update(range(at, at + aval.shape[axis]))
            v = dataclasses.replace(v, origin=Origin.FLAT, index=frozenset())
        values.append(v)
        at += aval.shape[axis]
    met = joined(c, values)
    return dataclasses.replace(
        met, origin=met.origin if met.data else Origin.POSITION, index=frozenset(columns)
    )


def _after_each_other(c: Call, rows: Sequence[Value], axis: int) -> Value:
    if len(rows) < len(c.ins) or len({(v.row.dim, v.row.inner) for v in rows}) > 1:
        raise Mixes("it puts something after the rows that doesn't follow them")
    if any(v.placed for v in rows) and any(v.data for v in rows):
        raise Mixes(PLACE)
    origin = max([Origin.TILED] + [v.origin for v in rows])
    row = RowDim(axis, sum(v.row.outer for v in rows), rows[0].row.inner)
    origin = Origin.DATA if origin is Origin.DRAWN else origin
    return Value(Kind.ROWS, row, origin, grown(c, rows, "add"), causes=causes_of(rows))


def pad(c: Call) -> Value:
    """Rule of pad: rows may not be padded."""
    config = c.params["padding_config"]

    def layout(row: RowDim) -> RowDim:
        if any(int(n) for n in config[row.dim]):
            raise Mixes("it pads the rows")
        return row

    need_constant(c, c.ins[1:], "padding")
    return joined(c, c.ins, layout)


def _blocks(c: Call, row: RowDim, start: int, stop: int) -> RowDim:
    block = c.rows * row.inner
    if start % block or stop % block or stop <= start:
        raise Mixes("it takes some of the rows")
    return dataclasses.replace(row, outer=(stop - start) // block)


def slice_(c: Call) -> Value:
    """Rule of slice: all rows, or all rows of some copies of them."""
    starts, stops, strides = c.params["start_indices"], c.params["limit_indices"], c.params["strides"]

    def layout(row: RowDim) -> RowDim:
        if strides is not None and int(strides[row.dim]) != 1:
            raise Mixes("it takes some of the rows")
        return _blocks(c, row, int(starts[row.dim]), int(stops[row.dim]))

    return joined(c, c.ins, layout)


def split(c: Call) -> list[Value]:
    """Rule of split: as slice."""
    axis, at, outs = int(c.params["axis"]), 0, []
    for size in map(int, c.params["sizes"]):
        start, stop = at, at + size

        def layout(row: RowDim, start: int = start, stop: int = stop) -> RowDim:
            return _blocks(c, row, start, stop) if row.dim == axis else row

        outs.append(joined(c, c.ins, layout))
        at = stop
    return outs


def dynamic_slice(c: Call) -> Value:
    """Rule of dynamic_slice: all rows, at a place that does not depend on them."""
    need_constant(c, c.ins[1:], "place")
    return joined(c, c.ins[:1], _untouched(c, c.params["slice_sizes"]))


def dynamic_update_slice(c: Call) -> Value:
    """Rule of dynamic_update_slice: all rows, at a place that does not depend on them."""
    need_constant(c, c.ins[2:], "place")
    return joined(c, c.ins[:2], _untouched(c, c.avals[1].shape))


def _untouched(c: Call, sizes: Sequence[int]) -> Callable[[RowDim], RowDim]:
    def layout(row: RowDim) -> RowDim:
        if sizes[row.dim] != c.shape[row.dim]:
            raise Mixes("it takes or writes some of the rows")
        return row

    return layout


def _others(ndim: int, *taken: Sequence[Any]) -> list[int]:
    gone = {d for dims in taken for d in dims}
    return [d for d in range(ndim) if d not in gone]


def _own_row(c: Call, operand: Value, indices: Value, places: Sequence[int]) -> bool:
    """Whether the indices name each row's own place in the row dim of the operand."""
    if indices.kind is not Kind.ROWS or operand.row.dim not in places:
        return False
    named = indices.index == WHOLE or list(places).index(operand.row.dim) in indices.index
    like = not indices.data or indices.row == operand.at(indices.row.dim).row
    return named and like and c.avals[1].shape[indices.row.dim] == c.shape[operand.row.dim]


def gather(c: Call) -> Value:
    """Rule of gather: row by row look-ups, or the same look-up for all rows."""
    (operand, indices), numbers = c.ins[:2], c.params["dimension_numbers"]
    if indices.kind is Kind.SUM:
        raise Mixes("its index is summed over the rows")
    if operand.kind is not Kind.ROWS and indices.kind is not Kind.ROWS:
        need_constant(c, [indices], "index")
        return joined(c, [operand])
    if operand.kind is Kind.SUM:
        raise Mixes("it looks up, for each row, a value that was computed from all rows")
    batch_out = _others(len(c.out_shape), numbers.offset_dims)
    if operand.kind is not Kind.ROWS:
        if indices.data:
            grown(c, [indices], "")
        moved = dataclasses.replace(meet([indices]), growth=operand.growth)
        return moved.at(batch_out[indices.row.dim])
    row, places = operand.row, [int(d) for d in numbers.start_index_map]
    batching = [int(d) for d in numbers.operand_batching_dims]
    window = _others(len(c.shape), numbers.collapsed_slice_dims, batching)
    both, origin = [operand], operand.origin
    if row.dim in batching:
        at = int(numbers.start_indices_batching_dims[batching.index(row.dim)])
        if indices.kind is Kind.ROWS:
            both.append(indices.at(row.dim if indices.row.dim == at else -1))
        dim = batch_out[at]
    elif row.dim in window and int(c.params["slice_sizes"][row.dim]) == c.shape[row.dim]:
        need_constant(c, [indices], "index")
        if indices.kind is Kind.ROWS:
            raise Mixes("it looks up every row for every other row")
        dim = int(numbers.offset_dims[window.index(row.dim)])
    elif _own_row(c, operand, indices, places):
        dim, origin = batch_out[indices.row.dim], max(origin, indices.origin)
        row = dataclasses.replace(row, dim=dim)
        return Value(Kind.ROWS, row, origin, operand.growth, causes=causes_of(c.ins))
    else:
        raise Mixes("it looks up rows by an index")
    return dataclasses.replace(meet(both), growth=operand.growth).at(dim)


def scatter(c: Call) -> Value:
    """Rule of all scatters: row by row writes, the same write for all rows, or a sum over the rows."""
    (operand, indices, updates), numbers = c.ins[:3], c.params["dimension_numbers"]
    adds = c.name.replace("_", "-") in ("scatter-add", "scatter-sub")
    if Kind.ROWS not in kinds(c.ins):
        need_constant(c, [indices], "index")
        if Kind.SUM in kinds(c.ins) and not (adds or c.name == "scatter"):
            raise Mixes(SUM_NONLINEAR)
        return joined(c, [operand, updates])
    scattered = _others(len(c.avals[2].shape), numbers.update_window_dims)
    growth = grown(c, [operand, updates], "add") if operand.kind is Kind.ROWS else None
    if operand.kind is not Kind.ROWS:
        return _accumulate(c, scattered, adds)
    if Kind.SUM in kinds(c.ins):
        raise Mixes("it writes a value that was computed from all rows to each row")
    row, batching = operand.row, [int(d) for d in numbers.operand_batching_dims]
    window = _others(len(c.shape), numbers.inserted_window_dims, batching)
    if row.dim in batching:
        index_dim = int(numbers.scatter_indices_batching_dims[batching.index(row.dim)])
        update_dim = scattered[index_dim]
    elif _own_row(c, operand, indices, [int(d) for d in numbers.scatter_dims_to_operand_dims]):
        index_dim, update_dim = indices.row.dim, scattered[indices.row.dim]
        indices = dataclasses.replace(indices, index=frozenset(), origin=Origin.FLAT)
    elif row.dim in window:
        index_dim, update_dim = -1, int(numbers.update_window_dims[window.index(row.dim)])
        if int(c.avals[2].shape[update_dim]) != c.shape[row.dim]:
            raise Mixes("it writes some of the rows")
    else:
        raise Mixes("it writes rows by an index")
    values = [operand]
    for value, dim in ((indices, index_dim), (updates, update_dim)):
        if value.kind is Kind.ROWS:
            values.append(value.at(row.dim if value.row.dim == dim else -1))
    return dataclasses.replace(meet(values), growth=growth)


def _accumulate(c: Call, scattered: Sequence[int], adds: bool) -> Value:
    operand, indices, updates = c.ins[:3]
    values = []
    for value, dims in ((indices, range(len(c.avals[1].shape))), (updates, scattered)):
        if value.kind is Kind.SUM:
            raise Mixes("it writes a value that was computed from all rows for each row")
        if value.kind is Kind.ROWS and value.row.dim in dims:
            values.append(value.at(list(dims).index(value.row.dim)))
        elif value.kind is Kind.ROWS:
            raise Mixes("it writes rows into a value that has none")
    if not adds:
        raise Mixes("it reduces over the rows")
    grown(c, [indices], "")
    return joined(c, [operand, summed(dataclasses.replace(meet(values), growth=updates.growth))])
