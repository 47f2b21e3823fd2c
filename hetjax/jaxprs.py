"""Tools on jaxprs: inlining down to the marks, evaluation with rules, pruning, canonical keys, FLOP counts.

Only public names of JAX are used. Version differences (jax 0.10 to 0.12) are kept in this file.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np

from hetjax.errors import UserError
from hetjax.marks import CUT

Atom = Any  # jex.Var | jex.Literal
Rule = Callable[[Any, list[Any]], Any]
_INLINED = {"jit", "pjit", "closed_call", "core_call", "call"}
_INLINED_WITH_MARK = {"remat", "remat2", "checkpoint"}
_CUSTOM = {"custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"}


def is_literal(atom: Atom) -> bool:
    """Whether an operand of an equation is a literal."""
    return isinstance(atom, jex.Literal)


def open_jaxpr(jaxpr: Any) -> tuple[Any, Sequence[Any]]:
    """Return `(jaxpr, consts)` of a `Jaxpr` or a `ClosedJaxpr`; the two are one class in jax 0.12."""
    inner = jaxpr.jaxpr if isinstance(jaxpr, jex.ClosedJaxpr) else jaxpr
    return inner, tuple(getattr(jaxpr, "consts", ()) or ())


def inner_jaxprs(eqn: Any) -> Iterator[Any]:
    """Yield every jaxpr among an equation's parameters."""
    for value in eqn.params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            if isinstance(item, jex.Jaxpr | jex.ClosedJaxpr):
                yield item


def is_cut(eqn: Any) -> bool:
    """Whether an equation is a mark of `hetjax.cut`."""
    return eqn.primitive.name == "name" and eqn.params["name"] == CUT


def holds_cut(eqn: Any) -> bool:
    """Whether an equation is a cut or holds one at any depth."""
    return is_cut(eqn) or any(holds_cut(e) for j in inner_jaxprs(eqn) for e in open_jaxpr(j)[0].eqns)


def close(eqns: Sequence[Any], invars: Sequence[Any], outvars: Sequence[Atom]) -> Any:
    """Make a closed jaxpr without constants of equations."""
    info = jex.DebugInfo("hetjax", "unit", ("",) * len(invars), ("",) * len(outvars))
    return jex.ClosedJaxpr(jex.Jaxpr((), tuple(invars), tuple(outvars), list(eqns), debug_info=info), ())


def _is_call(eqn: Any) -> bool:
    return any(True for _ in inner_jaxprs(eqn)) or any(
        k in eqn.params for k in ("bwd", "jvp_jaxpr_fun", "jvp")
    )


def bind(eqn: Any, args: Sequence[Any]) -> list[Any]:
    """Apply an equation's primitive to values and return the list of its results."""
    if _is_call(eqn):
        given = {v: a for v, a in zip(eqn.invars, args, strict=True) if not is_literal(v)}
        return list(jex.jaxpr_as_fun(close([eqn], list(given), eqn.outvars))(*given.values()))
    out = eqn.primitive.bind(*args, **eqn.params)
    return list(out) if eqn.primitive.multiple_results else [out]


def evaluate(
    eqns: Iterable[Any], env: dict[Any, Any], outvars: Sequence[Atom], rules: Mapping[str, Rule] | None = None
) -> list[Any]:
    """Evaluate equations in order.

    Args:
        eqns: Equations whose inputs are in `env`, are literals, or are results of earlier equations.
        env: Values by variable; is extended in place.
        outvars: Variables or literals to return.
        rules: By primitive name, a function `(eqn, args) -> list of results, or None for the ordinary
            meaning`.

    Returns:
        The values of `outvars`.
    """
    rules = rules or {}

    def read(atom: Atom) -> Any:
        return atom.val if is_literal(atom) else env[atom]

    for eqn in eqns:
        args = [read(a) for a in eqn.invars]
        rule = rules.get(eqn.primitive.name)
        results = rule(eqn, args) if rule else None
        if results is None:
            results = bind(eqn, args)
        env.update(zip(eqn.outvars, results, strict=True))
    return [read(a) for a in outvars]


