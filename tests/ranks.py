"""Names that moved to `tests/helpers.py`; delete this file when no test imports it."""

from tests.helpers import fork, run_ranks

__all__ = ["fork", "run_ranks"]
