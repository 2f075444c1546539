"""Verified decoding: autoregressive text, token for token, in the forwards that the rule allows."""

from __future__ import annotations

import io
import json
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from freda.cli import run
from freda.decode import device, places
from freda.decode.api import Model
from freda.decode.config import EngineConfig
from freda.decode.engine import Engine
from freda.decode.generate import generate
from freda.decode.plain import PlainModel
from freda.decode.request import Output, Pass, Request
from freda.decode.show import LiveDrafts
from freda.errors import FredaError
from freda.eval.config import SystemConfig
from freda.eval.evaluate import evaluate
from freda.eval.tasks.task import Example, Graded, Task
from freda.folders.model_folder import load_model
from freda.methods import default_method, method_like, method_named
from freda.methods.draft import Prediction, Sampling, predict, soft_embedding
from freda.methods.method import Method
from freda.methods.state import fresh_drafts, new_state
from freda.methods.verified import Verified
from freda.model.attention import Tokens, clean_tokens, concat, draft_tokens, make_mask
from freda.model.parts import Parts
from freda.model.transformer import Transformer
from freda.train import config as train_config
from tests.helpers import (
    BLANK,
    EOS,
    AheadModel,
    Letters,
    alone,
    answering_model,
    method,
    mixed_settings,
    random_prompts,
    save_model,
    scored,
    tiny_model,
)

RULES = [
    "verified",
    "verified:tail=blank",
    "verified:width=2",
    "verified:width=1,tail=blank",
    "verified:passes=3",
    "verified:passes=2,width=3",
]
OWN = method(layout="shifted")


def asked(count: int, seed: int, **settings: Any) -> list[Request]:
    """Requests with settings of their own. Where most of a choice is its noise, drafts are often right: half of them
    are sampled at a high temperature."""
    rng, found = random.Random(seed), []
    for number, prompt in enumerate(random_prompts(count, seed)):
        hot = {"temperature": rng.choice([1.0, 3.0, 8.0])} if rng.random() < 0.5 else {}
        stop = {"stop": [chr(ord("a") + rng.randrange(EOS))]} if rng.random() < 0.3 else {}
        found.append(Request(prompt=prompt, **{**mixed_settings(100 * seed + number), **hot, **stop, **settings}))
    return found


def decoded(parts: Parts, rule: Method, requests: list[Request], **options: Any) -> list[Output]:
    return generate(parts, rule, requests, stop_ids=[EOS], decode=Letters().decode, **options)


def texts(outputs: list[Output]) -> list[tuple[list[int], str]]:
    return [(output.tokens, output.finish) for output in outputs]


# -- the text ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("size", [1, 2, 4, 7])
def test_the_text_is_the_autoregressive_one(rule: str, size: int) -> None:
    """Greedy and sampled, with top-p, stop tokens, stop strings and lengths; whatever the drafts are worth."""
    rule = rule if size >= 4 else rule.replace("width=2", "width=1").replace("width=3", "width=1")
    parts, requests = Parts(tiny_model(size)), asked(24, size)
    expected = decoded(parts, method("autoregressive"), requests)
    found = decoded(parts, method_named(rule, replace(OWN, block_size=size)), requests)
    assert texts(found) == texts(expected)
    assert {output.finish for output in expected} == {"stop", "length"}
    for output in found:
        assert sum(output.accepted.values()) == output.nfe
        assert sum(count * forwards for count, forwards in output.accepted.items()) == len(output.tokens)
    lengths = sum((Counter(output.accepted) for output in found), Counter())
    assert max(lengths) == size and (size > 4 or set(range(1, size + 1)) <= set(lengths))
    assert ("passes" in rule) == bool(lengths[0]), "further passes make no token"


