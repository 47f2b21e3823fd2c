"""The rule table of `hetjax.rows`: how each JAX primitive passes the rows of a batch on.

A rule gets a `Call` and returns what comes out, or raises `Mixes`. It sees shapes only.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

from hetjax.rows import indexing
from hetjax.rows.values import (
    ADDS,
    COMPARES,
    IDENTITY,
    LINEAR,
    SCALES,
    SUM_NONLINEAR,
    SUM_PRODUCT,
    SUM_TO_ROWS,
    WHOLE,
    Call,
    Kind,
    Mixes,
    Origin,
    RowDim,
    Rule,
    Value,
    bilinear_sum,
    causes_of,
    grown,
    inexact,
    joined,
    kinds,
    meet,
    need_no_sum,
    summed,
    unindexed,
)

ELEMENTWISE = (
    SCALES
    | COMPARES
    | frozenset(
        "mul div rem pow integer_pow square sqrt rsqrt cbrt exp exp2 expm1 log log2 log1p logistic sin cos"
        " tan asin acos atan atan2 sinh cosh tanh asinh acosh atanh erf erfc erf_inv lgamma digamma zeta"
        " igamma polygamma igammac igamma_grad_a regularized_incomplete_beta bessel_i0e bessel_i1e floor ceil"
        " round clamp nextafter and or xor not shift_left shift_right_logical shift_right_arithmetic mulhi"
        " clz population_count bitcast_convert_type one_minus_square random_wrap random_unwrap random_clone"
        " empty empty2".split()
    )
)
RANDOM = frozenset(
    "random_bits random_split random_fold_in random_seed random_gamma rng_uniform rng_bit_generator"
    " threefry2x32 threefry4x32 philox2x32 philox4x32".split()
)


def elementwise(c: Call) -> Value:
    """Rule of what computes each element from the elements at the same place."""
    ins = list(c.ins)
    if c.name == "select_n" and ins[0].zero:
        return ins[1]  # what numpy's indexing makes of arange(rows), which has no negative numbers
    if c.name == "lt" and ins[0].index == WHOLE and ins[1].zero:
        return Value(Kind.ROWS, ins[0].row, Origin.FLAT, zero=True)
    if len(ins) == 1 and c.name in IDENTITY | {"convert_element_type"} and ins[0].kind is Kind.ROWS:
        return ins[0]
    if Kind.SUM in kinds(ins):
        return _elementwise_on_sums(c, ins)
    values = ins
    if c.name == "select_n":
        values = ins[1:]
        grown(c, ins[:1], "")
    growth = grown(c, values, c.name)
    zeros = [v.zero for v in values]
    if c.name == "mul":
        zero = any(zeros)
    else:
        zero = bool(zeros) and all(zeros) and c.name in SCALES
    rows = [v for v in ins if v.kind is Kind.ROWS]
    if not rows:
        return Value(growth=growth, zero=zero)
    met = meet(rows)
    return dataclasses.replace(met, growth=growth, zero=zero and not met.data)


def _elementwise_on_sums(c: Call, ins: list[Value]) -> Value:
    sums = [v for v in ins if v.kind is Kind.SUM]
    rows = [v for v in ins if v.kind is Kind.ROWS]
    causes = causes_of(ins)
    if not all(v.linear for v in sums):  # reported already, where it became so
        if rows:
            return dataclasses.replace(meet(rows), origin=Origin.DATA, causes=causes)
        return Value(Kind.SUM, linear=False, causes=causes)
    if rows:
        raise Mixes(SUM_TO_ROWS)
    values, floating = ins, inexact(c.out_avals[0])
    if c.name == "convert_element_type":
        linear = floating or (not inexact(c.avals[0]) and c.out_avals[0].dtype != bool)
    elif c.name == "mul":
        linear = len(sums) == 1
    elif c.name == "div":
        linear = floating and ins[1].kind is not Kind.SUM
    elif c.name == "select_n":
        linear, values = ins[0].kind is Kind.CONST, ins[1:]
        grown(c, ins[:1], "")
    else:
        linear = c.name in LINEAR | ADDS
    if not linear:
        raise Mixes(_nonlinear(c.name, ins))
    return Value(Kind.SUM, growth=grown(c, values, c.name), causes=causes)


def _nonlinear(name: str, ins: list[Value]) -> str:
    if name == "div" and ins[1].kind is Kind.SUM:
        return "it divides by a value that is summed over the rows"
    return SUM_PRODUCT if name in ("mul", "integer_pow", "square") else SUM_NONLINEAR


def random(c: Call) -> Value | list[Value]:
    """Rule of what draws random bits, or keys for them: a draw for each row where each row has a key."""
    if Kind.SUM in kinds(c.ins):
        raise Mixes("it draws by a key that depends on all rows")
    rows = [
        dataclasses.replace(v, index=frozenset(), origin=Origin.DATA) for v in c.ins if v.kind is Kind.ROWS
    ]
    return meet(rows) if rows else Value()


def identities(c: Call) -> list[Value]:
    """Rule of what returns its operands as they are."""
    return list(c.ins)


def iota(c: Call) -> Value:
    """Rule of iota: along the rows it is each row's own place."""
    follow = c.follow[0]
    if not follow:
        return Value()
    if len(follow) > 1 or not follow[0].inner:
        return Value(Kind.OPAQUE, origin=Origin.POSITION)
    (row,) = follow
    if row.dim != c.params["dimension"]:
        return Value(Kind.ROWS, row, Origin.FLAT)
    return Value(Kind.ROWS, row, Origin.POSITION, index=WHOLE)


