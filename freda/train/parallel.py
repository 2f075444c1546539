"""Training with several processes, each with a part of the weights: FSDP2 around a model that knows nothing of it.

`torchrun` starts the processes; `processes` joins them, and `Ranks` is what the loop knows of them. One process has no
process group and takes none of the paths below.

What is sharded is not the Transformer but a call of a method on it: `Root(model)(method.loss, batch, ...)`. A method
uses the embedding, the head and the layers by themselves, in several forwards before one backward. `Root` is the
outermost FSDP module: embedding, final norm and head (and the scorer's small parts) are gathered for the whole call,
and their gradients are summed once, at the end of its backward, because the call has no input with a gradient. Every
`Layer` is gathered for each of its forwards. Each of its two backwards in a group, the draft half's and the clean
half's, sums its gradient over the ranks: what adds up is a shard in fp32, not the whole gradient on each GPU.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from freda.errors import AgreedError, FredaError, require
from freda.model.parts import BACKBONE, Part, Parts
from freda.model.transformer import Layer

T = TypeVar("T")

# A layer returns keys and values as views; nothing changes them in place, which is what FSDP warns of.
warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor", category=UserWarning)


@dataclass(frozen=True)
class Ranks:
    """The processes of a run as one of them sees them. All methods but `first` are called by all ranks together."""

    rank: int = 0
    world: int = 1
    saving: dist.ProcessGroup | None = None  # of the threads that write checkpoints, beside the steps

    @property
    def first(self) -> bool:
        """Whether this is the rank that prints and writes."""
        return self.rank == 0

    def gather(self, vector: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
        """The vectors (n,) of all ranks, (world, n), from device to device."""
        if self.world == 1:
            return vector[None]
        every = [torch.empty_like(vector) for _ in range(self.world)]
        dist.all_gather(every, vector, group=group)
        return torch.stack(every)

    def tell(self, numbers: Sequence[int], group: dist.ProcessGroup | None = None) -> list[list[int]]:
        """The numbers of all ranks, by rank. They go from host to host: no GPU waits for them."""
        told: list[list[int]] = self.gather(torch.tensor(numbers, dtype=torch.int64), group).tolist()
        return told

    def exchange(self, value: T, group: dist.ProcessGroup | None = None) -> list[T]:
        """The values of all ranks, by rank."""
        every: list[T] = [value] * self.world
        if self.world > 1:
            dist.all_gather_object(every, value, group=group)
        return every

    def total(self, numbers: Tensor) -> Tensor:
        """The sums over all ranks of `numbers` (n,), from device to device: no host waits for a GPU."""
        if self.world > 1:
            numbers = numbers.clone()
            dist.all_reduce(numbers)
        return numbers

    def agree(self, work: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
        """What `work` returns here. If it fails on one rank, all raise the error: none is left waiting for another."""
        if self.world == 1:
            return work()
        problem: Exception | None = None
        try:
            result = work()
        except (FredaError, OSError, SafetensorError) as error:
            problem = error
        if not any(failed for (failed,) in self.tell([problem is not None], group)):
            return result
        problems = self.exchange(None if problem is None else _words(problem), group)
        first = next(rank for rank, words in enumerate(problems) if words is not None)
        where = "" if len(set(problems)) == 1 else f"rank {first}: "
        raise AgreedError(f"{where}{problems[first]}") from problem


def _words(error: Exception) -> str:
    return f"{error.strerror}: {error.filename}" if isinstance(error, OSError) and error.filename else str(error)


@contextlib.contextmanager
def processes() -> Iterator[Ranks]:
    """Join the processes that torchrun has started, each with the GPU of its number; alone, do nothing."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield Ranks()
        return
    gpu, gpus = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if gpu < gpus:
        torch.cuda.set_device(gpu)
    dist.init_process_group("cpu:gloo,cuda:nccl" if gpus else "gloo")
    ranks = Ranks(dist.get_rank(), dist.get_world_size(), dist.new_group(backend="gloo"))
    try:
        yield ranks
    except AgreedError:
        dist.destroy_process_group()
        raise
    dist.destroy_process_group()  # not after other errors: ranks that have not met them may be in a collective


def check_gpu(device: torch.device, ranks: Ranks) -> None:
    """Every process on a GPU needs its own."""
    here, gpus = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), torch.cuda.device_count()
    odd = f"{here} processes were started on a node with {gpus} GPUs; use torchrun --nproc-per-node {gpus}"
    require(device.type != "cuda" or ranks.world == 1 or here <= gpus, odd)


