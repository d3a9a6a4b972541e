"""Text from a checkpoint: the same at any tp x pp, with and without a cache, keyed choices, and clear words for bad input."""

from __future__ import annotations

import dataclasses
import math
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from byte_tokenizer import Bytes
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from megatron_lite.cli.generate import Stream, continuation
from megatron_lite.cli.main import main
from megatron_lite.config.load import load, to_dict
from megatron_lite.mesh.layout import Layout
from megatron_lite.mesh.local import RankInfo, rank_info
from megatron_lite.mesh.mesh import ProcessMesh
from megatron_lite.model.cache import KVCache
from megatron_lite.model.llama import Llama
from megatron_lite.model.protocol import ForwardContext
from megatron_lite.testing.ranks import RankFailed, run_ranks
from megatron_lite.train.assemble import assemble
from megatron_lite.train.inference import Generator, Sampling, choose, probabilities, prompt_keys
from megatron_lite.train.load_model import inference_config, load_model, open_checkpoint

ROOT = Path(__file__).parent.parent
VOCABULARY, POSITIONS, NEW = 61, 40, 12
# Two prompts of one length, and one that is given twice.
PROMPTS = [[3, 1, 4, 1, 5], [9, 2, 6], [5, 3, 5, 8, 9], [9, 2, 6], [7]]
GREEDY, SAMPLED = Sampling(temperature=0.0), Sampling(temperature=0.8, top_k=20, top_p=0.9, seed=5)
MODELS = {
    # Two key/value heads, a vocabulary that does not divide, large weights so that choices are not all alike.
    "llama": "--model llama --num-attention-heads 4 --group-query-attention --num-query-groups 2",
    "gpt": "--model gpt --num-attention-heads 2",
}
COMMON = (
    f"--num-layers 2 --hidden-size 32 --init-method-std 0.3 --seq-length 32 --max-position-embeddings {POSITIONS} --lr 1e-3 "
    f"--train-iters 1 --micro-batch-size 1 --mock-data --tokenizer-type NullTokenizer --vocab-size {VOCABULARY} "
    "--make-vocab-size-divisible-by 8 --device cpu"
)


def checkpoint(directory: Path, model: str) -> Path:
    """A checkpoint of a model that knows nothing."""
    from megatron_lite.checkpoint.save import save_checkpoint

    config = load(f"{model} {COMMON}".split(), resolve=resolve).config
    mesh = ProcessMesh.open(Layout())
    shares = [s for s in assemble(config, mesh).optimizer.shares() if s.kind == "weight"]
    save_checkpoint(directory, 7, shares, {"config": to_dict(config)}, mesh.axis("world"))
    return directory


def resolve(architecture: str) -> type:
    from megatron_lite.cli.train import resolve_model

    return resolve_model(architecture)


@pytest.fixture(scope="module")
def saved(_one_thread: None, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A checkpoint of each model."""
    return {name: checkpoint(tmp_path_factory.mktemp(name), flags) for name, flags in MODELS.items()}


@pytest.fixture(autouse=True)
def _plain_start(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """For models this small more threads only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def generator(directory: Path, dtype: str = "fp64", tp: int = 1, pp: int = 1, **options: Any) -> Generator:
    """On this rank of the default group, or alone."""
    reader = open_checkpoint(directory)
    config = inference_config(reader.state["config"], tp=tp, pp=pp, dtype=dtype, device="cpu")
    info = rank_info({})
    if tp * pp > 1:
        rank = torch.distributed.get_rank()
        info = RankInfo(rank, tp * pp, rank, tp * pp, "here", "torchrun")
    mesh, runtime = load_model(config, info, reader)
    return Generator(runtime, mesh, config.model.max_position_embeddings, **options)


# ---- the same at any layout


def _texts(directories: dict[str, Path], tp: int, pp: int) -> dict[str, Any]:
    """Everything that is compared: texts of every kind, and logits in fp32 on the last stage."""
    found: dict[str, Any] = {}
    for name, directory in directories.items():
        made = generator(directory, "fp64", tp, pp)
        for sampling in (GREEDY, SAMPLED):
            for use_cache in (True, False):
                found[f"{name} {sampling} {use_cache}"] = made.generate(PROMPTS, NEW, sampling, use_cache=use_cache)
        made.mesh.close()
        made = generator(directory, "fp32", tp, pp)
        logits = made.logits(np.array([PROMPTS[0], PROMPTS[2]]))
        found[f"{name} logits"] = None if logits is None else logits.numpy()
        made.mesh.close()
    return found


@pytest.fixture(scope="module")
def alone(saved: dict[str, Path]) -> dict[str, Any]:
    """What one process gives."""
    return _texts(saved, 1, 1)


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2), (2, 2)])
def test_layouts_give_the_same_text(saved: dict[str, Path], alone: dict[str, Any], tp: int, pp: int) -> None:
    for rank, found in enumerate(run_ranks(tp * pp, _texts, saved, tp, pp)):
        for key, value in found.items():
            if not key.endswith("logits"):
                assert value == alone[key], (rank, key)
            elif value is None:
                assert rank < tp * (pp - 1), "the last stage has logits"
            else:
                assert value.dtype == np.float32 and np.abs(value - alone[key]).max() <= 1e-4


