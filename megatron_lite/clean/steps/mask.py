"""Masks private data: mail addresses, IP addresses, telephone numbers, Chinese identity numbers, bank cards.

A pattern finds what looks like one; what stands around it and inside it then says whether it is. So dates, ``git@host:path`` and
the like stay. What may be an address is masked unless something marks it as a version or a section: a word before it ("version",
"upgrade to"), a name or a suffix that it is part of (``pkg-1.2.3.4-1``), and where three of the four numbers are below 32 also
a heading that it begins, or a number of three in the same text that begins as it does (1.7.12 beside 1.7.12.3).
Of IP addresses only public ones are masked: those of private networks, of this computer and of documentation
(``ipaddress.is_global``: the registries of RFC 6890) tell of nobody. Telephone numbers: Chinese mobile and landline
numbers, North American, Japanese and British ones, and any with ``+`` and a country's code (E.164). Identity and card numbers have
a check digit (mask_numbers.py). Full-width letters and digits are read as ASCII, and what is not masked stays as it was. Names
and postal addresses are not looked for.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from ipaddress import AddressValueError, IPv4Address, IPv6Address
from string import ascii_letters

from megatron_lite.clean.step import Document, LocalStep
from megatron_lite.clean.steps.mask_numbers import cards, identities

_LETTERS = "A-Za-zÀ-ÖØ-öø-\u024f\u0300-\u036fͰ-ϿЀ-ӿ"  # noqa: RUF001
_OTHERS = "\u0900-\u0dff\u0e00-\u0e7f\u3005-\u3007\u3041-\u3096\u30a1-\u30fc\u3400-\u9fff\uac00-\ud7a3"  # of domains
_TOPS = (  # top-level domains of scripts without spaces, where what comes after is no sign of their end (root zone of 2024)
    "(?:中国|中國|公司|网络|網絡|網路|香港|澳門|澳门|台湾|台灣|新加坡|网站|网址|网店|商城|商标|商店|政务|政府|公益|机构|移动|信息|我爱你|在线|中文网"
    "|集团|企业|娱乐|游戏|时尚|健康|世界|组织机构|手机|点看|餐厅|购物|みんな|コム|セール|ストア|ファッション|グーグル|한국|닷컴|닷넷)"
)
_MAIL = re.compile(
    rf"(?<![{_LETTERS}0-9])(?<![{_LETTERS}0-9][._%+-])[{_LETTERS}0-9][{_LETTERS}0-9._%+-]{{0,63}}[@＠]"  # noqa: RUF001
    # a part of the domain is of one kind, or "qq.com或访问www.example.com" would be one
    rf"((?:(?:[{_LETTERS}0-9](?:[{_LETTERS}0-9-]{{0,61}}[{_LETTERS}0-9])?|[{_OTHERS}](?:[{_OTHERS}0-9-]{{0,61}}[{_OTHERS}0-9])?)[.．])+"  # noqa: RUF001
    rf"(?P<top>[{_LETTERS}]{{2,24}}(?![{_LETTERS}0-9-])|{_TOPS}))"  # noqa: RUF001
    rf"(?P<path>:[\w~/.])?(?=(?P<call>\()?)"
)
_FILES = (".png", ".jpg", ".jpeg", ".gif", ".svg", ".webp", ".js", ".css")  # logo@2x.png
_IPV4 = re.compile(
    r"[0-9](?<![\w.]\d)(?<![A-Za-z][/-]\d)\d{0,2}\.\d{1,3}\.\d{1,3}\.\d{1,3}(?![A-Za-z0-9_]|\.\d|-[A-Za-z])", re.ASCII
)
_VERSION = re.compile(
    r"(?:\bv|\bver|version|releases?|release notes|revision|firmware|build|section|[=~<>]=|版本|版|升级"
    r"|(?:upgrad|downgrad|bump|install)\w*(?: (?!(?:at|on|by|in|from|via|ip|dns|host|server|address)\b)\S+)?)"
    r"\s*(?:号|number|to|for|到|至)?\.?\s*[:：=]?\s*$",  # noqa: RUF001
    re.I,
)
_SMALL = 32  # three numbers of four below this may be a version or a section: 1 in 140 addresses is so
_THREE = re.compile(r"[0-9](?<![\d.]\d)\d{0,2}\.\d{1,3}(?=\.\d{1,3}(?!\d|\.\d))", re.ASCII)  # the first two of three numbers
_LINE = re.compile(r"(?:^|\n)[ \t#*]*$")
_HEADING = re.compile(r"\.?[ \t]+(?:[A-Z][a-z]|[\u4e00-\u9fff])")
_SUFFIX = re.compile(r"-\d{1,2}(?![\d.])|\.[A-Za-z]|[+~]")  # of a package or a file
_IPV6 = re.compile(
    r"[23](?<![\w:.][23])[0-9A-Fa-f]{3}:[0-9A-Fa-f:]{2,34}(?![\w:])", re.ASCII
)  # global unicast, 2000::/3

_BEFORE, _AFTER = r"(?<![\dA-Za-z_.+/=-])", r"(?![\dA-Za-z_]|[-.]\d)"
_AREA = r"(?:10|2\d|[3-9]\d{2})"  # of China, without its 0
_PHONE = re.compile(
    "|".join(
        (
            # China, mobile: 11 digits from 13 to 19, by 3 4 4; no sum of money
            rf"(?:{_BEFORE}|(?<=1[3-9]\d{{9}}/)(?<![\dA-Za-z_.+=-]1[3-9]\d{{9}}/))"  # 13812345678/13987654321
            + r"(?:(?:\+|00)?86[- ]?|[(（]\+?86[)）] ?)?1[3-9]\d(?P<sep>[-－ ]?)\d{4}(?P=sep)\d{4}(?! ?[元万亿円])"  # noqa: RUF001
            + _AFTER,
            # China, landline: area code from 010 to 0999, 7 or 8 digits, an extension
            _BEFORE
            + rf"(?:(?:\+|00)86[- ]?0?|0){_AREA}[-－—– ][2-9]\d{{6,7}}(?:[-－转]\d{{1,5}})?"  # noqa: RUF001
            + _AFTER,
            rf"[(（]0{_AREA}[)）] ?[2-9]\d{{6,7}}" + _AFTER,  # noqa: RUF001
            # North America: 3 3 4, area and exchange from 200
            _BEFORE
            + r"(?:\+?1[-. ])?(?:\([2-9]\d{2}\) ?[2-9]\d{2}[- .]|[2-9]\d{2}(?P<us>[-.])[2-9]\d{2}(?P=us))\d{4}"
            + _AFTER,
            _BEFORE + r"\+?1 [2-9]\d{2} [2-9]\d{2} \d{4}" + _AFTER,
            # Japan: 0 and 10 or 11 digits in three groups
            _BEFORE + r"0(?:\d-\d{4}|\d{2}-\d{3,4}|\d{3}-\d{2,3}|\d{4}-\d)-\d{4}" + _AFTER,
            # Britain: 0 and 10 digits, by spaces
            _BEFORE
            + r"0(?:2\d \d{4} \d{4}|1\d1 [2-9]\d{2} \d{4}|1\d{3} [2-9]\d{4,5}|7\d{3} (?:\d{6}|\d{3} \d{3}))"
            + _AFTER,
            # anywhere: + and 8 to 15 digits
            r"(?P<anywhere>(?<![\w.+/=-])\+[1-9]\d{0,2}(?:[-. ]?\(?\d{1,4}\)?){2,6})" + _AFTER,
        )
    ),
    re.ASCII,
)
_FEWEST_DIGITS, _FEWEST_TOGETHER, _MOST_DIGITS = 8, 10, 15  # of a number with +; E.164 has the 15
# Seven digits or more with little between them: where a telephone number may be. (A pattern that begins with a set of
# characters is found many times faster than one that begins with a look behind; so are the two above.)
_DIGITS = re.compile(r"[0-9+(（](?:[ ()（）.+\-－—–转]{0,2}[0-9]){6,}")  # noqa: RUF001


_NARROW = {c + 0xFEE0: c for c in b"+.0123456789Xx"}  # full width to ASCII
_NARROW_LETTERS = {c + 0xFEE0: c for c in f"@.0123456789{ascii_letters}".encode()}
_WIDE = re.compile("[０-９]")


@dataclass(frozen=True)
class MaskOptions:
    """Options of ``mask``."""

    mail: str = "[EMAIL]"
    """What stands for a mail address; empty: they stay."""
    ip: str = "[IP]"
    """What stands for a public IPv4 or IPv6 address; empty: they stay."""
    phone: str = "[PHONE]"
    """What stands for a telephone number; empty: they stay."""
    identity: str = "[ID]"
    """What stands for a Chinese resident's identity number (18 characters, the last of them right); empty: they stay."""
    card: str = "[CARD]"
    """What stands for the number of a bank card (13 to 19 digits, the last right by Luhn's formula) that a word before it calls one
    (card, 卡, 账号 ...); empty: they stay."""


