"""Reading a configuration: one definition for flags and files, strict, every problem at once, nothing lost on the way back."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_lite.cli.train import split_function
from megatron_lite.config.check import check, check_files, prefixes
from megatron_lite.config.derived import (
    bucket_parameters,
    count_parameters,
    precision,
)
from megatron_lite.config.document import document
from megatron_lite.config.flags import ELSEWHERE, OTHER_NAMES, SECTIONS, field_flags, field_kinds, section_classes
from megatron_lite.config.load import (
    changed,
    from_dict,
    load,
    to_dict,
    to_json,
    to_yaml,
    with_checkpoint_args,
)
from megatron_lite.config.problem import ConfigError, Problem, format_problems, nearest_divisors, nearest_multiples
from megatron_lite.config.schema import RunConfig
from megatron_lite.config.summary import differences, notices, summary
from megatron_lite.config.transformer import LlamaConfig, TransformerConfig
from megatron_lite.mesh.layout import Layout
from megatron_lite.optim import from_config

GOOD = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 --lr 1e-3 "
    "--train-iters 10 --mock-data --tokenizer-type NullTokenizer --vocab-size 100"
)


def parse(text: str, **kwargs: Any) -> RunConfig[Any]:
    return load(text.split(), **kwargs).config


def refused(text: str, **kwargs: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        load(text.split(), **kwargs)
    return str(caught.value)


def problems(text: str, world_size: int = 1) -> str:
    config = parse(text)
    return format_problems(check(config, world_size, [model_problems, from_config.problems, split_function]))


def model_problems(config: RunConfig[Any], layout: Layout) -> list[str]:
    from megatron_lite.model.problems import transformer_problems

    return transformer_problems(
        config.model, layout, sequence_parallel=config.parallel.sequence_parallel, seq_length=config.data.seq_length
    )


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


# --- one definition -------------------------------------------------------------------------------------------------


def test_every_field_has_help_and_a_unique_flag() -> None:
    from megatron_lite.config.document import field_help

    seen: set[str] = set()
    for cls in section_classes(TransformerConfig).values():
        texts = field_help(cls)
        for name in field_kinds(cls):
            assert len(texts.get(name, "")) > 5, f"{cls.__name__}.{name} has no help"
            assert name not in seen, f"{name} is in two sections: its flag would be ambiguous"
            seen.add(name)


def test_sections_are_frozen() -> None:
    config = parse(GOOD)
    for section in SECTIONS:
        its = getattr(config, section)
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(its, dataclasses.fields(its)[0].name, 1)


def test_docs_are_current() -> None:
    path = Path(__file__).parent.parent / "docs" / "configuration.md"
    assert path.read_text() == document(), "run: python -m megatron_lite.config.document"


# --- flags ----------------------------------------------------------------------------------------------------------


def test_flags_reach_their_sections() -> None:
    config = parse(
        GOOD + " --tensor-model-parallel-size 2 --bf16 --rampup-batch-size 8 8 160 --data-path 0.3 a 0.7 b "
        "--no-load-optim --adam-beta2=0.95 --lr_decay_style cosine --profile-ranks 0 3"
    )
    assert config.parallel.tensor_model_parallel_size == 2
    assert config.training.bf16 and config.training.rampup_batch_size == (8, 8, 160)
    assert config.data.data_path == ("0.3", "a", "0.7", "b")
    assert not config.checkpoint.load_optim and config.optimizer.adam_beta2 == 0.95
    assert config.optimizer.lr_decay_style == "cosine" and config.logging.profile_ranks == (0, 3)


def test_the_last_of_repeated_flags_wins_and_the_others_are_named() -> None:
    loaded = load("--lr 1 --bf16 --lr 2 --no-bf16 --seed 3 --document-mask off --seed 3 --reset-position-ids".split())
    config = loaded.config
    assert config.optimizer.lr == 2 and not config.training.bf16 and config.data.document_mask
    why = {"--lr 1": "--lr 2", "--bf16": "--no-bf16", "--no-document-mask": "--document-mask"}
    assert dict(loaded.accepted) == {old: f"given again as {new}: the last one counts" for old, new in why.items()}


def test_numbers_are_not_read_as_python_reads_them() -> None:
    text = refused("--lr 1_0 --train-iters 1_000 --rampup-batch-size 1_0 2 3 --save 1_0")
    assert text.startswith("3 problems") and "--lr 1_0: expected a number" in text, text
    assert parse("--save 1_0 --lr 1e-3").checkpoint.save == "1_0"


def test_names_of_other_programs_are_understood() -> None:
    """Not as flags: as a hint, and each hint names a flag that exists."""
    assert "unknown flag --learning-rate\n      try:     --lr" in refused("--learning-rate 3")
    known = set(field_flags(LlamaConfig))
    for name, ours in OTHER_NAMES.items():
        assert ours in known and name not in known, (name, ours)
    assert known.isdisjoint(ELSEWHERE)
    assert "data preprocess --json-keys beforehand" in refused("--json-keys body")


def test_on_off() -> None:
    assert not parse("--document-mask off").data.document_mask
    assert parse("--document-mask on").data.document_mask
    assert parse("--document-mask").data.document_mask
    assert not parse("--no-mask-padded-vocab").training.mask_padded_vocab
    assert "expected on or off" in refused("--document-mask perhaps")


def test_every_error_of_a_command_line_at_once() -> None:
    text = refused(
        "stray --num-layers x --lr foo --num-layer 3 --fp16 yes --rampup-batch-size 1 2 --lr-decay-style cos"
    )
    for part in (
        "stray: no flag takes this",
        "--num-layers x: expected a whole number",
        "--lr foo: expected a number",
        "unknown flag --num-layer",
        "--fp16 takes no value, 1 given",
        "--rampup-batch-size takes 3 values, 2 given",
        "--lr-decay-style cos: expected one of constant, linear, cosine",
    ):
        assert part in text, (part, text)
    assert text.startswith("7 problems")


def test_a_missing_value_is_an_error_not_the_next_flag() -> None:
    assert "--lr takes one value, 0 given" in refused("--lr --bf16")
    assert parse("--lr-warmup-init -1").optimizer.lr_warmup_init == -1  # a negative number is a value


def test_split_in_quotes_as_in_bash_arrays() -> None:
    assert load(["--split", "'99,1,0'"]).config.data.split == "99,1,0"


# --- files ----------------------------------------------------------------------------------------------------------


def test_precedence(tmp_path: Path) -> None:
    first = write(
        tmp_path / "a.yaml", "training:\n  seed: 1\n  bf16: true\noptimizer:\n  lr: 6e-5\ndata:\n  document_mask: on\n"
    )
    second = write(tmp_path / "b.yaml", "training: {seed: 2}\ncheckpoint:\n")
    loaded = load(["--config", first, "--config", second, "--no-bf16", "--compat", "megatron"])
    config = loaded.config
    assert config.training.seed == 2  # the later file
    assert not config.training.bf16  # the flag
    assert config.optimizer.lr == 6e-5  # YAML 1.1 reads this as text; it is a number
    assert config.data.document_mask  # a file stands above --compat
    assert config.training.loss_normalization == "microbatch"  # --compat stands above the defaults
    assert ("training", "seed") in loaded.given and ("training", "train_iters") not in loaded.given


def test_files_are_read_strictly(tmp_path: Path) -> None:
    path = write(
        tmp_path / "run.yaml",
        "training:\n"
        "  micro_batch_sise: 4\n"
        "  seed: fast\n"
        "  bf16: 1\n"
        "  lr: 3\n"
        "  seed: 3\n"
        "  rampup_batch_size: [1, 2]\n"
        "trainning: {}\n"
        "parallel:\n"
        "  use_distributed_optimizer: true\n"
        "  cp_comm_type: p2p\n"
        "logging: 3\n"
        "data:\n"
        "  dataloader_type: single\n"
        "  data_path: 3.5\n"
        "  tokenizer_type: Bpe\n",
    )
    text = refused(f"--config {path}")
    for part in (
        f"{path}:2: training.micro_batch_sise: unknown field",
        "micro_batch_size",
        f"{path}:4: training.bf16: 1",
        "expected true or false",
        f"{path}:5: training.lr: lr belongs under 'optimizer:'",
        f"{path}:6: training.seed is given twice",
        f"{path}:7: training.rampup_batch_size: [1, 2]",
        "expected 3 values, each a whole number",
        f"{path}:8: trainning: unknown section",
        f"{path}:10: parallel.use_distributed_optimizer is only a flag's other name",
        "--zero-stage 1",
        f"{path}:11: parallel.cp_comm_type is not in this version",
        f"{path}:12: logging: expected fields",
        f"{path}:14: data.dataloader_type has no effect",
        f"{path}:16: data.tokenizer_type: 'Bpe'",
    ):
        assert part in text, (part, text)


@pytest.mark.parametrize("content", ["a: [1", "- 1\n- 2", "3", "\ttabs: 1", "a: *b"])
def test_broken_files_are_one_message(tmp_path: Path, content: str) -> None:
    path = write(tmp_path / "run.yaml", content)
    assert path in refused(f"--config {path}")


def test_missing_and_empty_files(tmp_path: Path) -> None:
    assert "cannot be read" in refused(f"--config {tmp_path}/none.yaml")
    assert parse(f"--config {write(tmp_path / 'empty.yaml', '')}") == parse("")
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\x00")
    assert "cannot be read" in refused(f"--config {tmp_path}/bytes.yaml")


# --- there and back -------------------------------------------------------------------------------------------------


def _value(kind: Any) -> st.SearchStrategy[Any]:
    import types
    import typing

    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return st.one_of([_value(a) for a in args])
    if origin is typing.Literal:
        return st.sampled_from(args)
    if origin is tuple:
        return st.lists(_value(args[0]), max_size=3).map(tuple) if args[-1] is ... else st.tuples(*map(_value, args))
    simple: dict[Any, st.SearchStrategy[Any]] = {
        bool: st.booleans(),
        int: st.integers(-(2**63), 2**63),
        float: st.floats(allow_nan=False, allow_infinity=False),
        str: st.text(st.characters(blacklist_categories=("Cs", "Cc")), max_size=12),
        type(None): st.none(),
    }
    return simple[kind]


@settings(max_examples=30, deadline=None)
@given(st.data(), st.sampled_from(["gpt", "llama"]))
def test_round_trip_through_yaml_and_json(data: st.DataObject, architecture: str) -> None:
    model = {"gpt": TransformerConfig, "llama": LlamaConfig}[architecture]
    sections = {
        name: cls(**{field: data.draw(_value(kind)) for field, kind in field_kinds(cls).items()})
        for name, cls in section_classes(model).items()
    }
    config = RunConfig(**sections, architecture=architecture)
    assert from_dict(json.loads(to_json(config))) == config
    assert from_dict(yaml.safe_load(to_yaml(config))) == config


def test_round_trip_through_a_file(tmp_path: Path) -> None:
    config = parse(GOOD + " --model llama --bf16 --data-path 0.3 a 0.7 b --adam-eps 1e-9 --compat megatron")
    assert parse(f"--config {write(tmp_path / 'a.yaml', to_yaml(config))}") == config
    assert parse(f"--config {write(tmp_path / 'b.yaml', to_yaml(config, only_changed=True))}") == config


def test_changed_lists_what_differs_from_the_defaults() -> None:
    config = parse("--model llama --seed 7 --no-swiglu")
    assert changed(config) == {
        ("", "architecture"): ("llama", "gpt"),
        ("training", "seed"): (7, 1234),
        ("model", "swiglu"): (False, True),
    }


def test_saved_configurations_are_read_strictly() -> None:
    saved = to_dict(parse(GOOD))
    saved["training"]["colour"] = "blue"
    saved["model"]["num_layers"] = "four"
    with pytest.raises(ConfigError) as caught:
        from_dict(saved, name="checkpoint of step 7")
    assert "checkpoint of step 7: training.colour: unknown field" in str(caught.value)
    assert "checkpoint of step 7: model.num_layers: 'four'" in str(caught.value)


def test_use_checkpoint_args() -> None:
    saved = to_dict(parse(GOOD + " --model llama --tokenizer-model tok.json --eod-token E --lr 5 --seed 9 --ffn-hidden-size 96"))
    here = "--lr 1 --load d --use-checkpoint-args"
    loaded = with_checkpoint_args(load(f"--seq-length 64 --hidden-dropout 0.5 {here}".split()), saved)
    config = loaded.config
    assert config.architecture == "llama" and isinstance(config.model, LlamaConfig) and config.model.num_layers == 4
    assert config.data.seq_length == 64 and config.model.hidden_dropout == 0.5  # given: it is not what the model is
    assert config.data.tokenizer_model == "tok.json" and config.data.tokenizer_type == "NullTokenizer"  # not given
    assert config.optimizer.lr == 1 and config.training.seed == 1234  # not the model's
    moved = with_checkpoint_args(load(f"--tokenizer-model b {here}".split()), saved).config.data
    assert (moved.tokenizer_type, moved.tokenizer_model, moved.eod_token) == ("NullTokenizer", "b", "E")
    other = with_checkpoint_args(load(f"--tokenizer-type HuggingFaceTokenizer --tokenizer-model b {here}".split()), saved)
    assert other.config.data.eod_token is None, "kind and files are given: nothing is of another tokenizer"


def test_what_is_given_of_a_model_is_not_thrown_away(tmp_path: Path) -> None:
    """Values beside --use-checkpoint-args are the checkpoint's, or a problem."""
    saved = to_dict(parse(GOOD + " --model llama --num-layers 2"))
    here = "--load d --use-checkpoint-args"
    file = tmp_path / "a.yaml"
    file.write_text("model: {num_layers: 3, vocab_size: 0}\n")  # 0: the tokenizer's
    for line in ("--num-layers 3", f"--config {file}"):
        [problem] = with_checkpoint_args(load(f"{line} {here}".split()), saved).problems
        assert problem.numbers == "num-layers 3 given, 2 in the checkpoint"
        assert problem.nearest == "leave num-layers out, or leave --use-checkpoint-args out"
    several = f"--model gpt --vocab-size 2002 --max-position-embeddings 256 --no-swiglu {here}"
    [problem] = with_checkpoint_args(load(several.split()), saved).problems
    for numbers in ("model gpt given, llama in", "vocab-size 2002 given, 100", "max-position-embeddings 256 given, 32", "swiglu False"):
        assert numbers in problem.numbers
    same = f"--model llama --num-layers 2 --hidden-size 64 --kv-channels 16 --vocab-size 100 {here}"  # 16 is what follows
    assert with_checkpoint_args(load(same.split()), saved).problems == ()


