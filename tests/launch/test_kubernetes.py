"""The chart and the manifests against the schemas of Kubernetes, of JobSet and of Kubeflow, and against raafl's own options.

Without helm the chart is not rendered: then launch/kubernetes/rendered.yaml, which `python -m tests.launch.test_kubernetes` writes
where helm or helm-python-sdk is installed, stands for it, and a digest says of which chart it is.
"""

from __future__ import annotations

import hashlib
import importlib.util
import shutil
import subprocess
from functools import cache

import pytest
import yaml

from tests.habits.source import ROOT
from tests.launch.command_lines import check

FOLDER = ROOT / "launch" / "kubernetes"
CHART = FOLDER / "chart"
RENDERED = FOLDER / "rendered.yaml"
HEAD = "# The chart beside this file with its defaults, for kubectl apply; written by python -m tests.launch.test_kubernetes.\n"
KUBERNETES = "1.31"


def digest():
    files = sorted(path for path in CHART.rglob("*") if path.is_file())
    text = b"".join(path.relative_to(CHART).as_posix().encode() + b"\0" + path.read_bytes() for path in files)
    return hashlib.sha256(text).hexdigest()[:16]


def rendered_by_helm(**values):
    """Render the chart with Helm's own code; None where there is none."""
    if importlib.util.find_spec("helm_python") is not None:
        from helm_python import Chart

        with Chart.load(str(CHART)) as chart:
            return "\n---\n".join(text.strip("\n") for _, text in sorted(chart.render(values, name="raafl").items()))
    if shutil.which("helm") is not None:
        command = ["helm", "template", "raafl", str(CHART), "--values", "-"]
        return subprocess.run(command, input=yaml.safe_dump(values), text=True, capture_output=True, check=True).stdout
    return None


def documents(text):
    return [document for document in yaml.safe_load_all(text) if document]


@cache
def from_file(name):
    return documents((FOLDER / name).read_text())


def valid(document):
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    kubernetes_validate.validate(document, KUBERNETES, strict=True)


def pods():
    """Each pod of each file, with a name for messages."""
    for document in from_file("rendered.yaml"):
        if document["kind"] == "Job":
            yield document["metadata"]["name"], document["spec"]["template"]["spec"]
    for job in from_file("jobset.yaml")[0]["spec"]["replicatedJobs"]:
        yield f"jobset {job['name']}", job["template"]["spec"]["template"]["spec"]


PODS = dict(pods())


def test_the_rendered_chart_is_of_this_chart():
    assert RENDERED.read_text().startswith(f"{HEAD}# chart {digest()}\n"), "python -m tests.launch.test_kubernetes"


def test_helm_renders_what_is_in_the_file():
    text = rendered_by_helm()
    if text is None:
        pytest.skip("neither helm nor helm-python-sdk is installed; rendered.yaml has what it gave")
    assert documents(text) == from_file("rendered.yaml")


def test_the_chart_with_a_config_an_object_store_and_no_clients_is_valid():
    server = {"output": "s3://bucket/run", "environment": "store", "options": ["--max_updates", "5"]}
    text = rendered_by_helm(server=server, config="seed: 1\n", clients={"count": 0}, nodeSelector={"pool": "a"})
    if text is None:
        pytest.skip("neither helm nor helm-python-sdk is installed")
    found = {document["kind"]: document for document in documents(text)}
    assert sorted(found) == ["ConfigMap", "Job", "Service"]
    for document in found.values():
        valid(document)
    assert found["ConfigMap"]["data"]["config.yaml"] == "seed: 1\n"
    container = found["Job"]["spec"]["template"]["spec"]["containers"][0]
    assert {"--output=s3://bucket/run", "--config", "/etc/raafl/config.yaml"} <= set(container["args"])
    assert container["args"][-2:] == ["--max_updates", "5"]


def test_what_is_of_kubernetes_alone_is_valid_there():
    for document in (*from_file("rendered.yaml"), *from_file("jobset.yaml")[1:]):
        valid(document)


def test_the_jobs_of_the_jobset_are_valid_and_its_own_fields_are_known():
    (jobset, *_), models = from_file("jobset.yaml"), pytest.importorskip("kubeflow_trainer_api.models")
    for job in jobset["spec"]["replicatedJobs"]:
        valid(
            {
                "apiVersion": "batch/v1",
                "kind": "Job",
                "metadata": {"name": job["name"]},
                "spec": job["template"]["spec"],
            }
        )
    assert lost(jobset, models.JobsetV1alpha2JobSet.from_dict(jobset).to_dict()) == []


def test_the_fields_of_the_train_job_are_known():
    (job,), models = from_file("trainjob.yaml"), pytest.importorskip("kubeflow_trainer_api.models")
    assert lost(job, models.TrainerV1alpha1TrainJob.from_dict(job).to_dict()) == []
    command, args = job["spec"]["trainer"]["command"], job["spec"]["trainer"]["args"]
    assert command == ["torchrun", "-m", "raafl", "fit"]
    check("fit", args)
    ranks = job["spec"]["trainer"]["numNodes"] * job["spec"]["trainer"]["numProcPerNode"]
    assert f"--clients={ranks - 1}" in args


def lost(given, kept, where=""):
    """Name the fields that a model, which drops what it does not know, has not kept."""
    if isinstance(given, dict) and isinstance(kept, dict):
        return [name for key, value in given.items() for name in lost(value, kept.get(key), f"{where}.{key}")]
    if isinstance(given, list) and isinstance(kept, list) and len(given) == len(kept):
        return [
            name
            for index, pair in enumerate(zip(given, kept, strict=True))
            for name in lost(*pair, f"{where}[{index}]")
        ]
    return [] if given == kept else [where]


@pytest.mark.parametrize("pod", PODS)
def test_a_pod_is_not_root_writes_to_volumes_alone_and_has_a_command_that_raafl_takes(pod):
    spec = PODS[pod]
    (container,) = spec["containers"]
    assert spec["securityContext"]["runAsNonRoot"] and spec["automountServiceAccountToken"] is False
    limits = container["securityContext"]
    assert limits["readOnlyRootFilesystem"] and not limits["allowPrivilegeEscalation"]
    assert limits["capabilities"] == {"drop": ["ALL"]}
    assert {mount["mountPath"] for mount in container["volumeMounts"] if not mount.get("readOnly")} == {"/work", "/tmp"}
    if "command" not in container:
        assert container["args"][0] == "serve"
        check("serve", container["args"][1:])
        assert container["livenessProbe"]["httpGet"] == {"path": "/healthz", "port": "monitor"}
        return
    # what the shell makes of it, for the pod of index 2
    script = container["command"][2].replace("exec raafl", "printf '%s\\n'")
    words = ["sh", "-c", script, container["command"][3], *container["args"]]
    found = subprocess.run(words, env={"JOB_COMPLETION_INDEX": "2"}, capture_output=True, text=True, check=True)
    command, *options = found.stdout.splitlines()
    assert command == "join" and options[:2] == ["--client", "3"]
    check("join", options)


if __name__ == "__main__":
    chart = rendered_by_helm()
    assert chart is not None, "install helm-python-sdk"
    RENDERED.write_text(f"{HEAD}# chart {digest()}\n{chart}\n")
