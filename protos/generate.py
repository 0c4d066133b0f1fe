"""Generates `prefixcache/_pb` from the `.proto` files here, or checks that it is fresh.

    python protos/generate.py            # write prefixcache/_pb
    python protos/generate.py --check    # exit 1 if what is there differs from what would be written

Beside the messages and stubs it writes type stubs (`.pyi`) with mypy-protobuf. protoc assumes that `prefixcache/v1`
is a Python package of its own; since the generated code lives below `prefixcache._pb`, its imports are moved there.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

PROTO_DIR = Path(__file__).resolve().parent
OUTPUT_DIR = PROTO_DIR.parent / "prefixcache" / "_pb"
PACKAGE_INIT = '"""Generated from `protos/`; `make proto` writes it, nobody edits it."""\n'
GENERATED_IMPORT = re.compile(r"^(from|import) prefixcache\.(?=v\d)", re.MULTILINE)


def main() -> int:
    parser = argparse.ArgumentParser(description="Generate prefixcache/_pb from protos/.")
    parser.add_argument("--check", action="store_true", help="write nothing; fail if the generated code is stale")
    check = parser.parse_args().check

    wanted = generated_files()
    present = {path.relative_to(OUTPUT_DIR): path.read_text() for path in OUTPUT_DIR.rglob("*.py*") if is_source(path)}
    if check:
        stale = sorted(str(name) for name in wanted.keys() | present.keys() if wanted.get(name) != present.get(name))
        for name in stale:
            print(f"stale: prefixcache/_pb/{name} (run `make proto`)", file=sys.stderr)
        return 1 if stale else 0

    for name in present.keys() - wanted.keys():
        (OUTPUT_DIR / name).unlink()
    for name, text in wanted.items():
        (OUTPUT_DIR / name).parent.mkdir(parents=True, exist_ok=True)
        (OUTPUT_DIR / name).write_text(text)
    return 0


def generated_files() -> dict[Path, str]:
    """All files of `prefixcache/_pb` as they should be, by path below it."""
    with tempfile.TemporaryDirectory() as folder:
        run_protoc(Path(folder))
        sources = {path.relative_to(folder): path.read_text() for path in Path(folder).rglob("*.py*")}
    files = {name: GENERATED_IMPORT.sub(r"\1 prefixcache._pb.prefixcache.", text) for name, text in sources.items()}
    packages = {parent for name in files for parent in name.parents}
    return files | {package / "__init__.py": PACKAGE_INIT for package in packages}


def run_protoc(folder: Path) -> None:
    scripts = Path(sysconfig.get_path("scripts"))
    command = [sys.executable, "-m", "grpc_tools.protoc", f"--proto_path={PROTO_DIR}"]
    command += [f"--plugin={plugin}={scripts / plugin}" for plugin in ("protoc-gen-mypy", "protoc-gen-mypy_grpc")]
    command += [f"--{kind}_out={folder}" for kind in ("python", "grpc_python")]
    command += [f"--{kind}_out=quiet:{folder}" for kind in ("mypy", "mypy_grpc")]
    command += sorted(str(path) for path in PROTO_DIR.rglob("*.proto"))
    subprocess.run(command, check=True)


def is_source(path: Path) -> bool:
    return path.suffix in {".py", ".pyi"}


if __name__ == "__main__":
    sys.exit(main())
