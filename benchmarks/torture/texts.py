"""Texts on which readers and tokenizers differ, if they do."""

from __future__ import annotations

import sys
import unicodedata
from itertools import pairwise

PLAIN = [
    "The first document.",
    "A second one,\n\n  with two paragraphs and    a run of spaces",
    "Größe, naïve café: Ünïcödé",
    "日本語のテキスト。中文文本，한국어 텍스트",
    "🙂 👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽",
]
AWKWARD = [
    *PLAIN,
    " leading, trailing ",
    "x    y = 1\n\tif  x:\n        return   y  \n",
    " \n\n\t x \r\n\r\n  y\r z",
    "\t\ttabs\t a \t b\n\n\nthree lines  \n \n ",
    "a\0b\x85\x1c\x7f\u200b\u200d\u202e\u2028\u3000\u00a0 c\u00a0\u00a0d \u3000 e",
    "it's I'LL they've 'tis don't  stop ſ's x'Ll 1's é's 日's _'s -'re ''s 's' ’s it’s",
    "the year 2024 and item 1234: 0123456789 3.14 1,000,000 1 12 12345 a1b22 １２３ ٣٤٥ ४५ Ⅶ①² ½",
    "e\u0301 é ŉ ǅ ﬁ Å \u212b Ω \u2126 ß ẞ İ ı ｱﾞ ﾊﾟ \u1100\u1161\u11a8 각 q\u0323\u0307 q\u0307\u0323",
    "ＦＵＬＬ　ｗｉｄｔｈ！　２０２４～ ㍿ ㌔ ℡ ﷺ … ﹏",
    "ภาษาไทย हिन्दी العربية עברית ქართული Ελληνικά кириллица",
    "\ud7ff\ue000\ufffd\U0001ffff\U000e0001\U0010ffff",
    '!?.,;: --- *** <<>> {[()]} \\ // `` "" ... @#$%^&* —— ▁ ▁▁ a▁b Ġ Ċ ##a </w> <0x0A>',
    "<|endoftext|> <s></s> <unk> <pad> [MASK] <|im_start|> <|end_of_text|> <extra_id_0> a<s>b a </s> b",
    "camelCase ALLCAPS snake_case kebab-case https://example.org/a?b=1&c=%20 a@b.org",
    "x" * 2000 + " " * 2000 + "\n" * 200,
    # Letters, digits and symbols that Unicode has since 15, 16 and 17.
    "\U0001e4d0's \U000323af's \U00016d40's \U00010d40\U00011bf0 \U0001ccf0",
    "\U00016ebb'll go \U000323b0's \U00011dc6 \U00018dcf's \U0001ceed \U0001e6dc",
]
_IN_TEXT = 200
# A large block has letters alone; one of so many is taken.
_STEP = 64


def every_block() -> list[str]:
    """Return texts with characters of every general category in every block of Unicode."""
    numbers = [*range(0x20, 0xD800), *range(0xE000, 0x34000), *range(0xE0000, 0xE01F0), 0xF0000]
    chosen = [
        chr(number)
        for before, number in pairwise([0, *numbers])
        if number % _STEP == 0 or unicodedata.category(chr(before)) != unicodedata.category(chr(number))
    ]
    assert len(chosen) > 1000 and ord(chosen[-1]) <= sys.maxunicode
    words = [f"{sign}'s {sign}{sign} 1{sign}a\n{sign} " for sign in chosen]
    return ["".join(words[first : first + _IN_TEXT]) for first in range(0, len(words), _IN_TEXT)]


# The small tokenizers learn from words, and have bytes or characters for the rest.
TRAINING = [
    *PLAIN,
    "the of and in a train model data token shard hello there is this that with item year " * 40,
]