def call(jaxpr: Any, args: Sequence[Any], rules: Mapping[str, Rule] | None = None) -> list[Any]:
    """Evaluate a whole (closed) jaxpr on values, with rules as in `evaluate`."""
    inner, consts = open_jaxpr(jaxpr)
    env = dict(zip(inner.constvars, consts, strict=True)) | dict(zip(inner.invars, args, strict=True))
    return evaluate(inner.eqns, env, inner.outvars, rules)


def scan_layout(eqn: Any) -> tuple[int, int, int]:
    """How many constants, carried values and scanned inputs a `scan` equation has, told by its shapes."""
    inner, _ = open_jaxpr(eqn.params["jaxpr"])
    num_carry = sum(o.aval.ndim == i.aval.ndim for o, i in zip(eqn.outvars, inner.outvars, strict=True))
    num_xs = sum(o.aval.ndim != i.aval.ndim for o, i in zip(eqn.invars, inner.invars, strict=True))
    return len(eqn.invars) - num_carry - num_xs, num_carry, num_xs


def _unroll(eqn: Any, args: list[Any], run: Callable[[Any, list[Any]], list[Any]]) -> list[Any]:
    num_consts, num_carry, _ = scan_layout(eqn)
    consts, carry, xs = (
        args[:num_consts],
        args[num_consts : num_consts + num_carry],
        args[num_consts + num_carry :],
    )
    length = eqn.params["length"]
    order = range(length - 1, -1, -1) if eqn.params["reverse"] else range(length)
    ys: list[Any] = [None] * length
    for i in order:
        slices = [jax.lax.index_in_dim(x, i, 0, keepdims=False) for x in xs]
        out = run(eqn.params["jaxpr"], [*consts, *carry, *slices])
        carry, ys[i] = out[:num_carry], out[num_carry:]
    return [*carry, *(jnp.stack(column) for column in zip(*ys, strict=True))]


_FOLDED = {"add": np.add, "sub": np.subtract, "mul": np.multiply}


def _fold(eqn: Any, args: Sequence[Any]) -> np.ndarray | None:
    """The result of arithmetic on two known integers: counters, by which equal layers would differ."""
    function = _FOLDED.get(eqn.primitive.name)
    known = all(isinstance(a, np.ndarray | np.generic | int) and np.ndim(a) == 0 for a in args)
    if function is None or not known or not jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.integer):
        return None
    dtype = eqn.outvars[0].aval.dtype
    with np.errstate(over="ignore"):
        return np.asarray(function(*(np.asarray(a, dtype) for a in args)), dtype)


def inline(closed: Any) -> Any:
    """Flatten a closed jaxpr until every cut stands at its top level.

    `jit` calls are always inlined; `remat` calls where they hold a cut; a `scan` whose body holds a cut is
    unrolled, its constants and carry passed from one iteration to the next. A cut in a function with a
    derivative of its own is passed over, with a warning.

    Raises:
        UserError: A cut stands in a construct that can't be divided (`while`, `cond`, ...).
    """

    def run(jaxpr: Any, args: Sequence[Any]) -> list[Any]:
        inner, consts = open_jaxpr(jaxpr)
        env = dict(zip(inner.constvars, consts, strict=True)) | dict(zip(inner.invars, args, strict=True))
        for eqn in inner.eqns:
            values = [a.val if is_literal(a) else env[a] for a in eqn.invars]
            env.update(zip(eqn.outvars, step(eqn, values), strict=True))
        return [a.val if is_literal(a) else env[a] for a in inner.outvars]

    def step(eqn: Any, args: list[Any]) -> list[Any]:
        name = eqn.primitive.name
        if is_cut(eqn):
            return bind(eqn, args)
        folded = _fold(eqn, args)
        if folded is not None:
            return [folded]
        if name == "unstack":  # as before jax 0.12: slices, of which each reader needs its own alone
            axis = eqn.params["axis"]
            return [jax.lax.index_in_dim(args[0], i, axis, keepdims=False) for i in range(len(eqn.outvars))]
        marked = holds_cut(eqn)
        if name in _INLINED or (marked and name in _INLINED_WITH_MARK):
            return run(next(inner_jaxprs(eqn)), args)
        if marked and name == "scan":
            return _unroll(eqn, args, run)
        if marked and name in _CUSTOM:
            warnings.warn(
                "hetjax.cut inside a function with a derivative of its own (jax.custom_vjp, jax.custom_jvp) "
                "is passed over, since its rule holds for the whole function. Place the cut around the call.",
                stacklevel=2,
            )
        elif marked:
            raise UserError(
                f"hetjax.cut stands inside `{name}`, whose body can't be divided between devices. A cut may "
                "stand at the top level, in jit, in remat and in the body of scan. Move the cut out of the "
                f"`{name}`, or write the loop as jax.lax.scan or as a Python loop."
            )
        return bind(eqn, args)

    flat = jax.make_jaxpr(lambda *args: run(closed, args))
    inner, _ = open_jaxpr(closed)
    return flat(*[jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in inner.invars])


