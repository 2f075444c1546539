"""Write the lock files: every package that `make` installs, at one version, with the hashes of its published files.

From the root of the repository, with the simple index that is to be asked for hashes: `python locks/write.py INDEX`.
`constraints.txt` says which versions of what freda asks for directly; pip finds the rest. torch is in no lock: it is
published in builds for CPUs and for several versions of CUDA, with libraries of its own; `constraints.txt` fixes its
version.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
BUILD = ("hatchling", "editables")  # what makes the package itself
NOT_LOCKED = ("torch", "freda")
LINUX = ("triton",)  # published for Linux alone
LOCKS = {"package.txt": ".", "dev.txt": ".[dev]"}
LINK = re.compile(r'#sha256=([0-9a-f]{64})"[^>]*>\s*([^<\s]+)')


def resolved(wanted: str) -> list[dict[str, Any]]:
    """What pip would install into an empty environment."""
    with tempfile.NamedTemporaryFile(suffix=".json") as report:
        asked = ("--dry-run", "--ignore-installed", "--quiet", "--report", report.name, "-c", "constraints.txt")
        subprocess.run([sys.executable, "-m", "pip", "install", *asked, wanted, *BUILD], check=True, cwd=HERE.parent)
        return list(json.loads(Path(report.name).read_text())["install"])


def hashes(name: str, version: str, found: dict[str, Any]) -> list[str]:
    """The hashes of all files of a release, for every platform, and of the file that pip has found."""
    with urllib.request.urlopen(f"{sys.argv[1].rstrip('/')}/{name}/") as answer:
        files = LINK.findall(answer.read().decode("utf-8"))
    start = (f"{name}-{version}-", f"{name}-{version}.tar", f"{name}-{version}.zip")
    own = [hash_ for hash_, file in files if file.lower().replace("_", "-").startswith(start)]
    return sorted({*own, found["download_info"]["archive_info"]["hashes"]["sha256"]})


def main() -> None:
    """Write all of them."""
    for file, wanted in LOCKS.items():
        lines = [
            f"# {wanted} of constraints.txt, by locks/write.py; pip install --require-hashes --no-deps -r locks/{file}"
        ]
        for found in sorted(resolved(wanted), key=lambda one: one["metadata"]["name"].lower()):
            name, version = found["metadata"]["name"].lower().replace("_", "-"), found["metadata"]["version"]
            if name in NOT_LOCKED or name.startswith(("nvidia-", "cuda-")):
                continue
            marker = ' ; sys_platform == "linux"' if name in LINUX else ""
            lines.append(f"{name}=={version}{marker} \\")
            lines.append(" \\\n".join(f"    --hash=sha256:{one}" for one in hashes(name, version, found)))
        (HERE / file).write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
