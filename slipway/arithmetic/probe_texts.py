"""Texts on which two readings of one tokenizer differ, if they differ at all.

Each has been the difference between published implementations: their editions of Unicode, normalization, runs
of white space, digits, contractions, control characters, and the text of special tokens.
"""

from __future__ import annotations

import sys
import unicodedata
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import pairwise

_AWKWARD = (
    "",
    " ",
    "a",
    " leading, trailing ",
    "x    y = 1\n\tif  x:\n        return   y  \n",
    " \n\n\t x \r\n\r\n  y\r z",
    "\t\ttabs\t a \t b\n\n\nthree lines  \n \n ",
    "a\0b\x85\x1c\x7f\ufeff\u200b\u200d\u202e\u2028\u3000\u00a0 c\u00a0\u00a0d \u3000 e",
    "it's I'LL they've 'tis don't  stop ſ's x'Ll 1's é's 日's _'s -'re ''s 's' ’s it’s",
    "0123456789 3.14 1,000,000 1 12 123 1234 12345 a1b22 １２３ ٣٤٥ ४५ Ⅷ①² ½ 1\u0301 in 2024, item 1234",
    "e\u0301 é ŉ ǅ ﬁ Å Å Ω ß ẞ İ ı ǆ ｱﾞ ﾊﾟ \u1100\u1161\u11a8 각 q\u0323\u0307 q\u0307\u0323 \u0301alone",
    "ＦＵＬＬ　ｗｉｄｔｈ！　２０２４～ ㍿ ㌔ ℡ ﷺ \u2460\u3231 \uff76\uff9e … ‥ ﹏",
    "日本語のテキスト。中文文本，한국어 텍스트 ภาษาไทย हिन्दी العربية עברית ქართული Ελληνικά кириллица",
    "👩‍👩‍👧‍👦 🏳️‍🌈 🇩🇪 👍🏽 1️⃣ ☺︎ 🫠\U0001fae8\U0001fae9 ✍️'s",
    "\ud7ff\ue000\ufffd\uffff\U0001ffff\U000e0001\U000f0000\U0010ffff",
    "!?.,;: --- *** <<>> {[()]} \\ // `` \"\" '' ... !!! @#$%^&* —— ▁ ▁▁ a▁b Ġ Ċ ##a </w> <0x0A>",
    "<|endoftext|> <s></s> <unk> <pad> [MASK] [CLS] <|im_start|> <|end_of_text|> <extra_id_0> a<s>b a </s> b",
    "def f(x):\n    return {'a': x**2, \"b\": [1, 2]}  # comment\n\n\n",
    "camelCase PascalCase ALLCAPS MiXeD snake_case kebab-case https://example.org/a?b=1&c=%20 a@b.org",
    # Added in Unicode 15 to 17: letters, digits, marks and symbols.
    "\U0001e4d0's \U000323af's \U00016d40's \U00010d40\U00011bf0 \U0001ccf0",
    "\U00016ebb'll go \U000323b0's \U00011dc6 \U00018dcf's \U0001ceed \U0001e6dc \U0001faea",
    "x" * 3000 + " " * 3000 + "\n" * 300,
)
# Characters, or tokens, of a text.
_IN_TEXT = 16
# Many blocks have letters alone, as their neighbors do, so that each so many code points have one too; those
# of planes 2 and 3 are large.
_STEP, _LARGE_STEP = 32, 1024


def probe_texts(added: Iterable[str] = ()) -> list[str]:
    """Return texts with characters of every Unicode block and of every general category in it.

    Parameters
    ----------
    added
        The tokenizer's added tokens, which its readings may take for text.
    """
    tokens = sorted({token for token in added if token})
    return [
        *_AWKWARD,
        *_join([f"{c}'s {c}{c} 1{c}a\n{c} " for c in _characters()]),
        *_join([f"a{t}b {t} {t}{t}\n{t}  '{t}1" for t in tokens]),
    ]


@cache
def _characters() -> tuple[str, ...]:
    """Return the first character of each run of one general category, and others inside of long runs."""
    characters = []
    # Planes 3 to 13 end with U+33479 in Unicode 17; the last two are for private use.
    numbers = [*range(0x34000), *range(0xE0000, 0xE0200), 0xF0000, sys.maxunicode - 2]
    for before, number in pairwise([0, *numbers]):
        category = unicodedata.category(chr(number))
        step = _STEP if number < 0x20000 else _LARGE_STEP
        if category != "Cs" and (number % step == 0 or category != unicodedata.category(chr(before))):
            characters.append(chr(number))
    return tuple(characters)


def _join(parts: list[str]) -> Iterator[str]:
    for first in range(0, len(parts), _IN_TEXT):
        yield "".join(parts[first : first + _IN_TEXT])
