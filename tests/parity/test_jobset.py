"""examples/jobset.yaml has the fields that the API of JobSet v1alpha2 has, its parts agree, and its command trains."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from onefold.train.run.records import read_metrics
from tests.harness.patience import PATIENCE_S

yaml = pytest.importorskip("yaml")

MANIFEST = Path(__file__).parents[2] / "examples" / "jobset.yaml"
SMALL = ("--layers", "2", "--hidden", "32", "--heads", "2", "--seq", "16", "--eval-windows", "4", "--log-every", "1",
         "--micro-batch", "1", "--global-batch", "2", "--steps", "2", "--data", __file__)  # fmt: skip

# The part of the schema that a training needs: a field, "!" where it is required, and what it holds. The API server
# refuses unknown fields under --validate=strict, which is kubectl's default. A list has one entry, for all its items.
TEXTS = {"*": str}
CONTAINER = {
    "name!": str, "image!": str, "command": [str], "args": [str],
    "env": [{"name!": str, "value": str, "valueFrom": {"fieldRef": {"fieldPath!": str}}}],
    "ports": [{"containerPort!": int}], "resources": {"limits": {"*": (int, str)}, "requests": {"*": (int, str)}},
    "securityContext": {"allowPrivilegeEscalation": bool},
    "volumeMounts": [{"name!": str, "mountPath!": str, "readOnly": bool}],
}  # fmt: skip
POD = {
    "restartPolicy": str, "terminationGracePeriodSeconds": int, "containers!": [CONTAINER],
    "securityContext": {"runAsNonRoot": bool, "runAsUser": int, "fsGroup": int},
    "volumes": [{"name!": str, "persistentVolumeClaim": {"claimName!": str}, "emptyDir": {"medium": str}}],
}  # fmt: skip
JOB = {
    "completionMode": str, "completions": int, "parallelism": int, "backoffLimit": int, "template!": {"spec!": POD},
}  # fmt: skip
JOBSET = {
    "apiVersion!": str, "kind!": str, "metadata!": {"name!": str, "labels": TEXTS},
    "spec!": {
        "network": {"enableDNSHostnames": bool, "subdomain": str, "publishNotReadyAddresses": bool},
        "failurePolicy": {"maxRestarts": int},
        "replicatedJobs!": [{"name!": str, "replicas": int, "template!": {"spec!": JOB}}],
    },
}  # fmt: skip


def mistakes(value: Any, wanted: Any, where: str = "") -> list[str]:
    """Fields that the schema does not have, lacks or holds otherwise."""
    if isinstance(wanted, list):
        if not isinstance(value, list) or not value:
            return [f"{where} is no list"]
        return [one for at, item in enumerate(value) for one in mistakes(item, wanted[0], f"{where}[{at}]")]
    if not isinstance(wanted, dict):
        exact = isinstance(value, wanted) and not (isinstance(value, bool) and wanted is not bool)
        return [] if exact else [f"{where} is {value!r}"]
    if not isinstance(value, dict):
        return [f"{where} is no object"]
    known = {name.rstrip("!"): kind for name, kind in wanted.items()}
    missing = [name[:-1] for name in wanted if name.endswith("!") and name[:-1] not in value]
    found = [f"{where}.{name} is missing" for name in missing]
    for name, item in value.items():
        kind = known.get(name, known.get("*"))
        found += [f"{where}.{name} is unknown"] if kind is None else mistakes(item, kind, f"{where}.{name}")
    return found


@pytest.fixture(scope="module")
def documents() -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(MANIFEST.read_text()))


@pytest.fixture
def jobset(documents) -> dict[str, Any]:
    return documents[0]


def pod_of(jobset: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    job = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]
    return job, job["template"]["spec"]


def test_the_manifest_has_the_fields_of_the_api(jobset):
    assert mistakes(jobset, JOBSET) == []
    assert jobset["apiVersion"] == "jobset.x-k8s.io/v1alpha2" and jobset["kind"] == "JobSet"


def test_the_check_finds_what_is_wrong(jobset):
    changed = yaml.safe_load(yaml.safe_dump(jobset))
    job, pod = pod_of(changed)
    job["completion"] = job.pop("completions")
    pod["containers"][0]["env"][0]["value"] = 2
    del pod["containers"][0]["image"]
    where = ".spec.replicatedJobs[0].template.spec"
    inside = f"{where}.template.spec.containers[0]"
    wanted = {f"{where}.completion is unknown", f"{inside}.env[0].value is 2", f"{inside}.image is missing"}
    assert set(mistakes(changed, JOBSET)) == wanted


def test_its_parts_agree(documents, jobset):
    job, pod = pod_of(jobset)
    (container,) = pod["containers"]
    env = {entry["name"]: entry.get("value") for entry in container["env"]}
    name, replicated = jobset["metadata"]["name"], jobset["spec"]["replicatedJobs"][0]
    assert job["completionMode"] == "Indexed" and job["completions"] == job["parallelism"] == int(env["NODES"])
    assert env["HEAD"] == f"{name}-{replicated['name']}-0-0.{name}" and replicated["replicas"] == 1
    assert container["resources"]["limits"]["nvidia.com/gpu"] == int(env["GPUS"])
    assert container["ports"] == [{"containerPort": int(env["PORT"])}]
    assert pod["terminationGracePeriodSeconds"] > int(env["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"])
    assert pod["restartPolicy"] == "Never" and job["backoffLimit"] == 0
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    policy = documents[1]["spec"]
    own = {"matchLabels": {"jobset.sigs.k8s.io/jobset-name": name}}
    assert policy["podSelector"] == own and policy["ingress"] == [{"from": [{"podSelector": own}]}]


def test_its_command_trains(jobset, tmp_path):
    _, pod = pod_of(jobset)
    (container,) = pod["containers"]
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = str(probe.getsockname()[1])
    here = {"NODES": "1", "GPUS": "1", "HEAD": "localhost", "PORT": port, "ATTEMPT": "0", "OMP_NUM_THREADS": "1",
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}  # fmt: skip
    done = subprocess.run(
        [*container["command"], *SMALL, "--out", str(tmp_path / "run")], env={**os.environ, **here},
        capture_output=True, text=True, timeout=PATIENCE_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert [row["step"] for row in read_metrics(tmp_path / "run")][-1] == 2
