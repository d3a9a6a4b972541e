"""Documents that need no parsing: plain text, Parquet, and the ``.dat.zst`` archives of lm_dataformat.

``.dat.zst`` is zstd of documents back to back, each 16 decimal ASCII digits, the number of bytes of its text, and then these
bytes, UTF-8. It has no facts besides the text. (Source: ``DatArchive`` and ``Reader.read_dat`` of
github.com/EleutherAI/lm_dataformat.)
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from itertools import islice
from typing import Any

from megatron_lite.config.text_files import DAT, PARQUET, Name
from megatron_lite.text.blocks import InputOptions, Refused, Texts
from megatron_lite.text.inputs_bytes import (
    DAMAGE,
    CountedFile,
    check_encoding,
    decoded,
    open_file,
    refuse_other_content,
    unpacked,
)
from megatron_lite.text.records import NOT_DECODABLE, NOT_UTF8, BadInput, not_a_string

LONGEST = 1 << 28  # characters of a plain-text document, which is in memory at once
_DIGITS = 16  # of the length of a document in a .dat.zst
_MOST_ROWS = 1 << 14  # in a block
_LONG_CARRY = 1 << 16  # characters in which a separator is looked for again
_SHOWN = 80  # characters of a bad document in a message

Found = str | Refused


def text_blocks(path: str, name: Name, options: InputOptions, start: int, stop: int | None) -> Iterator[Texts]:
    """Blocks of documents; see :func:`megatron_lite.text.inputs.open_input`."""
    if name.kind == PARQUET:
        yield from _parquet(path, options, start, stop)
        return
    first, found, size = start + 1, [], 0
    with ExitStack() as stack:
        file = CountedFile(stack.enter_context(open_file(path)))
        refuse_other_content(path, file.head(), name.packing)
        pieces = unpacked(file, name.packing, options.block_bytes)
        documents = _dat(path, pieces) if name.kind == DAT else _plain(path, pieces, options)
        try:
            for document in islice(documents, start, stop):
                found.append(document)
                size += len(document) if isinstance(document, str) else 0
                if size >= options.block_bytes:
                    yield _block(path, first, found, file.taken)
                    first, found, size = first + len(found), [], 0
        except DAMAGE as error:
            number = first + len(found)
            raise BadInput(f"{path}: damaged, cut off or unreadable in document {number} or later ({error})") from None
        if found:
            yield _block(path, first, found, file.taken)


def _block(path: str, first: int, found: list[Found], taken: int) -> Texts:
    texts = [document if isinstance(document, str) else "" for document in found]
    refused = tuple(replace(f, index=index) for index, f in enumerate(found) if isinstance(f, Refused))
    return Texts(path, first, [texts], ("text",), refused, taken=taken)


def _checked(text: str, reason: str = NOT_UTF8) -> Found:
    """A decoded text, or why it is none: bytes that could not be decoded are lone surrogates in it."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        return Refused(0, reason, f" (character {error.start + 1} of the document)", _start(text))
    return text


def _start(text: str) -> bytes:
    return text[:_SHOWN].encode("utf-16", "surrogatepass").decode("utf-16", "replace").encode()


def _plain(path: str, pieces: Iterator[bytes], options: InputOptions) -> Iterator[Found]:
    """The documents of plain text, as they stand between the separators."""
    held: list[str] = []
    separator, length, carry = options.separator, 0, ""
    begun = False
    for piece in decoded(pieces, check_encoding(options.encoding)):
        carry += piece if begun else piece.removeprefix("\ufeff")
        begun = begun or bool(piece)
        parts = [carry] if separator is None else carry.split(separator)
        if len(parts) > 1:
            yield from (_checked(part, NOT_DECODABLE) for part in ("".join([*held, parts[0]]), *parts[1:-1]))
            held, length, carry = [], 0, parts[-1]
        keep = 0 if separator is None else len(separator) - 1  # where a separator may have begun
        if len(carry) > max(keep, _LONG_CARRY):
            cut = len(carry) - keep
            held.append(carry[:cut])
            length, carry = length + cut, carry[cut:]
        if length > LONGEST:
            what = f"{path}: a document of more than {LONGEST:,} characters"
            raise BadInput(f"{what}; --document-separator parts a plain-text file into documents")
    if held or carry or separator is None:
        yield _checked("".join([*held, carry]), NOT_DECODABLE)


def _dat(path: str, pieces: Iterator[bytes]) -> Iterator[Found]:
    buffer, number = bytearray(), 0

    def filled(size: int) -> bool:
        while len(buffer) < size:
            piece = next(pieces, None)
            if piece is None:
                return False
            buffer.extend(piece)
        return True

    while filled(1):
        number += 1
        head = bytes(buffer[:_DIGITS]) if filled(_DIGITS) else b""
        if not head.isdigit():
            raise BadInput(
                f"{path}: before document {number} there is no length of {_DIGITS} digits: not a {DAT} archive"
            )
        if int(head) > 4 * LONGEST:
            raise BadInput(f"{path}: document {number} is said to have {int(head):,} bytes, more than the {4 * LONGEST:,} that are read")
        end = _DIGITS + int(head)
        if not filled(end):
            raise EOFError(f"the archive ends inside document {number}")
        yield _checked(buffer[_DIGITS:end].decode("utf-8", "surrogateescape"))
        del buffer[:end]


