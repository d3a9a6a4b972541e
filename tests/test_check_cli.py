"""``megatron-lite check``: its table and exit code, for the built-in models, a team's own, foreign ones and wrong ones."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from train_toys import environment

from megatron_lite.cli import check
from megatron_lite.cli.main import main
from megatron_lite.testing import ranks

EXAMPLES = Path(__file__).parents[1] / "examples"
EQUAL = r"equal, deviation (\d\.\de-1\d|0\.0e\+00) \(\d+\.\d s\)"
REFUSED = "refused: .*embed.tokens.weight.* and 33 more. Build them from megatron_lite.tensor.layers"


@pytest.fixture(autouse=True)
def _the_pool_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks of this test run go on to other tests."""
    monkeypatch.setattr(ranks, "close_pool", lambda: None)


def table(text: str) -> dict[tuple[str, str], str]:
    """(layout, options) -> verdict."""
    rows = [line.split(" | ", 2) for line in text.splitlines() if line.startswith("  tp ")]
    return {(layout.strip(), options.strip()): verdict for layout, options, verdict in rows}


def test_the_command_itself() -> None:
    command = [sys.executable, "-m", "megatron_lite", "check", "llama", "--max-ranks", "2"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=120)
    assert done.returncode == 0, done.stderr
    rows = table(done.stdout)
    assert list(rows) == [
        (f"tp {tp} x pp {pp} x dp {dp}", title)
        for tp, pp, dp in ((1, 1, 2), (1, 2, 1), (2, 1, 1))
        for title, _, _ in check.OPTIONS
    ]
    assert all(re.fullmatch(EQUAL, verdict) for verdict in rows.values()), done.stdout
    assert done.stdout.endswith("llama: every layout that it takes computes the same\n")


@pytest.mark.nightly
@pytest.mark.parametrize("argv", [[], ["gpt"], ["my_model:MyModel"]], ids=str)
def test_whole_tables(argv: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(EXAMPLES)
    assert main(["check", *argv]) == 0
    assert capsys.readouterr().out.count("equal, deviation") == 11 * 3 * (1 if argv else 2)


def test_a_teams_own_model_gets_tiny_sizes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(EXAMPLES)
    assert (
        main(["check", "my_model:MyModel", "--max-ranks", "2", "--global-batch-size", "4", "--model.logit-cap", "5"])
        == 0
    )
    rows = table(capsys.readouterr().out)
    assert len(rows) == 9 and all(re.fullmatch(EQUAL, verdict) for verdict in rows.values())
    model = check._model("my_model:MyModel", ["--model.num-layers", "3", "--model.hidden_size=64"], check_sizes())
    assert (model.num_layers, model.hidden_size, model.vocab_size) == (3, 64, 61)
    assert model.ffn_hidden_size is None  # follows from the hidden size that was given


def check_sizes() -> dict[str, int]:
    from megatron_lite.testing.layouts import TINY

    return TINY


REQUIRED = """
from dataclasses import dataclass
from megatron_lite.config.transformer import TransformerConfig
from megatron_lite.model.gpt import GPT

@dataclass(frozen=True)
class Config(TransformerConfig):
    num_layers: int
    hidden_size: int
    other: int
    vocab_size: int = 50

class Model(GPT):
    Config = Config
"""


def write(folder: Path, name: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / f"{name}.py").write_text(text)
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))


