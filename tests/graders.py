"""Graders that fail, in a module that imports nothing: each process that runs one imports it first."""

from __future__ import annotations

import os
import time


def die_of_seven(gold: str, answer: str) -> bool:
    """End the process at a 7, raise at an x."""
    if "7" in answer:
        os._exit(3)
    if answer == "x":
        raise RecursionError("too deep")
    return True


def hang_on_seven(gold: str, answer: str) -> bool:
    """Never return at a 7."""
    while "7" in answer:
        time.sleep(0.1)
    return True
