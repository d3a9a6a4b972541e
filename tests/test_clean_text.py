"""Steps that change texts: what each rule changes, and what it must leave alone, in English, Chinese and code."""

from __future__ import annotations

import random
from typing import Any

import pytest

from megatron_lite.clean.step import Document, LocalStep
from megatron_lite.clean.steps.chinese import Chinese, ChineseOptions
from megatron_lite.clean.steps.mask import Mask, MaskOptions
from megatron_lite.clean.steps.normalise import _NEEDED, _RUN, Normalise, NormaliseOptions, _visible


def after(step: LocalStep, text: str, language: str | None = None) -> str:
    document = Document(text, language=language)
    step.apply([document])
    assert document.dropped is None
    return document.text


# ---- normalise

PAGE = """<!DOCTYPE html>
<html><head><title>T</title><style>p { color: red }</style></head>
<body><h1>A   <b>bold</b> title</h1><script>if (a < b) { run("x") }</script>
<p>First line,<br>second&nbsp;line &amp; <a href="x">a
link</a>.</p><p>中文，段落。</p>
<ul><li>one</li><li>two</li></ul>
<table><tr><td>a</td><td>b</td></tr><tr><td>c</td><td>d</td></tr></table>
<pre>def f():
    return  1</pre></body></html>"""
PAGE_TEXT = """A bold title

First line,
second line & a link.

中文，段落。

one
two

a	b
c	d

def f():
    return  1"""
CODE = 'def f(a):\n\tif a  <  3:\n        return "<p>x</p>"  # done\n\n\nclass A: pass'


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("\ufeffstart and mid\ufeffdle", "start and middle"),
        ("a\x00b\x1bc\x7f\ufffed\ufff9\uffff", "abcd"),
        ("don\x92t \x93quote\x94 \x96 end\x85", "don’t “quote” – end…"),  # noqa: RUF001
        ("one\r\ntwo\rthree\u2028four\ffive", "one\ntwo\nthree\nfour\nfive"),
        ("cafe\u0301 ｶﾞ", "caf\u00e9 ｶﾞ"),
        ("\n\n  indented\u00a0here \t\n\n\n\nnext\u3000\n", "  indented here\n\nnext"),
        (PAGE, PAGE_TEXT),
        ("<div>only <i>a</i> part</div>", "only a part"),
        ("  <?xml version='1.0'?>\n<!-- c -->\n<HTML><BODY>Hi<BR>you</BODY></HTML>", "Hi\nyou"),
        ("<p>unclosed<p>next</b>", "unclosed\n\nnext"),
        ("\ufeff<meta charset=gbk><p>a&#1;b&#8;c&#133;d&#xFEFF;e</p><pre># f&#2;\r\n# g</pre>", "a b c…de\n\n# f\n# g"),
        ("<div><p hidden>a<b>b</b></p><p style='color: red; DISPLAY: none'>c</p><p>none</p></div>", "none"),
        ("<p>他们来了，\n  很好。\nabc\n한국\n어</p>", "他们来了，很好。 abc 한국 어"),  # noqa: RUF001
        ("<body><pre>a<br>b  <b>c</b>\n  d<script>x</script></pre></body>", "a\nb  c\n  d"),
        ("<html lang=de>Silben\u00adtrennung</b>", "Silbentrennung"),
        ("", ""),
        ("a\u200bb\u2060c\u202ad\u202ee\u3164f\ue000g\U000f0000h\u2067i\U000e0041j\U000e0100k", "abcdefghijk"),
        ("中\u200d文\ufe0f，か\u200dな\u200c。葛\U000e0100\ufe00", "中文，かな。葛"),  # noqa: RUF001
        ("x\ufe0f 1\ufe0f \u200d👩\u200d \u200b👩 ☺\ufe0f\ufe0f a\u200f\u115f\u1160", "x 1 👩 👩 ☺\ufe0f a"),
        ("ب\u202e\u200cت \u200cت e\u200b\u0301", "بت ت \u00e9"),
    ],
)
def test_normalise_changes(text: str, wanted: str) -> None:
    assert after(Normalise(NormaliseOptions()), text) == wanted


