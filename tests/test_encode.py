"""The corpus encoder: the ids of `Tokenizer.encode` whatever the text, and a reason where tiktoken cannot give them."""

import copy
import json
import pickle
import random
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tokenizers

from freda.data import encode
from freda.data.encode import Encoder, make_encoder
from freda.data.tokenizer import BLANK_TEXT, EOS_TEXT, Tokenizer, train_tokenizer, with_blank
from freda.errors import FredaError

tiktoken = pytest.importorskip("tiktoken")

QWEN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA = QWEN.replace(r"\p{N}|", r"\p{N}{1,3}|", 1)

TEXTS = [
    "Tom has 12 apples. He doesn't buy 7 more; they'll give 30 away!\nHow many apples does Tom have?\n\n",
    "def f(apples):\n    if apples:\n        return [x for x in apples]  # all of them...\n\tpass\r\n",
    "Die Äpfel kosten 3 €. L'été où naïf. Яблоки и груши, яблоки. りんごを食べる。苹果和梨，苹果。 😀😀😀",
] * 4
NORMAL_TOKENS = ("[KÅ]", "[E\u0301]")  # looked for in normalized text; their letters have other spellings

Change = Callable[[dict[str, Any]], object]


def trained(splits: Any, normalizer: Any = None, special: tuple[str, ...] = ()) -> dict[str, Any]:
    """tokenizer.json of a byte-level BPE of about 600 ids, as another project would have it."""
    source = tokenizers.Tokenizer(tokenizers.models.BPE())
    source.pre_tokenizer = splits
    source.decoder = tokenizers.decoders.ByteLevel()
    if normalizer is not None:
        source.normalizer = normalizer
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=600,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=list(special),
        show_progress=False,
    )
    source.train_from_iterator(TEXTS, trainer)
    source.add_special_tokens([EOS_TEXT])
    source.add_tokens([tokenizers.AddedToken("<think>", normalized=False)])
    source.add_tokens([tokenizers.AddedToken(text, normalized=True) for text in NORMAL_TOKENS])
    values: dict[str, Any] = json.loads(source.to_str())
    return values


def split_by(pattern: str) -> Any:
    steps = tokenizers.pre_tokenizers
    split = steps.Split(tokenizers.Regex(pattern), behavior="isolated", invert=False)
    return steps.Sequence([split, steps.ByteLevel(add_prefix_space=False, use_regex=False)])


def qwen_kind() -> dict[str, Any]:
    return trained(split_by(QWEN), tokenizers.normalizers.NFC())


def llama_kind() -> dict[str, Any]:
    """All pairs that spell a token are in the list, token by token, and whole pieces are looked up first."""
    values = trained(split_by(LLAMA))
    model, vocabulary = values["model"], values["model"]["vocab"]
    model["ignore_merges"] = True
    model["merges"] = [
        [token[:cut], token[cut:]]
        for token in sorted(vocabulary, key=vocabulary.__getitem__)
        for cut in range(1, len(token))
        if token[:cut] in vocabulary and token[cut:] in vocabulary
    ]
    return values


def gpt2_kind() -> dict[str, Any]:
    """EOS is in the vocabulary, where no merge makes it."""
    return trained(tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False), special=(EOS_TEXT,))


KINDS = {"qwen": qwen_kind, "llama": llama_kind, "gpt2": gpt2_kind}


def add_entries(values: dict[str, Any], *entries: str) -> None:
    """Entries behind the last one of the vocabulary; the added tokens move up, because ids have no gaps."""
    vocabulary = values["model"]["vocab"]
    vocabulary |= {entry: len(vocabulary) + index for index, entry in enumerate(entries)}
    for token in values["added_tokens"]:
        token["id"] += len(entries)


def tokenizer_of(values: dict[str, Any]) -> Tokenizer:
    return with_blank(json.dumps(values), [EOS_TEXT], {})


@pytest.fixture(scope="module")
def qwen() -> dict[str, Any]:
    return qwen_kind()


@pytest.fixture(scope="module")
def tokenizer(qwen: dict[str, Any]) -> Tokenizer:
    return tokenizer_of(qwen)


