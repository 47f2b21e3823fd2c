"""The models against independent references: numpy, each other, and what their formulas promise."""

import functools
import inspect
import tomllib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from jax.flatten_util import ravel_pytree

import hetjax
import models
from benchmarks import plain_gpt
from models import common, llama

VOCAB = 32
SHAPE = {"num_layers": 2, "embed_dim": 32, "num_heads": 4}
FAMILIES = {
    "gpt": {"family": "gpt"},
    "gpt naive": {"family": "gpt", "form": "naive"},
    "gpt untied": {"family": "gpt", "tied": False},
    "llama": {"family": "llama"},
    "llama grouped": {"family": "llama", "num_kv_heads": 2, "tied": False},
    "llama scanned": {"family": "llama", "layers": "scanned", "num_kv_heads": 1},
}
each_family = pytest.mark.parametrize("name", FAMILIES)


def make(section, seq_len=12, **fields):
    return models.build(models.parse(SHAPE | section | fields), seq_len=seq_len, vocab_size=VOCAB)


@functools.cache
def build(name):
    """A family's model, parameters and compiled logits: shared, because compiling is what takes the time.

    The parameters are larger than a fresh model's: attention is far from uniform and every bias counts.
    """
    model = make(FAMILIES[name])
    flat, unravel = ravel_pytree(jax.jit(model.init_fn)(jax.random.key(0)))
    noise = 0.1 * jax.random.normal(jax.random.key(1), flat.shape)
    params = unravel(jnp.where((flat == 0) | (flat == 1), flat + noise, flat * 8))
    return model, params, jax.jit(model.logits_fn)


def make_batch(rows=3, seq=12):
    rng = np.random.default_rng(0)
    ids = rng.integers(0, VOCAB, (rows, seq + 1)).astype(np.int32)
    weights = rng.integers(0, 2, (rows, seq)).astype(np.float32)
    batch = {"tokens": ids[:, :-1], "targets": ids[:, 1:], "weights": weights}
    return {name: jnp.asarray(values) for name, values in batch.items()}


def make_tokens(**shape):
    return {"tokens": make_batch(**shape)["tokens"]}


def mean_loss(model):
    return lambda params, batch: model.eval_loss_fn(params, batch)[0].value


def distance(a, b):
    a, b = (np.asarray(ravel_pytree(x)[0], np.float64) for x in (a, b))
    return np.linalg.norm(a - b) / np.linalg.norm(b)


def numbers(params):
    """The parameters as float64 numpy arrays in nested dicts, without flax's boxes."""
    pure = nnx.to_pure_dict(params) if isinstance(params, nnx.State) else linen.unbox(params)["params"]
    return jax.tree.map(lambda x: np.asarray(x, np.float64), pure)


def softmax(x):
    x = np.exp(x - x.max(-1, keepdims=True))
    return x / x.sum(-1, keepdims=True)


def attend(query, key, value):
    """Token by token, head by head; `[seq, heads, head_dim]` each, the keys with as many heads or fewer."""
    seq, heads, dim = query.shape
    out = np.zeros_like(query)
    for h in range(heads):
        shared = h // (heads // key.shape[1])
        for t in range(seq):
            weights = softmax(query[t, h] @ key[: t + 1, shared].T / np.sqrt(dim))
            out[t, h] = weights @ value[: t + 1, shared]
    return out


def gpt_reference(params, tokens, heads):
    """Logits of one row of a GPT in numpy."""

    def norm(x, p):
        standard = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
        return standard * p["scale"] + p["bias"]

    def dense(x, p):
        return x @ p["kernel"] + p["bias"]

    def gelu(x):
        return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))

    x = params["tokens"]["embedding"][tokens] + params["positions"]["embedding"][: len(tokens)]
    for i in range(len(params["blocks"])):
        p = params["blocks"][i]
        y = norm(x, p["attention_norm"])
        q, k, v = (dense(y, p["attention"][n]).reshape(len(x), heads, -1) for n in ("query", "key", "value"))
        x = x + dense(attend(q, k, v).reshape(x.shape), p["attention"]["out"])
        x = x + dense(gelu(dense(norm(x, p["mlp_norm"]), p["mlp"]["up"])), p["mlp"]["down"])
    x = norm(x, params["norm"])
    return x @ (params["head"]["kernel"] if "head" in params else params["tokens"]["embedding"].T)