class Mask(LocalStep):
    """See the module."""

    name = "mask"
    Options = MaskOptions

    def apply(self, documents: Sequence[Document]) -> None:
        """Change the texts, and count what was masked."""
        for document in documents:
            text = document.text
            is_wide = not text.isascii() and _WIDE.search(text) is not None
            for instead, find, what in self._finders(text.translate(_NARROW) if is_wide else text):
                if instead:
                    text = self._replace(text, find(text.translate(_NARROW) if is_wide else text), instead, what)
            document.text = text

    def _finders(self, text: str) -> Iterator[tuple[str, Callable[[str], Iterable[re.Match[str]]], str]]:
        """(what stands for it, what finds it, its name) of what there may be in a text."""
        options: MaskOptions = self.options
        yield options.mail, _mails, "mail addresses"
        yield options.ip, _public_ipv4, "IP addresses"
        yield options.ip, _public_ipv6, "IP addresses"
        if _DIGITS.search(text):
            yield options.identity, identities, "identity numbers"
            yield options.card, cards, "card numbers"
            yield options.phone, _phones, "telephone numbers"

    def _replace(self, text: str, found: Iterable[re.Match[str]], instead: str, what: str) -> str:
        """Put ``instead`` for what was found, and count."""
        parts, end = [], 0
        for match in found:
            parts += [text[end : match.start()], instead]
            end = match.end()
            self.count(what)
        return "".join([*parts, text[end:]]) if parts else text


