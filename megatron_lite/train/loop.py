"""The training program of one rank, from its configuration to its exit code.

Joining the job, the guard that ends all ranks when one fails, and the code with which each way to end leaves the
process (:mod:`megatron_lite.config.exit_codes`). What is built is in :mod:`megatron_lite.train.build`, the run itself in
:mod:`megatron_lite.train.training`.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Mapping
from typing import Any

from megatron_lite.checkpoint.save import SaveError
from megatron_lite.config import exit_codes
from megatron_lite.config.schema import RunConfig
from megatron_lite.mesh.local import RankInfo, leave, start
from megatron_lite.train.build import backend_of, build
from megatron_lite.train.guard import Guard, Store
from megatron_lite.train.nonfinite import NonFiniteError
from megatron_lite.train.signals import SignalRequests
from megatron_lite.train.training import Training, UserError

__all__ = ["backend_of", "train"]


def train(
    config: RunConfig[Any],
    info: RankInfo,
    *,
    environment: Mapping[str, str] | None = None,
    hang_seconds: float | None = None,
) -> int:
    """Run the whole training of this rank; returns its exit code.

    Args:
        config, info: what to run, and which rank this is.
        environment: variables of other libraries that we set, for run.json.
        hang_seconds: how long a rank may give no sign of life; None: ``--distributed-timeout-minutes``.
    """
    began = time.monotonic()
    minutes = config.parallel.distributed_timeout_minutes
    guards: list[Guard] = []

    def watch(store: Store | None) -> None:
        guards.append(Guard(info, store, hang_seconds or 60.0 * minutes))
        guards[0].start()

    parent = os.getppid()
    backend = backend_of(config)
    # The watchdog is to speak first, so that a hang ends with a place instead of a back end's timeout.
    store = start(info, backend, 2.0 * minutes, os.environ, met=watch)
    if not guards:
        watch(store)
    guard = guards[0]
    signals = requests(config, guard)
    signals.install()
    closing = contextlib.ExitStack()
    try:
        built = build(config, info, backend, guard, closing, dict(environment or {}))
        code = Training(config, info, built, guard, signals, parent=parent, began=began).run()
    except BaseException as error:  # whatever it is, the other ranks must hear of it
        code = guard.fail(error, code_of(error))
        sys.stdout.flush()
        sys.stderr.flush()
        if info.world_size > 1:
            os._exit(code)  # communicators whose peers are gone may wait for them when they are torn down
        return code
    finally:
        signals.restore()
        closing.close()  # last, since a thread that reads from a dead disk would keep an error waiting
    guard.stop()
    if store is not None:
        leave()
    return code


def requests(config: RunConfig[Any], guard: Guard) -> SignalRequests:
    """The signals that a run takes note of, from its start on."""
    training = config.training
    return SignalRequests(
        training.exit_signals, training.save_signals, lambda name: guard.leave(f"{name} came again: exit at once")
    )


def code_of(error: BaseException) -> int:
    """The exit code of an error that ends a run."""
    if isinstance(error, SaveError):
        return exit_codes.SAVE_FAILED
    if isinstance(error, NonFiniteError):
        return exit_codes.NON_FINITE
    if isinstance(error, UserError | ValueError):
        return exit_codes.CONFIGURATION
    return exit_codes.ERROR