def llama_reference(params, tokens, heads, kv_heads):
    """Logits of one row of an unrolled Llama in numpy; the rotation as a complex product."""

    def norm(x, p):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * p["scale"]

    def turn(x):
        half = x.shape[-1] // 2
        angles = np.arange(len(x))[:, None, None] * 10_000.0 ** (-np.arange(half) / half)
        z = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angles)
        return np.concatenate([z.real, z.imag], -1)

    x = params["tokens"]["embedding"][tokens]
    for i in range(sum(name.startswith("block_") for name in params)):
        p = params[f"block_{i}"]
        y, a = norm(x, p["attention_norm"]), p["attention"]
        q = (y @ a["query"]["kernel"]).reshape(len(x), heads, -1)
        k, v = ((y @ a[n]["kernel"]).reshape(len(x), kv_heads, -1) for n in ("key", "value"))
        x = x + attend(turn(q), turn(k), v).reshape(x.shape) @ a["out"]["kernel"]
        y, m = norm(x, p["mlp_norm"]), p["mlp"]
        gate = y @ m["gate"]["kernel"]
        x = x + (gate / (1 + np.exp(-gate)) * (y @ m["up"]["kernel"])) @ m["down"]["kernel"]
    x = norm(x, params["norm"])
    return x @ (params["head"]["kernel"] if "head" in params else params["tokens"]["embedding"].T)


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("name", "seq"),
    [("gpt", 12), ("gpt naive", 12), ("gpt untied", 7), ("gpt", 1), ("llama", 12), ("llama grouped", 7)],
)
def test_logits_equal_a_numpy_model_written_token_by_token(name, seq):
    model, params, logits_fn = build(name)
    batch, config = make_tokens(seq=seq), model.config
    if isinstance(config, llama.LlamaConfig):
        reference = functools.partial(llama_reference, heads=config.num_heads, kv_heads=config.kv_heads)
    else:
        reference = functools.partial(gpt_reference, heads=config.num_heads)
    expected = [reference(numbers(params), row) for row in np.asarray(batch["tokens"])]
    logits = logits_fn(params, batch)
    assert logits.dtype == jnp.float32
    assert distance(logits, np.stack(expected)) < 1e-5


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_loss_and_accuracy_are_float32_sums_over_the_weighted_tokens(dtype):
    batch = make_batch()
    logits = (3 * jax.random.normal(jax.random.key(0), (3, 12, VOCAB))).astype(dtype)
    loss, metrics = common.token_loss(logits, batch["targets"], batch["weights"])
    scores = np.asarray(logits, np.float64).reshape(-1, VOCAB)
    targets, weights = np.asarray(batch["targets"]).ravel(), np.asarray(batch["weights"]).ravel()
    nats = -np.log(softmax(scores))[np.arange(len(targets)), targets]
    right = scores[np.arange(len(targets)), targets] == scores.max(-1)
    assert loss.weight == metrics["accuracy"].weight == weights.sum()
    np.testing.assert_allclose(loss.total, (nats * weights).sum(), rtol=1e-5)
    assert metrics["accuracy"].total == (right * weights).sum()
    assert loss.total.dtype == jnp.float32


def test_flat_and_naive_forms_have_the_same_loss_and_gradients():
    (flat, params, _), (naive, _, _), batch = build("gpt"), build("gpt naive"), make_batch()
    first, second = (jax.jit(jax.value_and_grad(mean_loss(m)))(params, batch) for m in (flat, naive))
    np.testing.assert_allclose(first[0], second[0], rtol=1e-6)
    assert distance(first[1], second[1]) < 1e-5


def test_the_benchmarks_hand_written_gpt_is_the_same_function():
    model, params, _ = build("gpt")
    batch = make_batch() | {"weights": jnp.ones((3, 12))}
    pure = nnx.to_pure_dict(params)
    blocks = jax.tree.map(lambda *leaves: jnp.stack(leaves), *(pure["blocks"][i] for i in range(2)))
    stacked = {"blocks": blocks, "norm": pure["norm"]}
    stacked |= {name: pure[name]["embedding"] for name in ("tokens", "positions")}
    _, loss_fn = plain_gpt.make(**SHAPE, vocab_size=VOCAB, seq_len=12)
    with jax.numpy_rank_promotion("allow"):
        loss = jax.jit(loss_fn)(stacked, batch)
    np.testing.assert_allclose(loss, mean_loss(model)(params, batch), rtol=1e-6)


