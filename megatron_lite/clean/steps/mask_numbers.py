"""Numbers with a check digit that :mod:`megatron_lite.clean.steps.mask` looks for: Chinese resident identities and bank cards.

An identity number has 18 characters (GB 11643-1999): 6 of a district, 8 of a date of birth, 3 of a sequence, and one that is right
for the others by ISO/IEC 7064, MOD 11-2 (0 to 9, or X for 10). A card has 13 to 19 digits (ISO/IEC 7812), of which the last is
right by Luhn's formula. One of ten numbers is, by chance, so a card is a number that a word shortly before it calls one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import date

_IDENTITY = re.compile(r"[1-8](?<![\w.+-]\d)\d{5}(?:19|20)\d{9}[\dXx](?![0-9A-Za-z_]|[.-]\d)", re.ASCII)
_CARD = re.compile(r"[2-6](?<![\w.+-]\d)\d{3}(?:(?P<sep>[ -]?)\d{4}(?:(?P=sep)\d{4}){1,2}(?:(?P=sep)\d{1,4})?|[ -]?\d{6}[ -]?\d{5})"
                   r"(?![0-9A-Za-z_]|[ .-]?\d)", re.ASCII)  # fmt: skip
_CALLED = re.compile(r"\bcards?\b|\bvisa\b|master ?card|卡|账号|帐号|賬號|帳號|账户|帐户|カード|口座", re.I)
_NEAR = 24  # characters before a card in which a word calls it one
_WEIGHTS = [2 ** (17 - place) % 11 for place in range(17)]


def identities(text: str) -> Iterator[re.Match[str]]:
    """Resident identity numbers in a text."""
    return (found for found in _IDENTITY.finditer(text) if is_identity(found[0]))


def cards(text: str) -> Iterator[re.Match[str]]:
    """Card numbers in a text."""
    for found in _CARD.finditer(text):
        if is_luhn(found[0]) and _CALLED.search(text, max(0, found.start() - _NEAR), found.start()):
            yield found


def is_identity(number: str) -> bool:
    """Whether the date is one and the last of 18 characters is right."""
    try:
        date(int(number[6:10]), int(number[10:12]), int(number[12:14]))
    except ValueError:
        return False
    total = sum(weight * int(digit) for weight, digit in zip(_WEIGHTS, number, strict=False))
    return "10X98765432"[total % 11] == number[17].upper()


def is_luhn(number: str) -> bool:
    """Whether the digits of a number are 13 to 19, and the last of them is right."""
    digits = [int(c) for c in number if c.isdigit()]
    doubled = (digit if place % 2 == 0 else sum(divmod(2 * digit, 10)) for place, digit in enumerate(reversed(digits)))
    return 13 <= len(digits) <= 19 and sum(doubled) % 10 == 0
