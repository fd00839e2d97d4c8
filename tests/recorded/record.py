"""Record what the results are now: `python tests/recorded/record.py`, or with the names of some parts.

Only after a change that was meant to change results: the diff of hashes.json then says which.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the folder that `recorded` is in

from recorded.fingerprint import difference
from recorded.running import FIXTURE, PARTS, computed, recorded, write


def main(asked: list[str]) -> int:
    unknown = sorted(set(asked) - set(PARTS))
    if unknown:
        print(f"there is no part {unknown[0]}; there are {', '.join(PARTS)}", file=sys.stderr)
        return 2
    parts = asked or list(PARTS)
    found = computed(parts)
    failed = {name: one["error"] for name, one in found["results"].items() if "error" in one}
    for name, error in failed.items():
        print(f"failed   {name}: {error}", file=sys.stderr)
    if failed:
        print("nothing is recorded", file=sys.stderr)
        return 1
    before = recorded() if FIXTURE.exists() else {"machine": found["machine"], "results": {}}
    if set(parts) != set(PARTS) and before["machine"] != found["machine"]:
        print("the other parts were recorded on another machine: record all parts", file=sys.stderr)
        return 1
    kept = {name: one for name, one in before["results"].items() if name.partition("/")[0] not in parts}
    results = {**kept, **found["results"]}
    for name in sorted(before["results"].keys() | results.keys()):
        old, new = before["results"].get(name), results.get(name)
        if old is None or new is None:
            print(f"{'new' if old is None else 'gone':8} {name}")
        elif old != new:
            print(f"{'changed':8} {name} ({difference(new, old):.1e} of its norm)")
    write({"machine": found["machine"], "results": results})
    print(f"{len(results)} results, {sum(found['seconds'].values()):.0f} s for {', '.join(parts)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
