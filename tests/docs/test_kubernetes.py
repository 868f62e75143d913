"""The manifests for Kubernetes: against its published schema, and that their parts fit together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from outlast.launch import environment

MANIFEST = Path(__file__).parents[2] / "examples" / "kubernetes" / "train.yaml"


def parts() -> dict[str, Any]:
    return {part["kind"]: part for part in yaml.safe_load_all(MANIFEST.read_text())}


@pytest.mark.parametrize("version", ["1.31", "1.37"])
@pytest.mark.parametrize("kind", ["Service", "Job"])
def test_the_schema(kind: str, version: str) -> None:
    kubernetes_validate.validate(parts()[kind], version, strict=True)


def test_a_field_that_does_not_exist_is_found() -> None:
    job = parts()["Job"]
    job["spec"]["completionsMode"] = job["spec"].pop("completionMode")
    with pytest.raises(kubernetes_validate.ValidationError, match="completionsMode"):
        kubernetes_validate.validate(job, "1.31", strict=True)


def test_the_launcher_reads_where_its_pod_is(monkeypatch: pytest.MonkeyPatch) -> None:
    (agent,) = parts()["Job"]["spec"]["template"]["spec"]["containers"]
    for each in agent["env"]:  # as the kubelet sets them, and `JOB_COMPLETION_INDEX` besides
        path = each["valueFrom"].get("fieldRef", {}).get("fieldPath", "")
        if path.startswith("metadata.labels["):
            monkeypatch.setenv(each["name"], "eu-1")
    monkeypatch.setenv("JOB_COMPLETION_INDEX", "3")
    monkeypatch.delenv("SLURM_PROCID", raising=False)
    assert environment.topology() == ("eu-1", "3")


def test_the_endpoints_are_pods_that_the_service_names() -> None:
    service, job = parts()["Service"], parts()["Job"]
    pod = job["spec"]["template"]["spec"]
    (agent,) = pod["containers"]
    options = dict(
        word.removeprefix("--").split("=", 1) for word in agent["command"] if "=" in word
    )
    name = job["metadata"]["name"]
    assert pod["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": name}
    port = service["spec"]["ports"][0]["port"]
    pods = [f"{name}-{index}.{pod['subdomain']}:{port}" for index in range(3)]
    assert options["rdzv-endpoint"].split(",") == pods
    least, most = map(int, options["nnodes"].split(":"))
    assert most == job["spec"]["completions"] == job["spec"]["parallelism"]
    assert least > most / 2
    shell, _, hook = agent["lifecycle"]["preStop"]["exec"]["command"]
    said = dict(word.removeprefix("--").split("=", 1) for word in hook.split() if "=" in word)
    assert shell == "sh"
    assert {name: said[name] for name in ("rdzv-id", "rdzv-endpoint")} == {
        name: options[name] for name in ("rdzv-id", "rdzv-endpoint")
    }
    pause = int(hook.rpartition("sleep ")[2])
    assert pause + int(options["grace"]) < pod["terminationGracePeriodSeconds"]