@pytest.mark.parametrize(
    "text",
    [
        "Plain text, with marks: “quotes” – dashes… and (brackets)!",  # noqa: RUF001
        "　　中文的段落，用全角空格缩进。“引号”、《书名》！？",  # noqa: RUF001
        "日本語の文章です。「括弧」も残る。",
        "if a < b and c > d: x = a<b>(c)",
        "The tag <p> opens a paragraph, </p> closes it.",
        "<b>bold</b> is how a line may begin in a forum",
        CODE.replace("\n\n\n", "\n\n"),
        "#include <stdio.h>\nint main() { return 0; }",
        "<div> is a tag that this sentence does not close",
        '<p align="center">\n  <img src="logo.png">\n</p>\n\nText with `vector<int>` and a < b:\n\n    $ run <file>',
        '<h1 align="center">Name</h1>\n\n## Use\n\n- one\n- two <T>\n\n<p>end</p>',
        "<p> of a test < 0.05 is told by the tag </p> of HTML",
        "template <typename T> struct A { std::vector<T> v; };",
        "emoji 👩\u200d👩\u200d👧 and ی\u200cها stay joined, क्\u200dष too",
        "❤\ufe0f\u200d🔥 👩🏽\u200d💻 🏴\U000e0067\U000e0062\U000e007f 1\ufe0f\u20e3 ☺\ufe0e ©\ufe0f 🏳\ufe0f\u200d🌈 👁\ufe0f\u200d🗨\ufe0f",
        "ភាសា\u200bខ្មែរ, ไทย\u200bคำ, שלום\u200f!, ᠮᠣᠩᠭᠣᠯ\u180eᠠ\u180b, ക\u0d4d\u200d, \u1100\u1160 \u115f\u1161",
        "| a  | b |\n|----|---|",
    ],
)
def test_normalise_leaves(text: str) -> None:
    assert after(Normalise(NormaliseOptions()), text) == text


def test_looking_only_where_characters_are_not_ascii_changes_nothing() -> None:
    rng = random.Random(3)
    letters = "ab1#*9 \n\ufe0f\u20e3\u200d\u200c❤☀👩✌🏽🏴\U000e0067\U000e007f\u200bنी今\u1100\u1160\u115f\u1161\ue000"
    for _ in range(5000):
        text = "".join(rng.choices(letters, k=rng.randint(1, 12)))
        assert _RUN.sub(_visible, text) == _NEEDED.sub(lambda found: found[1] or "", text), ascii(text)


@pytest.mark.parametrize(
    ("off", "text"),
    [
        ({"bom": False}, "a\ufeffb"),
        ({"controls": False}, "a\x00b\rc"),
        ({"invisible": False}, "a\u200bb"),
        ({"nfc": False}, "cafe\u0301"),
        ({"whitespace": False}, "a \n\n\n\nb "),
        ({"html": "never"}, "<p>a</p>"),
    ],
)
def test_each_rule_of_normalise_can_be_turned_off(off: dict[str, Any], text: str) -> None:
    everything = {"bom": False, "controls": False, "invisible": False, "nfc": False, "whitespace": False, "html": "never"}
    assert after(Normalise(NormaliseOptions()), text) != text
    assert after(Normalise(NormaliseOptions(**off)), text) == text
    (name,) = off
    del everything[name]
    assert after(Normalise(NormaliseOptions(**everything)), text) != text


def test_normalising_twice_changes_nothing_more() -> None:
    step = Normalise(NormaliseOptions())
    for text in (PAGE, CODE, "a\r\r\n \x85\u0301", "ब\u202e\u200c\u200c👩\u200b\u200d👩", "don\x92t"):
        once = after(step, text)
        assert after(step, once) == once
    assert after(Normalise(NormaliseOptions(html="always")), "a <b>b</b> &lt; c") == "a b < c"
    assert step.counts["pages of HTML turned to text"] == 1


def test_deep_and_broken_pages_are_read() -> None:
    assert after(Normalise(NormaliseOptions()), "<div>" * 5000 + "deep" + "</div>" * 5000) == "deep"
    assert after(Normalise(NormaliseOptions()), "<html><body><p>cut off </p><table><tr><td>a<td>b") == "cut off\n\na\tb"


