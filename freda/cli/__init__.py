"""The command line: parse, call, print. Answers go to stdout, everything else to stderr."""

from freda.cli.app import app, main, run

# Each module adds its commands to the app; `--help` lists them in this order.
from freda.cli import train  # isort: skip
from freda.cli import decode  # isort: skip
from freda.cli import folders  # isort: skip
from freda.cli import evaluate  # isort: skip
from freda.cli import bench  # isort: skip

__all__ = ["app", "bench", "decode", "evaluate", "folders", "main", "run", "train"]
