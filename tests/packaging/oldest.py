"""The lowest versions that pyproject.toml allows, a line each, for pip: `python oldest.py hf demo ot report studio`.

torch is left out. The make target installs it first and exactly, because older builds of it bring gigabytes of CUDA
packages; the lowest version of torch itself is therefore not tested here.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import tomllib

project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
wanted = [*project["dependencies"], *(one for extra in sys.argv[1:] for one in project["optional-dependencies"][extra])]
lowest = {}
for requirement in wanted:
    name, least = re.fullmatch(r"([\w-]+)(?:\[\w+\])?>=([\d.]+).*", requirement).groups()  # type: ignore[union-attr]
    lowest[name] = least
del lowest["torch"]
print("\n".join(f"{name}=={least}" for name, least in lowest.items()))