# --- a team's own model ---------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Inner:
    rank: int = 4
    """Rank."""


@dataclasses.dataclass(frozen=True)
class TheirConfig:
    """Options of their own, one of them like a flag of ours."""

    width: int
    """Width (required)."""
    lr: float = 0.5
    """Not the optimizer's."""
    tanh: bool = False
    """Bounded."""
    inner: Inner = dataclasses.field(default_factory=Inner)
    """Nested."""


def theirs(architecture: str) -> type:
    assert architecture == "their.module:Model"
    return TheirConfig


def test_own_model_flags_and_files(tmp_path: Path) -> None:
    path = write(tmp_path / "m.yaml", "architecture: their.module:Model\nmodel:\n  width: 8\n  inner: {rank: 2}\n")
    config = parse(f"--config {path} --model.tanh --lr 3 --model.lr 0.25", resolve=theirs)
    assert config.model == TheirConfig(width=8, lr=0.25, tanh=True, inner=Inner(2)) and config.optimizer.lr == 3
    assert from_dict(to_dict(config), theirs) == config
    assert not parse(f"--config {path} --model.no-tanh", resolve=theirs).model.tanh


def test_own_model_errors(tmp_path: Path) -> None:
    text = refused("--model their.module:Model --model.widht 3 --num-layers 4", resolve=theirs)
    assert "unknown flag --model.widht" in text and "--model.width" in text and "unknown flag --num-layers" in text
    assert "--model.width is required" in refused("--model their.module:Model", resolve=theirs)
    assert "--model.width x: expected a whole number" in refused(
        "--model their.module:Model --model.width x", resolve=theirs
    )
    path = write(tmp_path / "m.yaml", "model:\n  inner: {rang: 2}\n")
    assert "rang is no field of Inner" in refused(f"--model their.module:Model --config {path}", resolve=theirs)
    assert "unknown model lama" in refused("--model lama")