# ---- mask


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("write to jane.doe+news@mail.example.co.uk, please", "write to [EMAIL], please"),
        ("<a@b.de>;c_d@e-f.org.", "<[EMAIL]>;[EMAIL]."),
        ("邮箱：zhang_san@163.com，欢迎来信", "邮箱：[EMAIL]，欢迎来信"),  # noqa: RUF001
        ("联系li@qq.com或致电", "联系[EMAIL]或致电"),
        ('AUTHOR = "someone@example.com"', 'AUTHOR = "[EMAIL]"'),
        ("from 93.184.216.34 port 22", "from [IP] port 22"),
        ("http://93.184.216.34:8080/x and 93.184.216.34.", "http://[IP]:8080/x and [IP]."),
        ("服务器地址是114.114.114.114，请勿外传", "服务器地址是[IP]，请勿外传"),  # noqa: RUF001
        ("ping 2606:2800:220:1:248:1893:25c8:1946 now", "ping [IP] now"),
        ("[2a00:1450:4001:81b::200e]:443", "[[IP]]:443"),
        ("手机13812345678，微信同号", "手机[PHONE]，微信同号"),  # noqa: RUF001
        ("电话：138-1234-5678 / 139 1234 5678", "电话：[PHONE] / [PHONE]"),  # noqa: RUF001
        ("+86 13812345678, 0086-13812345678, (+86)13812345678", "[PHONE], [PHONE], [PHONE]"),
        ("13812345678/13987654321/15012345678 8613812345678 86-13812345678", "[PHONE]/[PHONE]/[PHONE] [PHONE] [PHONE]"),
        ("138－1234－5678", "[PHONE]"),  # noqa: RUF001
        ("座机010-62345678，0755-26543210转8001", "座机[PHONE]，[PHONE]"),  # noqa: RUF001
        ("（0571）87654321，(021) 62345678", "[PHONE]，[PHONE]"),  # noqa: RUF001
        ("call (212) 555-0123 or 415-555-2671 or 415.555.2671 or 1-800-555-0199", "call [PHONE] or [PHONE] or [PHONE] or [PHONE]"),
        ("+1 212 555 0123; +44 20 7946 0958; +49 (0)30 901820; +81-3-1234-5678", "[PHONE]; [PHONE]; [PHONE]; [PHONE]"),
        ("電話 03-1234-5678、携帯 090-1234-5678", "電話 [PHONE]、携帯 [PHONE]"),
        ("tel:+442079460958", "tel:[PHONE]"),
        ("+8613812345678\n+86-10-62345678", "[PHONE]\n[PHONE]"),
        ("010 62345678、0571—87654321", "[PHONE]、[PHONE]"),  # noqa: RUF001
        ("zhang＠163．com，...li@qq.com(李)，-me@x.org", "[EMAIL]，...[EMAIL](李)，-[EMAIL]"),  # noqa: RUF001
        ("8.8.8.8 8.8.4.4, 1.1.1.1；223.5.5.5", "[IP] [IP], [IP]；[IP]"),  # noqa: RUF001
        ("::ffff:8.8.8.8 nameserver 9.9.9.9\n1.0.0.1 one.example 8.26.56.26.", "::ffff:[IP] nameserver [IP]\n[IP] one.example [IP]."),
        ("8.8.8.8 - - [10/Oct/2000] GET; 1.2.3.4:80, 1.2.3.0/24", "[IP] - - [10/Oct/2000] GET; [IP]:80, [IP]/24"),
        ("installed on 8.8.8.8, updated DNS to 8.8.4.4", "installed on [IP], updated DNS to [IP]"),
        ("+442071838750 rings\n+442071838750", "[PHONE] rings\n[PHONE]"),
        ("020 7183 8750; 0161 496 0123, 01632 960123, 07700 900 123", "[PHONE]; [PHONE], [PHONE], [PHONE]"),
        ("é@x.fr, josé.é@exämple.de, e\u0301@x.fr, почта@пример.рф", "[EMAIL], [EMAIL], [EMAIL], [EMAIL]"),  # noqa: RUF001
        ("192.0.0.170 ::ffff:93.184.216.34", "192.0.0.170 ::ffff:[IP]"),
        ("手机１３８１２３４５６７８，（０１０）６２３４５６７８；ＴＥＬ13812345678", "手机[PHONE]，[PHONE]；ＴＥＬ[PHONE]"),  # noqa: RUF001
        ("＋８６１３８１２３４５６７８，０１０－６２３４５６７８，１１４．１１４．１１４．１１４", "[PHONE]，[PHONE]，[IP]"),  # noqa: RUF001
        ("ｚｈａｎｇ＠１６３．ｃｏｍ，zhang＠163.com：", "[EMAIL]，[EMAIL]："),  # noqa: RUF001
        ("zhang@公司.中国或致电，info@例子.公司.cn。li@qq.com或访问www.qq.com", "[EMAIL]或致电，[EMAIL]。[EMAIL]或访问www.qq.com"),  # noqa: RUF001
        ("info@日本語.jp a@도메인.한국은 b@例え.みんな", "[EMAIL] [EMAIL]은 [EMAIL]"),
        ("身份证11010519491231002X，440524188001010014 11010519491231002x。", "身份证[ID]，440524188001010014 [ID]。"),  # noqa: RUF001
        ("号１１０１０５１９４９１２３１００２Ｘ", "号[ID]"),  # noqa: RUF001
        ("银行卡号：6222 0212 3456 7890 128，卡6222021234567890128", "银行卡号：[CARD]，卡[CARD]"),  # noqa: RUF001
        ("my Visa card 4111-1111-1111-1111; Amex card no. 3782 822463 10005", "my Visa card [CARD]; Amex card no. [CARD]"),
    ],
)
def test_mask_changes(text: str, wanted: str) -> None:
    assert after(Mask(MaskOptions()), text) == wanted


