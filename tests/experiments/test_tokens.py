"""Tokens: bytes are themselves, a tokenizer's ids are those that it gives each document."""

from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from tokenizing import END, write_tokenizer

from experiments import tokens
from experiments.tokens import DataError

DOCUMENTS = ["Hello, world. " * 7, "né — 汉字 🙂", "", "\r\ncarriage\n\n\n", f"not an {END}?"]
ENCODED = tuple(document.encode() for document in DOCUMENTS)


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer") / "bpe.json", DOCUMENTS)


# Bytes


def test_bytes_are_their_own_ids():
    ids = tokens.load(None).encode(ENCODED)
    assert ids.dtype == np.uint8
    assert ids.tolist() == list(b"\n\n".join(ENCODED))
    assert tokens.load(None).vocab_size == 256


def test_bytes_decode_to_text_and_a_mark_where_they_are_cut():
    decode = tokens.load(None).decode
    assert decode(tokens.load(None).encode(ENCODED)) == "\n\n".join(DOCUMENTS)
    assert decode(np.array([104, 0xC3, 0xA9], np.int32)) == "hé"
    assert decode([0xA9, 104, 0xC3]) == "\ufffdh\ufffd"
    assert decode([]) == ""


def test_a_word_that_a_tokenizer_has_no_token_for_is_refused(tmp_path):
    path = tmp_path / "words.json"
    tokenizer = Tokenizer(models.WordLevel({"known": 0}, unk_token="absent"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(path))
    assert tokens.load(path).encode([b"known known"]).tolist() == [0, 0]
    with pytest.raises(DataError, match="the tokenizer cannot encode the text"):
        tokens.load(path).encode([b"known", b"unknown"])


# A tokenizer


def test_pieces_are_those_that_the_tokenizer_gives_each_document(path):
    reference = Tokenizer.from_file(str(path))
    expected = []
    for i, document in enumerate(DOCUMENTS):
        last = i == len(DOCUMENTS) - 1
        expected += reference.encode(document + "\n\n" * (not last)).ids
    ids = tokens.load(path).encode(ENCODED)
    assert ids.tolist() == expected
    assert ids.dtype == np.uint16  # 300 words
    assert len(ids) < len(b"\n\n".join(ENCODED))


def test_pieces_decode_to_the_joined_text(path):
    pieces = tokens.load(path)
    assert pieces.vocab_size == 300
    assert pieces.decode(pieces.encode(ENCODED)) == "\n\n".join(DOCUMENTS)
    assert pieces.decode([]) == ""


def test_more_documents_than_are_encoded_at_once(path, monkeypatch):
    expected = tokens.load(path).encode(ENCODED * 3)
    monkeypatch.setattr(tokens, "GROUP", 4)
    np.testing.assert_array_equal(tokens.load(path).encode(ENCODED * 3), expected)


def test_a_file_that_truncates_pads_and_frames_does_none_of_it(path, tmp_path):
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=50)
    end = tokenizer.token_to_id(END)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {END}", special_tokens=[(END, end)]
    )
    tokenizer.save(str(tmp_path / "framing.json"))
    plain = ENCODED[:-1]  # which has no special token of its own
    ids = tokens.load(tmp_path / "framing.json").encode(plain)
    np.testing.assert_array_equal(ids, tokens.load(path).encode(plain))
    assert end not in ids


def test_a_vocabulary_with_gaps_counts_up_to_its_largest_id(tmp_path):
    (tmp_path / "gaps.json").write_text(
        '{"model": {"type": "WordLevel", "vocab": {"a": 0, "b": 70000}, "unk_token": "a"}}'
    )
    pieces = tokens.load(tmp_path / "gaps.json")
    assert pieces.vocab_size == 70001
    ids = pieces.encode([b"b"])
    assert ids.tolist() == [70000]
    assert ids.dtype == np.uint32


@pytest.mark.parametrize("bad", [-1, 300])
def test_ids_outside_the_vocabulary_are_refused(path, bad):
    for vocabulary in (tokens.load(path), tokens.load(None)):
        with pytest.raises(ValueError, match=rf"id {bad} is not in the vocabulary, 0 to "):
            vocabulary.decode([0, bad])


def test_documents_that_are_not_utf8_are_refused(path):
    with pytest.raises(DataError, match=r"document 1 is not at its byte 3; .* b'caf\\xe9"):
        tokens.load(path).encode([b"good", "café".encode("latin-1")])


def test_files_that_are_no_tokenizer_are_refused(tmp_path):
    with pytest.raises(DataError, match=r"cannot read the tokenizer '.*missing\.json': No such"):
        tokens.load(tmp_path / "missing.json")
    for content in ("", "{}", "words"):
        (tmp_path / "other.json").write_text(content)
        with pytest.raises(DataError, match=r"'.*other\.json' is no tokenizer; .* is needed"):
            tokens.load(tmp_path / "other.json")