def test_the_cache_changes_no_text(alone: dict[str, Any]) -> None:
    for name in MODELS:
        for sampling in (GREEDY, SAMPLED):
            assert alone[f"{name} {sampling} True"] == alone[f"{name} {sampling} False"]
        texts = alone[f"{name} {GREEDY} True"]
        assert all(len(text) == NEW for text in texts) and texts[1] == texts[3]
        assert len({tuple(text) for text in alone[f"{name} {SAMPLED} True"]}) == len(PROMPTS), "given twice: two texts"


def test_greedy_is_the_largest_logit_of_the_whole_text(saved: dict[str, Path], alone: dict[str, Any]) -> None:
    made = generator(saved["llama"])
    for prompt, text in zip(PROMPTS, alone[f"llama {GREEDY} True"], strict=True):
        logits = made.logits(np.array([[*prompt, *text]]))
        assert logits is not None
        assert logits[0].argmax(-1)[len(prompt) - 1 : -1].tolist() == text


def test_logits_of_fp32_are_those_of_fp64(saved: dict[str, Path], alone: dict[str, Any]) -> None:
    for name, directory in saved.items():
        logits = generator(directory, "fp64").logits(np.array([PROMPTS[0], PROMPTS[2]]))
        assert logits is not None and logits.shape == (2, 5, VOCABULARY)
        assert np.abs(logits.numpy() - alone[f"{name} logits"]).max() <= 1e-4


def test_the_cache_saves_work(saved: dict[str, Path]) -> None:
    """With it a new token costs one token's pass, without it the whole text's."""
    made, passes = generator(saved["llama"]), []
    infer = made.runtime.infer
    made.runtime.infer = lambda ctx: (passes.append(ctx.batch.tokens.numel()), infer(ctx))[1]  # type: ignore[method-assign]
    made.generate([[1, 2, 3]], 4, GREEDY)
    assert passes == [3, 1, 1, 1]
    passes.clear()
    made.generate([[1, 2, 3]], 4, GREEDY, use_cache=False)
    assert passes == [3, 4, 5, 6]


# ---- choices


def test_a_text_does_not_depend_on_the_prompts_beside_it(saved: dict[str, Path]) -> None:
    made = generator(saved["llama"])
    texts = made.generate(PROMPTS, NEW, SAMPLED)
    for number in (0, 1, 2, 4):
        assert made.generate([PROMPTS[number]], NEW, SAMPLED) == [texts[number]]
    order = [4, 1, 3, 0, 2]
    assert made.generate([PROMPTS[i] for i in order], NEW, SAMPLED) == [texts[i] for i in order]
    assert made.generate(PROMPTS, NEW, dataclasses.replace(SAMPLED, seed=6)) != texts
    small = generator(saved["llama"], batch_tokens=1)  # one prompt at a time
    assert small.generate(PROMPTS, NEW, SAMPLED) == texts
    assert made.generate(PROMPTS, NEW + 3, SAMPLED)[0][:NEW] == texts[0], "a longer text begins with the shorter one"


