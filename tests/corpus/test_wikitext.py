"""Text of MediaWiki's markup: what ordinary pages leave, and the time that hostile ones take."""

from __future__ import annotations

import pytest

from slipway.corpus.wikitext import plain_text

SIZE = 200_000


@pytest.mark.parametrize(
    ("markup", "text"),
    [
        ("a<!-- b --> c <!-- d", "a c <!-- d"),
        ("a<ref name='x/y'/> b<ref>c <ref>d</ref> e</ref> f", "a b e f"),
        ("a <REF>b</ref\n> c <math>x<ref>y</math> z</ref>", "a c z"),
        ("<references/> a <ref>not closed", "a not closed"),
        ("== A = b == \nc\n==== \n= d", "A = b\nc\n\n= d"),
        ("=\n==\n=== = ==\n=e", "=\n\n=\n=e"),
        ("{| a {| b |} {c} |} d |}", "d |}"),
        ("{||}{|a} b", "{|a} b"),
        ("[http://x.y/z a b] [//x] [//x y", "a b [//x y"),
        ("a ( ; ) b ( ,) c", "a b c"),
        ("&amp;&#65;&#x41;&#" + "9" * 5000 + ";.", "&AA\ufffd."),
    ],
)
def test_markup_is_left_out(markup: str, text: str) -> None:
    assert plain_text(markup) == text


@pytest.mark.timeout(30)
@pytest.mark.parametrize(
    "markup",
    [
        *(
            part * (SIZE // len(part))
            for part in ("=", "= ", "<!--", "<ref>", "<ref", "</ref ", "{|", "[//a")
        ),
        *(
            part * (SIZE // len(part))
            for part in ("{{", "[[a|", "( ", "\n ", "__A", "<math>x</ref>", "'", "&#")
        ),
        *("[//" + "a" * SIZE, "( " + " " * SIZE, "=" * SIZE + "x", "<ref>" * 40_000 + "</ref x>" * 40_000),
    ],
    ids=lambda markup: markup[:8].strip(),
)
def test_time_grows_as_the_text(markup: str) -> None:
    plain_text(markup)


@pytest.mark.parametrize(
    ("markup", "text"),
    [
        ("Ada.[[de:Ada]] [[zh-yue:Ada]]\n[[simple:Ada Lovelace]]", "Ada."),
        (
            "[[:de:Ada|Ada]] of [[Re:Zero]], [[doi:10.1/x]] and [[wikt:word|a word]]",
            "Ada of Re:Zero, doi:10.1/x and a word",
        ),
        ("一-{zh-hans:计算机; zh-hant:電腦;}-二-{三}-{{x|-{zh-hans:a;zh-hant:b}-}}", "一计算机二三"),
        ("a-{H|zh-hans:x;zh-hant:y}-b-{|}-", "ab"),
        ("{{a}}-{{b}} x-{y", "- x-{y"),
    ],
)
def test_other_languages_and_writings_are_left_out(markup: str, text: str) -> None:
    assert plain_text(markup) == text
