"""Input files of text: which files the arguments name, and blocks of lines or documents out of each.

What a file is, is told by its name: a kind and perhaps a packing, as in ``pages.jsonl.zst``.

====================================  =================================================================================
``.jsonl``, ``.json``, ``.ndjson``    JSON lines: an object on each line. A file that is one JSON array is refused.
``.txt``                              plain text: the file is a document, or ``separator`` parts it into documents
``.parquet``                          the keys are columns of strings, a row is a document
``.dat.zst``, ``.jsonl.zst.tar``      archives of lm_dataformat (:mod:`.inputs_texts`, :mod:`.inputs_bytes`); its
                                      ``.jsonl.zst`` are JSON lines, with the document's facts in the field ``meta``
``.gz``, ``.zst``, ``.bz2``, ``.xz``  packings of JSON lines and plain text
``-``                                 standard input: JSON lines, not packed
====================================  =================================================================================

Files are read, and unpacked, as blocks (:mod:`.blocks`) are asked for: memory does not grow with the file, except for one line
or one plain-text document.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from glob import glob, has_magic
from pathlib import Path
from typing import NoReturn

from megatron_lite.config.text_files import DAT, LINES, PARQUET, PLAIN, STANDARD_INPUT, SUPPORTED, TAR, name_of
from megatron_lite.text import inputs_bytes, inputs_texts
from megatron_lite.text.blocks import Block, InputOptions, Lines
from megatron_lite.text.frames import INDEX, LIST, differing
from megatron_lite.text.records import count_lines


def open_input(path: str | Path, options: InputOptions, start: int = 0, stop: int | None = None) -> Iterator[Block]:
    """The blocks of a file, in order.

    ``start`` and ``stop`` take a part of it: of JSON lines the lines that begin at an unpacked byte in [start, stop), of
    other kinds the documents with a (0-based) number in [start, stop). Parts whose ends meet have each line once, wherever
    the cuts are. Lines of a file without packing are numbered from the first of the part (:func:`lines_before` says how
    many there are before it); everything else keeps its number in the file.

    Raises:
        BadInput: a file that is damaged, cut off, a JSON array, or lacks a column; as soon as that is seen.
        ValueError: keys that the kind does not have.
        OSError: the file cannot be opened.
    """
    name = name_of(path)
    assert name is not None, path
    if name.kind in LINES or name.kind == TAR:
        return inputs_bytes.line_blocks(str(path), name, options, start, stop)
    return inputs_texts.text_blocks(str(path), name, options, start, stop)


def lines_before(path: str | Path, options: InputOptions, start: int) -> int:
    """How many lines begin before an unpacked byte of a file of JSON lines; reads what is before it."""
    return sum(
        count_lines(block.data) + (not block.data.endswith(b"\n"))
        for block in open_input(path, options, stop=start)
        if isinstance(block, Lines)
    )


def extent(path: str | Path, options: InputOptions) -> int | None:
    """The end of the range that ``start`` and ``stop`` of :func:`open_input` divide, where a part can be read by itself.

    Unpacked bytes of JSON lines that are not packed or are shards with their index (:mod:`.frames`), rows of a Parquet file;
    None: whoever wants a part reads what is before it.
    """
    name = name_of(path)
    if name is not None and name.kind == PARQUET:
        return inputs_texts.parquet_rows(str(path))
    is_lines = name is not None and name.kind in LINES and str(path) != STANDARD_INPUT
    if name is None or not is_lines or inputs_bytes.is_wide(inputs_bytes.check_encoding(options.encoding)):
        return None
    if not name.packing:
        return os.path.getsize(path)
    index = inputs_bytes.indexed(str(path), name)
    return None if index is None else index.bytes


def expand_inputs(arguments: Sequence[str], flag: str = "--input") -> list[Path]:
    """The files that the arguments name: files, patterns (``**`` too), directories (with all below); ``-`` is standard input.

    A directory that a pattern matches is read like one that is named, as where the shell takes the pattern.

    Files of a pattern or a directory come in the order of their names. Below a directory, names that begin with a dot and
    ``_SUCCESS`` are left out; any other name that is not read is an error.

    Raises:
        ValueError: a pattern or directory without a file, a file that is not there, or a kind that is not read.
        OSError: a directory that cannot be read.
    """
    files: list[Path] = []
    for argument in arguments:
        path = Path(argument)
        if path.is_dir():
            files += _below(argument, flag)
        elif has_magic(argument) and not path.exists():
            _refuse_unreadable(path, flag)
            matching: list[Path] = []
            for found in sorted(map(Path, glob(argument, recursive=True)), key=_in_order):
                if not found.is_dir():
                    matching.append(found)
                elif "**" not in argument:  # which matches what is below by itself
                    matching += _below(str(found), flag)
            if not matching:
                raise ValueError(f"{flag} {argument}: no file matches; supported are {SUPPORTED}")
            files += matching
        else:
            files.append(path)
    for path in files:
        if str(path) != STANDARD_INPUT and not path.is_file():
            raise ValueError(f"{flag} {path}: {'not an ordinary file' if path.exists() else 'no such file'}")
        if name_of(path) is None:
            raise ValueError(f"{flag} {path}: this kind of file is not read; supported are {SUPPORTED}")
    if [str(f) for f in files].count(STANDARD_INPUT) > 1:
        raise ValueError(f"{flag}: standard input (-) can be read once")
    return files


def called(files: Sequence[Path]) -> str:
    """One file's name, or how many there are."""
    return str(files[0]) if len(files) == 1 else f"{len(files)} files"


