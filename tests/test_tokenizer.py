"""Tokenizers: every kind of file, the end-of-document token, refusals, and GPT-2's pair of files against a library."""

from __future__ import annotations

import base64
import json
import pickle
import sysconfig
import time
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from megatron_lite.text.tokenizer import READ_BY, NullTokenizer, SentencePieceTokenizer, build_tokenizer, kind_of
from megatron_lite.text.tokenizer_bpe import LONGEST_SPACE

SCRIPTS = (
    "The cat's naïve café — it'll cost 1,234.56 €!  And\ttabs,\r\nnew lines   \n\n  'll 've 'Re",
    "今天天气很好。我们去公园吧！“好的”，他说。",
    "Привет, мир! Это проверка № 7. Ωμέγα και άλφα",
    "नमस्ते दुनिया ١٢٣ שלום emoji 😀👩‍👩‍👧 \u00a0\u2028\x85\u200b end",
    " lots   of      space \x00\x01 control <|endoftext|> spelled out",
)


def real_text() -> list[str]:
    """Sources of the standard library: real text that every machine has."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return [f.read_text(encoding="utf-8", errors="replace") for f in files[:60]]


class Exploit:
    """Its pickle writes a file when it is read."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return open, (str(self.marker), "w")


# --- Hugging Face ---------------------------------------------------------------------------------------------------