def test_reading_without_the_model() -> None:
    argv = ["--model", "their.module:Model", "--model.width", "3", "--tensor-model-parallel-size", "2"]
    assert load(argv, without_model=True).config.parallel.tensor_model_parallel_size == 2


# --- checks ---------------------------------------------------------------------------------------------------------


def test_a_good_configuration_has_no_problems() -> None:
    assert problems(GOOD) == "no problems"
    assert problems(GOOD + " --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2", 4) == "no problems"


BAD: list[tuple[str, int, tuple[str, ...]]] = [
    ("--tensor-model-parallel-size 2", 3, ("3 processes; tp 2", "2 or 4 processes", "tp 1 or 3")),
    (
        "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 3",
        4,
        ("4 processes; tp 2 x cp 1 x pp 3 = 6", "6 processes"),
    ),
    ("--tensor-model-parallel-size 0", 1, ("tp 0", "a whole number, 1 or more")),
    (
        "--sequence-parallel --tensor-model-parallel-size 8 --num-attention-heads 8 --micro-batch-size 4 --global-batch-size 10",
        16,
        ("10", "micro-batch-size 4 * dp 2 = 8", "8 or 16"),
    ),
    ("--num-attention-heads 3 --kv-channels 16 --tensor-model-parallel-size 2", 2, ("num-attention-heads 3",)),
    ("--hidden-size 66", 1, ("hidden-size 66 is not divisible by num-attention-heads 4", "64 or 68")),
    ("--group-query-attention --num-query-groups 3", 1, ("num-query-groups 3",)),
    ("--ffn-hidden-size 255 --tensor-model-parallel-size 2", 2, ("ffn-hidden-size 255", "254 or 256")),
    (
        "--pipeline-model-parallel-size 8",
        8,
        ("num-layers 4, pipeline-model-parallel-size 8", "--pipeline-model-parallel-size 4"),
    ),
    (
        "--pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 4",
        2,
        ("4 blocks, first stage 4, 1 other stages", "at most 3"),
    ),
    (
        "--pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 1 --decoder-last-pipeline-num-layers 2",
        2,
        ("sum to 4",),
    ),
    ("--decoder-last-pipeline-num-layers 2", 1, ("needs a pipeline",)),
    ("--fp16 --bf16", 1, ("--bf16 and --fp16 are given together", "--bf16 alone")),
    ("--fp64 --grad-reduce-in-bf16", 1, ("--grad-reduce-in-bf16 with --fp64",)),
    ("--context-parallel-size 1 --zero-stage 2", 1, ("--zero-stage 2 is not in this version", "--zero-stage 1")),
    ("--zero-stage 3", 1, ("--zero-stage 3 is not in this version: sharding parameters",)),
    ("--zero-stage 4", 1, ("--zero-stage 4",)),
    ("--recompute-granularity selective", 1, ("--recompute-granularity selective is not in this version",)),
    ("--lr-warmup-iters 20", 1, ("20", "10")),
    ("--lr-warmup-iters 10", 1, ("10",)),  # warm-up as long as the training
    ("--lr-warmup-samples 3", 1, ("--lr-warmup-samples", "--lr-warmup-iters")),
    ("--lr-decay-samples 3", 1, ("--lr-decay-samples",)),
    ("--train-samples 100", 1, ("train-iters 10, train-samples 100",)),
    ("--rampup-batch-size 2 4 100 --global-batch-size 16", 1, ("INCREMENT 4", "2 or 7")),
    ("--rampup-batch-size 8 8 100 --global-batch-size 32 --micro-batch-size 16", 1, ("8", "24", "use 16")),
    ("--lr-scaling-rule linear", 1, ("--lr-scaling-base-batch",)),
    ("--exit-signals TERM FOO", 1, ("unknown signal FOO",)),
    ("--exit-signals KILL", 1, ("cannot be handled",)),
    ("--save-signals TERM", 1, ("TERM in both",)),
    ("--on-nan rollback", 1, ("--on-nan rollback without --save",)),
    ("--no-mock-data --data-path a --split 0,1", 1, ("leaves nothing to train on",)),
    ("--split 1,two", 1, ("--split '1,two'",)),
    ("--no-mock-data", 1, ("there is no data",)),
    ("--no-mock-data --data-path a --train-data-path b", 1, ("--data-path beside --train-data-path",)),
    ("--no-mock-data --valid-data-path b", 1, ("there is no training data",)),
    ("--no-mock-data --data-path 0.3 a 0.7", 1, ("weights and prefixes do not alternate",)),
    ("--no-mock-data --data-path a 0.3 b 0.7", 1, ("weights and prefixes do not alternate",)),
    ("--no-mock-data --data-path 0.3", 1, ("a weight without a prefix",)),
    ("--no-mock-data --data-path -1 a 2 b", 1, ("none negative",)),
    ("--tokenizer-type HuggingFaceTokenizer --vocab-size 0", 1, ("HuggingFaceTokenizer needs --tokenizer-model",)),
    ("--tokenizer-type GPT2BPETokenizer --vocab-file v.json", 1, ("GPT2BPETokenizer needs --merge-file",)),
    ("--vocab-size 0", 1, ("NullTokenizer needs --vocab-size of at least 2",)),
    ("--eval-interval 0", 1, ("--eval-interval 0",)),
    ("--save-interval 0", 1, ("--save-interval 0",)),
    ("--finetune", 1, ("--finetune without --load",)),
    ("--ckpt-step 3", 1, ("--ckpt-step without --load",)),
    ("--override-opt-param-scheduler --use-checkpoint-opt-param-scheduler", 1, ("are given together",)),
    ("--profile --profile-step-start 5 --profile-step-end 5", 1, ("start 5, end 5",)),
    ("--profile --profile-ranks 0 1", 1, ("--profile-ranks names ranks that do not exist", "1 of 1 ranks")),
    ("--log-interval 0", 1, ("--log-interval 0",)),
    ("--check-weight-hash-across-dp-replicas-interval 0", 1, ("--check-weight-hash-across-dp-replicas-interval 0",)),
    ("--device cpu --distributed-backend nccl", 1, ("--distributed-backend gloo",)),
]


