"""Names that moved to `tests/helpers.py`; delete this file when no test imports it."""

from tests.helpers import write_lines, written

__all__ = ["write_lines", "written"]
