"""The process that holds a program's tests, runs them, and alone says whether the program passed.

`run.py` starts it for every program, in a fresh interpreter. It takes its rights away, starts the process that runs the
program (`worker.py`), and only then reads the tests. What a test calls is an object of the other process, known here by
a number (`Remote`); arguments and results cross over as values of built-in types (`channel.py`). Comparisons, `abs`,
`math.isclose` and all else in the tests are this process's own.

With namespaces there is a third process between the two: process 1 of the worker's pid namespace, which sees none
outside. When it ends, the kernel ends all that the program started.
"""

from __future__ import annotations

import builtins
import contextlib
import json
import os
import resource
import select
import signal
import sys
import time
from collections.abc import Iterator
from typing import Any, NamedTuple, NoReturn

from freda.eval.sandbox import namespaces
from freda.eval.sandbox.channel import Channel, ChannelError, decode, encode
from freda.eval.sandbox.namespaces import drop_rights, prctl
from freda.eval.sandbox.worker import show, work

SIGNALLED = 128  # plus the signal's number: how an exit status tells it, as a shell does
STARTED = b"+"  # first byte of the report: what fails before it is the sandbox's fault, not the program's
READY = "ready"
TESTS = "<tests>"
LEAVING = 1.0  # seconds for the program's process to end once nothing more is asked of it
TIMED_OUT, NO_MEMORY, EXITED = "time out", "out of memory", "exited early"
PASSED = "passed"


class Users(NamedTuple):
    """User ids for the two processes; None: stay who you are."""

    judge: int | None
    worker: int | None


