"""Brings a text to its plain form, each rule by itself: it changes how a text is written and none of its words or marks.

That a text is UTF-8 the reader of the input has made sure of (what is not is a bad record). HTML is told by how the text
begins and ends, so a page is turned to text and an article that quotes a tag stays, as does Markdown that begins with one;
for corpora of code set ``html: never``.
What the rules leave alone on purpose: indentation, runs of spaces inside a line, U+3000 (the indentation of Chinese).

What shows nothing makes equal texts different. The rule ``invisible`` removes what Unicode calls default ignorable
(``Default_Ignorable_Code_Point`` in DerivedCoreProperties.txt, Unicode 16) and private use, except where writing needs it: joiners,
direction marks, spaces of no width and selectors after a letter of a script that has them (Hebrew, Arabic, Indic scripts, Thai,
Tibetan, Burmese, Khmer, Mongolian ...), joiners, selectors and tags in sequences of emoji, and fillers between conjoining jamo.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from megatron_lite.clean.step import Document, LocalStep, missing_packages

# Bytes 80 to 9F that were read as Latin-1 are Windows-1252, as in HTML (https://html.spec.whatwg.org, numeric character
# reference end state): dropping them would drop quotation marks and dashes.
_WINDOWS = {code: bytes([code]).decode("cp1252", "ignore") for code in range(0x80, 0xA0)}
# Soft hyphens (where a line may be broken), interlinear marks, and code points that are no characters (Unicode 16, 23.7).
_CONTROLS = re.compile("[\x00-\x08\x0e-\x1f\x7f-\x9f\xad\ufff9-\ufffb\ufdd0-\ufdef\ufffe\uffff]")
_INVISIBLE = (
    "\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u202a-\u202e\u2060-\u206f\u3164\ufe00-\ufe0f\uffa0\ufff0-\ufff8"
    "\ue000-\uf8ff\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U0010ffff"  # the last: tags, selectors, private use
)
_JOINING = (  # letters of scripts that need joiners
    "\u0590-\u061b\u061d-\u08ff\u0900-\u109f\u1780-\u17b3\u17b6-\u180a\u1810-\u18af\u1900-\u1cff\ua800-\uaaff\uabc0-\uabff"
    "\ufb1d-\ufdcf\ufdf0-\ufdff\ufe70-\ufefc\U00010a00-\U00011fff\U0001e900-\U0001e95f"
)
_EMOJI = "(?:[\xa9\xae\u203c\u2049\u2122-\u2bff\u3030\u303d\u3297\u3299\U0001f000-\U0001faff][\ufe0e\ufe0f]?[\U0001f3fb-\U0001f3ff]?)"
_SHOWN_NOTHING = re.compile(f"[{_INVISIBLE}]")
_NEEDED = re.compile(
    f"([{_JOINING}][\u034f\u061c\u180b-\u180f\u200b-\u200f\ufe00-\ufe0f]"
    f"|\U0001f3f4[\U000e0020-\U000e007e]+\U000e007f|{_EMOJI}(?:\u200d{_EMOJI})*|[#*0-9]\ufe0f\u20e3"
    f"|[\u1100-\u115e]\u1160|\u115f[\u1161-\u11a7])|[{_INVISIBLE}]"
)
_RUN = re.compile("[#*0-9\x80-\U0010ffff][\x80-\U0010ffff]*")  # each match of _NEEDED lies in one of them; they are found quickly
_LINE_ENDS = re.compile("[\r\v\f\u2028\u2029]")
_SPACES = re.compile("[\u00a0\u1680\u2000-\u200a\u202f\u205f]")
_BLANK_LINES = re.compile("\n{3,}")
_PAGE = re.compile(
    r"[\s\ufeff]*(?:<\?xml[^>]*>\s*)?(?:<!--.*?-->\s*)*"
    r"(?:(?P<whole><!doctype\s+html|<(?:html|head|body)\b[^<>]*>)|<(?:div|p|table|article|section|main|header|nav|ul|ol|dl|h[1-6]"
    r"|span|center|form|blockquote|title|meta|link)(?:\s[^<>]*)?>)",
    re.I | re.S,
)
_CLOSED = re.compile(r"</[a-z][a-z0-9]*\s*>", re.I)
_PRE = re.compile(r"<pre\b.*?</pre>", re.I | re.S)
_MARKDOWN = re.compile(r"^ {0,3}(?:#{1,6} |```|~~~)", re.M)
_UNSEEN = {"head", "script", "style", "noscript", "template", "svg", "math", "iframe", "object", "select", "button"}
_PARAGRAPHS = {
    "p", "h1", "h2", "h3", "h4", "h5", "h6", "blockquote", "pre", "table", "ul", "ol", "dl", "article", "section",
}  # fmt: skip
_LINES = {
    "address", "aside", "body", "caption", "center", "dd", "details", "div", "dt", "fieldset", "figcaption", "figure", "footer",
    "form", "header", "hr", "html", "legend", "li", "main", "nav", "summary", "tbody", "tfoot", "thead", "tr",
}  # fmt: skip
_HIDDEN = "[hidden], [style*='display:none' i], [style*='display: none' i]"
_LINE, _PARAGRAPH, _CELL = "\x01", "\x02", "\x03"  # marks while a page is read, in which controls are spaces
_COLLAPSED = re.compile(r"[\x00-\x20\x7f]+")
# Lines of Chinese and Japanese are joined without a space (CSS Text 3, 4.1.3).
_BREAK = re.compile("(?<=[\u2e80-\u9fff\uf900-\ufaff\uff01-\uff60])[ \t\r]*\n\\s*(?=[\u2e80-\u9fff\uf900-\ufaff\uff01-\uff60])")
_MARKS = re.compile(f" *[{_LINE}{_PARAGRAPH}][ {_LINE}{_PARAGRAPH}{_CELL}]*")


@dataclass(frozen=True)
class NormaliseOptions:
    """Options of ``normalise``."""

    html: Literal["auto", "always", "never"] = "auto"
    """Turn HTML to text: pages, told by how they begin and end; every text; none."""
    bom: bool = True
    """Remove byte-order marks (U+FEFF), wherever they are."""
    controls: bool = True
    """Remove control characters, soft hyphens and code points that are none; end lines with a newline; bytes 80 to 9F as
    Windows-1252."""
    invisible: bool = True
    """Remove what shows nothing (spaces and joiners of no width, marks of direction, selectors, fillers, private use) where neither
    script nor emoji need it."""
    nfc: bool = True
    """Unicode normalisation form C (UAX 15): one code point where letter and accent are two; no change of how it looks."""
    whitespace: bool = True
    """Plain spaces for their kin (U+00A0 ...), none at the ends of lines, at most one blank line, none at the ends."""


class Normalise(LocalStep):
    """See the module."""

    name = "normalise"
    Options = NormaliseOptions

    def apply(self, documents: Sequence[Document]) -> None:
        """Change the texts."""
        options: NormaliseOptions = self.options
        for document in documents:
            text = document.text
            if options.html != "never" and (options.html == "always" or is_page(text)):
                text = page_text(text)
                self.count("pages of HTML turned to text")
            if options.bom and "\ufeff" in text:
                text = text.replace("\ufeff", "")
                self.count("texts with byte-order marks")
            if options.controls:
                text = self._controls(text)
            if options.invisible and not text.isascii() and _SHOWN_NOTHING.search(text):
                visible = _RUN.sub(_visible, text)
                self.count("texts with code points that show nothing", visible != text)
                text = visible
            if options.nfc and not unicodedata.is_normalized("NFC", text):
                text = unicodedata.normalize("NFC", text)
                self.count("texts brought to NFC")
            if options.whitespace:
                text = plain_space(text)
            document.text = text

    @staticmethod
    def problems(options: NormaliseOptions) -> list[str]:
        """The parser of HTML is missing where it is needed."""
        return missing_packages("selectolax") if options.html != "never" else []

    def _controls(self, text: str) -> str:
        text = _LINE_ENDS.sub("\n", text.replace("\r\n", "\n"))
        if _CONTROLS.search(text):
            self.count("texts with control characters")
            text = _CONTROLS.sub(lambda found: _WINDOWS.get(ord(found[0]), ""), text)
        return text


def _visible(run: re.Match[str]) -> str:
    """A run of characters outside of ASCII without what shows nothing and is not needed."""
    return _NEEDED.sub(lambda found: found[1] or "", run[0]) if _SHOWN_NOTHING.search(run[0]) else run[0]


def plain_space(text: str) -> str:
    """A text with plain spaces, none at the ends of lines, and at most one blank line together."""
    text = _SPACES.sub(" ", text)
    text = "\n".join(line.rstrip() for line in text.split("\n"))
    if "\n\n\n" in text:
        text = _BLANK_LINES.sub("\n\n", text)
    return text.strip("\n")


def is_page(text: str) -> bool:
    """Whether a text begins as HTML does and closes a tag; a part of a page ends with that, and is no Markdown."""
    begin = _PAGE.match(text)
    if begin is None or begin["whole"] is not None:
        return begin is not None and _CLOSED.search(text) is not None
    text = text.rstrip()
    return _CLOSED.fullmatch(text, text.rfind("<")) is not None and _MARKDOWN.search(_PRE.sub("", text)) is None


def page_text(html: str) -> str:
    """What a page shows: a line for each block, a blank line around paragraphs, tabs between the cells of a table."""
    from selectolax.lexbor import LexborHTMLParser, LexborNode

    tree = LexborHTMLParser(html)
    for inside in tree.css("pre br, pre script, pre style"):
        inside.replace_with("\n" if inside.tag == "br" else "")
    hidden = {node.mem_id for node in tree.css(_HIDDEN)} if "hidden" in html or "none" in html else set()
    parts: list[str] = []
    todo: list[str | LexborNode | None] = [tree.root]
    while todo:
        node = todo.pop()
        if node is None or isinstance(node, str):
            parts.append(node or "")
            continue
        if node.mem_id in hidden:
            continue
        tag = node.tag
        if tag == "-text":
            parts.append(_COLLAPSED.sub(" ", _BREAK.sub("", node.text_content or "")))
        elif tag == "br":
            parts.append(_LINE)
        elif tag == "pre":
            lines = _CONTROLS.sub("", _LINE_ENDS.sub("\n", node.text(deep=True))).strip("\n").split("\n")
            parts += [_PARAGRAPH, _LINE.join(line.replace(" ", "\u00a0") for line in lines), _PARAGRAPH]
        elif tag not in _UNSEEN:
            mark = _PARAGRAPH if tag in _PARAGRAPHS else _LINE if tag in _LINES else _CELL if tag in ("td", "th") else ""
            parts.append("" if mark == _CELL else mark)
            todo += [mark, *reversed(list(node.iter(include_text=True)))]
    text = _MARKS.sub(lambda found: "\n\n" if _PARAGRAPH in found[0] else "\n", "".join(parts))
    words = (" ".join(filter(None, line.split(" "))) for line in text.split("\n"))
    return "\n".join(line.rstrip(_CELL).replace(_CELL, "\t") for line in words).replace("\u00a0", " ").strip("\n")
