"""Makes a folder for `PYTHONPATH` in which a newer vLLM runs on a CPU: `python tests/next_vllm.py WHEEL OUT`.

A release of vLLM that has no CPU wheel yet is published for CUDA. What the plugin depends on is its Python code: that
is taken from WHEEL, and the compiled libraries from the vLLM that is installed. Enough for models in one process.
"""

from __future__ import annotations

import argparse
import importlib.util
import zipfile
from pathlib import Path

COMPILED = (".so", ".cubin", ".a", ".cuh", ".cu")


def make_overlay(wheel: Path, out: Path) -> str:
    """Returns the version, which calls itself one for CPUs, as vLLM's platforms look for that."""
    installed = importlib.util.find_spec("vllm")
    assert installed is not None, "vLLM is not installed"
    assert installed.origin is not None
    with zipfile.ZipFile(wheel) as archive:
        for member in archive.infolist():
            if member.filename.startswith("vllm/") and not member.filename.endswith(COMPILED):
                archive.extract(member, out)
    version = wheel.name.split("-")[1].partition("+")[0] + "+cpu"
    record = out / f"vllm-{version}.dist-info" / "METADATA"
    record.parent.mkdir(exist_ok=True)
    record.write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    here = Path(installed.origin).parent
    for library in here.rglob("*.so"):
        link = out / "vllm" / library.relative_to(here)
        link.unlink(missing_ok=True)
        link.symlink_to(library)
    return version


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    print(f"vLLM {make_overlay(options.wheel, options.out)} in {options.out}")


if __name__ == "__main__":
    main()
