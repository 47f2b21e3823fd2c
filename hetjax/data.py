"""Text as batches of token rows, on grain's `MapDataset`: any row of any step comes from its index alone.

So every process reads its own rows whatever the plan, and a run goes on at the exact batch where it stopped.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import grain
import jax
import numpy as np
import pydantic

from hetjax import corpus as corpora
from hetjax.errors import UserError
from hetjax.tokenizer import (
    NUM_SPECIALS,
    BpeTokenizer,
    ByteTokenizer,
    Tokenizer,
    check_vocab_size,
    load_tokenizer,
)

LOG = logging.getLogger(__name__)
FORMAT = 1  # of the cached tokens: raise it when the same text would give other ones
BYTE_VOCAB = 256 + NUM_SPECIALS
_BPE_TRAINING_CHARACTERS = 50_000_000  # more does not change a vocabulary, and takes minutes
_MANY_STEPS = 1 << 40

Batch = dict[str, np.ndarray]


class DataConfig(pydantic.BaseModel):
    """What to read and how to cut it into rows."""

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid")

    source: Literal["stdlib", "text", "jsonl", "parquet"] = pydantic.Field(
        "stdlib", description="stdlib: documentation strings of Python's own library; else the kind of files"
    )
    paths: tuple[str, ...] = pydantic.Field((), description="files or patterns such as books/**/*.txt")
    field: str = pydantic.Field("text", description="JSON key or Parquet column that holds the text")
    tokenizer: Literal["bytes", "bpe"] = pydantic.Field(
        "bpe", description="bytes, or bpe, which is trained on the training part of the text"
    )
    vocab_size: Annotated[int, pydantic.Field(ge=1, le=1 << 20, strict=True)] | None = pydantic.Field(
        None, description="ids of the tokenizer, specials included; without: 4096 for bpe, 264 for bytes"
    )
    seq_len: Annotated[int, pydantic.Field(ge=1, le=1 << 24, strict=True)] = pydantic.Field(
        256, description="tokens of a row"
    )
    global_batch: Annotated[int, pydantic.Field(ge=1, le=1 << 20, strict=True)] = pydantic.Field(
        16, description="rows of a step"
    )
    packing: Literal["packed", "padded"] = pydantic.Field(
        "packed",
        description="packed: rows are cut from all documents in a line, with segment ids; "
        "padded: a row holds (a part of) one document",
    )
    seed: Annotated[int, pydantic.Field(ge=0)] = pydantic.Field(0, description="of the order of the rows")
    validation_fraction: Annotated[float, pydantic.Field(ge=0, lt=1)] = pydantic.Field(
        0.02, description="part of the bytes that is held out"
    )
    max_validation_batches: Annotated[int, pydantic.Field(ge=1)] | None = pydantic.Field(
        None, description="validate on the first so many batches; without: on all of them"
    )
    cache_dir: str | None = pydantic.Field(
        None, description="where texts and tokens are kept; without: hetjax in $XDG_CACHE_HOME or ~/.cache"
    )

    @pydantic.field_validator("paths", mode="before")
    @classmethod
    def _one_path(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    @property
    def resolved_vocab_size(self) -> int:
        """Number of ids of the tokenizer, specials included.

        Raises:
            UserError: Bytes with another size than theirs, or a BPE vocabulary without room for a merge.
        """
        if self.tokenizer == "bytes":
            if self.vocab_size not in (None, BYTE_VOCAB):
                raise UserError(
                    f'data.vocab_size = {self.vocab_size}, and data.tokenizer = "bytes" has {BYTE_VOCAB} '
                    'ids. Leave vocab_size out, or take data.tokenizer = "bpe".'
                )
            return BYTE_VOCAB
        size = 4096 if self.vocab_size is None else self.vocab_size
        check_vocab_size(size)
        return size


def batch_spec(config: DataConfig) -> dict[str, jax.ShapeDtypeStruct]:
    """Describe a global batch without reading anything: each array [global_batch, seq_len].

    Args:
        config: What `load` would be given.
    """
    shape = (config.global_batch, config.seq_len)
    dtypes = {"tokens": np.int32, "targets": np.int32, "weights": np.float32}
    if config.packing == "packed":
        dtypes |= {"segment_ids": np.int32, "positions": np.int32}
    return {name: jax.ShapeDtypeStruct(shape, dtype) for name, dtype in dtypes.items()}


def load(config: DataConfig) -> TextData:
    """Read, divide and tokenize the text, or find the tokens in the cache.

    Args:
        config: What to read.

    Raises:
        UserError: Files are missing or not what the config says, or the text does not fill one batch.
    """
    vocab_size = config.resolved_vocab_size
    cache = cache_folder(config)
    corpus = _find_corpus(config, cache)
    key = _digest(FORMAT, corpus.digest(), config.tokenizer, vocab_size, config.validation_fraction)
    folder = cache / f"tokens-{key}"
    if not folder.is_dir():
        LOG.info("Tokenizing %s", corpus.about)
        with corpora.publish(folder) as new:
            _prepare(corpus, config, vocab_size, new)
    return TextData(config, folder, corpus.about)


def _find_corpus(config: DataConfig, cache: Path) -> corpora.Corpus:
    if config.source == "stdlib":
        if config.paths:
            raise UserError(
                f'data.source = "stdlib" reads no files, and data.paths names {list(config.paths)}. '
                'Set data.source to "text", "jsonl" or "parquet".'
            )
        return corpora.stdlib_corpus(cache)
    if not config.paths:
        raise UserError(f'data.source = "{config.source}" needs files: data.paths = ["folder/**/*"]')
    return corpora.find_files(config.paths, config.source, config.field)


def cache_folder(config: DataConfig) -> Path:
    """Return where gathered texts and tokens are kept; need not exist.

    Args:
        config: Its `cache_dir` comes first, then $XDG_CACHE_HOME, then ~/.cache.
    """
    if config.cache_dir is not None:
        return Path(config.cache_dir).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hetjax"


class TextData:
    """Batches by step, and the place in them.

    Every batch is a dict of arrays [rows, seq]: `tokens` and `targets` int32 (the tokens that follow),
    `weights` float32 (1 where there is something to predict, 0 on padding), and if packed `segment_ids` (from
    1 on in each row, 0 on padding) and `positions` (from the start of the segment) int32.

    As an iterator it gives the training batches from `step` on, read ahead by threads.

    Attributes:
        config: What was loaded.
        tokenizer: For decoding samples and for saving beside a model.
        about: What the text is, for a person.
        step: The step whose batch the iterator gives next.
        num_train_tokens: Predictions in one epoch.
        num_validation_tokens: Predictions in `validation_batches`.
        validation_bytes: Bytes of text that these stand for:
            bits per byte = summed negative log-likelihood (nats) / ln 2 / validation_bytes.
    """

    def __init__(self, config: DataConfig, folder: Path, about: str) -> None:
        """Open prepared tokens; use `load`.

        Args:
            config: What they were prepared for.
            folder: Where they lie.
            about: What the text is.

        Raises:
            UserError: The folder is damaged, or the text does not fill one batch.
        """
        self.config = config
        self.about = about
        self.step = 0
        self._key = folder.name.removeprefix("tokens-")
        try:
            path = folder / "tokenizer.json"
            self.tokenizer = load_tokenizer(config.tokenizer, path, config.resolved_vocab_size)
            train, validation = (np.load(folder / f"{n}.npy", mmap_mode="r") for n in ("train", "validation"))
        except (OSError, ValueError) as error:
            raise UserError(
                f"The data cache {folder} is damaged ({error}). Delete that folder and start again."
            ) from None
        self._train = _Rows(train, self.tokenizer, config)
        if len(self._train) < config.global_batch:
            raise UserError(
                f"The text is too small: its training part has {self._train.num_tokens} tokens, which make "
                f"{len(self._train)} rows of data.seq_len = {config.seq_len}, and a batch needs "
                f"data.global_batch = {config.global_batch}. Give more text, or make one of the two smaller."
            )
        limit = (config.max_validation_batches or _MANY_STEPS) * config.global_batch
        self._validation = _Rows(validation, self.tokenizer, config, limit)
        self._rows = _pipeline(self._train, config.seed)
        self._ahead: Iterator[Batch] | None = None
        self.num_train_tokens = self._train.num_tokens
        self.num_validation_tokens = self._validation.num_tokens
        self.validation_bytes = self._validation.num_bytes

    @property
    def vocab_size(self) -> int:
        """Number of ids of the tokenizer, specials included."""
        return self.tokenizer.vocab_size

    @property
    def steps_per_epoch(self) -> float:
        """How many steps read every row once."""
        return len(self._train) / self.config.global_batch

    def train_batch(self, step: int, rows: slice = slice(None)) -> Batch:
        """Compute the training batch of a step, from its number alone.

        Each epoch has an order of its own; rows go on from one epoch into the next without a gap.

        Args:
            step: From 0 on, without end.
            rows: Which of the global batch's rows, without a stride.

        Raises:
            ValueError: The step is negative, or there are no such rows.
        """
        if step < 0:
            raise ValueError(f"Training steps count from 0, and train_batch got {step}.")
        start = step * self.config.global_batch
        return _stack([self._rows[start + row] for row in self._indices(rows)])

    def validation_batches(self, rows: slice = slice(None)) -> Iterator[Batch]:
        """Give the held-out text in order, each token once; rows of weight 0 fill up the last batch.

        Args:
            rows: Which of the global batch's rows, without a stride.

        Raises:
            ValueError: There are no such rows.
        """
        wanted = self._indices(rows)
        size = self.config.global_batch
        for start in range(0, len(self._validation), size):
            yield _stack([self._validation[start + row] for row in wanted])

    def train_batches(self, start: int = 0, rows: slice = slice(None)) -> Iterator[Batch]:
        """Give the training batches from a step on, for ever; two threads read ahead.

        Args:
            start: First step.
            rows: As in `train_batch`.
        """
        steps = grain.MapDataset.range(start, _MANY_STEPS).map(functools.partial(self.train_batch, rows=rows))
        return iter(steps.to_iter_dataset(grain.ReadOptions(num_threads=2, prefetch_buffer_size=4)))

    def __iter__(self) -> TextData:
        return self

    def __next__(self) -> Batch:
        if self._ahead is None:
            self._ahead = self.train_batches(self.step)
        batch = next(self._ahead)
        self.step += 1
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Describe the place of the iterator; goes into JSON."""
        fixed = self.config.model_dump(include={"seq_len", "global_batch", "packing", "seed"})
        return {"step": self.step, "corpus": self._key, **fixed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a place that `state_dict` described.

        Args:
            state: Of data with the same text, tokenizer, seed and size of a batch.

        Raises:
            UserError: The data differs, so that the place means nothing here.
        """
        here = self.state_dict()
        differ = [k for k in here if k != "step" and here[k] != state.get(k)]
        if differ:
            said = [f"data.{k} = {state.get(k)} (now {here[k]})" for k in differ if k != "corpus"]
            if "corpus" in differ:
                said.insert(0, "other text or another tokenizer")
            raise UserError(
                f"The run to resume read other data: {', '.join(said)}. Set these back, or start a new run."
            )
        self.step = state["step"]
        self._ahead = None

    def __str__(self) -> str:
        """Describe the data in one line."""
        c = self.config
        return (
            f"{self.about}: {self.num_train_tokens:,} training and {self.num_validation_tokens:,} validation "
            f"tokens ({c.tokenizer}, {self.vocab_size} ids), {len(self._train):,} {c.packing} rows of "
            f"{c.seq_len}, {self.steps_per_epoch:,.1f} steps an epoch"
        )

    def _indices(self, rows: slice) -> range:
        indices = range(self.config.global_batch)[rows]
        if not indices or indices.step != 1:
            raise ValueError(f"No such rows: {rows} of a global batch of {self.config.global_batch} rows.")
        return indices


class _Rows:
    """Rows of a token stream, as grain's source or in order. Indices past the end give rows of padding."""

    def __init__(
        self, stream: np.ndarray, tokenizer: Tokenizer, config: DataConfig, limit: int | None = None
    ) -> None:
        """Find where each row starts and stops.

        Args:
            stream: All documents in a line, each after a document token, and a document token at the end.
            tokenizer: Whose ids these are.
            config: Length and packing of the rows.
            limit: Keep the first so many rows.
        """
        self._stream, self._tokenizer, self._config = stream, tokenizer, config
        length, last = config.seq_len, len(stream) - 1
        if config.packing == "packed":
            begins, ends = np.array([0]), np.array([last])
        else:
            begins = np.flatnonzero(stream[:last] == tokenizer.document_id)
            ends = np.append(begins[1:], last)
        pieces = -(-(ends - begins) // length)
        within = np.arange(pieces.sum()) - np.repeat(np.cumsum(pieces) - pieces, pieces)
        self._starts = (np.repeat(begins, pieces) + within * length)[:limit]
        self._stops = np.minimum(self._starts + length, np.repeat(ends, pieces)[:limit])

    def __len__(self) -> int:
        return len(self._starts)

    @property
    def num_tokens(self) -> int:
        """Number of predictions."""
        return int((self._stops - self._starts).sum())

    @property
    def num_bytes(self) -> int:
        """Bytes of text that the predicted tokens stand for; rows lie in the stream without gaps."""
        end = int(self._stops[-1]) if len(self) else 0
        return int(self._tokenizer.token_bytes[self._stream[1 : end + 1]].sum())

    def __getitem__(self, index: int) -> Batch:
        start, stop = (int(self._starts[index]), int(self._stops[index])) if index < len(self) else (0, 0)
        num, length, ids = stop - start, self._config.seq_len, self._tokenizer
        tokens, targets = (np.full(length, ids.padding_id, np.int32) for _ in range(2))
        tokens[:num] = self._stream[start:stop]
        targets[:num] = self._stream[start + 1 : stop + 1]
        row = {"tokens": tokens, "targets": targets, "weights": (np.arange(length) < num).astype(np.float32)}
        if self._config.packing == "packed":
            row |= _segments(tokens[:num] == ids.document_id, length)
        return row


def _segments(begins: np.ndarray, length: int) -> Batch:
    """Number the documents of a row and the tokens in each.

    Args:
        begins: Bool [tokens], true where a document begins.
        length: Of the row; the rest is padding.
    """
    segment_ids, positions = np.zeros((2, length), np.int32)
    num = len(begins)
    if num:
        places = np.arange(num, dtype=np.int32)
        segment_ids[:num] = np.cumsum(begins) + (not begins[0])
        positions[:num] = places - np.maximum.accumulate(np.where(begins, places, 0))
    return {"segment_ids": segment_ids, "positions": positions}


def _pipeline(rows: _Rows, seed: int) -> grain.MapDataset:
    # Hashed, because grain adds the epoch to the seed: epoch 1 of seed 0 would be epoch 0 of seed 1.
    hashed = int.from_bytes(hashlib.blake2b(str(seed).encode(), digest_size=4).digest())
    return grain.MapDataset.source(rows).shuffle(seed=hashed).repeat()


def _stack(rows: Sequence[Any]) -> Batch:
    return {name: np.stack([row[name] for row in rows]) for name in rows[0]}


def _digest(*parts: Any) -> str:
    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=8).hexdigest()


def _prepare(corpus: corpora.Corpus, config: DataConfig, vocab_size: int, folder: Path) -> None:
    """Divide and tokenize a corpus into `train.npy`, `validation.npy` and `tokenizer.json`."""
    chosen = corpora.divide(corpus, config.validation_fraction)
    if config.tokenizer == "bytes":
        tokenizer: Tokenizer = ByteTokenizer()
    else:
        tokenizer = BpeTokenizer.train(_head(train for train, _ in corpora.parts(corpus, chosen)), vocab_size)
    tokenizer.save(folder / "tokenizer.json")
    dtype = np.uint16 if vocab_size <= 1 << 16 else np.uint32
    boundary = np.array([tokenizer.document_id], dtype)
    streams: tuple[list[np.ndarray], list[np.ndarray]] = ([], [])
    for texts in _chunks(corpora.parts(corpus, chosen)):
        for stream, side in zip(streams, zip(*texts, strict=True), strict=True):
            for ids in tokenizer.encode_batch([text for text in side if text]):
                stream += [boundary, ids.astype(dtype)]
    for name, stream in zip(("train", "validation"), streams, strict=True):
        np.save(folder / f"{name}.npy", np.concatenate([*stream, boundary]))
    how = config.model_dump(include={"source", "field", "tokenizer", "validation_fraction"})
    origin = {"what": corpus.about, "files": [str(f) for f in corpus.files], "vocab_size": vocab_size, **how}
    (folder / "origin.json").write_text(json.dumps(origin, indent=2) + "\n")


def _head(texts: Iterable[str]) -> Iterator[str]:
    left = _BPE_TRAINING_CHARACTERS
    for text in texts:
        yield text[:left]
        left -= len(text)
        if left <= 0:
            break


def _chunks(pairs: Iterable[tuple[str, str]], characters: int = 1 << 22) -> Iterator[list[tuple[str, str]]]:
    """Collect documents until they are worth encoding together."""
    chunk: list[tuple[str, str]] = []
    size = 0
    for pair in pairs:
        chunk.append(pair)
        size += len(pair[0]) + len(pair[1])
        if size >= characters:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk
