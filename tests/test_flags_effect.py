"""For each implemented flag, one observable that it changes.

A :class:`Case` runs a part of what the program runs (the model, the schedules, the layout, the tokenizer, ...) with and
without the flag and compares what comes out. A :class:`RunCase` does so with a whole training run of a tiny model: its
numbers, files, exit code, and what ranks sent each other. A flag that has none of both fails, so no new field can be
without effect unnoticed.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import shlex
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from flag_toys import RUN, Finished, finish, make_places
from train_toys import info_here
from whole_model import enlarge, make_whole, random_batch

from megatron_lite.cli.environment import variables
from megatron_lite.config import exit_codes, flags
from megatron_lite.config.derived import bucket_parameters
from megatron_lite.config.load import changed, load
from megatron_lite.config.schema import RunConfig
from megatron_lite.config.transformer import TransformerConfig
from megatron_lite.data.stage_dir import open_access
from megatron_lite.mesh.layout import Layout, layout_for
from megatron_lite.mesh.mesh import ProcessMesh
from megatron_lite.model.protocol import load_definition
from megatron_lite.optim import from_config
from megatron_lite.pipeline.partition import partition
from megatron_lite.testing.layouts import Batches
from megatron_lite.train import loop
from megatron_lite.train.assemble import assemble, recompute
from megatron_lite.train.build import backend_of
from megatron_lite.train.datasets import tokenizer_of_run
from megatron_lite.train.signals import SignalRequests
from megatron_lite.train.step import HostNumbers

Config = RunConfig[Any]
Observe = Callable[[Config], Any]
BASE = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --vocab-size 61 --seq-length 16 --lr 0.01"
LONG = f"{BASE} --max-position-embeddings 16 --train-iters 100 --global-batch-size 16"


@dataclass(frozen=True)
class Case:
    """``flag`` (with values, as typed) added to ``base`` changes what ``observe`` returns."""

    typed: str
    observe: Observe
    base: str = LONG


def loss(config: Config) -> float:
    """Training loss of the model on a fixed batch, with enlarged weights so that every part counts."""
    model = enlarge(make_whole(load_definition(config.architecture), config.model))
    batch = random_batch(config.data.seq_length, [[0], [0, 5]])
    with torch.no_grad():
        return float(model.loss(batch, seed=config.training.seed, step=0, training=True))


def specs(config: Config) -> Any:
    """Names, shapes, initial values and decay of every parameter."""
    model = make_whole(load_definition(config.architecture), config.model)
    return {n: (p.spec.full_shape, p.spec.init, p.spec.decay) for n, p in model.by_name.items()}  # type: ignore[union-attr]


def two_steps(config: Config) -> Any:
    """(loss, gradient norm) of two optimizer steps on one process, and the weights and their dtype after them.

    The second microbatch of each step has fewer valid targets than the first.
    """
    mesh = ProcessMesh.open(Layout())
    assembly = assemble(config, mesh)
    reports = []
    for step in range(2):
        micro = [random_batch(16, [[0, 5]], seed=10 * step), random_batch(16, [[0]], seed=10 * step + 1, first_row=1)]
        mask = micro[1].loss_mask.clone()
        mask[:12] = 0
        micro[1] = dataclasses.replace(micro[1], loss_mask=mask, valid_tokens=int(mask.sum()))
        report = assembly.step.run(
            Batches(micro, digest=step, valid_tokens=sum(b.valid_tokens for b in micro)),
            seed=config.training.seed,
            step=step,
            loss_scale=1.0,
            update=step + 1,
            learning_rates={"": 0.01},
            weight_decay=config.optimizer.weight_decay,
            host=HostNumbers(0, False, 0.0, 0.0),
        )
        reports.append((report.loss, report.grad_norm))
    weights = {name: (p.dtype, p.double().sum().item()) for name, p in assembly.stage.parameters_by_name().items()}
    assembly.gradients.close()
    mesh.close()
    return reports, weights


def stages(config: Config) -> list[range]:
    """The blocks of each of two stages, all blocks alike."""
    parallel = config.parallel
    first, last = parallel.decoder_first_pipeline_num_layers, parallel.decoder_last_pipeline_num_layers
    return partition([1.0] * config.model.num_layers, 2, first=first, last=last)


def padded_vocabulary(config: Config) -> int:
    from megatron_lite.mesh.collectives import Axis
    from megatron_lite.tensor.spec import TensorParallel

    multiple = config.model.make_vocab_size_divisible_by
    return TensorParallel(Axis.single("tp"), vocab_multiple=multiple).padded_vocab(config.model.vocab_size)


def batch_sizes(config: Config) -> Any:
    """(phases of the global batch, length of the training, problems) at dp 2."""
    layout = layout_for(2)
    batch = from_config.batch_schedule(config.training, config.data.seq_length, layout.dp)
    length = from_config.training_length(config.training, batch)
    return batch.phases, length, from_config.problems(config, layout)


def rates(config: Config) -> Any:
    """Learning rates and weight decay over the training."""
    batch = from_config.batch_schedule(config.training, config.data.seq_length, 1)
    of_run = from_config.rates(config.training, config.optimizer, batch)
    points = range(0, 1700, 40)
    return [(of_run.learning_rates(s), of_run.weight_decay.at(s)) for s in points]


def scale(config: Config) -> Any:
    """The loss scaler."""
    return from_config.loss_scaler(config.training, config.optimizer)


def layout(config: Config) -> Any:
    """The layout of 8 ranks."""
    tp, pp = config.parallel.tensor_model_parallel_size, config.parallel.pipeline_model_parallel_size
    return layout_for(8, tp=tp, pp=pp)


def tokens(config: Config) -> Any:
    """Ids of a text that tells tokenizers apart, and the id that ends a document."""
    tokenizer = tokenizer_of_run(config)
    assert tokenizer is not None
    text = "hello 1234 aB" if config.data.tokenizer_type != "GPT2BPETokenizer" else "abcab"
    return tokenizer.encode(text), tokenizer.eod_id


def patience(config: Config) -> Any:
    """Minutes that a start may take, and seconds after which the watchdog speaks."""
    told: list[float] = []
    with (
        mock.patch.object(loop, "start", lambda info, backend, minutes, *_, **__: told.append(minutes)),
        mock.patch.object(loop, "Guard", lambda info, store, seconds, *_: told.append(seconds) or mock.Mock()),
        mock.patch.object(loop, "build", mock.Mock(side_effect=ValueError("far enough"))),
    ):
        loop.train(config, info_here())
    return told


def on_signals(name: str) -> Observe:
    """What a signal asks of a run."""

    def observe(config: Config) -> Any:
        number = getattr(signal, f"SIG{name}")
        before = signal.signal(number, signal.SIG_IGN)
        requests = SignalRequests(config.training.exit_signals, config.training.save_signals)
        requests.install()
        try:
            os.kill(os.getpid(), number)
            return requests.stop, requests.save
        finally:
            requests.restore()
            signal.signal(number, before)

    return observe


ROPE = f"{LONG} --position-embedding-type rope"
SCALED = f"{ROPE} --use-rope-scaling --rope-scaling-original-max-position-embeddings 8 --rope-scaling-factor 4"
GQA = f"{LONG} --group-query-attention --num-query-groups 2"
FP16 = f"{LONG} --fp16"
WSD = f"{LONG} --lr-decay-style WSD --lr-wsd-decay-iters 20"
SAMPLES = f"{BASE} --max-position-embeddings 16 --train-samples 1600 --global-batch-size 16"
SAMPLES_WSD = f"{SAMPLES} --lr-decay-style WSD --lr-wsd-decay-samples 320"
STEPS = f"{LONG} --fp64 --attention-dropout 0 --hidden-dropout 0"
RAMP_WD = f"{LONG} --weight-decay-incr-style linear"

SENTENCE_PIECE = "--tokenizer-type SentencePieceTokenizer"
TIKTOKEN = "--tokenizer-type TikTokenizer --vocab-size 1300 --tiktoken-pattern v2"
GPT2 = f"{LONG} --tokenizer-type GPT2BPETokenizer --vocab-file {{vocab}} --merge-file {{merges}}"

CASES: list[Case] = [
    # model
    Case("--model llama", specs),
    Case("--num-layers 3", specs),
    Case("--hidden-size 64", specs),
    Case("--num-attention-heads 2", loss),
    Case("--ffn-hidden-size 100", specs),
    Case("--group-query-attention", specs),
    Case("--num-query-groups 4", specs, GQA),
    Case("--kv-channels 16", specs),
    Case("--vocab-size 70", specs),
    Case("--make-vocab-size-divisible-by 100", padded_vocabulary),
    Case("--max-position-embeddings 32", specs),
    Case("--position-embedding-type rope", loss),
    Case("--rotary-base 100", loss, ROPE),
    Case("--rotary-percent 0.5", loss, ROPE),
    Case("--use-rope-scaling", loss, ROPE + " --rope-scaling-original-max-position-embeddings 8"),
    Case("--rope-scaling-factor 16", loss, SCALED),
    Case("--rope-scaling-low-freq-factor 0.2", loss, SCALED),
    Case("--rope-scaling-high-freq-factor 9", loss, SCALED),
    Case("--rope-scaling-original-max-position-embeddings 64", loss, SCALED),
    Case("--normalization RMSNorm", loss),
    Case("--norm-epsilon 0.1", loss),
    Case("--apply-layernorm-1p", specs),
    Case("--qk-layernorm", specs),
    Case("--swiglu", specs),
    Case("--squared-relu", loss),
    Case("--no-add-bias-linear", specs),
    Case("--add-qkv-bias", specs, f"{LONG} --no-add-bias-linear"),
    Case("--untie-embeddings-and-output-weights", specs),
    Case("--attention-dropout 0.5", loss),
    Case("--hidden-dropout 0.5", loss),
    Case("--init-method-std 0.1", specs),
    Case("--label-smoothing 0.1", loss),
    Case("--no-weight-decay-patterns *.query.weight", specs),
    # parallel
    Case("--tensor-model-parallel-size 2", layout),
    Case("--pipeline-model-parallel-size 2", layout),
    Case("--decoder-first-pipeline-num-layers 1", stages, f"{LONG} --num-layers 6"),
    Case("--decoder-last-pipeline-num-layers 1", stages, f"{LONG} --num-layers 6"),
    Case("--ddp-bucket-size 1000", lambda c: bucket_parameters(c.parallel, 2)),
    Case("--device cpu", lambda c: variables(c, gpu=True)),
    Case("--distributed-backend nccl", backend_of, f"{LONG} --device cpu"),
    Case("--distributed-timeout-minutes 3", patience),
    # training
    Case("--micro-batch-size 16", batch_sizes),
    Case("--global-batch-size 32", batch_sizes),
    Case("--rampup-batch-size 8 8 160", batch_sizes),
    Case('--step-batch-size-schedule "0:8 1K:16"', batch_sizes),
    Case("--train-iters 50", batch_sizes),
    Case("--train-samples 3200", batch_sizes, SAMPLES),
    Case("--seed 7", loss),
    Case("--bf16", two_steps),
    Case("--fp16", scale),
    Case("--fp64", two_steps),
    Case("--deterministic", lambda c: variables(c, gpu=True)),
    Case("--exit-signals USR1", on_signals("INT")),
    Case("--save-signals USR2 HUP", on_signals("HUP")),
    Case("--compat megatron", lambda c: {k: v for k, v in changed(c).items() if k[1] != "compat"}),
    Case("--loss-normalization microbatch", two_steps),
    Case("--mask-padded-vocab off", two_steps),
    Case("--recompute-granularity full", recompute),
    Case("--recompute-method block", recompute, f"{LONG} --recompute-granularity full"),
    Case("--recompute-num-layers 2", recompute, f"{LONG} --recompute-granularity full"),
    # optimizer
    Case("--clip-grad 0.001", two_steps, STEPS),
    Case("--clip-grad-value 0.0001", two_steps, STEPS),
    Case("--adam-beta1 0.5", two_steps, STEPS),
    Case("--adam-beta2 0.5", two_steps, STEPS),
    Case("--adam-eps 0.1", two_steps, STEPS),
    Case("--lr 0.02", rates),
    Case("--min-lr 0.001", rates),
    Case("--decoupled-lr 0.1", rates),
    Case("--decoupled-min-lr 0.05", rates, f"{LONG} --decoupled-lr 0.1"),
    Case("--lr-decay-style cosine", rates),
    Case("--lr-decay-iters 50", rates),
    Case("--lr-decay-samples 800", rates, SAMPLES),
    Case("--lr-warmup-iters 10", rates),
    Case("--lr-warmup-samples 160", rates, SAMPLES),
    Case("--lr-warmup-fraction 0.1", rates),
    Case("--lr-warmup-init 0.005", rates, f"{LONG} --lr-warmup-iters 10"),
    Case("--lr-wsd-decay-style linear", rates, WSD),
    Case("--lr-wsd-decay-iters 40", rates, WSD),
    Case("--lr-wsd-decay-samples 640", rates, SAMPLES_WSD),
    Case("--lr-scaling-rule sqrt", rates, f"{LONG} --lr-scaling-base-batch 4"),
    Case("--lr-scaling-base-batch 4", rates, f"{LONG} --lr-scaling-rule linear --lr-scaling-base-batch 8"),
    Case("--weight-decay 0.1", rates),
    Case("--start-weight-decay 0", rates, f"{RAMP_WD} --weight-decay 0.1"),
    Case("--end-weight-decay 0.5", rates, RAMP_WD),
    Case("--weight-decay-incr-style cosine", rates, f"{RAMP_WD} --start-weight-decay 0 --end-weight-decay 0.1"),
    Case("--loss-scale 1024", scale, FP16),
    Case("--initial-loss-scale 1024", scale, FP16),
    Case("--min-loss-scale 8", scale, FP16),
    Case("--loss-scale-window 10", scale, FP16),
    Case("--hysteresis 5", scale, FP16),
    # data
    Case("--seq-length 8", loss),
    Case("--remote-cache-gib 2", lambda c: open_access(c.data)[0].cache_bytes),
    Case("--tokenizer-type Llama2Tokenizer", tokens, f"{LONG} {SENTENCE_PIECE} --tokenizer-model {{sp}}"),
    Case("--tokenizer-model {sp2}", tokens, f"{LONG} {SENTENCE_PIECE} --tokenizer-model {{sp}}"),
    Case("--tiktoken-pattern v1", tokens, f"{LONG} {TIKTOKEN} --tokenizer-model {{tik}}"),
    Case("--vocab-file {vocab2}", tokens, GPT2),
    Case("--merge-file {merges2}", tokens, GPT2),
    Case("--eod-token <eod>", tokens, GPT2),
]

TP, PP = "--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2"
DATA = f"{RUN} --data-path {{data}}"
EVERY = "--eval-iters 1 --eval-interval 2"
EVAL = f"{DATA} {EVERY}"
SAVE = f"{DATA} --save {{scratch}}/save"
LOAD = f"{DATA} --load {{checkpoint}} --train-iters 6 --lr-decay-iters 4"
BOARD = f"{DATA} --log-interval 1 --tensorboard-dir {{scratch}}/board"
WANDB = f"{DATA} --wandb-project mine"
PROFILED = "--profile-step-start 1 --profile-step-end 3"


def inside(name: str) -> Callable[[Finished], Any]:
    """What was seen inside the run."""
    return lambda done: done.inside[name]


def losses(done: Finished) -> list[float]:
    return done.losses


def evaluations(done: Finished) -> list[tuple[int, str, float]]:
    return done.evaluations


def saved(done: Finished) -> list[str]:
    return done.saved


def board(done: Finished) -> set[str]:
    return done.board


def first_step(done: Finished) -> int:
    return min(done.steps, default=0)  # none where the checkpoint is of the last step


def keys(done: Finished) -> set[str]:
    """Names of the numbers of a step."""
    return set(done.steps[1])


def rates_of(done: Finished) -> list[float]:
    """Learning rates."""
    return [record["learning_rate"] for record in done.steps.values()]


@dataclass(frozen=True)
class RunCase:
    """``flag`` (with values, as typed) added to ``base`` changes what is ``seen`` of a whole run.

    ``{name}`` in the text stands for a place of :func:`flag_toys.make_places`; steps in ``bad`` are not finite; with the flag
    the run ends with ``code``.
    """

    typed: str
    seen: Callable[[Finished], Any]
    base: str = DATA
    ranks: int = 1
    bad: tuple[int, ...] = ()
    code: int = exit_codes.DONE


RUNS: list[RunCase] = [
    # parallel
    RunCase("--sequence-parallel", inside("traffic"), f"{DATA} {TP}", ranks=2),
    RunCase("--zero-stage 1", inside("memory"), ranks=2),
    RunCase("--pipeline-schedule gpipe", inside("schedules"), f"{DATA} {PP}", ranks=2),
    RunCase("--overlap-grad-reduce", inside("early buckets"), ranks=2),
    # training
    RunCase("--manual-gc", inside("collections"), EVAL),
    RunCase("--manual-gc-interval 1", inside("collections"), f"{DATA} --manual-gc"),
    RunCase("--on-nan skip", lambda r: (r.code, len(r.steps)), bad=(2,)),
    RunCase("--exit-interval 2", lambda r: (r.code, len(r.steps)), code=exit_codes.LIMIT),
    RunCase("--exit-duration-in-mins 0.0000001", lambda r: (r.code, len(r.steps)), code=exit_codes.LIMIT),
    RunCase("--check-weight-hash-across-dp-replicas-interval 2", inside("replica checks")),
    RunCase("--grad-reduce-in-bf16", inside("traffic"), ranks=2),
    # data
    RunCase("--data-path {other}", losses),
    RunCase("--train-data-path {other}", losses, f"{RUN} --train-data-path {{data}}"),
    RunCase("--valid-data-path {other}", evaluations, f"{RUN} {EVERY} --train-data-path {{data}}"),
    RunCase("--test-data-path {other}", evaluations, f"{RUN} {EVERY} --train-data-path {{data}}"),
    RunCase("--split 1,0,0", evaluations, EVAL),
    RunCase("--blend-temperature 9", losses, f"{RUN} --data-path 9 {{data}} 1 {{other}}"),
    RunCase("--curriculum {curriculum}", losses),
    RunCase("--transform flag_toys:turned", losses),
    RunCase("--mock-data", losses),
    RunCase("--sample-order megatron", losses),
    RunCase("--packing best-fit", losses),
    RunCase("--document-mask off", losses),
    RunCase("--eod-mask-loss", losses, f"{DATA} --document-mask off"),
    RunCase("--num-workers 0", inside("workers")),
    RunCase("--data-access pread", inside("mapped")),
    RunCase("--data-cache-path {scratch}/cache", lambda r: r.files, f"{DATA} --sample-order megatron"),
    RunCase("--stage-dir {scratch}/stage", lambda r: r.files),
    RunCase("--chat-template {template}", lambda r: r.code, f"{RUN} --data-path {{chat}} --split 1,0,0"),
    RunCase("--prefetch-mib 1", inside("bytes ahead")),
    RunCase("--no-pin-memory", inside("pinned")),
    # evaluation
    RunCase("--eval-interval 1", evaluations, EVAL),
    RunCase("--eval-iters 2", evaluations, EVAL),
    RunCase("--skip-train", lambda r: (len(r.steps), len(r.evaluations)), EVAL),
    # checkpoints
    RunCase("--save {scratch}/save", saved),
    RunCase("--save-interval 2", saved, SAVE),
    RunCase("--save-interval-minutes 0.0000001", saved, SAVE),
    RunCase("--keep-last 1", saved, f"{SAVE} --save-interval 1"),
    RunCase("--keep-every 2", saved, f"{SAVE} --save-interval 1 --keep-last 1"),
    RunCase("--no-save-optim", lambda r: r.kinds, SAVE),
    RunCase("--load {checkpoint}", first_step),
    RunCase("--ckpt-step 2", first_step, LOAD),
    RunCase("--no-load-optim", losses, LOAD),
    RunCase("--finetune", first_step, LOAD),
    RunCase(
        "--exit-on-missing-checkpoint",
        lambda r: r.code,
        f"{SAVE} --load {{scratch}}/save",
        code=exit_codes.CONFIGURATION,
    ),
    RunCase("--use-checkpoint-args", lambda r: r.code, LOAD.replace("--num-layers 2 ", "")),
    RunCase("--override-opt-param-scheduler", lambda r: (r.code, rates_of(r)), f"{LOAD} --lr 0.02"),
    RunCase("--use-checkpoint-opt-param-scheduler", lambda r: (r.code, rates_of(r)), f"{LOAD} --lr 0.02"),
    # reports
    RunCase("--log-interval 2", lambda r: r.text.count("step 2/4")),
    RunCase("--log-dir {scratch}/elsewhere", lambda r: r.files, f"{DATA} --log-dir {{scratch}}/log"),
    RunCase("--log-params-norm", keys),
    RunCase("--log-num-zeros-in-grad", keys),
    RunCase("--tensorboard-dir {scratch}/board", board, f"{DATA} --log-interval 1"),
    RunCase("--log-timers-to-tensorboard", board, BOARD),
    RunCase("--log-memory-to-tensorboard", board, BOARD),
    RunCase("--log-validation-ppl-to-tensorboard", board, f"{BOARD} {EVERY}"),
    RunCase("--wandb-project mine", inside("wandb")),
    RunCase("--wandb-exp-name first", inside("wandb"), WANDB),
    RunCase("--wandb-save-dir {scratch}/wandb", inside("wandb"), WANDB),
    RunCase("--profile", inside("profiled"), f"{DATA} {PROFILED}"),
    RunCase("--profile-step-start 2", inside("profiled"), f"{DATA} --profile {PROFILED}"),
    RunCase("--profile-step-end 2", inside("profiled"), f"{DATA} --profile {PROFILED}"),
    RunCase(
        "--profile-ranks 1", lambda r: [f for f in r.files if "trace" in f], f"{DATA} --profile {PROFILED}", ranks=2
    ),
    RunCase("--peak-tflops 100", lambda r: [s["mfu"] is None for s in r.steps.values()]),
]


FIELDS = flags.field_flags(TransformerConfig)
IMPLEMENTED = [f for f in FIELDS if f not in flags.ABSENT]
POSITIVE = {f.negative: f.flag for f in FIELDS.values() if f.negative}


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return make_places(tmp_path_factory.mktemp("places"))


def flag_of(case: Case | RunCase) -> str:
    """The positive name of a case's flag."""
    typed = shlex.split(case.typed)[0]
    return POSITIVE.get(typed, typed)