def hugging_face(directory: Path, template: str | None = None, end: Any = None, **more: Any) -> Path:
    """A toy tokenizer.json of whole words. ``end``: eos_token of a tokenizer_config.json beside it."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    words = ["[UNK]", "<s>", "</s>", "<|endoftext|>", "hello", "world"]
    fast = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    fast.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast.add_special_tokens(words[1:4])
    if template is not None:
        named = [(w, words.index(w)) for w in words[1:4]]
        fast.post_processor = processors.TemplateProcessing(single=template, special_tokens=named)
    if "truncation" in more:
        fast.enable_truncation(more["truncation"])
        fast.enable_padding(length=20)
    directory.mkdir(exist_ok=True)
    fast.save(str(directory / "tokenizer.json"))
    if end is not None:
        (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": end}))
    return directory


def test_without_end_token_is_refused(tmp_path: Path) -> None:
    path = str(hugging_face(tmp_path / "a"))
    with pytest.raises(ValueError, match=r"declares no end-of-document token.*<s>, </s>.*--eod-token"):
        build_tokenizer("HuggingFaceTokenizer", model=path)
    with pytest.raises(ValueError, match=r"'<eod>' is not in .*tokenizer\.json"):
        build_tokenizer("HuggingFaceTokenizer", model=path, eod_token="<eod>")
    assert build_tokenizer("HuggingFaceTokenizer", model=path, eod_token="</s>").eod_id == 2


def test_one_special_token_is_not_taken_for_the_end(tmp_path: Path) -> None:
    """The only special token may as well mean padding or an unknown word."""
    from tokenizers import Tokenizer, models

    fast = Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    fast.add_special_tokens(["[UNK]"])
    fast.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ValueError, match="declares no end-of-document token"):
        build_tokenizer("HuggingFaceTokenizer", model=str(tmp_path))


@pytest.mark.parametrize(
    ("template", "end", "eod", "ids"),
    [
        (None, "</s>", 2, [4, 5]),
        ("<|endoftext|> $A", "<|endoftext|>", 3, [4, 5]),  # begin and end are one token
        ("<s> $A </s>", {"content": "</s>", "lstrip": False}, 2, [1, 4, 5]),  # a begin token of its own stays
        ("<s> $A </s> </s>", "</s>", 2, [1, 4, 5]),
    ],
)
def test_end_is_the_tokenizers_own_and_not_doubled(
    tmp_path: Path, template: Any, end: Any, eod: int, ids: list[int]
) -> None:
    for path in (hugging_face(tmp_path / "a", template, end), tmp_path / "a" / "tokenizer.json"):
        tokenizer = build_tokenizer("HuggingFaceTokenizer", model=str(path))
        assert (tokenizer.eod_id, tokenizer.vocab_size) == (eod, 6)
        assert tokenizer.encode("hello world") == ids
        assert tokenizer.encode_batch(["hello world", "hello", ""]) == [ids, ids[:-1], ids[:-2]]
        assert tokenizer.decode([4, eod]).startswith("hello")


def test_end_token_in_the_text_itself_stays(tmp_path: Path) -> None:
    tokenizer = build_tokenizer("HuggingFaceTokenizer", model=str(hugging_face(tmp_path / "a", "<s> $A </s>", "</s>")))
    assert tokenizer.encode("hello </s>") == [1, 4, 2] and tokenizer.encode_batch(["</s> hello"]) == [[1, 2, 4]]


def test_limit_of_length_in_the_file_is_not_followed(tmp_path: Path) -> None:
    path = hugging_face(tmp_path / "a", "<s> $A </s>", "</s>", truncation=5)
    tokenizer = build_tokenizer("HuggingFaceTokenizer", model=str(path))
    assert tokenizer.encode("hello world " * 10) == [1, *[4, 5] * 10]
    assert tokenizer.encode_batch(["hello", "world " * 30]) == [[1, 4], [1, *[5] * 30]]


def test_broken_files_beside_it_are_named(tmp_path: Path) -> None:
    path = hugging_face(tmp_path / "a")
    for content, message in ((b"{", "is not JSON"), (b"\xff", "is not JSON"), (b"[]", "is not an object but list")):
        (path / "tokenizer_config.json").write_bytes(content)
        with pytest.raises(ValueError, match=rf"tokenizer_config\.json {message}"):
            build_tokenizer("HuggingFaceTokenizer", model=str(path))


# --- SentencePiece --------------------------------------------------------------------------------------------------


@cache
def sentence_piece_model(**ids: int) -> bytes:
    """A model trained on a few lines."""
    import io

    import sentencepiece

    lines = [line for text in SCRIPTS[:3] for line in text.split()] * 20 + ["hello world", "the end of the line"] * 30
    buffer = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=buffer, vocab_size=150, hard_vocab_limit=False, minloglevel=2,
        user_defined_symbols=["<eod>"], character_coverage=1.0, byte_fallback=False, **ids,
    )  # fmt: skip
    return buffer.getvalue()


def test_sentence_piece(tmp_path: Path) -> None:
    import sentencepiece

    file = tmp_path / "a.model"
    file.write_bytes(sentence_piece_model())
    plain = sentencepiece.SentencePieceProcessor(model_file=str(file))
    for kind in ("SentencePieceTokenizer", "GPTSentencePieceTokenizer"):
        tokenizer = build_tokenizer(kind, model=str(file))
        assert tokenizer.vocab_size == plain.vocab_size() and tokenizer.eod_id == plain.eos_id() == 2
        assert tokenizer.encode("hello world") == plain.encode("hello world")
        assert tokenizer.encode_batch(["the end", ""]) == [plain.encode("the end"), []]
        assert tokenizer.decode(tokenizer.encode("hello world")) == "hello world"
        assert isinstance(tokenizer.decode([10**6]), str)
    llama = build_tokenizer("Llama2Tokenizer", model=str(file))
    assert llama.encode("hello") == [plain.bos_id(), *plain.encode("hello")] and llama.eod_id == 2
    assert llama.fingerprint != tokenizer.fingerprint
    assert build_tokenizer("Llama2Tokenizer", model=str(file), eod_token="<eod>").eod_id == plain.piece_to_id("<eod>")
    with pytest.raises(ValueError, match=r"no end-of-sequence piece \(<none>\)"):
        build_tokenizer("Llama2Tokenizer", model=str(file), eod_token="<none>")


def test_sentence_piece_without_end_or_begin(tmp_path: Path) -> None:
    file = tmp_path / "a.model"
    file.write_bytes(sentence_piece_model(eos_id=-1, bos_id=-1))
    with pytest.raises(ValueError, match=r"no end-of-sequence piece \(eos_id is -1\).*--eod-token"):
        build_tokenizer("SentencePieceTokenizer", model=str(file))
    assert build_tokenizer("SentencePieceTokenizer", model=str(file), eod_token="<eod>").eod_id > 0
    with pytest.raises(ValueError, match="no begin-of-sequence piece"):
        SentencePieceTokenizer(str(file), add_bos=True, eod_token="<eod>")


# --- tiktoken -------------------------------------------------------------------------------------------------------

TOKENS = [bytes([b]) for b in range(256)] + [b"he", b"ll", b"hell", b"hello", b" w", b"or", b" wor", b"ld", b" world"]


def tiktoken_json(path: Path, tokens: list[bytes] = TOKENS) -> Path:
    texts = [base64.b64encode(t).decode() for t in tokens]
    entries = [{"rank": i, "token_bytes": t, "token_str": None} for i, t in enumerate(texts)]
    path.write_text(json.dumps(entries))
    return path


def tiktoken_lines(path: Path, first: int = 0) -> Path:
    lines = [base64.b64encode(t) + f" {i}\n".encode() for i, t in enumerate(TOKENS, first)]
    path.write_bytes(b"".join(lines) + b"\n")
    return path


@pytest.mark.parametrize("pattern", ["v1", "v2"])
def test_tiktoken_json(tmp_path: Path, pattern: str) -> None:
    """1,000 ids come before the ranks; id 2 ends a document."""
    path = str(tiktoken_json(tmp_path / "vocab.json"))
    tokenizer = build_tokenizer("TikTokenizer", model=path, tiktoken_pattern=pattern)
    assert (tokenizer.vocab_size, tokenizer.eod_id) == (1265, 2)
    assert tokenizer.encode("hello world") == [1259, 1264]
    assert tokenizer.encode("</s>") == [1000 + b for b in b"</s>"]  # text is text
    for text in SCRIPTS:
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode([1259, 10**6, 2]) == "hello\ufffd</s>"
    smaller = build_tokenizer("TikTokenizer", model=path, tiktoken_pattern=pattern, vocab_size=1258)
    assert smaller.vocab_size == 1258 and smaller.encode("hello") == [1256, 1257, 1000 + ord("o")]
    assert smaller.fingerprint != tokenizer.fingerprint
    with pytest.raises(ValueError, match=r"no token for 156 of the 256 single bytes \(0x64"):
        build_tokenizer("TikTokenizer", model=path, tiktoken_pattern=pattern, vocab_size=1100)
    with pytest.raises(ValueError, match="no token for 256 of the 256 single bytes"):
        build_tokenizer("TikTokenizer", model=path, tiktoken_pattern=pattern, vocab_size=500)
    assert build_tokenizer("TikTokenizer", model=path, tiktoken_pattern=pattern, eod_token="<sep>").eod_id == 6
    with pytest.raises(ValueError, match="'<x>' is none of the special tokens"):
        build_tokenizer("TikTokenizer", model=path, tiktoken_pattern=pattern, eod_token="<x>")


def test_tiktoken_lines(tmp_path: Path) -> None:
    options: dict[str, Any] = {"model": str(tiktoken_lines(tmp_path / "a.tiktoken")), "tiktoken_pattern": "v2"}
    with pytest.raises(ValueError, match="declares no end-of-document token: name it with --eod-token TEXT, or"):
        build_tokenizer("TikTokenizer", **options)
    tokenizer = build_tokenizer("TikTokenizer", **options, eod_token="<|end|>")
    assert (tokenizer.vocab_size, tokenizer.eod_id) == (266, 265) and tokenizer.encode("hello world") == [259, 264]
    tokenizer = build_tokenizer("TikTokenizer", **options, eod_token="<|end|>=300")
    assert (tokenizer.vocab_size, tokenizer.eod_id) == (301, 300)
    with pytest.raises(ValueError, match=r"id 259 is the token b'hello'; 265 is free"):
        build_tokenizer("TikTokenizer", **options, eod_token="<|end|>=259")
    with pytest.raises(ValueError, match="give v1 or v2"):
        build_tokenizer("TikTokenizer", model=options["model"], eod_token="<|end|>")
    cases = ((b"aGk= 1 2\n", r"a:1: not a line of `base64 rank`"), (b"", "no token for 256 of the 256"))
    for content, message in cases:
        (tmp_path / "a").write_bytes(content)
        with pytest.raises(ValueError, match=message):
            build_tokenizer("TikTokenizer", model=str(tmp_path / "a"), tiktoken_pattern="v1", eod_token="x")
    tiktoken_json(tmp_path / "b.json").write_text(json.dumps([{"rank": 1, "token_bytes": "YQ=="}]))
    with pytest.raises(ValueError, match="entry 0 has rank 1; ranks must count up from 0"):
        build_tokenizer("TikTokenizer", model=str(tmp_path / "b.json"), tiktoken_pattern="v1")


def test_tiktoken_takes_a_million_spaces(tmp_path: Path) -> None:
    """Longer runs than ``LONGEST_SPACE`` are cut; the package's matcher would run out of stack."""
    path = str(tiktoken_json(tmp_path / "vocab.json"))
    tokenizer = build_tokenizer("TikTokenizer", model=path, tiktoken_pattern="v1")
    for text in (" " * 1_500_000, "a" + "\t" * 1_200_000 + "b", "hello" * 100_000, "x \n" * 300_000):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    short = "hello " + " " * 1000 + "world"
    padded = short + "y" * (LONGEST_SPACE + 1)  # long, with short runs of space: not cut
    assert tokenizer.encode(padded)[: len(tokenizer.encode(short)) - 1] == tokenizer.encode(short)[:-1]


