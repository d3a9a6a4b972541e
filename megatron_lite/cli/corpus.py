"""What the commands that write a corpus share: strict flags, interrupts, and the exit status of what goes wrong."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable, Sequence
from functools import partial
from itertools import takewhile
from types import FrameType
from typing import Any, NoReturn

from megatron_lite.cli.main import complain
from megatron_lite.config.exit_codes import ERROR
from megatron_lite.config.problem import nearest_name

INTERRUPTED = 128 + signal.SIGINT


def strict(p: argparse.ArgumentParser, argv: Sequence[str]) -> argparse.Namespace:
    """The flags; exits with 2 and the nearest known name at one that does not exist, before it misses one that is required."""
    known = [name for action in p._actions for name in action.option_strings]
    flags = takewhile(lambda word: word != "--", argv)
    for word in flags:
        name = word.split("=")[0]
        if word.startswith("--") and " " not in word and name not in known:
            nearest = nearest_name(name, known)
            p.error(f"unknown argument {word}" + (f": did you mean {nearest}?" if nearest else ""))
    p.allow_abbrev = False
    return p.parse_args(argv)


def add_reading_flags(group: argparse._ArgumentGroup) -> None:
    """``--encoding`` and ``--document-separator``: how files of text are read."""
    text = "of JSON lines and plain text, such as gb18030 (default: utf-8)"
    group.add_argument("--encoding", default="utf-8", metavar="NAME", help=text)
    text = r"between the documents of a .txt file, such as '<|endoftext|>' or '\n\n' (default: a file is a document)"
    group.add_argument("--document-separator", type=_escaped, metavar="TEXT", help=text)


def add_running_flags(group: argparse._ArgumentGroup) -> None:
    """How a run that tokenizes goes; :func:`running_options` reads them."""
    group.add_argument("--workers", type=at_least_one, default=1, help="tokenizing processes or threads (default: 1)")
    text = "read the i-th of n parts of the input, from 0; `megatron-lite data merge` joins their outputs in order"
    group.add_argument("--part", metavar="i/n", help=text)
    text = "go on where a run with these flags was ended (nothing to do where it is complete), and if ended leave what is needed"
    group.add_argument("--resume", action="store_true", help=text)
    text = "tokenize by the reference library only, also where a faster one is proved to give the same ids"
    group.add_argument("--no-fast-tokenizer", action="store_true", help=text)
    text = "documents between progress lines (default: 10000); a terminal has a bar instead"
    group.add_argument("--log-interval", type=int, default=10000, help=text)


def at_least_one(text: str) -> int:
    """The number a flag gives, refused below 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: give at least 1")
    return int(text)


def running_options(args: argparse.Namespace) -> dict[str, Any]:
    """Options of :func:`megatron_lite.text.run.run_job`. Raises ValueError."""
    from megatron_lite.text.shares import parse_part

    return {
        "workers": args.workers,
        "part": None if args.part is None else parse_part(args.part),
        "resume": args.resume,
        "log_interval": args.log_interval,
        "bar": sys.stderr.isatty(),
        "say": partial(print, flush=True),
    }


def left_by(args: argparse.Namespace) -> str:
    """What a run that was ended has left, in words."""
    return "the same command goes on from here" if args.resume else "nothing was written"


def _escaped(text: str) -> str:
    return text.replace("\\n", "\n").replace("\\t", "\t")


def check_prefix(p: argparse.ArgumentParser, prefix: str, example: str) -> None:
    """Exit with 2 unless ``--output-prefix`` ends in a name."""
    if not prefix.strip():
        p.error(f"--output-prefix is given an empty text: give a path such as data/{example}")
    if prefix.endswith("/"):
        p.error(f"--output-prefix {prefix} is a directory: add the beginning of a name, as in {prefix}{example}")


def any_name_prints() -> None:
    """Whatever the locale: a name or a text that cannot be printed must not end a run."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def status_of(
    work: Callable[[], tuple[int, str]],
    left: str = "nothing was written",
    *,
    interrupted: str | None = None,
    failures: tuple[type[Exception], ...] = (OSError,),
) -> int:
    """Do it, print what came of it, and give the exit status.

    Args:
        work: gives its status and what is to be printed.
        left: what a failure leaves, in words; ``interrupted``: what an interrupt leaves, where that is something else.
        failures: what ends it with status 1; what the user can put right (ValueError, a path) ends it with 2.
    """
    any_name_prints()
    terminate = signal.signal(signal.SIGTERM, _interrupt)
    try:
        try:
            status, text = work()
        except (ValueError, FileExistsError, FileNotFoundError, PermissionError) as error:
            return complain(_words(error))
        except failures as error:
            complain(f"{_words(error)}; {left}")
            return ERROR
        print(text)  # outside: what cannot be printed does not mean that nothing was written
        return status
    except KeyboardInterrupt:
        print(f"interrupted; {interrupted or left}", file=sys.stderr)
        return INTERRUPTED
    finally:
        signal.signal(signal.SIGTERM, terminate)


def _words(error: Exception) -> str:
    """An error without the number that the system has for it."""
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return str(error)


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt
