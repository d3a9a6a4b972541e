"""Bytes of input files: unpacked as a stream, brought to UTF-8, and cut into blocks of whole lines.

Packed files may have several members or frames one after another (``cat a.zst b.zst``, ``pigz``, ``zstd -T``); one that ends
in the middle is an error, and never a short file. Damage is reported with the first line that is not known to be good.

A ``.jsonl.zst.tar`` of lm_dataformat is a tar archive, not packed itself, of ``.jsonl.zst`` files as its ``Archive`` writes
them: zstd of lines ``{"text": ..., "meta": {...}}`` in UTF-8. A text may be a list of paragraphs, which its reader joins
with a blank line (:mod:`.records` does too); ``meta`` is an object, and may be missing. Members are read in the order in
which they lie in the archive. (Source: ``Reader.read_jsonl_tar``, ``Archive`` of github.com/EleutherAI/lm_dataformat.)
"""

from __future__ import annotations

import bz2
import codecs
import gzip
import lzma
import re
import sys
import tarfile
import zlib
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any, Protocol

from megatron_lite.config.text_files import LINES, STANDARD_INPUT, TAR, Name
from megatron_lite.text.blocks import InputOptions, Lines
from megatron_lite.text.frames import FrameIndex, fitting_index, zstandard_package
from megatron_lite.text.records import BYTE_ORDER_MARK, BadInput, count_lines, excerpt