def without_branches(closed: Any) -> Any:
    """Compute all branches of each `cond` and choose, so that each result depends on its own inputs alone."""

    def choose(eqn: Any, args: Sequence[Any]) -> list[Any]:
        index, *operands = args
        results = [call(inline(branch), operands, {"cond": choose}) for branch in eqn.params["branches"]]
        return [jax.lax.select_n(index, *column) for column in zip(*results, strict=True)]

    inner, _ = open_jaxpr(closed)
    specs = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in inner.invars]
    return jax.make_jaxpr(lambda *args: call(closed, args, {"cond": choose}))(*specs)


class Slicer:
    """Finds what some results need among equations; made once where many results are asked for."""

    def __init__(self, eqns: Sequence[Any]) -> None:
        """Index the equations, which are in order."""
        self.eqns = eqns
        self._made_by = {v: i for i, eqn in enumerate(eqns) for v in eqn.outvars}

    def __call__(self, outvars: Sequence[Atom], stop: Iterable[Any] = ()) -> tuple[list[Any], list[Any]]:
        """See `prune`."""
        stop = set(stop)
        waiting = [v for v in outvars if not is_literal(v) and v not in stop]
        found: set[int] = set()
        while waiting:
            number = self._made_by.get(waiting.pop())
            if number is not None and number not in found:
                found.add(number)
                waiting += [v for v in self.eqns[number].invars if not is_literal(v) and v not in stop]
        kept = [self.eqns[i] for i in sorted(found)]
        defined = {v for e in kept for v in e.outvars}
        free: dict[Any, None] = {}
        for atom in [*(v for e in kept for v in e.invars), *outvars]:
            if not is_literal(atom) and (atom not in defined or atom in stop):
                free[atom] = None
        return kept, list(free)


def prune(
    eqns: Sequence[Any], outvars: Sequence[Atom], stop: Iterable[Any] = ()
) -> tuple[list[Any], list[Any]]:
    """Keep the equations that `outvars` need.

    Args:
        eqns: Equations in order.
        outvars: What is wanted; literals are passed over.
        stop: Variables that are given, so what computes them is not needed.

    Returns:
        The needed equations in order, and the variables that they (and `outvars`) read and no kept equation
        defines, in the order of first use.
    """
    return Slicer(eqns)(outvars, stop)


class Entry(NamedTuple):
    """The equations `result = stack[index : index + 1]`."""

    eqns: list[Any]
    stack: Any
    index: Any
    result: Any


def entry_eqns(aval: Any) -> Entry:
    """Take one entry along the first dim of an array, by an index that is an input; fresh variables."""

    def take(stack: Any, index: Any) -> Any:
        starts = (index, *[np.uint32(0)] * (stack.ndim - 1))
        return jax.lax.dynamic_slice(stack, starts, (1, *stack.shape[1:]))

    specs = (jax.ShapeDtypeStruct(aval.shape, aval.dtype), jax.ShapeDtypeStruct((), jnp.uint32))
    inner, _ = open_jaxpr(jax.make_jaxpr(take)(*specs))
    stack, index = inner.invars
    return Entry(list(inner.eqns), stack, index, inner.outvars[0])


