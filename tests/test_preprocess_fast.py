"""The fast path of tokenizing: it gives the reference's ids or is not taken, and a difference ends a run."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from byte_tokenizer import Bytes

from megatron_lite.data.indexed import IndexedDataset
from megatron_lite.text import encode, tokenizer_fast
from megatron_lite.text.preprocess import Options, preprocess
from megatron_lite.text.records import BadInput
from megatron_lite.text.tokenizer import Tokenizer, build_tokenizer
from megatron_lite.text.tokenizer_fast import Encoder, FastDiffers, Ids, NotFast, encoder_of, flat, surrounded
from megatron_lite.text.tokenizer_probes import hard_texts, unassigned

ROOT = Path(__file__).resolve().parent.parent
WORDS = "the quick brown fox's tail isn't 2024 über Straße naïve 今天 天气 很好 привет мир 3.14 foo_bar() {x: [1, 2]}".split()
KINDS = ("hf", "hf with ends", "gpt2", "tiktoken", "tiktoken json", "sp", "sp with begin")


def corpus(documents: int = 60, seed: int = 0) -> list[str]:
    rng = random.Random(seed)
    ends = (" ", " ", " ", "\n", "  ", "\n\n", ", ", ". ", "\t", "\u00a0")
    return ["".join(rng.choice(WORDS) + rng.choice(ends) for _ in range(rng.randint(1, 80))) for _ in range(documents)]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Small tokenizers of every kind, trained on the corpus."""
    import sentencepiece
    from tokenizers import Tokenizer as Fast
    from tokenizers import decoders, models, pre_tokenizers, processors, trainers

    folder = tmp_path_factory.mktemp("tokenizers")
    bpe = Fast(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator(corpus(), trainer)
    bpe.save(str(folder / "plain.json"))
    bpe.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)])
    bpe.save(str(folder / "ends.json"))
    model = json.loads((folder / "plain.json").read_text())["model"]
    vocabulary = {token: i for token, i in model["vocab"].items() if i >= 2}
    (folder / "vocab.json").write_text(json.dumps({**vocabulary, "<|endoftext|>": 0}))
    merges = [m if isinstance(m, str) else " ".join(m) for m in model["merges"]]
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n", encoding="utf-8")
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]  # GPT-2 writes these as they are, and others from U+0100 on
    to_byte = {chr(b): b for b in printable}
    to_byte |= {chr(256 + i): b for i, b in enumerate(b for b in range(256) if b not in printable)}
    tokens = [bytes(to_byte[c] for c in token) for token, _ in sorted(vocabulary.items(), key=lambda entry: entry[1])]
    encoded = [base64.b64encode(token).decode() for token in tokens]
    (folder / "ranks.tiktoken").write_text("".join(f"{token} {i}\n" for i, token in enumerate(encoded)))
    entries = [{"rank": i, "token_bytes": token, "token_str": ""} for i, token in enumerate(encoded)]
    (folder / "ranks.json").write_text(json.dumps(entries))
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(line for text in corpus() for line in text.split("\n") if line.strip()),
        model_prefix=str(folder / "sp"), vocab_size=450, model_type="bpe", byte_fallback=True, minloglevel=2,
    )  # fmt: skip
    return folder


def build(files: Path, kind: str) -> Tokenizer:
    return {
        "hf": partial(build_tokenizer, "HuggingFaceTokenizer", model=str(files / "plain.json"), eod_token="</s>"),
        "hf with ends": partial(
            build_tokenizer, "HuggingFaceTokenizer", model=str(files / "ends.json"), eod_token="</s>"
        ),
        "gpt2": partial(
            build_tokenizer,
            "GPT2BPETokenizer",
            vocab_file=str(files / "vocab.json"),
            merge_file=str(files / "merges.txt"),
        ),
        "tiktoken": partial(
            build_tokenizer,
            "TikTokenizer",
            model=str(files / "ranks.tiktoken"),
            tiktoken_pattern="v2",
            eod_token="<end>",
        ),
        "tiktoken json": partial(
            build_tokenizer, "TikTokenizer", model=str(files / "ranks.json"), tiktoken_pattern="v2"
        ),
        "sp": partial(build_tokenizer, "SentencePieceTokenizer", model=str(files / "sp.model")),
        "sp with begin": partial(build_tokenizer, "Llama2Tokenizer", model=str(files / "sp.model")),
    }[kind]()