def _products(shape: Sequence[int], dim: int) -> tuple[int, int]:
    return math.prod(shape[:dim]), math.prod(shape[dim + 1 :])


def reshape(c: Call) -> Value:
    """Rule of reshape: the factors before and after the row index decide which new dim holds it."""
    value = c.ins[0]
    if value.kind is not Kind.ROWS:
        return joined(c, c.ins[:1])
    if c.params.get("dimensions") is not None:
        raise Mixes("a reshape that also transposes is not followed", known=False)
    old, new, row = c.shape, c.out_shape, value.row
    before, after = _products(old, row.dim)
    outer, inner = before * row.outer, row.inner * after
    for dim in range(len(new)):
        before, after = _products(new, dim)
        if before and after and outer % before == 0 and inner % after == 0 and new[dim] % c.rows == 0:
            if outer // before * c.rows * (inner // after) == new[dim]:
                to = RowDim(dim, outer // before, inner // after)
                origin = value.origin
                if origin is Origin.FLAT and new[dim] != old[row.dim]:
                    origin = Origin.TILED
                if new[dim] != old[row.dim] or value.index != WHOLE:
                    value = unindexed(value)
                return dataclasses.replace(value, row=to, origin=origin)
    if value.flexible and c.follow[0] and len(c.follow[0]) == 1 and c.follow[0][0].inner:
        return dataclasses.replace(value, row=c.follow[0][0])
    raise Mixes("it reshapes the rows into parts that hold several rows or parts of them")


def transpose(c: Call) -> Value:
    """Rule of transpose."""
    order = list(c.params["permutation"])
    return joined(c, c.ins, lambda row: dataclasses.replace(row, dim=order.index(row.dim)))


def broadcast_in_dim(c: Call) -> Value:
    """Rule of broadcast_in_dim; new dims that follow the rows are found by comparing traces."""
    to = c.params["broadcast_dimensions"]
    return joined(c, c.ins[:1], lambda row: dataclasses.replace(row, dim=int(to[row.dim])))


def squeeze(c: Call) -> Value:
    """Rule of squeeze."""
    gone = [int(d) % len(c.shape) for d in c.params["dimensions"]]
    return joined(c, c.ins, lambda row: _drop(row, gone))


def _drop(row: RowDim, gone: Sequence[Any]) -> RowDim:
    return dataclasses.replace(row, dim=row.dim - sum(d < row.dim for d in gone))


def tile(c: Call) -> Value:
    """Rule of tile: copies of all rows after each other raise `outer`."""
    reps = c.params["reps"]
    return joined(c, c.ins, lambda row: dataclasses.replace(row, outer=row.outer * int(reps[row.dim])))


def stack(c: Call) -> Value:
    """Rule of stack."""
    axis = int(c.params["axis"]) % len(c.out_shape)
    return joined(c, c.ins, lambda row: dataclasses.replace(row, dim=row.dim + (row.dim >= axis)))


def along(does: str, param: str, *, drops: bool = False, linear: bool = False, scales: bool = False) -> Rule:
    """Rule of a primitive that works along some dims and keeps the others apart.

    Args:
        does: What it does to rows along those dims, for the message.
        param: The parameter that names the dim or dims.
        drops: Whether the dims are gone afterwards.
        linear: Whether it is linear, so that sums over the rows stay sums.
        scales: Whether scaling its operand scales its result.
    """

    def rule(c: Call) -> Value:
        ndim = len(c.shape)
        dims = c.params.get(param, ndim - 1)
        dims = [int(d) % ndim for d in (dims if isinstance(dims, list | tuple) else (dims,))]
        if not linear:
            need_no_sum(c.ins)
        if not (linear or scales):
            grown(c, c.ins, "")

        def layout(row: RowDim) -> RowDim:
            if row.dim in dims:
                raise Mixes(f"it {does}")
            return _drop(row, dims) if drops else row

        out = unindexed(joined(c, c.ins, layout))
        return out if linear else dataclasses.replace(out, zero=False)

    return rule


def along_flat(rule: Rule) -> Rule:
    """The rule, for a reduction that leaves an array as it is where all its elements are equal (max, and).

    Args:
        rule: The rule for everything else.
    """

    def flat_rule(c: Call) -> Value | list[Value]:
        value = c.ins[0]
        if value.kind is Kind.ROWS and value.origin is Origin.FLAT and value.row.dim in c.params["axes"]:
            return Value(growth=value.growth, zero=value.zero)
        return rule(c)

    return flat_rule


def reduce_sum(c: Call) -> Value:
    """Rule of reduce_sum: over the rows it makes an additive value."""
    value, axes = c.ins[0], [int(a) for a in c.params["axes"]]
    if value.kind is Kind.ROWS and value.row.dim in axes:
        return summed(value)
    return unindexed(joined(c, c.ins[:1], lambda row: _drop(row, axes)))


def reduce_window(c: Call) -> Value:
    """Rule of windows (pooling): each row stays apart where the window has size 1 there."""
    names = ("window_dimensions", "window_strides", "base_dilation", "window_dilation")
    ones = [c.params[n] for n in names if c.params.get(n) is not None]
    padding = c.params["padding"]
    arrays = [v for v, a in zip(c.ins, c.avals, strict=True) if len(a.shape) == len(c.shape)]

    def layout(row: RowDim) -> RowDim:
        if any(int(o[row.dim]) != 1 for o in ones) or any(int(p) for p in padding[row.dim]):
            raise Mixes("its window covers several rows")
        return row

    if c.name != "reduce_window_sum":
        need_no_sum(arrays)
    return unindexed(joined(c, arrays, layout))


def dot_general(c: Call) -> Value:
    """Rule of dot_general: rows stay apart as batch or free dim, and are summed where contracted."""
    (contract, batch) = c.params["dimension_numbers"]
    sides = list(c.ins[:2])
    plain = grown(c, sides, "mul")
    if Kind.SUM in kinds(sides):
        return bilinear_sum(sides, plain)
    rows = [(i, v) for i, v in enumerate(sides) if v.kind is Kind.ROWS]
    if not rows:
        return Value(growth=plain, zero=any(v.zero for v in sides))
    places = []
    for side, v in rows:
        for role, dims in (("contract", contract[side]), ("batch", batch[side])):
            if v.row.dim in [int(d) for d in dims]:
                places.append((role, [int(d) for d in dims].index(v.row.dim)))
                break
        else:
            places.append(("free", side))
    if len(rows) == 2 and (places[0] != places[1]):
        raise Mixes("it multiplies every row with every other row")
    role, at = places[0]
    met = meet(v.at(0) for _, v in rows)
    if role == "contract":
        return summed(dataclasses.replace(met, growth=plain))
    side, v = rows[0]
    taken = [int(d) for d in (*contract[side], *batch[side])]
    if role == "free":
        free = [d for d in range(len(c.avals[side].shape)) if d not in taken]
        others = len(c.avals[0].shape) - len(contract[0]) - len(batch[0]) if side else 0
        at = len(batch[0]) + others + free.index(v.row.dim)
    return dataclasses.replace(met.at(at), growth=plain)


def conv_general_dilated(c: Call) -> Value:
    """Rule of a convolution: rows stay apart as its batch dim."""
    numbers, sides = c.params["dimension_numbers"], list(c.ins[:2])
    growth = grown(c, sides, "mul")
    if Kind.SUM in kinds(sides):
        return bilinear_sum(sides, growth)
    if sides[1].kind is Kind.ROWS:
        raise Mixes("its kernel has rows", known=False)
    if sides[0].kind is not Kind.ROWS:
        return Value(growth=growth)
    if sides[0].row.dim != numbers.lhs_spec[0] or c.params.get("batch_group_count", 1) != 1:
        raise Mixes("it convolves over the rows")
    return dataclasses.replace(unindexed(sides[0]).at(int(numbers.out_spec[0])), growth=growth)


def leading(num_last: Callable[[Call], int]) -> Rule:
    """Rule of what works on the last dims and keeps all earlier ones apart (linear algebra, FFT).

    Args:
        num_last: How many dims it works on.
    """

    def rule(c: Call) -> Value:
        need_no_sum(c.ins)
        grown(c, c.ins, "")

        def layout(row: RowDim) -> RowDim:
            if row.dim >= len(c.shape) - num_last(c):
                raise Mixes("it works along the rows")
            return row

        return unindexed(joined(c, c.ins, layout))

    return rule


def attention(c: Call) -> list[Value]:
    """Rule of the fused attention calls: rows stay apart as the first dim of every operand."""
    rows = [v for v in c.ins if v.kind is Kind.ROWS]
    if any(v.row.dim for v in rows) or kinds(c.ins) - {Kind.ROWS, Kind.CONST}:
        raise Mixes("it attends over the rows")
    return [meet(rows)] * len(c.out_avals) if rows else [Value()] * len(c.out_avals)


def _table() -> dict[str, Rule]:
    rules: dict[str, Rule] = dict.fromkeys(ELEMENTWISE, elementwise)
    rules |= dict.fromkeys(RANDOM, random)
    rules |= dict.fromkeys(IDENTITY, identities)
    rules |= {
        "reshape": reshape,
        "transpose": transpose,
        "broadcast_in_dim": broadcast_in_dim,
        "squeeze": squeeze,
        "tile": tile,
        "stack": stack,
        "unstack": along("takes single rows out of the batch", "axis", drops=True, linear=True),
        "concatenate": indexing.concatenate,
        "pad": indexing.pad,
        "slice": indexing.slice_,
        "split": indexing.split,
        "dynamic_slice": indexing.dynamic_slice,
        "dynamic_update_slice": indexing.dynamic_update_slice,
        "gather": indexing.gather,
        "iota": iota,
        "dot_general": dot_general,
        "conv_general_dilated": conv_general_dilated,
        "reduce_sum": reduce_sum,
        "rev": along("reverses the rows", "dimensions", linear=True),
        "sort": along("sorts over the rows", "dimension", scales=True),
        "top_k": along("takes the largest over the rows", "axis"),
        "approx_top_k": along("takes the largest over the rows", "reduction_dimension"),
        "reduce": along("reduces over the rows", "dimensions", drops=True),
        "fft": leading(lambda c: len(c.params["fft_lengths"])),
        "dot_product_attention_fwd_wrapper": attention,
        "dot_product_attention_fwd": attention,
    }
    for name, scales in {
        "max": True,
        "min": True,
        "prod": False,
        "and": True,
        "or": True,
        "xor": False,
    }.items():
        rule = along(f"takes the {name} over the rows", "axes", drops=True, scales=scales)
        rules[f"reduce_{name}"] = along_flat(rule) if scales else rule
    for name in ("argmax", "argmin"):
        rules[name] = along(f"takes the {name} over the rows", "axes", drops=True)
    for name in ("sum", "prod", "max", "min", "logsumexp"):
        linear, scales = name == "sum", name in ("max", "min")
        rules[f"cum{name}"] = along("accumulates over the rows", "axis", linear=linear, scales=scales)
    for name in ("reduce_window", "reduce_window_sum", "reduce_window_max", "reduce_window_min"):
        rules[name] = reduce_window
    for name in ("select_and_scatter_add", "select_and_gather_add"):
        rules[name] = reduce_window
    for name in (
        "scatter",
        *(f"scatter{sep}{op}" for sep in "-_" for op in ("add", "sub", "mul", "min", "max")),
    ):
        rules[name] = indexing.scatter
    for (
        name
    ) in "cholesky qr lu svd eigh eig triangular_solve householder_product geqrf tridiagonal_solve".split():
        rules[name] = leading(lambda c: 2)
    return rules


RULES = _table()
