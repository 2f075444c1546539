"""The methods by the name that the config and the command line use; mypy checks each against `Method`."""

from freda.methods import autoregressive, best_of_n, block_diffusion, self_refine
from freda.methods.config import MethodName
from freda.methods.method import Method

METHODS: dict[MethodName, Method] = {
    "autoregressive": autoregressive,
    "block-diffusion": block_diffusion,
    "self-refine": self_refine,
    "best-of-n": best_of_n,
}
