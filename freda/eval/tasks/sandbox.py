"""Runs a program that a model wrote, then its tests, and says whether it passed. Linux only.

Every program gets a fresh interpreter (`python -I`) with an empty environment, a temporary folder, empty standard
input, its own session, limits on memory, time, file size, open files and processes, and no network. Where the kernel
allows namespaces, it sees no process but its own, and all of them end with it. Started by root, it runs under a user id
that nobody else has. A pass is a secret that comes back: `inside.py` says how it is kept from the program.

What remains possible. On the machine:

- Started by an ordinary user, the program may read and change what that user may. Started by root, it may read what
  everyone may, and leave files where everyone may write (/tmp). Run what you distrust as root in a container.
- Memory is limited by process, not in sum (`processes` times `memory_mb`); the number of files only by time.
- Without namespaces (`isolation` tells) there is network, and for an ordinary user a way to outlive the end: to kill
  the first process, which has the same user id. The memory of freda's own process, secrets in it, is open to it too.

In the score, for a program that means to deceive:

- Values that lie: an `__eq__` that is always true, or `abs`, `math.isclose`, ... replaced while the tests run. Builtins
  are put back once, between program and tests; other modules are not.
- Tests and oracle share the process: a function can find them in the frames above it and return what they expect.
- Machine code: an extension module that the program writes to a file and imports can read all memory.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import math
import os
import pwd
import secrets
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from freda.errors import FredaError, require
from freda.eval.tasks.inside import SIGNALLED, STARTED, TIMED_OUT

INSIDE = Path(__file__).with_name("inside.py")
FIRST_UID, UIDS = 64_000, 1_024  # below 65,534, so that containers with 65,536 ids have them
OPEN_FILES = 64
GRACE = 3.0  # seconds that start-up and clearing away may take beyond the program's own; then all is killed from here
REPORT = 4_096  # bytes kept of what comes through the result socket
ENVIRONMENT = {"PATH": "/usr/local/bin:/usr/bin:/bin", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
PASSED_ON = ("LD_LIBRARY_PATH",)  # a Python built with a shared library may need it to start


@dataclass(frozen=True)
class Limits:
    """What one program may use."""

    seconds: float = 30.0  # four references of HumanEval+ need 3.5 to 11
    memory_mb: int = 4096  # address space of each process
    file_mb: int = 1  # size of each file
    processes: int = 32  # and threads, all together; three are the sandbox's own
    output_kb: int = 64  # kept of the end of what it prints

    def __post_init__(self) -> None:
        require(self.seconds > 0, f"seconds = {self.seconds}: a program needs time; choose a number above 0")
        for name, least in (("memory_mb", 128), ("file_mb", 0), ("processes", 4), ("output_kb", 1)):
            value = getattr(self, name)
            require(value >= least, f"{name} = {value}: Python itself needs {least}; choose that or more")


class Verdict(NamedTuple):
    """The outcome of a program: `reason` is "passed", or why not; `output` is the end of what it printed."""

    passed: bool
    reason: str
    seconds: float
    output: str


class Isolation(NamedTuple):
    """The command that makes namespaces, and which of them the kernel grants."""

    command: tuple[str, ...]
    network: bool  # True: no network in the sandbox
    processes: bool  # True: a pid namespace, in which the sandbox sees only its own, and they end together


# -- running ---------------------------------------------------------------------------------------------------------


def run_program(program: str, tests: str, limits: Limits = Limits()) -> Verdict:
    """Run a program and its tests in one namespace; it passes if all of it ran to its end."""
    begun, secret, granted = time.monotonic(), secrets.token_hex(16), isolation()
    uid = _free_uid() if os.geteuid() == 0 else None
    job = {
        "program": program,
        "tests": tests,
        "secret": secret,
        "uid": uid,
        "seconds": limits.seconds,
        "limits": _resource_limits(limits, uid, granted),
        "pid_namespace": granted.processes,
    }
    passed_on = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
    ours, theirs = socket.socketpair()  # unlike a pipe, it cannot be opened again by way of /proc/self/fd
    with _folder(uid) as folder, ours:
        with theirs, tempfile.TemporaryFile() as file:  # no pipe: both sides could wait for each other
            file.write(json.dumps({**job, "result": theirs.fileno()}).encode())
            file.seek(0)
            process = subprocess.Popen(
                [*granted.command, sys.executable, "-I", "-B", "-X", "utf8", str(INSIDE)],
                stdin=file,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                cwd=folder,
                env={**ENVIRONMENT, **passed_on, "HOME": folder, "TMPDIR": folder},
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        output, report, in_time = _finish(process, ours.fileno(), limits)
    status = process.returncode if in_time else TIMED_OUT
    if report is None and status != TIMED_OUT:
        raise FredaError(f"the sandbox did not start (exit status {status}): {output.strip()[-500:] or 'no output'}")
    reason = _reason(status, report or "", secret, limits)
    return Verdict(reason == "passed", reason, time.monotonic() - begun, output)


def run_many(jobs: Sequence[tuple[str, str]], limits: Limits = Limits(), workers: int = 0) -> list[Verdict]:
    """Verdicts on (program, tests) pairs, in order; `workers` 0 is one per core."""
    require(workers >= 0, f"workers = {workers}: choose a number, or 0 for one per core")
    if jobs:
        isolation()  # once, before the threads
    with ThreadPoolExecutor(workers or len(os.sched_getaffinity(0))) as pool:
        return list(pool.map(lambda job: run_program(job[0], job[1], limits), jobs))


def _finish(process: subprocess.Popen[bytes], result: int, limits: Limits) -> tuple[str, str | None, bool]:
    """Read to the end: the tail of the output, the report (None: never started), and whether it ended by itself."""
    assert process.stdout is not None
    deadline = time.monotonic() + limits.seconds + GRACE
    try:
        kept = {process.stdout.fileno(): limits.output_kb * 1024, result: REPORT}
        (_, output), (first, report) = _read(kept, deadline)
        unreaped = functools.partial(os.waitid, os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        while not (in_time := unreaped() is not None) and time.monotonic() < deadline:
            time.sleep(0.002)
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)  # not reaped yet, so the number is still that of our group
        process.wait()
        process.stdout.close()
    outcome = report.decode("utf-8", "replace").removeprefix(STARTED.decode()) if first == STARTED else None
    return output.decode("utf-8", "replace"), outcome, in_time


def _read(kept: dict[int, int], deadline: float) -> list[tuple[bytes, bytes]]:
    """Read file descriptors until all are closed or time is up: the first byte of each, and as much of its end as
    `kept` says."""
    seen, selector = {fd: (b"", b"") for fd in kept}, selectors.DefaultSelector()

    def take(fd: int) -> None:
        data, (first, tail) = os.read(fd, 1 << 16), seen[fd]
        seen[fd] = (first or data[:1], (tail + data)[-kept[fd] :])
        if not data:
            selector.unregister(fd)

    with selector:
        for fd in kept:
            selector.register(fd, selectors.EVENT_READ)
        while selector.get_map() and (left := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                take(key.fd)
    return list(seen.values())


def _reason(status: int, report: str, secret: str, limits: Limits) -> str:
    """The verdict in words, from the first process's exit status and what came through the result socket."""
    if status == 0 and secret in report:
        return "passed"
    if status in (TIMED_OUT, SIGNALLED + signal.SIGXCPU):
        return f"time out after {limits.seconds:g} s"
    if report.startswith("MemoryError"):
        return "out of memory"
    if status > SIGNALLED or status < 0:
        return f"killed by signal {status - SIGNALLED if status > 0 else -status}"
    return f"failed: {report[:500]}" if report else "exited early"


