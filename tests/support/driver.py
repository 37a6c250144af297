"""Stands in for CUDA's driver where there is none, and notes who asks it.

:func:`noted` makes every Python process below a folder believe that its torch is made for CUDA.  Each
question of torch to CUDA's runtime, and with that to the driver, is noted; NVML answers that there is no GPU,
and is not noted.  So it shows on any machine which process would have fixed its GPUs, by an import or by a
call.

:func:`library` makes a driver of two GPUs that reads ``CUDA_VISIBLE_DEVICES`` as CUDA's does: once.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest

_SITE = """
import ctypes, os, sys, traceback
from importlib.machinery import PathFinder

def note(*_):
    stack = [f"{f.filename}:{f.lineno}" for f in traceback.extract_stack()[:-1] if "importlib" not in f.filename]
    with open(NOTES, "a") as file:
        file.write(f"{os.getpid()}\\t{sys.argv[0]}\\t{' < '.join(reversed(stack[-8:]))}\\n")
    return 0

class Nvml:
    def nvmlInit(self):
        return 0
    def nvmlDeviceGetCount_v2(self, count):
        count._obj.value = 0
        return 0

class Library(ctypes.CDLL):
    def __new__(cls, name=None, *arguments, **options):
        if name == "libnvidia-ml.so.1":
            return Nvml()
        return super().__new__(cls)

class Finder:
    def find_spec(name, path, target=None):
        if name != "torch._C":
            return None
        spec = PathFinder.find_spec(name, path)
        made = spec.loader.exec_module
        def execute(module):
            made(module)
            module._cuda_getDeviceCount = module._cuda_init = module._cuda_getCurrentRawStream = note
        spec.loader.exec_module = execute
        return spec

ctypes.CDLL = Library
sys.meta_path.insert(0, Finder)
"""

_LIBRARY = """
#define _GNU_SOURCE
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
static int first = -1;
int cuInit(unsigned flags) {
    const char *visible = getenv("CUDA_VISIBLE_DEVICES");
    const char *notes = getenv("DRIVER_NOTES");
    FILE *file = notes ? fopen(notes, "a") : NULL;
    if (file) { fprintf(file, "%d\\t%s\\tcuInit\\n", getpid(), program_invocation_name); fclose(file); }
    if (first < 0) first = visible ? atoi(visible) : 0;
    return first < 2 ? 0 : 100;
}
int cuDeviceGet(int *device, int ordinal) { *device = first + ordinal; return 0; }
int cuDeviceGetUuid_v2(unsigned char *uuid, int device) { memset(uuid, 0xa0 + device, 16); return 0; }
"""


class Note(NamedTuple):
    """A process asked the driver; ``stack`` has the places in its code, the innermost first."""

    pid: int
    program: str
    stack: str


def noted(folder: Path) -> dict[str, str]:
    """Returns the environment in which processes note in ``folder`` what they ask the driver, by torch or by
    its library.
    """
    place = str(folder / "notes")
    (folder / "sitecustomize.py").write_text(f"NOTES = {place!r}\n{_SITE}")
    return {"PYTHONPATH": str(folder), "LD_LIBRARY_PATH": str(library(folder)), "DRIVER_NOTES": place}


def notes(folder: Path) -> list[Note]:
    """Returns who has asked the driver."""
    lines = (folder / "notes").read_text().splitlines() if (folder / "notes").exists() else []
    return [Note(int(pid), program, stack) for pid, program, stack in (line.split("\t") for line in lines)]


def library(folder: Path) -> Path:
    """Makes a driver of two GPUs, whose UUIDs are 16 bytes a0 and 16 bytes a1.  Without a C compiler the test
    is skipped.
    """
    if (compiler := shutil.which("cc")) is None:
        pytest.skip("needs a C compiler")
    (folder / "driver.c").write_text(_LIBRARY)
    subprocess.run(
        [
            compiler,
            "-shared",
            "-fPIC",
            "-Wl,-soname,libcuda.so.1",
            "-o",
            folder / "libcuda.so.1",
            folder / "driver.c",
        ],
        check=True,
    )
    return folder
