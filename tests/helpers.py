"""What many tests share: tiny models and packed rows, a stand-in for the bundled model, and the ranks of
a run."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import importlib
import itertools
import json
import multiprocessing
import os
import random
import re
import signal
import socket
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from freda.cli import main
from freda.data import mini
from freda.data.config import CorpusConfig, MiniConfig, PrepareConfig, PrepareFile, SourceConfig
from freda.data.loader import Batch
from freda.data.prepare import prepare_corpus
from freda.data.shards import Documents, Manifest
from freda.data.synthetic import Item, Split, problems_of
from freda.data.tokenizer import BLANK_TEXT, Tokenizer, train_tokenizer
from freda.decode.engine import Engine
from freda.decode.generate import generate
from freda.decode.plain import PlainModel
from freda.decode.request import Request
from freda.files import written_beside
from freda.folders.hugging_face import hugging_face_name
from freda.folders.model_folder import About, LoadedModel, part_file, write_files
from freda.folders.tensors import save_tensors
from freda.methods import METHODS, method_named
from freda.methods.method import Method
from freda.methods.self_refine import SelfRefine
from freda.model.attention import clean_tokens, make_mask
from freda.model.config import ModelConfig
from freda.model.parts import BACKBONE, Parts
from freda.model.scorer import Scorer
from freda.model.transformer import Transformer
from freda.train.config import DataConfig, RunConfig, TrainConfig
from freda.train.parallel import Ranks, processes

VOCAB, BLANK, EOS = 29, 28, 27
WORDS = ["alpha", "beta", "gamma", "delta", "river", "stone", "cloud", "seven",
         "eight", "nine", "ten", "tree", "house", "walks", "talks", "sings"]  # fmt: skip
TOLERANCE = 1e-4
LENGTH = 40
# An original context this short makes the scaling change the logits of a short text.
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
SHAPE = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
METHOD = SelfRefine(block_size=3, feedback="hard", rescale=True, committed_hard=True)

TRANSFORMERS_CASES = {
    "qwen3-tied": ("Qwen3", {"num_key_value_heads": 2, "head_dim": 16, "tie_word_embeddings": True}),
    "qwen3-untied": ("Qwen3", {"num_key_value_heads": 4, "head_dim": 8, "tie_word_embeddings": False}),
    "qwen2-tied": ("Qwen2", {"num_key_value_heads": 2, "tie_word_embeddings": True}),
    "llama-untied": ("Llama", {"num_key_value_heads": 1, "head_dim": 16, "tie_word_embeddings": False}),
    "llama3-tied": ("Llama", {"num_key_value_heads": 2, "tie_word_embeddings": True, "rope_parameters": LLAMA3}),
}
LAYOUTS: dict[str, dict[str, Any]] = {  # besides the paper's: settings of a block method
    "shifted": {"layout": "shifted"},
    "only shifted": {"layout": "shifted", "context": "block"},
    "only causal": {"context": "causal"},
}
EASY = MiniConfig(documents=200, validation_documents=10)
CONTEXT = multiprocessing.get_context("forkserver")  # a server imports torch once, and ranks fork from it
CONTEXT.set_forkserver_preload(["freda.train.loop", "torch._dynamo", "tests.helpers"])  # training imports the second
PATIENCE = 100  # seconds: a rank that waits for another for ever must not hold up the tests


# -- tiny models and packed rows ---------------------------------------------------------------------------------------


def tiny_model(seed: int = 0, **shape: object) -> Transformer:
    """Two layers, grouped heads, weights large enough that every input changes the output."""
    config = ModelConfig(
        **{
            "vocab_size": VOCAB,
            "dim": 32,
            "layers": 2,
            "heads": 4,
            "kv_heads": 2,
            "head_dim": 8,
            "ffn_dim": 48,
            **shape,
        }
    )
    model = Transformer(config, blank_id=BLANK)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.copy_(torch.randn(weight.shape, generator=generator) * 0.25)
    return model


@torch.no_grad()
def init_weights(module: Transformer | Scorer, seed: int, backbone: Transformer | None = None) -> None:
    """Start with the weights of a new run; a last layer that a scorer has starts as the backbone's."""
    if isinstance(module, Scorer) and module.last_layer is not None and backbone is not None:
        module.last_layer.load_state_dict(backbone.layers[-1].state_dict())
    for name, value in module.random_weights(seed):
        module.get_parameter(name).copy_(value)