def test_keys() -> None:
    keys = prompt_keys([[1], [2], [1]], 0)
    assert len(set(keys)) == 3 and keys[:2] == prompt_keys([[1], [2]], 0) == prompt_keys([(1,), (2,)], 0)
    assert keys[0] != prompt_keys([[1]], 1)[0] and keys[0] != prompt_keys([[1, 1]], 0)[0]
    assert all(0 <= part < 2**64 for key in keys + prompt_keys([[3]], -(2**70)) for part in key)


def _allowed(logits: np.ndarray, sampling: Sampling) -> dict[int, float]:
    """Ids that may be chosen and their probabilities, token by token."""
    weights = [math.exp((x - max(logits)) / sampling.temperature) for x in logits.tolist()]
    ranked = sorted(range(len(weights)), key=lambda i: (-logits[i], i))
    kept: list[int] = []
    for i in ranked:
        enough = sampling.top_p < 1 and sum(weights[j] for j in kept) / sum(weights) >= sampling.top_p
        if enough or (sampling.top_k and len(kept) == sampling.top_k):
            break
        kept.append(i)
    return {i: weights[i] / sum(weights[j] for j in kept) for i in kept}


@settings(deadline=None, max_examples=200)
@given(
    logits=st.lists(st.integers(-40, 40), min_size=1, max_size=12),
    temperature=st.sampled_from([0.3, 1.0, 2.5]),
    top_k=st.integers(0, 14),
    top_p=st.sampled_from([0.05, 0.3, 0.77, 0.95, 1.0]),
)
def test_top_k_and_top_p_against_brute_force(logits: list[int], temperature: float, top_k: int, top_p: float) -> None:
    sampling = Sampling(temperature, top_k, top_p)
    values = np.array(logits) / 10.0
    ids, chances = probabilities(values, sampling)
    want = _allowed(values, sampling)
    assert ids.tolist() == list(want)  # the likeliest first
    assert np.allclose(chances, list(want.values()), rtol=1e-12, atol=0)
    assert choose(values, sampling, (1, 2), 3) in want


@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (3, 1.0), (0, 0.8), (4, 0.95)])
def test_choices_have_the_probabilities(top_k: int, top_p: float) -> None:
    logits, sampling, n = np.array([0.5, 2.0, -1.0, 1.5, 1.0, -30.0]), Sampling(1.3, top_k, top_p), 3000
    want = _allowed(logits, sampling)
    counts = np.bincount([choose(logits, sampling, (7, 11), position) for position in range(n)], minlength=6)
    for i in range(6):
        chance = want.get(i, 0.0)
        assert abs(counts[i] - n * chance) <= 5 * math.sqrt(n * chance * (1 - chance)) + 1e-9, (i, counts, want)


def test_choices_at_the_edges() -> None:
    logits = np.array([1.0, 3.0, 3.0, -math.inf])
    assert choose(logits, GREEDY, (0, 0), 0) == 1, "the first of equal ones"
    assert {choose(logits, Sampling(1e-300), (0, 0), i) for i in range(20)} == {1, 2}
    assert {choose(logits, Sampling(top_k=1), (0, 0), i) for i in range(20)} == {1}
    assert {choose(logits, Sampling(top_p=1e-9), (0, 0), i) for i in range(20)} == {1}
    assert 3 not in {choose(logits, Sampling(1e3), (0, 0), i) for i in range(200)}
    for bad in (math.nan, math.inf):
        with pytest.raises(FloatingPointError, match="position 5 are not finite"):
            choose(np.array([0.0, bad]), Sampling(), (0, 0), 5)


def test_options_are_checked() -> None:
    assert SAMPLED.problems() == GREEDY.problems() == []
    for bad in (Sampling(-1.0), Sampling(math.nan), Sampling(top_k=-1), Sampling(top_p=0.0), Sampling(top_p=1.5)):
        assert len(bad.problems()) == 1 and "--" in bad.problems()[0]


def test_a_text_ends_before_its_stop_token(saved: dict[str, Path]) -> None:
    made, heard = generator(saved["llama"]), []
    texts = made.generate(PROMPTS, NEW, GREEDY)
    stop = texts[0][4]
    cut = [text[: text.index(stop)] if stop in text else text for text in texts]
    assert made.generate(PROMPTS, NEW, GREEDY, stop_id=stop, on_token=lambda *what: heard.append(what)) == cut
    assert [[t for n, t in heard if n == number] for number in range(len(PROMPTS))] == cut


