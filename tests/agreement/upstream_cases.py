"""The cases of the operator's own tests of its validation, recorded while those tests run.

They are Go literals, so they are not read but run: in a copy of the module the two functions under test
write down each object that they are given, and what they answer.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

RECORD = "RECORDED_CASES"
FUNCTIONS = {
    "ValidateRayJobSpec": (
        "rayJob *rayv1.RayJob",
        'record("RayJob", rayJob, untoldValidateRayJobSpec(rayJob))',
    ),
    "ValidateRayClusterSpec": (
        "spec *rayv1.RayClusterSpec, annotations map[string]string",
        'record("RayCluster", &rayv1.RayCluster{Spec: *spec, '
        "ObjectMeta: metav1.ObjectMeta{Annotations: annotations}}, "
        "untoldValidateRayClusterSpec(spec, annotations))",
    ),
}
RECORDER = f"""
func record(kind string, object any, answer error) error {{
	said := ""
	if answer != nil {{
		said = answer.Error()
	}}
	line, err := json.Marshal(map[string]any{{"kind": kind, "object": object, "said": said}})
	if err != nil {{
		panic(err)
	}}
	file, err := os.OpenFile(os.Getenv("{RECORD}"), os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o644)
	if err != nil {{
		panic(err)
	}}
	defer file.Close()
	if _, err := file.Write(append(line, '\\n')); err != nil {{
		panic(err)
	}}
	return answer
}}
"""


def recorded_cases(operator: Path, folder: Path) -> list[tuple[dict[str, Any], str]]:
    """Each object of the operator's tests, and what its validation says of it: "" for a valid one."""
    copy = folder / "ray-operator"
    shutil.copytree(operator, copy)
    for path in (copy, *copy.rglob("*")):
        path.chmod(path.stat().st_mode | 0o200)
    source = copy / "controllers/ray/utils/validation.go"
    source.write_text(_recording(source.read_text()))
    record = folder / "record"
    ended = subprocess.run(
        ["go", "test", "-mod=readonly", "-trimpath", "-buildvcs=false", "-count=1"]
        + ["-run", "TestValidateRayJob|TestValidateRayCluster", "./controllers/ray/utils/"],
        cwd=copy,
        env=os.environ | {RECORD: str(record), "GOFLAGS": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    lines = [json.loads(line) for line in record.read_text().splitlines()]
    return [(line["object"] | {"kind": line["kind"]}, line["said"]) for line in lines]


def _recording(source: str) -> str:
    for name, (arguments, recorded) in FUNCTIONS.items():
        # Calls between the two stay unrecorded; the outer call is the case.
        source = re.sub(rf"\b{name}\(", f"untold{name}(", source)
        source += f"\nfunc {name}({arguments}) error {{\n\treturn {recorded}\n}}\n"
    return source.replace("import (\n", 'import (\n\t"encoding/json"\n\t"os"\n', 1) + RECORDER
