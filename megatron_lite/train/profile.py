"""Profiler traces of a few steps on chosen ranks (``--profile``), written where the run logs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from megatron_lite.config.schema_io import LoggingConfig


class Profiler:
    """Starts before step ``profile_step_start`` and writes ``trace-rankN.json`` before step ``profile_step_end``."""

    def __init__(self, options: LoggingConfig, rank: int, log_dir: Path) -> None:
        self._options, self._path = options, log_dir / f"trace-rank{rank:05d}.json"
        self._wanted = options.profile and rank in options.profile_ranks
        self._profile: Any = None

    def begin(self, step: int) -> None:
        """Before the step that follows ``step`` finished ones."""
        if self._wanted and self._profile is None and step == self._options.profile_step_start:
            self._profile = torch.profiler.profile()
            self._profile.__enter__()

    def end(self, step: int) -> None:
        """After that step."""
        if self._profile is not None and step + 1 >= self._options.profile_step_end:
            self.close()

    def close(self) -> None:
        """Write what was recorded so far: the run may end before the last profiled step."""
        if self._profile is None:
            return
        self._profile.__exit__(None, None, None)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._profile.export_chrome_trace(str(self._path))
        self._profile = None
        self._wanted = False
