"""checkpoint.py: what is written can be read on any machine, and nothing damaged is read."""

import gc
import json
import resource
import signal
import sys
import threading
import types

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from hetjax import checkpoint
from hetjax.checkpoint import (
    Checkpointer,
    CheckpointError,
    check_layout,
    fill,
    load,
    nest,
    quiet_background_errors,
)
from hetjax.errors import UserError
from hetjax.program import path_string

# tensorstore's tasks of a read that failed end after their event loop
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


def exported(seed=0, size=64):
    """Build what a trainer exports: flat host arrays by path."""
    rng = np.random.default_rng(seed)
    return {
        "params": {
            "dense/kernel": rng.normal(size=(size, size)).astype(np.float32),
            "dense/bias": rng.normal(size=(size,)).astype(jnp.bfloat16),
            "empty": np.zeros((0, 3), np.float32),
        },
        "opt_state": {"0/count": np.asarray(7, np.int32), "0/mu/dense/kernel": rng.normal(size=(size, size))},
        "step": 7,
        "seed": 3,
        "loss_scale": {"scale": np.float32(1024.0), "good_steps": 5},
    }


def spec_of(state):
    return {
        part: {k: jax.ShapeDtypeStruct(v.shape, v.dtype) for k, v in state[part].items()}
        for part in ("params", "opt_state")
    }