def scored_model(seed: int = 0, scale: float = 0.4, *, last_layer: bool = False) -> Parts:
    """A tiny model with a scorer that has opinions."""
    model = tiny_model(seed)
    scorer = Scorer(model.config, last_layer=last_layer)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for weight in scorer.parameters():
            if weight.dim() > 1:
                weight.copy_(torch.randn(weight.shape, generator=generator) * scale)
    return Parts(model, scorer)


def method(name: str = "self-refine", **settings: Any) -> Method:
    """A method by its name, with some of its settings."""
    return METHODS[name](**settings)


def answering_model(
    texts: list[str], vocab_size: int = 300, *, seed: int, method: str = "self-refine", **shape: int
) -> LoadedModel:
    """One layer of random weights with a tokenizer of `texts`; its embedding is so large that it answers something."""
    tokenizer = train_tokenizer(texts, vocab_size)
    values = {"dim": 32, "layers": 1, "heads": 2, "kv_heads": 2, "head_dim": 16, "ffn_dim": 48, **shape}
    network = Transformer(ModelConfig(vocab_size=tokenizer.size, **values), tokenizer.blank_id)  # type: ignore[arg-type]
    init_weights(network, seed)
    with torch.no_grad():
        network.embed_tokens.weight.mul_(20)
    return LoadedModel(Parts(network), tokenizer, METHODS[method](), "test")


def packed_batch(lengths: list[list[int]], seed: int = 0) -> Batch:
    """Rows of documents of the given lengths, padded to the longest row, with random tokens."""
    width = max(sum(row) for row in lengths)
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, EOS, (len(lengths), width), generator=generator)
    document = torch.full((len(lengths), width), -1, dtype=torch.int32)
    position = torch.zeros_like(document)
    fill = torch.zeros_like(document, dtype=torch.bool)
    for row, pieces in enumerate(lengths):
        begin = 0
        for number, length in enumerate(pieces):
            document[row, begin : begin + length] = number
            position[row, begin : begin + length] = torch.arange(length)
            tokens[row, begin + length - 2 : begin + length] = EOS
            fill[row, begin + length - 1] = True
            begin += length
    return Batch(tokens, document, position, fill)


# -- decoding ----------------------------------------------------------------------------------------------------------


class AheadModel(PlainModel):
    """Forwards by the Transformer, in the way of the kernels: packed, in memory that stays, one pass ahead."""

    graphs = True


def use_ahead(patch: Any) -> None:
    """Let every engine decode in the way of the kernels, unless it was asked not to."""

    def backend(engine: Engine, method: Method) -> PlainModel:
        kind = AheadModel if engine.config.on_device else PlainModel
        return kind(engine.loaded.parts, method, engine.pages)

    patch.setattr(Engine, "_backend", backend)


class Letters(Tokenizer):
    """Token n is the n-th letter; EOS is the stop token, and there is no BOS. Only what the engine uses."""

    bos_id = None  # type: ignore[assignment]

    def __init__(self) -> None:
        pass

    @property
    def stop_ids(self) -> list[int]:  # type: ignore[override]
        return [EOS]

    def decode(self, ids: Iterable[int]) -> str:
        return "".join("." if token == EOS else chr(ord("a") + token) for token in ids)


def scored(name: str = "self-refine", *, last_layer: bool = False, block_size: int = 4, **settings: Any) -> LoadedModel:
    """A tiny model with a scorer and letters for tokens."""
    rule = method(name, block_size=block_size, **settings)
    return LoadedModel(scored_model(scale=0.3, last_layer=last_layer), Letters(), rule, "test")


def random_prompts(count: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(EOS) for _ in range(rng.randrange(1, 40))] for _ in range(count)]


def mixed_settings(number: int) -> dict[str, Any]:
    """Another mixture of everything a request may say for every number."""
    rng = random.Random(number)
    return {
        "max_new_tokens": rng.randrange(1, 24),
        "passes": rng.randrange(1, 5),
        "threshold": rng.choice([0.2, 0.5, 2.0]),
        "temperature": rng.choice([0.0, 0.0, 1.0]),
        "top_p": rng.choice([1.0, 0.7]),
        "seed": number,
        "width": rng.randrange(1, 5),
        "tau": rng.choice([0.0, 0.5, 2.0]),
        "candidates": rng.choice(["beam", "sampled"]),
        "select": rng.choice(["argmax", "gumbel"]),
    }