def rename(eqn: Any, names: Mapping[Any, Any]) -> Any:
    """The equation with some of its variables replaced."""
    invars = [a if is_literal(a) else names.get(a, a) for a in eqn.invars]
    return eqn.replace(invars=invars, outvars=[names.get(v, v) for v in eqn.outvars])


# ---- canonical keys ----


_RULES = ("fwd", "bwd", "jvp", "jvp_jaxpr_fun", "jvp_jaxpr_thunk", "fwd_jaxpr_thunk")


def _digest_array(value: Any) -> str:
    if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        return f"{value.dtype}{_digest_array(jax.random.key_data(value))}"
    array = np.asarray(value)
    if array.size <= 16:
        return f"{array.dtype}{array.shape}{array.tolist()}"
    return f"{array.dtype}{array.shape}{hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()}"


def _aval_key(aval: Any) -> str:
    weak = "w" if getattr(aval, "weak_type", False) else ""
    return f"{getattr(aval, 'dtype', aval)}{getattr(aval, 'shape', ())}{weak}"


def _rule_key(eqn: Any) -> str:
    """What a custom-derivative rule does: the jaxpr of its derivative (a function has no sure name)."""
    specs = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in eqn.invars]
    diff = [i for i, s in enumerate(specs) if jnp.issubdtype(s.dtype, jnp.floating)]

    def derivative(*args: Any) -> Any:
        def f(*moving: Any) -> list[Any]:
            full = list(args)
            for i, m in zip(diff, moving, strict=True):
                full[i] = m
            return [o for o in bind(eqn, full) if jnp.issubdtype(o.dtype, jnp.floating)]

        out, pull = jax.vjp(f, *[args[i] for i in diff])
        return pull([jnp.ones_like(o) for o in out])

    traced, consts = open_jaxpr(jax.make_jaxpr(derivative)(*specs))
    kept, _ = prune(traced.eqns, traced.outvars)
    return equations_key(kept, [*traced.constvars, *traced.invars], traced.outvars, rules=False) + str(
        len(consts)
    )


def _param_key(value: Any, rules: bool) -> str:
    if isinstance(value, jex.Jaxpr | jex.ClosedJaxpr):
        return canonical_key(value, rules)
    if isinstance(value, tuple | list):
        return "(" + ",".join(_param_key(v, rules) for v in value) + ")"
    if isinstance(value, Mapping):  # repr shortens large arrays
        return "{" + ",".join(f"{k!r}:{_param_key(v, rules)}" for k, v in value.items()) + "}"
    if isinstance(value, np.ndarray | jax.Array):
        return _digest_array(value)
    if callable(value) and not isinstance(value, type):
        return _function_key(value, rules)
    return repr(value)


def _function_key(function: Any, rules: bool) -> str:
    """What a function among an equation's parameters does: its code and what it holds, or itself.

    Such are callbacks and remat policies.
    """
    if isinstance(function, functools.partial):
        held: Sequence[Any] = (function.func, function.args, tuple(sorted(function.keywords.items())))
    elif dataclasses.is_dataclass(function):
        held = [getattr(function, f.name) for f in dataclasses.fields(function)]
    elif hasattr(function, "__code__") and not hasattr(function, "__self__"):
        cells = [c.cell_contents for c in function.__closure__ or ()]
        held = (id(function.__code__), function.__defaults__, function.__kwdefaults__, *cells)
    elif hasattr(function, "__self__"):
        return f"{function.__qualname__}@{id(function.__self__)}"
    else:
        return f"{type(function).__qualname__}@{id(function)}"
    return f"{type(function).__qualname__}{_param_key(tuple(held), rules)}"


