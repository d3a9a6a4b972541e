"""The command line: quick help without torch, subcommands found and named, errors without tracebacks, exit codes."""

from __future__ import annotations

import dataclasses
import shlex
import subprocess
import sys
import time
import types
from pathlib import Path
from typing import Any

import pytest

from megatron_lite.cli import environment, train
from megatron_lite.cli.main import COMMANDS, main, module_of
from megatron_lite.config import exit_codes
from megatron_lite.config.load import load
from megatron_lite.config.problem import ConfigError

ROOT = Path(__file__).parent.parent
GOOD = shlex.split(
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 --lr 1e-3 "
    "--train-iters 10 --mock-data --tokenizer-type NullTokenizer --vocab-size 100"
)
LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID")


@pytest.fixture(autouse=True)
def _plain_start(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LAUNCHER:
        monkeypatch.delenv(name, raising=False)


def python(*args: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *args], capture_output=True, text=True, cwd=ROOT, check=check, timeout=120)


# --- help -----------------------------------------------------------------------------------------------------------


def test_help_reads_well(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    for name, what in COMMANDS.items():
        assert name in text and what in text
    assert all(f"  {code}  {meaning}" in text for code, meaning in exit_codes.MEANING.items())
    assert max(map(len, text.splitlines())) < 121


@pytest.mark.parametrize("args", [["--help"], ["train", "--help"], ["--version"], ["show-schedule"]], ids=" ".join)
def test_help_imports_no_torch(args: list[str]) -> None:
    code = (
        "import sys\nfrom megatron_lite.cli.main import main\n"
        f"try:\n    main({args!r})\nexcept SystemExit as e:\n    assert not e.code\n"
        "heavy = [m for m in ('torch', 'numpy', 'tokenizers') if m in sys.modules]\nassert not heavy, heavy"
    )
    python("-c", code)


def test_help_is_quick() -> None:
    """Under 1.5 times an import of torch; the best of a few, since the machine is shared."""

    def best(*args: str) -> float:
        times = []
        for _ in range(3):
            start = time.perf_counter()
            python(*args)
            times.append(time.perf_counter() - start)
        return min(times)

    torch_import = best("-c", "import torch")
    assert best("-m", "megatron_lite", "--help") < 1.5 * torch_import
    assert best("-m", "megatron_lite", "train", "--help") < 1.5 * torch_import


def test_train_help_has_every_section(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["train", "--help"])
    assert not stopped.value.code
    text = capsys.readouterr().out
    for part in ("megatron-lite train", "--tensor-model-parallel-size", "Pipeline stages (pp).", "--config FILE.yaml"):
        assert part in text
    for section in ("model", "parallel", "training", "optimizer", "data", "evaluation", "checkpoint", "logging"):
        assert f"{section} options" in text


def test_help_of_a_model_shows_its_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["train", "--model", "llama", "--help"])
    assert "(default: RMSNorm)" in capsys.readouterr().out


def test_help_of_a_teams_model_has_its_options(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["train", "--model", "examples.my_model:MyModel", "--help"])
    assert "--model.logit-cap" in capsys.readouterr().out


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def absent(_: str) -> None:
        raise ModuleNotFoundError("No module named 'torch'", name="torch")

    monkeypatch.setattr("megatron_lite.cli.main.importlib.import_module", absent)
    assert main(["doctor"]) == exit_codes.CONFIGURATION
    assert "the Python package torch is missing" in capsys.readouterr().err