@pytest.mark.parametrize(
    "text",
    [
        "git clone git@github.com:user/repo.git",
        "@decorator\n@app.route('/')\ndef f(self, *args): return a @ b",
        "logo@2x.png and user@localhost, npm i react@18.2.0, 3 @ 5.00",
        "version 81.2.33.4, v93.184.216.34, firmware: 93.184.216.34, ==93.184.216.34",
        "Chrome/93.184.216.34 Safari/537.36, Section 1.2.3.4, 版本号：93.184.216.34",  # noqa: RUF001
        "127.0.0.1, 0.0.0.0, 10.1.2.3, 192.168.1.1, 172.16.9.9, 255.255.255.255, 169.254.0.1",
        "93.184.216.340, 1.93.184.216.34, 93.184.216, 93.184.216.34a, 093.184.216.34",
        "12:30:45, std::vector<int>, dead::beef, ::1, fe80::1, 2001:db8::1, 2023:10:15, 2:3:4",
        "Foo::Bar::new(), 2001:xyz, a[1:2:3], 00:1a:2b:3c:4d:5e",
        "2023-01-15, 2023/01/15 12:30:45, 15.01.2023, 20230115, 1999-2003",
        "3.14159265358979, 0.13812345678, 13812345678.5, 138123456789, x13812345678, 0x13812345678",
        "ISBN 978-7-302-12345-6, 978-0-306-40615-7, 4111 1111 1111 1111, 1700000000, 1700000000000",
        "a +12345678, x = 100+2000000, 1+1, C++ 17, 5 + 20 + 300",
        "@@ -1,2 +1,2 @@\n+12345678901\n-12345678902\n context of a patch",
        "1.2.3.4 Scope of this section\n  5.6.7.8. 范围",
        "Git 1.7.12 was followed by Git 1.7.12.3 and (1.7.11.1); 3.1.4\n3.1.5.9",
        "since V8 was upgraded to 4.6.85.28, release notes for 1.5.0.1, bump libXt to 1.0.99.1, 升级到 8.8.8.8",
        "alsa (1.2.7.2-1), lib-1.2.3.4.tar.gz, x_1.2.3.4.deb, 1.2.3.4.dll, 1.2.3.4~rc1",
        "人口 1400000000，面积 9600000 平方公里，2008-08-08 开幕",  # noqa: RUF001
        "uuid 123e4567-e89b-12d3-a456-426614174000, sha 4155552671abcdef",
        "192 168 1000, 200 300 4000, rows 100-200-3000",
        "nginx-1.18.40.7, openssl-93.184.216.34, 93.184.216.34-generic, linux-2.6.35.4, section 45.43.42.41, 224.0.1.200",
        "110105194912310021, 110105194913310025, 1101051949123100 2X, a11010519491231002X, 11010519491231002X3",
        "卡号 4111 1111 1111 1112, order 4111111111111111, card 12345678901234567, card 4111 1111 1111 1111 1111 1111",
        "微博@张三.中文 a@b，１２３４５６７８９０，２０２４．０１．１５，第１３８章",  # noqa: RUF001
        "y = a@b.reshape(3), gcc-10 (>= 10-20200431), 13812345678元, 13812345678 万",
    ],
)
def test_mask_leaves(text: str) -> None:
    assert after(Mask(MaskOptions()), text) == text