def test_one_token_a_block_is_autoregressive_decoding() -> None:
    parts, requests = Parts(tiny_model()), asked(6, 3)
    expected = decoded(parts, method("autoregressive"), requests)
    found = decoded(parts, method("verified", block_size=1), requests)
    assert [output.nfe for output in found] == [output.nfe for output in expected]
    assert [output.accepted for output in found] == [output.accepted for output in expected]


@pytest.mark.parametrize("rule", RULES[:3])
def test_batch_cache_and_commits_change_nothing(rule: str) -> None:
    parts, chosen, requests = Parts(tiny_model()), method_named(rule, OWN), asked(8, 5)
    together = decoded(parts, chosen, requests)
    for option in ("cached", "fused"):
        other = decoded(parts, chosen, requests, **{option: False})
        assert [(o.tokens, o.accepted) for o in other] == [(o.tokens, o.accepted) for o in together]
    apart = [decoded(parts, chosen, [request])[0] for request in requests]
    assert [(o.tokens, o.accepted) for o in apart] == [(o.tokens, o.accepted) for o in together]


# -- the rule ----------------------------------------------------------------------------------------------------------


class ByHand:
    """The rule once more, for blocks of four: whole-text forwards, lists, no cache."""

    def __init__(self, model: Transformer, request: Request, tail: str, size: int = 4) -> None:
        self.model, self.request, self.tail, self.size = model, request, tail, size

    @torch.no_grad()
    def forward(self, ids: list[int], alpha: list[float], position: list[int], rows: Tokens) -> Tensor:
        x = soft_embedding(self.model, torch.tensor([ids]), torch.tensor([alpha]))
        return self.model.logits(self.model(x, torch.tensor([position]), make_mask(rows, rows, "sdpa")).hidden)

    def chosen(self, logits: Tensor, first: int) -> tuple[list[int], list[float]]:
        """The tokens for positions from `first` on."""
        given = torch.tensor([self.request.temperature]), torch.tensor([self.request.top_p])
        sampling = Sampling(*given, torch.tensor([self.request.seed])) if self.request.temperature else None
        made = predict(logits, sampling, first + torch.arange(logits.shape[1])[None])
        return made.ids[0].tolist(), made.prob[0].tolist()

    def run(self) -> tuple[list[int], list[int]]:
        """The new tokens, and how many each forward made."""
        text, new, lengths = list(self.request.prompt), list[int](), list[int]()
        draft, prob = list[int](), list[float]()
        while True:
            last = len(text) - 1
            checked = [*text, *draft]
            ids, alpha, position = list(checked), [1.0] * len(checked), list(range(len(checked)))
            rows = [clean_tokens(torch.zeros(1, len(ids)), torch.tensor([position]), 1)]
            for right in range(len(draft) + 1):
                first = last + right
                shown = [checked[first]] + [BLANK] * (self.size - 1)
                weight = [1.0] + [0.0] * (self.size - 1)
                for slot in range(2, self.size):
                    if self.tail == "refine" and right + slot <= len(draft):
                        shown[slot], weight[slot] = draft[right + slot - 1], prob[right + slot - 1]
                ids, alpha = ids + shown, alpha + weight
                position += range(first, first + self.size)
                ones = torch.ones(1, self.size, dtype=torch.int64)
                rows.append(draft_tokens(0 * ones, first * ones, right * ones))
            logits = self.forward(ids, alpha, position, concat(*rows))
            choices, _ = self.chosen(logits[:, last : len(checked)], last + 1)
            right = 0
            while right < len(draft) and draft[right] == choices[right]:
                right += 1
            begin = len(checked) + right * self.size
            ids, prob = self.chosen(logits[:, begin : begin + self.size], last + right + 1)
            made = [*draft[:right], choices[right]]
            draft, prob = ids[1:], prob[1:]
            lengths.append(len(made))
            for token in made:
                new.append(token)
                if token == EOS or len(new) == self.request.max_new_tokens:
                    lengths[-1] -= len(made) - 1 - made.index(token) if token == EOS else 0
                    return new, lengths
            text += made


