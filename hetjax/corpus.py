"""Documents from where they lie, and how they are divided into training and validation.

The default corpus needs no download: the documentation strings of the interpreter's own standard library.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import glob
import hashlib
import json
import os
import platform
import shutil
import sysconfig
import tempfile
import warnings
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

from hetjax.errors import UserError

LICENCE = "PSF-2.0 (Python Software Foundation License Version 2)"
_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test"}


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Where documents lie; iterate over it as often as needed.

    Attributes:
        kind: "text" (a file is a document), "jsonl" (a line is one) or "parquet" (a row is one).
        files: In the order in which they are read.
        field: JSON key or Parquet column that holds the text.
        about: What this text is, for a person.
    """

    kind: str
    files: tuple[Path, ...]
    field: str
    about: str

    def __iter__(self) -> Iterator[str]:
        """Read the documents in order; empty ones, and nulls of a Parquet column, are left out."""
        read = {"text": _read_text, "jsonl": _read_jsonl, "parquet": _read_parquet}[self.kind]
        for path in self.files:
            yield from (text for text in read(path, self.field) if text)

    def digest(self) -> str:
        """Hash of the files' bytes, in order; names and places do not matter."""
        total = hashlib.blake2b(f"{self.kind}:{self.field}".encode(), digest_size=16)
        for path in self.files:
            with _opened(path) as file:
                total.update(hashlib.file_digest(file, _blake2b).digest())
        return total.hexdigest()


def find_files(paths: Sequence[str], kind: str, field: str) -> Corpus:
    """Resolve paths and globs to a corpus.

    Args:
        paths: Files, or patterns as of `glob` (`**` goes into folders), matches in sorted order.
        kind: "text", "jsonl" or "parquet".
        field: JSON key or Parquet column.

    Raises:
        UserError: A file is missing, a pattern matches none, or a path is a folder.
    """
    files: dict[Path, None] = {}  # an ordered set: a file that two patterns match is read once
    for given in paths:
        path = _expanded(given)
        if path.is_file():
            files[path] = None
        elif path.is_dir():
            raise UserError(
                f"data.paths has {given!r}, which is a folder. "
                f"Name its files by a pattern, for example {path / '**' / '*'}"
            )
        elif glob.has_magic(given):
            found = sorted(p for p in glob.glob(str(path), recursive=True) if os.path.isfile(p))
            if not found:
                raise UserError(
                    f"data.paths has {given!r}, and no file matches that pattern (seen from {Path.cwd()})."
                )
            files.update((Path(p), None) for p in found)
        else:
            raise UserError(f"data.paths has {given!r}, and there is no such file (seen from {Path.cwd()}).")
    return Corpus(kind, tuple(files), field, f"{len(files)} {kind} file{'s' * (len(files) != 1)}")


def stdlib_corpus(cache: Path) -> Corpus:
    """Gather the documentation strings of this interpreter's standard library, or find them in the cache.

    A document holds the strings of one module in the order of its source; a repeated string is left out.
    Beside them lies `origin.json`: the Python version, the licence and the counts.

    Args:
        cache: Folder that may hold them, and will.

    Raises:
        UserError: This interpreter comes without the sources of its library.
    """
    root = Path(sysconfig.get_path("stdlib"))
    sources = sorted(p for p in root.rglob("*.py") if not _LEFT_OUT & {*p.relative_to(root).parts})
    listing = "\n".join(f"{p.relative_to(root)} {p.stat().st_size}" for p in sources)
    version = f"{platform.python_implementation().lower()}-{platform.python_version()}"
    folder = cache / f"stdlib-{version}-{hashlib.blake2b(listing.encode(), digest_size=6).hexdigest()}"
    if not folder.is_dir():
        documents = list(_gather_docstrings(sources))
        if not documents:
            raise UserError(
                f"The standard library of this Python ({root}) comes without documentation strings. "
                'Name your own text: data.source = "text" and data.paths.'
            )
        with publish(folder) as new:
            body = "".join(json.dumps({"text": text}) + "\n" for text in documents).encode()
            (new / "documents.jsonl").write_bytes(body)
            origin = {
                "what": "documentation strings of Python's standard library, gathered from its source",
                "python": platform.python_version(),
                "implementation": platform.python_implementation(),
                "licence": LICENCE,
                "documents": len(documents),
                "bytes": sum(len(text.encode()) for text in documents),
                "sha256": hashlib.sha256(body).hexdigest(),
            }
            (new / "origin.json").write_text(json.dumps(origin, indent=2) + "\n")
    about = f"documentation strings of Python {platform.python_version()}'s standard library (PSF licence)"
    return Corpus("jsonl", (folder / "documents.jsonl",), "text", about)


