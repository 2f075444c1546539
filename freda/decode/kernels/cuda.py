"""CUDA C++ built when it is first needed, by the compiler library that every CUDA build of PyTorch brings along."""

from __future__ import annotations

import ctypes
import functools
import site
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

SHARED_MEMORY = 8  # the driver's number for the attribute that allows a kernel more shared memory than 48 KB


class Unavailable(RuntimeError):
    """There is no compiler, or it or the driver refused."""


def kernel(source: Path, name: str, defines: Mapping[str, object], shared: int) -> Kernel:
    """A kernel of a source file, compiled for the present GPU with macros defined, with `shared` bytes of memory."""
    options = [f"-D{key}={value}" for key, value in defines.items()]
    major, minor = torch.cuda.get_device_capability()
    image = _compiled(
        source.read_text(), (f"--gpu-architecture=sm_{major}{minor}", "--std=c++17", f"-I{source.parent}", *options)
    )
    return Kernel(image, name, shared)


@functools.cache
def _compiled(source: str, options: tuple[str, ...]) -> bytes:
    """Machine code of a source."""
    library, program, size = _compiler(), ctypes.c_void_p(), ctypes.c_size_t()
    library.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"source.cu", 0, None, None)
    given = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    try:
        if library.nvrtcCompileProgram(program, len(options), given):
            library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
            log = ctypes.create_string_buffer(size.value)
            library.nvrtcGetProgramLog(program, log)
            raise Unavailable(log.value.decode(errors="replace"))
        library.nvrtcGetCUBINSize(program, ctypes.byref(size))
        image = ctypes.create_string_buffer(size.value)
        library.nvrtcGetCUBIN(program, image)
        return image.raw
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


@functools.cache
def _compiler() -> ctypes.CDLL:
    """NVRTC: where the loader finds it, or in a package beside PyTorch."""
    major = (torch.version.cuda or "0").split(".")[0]
    name = f"libnvrtc.so.{major}"
    folders = {Path(folder) for folder in (*site.getsitepackages(), sysconfig.get_path("purelib"))}
    beside = [str(path) for folder in folders for path in sorted(folder.glob(f"nvidia/*/lib/{name}"))]
    for path in (name, *beside):
        try:
            return ctypes.CDLL(path)
        except OSError:
            continue
    raise Unavailable(f"{name} is not there")


class Kernel:
    """A kernel whose thread blocks all run at the same time, and may wait for each other."""

    def __init__(self, image: bytes, name: str, shared: int) -> None:
        torch.cuda.current_stream().synchronize()  # the driver works on the context that PyTorch has made
        self._driver, self._module, self._function = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p(), ctypes.c_void_p()
        self._shared, self._image = shared, image
        self._check(self._driver.cuModuleLoadData(ctypes.byref(self._module), image))
        function = ctypes.byref(self._function)
        self._check(self._driver.cuModuleGetFunction(function, self._module, name.encode()))
        self._check(self._driver.cuFuncSetAttribute(self._function, SHARED_MEMORY, shared))

    def launch(self, args: ctypes.Structure, blocks: int, threads: int) -> None:
        """Run it on the present stream, with one argument."""
        given: Any = (ctypes.c_void_p * 1)(ctypes.addressof(args))
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        size = (blocks, 1, 1, threads, 1, 1, self._shared)
        self._check(self._driver.cuLaunchCooperativeKernel(self._function, *size, stream, given))

    def _check(self, result: int) -> None:
        if result:
            text = ctypes.c_char_p()
            self._driver.cuGetErrorString(result, ctypes.byref(text))
            raise Unavailable((text.value or b"CUDA error").decode())