@pytest.mark.parametrize("tail", ["refine", "blank"])
@pytest.mark.parametrize("temperature", [0.0, 6.0])
def test_the_rule_written_out_by_hand(tail: str, temperature: float) -> None:
    """Forward by forward: which tokens were accepted shows what every candidate saw and predicted."""
    model = tiny_model(1)
    rule = method("verified", tail=tail)
    differ = 0
    for number, prompt in enumerate(random_prompts(10, seed=9)):
        request = Request(prompt=prompt, max_new_tokens=18, temperature=temperature, top_p=0.95, seed=number)
        tokens, lengths = ByHand(model, request, tail).run()
        output = generate(Parts(model), rule, [request], stop_ids=[EOS])[0]
        assert output.tokens == tokens and output.nfe == len(lengths)
        differ += len(set(lengths)) > 1
    assert differ > 5 or not temperature


def state_of(ids: list[int], prob: list[float]) -> Any:
    """One request in the middle of its text, with a draft that had one pass."""
    draft = fresh_drafts([[]], 4, BLANK, torch.device("cpu"))
    draft = draft._replace(ids=torch.tensor([ids]), prob=torch.tensor([prob]), passes=torch.tensor([1]))
    return new_state([Request(prompt=())], draft, torch.tensor([9]), torch.tensor([5]), torch.tensor([EOS]))


DRAFT = state_of([1, 2, 3, BLANK], [0.9, 0.8, 0.4, 0.0])


def candidates(rule: str, state: Any = DRAFT) -> Any:
    chosen = method_like(rule)
    return chosen.candidates(state, chosen.limits([]))


def test_candidates_begin_behind_what_they_take_for_text() -> None:
    found = candidates("verified")
    assert found.ahead.tolist() == [[0, 1, 2, 3]] and found.valid.all()
    ids, alpha = DRAFT.shown(method_like("verified").geometry, found)
    assert ids[0].tolist() == [[5, BLANK, 2, 3], [1, BLANK, 3, BLANK], [2, BLANK, BLANK, BLANK], [3] + [BLANK] * 3]
    torch.testing.assert_close(alpha[0], torch.tensor([[1, 0, 0.8, 0.4], [1, 0, 0.4, 0], [1, 0, 0, 0], [1, 0, 0, 0]]))
    ids, alpha = DRAFT.shown(method_like("verified").geometry, candidates("verified:tail=blank"))
    assert ids[0, :, 1:].eq(BLANK).all() and alpha[0].tolist() == [[1, 0, 0, 0]] * 4


@pytest.mark.parametrize(("width", "ahead"), [(1, [2]), (2, [2, 3]), (3, [1, 2, 3])])
def test_few_candidates_are_those_for_the_likeliest_lengths(width: int, ahead: list[int]) -> None:
    """None right 0.1, one 0.18, two 0.432, three 0.288."""
    assert candidates(f"verified:width={width}").ahead.tolist() == [ahead]


def test_a_draft_that_ends_early_has_fewer_candidates() -> None:
    assert candidates("verified", state_of([1, BLANK, 3, BLANK], [0.9, 0.0, 0.7, 0.0])).ahead.tolist() == [[0, 1]]
    assert candidates("verified", state_of([BLANK] * 4, [0.0] * 4)).ahead.tolist() == [[0]]


def settled(rule: str, choices: list[int]) -> tuple[Any, Any]:
    """What becomes of `DRAFT` where the text predicts these tokens, and slots the tokens 11 to 14."""
    chosen = method_like(rule)
    found = candidates(rule)
    text, made = (
        Prediction(ids, ids / 20, ids, 0.0 * ids) for ids in (torch.tensor([choices]), torch.arange(11, 15)[None])
    )
    winner, _ = chosen.choose(Parts(tiny_model()), DRAFT, found, None, text)
    from freda.methods.state import Seen

    return chosen.settle(DRAFT, made, Seen(found, winner, text), BLANK)