def main() -> NoReturn:
    """Read the job, start the program's process, run the tests and report."""
    with open(0, "rb", closefd=False) as file:
        job = json.load(file)
    with open(os.devnull, "rb") as empty:
        os.dup2(empty.fileno(), 0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    prctl(namespaces.PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != job["parent"]:  # it has died before it could be told
        os._exit(1)
    try:
        users = _leave_host(Users(*job["users"])) if job["isolated"] else Users(*job["users"])
    except OSError as error:
        sys.exit(str(error))
    _limit(job["limits"])  # not before: a namespace of users keeps the limits of its maker for all his processes
    prctl(namespaces.PR_SET_DUMPABLE, 0)  # the memory of all three processes is closed, also to the same user's others
    prctl(namespaces.PR_SET_CHILD_SUBREAPER, 1)  # without namespaces, orphans come here
    calls, replies = os.pipe(), os.pipe()
    first = os.fork()
    if not first:
        for fd in (job["result"], job["tests"], calls[1], replies[0]):
            os.close(fd)
        _start(job, users, Channel(calls[0], replies[1]))
    os.close(calls[0])
    os.close(replies[1])
    root = None if job["isolated"] or users.judge is None else 0  # to end what the program leaves behind
    drop_rights(users.judge, saved=root)
    watch = os.pidfd_open(first)
    reason = _judged(job, Channel(replies[0], calls[1], watch))
    for fd in (calls[1], replies[0]):  # nothing more is asked of the program
        os.close(fd)
    sys.stdout.flush()
    ended = select.select([watch], [], [], 0 if reason == TIMED_OUT else LEAVING)[0]
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(first, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(first, 0)[1]) if ended else 0
    if not job["isolated"]:
        _end_others(users.worker)
    os.write(job["result"], (reason or _end_in_words(status)).encode("utf-8", "replace"))
    os._exit(0)


def _limit(limits: dict[str, int]) -> None:
    for name, value in limits.items():
        limit = getattr(resource, name)
        highest = resource.getrlimit(limit)[1]
        value = value if highest == resource.RLIM_INFINITY else min(value, highest)
        resource.setrlimit(limit, (value, value))


def _leave_host(users: Users) -> Users:
    """Enter new namespaces; who the processes can be there."""
    if os.geteuid() == 0:
        with contextlib.suppress(PermissionError):  # root of a container may be less than root
            namespaces.unshare(user=False)
            return users
    namespaces.unshare(user=True)
    return Users(None, None)


# -- the program's process -------------------------------------------------------------------------------------------


def _start(job: dict[str, Any], users: Users, channel: Channel) -> NoReturn:
    """Become the program's process, with namespaces by way of process 1, which waits for it."""
    prctl(namespaces.PR_SET_PDEATHSIG, signal.SIGKILL)
    poll = select.poll()
    poll.register(channel.read, 0)
    if poll.poll(0):  # the judge has died before that
        os._exit(1)
    if job["isolated"]:
        try:
            namespaces.change_root(job["paths"], job["disk_mb"])
        except OSError as error:
            sys.exit(str(error))
        worker = os.fork()
        if worker:
            os.close(channel.read)
            os.close(channel.write)
            drop_rights(users.judge)
            os._exit(_wait(worker))
    drop_rights(users.worker)
    channel.send(READY)
    work(job["program"], job["names"], channel)


def _wait(worker: int) -> int:
    """The worker's exit status as a shell gives it; orphans that end before it are reaped on the way."""
    while True:
        pid, status = os.wait()
        if pid == worker:
            return SIGNALLED + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


def _end_others(uid: int | None) -> None:
    """Kill what the program left, where no pid namespace does: its user's processes, or this one's descendants."""
    if uid is not None:
        if not os.fork():
            os.setresuid(-1, 0, -1)
            os.setresuid(uid, uid, uid)
            os.kill(-1, signal.SIGKILL)  # all at once, so that a fork bomb has no moment to fork; not the caller
            os._exit(0)
        os.wait()
        return
    deadline = time.monotonic() + 2  # each round stops all that it sees; a bomb is bounded by RLIMIT_NPROC
    while (found := _descendants()) and time.monotonic() < deadline:
        for number, pid in [(number, pid) for number in (signal.SIGSTOP, signal.SIGKILL) for pid in found]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
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


# -- the tests -------------------------------------------------------------------------------------------------------


class TimeUp(BaseException):
    """The program and its tests have had their time."""


class Remote:
    """An object of the program's process. What is done to it is done there; it equals itself alone."""

    __slots__ = ("_number", "_program")
    _number: int
    _program: Program

    def __init__(self, program: Program, number: int) -> None:
        object.__setattr__(self, "_program", program)
        object.__setattr__(self, "_number", number)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """What the program returns."""
        return self._program.ask("call", self, *arguments, **options)

    def __getattr__(self, name: str) -> Any:
        return self._program.ask("getattr", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._program.ask("setattr", self, name, value)

    def __getitem__(self, key: Any) -> Any:
        return self._program.ask("getitem", self, key)

    def __contains__(self, value: Any) -> bool:
        return bool(self._program.ask("contains", self, value))

    def __iter__(self) -> Iterator[Any]:
        rest = self._program.ask("iter", self)
        with contextlib.suppress(StopIteration):
            while True:
                yield self._program.ask("next", rest)

    def __len__(self) -> int:
        return int(self._program.ask("len", self))

    def __bool__(self) -> bool:
        return bool(self._program.ask("bool", self))

    def __repr__(self) -> str:
        return str(self._program.ask("repr", self))


class Program:
    """The program's process, asked through the channel."""

    def __init__(self, channel: Channel) -> None:
        self.channel, self.lost = channel, False

    def ask(self, operation: str, *arguments: Any, **options: Any) -> Any:
        """Have an operation done there, and return its value or raise its error."""
        message = encode([operation, list(arguments), options], self._number)
        try:
            self.channel.send(message)
        except ChannelError:
            self.lost = True
            raise
        return self.answer()

    def answer(self) -> Any:
        """What the other process has sent. An answer that cannot be read is as good as none."""
        try:
            kind, *content = self.channel.receive()
            if kind == "value":
                return decode(content[0], lambda number: Remote(self, int(number)))
            error = _error(*content)
        except TimeUp:
            raise
        except BaseException as failure:
            self.lost = True
            raise ChannelError(f"an answer that cannot be read ({failure})") from None
        raise error

    @staticmethod
    def _number(value: Any) -> int:
        if type(value) is not Remote:
            raise TypeError(f"the tests hand the program a {type(value).__name__}, which cannot be sent")
        return value._number


def _error(kinds: list[str], text: str) -> Exception:
    """An exception that is caught and shown like the program's: of the nearest built-in class, by the same name."""
    known = [getattr(builtins, kind, None) for kind in kinds]
    errors = (kind for kind in known if isinstance(kind, type) and issubclass(kind, Exception))
    base = next((kind for kind in errors if not issubclass(kind, BaseExceptionGroup)), Exception)
    methods = {"__module__": "builtins", "__init__": lambda self, text: None, "__str__": lambda self: text}
    made: Exception = type(str(kinds[0]), (base,), methods)(str(text))
    return made


def _judged(job: dict[str, Any], channel: Channel) -> str:
    """The verdict in words: `PASSED`, or why not; empty if the program's process is gone, whose end is the reason."""
    with open(job["tests"], "rb") as file:
        tests = json.load(file)
    program, up = Program(channel), False

    def time_is_up(*_: object) -> None:
        nonlocal up
        up = True
        raise TimeUp

    signal.signal(signal.SIGALRM, time_is_up)
    signal.setitimer(signal.ITIMER_REAL, job["seconds"])
    try:
        if channel.receive() != READY:
            os._exit(1)
    except ChannelError:  # what went wrong was printed
        os._exit(1)
    os.write(job["result"], STARTED)
    try:
        reason = _run(tests, program)
        signal.setitimer(signal.ITIMER_REAL, 0)
    except TimeUp:
        return TIMED_OUT
    if up:  # the tests went on after it
        return TIMED_OUT
    return "" if program.lost else reason


def _run(tests: dict[str, str], program: Program) -> str:
    """Run what the tests need, then the tests, with the names of the program that they ask for."""
    space: dict[str, Any] = {"__name__": "tests", "__builtins__": builtins}
    try:
        exec(compile(tests["given"], TESTS, "exec"), space)
        space.update(program.answer())
        exec(compile(tests["tests"], TESTS, "exec"), space)
    except TimeUp:
        raise
    except BaseException as error:
        return _failure(error)
    return PASSED


def _failure(error: BaseException) -> str:
    """Why the tests failed; the part of the traceback that is theirs is printed."""
    if not isinstance(error, ChannelError):
        show(error, TESTS)
    if isinstance(error, MemoryError):
        return NO_MEMORY
    text = str(error).strip()
    return f"failed: {type(error).__name__}: {text}"[:500] if text else f"failed: {type(error).__name__}"


def _end_in_words(status: int) -> str:
    """How the program's process ended, by its exit status or that of process 1, which passes it on."""
    number = -status if status < 0 else status - SIGNALLED
    if number == signal.SIGXCPU:
        return TIMED_OUT
    return f"killed by signal {number}" if number > 0 else EXITED
