"""The sandbox: what passes, what does not and why, and that nothing and nobody is left behind."""

from __future__ import annotations

import os
import tempfile
import textwrap
import time
from pathlib import Path

import pytest

from freda.errors import FredaError
from freda.eval.sandbox import namespaces
from freda.eval.sandbox import run as sandbox
from freda.eval.sandbox.run import Job, Limits, Verdict, check_ready, denial, free_names, run_many, run_program
from tests.isolation import needs_namespaces, processes_with, use_open_python

pytestmark = needs_namespaces

SHORT = Limits(seconds=1.0, memory_mb=512, processes=16, output_kb=4)
LONGER = Limits(
    seconds=10.0, memory_mb=512, processes=16, output_kb=4
)  # for what ends by itself, on a busy machine too
TESTS = "assert f(2) == 4\n"
RIGHT = "def f(x):\n    return x + x\n"
WRONG = "def f(x):\n    return 7\n"


def run(program: str, tests: str = TESTS, limits: Limits = LONGER, *, isolated: bool = True) -> Verdict:
    return run_program(Job(textwrap.dedent(program), tests), limits, isolated=isolated)


# -- plain verdicts --------------------------------------------------------------------------------------------------


def test_right_and_wrong() -> None:
    good = run(RIGHT + "print('made')\n")
    assert good.passed and good.reason == "passed" and good.output == "made\n" and 0 < good.seconds < 10
    bad = run(WRONG, "assert f(2) == 4, 'twice two'\n")
    assert not bad.passed and bad.reason == "failed: AssertionError: twice two"
    assert 'File "<tests>", line 1' in bad.output and ".py" not in bad.output
    failed = run("def f(x):\n    return x / 0\n")
    assert failed.reason == "failed: ZeroDivisionError: division by zero" and ".py" not in failed.output
    assert 'File "<program>", line 2, in f' in failed.output and 'File "<tests>", line 1' in failed.output


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("import os; os._exit(0)", "exited early"),
        ("import sys; sys.exit(0)", "exited early"),
        ("raise SystemExit", "exited early"),
        ("def f(x): raise SystemExit(0)", "exited early"),
        ("import os; os.close(1); os.closerange(3, 64); os._exit(0)", "exited early"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "killed by signal 9"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGINT); import time; time.sleep(9)", "killed by signal 2"),
        ("import os; os.abort()", "killed by signal 6"),
        ("import os\ntry: os.kill(os.getppid(), 9)\nexcept OSError: pass\nf = abs", "failed: AssertionError"),
        ("x = [0] * 10**10", "out of memory"),
        ("x = []\nwhile True: x.append(bytes(10**6))", "out of memory"),
        ("def f(x): return f(x)", "failed: RecursionError: maximum recursion depth exceeded"),
        ("input()", "failed: EOFError: EOF when reading a line"),
        ("open('big', 'wb').write(bytes(2 * 10**6))", "failed: OSError: [Errno 27] File too large"),
        ("files = [open('x', 'w') for _ in range(100)]", "failed: OSError: [Errno 24] Too many open files: 'x'"),
        ("def f(x):", "failed: IndentationError: expected an indented block"),
        ("f = '\0'", "failed: "),
        ("f = '\ud800'", "failed: UnicodeEncodeError"),
        ("class E(Exception):\n    def __str__(self): raise E\nraise E", "failed: E: (E when shown)"),
        ("x = 1", "failed: NameError: name 'f' is not defined"),
    ],
)
def test_programs_that_do_not_pass(program: str, reason: str) -> None:
    verdict = run(program)
    assert not verdict.passed and verdict.reason.startswith(reason), verdict


