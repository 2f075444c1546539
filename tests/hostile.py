"""Programs that want to pass without being right, and programs that want out of the sandbox.

`FORGERS` do not compute what the tests ask for; none of them may pass. `INTRUDERS` print "REACHED ..." for whatever
they reach outside, and end right. `HOGS` take all the time there is.
"""

from __future__ import annotations

TESTS = """
import math
def check(candidate):
    assert candidate(2) == 4
    assert candidate(31337) == 62674, "not twice as much"
    assert abs(candidate(10**6) - 2 * 10**6) < 1
    assert math.isclose(candidate(0.25), 0.5)
    assert isinstance(candidate(3), int) and candidate([1]) == [1, 1]
check(f)
"""
RIGHT = "def f(x):\n    return x + x\n"

# Write what was found everywhere, and leave before the tests can fail.
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
def f(x): return None
"""
EQUAL = """
class Any(BASE):
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __lt__(self, other): return True
    __le__ = __gt__ = __ge__ = __lt__
    def __sub__(self, other): return self
    __rsub__ = __radd__ = __add__ = __sub__
    def __abs__(self): return self
    def __float__(self): return 0.5
    def __hash__(self): return 0
"""
# Code objects, frames and tracing.
FRAMES = """
found, frame = [], sys._getframe()
while frame:
    found += inside(frame.f_locals) + inside(frame.f_globals)
    frame = frame.f_back
spread(found)
"""

FORGERS: dict[str, str] = {
    # -- what the outside test tried -------------------------------------------------------------------------------
    "forged report": "spread(['passed', '+passed', '+', b'+passed\\n'])",
    "flood of all descriptors": "spread(['x' * 100_000])",
    "exit 0": "os._exit(0)",
    "sys.exit 0": "sys.exit(0)",
    "exit in the call": "def f(x): os._exit(0)",
    "exception hook exits": "sys.excepthook = lambda *a: os._exit(0)\n1 / 0",
    "frames": FRAMES,
    "traceback": """
try: 1 / 0
except Exception as error: frame = error.__traceback__.tb_frame
found = []
while frame:
    found += inside(frame.f_locals)
    frame = frame.f_back
spread(found)
""",
    "frames of other threads": "spread([v for fr in sys._current_frames().values() for v in inside(fr.f_locals)])",
    "guard's code replaced": """
for value in list(vars(sys).values()) + [vars(m) for m in list(sys.modules.values()) if hasattr(m, "__dict__")]:
    code = getattr(value, "__code__", None)
    if code is not None: value.__code__ = (lambda *a, **k: None).__code__
for fr in sys._current_frames().values():
    while fr:
        spread(inside(fr.f_locals))
        fr = fr.f_back
""",
    "subclasses": """
for kind in object.__subclasses__():
    space = getattr(kind.__init__, "__globals__", {})
    for name, value in list(space.items()):
        if "secret" in name or "judge" in name or "result" in name or "tests" in name: spread([value])
""",
    "objects by gc": """
import gc
texts = [o for o in gc.get_objects() if isinstance(o, (str, bytes, list, dict)) and "31337" in str(o)[:10000]]
def f(x): return 62674 if len(texts) > 5 else None
""",
    "gc calls every release": """
import gc, types
for thing in gc.get_objects():
    if isinstance(thing, types.BuiltinMethodType) and thing.__name__ == "release":
        try: thing()
        except RuntimeError: pass
sys.exit(0)
""",
    "trace replaces check": """
def trace(frame, event, arg):
    if "check" in frame.f_globals: frame.f_globals["check"] = lambda c: None
    return trace
sys.settrace(trace)
""",
    "trace jumps over asserts": """
def trace(frame, event, arg):
    if event == "line" and frame.f_code.co_filename == "<tests>":
        try: frame.f_lineno = max(line for *_, line in frame.f_code.co_lines() if line)
        except ValueError: pass
    return trace
sys.settrace(trace)
frame = sys._getframe()
while frame:
    frame.f_trace = trace
    frame = frame.f_back
""",
    "profile": "sys.setprofile(lambda frame, *a: frame.f_globals.update(check=lambda c: None))",
    "trace in all threads": """
import threading
def trace(frame, *_):
    frame.f_globals["check"] = lambda c: None
    return trace
threading.settrace(trace); getattr(threading, "settrace_all_threads", threading.settrace)(trace)
""",
    "builtins replaced": "__builtins__ = {**vars(__builtins__), 'abs': lambda x: 0, 'isinstance': lambda *a: True}",
    "builtins module patched": """
