"""How probable a trained model finds texts: bits per byte, for the perplexity filter of the cleaning pipeline.

One process, the whole model, one text after the other: what a text scores does not depend on those beside it, not even in
the rounding of a batch.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import torch

from megatron_lite.mesh.local import rank_info
from megatron_lite.text.tokenizer import tokenizer_of
from megatron_lite.train.inference import Generator
from megatron_lite.train.load_model import inference_config, load_model, open_checkpoint


class CheckpointScorer:
    """Scores texts with the newest checkpoint of a run, in fp32.

    Args:
        directory: ``--save`` of the run.

    Raises:
        ValueError: no checkpoint, or no tokenizer where the run found it.
    """

    def __init__(self, directory: Path) -> None:
        reader = open_checkpoint(directory)
        config = inference_config(reader.state["config"])
        self.tokenizer = tokenizer_of(config.data, config.model.vocab_size)
        self.window = config.data.seq_length
        torch.set_num_threads(1)  # workers are processes, one for each core
        mesh, runtime = load_model(config, rank_info({}), reader)
        self.generator = Generator(runtime, mesh)

    def bits(self, text: str) -> float:
        """Minus the binary logarithm of the text's probability after an end of document.

        Windows of the run's sequence length are scored each by itself, as the run saw them.
        """
        ids = np.array([self.tokenizer.eod_id, *self.tokenizer.encode(text)], dtype=np.int64)
        inputs, targets = ids[:-1], ids[1:]
        whole = len(inputs) // self.window * self.window
        nats = 0.0
        for rows, wanted in (
            (inputs[:whole].reshape(-1, self.window), targets[:whole].reshape(-1, self.window)),
            (inputs[None, whole:], targets[None, whole:]),
        ):
            if rows.size:
                logits = self.generator.logits(rows)
                assert logits is not None  # there is one stage
                chosen = torch.from_numpy(wanted).to(logits.device)[..., None]
                nats -= float(torch.log_softmax(logits.double(), -1).gather(-1, chosen).sum())
        return nats / math.log(2)