@pytest.mark.parametrize(
    ("rule", "choices", "final", "following", "passes"),
    [
        ("verified", [1, 2, 3, 20], [1, 2, 3, 20], [12, 13, 14, BLANK], 1),
        ("verified", [1, 20, 3, 9], [1, 20], [12, 13, 14, BLANK], 1),
        ("verified", [20, 2, 3, 9], [20], [12, 13, 14, BLANK], 1),
        ("verified:width=1", [1, 2, 20, 9], [1, 2, 20], [12, 13, 14, BLANK], 1),
        ("verified:width=1", [20, 2, 3, 9], [20], [2, 3, BLANK, BLANK], 0),  # no candidate: the old tail is the draft
        ("verified:width=1", [1, 2, 3, 20], [1, 2, 3, 20], [BLANK] * 4, 0),
        ("verified:width=1,tail=blank", [20, 2, 3, 9], [20], [BLANK] * 4, 0),
        ("verified:passes=2", [1, 2, 3, 20], [], [11, 12, 13, BLANK], 2),  # not checked yet
    ],
)
def test_what_a_pass_leaves(rule: str, choices: list[int], final: list[int], following: list[int], passes: int) -> None:
    told, left = settled(rule, choices)
    assert told.ids[0, : told.closed].tolist() == final and told.committed.sum() == len(final)
    assert left.ids.tolist() == [following] and left.passes.tolist() == [passes] and not left.closed.any()
    assert ((left.prob > 0) == (left.ids != BLANK)).all()


# -- the engine --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def mixed() -> list[tuple[Request, tuple[list[int], int, str]]]:
    """Requests of many methods, and what the reference loop makes of each alone."""
    methods = [*RULES, "self-refine", "autoregressive", "best-of-n"]
    requests = [replace(one, method=methods[n % 9], stop=()) for n, one in enumerate(asked(24, 13))]
    return [(request, alone(scored(layout="shifted"), request)) for request in requests]


