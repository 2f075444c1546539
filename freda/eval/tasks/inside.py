"""The inner half of the sandbox: the script that `sandbox.py` starts in a fresh interpreter for every program.

It reads the program, the tests, the limits and a secret from its standard input, takes its rights away and forks. The
first process (process 1 where there is a pid namespace) keeps the time and ends what the program leaves behind. The
second runs the program, then the tests, and writes the secret to the result socket if both came to an end.

The program shares a process with the secret, so the secret is where Python code does not reach:

- Program and tests run in a thread whose lowest frame is the program's own: no `f_back` leads to the main thread, which
  keeps the secret in a local variable and waits.
- That both came to an end is not said by Python code that could be called early or replaced: a chain of C functions
  (`deque(map(call, stages))`) runs program, tests and last the release of a lock that no name leads to. `os._exit`,
  `sys.exit`, an exception, a signal: each ends the chain before.
- An audit hook, which cannot be taken out again, refuses what finds objects without a name: `gc.get_objects` and its
  like, `sys._current_frames`, tracing of other threads, subinterpreters, ctypes.
- The process is not dumpable: `/proc/PID/mem` and ptrace are closed, also to children with the same user id.

Nothing here imports freda, and little is imported at all: start-up is most of the cost of a short program.
"""

from __future__ import annotations

import _thread
import builtins
import collections
import contextlib
import functools
import json
import operator
import os
import resource
import signal
import sys
import time
import types
from collections.abc import Callable
from typing import Any, NoReturn

TIMED_OUT = 124  # exit status of the first process when time is up, as that of the program `timeout`
SIGNALLED = 128  # plus the signal's number, as a shell says it
PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER = 4, 36
STARTED = b"+"  # first byte of the result socket: what fails before it is the sandbox's fault, not the program's
STACK = 64 * 2**20  # of the program's thread: deep recursion is to end in RecursionError, not in a signal


