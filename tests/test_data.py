import hashlib
import json
import math
import re
import subprocess
import sys
import textwrap

import jax
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hetjax import UserError, corpus, data
from hetjax.tokenizer import BpeTokenizer, ByteTokenizer, load_tokenizer

DOCUMENTS = [f"Document {n}.\n" + f"Line {n} of text, with some length.\n" * (n % 7 + 1) for n in range(60)]
BPE = BpeTokenizer.train(DOCUMENTS, 320)


@pytest.fixture(scope="session")
def texts(tmp_path_factory):
    """A JSONL file of 60 documents, and a cache beside it."""
    folder = tmp_path_factory.mktemp("texts")
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": t, "n": 1}) + "\n" for t in DOCUMENTS))
    return folder


@pytest.fixture
def config(texts):
    return data.DataConfig(
        source="jsonl",
        paths=str(texts / "a.jsonl"),
        cache_dir=str(texts / "cache"),
        tokenizer="bytes",
        seq_len=32,
        global_batch=4,
        validation_fraction=0.1,
    )


def changed(config, **changes):
    return data.DataConfig(**(config.model_dump() | changes))


def assert_same(one, two):
    assert one.keys() == two.keys()
    for name in one:
        np.testing.assert_array_equal(one[name], two[name])


def decoded_documents(loaded, batches):
    """Put rows back together to documents, knowing only what the batch says."""
    pieces, doc = [], loaded.tokenizer.document_id
    for batch in batches:
        for tokens, weights in zip(batch["tokens"], batch["weights"], strict=True):
            pieces.append(tokens[weights > 0])
    stream = np.concatenate(pieces)
    return [loaded.tokenizer.decode(d) for d in np.split(stream, np.flatnonzero(stream == doc))[1:]]


@pytest.mark.smoke
@pytest.mark.parametrize("packing", ["packed", "padded"])
@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
def test_training_and_validation_together_hold_every_document_once(config, packing, tokenizer):
    vocab = 300 if tokenizer == "bpe" else None
    loaded = data.load(changed(config, packing=packing, tokenizer=tokenizer, vocab_size=vocab))
    order = [loaded._train[i] for i in range(len(loaded._train))]
    train = decoded_documents(loaded, [{k: v[None] for k, v in row.items()} for row in order])
    held_out = decoded_documents(loaded, loaded.validation_batches())
    assert sorted("".join(train + held_out)) == sorted("".join(DOCUMENTS))
    whole = [t for t in train + held_out if t in DOCUMENTS]
    assert len(whole) >= len(DOCUMENTS) - 1 and len(set(whole)) == len(whole)  # one is shared
    total = sum(len(t.encode()) for t in DOCUMENTS)
    assert loaded.validation_bytes == sum(len(t.encode()) for t in held_out)
    assert 0.1 * total - 80 <= loaded.validation_bytes <= 0.1 * total + 80  # to a line


def test_an_epoch_gives_every_row_once_and_the_next_epoch_another_order(config):
    loaded = data.load(config)
    rows = len(loaded._train)
    stream = [loaded.train_batch(s)["tokens"] for s in range(math.ceil(2 * rows / 4))]
    read = [row.tobytes() for row in np.concatenate(stream)]
    expected = sorted(loaded._train[i]["tokens"].tobytes() for i in range(rows))
    first, second = read[:rows], read[rows : 2 * rows]
    assert sorted(first) == expected and sorted(second) == expected
    assert first != second and first != expected


def test_seeds_give_other_orders_that_no_epoch_of_another_seed_repeats(config):
    orders = set()
    for seed in (0, 1):
        loaded = data.load(changed(config, seed=seed))
        rows = len(loaded._train)
        batches = [loaded.train_batch(s)["tokens"] for s in range(math.ceil(2 * rows / 4))]
        read = [row.tobytes() for row in np.concatenate(batches)]
        orders |= {tuple(read[:rows]), tuple(read[rows : 2 * rows])}
    assert len(orders) == 4


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(step=st.integers(0, 10_000), bounds=st.tuples(st.integers(0, 4), st.integers(0, 4)))
def test_any_process_computes_its_own_rows_of_any_step(config, step, bounds):
    start, stop = sorted(bounds)
    loaded = data.load(config)
    if start == stop:
        with pytest.raises(ValueError, match="No such rows: .* of a global batch of 4 rows"):
            loaded.train_batch(step, slice(start, stop))
        return
    whole = data.load(config).train_batch(step)
    assert_same(loaded.train_batch(step, slice(start, stop)), {k: v[start:stop] for k, v in whole.items()})