@pytest.mark.parametrize(("backend", "few"), [(PlainModel, 0), (AheadModel, 0), (AheadModel, 64)])
def test_mixed_methods_in_one_engine_are_what_generate_makes_of_each_alone(
    mixed: list[tuple[Request, tuple[list[int], int, str]]], backend: Any, few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forwards packed or dense, choices of all blocks together or only of those that are kept."""
    monkeypatch.setattr(places, "FEW_TOKENS", few)
    monkeypatch.setattr(device, "CHOSEN_TOGETHER", few)
    engine = Engine(scored(layout="shifted"), EngineConfig(max_batch=8, page_size=6, pages=90, prefill=24), backend)
    for (_, expected), output in zip(mixed, engine.run([request for request, _ in mixed]), strict=True):
        assert (output.tokens, output.nfe, output.finish) == expected
        assert sum(output.accepted.values()) == output.nfe
    assert engine.pages.available == 90


def test_stop_strings_end_texts_in_the_engine_too() -> None:
    model = scored(layout="shifted")
    requests = asked(12, 17, stop=["a", "bc"], method="verified")
    plain = [replace(request, method="autoregressive") for request in requests]
    engine = Engine(model, EngineConfig(max_batch=4, page_size=8, pages=90), AheadModel)
    assert texts(engine.run(requests)) == texts(decoded(model.parts, method("autoregressive"), plain))


def test_what_was_rejected_is_never_shared() -> None:
    """Pages hold keys and values of rejected tokens for a while; only full pages of text are found by others."""
    model = scored(layout="shifted")
    engine = Engine(model, EngineConfig(max_batch=2, page_size=3, pages=90))
    for request in asked(8, 19, method="verified", stop=(), max_new_tokens=12):
        output = engine.run([request])[0]
        again = replace(
            request, prompt=[*request.prompt, *output.tokens[:-1]], method="autoregressive", temperature=0.0
        )
        assert engine.run([again])[0].tokens == alone(model, again)[0]


@pytest.mark.parametrize("backend", [PlainModel, AheadModel])
def test_a_watched_request_shows_what_every_pass_made_final(backend: Any) -> None:
    model = scored(layout="shifted")
    request = Request(prompt=[3, 1, 4], max_new_tokens=14, temperature=8.0, method="verified", watch=True)
    seen: list[Pass] = []
    expected = generate(model.parts, method("verified"), [request], stop_ids=[EOS], watch=seen.append)[0]
    handle = Engine(model, EngineConfig(max_batch=2, page_size=8, pages=60), backend).submit(request)
    passes = [one for one in handle if isinstance(one, Pass)]
    for one, two in zip(seen, passes, strict=True):
        assert one._replace(request=0, prob=[], scores=[]) == two._replace(request=0, prob=[], scores=[])
    live = LiveDrafts(request.prompt, Letters())  # type: ignore[arg-type]
    live._print = lambda *_, **__: None  # type: ignore[method-assign]
    for step in passes:
        live(step)
        assert step.committed == [place < step.closed for place in range(4)]
    assert live.ids[3 : 3 + len(expected.tokens)] == expected.tokens and len(passes) == expected.nfe


# -- what it refuses, and the commands ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "own", "message"),
    [
        (
            "verified",
            method(),
            "needs causal text and slots that predict the next token; the model has the paper's layout",
        ),
        ("verified", method(context="causal"), "the model has shift = false and causal context"),
        ("verified", method(layout="shifted", context="block"), "the model has shift = true and block context"),
        ("verified:width=5", OWN, "method.width is 5; use 0 to 4"),
        ("verified:passes=0", OWN, "method.passes is 0"),
        ("verified:passes=17", OWN, "method.passes is 17; use 1 to 16"),
        ("verified:tail=old", OWN, "tail"),
        ("verified:tails=blank", OWN, "tail"),
        ("verified:block_size=8", OWN, "method.block_size is 8, but the model was trained with 4; omit it"),
        ("verifed", OWN, "there is no method 'verifed'"),
    ],
)
def test_bad_input(text: str, own: Method, message: str) -> None:
    with pytest.raises(FredaError, match=message):
        method_named(text, own)


def test_it_trains_nothing() -> None:
    with pytest.raises(FredaError, match=r"method.name is 'verified', which decodes models of other methods"):
        train_config.load(None, ["method.name=verified"])
    with pytest.raises(FredaError, match="train self-refine"):
        Verified().loss(None, None, None)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["self-refine", "best-of-n", "block-diffusion"])
def test_it_decodes_every_model_of_the_layout_and_keeps_its_settings(name: str) -> None:
    own = method(name, layout="shifted", block_size=2, **({"feedback": "hard"} if name == "self-refine" else {}))
    found = method_named("verified:tail=blank", own)
    assert isinstance(found, Verified) and (found.block_size, found.tail) == (2, "blank")
    assert found.feedback == ("hard" if name == "self-refine" else "soft")
    assert default_method(own) == "verified"


def test_it_is_the_default_of_none_but_the_shifted_layout() -> None:
    for own in (method(), method("autoregressive"), method(context="causal"), method(shift=True)):
        assert default_method(own) == own.name


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of the shifted layout."""
    loaded = answering_model(["How many shells does Mia have in the end?"] * 3, seed=5)
    save_model(tmp_path_factory.mktemp("verified") / "model", loaded._replace(method=OWN))
    return tmp_path_factory.getbasetemp() / "verified0" / "model"


def test_generate_takes_it_by_default_and_says_so(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    common = ["generate", str(folder), "How many", "--max-new-tokens", "12", "--json", "--device", "cpu"]
    found = {}
    for method_ in (None, "verified:width=2", "autoregressive", "self-refine"):
        assert run([*common, *(["--method", method_] if method_ else [])]) == 0
        said = capsys.readouterr()
        found[method_] = json.loads(said.out)
        assert ("decoding as verified, the model's own autoregressive text" in said.err) == (method_ is None)
    assert found[None]["method"] == "verified"
    assert found[None]["text"] == found["verified:width=2"]["text"] == found["autoregressive"]["text"]
    accepted = found[None]["accepted"]
    assert sum(accepted.values()) == found[None]["nfe"] and sum(int(n) * f for n, f in accepted.items()) == 12
    assert run([*common, "--reference"]) == 0
    assert json.loads(capsys.readouterr().out)["tokens"] == found[None]["tokens"]


def test_the_command_line_refuses_a_model_without_causal_text(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    loaded = answering_model(["How many shells?"] * 3, seed=5)
    save_model(tmp_path / "paper", loaded)
    assert run(["generate", str(tmp_path / "paper"), "How", "--method", "verified", "--device", "cpu"]) == 2
    assert "needs causal text" in capsys.readouterr().err
    assert run(["train", "--dry-run", "--set", "method.name=verified"]) == 2
    assert "decodes models of other methods" in capsys.readouterr().err


def test_eval_and_sweeps_name_a_method_and_results_have_accepted_lengths(folder: Path, tmp_path: Path) -> None:
    def graded(examples: Any, answers: Any) -> list[Graded]:
        return [Graded(True, answer, answer) for answer in answers]

    task = Task(name="t", kind="mathematics", rows=3, load=lambda *_: [], grade_all=graded, max_new_tokens=10)
    examples = [Example(str(number), "How many " + "shells" * number, "", {}) for number in range(3)]
    model, found = Model(load_model(folder)), {}
    for name in ("verified:tail=blank", "autoregressive"):
        settings = SystemConfig(models=("m",), method=name).decoding(10)
        first = evaluate(model, task, examples, tmp_path / name[:4], settings=settings)
        found[name] = evaluate(model, task, examples, tmp_path / name[:4], settings=settings)  # from its own file
        assert first["accepted"] == found[name]["accepted"] and first["settings"]["method"] == name
        lines = (tmp_path / name[:4] / "samples.jsonl").read_text().splitlines()[1:]
        found[name]["texts"] = [json.loads(line)["output"] for line in lines]
    one, other = found.values()
    assert one["texts"] == other["texts"] and other["accepted"] == {"1": other["nfe"] * 3}
    assert sum(one["accepted"].values()) == pytest.approx(3 * one["nfe"])


def test_chat_takes_it_by_default(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("How many\n"))
    assert run(["chat", str(folder), "--max-new-tokens", "6", "--device", "cpu"]) == 0
    assert "decoding as verified" in capsys.readouterr().err


def test_bench_rows_have_accepted_lengths(rates_once: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--context", "8", "--new-tokens", "8", "--device", "cpu", "--out", str(tmp_path / "bench.json")]
    assert run(["bench", "decode", "tiny", "--method", "verified:tail=blank", *sizes]) == 0
    (row,) = json.loads((tmp_path / "bench.json").read_text())["rows"]
    assert row["what"] == "plain engine, verified:tail=blank"
    assert sum(int(tokens) * forwards for tokens, forwards in row["accepted"].items()) == 8


def test_passes_are_traced_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU what is around a forward is compiled: nothing in it may ask for a value, or hide from the compiler."""
    traced = tuple(
        torch.compile(function, dynamic=False, backend="eager", fullgraph=True)
        for function in (device.laid_out, device.choice, device.advance)
    )
    monkeypatch.setattr(device, "_around", lambda compiled: traced)
    model = scored(layout="shifted")
    request = Request(prompt=[3, 1, 4], max_new_tokens=6, temperature=8.0, method="verified:width=2,passes=2")
    output = Engine(model, EngineConfig(max_batch=1, page_size=8, pages=9), AheadModel).run([request])[0]
    assert (output.tokens, output.nfe, output.finish) == alone(model, request)