@pytest.mark.parametrize(("flags", "world_size", "parts"), BAD, ids=[b[0][:60] for b in BAD])
def test_problems(flags: str, world_size: int, parts: tuple[str, ...]) -> None:
    text = problems(f"{GOOD} {flags}", world_size)
    for part in parts:
        assert part in text, text
    assert (text == "no problems") == (not parts)


def test_several_problems_at_once() -> None:
    text = problems(
        GOOD + " --tensor-model-parallel-size 2 --pipeline-model-parallel-size 3 --num-attention-heads 3 --fp16 --bf16 "
        "--exit-signals FOO --split nothing --no-mock-data",
        5,
    )
    for part in ("5 processes", "num-attention-heads 3", "--bf16 and --fp16", "FOO", "--split 'nothing'", "no data"):
        assert part in text, text


def test_no_lr_and_no_length() -> None:
    text = problems(GOOD.replace("--lr 1e-3", "").replace("--train-iters 10", ""))
    assert "--lr is not given" in text and "train-iters None, train-samples None" in text


def test_a_wrong_batch_hides_no_wrong_schedule() -> None:
    text = problems(f"{GOOD} --micro-batch-size 3 --global-batch-size 8 --lr-warmup-iters 12")
    assert "not divisible by micro-batch-size 3" in text and "warm-up of 96 samples" in text, text