def test_scanned_layers_equal_unrolled_ones_with_the_parameters_stacked():
    unrolled, boxed, _ = build("llama")
    scanned, params, batch = make(FAMILIES["llama"], layers="scanned"), linen.unbox(boxed), make_batch()

    def stack(tree):
        blocks = [tree["params"][f"block_{i}"] for i in range(SHAPE["num_layers"])]
        rest = {k: v for k, v in tree["params"].items() if not k.startswith("block_")}
        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *blocks)
        return {"params": rest | {"blocks": {"block": stacked}}}

    first = jax.jit(jax.value_and_grad(mean_loss(unrolled)))(params, batch)
    second = jax.jit(jax.value_and_grad(mean_loss(scanned)))(stack(params), batch)
    np.testing.assert_allclose(first[0], second[0], rtol=1e-6)
    assert distance(second[1], stack(first[1])) < 1e-5


def test_grouped_attention_equals_full_attention_with_the_key_heads_repeated():
    query, key, value = (jax.random.normal(jax.random.key(h), (3, h, 12, 8)) for h in (4, 2, 2))
    bias = common.attention_bias(make_tokens())
    full = common.causal_attention(query, jnp.repeat(key, 2, axis=1), jnp.repeat(value, 2, axis=1), bias)
    assert distance(common.causal_attention(query, key, value, bias), full) < 1e-6


@pytest.mark.parametrize("name", ["gpt", "gpt naive", "llama grouped", "llama scanned"])
def test_a_packed_row_equals_its_texts_one_by_one(name):
    _, params, logits_fn = build(name)
    tokens, texts = make_tokens(rows=1)["tokens"][0], ((0, 5), (5, 6), (6, 12))
    packed = {
        "tokens": tokens[None],
        "segment_ids": jnp.asarray([[i for i, (a, b) in enumerate(texts) for _ in range(a, b)]], jnp.int32),
        "positions": jnp.asarray([[t - a for a, b in texts for t in range(a, b)]], jnp.int32),
    }
    alone = logits_fn(params, {"tokens": jnp.stack([jnp.roll(tokens, -start) for start, _ in texts])})
    expected = jnp.concatenate([alone[i, : b - a] for i, (a, b) in enumerate(texts)])
    assert distance(logits_fn(params, packed)[0], expected) < 1e-6


@each_family
def test_no_token_sees_a_later_one(name):
    _, params, logits_fn = build(name)
    tokens = make_tokens()["tokens"]
    before = logits_fn(params, {"tokens": tokens})
    for place in (11, 6, 5):
        after = logits_fn(params, {"tokens": tokens.at[:, place].add(1) % VOCAB})
        np.testing.assert_array_equal(before[:, :place], after[:, :place])
        assert distance(before[:, place:], after[:, place:]) > 1e-3


def test_rotated_products_depend_on_the_distance_alone():
    query, key = (jax.random.normal(jax.random.key(i), (1, 1, 1, 16)) for i in (0, 1))

    def turn(x, place):
        return llama.rotate(x, llama.rotary_tables(jnp.asarray([[place]], jnp.int32), 16, 10_000.0))

    def product(i, j):
        return float(jnp.vdot(turn(query, i), turn(key, j)))

    np.testing.assert_allclose(product(3, 1), product(103, 101), rtol=1e-4)
    np.testing.assert_allclose(product(7, 7), float(jnp.vdot(query, key)), rtol=1e-5)
    assert abs(product(3, 1) - product(1, 3)) > 1e-2