def same(tokenizer: Tokenizer, encoder: Encoder, texts: list[str]) -> None:
    """The ids of all texts, and no other, are the reference's."""
    found = encoder.encode(texts)
    wanted = tokenizer.encode_batch(texts)
    assert found.lengths.tolist() == [len(ids) for ids in wanted]
    assert found.ids.tolist() == [i for ids in wanted for i in ids]


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_has_a_fast_form_with_the_same_ids(files: Path, kind: str) -> None:
    """Also where both forms meet in one batch: unassigned code points, text in and outside of ASCII."""
    tokenizer = build(files, kind)
    encoder = encoder_of(tokenizer, corpus(10))
    assert encoder.is_fast
    rng = random.Random(1)
    pool = [
        *WORDS,
        " ",
        "\n",
        "\u0301",
        "\u200d",
        "\U0001f469",
        "\ua7f1",
        "\u0378",
        "\x85",
        "\ufb01",
        "<s>",
        "</s>",
        "ｱ",
        "\u3000",
    ]
    texts = ["".join(rng.choices(pool, k=rng.randint(0, 30))) for _ in range(1500)]
    same(
        tokenizer,
        encoder,
        [*texts, "", *corpus(100, seed=2), "a" * 50_000, "\u4eca" * 20_000, " " * 120_000 + "\u00e9"],
    )
    same(tokenizer, encoder, [])
    same(tokenizer, encoder, ["\u0378"])


@pytest.mark.parametrize(
    ("rule", "add_dummy_prefix", "remove_extra"),
    [("nmt_nfkc", True, True), ("identity", True, False), ("nfkc_cf", False, True), ("identity", False, False)],
)
@pytest.mark.parametrize("helper", ["compiled", "none"])
def test_segments_of_sentencepiece(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, helper: str, rule: str, add_dummy_prefix: bool, remove_extra: bool
) -> None:
    """However text is normalised, also where pieces go over several words, with the compiled helper and without."""
    import sentencepiece

    from megatron_lite.text import sentencepiece_segments

    if helper == "none":
        monkeypatch.setattr(sentencepiece_segments, "index_module", lambda: (None, "not built"))
    elif sentencepiece_segments.index_module()[0] is None:
        pytest.skip("the helper is not built")
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(line for text in corpus() for line in text.split("\n") if line.strip()),
        model_prefix=str(tmp_path / "sp"), vocab_size=430, model_type="bpe", byte_fallback=True, minloglevel=2,
        normalization_rule_name=rule, add_dummy_prefix=add_dummy_prefix, remove_extra_whitespaces=remove_extra,
        split_by_whitespace=False, user_defined_symbols=["<tag>", "x\u2581y"],
    )  # fmt: skip
    tokenizer = build_tokenizer("SentencePieceTokenizer", model=str(tmp_path / "sp.model"))
    segmented = sentencepiece_segments.by_segments(tokenizer.model, lambda texts: ([], []))  # type: ignore[attr-defined]
    assert (segmented is not None) == (helper == "compiled")
    try:
        encoder = encoder_of(tokenizer)
    except NotFast:
        assert helper == "none"
        return
    rng = random.Random(5)
    pool = [
        *WORDS,
        *" \n\t\x01\x02aX",
        "  ",
        "<tag>",
        "x y",
        "\u2581",
        "\u0301",
        "\ufb01",
        "\uff21",
        "\u3000",
        "\U0001f600",
        "w" * 70,
    ]
    for _ in range(4):  # what the first has met is known to the others
        same(tokenizer, encoder, ["".join(rng.choices(pool, k=rng.randint(0, 25))) for _ in range(400)])


