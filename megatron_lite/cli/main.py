"""``megatron-lite SUBCOMMAND ...``: finds the subcommand and turns errors into one clear message.

A subcommand is a file of this package with ``run(argv) -> int``, imported only when it is asked for: ``--help`` imports
neither torch nor any of them. A :class:`ValueError` is the user's (configuration, input): its text is printed without a
traceback and the exit code is 2. Anything else is ours: traceback, exit code 1.
"""

from __future__ import annotations

import importlib
import importlib.util
import signal
import sys
from collections.abc import Sequence

from megatron_lite import __version__
from megatron_lite.config.exit_codes import CONFIGURATION, DONE, ERROR, MEANING

COMMANDS: dict[str, str] = {
    "train": "train a model (flags of Megatron-LM, or --config run.yaml)",
    "generate": "print text sampled from a checkpoint",
    "compare": "where two runs part: first differing step, settings, curves",
    "show-schedule": "draw a pipeline schedule",
    "data": "tokenize, clean, inspect, merge, split: all that is done to a corpus before training",
    "inspect": "what is in a checkpoint or a dataset",
    "doctor": "versions, devices, and which kernel each op runs on, and why",
    "check": "prove that a model computes the same numbers in every layout",
}

REQUIRED = ("torch", "numpy", "tyro", "yaml", "tqdm", "regex", "tokenizers", "orjson", "zstandard", "jinja2")  # imported without asking


def usage() -> str:
    """The text of ``--help``."""
    width = max(map(len, COMMANDS))
    commands = "\n".join(f"  {name:<{width}}  {what}" for name, what in COMMANDS.items())
    codes = "\n".join(f"  {code}  {what}" for code, what in MEANING.items())
    return (
        "usage: megatron-lite SUBCOMMAND [OPTIONS]\n\n"
        "Train transformers over tensor, pipeline and data parallelism; every layout computes the same numbers.\n\n"
        f"subcommands (each with --help):\n{commands}\n\n"
        f"exit codes:\n{codes}\n\n"
        "On several GPUs: torchrun --nproc-per-node 8 -m megatron_lite train ...\n"
    )


def module_of(command: str) -> str:
    """Module of a subcommand."""
    return f"megatron_lite.cli.{command.replace('-', '_')}"


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand; the result is the process's exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(usage(), end="")
        return DONE if arguments else CONFIGURATION
    if arguments[0] in ("-V", "--version"):
        print(f"megatron-lite {__version__}")
        return DONE
    command, rest = arguments[0], arguments[1:]
    if command not in COMMANDS:
        return _unknown(command)
    if importlib.util.find_spec(module_of(command)) is None:
        return complain(f"{command} is not in this version")
    try:
        return int(importlib.import_module(module_of(command)).run(rest))
    except ValueError as error:
        return complain(str(error))
    except ModuleNotFoundError as error:
        if error.name not in REQUIRED:
            raise
        return complain(
            f"the Python package {error.name} is missing in {sys.executable}: activate the environment that has it, "
            "or install this one (pip install -e .)"
        )
    except KeyboardInterrupt:  # once a run has started, its own handlers save first
        complain("interrupted")
        return 128 + signal.SIGINT
    except BrokenPipeError:  # the reader of our output is gone, as with `| head`
        sys.stderr.close()
        return ERROR


def complain(message: str) -> int:
    """Print a user's error; the exit code for it."""
    print(f"megatron-lite: error: {message}", file=sys.stderr, flush=True)
    return CONFIGURATION


def _unknown(command: str) -> int:
    from megatron_lite.config.problem import nearest_name

    nearest = nearest_name(command, COMMANDS)
    hint = f"did you mean {nearest}?" if nearest else f"known are {', '.join(COMMANDS)}"
    if command.startswith("--"):
        hint = f"flags follow a subcommand, as in: megatron-lite train {command} ..."
    return complain(f"unknown subcommand {command}: {hint}")


if __name__ == "__main__":
    sys.exit(main())