def test_problems_of_functions_are_problems() -> None:
    config = parse(GOOD)
    seen: list[Layout] = []

    def function(config: RunConfig[Any], layout: Layout) -> list[Problem | str]:
        seen.append(layout)
        return ["a sentence", Problem("a problem", rule="of a rule"), "a sentence"]

    found = check(config, 4, [function])
    assert found == [Problem("a sentence"), Problem("a problem", rule="of a rule")] and seen == [Layout(dp=4)]


def test_files_that_are_missing(tmp_path: Path) -> None:
    for suffix in (".bin", ".idx"):
        (tmp_path / f"there{suffix}").touch()
    (tmp_path / "half.idx").touch()
    config = parse(f"--data-path 0.5 {tmp_path}/there 0.5 {tmp_path}/half --load {tmp_path}/none --save x")
    text = format_problems(check_files(config))
    assert f"{tmp_path}/half.bin not found" in text and "there" not in text.split("half")[0].split("problems")[1]
    assert f"--load {tmp_path}/none: no such directory" in text
    assert not check_files(parse("--load same --save same"))
    assert not check_files(parse("--data-path 0.7 a b 0.3"))  # that it is no blend is said by the check of the flags
    (tmp_path / "there_text_document.idx").touch()
    for name, meant in (("there.bin", "there"), ("there.idx", "there"), ("there.jsonl", None)):
        text = format_problems(check_files(parse(f"--train-data-path {tmp_path}/{name}")))
        hint = f"try:     --train-data-path {tmp_path}/{meant}"
        assert (hint in text) == (meant is not None), text
    (tmp_path / "there.idx").unlink()
    text = format_problems(check_files(parse(f"--data-path {tmp_path}/there")))
    assert f"try:     --data-path {tmp_path}/there_text_document" in text
    for name in ("c2_text_document", "c1_text_document", "c1_chat", "c1_chat_loss_mask", "zz"):
        (tmp_path / f"{name}.idx").touch()
    text = format_problems(check_files(parse(f"--data-path {tmp_path}/c1_text_docment")))
    assert f"try:     --data-path {tmp_path}/c1_text_document or {tmp_path}/c2_text_document or " in text and "mask" not in text