# ---- models of a team


class NoCacheBlock(nn.Module):
    """A block whose attention knows no cache."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, hidden: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        out = self.block(hidden, dataclasses.replace(ctx, cache=None))
        assert isinstance(out, torch.Tensor)
        return out


class NoCache(Llama):
    """One such block."""

    def make_block(self, index: int) -> nn.Module:
        block = super().make_block(index)
        return NoCacheBlock(block) if index == 1 else block


class FailsOnOneRank(Llama):
    """Its second tp rank raises in the third pass."""

    def make_block(self, index: int) -> nn.Module:
        block = super().make_block(index)
        if self.parallel.axis.size > 1 and self.parallel.axis.index == 1 and index == 0:
            calls: list[int] = []

            def fail(*_: object) -> None:
                calls.append(1)
                if len(calls) == 3:
                    raise RuntimeError("this rank has had enough")

            block.register_forward_pre_hook(fail)
        return block


class NotFinite(Llama):
    """Its logits are not numbers."""

    def make_head(self) -> nn.Module:
        head = super().make_head()
        logits = head.logits
        head.logits = lambda hidden, ctx: logits(hidden, ctx) * math.nan  # type: ignore[assignment]
        return head


def _without_a_cache(directory: Path, pp: int) -> tuple[list[list[int]], list[list[int]], bool | None]:
    made = generator(directory, pp=pp)
    return made.generate(PROMPTS, 4, GREEDY), made.generate(PROMPTS, 4, GREEDY, use_cache=False), made.takes_cache


def test_a_model_without_a_cache_is_noticed(tmp_path: Path) -> None:
    """Also where only one stage holds such a block: all stages go without."""
    flags = MODELS["llama"].replace("--model llama", "--model test_generate:NoCache")
    directory = checkpoint(tmp_path, flags)
    alone = _without_a_cache(directory, 1)
    assert alone[0] == alone[1] and alone[2] is False
    assert run_ranks(2, _without_a_cache, directory, 2) == [alone, alone]


def _generate(directory: Path, tp: int, pp: int) -> None:
    generator(directory, tp=tp, pp=pp).generate([[1, 2]], 3, SAMPLED)


def test_logits_that_are_not_finite(tmp_path: Path) -> None:
    directory = checkpoint(tmp_path, MODELS["llama"].replace("--model llama", "--model test_generate:NotFinite"))
    with pytest.raises(FloatingPointError, match="the logits at position 2 are not finite"):
        _generate(directory, 1, 1)
    with pytest.raises(RankFailed, match="rank 1 of 2 failed(.|\n)*not finite"):
        run_ranks(2, _generate, directory, 1, 2, timeout=30)


# ---- the engine's own errors


def test_prompts_that_cannot_run(saved: dict[str, Path]) -> None:
    made = generator(saved["llama"])
    for prompts, new, text in (
        ([[1], []], 3, "prompt 2 is empty"),
        ([[1] * 30], 11, "prompt 1: its 30 tokens and 11 new ones are more than the model's 40 positions"),
        ([[1, VOCABULARY]], 3, "token ids 1 to 61: the model's vocabulary is 0 to 60"),
        ([[-1, 2]], 3, "token ids -1 to 2"),
    ):
        with pytest.raises(ValueError, match=text):
            made.generate(prompts, new, GREEDY)
    assert len(made.generate([[1] * 30], 10, GREEDY)[0]) == 10, "all positions"


def test_a_cache_that_is_full(saved: dict[str, Path]) -> None:
    with pytest.raises(ValueError, match="3 tokens do not fit a key/value cache made for 2"):
        generator(saved["llama"]).logits(np.array([[1, 2, 3]]), KVCache(2))


# ---- the command


def command(capsys: pytest.CaptureFixture[str], *args: object) -> tuple[int, str, str]:
    code = main(["generate", *map(str, args)])
    return (code, *capsys.readouterr())


def numbers(tokens: Sequence[int]) -> str:
    return " ".join(map(str, tokens))


def test_command(saved: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Prompts of flags and a file, in their order; one prompt's text, which is printed as it comes, is the same."""
    file = tmp_path / "prompts.txt"
    file.write_text(f"{numbers(PROMPTS[2])}\n\n{numbers(PROMPTS[4])}\n")
    options = ["--load", saved["llama"], "--dtype", "fp64", "--max-new-tokens", NEW, "--device", "cpu"]
    prompts = ["--prompt", numbers(PROMPTS[0]), "--prompt", numbers(PROMPTS[1])]
    made = generator(saved["llama"])
    for flags, sampling in (
        (["--greedy"], GREEDY),
        (["--temperature", "0"], GREEDY),
        (["--temperature", 0.8, "--top-k", 20, "--top-p", 0.9, "--seed", 5], SAMPLED),
        (["--no-cache", "--seed", 5], Sampling(seed=5)),
    ):
        chosen = [PROMPTS[i] for i in (0, 1, 2, 4)]
        texts = made.generate(chosen, NEW, sampling, stop_id=VOCABULARY - 1)
        code, out, err = command(capsys, *options, *prompts, "--prompts-file", file, *flags)
        assert (code, err) == (0, "")
        lines = [numbers([*prompt, *text]) for prompt, text in zip(chosen, texts, strict=True)]
        assert out.splitlines() == lines
        assert command(capsys, *options, *prompts[:2], *flags) == (0, lines[0] + "\n", "")
    assert command(capsys, *options, *prompts[:2], "--greedy", "--ckpt-step", 7)[1].startswith(numbers(PROMPTS[0]))


