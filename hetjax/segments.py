"""A unit (neighbouring segments) as a forward and a backward function; tracing only, no devices.

The forward function returns what the backward needs beside its own inputs. A weight, or anything computed
from weights alone (a cast of one), is never among it: the backward is given the weights again and repeats the
cast.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from hetjax import jaxprs
from hetjax.errors import UserError
from hetjax.flat import Flat, Unit
from hetjax.marks import CONSTRAIN

Rule = Callable[[Any, list[Any]], list[Any] | None]


def checkpoint_policy(remat: str) -> Callable | None:
    """The `jax.checkpoint` policy of a remat name; None for `"none"`, which keeps everything.

    Raises:
        UserError: The name is none of `none`, `full`, `dots` and JAX's policies.
    """
    if remat == "none":
        return None
    policies = jax.checkpoint_policies
    named = {"full": policies.nothing_saveable, "dots": policies.dots_with_no_batch_dims_saveable}
    known = [
        n for n in dir(policies) if n.endswith("saveable") or n.startswith(("dots", "everything", "nothing"))
    ]
    policy = named.get(remat) or (getattr(policies, remat) if remat in known else None)
    if policy is None:
        raise UserError(
            f"The remat policy {remat!r} is unknown. Allowed: none, full, dots, {', '.join(sorted(known))}."
        )
    return policy


def flatten_dot(eqn: Any, args: list[Any]) -> list[Any] | None:
    """Rewrite a `dot_general` without batch dims as a product of two matrices, which XLA:CPU runs far faster.

    What counts is its transpose: the gradient of a weight that is applied to `[rows, seq, d]` contracts two
    dims at once, for which XLA:CPU copies the activations. Batched products (attention) are left alone:
    transposing them to the front costs more than it gains (docs/log.md). The values are the same sums.
    """
    (lhs_contract, rhs_contract), (lhs_batch, _) = eqn.params["dimension_numbers"]
    lhs, rhs = args
    lhs_free = [d for d in range(lhs.ndim) if d not in lhs_contract]
    rhs_free = [d for d in range(rhs.ndim) if d not in rhs_contract]
    if lhs_batch or (len(lhs_free) <= 1 and len(rhs_free) <= 1 and len(lhs_contract) == 1):
        return None
    left, left_contract = _as_matrix(lhs, lhs_contract, lhs_free)
    right, right_contract = _as_matrix(rhs, rhs_contract, rhs_free)
    keep = {k: eqn.params[k] for k in ("precision", "preferred_element_type")}
    out = jax.lax.dot_general(left, right, (((left_contract,), (right_contract,)), ((), ())), **keep)
    return [out.reshape(*(lhs.shape[d] for d in lhs_free), *(rhs.shape[d] for d in rhs_free))]


def _as_matrix(x: jax.Array, contract: Sequence[int], free: Sequence[int]) -> tuple[jax.Array, int]:
    """Merge an operand's contracted and its free dims; returns the matrix and its contracted dim.

    They stay in the order in which they stand, so that as little as can be is transposed.
    """
    contract_first = not free or (bool(contract) and min(contract) < min(free))
    groups = (contract, free) if contract_first else (free, contract)
    matrix = jnp.transpose(x, (*groups[0], *groups[1])).reshape(
        [math.prod(x.shape[d] for d in g) for g in groups]
    )
    return matrix, 0 if contract_first else 1


@dataclasses.dataclass(frozen=True)
class Setting:
    """How a unit is turned into functions on one kind of submesh.

    Attributes:
        remat: Policy name, see `checkpoint_policy`.
        flatten_dots: Whether products are rewritten by `flatten_dot`.
        microbatch_rows: Rows of the whole microbatch, of which this trace sees a part; random draws are made
            for all of them and the own rows taken, so that they don't depend on the placement.
        constrain: Lays out an array by its logical names; None leaves it.
    """

    remat: str = "dots"
    flatten_dots: bool = False
    microbatch_rows: int | None = None
    constrain: Callable[[Any, tuple[str | None, ...]], Any] | None = None


def _with_flat_dots(eqn: Any, args: list[Any]) -> list[Any]:
    """Rewrite the products inside a remat call by evaluating its body with the rule."""
    body = next(jaxprs.inner_jaxprs(eqn))
    run = jax.checkpoint(
        lambda *a: jaxprs.call(body, a, {"dot_general": flatten_dot}),
        policy=eqn.params["policy"],
        prevent_cse=eqn.params["prevent_cse"],
    )
    return run(*args)


class UnitFunction:
    """A unit's forward and backward as pure functions on the arrays of one shard.

    Arguments are lists in the order of `unit.params`, `unit.inputs` and `unit.data`; `offset` is the index,
    in the microbatch, of the shard's first row (an int32 scalar).
    """

    def __init__(self, flat: Flat, unit: Unit, setting: Setting, trainable: Sequence[bool]) -> None:
        """Prepare the functions; nothing is traced before one is asked for.

        Args:
            flat: The trace that the unit is of.
            unit: The unit.
            setting: See `Setting`.
            trainable: For each of `unit.params`, whether it gets a gradient.
        """
        self.flat, self.unit, self.setting = flat, unit, setting
        floating = [jnp.issubdtype(v.aval.dtype, jnp.floating) for v in (*unit.input_vars, *unit.output_vars)]
        num_inputs = len(unit.inputs)
        self.moving_params = [i for i, t in enumerate(trainable) if t]
        self.moving_inputs = [i for i in range(num_inputs) if floating[i]]
        self.moving_outputs = [i for i in range(len(unit.outputs)) if floating[num_inputs + i]]
        self.makes_loss = "loss.total" in unit.results
        self._policy = checkpoint_policy(setting.remat)
        self._random = flat.random_rows(unit.eqns) if setting.microbatch_rows else {}
        self._pull_treedef: Any = None
        self.specs = (
            [flat.piece_spec(v) for v in unit.param_vars],
            [flat.piece_spec(v) for v in unit.input_vars],
            [flat.piece_spec(v) for v in unit.data_vars],
            jax.ShapeDtypeStruct((), jnp.int32),
        )

    # ---- the plain function ----

    def run(self, params: list, inputs: list, data: list, offset: Any) -> tuple[list, list]:
        """Evaluate the unit. Returns its outputs and its results."""
        unit = self.unit
        env = dict(
            zip((*unit.param_vars, *unit.input_vars, *unit.data_vars), (*params, *inputs, *data), strict=True)
        )
        out = jaxprs.evaluate(unit.eqns, env, [*unit.output_vars, *unit.result_atoms], self._rules(offset))
        num_outputs = len(unit.outputs)
        return out[:num_outputs], [jnp.asarray(r) for r in out[num_outputs:]]

    def _rules(self, offset: Any) -> dict[str, Rule]:
        rules: dict[str, Rule] = {"name": self._constrain}
        if self.setting.flatten_dots:
            rules["dot_general"] = flatten_dot
            rules |= dict.fromkeys(("remat", "remat2", "checkpoint"), _with_flat_dots)
        if self._random:
            names = {e.primitive.name for e in self.unit.eqns if any(v in self._random for v in e.outvars)}
            rules |= dict.fromkeys(names, lambda eqn, args: self._own_draws(eqn, args, offset))
        return rules

    def _constrain(self, eqn: Any, args: list[Any]) -> list[Any] | None:
        name = eqn.params["name"]
        if self.setting.constrain is None or not name.startswith(CONSTRAIN):
            return None
        return [self.setting.constrain(args[0], tuple(n or None for n in name[len(CONSTRAIN) :].split(",")))]

    def _own_draws(self, eqn: Any, args: list[Any], offset: Any) -> list[Any] | None:
        """Draw for the whole microbatch and take the own rows."""
        row_dim, all_rows = self._random.get(eqn.outvars[0]), self.setting.microbatch_rows
        shape = eqn.params.get("shape")
        if row_dim is None or all_rows is None or all_rows == self.flat.rows:
            return None
        if shape is None or len(eqn.outvars) != 1:
            raise UserError(
                f"The model draws random numbers with `{eqn.primitive.name}`, whose draws for some of the "
                "rows can't be taken out of those for all. Use jax.random with the default key type."
            )
        dim, outer, inner = row_dim.dim, row_dim.outer, row_dim.inner
        whole = (*shape[:dim], outer * all_rows * inner, *shape[dim + 1 :])
        drawn = eqn.primitive.bind(*args, **(eqn.params | {"shape": whole}))
        extra = drawn.shape[len(shape) :]
        split = drawn.reshape(
            *shape[:dim], outer, self.setting.microbatch_rows, inner, *shape[dim + 1 :], *extra
        )
        own = jax.lax.dynamic_slice_in_dim(split, offset, self.flat.rows, axis=dim + 1)
        return [own.reshape(*shape, *extra)]

    # ---- differentiated ----

    def _pull(self, params: list, inputs: list, data: list, offset: Any) -> tuple[list, list, Any]:
        """(outputs, results, the vjp's pullback) with respect to the moving parameters and inputs."""

        def f(moving_params: list, moving_inputs: list, rest: tuple) -> tuple[list, list]:
            fixed_params, fixed_inputs, d, o = rest
            p, x = list(fixed_params), list(fixed_inputs)
            for i, a in zip(self.moving_params, moving_params, strict=True):
                p[i] = a
            for i, a in zip(self.moving_inputs, moving_inputs, strict=True):
                x[i] = a
            outputs, results = self.run(p, x, d, o)
            moving = [outputs[i] for i in self.moving_outputs]
            if self.makes_loss:
                moving.append(results[self.unit.results.index("loss.total")])
            return moving, [outputs, results]

        if self._policy is not None:
            f = jax.checkpoint(f, policy=self._policy, prevent_cse=False)
        still = (
            [None if i in self.moving_params else p for i, p in enumerate(params)],
            [None if i in self.moving_inputs else x for i, x in enumerate(inputs)],
            data,
            offset,
        )
        _, pull, (outputs, results) = jax.vjp(
            lambda p, x: f(p, x, still),
            [params[i] for i in self.moving_params],
            [inputs[i] for i in self.moving_inputs],
            has_aux=True,
        )
        return outputs, results, pull

    def _learn_sources(self) -> None:
        """Find out which leaves of the pullback are inputs, follow from weights alone, or have to be kept."""

        def leaves(*args: Any) -> list[Any]:
            return jax.tree.leaves(self._pull(*args)[2])

        closed = jax.make_jaxpr(leaves)(*self.specs)
        inner, consts = jaxprs.open_jaxpr(closed)
        position = {v: i for i, v in enumerate(inner.invars)}
        num_params = len(self.unit.params)
        batch_inputs = set(inner.invars[num_params:])
        self._consts = dict(zip(inner.constvars, consts, strict=True))
        self._invars = inner.invars
        self._sources: list[tuple[str, Any]] = []
        self._kept_specs: list[Any] = []
        for atom in inner.outvars:
            if jaxprs.is_literal(atom):
                self._sources.append(("derived", ([], atom)))
            elif atom in position:
                self._sources.append(("input", position[atom]))
            else:
                eqns, free = jaxprs.prune(inner.eqns, [atom])
                if batch_inputs.isdisjoint(free):
                    self._sources.append(("derived", (eqns, atom)))
                else:
                    self._sources.append(("kept", len(self._kept_specs)))
                    self._kept_specs.append(jax.ShapeDtypeStruct(atom.aval.shape, atom.aval.dtype))

    @property
    def kept_specs(self) -> list[jax.ShapeDtypeStruct]:
        """What the forward keeps for the backward, for one shard."""
        if not hasattr(self, "_sources"):
            self._learn_sources()
        return self._kept_specs

    def forward(self, params: list, inputs: list, data: list, offset: Any) -> tuple[list, list, list]:
        """Returns outputs, results and the kept residuals."""
        num_kept = len(self.kept_specs)
        outputs, results, pull = self._pull(params, inputs, data, offset)
        leaves, self._pull_treedef = jax.tree.flatten(pull)
        kept = [leaf for leaf, (source, _) in zip(leaves, self._sources, strict=True) if source == "kept"]
        assert len(kept) == num_kept, "two traces of one unit keep unlike residuals"
        return outputs, results, kept

    def backward(
        self, params: list, inputs: list, data: list, offset: Any, kept: list, cotangents: list
    ) -> tuple[list, list]:
        """Pull cotangents back.

        Args:
            params: As in the forward.
            inputs: As in the forward.
            data: As in the forward.
            offset: As in the forward.
            kept: What the forward kept.
            cotangents: One for each moving output, and last the loss's seed if this unit makes the loss.

        Returns:
            Gradients of the moving parameters and cotangents of the moving inputs.
        """
        assert self._pull_treedef is not None, "the backward of a unit is traced before its forward"
        given = [*params, *inputs, *data, offset]
        env = dict(self._consts) | dict(zip(self._invars, given, strict=True))
        leaves = []
        for source, what in self._sources:
            if source == "derived":
                leaves.append(jaxprs.evaluate(what[0], dict(env), [what[1]])[0])
            else:
                leaves.append(given[what] if source == "input" else kept[what])
        pull = jax.tree.unflatten(self._pull_treedef, leaves)
        return pull(cotangents)


def kept_bytes(flat: Flat, unit: Unit, policies: Sequence[str]) -> dict[str, float]:
    """Bytes that a unit keeps for its backward (residuals and its floating inputs), by remat policy."""
    trainable = [jnp.issubdtype(v.aval.dtype, jnp.floating) for v in unit.param_vars]
    held = sum(math.prod(v.aval.shape) * v.aval.dtype.itemsize for v in unit.input_vars)
    out = {}
    for policy in policies:
        function = UnitFunction(flat, unit, Setting(remat=policy), trainable)
        out[policy] = float(held + sum(math.prod(s.shape) * s.dtype.itemsize for s in function.kept_specs))
    return out
