"""Run command lines one after the other in one process, each through the program's own entry point.

    python verbs_in_turn.py CODES < LINES

Every line is a JSON list of words. The exit codes go into the file CODES: stdout may be anything, also closed.
Importing torch takes longer than all the verbs, so one process serves them all.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from isomerge.cli import main

codes = Path(sys.argv[1])
for line in sys.stdin.readlines():
    # As the interpreter decodes its arguments, whatever the locale.
    sys.argv = ["isomerge", *(os.fsdecode(word.encode("utf-8")) for word in json.loads(line))]
    try:
        main()
        code: object = "returned"
    except SystemExit as end:
        code = end.code
    except BaseException as error:
        code = repr(error)
    with codes.open("a", encoding="utf-8") as file:
        file.write(json.dumps([sys.argv[1], code]) + "\n")
