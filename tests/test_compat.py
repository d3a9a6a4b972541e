"""``--compat megatron`` against a plain statement of Megatron-LM's formulas: three steps in fp64.

The program trains as it always does: flags, token files, ranks, buckets, checkpoints. What it is held against is written
out below in plain torch, one row after the other in one process, and takes from it only the initial weights and the
tokens of each sample. Documents see each other and positions run on, every target is trained (or none behind an
end-of-document token), the loss is the mean of the microbatches' means, the softmax runs over the padded vocabulary, whose
extra rows start at zero and are trained, and the update is Megatron-LM's Adam, clip and learning rate.
"""

from __future__ import annotations

import functools
import math
import re
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from train_toys import info_here, make_data, steps_of, tensors_of, train_here, trained
from whole_model import make_whole

from megatron_lite.config import exit_codes
from megatron_lite.config.load import load
from megatron_lite.data.batch import Row, make_batch
from megatron_lite.data.build import build_datasets
from megatron_lite.model.protocol import ForwardContext, load_definition
from megatron_lite.testing.equal import TOLERANCE, Mismatch, deviation
from megatron_lite.train.load_model import inference_config, load_model, open_checkpoint

STEPS, ROWS, S, EOD = 3, 8, 16, 60
H, LAYERS, HEADS, EPS = 32, 4, 4, 1e-5
LR, INIT_LR, MIN_LR, WARMUP, DECAY = 1e-2, 2e-3, 1e-3, 2 * ROWS, STEPS * ROWS
WEIGHT_DECAY, CLIP, BETA1, BETA2, ADAM_EPS = 0.1, 0.5, 0.9, 0.95, 1e-8

FLAGS = (
    f"--compat megatron --fp64 --num-layers {LAYERS} --hidden-size {H} --num-attention-heads {HEADS} --seq-length {S} "
    f"--max-position-embeddings {S} --attention-dropout 0 --hidden-dropout 0 "
    f"--init-method-std 0.1 --global-batch-size {ROWS} --train-iters {STEPS} --lr {LR} --lr-warmup-init {INIT_LR} "
    f"--min-lr {MIN_LR} --lr-warmup-iters 2 --lr-decay-style cosine --weight-decay {WEIGHT_DECAY} --clip-grad {CLIP} "
    f"--adam-beta1 {BETA1} --adam-beta2 {BETA2} --adam-eps {ADAM_EPS} --split 1,0,0 --eval-iters 0 --ddp-bucket-size 3000 "
    "--device cpu"
)
Weights = dict[str, torch.Tensor]
TABLES = ("embed.tokens.weight", "head.output.weight")  # over the vocabulary


@dataclass(frozen=True)
class Cell:
    """One run: ranks and flags of its layout, samples of a microbatch, rows of padding, whether EOD inputs train."""

    ranks: int = 1
    layout: str = ""
    micro_batch: int = 2
    multiple: int = 128
    eod_mask: bool = False
    untied: bool = False
    vocab: int = 61

    @property
    def padding(self) -> int:
        """Rows below the vocabulary, where tp is 1 or pads nothing."""
        return -self.vocab % self.multiple

    def flags(self, data: str) -> str:
        """The whole command line but for the directories."""
        its = f"--micro-batch-size {self.micro_batch} --make-vocab-size-divisible-by {self.multiple} {self.layout}"
        its += f" --vocab-size {self.vocab}"
        its += " --eod-mask-loss" * self.eod_mask + " --untie-embeddings-and-output-weights" * self.untied
        return f"{FLAGS} --data-path {data} {its}"

    def __str__(self) -> str:
        return self.layout.replace("--", "").replace("-model-parallel-size ", "") + (
            f" mbs{self.micro_batch} multiple{self.multiple}" + " eod" * self.eod_mask + " untied" * self.untied
        )