def test_fields_without_a_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Sizes that we know get tiny values; what else is required is asked for."""
    text = REQUIRED.replace("@dataclass(frozen=True)", "@dataclass(frozen=True, kw_only=True)")
    write(tmp_path, "team_required", text, monkeypatch)
    argv = ["check", "team_required:Model", "--max-ranks", "1"]
    assert main(argv) == 2
    assert "--model.other is required" in capsys.readouterr().err
    assert main([*argv, "--model.other", "1"]) == 0
    out = capsys.readouterr().out
    assert list(table(out)) == [("tp 1 x pp 1 x dp 1", title) for title, _, _ in check.OPTIONS]


@pytest.mark.parametrize("name", ["shared_block:SharedModel", "parallel_block:ParallelBlockModel"])
def test_foreign_models(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    small = "--max-ranks 2 --global-batch-size 6 --model.num-layers 2"
    assert main(["check", f"foreign.{name}", *small.split()]) == 0
    rows = table(capsys.readouterr().out)
    assert len(rows) == 9 and all(re.fullmatch(EQUAL, verdict) for verdict in rows.values()), rows


def test_ordinary_layers_are_refused_under_tp_alone(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["check", "foreign.plain_linear:PlainModel", "--max-ranks", "2", "--global-batch-size", "4"]
    assert main(argv) == 0
    for (layout, _), verdict in table(capsys.readouterr().out).items():
        assert re.fullmatch(f"{REFUSED}.*" if layout.startswith("tp 2") else EQUAL, verdict), (layout, verdict)


def test_what_cannot_be_split_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--num-layers 1 --num-attention-heads 3 --hidden-size 24 --max-ranks 2 --global-batch-size 3"
    assert main(["check", "llama", *flags.split()]) == 0
    rows = table(capsys.readouterr().out)
    assert rows["tp 1 x pp 1 x dp 2", "plain"] == "left out: 3 rows do not divide by 2 data-parallel ranks"
    assert "pipeline" in rows["tp 1 x pp 2 x dp 1", "plain"] and "refused" in rows["tp 1 x pp 2 x dp 1", "plain"]
    assert re.match("refused: .*num-attention-heads 3", rows["tp 2 x pp 1 x dp 1", "plain"])


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["gtp"], "gtp"),
        (["nowhere:Model"], "no module nowhere"),
        (["llama", "--tensor-model-parallel-size", "2"], "tensor_model_parallel_size: `check` takes the model's flags"),
        (["llama", "--hiden-size", "8"], "--hidden-size"),
        (["gpt", "--num-attention-heads", "5"], "cannot run on one rank: .*hidden-size 32"),
        (["gpt", "--seq-length", "1"], "at least 2 tokens"),
    ],
)
def test_bad_input(argv: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", *argv]) == 2
    assert re.search(words, capsys.readouterr().err)


# ---- wrong models: each is right on one process

BASE = """
import torch
from torch import nn
from megatron_lite.config.transformer import LlamaConfig
from megatron_lite.model.blocks import Block
from megatron_lite.model.llama import Llama
from megatron_lite.tensor.regions import reduce_from_tp

class Base(Llama):
    pass
"""

REDUCES_TWICE = """
class Twice(Block):
    def forward(self, hidden, ctx):
        return reduce_from_tp(super().forward(hidden, ctx), self.parallel.axis)

class Model(Base):
    def make_block(self, index):
        block = Twice(self.config, self.parallel, index)
        block.parallel = self.parallel
        return block
"""

FORGETS_A_PARTIAL_SUM = """
class Model(Base):
    def make_block(self, index):
        from dataclasses import replace
        block = super().make_block(index)
        weight = block.mlp_norm.weight
        weight.spec = replace(weight.spec, partial_over=())
        return block
"""

MEAN_INSTEAD_OF_SUM = """
class Model(Base):
    def make_head(self):
        head = super().make_head()
        forward = head.forward
        head.forward = lambda hidden, ctx: forward(hidden, ctx) / ctx.batch.rows
        return head
"""

DRAWS_AT_RANDOM = """
class Noisy(Block):
    def forward(self, hidden, ctx):
        return super().forward(hidden, ctx) * (1 + 0.01 * torch.rand(hidden.shape))

class Model(Base):
    def make_block(self, index):
        return Noisy(self.config, self.parallel, index)
"""

RAISES = """
class Model(Base):
    def make_block(self, index):
        block = super().make_block(index)
        if self.parallel.sequence_parallel:
            block.forward = lambda hidden, ctx: hidden[10**6]
        return block
"""

FORGETS_ITS_TIE = '''
class Model(Base):
    """The head uses the embedding's own parameter: one process holds one tensor, a pipeline two."""

    def make_embed(self):
        self.table = super().make_embed()
        return self.table

    def make_head(self):
        head = super().make_head()
        if hasattr(self, "table"):
            head.output.weight = self.table.tokens.weight
        return head