def test_another_process_reads_the_same_batch(config):
    program = f"""
import hashlib
from hetjax import data
batch = data.load(data.DataConfig(**{config.model_dump()!r})).train_batch(77)
print(hashlib.sha256(b"".join(batch[k].tobytes() for k in sorted(batch))).hexdigest())
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    batch = data.load(config).train_batch(77)
    here = hashlib.sha256(b"".join(batch[k].tobytes() for k in sorted(batch))).hexdigest()
    assert run.stdout.strip() == here


def test_a_resumed_iterator_goes_on_at_the_exact_batch(config):
    one = data.load(config)
    read = [next(one) for _ in range(7)]
    for step, batch in enumerate(read):
        assert_same(batch, one.train_batch(step))
    state = json.loads(json.dumps(one.state_dict()))
    after = [next(one) for _ in range(3)]
    two = data.load(config)
    next(two)
    two.load_state_dict(state)
    for batch in after:
        assert_same(next(two), batch)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"global_batch": 2}, "data.global_batch = 4 (now 2)"),
        ({"seed": 3}, "data.seed = 0 (now 3)"),
        ({"validation_fraction": 0.2}, "other text or another tokenizer"),
    ],
)
def test_a_state_of_other_data_is_refused(config, changes, said):
    state = data.load(config).state_dict()
    with pytest.raises(UserError, match="The run to resume read other data: " + re.escape(said)):
        data.load(changed(config, **changes)).load_state_dict(state)


@pytest.mark.parametrize("packing", ["packed", "padded"])
def test_batches_are_what_batch_spec_says_and_targets_follow_tokens(config, packing):
    config = changed(config, packing=packing)
    loaded = data.load(config)
    spec = data.batch_spec(config)
    for batch in [loaded.train_batch(0), loaded.train_batch(999), *loaded.validation_batches()]:
        assert {k: (v.shape, v.dtype) for k, v in batch.items()} == {
            k: (s.shape, s.dtype) for k, s in spec.items()
        }
        assert set(np.unique(batch["weights"])) <= {0, 1}
        both = (batch["weights"][:, :-1] > 0) & (batch["weights"][:, 1:] > 0)
        np.testing.assert_array_equal(batch["targets"][:, :-1][both], batch["tokens"][:, 1:][both])
        nothing = batch["weights"] == 0
        assert (batch["tokens"][nothing] == loaded.tokenizer.padding_id).all()
        assert (batch["tokens"][~nothing] != loaded.tokenizer.padding_id).all()
        assert (batch["tokens"] < loaded.vocab_size).all()


def test_packed_rows_number_their_documents_and_count_positions_from_each_start(config):
    loaded = data.load(config)
    for i in range(len(loaded._train)):
        row = loaded._train[i]
        segment, position, doc = None, 0, loaded.tokenizer.document_id
        for token, weight, seg, pos in zip(
            row["tokens"], row["weights"], row["segment_ids"], row["positions"], strict=True
        ):
            if weight == 0:
                assert seg == 0 and pos == 0
                continue
            if segment is None:
                segment, position = 1, 0
            elif token == doc:
                segment, position = segment + 1, 0
            else:
                position += 1
            assert (seg, pos) == (segment, position)


def test_padded_rows_never_hold_two_documents(config):
    loaded = data.load(changed(config, packing="padded"))
    for i in range(len(loaded._train)):
        tokens = loaded._train[i]["tokens"]
        assert (tokens[1:] != loaded.tokenizer.document_id).all()


def test_rows_of_weight_zero_fill_up_the_last_validation_batch(config):
    loaded = data.load(config)
    batches = list(loaded.validation_batches())
    assert all(len(b["tokens"]) == 4 for b in batches)
    assert sum(b["weights"].sum() for b in batches) == loaded.num_validation_tokens
    halves = zip(
        loaded.validation_batches(slice(0, 2)), loaded.validation_batches(slice(2, 4)), batches, strict=True
    )
    for low, high, whole in halves:
        assert_same({k: np.concatenate([low[k], high[k]]) for k in low}, whole)


def test_validation_bytes_count_only_the_batches_that_are_read(config):
    loaded = data.load(changed(config, max_validation_batches=2))
    batches = list(loaded.validation_batches())
    assert len(batches) == 2
    targets = np.concatenate([b["targets"][b["weights"] > 0] for b in batches])
    assert loaded.validation_bytes == len(loaded.tokenizer.decode_bytes(targets))
    assert loaded.num_validation_tokens == len(targets)


def test_without_a_fraction_there_is_no_validation(config):
    loaded = data.load(changed(config, validation_fraction=0))
    assert list(loaded.validation_batches()) == []
    assert loaded.validation_bytes == 0


def test_copies_of_a_document_are_on_one_side(config, tmp_path):
    path = tmp_path / "twice.jsonl"
    path.write_text("".join(json.dumps({"text": t}) + "\n" for t in DOCUMENTS * 2))
    source = corpus.find_files([str(path)], "jsonl", "text")
    chosen = corpus.divide(source, 0.2)
    sides: dict[str, set[tuple[str, str]]] = {}
    for text, parts in zip(source, corpus.parts(source, chosen), strict=True):
        sides.setdefault(text, set()).add(parts)
    assert all(len(s) == 1 for s in sides.values())


def test_one_long_document_is_divided_between_lines(tmp_path):
    path = tmp_path / "novel.txt"
    path.write_text("".join(f"This is line {n} of the novel.\n" for n in range(1000)))
    source = corpus.find_files([str(path)], "text", "text")
    ((train, held_out),) = corpus.parts(source, corpus.divide(source, 0.05))
    assert train + held_out == path.read_text()
    assert train.endswith("\n")
    assert 0.04 < len(held_out) / len(path.read_text()) < 0.06


def test_text_jsonl_and_parquet_of_the_same_documents_give_the_same_batches(config, tmp_path):
    for n, text in enumerate(DOCUMENTS):
        (tmp_path / f"{n:03}.txt").write_text(text)
    column = pa.array([DOCUMENTS[0], None, "", *DOCUMENTS[1:]])
    pq.write_table(pa.table({"id": pa.array(range(len(column))), "body": column}), tmp_path / "a.parquet")
    read = [
        data.load(config),
        data.load(changed(config, source="text", paths=str(tmp_path / "*.txt"))),
        data.load(
            changed(config, source="text", paths=[str(tmp_path / "0*.txt"), str(tmp_path / "**/*.txt")])
        ),
        data.load(changed(config, source="parquet", paths=str(tmp_path / "*.parquet"), field="body")),
    ]
    for loaded in read[1:]:
        assert_same(read[0].train_batch(5), loaded.train_batch(5))


@settings(max_examples=60, deadline=None)
@given(text=st.text(st.characters(exclude_categories=("Cs",)), max_size=200))
def test_tokenizers_lose_nothing_whatever_the_text(text):
    for tokenizer in (ByteTokenizer(), BPE):
        for said in (text, text + "<|doc|><|endoftext|>" + text):
            ids = tokenizer.encode(said)
            assert tokenizer.decode(ids) == said
            assert tokenizer.token_bytes[ids].sum() == len(said.encode())
            assert (ids < tokenizer.document_id).all()


def test_bpe_shortens_text_and_training_it_again_gives_the_same(tmp_path):
    again = BpeTokenizer.train(iter(DOCUMENTS), 320)
    for name, tokenizer in (("one", BPE), ("two", again)):
        tokenizer.save(tmp_path / name)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
    text = DOCUMENTS[7]
    assert len(BPE.encode(text)) < len(text) / 2
    stored = load_tokenizer("bpe", tmp_path / "one", 320)
    np.testing.assert_array_equal(stored.encode(text), BPE.encode(text))
    assert stored.vocab_size == 320


def test_a_vocabulary_that_the_text_cannot_fill_keeps_its_size():
    tokenizer = BpeTokenizer.train(["ab ab ab"], 1000)
    assert tokenizer.vocab_size == 1000
    assert tokenizer.decode(tokenizer.encode("ab abc")) == "ab abc"


def test_texts_longer_than_the_encoder_takes_at_once_come_back_whole():
    text = "".join(f"line {n} é\n" for n in range(60_000)) + "x" * 600_000
    assert BPE.decode(BPE.encode(text)) == text


def test_half_a_character_decodes_to_a_replacement():
    tokenizer = ByteTokenizer()
    assert tokenizer.decode([*tokenizer.encode("aé")][:2]) == "a\N{REPLACEMENT CHARACTER}"


@pytest.fixture(scope="session")
def stdlib(tmp_path_factory):
    return tmp_path_factory.mktemp("stdlib")


@pytest.mark.smoke
def test_the_default_is_a_megabyte_and_more_of_english_with_its_origin_beside_it(stdlib):
    found = corpus.stdlib_corpus(stdlib)
    documents = list(found)
    total = sum(len(d.encode()) for d in documents)
    assert total > 1_200_000
    assert sum("Return" in d for d in documents) > 100
    origin = json.loads((found.files[0].parent / "origin.json").read_text())
    assert origin["python"] == ".".join(map(str, sys.version_info[:3]))
    assert origin["licence"].startswith("PSF-2.0")
    assert (origin["documents"], origin["bytes"]) == (len(documents), total)
    written = found.files[0].stat().st_mtime_ns
    assert corpus.stdlib_corpus(stdlib) == found
    assert found.files[0].stat().st_mtime_ns == written


def test_the_default_job_validates_on_the_same_bytes_whatever_the_tokenizer(stdlib):
    loaded = [data.load(data.DataConfig(cache_dir=str(stdlib), tokenizer=t)) for t in ("bytes", "bpe")]
    assert loaded[0].validation_bytes == loaded[1].validation_bytes > 20_000
    assert loaded[1].vocab_size == 4096 and loaded[0].vocab_size == 264
    assert loaded[1].num_train_tokens < loaded[0].num_train_tokens / 3
    assert "documentation strings of Python" in str(loaded[1])


def test_an_interpreter_without_sources_is_told_to_name_text(tmp_path, monkeypatch):
    monkeypatch.setattr("sysconfig.get_path", lambda _: str(tmp_path))
    with pytest.raises(UserError, match="comes without documentation strings.*data.paths"):
        corpus.stdlib_corpus(tmp_path / "cache")


def test_docstrings_come_in_the_order_of_the_source_and_once(tmp_path, monkeypatch):
    source = '''
        """The module."""
        if True:
            class A:
                """A class."""
                def f(self):
                    """Do a thing.

                    More.
                    """
        async def g():
            """The module."""
        def h():
            """Last."""
    '''
    library = tmp_path / "lib"
    (library / "test").mkdir(parents=True)
    (library / "m.py").write_text(textwrap.dedent(source))
    (library / "broken.py").write_text("def")
    (library / "test" / "t.py").write_text('"""Not this."""')
    monkeypatch.setattr("sysconfig.get_path", lambda _: str(library))
    documents = list(corpus.stdlib_corpus(tmp_path / "cache"))
    assert documents == ["The module.\n\nA class.\n\nDo a thing.\n\nMore.\n\nLast.\n"]


def test_of_two_that_publish_at_once_the_first_stays_whole(tmp_path):
    folder = tmp_path / "cache" / "entry"
    with corpus.publish(folder) as slow:
        (slow / "half").write_text("slow")
        with corpus.publish(folder) as fast:
            (fast / "whole").write_text("fast")
        assert (folder / "whole").read_text() == "fast"
    assert [p.name for p in folder.iterdir()] == ["whole"]
    assert [p.name for p in folder.parent.iterdir()] == ["entry"]


def test_a_failure_while_preparing_leaves_nothing(tmp_path):
    folder = tmp_path / "entry"
    with pytest.raises(ZeroDivisionError), corpus.publish(folder) as new:
        (new / "half").write_text("half")
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []


def test_two_processes_that_prepare_the_same_text_at_once_agree(config, tmp_path):
    config = changed(config, tokenizer="bpe", vocab_size=400, cache_dir=str(tmp_path))
    program = f"""
