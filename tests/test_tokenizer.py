"""The tokenizer: ids of BLANK and EOS, any text there and back, drawing of drafts, and what a bad folder says."""

import json
import random
import shutil
from pathlib import Path

import pytest
import tokenizers

from freda.data.tokenizer import BLANK_TEXT, EOS_TEXT, Tokenizer, first_free_id, train_tokenizer, with_blank
from freda.errors import FredaError

TEXTS = [
    "Tom has 12 apples. He buys 7 more and gives 3 away.\nHow many apples does Tom have?\n",
    "Ann reads 30 pages a day. After 4 days she has read 120 pages.\n",
] * 5


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(TEXTS, 300)


@pytest.fixture
def folder(tokenizer: Tokenizer, tmp_path: Path) -> Path:
    tokenizer.save(tmp_path / "saved")
    return tmp_path / "saved"


def edit_settings(folder: Path, **changes: object) -> None:
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def without_blank(tokenizer: Tokenizer, folder: Path) -> str:
    """tokenizer.json as another project would have it."""
    tokenizer.save(folder)
    values = json.loads((folder / "tokenizer.json").read_text())
    values["added_tokens"] = [token for token in values["added_tokens"] if token["content"] != BLANK_TEXT]
    return json.dumps(values)


# -- training --------------------------------------------------------------------------------------------------------


def test_last_ids_are_eos_and_blank(tokenizer: Tokenizer) -> None:
    assert tokenizer.size <= 300
    assert (tokenizer.eos_id, tokenizer.blank_id) == (tokenizer.size - 2, tokenizer.size - 1)
    assert tokenizer.stop_ids == (tokenizer.eos_id,)


def test_training_is_deterministic(tokenizer: Tokenizer) -> None:
    shuffled = random.Random(0).sample(TEXTS, len(TEXTS))
    assert train_tokenizer(iter(shuffled), 300).fingerprint == tokenizer.fingerprint
    assert train_tokenizer(TEXTS, 290).fingerprint != tokenizer.fingerprint


def test_too_few_merges_give_a_smaller_table() -> None:
    small = train_tokenizer(["ab"], 400)
    assert small.size == 256 + 1 + 2
    assert len(small.encode("ab")) == 1


def test_a_vocabulary_below_the_bytes_is_refused() -> None:
    with pytest.raises(FredaError, match="257 is too small; use 258 or more"):
        train_tokenizer(TEXTS, 257)


# -- text to ids and back --------------------------------------------------------------------------------------------


def test_any_text_comes_back(tokenizer: Tokenizer) -> None:
    hypothesis = pytest.importorskip("hypothesis")

    @hypothesis.settings(max_examples=200, deadline=None, database=None)
    @hypothesis.given(hypothesis.strategies.text())
    def check(text: str) -> None:
        # The strings of the code itself are among what hypothesis tries: texts that spell a special token are no text.
        hypothesis.assume(BLANK_TEXT not in text and EOS_TEXT not in text)
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert all(0 <= index < tokenizer.eos_id for index in ids)

    check()