def test_blends() -> None:
    assert (
        prefixes(("a",)) == ["a"]
        and prefixes(("a", "b")) == ["a", "b"]
        and prefixes(("1", "a", ".5", "b")) == ["a", "b"]
    )


@given(st.integers(1, 200), st.integers(1, 200))
def test_nearest_values_are_valid_and_nearest(value: int, other: int) -> None:
    divisors = [d for d in range(1, other + 1) if other % d == 0]
    below, above = [d for d in divisors if d <= value], [d for d in divisors if d > value]
    assert nearest_divisors(value, other) == ([max(below)] if below else []) + ([min(above)] if above else [])
    multiples = nearest_multiples(value, other)
    assert all(m % other == 0 and m > 0 and abs(m - value) <= other for m in multiples) and multiples


# --- what a start says ----------------------------------------------------------------------------------------------


def test_compat_leaves_only_the_difference_without_a_flag() -> None:
    ours = differences(parse(GOOD + " --fp16"))
    assert len(ours) == 7 and any(line.startswith("initial loss scale") for line in ours)
    assert not any(line.startswith("initial loss scale") for line in differences(parse(GOOD)))
    theirs_left = differences(parse(GOOD + " --fp16 --compat megatron"))
    assert [line.split(":")[0] for line in theirs_left] == ["initial weights"]
    mixed = differences(parse(GOOD + " --compat megatron --calculate-per-token-loss --reset-attention-mask"))
    names = [line.split(":")[0] for line in mixed]
    assert names == ["documents in a row", "target across a border", "objective", "initial weights"]