def main() -> NoReturn:
    """Read what to do, take rights away, start the program and wait for its end."""
    with open(0, "rb", closefd=False) as file:
        job = json.load(file)
    with open(os.devnull, "rb") as empty:
        os.dup2(empty.fileno(), 0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the program dies of it; KeyboardInterrupt would come out here
    signal.signal(signal.SIGALRM, _time_is_up)
    signal.setitimer(signal.ITIMER_REAL, job["seconds"])
    for name, value in job["limits"].items():
        limit = getattr(resource, name)
        highest = resource.getrlimit(limit)[1]
        value = value if highest == resource.RLIM_INFINITY else min(value, highest)
        resource.setrlimit(limit, (value, value))
    _prctl(PR_SET_DUMPABLE, 0)
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    worker = os.fork()
    if not worker:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        _drop_user(job["uid"])
        _work(job["program"], job["tests"], job["secret"].encode(), job["result"])
    os.close(job["result"])
    code = _wait(worker)
    signal.setitimer(signal.ITIMER_REAL, 0)
    if not job["pid_namespace"]:  # with one, the kernel ends everything in it when this process ends
        _end_others(job["uid"])
    os._exit(code)


# -- the first process -----------------------------------------------------------------------------------------------


def _wait(worker: int) -> int:
    """The worker's exit status as a shell gives it; orphans that end before it are reaped on the way."""
    try:
        while True:
            pid, status = os.wait()
            if pid == worker:
                return SIGNALLED + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
    except TimeoutError:
        return TIMED_OUT


def _time_is_up(*_: object) -> NoReturn:
    raise TimeoutError


def _prctl(option: int, value: int) -> None:
    """Call prctl, and forget ctypes again: the program must not find it loaded."""
    try:
        import ctypes

        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
    except (ImportError, OSError, AttributeError):
        return
    for name in [name for name in sys.modules if name.partition(".")[0] in ("ctypes", "_ctypes")]:
        del sys.modules[name]


def _end_others(uid: int | None) -> None:
    """Kill what the program left, where no pid namespace does: its user's processes, or this one's descendants."""
    if uid is not None:
        if not os.fork():
            os.setresuid(uid, uid, uid)
            os.kill(-1, signal.SIGKILL)  # all at once, so that a fork bomb has no moment to fork; not the caller
            os._exit(0)
        _reap()
        return
    deadline = time.monotonic() + 2  # each round stops all that it sees; a bomb is bounded by RLIMIT_NPROC
    while (found := _descendants()) and time.monotonic() < deadline:
        for number, pid in [(number, pid) for number in (signal.SIGSTOP, signal.SIGKILL) for pid in found]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        _reap()


def _reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _descendants() -> list[int]:
    """Processes below this one, which adopts orphans: changing the session does not hide them."""
    parents: dict[int, int] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{name}/stat", encoding="latin-1") as file:  # it may have ended
            parents[int(name)] = int(file.read().rpartition(")")[2].split()[1])
    below, found = {os.getpid()}, list[int]()
    while fresh := [pid for pid, parent in parents.items() if parent in below and pid not in found]:
        found += fresh
        below = set(fresh)
    return found


# -- the worker ------------------------------------------------------------------------------------------------------


def _drop_user(uid: int | None) -> None:
    """Become another user, and still reach the standard library: root's Python often lies in a folder of root's."""
    if uid is None:
        return
    folders = {entry: os.open(entry, os.O_PATH) for entry in sys.path if os.path.isdir(entry)}
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    closed = {entry: f"/proc/self/fd/{fd}" for entry, fd in folders.items() if not os.access(entry, os.R_OK)}
    for entry, fd in folders.items():
        if entry not in closed:
            os.close(fd)

    def opened(path: str) -> str:
        entry = max((entry for entry in closed if f"{path}/".startswith(f"{entry}/")), key=len, default="")
        return closed[entry] + path[len(entry) :] if entry else path

    if closed:
        sys.path[:] = [opened(path) for path in sys.path]
        for module in list(sys.modules.values()):
            if isinstance(getattr(module, "__path__", None), list):
                module.__path__ = [opened(path) for path in module.__path__]
        sys.path_importer_cache.clear()


class _End:
    """Flushes and calls back when the last reference to it goes: held by the chain, that is at the thread's end."""

    def __init__(self, flush: Callable[[], None], call: Callable[[], None]) -> None:
        self.flush, self.call = flush, call

    def __del__(self) -> None:
        with contextlib.suppress(OSError, ValueError):  # the program closed it
            self.flush()
        self.call()


def _work(program: str, tests: str, secret: bytes, result: int) -> NoReturn:
    """Run both in a thread; this frame alone holds the secret, and writes it when the chain came to its end."""
    write, leave = os.write, os._exit
    write(result, STARTED)
    try:
        code = [compile(text, name, "exec") for text, name in ((program, "<program>"), (tests, "<tests>"))]
    except BaseException as error:
        _report(result, type(error), error)
        leave(1)
    module = types.ModuleType("__main__")
    module.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = module
    sys.unraisablehook = functools.partial(_unraisable, sys.unraisablehook, sys.excepthook, result)
    ended, done = _thread.allocate_lock(), _thread.allocate_lock()
    ended.acquire()
    done.acquire()
    stages: list[Callable[[], Any]] = [
        functools.partial(exec, code[0], module.__dict__),
        functools.partial(builtins.__dict__.update, dict(builtins.__dict__)),  # the tests get the true abs and all
        functools.partial(exec, code[1], module.__dict__),
        done.release,
        functools.partial(bool, _End(sys.stdout.flush, ended.release)),
    ]
    _thread.stack_size(STACK)
    sys.addaudithook(_guard)
    _thread.start_new_thread(collections.deque, (map(operator.call, _drain(stages)), 0))
    ended.acquire()
    if done.acquire(False):
        write(result, secret)
        leave(0)
    leave(1)


def _drain(stages: list[Callable[[], Any]]) -> Any:
    """An iterator that alone holds the stages, so that they go when it goes."""
    taken = iter(tuple(stages))
    stages.clear()
    return taken


def _guard(event: str, details: tuple[Any, ...]) -> None:
    """The audit hook. Constants only: what it looks up by name, the program could replace."""
    if event == "import":
        if details[0].rpartition(".")[2] in {"_ctypes", "_xxsubinterpreters", "_interpreters", "_testcapi"}:
            raise ImportError(f"{details[0]} is not available in the sandbox")
    elif event[:7] == "ctypes." or event in {
        "gc.get_objects",
        "gc.get_referrers",
        "gc.get_referents",
        "sys._current_frames",
        "sys._current_exceptions",
        "sys._settraceallthreads",
        "sys._setprofileallthreads",
        "sys.monitoring.register_callback",
        "sys.remote_exec",
        "cpython.PyInterpreterState_New",
    }:
        raise RuntimeError(f"{event} is not available in the sandbox")


# -- what went wrong: for people, and forgeable by the program; a pass does not depend on it ---------------------------


def _unraisable(usual: Callable[[Any], None], show: Callable[..., Any], result: int, event: Any) -> None:
    """Report the exception that ended the program's thread; others only get printed."""
    if event.object is collections.deque or "thread started by" in (event.err_msg or ""):
        show(event.exc_type, event.exc_value, event.exc_traceback)
        _report(result, event.exc_type, event.exc_value)
    else:
        usual(event)


def _report(result: int, kind: type[BaseException], error: BaseException | None) -> None:
    try:
        text = str(error).strip()
    except BaseException as other:  # the program's own __str__
        text = f"({type(other).__name__} when shown)"
    line = f"{kind.__name__}: {text}" if text else kind.__name__
    os.write(result, line[:500].encode("utf-8", "replace"))


if __name__ == "__main__":
    main()
