"""Losses that models have, and losses that mix the rows of a batch: name -> function of (params, batch)."""

import jax
import jax.numpy as jnp
import optax

import hetjax

ROWS = 8
SEQ, DIM, VOCAB = 5, 4, 7
KEY = jax.random.key(0)


def make_batch(rows):
    x, t, y, m = jax.random.split(KEY, 4)
    return {
        "x": jax.random.normal(x, (rows, SEQ, DIM)),
        "tokens": jax.random.randint(t, (rows, SEQ), 0, VOCAB),
        "label": jax.random.randint(y, (rows,), 0, DIM),
        "mask": jax.random.bernoulli(m, 0.7, (rows, SEQ)).astype(jnp.float32),
    }


PARAMS = {"embed": jax.random.normal(KEY, (VOCAB, DIM)), "w": jax.random.normal(KEY, (DIM, DIM))}


def logits_of(p, b):
    return jax.nn.silu(p["embed"][b["tokens"]] @ p["w"]) @ p["embed"].T


def nll_of(p, b):
    return optax.softmax_cross_entropy_with_integer_labels(logits_of(p, b), b["tokens"])


def masked(p, b):
    return (nll_of(p, b) * b["mask"]).sum(), b["mask"].sum()


def attention_bqhd(p, b):
    q = b["x"].reshape(-1, SEQ, 2, 2)
    weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, q), where=jnp.tril(jnp.ones((SEQ, SEQ), bool)))
    return jnp.einsum("bhqk,bkhd->bqhd", weights, q).mean()


def attention_bhqd(p, b):
    flat = b["x"].reshape(-1, DIM) @ p["w"]
    q = flat.reshape(-1, SEQ, 2, 2).transpose(0, 2, 1, 3)
    weights = jax.nn.softmax(q @ q.swapaxes(-1, -2))
    return ((weights @ q).transpose(0, 2, 1, 3).reshape(-1, DIM) @ p["w"]).mean()


def grouped_query(p, b):
    q = jnp.repeat(b["x"][:, :, None], 4, axis=2)
    k, v = (jnp.repeat(b["x"][:, :, None, :], 2, axis=2) for _ in range(2))
    return jax.nn.dot_product_attention(q, k, v, is_causal=True).mean()