'''


@pytest.mark.parametrize(
    ("text", "wrong", "words"),
    [
        (REDUCES_TWICE, {"tp 2": check.OPTIONS}, "losses of step 1"),
        (
            FORGETS_A_PARTIAL_SUM,
            {"tp 2": check.OPTIONS[1:2]},
            r"gradient of step 1 differs [^:]*: blocks.1.mlp_norm.weight \([^)]*\), blocks.0.mlp_norm.weight \([^)]*\)$",
        ),
        (MEAN_INSTEAD_OF_SUM, {"tp 1 x pp 1 x dp 2": check.OPTIONS}, "losses of step 1"),
        (DRAWS_AT_RANDOM, {"tp": check.OPTIONS}, "losses of step 1"),
        (RAISES, {"tp 2": check.OPTIONS[1:2]}, "IndexError: index 1000000 is out of bounds"),
    ],
    ids=["reduces twice", "forgets a partial sum", "mean instead of sum", "draws at random", "raises"],
)
def test_a_wrong_model_is_not_equal(
    text: str,
    wrong: dict[str, tuple[tuple[str, object, object], ...]],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    request: pytest.FixtureRequest,
) -> None:
    name = "wrong_" + re.sub(r"\W", "_", request.node.callspec.id)
    write(tmp_path, name, BASE + text, monkeypatch)
    small = "--max-ranks 2 --num-layers 2 --global-batch-size 6"
    assert main(["check", f"{name}:Model", *small.split()]) == 1
    out = capsys.readouterr().out
    ((start, options),) = wrong.items()
    titles = [title for title, _, _ in options]
    for (layout, title), verdict in table(out).items():
        if layout.startswith(start) and title in titles:
            assert re.match(f"NOT EQUAL: .*{words}", verdict), (layout, title, verdict)
        elif start != "tp 1 x pp 1 x dp 2":
            assert re.fullmatch(EQUAL, verdict), (layout, title, verdict)
    assert out.endswith(f"{name}:Model: NOT EQUAL\n")


def test_a_tie_that_is_not_declared_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, "wrong_tie", BASE + FORGETS_ITS_TIE, monkeypatch)
    assert main(["check", "wrong_tie:Model", "--max-ranks", "1"]) == 2
    assert "embed.tokens.weight and head.output.weight are one parameter" in capsys.readouterr().err


CUT_OFF = """
class Cut(Block):
    def __init__(self, config, parallel, index):
        super().__init__(config, parallel, index)
        self.gate = replicated(parallel, (4,), 1.0)

    def forward(self, hidden, ctx):
        return super().forward(hidden.detach(), ctx)

class Model(Base):
    def make_block(self, index):
        return Cut(self.config, self.parallel, index)
"""

IN_FP32 = """
class Narrow(Block):
    def __init__(self, config, parallel, index):
        super().__init__(config, parallel, index)
        self.gate = replicated(parallel, (config.hidden_size,), 0.1)

    def forward(self, hidden, ctx):
        return super().forward(hidden, ctx) + (hidden.float() * self.gate.float()).to(hidden.dtype)

class Model(Base):
    def make_block(self, index):
        return Narrow(self.config, self.parallel, index)
"""


def test_what_check_tells_besides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Parameters without a gradient, which every layout leaves alike; fp32 inside a model of fp64."""
    base = f"{BASE}\nfrom megatron_lite.tensor.layers import replicated\n"
    small = "--max-ranks 2 --num-layers 2 --global-batch-size 2"
    write(tmp_path, "cut_off", base + CUT_OFF, monkeypatch)
    assert main(["check", "cut_off:Model", *small.split()]) == 0
    said = capsys.readouterr().out
    assert "NO GRADIENT in any step: blocks.0.attention.key.weight" in said and "more: never used, or cut off" in said, said
    write(tmp_path, "in_fp32", base + IN_FP32, monkeypatch)
    assert main(["check", "in_fp32:Model", *small.split()]) == 1
    said = capsys.readouterr().out
    assert "; looks like fp32" in said and "look for .float()" in said and "NO GRADIENT" not in said, said
