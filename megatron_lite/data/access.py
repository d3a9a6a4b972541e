"""How token files are read: mapped, by ``pread``, or from a store through a local cache of blocks.

A dataset asks for three things: its index whole (mapped: 20 bytes a document, of which a row touches a few pages), its
``.meta.json``, and ranges of bytes of ``.bin``. Where the files lie is decided here and known nowhere else:

* ``mmap``: the page cache is the memory; the fastest on local disks.
* ``pread``: one request of the right size for each row, where a page fault is a dear round trip (Lustre, NFS, GPFS).
* a prefix with a scheme (``s3://bucket/corpus``): ranges through :mod:`megatron_lite.data.remote`.
* staged: what :mod:`megatron_lite.data.stage_dir` has copied to the node's own disk stands for the original.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from megatron_lite.config.text_files import near_prefixes
from megatron_lite.data.index_format import DatasetMeta, prefix_paths
from megatron_lite.data.remote import BlockCache, RemoteFile, is_remote, local_index

GIB = 1 << 30


class TokenFile(Protocol):
    """The bytes of a ``.bin``."""

    size: int

    def read(self, start: int, stop: int) -> bytes:
        """Bytes [start, stop); ValueError where the file ends before."""
        ...

    def close(self) -> None:
        """Give back what is held open."""
        ...


class ReadFile:
    """A file read by ``pread``."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor: int | None = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self.size = os.fstat(self._descriptor).st_size

    def read(self, start: int, stop: int) -> bytes:
        """Bytes [start, stop)."""
        assert self._descriptor is not None, "closed"
        data = os.pread(self._descriptor, stop - start, start)
        while len(data) < stop - start:  # a signal, or a request beyond the 2 GiB that one call reads
            more = os.pread(self._descriptor, stop - start - len(data), start + len(data))
            if not more:
                raise ValueError(f"{self.path} ends before byte {stop}: it was shortened while it was open")
            data += more
        return data

    def close(self) -> None:
        """Close the file."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


@dataclass(frozen=True)
class DatasetFiles:
    """The files of one dataset.

    Attributes:
        bin_name, idx_name, meta_name: for messages.
        index: the whole ``.idx``.
        meta: what ``.meta.json`` says, or None.
        mapped: the whole ``.bin``, or None where it is read through ``reader``.
        reader: see :class:`TokenFile`; None where ``.bin`` is mapped.
        size: bytes of ``.bin``.
    """

    bin_name: str
    idx_name: str
    meta_name: str
    index: mmap.mmap | bytes
    meta: DatasetMeta | None
    mapped: mmap.mmap | bytes | None
    reader: TokenFile | None
    size: int


@dataclass(frozen=True)
class Access:
    """How the datasets of a run are read.

    Attributes:
        method: of local files.
        cache: directory for the indices and blocks of remote ones; None: remote prefixes are refused.
        cache_bytes: what the blocks there may take.
        staged: for a prefix, the local one that stands for it.
        blocks: the cache of all remote datasets, whose bound they share.
    """

    method: Literal["mmap", "pread"] = "mmap"
    cache: Path | None = None
    cache_bytes: int = 64 * GIB
    staged: Mapping[str, str] = field(default_factory=dict)
    blocks: BlockCache | None = field(init=False, compare=False)

    def __post_init__(self) -> None:
        cache = None if self.cache is None else BlockCache(self.cache / "blocks", self.cache_bytes)
        object.__setattr__(self, "blocks", cache)

    def exists(self, prefix: str) -> bool:
        """Whether there is any of the two files that a dataset needs."""
        prefix = self.staged.get(prefix, prefix)
        if is_remote(prefix):
            return any(RemoteFile.find(prefix + suffix) is not None for suffix in (".bin", ".idx"))
        return any(path.exists() for path in prefix_paths(prefix)[:2])

    def open(self, prefix: str) -> DatasetFiles:
        """Open a dataset's files.

        Raises:
            FileNotFoundError: one is missing (the message lists prefixes near by).
            ValueError: a remote prefix without a cache, or without the package that its scheme needs.
        """
        prefix = self.staged.get(prefix, prefix)
        if is_remote(prefix):
            return self._open_remote(prefix)
        bin_path, idx_path, meta_path = prefix_paths(prefix)
        if not idx_path.exists() or not bin_path.exists():
            raise FileNotFoundError(_missing(bin_path, idx_path))
        mapped = map_file(bin_path) if self.method == "mmap" else None
        reader = None if self.method == "mmap" else ReadFile(bin_path)
        names = str(bin_path), str(idx_path), str(meta_path)
        size = bin_path.stat().st_size
        return DatasetFiles(*names, map_file(idx_path), DatasetMeta.read(meta_path), mapped, reader, size)

    def _open_remote(self, prefix: str) -> DatasetFiles:
        if self.cache is None or self.blocks is None:
            raise ValueError(
                f"{prefix}: a remote prefix needs --data-cache-path DIR, a directory of the node for its index and for "
                f"blocks of its tokens (at most --remote-cache-gib), or --stage-dir DIR, to copy it whole"
            )
        names = prefix + ".bin", prefix + ".idx", prefix + ".meta.json"
        tokens, index, described = (RemoteFile.find(name) for name in names)
        missing = [n for n, f in zip(names[:2], (tokens, index), strict=True) if f is None]
        if tokens is None or index is None:
            raise FileNotFoundError(f"{' and '.join(missing)}: no such file")
        meta = None if described is None else DatasetMeta.parse(described.fetch(0, described.size), names[2])
        path = local_index(index, self.cache, None if meta is None else meta.sha256_idx)
        return DatasetFiles(*names, map_file(path), meta, mapped=None, reader=self.blocks.open(tokens), size=tokens.size)


def map_file(path: Path) -> mmap.mmap | bytes:
    """A file's bytes, mapped."""
    with open(path, "rb") as file:
        if os.fstat(file.fileno()).st_size == 0:  # an empty file cannot be mapped
            return b""
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def _missing(bin_path: Path, idx_path: Path) -> str:
    missing = [str(path) for path in (bin_path, idx_path) if not path.exists()]
    text = f"{' and '.join(missing)}: no such file"
    if bin_path.name.endswith((".bin.bin", ".idx.bin")):
        text += "; give the prefix without .bin or .idx"
    prefix = str(idx_path)[: -len(".idx")]
    if text.endswith("no such file") and os.path.isfile(prefix):
        return f"{text}; {prefix} is a file, not the prefix of a dataset (of text, data preprocess makes one)"
    if os.path.isdir(prefix) and len(missing) == 2:
        prefix = prefix.rstrip("/")
        held = sorted(str(path)[: -len(".idx")] for path in Path(prefix).glob("*.idx"))
        return f"{prefix} is a directory, not the prefix of a dataset" + (f"; in it are: {', '.join(held[:5])}" if held else "")
    near = near_prefixes(prefix)
    return text + (f"; there are: {', '.join(near)}" if near else "")
