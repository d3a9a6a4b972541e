"""examples/quickstart/train_tokenizer.py: what it reads, what it samples, how it cuts, and that the fast path takes it."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from megatron_lite.clean.shards import ShardWriter
from megatron_lite.text.tokenizer import build_tokenizer
from megatron_lite.text.tokenizer_fast import encoder_of

SCRIPT = Path(__file__).parent.parent / "examples" / "quickstart" / "train_tokenizer.py"
CLAUSE = "领域的改善离不开每一个人的努力"


def train(out: Path, *flags: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, SCRIPT, "--out", out, "--vocab-size", "700", *flags]
    return subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=120)


def line(text: str, key: str = "text") -> bytes:
    return json.dumps({key: text}, ensure_ascii=False).encode() + b"\n"


def tokens(out: Path) -> set[str]:
    tokenizer = Tokenizer.from_file(str(out / "tokenizer.json"))
    return {tokenizer.decode([i]) for i in range(tokenizer.get_vocab_size())}


def test_it_reads_what_data_clean_writes_and_other_inputs_and_says_how_long_tokens_are(tmp_path: Path) -> None:
    (tmp_path / "shards").mkdir()
    with ShardWriter(tmp_path / "shards") as writer:
        writer.add(b"".join(line(f"{CLAUSE}。第{i}页") for i in range(200)))
    (tmp_path / "plain.txt").write_text("|".join(f"a zebra of stripe {i}" for i in range(200)))
    flags = ("--input", tmp_path / "shards", tmp_path / "*.txt", "--document-separator", "|")
    done = train(tmp_path / "one", *flags)
    assert done.returncode == 0, done.stderr
    assert f"{tmp_path}/shards, mostly Han: 4 texts held out, " in done.stdout
    assert f"{tmp_path}/*.txt, other: 4 texts held out, " in done.stdout and " characters per token" in done.stdout
    assert " zebra" in tokens(tmp_path / "one") and "改善" in "".join(tokens(tmp_path / "one"))
    assert train(tmp_path / "two", *flags).returncode == 0
    first, second = ((tmp_path / name / "tokenizer.json").read_bytes() for name in ("one", "two"))
    assert first == second
    (tmp_path / "gbk.jsonl").write_bytes(line("另一个", "body").decode().encode("gb18030") * 60)
    assert (
        train(
            tmp_path / "gbk", "--input", tmp_path / "gbk.jsonl", "--encoding", "gb18030", "--json-keys", "body"
        ).returncode
        == 0
    )
    assert "另一个" in tokens(tmp_path / "gbk")
    for given, why in [(tmp_path / "none", "no such file"), (tmp_path / "gbk.jsonl", "no text under text")]:
        refused = train(tmp_path / "no", "--input", given)
        assert refused.returncode == 1 and why in refused.stderr and "Traceback" not in refused.stderr


def test_a_sample_is_taken_from_all_over(tmp_path: Path) -> None:
    """Each tenth of the input has a word of its own."""
    files = [tmp_path / f"{i}.jsonl" for i in range(2)]
    for i, file in enumerate(files):
        file.write_bytes(b"".join(line(f"word{'abcdefghij'[5 * i + j // 1000]} " * 9) for j in range(5000)))
    assert train(tmp_path / "out", "--input", *files, "--sample-mb", 0.2).returncode == 0
    assert {f"word{letter}" for letter in "abcdefghij"} <= {token.strip() for token in tokens(tmp_path / "out")}


@pytest.mark.parametrize("pattern", ["gpt2", "llama3", "deepseek"])
def test_clauses_are_no_tokens_and_the_fast_path_takes_it(tmp_path: Path, pattern: str) -> None:
    chance = random.Random(1)
    clauses = [CLAUSE, "GDP增长", "China's 12345 isn't\r\n\n  x = 3", "かなカナ漢字", " spaced 汉字"]
    text = b"".join(line("，".join(chance.choices(clauses, k=9))) for _ in range(150))
    (tmp_path / "a.jsonl").write_bytes(text)
    assert train(tmp_path / "t", "--input", tmp_path / "a.jsonl", "--pattern", pattern).returncode == 0
    found = tokens(tmp_path / "t")
    assert max(len(token.encode()) for token in found if token != "<|endoftext|>") == 24
    assert ("GDP增长" in found) == (pattern != "deepseek") and "GDP" in "".join(found)
    tokenizer = build_tokenizer("HuggingFaceTokenizer", model=str(tmp_path / "t"))
    assert encoder_of(tokenizer, [text.decode()]).is_fast


def test_special_tokens_are_reserved(tmp_path: Path) -> None:
    """Tokens of a chat template: ids of their own, which take from the vocabulary and are declared special."""
    (tmp_path / "a.jsonl").write_bytes(line("some words <|im_end|> " * 30) * 50)
    chat = ("<|im_start|>", "<|im_end|>")
    assert train(tmp_path / "t", "--input", tmp_path / "a.jsonl", "--vocab-size", 280, "--special-tokens", *chat).returncode == 0
    tokenizer = build_tokenizer("HuggingFaceTokenizer", model=str(tmp_path / "t"))
    assert tokenizer.vocab_size <= 280 and set(tokenizer.special) == {"<|endoftext|>", *chat}
    assert tokenizer.eod_id == tokenizer.special["<|endoftext|>"]
    for flags in (("--special-tokens", "a", "a"), ("--special-tokens", "<|endoftext|>"), ("--special-tokens", " "), ("--vocab-size", 256)):
        refused = train(tmp_path / "no", "--input", tmp_path / "a.jsonl", *flags)
        assert refused.returncode == 2 and ("each once, and none empty" in refused.stderr or "at least 257" in refused.stderr)