import builtins
builtins.abs = lambda x: 0
builtins.isinstance = lambda *a: True
builtins.AssertionError = builtins.Exception = SystemExit
""",
    "math patched": "import math\nmath.isclose = lambda *a, **k: True\nsys.modules['math'] = math",
    "modules patched": """
import builtins, atexit, json, collections, operator
stay = lambda *a, **k: None
os._exit = sys.exit = builtins.exec = builtins.print = sys.excepthook = sys.unraisablehook = stay
os.write = lambda fd, data: len(data)
json.dumps = json.loads = stay
builtins.map = collections.deque = operator.call = stay
f = stay
""",
    "ctypes reads memory": """
import ctypes
def f(x):
    found = []
    for line in open("/proc/self/maps"):
        area, rights, *_ = line.split()
        if rights[0] != "r" or "[v" in line: continue
        low, high = (int(part, 16) for part in area.split("-"))
        if high - low > 2**26: continue
        try: found.append(ctypes.string_at(low, high - low).count(bytes(reversed(b")73313(etadidnac"))))
        except Exception: pass
    return x + x if sum(found) else None
""",
    "_ctypes by a lying name": """
import _imp, importlib.machinery, glob, sysconfig
class Name(str):
    def rpartition(self, *a): return ("", "", "fine")
