"""The code benchmarks: rows of HumanEval, HumanEval+ and MBPP as (program, tests) for the sandbox.

Rows are the published ones, as JSON gives them. Nothing here runs a program; `freda.eval.sandbox.run_many` does.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

HUMANEVAL_STOPS = ("\nclass", "\ndef", "\n#", "\nif", "\nprint")

# The tests of HumanEval+, as evalplus has them: the reference computes what is expected (in names of its own), and
# floats may differ by atol, or by 1e-6 where the row says 0. Builtins come from the module, since the program may use
# their names for its own; inputs are read anew, since functions change them. One zero of a polynomial is as good as
# another, so find_zero is tested by what it is to achieve: a residual of at most atol.
PLUS_TESTS = """
def _freda_check(candidate, reference, inputs, entry_point, atol):
    import json
    from builtins import abs, all, dict, enumerate, exec, float, int, isinstance, len, list, tuple, type, zip

    def close(out, expected, allowed):
        if isinstance(expected, (list, tuple)):
            same = type(out) is type(expected) and len(out) == len(expected)
            return same and all([close(a, b, allowed) for a, b in zip(out, expected)])
        if out == expected or not isinstance(expected, (int, float)) or not isinstance(out, (int, float)):
            return out == expected
        return abs(out - expected) <= allowed + 1e-7 * abs(expected) or (out != out and expected != expected)

    def right(given, out, expected):
        if entry_point == "find_zero":
            return isinstance(out, (int, float)) and abs(oracle["poly"](*given, out)) <= atol
        parts = expected if isinstance(expected, (list, tuple)) else [expected]
        floats = len(parts) > 0 and all([isinstance(part, float) for part in parts])
        if atol or floats:
            return out == expected or close(out, expected, atol or 1e-6)
        return out == expected

    oracle = dict(__name__="oracle")
    exec(reference, oracle)
    wanted = [oracle[entry_point](*given) for given in json.loads(inputs)]
    for number, (given, kept) in enumerate(zip(json.loads(inputs), json.loads(inputs))):
        out = candidate(*given)
        assert right(kept, out, wanted[number]), f"input {number}: {out!r:.80} is not {wanted[number]!r:.80}"

"""


def humaneval_program(row: Mapping[str, Any], completion: str) -> tuple[str, str]:
    """Prompt and completion; the row's test, called on the function asked for."""
    return row["prompt"] + completion, f"{row['test']}\ncheck({row['entry_point']})\n"


def humanevalplus_program(row: Mapping[str, Any], completion: str) -> tuple[str, str]:
    """Prompt and completion; a comparison with the reference on all inputs of the row."""
    inputs = json.dumps([*row["base_input"], *row["plus_input"]])
    reference = row["prompt"] + row["canonical_solution"]
    name = row["entry_point"]
    call = f"_freda_check({name}, {reference!r}, {inputs!r}, {name!r}, {row['atol']!r})\n"
    return row["prompt"] + completion, PLUS_TESTS + call


def mbpp_program(row: Mapping[str, Any], completion: str) -> tuple[str, str]:
    """The completion, which is all of the program; the row's asserts.

    The set-up of rows 367 and 927, the only ones that have one, makes trees of the program's own class `Node`: it must
    come after the program. Before it, as in other harnesses, these two references fail their own tests.
    """
    return completion, "\n".join([row["test_setup_code"], *row["test_list"], ""])
