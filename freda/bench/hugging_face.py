"""`generate` of Hugging Face's transformers over the weights of one of our models, for `freda bench decode`.

The model of transformers is built without storage and gets our tensors themselves, so no weight is held twice. Its
greedy text is that of our autoregressive decoder, which alone never writes BLANK. It runs with its defaults: its own
attention, a cache that grows, no compilation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from freda.bench.rates import now
from freda.folders.hugging_face import EMBEDDING, HEAD, hugging_face_config, hugging_face_name
from freda.model.transformer import Transformer


class Timed(NamedTuple):
    """The tokens of a call, and how long it took."""

    tokens: list[list[int]]  # the new ones
    prefill: float  # seconds, up to the first token of every text: one forward
    passes: float  # seconds for the tokens after it, a forward for each


def version() -> str | None:
    """The release of transformers; None where it is not installed."""
    try:
        import transformers
    except ImportError:
        return None
    return str(transformers.__version__)


def borrowed(model: Transformer) -> Any:
    """Our model as one of transformers, over our own weights; no token ends a text."""
    import transformers

    values = hugging_face_config(model.config) | {"bos_token_id": None, "eos_token_id": None}
    config = transformers.AutoConfig.for_model(values.pop("model_type"), **values)
    state = {hugging_face_name(name): weight for name, weight in model.state_dict().items()}
    state.setdefault(HEAD, state[EMBEDDING])
    with torch.device("meta"):
        theirs = transformers.AutoModelForCausalLM.from_config(config, dtype=state[EMBEDDING].dtype)
    theirs.load_state_dict(state, assign=True)
    for name, _ in list(theirs.named_buffers()):  # the rotary frequencies, which no state holds
        place, _, last = name.rpartition(".")
        assert last.endswith("inv_freq"), f"transformers has a buffer {name} that is not known here"
        setattr(theirs.get_submodule(place), last, model.inv_freq.clone())
    return theirs.eval()


def timed_generate(theirs: Any, prompts: Sequence[Sequence[int]], new_tokens: int) -> Timed:
    """Continue prompts of one length as one batch, greedily, by exactly so many tokens."""
    import transformers

    ids = torch.tensor(prompts, device=theirs.device)
    goes_on = torch.zeros(len(ids), dtype=torch.bool, device=ids.device)
    marks: list[float] = []

    def first_token(ids: Tensor, scores: Tensor, **more: object) -> Tensor:
        """A stopping criterion that never stops, and notes when the first token was there."""
        if not marks:
            marks.append(now(ids.device))
        return goes_on

    greedy = transformers.GenerationConfig(max_new_tokens=new_tokens, do_sample=False, use_cache=True)
    criteria = transformers.StoppingCriteriaList([first_token])
    begun, every = now(ids.device), torch.ones_like(ids)
    made = theirs.generate(ids, attention_mask=every, generation_config=greedy, stopping_criteria=criteria)
    ended = now(ids.device)
    tokens: list[list[int]] = made[:, ids.shape[1] :].tolist()
    assert all(len(text) == new_tokens for text in tokens), f"generate made {len(tokens[0])} of {new_tokens} tokens"
    return Timed(tokens, marks[0] - begun, ended - marks[0])