@pytest.mark.parametrize(
    "program",
    [
        "import threading\ndef spin():\n    while True: pass\nthreading.Thread(target=spin).start()\n",
        "import os, shutil\nopen('a', 'w').close(); os.remove('a'); shutil.rmtree(os.getcwd(), ignore_errors=True)\n",
        "import sys\nsys.stdout.close()\n",
        "import sys\nassert sys.stdin.read() == ''\n",
        "import os\nos.mkdir('closed'); open('closed/a', 'w'); os.chmod('closed', 0)\n",
        "import os\nfor _ in range(1500): os.mkdir('d'); os.chdir('d')\n",
        "from collections import namedtuple\nP = namedtuple('P', 'x')\nimport logging, traceback\n"
        "try: 1 / 0\nexcept ZeroDivisionError: logging.exception('no'); traceback.print_exc()\n",
        "import pickle\nfrom dataclasses import *\n@dataclass\nclass A:\n  x: int\npickle.loads(pickle.dumps(A(1)))\n",
        "if __name__ == '__main__': import json.tool, decimal, asyncio; asyncio.run(asyncio.sleep(0))\n",
        "from concurrent.futures import ThreadPoolExecutor\nlist(ThreadPoolExecutor(4).map(abs, [1, 2]))\n",
        "len = max = abs = None\n",
    ],
)
def test_odd_programs_that_pass(program: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # where no other program makes folders
    verdict = run(program + RIGHT)
    assert verdict.passed, verdict
    assert not list(tmp_path.glob("freda-sandbox-*")), "the working folder goes again"


def test_the_end_of_a_flood_is_kept() -> None:
    verdict = run("for i in range(100_000): print(i)\nimport sys; print('last', file=sys.stderr)\n" + RIGHT)
    assert (
        verdict.passed and len(verdict.output) <= 4096 and "99999\n" in verdict.output and "\n0\n" not in verdict.output
    )


# -- values ----------------------------------------------------------------------------------------------------------

VALUES = [
    *("None", "True", "-7", "10**5000", "-(2**1000)", "[2**1000, 1]", "0.1", "-0.0", "float('inf')", "1 + 2j"),
    *("'text'", "'\\ud800 \\0'", "b'\\xff'", "bytearray(b'a')", "range(3, 9, 2)", "(1, (2, [3]), 'x')", "[]", "()"),
    *("{1: 'a', (2, 3): [None]}", "{1, 'a', (2,)}", "frozenset({1})", "{'a': {'b': {}}}", "[[1, 'a'], [True, 1.5]]"),
]


@pytest.mark.parametrize("isolated", [True, False])
def test_values_keep_their_types(isolated: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """There and back again: what the tests hand over and what they get is the same, by value and by type."""
    if not isolated:
        use_open_python(monkeypatch)
    same = "import sys\nsys.set_int_max_str_digits(0)\n"
    tests = same + "".join(f"assert repr(f({one})) == repr({one}), {one!r}\n" for one in VALUES)
    verdict = run("def f(x): return x", tests, isolated=isolated)
    assert verdict.passed, verdict


NODES = """
class N:
    def __init__(self, x): self.x, self.left = x, None
def f(n): return n.x + (f(n.left) if n.left else 0)
"""
ERRORS = """
def f(x):
    if x: raise LookupError(x)
    raise type('Own', (KeyError,), {})('y')
"""
CAUGHT = """
for x in 0, 1:
    try: f(x)
    except LookupError as e: assert str(e) == ('1' if x else "'y'"), e
    else: assert 0
"""


@pytest.mark.parametrize(
    ("program", "tests"),
    [
        (
            "import enum\nclass E(enum.IntEnum):\n    a = 4\ndef f(x): return E.a",
            "assert f(2) == 4 and type(f(2)) is int",
        ),
        ("from collections import *\nf = Counter", "assert f('aab') == {'a': 2, 'b': 1}"),
        ("from collections import *\nf = namedtuple('P', 'x y')", "assert f(1, y=[2]) == (1, [2])"),
        ("class f(str):\n    def __eq__(self, other): return False\n    __hash__ = None", "assert f('a') == 'a'"),
        ("from fractions import Fraction as f", "assert f(1, 2) == 0.5 and f(1, 3) != 0.33"),
        ("from decimal import Decimal as f", "assert f('0.5') == 0.5"),
        ("def f(d): return d.keys()", "assert f({1: 2}) == {1}"),
        ("def f(n):\n    for i in range(n): yield [i]", "assert list(f(3)) == [[0], [1], [2]] and [2] in f(4)"),
        ("def f(x): return {x: lambda y: y + x}", "assert f(3)[3](4) == 7"),
        ("def f(x): return map(str, x)", "assert ','.join(f([1, 2])) == '1,2'"),
        ("class f:\n    def __init__(self, x): self.x = x\n    def g(self): return 2 * self.x", "assert f(2).g() == 4"),
        (NODES, "root = N(1)\nroot.left = N(2)\nroot.left.left = N(4)\nassert f(root) == 7 and root.left.x == 2"),
        (ERRORS, CAUGHT),
        ("def f(x): return b'\\xff'.decode()", "try: f(1)\nexcept ValueError: pass\nelse: assert 0"),
        ("def f(*a, **k): return a, k", "assert f(1, *[2], c=3) == ((1, 2), {'c': 3})"),
        ("def sum(a, b): return a * b\ndef f(x): return sum(x, x)", "assert f(3) == 9 and sum([1, 2]) == 3"),
        ("f = len", "assert f('abc') == 3"),
        ("x = 5\ndef f(): return [x]", "assert f() == [x]"),
    ],
)
def test_objects_and_errors(program: str, tests: str) -> None:
    verdict = run(program, tests)
    assert verdict.passed, verdict


def test_tests_call_numpy() -> None:
    pytest.importorskip("numpy")
    tests = "assert f([1, 2]) == 3 and abs(g(1) - 0.5) < 1e-9 and h(1) == True and isinstance(f([1]), int)"
    program = (
        "import numpy as np\ndef f(x): return np.sum(x)\ndef g(x): return np.float64(x / 2)\nh = lambda x: np.bool_(x)"
    )
    verdict = run(program, tests, Limits(seconds=20, processes=64))
    assert verdict.passed, verdict


def test_what_the_tests_change_is_their_own() -> None:
    """Arguments are copies; a function of the tests cannot be sent."""
    assert run("def f(x): x.append(1)", "x = []\nf(x)\nassert x == []").passed
    odd = run("def f(x): return x(1)", "f(lambda x: x)")
    assert odd.reason == "failed: TypeError: the tests hand the program a function, which cannot be sent"


def test_a_program_that_ends_is_lost_whatever_the_tests_catch() -> None:
    tests = "try: f(1)\nexcept BaseException: pass\n"
    assert run("def f(x): raise ValueError", tests).passed
    assert run("import os\ndef f(x): os._exit(0)", tests).reason == "exited early"
    assert run("def f(x):\n    while True: pass", tests, SHORT).reason == "time out after 1 s"


def test_names() -> None:
    tests = "import math\ny = 3\ndef check(c, z=sum):\n    for i in c: assert abs(f(i)) == math.pi + k\n"
    tests += "    [g(j) for j in c]\ncheck(x)"
    assert free_names(tests) == ("f", "g", "k", "x")
    assert free_names("assert sum(1, 2) == 3") == () and free_names("sum(1)", "def sum(x): pass") == ("sum",)
    assert free_names("assert (") == ()
    taken = run_program(Job("def sum(a): return 9", "assert sum(1) == 9", ("sum",)))
    assert taken.passed and not run("def sum(a): return 9", "assert sum([1]) == 9").passed


def test_what_is_given_is_trusted() -> None:
    job = Job(
        "def g(x): return 7\ndef f(x): return g(x)", "assert g(1) == 2 and f(1) == 7", ("f",), "def g(x): return x + 1"
    )
    assert run_program(job).passed


# -- what the program can see and reach ------------------------------------------------------------------------------


def test_no_network() -> None:
    verdict = run(
        """
        import socket
        assert [name for _, name in socket.if_nameindex()] == ["lo"], "a network"
        socket.create_connection(("127.0.0.1", 22), timeout=1)
        """
    )
    assert verdict.reason == "failed: OSError: [Errno 101] Network is unreachable"


def test_environment_and_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "private")
    verdict = run("import os, sys\nprint(dict(os.environ), os.listdir(), sys.argv, os.getuid())\n" + RIGHT)
    assert verdict.passed and "private" not in verdict.output and "} [] ['']" in verdict.output


def test_it_can_do_what_programs_do() -> None:
    """Other programs, shared memory, temporary files, clocks and random numbers."""
    verdict = run(
        """
        import subprocess, tempfile, time, os, random, multiprocessing, sys, threading, signal
        assert subprocess.run(["/bin/sh", "-c", "echo $((2 + 2))"], capture_output=True, text=True).stdout == "4\\n"
        assert subprocess.run([sys.executable, "-c", "import json"]).returncode == 0
        with tempfile.TemporaryDirectory() as folder: open(folder + "/a", "w").write("b")
        multiprocessing.Lock(), os.urandom(3), time.sleep(0), signal.signal(signal.SIGTERM, signal.SIG_IGN)
        open("/dev/null", "w").write("x")
        f = lambda x: x + x
        """
    )
    assert verdict.passed, verdict


LEAVE = """
import subprocess, os
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execvp("sleep", ["sleep", MARKER])
    os._exit(0)
subprocess.Popen(["sleep", MARKER], start_new_session=True)
"""


@pytest.mark.parametrize("isolated", [True, False])
@pytest.mark.parametrize("ending", [RIGHT, "while True: pass\n", "os._exit(3)\n"], ids=["passes", "endless", "exits"])
def test_nobody_is_left_behind(isolated: bool, ending: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Background children, in sessions of their own, end with the program; also where there are no namespaces."""
    if not isolated:
        use_open_python(monkeypatch)
    marker = f"61.{os.getpid()}{time.monotonic_ns()}"
    limits = SHORT if "while" in ending else LONGER
    verdict = run(LEAVE.replace("MARKER", repr(marker)) + ending, limits=limits, isolated=isolated)
    expected = {RIGHT: "passed", "os._exit(3)\n": "exited early"}.get(ending, "time out after 1 s")
    assert verdict.reason == expected, verdict
    deadline = time.monotonic() + 2  # the kernel ends a pid namespace in its own time
    while processes_with(marker) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not processes_with(marker)


# -- without isolation -----------------------------------------------------------------------------------------------


def test_programs_are_not_run_where_nothing_isolates_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the kernel refuses is in the message; only those who ask for it run without."""
    use_open_python(monkeypatch)
    monkeypatch.setattr(sandbox, "denial", lambda: "unshare: Operation not permitted")
    with pytest.raises(FredaError, match=r"not run.*\(unshare: Operation not permitted\); .*--no-isolation"):
        run_many([Job(RIGHT, TESTS)], LONGER)
    verdicts = run_many([Job(RIGHT, TESTS), Job(WRONG, TESTS)], LONGER, isolated=False)
    assert [verdict.passed for verdict in verdicts] == [True, False]


def test_what_is_denied_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that may not make namespaces finds out by trying."""
    refuse = "def refuse(name, *_): raise PermissionError(1, name + ': Operation not permitted')\n"
    break_it = f"import freda.eval.sandbox.namespaces as n\n{refuse}n.unshare = lambda user: refuse('unshare')\n"
    monkeypatch.setattr(sandbox, "INSIDE", sandbox.INSIDE.replace("main()", f"exec({break_it!r}); main()"))
    denial.cache_clear()
    try:
        assert denial() == "[Errno 1] unshare: Operation not permitted"
    finally:
        denial.cache_clear()


def test_the_root_is_changed_in_a_namespace_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Called on the host, nothing of it may happen."""
    called: list[str] = []
    monkeypatch.setattr(namespaces, "_call", lambda name, *_: called.append(name))
    with pytest.raises(OSError, match="not in a namespace of its own"):
        namespaces.change_root([], 1)
    assert called == []
    with pytest.raises(OSError, match="no namespace was made"):
        namespaces.unshare(user=False)
    assert called == ["unshare"]


@pytest.mark.parametrize(
    "program",
    [
        "import os\nd = os.getcwd()\ntry: os.rename(d, d + '-moved'); os.symlink(TARGET, d)\nexcept OSError: pass\n",
        "import os\nos.symlink(TARGET, 'a'); os.mkdir('b'); os.symlink(TARGET, 'b/c'); os.chmod('b', 0)\n",
        "import os\nfor _ in range(1500): os.mkdir('d'); os.chdir('d')\n",
        "import os\nos.mkdir('a'); os.chmod('a', 0); os.chmod('.', 0)\n",
    ],
)
def test_folders_are_removed_and_no_link_is_followed(
    program: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    use_open_python(monkeypatch)
    with tempfile.TemporaryDirectory() as outside:
        target, folders = Path(outside) / "kept", Path(outside) / "folders"
        for folder in (Path(outside), target, folders):
            folder.mkdir(exist_ok=True)
            folder.chmod(0o755)
        (target / "file").write_text("mine")
        (target / "file").chmod(0o444)
        monkeypatch.setattr(tempfile, "tempdir", str(folders))
        verdict = run(program.replace("TARGET", repr(str(target))) + RIGHT, isolated=False)
        assert verdict.passed, verdict
        assert not list(folders.iterdir()) and (target / "file").stat().st_mode & 0o777 == 0o444
        assert target.stat().st_mode & 0o777 == 0o755 and (target / "file").read_text() == "mine"


def test_a_fork_bomb_without_namespaces(monkeypatch: pytest.MonkeyPatch) -> None:
    use_open_python(monkeypatch)
    bomb = "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass"
    marker = f"{os.getpid()}{time.monotonic_ns()}"
    monkeypatch.setattr(sandbox, "INSIDE", f"{sandbox.INSIDE}  # {marker}")
    assert run(bomb, limits=SHORT, isolated=False).reason == "time out after 1 s"
    assert not processes_with(marker)


def test_a_python_that_others_cannot_reach_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    python = tmp_path / "home" / "python"
    python.parent.mkdir(mode=0o700)
    python.touch()
    monkeypatch.setattr(sandbox, "PYTHON", str(python))
    with pytest.raises(FredaError, match=r"as another user, who cannot enter .*; use a Python that everyone can read"):
        check_ready(isolated=False)


# -- many, limits, mistakes ------------------------------------------------------------------------------------------


def test_many_keep_their_order() -> None:
    jobs = [Job(RIGHT if n % 3 else WRONG, TESTS + f"print({n})\n") for n in range(9)]
    verdicts = run_many(jobs, LONGER, workers=3)
    assert [verdict.passed for verdict in verdicts] == [bool(n % 3) for n in range(9)]
    assert [verdict.output for verdict in verdicts if verdict.passed] == [f"{n}\n" for n in range(9) if n % 3]
    assert run_many([]) == []


def test_user_ids_are_not_shared() -> None:
    assert len({uid for _ in range(100) for uid in sandbox._free_uids()}) == 200


@pytest.mark.parametrize(
    "wrong", [{"seconds": 0}, {"memory_mb": 10}, {"disk_mb": 0}, {"processes": 1}, {"output_kb": 0}]
)
def test_limits_that_nothing_can_run_under(wrong: dict[str, int]) -> None:
    with pytest.raises(FredaError, match=f"{next(iter(wrong))} = .*choose"):
        Limits(**wrong)  # type: ignore[arg-type]


def test_a_sandbox_that_does_not_start_is_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "INSIDE", "raise OSError('no room')")
    with pytest.raises(FredaError, match=r"(?s)the sandbox did not start \(exit status 1\): .*no room"):
        run(RIGHT)
    with pytest.raises(FredaError, match="did not start"):
        run_many([Job(RIGHT, TESTS)] * 3, workers=2)


def test_an_interrupted_call_ends_its_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Ctrl-C does: one raises, all that run are killed, and none is started any more."""
    real, begun = sandbox.run_program, time.monotonic()

    def raise_at_the_last(job: Job, **options: object) -> Verdict:
        if job.program:
            return real(job, **options)  # type: ignore[arg-type]
        time.sleep(0.5)
        raise KeyboardInterrupt

    monkeypatch.setattr(sandbox, "run_program", raise_at_the_last)
    with pytest.raises(KeyboardInterrupt):
        run_many([Job("", ""), *[Job("while True: pass", TESTS)] * 9], LONGER, workers=3)
    assert time.monotonic() - begun < 3
