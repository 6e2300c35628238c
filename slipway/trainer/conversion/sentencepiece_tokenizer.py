"""SentencePiece models as a ``tokenizer.json`` that gives their ids.

The two libraries differ in how they normalize a text, put a space before it, order merges, and read the
names of control pieces. Each is stated here as SentencePiece has it (github.com/google/sentencepiece:
normalizer.cc, bpe_model.cc, unigram_model.cc).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from slipway.common.errors import UserError
from slipway.trainer import requirements

# Types of pieces and of models in sentencepiece_model.proto.
_NORMAL, _UNKNOWN, CONTROL, _USER_DEFINED, _UNUSED = 1, 2, 3, 4, 5
# Their names in a text are text.
_RESERVED = (_UNKNOWN, CONTROL, 6)
_UNIGRAM, _BPE, _WORD = 1, 2, 3
# Noncharacters, which no text has: between two characters, and in place of one that no piece has.
_BETWEEN, _NOWHERE = "\ufdd3", "\ufdd5"
# Of a plane for private use: in place of the symbols that normalization would change.
_SYMBOLS = 0xF4321
_PLAIN = re.compile(r"[!-@\[-~]+")
# Marks of a character, at most, that become one with it.
_MARKS = 3
_ROUNDING = 2.0**-23


class PieceModel:
    """A SentencePiece model; `processor` is the library's own reading of it, the reference.

    Raises
    ------
    UserError
        If a library is missing, or the file is no model.
    """

    def __init__(self, path: Path) -> None:
        requirements.check(("sentencepiece", "google.protobuf"), extra="conversion")
        from sentencepiece import SentencePieceProcessor, sentencepiece_model_pb2

        try:
            self.processor: Any = SentencePieceProcessor(model_file=str(path))
            model = sentencepiece_model_pb2.ModelProto.FromString(path.read_bytes())
        except (OSError, RuntimeError, ValueError) as error:
            raise UserError(f"{path}: not a SentencePiece model: {error}") from None
        self.pieces, self._options, self._rules = model.pieces, model.trainer_spec, model.normalizer_spec

    def named(self, *kinds: int) -> list[str]:
        """Return the pieces of some types; without any, those of all types but normal text."""
        return [p.piece for p in self.pieces if (p.type in kinds if kinds else p.type != _NORMAL)]

    def is_tie(self, first: list[int], second: list[int]) -> bool:
        """Return whether two segmentations are equally likely, to SentencePiece's precision of 32 bits."""
        if self._options.model_type != _UNIGRAM or max(second, default=0) >= len(self.pieces):
            return False
        one, other = ([self.pieces[number] for number in ids] for ids in (first, second))
        total = sum(p.score for p in one)
        difference = abs(total - sum(p.score for p in other))
        is_same = "".join(p.piece for p in one) == "".join(p.piece for p in other)
        return is_same and difference <= len(one) * abs(total) * _ROUNDING

    def fast_tokenizer(self) -> Any:
        """Return the tokenizer of ``tokenizers``; raise UserError if that cannot express the model."""
        from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers

        self._check()
        is_bpe, space, has_prefix = self._options.model_type != _UNIGRAM, self._space, self._has_prefix
        symbols = sorted(self.named(_USER_DEFINED), key=len, reverse=True)
        tokenizer = Tokenizer(self._bpe(symbols) if is_bpe else self._unigram())
        steps, split = list(self._normalizers(symbols)), [re.escape(text) for text in symbols]
        if is_bpe and not has_prefix:
            tokenizer.add_tokens([AddedToken(text, normalized=True, special=False) for text in symbols])
            split = []
        elif not is_bpe:
            # A text may spell a control piece. A character that no piece has keeps it from becoming one.
            known = re.escape("".join(set("".join(self.named(_NORMAL)))))
            cuts = [re.split(f"([^{known}])", text, maxsplit=1) for text in self.named(*_RESERVED)]
            cuts = [parts for parts in cuts if len(parts) > 1]
            split = [f"(?<={re.escape(a)}){re.escape(b)}(?={re.escape(c)})" for a, b, c in cuts]
            if not self._options.byte_fallback:
                # Neighbours that no piece has are one token, and have to stay together.
                steps += [normalizers.Replace(a + b + c, a + _NOWHERE + c) for a, b, c in cuts]
                split = []
        tokenizer.normalizer = normalizers.Sequence(steps)
        if split:
            tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("|".join(split)), "isolated")
        begin = [decoders.Fuse(), decoders.Strip(" ", left=int(has_prefix))]
        tokenizer.decoder = decoders.Sequence([decoders.Replace(space, " "), decoders.ByteFallback(), *begin])
        return tokenizer

    @property
    def _space(self) -> str:
        return "▁" if self._rules.escape_whitespaces else " "

    @property
    def _has_prefix(self) -> bool:
        return bool(self._rules.add_dummy_prefix and not self._options.treat_whitespace_as_suffix)

    def _check(self) -> None:
        limits = {
            "model_type=word": self._options.model_type == _WORD,
            "a restricted vocabulary": bool(self.named(_UNUSED)),
            "a user-defined normalization_rule_tsv": self._rules.name == "user_defined",
        }
        for words in (words for words, is_there in limits.items() if is_there):
            raise UserError(
                f"the SentencePiece model has {words}, which no tokenizer.json expresses; expected "
                "conversion.tokenizer_dir=/path, a directory with another tokenizer"
            )

    def _normalizers(self, symbols: list[str]) -> Iterator[Any]:
        """Yield the steps of the normalization, in SentencePiece's order."""
        from tokenizers import Regex, normalizers

        rules, space, prefix = self._rules, self._space, self._space if self._has_prefix else ""

        def replace(pattern: str, text: str) -> Any:
            return normalizers.Replace(Regex(pattern), text)

        if prefix:
            yield normalizers.Prepend(prefix)
        is_changing = rules.precompiled_charsmap or rules.remove_extra_whitespaces
        changed = [text for text in symbols if is_changing and not _PLAIN.fullmatch(text)]
        for number, text in enumerate(changed, _SYMBOLS):
            yield normalizers.Replace(text, chr(number))
        if rules.precompiled_charsmap:
            # tokenizers looks up a cluster of characters, and takes its first part for the whole.
            yield normalizers.Prepend(_BETWEEN)
            yield replace(r"(?!\A)(?=[^ -~])", _BETWEEN)
            yield normalizers.Precompiled(rules.precompiled_charsmap)
            yield normalizers.Replace(_BETWEEN, "")
            # Where the map combines several marks into one, do so mark by mark: their order stays.
            for _ in range(_MARKS if "é" in self.processor.normalize("e\u0301") else 0):
                yield replace(r"(?<=\p{Mn})(?=\p{Mn})", _BETWEEN)
                yield normalizers.NFC()
                yield normalizers.Replace(_BETWEEN, "")
        if rules.remove_extra_whitespaces:
            yield replace(rf"(?<=\A{prefix}) +", "")
            yield replace(" {2,}", " ")
        yield normalizers.Replace(" ", space)
        if rules.remove_extra_whitespaces:
            yield replace(rf"{space}+\z", "")
        if rules.add_dummy_prefix and not prefix:
            yield replace(r"(?<=[\s\S])\z", space)
        for number, text in enumerate(changed, _SYMBOLS):
            yield normalizers.Replace(chr(number), text.replace(" ", space))

    def _bpe(self, symbols: list[str]) -> Any:
        """Return the model of merges, the best score first; a model of characters has no merges."""
        from tokenizers import models

        texts = [piece.piece for piece in self.pieces]
        normal = {p.piece: (-p.score, n) for n, p in enumerate(self.pieces) if p.type == _NORMAL}
        merges = [
            (*normal[text], cut)
            for text in normal
            for cut in range(1, len(text))
            if self._options.model_type == _BPE and text[:cut] in normal and text[cut:] in normal
        ]
        return models.BPE(
            {text: number for number, text in enumerate(texts)},
            [(texts[number][:cut], texts[number][cut:]) for _, number, cut in sorted(merges)],
            unk_token=self.named(_UNKNOWN)[0],
            fuse_unk=True,
            byte_fallback=self._options.byte_fallback,
            # No merges need to lead to a user-defined symbol.
            ignore_merges=bool(symbols) and self._has_prefix,
        )

    def _unigram(self) -> Any:
        from tokenizers import models

        scores = [float(piece.score) for piece in self.pieces if piece.type == _NORMAL]

        def score(piece: Any) -> float:
            if piece.type == _USER_DEFINED:
                return len(piece.piece.encode()) * max(scores) - 0.1
            # That of another piece is below what its characters have together.
            return float(piece.score) if piece.type == _NORMAL else len(piece.piece) * min(scores) - 1

        vocabulary = [(piece.piece, score(piece)) for piece in self.pieces]
        unknown = next(number for number, piece in enumerate(self.pieces) if piece.type == _UNKNOWN)
        return models.Unigram(vocabulary, unk_id=unknown, byte_fallback=self._options.byte_fallback)