def dot_dtypes(jaxpr):
    """The operand dtypes of every matrix product, inside scans and calls too."""
    found = set()
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            found |= {str(v.aval.dtype) for v in eqn.invars}
        for inner in jax.tree.leaves(eqn.params, is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")):
            if hasattr(inner, "eqns") or hasattr(inner, "jaxpr"):
                found |= dot_dtypes(getattr(inner, "jaxpr", inner))
    return found


@each_family
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_products_are_computed_in_the_dtype_of_the_parameters(name, dtype):
    model, params, _ = build(name)
    lower = jax.tree.map(lambda x: x.astype(dtype), params)
    forward = jax.make_jaxpr(model.logits_fn)(lower, make_tokens())
    assert dot_dtypes(forward.jaxpr) == {dtype}
    loss, grads = jax.eval_shape(jax.value_and_grad(mean_loss(model)), lower, make_batch())
    assert loss.dtype == jnp.float32 and {str(g.dtype) for g in jax.tree.leaves(grads)} == {dtype}


def test_bfloat16_parameters_give_nearly_the_float32_gradients():
    model, params, _ = build("llama grouped")
    lower, grad = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params), jax.jit(jax.grad(mean_loss(model)))
    exact = grad(jax.tree.map(lambda x: x.astype(jnp.float32), lower), make_batch())
    assert distance(grad(lower, make_batch()), exact) < 3e-2


def test_dropout_follows_its_key_and_is_off_without_one():
    plain, params, _ = build("gpt")
    model, batch = make(FAMILIES["gpt"], dropout=0.3), make_batch()
    loss = jax.jit(lambda rng: model.loss_fn(params, batch, rng)[0].value)
    first, again, other = loss(jax.random.key(1)), loss(jax.random.key(1)), loss(jax.random.key(2))
    assert first == again != other
    without_key = functools.partial(model.loss_fn, rng=None)
    losses = (without_key, model.eval_loss_fn, plain.loss_fn)
    assert len({str(jax.make_jaxpr(f)(params, batch)) for f in losses}) == 1
    assert len(inspect.signature(model.loss_fn).parameters) == 3
    assert len(inspect.signature(plain.loss_fn).parameters) == 2


def test_dropout_keeps_the_expected_value():
    x = jnp.full((200, 500), 3.0)
    y = common.dropout(x, 0.25, jax.random.key(0))
    np.testing.assert_allclose(y.mean(), 3.0, rtol=1e-2)
    np.testing.assert_allclose((y == 0).mean(), 0.25, rtol=2e-2)


@pytest.mark.smoke
@each_family
def test_every_dim_of_every_parameter_has_a_name(name):
    model = build(name)[0]
    config, params = model.config, jax.eval_shape(model.init_fn, jax.random.key(0))
    partition_spec = nnx.get_partition_spec if isinstance(params, nnx.State) else linen.get_partition_spec
    specs = jax.tree.leaves(partition_spec(params), is_leaf=lambda x: isinstance(x, jax.P))
    shapes = [leaf.shape for leaf in jax.tree.leaves(params)]
    size = {"vocab": VOCAB, "embed": 32, "heads": 32, "mlp": config.mlp_width, "pos": 12, "layers": 2}
    if isinstance(config, llama.LlamaConfig):
        size["kv"] = config.kv_heads * config.head_dim
    assert [tuple(size[axis] for axis in spec) for spec in specs] == shapes


@pytest.mark.parametrize(
    ("fields", "num_cuts"),
    [({}, 5), ({"cut_every": 2}, 3), ({"cut_every": 3}, 3), ({"cuts": "half"}, 9)],
    ids=["each block", "two", "three", "half"],
)
@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_cuts_stand_after_the_embedding_and_the_blocks(family, fields, num_cuts):
    model = make({"family": family}, num_layers=4, **fields)
    params = jax.eval_shape(model.init_fn, jax.random.key(0))
    jaxpr = jax.make_jaxpr(model.logits_fn)(params, make_tokens())
    cuts = [e for e in jaxpr.jaxpr.eqns if e.primitive.name == "name" and e.params["name"] == "hetjax.cut"]
    assert len(cuts) == num_cuts


PUBLISHED = {  # the Zorse authors' model_stats.json, vocabulary 49152
    "gpt_1.3b": 1_414_123_520,
    "gpt_2.7b": 2_774_553_600,
    "gpt_6.7b": 6_855_204_864,
    "llama_1b": 1_331_783_680,
    "llama_3b": 3_536_246_400,
    "llama_7b": 6_878_924_800,
    "llama_13b": 13_191_500_800,
    "llama_33b": 32_757_271_040,
    "llama_65b": 65_566_679_040,
}