@contextlib.contextmanager
def publish(folder: Path) -> Generator[Path]:
    """Let a folder appear with all its content, or not at all.

    Several processes may publish the same folder at once: the first one's stays.

    Args:
        folder: Where it has to appear.

    Yields:
        A folder beside it to fill.

    Raises:
        UserError: The place can't be written to.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        new = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    except OSError as error:
        raise UserError(
            f"The data cache {folder.parent} can't be written to ({error.strerror}). "
            "Name another folder: data.cache_dir"
        ) from None
    try:
        yield new
        try:
            new.rename(folder)
        except OSError:
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(new, ignore_errors=True)


def divide(corpus: Corpus, validation_fraction: float) -> dict[bytes, float]:
    """Choose what is held out for validation: the wanted fraction of the bytes, by hashes of documents.

    The choice depends on the text alone: neither the seed of a run nor the place of a document changes it,
    and the copies of a document are on one side. The last document chosen is shared: its end is held out, so
    that a corpus of one long document divides too.

    Args:
        corpus: What to divide.
        validation_fraction: Of the bytes, 0 to 1.

    Returns:
        By the hash of each chosen document, which part of it stays in training: 0 except for one.
    """
    sizes: dict[bytes, int] = {}
    for text in corpus:
        key, size = _hash(text)
        sizes[key] = sizes.get(key, 0) + size
    wanted = round(validation_fraction * sum(sizes.values()))
    chosen: dict[bytes, float] = {}
    for key, size in sorted(sizes.items()):
        if wanted <= 0:
            break
        chosen[key] = max(0.0, 1 - wanted / size)
        wanted -= size
    return chosen


def parts(corpus: Corpus, chosen: dict[bytes, float]) -> Iterator[tuple[str, str]]:
    """Read the documents as pairs of their training and validation parts, either of which may be empty.

    Args:
        corpus: What was divided.
        chosen: What `divide` returned.
    """
    for text in corpus:
        at = int(chosen.get(_hash(text)[0], 1.0) * len(text))
        line_end = text.find("\n", at) + 1
        if 0 < at < len(text) and 0 < line_end < len(text):
            at = line_end  # a shared document is cut between lines where it has any
        yield text[:at], text[at:]


def _hash(text: str) -> tuple[bytes, int]:
    encoded = text.encode()
    return hashlib.blake2b(encoded, digest_size=8).digest(), len(encoded)


def _gather_docstrings(sources: Sequence[Path]) -> Iterator[str]:
    seen: set[str] = set()
    for path in sources:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # old modules hold escapes that newer compilers frown on
                tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError):
            continue
        new = [text for text in _docstrings(tree) if text not in seen and _encodes(text)]
        seen.update(new)
        if new:
            yield "\n\n".join(dict.fromkeys(new)) + "\n"


def _docstrings(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        text = (ast.get_docstring(node) or "").strip()
        if text:
            yield text
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt | ast.excepthandler | ast.match_case):
            yield from _docstrings(child)


def _encodes(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _expanded(given: str) -> Path:
    try:
        return Path(given).expanduser()
    except RuntimeError:
        raise UserError(f"data.paths has {given!r}, and there is no such user. Write the path out.") from None


def _blake2b() -> Any:
    return hashlib.blake2b(digest_size=16)


@contextlib.contextmanager
def _opened(path: Path) -> Generator[Any]:
    """Open a file; what goes wrong while it is read is the user's to hear, too."""
    try:
        with path.open("rb") as file:
            yield file
    except OSError as error:
        raise UserError(f"The data file {path} can't be read ({error.strerror or error}).") from None


def _read_text(path: Path, _: str) -> Iterator[str]:
    with _opened(path) as file:
        content = file.read()
    try:
        yield content.decode()
    except UnicodeDecodeError as error:
        raise UserError(
            f"The data file {path} is not UTF-8 at byte {error.start}. Convert it, or leave it out."
        ) from None


def _read_jsonl(path: Path, field: str) -> Iterator[str]:
    with _opened(path) as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            where = f"{path}, line {number}:"
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise UserError(f"{where} not JSON ({error}). Each line has to be one JSON object.") from None
            texts = (
                {k: v for k, v in record.items() if isinstance(v, str)} if isinstance(record, dict) else {}
            )
            if field not in texts:
                raise UserError(
                    f"{where} no text under the key {field!r}. Keys with text: {', '.join(texts) or 'none'}. "
                    "Name the one wanted: data.field"
                )
            if not _encodes(texts[field]):
                raise UserError(
                    f"{where} the text holds half of a surrogate pair, which is not Unicode. Mend it."
                )
            yield texts[field]


def _read_parquet(path: Path, field: str) -> Iterator[str]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    with _opened(path) as file:
        try:
            table = pq.ParquetFile(file)
        except pa.ArrowException as error:
            raise UserError(f"The data file {path} is not Parquet ({error}).") from None
        kinds = (pa.string(), pa.large_string(), pa.string_view())
        texts = [column.name for column in table.schema_arrow if column.type in kinds]
        if field not in texts:
            raise UserError(
                f"The data file {path} has no column {field!r} of strings. "
                f"Columns of strings: {', '.join(texts) or 'none'}. Name the one wanted: data.field"
            )
        try:
            for batch in table.iter_batches(batch_size=1024, columns=[field]):
                yield from (text for text in batch.column(0).to_pylist() if text is not None)
        except (pa.ArrowException, UnicodeDecodeError) as error:
            raise UserError(f"The data file {path} is damaged ({error}). Mend it, or leave it out.") from None
