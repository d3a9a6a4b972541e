"""``megatron-lite data index FLAGS``: what the start of a run would compute and copy, ahead of it.

FLAGS are those of ``megatron-lite train``. The orders of samples go to ``--data-cache-path``, copies to ``--stage-dir``,
and all checks of the data are made; no model is built, and nothing is trained. On a cluster a job of one process saves
the first start that work, or each node a copy.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from megatron_lite.cli.train import read, with_vocabulary
from megatron_lite.config.check import check_files, require
from megatron_lite.config.check_io import data_problems
from megatron_lite.config.exit_codes import DONE
from megatron_lite.config.problem import ConfigError, Problem


def run(argv: Sequence[str]) -> int:
    """The subcommand."""
    if not argv or "--help" in argv or "-h" in argv:
        print(f"usage: megatron-lite data index FLAGS OF A RUN\n\n{__doc__}", end="")
        return DONE
    began = time.monotonic()
    loaded = read(argv)
    config, found = with_vocabulary(loaded.config)
    found += [*loaded.problems, *check_files(config), *data_problems(config)]
    if config.training.global_batch_size is None:
        rule = "the order depends on the number of samples, and that on the steps times the global batch"
        found.append(Problem("data index needs --global-batch-size", rule=rule))
    if not (config.data.data_cache_path or config.data.stage_dir):
        rule = "there is nowhere to keep what is computed or copied"
        found.append(Problem("data index without --data-cache-path and --stage-dir", rule=rule))
    require(list(dict.fromkeys(found)))
    from megatron_lite.optim import from_config
    from megatron_lite.train.datasets import find_data, tokenizer_of_run

    try:
        batch = from_config.batch_schedule(config.training, config.data.seq_length, 1)
        steps, samples = from_config.training_length(config.training, batch)
    except ValueError as error:
        raise ConfigError([Problem(str(error))]) from error
    data = find_data(config, batch, steps, samples, tokenizer_of_run(config))
    print("\n".join([*data.summary, *data.notices, f"ready after {time.monotonic() - began:.1f} s"]))
    return DONE
