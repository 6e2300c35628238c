"""Filters of datatrove: the documents they drop, the counts, and mistakes in the configuration."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest

from slipway.common.errors import UserError
from slipway.common.sections import Filter
from slipway.corpus.cleaning import Cleaner, DropCounts, identity
from slipway.corpus.documents import Document

# Trained by fastText on sentences of a few English (en) and German (de) words; 1,235 bytes.
MODEL = Path(__file__).with_name("two_languages.bin")
PROSE = "\n".join(
    f"The {subject} went to the harbour, and the people who lived there told stories of the old ships."
    for subject in ("captain", "teacher", "baker", "painter", "doctor", "farmer", "singer", "sailor")
)


def clean(text: str, name: str, **options: object) -> Document | str:
    return Cleaner([Filter(name, options)]).clean(Document(text, file=3, offset=17))


def reason(text: str, name: str, **options: object) -> str | None:
    result = clean(text, name, **options)
    return result if isinstance(result, str) else None


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("gopher_quality", "Too short.", "gopher_quality/gopher_short_doc"),
        ("gopher_repetition", "the same line again\n" * 40, "gopher_repetition/dup_line_frac"),
        ("c4_quality", "One sentence of words is here.", "c4_quality/too_few_sentences"),
        ("c4_paragraph", PROSE, "c4_paragraph/< 3 paragraphs"),
        ("fineweb_quality", "menu\nhome\nlogin\n" * 9, "fineweb_quality/line_punct_ratio"),
        ("gopher_quality", " \n\t ", "empty"),
        ("fineweb_quality", "\u3000", "empty"),
    ],
)
def test_filter_drops_document_with_datatroves_reason(name: str, text: str, expected: str) -> None:
    assert reason(text, name) == expected


@pytest.mark.parametrize("name", ["gopher_quality", "c4_quality", "fineweb_quality"])
def test_prose_passes_the_filters(name: str) -> None:
    assert clean(PROSE, name) == Document(PROSE, file=3, offset=17)


def test_options_reach_the_filter() -> None:
    rules = {"min_stop_words": 0, "max_non_alpha_words_ratio": None}
    assert reason("Too short.", "gopher_quality", min_doc_words=2, **rules) is None
    assert reason(PROSE, "regex", regex_exp="h[aeiou]rbour") == "regex"
    assert reason(PROSE, "fineweb_quality", stop_chars=["!"]) == "fineweb_quality/line_punct_ratio"


def test_filter_may_change_the_text() -> None:
    result = clean(f"{PROSE}\nread more", "c4_quality")
    assert isinstance(result, Document)
    assert result.text == PROSE


def test_filters_apply_in_order() -> None:
    cleaner = Cleaner([Filter("regex", {"regex_exp": "captain"}), Filter("gopher_quality", {})])
    assert cleaner.clean(Document("captain", 0, 0)) == "regex"


def test_without_filters_nothing_is_dropped() -> None:
    assert Cleaner([]).clean(Document("\n", 0, 0)) == Document("\n", 0, 0)


def test_language_comes_from_a_local_model() -> None:
    model = str(MODEL)
    assert reason("das haus und der baum\nist nicht", "language", languages=["en"], model=model) == "language"
    assert reason("the house and\n the tree", "language", languages=["en"], model=model) is None
    labels = [["de", 0.5]]
    assert reason("the house and the tree", "fasttext", keep_labels=labels, model=model) == "fasttext"
    assert reason("das haus und der baum", "fasttext", keep_labels=labels, model=model) is None


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("gopher_quality", {"min_doc_word": 3}, "min_doc_word: unknown option.*did you mean 'min_doc_words'"),
        ("gopher_quality", {"min_doc_words": "3"}, "min_doc_words='3': expected a number, or null"),
        ("gopher_quality", {"language": "english"}, "language='english'.*such as eng"),
        ("gopher_repetition", {"top_n_grams": 2}, "top_n_grams=2: expected a list"),
        ("c4_quality", {"filter_policy": 1}, "filter_policy=1: expected true or false"),
        ("c4_paragraph", {"min": 1}, "min: unknown option; it has no options"),
        ("regex", {}, "regex_exp: missing"),
        ("regex", {"regex_exp": "("}, "not a regular expression"),
        ("language", {}, "model: missing.*curl .*lid.176.bin"),
        ("language", {"model": "/none"}, "model='/none': no such file.*curl"),
        ("language", {"model": __file__}, "not a fastText model"),
        ("language", {"model": str(MODEL), "backend": "glot"}, "backend='glot': expected one of ft176, glot"),
        ("fasttext", {"model": str(MODEL), "keep_labels": [["fr", 0.5]]}, "no label 'fr' in .*has de, en"),
    ],
)
def test_mistake_in_the_configuration_is_named(name: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Cleaner([Filter(name, options)])


def test_missing_library_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datatrove.pipeline.filters", None)
    with pytest.raises(UserError, match=r"needs the library datatrove.*\[cleaning\]"):
        Cleaner([Filter("regex", {"regex_exp": "a"})])


def test_failure_of_a_filter_names_the_document(monkeypatch: pytest.MonkeyPatch) -> None:
    from datatrove.pipeline.filters import RegexFilter

    monkeypatch.setattr(RegexFilter, "filter", lambda _, __: 1 / 0)
    with pytest.raises(ZeroDivisionError) as error:
        clean("text", "regex", regex_exp="a")
    assert error.value.__notes__ == ["in filter regex, source file 3, offset 17"]


def test_identity_changes_with_the_models_content(tmp_path: Path) -> None:
    model = tmp_path / "model.bin"
    filters = [Filter("language", {"model": str(model), "languages": ["en"]})]
    identities = []
    for content in (b"a", b"b"):
        model.write_bytes(content)
        identities.append(identity(filters))
    assert identities[0] != identities[1]
    assert str(tmp_path) not in str(identities)
    model.unlink()
    with pytest.raises(UserError, match=r"language.model='.*': No such file"):
        identity(filters)


def test_counts_and_samples_do_not_depend_on_the_division() -> None:
    places = [(file, offset) for file in range(3) for offset in range(50)]
    records = []
    for parts in (1, 7, 50):
        random.Random(parts).shuffle(places)
        total = DropCounts()
        for part in range(parts):
            counts = DropCounts()
            for file, offset in places[part::parts]:
                counts.add(f"reason {offset % 2}", file, offset, text="x" * 300)
            total.merge(counts.record())
        records.append(total.record())
        assert {name: len(samples) for name, samples in total.samples().items()} == {
            "reason 0": 3,
            "reason 1": 3,
        }
        assert all(len(sample["text"]) == 200 for sample in total.samples()["reason 0"])
    assert records[0]["counts"] == {"reason 0": 75, "reason 1": 75}
    assert records[0] == records[1] == records[2]