_ZSTD_LEAST, _ZSTD_MOST = 1 << 6, 1 << 13  # packed bytes at a time, ...
_ZSTD_UNPACKED = 1 << 20  # ... so that they unpack to about as much as this, whatever they hold
_ZSTD_WINDOW = 1 << 31  # the largest that `zstd --long=31` makes
_ARRAY = re.compile(rb"\s*\[\s*(\{|\n|$)")  # how a file that is a JSON array of objects begins
_UNFIT = ("utf-7", "hz", "iso2022", "raw-unicode-escape", "idna", "punycode")  # a newline is not always a newline there
_LONGEST_LINE = 1 << 30  # bytes; what is packed can be a line without end
_HEAD = 12  # bytes that tell a packing
_MAGIC = {  # how files begin
    ".gz": re.compile(rb"\x1f\x8b"),
    ".zst": re.compile(rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18"),
    ".bz2": re.compile(rb"BZh[1-9]1AY&SY"),
    ".xz": re.compile(rb"\xfd7zXZ\x00"),
    ".parquet": re.compile(rb"PAR1[\x00-\x1f]"),
}
_TEXT = re.compile(rb"(\xef\xbb\xbf)?\s*[{\[\"]")  # JSON that is not packed
DAMAGE = (OSError, EOFError, lzma.LZMAError, zlib.error, tarfile.TarError)


class Readable(Protocol):
    """What is read from a file here."""

    def read(self, size: int = -1, /) -> bytes: ...


def check_encoding(name: str) -> str:
    """Python's own name of an encoding of text. Raises ValueError for one that is not read."""
    try:
        found = codecs.lookup(name).name
        fits = "\n".encode(found) == b"\n" and not found.startswith(_UNFIT)
    except (LookupError, ValueError):
        found, fits = name, False
    if found == "utf-8-sig":
        return "utf-8"
    if not fits and not is_wide(found):
        some = "utf-8, gb18030, gbk, big5, euc-jp, shift_jis, euc-kr, cp1251, latin-1, utf-16"
        raise ValueError(f"--encoding {name}: not an encoding that is read here; known are {some} and others")
    return found


def is_wide(encoding: str) -> bool:
    """Whether a character is two or four bytes, so that lines cannot be cut at the byte of a newline."""
    return encoding.startswith(("utf-16", "utf-32"))


def open_file(path: str) -> IO[bytes]:
    """The file of that name, or standard input."""
    if path != STANDARD_INPUT:
        return open(path, "rb", buffering=0)
    if sys.stdin is None:
        raise BadInput("standard input is closed")
    return sys.stdin.buffer


def shown_name(path: str) -> str:
    """A file's name in messages."""
    return "standard input" if path == STANDARD_INPUT else path


def unpacked(file: Readable, packing: str, size: int) -> Iterator[bytes]:
    """The content of a file in pieces of about ``size`` bytes (zstd: smaller or larger ones)."""
    if packing == ".zst":
        yield from _zstd_frames(file)
        return
    if packing in _STREAMS:
        yield from _packed_streams(file, *_STREAMS[packing], size)
        return
    stream = gzip.open(file, "rb") if packing else file  # type: ignore[call-overload]
    while data := stream.read(size):
        yield data


# What unpacks one stream of several in a file, and the bytes that may lie between them (2.2 of the .xz file format).
_STREAMS: dict[str, tuple[Callable[[], Any], bytes]] = {".bz2": (bz2.BZ2Decompressor, b""), ".xz": (lzma.LZMADecompressor, b"\0")}


def _packed_streams(file: Readable, unpacker_of: Callable[[], Any], padding: bytes, size: int) -> Iterator[bytes]:
    """Streams of bzip2 or xz to the last byte; ``bz2.open`` and ``lzma.open`` end without a word where a later one is damaged."""
    unpacker, packed = unpacker_of(), b""
    while packed := packed or file.read(1 << 18):
        if unpacker.eof:
            packed = packed.lstrip(padding)
            if not packed:
                continue
            unpacker = unpacker_of()
        yield unpacker.decompress(packed, size)
        while not (unpacker.eof or unpacker.needs_input):
            yield unpacker.decompress(b"", size)
        packed = unpacker.unused_data
    if not unpacker.eof:
        raise EOFError("the file ends inside a stream")


def _zstd_frames(file: Readable) -> Iterator[bytes]:
    zstandard = zstandard_package()
    unpacker = zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW)
    frame, size = None, _ZSTD_LEAST
    while packed := file.read(1 << 18):
        start = 0
        while start < len(packed):
            frame = frame or unpacker.decompressobj()
            piece = packed[start : start + size]
            try:
                data = frame.decompress(piece)
            except zstandard.ZstdError as error:
                raise EOFError(str(error)) from None
            if data:
                yield data
                size = min(_ZSTD_MOST, 2 * size, max(_ZSTD_LEAST, _ZSTD_UNPACKED * len(piece) // len(data)))
            start += len(piece)
            if frame.eof:
                start -= len(frame.unused_data)
                frame = None
    if frame is not None:
        raise EOFError("the file ends inside a zstd frame")


def decoded(pieces: Iterator[bytes], encoding: str) -> Iterator[str]:
    """Bytes as text; those that cannot be decoded are lone surrogates in it."""
    decoder = codecs.getincrementaldecoder(encoding)("surrogatepass" if is_wide(encoding) else "surrogateescape")
    try:
        for piece in pieces:
            yield decoder.decode(piece)
        yield decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        raise EOFError(f"not {encoding}: {error.reason}") from None


def to_utf8(data: bytes, encoding: str) -> bytes:
    """Whole lines in UTF-8; those that cannot be decoded with a byte that is not UTF-8 in that place."""
    try:
        return data.decode(encoding).encode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        return b"\n".join(_line_to_utf8(line, encoding) for line in data.split(b"\n"))


def _line_to_utf8(line: bytes, encoding: str) -> bytes:
    try:
        return line.decode(encoding).encode("utf-8", "surrogatepass")
    except UnicodeDecodeError as error:
        good = line[: error.start].decode(encoding).encode("utf-8", "surrogatepass")
        return good + b"\xff" + line[error.start :].decode(encoding, "replace").encode("utf-8", "surrogatepass")


def whole_lines(pieces: Iterator[bytes], size: int) -> Iterator[bytes]:
    """Blocks of whole lines, each of about ``size`` bytes or one longer line; the last may lack its newline. EOFError: one too long."""
    held: list[bytes | memoryview] = []
    length = 0
    for piece in pieces:
        held.append(piece)
        length += len(piece)
        cut = piece.rfind(b"\n") + 1 if length >= size else 0
        if cut:
            held[-1] = memoryview(piece)[:cut]
            yield b"".join(held)
            held = [piece[cut:]]
            length = len(held[0])
        elif length > _LONGEST_LINE:
            raise EOFError(f"a line of more than {_LONGEST_LINE:,} bytes")
    if length:
        yield b"".join(held)


def line_blocks(path: str, name: Name, options: InputOptions, start: int, stop: int | None) -> Iterator[Lines]:
    """Blocks of JSON lines; see :func:`megatron_lite.text.inputs.open_input`."""
    encoding = "utf-8" if name.kind == TAR else check_encoding(options.encoding)
    shown = shown_name(path)
    with ExitStack() as stack:
        file = open_file(path)
        if path != STANDARD_INPUT:
            stack.enter_context(file)
        offset, line, place = 0, 1, 0
        if start > 0 and name.kind != TAR and not is_wide(encoding) and file.seekable():
            offset, line, place = _nearest(path, name, start)
            file.seek(place)
        counted = CountedFile(file, place)
        if not place:
            refuse_other_content(shown, counted.head(), name.packing)
        try:
            for member, (where, pieces) in enumerate(_streams(shown, counted, name, encoding, options.block_bytes)):
                line = 1 if member else line
                for data in whole_lines(pieces, options.block_bytes):
                    if line == 1:
                        _refuse_array(where, data)
                    before, wanted = _cut(data, start - offset, None if stop is None else stop - offset)
                    if wanted:
                        first = line + count_lines(data, 0, before)
                        text = wanted if encoding == "utf-8" or is_wide(encoding) else to_utf8(wanted, encoding)
                        yield Lines(where, first, text, offset + before, counted.taken, offset + before + len(wanted))
                    line += count_lines(data)
                    offset += len(data)
                    if stop is not None and offset >= stop:
                        return
        except DAMAGE as error:
            raise BadInput(
                f"{shown}: damaged, cut off or unreadable in line {max(line, 1)} or later ({error})"
            ) from None


def indexed(path: str, name: Name) -> FrameIndex | None:
    """The index of a packed file of JSON lines that can be read from its middle."""
    return fitting_index(Path(path)) if name.packing == ".zst" and name.kind in LINES else None


def _nearest(path: str, name: Name, start: int) -> tuple[int, int, int]:
    """Where to read from, to have the lines from an unpacked byte on: the unpacked byte, number of its line, byte in the file."""
    if not name.packing:
        return start - 1, 0, start - 1  # whether a line begins at `start`, the byte before it says
    index = indexed(path, name)
    if index is None:
        return 0, 1, 0
    frame = index.frames[bisect_right(index.frames, start, key=lambda frame: frame.start) - 1]
    return frame.start, frame.line + 1, frame.offset


class CountedFile:
    """A file that counts what was read from it; ``taken`` bytes are behind it."""

    def __init__(self, file: Readable, taken: int = 0) -> None:
        self._file, self.taken, self._head = file, taken, b""

    def head(self) -> bytes:
        """The next bytes, which are read again."""
        self._head = self._file.read(_HEAD)
        return self._head

    def read(self, size: int = -1) -> bytes:
        """As of files; it may be less."""
        if not self._head:
            data = self._file.read(size)
        elif size < 0:
            data, self._head = self._head + self._file.read(), b""
        else:
            data, self._head = self._head[:size], self._head[size:]
        self.taken += len(data)
        return data


def refuse_other_content(shown: str, head: bytes, packing: str) -> None:
    """Raise BadInput where the first bytes of a file are of another packing than its name says, with the remedy."""
    found = next((suffix for suffix, magic in _MAGIC.items() if magic.match(head)), "")
    if found in ("", packing) and not (packing and not found and _TEXT.match(head)):
        return
    what = f"its content is {found[1:]}" if found else "its content is not packed"
    remedy = f"give it a name that ends in {found}" if found else f"give it a name without {packing}"
    if shown == shown_name(STANDARD_INPUT):
        remedy = "standard input is read as JSON lines that are not packed"
    said = f"its name says {packing[1:]}" if packing else "its name does not say so"
    raise BadInput(f"{shown}: {what}, and {said}: {remedy}")


def _streams(
    shown: str, file: CountedFile, name: Name, encoding: str, size: int
) -> Iterator[tuple[str, Iterator[bytes]]]:
    """(name for messages, unpacked content) of the file, or of each member of an archive."""
    if name.kind != TAR:
        pieces = unpacked(file, name.packing, size)
        if is_wide(encoding):  # a lone surrogate becomes bytes that are not UTF-8
            pieces = (text.encode("utf-8", "surrogatepass") for text in decoded(pieces, encoding))
        yield shown, pieces
        return
    with tarfile.open(fileobj=file, mode="r|", errors="replace", tarinfo=_Member) as archive:  # type: ignore[call-overload]
        for member in archive:
            archive.members = []  # type: ignore[attr-defined]  # which otherwise remembers them all
            if member.isdir():
                continue
            inside = archive.extractfile(member) if member.name.endswith(".jsonl.zst") else None
            if inside is None:
                raise BadInput(f"{shown}: holds {member.name}; only .jsonl.zst files are read in a {TAR}")
            yield f"{shown}({member.name})", unpacked(inside, ".zst", size)
        while rest := archive.fileobj.read(1 << 16):  # type: ignore[union-attr]
            if rest.strip(b"\0"):
                raise EOFError("there is something behind the end of the archive")


class _Member(tarfile.TarInfo):
    """Takes an archive to end where its end is written: ``tarfile`` ends without a word at any header that it cannot read."""

    @classmethod
    def fromtarfile(cls, archive: tarfile.TarFile) -> Any:
        """As of the base. Raises EOFError: no header."""
        try:
            return super().fromtarfile(archive)
        except tarfile.HeaderError as error:
            if type(error).__name__ == "EOFHeaderError":  # the end
                raise
            raise EOFError(f"{error} of a file in the archive") from None


def _cut(data: bytes, start: int, stop: int | None) -> tuple[int, bytes]:
    """The lines that begin in [start, stop): how many bytes are before them, and they."""
    before, end = 0, len(data)
    if start > 0:
        before = (data.find(b"\n", start - 1) + 1 or end) if start <= end else end
    if stop is not None:
        end = 0 if stop <= 0 else (data.find(b"\n", stop - 1) + 1 or end) if stop <= end else end
    if before == 0 and end == len(data):
        return 0, data
    return before, data[before:end]


def _refuse_array(file: str, data: bytes) -> None:
    if _ARRAY.match(data.removeprefix(BYTE_ORDER_MARK)[:256]):
        remedy = "jq -c '.[]' FILE > FILE.jsonl"
        why = f"a JSON array, where each line must be an object; make lines of it: {remedy}"
        raise BadInput(f"{file}:1: {why}: {excerpt(data)}")
