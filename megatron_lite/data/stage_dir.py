"""Copies of datasets on a node's own disk (``--stage-dir``).

Reading windows at random from a file system that many nodes share costs a round trip each, and all nodes at once make
it slow for everybody; copying whole files in order does not. One process of a node copies, the others wait for it
(:mod:`megatron_lite.data.node_file`). A copy grows under a name that holds the state of its source, so that a run that
was ended goes on where it stopped; its SHA-256 is compared with the one in ``.meta.json`` before it is renamed, and a
record with the states of the sources and of the copies, written last, is what makes it a dataset. A later run that finds
the record uses the copies; where a source or a copy has changed since it is copied again.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

from megatron_lite.config.schema_io import DataConfig
from megatron_lite.data.access import GIB, Access, ReadFile
from megatron_lite.data.index_format import DatasetMeta, mask_prefix
from megatron_lite.data.node_file import new_file, node_lock
from megatron_lite.data.remote import RemoteFile, is_remote
from megatron_lite.data.sources import parse_sources

SUFFIXES = (".bin", ".meta.json", ".idx")  # in the order in which they are put in place
_CHUNK = 8 << 20
_AHEAD = 4  # chunks that are read while one is written
_SPARE = 64 << 20  # bytes that stay free
_SAY_SECONDS = 15.0
Tell = Callable[[str], None]


@dataclass(frozen=True)
class _Source:
    """A file to copy: ``state`` changes when it does."""

    name: str
    size: int
    state: str
    read: Callable[[int, int], bytes]
    close: Callable[[], None]


@dataclass
class Staged:
    """What has become of the datasets.

    Attributes:
        prefixes: for each, the local copy.
        copied: bytes that this process copied; 0 where it found all or another process did it.
        notices: what is worth knowing.
    """

    prefixes: dict[str, str] = field(default_factory=dict)
    copied: int = 0
    notices: list[str] = field(default_factory=list)


def open_access(data: DataConfig, tell: Tell = lambda text: None) -> tuple[Access, list[str]]:
    """How the data of a run are read, after copying them if that is asked for; and lines for the start-up text.

    Raises:
        FileNotFoundError, ValueError: see :func:`stage`.
    """
    cache = None if data.data_cache_path is None else Path(data.data_cache_path)
    access = Access(data.data_access, cache, data.remote_cache_gib * GIB)
    if data.stage_dir is None or data.mock_data:
        return access, []
    prefixes = []
    for entries in (data.data_path, data.train_data_path, data.valid_data_path, data.test_data_path):
        for source in parse_sources(entries):
            mask = mask_prefix(source.prefix)
            if source.weight != 0 or data.curriculum is not None:  # which may draw from it later
                prefixes += [source.prefix, *([mask] if access.exists(mask) else [])]
    staged = stage(prefixes, Path(data.stage_dir), tell)
    lines = [f"the data are read from copies in {data.stage_dir}"]
    lines += [f"{staged.copied / GIB:.2f} GiB were copied there now"] if staged.copied else []
    return replace(access, staged=staged.prefixes), [*lines, *staged.notices]


def stage(prefixes: Iterable[str], directory: Path, tell: Tell = lambda text: None) -> Staged:
    """Copies of datasets in ``directory``, made now or found there.

    Args:
        prefixes: paths without suffix, or addresses in stores.
        directory: of this node; made if need be.
        tell: called with a line of progress at least once a second while something moves, here or in the process that
            is waited for.

    Raises:
        FileNotFoundError: a dataset is not there.
        ValueError: a copy is not what ``.meta.json`` says, or there is no room.
    """
    result = Staged()
    for prefix in dict.fromkeys(prefixes):
        name = prefix.rstrip("/").rpartition("/")[2]
        whole = prefix if is_remote(prefix) else os.path.abspath(prefix)
        target = directory / f"{name}-{hashlib.sha256(whole.encode()).hexdigest()[:12]}"
        sources = _open_sources(prefix)
        try:
            with node_lock(target, _watch(target, tell)):
                _stage_one(prefix, sources, target, tell, result)
        finally:
            for source in sources.values():
                source.close()
        result.prefixes[prefix] = str(target)
    return result


def _stage_one(
    prefix: str, sources: Mapping[str, _Source], target: Path, tell: Tell, result: Staged
) -> None:
    """One dataset; its lock is held."""
    record_path = Path(f"{target}.staged.json")

    def record() -> dict[str, object]:
        copies = {suffix: _state(Path(f"{target}{suffix}")) for suffix in sources}
        return {"source": prefix, "files": {suffix: source.state for suffix, source in sources.items()}, "copies": copies}

    if _read(record_path) == record():
        return
    record_path.unlink(missing_ok=True)
    needed = sum(s.size - _size(_part(target, suffix, s)) for suffix, s in sources.items())
    free = shutil.disk_usage(target.parent).free
    if needed + _SPARE > free:
        raise ValueError(
            f"--stage-dir {target.parent} has {free / GIB:.2f} GiB free, and the copy of {prefix} takes {needed / GIB:.2f} more: "
            "give a directory with more room, or leave this dataset where it is"
        )
    meta = None
    if ".meta.json" in sources:
        source = sources[".meta.json"]
        meta = DatasetMeta.parse(source.read(0, source.size), source.name)
    else:
        Path(f"{target}.meta.json").unlink(missing_ok=True)
        result.notices.append(f"{prefix} has no .meta.json: its copy could not be compared with a checksum")
    wanted = {} if meta is None else {".bin": meta.sha256_bin, ".idx": meta.sha256_idx}
    for suffix, source in sources.items():
        part = _part(target, suffix, source)
        for old in target.parent.glob(f"{target.name}{suffix}.*.part"):
            if old != part:
                old.unlink(missing_ok=True)
        result.copied += _copy(source, part, wanted.get(suffix), tell)
        os.replace(part, f"{target}{suffix}")
    with new_file(record_path) as file:
        file.write(json.dumps(record()).encode())


def _copy(source: _Source, part: Path, sha256: str | None, tell: Tell) -> int:
    """Complete ``part``; the bytes that were copied. What an earlier run left is kept where a checksum will prove it."""
    resumed = min(_size(part), source.size) if sha256 is not None else 0
    digest = hashlib.sha256()
    began = told = said = time.monotonic()
    with open(part, "r+b" if part.exists() else "w+b") as file:
        file.truncate(resumed)
        while data := file.read(_CHUNK):
            digest.update(data)
        done = resumed
        for data in _chunks(source, resumed):
            file.write(data)
            digest.update(data)
            done += len(data)
            if time.monotonic() - told > 0.5:
                told = time.monotonic()
                rate = (done - resumed) / (told - began) / (1 << 20)
                text = f"staging {source.name}: {done / GIB:.2f} of {source.size / GIB:.2f} GiB, {rate:.0f} MiB/s"
                tell(text)
                if told - said > _SAY_SECONDS:  # the one process of the node that knows
                    said = told
                    print(text, flush=True)
        file.flush()
        os.fsync(file.fileno())
    if sha256 is not None and digest.hexdigest() != sha256:
        part.unlink()
        if resumed:  # perhaps only what was there is damaged
            return _copy(source, part, sha256, tell)
        raise ValueError(
            f"{source.name}: the sha256 of its copy is not the one in .meta.json: the file is damaged, or .meta.json is of "
            "another dataset. `megatron-lite data verify` tells"
        )
    return source.size - resumed


def _chunks(source: _Source, start: int) -> Iterator[bytes]:
    """The bytes from ``start`` on, a few chunks being read ahead."""
    with ThreadPoolExecutor(_AHEAD, thread_name_prefix="stage") as pool:
        ahead: deque[Future[bytes]] = deque()
        for at in range(start, source.size, _CHUNK):
            ahead.append(pool.submit(source.read, at, min(at + _CHUNK, source.size)))
            if len(ahead) == _AHEAD:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()


def _open_sources(prefix: str) -> dict[str, _Source]:
    """The files of a dataset by suffix; ``.meta.json`` may be missing."""
    found: dict[str, _Source] = {}
    for suffix in SUFFIXES:
        name = prefix + suffix
        if is_remote(prefix):
            remote = RemoteFile.find(name)
            if remote is not None:
                found[suffix] = _Source(name, remote.size, remote.key, remote.fetch, lambda: None)
        elif Path(name).is_file():
            file = ReadFile(Path(name))
            found[suffix] = _Source(name, file.size, _state(Path(name)), file.read, file.close)
    missing = [prefix + suffix for suffix in (".bin", ".idx") if suffix not in found]
    if missing:
        for source in found.values():
            source.close()
        raise FileNotFoundError(f"{' and '.join(missing)}: no such file")
    return found


def _watch(target: Path, tell: Tell) -> Callable[[], None]:
    """What to do while another process copies: a sign of life when its files have grown."""
    seen = [-1]

    def look() -> None:
        size = sum(_size(path) for path in target.parent.glob(f"{target.name}.*"))
        if size != seen[0]:
            seen[0] = size
            tell(f"waiting for another process of this node, which copies to {target}: {size / GIB:.2f} GiB")

    return look


def _part(target: Path, suffix: str, source: _Source) -> Path:
    return Path(f"{target}{suffix}.{source.state[:16]}.part")


def _size(path: Path) -> int:
    """Bytes of a file; 0 where there is none."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _state(path: Path) -> str:
    """32 hexadecimal digits that change when a file is written to; "" where there is none."""
    try:
        stat = path.stat()
    except FileNotFoundError:
        return ""
    return hashlib.sha256(f"{stat.st_size} {stat.st_mtime_ns}".encode()).hexdigest()[:32]


def _read(path: Path) -> object:
    """What a record says, or None."""
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