BAD: list[tuple[str, str]] = [
    ("--prompt ''", "prompt 1 is empty: give at least one character"),
    ("--prompt '  '", "prompt 1 is empty: give at least one token"),
    ("", "no prompt: give --prompt or --prompts-file"),
    ("--prompts-file EMPTY", "holds no prompt"),
    ("--prompts-file NOWHERE", "--prompts-file NOWHERE: No such file or directory"),
    ("--prompts-file BINARY", "is not UTF-8"),
    ("--prompt '1 2' --max-new-tokens 39", "prompt 1: its 2 tokens and 39 new ones are more than the model's 40 positions"),
    ("--prompt 61", "id 61 is outside [0, 61)"),
    ("--prompt word", "not numbers apart by spaces"),
    ("--prompt 1 --max-new-tokens 0", "--max-new-tokens 0: at least 1"),
    ("--prompt 1 --top-p 0 --temperature -2", "--temperature -2.0: 0 (greedy) or more; --top-p 0.0: above 0"),
    ("--prompt 1 --load NOWHERE", "NOWHERE holds no checkpoint"),
    ("--prompt 1 --ckpt-step 8", "step 8"),
    ("--prompt 1 --load DAMAGED", "DAMAGED"),
    ("--prompt 1 --tensor-model-parallel-size 2", "tp 2 x pp 1 = 2 ranks, but 1 were started: start torchrun --nproc-per-node 2"),
    ("--prompt 1 --tensor-model-parallel-size 0", "tensor-model-parallel-size 0"),
    ("--prompt 1 --tokenizer-model NOWHERE --device cuda", "torch sees no GPU"),
]


