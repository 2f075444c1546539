"""The sandbox: what passes, what does not and why, and that nothing and nobody is left behind."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import pytest

from freda.errors import FredaError
from freda.eval.tasks import sandbox
from freda.eval.tasks.sandbox import Isolation, Limits, Verdict, isolation, run_many, run_program

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox needs Linux")

SHORT = Limits(seconds=1.0, memory_mb=512, processes=16, output_kb=4)
LONGER = Limits(
    seconds=10.0, memory_mb=512, processes=16, output_kb=4
)  # for what ends by itself, on a busy machine too
TESTS = "assert f(2) == 4\n"
RIGHT = "def f(x):\n    return x + x\n"
WRONG = "def f(x):\n    return 7\n"


def run(program: str, tests: str = TESTS, limits: Limits = LONGER) -> Verdict:
    return run_program(textwrap.dedent(program), tests, limits)


def processes_with(marker: str) -> list[str]:
    found = []
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdigit() and marker.encode() in (folder / "cmdline").read_bytes():
                found.append(folder.name)
        except OSError:
            continue
    return found


def needs(granted: bool, what: str) -> None:
    if not granted:
        pytest.skip(f"this kernel does not grant {what} to this user")


# -- plain verdicts --------------------------------------------------------------------------------------------------


def test_right_and_wrong() -> None:
    good = run(RIGHT + "print('made')\n")
    assert good.passed and good.reason == "passed" and good.output == "made\n" and 0 < good.seconds < 10
    bad = run(WRONG, "assert f(2) == 4, 'twice two'\n")
    assert not bad.passed and bad.reason == "failed: AssertionError: twice two"
    assert 'File "<tests>", line 1' in bad.output and "inside.py" not in bad.output


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
        ("import ctypes", "failed: ImportError: _ctypes is not available in the sandbox"),
        ("class E(Exception):\n    def __str__(self): raise E\nraise E", "failed: E: (E when shown)"),
        ("x = 1", "failed: NameError: name 'f' is not defined"),
    ],
)
def test_programs_that_do_not_pass(program: str, reason: str) -> None:
    if "getppid" in program and os.geteuid() != 0 and not isolation().processes:
        pytest.skip("without a pid namespace an ordinary user's program can kill the first process")
    verdict = run(program)
    assert not verdict.passed and verdict.reason.startswith(reason), verdict


@pytest.mark.parametrize(
    "program",
    [
        "while True: pass",
        "import time; time.sleep(100)",
        "while True: print('x' * 1000)",
        "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
        "import signal, os, time\nif os.fork(): os.wait()\nos.setsid(); time.sleep(100)",
    ],
)
def test_endless_programs_are_stopped(program: str) -> None:
    verdict = run(program, limits=SHORT)
    assert verdict.reason == "time out after 1 s" and verdict.seconds < 1 + sandbox.GRACE
    assert len(verdict.output) <= 4096


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


# -- what the program can see and reach ------------------------------------------------------------------------------


def test_no_network() -> None:
    needs(isolation().network, "network namespaces")
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
    assert verdict.passed and "private" not in verdict.output and "} [] [" in verdict.output


def test_root_is_dropped() -> None:
    needs(os.geteuid() == 0, "root's rights (it is about root)")
    marker = Path(tempfile.mkdtemp()) / "kept"
    marker.write_text("mine")
    verdict = run(
        f"import os\nassert os.getuid() == os.geteuid() >= 64_000 and os.getgroups() == []\nopen({str(marker)!r}, 'w')"
    )
    assert "PermissionError" in verdict.reason and marker.read_text() == "mine"
    assert run("import os; os.setuid(0)").reason.startswith("failed: PermissionError")
    marker.unlink()
    marker.parent.rmdir()


LEAVE = """
import subprocess, os
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execvp("sleep", ["sleep", MARKER])
    os._exit(0)