@pytest.mark.nightly
@pytest.mark.parametrize("kind", KINDS)
def test_every_code_point_has_the_same_ids(files: Path, kind: str) -> None:
    tokenizer = build(files, kind)
    encoder = encoder_of(tokenizer)
    characters = [chr(c) for c in range(0x110000) if not 0xD800 <= c < 0xE000]
    for start in range(0, len(characters), 64):
        same(tokenizer, encoder, [f"a{c}b {c}{c} {c}'s{c}1\n{c}\n {c} \n" for c in characters[start : start + 64]])


@pytest.mark.parametrize(
    ("kind", "damage"), [("hf", "cut"), ("hf", "merges"), ("gpt2", "merges"), ("tiktoken", "pattern"), ("sp", "merges")]
)
def test_a_fast_form_that_differs_is_not_taken(
    files: Path, monkeypatch: pytest.MonkeyPatch, kind: str, damage: str
) -> None:
    """Each is changed by a little, and the texts made to be hard show it."""
    import gigatoken.gigatoken_rs as rs

    load, from_ranks = rs.load_hf_json, rs.BPETokenizer.from_tiktoken

    def other(content: str) -> Any:
        data = json.loads(content)
        if damage == "merges":
            del data["model"]["merges"][50]
        else:
            data["pre_tokenizer"] = {
                "type": "ByteLevel",
                "add_prefix_space": True,
                "trim_offsets": True,
                "use_regex": True,
            }
        return load(json.dumps(data))

    class Ranks:
        @staticmethod
        def from_tiktoken(path: str, pretokenizer: str, special: dict[str, int]) -> Any:
            return from_ranks(path, "qwen2", special)

    monkeypatch.setattr(rs, "load_hf_json", other)
    monkeypatch.setattr(rs, "BPETokenizer", Ranks)
    with pytest.raises(NotFast, match=r"ids differ from the reference's|not among the reference's"):
        encoder_of(build(files, kind))


