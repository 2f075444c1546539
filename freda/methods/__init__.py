"""The methods by the name that the config and the command line use."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import cast

from freda.config import MethodName
from freda.methods import autoregressive, block_diffusion, self_refine
from freda.methods.method import Method

METHODS: Mapping[MethodName, Method] = MappingProxyType(
    {
        "autoregressive": cast(Method, autoregressive),
        "block-diffusion": cast(Method, block_diffusion),
        "self-refine": cast(Method, self_refine),
    }
)
