"""Runs programs that a model wrote against their tests, and says which passed. Linux only.

For every program a fresh interpreter (`judge.py`) starts two processes. One runs the program. The other holds the
tests, calls the program's functions through a pipe and compares what comes back. Values cross over, objects do not: the
process of the program has nothing that makes a pass, and a program passes by returning what the tests expect.

The program has an empty environment and standard input, limits on memory, time, file size, open files and processes,
and namespaces of its own (`namespaces.py`): it sees no network, no socket of the host, no process but its own, and of
the files only the system's and Python's, read-only. It can write to one folder in memory, of limited size. Started by
root it runs under a user id that nobody else has. All its processes end with it, and with freda, however freda ends.

Where the kernel grants no namespaces, programs are not run unless the caller says so (`isolated=False`); SECURITY.md
says what is promised then, and what never is.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import itertools
import json
import math
import os
import pwd
import selectors
import shutil
import signal
import socket
import subprocess
import symtable
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from freda.errors import FredaError, require
from freda.eval.sandbox.judge import PASSED, STARTED, TIMED_OUT
from freda.eval.sandbox.namespaces import ROOM, python_paths

PYTHON = sys.executable
PACKAGES = str(Path(__file__).parents[3])  # the folder that freda is in
INSIDE = (
    "import sys; sys.path.insert(0, sys.argv[1]); from freda.eval.sandbox.judge import main; del sys.path[0]; main()"
)
FIRST_UID, UIDS = 64_000, 1_024  # below 65,534, so that containers with 65,536 ids have them
OPEN_FILES = 64
STACK = 64 * 2**20  # bytes: deep recursion is to end in RecursionError, not in a signal
GRACE = 3.0  # seconds that start-up and clearing away may take beyond the program's own; then all is killed from here
REPORT = 4_096  # bytes kept of the report
ENVIRONMENT = {"PATH": "/usr/local/bin:/usr/bin:/bin", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
PASSED_ON = ("LD_LIBRARY_PATH",)  # a Python built with a shared library may need it to start


@dataclass(frozen=True)
class Limits:
    """What one program may use."""

    seconds: float = 30.0  # four references of HumanEval+ need 3.5 to 11
    memory_mb: int = 4096  # address space of each process
    file_mb: int = 1  # size of each file
    disk_mb: int = 64  # of all files together
    processes: int = 32  # and threads, all together; three are the sandbox's own
    output_kb: int = 64  # kept of the end of what it prints

    def __post_init__(self) -> None:
        require(self.seconds > 0, f"seconds = {self.seconds}: a program needs time; choose a number above 0")
        for name, least in (("memory_mb", 128), ("file_mb", 0), ("disk_mb", 1), ("processes", 4), ("output_kb", 1)):
            value = getattr(self, name)
            require(value >= least, f"{name} = {value}: Python itself needs {least}; choose that or more")


class Job(NamedTuple):
    """A program and its tests."""

    program: str
    tests: str  # code that raises nothing if the program is right
    names: tuple[str, ...] | None = None  # what the tests use of the program; None: all names that they do not define
    given: str = ""  # trusted code that runs before the tests, in their process


class Verdict(NamedTuple):
    """The outcome of a program: `reason` is "passed", or why not; `output` is the end of what it printed."""

    passed: bool
    reason: str
    seconds: float
    output: str


# -- running ---------------------------------------------------------------------------------------------------------


class Running:
    """The processes of one call, which can be ended all at once."""

    def __init__(self) -> None:
        self.lock, self.stopped, self.processes = threading.Lock(), False, set[subprocess.Popen[bytes]]()

    @contextlib.contextmanager
    def started(self, command: Sequence[str], **options: object) -> Iterator[subprocess.Popen[bytes]]:
        """A process in a session of its own; what is left of it and its group is killed in the end."""
        with self.lock:
            require(not self.stopped, "interrupted")
            process = subprocess.Popen(command, start_new_session=True, **options)  # type: ignore[call-overload]
            self.processes.add(process)
        try:
            yield process
        finally:
            with self.lock:
                self._kill(process)  # not reaped yet, so the number is still that of our group
                self.processes.remove(process)
                process.wait()

    def stop(self) -> None:
        """Kill all, and start no more."""
        with self.lock:
            self.stopped = True
            for process in self.processes:
                self._kill(process)

    @staticmethod
    def _kill(process: subprocess.Popen[bytes]) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)


def run_many(
    jobs: Sequence[Job], limits: Limits = Limits(), workers: int = 0, *, isolated: bool = True
) -> list[Verdict]:
    """Verdicts in the order of the jobs; `workers` 0 is one per core. An exception here, Ctrl-C too, ends them all."""
    require(workers >= 0, f"workers = {workers}: choose a number, or 0 for one per core")
    if jobs:
        check_ready(isolated)
    running, pool = Running(), ThreadPoolExecutor(workers or len(os.sched_getaffinity(0)))
    try:
        one = functools.partial(run_program, limits=limits, isolated=isolated, running=running)
        return [future.result() for future in [pool.submit(one, job) for job in jobs]]
    except BaseException:
        running.stop()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def run_program(
    job: Job, limits: Limits = Limits(), *, isolated: bool = True, running: Running | None = None
) -> Verdict:
    """Run a program, then its tests; it passes if they ran to their end."""
    begun = time.monotonic()
    names = free_names(job.tests) if job.names is None else job.names
    users = _free_uids() if os.geteuid() == 0 else (None, None)
    setup = {
        "program": job.program,
        "names": names,
        "users": users,
        "seconds": limits.seconds,
        "limits": _resource_limits(limits, isolated),
        "isolated": isolated,
        "paths": python_paths(),
        "disk_mb": limits.disk_mb,
        "parent": os.getpid(),
    }
    passed_on = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
    ours, theirs = socket.socketpair()  # unlike a pipe, it cannot be opened again by way of /proc/self/fd
    with (
        ours,
        contextlib.nullcontext(ROOM) if isolated else _folder(users[1]) as folder,
        theirs,
        _file({"tests": job.tests, "given": job.given}) as tests,
        _file({**setup, "tests": tests, "result": theirs.fileno()}) as setup_file,
        (running or Running()).started(
            [PYTHON, "-I", "-B", "-X", "utf8", "-c", INSIDE, PACKAGES],
            stdin=setup_file,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd="/" if isolated else folder,
            env={**ENVIRONMENT, **passed_on, "HOME": folder, "TMPDIR": folder},
            pass_fds=(theirs.fileno(), tests),
        ) as process,
    ):
        theirs.close()
        output, report, in_time = _finish(process, ours.fileno(), limits)
    reason = _reason(report, in_time, process.returncode, output)
    shown = f"{reason} after {limits.seconds:g} s" if reason == TIMED_OUT else reason
    return Verdict(reason == PASSED, shown, time.monotonic() - begun, output)


def _finish(process: subprocess.Popen[bytes], result: int, limits: Limits) -> tuple[str, bytes, bool]:
    """Read to the end: the tail of the output, the report, and whether the judge ended by itself."""
    assert process.stdout is not None
    deadline = time.monotonic() + limits.seconds + GRACE
    with process.stdout:
        kept = {process.stdout.fileno(): limits.output_kb * 1024, result: REPORT}
        output, report = _read(kept, deadline)
        unreaped = functools.partial(os.waitid, os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        while not (in_time := unreaped() is not None) and time.monotonic() < deadline:
            time.sleep(0.002)
    return output.decode("utf-8", "replace"), report, in_time


def _read(kept: dict[int, int], deadline: float) -> list[bytes]:
    """Read file descriptors until all are closed or time is up; as much of the end of each as `kept` says."""
    seen, selector = dict.fromkeys(kept, b""), selectors.DefaultSelector()

    def take(fd: int) -> None:
        data = os.read(fd, 1 << 16)
        seen[fd] = (seen[fd] + data)[-kept[fd] :]
        if not data:
            selector.unregister(fd)

    with selector:
        for fd in kept:
            selector.register(fd, selectors.EVENT_READ)
        while selector.get_map() and (left := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                take(key.fd)
    return list(seen.values())


def _reason(report: bytes, in_time: bool, status: int, output: str) -> str:
    """What the judge reported; without a report, why there is none."""
    if in_time and not report.startswith(STARTED):
        raise FredaError(f"the sandbox did not start (exit status {status}): {output.strip()[-500:] or 'no output'}")
    if not in_time or status == -signal.SIGXCPU:
        return TIMED_OUT
    told = report.removeprefix(STARTED).decode("utf-8", "replace")
    return told or f"failed: the process of the tests ended with status {status}"


def free_names(tests: str, reference: str = "") -> tuple[str, ...]:
    """The names that tests use and neither define nor find among Python's own; a name that the reference defines is the
    program's even if it is one of Python's."""
    used, defined = _names(tests)
    return tuple(sorted(used - defined - (set(dir(builtins)) - _names(reference)[1])))


def _names(code: str) -> tuple[set[str], set[str]]:
    """The global names that code uses, and those that it defines."""
    try:
        tables = [symtable.symtable(code, "<code>", "exec")]
    except (SyntaxError, ValueError):  # what is wrong is seen when it runs
        return set(), set()
    defined = {one.get_name() for one in tables[0].get_symbols() if one.is_assigned() or one.is_imported()}
    used = {one.get_name() for one in tables[0].get_symbols()}
    while tables:
        table = tables.pop()
        tables += table.get_children()
        used |= {one.get_name() for one in table.get_symbols() if one.is_global()}
    return used, defined


# -- limits and rights -----------------------------------------------------------------------------------------------


def check_ready(isolated: bool = True) -> None:
    """Refuse to run programs where they would not be isolated, or, if that is wanted, where they cannot run."""
    require(sys.platform == "linux", f"the sandbox needs Linux, this is {sys.platform}; run it in a Linux container")
    if isolated:
        why = f"programs are not run, because this machine grants no namespaces ({denial()})"
        hint = "run freda where it may make them, or, in a machine you can lose, with --no-isolation (SECURITY.md)"
        require(not denial(), f"{why}; {hint}")
    elif os.geteuid() == 0:
        closed = next((path for path in Path(PYTHON).resolve().parents if not path.stat().st_mode & 1), None)
        hint = "use a Python that everyone can read, as in /usr"
        require(closed is None, f"without isolation programs run as another user, who cannot enter {closed}; {hint}")


@functools.cache
def denial() -> str:
    """Why programs cannot be isolated on this machine, tried once; empty if they can."""
    try:
        run_program(Job("", ""))
    except FredaError as error:
        return str(error).partition(": ")[2]
    return ""


def _resource_limits(limits: Limits, isolated: bool) -> dict[str, int]:
    """Limits by their names in the module `resource`."""
    # The kernel counts processes by user, inside a user namespace only those in it. Without one, an ordinary user's
    # other processes count too.
    others = 0 if isolated or os.geteuid() == 0 else _tasks_of(os.getuid())
    return {
        "RLIMIT_AS": limits.memory_mb * 2**20,
        "RLIMIT_CPU": math.ceil(limits.seconds) + 1,
        "RLIMIT_FSIZE": limits.file_mb * 2**20,
        "RLIMIT_NOFILE": OPEN_FILES,
        "RLIMIT_NPROC": others + limits.processes,
        "RLIMIT_STACK": STACK,
        "RLIMIT_CORE": 0,
    }


def _tasks_of(uid: int) -> int:
    """Threads that a user runs now."""
    count = 0
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it may have ended
            count += len(os.listdir(folder / "task")) if folder.stat().st_uid == uid else 0
    return count


_uids = itertools.count(os.getpid() * 64)


def _free_uids() -> tuple[int, int]:
    """User ids for tests and program that no account and no running program has: limits count by user."""
    free = (FIRST_UID + number % UIDS for number in itertools.islice(_uids, 2 * UIDS))
    found = list(itertools.islice(filter(_is_free, free), 2))
    require(len(found) == 2, f"user ids from {FIRST_UID} to {FIRST_UID + UIDS - 1} have accounts; run as another user")
    return found[0], found[1]


def _is_free(uid: int) -> bool:
    try:
        pwd.getpwuid(uid)
    except KeyError:
        return True
    return False


@contextlib.contextmanager
def _file(content: object) -> Iterator[int]:
    """A file in memory that no folder has, and that holds JSON."""
    fd = os.memfd_create("freda")
    try:
        with open(fd, "wb", closefd=False) as file:
            file.write(json.dumps(content).encode())
        os.lseek(fd, 0, os.SEEK_SET)
        yield fd
    finally:
        os.close(fd)


@contextlib.contextmanager
def _folder(uid: int | None) -> Iterator[str]:
    """Without isolation: a working folder that is removed afterwards, whatever the program did in it. It lies in one
    that another user's program cannot rename, and no link is followed."""
    outer = tempfile.mkdtemp(prefix="freda-sandbox-")
    folder = f"{outer}/program"
    try:
        os.mkdir(folder)
        if uid is not None:
            os.chmod(outer, 0o711)
            os.chown(folder, uid, uid)
        yield folder
    finally:
        try:
            shutil.rmtree(outer)
        except (OSError, RecursionError):  # folders without rights, or nested deeper than rmtree goes
            opened = ["find", "-P", outer, "-type", "d", "-exec", "chmod", "u+rwx", "{}", ";"]
            for command in ([] if uid is not None else [opened]) + [["rm", "-rf", "--", outer]]:
                subprocess.run(command, capture_output=True, check=False)