def test_what_has_no_fast_form(files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not encoder_of(build_tokenizer("NullTokenizer", vocab_size=9)).is_fast
    v1 = build_tokenizer("TikTokenizer", model=str(files / "ranks.tiktoken"), tiktoken_pattern="v1", eod_token="<end>")
    with pytest.raises(NotFast, match="does not know the pattern v1"):
        encoder_of(v1)
    from tokenizers import Tokenizer as Fast
    from tokenizers import models

    Fast(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]")).save(str(tmp_path / "words.json"))
    words = build_tokenizer("HuggingFaceTokenizer", model=str(tmp_path / "words.json"), eod_token="a")
    with pytest.raises(NotFast, match="cannot take this tokenizer"):
        encoder_of(words)
    monkeypatch.setitem(sys.modules, "gigatoken", None)
    with pytest.raises(NotFast, match="pip install gigatoken"):
        encoder_of(build(files, "hf"))


def test_an_interrupt_while_the_fast_form_is_tried_is_not_lost(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """gigatoken swallows one that comes while it imports a package, and goes on without the package."""

    def swallows(tokenizer: Any) -> Encoder:
        with contextlib.suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        return Encoder(tokenizer)

    tokenizer = build(files, "hf")
    monkeypatch.setitem(tokenizer_fast._BUILDERS, type(tokenizer), swallows)
    with pytest.raises(KeyboardInterrupt):
        encoder_of(tokenizer)


def test_hard_texts_hold_what_they_should(files: Path) -> None:
    texts = hard_texts(build(files, "hf"))
    joined = "".join(texts)
    assert not unassigned(joined) and "</s>" in joined and 100_000 < len(joined) < 500_000
    assert set("\u0301\u200d\u00a0\r\uac00\U0001f468\u2028\U000e0041") <= set(joined)
    for text, wanted in (
        ("\u0378", True),
        ("a\u4eca\U0001f600", False),
        ("\U0003fffe", True),
        ("\uffff", True),
        ("\U0010fffd", False),
    ):
        assert unassigned(text) is wanted, text


def test_ids_are_put_between_others() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        lists = [rng.integers(0, 9, rng.integers(0, 4)).tolist() for _ in range(rng.integers(1, 6))]
        before, after = (
            rng.integers(10, 99, rng.integers(0, 3)).tolist(),
            rng.integers(10, 99, rng.integers(0, 3)).tolist(),
        )
        found = surrounded(flat(lists), before, after)
        assert [found.of(i) for i in range(len(lists))] == [[*before, *ids, *after] for ids in lists]


# --- in a run -------------------------------------------------------------------------------------------------------


class Twofold(Bytes):
    """The same bytes; its fast form (:func:`drifting`) is wrong about one word."""

    vocab_size, eod_id, fingerprint = 300, 299, "twofold"


def drifting(tokenizer: Twofold) -> Encoder:
    def fast(texts: list[str]) -> Ids:
        return flat([list(text.replace("drift", "DRIFT").encode()) for text in texts])

    return Encoder(tokenizer, fast)


def write(path: Path, texts: Sequence[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def run(tmp_path: Path, texts: Sequence[str], **options: Any) -> tuple[list[str], list[str]]:
    """(documents, lines that were said, besides that on ends of documents, which are left out here)."""
    said: list[str] = []

    def say(line: str) -> None:
        if not line.startswith("note: without --append-eod"):
            said.append(line)

    path = write(tmp_path / "a.jsonl", texts)
    preprocess([path], str(tmp_path / "out"), Options(Twofold, **options), overwrite=True, say=say)
    dataset = IndexedDataset(tmp_path / "out_text_document")
    found = [Twofold().decode(dataset.document(d).tolist()) for d in range(dataset.num_documents)]
    dataset.close()
    return found, said


def test_a_difference_at_the_start_falls_back_with_a_notice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(tokenizer_fast._BUILDERS, Twofold, drifting)
    found, said = run(tmp_path, ["fine", "a drift here", "fine"])
    assert found == ["fine", "a drift here", "fine"]
    assert len(said) == 1 and "reference library, which is slower" in said[0] and "'a drift here'" in said[0]
    assert run(tmp_path, ["a drift"], fast=False) == (["a drift"], [])


def test_a_later_difference_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One record in 10,000 is compared, the one with the rarest character first: line 25,000 is found by that."""
    monkeypatch.setitem(tokenizer_fast._BUILDERS, Twofold, drifting)
    texts = [f"{i} of many words in a row, to have more than one block of them" for i in range(40_000)]
    texts[25_000] = "\u00e9 drift"
    with pytest.raises(
        BadInput, match=r"a\.jsonl:25001: the fast tokenizer's ids differ .*token 3.*--no-fast-tokenizer: .*drift"
    ):
        run(tmp_path, texts)
    assert [p.name for p in tmp_path.iterdir()] == ["a.jsonl"]
    assert len(run(tmp_path, texts, fast=False)[0]) == 40_000


def test_the_last_block_and_every_key_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """12,000 records in one block, and the difference is in the second of two texts."""
    monkeypatch.setitem(tokenizer_fast._BUILDERS, Twofold, drifting)
    other = {9_000: "\u00e9 drift"}
    rows = [json.dumps({"a": str(i), "b": other.get(i, str(i))}) + "\n" for i in range(12_000)]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(rows))
    with pytest.raises(BadInput, match=r"a\.jsonl:9001: the fast tokenizer's ids differ"):
        preprocess([path], str(tmp_path / "out"), Options(Twofold, keys=("a", "b")), say=lambda line: None)


def test_one_in_so_many_is_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(tokenizer_fast._BUILDERS, Twofold, drifting)
    texts = [f"{i} of many words in a row, to have more than one block of them" for i in range(45_000)]
    first, second = write(tmp_path / "a.jsonl", texts), write(tmp_path / "b.jsonl", texts[:5000])
    counts = preprocess([first, second, second], str(tmp_path / "out"), Options(Twofold), say=lambda line: None)
    assert counts.compared == 5 and counts.documents == 55_000


def test_a_text_that_the_fast_form_refuses_is_encoded_by_the_reference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Panic(BaseException):
        pass

    def fast(texts: list[str]) -> Ids:
        if any("panic" in text for text in texts):
            raise Panic
        return flat([list(text.encode()) for text in texts])

    monkeypatch.setitem(tokenizer_fast._BUILDERS, Twofold, lambda tokenizer: Encoder(tokenizer, fast))
    monkeypatch.setattr("megatron_lite.text.preprocess._TRIED", 1)
    found, said = run(tmp_path, ["fine and longer than what is tried", "a panic", "fine"])
    assert found[1:] == ["a panic", "fine"] and said == []


MEASURED = """
import sys
from megatron_lite.cli.preprocess import main
status = main(sys.argv[1:])
print(open("/proc/self/status").read().split("VmHWM:")[1].split()[0])
sys.exit(status)
"""


@pytest.mark.parametrize("tokenizer", [
    ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", "plain.json", "--eod-token", "</s>"],
    ["--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", "sp.model"],
])  # fmt: skip
def test_memory_does_not_grow_with_the_input(files: Path, tmp_path: Path, tokenizer: list[str]) -> None:
    """Of the command, to its end, for 400,000 documents and 50 MB more."""
    found = []
    for times in (8, 48):
        path = tmp_path / f"{times}.jsonl"
        path.write_bytes((b'{"text": "a"}\n' * 10_000 + b'{"text": "%s"}\n' % (b"some words " * 2_000) * 50) * times)
        command = [sys.executable, "-c", MEASURED, "--input", str(path), "--output-prefix", str(tmp_path / f"{times}")]
        done = subprocess.run(
            [*command, "--append-eod", *tokenizer], cwd=files, env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True, text=True, timeout=120, check=True,
        )  # fmt: skip
        assert f"{10_050 * times:,} documents" in done.stdout
        found.append(int(done.stdout.split()[-1]) << 10)
    assert found[1] - found[0] < 30 << 20, found


def test_what_is_remembered_is_bounded(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fast form is made anew when the process has grown, and the ids stay those of the reference."""
    import gigatoken.gigatoken_rs as rs

    load, made, resident = rs.load_hf_json, [], [1000]

    def counted(content: str) -> Any:
        made.append(content)
        return load(content)

    monkeypatch.setattr(rs, "load_hf_json", counted)
    monkeypatch.setattr(tokenizer_fast, "_resident", lambda: resident[0])
    monkeypatch.setattr(tokenizer_fast, "_MOST_REMEMBERED", 100)
    tokenizer = build(files, "hf")
    encoder = encoder_of(tokenizer, prove=False)
    for memory, times in ((1050, 1), (1101, 2), (1120, 2), (1130, 3), (900, 3)):
        resident[0] = memory
        same(tokenizer, encoder, corpus(3))
        assert len(made) == times


def test_comparing_names_the_text() -> None:
    encoder = drifting(Twofold())
    with pytest.raises(FastDiffers) as error:
        encoder.check(["ab", "a drift"], encoder.encode(["ab", "a drift"]), [0, 1])
    assert error.value.index == 1 and "at token 2: [68, 82, 73] for [100, 114, 105]" in str(error.value)
    assert encode.SENTENCE_END.split("One. Two") == ["One.", "Two"]


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("kind", ["hf with ends", "sp with begin"])
def test_outputs_are_the_reference_s(files: Path, tmp_path: Path, kind: str, workers: int) -> None:
    """Sentences, ends and empty texts are treated alike by both."""
    texts = [*corpus(40), "", " ", "One. Two! Three", "</s> inside. Twice </s>", "\u0378 new"]
    path = write(tmp_path / "a.jsonl", texts)
    stored = []
    for fast in (True, False):
        options = Options(partial(build, files, kind), append_eod=True, split_sentences=True, fast=fast)
        counts = preprocess(
            [path], str(tmp_path / f"out{fast}"), options, workers=workers, say=lambda line: pytest.fail(line)
        )
        stored.append([(tmp_path / f"out{fast}_text_sentence.{s}").read_bytes() for s in ("bin", "idx", "meta.json")])
        assert counts.dropped["empty"] == 2 and counts.holds_eod == (kind == "hf with ends")
    assert stored[0] == stored[1]