def repeated(files: Sequence[Path]) -> str | None:
    """A note where a file is named more than once, perhaps through a link or by two patterns."""
    places = Counter(os.path.realpath(path) for path in files)
    twice = [path for path, number in places.items() if number > 1]
    if not twice:
        return None
    more = f" (as {len(twice) - 1} more are)" if len(twice) > 1 else ""
    return f"note: {twice[0]} is named {places[twice[0]]} times, and read as often{more}"


def _refuse_unreadable(pattern: Path, flag: str) -> None:
    """Raises PermissionError for a directory in which the pattern cannot look, which ``glob`` passes over."""
    last = pattern / "*" if pattern.name == "**" else pattern
    for parent, child in zip(last.parents, (last, *last.parents), strict=False):
        mode = os.X_OK | (os.R_OK if has_magic(child.name) else 0)
        for place in glob(str(parent), recursive=True):
            if os.path.isdir(place) and not os.access(place, mode):
                raise PermissionError(f"{flag} {pattern}: {place} cannot be read (no permission)")


def _in_order(path: Path) -> Path:
    """What a file is sorted by: its name, and a shard's number, which from 100,000 on has more digits than the others'."""
    number = re.fullmatch(r"shard-(\d{5,})\.jsonl\.zst", path.name)
    return path.with_name(f"shard-{number[1]:0>12}.jsonl.zst") if number else path


def _below(directory: str, flag: str) -> list[Path]:
    """Files of a directory, recursively, in the order of their names."""
    files: list[Path] = []
    seen: set[str] = set()
    for top, names, inside in os.walk(directory, onerror=_raise, followlinks=True):
        names[:] = [n for n in names if not n.startswith(".")]
        if (real := os.path.realpath(top)) in seen:
            raise ValueError(f"{flag} {directory}: {top} is reached a second time, through a link")
        seen.add(real)
        if wrong := differing(Path(top), inside):
            raise ValueError(
                f"{flag} {directory}: {top} is not as {os.path.join(INDEX, LIST)} in it lists its shards: {wrong}; bring it "
                f"back from a copy, or give the pattern '{os.path.join(top, '*.jsonl.zst')}' to read what is there"
            )
        files += [Path(top, n) for n in inside if not n.startswith(".") and n != "_SUCCESS"]
    files.sort(key=_in_order)
    unknown = [str(f) for f in files if name_of(f) is None]
    if unknown:
        more = f" and {len(unknown) - 1} more" if len(unknown) > 1 else ""
        pattern = os.path.join(directory, "**", "*.jsonl")
        raise ValueError(
            f"{flag} {directory}: holds {unknown[0]}{more}, which is not read; give a pattern as in '{pattern}'; "
            f"supported are {SUPPORTED}"
        )
    if not files:
        raise ValueError(f"{flag} {directory}: a directory without files; supported are {SUPPORTED}")
    return files


def _raise(error: OSError) -> NoReturn:
    raise error


def check_options(options: InputOptions, files: Sequence[Path]) -> None:
    """Refuse options that fit no file, before anything is read. Raises ValueError."""
    inputs_bytes.check_encoding(options.encoding)
    if options.separator == "":
        raise ValueError("--document-separator is an empty text")
    for path in files:
        name = name_of(path)
        if name is not None and name.kind in (PLAIN, DAT) and options.keys != ("text",):
            what = "plain text" if name.kind == PLAIN else "an archive of texts"
            raise ValueError(f"{path}: {what} has no keys but 'text'; --json-keys asks for {' '.join(options.keys)}")
    if options.separator is not None and not any(n is not None and n.kind == PLAIN for n in map(name_of, files)):
        raise ValueError(f"--document-separator: none of the {len(files)} inputs is plain text ({PLAIN})")