def rotary(p, b):
    angle = jnp.arange(SEQ, dtype=jnp.float32)[:, None] * jnp.ones((1, DIM // 2))
    a, c = jnp.split(b["x"], 2, axis=-1)
    sin, cos = jnp.sin(angle)[None], jnp.cos(angle)[None]
    return jnp.concatenate([a * cos - c * sin, a * sin + c * cos], -1).mean()


def two_views(p, b):
    both = jnp.concatenate([b["x"], 2 * b["x"]]) @ p["w"]
    a, c = jnp.split(both, 2)
    return (a * jnp.cos(c)).mean()


def top_experts(p, b):
    gates, which = jax.lax.top_k(jax.nn.softmax(b["x"] @ p["w"]), 2)
    chosen = jax.nn.one_hot(which, DIM) * gates[..., None]
    return jnp.einsum("rske,rsd,ed->rsd", chosen, b["x"], p["w"]).mean()


def layers(p, b):
    stacked = jnp.stack([p["w"], p["w"] + 1])
    body = jax.checkpoint(lambda h, w: (jnp.tanh(h @ w), None))
    return jax.lax.scan(body, b["x"], stacked)[0].mean()


def recurrent(p, b):
    xs = b["x"].swapaxes(0, 1)
    start = jnp.zeros((xs.shape[1], DIM))
    return jax.lax.scan(lambda h, x: (jnp.tanh(h @ p["w"] + x), h), start, xs)[1].mean()


def chunked(p, b):
    def step(total, x):
        return total + jnp.square(x @ p["w"]).sum(), None

    total = jax.lax.scan(step, jnp.zeros(()), b["x"].swapaxes(0, 1))[0]
    return total, jnp.float32(b["x"].size)


MIDDLE = make_batch(ROWS)["x"].mean()


@jax.custom_jvp
def relu(x):
    return jnp.maximum(x, 0.0)


relu.defjvp(lambda primals, tangents: (relu(*primals), tangents[0] * (primals[0] > 0)))


@jax.custom_vjp
def cube(x):
    return x**3


cube.defvjp(lambda x: (x**3, x), lambda x, ct: (3 * x**2 * ct,))

FINE = {
    "a mean over everything": lambda p, b: (b["x"] @ p["w"]).mean(),
    "a mean of examples": lambda p, b: jnp.square(b["x"]).sum((1, 2)).mean(),
    "examples weighted by 1 / rows": lambda p, b: (b["x"].sum((1, 2)) / b["x"].shape[0]).sum(),
    "cross entropy with masked sums": masked,
    "total and number of tokens": lambda p, b: (nll_of(p, b).sum(), jnp.float32(b["tokens"].size)),
    "masked by where": lambda p, b: (jnp.where(b["mask"] > 0, nll_of(p, b), 0.0).sum(), b["mask"].sum()),
    "a mean and a penalty on parameters": lambda p, b: b["x"].mean() + 0.1 * jnp.square(p["w"]).sum(),
    "a penalty times the weight": lambda p, b: (
        masked(p, b)[0] + 0.1 * jnp.square(p["w"]).sum() * masked(p, b)[1],
        masked(p, b)[1],
    ),
    "one_hot": lambda p, b: (
        -(jax.nn.one_hot(b["label"], DIM) * jax.nn.log_softmax(b["x"][:, 0])).sum(-1).mean()
    ),
    "take_along_axis": lambda p, b: jnp.take_along_axis(b["x"][:, 0], b["label"][:, None], -1).mean(),
    "logits[arange(rows), labels]": lambda p, b: jax.nn.log_softmax(b["x"][:, 0] @ p["w"])[
        jnp.arange(b["label"].shape[0]), b["label"]
    ].mean(),
    "logits[arange(rows * seq), labels]": lambda p, b: jax.nn.log_softmax(logits_of(p, b).reshape(-1, VOCAB))[
        jnp.arange(b["tokens"].size), b["tokens"].reshape(-1)
    ].mean(),
    "writes at [arange(rows), labels]": lambda p, b: (
        jnp.zeros((b["label"].shape[0], DIM)).at[jnp.arange(b["label"].shape[0]), b["label"]].set(1.0)
        * b["x"][:, 0]
    ).mean(),
    "attention in bqhd": attention_bqhd,
    "attention in bhqd on flat rows": attention_bhqd,
    "grouped queries": grouped_query,
    "rotary": rotary,
    "two views concatenated and split": two_views,
    "top experts": top_experts,
    "scan over layers with remat": layers,
    "scan over time": recurrent,
    "sums over chunks of the sequence": chunked,
    "custom_jvp": lambda p, b: relu(b["x"] @ p["w"]).mean(),
    "custom_vjp": lambda p, b: cube(b["x"] @ p["w"]).mean(),
    "jit": lambda p, b: jax.jit(lambda x: jnp.tanh(x).mean())(b["x"]),
    "activations": lambda p, b: sum(
        f(b["x"]).mean() for f in (jax.nn.gelu, jax.nn.relu, jax.nn.silu, jax.nn.elu)
    ),
    "vmap over examples": lambda p, b: jax.vmap(lambda x, y: (x @ p["w"])[:, y].max())(
        b["x"], b["label"]
    ).mean(),
    "map over examples": lambda p, b: jax.lax.map(lambda x: jnp.sort(x @ p["w"]).max(), b["x"]).mean(),
    "cond on a parameter": lambda p, b: jax.lax.cond(p["w"][0, 0] > 0, jnp.sin, jnp.cos, b["x"]).mean(),
    "a loop of known length": lambda p, b: jax.lax.fori_loop(
        0, 3, lambda i, x: x * jnp.sin(x), b["x"]
    ).mean(),
    "sorts, cumsums, argmax over features": lambda p, b: (
        jnp.sort(b["x"], -1)[..., 0]
        + jnp.cumsum(b["x"], 1)[..., 0]
        + b["x"][..., 0] * b["x"].argmax(-1).astype(jnp.float32)
    ).mean(),
    "fft and cholesky of each row": lambda p, b: (
        jnp.abs(jnp.fft.fft(b["x"])).mean()
        + jnp.linalg.cholesky(jnp.einsum("rsi,rsj->rij", b["x"], b["x"]) + jnp.eye(DIM)[None]).mean()
    ),
    "a covariance": lambda p, b: (jnp.einsum("rsi,rsj->ij", b["x"], b["x"]) * p["w"]).sum() / b["x"].shape[0],
    "counts of tokens": lambda p, b: (
        (jnp.zeros(VOCAB).at[b["tokens"]].add(1.0) * p["embed"][:, 0]).sum(),
        jnp.float32(b["tokens"].size),
    ),
    "segment sums": lambda p, b: (
        (jax.ops.segment_sum(b["x"].reshape(-1, DIM), b["tokens"].reshape(-1), VOCAB) * p["embed"]).sum(),
        jnp.float32(b["tokens"].size),
    ),
    "a gradient within": lambda p, b: jnp.square(
        jax.grad(lambda x: jnp.tanh(x @ p["w"]).sum())(b["x"])
    ).mean(),
    "average pooling": lambda p, b: (
        jax.lax.reduce_window(b["x"], 0.0, jax.lax.add, (1, 2, 1), (1, 1, 1), "VALID").mean() / 2
    ),
    "marks": lambda p, b: hetjax.constrain(hetjax.cut(b["x"]), "batch", None, "embed").mean(),
    "padding, slices and updates of the sequence": lambda p, b: (
        jnp.pad(b["x"], ((0, 0), (1, 0), (0, 0)))[:, :-1]
        * jax.lax.dynamic_update_slice(b["x"], b["x"][:, :1], (0, 2, 0))
    ).mean(),
    "a constant": lambda p, b: jnp.square(p["w"]).sum(),
    "zero and a weight": lambda p, b: (jnp.zeros(()), b["mask"].sum()),
}

MIXING = {
    "total / weight": (lambda p, b: masked(p, b)[0] / masked(p, b)[1], "divides by a value that is summed"),
    "total / max(weight, 1)": (
        lambda p, b: masked(p, b)[0] / jnp.maximum(masked(p, b)[1], 1.0),
        "non-linear function to a value that is summed",
    ),
    "Mean.value": (lambda p, b: hetjax.Mean(*masked(p, b)).value, "non-linear function"),
    "contrastive": (
        lambda p, b: -jnp.diag(jax.nn.log_softmax(b["x"][:, 0] @ b["x"][:, 1].T)).mean(),
        "every row with every other row",
    ),
    "pairs by broadcasting": (
        lambda p, b: jnp.square(b["x"][:, None, 0] - b["x"][None, :, 0]).mean(),
        "rows with other rows",
    ),
    "max over the batch": (lambda p, b: (b["x"] @ p["w"]).max(), "takes the max over the rows"),
    "norm over the batch": (lambda p, b: jnp.linalg.norm(b["x"]), "non-linear function"),
    "exp of the mean": (lambda p, b: jnp.exp(b["x"].mean()), "non-linear function"),
    "sort over the rows": (lambda p, b: (jnp.sort(b["x"], 0) * b["x"]).mean(), "sorts over the rows"),
    "cumsum over the rows": (lambda p, b: jnp.sin(jnp.cumsum(b["x"], 0)).mean(), "accumulates over the rows"),
    "softmax over the rows": (lambda p, b: (jax.nn.softmax(b["x"], 0) * b["x"]).mean(), "max over the rows"),
    "subtracting the batch mean": (
        lambda p, b: jnp.square(b["x"] - b["x"].mean(0, keepdims=True)).mean(),
        "combines each row with a value that was computed from all rows",
    ),
    "std over the batch": (lambda p, b: jnp.std(b["x"], 0).mean(), "computed from all rows"),
    "product of two batch means": (
        lambda p, b: (b["x"].mean((0, 1)) * jnp.square(b["x"]).mean((0, 1))).sum(),
        "multiplies values that are each summed",
    ),
    "square of a batch mean": (lambda p, b: jnp.square(b["x"].mean(0)).sum(), "multiplies values"),
    "reversed rows": (lambda p, b: (b["x"] * b["x"][::-1]).mean(), "reverses the rows"),
    "rolled rows": (lambda p, b: (b["x"] * jnp.roll(b["x"], 1, 0)).mean(), "takes some of the rows"),
    "halves of the batch": (
        lambda p, b: (lambda a, c: (a * c).mean())(*jnp.split(b["x"] @ p["w"], 2)),
        "takes some of the rows",
    ),
    "rows folded into features": (
        lambda p, b: jnp.square(b["x"].reshape(2, -1, SEQ, DIM).sum(0)).mean(),
        "reshapes the rows into parts",
    ),
    "shuffled rows": (
        lambda p, b: (b["x"] * b["x"][jax.random.permutation(KEY, b["x"].shape[0])]).mean(),
        "rows",
    ),
    "rows looked up by data": (lambda p, b: (b["x"][b["label"]] * b["x"]).mean(), "rows"),
    "the first row for all": (lambda p, b: (b["x"] * b["x"][:1]).mean(), "takes some of the rows"),
    "weights by place in the batch": (
        lambda p, b: (b["x"] * jnp.arange(b["x"].shape[0], dtype=jnp.float32)[:, None, None]).mean(),
        "place in the batch",
    ),
    "divided by rows - 1": (
        lambda p, b: b["x"].sum() / (b["x"].shape[0] - 1),
        "the number of rows for more than",
    ),
    "a scan over the rows": (
        lambda p, b: jax.lax.scan(lambda h, x: (jnp.tanh(h + x), h), jnp.zeros((SEQ, DIM)), b["x"])[1].mean(),
        "carries a value from row to row",
    ),
    "a loop until all rows are done": (
        lambda p, b: jax.lax.while_loop(lambda x: jnp.abs(x).sum() > 20, lambda x: x * 0.5, b["x"]).mean(),
        "the number of iterations depends on the rows",
    ),
    "a branch by the batch": (
        lambda p, b: jax.lax.cond(b["x"].mean() > MIDDLE, jnp.sin, jnp.cos, b["x"]).mean(),
        "non-linear function",
    ),
    "a sum and a penalty on parameters": (
        lambda p, b: (b["x"].sum() + jnp.square(p["w"]).sum(), jnp.float32(b["x"].size)),
        "some grow with the number of rows and others don't",
    ),
    "a triangle over the rows": (
        lambda p, b: jnp.einsum("rq,qsd->rsd", jnp.tril(jnp.ones((b["x"].shape[0],) * 2)), b["x"]).mean(),
        "place in the batch",
    ),
    "as many iterations as rows": (
        lambda p, b: jax.lax.fori_loop(0, b["x"].shape[0], lambda i, x: x * 0.5, b["x"]).mean(),
        "carries a value from row to row",
    ),
    "a loop that adds its counter to a sum": (
        lambda p, b: (
            jax.lax.fori_loop(0, 3, lambda i, total: total + jnp.float32(i), b["x"].sum()),
            jnp.float32(b["x"].size),
        ),
        "some grow with the number of rows and others don't",
    ),
    "capacity of experts": (
        lambda p, b: (jnp.cumsum(jax.nn.one_hot(b["label"], DIM), 0) * b["x"][:, 0]).mean(),
        "accumulates over the rows",
    ),
}