def damage(path, change):
    """Change the largest file of a checkpoint's arrays."""
    largest = max((p for p in path.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    largest.write_bytes(change(bytearray(largest.read_bytes())))


def flip_the_middle(data):
    data[len(data) // 2] ^= 0xFF
    return data


def test_every_value_comes_back_bit_for_bit(tmp_path):
    state = exported()
    saver = Checkpointer(tmp_path / "c")
    saver.save(7, state, {"next": 12, "epochs": [1, 2]})
    for value in state["params"].values():
        value[...] = 0  # the write in the background has its own copy
    saver.close()
    back, data_state = load(tmp_path / "c")
    state = exported()
    assert data_state == {"next": 12, "epochs": [1, 2]}
    assert (back["step"], back["seed"], back["loss_scale"]) == (7, 3, {"scale": 1024.0, "good_steps": 5})
    for part in ("params", "opt_state"):
        assert back[part].keys() == state[part].keys()
        for name, value in state[part].items():
            assert back[part][name].dtype == value.dtype
            assert back[part][name].shape == value.shape
            assert back[part][name].tobytes() == value.tobytes()


def test_only_the_latest_are_kept_and_an_interrupted_write_is_cleaned_up(tmp_path):
    (tmp_path / "9.orbax-checkpoint-tmp").mkdir()
    saver = Checkpointer(tmp_path, max_to_keep=2)
    for step in (1, 2, 3):
        saver.save(step, exported(step))
    saver.close()
    assert checkpoint.finished_steps(tmp_path) == [2, 3]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["2", "3"]
    with pytest.raises(UserError, match=r"holds no checkpoint of step 1. It has 2, 3\."):
        load(tmp_path, 1)
    with pytest.raises(UserError, match=r"none holds no finished checkpoint. Leave out --resume"):
        load(tmp_path / "none")


def test_a_checkpoint_restores_on_one_device_in_plain_flax_and_optax(tmp_path):
    """Three steps here, saved by path; two more in plain flax equal five steps in a row."""

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(1, name="out")(nn.tanh(nn.Dense(8, name="hidden")(x)))

    net, tx = Net(), optax.adamw(1e-2)
    x = np.linspace(-1, 1, 32, dtype=np.float32)[:, None]

    def predict(variables):
        return jnp.asarray(net.apply(variables, x))

    @jax.jit
    def step(params, opt_state):
        grads = jax.grad(lambda p: jnp.mean((predict(p) - x**2) ** 2))(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    def run(params, opt_state, num_steps):
        for _ in range(num_steps):
            params, opt_state = step(params, opt_state)
        return params, opt_state

    first = net.init(jax.random.key(0), x)
    params, opt_state = run(first, tx.init(first), 3)

    def by_path(tree):
        leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
        return {path_string(keys): np.asarray(leaf) for keys, leaf in leaves}

    saver = Checkpointer(tmp_path)
    saver.save(3, {"params": by_path(params), "opt_state": by_path(opt_state), "step": 3})
    saver.close()

    # hetjax's own reader, into freshly initialised plain trees
    other = net.init(jax.random.key(1), x)
    back, _ = load(tmp_path)
    resumed = run(fill(other, back["params"]), fill(tx.init(other), back["opt_state"]), 2)
    straight = run(first, tx.init(first), 5)
    assert jax.tree.all(jax.tree.map(np.array_equal, resumed, straight))
    # and orbax alone: nested by parameter path, which is what flax takes
    import orbax.checkpoint as ocp

    with ocp.StandardCheckpointer() as reader:
        variables = reader.restore(tmp_path / "3" / "state")["params"]
    assert np.array_equal(predict(variables), predict(params))
    with pytest.raises(UserError, match=r"has no array 'params/hidden/bias'. It has a, b, \.\.\."):
        fill(first, {"a": 1, "b": 2})
    with pytest.raises(UserError, match=r"params/hidden/bias of shape \(9,\), and \(8,\) is needed"):
        fill(first, {"params/hidden/bias": np.zeros(9)})


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda b: b[: len(b) // 2], "damaged or was cut short"),
        (
            lambda b: b[: len(b) // 2] + bytes([b[len(b) // 2] ^ 0xFF]) + b[len(b) // 2 + 1 :],
            "checksum|damaged",
        ),
        (lambda b: b"", "damaged or was cut short"),
    ],
    ids=["cut short", "one byte flipped", "emptied"],
)
def test_a_damaged_checkpoint_is_refused_and_the_way_out_is_named(tmp_path, change, reason):
    saver = Checkpointer(tmp_path)
    saver.save(10, exported(1, size=128))
    saver.save(20, exported(2, size=128))
    saver.close()
    damage(tmp_path / "20", change)
    with pytest.raises(UserError, match=reason) as error:
        load(tmp_path)
    assert str(error.value).endswith("Remove that directory to resume from step 10.")
    assert load(tmp_path, 10)[0]["step"] == 7
    gc.collect()


def test_a_newer_format_is_refused(tmp_path):
    saver = Checkpointer(tmp_path)
    saver.save(1, exported())
    saver.close()
    meta = tmp_path / "1" / "meta" / "metadata"
    meta.write_text(json.dumps(json.loads(meta.read_text()) | {"format_version": 99}))
    with pytest.raises(UserError, match=r"is in format 99, and this hetjax reads up to 1. Update hetjax"):
        load(tmp_path)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_full_disk_is_one_message_and_the_checkpoint_before_is_intact(tmp_path):
    saver = Checkpointer(tmp_path)
    saver.save(1, exported(1, size=256))
    saver.wait()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        with pytest.raises(
            CheckpointError, match=r"could not be written to .*The checkpoint of step 1 is intact"
        ):
            saver.save(2, exported(2, size=256))
            saver.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    assert (
        load(tmp_path)[0]["params"]["dense/kernel"].tobytes()
        == exported(1, 256)["params"]["dense/kernel"].tobytes()
    )
    saver.save(3, exported(3, size=256))
    saver.close()
    assert checkpoint.finished_steps(tmp_path) == [1, 3]


def test_what_does_not_fit_the_model_is_listed_by_name():
    state = exported()
    check_layout(state, spec_of(state), "runs/x/7")
    changed = exported()
    changed["params"]["dense/kernels"] = changed["params"].pop("dense/kernel")
    changed["params"]["dense/bias"] = np.zeros(65, jnp.bfloat16)
    changed["opt_state"]["0/count"] = np.asarray(7, np.int64)
    with pytest.raises(UserError) as error:
        check_layout(changed, spec_of(state), "runs/x/7")
    text = str(error.value)
    assert "The checkpoint runs/x/7 does not fit this model and optimizer" in text
    assert "params/dense/kernel is missing from it" in text
    assert "params/dense/kernels is left over (renamed to dense/kernel?)" in text
    assert "params/dense/bias has shape (65,), and the model needs (64,)" in text
    assert "opt_state/0/count is int64, and the model needs int32" in text
    many = {"params": {f"p{i}": np.zeros(1) for i in range(9)}, "opt_state": {}}
    with pytest.raises(UserError, match="and 4 more"):
        check_layout(many, {"params": {}, "opt_state": {}}, "x")


def test_paths_nest_and_flatten_back():
    flat = {"a/b/0": 1, "a/b/1": 2, "c": 3}
    assert nest(flat) == {"a": {"b": {"0": 1, "1": 2}}, "c": 3}
    assert checkpoint.flatten(nest(flat)) == flat
    with pytest.raises(AssertionError, match="a/b lies below an array"):
        nest({"a": 1, "a/b": 2})


def test_parameters_that_are_not_finite_are_noticed():
    state = exported()
    assert checkpoint.all_finite(state)
    state["params"]["dense/bias"][3] = np.nan
    assert not checkpoint.all_finite(state)


def test_what_the_storage_layer_raises_when_it_closes_is_a_checkpoint_error_too(tmp_path, monkeypatch):
    def full():
        raise OSError(28, "No space left on device")

    saver = Checkpointer(tmp_path / "c")
    close = saver._manager.close
    monkeypatch.setattr(saver._manager, "close", full)
    with pytest.raises(CheckpointError, match=r"No space left on device. There is no earlier checkpoint."):
        saver.close()
    close()


def test_only_late_reports_to_a_closed_loop_are_kept_from_the_terminal(monkeypatch):
    told = []
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: told.append(str(unraisable.exc_value)))
    monkeypatch.setattr(threading, "excepthook", threading.excepthook)
    quiet_background_errors()
    for text in ("Event loop is closed", "another"):
        sys.unraisablehook(types.SimpleNamespace(exc_value=RuntimeError(text)))
    assert told == ["another"]
