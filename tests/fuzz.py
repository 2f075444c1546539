"""The fuzzer: valid inputs of every kind, mutated, each given to a command in a process with limits.

A command must end with 0, or with 2 and one line that says what is wrong; within its time and memory; and without
changing its inputs. `make fuzz` runs it for minutes (`python -m tests.fuzz --seconds 300`), the tests for seconds.
Everything depends on the seed and the number of a case: `python -m tests.fuzz --seed 0 --case 123` runs one again.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import lzma
import os
import random
import resource
import shutil
import signal
import sys
import tarfile
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from freda.cli import run
from freda.sections import tables_as_toml
from tests.seeds import SEEDS, Seed, make_seeds

SECONDS, MEMORY = 60, 2500 * 2**20  # of one command, on a busy machine too
DEEP = 100_000
ODD: tuple[Any, ...] = (
    *(None, True, False, -1, 0, 1, 2, 3, 7, 2**31, 2**32 - 1, 2**63, 10**9, 10**12, 10**30, -(2**63)),
    *(0.0, -1.5, 1e-300, 1e300, float("nan"), float("inf"), -float("inf")),
    *("", "x", "0", "../x", "/etc/passwd", "a" * 10_000, "\ud800", "\0", "ünï", "<|blank|>", "{{ 1 }}", "nan"),
    *([], {}, [None], [[1]], ["x", 1], {"a": 1}, {"content": 5}),
)


class Finding(NamedTuple):
    """What a command did that it must not do."""

    case: str
    problem: str


# -- mutations -------------------------------------------------------------------------------------------------------


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every node of nested dicts and lists, of long lists the first few."""
    yield path
    for key in (
        list(value)[:60] if isinstance(value, dict) else range(min(len(value), 4)) if isinstance(value, list) else ()
    ):
        yield from places(value[key], (*path, key))


def mutate_values(value: Any, rng: random.Random) -> Any:
    """Replace, delete or duplicate a node or two."""
    for _ in range(rng.choice((1, 1, 1, 2))):
        *parents, last = rng.choice([path for path in places(value) if path] or [()]) or (None,)
        if last is None:
            return rng.choice(ODD)
        node = value
        for key in parents:
            node = node[key]
        if rng.random() < 0.15:
            del node[last]
        elif isinstance(node, dict) and rng.random() < 0.1:
            node[f"{last}x"] = node[last]
        else:
            node[last] = rng.choice(ODD)
    return value


def mutate_json(text: bytes, rng: random.Random) -> bytes:
    """Mutated values, or a text that is no good JSON."""
    kind = rng.random()
    if kind < 0.85:
        return json.dumps(mutate_values(json.loads(text), rng)).encode()
    broken = (
        b"[" * DEEP,
        b'{"a":' * DEEP,
        b"1" * 5000,
        b'{"a": ' + b"9" * 5000 + b"}",
        b"",
        b"\xff\xfe",
        b"[]",
        b"null",
    )
    return rng.choice(broken)