def equations_key(
    eqns: Sequence[Any], invars: Sequence[Any], outvars: Sequence[Atom], rules: bool = True
) -> str:
    """A key that two equation lists share exactly when they have the same structure.

    Args:
        eqns: Equations in order.
        invars: Inputs, in order; every variable that is read and not computed.
        outvars: Outputs, in order.
        rules: Whether custom derivative rules count; without, only the values do.
    """
    names: dict[Any, int] = {v: i for i, v in enumerate(invars)}
    digest = hashlib.sha256()
    digest.update(";".join(_aval_key(v.aval) for v in invars).encode())

    def atom(a: Atom) -> str:
        return f"={_digest_array(a.val)}{_aval_key(a.aval)}" if is_literal(a) else str(names[a])

    for eqn in eqns:
        params = eqn.params
        text = [eqn.primitive.name, *(atom(a) for a in eqn.invars)]
        text += [
            f"{k}:{_param_key(params[k], rules)}"
            for k in sorted(params)
            if k not in (*_RULES, "out_trees", "name")
        ]
        if eqn.primitive.name == "name":
            text.append(params["name"])
        if rules and any(k in params for k in _RULES):
            text.append(_rule_key(eqn))
        for v in eqn.outvars:
            names[v] = len(names)
            text.append(_aval_key(v.aval))
        digest.update(("|".join(text) + "\n").encode())
    digest.update(",".join(atom(a) for a in outvars).encode())
    return digest.hexdigest()[:16]


def canonical_key(jaxpr: Any, rules: bool = True) -> str:
    """`equations_key` of a (closed) jaxpr, its constants compared by value."""
    inner, consts = open_jaxpr(jaxpr)
    body = equations_key(inner.eqns, [*inner.constvars, *inner.invars], inner.outvars, rules)
    return body + "".join(_digest_array(c) for c in consts)


def text_key(*parts: Any) -> str:
    """A short digest of anything with a faithful `str`."""
    return hashlib.sha256("|".join(map(str, parts)).encode()).hexdigest()[:16]


# ---- FLOPs ----


def _dot_flops(eqn: Any) -> float:
    (contract, _), _ = eqn.params["dimension_numbers"]
    lhs = eqn.invars[0].aval.shape
    return 2.0 * math.prod(eqn.outvars[0].aval.shape) * math.prod(lhs[d] for d in contract)


def _conv_flops(eqn: Any) -> float:
    numbers = eqn.params["dimension_numbers"]
    rhs = eqn.invars[1].aval.shape
    out_features = rhs[numbers.rhs_spec[0]]
    return 2.0 * math.prod(eqn.outvars[0].aval.shape) * math.prod(rhs) / out_features


_MOVES = {
    *(
        "reshape",
        "transpose",
        "broadcast_in_dim",
        "squeeze",
        "expand_dims",
        "slice",
        "dynamic_slice",
        "gather",
        "pad",
    ),
    *(
        "concatenate",
        "convert_element_type",
        "copy",
        "name",
        "stop_gradient",
        "iota",
        "rev",
        "sharding_constraint",
    ),
    *("split", "dynamic_update_slice", "optimization_barrier", "bitcast_convert_type", "select_n"),
}


def count_flops(eqns: Iterable[Any]) -> float:
    """FLOPs: products and convolutions exactly, a scan's body times its length, else one an element."""
    total = 0.0
    for eqn in eqns:
        name = eqn.primitive.name
        if name == "dot_general":
            total += _dot_flops(eqn)
        elif name == "conv_general_dilated":
            total += _conv_flops(eqn)
        elif name == "cond":
            total += max(count_flops(open_jaxpr(j)[0].eqns) for j in inner_jaxprs(eqn))
        elif any(True for _ in inner_jaxprs(eqn)):
            times = eqn.params["length"] if name == "scan" else 1
            total += times * count_flops(e for j in inner_jaxprs(eqn) for e in open_jaxpr(j)[0].eqns)
        elif name.startswith("reduce") and eqn.invars:
            total += math.prod(eqn.invars[0].aval.shape)
        elif name not in _MOVES:
            total += sum(math.prod(v.aval.shape) for v in eqn.outvars if hasattr(v.aval, "shape"))
    return total