def test_every_digit_is_one_token(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("apples 120, 12")
    digits = [piece for piece in tokenizer.pieces(ids) if any(c.isdigit() for c in piece)]
    assert digits == ["1", "2", "0", "1", "2"]


def test_nothing_is_added_around_the_text(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("") == []
    assert tokenizer.encode(EOS_TEXT) == [tokenizer.eos_id]


def test_text_that_spells_blank_is_refused_with_its_place(tokenizer: Tokenizer) -> None:
    with pytest.raises(FredaError, match=r"contains <\|blank\|> at character 4.*remove it"):
        tokenizer.encode(f"abc {BLANK_TEXT}")


def test_broken_bytes_are_refused_with_their_place(tokenizer: Tokenizer) -> None:
    with pytest.raises(FredaError, match="not valid Unicode at character 2"):
        tokenizer.encode("ab\udcff")


def test_decode_leaves_special_tokens_out(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("Tom")
    assert tokenizer.decode([*ids, tokenizer.blank_id, tokenizer.eos_id]) == "Tom"


def test_truncation_of_the_saved_tokenizer_is_ignored(folder: Path) -> None:
    path = folder / "tokenizer.json"
    limited = tokenizers.Tokenizer.from_file(str(path))
    limited.enable_truncation(2)
    limited.enable_padding(length=50)
    limited.save(str(path))
    assert Tokenizer.load(folder).decode(Tokenizer.load(folder).encode("Tom has 12 apples")) == "Tom has 12 apples"


# -- drawing ---------------------------------------------------------------------------------------------------------


def test_pieces_are_printable_and_one_per_id(tokenizer: Tokenizer) -> None:
    ids = [*range(tokenizer.size), tokenizer.size + 5]
    pieces = tokenizer.pieces(ids)
    assert len(pieces) == len(ids)
    assert all(piece and piece.isprintable() for piece in pieces)


def test_pieces_draw_blanks_ends_and_line_breaks(tokenizer: Tokenizer) -> None:
    ids = [*tokenizer.encode("Tom has\n\t€"), tokenizer.blank_id, tokenizer.eos_id]
    assert "".join(tokenizer.pieces(ids)) == "Tom has⏎⇥���░■"


def test_pieces_of_sentencepiece_keep_the_space() -> None:
    # Shaped like Llama 2: a space is ▁, an unknown character falls back to bytes, the decoder strips the first space.
    vocabulary = {"<unk>": 0, "</s>": 1, "▁Tom": 2, "s": 3, "<0xE2>": 4}
    source = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    decoders = tokenizers.decoders
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    source.decoder = decoders.Sequence(steps)
    assert with_blank(source.to_str(), [1], {}).pieces([2, 3, 4]) == [" Tom", "s", "�"]


# -- files -----------------------------------------------------------------------------------------------------------


def test_load_gives_the_same_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    loaded = Tokenizer.load(folder)
    text = "Tom has 12 épées"
    assert loaded.encode(text) == tokenizer.encode(text)
    assert loaded.fingerprint == tokenizer.fingerprint
    assert (loaded.size, loaded.stop_ids) == (tokenizer.size, tokenizer.stop_ids)


def test_fingerprint_ignores_spacing_but_not_content(tokenizer: Tokenizer, folder: Path) -> None:
    path = folder / "tokenizer.json"
    values = json.loads(path.read_text())
    path.write_text(json.dumps(values, indent=4))
    assert Tokenizer.load(folder).fingerprint == tokenizer.fingerprint
    values["model"]["merges"].pop()
    path.write_text(json.dumps(values))
    assert Tokenizer.load(folder).fingerprint != tokenizer.fingerprint


def test_transformers_reads_the_folder(tokenizer: Tokenizer, folder: Path) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    assert theirs("Tom has 12 apples").input_ids == tokenizer.encode("Tom has 12 apples")
    assert (theirs.eos_token_id, theirs.pad_token_id) == (tokenizer.eos_id, tokenizer.eos_id)


def test_a_missing_file_is_named(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    with pytest.raises(FredaError, match=r"saved: tokenizer\.json is missing"):
        Tokenizer.load(folder)


def test_a_damaged_file_is_named(folder: Path) -> None:
    (folder / "tokenizer.json").write_text('{"model": ')
    with pytest.raises(FredaError, match=r"tokenizer\.json is not a valid tokenizer"):
        Tokenizer.load(folder)
    (folder / "tokenizer_config.json").write_text("[1]")
    shutil.copy(folder / "tokenizer_config.json", folder / "tokenizer.json")
    with pytest.raises(FredaError, match=r"tokenizer_config\.json is not a JSON object"):
        Tokenizer.load(folder)


def test_a_tokenizer_without_blank_says_convert(tokenizer: Tokenizer, folder: Path, tmp_path: Path) -> None:
    (folder / "tokenizer.json").write_text(without_blank(tokenizer, tmp_path / "other"))
    with pytest.raises(FredaError, match=r"no <\|blank\|> token; run: freda convert"):
        Tokenizer.load(folder)


def test_ids_behind_blank_are_refused(folder: Path) -> None:
    path = folder / "tokenizer.json"
    extended = tokenizers.Tokenizer.from_file(str(path))
    extended.add_tokens(["<new>"])
    extended.save(str(path))
    with pytest.raises(FredaError, match="must be the last one"):
        Tokenizer.load(folder)


def test_eos_must_be_named_and_known(folder: Path) -> None:
    edit_settings(folder, eos_token=None)
    with pytest.raises(FredaError, match="names no eos_token"):
        Tokenizer.load(folder)
    edit_settings(folder, eos_token="<eos>")
    with pytest.raises(FredaError, match=r"eos_token .<eos>.*is not a token"):
        Tokenizer.load(folder)
    edit_settings(folder, eos_token=BLANK_TEXT)
    with pytest.raises(FredaError, match="is not a token"):
        Tokenizer.load(folder)


# -- other projects' tokenizers --------------------------------------------------------------------------------------


def test_blank_takes_the_first_free_id(tokenizer: Tokenizer, tmp_path: Path) -> None:
    text = without_blank(tokenizer, tmp_path)
    free = first_free_id(tokenizers.Tokenizer.from_str(text))
    ours = with_blank(text, [tokenizer.eos_id, 65], {"chat_template": "T", "tokenizer_class": "Qwen2Tokenizer"})
    assert ours.blank_id == free == tokenizer.blank_id
    assert ours.stop_ids == (tokenizer.eos_id, 65)
    assert ours.encode("Tom has 12") == tokenizer.encode("Tom has 12")
    assert ours.settings["chat_template"] == "T"
    assert ours.settings["tokenizer_class"] == "PreTrainedTokenizerFast"


def test_stops_may_be_texts_and_survive_saving(tokenizer: Tokenizer, tmp_path: Path) -> None:
    with_blank(without_blank(tokenizer, tmp_path), ["!", EOS_TEXT, "!"], {}).save(tmp_path)
    loaded = Tokenizer.load(tmp_path)
    assert loaded.eos_id == loaded.encode("!")[0]
    assert loaded.stop_ids == (loaded.eos_id, tokenizer.eos_id)


def test_stops_that_are_no_tokens_are_refused(tokenizer: Tokenizer, tmp_path: Path) -> None:
    text = without_blank(tokenizer, tmp_path)
    with pytest.raises(FredaError, match=r"\[99999\] are not tokens"):
        with_blank(text, [99999], {})
    with pytest.raises(FredaError, match=r"\[\] are not tokens"):
        with_blank(text, [], {})


def test_gaps_in_the_ids_are_refused() -> None:
    gap = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={"a": 0, "b": 7}, merges=[]))
    with pytest.raises(FredaError, match="gaps below 8"):
        with_blank(gap.to_str(), [0], {})