# -- limits and rights -----------------------------------------------------------------------------------------------


def _resource_limits(limits: Limits, uid: int | None, granted: Isolation) -> dict[str, int]:
    """Limits by their names in the module `resource`."""
    # The kernel counts processes by user, inside a user namespace only those in it. Without one, an ordinary user's
    # other processes count too.
    others = 0 if uid is not None or "--user" in granted.command else _tasks_of(os.getuid())
    return {
        "RLIMIT_AS": limits.memory_mb * 2**20,
        "RLIMIT_CPU": math.ceil(limits.seconds) + 1,
        "RLIMIT_FSIZE": limits.file_mb * 2**20,
        "RLIMIT_NOFILE": OPEN_FILES,
        "RLIMIT_NPROC": others + limits.processes,
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


def _free_uid() -> int:
    """A user id that no account and no running program has: limits on processes count by user."""
    for number in itertools.islice(_uids, UIDS):
        uid = FIRST_UID + number % UIDS
        try:
            pwd.getpwuid(uid)
        except KeyError:
            return uid
    raise FredaError(f"every user id from {FIRST_UID} to {FIRST_UID + UIDS - 1} has an account; run as another user")


@functools.cache
def isolation() -> Isolation:
    """What the kernel grants, tried once; what it does not is reported once on standard error."""
    require(sys.platform == "linux", f"the sandbox needs Linux, this is {sys.platform}; run it in a Linux container")
    unshare = shutil.which("unshare")
    network = (*(() if os.geteuid() == 0 else ("--user",)), "--net")
    whole = (*network, "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc")
    found = Isolation((), False, False)
    for command in [(unshare, *network), (unshare, *whole)] if unshare else []:
        if subprocess.run([*command, "true"], capture_output=True, check=False).returncode == 0:
            found = Isolation(command, True, "--pid" in command)
    missing = [text for has, text in ((found.network, "no network"), (found.processes, "a pid namespace")) if not has]
    if missing:
        print(f"sandbox: this kernel does not grant {' and '.join(missing)}; programs run without", file=sys.stderr)
    return found


@contextlib.contextmanager
def _folder(uid: int | None) -> Iterator[str]:
    """A working folder that is removed afterwards, whatever the program did in it."""
    folder = tempfile.mkdtemp(prefix="freda-sandbox-")
    try:
        if uid is not None:
            os.chown(folder, uid, uid)
        yield folder
    finally:
        try:
            shutil.rmtree(folder)
        except (OSError, RecursionError):  # folders without rights, or nested deeper than rmtree goes
            for command in (["chmod", "-R", "u+rwx"], ["rm", "-rf"]):
                subprocess.run([*command, "--", folder], capture_output=True, check=False)