def test_an_interrupt_before_the_start(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(_: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("megatron_lite.cli.main.importlib.import_module", interrupted)
    assert main(["train"]) == 130 and capsys.readouterr().err == "megatron-lite: error: interrupted\n"


def test_a_misspelt_flag_hides_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", *GOOD, "--tensr", "2", "--bf16", "--fp16", "--num-experts", "2"]) == exit_codes.CONFIGURATION
    said = capsys.readouterr().err
    assert "3 problems" in said, said
    for part in ("unknown flag --tensr", "--bf16 and --fp16", "--num-experts is not supported"):
        assert part in said


def test_another_runs_checkpoints_stay(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A start that does not go on from what is in --save would overwrite or prune it."""
    argv = ["train", *GOOD, "--micro-batch-size", "1", "--device", "cpu", "--train-iters", "2", "--save", str(tmp_path)]
    assert main(argv) == exit_codes.DONE
    for more in ([], ["--load", str(tmp_path / "other")]):
        (tmp_path / "other").mkdir(exist_ok=True)
        assert main([*argv, "--keep-last", "1", *more]) == exit_codes.CONFIGURATION
        assert f"--save {tmp_path} holds checkpoints of an earlier run (the newest of step 2)" in capsys.readouterr().err
    assert main([*argv, "--load", str(tmp_path)]) == exit_codes.DONE
    assert main([*argv, "--load", str(tmp_path / "step_00000002"), "--save", str(tmp_path / "b")]) == exit_codes.CONFIGURATION
    assert f"--load {tmp_path} --ckpt-step 2" in capsys.readouterr().err


def test_an_unnamed_tokenizer_is_one_problem(capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32"
    assert main(["train", *flags.split(), *"--lr 1 --train-iters 1 --mock-data".split()]) == exit_codes.CONFIGURATION
    said = capsys.readouterr().err
    assert "1 problem" in said and "--tokenizer-model FILE" in said and "--vocab-size N alone" in said


# --- subcommands ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", COMMANDS)
def test_subcommands_have_run_or_are_named(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    import importlib.util

    if importlib.util.find_spec(module_of(command)) is None:
        assert main([command]) == exit_codes.CONFIGURATION
        assert f"{command} is not in this version" in capsys.readouterr().err
    else:
        assert callable(importlib.import_module(module_of(command)).run)


def test_unknown_subcommands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trian"]) == exit_codes.CONFIGURATION
    assert "did you mean train?" in capsys.readouterr().err
    assert main(["--lr", "3"]) == exit_codes.CONFIGURATION
    assert "megatron-lite train --lr" in capsys.readouterr().err
    assert main([]) == exit_codes.CONFIGURATION
    assert "subcommands" in capsys.readouterr().out


def test_errors_of_users_are_messages_and_ours_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("megatron_lite.cli.doctor")
    monkeypatch.setitem(sys.modules, "megatron_lite.cli.doctor", module)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())

    def users(argv: list[str]) -> int:
        raise ValueError("the file is empty")

    def ours(argv: list[str]) -> int:
        raise KeyError("broken")

    monkeypatch.setattr(module, "run", users, raising=False)
    assert main(["doctor"]) == exit_codes.CONFIGURATION
    monkeypatch.setattr(module, "run", ours)
    with pytest.raises(KeyError):
        main(["doctor"])
    monkeypatch.setattr(module, "run", lambda argv: exit_codes.SIGNAL)
    assert main(["doctor"]) == exit_codes.SIGNAL


def test_exit_codes_are_those_of_the_docs() -> None:
    assert sorted(exit_codes.MEANING) == list(range(9))
    assert (exit_codes.DONE, exit_codes.ERROR, exit_codes.CONFIGURATION, exit_codes.NON_FINITE) == (0, 1, 2, 3)
    assert (exit_codes.HANG, exit_codes.SAVE_FAILED, exit_codes.SIGNAL, exit_codes.LIMIT) == (4, 5, 6, 7)
    assert exit_codes.WAITING == 8


# --- train ----------------------------------------------------------------------------------------------------------


def test_all_problems_and_no_traceback(tmp_path: Path) -> None:
    script = str(ROOT / "tools" / "pretrain_gpt.py")
    bad = [
        *GOOD,
        "--tensor-model-parallel-size",
        "2",
        "--fp16",
        "--bf16",
        "--exit-signals",
        "FOO",
        "--lr-warmup-iters",
        "20",
    ]
    done = python(script, *bad, check=False)
    assert done.returncode == exit_codes.CONFIGURATION and done.stdout == "" and "Traceback" not in done.stderr
    for part in ("problems in the configuration", "1 processes; tp 2", "--bf16 and --fp16", "FOO", "warm-up"):
        assert part in done.stderr, done.stderr
    assert "megatron_lite/" not in done.stderr


def test_one_rank_prints(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("megatron_lite.train.guard._store_within", lambda *args: None)
    monkeypatch.setattr(train, "die_with_parent", lambda: None)
    values = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    for rank, printed in ((0, True), (1, False)):
        for name, value in {**values, "RANK": str(rank), "LOCAL_RANK": str(rank)}.items():
            monkeypatch.setenv(name, value)
        assert main(["train", "--bf16", "--fp16"]) == exit_codes.CONFIGURATION
        assert ("--bf16 and --fp16" in capsys.readouterr().err) == printed


def test_unreadable_ranks_are_an_error(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("RANK", "x")
    assert main(["train", *GOOD]) == exit_codes.CONFIGURATION
    assert "RANK" in capsys.readouterr().err


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Calls of the training loop, which is replaced."""
    calls: list[Any] = []
    loop = types.ModuleType("megatron_lite.train.loop")

    def fake(config: Any, info: Any, environment: Any) -> int:
        calls.append((config, info, environment))
        return exit_codes.LIMIT

    loop.train = fake  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "megatron_lite.train.loop", loop)
    return calls


def test_train_gets_the_configuration(trained: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", *GOOD, "--use-flash-attn"]) == exit_codes.LIMIT
    [(config, info, variables)] = trained
    assert config == load(GOOD).config and (info.rank, info.world_size, variables) == (0, 1, {})
    text = capsys.readouterr().out
    for part in (
        "model gpt:",
        "10 steps, 10 samples",
        "learning rate: linear",
        "differs from Megatron-LM",
        "--use-flash-attn",
    ):
        assert part in text, text


def test_train_prints_what_each_scaling_rule_gives(trained: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    rules = ["--lr-scaling-rule", "sqrt", "--lr-scaling-base-batch", "4", "--global-batch-size", "16"]
    assert main(["train", *GOOD, *rules]) == exit_codes.LIMIT
    assert "(in force: sqrt): none 0.001, linear 0.004, sqrt 0.002, auto 0.004" in capsys.readouterr().out


def test_train_says_when_the_batch_grows(trained: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    ramp = ["--rampup-batch-size", "8", "8", "160", "--global-batch-size", "16", "--train-iters", "100"]
    assert main(["train", *GOOD, *ramp, "--lr-warmup-iters", "10"]) == exit_codes.LIMIT
    text = capsys.readouterr().out
    assert "100 steps, 1,440 samples" in text and "grows from 8 to 16 over 160 samples" in text
    assert "warm-up 80 samples" in text


def test_a_vocabulary_that_is_too_small(
    monkeypatch: pytest.MonkeyPatch, trained: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("megatron_lite.text.tokenizer.vocabulary_size", lambda data: 300)
    assert main(["train", *GOOD]) == exit_codes.CONFIGURATION
    assert "vocab-size 100, tokenizer 300" in capsys.readouterr().err
    assert (
        main(
            ["train", *GOOD, "--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", "t", "--vocab-size", "0"]
        )
        == 7
    )
    assert trained[0][0].model.vocab_size == 300


def test_a_teams_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["train", "--model", "no_such_module:Model", "--lr", "1"]) == exit_codes.CONFIGURATION
    assert "--model no_such_module:Model" in capsys.readouterr().err


# --- show-schedule --------------------------------------------------------------------------------------------------


def test_show_schedule(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show-schedule", "--pipeline-model-parallel-size", "3", "--microbatches", "4", "--actions"]) == 0
    text = capsys.readouterr().out
    assert [line[:8] for line in text.splitlines()[1:4]] == ["stage 0 ", "stage 1 ", "stage 2 "]
    assert "bubble" in text and "keeps at its peak: 3, 2, 1" in text and "Recv forward 0 from stage 1" in text
    assert main(["show-schedule", "--pipeline-schedule", "gpipe", "--microbatches", "4"]) == 0
    assert "keeps at its peak: 4, 4, 4, 4" in capsys.readouterr().out


@pytest.mark.parametrize("bad", [["--microbatches", "0"], ["--forward", "0"], ["--pipeline-schedule", "2f2b"], ["--x"]])
def test_show_schedule_errors(bad: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show-schedule", *bad]) == exit_codes.CONFIGURATION
    assert capsys.readouterr().err


# --- environment ----------------------------------------------------------------------------------------------------


def test_variables_follow_from_the_configuration() -> None:
    def of(*argv: str, gpu: bool = True) -> dict[str, str]:
        return environment.variables(load(argv).config, gpu)

    assert of("--device", "cpu") == of(gpu=False) == {}
    assert set(of()) == {"PYTORCH_ALLOC_CONF"} == set(of("--device", "cuda", gpu=False))
    assert of("--tensor-model-parallel-size", "2")["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
    assert of("--deterministic")["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert not any(name.startswith("NCCL_ALGO") for name in of("--deterministic"))


def test_what_a_person_set_stays() -> None:
    environ = {"A": "theirs"}
    assert environment.apply({"A": "ours", "B": "ours"}, environ) == {"B": "ours"}
    assert environ == {"A": "theirs", "B": "ours"}
    old = {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}
    assert environment.apply({"PYTORCH_ALLOC_CONF": "x"}, old) == {}


def test_variables_are_set_before_a_teams_module_is_imported(tmp_path: Path) -> None:
    """Reading the command line for them imports no model; errors are left to the reading that follows."""
    (tmp_path / "run.yaml").write_text("architecture: a.b:C\nmodel: {x: 1}\nparallel: {device: cuda}\n")
    environ: dict[str, str] = {}
    argv = ["--config", str(tmp_path / "run.yaml"), "--model.width", "3", "--deterministic"]
    assert environment.apply_early(argv, environ) == environ
    assert set(environ) == {"PYTORCH_ALLOC_CONF", "CUBLAS_WORKSPACE_CONFIG"}
    assert environment.apply_early(["--no-such-flag"], {}) == {}


def test_training_sets_variables_before_torch() -> None:
    code = (
        "import sys, types\n"
        "from megatron_lite.cli import environment\n"
        "def apply_early(argv, environ):\n"
        "    assert 'torch' not in sys.modules\n"
        "    print('first')\n"
        "    return {}\n"
        "import megatron_lite.cli.train as train\n"
        "train.apply_early = apply_early\n"
        "assert train.run(['--bf16', '--fp16']) == 2\n"
        "assert 'torch' in sys.modules\n"
    )
    assert python("-c", code).stdout == "first\n"


def test_train_reads_the_checkpoints_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron_lite.config.load import to_dict

    saved = to_dict(load([*GOOD, "--model", "llama", "--ffn-hidden-size", "96"]).config)
    monkeypatch.setattr(train, "saved_config", lambda config: saved)
    loaded = train.read(["--use-checkpoint-args", "--load", "d", "--lr", "2"])
    assert loaded.config.architecture == "llama" and loaded.config.model.ffn_hidden_size == 96
    assert loaded.config.data.seq_length == 32 and loaded.config.optimizer.lr == 2


def test_arguments_of_a_real_checkpoint(tmp_path: Path) -> None:
    from megatron_lite.checkpoint.save import save_checkpoint
    from megatron_lite.mesh.collectives import Axis

    saved = load([*GOOD, "--model", "llama", "--ffn-hidden-size", "96"]).config
    state = {"config": dataclasses.asdict(saved)}  # what the training loop stores
    save_checkpoint(tmp_path, 3, [], state, Axis.single("world"))
    loaded = train.read(["--use-checkpoint-args", "--load", str(tmp_path), "--seq-length", "16"])
    assert loaded.config.model == saved.model and loaded.config.data.seq_length == 16


def test_checkpoint_arguments_of_a_fresh_start(tmp_path: Path) -> None:
    argv = [*GOOD, "--use-checkpoint-args", "--load", str(tmp_path)]
    assert train.read([*argv, "--save", str(tmp_path)]).config.model == load(GOOD).config.model
    with pytest.raises(ConfigError, match="holds no checkpoint"):
        train.read(argv)