def parquet_rows(path: str) -> int:
    """The number of rows of a Parquet file."""
    with _parquet_file(path) as file:
        return int(file.metadata.num_rows)


def _parquet_file(path: str) -> Any:
    try:
        import pyarrow
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise ValueError("reading .parquet needs a package that is not installed: pip install pyarrow") from None
    try:
        return ParquetFile(path, buffer_size=1 << 20)  # columns are read in pieces, not whole
    except pyarrow.ArrowException as error:
        raise BadInput(f"{path}: not a Parquet file, or damaged ({error})") from None


def _parquet(path: str, options: InputOptions, start: int, stop: int | None) -> Iterator[Texts]:
    size = os.path.getsize(path)
    with _parquet_file(path) as file:
        import pyarrow

        schema, rows = file.schema_arrow, file.metadata.num_rows
        for key in options.keys:
            _check_column(path, key, schema)
        stop = rows if stop is None else stop
        groups, number = _groups(file.metadata, start, stop)
        unpacked_size = sum(file.metadata.row_group(g).total_byte_size for g in range(file.metadata.num_row_groups))
        count = min(max(options.block_bytes * rows // max(unpacked_size, rows, 1), 1), _MOST_ROWS)
        columns = None if options.whole else list(options.keys)
        try:
            for batch in file.iter_batches(count, row_groups=groups, columns=columns):
                low, high = max(start - number, 0), min(stop - number, batch.num_rows)
                if low < high:
                    taken = size * (number + high) // rows
                    yield _rows(path, number + low + 1, batch.slice(low, high - low), options, taken)
                number += batch.num_rows
        except (pyarrow.ArrowException, OSError) as error:
            raise BadInput(f"{path}: damaged, cut off or unreadable in row {number + 1} or later ({error})") from None


def _check_column(path: str, key: str, schema: Any) -> None:
    import pyarrow.types as t

    if schema.names.count(key) != 1:
        raise BadInput(f"{path}: no column {key!r}; its columns are {', '.join(schema.names)}")
    kind = schema.field(key).type
    kind = kind.value_type if t.is_dictionary(kind) else kind
    if not (t.is_string(kind) or t.is_large_string(kind) or t.is_binary(kind) or t.is_large_binary(kind)):
        raise BadInput(f"{path}: column {key!r} holds {kind}, not strings")


def _groups(metadata: Any, start: int, stop: int) -> tuple[list[int], int]:
    """The row groups that hold rows of [start, stop), and the number of the first of their rows."""
    groups: list[int] = []
    first = at = 0
    for group in range(metadata.num_row_groups):
        end = at + metadata.row_group(group).num_rows
        if at < stop and end > start:
            first = first if groups else at
            groups.append(group)
        at = end
    return groups, first


def _rows(path: str, first: int, batch: Any, options: InputOptions, taken: int) -> Texts:
    refused: dict[int, Refused] = {}
    columns = []
    for key in options.keys:
        column = [_cell(key, value) for value in _values(batch.column(key))]
        for index, value in enumerate(column):
            if isinstance(value, Refused):
                refused.setdefault(index, replace(value, index=index))
        columns.append(["" if isinstance(value, Refused) else value for value in column])
    records = None
    if options.whole:  # pyarrow takes rows without a column for no rows
        records = _others(batch.drop_columns(list(options.keys)), refused) or [{} for _ in columns[0]]
    return Texts(path, first, columns, options.keys, tuple(refused[i] for i in sorted(refused)), records, taken)


def _others(batch: Any, refused: dict[int, Refused]) -> list[dict[str, Any]]:
    """The other fields of rows; adds rows whose strings are not UTF-8 to ``refused``."""
    columns = [column.cast(_told(column.type)) for column in batch.columns]
    batch = type(batch).from_arrays(columns, batch.schema.names)
    try:
        return list(batch.to_pylist())
    except UnicodeDecodeError:
        records = []
        for index in range(batch.num_rows):
            try:
                records += batch.slice(index, 1).to_pylist()
            except UnicodeDecodeError:
                records.append({})
                refused.setdefault(index, Refused(index, NOT_UTF8, " (a column beside the text)", b""))
        return records


def _told(kind: Any) -> Any:
    """The type in which values are told: times and decimal numbers as strings (Python's own lack nanoseconds and far years)."""
    import pyarrow as pa

    if pa.types.is_temporal(kind) or pa.types.is_decimal(kind):
        return pa.string()
    if pa.types.is_map(kind):
        return pa.map_(_told(kind.key_type), _told(kind.item_type))
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return pa.large_list(_told(kind.value_type))
    return pa.struct([f.with_type(_told(f.type)) for f in kind]) if pa.types.is_struct(kind) else kind


def _values(column: Any) -> list[str | bytes | None]:
    """Strings as Python's, or bytes where the column holds some that are not UTF-8."""
    import pyarrow

    try:
        return list(column.to_pylist())
    except UnicodeDecodeError:
        plain = column.dictionary_decode() if pyarrow.types.is_dictionary(column.type) else column
        return list(plain.cast(pyarrow.large_binary()).to_pylist())


def _cell(key: str, value: str | bytes | None) -> Found:
    if isinstance(value, bytes):
        return _checked(value.decode("utf-8", "surrogateescape"))
    if value is None:
        why = not_a_string(key, value)
        return Refused(0, why.reason, "", b"")
    return value
