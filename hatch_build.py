"""Build hook: compiles the CPU kernels into the package, where there is a compiler; without one the package is pure."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class NativeKernels(BuildHookInterface):  # type: ignore[type-arg]
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, and mark the wheel as one for this platform; say so if it stays a pure one."""
        sys.path.insert(0, str(Path(self.root) / "prefixcache" / "model" / "native"))
        import build  # noqa: PLC0415  (by path: the package itself needs torch, which no build environment has)

        why_not = build.obstacle()
        if why_not is None:
            try:
                library = build.build()
            except subprocess.CalledProcessError as error:
                why_not = f"the compiler failed with exit code {error.returncode}"
        if why_not is not None:
            self.app.display_warning(f"prefixcache is installed without its own CPU kernels: {why_not}.")
            return
        build_data["pure_python"] = False
        build_data["infer_tag"] = True
        build_data["artifacts"].append(str(library.relative_to(self.root)))