@pytest.mark.parametrize(("args", "text"), BAD, ids=[args or "nothing" for args, _ in BAD])
def test_bad_input(
    args: str, text: str, saved: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit 2, one line that says it, nothing on stdout."""
    import shlex
    import shutil

    if "cuda" in args and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    monkeypatch.chdir(tmp_path)
    Path("EMPTY").write_text("\n\n")
    Path("BINARY").write_bytes(b"\xff\xfe1")
    shutil.copytree(saved["llama"], "DAMAGED")
    for file in Path("DAMAGED").glob("*/*.safetensors"):
        file.write_bytes(file.read_bytes()[:-9])
    words = ["--load", str(saved["llama"]), "--max-new-tokens", "3", *shlex.split(args)]
    code, out, err = command(capsys, *words)
    assert (code, out) == (2, "") and text in err and len(err.splitlines()) == 1, err


def test_damage_that_only_the_bytes_show(saved: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import shutil

    directory = tmp_path / "damaged"
    shutil.copytree(saved["llama"], directory)
    (file,) = directory.glob("*/*.safetensors")
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)
    code, out, err = command(capsys, "--load", directory, "--prompt", "1", "--max-new-tokens", 4)
    assert (code, out) == (2, "") and "do not match their checksum" in err


def test_layouts_that_the_model_does_not_take(saved: dict[str, Path]) -> None:
    state = open_checkpoint(saved["llama"]).state["config"]
    with pytest.raises(ValueError, match="3"):
        inference_config(state, tp=3)
    with pytest.raises(ValueError, match="2 blocks cannot fill 3 pipeline stages"):
        inference_config(state, pp=3)
    odd = {**state, "parallel": {**state["parallel"], "sequence_parallel": True, "distributed_backend": "nccl"}}
    config = inference_config(odd, dtype="bf16", device="cpu")
    assert config.training.bf16 and config.parallel.distributed_backend is None and not config.parallel.sequence_parallel


# ---- printing


class Words(Bytes):
    """One that leaves out the space at the beginning of a text, as SentencePiece's do."""

    def decode(self, ids: Sequence[int]) -> str:
        return super().decode(ids).removeprefix(" ")


@pytest.mark.parametrize("after", ["plain", " räum 漢字 🚀 end", "ends within \U0001f680"[:-1] + "\ufffd"])
def test_a_stream_prints_the_text(after: str, capsys: pytest.CaptureFixture[str]) -> None:
    ids = list(after.encode())
    stream = Stream(Bytes(), "é:", list("é:".encode()))
    pieces = [capsys.readouterr().out]
    for token in ids:
        stream.add(token)
        pieces.append(capsys.readouterr().out)
    stream.end()
    pieces.append(capsys.readouterr().out)
    assert "".join(pieces) == f"é:{after}\n"
    assert "\ufffd" not in "".join(pieces[:-1]), "characters come when they are whole"
    assert sum(map(bool, pieces)) > len(after) / 2, "as they come, not at the end"


def test_a_stream_that_ends_within_a_character(capsys: pytest.CaptureFixture[str]) -> None:
    stream = Stream(Bytes(), "a", [97])
    for token in "é".encode()[:1]:
        stream.add(token)
    stream.end()
    assert capsys.readouterr().out == "a\ufffd\n"


def test_spaces_between_prompt_and_text() -> None:
    words = Words()
    assert continuation(words, words.encode(" a"), words.encode(" b")) == " b"
    assert continuation(words, [], words.encode(" b")) == "b"


# ---- several processes


def torchrun(cwd: Path, *args: object) -> subprocess.CompletedProcess[str]:
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    path = os.pathsep.join(filter(None, [str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    words = [*start, "-m", "megatron_lite", "generate", *map(str, args)]
    return subprocess.run(words, cwd=cwd, env=environment, capture_output=True, text=True, timeout=120)


def test_two_processes(saved: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--load", saved["llama"], "--prompt", "3 1 4", "--dtype", "fp64", "--max-new-tokens", 9, "--device", "cpu"]
    want = command(capsys, *options)[1]
    done = torchrun(tmp_path, *options, "--tensor-model-parallel-size", 2)
    assert (done.returncode, done.stdout) == (0, want), done.stderr


def test_too_many_processes_say_so_once(saved: dict[str, Path], tmp_path: Path) -> None:
    done = torchrun(tmp_path, "--load", saved["llama"], "--prompt", "3 1 4")
    text = "megatron-lite: error: tp 1 x pp 1 = 1 ranks, but 2 were started: start without torchrun"
    assert done.returncode != 0 and done.stdout == "" and done.stderr.count(text) == 1, done.stderr
    assert "Traceback (most recent call last)" not in done.stderr.split(text)[0]


def test_one_ranks_failure_ends_both(tmp_path: Path) -> None:
    directory = checkpoint(tmp_path / "ck", MODELS["llama"].replace("--model llama", "--model test_generate:FailsOnOneRank"))
    done = torchrun(tmp_path, "--load", directory, "--prompt", "3 1 4", "--max-new-tokens", 4, "--tensor-model-parallel-size", 2)
    assert done.returncode != 0 and "this rank has had enough" in done.stderr, done.stderr
    assert "rank 1 on" in done.stderr and "rank 0 on" not in done.stderr
