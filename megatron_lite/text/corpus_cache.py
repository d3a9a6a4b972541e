"""Files of text as a run's data: tokenized when they are first named in ``--data-path``, found at later starts.

Each file becomes an ordinary dataset, ``NAME-KEY_text_document.bin/.idx/.meta.json``, in ``--data-cache-path`` or, without
it, in ``.tokenized`` beside the file; one of conversations becomes ``NAME-KEY_chat`` and its loss mask. A directory and a pattern
become one dataset too, of their files in order. KEY is a digest of what the tokens depend on: the files' places, sizes and times of
change, the tokenizer, its template, the options. What changed gets a new dataset; old ones can be deleted at any time. One that is
damaged, so that it does not open, is made again.

One process of a node tokenizes and the others wait for it (:mod:`megatron_lite.data.node_file`), also those of another job.
It writes into a directory of its own beside the place and renames what is complete, ``.idx`` last. When it fails it
writes the reason into its lock, whose name it has removed: those that were waiting have it open and fail for that reason too,
instead of trying the same again, nobody else ever sees it, and nothing of it stays.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shlex
import shutil
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from glob import has_magic
from pathlib import Path
from typing import Any

from megatron_lite.config.schema_io import DataConfig
from megatron_lite.config.text_files import is_text_file
from megatron_lite.data.index_format import mask_prefix, prefix_paths
from megatron_lite.data.indexed import IndexedDataset, open_mask
from megatron_lite.data.locked_file import sync_directory
from megatron_lite.data.node_file import node_lock
from megatron_lite.data.sources import parse_sources
from megatron_lite.text.chat_files import ChatOptions, holds_conversations, prepare_chat, summary
from megatron_lite.text.inputs import expand_inputs
from megatron_lite.text.preprocess import Options, preprocess
from megatron_lite.text.records import BadInput
from megatron_lite.text.tokenizer import Tokenizer

FIELDS = ("data_path", "train_data_path", "valid_data_path", "test_data_path")
FOLDER = ".tokenized"  # beside the file
KEY = "text"
CHAT = "chat"  # ends the prefix of conversations
_FORMAT = 2  # to be raised when the same file and options give other tokens
_MANY_BYTES = 1 << 25  # of a file that is worth starting worker processes for
_MOST_WORKERS = 8
Tell = Callable[[str], None]


@dataclass(frozen=True)
class CorpusCache:
    """Makes and finds the datasets of files of text.

    Attributes:
        make: builds the tokenizer; sent to worker processes.
        tokenizer: what it builds.
        directory: of the datasets; None: beside each file.
        tell: called with a line of progress again and again while something moves, here or in the process that is waited
            for.
        beside: directory of the tokenizer's files, where the chat template may be; template: a file of it, before that.
    """

    make: Callable[[], Tokenizer]
    tokenizer: Tokenizer
    directory: Path | None = None
    tell: Tell = lambda text: None
    beside: Path | None = None
    template: Path | None = None

    def prefix_of(self, path: Path, files: Sequence[Path] = ()) -> Path:
        """Where the dataset of a file is, or will be; ``path`` may stand for several ``files``."""
        files = files or [path]
        states = [(os.path.realpath(file), state.st_size, state.st_mtime_ns) for file in files for state in [file.stat()]]
        what = [_FORMAT, KEY, True, states, self.tokenizer.fingerprint, self.tokenizer.eod_id, self.tokenizer.vocab_size]
        chat = holds_conversations(files[0])
        if chat:
            try:
                templates = self._chat_options(files).templates(self.tokenizer)
            except ValueError as error:
                raise ValueError(f"{path} holds conversations: {error}") from None
            what.append(templates.digest)
        key = hashlib.sha256(json.dumps(what).encode()).hexdigest()[:16]
        beside, name = _place(path)
        return (self.directory or beside / FOLDER) / f"{name}-{key}_{CHAT if chat else f'{KEY}_document'}"

    def _chat_options(self, files: Sequence[Path]) -> ChatOptions:
        changed = datetime.fromtimestamp(max(file.stat().st_mtime for file in files))  # the date, for templates that write one
        return ChatOptions(self.make, self.beside, self.template, changed)

    def dataset_of(self, path: Path) -> tuple[str, str]:
        """The prefix of a file's tokens, and a line about how they came to be.

        Raises:
            ValueError: what is wrong with the file, in the process that reads it and in those that waited for it.
            OSError: the dataset cannot be written.
        """
        files = [path] if path.is_file() else expand_inputs([str(path)], "--data-path")
        prefix = self.prefix_of(path, files)
        if _damage(prefix) is None:
            return str(prefix), f"{path}: tokenized before, in {prefix}"
        reason = _cannot_write(prefix.parent)
        if reason:
            raise ValueError(
                f"the tokens of {path} cannot be kept in {prefix.parent} ({reason}); give --data-cache-path DIRECTORY"
            )
        with node_lock(prefix, lambda: self.tell(f"waiting for another process, which tokenizes {path}")) as lock:
            lock.seek(0)
            if failure := lock.read():
                raise ValueError(failure.decode())
            why = ""
            try:
                damage = _damage(prefix)
                if damage is None:
                    return str(prefix), f"{path}: tokenized by another process, in {prefix}"
                if damage:
                    print(f"{damage}; it is made again", flush=True)
                return str(prefix), self._tokenize(path, files, prefix)
            except (OSError, ValueError) as error:
                if "--skip-bad" in str(error):
                    error = BadInput(f"{error}. {self._instead(path, prefix, str(error))}")
                why = str(error)
                raise error from None
            finally:
                _remove(Path(lock.name), prefix.parent)
                with contextlib.suppress(OSError):
                    lock.write(why.encode())

    def _instead(self, path: Path, prefix: Path, error: str) -> str:
        """The command that makes a dataset of a file where its tokenizing has failed: of the good records, if nothing else helps."""
        encoding, key = re.search(r"--encoding (\S+) may be right", error), "KEY" if "--json-keys names" in error else KEY
        beside, name = _place(path)
        out, is_chat = beside / (name.partition(".")[0].strip("_") or "corpus"), prefix.name.endswith(CHAT)
        words = ["megatron-lite", "data", "chat" if is_chat else "preprocess", "--input", str(path), "--output-prefix", str(out)]
        words += ["--encoding", encoding[1]] if encoding else ["--json-keys", key] if key != KEY else ["--skip-bad"]
        words += [*shlex.split(self.tokenizer.flags or ""), *([] if is_chat else ["--append-eod"])]
        words += ["--chat-template", str(self.template)] if is_chat and self.template else []
        made = out if is_chat else f"{out}_{key}_document"
        return f"Training reads {KEY!r} in UTF-8 and skips no record; make a dataset for --data-path {made} first: {shlex.join(words)}"

    def _tokenize(self, path: Path, files: Sequence[Path], prefix: Path) -> str:
        """Make the dataset; its lock is held."""
        started = time.monotonic()
        print(f"tokenizing {path}, this once, into {prefix.parent}", flush=True)
        host = socket.gethostname()
        for left in prefix.parent.glob(f"{prefix.name}.{host}.*.tmp"):  # by a killed process
            shutil.rmtree(left, ignore_errors=True)
        own = prefix.with_name(f"{prefix.name}.{host}.{os.getpid()}.tmp")
        own.mkdir()
        try:
            running: dict[str, Any] = {
                "workers": _workers(files),
                "log_interval": 1000,
                "say": lambda text: self.tell(f"tokenizing {path}: {text}"),
            }
            made = str(own / "made")
            if prefix.name.endswith(CHAT):
                chat = self._chat_options(files)
                text = summary(prepare_chat(files, made, chat, **running), chat)
                print(text, flush=True)  # the process that starts a run's output may be another one
                what = "; ".join(text.splitlines())
                _move(mask_prefix(made), mask_prefix(str(prefix)))  # before the tokens
            else:
                options = Options(self.make, keys=(KEY,), append_eod=True)
                counts = preprocess(files, made, options, **running)
                what = "; ".join((f"{counts.documents:,} documents, {counts.tokens:,} tokens", *counts.skipped()))
                made = options.output(made, KEY)
            _move(made, str(prefix))
            sync_directory(prefix.parent)
        finally:
            shutil.rmtree(own, ignore_errors=True)
        seconds = time.monotonic() - started
        return f"{path}: {what}, tokenized in {seconds:.1f} s into {prefix}"


def names_text(data: DataConfig) -> bool:
    """Whether any source is a file of text."""
    return any(is_text_file(entry) for name in FIELDS for entry in getattr(data, name))


def with_tokens(data: DataConfig, cache: CorpusCache) -> tuple[dict[str, str], list[str]]:
    """The dataset that stands for each file of text (and the one that stands for its loss mask), and a line about each file.

    Raises:
        ValueError, OSError: see :meth:`CorpusCache.dataset_of`.
    """
    found: dict[str, str] = {}
    lines: list[str] = []
    for name in FIELDS:
        for source in parse_sources(getattr(data, name)):
            if is_text_file(source.prefix) and source.prefix not in found:
                prefix, line = cache.dataset_of(Path(source.prefix))
                found[source.prefix] = prefix
                if prefix_paths(mask_prefix(prefix))[1].exists():
                    found[mask_prefix(source.prefix)] = mask_prefix(prefix)
                lines.append(line)
    return found, lines


def renamed(data: DataConfig, tokens: Mapping[str, str]) -> DataConfig:
    """The data section with datasets in place of files of text."""
    entries: dict[str, Any] = {name: tuple(tokens.get(e, e) for e in getattr(data, name)) for name in FIELDS}
    return replace(data, **entries)


def _move(made: str, final: str) -> None:
    """Rename a dataset's files, ``.idx`` last."""
    pairs = zip(prefix_paths(made), prefix_paths(final), strict=True)
    for old, new in sorted(pairs, key=lambda pair: pair[1].suffix == ".idx"):
        os.replace(old, new)


