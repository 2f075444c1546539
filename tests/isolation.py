"""What tests of the sandbox need to know of this machine."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

from freda.errors import FredaError
from freda.eval.sandbox import run
from freda.eval.sandbox.run import check_ready, denial

WHY = denial() if sys.platform == "linux" else f"{sys.platform} is not Linux"
needs_namespaces = pytest.mark.skipif(bool(WHY), reason=f"this machine grants no namespaces ({WHY})")


def use_open_python(patch: pytest.MonkeyPatch) -> None:
    """Without isolation root's programs run as another user: use a Python that this one can reach, or skip the test."""
    own = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    for python in (sys.executable, shutil.which(own, path="/usr/local/bin:/usr/bin:/bin")):
        if python is None:
            continue
        patch.setattr(run, "PYTHON", python)
        try:
            return check_ready(isolated=False)
        except FredaError:
            continue
    pytest.skip("there is no Python that another user can reach")


def processes_with(marker: str) -> list[str]:
    """Processes whose command line has a text in it."""
    found = []
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdigit() and marker.encode() in (folder / "cmdline").read_bytes():
                found.append(folder.name)
        except OSError:
            continue
    return [pid for pid in found if pid != str(os.getpid())]