PP, TP = "--pipeline-model-parallel-size 2", "--tensor-model-parallel-size 2"
ZERO = "--use-distributed-optimizer --overlap-grad-reduce"
CELLS = [
    Cell(),
    Cell(micro_batch=1, multiple=8, eod_mask=True),
    Cell(untied=True),
    Cell(2, "", eod_mask=True),
    Cell(2, ZERO, multiple=8),
    Cell(2, PP, eod_mask=True),  # the tied table, padding included, is on both stages
    Cell(4, f"{PP} {ZERO}", micro_batch=1, eod_mask=True, untied=True),
    Cell(4, f"{PP} {ZERO}", eod_mask=True),
    Cell(2, f"{TP} --sequence-parallel", multiple=8, vocab=64),  # over tp equality is promised where nothing is padded
    Cell(4, f"{TP} {PP}", multiple=8, vocab=64, eod_mask=True),
]


# ---- Megatron-LM's formulas


def forward(w: Weights, tokens: torch.Tensor) -> torch.Tensor:
    """Logits [S, padded V] of one row of tokens [S]: a GPT-2 whose documents see each other."""
    hidden = w["embed.tokens.weight"][tokens] + w["embed.positions.weight"][: len(tokens)]
    causal = torch.ones(len(tokens), len(tokens), dtype=torch.bool).tril()
    for i in range(LAYERS):
        b = f"blocks.{i}."
        x = F.layer_norm(hidden, (H,), w[b + "attention_norm.weight"], w[b + "attention_norm.bias"], EPS)
        q, k, v = (
            F.linear(x, w[b + f"attention.{n}.weight"], w[b + f"attention.{n}.bias"]).view(-1, HEADS, H // HEADS)
            for n in ("query", "key", "value")
        )
        scores = torch.einsum("ihd,jhd->hij", q, k) / math.sqrt(H // HEADS)
        attended = torch.einsum("hij,jhd->ihd", scores.masked_fill(~causal, -math.inf).softmax(-1), v).reshape(-1, H)
        hidden = hidden + F.linear(attended, w[b + "attention.output.weight"], w[b + "attention.output.bias"])
        x = F.layer_norm(hidden, (H,), w[b + "mlp_norm.weight"], w[b + "mlp_norm.bias"], EPS)
        x = F.gelu(F.linear(x, w[b + "mlp.up.weight"], w[b + "mlp.up.bias"]), approximate="tanh")
        hidden = hidden + F.linear(x, w[b + "mlp.down.weight"], w[b + "mlp.down.bias"])
    hidden = F.layer_norm(hidden, (H,), w["head.norm.weight"], w["head.norm.bias"], EPS)
    return hidden @ w.get("head.output.weight", w["embed.tokens.weight"]).T


def microbatch_mean(w: Weights, rows: torch.Tensor, eod_mask: bool) -> torch.Tensor:
    """Mean over the trained targets of a microbatch of rows [B, S + 1]."""
    losses, masks = [], []
    for row in rows:
        losses.append(F.cross_entropy(forward(w, row[:-1]), row[1:], reduction="none"))
        masks.append((row[:-1] != EOD) if eod_mask else torch.ones(S, dtype=torch.bool))
    loss, mask = torch.cat(losses), torch.cat(masks).double()
    return (loss * mask).sum() / mask.sum().clamp(min=1)


def learning_rate(samples: int) -> float:
    """Of the update before which ``samples`` samples were trained."""
    if samples <= WARMUP:
        return INIT_LR + (LR - INIT_LR) * samples / WARMUP
    ratio = (samples - WARMUP) / (DECAY - WARMUP)
    return MIN_LR + (LR - MIN_LR) * 0.5 * (1 + math.cos(math.pi * ratio))


@dataclass
class Plain:
    """Losses, gradient norms and learning rates of the steps, and what is left after them."""

    losses: list[float]
    norms: list[float]
    rates: list[float]
    weights: Weights
    moments: tuple[Weights, Weights]


def plain_training(start: Weights, rows: torch.Tensor, cell: Cell) -> Plain:
    """Three steps."""
    w = {name: value.clone().requires_grad_() for name, value in start.items()}
    first = {name: torch.zeros_like(value) for name, value in start.items()}
    second = {name: torch.zeros_like(value) for name, value in start.items()}
    out = Plain([], [], [], {}, (first, second))
    for step in range(STEPS):
        batch = rows[step * ROWS : (step + 1) * ROWS].split(cell.micro_batch)  # of one data-parallel rank after another
        loss = torch.stack([microbatch_mean(w, micro, cell.eod_mask) for micro in batch]).mean()
        gradients = dict(zip(w, torch.autograd.grad(loss, list(w.values())), strict=True))
        norm = math.sqrt(sum(float(g.square().sum()) for g in gradients.values()))
        factor = min(1.0, CLIP / (norm + 1e-6))
        lr = learning_rate(step * ROWS)
        with torch.no_grad():
            for name, p in w.items():
                g = gradients[name] * factor
                m, v = first[name], second[name]
                m.mul_(BETA1).add_(g, alpha=1 - BETA1)
                v.mul_(BETA2).addcmul_(g, g, value=1 - BETA2)
                m_hat, v_hat = m / (1 - BETA1 ** (step + 1)), v / (1 - BETA2 ** (step + 1))
                decay = WEIGHT_DECAY if p.ndim > 1 else 0.0
                p.sub_(lr * (m_hat / (v_hat.sqrt() + ADAM_EPS) + decay * p))
        out.losses.append(float(loss.detach()))
        out.norms.append(norm)
        out.rates.append(lr)
    out.weights = {name: value.detach() for name, value in w.items()}
    return out


# ---- the comparison


def rows_of(data: str, flags: str) -> torch.Tensor:
    """The tokens of the run's samples in their order, [samples, S + 1]."""
    config = load(shlex.split(flags)).config
    assert config.data.sample_order == "megatron" and not config.data.document_mask
    found = build_datasets(
        config.data, asked=(STEPS * ROWS, 0, 0), seed=config.training.seed, vocab_size=None, eod_id=EOD
    )
    assert not found.problems and found.train is not None
    rows = [found.train.row(j) for j in range(STEPS * ROWS)]
    tokens = torch.stack([torch.from_numpy(row.tokens.astype("int64")) for row in rows])
    assert (tokens == EOD).any(1).float().mean() > 0.5  # borders of documents are in most rows
    return tokens


def initial_weights(flags: str, cell: Cell) -> Weights:
    """Ours, with rows of zeros below the vocabulary."""
    config = load(shlex.split(flags)).config
    whole = make_whole(load_definition(config.architecture), config.model, seed=config.training.seed)
    found = {name: p.detach().clone() for name, p in whole.by_name.items()}
    return {n: F.pad(t, (0, 0, 0, cell.padding)) if n in TABLES else t for n, t in found.items()}


def with_padding(tensors: dict[tuple[str, str], torch.Tensor], kind: str) -> Weights:
    """A checkpoint's tensors of one kind, each with the rows of its ``.padding`` below it."""
    found = {name: t for (its, name), t in tensors.items() if its == kind}
    padding = {name.removesuffix(".padding"): found.pop(name) for name in list(found) if name.endswith(".padding")}
    return {name: torch.cat([t, padding[name]]) if name in padding else t for name, t in found.items()}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_data(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def plain(data: str) -> Iterator[Callable[[Cell], Plain]]:
    """The plain statement's run for a cell; layouts share one."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)

    @functools.cache
    def compute(cell: Cell) -> Plain:
        flags = cell.flags(data)
        return plain_training(initial_weights(flags, cell), rows_of(data, flags), cell)

    yield lambda cell: compute(replace(cell, ranks=1, layout=""))
    torch.set_num_threads(threads)


def differences(folder: Path, want: Plain) -> list[str]:
    """What of a run is not the plain statement's."""
    steps, tensors, found = steps_of(folder), tensors_of(folder, STEPS), []
    for name, values in (("loss", want.losses), ("grad_norm", want.norms), ("learning_rate", want.rates)):
        got = [steps[s][name] for s in range(1, STEPS + 1)]
        if not all(abs(x - y) <= TOLERANCE * abs(y) for x, y in zip(got, values, strict=True)):
            found.append(f"{name}: {got}, not {values}")
    for kind, expected in (("weight", want.weights), ("exp_avg", want.moments[0]), ("exp_avg_sq", want.moments[1])):
        got = {n: t.numpy() for n, t in with_padding(tensors, kind).items()}
        try:
            deviation(got, {n: t.numpy() for n, t in expected.items()}, kind)
        except Mismatch as mismatch:
            found.append(str(mismatch))
    return found


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_three_steps_are_megatrons(cell: Cell, data: str, tmp_path: Path, plain: Callable[[Cell], Plain]) -> None:
    trained(cell.ranks, f"{cell.flags(data)} --save {tmp_path}")
    assert not differences(tmp_path, plain(cell))


@pytest.mark.parametrize(
    "ours",
    [
        "--document-mask on",
        "--loss-normalization token",
        "--mask-padded-vocab on",
        "--sample-order windows",
        "--clip-grad 0.4",
        "--lr-warmup-init 0.0021",
        "--adam-eps 1e-7",
        "--weight-decay 0.11",
    ],
)
def test_each_formula_counts(ours: str, data: str, tmp_path: Path, plain: Callable[[Cell], Plain]) -> None:
    """One flag changed: another run than the plain statement's."""
    cell = Cell(multiple=8, eod_mask=True)
    outcome = train_here(f"{cell.flags(data)} {ours} --save {tmp_path}")
    assert outcome.code == 0 and differences(tmp_path, plain(cell))


def test_padding_starts_at_zero_is_trained_and_stored(
    data: str, tmp_path: Path, plain: Callable[[Cell], Plain]
) -> None:
    """Its gradient is the softmax's alone; it goes through a checkpoint into other layouts, not into another tp."""
    cell = Cell(untied=True)
    flags = f"{cell.flags(data)} --save {tmp_path}"
    assert train_here(f"{flags} --exit-interval 2").code == exit_codes.LIMIT
    stored = tensors_of(tmp_path, 2)
    assert {n for _, n in stored if n.endswith(".padding")} == {f"{n}.padding" for n in TABLES}
    assert stored["weight", "head.output.weight.padding"].shape == (cell.padding, H)
    assert stored["weight", "head.output.weight.padding"].abs().max() > 1e-4
    assert not stored["weight", "embed.tokens.weight.padding"].any()  # no id looks these rows up
    for wrong, words in (
        (TP, r"embed.tokens.weight.padding: \[67, 32\] in the checkpoint, \[195, 32\] in the model"),
        ("--mask-padded-vocab on", "embed.tokens.weight.padding"),
    ):
        outcome = trained(2, f"{flags} {wrong} --load {tmp_path}")[0]
        assert outcome.code == exit_codes.CONFIGURATION and re.search(words, outcome.error), outcome
    trained(4, f"{flags} {PP} {ZERO} --micro-batch-size 1 --load {tmp_path}")
    assert not differences(tmp_path, plain(cell))


def test_a_checkpoint_with_padding_gives_the_same_logits(
    data: str, tmp_path: Path, plain: Callable[[Cell], Plain]
) -> None:
    cell = Cell(multiple=8)
    assert train_here(f"{cell.flags(data)} --save {tmp_path}").code == 0
    reader = open_checkpoint(tmp_path)
    mesh, runtime = load_model(inference_config(reader.state["config"], dtype="fp64"), info_here(), reader)
    tokens = torch.arange(S) * 7 % cell.vocab
    rows = [Row(torch.cat([tokens, tokens[:1]]).numpy(), np.zeros(1, dtype=np.int64), 0)]
    got = runtime.infer(ForwardContext(make_batch(rows)))
    torch.testing.assert_close(got, forward(plain(cell).weights, tokens)[:, : cell.vocab], rtol=0, atol=1e-11)
    mesh.close()