def _mails(text: str) -> Iterable[re.Match[str]]:
    if "＠" in text:  # noqa: RUF001
        text = text.translate(_NARROW_LETTERS)
    return filter(_is_mail, _MAIL.finditer(text)) if "@" in text else ()


def _is_mail(found: re.Match[str]) -> bool:
    """No address of a repository, no name of a file, no product of matrices (``a@b.reshape(3)``)."""
    called = found["call"] is not None and len(found["top"]) > 4
    return found["path"] is None and not called and not found[1].lower().endswith(_FILES)


def _public_ipv4(text: str) -> Iterator[re.Match[str]]:
    of_three: set[str] | None = None
    for found in _IPV4.finditer(text):
        if _VERSION.search(text, max(0, found.start() - 32), found.start()) or not _is_public(IPv4Address, found[0]):
            continue
        if sum(int(number) < _SMALL for number in found[0].split(".")) > 2:
            of_three = set(_THREE.findall(text)) if of_three is None else of_three
            begins_line = _LINE.search(text, max(0, found.start() - 32), found.start())
            if found[0].rsplit(".", 2)[0] in of_three or _SUFFIX.match(text, found.end()):
                continue
            if begins_line and _HEADING.match(text, found.end()):
                continue
        yield found


def _public_ipv6(text: str) -> Iterator[re.Match[str]]:
    return (found for found in _IPV6.finditer(text) if _is_public(IPv6Address, found[0]))


def _is_public(kind: type[IPv4Address | IPv6Address], text: str) -> bool:
    try:
        address = kind(text)
        return address.is_global and not address.is_multicast
    except AddressValueError:  # a number above 255, or one that begins with 0
        return False


def _phones(text: str) -> Iterator[re.Match[str]]:
    is_patch: bool | None = None
    for digits in _DIGITS.finditer(text):
        for found in _PHONE.finditer(text, digits.start(), digits.end() + 2):  # and what comes after it
            if found["anywhere"] is not None:
                number = sum(c.isdigit() for c in found[0])
                together = number == len(found[0]) - 1  # without any separator: perhaps a sum, or a line that a patch adds
                if not (_FEWEST_TOGETHER if together else _FEWEST_DIGITS) <= number <= _MOST_DIGITS:
                    continue
                if together and text[found.start() - 1 : found.start()] in ("", "\n"):
                    is_patch = re.search(r"^@@ -", text, re.M) is not None if is_patch is None else is_patch
                    if is_patch:
                        continue
            yield found