def read(name):
    with models.path(name).open("rb") as file:
        return tomllib.load(file)


@pytest.mark.parametrize("name", PUBLISHED)
def test_large_sizes_have_the_published_number_of_parameters(name):
    data = read(name)["data"]
    sizes = {"seq_len": data["seq_len"], "vocab_size": data["vocab_size"]}
    one, two = (models.build(models.load(name, {"num_layers": n}), **sizes).num_params for n in (1, 2))
    assert one + (models.load(name).num_layers - 1) * (two - one) == PUBLISHED[name]


@pytest.mark.parametrize("name", sorted(set(models.names()) - set(PUBLISHED)))
def test_small_sizes_build(name):
    content = read(name)
    assert set(content) == {"description", "model", "data", "optimizer", "train"}
    model = models.build(models.load(name), seq_len=content["data"]["seq_len"], vocab_size=256)
    params = jax.eval_shape(model.init_fn, jax.random.key(0))
    assert jax.eval_shape(model.loss_fn, params, model.batch_spec(2))[0].total.shape == ()


def test_batch_spec_is_what_the_loss_reads():
    model = build("llama")[0]
    spec = model.batch_spec(6, packed=True)
    params = jax.eval_shape(model.init_fn, jax.random.key(0))
    assert jax.eval_shape(model.loss_fn, params, spec)[0].total.dtype == jnp.float32
    assert set(spec) - set(model.batch_spec(6)) == {"segment_ids", "positions"}
    assert {s.shape for s in spec.values()} == {(6, 12)}


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({}, r"\[model\] in job\.toml has no family\. Set it to one of: gpt, llama\."),
        ({"family": "gtp"}, r"has family = 'gtp'\. Set it to one of: gpt, llama\."),
        ({"family": []}, r"has family = \[\]\. Set it to one of: gpt, llama\."),
        (SHAPE | {"family": "gpt", "embed_dim": 10**20}, r"embed_dim = 10{20}: input should be less than or"),
        (
            SHAPE | {"family": "gpt", "num_layers": True},
            r"num_layers = True: input should be a valid integer",
        ),
        (SHAPE | {"family": "gpt", "layres": 3}, r"describe a gpt: unknown key 'layres'\. Its keys are: "),
        ({"family": "gpt", "embed_dim": 8, "num_heads": 2}, r"'num_layers' is missing"),
        (SHAPE | {"family": "gpt", "num_layers": 0}, r"num_layers = 0: input should be greater than 0"),
        (SHAPE | {"family": "gpt", "form": "fast"}, r"form = 'fast': input should be 'flat' or 'naive'"),
        (SHAPE | {"family": "gpt", "num_heads": 5}, r"embed_dim = 32 is no multiple of num_heads = 5"),
        (SHAPE | {"family": "llama", "num_kv_heads": 3}, r"num_heads = 4 is no multiple of num_kv_heads = 3"),
        (SHAPE | {"family": "llama", "embed_dim": 36}, r"embed_dim / num_heads = 9 is odd"),
        (SHAPE | {"family": "llama", "layers": "scanned", "cut_every": 2}, r"cut_every = 2 needs layers"),
    ],
)
def test_a_wrong_model_section_is_explained(section, message):
    with pytest.raises(hetjax.UserError, match=message):
        models.parse(section, where="job.toml")


def test_a_wrong_model_file_is_explained(tmp_path):
    with pytest.raises(hetjax.UserError, match=r"No model file 'gpt_smal'\. .* one of: .*gpt_small, "):
        models.load("gpt_smal")
    broken = tmp_path / "broken.toml"
    broken.write_text("[model\n")
    with pytest.raises(hetjax.UserError, match=r"broken\.toml is not a TOML file: "):
        models.load(broken)
    broken.write_text("[data]\n")
    with pytest.raises(hetjax.UserError, match=r"has no section \[model\]\. Add one, with family set to"):
        models.load(broken)
    with pytest.raises(hetjax.UserError, match=r"got a ModelConfig\. Give a config of one of: gpt, llama\."):
        models.build(common.ModelConfig(**SHAPE), seq_len=4, vocab_size=4)
    assert models.load("gpt_tiny", {"num_layers": 7}).num_layers == 7