# --- GPT-2 ----------------------------------------------------------------------------------------------------------


@cache
def gpt2_library() -> Any:
    """A byte-level BPE of the tokenizers package, trained on real text."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    fast = Tokenizer(models.BPE())
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=3000, special_tokens=["<|endoftext|>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )  # fmt: skip
    fast.train_from_iterator([*real_text()[:25], *SCRIPTS], trainer)
    return fast


def gpt2(directory: Path, **options: Any) -> Any:
    gpt2_library().model.save(str(directory))
    files = {"vocab_file": str(directory / "vocab.json"), "merge_file": str(directory / "merges.txt")}
    return build_tokenizer("GPT2BPETokenizer", **files, **options)


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return gpt2(tmp_path_factory.mktemp("gpt2"))


def test_gpt2_equals_the_library_on_real_text(ours: Any) -> None:
    texts = [*real_text(), *SCRIPTS[:4]]
    assert sum(map(len, texts)) > 1_000_000
    expected = [e.ids for e in gpt2_library().encode_batch(texts)]
    assert ours.encode_batch(texts) == expected
    assert all(ours.decode(ids) == text for ids, text in zip(expected, texts, strict=True))
    assert (ours.vocab_size, ours.eod_id) == (3000, gpt2_library().token_to_id("<|endoftext|>"))


def test_gpt2_special_text_is_text(ours: Any) -> None:
    ids = ours.encode(SCRIPTS[4])
    assert ours.eod_id not in ids and ours.decode(ids) == SCRIPTS[4]
    assert ours.decode([ours.eod_id, 10**7]) == "<|endoftext|>"


def test_gpt2_long_words_take_no_quadratic_time(ours: Any) -> None:
    word = base64.b64encode(bytes(range(256)) * 3000).decode().replace("+", "a").replace("/", "b")
    word = "".join(c for c in word if c.isalpha())[:400_000]
    start = time.monotonic()
    ids = ours.encode(word)
    assert time.monotonic() - start < 30
    assert ids[:2000] == gpt2_library().encode(word[:20_000]).ids[:2000] and ours.decode(ids) == word


def test_gpt2_ids_need_not_follow_the_merges(tmp_path: Path) -> None:
    """The merges decide what is merged first, the vocabulary which id it has; line ends of Windows do not matter."""
    (tmp_path / "vocab.json").write_text('{"a": 5, "b": 4, "c": 3, "ab": 0, "bc": 1, "<eod>": 2}')
    for newline in ("\n", "\r\n"):
        (tmp_path / "merges.txt").write_bytes(newline.join(["#version: 0.2", "b c", "a b", ""]).encode())
        files = {"vocab_file": str(tmp_path / "vocab.json"), "merge_file": str(tmp_path / "merges.txt")}
        tokenizer = build_tokenizer("GPT2BPETokenizer", **files, eod_token="<eod>")
        assert tokenizer.encode("abcab") == [5, 1, 0] and (tokenizer.vocab_size, tokenizer.eod_id) == (6, 2)
    with pytest.raises(ValueError, match=r"has no '<\|endoftext\|>': name its end of document with --eod-token"):
        build_tokenizer("GPT2BPETokenizer", **files)
    with pytest.raises(ValueError, match="no token for a byte of 'abd'"):
        tokenizer.encode("abd")


def test_gpt2_broken_files_are_named(tmp_path: Path) -> None:
    vocab, merges = tmp_path / "vocab.json", tmp_path / "merges.txt"
    good = ('{"a": 0, "<|endoftext|>": 1}', "a a\n")
    cases = [
        (("[1]", good[1]), r"vocab\.json is not an object that gives each token its id"),
        (("{}", good[1]), r"vocab\.json is not an object"),
        (('{"a": "0"}', good[1]), r"vocab\.json is not an object"),
        (('{"a": 0, "b": 0}', good[1]), r"vocab\.json gives two tokens the same id"),
        (("{", good[1]), r"vocab\.json is not JSON"),
        ((good[0], "a a\na\n"), r"merges\.txt:2: not two pieces apart by a space: 'a'"),
        ((good[0], "a a a\n"), r"merges\.txt:1: not two pieces"),
    ]
    for (v, m), message in cases:
        vocab.write_text(v)
        merges.write_text(m)
        with pytest.raises(ValueError, match=message):
            build_tokenizer("GPT2BPETokenizer", vocab_file=str(vocab), merge_file=str(merges))
    vocab.write_text(good[0])
    merges.write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"merges\.txt is no text"):
        build_tokenizer("GPT2BPETokenizer", vocab_file=str(vocab), merge_file=str(merges))


# --- null, and what all share ---------------------------------------------------------------------------------------


def test_null_tokenizer() -> None:
    tokenizer = build_tokenizer("NullTokenizer", vocab_size=100)
    assert (tokenizer.vocab_size, tokenizer.eod_id) == (100, 99)
    assert tokenizer.encode("0 5\n 99") == [0, 5, 99] and tokenizer.encode_batch(["1", ""]) == [[1], []]
    assert tokenizer.decode([3, 4]) == "3 4"
    for text in ("1 x", "-1", "1_0", "1.5", "\u0661"):
        with pytest.raises(ValueError, match="not numbers apart by spaces"):
            tokenizer.encode(text)
    with pytest.raises(ValueError, match=r"id 100 is outside \[0, 100\)"):
        tokenizer.encode("1 100")
    for size in (None, 0, 1):
        with pytest.raises(ValueError, match="needs --vocab-size"):
            build_tokenizer("NullTokenizer", vocab_size=size)


def test_flags_that_are_missing_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"unknown tokenizer type 'Bpe': known are .*NullTokenizer"):
        build_tokenizer("Bpe")
    with pytest.raises(ValueError, match="needs --vocab-file"):
        build_tokenizer("GPT2BPETokenizer")
    for kind in READ_BY:
        if "model" in READ_BY[kind]:
            with pytest.raises(ValueError, match="needs --tokenizer-model"):
                build_tokenizer(kind, tiktoken_pattern="v1")
            with pytest.raises(ValueError, match=r"--tokenizer-model .*none: No such file"):
                build_tokenizer(kind, model=str(tmp_path / "none"), tiktoken_pattern="v1")


def test_pickles_are_not_read(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    for content in (pickle.dumps(Exploit(marker)), pickle.dumps(Exploit(marker), protocol=0), b""):
        for name in ("tokenizer.json", "file", "vocab.json"):
            (tmp_path / name).write_bytes(content)
        for kind, options in {
            "HuggingFaceTokenizer": {"model": str(tmp_path)},
            "SentencePieceTokenizer": {"model": str(tmp_path / "file")},
            "TikTokenizer": {"model": str(tmp_path / "file"), "tiktoken_pattern": "v1", "eod_token": "x"},
            "GPT2BPETokenizer": {"vocab_file": str(tmp_path / "file"), "merge_file": str(tmp_path / "file")},
        }.items():
            with pytest.raises(ValueError, match=str(tmp_path)):
                build_tokenizer(kind, **options)
        with pytest.raises(ValueError, match=r"vocab\.json"):
            build_tokenizer("TikTokenizer", model=str(tmp_path / "vocab.json"), tiktoken_pattern="v1")
    assert not marker.exists()


def test_fingerprints_tell_tokenizers_apart(tmp_path: Path) -> None:
    path = str(hugging_face(tmp_path / "a"))
    ends = ("<s>", "</s>", "<s>")
    prints = {build_tokenizer("HuggingFaceTokenizer", model=path, eod_token=t).fingerprint for t in ends}
    assert len(prints) == 2 and all(len(p) == 64 for p in prints)
    assert NullTokenizer(5).fingerprint != NullTokenizer(6).fingerprint


def test_a_kind_that_is_not_named_is_that_of_the_files(tmp_path: Path) -> None:
    folder = hugging_face(tmp_path / "hf", end="</s>")
    assert build_tokenizer(None, model=str(folder)).flags == f"--tokenizer-type HuggingFaceTokenizer --tokenizer-model {folder}"
    for name, data in {"a.model": b"", "b.tiktoken": b"", "c.json": b' [{"rank": 0}]', "d.bpe": b""}.items():
        (tmp_path / name).write_bytes(data)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "vocab.json").touch()

    def kind(**options: Any) -> str:
        return kind_of({name: str(tmp_path / file) for name, file in options.items()})

    assert kind(model="hf/tokenizer.json") == "HuggingFaceTokenizer" and kind(model="a.model") == "SentencePieceTokenizer"
    assert {kind(model=name) for name in ("b.tiktoken", "c.json")} == {"TikTokenizer"}
    assert kind(vocab_file="v", merge_file="m") == kind(vocab_file="v") == "GPT2BPETokenizer"
    with pytest.raises(ValueError, match="no tokenizer is named: give --tokenizer-model DIRECTORY .*--vocab-file .*NullTokenizer"):
        kind()
    with pytest.raises(ValueError, match="no_such: No such file or directory; only local files are read, nothing is downloaded"):
        kind(model="no_such")
    with pytest.raises(ValueError, match=r"other: a directory without tokenizer.json \(in it: vocab.json\)"):
        kind(model="other")
    with pytest.raises(ValueError, match="d.bpe: its name does not say which kind it is; name it with --tokenizer-type"):
        kind(model="d.bpe")