def alone(loaded: LoadedModel, request: Request) -> tuple[list[int], int, str]:
    """Tokens, forwards and end of a request by the reference loop."""
    rule = method_named(request.method, loaded.method)
    found = generate(loaded.parts, rule, [request], stop_ids=loaded.tokenizer.stop_ids)[0]
    return found.tokens, found.nfe, found.finish


# -- small runs --------------------------------------------------------------------------------------------------------


def small_run(data: Path, *, problems: int = 60, **train: Any) -> RunConfig:
    """One step of a one-layer model over word problems, made in the folder `data`; `train` changes its section."""
    prepare_corpus(CorpusConfig(problems=problems, validation_problems=problems // 7, vocab_size=300), data)
    once = {"steps": 1, "batch_rows": 2, "group_rows": 2, "warmup_steps": 1, "validation_rows": 2}
    return RunConfig(
        model=ModelConfig(dim=32, layers=1, heads=2, kv_heads=1, head_dim=16, ffn_dim=48),
        data=DataConfig(path=str(data), seq_len=96),
        train=TrainConfig(**{**once, **train}),
    )


# -- the bundled model -------------------------------------------------------------------------------------------------


def write_stand_in(assets: Path) -> Path:
    """A model with random weights in the place of the packaged one, with the settings of its questions."""
    texts = [mini.item(kind, EASY, "train", number).document for kind in mini.KINDS for number in range(100)]
    made_up = answering_model(texts, 700, seed=3)
    tokenizer = made_up.tokenizer
    save_model(assets / "mini", made_up)
    (assets / "mini" / "data").mkdir()
    made = {"mini": {"generator": mini.VERSION, **dataclasses.asdict(EASY)}}
    Manifest(made, 16, tokenizer.eos_id, tokenizer.blank_id, tokenizer.fingerprint, {}).write(assets / "mini" / "data")
    return assets / "mini"


# -- other processes, forked from one that has torch loaded ------------------------------------------------------------


def fork(function: Callable[..., None], *arguments: object) -> multiprocessing.process.BaseProcess:
    """A process of its own that runs `function`, which is one of a module."""
    process = CONTEXT.Process(target=function, args=arguments)
    process.start()
    return process


class Said(NamedTuple):
    """What became of a command."""

    code: int | None
    out: str
    errors: str


class FredaProcess:
    """The command line in a process of its own that has torch loaded already; stdout and stderr go to `folder`, or with
    the rest to the terminal of that name."""

    def __init__(self, *arguments: object, folder: Path, terminal: str = "", **environment: object) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.files = folder / "stdout", folder / "stderr"
        places = [terminal] * 3 if terminal else [os.devnull, *map(str, self.files)]
        given = [str(argument) for argument in arguments]
        self.process = fork(_freda, given, places, {key: str(value) for key, value in environment.items()})

    def signal(self, number: signal.Signals) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def wait(self) -> Said:
        self.process.join(PATIENCE)
        code = self.process.exitcode
        self.process.kill()
        return Said(code, *(path.read_text() if path.exists() else "" for path in self.files))


def _freda(arguments: list[str], places: list[str], environment: dict[str, str]) -> None:
    torch.set_num_threads(1)
    os.environ |= environment
    for number, (place, name) in enumerate(zip(places, ("stdin", "stdout", "stderr"), strict=True)):
        os.dup2(os.open(place, os.O_RDWR | os.O_CREAT), number)
        setattr(sys, name, os.fdopen(number, "w" if number else "r", closefd=False))
    sys.argv = ["freda", *arguments]
    main()


def freda_on_ranks(*arguments: object, world: int, folder: Path) -> list[Said]:
    """What becomes of a command on each rank, whose environment is as torchrun makes it."""
    port = _free_port()
    ranks = [
        FredaProcess(*arguments, folder=folder / str(rank), **_rank_environment(rank, world, port))
        for rank in range(world)
    ]
    return [rank.wait() for rank in ranks]


def loaded_by(modules: Sequence[str], folder: Path) -> set[str]:
    """The packages that are there when these modules, and others of freda, have been imported."""
    child = fork(_import, modules, folder / "loaded")
    child.join(PATIENCE)
    return set((folder / "loaded").read_text().split())


def _import(modules: Sequence[str], found: Path) -> None:
    for name in modules:
        importlib.import_module(name)
    found.write_text("\n".join({name.partition(".")[0] for name in sys.modules}))


def run_interpreted(check: Callable[[], None], folder: Path) -> None:
    """Call `check`, a function of a module, in a process of its own where kernels run in Triton's interpreter."""
    child = fork(_interpreted, check, folder / "stderr")
    child.join(PATIENCE)
    child.kill()
    assert child.exitcode == 0, (folder / "stderr").read_text()


def _interpreted(check: Callable[[], None], errors: Path) -> None:
    with _stderr_to(errors):
        os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported, which is done again
        for name in [name for name in sys.modules if re.match(r"triton\b(?!\._C)", name)]:
            del sys.modules[name]
        import triton.language as tl
        from triton.runtime import interpreter

        # The language is patched once, not at every call, and int32 is not watched: nothing here is that large.
        interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
        interpreter._patch_lang = lambda _: interpreter._LangPatchScope()
        builder = interpreter.interpreter_builder
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
        check()


def run_ranks(function: Callable[[Ranks, Path], Any], world: int, folder: Path) -> list[Any]:
    """What `function(ranks, folder)` returns on each rank, as JSON carries it."""
    folder.mkdir(parents=True, exist_ok=True)
    port = _free_port()
    children = [fork(_rank, function, rank, world, port, folder) for rank in range(world)]
    for child in children:
        child.join(PATIENCE)
    codes = [child.exitcode for child in children]
    for child in children:
        child.kill()
    said = "".join((folder / f"stderr-{rank}").read_text() for rank in range(world))
    assert codes == [0] * world, f"exit codes {codes}\n{said}"
    return [json.loads((folder / f"result-{rank}.json").read_text()) for rank in range(world)]


def _rank(function: Callable[[Ranks, Path], Any], rank: int, world: int, port: int, folder: Path) -> None:
    torch.set_num_threads(1)
    os.environ |= _rank_environment(rank, world, port)
    with _stderr_to(folder / f"stderr-{rank}"), processes() as ranks:
        result = function(ranks, folder)
    (folder / f"result-{rank}.json").write_text(json.dumps(result))


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return int(free.getsockname()[1])


def _rank_environment(rank: int, world: int, port: int) -> dict[str, str]:
    here = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "MASTER_PORT": port}
    return {**{key: str(value) for key, value in here.items()}, "MASTER_ADDR": "localhost"}


@contextlib.contextmanager
def _stderr_to(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        os.dup2(file.fileno(), 2)
        sys.stderr = os.fdopen(2, "w", closefd=False)
        yield


# -- checkpoints of transformers ---------------------------------------------------------------------------------------


@torch.no_grad()
def randomise(model: torch.nn.Module) -> None:
    """Weights of a size that makes any mistake visible; norms and biases too, which start at one and zero."""
    generator = torch.Generator().manual_seed(0)
    for _, weight in sorted(model.named_parameters()):
        noise = torch.randn(weight.shape, generator=generator) * 0.2
        weight.copy_(noise if weight.dim() > 1 else noise + 1)


def own_model(tokenizer: Tokenizer, **changes: Any) -> Transformer:
    values = {"dim": 32, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 8, "ffn_dim": 48} | changes
    model = Transformer(ModelConfig(vocab_size=tokenizer.size, **values), tokenizer.blank_id)
    randomise(model)
    return model


def as_loaded(model: Transformer, tokenizer: Tokenizer, stage: str = "I") -> LoadedModel:
    return LoadedModel(Parts(model), tokenizer, METHOD, stage)


def write_hf(
    folder: Path, tokenizer: Tokenizer, case: str, *, rows: int, dtype: torch.dtype = torch.float32, **save: Any
) -> Any:
    """A checkpoint of `transformers` with a tokenizer that has no BLANK; returns the model."""
    import transformers

    family, changes = copy.deepcopy(TRANSFORMERS_CASES[case])  # transformers writes into the rope parameters
    values = {**SHAPE, **changes, "vocab_size": rows, "eos_token_id": tokenizer.eos_id, "bos_token_id": None}
    model = getattr(transformers, f"{family}ForCausalLM")(getattr(transformers, f"{family}Config")(**values)).eval()
    randomise(model)
    model.to(dtype).save_pretrained(folder, **save)
    write_plain_tokenizer(folder, tokenizer)
    return model


def write_plain_tokenizer(folder: Path, tokenizer: Tokenizer) -> None:
    tokenizer.save(folder)
    edit_json(folder / "tokenizer.json", added_tokens=[eos_entry(folder)])


def eos_entry(folder: Path) -> dict[str, Any]:
    added: list[dict[str, Any]] = json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
    return next(token for token in added if token["content"] != BLANK_TEXT)


def edit_json(path: Path, **changes: Any) -> None:
    """Set keys of a JSON file; None removes one."""
    values = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in values.items() if value is not None}))