def test_summary() -> None:
    loaded = load(
        (GOOD + " --sequence-parallel --use-flash-attn --ddp-bucket-size 100000 --mask-padded-vocab off").split()
    )
    text = summary(
        loaded, Layout(dp=4), lines=["a line"], lr_by_rule={"none": 0.1, "linear": 0.2}, environment={"A": "1"}
    )
    for part in (
        f"{count_parameters(loaded.config.model):,} parameters",
        "tp 1 x cp 1 x dp 4 x pp 1 = 4 ranks",
        "gradient bucket: at most 0.4 MB (100,000 parameters of 4 bytes)",
        "a line",
        "none 0.1, linear 0.2",
        "documents in a row: do not see each other",
        "--use-flash-attn: each op's kernel",
        "A=1",
    ):
        assert part in text, (part, text)
    later = "\n".join(notices(loaded.config))
    for part in ("--sequence-parallel has no", "stored in the checkpoint as <name>.padding", "--attention-dropout 0.1", "nothing is saved"):
        assert part in later and part not in text, (part, later)
    assert "differs from Megatron-LM" not in summary(loaded, Layout(dp=4), first_start=False), "a run that goes on has said it"
    small = load(f"{GOOD} --packing best-fit".split())
    text, parameters = summary(small, Layout()), count_parameters(small.config.model)
    assert f"({parameters:,} parameters of 4 bytes)" in text, "no bucket is larger than the model"
    assert "whole documents and padding" in text and "permuted windows" not in text


def test_notices_are_silent_about_nothing() -> None:
    quiet = GOOD + " --attention-dropout 0 --save d"
    assert notices(parse(quiet)) == []
    for flags in (
        "--recompute-method uniform",
        "--lr-wsd-decay-iters 3",
        "--keep-every 10",
        "--log-memory-to-tensorboard",
        "--wandb-exp-name x",
        "--data-path p",
    ):
        assert len(notices(parse(f"{quiet} {flags}"))) == 1, flags


def test_derived() -> None:
    assert (
        bucket_parameters(parse("").parallel, 8) == 40_000_000
        and bucket_parameters(parse("").parallel, 64) == 64_000_000
    )
    assert [precision(parse(f).training) for f in ("", "--bf16", "--fp16", "--fp64")] == [
        "fp32",
        "bf16",
        "fp16",
        "fp64",
    ]
