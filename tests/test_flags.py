"""The four lists: no flag of a dense Megatron-LM launch script passes without a word, and none is in two lists."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from megatron_lite.config import flags
from megatron_lite.config.argv import cut
from megatron_lite.config.check import check
from megatron_lite.config.load import load
from megatron_lite.config.problem import ConfigError, format_problems
from megatron_lite.config.schema import RunConfig
from megatron_lite.config.transformer import TransformerConfig
from megatron_lite.mesh.layout import Layout
from megatron_lite.model.problems import transformer_problems
from megatron_lite.optim import from_config

DATA = Path(__file__).parent / "data"
LISTS = ("implemented", "alias", "accepted without effect", "not in this version")
LAUNCH = sorted((DATA / "launch_flags").glob("*.txt"))


def lines_of(path: Path) -> list[str]:
    return [line for line in path.read_text().splitlines() if line and not line.startswith("#")]


MEGATRON = lines_of(DATA / "megatron_flags.txt")


def refused(text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(text.split())
    return str(caught.value)


@pytest.mark.parametrize("flag", MEGATRON)
def test_each_flag_of_a_dense_script_is_in_a_list(flag: str) -> None:
    assert flags.list_of(flag, TransformerConfig) in LISTS


def test_the_lists_printed(capsys: pytest.CaptureFixture[str]) -> None:
    by_list = {name: [f for f in MEGATRON if flags.list_of(f, TransformerConfig) == name] for name in LISTS}
    for name, members in by_list.items():
        print(f"{name} ({len(members)}): {' '.join(members)}")
    assert sum(map(len, by_list.values())) == len(MEGATRON) > 160
    assert by_list["not in this version"] == [
        "--recompute-modules",
        "--recompute-activations",
        "--num-layers-per-virtual-pipeline-stage",
        "--num-virtual-stages-per-pipeline-rank",
        "--context-parallel-size",
        "--cp-comm-type",
        "--overlap-param-gather",
        "--async-save",
    ]
    assert "implemented" in capsys.readouterr().out


def test_no_flag_is_in_two_lists() -> None:
    fields = flags.field_flags(TransformerConfig)
    ours = set(fields) | {f.negative for f in fields.values() if f.negative}
    absent = set(flags.ABSENT) - {"--context-parallel-size"}  # a field, of which this version has the value 1
    sets = [ours, set(flags.ALIASES), set(flags.ACCEPTED), absent]
    for i, a in enumerate(sets):
        for b in sets[i + 1 :]:
            assert not a & b
    for flag in set().union(*sets):
        assert not flags.refused_as(flag), flag


def test_every_difference_names_a_field() -> None:
    names = {f.name for f in flags.field_flags(TransformerConfig).values()}
    assert set(flags.DIFFERENCES) <= names and names >= flags.OURS


@pytest.mark.parametrize("flag", sorted(flags.ALIASES))
def test_aliases_change_what_they_name(flag: str) -> None:
    alias = flags.ALIASES[flag]
    value = {"--activations-checkpoint-method": "block"}.get(flag, "5")
    start = ["--no-document-mask", "--loss-normalization", "microbatch"]
    with_alias = load([*start, flag, *([value] if alias.values else [])])
    spelled = load([*start, *(token.format(value) for token in alias.becomes)])
    assert with_alias.config == spelled.config != load(start).config


@pytest.mark.parametrize("flag", sorted(flags.ACCEPTED))
def test_accepted_flags_change_nothing_and_say_why(flag: str) -> None:
    entry = flags.ACCEPTED[flag]
    value = [entry.only[0] if entry.only else "1"] if entry.values else []
    loaded = load([flag, *value])
    assert loaded.config == load([]).config and loaded.accepted == ((flag, entry.reason),) and len(entry.reason) > 10
    if entry.only:
        assert f"{flag} other is not supported" in refused(f"{flag} other")


@pytest.mark.parametrize("flag", sorted(flags.ABSENT))
def test_absent_flags_are_refused_by_name(flag: str) -> None:
    entry = flags.ABSENT[flag]
    value = " 2" if entry.values else ""
    assert f"{flag}{value} is not in this version: {entry.what}" in refused(flag + value)
    for harmless in entry.harmless:
        assert load([flag, harmless]).config == load([]).config


@pytest.mark.parametrize(
    ("flag", "what"),
    [
        ("--fp8-format", "fp8"),
        ("--fp8-param-gather", "fp8"),
        ("--num-experts", "mixtures of experts"),
        ("--moe-router-topk", "mixtures of experts"),
        ("--expert-model-parallel-size", "mixtures of experts"),
        ("--multi-latent-attention", "multi-latent attention"),
        ("--kv-lora-rank", "multi-latent attention"),
        ("--mtp-num-layers", "multi-token prediction"),
        ("--use-megatron-fsdp", "FSDP"),
        ("--tp-comm-overlap-cfg", "Transformer Engine"),
        ("--model-parallel-size", "--tensor-model-parallel-size"),
    ],
)
def test_what_is_out_of_scope_is_refused_by_name(flag: str, what: str) -> None:
    text = refused(f"{flag} 3")
    assert f"{flag} is not supported" in text and what in text


@pytest.mark.parametrize(
    ("typo", "nearest"),
    [
        ("--num-layer", "--num-layers"),
        ("--tensor-parallel-size", "--tensor-model-parallel-size"),
        ("--micro-batch", "--micro-batch-size"),
        ("--use-distributed-optimiser", "--use-distributed-optimizer"),
        ("--no-load-optimizer", "--no-load-optim"),
        ("--confg", "--config"),
    ],
)
def test_unknown_flags_name_the_nearest(typo: str, nearest: str) -> None:
    text = refused(typo)
    assert f"unknown flag {typo}" in text and re.search(rf"{nearest}$", text, re.MULTILINE)


def test_nothing_is_guessed_for_gibberish() -> None:
    assert "see --help" in refused("--zqxw")


# --- launch scripts -------------------------------------------------------------------------------------------------


def tokens(path: Path) -> list[str]:
    """As the shell splits them: quotes inside an array's element stay."""
    return [token for line in lines_of(path) for token in line.split()]