@functools.cache
def base_config(base: str) -> Config:
    """Many cases share a base; it is read once."""
    return load(shlex.split(base)).config


@functools.cache
def without_flag(base: str, observe: Observe) -> Any:
    """What is observed without the flag."""
    return observe(base_config(base))


@functools.cache
def base_run(base: str, ranks: int, scratch: Path, bad: tuple[int, ...]) -> Finished:
    """A run without the flag."""
    return finish(base, ranks, scratch, bad)


@pytest.mark.parametrize("flag", IMPLEMENTED)
def test_every_implemented_flag_has_a_case(flag: str) -> None:
    assert [flag_of(case) for case in [*CASES, *RUNS]].count(flag) == 1


def test_no_case_is_of_an_unknown_flag() -> None:
    assert {flag_of(case) for case in [*CASES, *RUNS]} == set(IMPLEMENTED)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.typed)
def test_the_flag_has_its_effect(case: Case, places: dict[str, str]) -> None:
    base = case.base.format(**places)
    with_flag = load(shlex.split(base) + shlex.split(case.typed.format(**places))).config
    assert with_flag != base_config(base), "the flag does not reach the configuration"
    assert case.observe(with_flag) != without_flag(base, case.observe)


@pytest.mark.parametrize("case", RUNS, ids=lambda case: case.typed)
def test_the_flag_has_its_effect_on_a_run(case: RunCase, places: dict[str, str]) -> None:
    base, scratch = case.base.format(**places), Path(places["scratch"])
    before = base_run(base, case.ranks, scratch, case.bad)
    with_flag = finish(f"{base} {case.typed.format(**places)}", case.ranks, scratch, case.bad)
    assert with_flag.code == case.code, with_flag
    assert case.seen(with_flag) != case.seen(before)


def test_cases_repeat(places: dict[str, str]) -> None:
    """What is observed is a function of the configuration alone, so a difference comes from the flag."""
    config = load(shlex.split(SCALED)).config
    for observe in (loss, specs, rates, scale, batch_sizes):
        assert observe(config) == observe(dataclasses.replace(config))
    first, second = (finish(EVAL.format(**places), 1, Path(places["scratch"])) for _ in range(2))
    assert (first.steps, first.evaluations, first.files) == (second.steps, second.evaluations, second.files)
    assert first.inside == second.inside and len(first.steps) == 4 and len(first.evaluations) == 3
