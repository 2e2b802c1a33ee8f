"""All benches, or those that are named: `python -m tests.bench [NAME ...] [--quick]`; `make bench` runs it.

Each runs in a process of its own. Their tables go to stdout, all figures to build/bench.json. The bench of
GPUs is not among them: `make gpu` runs it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys

from tests.bench.rounds import BUILD, ROOT, say

BENCHES = (
    "launcher",
    "scale",
    "step",
    "logs",
    "training",
    "fine_tuning",
    "ingest",
    "streaming",
    "decoding",
    "tables",
    "checkpoint",
    "startup",
    "goodput",
    "memory",
)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench", allow_abbrev=False)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(BENCHES)}")
    parser.add_argument("--quick", action="store_true", help="tiny numbers, in seconds")
    wanted = parser.parse_args()
    unknown = set(wanted.names) - set(BENCHES)
    if unknown:
        parser.error(f"there is no bench {', '.join(sorted(unknown))}: {', '.join(BENCHES)}")
    found, failed = {}, []
    for name in wanted.names or BENCHES:
        say(f"bench {name}")
        print(f"## {name}\n", flush=True)
        file = BUILD / f"{name}.json"
        file.unlink(missing_ok=True)
        command = [sys.executable, "-m", f"tests.bench.{name}", "--json", str(file)]
        code = subprocess.call([*command, *(["--quick"] if wanted.quick else [])], cwd=ROOT)
        if code:
            failed.append(name)
        else:
            found[name] = json.loads(file.read_text())
    BUILD.mkdir(parents=True, exist_ok=True)
    BUILD.with_suffix(".json").write_text(json.dumps(found, indent=2) + "\n")
    for name, row in missed(found):
        say(f"missed: {name}: {row['what']} {row['median']:.3g} {row['unit']}, {row['target']}")
    if failed:
        say(f"error: these did not end well: {', '.join(failed)}")
    return 1 if failed else 0


def missed(found: dict) -> list[tuple[str, dict]]:
    return [
        (name, row)
        for name, bench in found.items()
        for section in bench["sections"]
        for row in section["rows"]
        if row["met"] is False
    ]


if __name__ == "__main__":
    sys.exit(main())
