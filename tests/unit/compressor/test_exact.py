from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from compressor import Compressed, compress, load_counter
from tests.unit.compressor.texts import WORDS, prose, user


def test_a_local_tokenizer_counts_and_the_extract_fits_its_count(tmp_path: Path) -> None:
    words = {word: i for i, word in enumerate(["?", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    count = load_counter(tmp_path / "tokenizer.json")
    assert count("river bridge. Unknown") == 4
    text = prose(60)
    found = compress(user(text), int(count(text) * 0.7), 4.0, exact_counter=count, when="any")
    assert isinstance(found, Compressed)
    assert found.tokens_after == count(found.messages[0]["content"]) <= count(text) * 0.7


def test_a_bad_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("{}")
    with pytest.raises(ValueError, match=r"x\.json is not a tokenizer\.json"):
        load_counter(tmp_path / "x.json")