subprocess.Popen(["sleep", MARKER], start_new_session=True)
"""


@pytest.mark.parametrize("granted", ["all", "nothing"])
@pytest.mark.parametrize("ending", [RIGHT, "while True: pass\n", "os._exit(3)\n"], ids=["passes", "endless", "exits"])
def test_nobody_is_left_behind(granted: str, ending: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Background children, in sessions of their own, end with the program; also where there are no namespaces."""
    if granted == "nothing":
        monkeypatch.setattr(sandbox, "isolation", lambda: Isolation((), False, False))
    marker = f"61.{os.getpid()}{time.monotonic_ns()}"
    verdict = run(LEAVE.replace("MARKER", repr(marker)) + ending, limits=SHORT if "while" in ending else LONGER)
    expected = {RIGHT: "passed", "os._exit(3)\n": "exited early"}.get(ending, "time out after 1 s")
    assert verdict.reason == expected, verdict
    deadline = time.monotonic() + 2  # the kernel ends a pid namespace in its own time
    while processes_with(marker) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not processes_with(marker)


def test_a_fork_bomb_without_namespaces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "isolation", lambda: Isolation((), False, False))
    verdict = run("import os\nwhile True:\n    try: os.fork()\n    except OSError: pass", limits=SHORT)
    assert verdict.reason == "time out after 1 s"
    assert not processes_with(str(sandbox.INSIDE))


# -- the secret ------------------------------------------------------------------------------------------------------

# What every thief does with what it found: write it everywhere, and leave before the tests can fail.
SPREAD = """
import os, sys
def spread(values):
    for value in values:
        for fd in range(64):
            try: os.write(fd, value if isinstance(value, bytes) else str(value).encode())
            except OSError: pass
    os._exit(0)
def inside(names):
    return [value for value in names.values() if isinstance(value, (bytes, str, list, dict))]
"""
THIEVES = {
    "forged": "spread(['passed', '+'])",
    "flood": "spread(['x' * 100_000])",
    "frames": """
found, frame = [], sys._getframe()
while frame:
    found += inside(frame.f_locals) + inside(frame.f_globals)
    frame = frame.f_back
spread(found)
""",
    "traceback": """
try: 1 / 0
except Exception as error: frame = error.__traceback__.tb_frame
found = []
while frame:
    found += inside(frame.f_locals)
    frame = frame.f_back
spread(found)
""",
    "other threads": "spread([v for frame in sys._current_frames().values() for v in inside(frame.f_locals)])",
    "lock by gc": """
import gc, types
for thing in gc.get_objects():
    if isinstance(thing, types.BuiltinMethodType) and thing.__name__ == "release":
        try: thing()
        except RuntimeError: pass
sys.exit(0)
""",
    "lock by referents": """
import gc
gc.get_referents(sys.modules)
import types
[thing() for thing in gc.get_referrers(types.BuiltinMethodType) if getattr(thing, "__name__", "") == "release"]
""",
    "modules": "spread([v for module in list(sys.modules.values()) for v in inside(vars(module))])",
    "descriptors": """
found = []
for fd in range(64):
    for way in (lambda: os.set_blocking(fd, False), lambda: found.append(os.read(fd, 9999)),
                lambda: found.append(os.pread(fd, 9999, 0)),
                lambda: found.append(open(f"/proc/self/fd/{fd}", "rb").read(99))):
        try: fd > 2 and way()
        except OSError: pass
spread(found)
""",
    "proc": """
found = []
for pid in ("self", "1", str(os.getppid()), str(os.getpid())):
    for name in ("mem", "environ", "cmdline", "fd/0", "fd/3"):
        try:
            with open(f"/proc/{pid}/{name}", "rb") as file: found.append(file.read(9999))
            print("opened", pid, name)
        except OSError: pass
spread(found)
""",
    "memory by a child": """
import subprocess
code = "import sys; open('/proc/' + sys.argv[1] + '/mem', 'rb'); print('opened', sys.argv[1], 'mem')"
for pid in ("1", str(os.getppid()), str(os.getpid())):
    subprocess.run([sys.executable, "-c", code, pid])
spread([])
""",
    "patches": """
import builtins, atexit, json, _thread, collections, operator
stay = lambda *a, **k: None
os._exit = sys.exit = builtins.exec = builtins.print = sys.excepthook = sys.unraisablehook = stay
os.write = lambda fd, data: len(data)
builtins.AssertionError = builtins.Exception = builtins.BaseException = SystemExit
collections.deque = operator.call = _thread.allocate_lock = builtins.map = stay
atexit.register(lambda: os.kill(os.getpid(), 0))
f = stay
""",
    "early end": """
for kind in object.__subclasses__():
    if kind.__name__ == "_End": kind.__del__ = lambda self: (self.call(), self.call())
def f(x): raise SystemExit
""",
    "late audit": "sys.addaudithook(lambda *a: spread(inside(sys._getframe(1).f_locals)))\ndef f(x): sys.exit(0)",
    "tracing": """
import threading
def trace(frame, *_):
    spread(inside(frame.f_locals)) if "secret" in frame.f_locals else None
    return trace
sys.settrace(trace); threading.settrace(trace); getattr(threading, "settrace_all_threads", threading.settrace)(trace)
def f(x): sys.exit(0)
""",
    "child that goes on": "if os.fork(): os._exit(0)\ndef f(x): return 4",
}


