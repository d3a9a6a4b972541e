"""How a process of ours ends, as a number.

These are the codes of a rank's process and of our scripts that check before they start ``torchrun``. Under torchrun
the launcher's own code is 1 whatever a rank's was; the rank's code and error stand in torchrun's summary.
"""

from __future__ import annotations

DONE = 0
ERROR = 1  # anything that has no code of its own
CONFIGURATION = 2  # configuration or input
NON_FINITE = 3  # the loss or a gradient is not finite, and --on-nan says stop
HANG = 4  # found by the watchdog
SAVE_FAILED = 5
SIGNAL = 6  # stopped by a signal, after saving
LIMIT = 7  # stopped by --exit-duration-in-mins or --exit-interval
WAITING = 8  # data clean: other parts are not there yet; the same command goes on later

MEANING: dict[int, str] = {
    DONE: "done",
    ERROR: "any other error",
    CONFIGURATION: "configuration or input",
    NON_FINITE: "a number that is not finite",
    HANG: "a hang found by the watchdog",
    SAVE_FAILED: "a save failed",
    SIGNAL: "stopped by a signal after saving",
    LIMIT: "stopped by --exit-duration-in-mins or --exit-interval",
    WAITING: "other parts are not there yet",
}