def test_mask_counts_and_takes_its_texts() -> None:
    step = Mask(MaskOptions(mail="<m>", phone="", ip="<i>"))
    assert after(step, "a@b.org c@d.org 13812345678 93.184.216.34") == "<m> <m> 13812345678 <i>"
    assert step.counts == {"mail addresses": 2, "IP addresses": 1}
    assert after(Mask(MaskOptions(mail="", ip="")), "a@b.org 13812345678 93.184.216.34") == "a@b.org [PHONE] 93.184.216.34"


PIECES = ["a", "a.", "1", "1-", "1 ", "+1 ", "@", "a@b.", "é.", "2001:", "(0", "010-"]
PIECES += ["a@中", "a@中.", "中.", "6222 ", "62220212", "卡6222", "11010519491231", "１", "１．"]  # noqa: RUF001
PIECES += ["1.1.1.", "1.2.3.4 ", "\n1.2.3.4 install ", "\n+442071838750"]


@pytest.mark.timeout(20)
@pytest.mark.parametrize("piece", PIECES)
def test_masking_takes_linear_time(piece: str) -> None:
    after(Mask(MaskOptions()), piece * (200_000 // len(piece)))


# ---- full width, traditional and simplified


def test_full_width_forms_are_folded_as_asked() -> None:
    text = "ＡＢＣ１２３，ｘｙｚ！　ｶﾀｶﾅ（全角）～￥"  # noqa: RUF001
    assert after(Chinese(ChineseOptions()), text) == text
    assert after(Chinese(ChineseOptions(full_width="letters")), text) == "ABC123，xyz！　ｶﾀｶﾅ（全角）～￥"  # noqa: RUF001
    assert after(Chinese(ChineseOptions(full_width="all")), text) == "ABC123,xyz! ｶﾀｶﾅ(全角)~￥"  # noqa: RUF001
    step = Chinese(ChineseOptions(full_width="all"))
    assert after(step, "plain ASCII, 中文。") == "plain ASCII, 中文。" and not step.counts


def test_traditional_is_simplified_in_chinese_only() -> None:
    pytest.importorskip("opencc")
    simplify, complicate = Chinese(ChineseOptions(convert="t2s")), Chinese(ChineseOptions(convert="s2t"))
    assert after(simplify, "漢語的軟體，「標點」不變！") == "汉语的软体，「标点」不变！"  # noqa: RUF001
    assert after(simplify, "漢語", "zh") == "汉语"
    assert after(simplify, "漢語", "ja") == "漢語"
    assert after(simplify, "日本語の国語は漢字") == "日本語の国語は漢字"
    assert after(simplify, "no Han at all") == "no Han at all"
    assert simplify.counts == {"texts converted": 2}
    assert after(complicate, "头发发展") == "頭髮發展"


def test_packages_are_asked_for_where_they_are_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert Chinese.problems(ChineseOptions(full_width="all")) == []
    assert Chinese.problems(ChineseOptions(convert="t2s")) == ["needs the package opencc: pip install opencc"]
    assert Normalise.problems(NormaliseOptions(html="never")) == []
    assert Normalise.problems(NormaliseOptions()) == ["needs the package selectolax: pip install selectolax"]
