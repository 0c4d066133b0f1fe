"""Compiles the kernels into this folder: `python prefixcache/model/native/build.py`. Standard library only.

Installing the package does this too, where there is a C++ compiler; without one everything runs on PyTorch's kernels.
"""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parent
LIBRARY = FOLDER / "kernels.so"
SOURCES = sorted([*FOLDER.glob("*.cpp"), *FOLDER.glob("*.h")])

# x86-64-v3 is AVX2, FMA and F16C; library.py looks for them before it loads what was built.
MACHINE_FLAGS = {"x86_64": ["-march=x86-64-v3"], "aarch64": []}
# The two -fno say that nobody reads errno or floating-point exceptions: results stay as IEEE 754 has them.
FLAGS = ["-std=c++17", "-O3", "-fPIC", "-shared", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-Wno-psabi"]


def obstacle() -> str | None:
    """Say why the kernels cannot be compiled here, or return None."""
    if sys.platform != "linux" or platform.machine() not in MACHINE_FLAGS:
        return f"they are written for Linux on x86-64 and Arm, not {sys.platform} on {platform.machine()}"
    if shutil.which(_compiler()[0]) is None:
        return f"there is no C++ compiler ({_compiler()[0]}; another one can be named in $CXX)"
    return None


def build() -> Path:
    """Compile and return the library; an interrupted or failed build leaves the old one.

    Raises:
        subprocess.CalledProcessError: The compiler failed; it has said why on standard error.
    """
    unfinished = LIBRARY.with_suffix(f".{os.getpid()}.tmp")
    command = [
        *_compiler(),
        *FLAGS,
        *MACHINE_FLAGS[platform.machine()],
        str(FOLDER / "kernels.cpp"),
        "-o",
        str(unfinished),
    ]
    try:
        subprocess.run(command, check=True)
        unfinished.replace(LIBRARY)
    finally:
        unfinished.unlink(missing_ok=True)
    return LIBRARY


def _compiler() -> list[str]:
    return shlex.split(os.environ.get("CXX", "g++"))


if __name__ == "__main__":
    why_not = obstacle()
    if why_not is not None:
        sys.exit(f"The kernels cannot be compiled: {why_not}.")
    print(build())
