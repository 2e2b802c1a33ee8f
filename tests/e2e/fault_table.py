"""Write docs/results/faults.md from the results of the drills and of a soak.

    python -m tests.e2e.fault_table [--soak SOAK.json [--of TEXT]] [RESULTS.json]

first merges new results into docs/results/faults.json, and a soak's report into docs/results/soak.json.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path
from typing import Any

from trainyard.drills.final_errors import FINAL_ERRORS
from trainyard.drills.scenarios import SCENARIOS

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs/results/faults.json"
SOAK = ROOT / "docs/results/soak.json"
PAGE = ROOT / "docs/results/faults.md"

Object = dict[str, Any]

HEAD = """\
# Faults

What each fault costs a run, measured by drills. `make fault-table` writes this page from the results of
`make drills` and `make soak`. [Faults and fencing](../explanation/faults.md) explains how a run survives.

A drill submits a small run, injects one fault at a random step, follows the run to its end, and compares
its weights with those of an undisturbed run:

```sh
trainyard drill --list                           # the scenarios, and their rights
trainyard drill worker-killed run.yaml -n team   # exit code 0: it recovered
make drills                                      # all, on the test cluster
```

## Results

One drill each, on a machine with 2 cores that holds the whole cluster: a ResNet-18 on two CPU workers,
saved every 5 s.

* *noticed* counts from the fault. If training goes on after it, it is the time until the workers leave.
* *again* counts from then until the next step is done; with `faults.replace_workers`, until all workers
  can make it.
* All runs ended with the same bits as without a fault, unless a line says otherwise. The bits of an elastic
  run depend on its number of workers over time, so only its steps and samples are compared.

"""
BOUNDS = """
## Bounds

A drill fails if it exceeds one of these:

* A lost worker costs at most 45 s, from the moment it is noticed or from the end of what prevents its start.
* A lost driver costs at most 150 s.
* At most one checkpoint interval and 5 s of training are lost, and nothing if there was a notice.
* Nothing of the run is left in the cluster or in its folder.
"""


def table(results: dict[str, Object]) -> str:
    rows = ["| fault | what happens | steps lost | noticed | again | who acts |", "|" + "---|" * 6]
    for each in results.values():
        recovery = each["recovery"]
        cells = (
            each["fault"],
            each["answer"],
            lost(recovery),
            seconds(recovery["noticed_s"]),
            seconds(recovery["again_s"]),
            each["actor"],
        )
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def lost(recovery: Object) -> str:
    """Return the number of lost steps and the time that they had taken."""
    steps, spent = recovery["steps_lost"], recovery["seconds_lost"]
    return f"{steps} ({spent:.1f} s)" if steps and spent is not None else str(steps)


def seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f} s"


def details(results: dict[str, Object]) -> str:
    """Return the times of the phases of each recovery, and the limits that were not met."""
    lines = ["\n## Where the time goes\n", "| drill | noticed by | attempts, groups | then |"]
    lines.append("|" + "---|" * 4)
    for name, each in results.items():
        recovery = each["recovery"]
        phases = ", ".join(f"{what} {spent:.1f}" for what, spent in recovery["phases"].items())
        groups = f"{each['attempts']}, {each['worker_groups']}"
        lines.append(f"| `{name}` | {recovery['noticed_by']} | {groups} | {phases or '-'} |")
    missed = [
        f"* `{name}`: {'; '.join(problems(each))}."
        for name, each in results.items()
        if problems(each)
    ]
    if missed:
        lines += ["\n## Not held\n", *missed]
    return "\n".join(lines) + "\n"


def problems(result: Object) -> list[str]:
    found = list(result["missed"])
    if not result["is_recovered"]:
        found.append(f"did not recover ({result['why_not']})")
    elif result["has_equal_weights"] is False:
        found.append("ended with other weights")
    elif result["has_equal_weights"] is None and not result["is_elastic"]:
        found.append("its weights were not compared")
    return found


FINAL_HEAD = """\
## Errors that a retry cannot cure