class Root(nn.Module):
    """A call of a function of the model as one module, so that it can be sharded from outside."""

    def __init__(self, parts: Parts) -> None:
        super().__init__()
        self.parts = parts
        self.copies: dict[Tensor, Tensor] = {}  # the bf16 copy of each weight that has one
        self._versions: dict[Tensor, int] = {}  # of each copied weight, as it was copied

    @property
    def sharded(self) -> bool:
        """Whether each rank has a part of the weights."""
        return isinstance(self, FSDPModule)

    def forward(self, function: Callable[..., T], *arguments: object) -> T:
        """`function(parts, *arguments)`."""
        return function(self.parts, *arguments)

    def in_bfloat16(self, function: Callable[..., T], *arguments: object) -> T:
        """`function(parts, *arguments)` with bf16 copies of the weights (M17), where the gradients of all forwards add
        up. Autocast would cast the weights anew in every forward and backward, and sum the residual stream in fp32."""
        result: T = torch.func.functional_call(self, self._fresh_copies(), (function, *arguments))
        return result

    def _fresh_copies(self) -> dict[str, Tensor]:
        """The copies by name, those made anew whose weight has been written to since."""
        exact = self.parts.exact()
        weights: Iterator[tuple[str, Tensor]] = self.parts.named_parameters()
        rounded = {f"parts.{name}": weight for name, weight in weights if name not in exact}
        for weight in rounded.values():
            if weight not in self.copies:
                copy = torch.empty_like(weight, dtype=torch.bfloat16)
                self.copies[weight] = copy.requires_grad_(weight.requires_grad)
        stale = [weight for weight in rounded.values() if self._versions.get(weight) != weight._version]
        if stale:
            with torch.no_grad():
                torch._foreach_copy_([self.copies[weight] for weight in stale], stale)
        self._versions |= {weight: weight._version for weight in stale}
        return {name: self.copies[weight] for name, weight in rounded.items()}

    def outdate_copies(self) -> None:
        """The weights have changed, and their versions may not say so: the library's fused optimizer leaves them."""
        self._versions.clear()

    def widen_gradients(self) -> None:
        """Add the gradients of the copies to those of the weights, in fp32."""
        with torch.no_grad():
            for weight, copy in self.copies.items():
                if copy.grad is not None:
                    weight.grad = copy.grad.float() if weight.grad is None else weight.grad.add_(copy.grad)
                    copy.grad = None


def shard(root: Root, dtype: str, device: torch.device, ranks: Ranks, *, reshard: bool) -> None:
    """Leave each rank its part of every weight, whether it has storage yet or not. With bfloat16, weights are gathered
    in it, those of small parts excepted, and gradients are summed in fp32."""
    mesh = init_device_mesh(device.type, (ranks.world,))
    exact = MixedPrecisionPolicy(cast_forward_inputs=False)
    half = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    policy = half if dtype == "bfloat16" else exact
    names = root.parts.exact()
    for name, module in list(root.parts.named_modules()):
        if isinstance(module, Layer):
            own = exact if all(f"{name}.{weight}" in names for weight, _ in module.named_parameters()) else policy
            fully_shard(module, mesh=mesh, mp_policy=own, reshard_after_forward=reshard)
    for part, module in root.parts.named_children():
        if part != BACKBONE:
            fully_shard(module, mesh=mesh, mp_policy=exact, reshard_after_forward=False)
    fully_shard(root, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    for module in sharded(root):  # gradients are added: losses are divided by the labels of all ranks already
        module.set_force_sum_reduction_for_comms(True)
        module.set_gradient_divide_factor(1.0)


def sharded(root: Root) -> list[FSDPModule]:
    """The modules of which each rank has a part."""
    return [module for module in root.modules() if isinstance(module, FSDPModule)]


def own_rows(weight: Tensor) -> Part:
    """The rows of a weight that this rank holds, which are all where it is not sharded. FSDP cuts the rows as
    `torch.chunk` does: equal pieces, of which the last may be short or missing."""
    first = 0
    if isinstance(weight, DTensor):
        mesh, rows = weight.device_mesh, weight.shape[0]
        first = min(mesh.get_local_rank() * -(-rows // mesh.size()), rows)
    return Part(own_part(weight.detach()), first)


def own_part(tensor: Tensor) -> Tensor:
    """This rank's part of a sharded tensor; all of a plain one."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
