"""Hostile programs: none passes that is not right, none leaves the sandbox, none outlives freda."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from freda.eval.sandbox.run import GRACE, Job, Limits, Verdict, run_program
from tests.hostile import FORGERS, HOGS, INTRUDERS, RIGHT, SPREAD, TESTS
from tests.isolation import needs_namespaces, processes_with

pytestmark = needs_namespaces
SHORT = Limits(seconds=0.4, memory_mb=512, processes=16, output_kb=4)
LONGER = Limits(seconds=10.0, memory_mb=512, processes=16)


@pytest.mark.parametrize("name", FORGERS)
def test_no_forger_passes(name: str) -> None:
    verdict = run_program(Job(SPREAD + FORGERS[name], TESTS), LONGER)
    assert not verdict.passed, verdict
    assert not verdict.reason.startswith(("failed: SyntaxError", "failed: NameError: name 'sp")), "the forger is broken"
    assert "the process of the tests ended" not in verdict.reason, "the judge fails as it should, not by a mistake"


def test_the_right_program_passes_these_tests() -> None:
    assert run_program(Job(RIGHT, TESTS), LONGER).reason == "passed"
    assert run_program(Job(SPREAD + RIGHT, TESTS), LONGER).reason == "passed"


@pytest.mark.parametrize("name", HOGS)
def test_hogs_are_stopped(name: str) -> None:
    verdict = run_program(Job(HOGS[name], TESTS), SHORT)
    assert verdict.reason == "time out after 0.4 s" and verdict.seconds < 0.4 + GRACE
    assert len(verdict.output) <= 4096


# -- the machine -----------------------------------------------------------------------------------------------------


class Host(NamedTuple):
    private: Path
    heard: list[bytes]
    names: dict[str, str]


@pytest.fixture(scope="module")
def host() -> Iterator[Host]:
    """A folder with a file that everyone may read, a unix socket and ports that everyone may connect to."""
    with contextlib.ExitStack() as stack:
        private = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="freda-host-")))
        private.chmod(0o755)
        (private / "secret.txt").write_text("REACHED a private file")
        (private / "secret.txt").chmod(0o444)
        heard: list[bytes] = []
        name = f"freda-{os.getpid()}"
        places = {"socket": str(private / "socket"), "name": name}
        for address in (places["socket"], f"\0{name}", ("127.0.0.1", 0)):
            listener = socket.socket(socket.AF_INET if isinstance(address, tuple) else socket.AF_UNIX)
            stack.enter_context(listener)
            listener.bind(address)
            listener.listen()
            threading.Thread(target=_listen, args=(listener, heard), daemon=True).start()
            if isinstance(address, tuple):
                places["port"] = str(listener.getsockname()[1])
        (private / "socket").chmod(0o777)
        yield Host(private, heard, places | {"private": str(private)})


def _listen(listener: socket.socket, heard: list[bytes]) -> None:
    with contextlib.suppress(OSError):
        while True:
            connection, _ = listener.accept()
            heard.append(b"connected")
            connection.close()


def intrude(name: str, host: Host) -> Verdict:
    program = INTRUDERS[name]
    for key, value in host.names.items():
        program = program.replace(f"{{{key}}}", value)
    return run_program(Job(program.replace("{{", "{").replace("}}", "}") + "\n" + RIGHT, TESTS), LONGER)


@pytest.mark.parametrize("name", INTRUDERS)
def test_no_intruder_reaches_the_host(name: str, host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "REACHED a token")
    before = {path: path.stat() for path in (host.private, host.private / "secret.txt", Path(tempfile.gettempdir()))}
    verdict = intrude(name, host)
    assert "REACHED" not in verdict.output and not host.heard, verdict
    assert not verdict.reason.startswith("failed: SyntaxError"), verdict
    assert {path: path.stat().st_mode for path in before} == {path: one.st_mode for path, one in before.items()}
    assert sorted(os.listdir(host.private)) == ["secret.txt", "socket"]
    assert stat.S_IMODE((host.private / "secret.txt").stat().st_mode) == 0o444


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("import os\nfor n in range(999):\n    open(f'/dev/shm/{n}', 'wb').write(bytes(10**6))", "[Errno 28] No space"),
        ("for n in range(99_999):\n    open(f'{n}', 'wb').close()", "[Errno 28] No space"),
        ("open('big', 'wb').write(bytes(2 * 10**6))", "[Errno 27] File too large"),
        ("import mmap\nkept = [mmap.mmap(-1, 2**26) for _ in range(99)]", "Cannot allocate memory"),
    ],
)
def test_memory_and_files_are_bounded(program: str, reason: str) -> None:
    assert reason in run_program(Job(program, TESTS), LONGER).reason


# -- freda's end -----------------------------------------------------------------------------------------------------

ENDLESS = """
import os, subprocess
if os.fork() == 0:
    os.setsid()
    os.execvp("sleep", ["sleep", "MARKER"])
subprocess.Popen(["sleep", "MARKER"], start_new_session=True)
while True: pass
"""
FREDA = """
import os, signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
from freda.eval.sandbox.run import Job, Limits, run_many
run_many([Job(os.environ["PROGRAM"], "")] * 4, Limits(seconds=60, processes=16), workers=2)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_programs_end_with_freda(number: signal.Signals, tmp_path: Path) -> None:
    """Killed, terminated or interrupted, freda ends at once, with all that it started."""
    marker = f"61.{os.getpid()}{time.monotonic_ns()}"
    environment = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": str(Path(__file__).parents[1])}
    environment["PROGRAM"] = ENDLESS.replace("MARKER", marker)
    freda = subprocess.Popen([sys.executable, "-c", FREDA], env=environment, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 20
    while len(processes_with(marker)) < 4 and time.monotonic() < deadline:
        time.sleep(0.02)
    assert len(processes_with(marker)) == 4, "two programs run, with two children each"
    begun = time.monotonic()
    freda.send_signal(number)
    freda.wait(10)
    while processes_with(marker) and time.monotonic() < begun + 5:
        time.sleep(0.01)
    assert not processes_with(marker) and time.monotonic() - begun < 3 and not list(tmp_path.iterdir())