def edit_tensors(path: Path, **changes: Tensor | None) -> None:
    tensors = load_file(path) | changes
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, path, metadata={"format": "pt"})


def some_ids(tokenizer: Tokenizer) -> Tensor:
    return torch.randint(0, tokenizer.eos_id, (2, LENGTH), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def own_logits(model: Transformer, ids: Tensor) -> Tensor:
    position = torch.arange(ids.shape[1]).expand_as(ids)
    tokens = clean_tokens(torch.zeros_like(ids), position, block_size=1)
    hidden, _, _ = model(model.embed_tokens(ids), position, make_mask(tokens, tokens, "sdpa"))
    return model.logits(hidden)


@torch.no_grad()
def their_logits(model: Any, ids: Tensor, tokenizer: Tokenizer) -> Tensor:
    logits: Tensor = model(ids).logits[..., : tokenizer.blank_id]
    return logits


def assert_same_logits(own: Transformer, theirs: Any, tokenizer: Tokenizer) -> None:
    ids = some_ids(tokenizer)
    expected = their_logits(theirs, ids, tokenizer)
    assert expected.std() > 0.5  # otherwise the tolerance would say nothing
    assert (own_logits(own, ids) - expected).abs().max() < TOLERANCE


# -- documents to prepare ----------------------------------------------------------------------------------------------


def sentence(generator: random.Random, words: int) -> str:
    return " ".join(generator.choices(WORDS, k=words)) + "."


def write_source(path: Path, documents: int, seed: int = 0, words: int = 30) -> None:
    generator = random.Random(seed)
    lines = [json.dumps({"text": f"{n} " + sentence(generator, generator.randint(1, words))}) for n in range(documents)]
    path.write_text("\n".join(lines) + "\n")


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def mixture(**settings: Any) -> PrepareFile:
    values = {"vocab_size": 300, "parts": 3, "validation_share": 0.1, **settings}
    sources = {"one": SourceConfig(path="one.jsonl", share=3.0), "two": SourceConfig(path="two.jsonl", share=1.0)}
    return PrepareFile(prepare=PrepareConfig(**values), source=sources)


def mixture_file(root: Path, **settings: Any) -> Path:
    """The config of `mixture` as a file."""
    lines = [f"{name} = {value}" for name, value in {"vocab_size": 300, "validation_share": 0.1, **settings}.items()]
    shares = [f'[source.{name}]\npath = "{name}.jsonl"\nshare = {share}' for name, share in (("one", 3), ("two", 1))]
    (root / "mix.toml").write_text("\n".join(["[prepare]", *lines, *shares]))
    return root / "mix.toml"


def texts(folder: Path, split: str = "train") -> list[str]:
    manifest, tokenizer = Manifest.read(folder), Tokenizer.load(folder)
    documents = Documents(folder, split, manifest)
    return [tokenizer.decode(documents.document(index).tolist()) for index in range(len(documents))]


def save_model(folder: Path, loaded: LoadedModel, *, dtype: torch.dtype | None = None, replace: bool = False) -> None:
    """Write a model folder; `dtype` casts the weights. An existing folder is an error unless it may be replaced."""
    with written_beside(folder, replace) as temporary:
        for part, module in loaded.parts.named_children():
            state = {name: tensor.detach().to("cpu", dtype) for name, tensor in module.state_dict().items()}
            if part == BACKBONE:
                tensors = {hugging_face_name(name): tensor.contiguous() for name, tensor in state.items()}
                write_files(temporary, loaded.backbone.config, tensors, About(*loaded[1:]))
            else:
                save_tensors(state, temporary / part_file(part))


def problems(split: Split, count: int, **settings: Any) -> list[Item]:
    """The first sums of a split, given values of `[corpus]`."""
    return list(itertools.islice(problems_of(CorpusConfig(**settings), split), count))