@pytest.fixture(scope="module")
def encoder(tokenizer: Tokenizer) -> Encoder:
    return make_encoder(tokenizer, TEXTS)


@pytest.fixture(scope="module", params=KINDS)
def pair(request: pytest.FixtureRequest) -> tuple[Encoder, Tokenizer]:
    tokenizer = tokenizer_of(KINDS[request.param]())
    return make_encoder(tokenizer), tokenizer


@pytest.fixture(autouse=True)
def few_scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison of every script takes 0.3 s; the encoders above are made before this takes it away."""
    monkeypatch.setattr(encode, "_every_script", tuple)


def same(encoder: Encoder, tokenizer: Tokenizer, text: str) -> bool:
    ids = encoder.encode(text)
    assert ids.dtype == np.int32 and ids.ndim == 1 and ids.flags.writeable
    return ids.tolist() == tokenizer.encode(text)


# -- the same ids ----------------------------------------------------------------------------------------------------


def test_any_text_has_the_ids_of_the_tokenizer(pair: tuple[Encoder, Tokenizer]) -> None:
    hypothesis = pytest.importorskip("hypothesis")
    some = hypothesis.strategies
    encoder, tokenizer = pair
    assert (encoder.library, encoder.reason) == ("tiktoken", "")
    fragments = [
        *TEXTS[:3],
        *TEXTS[2].split(),
        "'LL",
        " ",
        "  ",
        "\n",
        "\u0301",
        "\u0323",
        "\u1100",
        "\u1161",
        "<",
        "K",
    ]

    @hypothesis.settings(max_examples=150, deadline=None, database=None)
    @hypothesis.given(some.lists(some.one_of(some.text(), some.sampled_from(fragments))).map("".join))
    def check(text: str) -> None:
        hypothesis.assume(BLANK_TEXT not in text)
        assert same(encoder, tokenizer, text)

    check()


def test_tiktoken_does_the_work(encoder: Encoder, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = {text: tokenizer.encode(text) for text in (*TEXTS[:3], "naı\u0308f e\u0301te\u0301")}
    monkeypatch.setattr(Tokenizer, "encode", lambda self, text: pytest.fail("the slow library was asked"))
    assert all(encoder.encode(text).tolist() == ids for text, ids in expected.items())


@pytest.mark.parametrize("text", [EOS_TEXT, f"a {EOS_TEXT}\n\nb", "x<think>y", f"Tom{NORMAL_TOKENS[0]} has", "<think"])
def test_added_tokens_are_found(encoder: Encoder, tokenizer: Tokenizer, text: str) -> None:
    assert same(encoder, tokenizer, text)
    assert (encoder.quick(text) is None) == (text != "<think")


def test_added_tokens_are_found_in_normalized_text(encoder: Encoder, tokenizer: Tokenizer) -> None:
    for text, token in zip(("[\u212aA\u030a]", "[É]"), NORMAL_TOKENS, strict=True):
        assert token not in text and len(tokenizer.encode(token)) == 1
        assert same(encoder, tokenizer, f"Tom {text} has")
        assert encoder.encode(f"Tom {text} has").tolist() == tokenizer.encode(f"Tom {token} has")


def test_text_is_normalized_by_the_tables_of_the_tokenizer(encoder: Encoder, tokenizer: Tokenizer) -> None:
    assert encoder.encode("e\u0301te\u0301").tolist() == encoder.encode("été").tolist()
    assert same(encoder, tokenizer, "a\u1abf\u0301")  # Python 3.11 knows the middle one as a mark, the library does not


def test_text_is_normalized_where_the_tokenizer_does(pair: tuple[Encoder, Tokenizer]) -> None:
    encoder, tokenizer = pair
    assert same(encoder, tokenizer, "e\u0301")
    normalized = '"NFC"' in tokenizer.json_text
    assert (encoder.encode("e\u0301").tolist() == encoder.encode("é").tolist()) == normalized


def test_files_of_older_versions_are_read(tokenizer: Tokenizer) -> None:
    values = json.loads(tokenizer_of(gpt2_kind()).json_text)
    values["model"]["merges"] = [" ".join(merge) for merge in values["model"]["merges"]]
    del values["model"]["type"], values["pre_tokenizer"]["use_regex"]
    older = Tokenizer(json.dumps(values), tokenizer.settings)
    encoder = make_encoder(older, TEXTS)
    assert encoder.library == "tiktoken"
    assert all(same(encoder, older, text) for text in TEXTS)


def test_blank_may_be_an_entry_like_any_other(qwen: dict[str, Any]) -> None:
    values = copy.deepcopy(qwen) | {"added_tokens": []}
    add_entries(values, EOS_TEXT, BLANK_TEXT)
    tokenizer = tokenizer_of(values)
    encoder = make_encoder(tokenizer)
    assert same(encoder, tokenizer, EOS_TEXT) and encoder.quick("Tom") is not None
    with pytest.raises(FredaError, match="contains"):
        encoder.encode(BLANK_TEXT)


def test_blank_and_broken_bytes_are_the_errors_of_the_tokenizer(encoder: Encoder) -> None:
    with pytest.raises(FredaError, match=r"contains <\|blank\|> at character 4.*remove it"):
        encoder.encode(f"abc {BLANK_TEXT}")
    for text in ("ab\udcff", "e\u0301\udcff"):
        with pytest.raises(FredaError, match="not valid Unicode at character 2"):
            encoder.encode(text)


def test_both_libraries_split_by_the_same_classes_of_characters() -> None:
    """ "a" and a character are one piece, or a character and a line break: letters, signs, digits and spaces differ."""
    characters = [chr(code) for code in range(0x20000) if not 0x3400 <= code < 0xE000]
    split = tokenizers.pre_tokenizers.Split(tokenizers.Regex(QWEN), "isolated")
    for form in ("a{}", "{}\n"):
        texts = [form.format(character) for character in characters]
        ranks = {bytes([byte]): byte for byte in range(256)}
        ranks |= {text.encode(): 256 + index for index, text in enumerate(texts)}
        probe = tiktoken.Encoding("probe", pat_str=QWEN, mergeable_ranks=ranks, special_tokens={})
        for text in texts:
            assert (len(probe.encode_ordinary(text)) == 1) == (len(split.pre_tokenize_str(text)) == 1), ascii(text)


def random_model(dice: random.Random) -> dict[str, Any]:
    """A BPE over a and b: a random list of merges, often with tokens that their own text does not give."""
    made = ["a", "b"]
    merges: list[list[str]] = []
    for _ in range(dice.randrange(2, 9)):
        pair = [dice.choice(made), dice.choice(made)]
        if "".join(pair) not in made:
            merges.append(pair)
            made.append("".join(pair))
    if dice.random() < 0.5:
        dice.shuffle(merges)  # a merge may come before the one that makes its part
    tokens = ["".join(pair) for pair in merges]
    if dice.random() < 0.5:  # all pairs that spell a token, as Llama 3 has them
        cuts = [(token, cut) for token in tokens for cut in range(1, len(token))]
        merges = [[token[:cut], token[cut:]] for token, cut in cuts if {token[:cut], token[cut:]} <= set(made)]
    vocabulary = {token: index for index, token in enumerate([*encode._byte_characters(), *tokens])}
    return {"vocab": vocabulary, "merges": merges, "ignore_merges": dice.random() < 0.5}


def test_merge_lists_that_pass_the_check_mean_the_same_to_both_libraries() -> None:
    dice = random.Random(0)
    results = {(passed, equal): 0 for passed in (True, False) for equal in (True, False)}
    for _ in range(300):
        model = random_model(dice)
        try:
            encode._check_merges(model)
            passed = True
        except FredaError:
            passed = False
        merges = [tuple(pair) for pair in model["merges"]]
        ours = tokenizers.models.BPE(vocab=model["vocab"], merges=merges, ignore_merges=model["ignore_merges"])
        options: dict[str, Any] = {"mergeable_ranks": encode._ranks(model), "special_tokens": {}}
        theirs = tiktoken.Encoding("random", pat_str=".+", **options)
        texts = ["".join(dice.choices("ab", k=dice.randrange(1, 14))) for _ in range(100)]
        texts += [token for token in model["vocab"] if len(token) > 1] + ["".join(dice.choices("ab", k=700))]
        equal = all([token.id for token in ours.tokenize(text)] == theirs.encode_ordinary(text) for text in texts)
        results[passed, equal] += 1
    assert results[True, False] == 0
    assert results[True, True] > 100 and results[False, False] > results[False, True]  # the check is no formality


# -- texts that are hard on a library --------------------------------------------------------------------------------


def test_a_million_spaces_are_left_to_the_tokenizer(
    encoder: Encoder, tokenizer: Tokenizer, capfd: pytest.CaptureFixture[str]
) -> None:
    assert encoder.quick("a" + " " * 999_000 + "b") is not None
    text = "a" + " " * 1_000_100 + "b"
    assert encoder.quick(text) is None
    assert tokenizer.decode(encoder.encode(text)) == text
    assert "panicked" not in capfd.readouterr().err


@pytest.mark.parametrize("unit", ["a", "apples", "7", "苹", "😀", "-", "\r\n", "a\u0323\u0300"])
def test_long_runs_are_linear(encoder: Encoder, tokenizer: Tokenizer, unit: str) -> None:
    assert same(encoder, tokenizer, unit * 20_000)
    start = time.process_time()
    encoder.encode(unit * 200_000)
    assert time.process_time() - start < 10  # 0.1 to 1 s; a quadratic way would take minutes


# -- reasons ---------------------------------------------------------------------------------------------------------


def assert_falls_back(tokenizer: Tokenizer, reason: str) -> None:
    """The reason is given, and the ids are right all the same."""
    found = make_encoder(tokenizer)
    assert found.library == "tokenizers" and reason in found.reason
    assert same(found, tokenizer, "Tom has 12 apples. Äpfel")


def test_the_tokenizer_of_the_demo_splits_in_another_way() -> None:
    assert_falls_back(train_tokenizer(TEXTS, 300), "its pre-tokenizer is Digits + ByteLevel, not Split + ByteLevel")


def swap_merges(values: dict[str, Any]) -> None:
    merges = values["model"]["merges"]
    merges[10], merges[-1] = merges[-1], merges[10]


def improper_token(values: dict[str, Any]) -> None:
    """ "zqx" is listed as zq + x, but qx comes before zq, so that its own text never becomes it."""
    add_entries(values, "qx", "zq", "zqx")
    values["model"]["merges"] += [["q", "x"], ["z", "q"], ["zq", "x"]]


def looked_up_pair(values: dict[str, Any]) -> None:
    """Two bytes that no merge joins, though the whole piece is one token."""
    values["model"]["ignore_merges"] = True
    add_entries(values, "zq")


def lose_a_byte(values: dict[str, Any]) -> None:
    del values["model"]["vocab"]["ÿ"]  # a byte that no UTF-8 has


def set_step(values: dict[str, Any], step: int, **changes: object) -> None:
    values["pre_tokenizer"]["pretokenizers"][step] |= changes


REASONS: dict[str, tuple[Change, str]] = {
    "order": (swap_merges, "the ids are not in the order of the merges"),
    "improper": (improper_token, "tiktoken would make the token 'zqx' where its merges do not"),
    "looked up": (looked_up_pair, "tiktoken would make the token 'zq' where its merges do not"),
    "byte": (lose_a_byte, "lacks 1 of the 256 bytes"),
    "normalizer": (lambda values: values.update(normalizer={"type": "NFKC"}), "its normalizer is NFKC"),
    "prefix": (lambda values: set_step(values, 1, add_prefix_space=True), "adds a space"),
    "two patterns": (lambda values: set_step(values, 1, use_regex=True), "does not split by one regular expression"),
    "behavior": (lambda values: set_step(values, 0, behavior="Removed"), "does not split by one regular expression"),
    "string": (lambda values: set_step(values, 0, pattern={"String": " "}), "does not split by one regular expression"),
    "no splits": (lambda values: values.update(pre_tokenizer=None), "its pre-tokenizer is none"),
    "unknown": (lambda values: values["model"].update(unk_token="!"), "its model has unk_token = '!'"),
    "gaps": (lambda values: set_step(values, 0, pattern={"Regex": r"\p{L}+|\p{N}+"}), "it gives other ids"),
    "pattern": (lambda values: set_step(values, 0, pattern={"Regex": r"\X"}), "tiktoken cannot read"),
}


@pytest.mark.parametrize("name", REASONS)
def test_what_tiktoken_cannot_do_is_a_reason(qwen: dict[str, Any], name: str) -> None:
    change, reason = REASONS[name]
    values = copy.deepcopy(qwen)
    change(values)
    assert_falls_back(tokenizer_of(values), reason)


def test_a_token_that_is_only_looked_up_is_fine(qwen: dict[str, Any]) -> None:
    values = copy.deepcopy(qwen)
    values["model"]["ignore_merges"] = True
    add_entries(values, "Ġzqzq", "中")  # the second is not written in bytes, so that no text is it
    index = values["model"]["vocab"]["Ġzqzq"]
    tokenizer = tokenizer_of(values)
    encoder = make_encoder(tokenizer)
    assert encoder.library == "tiktoken"
    assert same(encoder, tokenizer, "a zqzq") and index in encoder.encode("a zqzq")
    assert same(encoder, tokenizer, "a zqzqa") and index not in encoder.encode("a zqzqa")


def test_a_token_that_nothing_makes_is_left_out(qwen: dict[str, Any]) -> None:
    values = copy.deepcopy(qwen)
    add_entries(values, "Ġzq", "zq", "a b")
    tokenizer = tokenizer_of(values)
    encoder = make_encoder(tokenizer)
    assert encoder.library == "tiktoken"
    assert same(encoder, tokenizer, "a zq a b zqzq") and encoder.encode("a zq a b zqzq").max() < len(
        qwen["model"]["vocab"]
    )


@pytest.mark.parametrize("kind", ["WordPiece", "Unigram"])
def test_another_model_is_a_reason(kind: str) -> None:
    models = tokenizers.models
    if kind == "WordPiece":
        model = models.WordPiece(vocab={"[UNK]": 0, "Tom": 1}, unk_token="[UNK]")
    else:
        model = models.Unigram([("<unk>", 0.0), ("Tom", -1.0)], unk_id=0)
    source = tokenizers.Tokenizer(model)
    source.add_special_tokens([EOS_TEXT])
    assert_falls_back(with_blank(source.to_str(), [EOS_TEXT], {}), f"its model is {kind}, not BPE")


def test_missing_tiktoken_is_a_reason(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    assert_falls_back(tokenizer, "pip install 'freda[data]'")


def test_a_sample_that_differs_is_a_reason(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    right = tiktoken.Encoding.encode_to_numpy

    def wrong(self: Any, text: str, **options: Any) -> Any:
        return right(self, text, **options)[: -1 if "zebra" in text else None]

    monkeypatch.setattr(tiktoken.Encoding, "encode_to_numpy", wrong)
    assert make_encoder(tokenizer, ["a horse"]).library == "tiktoken"
    found = make_encoder(tokenizer, ["a horse", "a zebra " * 20])
    assert found.library == "tokenizers"
    assert found.reason.startswith("it gives other ids than the library tokenizers for the text 'a zebra ")
    assert len(found.reason) < 140
    assert same(found, tokenizer, "a zebra")
    assert make_encoder(tokenizer, iter(["a zebra"])).library == "tokenizers"


def test_samples_that_are_left_to_the_tokenizer_are_no_error(tokenizer: Tokenizer) -> None:
    assert make_encoder(tokenizer, [BLANK_TEXT, "ab\udcff", EOS_TEXT]).library == "tiktoken"


# -- use -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("library", ["tiktoken", "tokenizers"])
def test_workers_get_the_same_encoder_without_the_checks(
    tokenizer: Tokenizer, library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = tokenizer if library == "tiktoken" else train_tokenizer(TEXTS, 300)
    sent = pickle.dumps(make_encoder(tokenizer))
    monkeypatch.setattr(encode, "_check_merges", lambda model: pytest.fail("checked again"))
    monkeypatch.setattr(encode, "_compare", lambda *_: pytest.fail("compared again"))
    received = pickle.loads(sent)
    assert received.library == library and bool(received.reason) == (library == "tokenizers")
    assert all(same(received, tokenizer, text) for text in (*TEXTS[:3], EOS_TEXT))