`trainyard drill NAME RUN.yaml` submits a run that has the error, and watches it as `submit` does. It must
fail on its first cluster. *Held* adds up the seconds from the creation of each pod, head and workers, until
it was gone or the run had failed.
"""


def final_section(results: dict[str, Object]) -> str:
    """Return the section about errors that a retry cannot cure; empty without results."""
    if not results:
        return ""
    rows = ["| drill | error | clusters | pods | held | failed after |", "|" + "---|" * 6]
    for name, each in results.items():
        cells = (f"`{name}`", each["fault"], each["clusters"], each["pods"])
        rows.append(
            f"| {' | '.join(map(str, cells))} | {seconds(each['held_s'])} | {seconds(each['ended_s'])} |"
        )
    missed = [
        f"* `{name}`: {'; '.join(each['missed'])}."
        for name, each in results.items()
        if each["missed"]
    ]
    lines = [*rows, *(["", "Not held:", "", *missed] if missed else [])]
    return f"\n{FINAL_HEAD}\n" + "\n".join(lines) + "\n"


SOAK_HEAD = """\
`trainyard soak RUN.yaml --minutes 90` (`make soak MINUTES=90`) injects one of these faults every 1 to 3
minutes and trains the run in rounds until the time is over. The run must end with the weights of an
undisturbed run, with memory and checkpoints in the last third no larger than 1.25 times those of the first
third, and with nothing left behind. `make e2e` includes a minute of it.
"""

SOAKED = "the run file as it is"
"""What a soak is about, unless `--of` says something else."""


def soak_section(soaks: dict[str, Object]) -> str:
    """Return the section about long soaks, by what each of them is about."""
    return f"\n## Long soaks\n\n{SOAK_HEAD}" + "".join(
        f"\n### {name[0].upper()}{name[1:]}\n\n{soak_table(report)}"
        for name, report in soaks.items()
    )


def soak_table(report: Object) -> str:
    """Return the table of a soak, with its remark."""
    strikes = [each for each in report["strikes"] if not each["why_not"]]
    often = Counter(each["scenario"] for each in strikes)
    names = ", ".join(f"{name} {times}" for name, times in often.most_common())
    grown = ", ".join(f"{what} {by:.2f}" for what, by in report["grown"].items())
    largest = {
        key: max(each[key] for each in report["sizes"]) for key in ("head_bytes", "worker_bytes")
    }
    others = report["sizes"][-1]["other_bytes"]
    rows = {
        "struck for": f"{report['minutes']:g} minutes, {len(strikes)} times: {names}",
        "trained": f"{report['epochs']:,} epochs, {report['steps']:,} steps, in {report['rounds']} rounds",
        "attempts, worker groups": f"{report['attempts']}, {report['worker_groups']}",
        "steps trained twice": f"{report['steps_lost']:,}",
        "goodput": "not measured" if report.get("goodput") is None else f"{report['goodput']:.0%}",
        "weights": WEIGHTS[report["has_equal_weights"]],
        "epochs": EPOCHS[report.get("has_even_epochs")],
        "last third over the first": grown,
        "most memory": f"head {gib(largest['head_bytes'])}, worker {gib(largest['worker_bytes'])}",
        "beside checkpoints": f"{others / 2**20:.0f} MiB in the run's folder: model, logs, records",
        "left behind": ", ".join(report["left_behind"]) or "nothing",
        "bounds missed": "; ".join(report["missed"]) or "none",
    }
    lines = "".join(f"| {what} | {found} |\n" for what, found in rows.items())
    remark = f"\n{report['remark']}\n" if "remark" in report else ""
    return f"| what | found |\n|---|---|\n{lines}{remark}"


WEIGHTS = {
    True: "those of an undisturbed run, bit by bit",
    False: "others than those of an undisturbed run",
    None: "not compared",
}


EPOCHS = {
    True: "each there once, all of as many steps and samples",
    False: "some recorded twice or not at all, or with other steps or samples",
    None: "not counted",
}


def gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"


def page(results: dict[str, Object]) -> str:
    soak = soak_section(json.loads(SOAK.read_text()))
    final = {name: each for name, each in results.items() if name in FINAL_ERRORS}
    struck = {name: each for name, each in results.items() if name not in FINAL_ERRORS}
    return HEAD + table(struck) + BOUNDS + details(struck) + final_section(final) + soak


def load() -> dict[str, Object]:
    results: dict[str, Object] = json.loads(RESULTS.read_text())
    return results


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.e2e.fault_table", allow_abbrev=False)
    parser.add_argument("--soak", type=Path, help="what `trainyard soak --json` has printed")
    parser.add_argument("--of", default=SOAKED, help="what the soak is about")
    parser.add_argument("results", type=Path, nargs="*", help="build/drills.json")
    wanted = parser.parse_args()
    results = load() if RESULTS.exists() else {}
    for file in wanted.results:
        results |= json.loads(file.read_text())
    if wanted.soak:
        soaks = json.loads(SOAK.read_text()) | {wanted.of: json.loads(wanted.soak.read_text())}
        SOAK.write_text(json.dumps(soaks, indent=1) + "\n")
    known = [*SCENARIOS, *sorted(results.keys() - SCENARIOS.keys())]
    ordered = {name: results[name] for name in known if name in results}
    RESULTS.write_text(json.dumps(ordered, indent=1) + "\n")
    PAGE.write_text(page(load()))


if __name__ == "__main__":
    main()