def ranks(path: Path) -> int:
    found = re.search(r"ranks: (\d+)", path.read_text())
    assert found
    return int(found[1])


def rooms(config: RunConfig[TransformerConfig], layout: Layout) -> list[str]:
    sp, length = config.parallel.sequence_parallel, config.data.seq_length
    return transformer_problems(config.model, layout, sequence_parallel=sp, seq_length=length)


@pytest.mark.parametrize("path", LAUNCH, ids=lambda p: p.stem)
def test_launch_scripts(path: Path) -> None:
    pairs, stray = cut(tokens(path))
    assert not stray
    absent = []
    for flag, values in pairs:
        where = flags.list_of(flag, TransformerConfig)
        assert where in LISTS, (flag, where)
        if where == "not in this version" and values not in [[h] for h in flags.ABSENT[flag].harmless]:
            absent.append((flag, values))
    if absent:  # refused, each by name ...
        text = refused(" ".join(tokens(path)))
        assert all(flag in text for flag, _ in absent) and text.startswith(f"{len(absent)} problem")
    rest = [token for flag, values in pairs if (flag, values) not in absent for token in (flag, *values)]
    config = load(rest).config  # ... and the rest runs
    vocabulary = config.model.vocab_size or 50257  # the tokenizer's
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, vocab_size=vocabulary))
    assert format_problems(check(config, ranks(path), [rooms, from_config.problems])) == "no problems"


def test_the_scripts_are_there() -> None:
    assert [p.stem for p in LAUNCH if not p.stem.startswith("sc21")] == [
        "gpt3_175b_distributed",
        "llama3_8b_bf16",
        "llama3_8b_bf16_mock",
    ]
    assert len(LAUNCH) == 13


def test_175b_script_in_numbers() -> None:
    config = load(tokens(DATA / "launch_flags" / "gpt3_175b_distributed.txt")).config
    batch = from_config.batch_schedule(config.training, config.data.seq_length, 8)
    assert len(batch.phases) == 96 and batch.size(0) == 16 and batch.final == 1536
    rates = from_config.rates(config.training, config.optimizer, batch)
    lr = rates.lr[""]
    assert lr.decay_samples == batch.samples_after(430_000) and lr.warmup_samples == 0.001 * lr.decay_samples
    assert lr.at(0) == 0 and lr.at(round(lr.warmup_samples)) == pytest.approx(6e-5, rel=1e-6)


def test_llama_script_in_values() -> None:
    listed = [t for t in tokens(DATA / "launch_flags" / "llama3_8b_bf16.txt") if t != "--overlap-param-gather"]
    loaded = load(listed)
    config = loaded.config
    assert config.parallel.zero_stage == 1 and config.training.loss_normalization == "token" and config.training.bf16
    assert not config.model.add_bias_linear and config.model.kv_heads == 8 and config.model.rotary_base == 1e6
    assert config.data.split == "99,1,0" and config.data.data_path[0] == "0.7"
    assert {flag for flag, _ in loaded.accepted} >= {"--use-mcore-models", "--attention-backend", "--ckpt-format"}