def _damage(prefix: Path) -> str | None:
    """None for a dataset that opens; else what is wrong with it, or "" where there is none."""
    files = [*prefix_paths(prefix), *(prefix_paths(mask_prefix(str(prefix))) if prefix.name.endswith(CHAT) else ())]
    missing = [path for path in files if not path.is_file()]
    if missing:
        return "" if len(missing) == len(files) else f"{missing[0]} is missing beside {prefix}"
    try:
        with contextlib.closing(IndexedDataset(prefix)) as dataset:
            open_mask(dataset)
    except (OSError, ValueError) as error:
        return str(error)
    return None


def _cannot_write(directory: Path) -> str | None:
    """Makes the directory; why no file can be written in it, or None."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return error.strerror
    return None if os.access(directory, os.W_OK | os.X_OK) else "no permission"


def _remove(lock: Path, directory: Path) -> None:
    """Remove the name of a lock, and directories that hold nothing else."""
    lock.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        lock.parent.rmdir()
        directory.rmdir()


def _workers(files: Sequence[Path]) -> int:
    """The other ranks of the node wait meanwhile."""
    size = sum(file.stat().st_size for file in files)
    return min(_MOST_WORKERS, len(os.sched_getaffinity(0))) if size >= _MANY_BYTES else 1


def _place(path: Path) -> tuple[Path, str]:
    """The directory that a file, directory or pattern is in, and a name for it that is no pattern."""
    beside = next((parent for parent in path.parents if not has_magic(str(parent))), path)
    return beside, re.sub(r"[*?\[\]/]", "_", str(path.relative_to(beside)) if path != beside else "text")