def mutate_lines(text: bytes, rng: random.Random) -> bytes:
    """One line of JSON lines mutated, or removed, or put in twice."""
    lines = text.splitlines(keepends=True)
    at = rng.randrange(len(lines))
    lines[at] = rng.choice((mutate_json(lines[at], rng) + b"\n", b"", lines[at] * 2, lines[at][: len(lines[at]) // 2]))
    return b"".join(lines)


def mutate_toml(text: bytes, rng: random.Random) -> bytes:
    """Mutated values, or a text that is no good TOML."""
    if rng.random() < 0.1:
        return rng.choice(
            (b"a = " + b"[" * DEEP, b"[a." + b"a." * DEEP + b"a]", b"a = " + b"9" * 5000, b"\xff", b"a = 1\n" * 2)
        )
    with contextlib.suppress(TypeError, ValueError, AttributeError):
        tables = mutate_values(tomllib.loads(text.decode()), rng)
        return tables_as_toml(_tuples(tables)).encode("utf-8", "surrogatepass")
    return text + b"[x]\n"


def _tuples(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _tuples(one) for key, one in value.items()}
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def mutate_bytes(data: bytes, rng: random.Random) -> bytes:
    """Bytes changed, cut, inserted, or numbers of eight bytes replaced by large ones, mostly near the beginning."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 8))):
        at = (
            min(int(rng.expovariate(1 / 200)), max(0, len(out) - 8))
            if rng.random() < 0.7
            else rng.randrange(len(out) or 1)
        )
        choice = rng.randrange(6)
        if choice == 0:
            del out[at:]
        elif choice == 1:
            out[at:at] = rng.randbytes(rng.choice((1, 8, 100)))
        elif choice == 2:
            out[at : at + 8] = rng.choice((2**60, 2**31, 2**64 - 1, 0, 1)).to_bytes(8, "little")
        elif choice == 3:
            out[at : at + 4] = rng.choice((2**31 - 1, 2**32 - 1, 0, 1)).to_bytes(4, "little")
        elif out:
            out[at % len(out)] = rng.randrange(256)
    return bytes(out)


def mutate_file(path: Path, rng: random.Random) -> None:
    """Mutate a file in a way that fits its kind, or put something else in its place."""
    if rng.random() < 0.08:
        path.unlink()
        _instead(path, rng)
        return
    data = path.read_bytes()
    by_suffix: dict[str, Callable[[bytes, random.Random], bytes]] = {
        ".json": mutate_json, ".jsonl": mutate_lines, ".toml": mutate_toml
    }  # fmt: skip
    change = by_suffix.get(path.suffix, mutate_bytes) if rng.random() < 0.85 else mutate_bytes
    path.write_bytes(change(data, rng) if data else b"x")


def _instead(path: Path, rng: random.Random) -> None:
    """Something that is no file, or a file that is not what it seems."""
    kinds: list[Callable[[], object]] = [
        lambda: path.mkdir(),
        lambda: os.mkfifo(path),
        lambda: path.symlink_to("/dev/zero"),
        lambda: path.symlink_to("/nowhere"),
        lambda: path.symlink_to(path.name),
        lambda: path.write_bytes(b""),
        lambda: None,
        lambda: _archive(path, rng),
        lambda: path.with_name(f"{path.name}.xz").write_bytes(lzma.compress(bytes(2**26), preset=0)),
    ]
    rng.choice(kinds)()


def _archive(path: Path, rng: random.Random) -> None:
    """A tar file of odd members."""
    with tarfile.open(path.with_name(f"{path.stem}.tar"), "w") as archive:
        for number in range(3):
            member = tarfile.TarInfo(rng.choice(("../a.jsonl", "/a.jsonl", "a.jsonl", f"b{number}.txt")))
            member.type = rng.choice(
                (tarfile.REGTYPE, tarfile.LNKTYPE, tarfile.SYMTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE)
            )
            member.linkname, member.size = rng.choice(("a.jsonl", "nothing", "/dev/zero")), 5
            archive.addfile(member, io.BytesIO(b"hello") if member.type == tarfile.REGTYPE else None)


def mutate_arguments(arguments: list[str], rng: random.Random) -> list[str]:
    """A command line with one value changed, an option added, or a word missing."""
    values = [value for value in ODD if isinstance(value, str | int | float) and "\0" not in str(value)]
    at = rng.randrange(1, len(arguments))
    return [*arguments[:at], str(rng.choice(values)), *arguments[at + rng.randrange(2) :]]


# -- one case ----------------------------------------------------------------------------------------------------------


def case(number: int, seed: int, folder: Path) -> Finding | None:
    """Run a case in `folder`, which holds the seeds; None if all is as it must be."""
    rng = random.Random(f"{seed} {number}")
    chosen: Seed = SEEDS[rng.choice(list(SEEDS))]
    with tempfile.TemporaryDirectory(dir=folder) as place:
        work = Path(place)
        shutil.copytree(folder / chosen.folder, work / "in", symlinks=True)
        arguments = [
            str(part).replace("IN", str(work / "in")).replace("OUT", str(work / "out")) for part in chosen.command
        ]
        if rng.random() < 0.15 and len(arguments) > 2:
            arguments, what = mutate_arguments(arguments, rng), "arguments"
        else:
            files = sorted(path for path in (work / "in").rglob("*") if path.is_file() and path.match(chosen.files))
            target = rng.choice(files)
            mutate_file(target, rng)
            what = target.name
        name = f"case {number}: {what}: freda {' '.join(arguments)}".replace(str(work), "")[:300]
        before = _listing(work / "in")
        code, said, seconds = in_process(arguments, work)
        changed = not chosen.writes and _listing(work / "in") != before
        problem = judge(code, said, seconds) or ("an input was changed" if changed else "")
        return Finding(name, problem) if problem else None


def _listing(folder: Path) -> dict[str, tuple[int, int]]:
    found = {str(path): path.lstat() for path in folder.rglob("*")}
    return {name: (one.st_size, one.st_mtime_ns) for name, one in found.items() if not name.endswith("in")}


def in_process(arguments: list[str], work: Path) -> tuple[int, str, float]:
    """Exit code (negative: a signal), standard error and seconds of a command, run in a fork with limits."""
    errors, begun = work / "stderr", time.monotonic()
    child = os.fork()
    if not child:
        code = 70
        try:
            os.chdir(work)
            for stream, path in ((1, work / "stdout"), (2, errors)):
                os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600), stream)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w", errors="backslashreplace")  # noqa: SIM115
            used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(SECONDS)
            code = run(arguments)
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            with contextlib.suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)
    status = os.waitpid(child, 0)[1]
    said = errors.read_text(encoding="utf-8", errors="replace") if errors.exists() else ""
    return os.waitstatus_to_exitcode(status), said, time.monotonic() - begun


def judge(code: int, said: str, seconds: float) -> str:
    """What is wrong with the end of a command, if anything is."""
    if code == -signal.SIGALRM:
        return f"no end after {SECONDS} s"
    if "Traceback" in said or code not in (0, 2):
        return f"exit {code}: {' | '.join(said.strip().splitlines()[-6:])[-600:]}"
    errors = [line for line in said.splitlines() if line.startswith("freda: error:")]
    if code == 2 and (len(errors) != 1 or not errors[0].removeprefix("freda: error:").strip()):
        return f"exit 2 with {len(errors)} lines of error: {said[-300:]}"
    return f"{len(errors[0]):,} characters of error" if errors and len(errors[0]) > 3000 else ""


def findings(
    numbers: Iterator[int] | range, seed: int, folder: Path, deadline: float
) -> Iterator[tuple[int, Finding | None]]:
    """Cases by number, until time is up."""
    for number in numbers:
        if time.monotonic() > deadline:
            return
        yield number, case(number, seed, folder)


def main() -> int:
    """`python -m tests.fuzz`: print what was found; 1 if anything was."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", type=int, default=None)
    parser.add_argument("--first", type=int, default=0)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        make_seeds(Path(place))
        numbers = range(asked.first, 10**9) if asked.case is None else range(asked.case, asked.case + 1)
        count = found = 0
        for _, finding in findings(numbers, asked.seed, Path(place), time.monotonic() + asked.seconds):
            count += 1
            if finding is not None:
                found += 1
                print(f"{finding.case}\n    {finding.problem}\n", flush=True)
    print(f"{count:,} cases of seed {asked.seed}, {found} findings")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