@pytest.mark.parametrize("name", THIEVES)
def test_a_pass_cannot_be_forged(name: str) -> None:
    verdict = run(SPREAD + THIEVES[name])
    assert not verdict.passed, verdict
    assert not [line for line in verdict.output.splitlines() if line.startswith("opened") and line.endswith("mem")]
    assert not verdict.reason.startswith(("failed: SyntaxError", "failed: NameError")), "the thief is broken"


def test_builtins_are_whole_when_the_tests_begin() -> None:
    verdict = run("import builtins\nbuiltins.abs = lambda x: 0\ndef f(x): return 9", "assert abs(f(2) - 4) < 1\n")
    assert verdict.reason == "failed: AssertionError"


# -- many, limits, mistakes ------------------------------------------------------------------------------------------


def test_many_keep_their_order() -> None:
    jobs = [(RIGHT if n % 3 else WRONG, TESTS + f"print({n})\n") for n in range(9)]
    verdicts = run_many(jobs, LONGER, workers=3)
    assert [verdict.passed for verdict in verdicts] == [bool(n % 3) for n in range(9)]
    assert [verdict.output for verdict in verdicts if verdict.passed] == [f"{n}\n" for n in range(9) if n % 3]
    assert run_many([]) == []


def test_user_ids_are_not_shared() -> None:
    assert len({sandbox._free_uid() for _ in range(100)}) == 100


@pytest.mark.parametrize("wrong", [{"seconds": 0}, {"memory_mb": 10}, {"processes": 1}, {"output_kb": 0}])
def test_limits_that_nothing_can_run_under(wrong: dict[str, int]) -> None:
    with pytest.raises(FredaError, match=f"{next(iter(wrong))} = .*choose"):
        Limits(**wrong)  # type: ignore[arg-type]


def test_a_sandbox_that_does_not_start_is_no_verdict(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "inside.py"
    broken.write_text("raise OSError('no room')")
    monkeypatch.setattr(sandbox, "INSIDE", broken)
    with pytest.raises(FredaError, match=r"(?s)the sandbox did not start \(exit status 1\): .*no room"):
        run(RIGHT)


def test_what_is_not_granted_is_said_once(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def refuse(*_: object, **__: object) -> subprocess.CompletedProcess[bytes]:
        return subprocess.CompletedProcess([], 1)

    isolation.cache_clear()
    try:
        with monkeypatch.context() as patch:
            patch.setattr(sandbox.subprocess, "run", refuse)
            assert isolation() == isolation() == Isolation((), False, False)
        assert capsys.readouterr().err.count("does not grant no network and a pid namespace") == 1
    finally:
        isolation.cache_clear()
