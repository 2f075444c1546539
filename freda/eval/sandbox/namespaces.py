"""A machine of its own for one process and its children, made of Linux namespaces: no network, no other process, no
file but Python's and the system's, which cannot be written, and one small folder in memory that can.

Everything is made with calls of the C library, and is gone when the last process in it ends. Nothing imports freda
but for this folder's own modules: start-up is most of the cost of a short program.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Sequence

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x20000, 0x4000000, 0x8000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
ALL = CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWPID | CLONE_NEWNET
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC, MS_PRIVATE = 1, 2, 4, 8, 1 << 12, 1 << 14, 1 << 18
MNT_DETACH, AT_RECURSIVE, AT_FDCWD = 2, 0x8000, -100
SYS_MOUNT_SETATTR = 442  # the same on all processors
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 4, 36, 38
CAPABILITY_VERSION = 0x20080522
SIGKILL = 9

NEW_ROOT = "/sys"  # where the new root is put together: a folder that exists everywhere and nothing is taken from
ROOM = "/tmp"  # the folder of the program
SYSTEM = (
    *("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/nix/store", "/gnu/store"),
    *("/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d", "/etc/alternatives", "/etc/localtime"),
    *("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom"),
)
LINKS = {
    "/dev/shm": ROOM,
    "/var/tmp": ROOM,
    "/dev/fd": "/proc/self/fd",
    "/dev/stdin": "/proc/self/fd/0",
    "/dev/stdout": "/proc/self/fd/1",
    "/dev/stderr": "/proc/self/fd/2",
}
EMPTY = ("/proc", "/run", ROOM)

_libc = ctypes.CDLL(None, use_errno=True)


def _call(name: str, *arguments: object) -> None:
    """Call a function of the C library; OSError says which one failed."""
    if getattr(_libc, name)(*arguments) < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def prctl(option: int, value: int) -> None:
    """Set an attribute of this process."""
    _call("prctl", option, ctypes.c_ulong(value), ctypes.c_ulong(0), ctypes.c_ulong(0), ctypes.c_ulong(0))


def unshare(user: bool) -> None:
    """Leave the namespaces of the host; the next child is process 1 of a new one. An ordinary user needs a namespace of
    users as well in order to make the others; programs can then make no more of them."""
    uid, gid, host = os.getuid(), os.getgid(), os.readlink("/proc/self/ns/mnt")
    _call("unshare", ALL | (CLONE_NEWUSER if user else 0))
    if os.readlink("/proc/self/ns/mnt") == host:
        raise OSError("unshare: no namespace was made")
    if user:
        ids = {"self/setgroups": "deny", "self/uid_map": f"{uid} {uid} 1", "self/gid_map": f"{gid} {gid} 1"}
        for name, text in {**ids, "sys/user/max_user_namespaces": "0"}.items():
            with open(f"/proc/{name}", "w") as file:
                file.write(text)


def drop_rights(uid: int | None, saved: int | None = None) -> None:
    """Become another user, if `uid` names one, without groups and capabilities, for ever, but for a user id `saved`
    that can be taken again."""
    if uid is not None:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid if saved is None else saved)
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    prctl(PR_SET_DUMPABLE, 0)  # its memory is closed to other processes of the same user
    prctl(PR_SET_PDEATHSIG, SIGKILL)  # a change of user has reset it
    if saved is None:
        header, none = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION, 0), (ctypes.c_uint32 * 6)()
        _call("capset", header, none)


def change_root(paths: Sequence[str], megabytes: int) -> None:
    """Give all processes of this mount namespace a root that holds the system's folders and `paths`, read-only, and an
    empty folder for `megabytes`, which becomes the working folder. Only process 1 of a new namespace may call it: on
    the host it would change the root of every process."""
    if os.getpid() != 1 or os.getppid() != 0:
        raise OSError("change_root: not in a namespace of its own")
    _mount(None, "/", None, MS_REC | MS_PRIVATE)
    _mount("tmpfs", NEW_ROOT, "tmpfs", MS_NOSUID, "mode=755,size=1m")
    for path in EMPTY:
        os.mkdir(NEW_ROOT + path)
    _mount("tmpfs", NEW_ROOT + ROOM, "tmpfs", MS_NODEV, f"mode=1777,size={megabytes}m,nr_inodes={megabytes * 256}")
    for path in (*SYSTEM, *sorted(paths)):
        _show(path)
    for path, target in LINKS.items():
        os.makedirs(os.path.dirname(NEW_ROOT + path), exist_ok=True)
        os.symlink(target, NEW_ROOT + path)
    _set_attributes(NEW_ROOT, AT_RECURSIVE, MS_RDONLY | MS_NOSUID, 0)
    _set_attributes(NEW_ROOT + ROOM, 0, 0, MS_RDONLY)
    with contextlib.suppress(PermissionError):  # in a container that hides parts of /proc: then there is none
        _mount("proc", f"{NEW_ROOT}/proc", "proc", MS_RDONLY | MS_NOSUID | MS_NODEV | MS_NOEXEC)
    os.chdir(NEW_ROOT)
    _call("pivot_root", b".", b".")
    _call("umount2", b".", MNT_DETACH)
    os.chdir(ROOM)


def _set_attributes(path: str, flags: int, on: int, off: int) -> None:
    attributes = (ctypes.c_uint64 * 4)(on, off, 0, 0)  # struct mount_attr
    size = ctypes.c_size_t(ctypes.sizeof(attributes))
    _call("syscall", ctypes.c_long(SYS_MOUNT_SETATTR), AT_FDCWD, path.encode(), flags, attributes, size)


def _mount(source: str | None, target: str, kind: str | None, flags: int, data: str = "") -> None:
    texts = [None if text is None else text.encode() for text in (source, target, kind)]
    _call("mount", *texts, ctypes.c_ulong(flags), data.encode())


def _show(path: str) -> None:
    """Let a file, a folder or a link be where it is in the new root, too."""
    place = NEW_ROOT + path
    if os.path.lexists(place) or not os.path.lexists(path):
        return
    os.makedirs(os.path.dirname(place), exist_ok=True)
    if os.path.islink(path):
        os.symlink(os.readlink(path), place)
        return
    if os.path.isdir(path):
        os.mkdir(place)
    else:
        os.close(os.open(place, os.O_CREAT, 0o644))
    _mount(path, place, None, MS_BIND | MS_REC)


def python_paths() -> list[str]:
    """Where this interpreter and its packages are."""
    found = os.environ.get("LD_LIBRARY_PATH", "").split(":")
    for prefix in {sys.prefix, sys.base_prefix, os.path.realpath(sys.prefix), os.path.realpath(sys.base_prefix)}:
        found += [f"{prefix}/{name}" for name in ("bin", "lib", "lib32", "lib64", "pyvenv.cfg")]
    return [
        path for path in found if path.startswith("/") and not path.startswith(("/usr/", "/proc/", "/sys/", "/dev/"))
    ]