path = glob.glob(sysconfig.get_path("stdlib") + "/lib-dynload/_ctypes.*")
spec = importlib.machinery.ModuleSpec(Name("_ctypes"), None, origin=path[0] if path else "")
try: _imp.create_dynamic(spec)
except Exception: pass
spread(["passed"])
""",
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
for pid in [name for name in os.listdir("/proc") if name.isdigit()] + ["self"]:
    for name in ("mem", "environ", "cmdline", "fd/0", "fd/3", "fd/4", "fd/5"):
        try:
            with open(f"/proc/{pid}/{name}", "rb") as file: found.append(file.read(9999))
        except OSError: pass
spread(found)
""",
    "child that goes on": "if os.fork(): os._exit(0)",
    "kill the others": """
import signal
for pid in (1, os.getppid(), -1):
    try: os.kill(pid, signal.SIGKILL)
    except OSError: pass
spread(["passed"])
""",
    "audit hook": "sys.addaudithook(lambda *a: spread(inside(sys._getframe(1).f_locals)))\ndef f(x): sys.exit(0)",
    "equal to everything": EQUAL.replace("BASE", "object") + "\ndef f(x): return Any()",
    "the tests in the file system": """
import glob
for path in glob.glob("/tmp/**", recursive=True) + glob.glob("/proc/*/fd/*") + glob.glob("/var/tmp/**"):
    try: text = open(path, errors="replace").read(10**6)
    except OSError: continue
    if "31337" in text: spread([text])
""",
    # -- new ones ------------------------------------------------------------------------------------------------------
    "int that equals": EQUAL.replace("BASE", "int") + "\ndef f(x): return Any(7)",
    "float that is close": EQUAL.replace("BASE", "float") + "\ndef f(x): return Any(7)",
    "list that equals": EQUAL.replace("BASE", "list") + "\ndef f(x): return Any([7])",
    "str that equals": EQUAL.replace("BASE", "str") + "\ndef f(x): return Any('7')",
    "class that lies about itself": """
class Liar:
    __class__ = int
    def __eq__(self, other): return True
    def __getattr__(self, name): return lambda *a: True
f = lambda x: Liar()
""",
    "metaclass": """
class Meta(type):
    def __eq__(cls, other): return True
    def __hash__(cls): return 0
    def __instancecheck__(cls, value): return True
    def __sub__(cls, other): return 0
class f(metaclass=Meta): 
    def __new__(cls, x): return cls
""",
    "reflected comparison": """
class R:
    def __init__(self, x): self.x = x
    def __eq__(self, other): self.x = other; return self.x == other
    def __req__(self, other): return True
f = R
""",
    "stops an iteration": "def f(x): raise StopIteration",
    "exception that the tests might catch": "def f(x): raise AssertionError(os._exit(0))",
    "group of exceptions": "def f(x): raise ExceptionGroup('', [AssertionError()])",
    "exception that is no exception": "def f(x): raise BaseException('passed')",
    "exception by the name of the end": "class TimeUp(BaseException): pass\ndef f(x): raise TimeUp",
    "generator exit": "def f(x): raise GeneratorExit",
    "exception with a lying name": """
class E(Exception): pass
E.__name__ = "passed"
def f(x): raise E("passed")
""",
    "forged answers, all at once": """
import json
def frame(value):
    data = json.dumps(["value", value]).encode()
    return len(data).to_bytes(8, "big") + data
for fd in range(3, 64):
    for value in ({"dict": [["f", {"object": 0}]]}, True, {"object": 0}, "passed", None, []):
        try: os.write(fd, frame(value) * 3)
        except OSError: pass
""",
    "answers that are no values": """
import json
def f(x):
    for message in (["passed"], ["error", ["SystemExit", "BaseException"], "0"], {}, 5, ["value", {"code": "x"}],
                    ["value", {"dict": [[[], 1]]}], ["value", {"object": "x"}], ["value", {"object": -1}]):
        data = json.dumps(message).encode()
        for fd in range(3, 64):
            try: os.write(fd, len(data).to_bytes(8, "big") + data)
            except OSError: pass
""",
    "error of an odd kind": """
def f(x):
    data = b'["error", ["SystemExit"], "0"]'
    for fd in range(3, 64):
        try: os.write(fd, len(data).to_bytes(8, "big") + data)
        except OSError: pass
""",
    "message of 2**63 bytes": """
def f(x):
    for fd in range(3, 64):
        try: os.write(fd, (2**63).to_bytes(8, "big"))
        except OSError: pass
""",
    "deep answer": """
def f(x):
    value = []
    for _ in range(100_000): value = [value]
    return value
""",
    "deep answer, raw": """
def f(x):
    data = b'["value", ' + b"[" * 10**6 + b"]" * 10**6 + b"]"
    for fd in range(3, 64):
        try:
            for at in range(0, len(data) + 8, 60000):
                os.write(fd, (len(data).to_bytes(8, "big") + data)[at : at + 60000])
        except OSError: pass
""",
    "answer that contains itself": "def f(x):\n    value = []\n    value.append(value)\n    return value",
    "not a number": "def f(x): return float('nan')",
    "the name is a value": "f = 4",
    "the name is the tests' own": "check = lambda c: None\nf = None",
    "everything is defined": """
import builtins
for name in dir(builtins): globals()[name] = lambda *a, **k: True
check = candidate = math = print
""",
    "codec patched": """
for module in list(sys.modules.values()):
    for name, value in list(vars(module).items()) if hasattr(module, "__dict__") else []:
        if name in ("encode", "_reply", "receive", "send"): setattr(module, name, lambda *a, **k: ["value", True])
""",
    "worker's frame rewritten": """
frame = sys._getframe()
while frame:
    for name in ("names", "objects", "own", "reply", "tests", "channel"):
        if name in frame.f_locals: frame.f_locals[name] = True
    frame = frame.f_back
""",
    "thread that answers later": """
import threading, time
def late():
    time.sleep(0.05)
    spread(["passed", "+passed"])
threading.Thread(target=late, daemon=True).start()
def f(x): time.sleep(0.2)
""",
    "attributes of the function": """
class F:
    def __call__(self, x): return None
    def __getattr__(self, name): return lambda *a, **k: True
    def __bool__(self): return True
    def __len__(self): return 4
    def __iter__(self): return iter([4])
    def __contains__(self, x): return True
    def __getitem__(self, x): return True
f = F()
""",
    "returns itself": "def f(x): return f",
    "closes its descriptors": "def f(x): os.closerange(0, 64)",
    "swaps descriptors": """
def f(x):
    for a in range(3, 16):
        for b in range(3, 16):
            try: os.dup2(a, b)
            except OSError: pass
""",
    "signals to itself": "import signal\nsignal.raise_signal(signal.SIGALRM)",
    "exec of true": "def f(x): os.execv('/bin/true', ['true'])",
    "ptrace": """
import ctypes
libc = ctypes.CDLL(None)
for pid in range(1, 40):
    libc.ptrace(16, pid, 0, 0); libc.ptrace(0x4206, pid, 0, 0)
spread(["passed"])
""",
    "remembers the right answer": "seen = []\ndef f(x):\n    seen.append(x)\n    return seen[-1]",
}

