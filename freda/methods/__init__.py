"""The methods by the name that the config and the command line use; mypy checks each against `Method`."""

from freda.config import MethodName
from freda.methods import autoregressive, block_diffusion, self_refine
from freda.methods.method import Method

METHODS: dict[MethodName, Method] = {
    "autoregressive": autoregressive,
    "block-diffusion": block_diffusion,
    "self-refine": self_refine,
}
