"""Text to token ids and back without loss: bytes, or byte-level BPE trained with `tokenizers`.

The last `NUM_SPECIALS` ids of a vocabulary never come from text, whatever it says: the first of them marks
where a document begins (and the one before it ends), the second is padding. Every other id stands for bytes.
"""

from __future__ import annotations

import abc
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import SupportsIndex

import numpy as np

from hetjax.errors import UserError

NUM_SPECIALS = 8  # eight, so that a byte vocabulary (264) still divides over tensor axes
MIN_BPE_VOCAB = 256 + NUM_SPECIALS + 1
_LONGEST_TEXT = 1 << 18  # characters given to the encoder at once: it holds about 100 bytes for each


class Tokenizer(abc.ABC):
    """A lossless tokenizer.

    Attributes:
        pieces: The bytes that each id stands for; empty for specials and for ids that training left unused.
        document_id: The token before each document, and so also what is predicted at its end.
        padding_id: Fills rows; never predicted.
    """

    def __init__(self, pieces: Sequence[bytes]) -> None:
        """Take the bytes of each id, specials not among them."""
        self.pieces = (*pieces, *[b""] * NUM_SPECIALS)
        self.document_id = len(pieces)
        self.padding_id = len(pieces) + 1

    @property
    def vocab_size(self) -> int:
        """Number of ids, specials included."""
        return len(self.pieces)

    @property
    def token_bytes(self) -> np.ndarray:
        """Bytes of text that each id stands for: int32 [vocab]. What bits per byte divides by."""
        return np.array([len(piece) for piece in self.pieces], np.int32)

    @abc.abstractmethod
    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Encode texts.

        Args:
            texts: Any Unicode text without lone surrogates.

        Returns:
            One array of ids a text, without specials.
        """

    def encode(self, text: str) -> np.ndarray:
        """Encode one text; see `encode_batch`."""
        return self.encode_batch([text])[0]

    def decode_bytes(self, ids: Iterable[SupportsIndex]) -> bytes:
        """Return exactly the bytes that were encoded; specials stand for none."""
        return b"".join(self.pieces[i] for i in ids)

    def decode(self, ids: Iterable[SupportsIndex]) -> str:
        """Decode for a person: a character that the ids hold only in part shows as U+FFFD."""
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    @abc.abstractmethod
    def save(self, path: Path) -> None:
        """Write what `load` needs; the file of a BPE is the format of `tokenizers`."""


class ByteTokenizer(Tokenizer):
    """One id for each byte of UTF-8."""

    def __init__(self) -> None:
        """Build the 264 ids."""
        super().__init__([bytes([b]) for b in range(256)])

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Encode texts; see `Tokenizer.encode_batch`."""
        return [np.frombuffer(text.encode(), np.uint8).astype(np.int32) for text in texts]

    def save(self, path: Path) -> None:
        """Write a file that says that there is nothing to know."""
        path.write_text('{"hetjax": "bytes"}\n')


class BpeTokenizer(Tokenizer):
    """Byte-level BPE with GPT-2's pattern for words."""

    def __init__(self, serialised: str, vocab_size: int) -> None:
        """Take a trained BPE.

        Args:
            serialised: JSON of a byte-level `tokenizers.Tokenizer` without special tokens.
            vocab_size: Number of ids, specials included; those that training did not fill are never produced.
        """
        import tokenizers

        self._bpe = tokenizers.Tokenizer.from_str(serialised)
        byte_of = {char: byte for byte, char in _byte_characters().items()}
        pieces = [b""] * (vocab_size - NUM_SPECIALS)
        for token, index in self._bpe.get_vocab().items():
            pieces[index] = bytes(byte_of[char] for char in token)
        super().__init__(pieces)

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int) -> BpeTokenizer:
        """Learn merges from texts. The same texts give the same tokenizer.

        Args:
            texts: What to learn from.
            vocab_size: Number of ids, specials included; at least `MIN_BPE_VOCAB`.

        Raises:
            UserError: The vocabulary is too small for the 256 bytes, the specials and one merge.
        """
        from tokenizers import Tokenizer, models, pre_tokenizers, trainers

        check_vocab_size(vocab_size)
        bpe = Tokenizer(models.BPE())
        bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size - NUM_SPECIALS,
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        )
        bpe.train_from_iterator(texts, trainer)
        return cls(bpe.to_str(), vocab_size)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Encode texts; see `Tokenizer.encode_batch`. Long ones are encoded in parts, cut at line ends."""
        parts = [list(_parts(text)) for text in texts]
        flat = [part for text in parts for part in text]
        encoded = iter(self._bpe.encode_batch_fast(flat, add_special_tokens=False))
        ids = [[np.array(next(encoded).ids, np.int32) for _ in text] for text in parts]
        return [np.concatenate(text) if text else np.zeros(0, np.int32) for text in ids]

    def save(self, path: Path) -> None:
        """Write the BPE as `tokenizers` does, so that other tools read it too."""
        self._bpe.save(str(path))


def load_tokenizer(kind: str, path: Path, vocab_size: int) -> Tokenizer:
    """Read what `Tokenizer.save` wrote.

    Args:
        kind: "bytes" or "bpe".
        path: The file.
        vocab_size: As it was trained; 264 for bytes.
    """
    return ByteTokenizer() if kind == "bytes" else BpeTokenizer(path.read_text(), vocab_size)


def check_vocab_size(vocab_size: int) -> None:
    """Refuse a BPE vocabulary that has no room for bytes, specials and a merge."""
    if vocab_size < MIN_BPE_VOCAB:
        raise UserError(
            f"data.vocab_size = {vocab_size} is too small for a BPE tokenizer: 256 bytes, {NUM_SPECIALS} "
            f'special tokens and a merge need {MIN_BPE_VOCAB}. Raise it, or take data.tokenizer = "bytes".'
        )


def _byte_characters() -> dict[int, str]:
    """Return GPT-2's stand-in for each byte: itself if printable Latin-1, else the next from U+0100 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(0x100 + i) for i, byte in enumerate(others)}


def _parts(text: str) -> Iterator[str]:
    """Cut a long text after line ends where it has any."""
    while len(text) > _LONGEST_TEXT:
        end = text.rfind("\n", 0, _LONGEST_TEXT) + 1 or _LONGEST_TEXT
        yield text[:end]
        text = text[end:]
    if text:
        yield text