from hetjax import data
print(data.load(data.DataConfig(**{config.model_dump()!r})).train_batch(3)["tokens"].tobytes().hex())
"""
    runs = [
        subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for _ in range(2)
    ]
    out = [run.communicate() for run in runs]
    assert [run.returncode for run in runs] == [0, 0], out
    assert out[0][0] == out[1][0]
    assert len(list(tmp_path.iterdir())) == 1


def test_a_damaged_cache_says_which_folder_to_delete(config, tmp_path):
    config = changed(config, cache_dir=str(tmp_path))
    data.load(config)
    (folder,) = tmp_path.iterdir()
    (folder / "train.npy").write_bytes(b"half")
    with pytest.raises(UserError, match=f"{folder} is damaged .* Delete that folder"):
        data.load(config)


def test_the_cache_lies_where_the_system_keeps_caches_unless_told(config, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert data.cache_folder(changed(config, cache_dir=None)) == tmp_path / "hetjax"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert data.cache_folder(changed(config, cache_dir=None)) == tmp_path / ".cache" / "hetjax"
    assert data.cache_folder(changed(config, cache_dir="~/here")) == tmp_path / "here"


def faulty(tmp_path):
    """Write files with faults; what to load and what has to be said about it."""
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9 " * 10)
    (tmp_path / "small.txt").write_text("few words")
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "file").write_text("")
    lines = {
        "broken": '{"text": "a"}\n\n{"text": ',
        "keyless": '{"body": "a", "n": 1}',
        "list": "[1]",
        "surrogate": '{"text": "\\ud800"}',
        "deep": "[" * 100_000,
    }
    for name, content in lines.items():
        (tmp_path / f"{name}.jsonl").write_text(content)
    pq.write_table(pa.table({"body": ["a"], "n": [1]}), tmp_path / "a.parquet")
    latin = pa.Array.from_buffers(pa.string(), 1, pa.array([b"caf\xe9"]).buffers())
    pq.write_table(pa.table({"text": latin}), tmp_path / "latin.parquet")
    pq.write_table(pa.table({"text": ["many words " * 50]}), tmp_path / "b.parquet")
    content = (tmp_path / "b.parquet").read_bytes()
    (tmp_path / "b.parquet").write_bytes(content[:40] + bytes(10) + content[50:])
    at = f"{tmp_path}/"
    return [
        ({"source": "text", "paths": at + "none.txt"}, "none.txt', and there is no such file (seen from"),
        ({"source": "text", "paths": at + "*.md"}, "*.md', and no file matches that pattern"),
        (
            {"source": "text", "paths": at},
            f"which is a folder. Name its files by a pattern, for example {at}**/*",
        ),
        ({"source": "text", "paths": ""}, "which is a folder. Name its files by a pattern, for example **/*"),
        (
            {"source": "text", "paths": "~nobody_here/a.txt"},
            "'~nobody_here/a.txt', and there is no such user",
        ),
        ({"source": "jsonl", "paths": at + "deep.jsonl"}, "deep.jsonl, line 1: not JSON ("),
        ({"source": "parquet", "paths": at + "latin.parquet"}, "latin.parquet is damaged ("),
        ({"source": "parquet", "paths": at + "b.parquet"}, "b.parquet can't be read ("),
        ({"source": "text", "paths": ()}, 'data.source = "text" needs files: data.paths'),
        (
            {"source": "stdlib", "paths": ("a",)},
            "data.source = \"stdlib\" reads no files, and data.paths names ['a']",
        ),
        ({"source": "text", "paths": at + "latin.txt"}, "latin.txt is not UTF-8 at byte 3"),
        ({"source": "text", "paths": at + "small.txt"}, "too small: its training part has"),
        (
            {"source": "text", "paths": at + "empty.txt"},
            "has 0 tokens, which make 0 rows of data.seq_len = 32",
        ),
        ({"source": "jsonl", "paths": at + "broken.jsonl"}, "broken.jsonl, line 3: not JSON ("),
        (
            {"source": "jsonl", "paths": at + "keyless.jsonl"},
            "line 1: no text under the key 'text'. Keys with text: body.",
        ),
        (
            {"source": "jsonl", "paths": at + "list.jsonl"},
            "no text under the key 'text'. Keys with text: none.",
        ),
        (
            {"source": "jsonl", "paths": at + "surrogate.jsonl"},
            "line 1: the text holds half of a surrogate pair",
        ),
        (
            {"source": "parquet", "paths": at + "a.parquet"},
            "has no column 'text' of strings. Columns of strings: body.",
        ),
        ({"source": "parquet", "paths": at + "a.parquet", "field": "n"}, "has no column 'n' of strings"),
        ({"source": "parquet", "paths": at + "small.txt"}, "small.txt is not Parquet ("),
        ({"cache_dir": at + "file/cache"}, "file/cache can't be written to (Not a directory)"),
        ({"vocab_size": 300}, 'data.vocab_size = 300, and data.tokenizer = "bytes" has 264 ids'),
        ({"tokenizer": "bpe", "vocab_size": 264}, "data.vocab_size = 264 is too small for a BPE tokenizer"),
    ]


def test_each_mistake_in_the_data_section_is_named_and_leaves_nothing_in_the_cache(config, tmp_path):
    for number, (changes, said) in enumerate(faulty(tmp_path)):
        cache = tmp_path / f"cache{number}"
        with pytest.raises(UserError, match=re.escape(said)):
            data.load(changed(config, **({"cache_dir": str(cache)} | changes)))
        assert not cache.exists() or all(p.name.startswith("tokens-") for p in cache.iterdir()), changes


def test_steps_count_from_zero(config):
    with pytest.raises(ValueError, match="Training steps count from 0, and train_batch got -1"):
        data.load(config).train_batch(-1)


@pytest.mark.parametrize(
    "wrong",
    [{"seq_len": 0}, {"validation_fraction": 1.0}, {"packing": "dense"}, {"sequence": 1}, {"seed": -1}],
)
def test_impossible_settings_are_refused_by_the_config(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        data.DataConfig(**wrong)


def test_a_batch_goes_to_a_device_as_it_is(config):
    batch = data.load(config).train_batch(0)
    assert jax.tree.map(lambda x: x.dtype, jax.device_put(batch)) == jax.tree.map(lambda x: x.dtype, batch)