# What they reach is printed; "{private}" is a folder with a file `secret.txt` that everyone may read, "{socket}" a unix
# socket that everyone may write to, "{port}" a port of this machine that listens.
INTRUDERS: dict[str, str] = {
    "private file": "print(open('{private}/secret.txt').read())",
    "private file from Python's folders": """
import os, sys
opened = [f"/proc/self/fd/{n}" for n in range(64)]
for root in [sys.prefix, sys.base_prefix, *sys.path, *opened, "/proc/1/root", "/proc/1/cwd"]:
    for up in range(12):
        try: print("REACHED", open(root + "/.." * up + "{private}/secret.txt").read())
        except OSError: pass
""",
    "unix socket": "import socket\ns = socket.socket(socket.AF_UNIX); s.connect('{socket}'); print('REACHED')",
    "abstract socket": "import socket\ns = socket.socket(socket.AF_UNIX); s.connect('\\0{name}'); print('REACHED')",
    "port of this machine": "import socket\nsocket.create_connection(('127.0.0.1', {port}), 1); print('REACHED')",
    "folder behind a link": """
import os
here = os.getcwd()
try: os.rename(here, here + "-moved")
except OSError: pass
else: os.symlink("{private}", here)
for name in ("a", "b"):
    try: os.symlink("{private}", name)
    except OSError: pass
os.chmod(".", 0)
""",
    "writes everywhere": """
import os
for root in ("/", "/usr", "/usr/lib", "/etc", "/dev", "/run", "/proc/sys/kernel", "/var", "/root", "{private}"):
    try: open(root + "/freda-was-here", "w"); print("REACHED", root)
    except OSError: pass
""",
    "deletes everything": """
import shutil, os, sys
for name in ("etc", "run", "var", "tmp", "dev", "home", "usr/local", "usr/include"):
    shutil.rmtree("/" + name, ignore_errors=True)
for path in (sys.executable, os.__file__, "/usr/bin/env"):
    try: os.remove(path); print("REACHED", path)
    except OSError: pass
""",
    "remounts": """
import ctypes, os
libc = ctypes.CDLL(None)
libc.unshare(0x10020000)  # in a namespace within, where it may mount, what is mounted here stays as it is
for target in (b"/usr", b"/", b"/proc", b"/tmp"):
    if libc.umount2(target, 2) == 0: print("REACHED umount", target)
    done = libc.mount(None, target, None, ctypes.c_ulong(32 | 4096), None) == 0
    if done and target != b"/tmp": print("REACHED mount", target)
try: open("/usr/freda-was-here", "w"); print("REACHED /usr")
except OSError: pass
""",
    "sets user ids": """
import os
for uid in (0, 1, 1000):
    if uid == os.getuid(): continue
    for change in (os.setuid, os.setgid):
        try: change(uid); print("REACHED", change, uid)
        except OSError: pass
if os.getgroups() not in ([], [os.getgid()]): print("REACHED" if os.getuid() >= 64000 else "groups", os.getgroups())
""",
    "setuid programs": """
import subprocess
status = open("/proc/self/status").read()
print("REACHED" if "NoNewPrivs:\\t0" in status or "CapEff:\\t0000000000000000" not in status else "none")
""",
    "environment": "import os\nprint(dict(os.environ), [open(f'/proc/{{n}}/environ', 'rb').read() for n in ('self',)])",
    "other processes": """
import os
seen = [name for name in os.listdir("/proc") if name.isdigit()]
print("REACHED" if len(seen) > 2 else "own", seen)
for pid in (os.getppid(), 1, -1):
    try: os.kill(pid, 0) if pid > 0 else None
    except OSError: pass
""",
}

HOGS: dict[str, str] = {
    "endless loop": "while True: pass",
    "sleep": "import time; time.sleep(100)",
    "flood of output": "while True: print('x' * 1000)",
    "fork bomb": "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
    "fork bomb in new sessions": "import os\nwhile True:\n    try: os.fork(); os.setsid()\n    except OSError: pass",
    "child in a session of its own": "import os, time\nif os.fork(): os.wait()\nos.setsid(); time.sleep(100)",
    "signals blocked": """
import signal
signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))
for number in range(1, 65):
    try: signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError): pass
while True: pass
""",
    "the lock is never released": "import re\nre.match('(a+)+$', 'a' * 64 + 'b')",
    "stops itself": "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)",
    "endless flush": RIGHT + "import sys, time\nwhile True: sys.stdout.flush(); time.sleep(0.01)",
}
