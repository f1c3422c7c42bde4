"""The manifests in `docker/k8s`: against the published schemas, against the code, and stopped as a kubelet would.

No cluster is needed: `kubernetes-validate` holds Kubernetes' own schemas, and a pod's containers are run here as
processes, with the manifest's arguments, environment and order.
"""

from __future__ import annotations

import concurrent.futures
import copy
import re
import subprocess
import threading
import time
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import kubernetes_validate
import pytest
import yaml

from app.cli import STOP_GRACE
from app.door import OPEN_PATHS
from app.server import CLOSE_GRACE
from app.settings import Settings
from tests.service import MODELS, ROOT, Service, alive, descendants, free_port, until
from workers.errors import RunDirectoryError
from workers.rundir import prepare_run_dir

Manifest = dict[str, Any]

K8S = ROOT / "docker" / "k8s"
VERSIONS = ["1.30", kubernetes_validate.latest_version()]  # the oldest that the manifests ask for, and the newest known
SEVERAL_HOSTS = {"nnodes", "node_rank", "rdzv_endpoint", "interface", "cluster_key_file", "local_addr"}
LWS_GIVES = ["LWS_LEADER_ADDRESS", "LWS_GROUP_SIZE", "LWS_WORKER_INDEX"]


def manifests(name: str) -> dict[str, Manifest]:
    """The objects of a file by kind."""
    return {one["kind"]: one for one in yaml.safe_load_all((K8S / name).read_text())}


HOST, HOSTS = manifests("host.yaml"), manifests("hosts.yaml")
GROUP = HOSTS["LeaderWorkerSet"]["spec"]["leaderWorkerTemplate"]
TEMPLATES = {
    "host": HOST["Deployment"]["spec"]["template"],
    "leader": GROUP["leaderTemplate"],
    "worker": GROUP["workerTemplate"],
}
PODS: dict[str, Manifest] = {name: template["spec"] for name, template in TEMPLATES.items()}


def containers(pod: Manifest) -> dict[str, Manifest]:
    return {one["name"]: one for one in [*pod.get("initContainers", []), *pod["containers"]]}


def environment(container: Manifest, config: Manifest) -> dict[str, str]:
    """Of a container, as a kubelet makes it but for what comes from the pod's fields."""
    return config["data"] | {one["name"]: one["value"] for one in container.get("env", []) if "value" in one}


CONTAINERS = [
    pytest.param(pod, container, id=f"{name}-{container['name']}")
    for name, pod in PODS.items()
    for container in containers(pod).values()
]
APPS = [pytest.param(PODS[name], containers(PODS[name])["app"], id=name) for name in ("host", "leader")]


# ---- the schemas


def object_of(required: list[str], /, **properties: Manifest) -> Manifest:
    return {"type": "object", "additionalProperties": False, "required": required, "properties": properties}


COUNT, TEXT, ANYTHING = {"type": "integer", "minimum": 0}, {"type": "string"}, {"type": "object"}
COUNT_OR_PERCENT = {"anyOf": [COUNT, {"type": "string", "pattern": r"^\d+%$"}]}
# leaderworkerset.x-k8s.io/v1 as its API reference has it, without what a set of ours has no use for.
LEADER_WORKER_SET = object_of(
    ["apiVersion", "kind", "metadata", "spec"],
    apiVersion={"const": "leaderworkerset.x-k8s.io/v1"},
    kind={"const": "LeaderWorkerSet"},
    metadata=object_of(["name"], name=TEXT, namespace=TEXT, labels=ANYTHING, annotations=ANYTHING),
    spec=object_of(
        ["leaderWorkerTemplate"],
        replicas=COUNT,
        startupPolicy={"enum": ["LeaderCreated", "LeaderReady"]},
        rolloutStrategy=object_of(
            ["type"],
            type={"const": "RollingUpdate"},
            rollingUpdateConfiguration=object_of(
                [], partition=COUNT, maxUnavailable=COUNT_OR_PERCENT, maxSurge=COUNT_OR_PERCENT
            ),
        ),
        networkConfig=object_of(["subdomainPolicy"], subdomainPolicy={"enum": ["Shared", "UniquePerReplica"]}),
        leaderWorkerTemplate=object_of(
            ["workerTemplate"],
            leaderTemplate=ANYTHING,
            workerTemplate=ANYTHING,
            size={"type": "integer", "minimum": 1},
            restartPolicy={"enum": ["None", "RecreateGroupOnPodRestart", "Default"]},
            subGroupPolicy=object_of(
                [], subGroupPolicyType={"enum": ["LeaderWorker", "LeaderExcluded"]}, subGroupSize=COUNT
            ),
        ),
    ),
)


def check(manifest: Manifest, version: str) -> None:
    """Refuse what the API server would: unknown fields, wrong types, missing ones. jsonschema.ValidationError."""
    if manifest["kind"] != "LeaderWorkerSet":
        kubernetes_validate.validate(manifest, version, strict=True)
        return
    jsonschema.validate(manifest, LEADER_WORKER_SET)
    group = manifest["spec"]["leaderWorkerTemplate"]
    for template in (group["workerTemplate"], group.get("leaderTemplate")):
        if template is not None:
            pod = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "x"}, "template": template}
            kubernetes_validate.validate(pod, version, strict=True)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", sorted(path.name for path in K8S.iterdir()))
def test_every_manifest_is_what_kubernetes_takes(name: str, version: str) -> None:
    for manifest in yaml.safe_load_all((K8S / name).read_text()):
        check(manifest, version)


@pytest.mark.parametrize("name", ["host.yaml", "hosts.yaml"])
def test_with_the_line_for_api_keys_in_force_it_is_so_too(name: str) -> None:
    text, found = re.subn(r"# (- \{name: PHALANX_API_KEYS_FILE.*)", r"\1", (K8S / name).read_text())
    assert found == 1
    for manifest in yaml.safe_load_all(text):
        check(manifest, VERSIONS[-1])
    [mounted] = re.findall(r"\{name: keys, mountPath: ([^,]+), readOnly: true\}", text)
    assert f"PHALANX_API_KEYS_FILE, value: {mounted}/keys}}" in text


def broken(kind: str, change: Callable[[Manifest], object]) -> Manifest:
    manifest = copy.deepcopy((HOSTS | HOST)[kind])
    change(manifest)
    return manifest


def group_of(manifest: Manifest) -> Manifest:
    found: Manifest = manifest["spec"]["leaderWorkerTemplate"]
    return found


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        pytest.param("Deployment", lambda it: it["spec"].pop("selector"), id="no selector"),
        pytest.param("Deployment", lambda it: it["spec"].update(replicas="one"), id="wrong type"),
        pytest.param("Deployment", lambda it: it["spec"].update(strateggy={}), id="unknown field"),
        pytest.param(
            "Deployment",
            lambda it: it["spec"]["template"]["spec"]["containers"][0].update(livenesProbe={}),
            id="unknown field of a container",
        ),
        pytest.param("Service", lambda it: it["spec"]["ports"][0].update(port="80"), id="a port as text"),
        pytest.param("NetworkPolicy", lambda it: it["spec"].update(ingres=[]), id="unknown field of a policy"),
        pytest.param("LeaderWorkerSet", lambda it: group_of(it).pop("workerTemplate"), id="set without workers"),
        pytest.param("LeaderWorkerSet", lambda it: group_of(it).update(size="2"), id="size as text"),
        pytest.param("LeaderWorkerSet", lambda it: group_of(it).update(restartPolicy="Never"), id="unknown policy"),
        pytest.param("LeaderWorkerSet", lambda it: it["spec"].update(size=2), id="field in the wrong place"),
        pytest.param(
            "LeaderWorkerSet",
            lambda it: group_of(it)["leaderTemplate"]["spec"]["containers"][0].pop("name"),
            id="container of a set without a name",
        ),
    ],
)
def test_a_broken_manifest_is_refused(kind: str, change: Callable[[Manifest], object]) -> None:
    with pytest.raises(jsonschema.ValidationError):
        check(broken(kind, change), VERSIONS[-1])


# ---- the code and the image


def test_they_set_only_settings_that_exist() -> None:
    named = {name.lower() for path in K8S.iterdir() for name in re.findall(r"PHALANX_(\w+)", path.read_text())}
    assert named <= set(Settings.model_fields)


def test_they_run_the_image_of_this_version_as_its_user() -> None:
    dockerfile = (ROOT / "Dockerfile").read_text()
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert {one["image"] for pod in PODS.values() for one in containers(pod).values()} == {f"phalanx:{version}"}
    [user] = re.findall(r"^USER (\d+):(\d+)$", dockerfile, re.MULTILINE)
    for pod in PODS.values():
        context = pod["securityContext"]
        assert (str(context["runAsUser"]), str(context["runAsGroup"])) == user
        assert str(context["fsGroup"]) == user[1]


def test_the_commands_of_the_readme_give_every_container_ones_own_image() -> None:
    commands = re.findall(r"^\$ (sed .*) \| kubectl apply -f -$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert len(commands) == 2
    for command in commands:
        done = subprocess.run(command, shell=True, capture_output=True, text=True, cwd=ROOT, env={"IMAGE": "a.b/c:1"})
        assert set(re.findall(r"image: (.*)", done.stdout)) == {"a.b/c:1"}


@pytest.mark.parametrize(("pod", "container"), CONTAINERS)
def test_every_container_is_as_confined_as_with_compose(pod: Manifest, container: Manifest) -> None:
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert (pod["automountServiceAccountToken"], pod["enableServiceLinks"]) == (False, False)
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert "memory" in container["resources"]["limits"]


@pytest.mark.parametrize(("pod", "container"), APPS)
def test_there_is_time_for_the_drain_and_for_the_ranks_to_leave(pod: Manifest, container: Manifest) -> None:
    wait = container["lifecycle"]["preStop"]["sleep"]["seconds"]
    drain = Settings.model_fields["drain_timeout"].default
    assert pod["terminationGracePeriodSeconds"] >= wait + drain + CLOSE_GRACE + STOP_GRACE


@pytest.mark.parametrize("pod", [pytest.param(PODS[name], id=name) for name in ("host", "leader")])
def test_the_ranks_are_stopped_after_the_front_end(pod: Manifest) -> None:
    [workers], [app] = pod["initContainers"], pod["containers"]
    assert (workers["name"], workers["restartPolicy"]) == ("workers", "Always")
    assert app["name"] == "app"
    assert not {"lifecycle", "startupProbe", "livenessProbe"} & workers.keys()


def test_a_rollout_needs_no_second_set_of_gpus_and_waits_for_the_model() -> None:
    deployment, hosts = HOST["Deployment"]["spec"], HOSTS["LeaderWorkerSet"]["spec"]
    assert deployment["strategy"]["rollingUpdate"]["maxSurge"] == 0
    assert hosts["rolloutStrategy"]["rollingUpdateConfiguration"]["maxSurge"] == 0
    assert deployment["progressDeadlineSeconds"] > Settings.model_fields["start_timeout"].default


# ---- names that must agree


@pytest.mark.parametrize("pod", [pytest.param(pod, id=name) for name, pod in PODS.items()])
def test_every_mount_has_its_volume_and_every_volume_its_mount(pod: Manifest) -> None:
    mounts = [mount["name"] for one in containers(pod).values() for mount in one["volumeMounts"]]
    assert set(mounts) == {volume["name"] for volume in pod["volumes"]}
    shared = {name for name in mounts if mounts.count(name) > 1}
    assert shared <= {"run"}, "the two containers share nothing but the run directory"


@pytest.mark.parametrize(("pod", "container"), CONTAINERS)
def test_the_run_directory_is_made_in_a_volume_in_memory(pod: Manifest, container: Manifest, tmp_path: Path) -> None:
    [variable] = [one for one in container["env"] if one["name"] == "PHALANX_RUN_DIR"]
    mounts = {mount["name"]: Path(mount["mountPath"]) for mount in container["volumeMounts"]}
    run_dir = Path(variable["value"])
    assert run_dir.parent == mounts["run"]
    [volume] = [one["emptyDir"] for one in pod["volumes"] if one["name"] == "run"]
    assert volume["medium"] == "Memory"
    if "app" in containers(pod):  # whose front end has the ring there
        ring = Settings.model_fields["ring_bytes"].default
        assert int(volume["sizeLimit"].removesuffix("Gi")) * 2**30 > ring
    for mode in (0o777, 0o2777):  # of an emptyDir, without and with fsGroup
        tmp_path.chmod(mode)
        with pytest.raises(RunDirectoryError, match="it must be 0700"):
            prepare_run_dir(tmp_path)
        prepare_run_dir(tmp_path / run_dir.name)
        prepare_run_dir(tmp_path / run_dir.name)  # by the other container
        (tmp_path / run_dir.name).rmdir()


@pytest.mark.parametrize(("pod", "container"), APPS)
def test_probes_ask_what_is_served_without_a_key(pod: Manifest, container: Manifest, digits: Service) -> None:
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    wanted = {"startupProbe": "/livez", "livenessProbe": "/livez", "readinessProbe": "/readyz"}
    for name, path in wanted.items():
        probe = container[name]["httpGet"]
        assert (probe["path"], ports[probe["port"]]) == (path, 8000)
        assert path in OPEN_PATHS
        assert digits.client.get(path).status_code == 200
    assert {"name": "PHALANX_PORT", "value": "8000"} in container["env"]
    assert {"name": "PHALANX_HOST", "value": "0.0.0.0"} in container["env"]


@pytest.mark.parametrize(("file", "template"), [(HOST, "host"), (HOSTS, "leader")], ids=["host", "leader"])
def test_service_policy_and_scrape_find_the_front_end(file: dict[str, Manifest], template: str) -> None:
    metadata, container = TEMPLATES[template]["metadata"], containers(PODS[template])["app"]
    service, policy = file["Service"]["spec"], file["NetworkPolicy"]["spec"]
    assert service["selector"].items() <= metadata["labels"].items()
    assert policy["podSelector"]["matchLabels"].items() <= metadata["labels"].items()
    [port], [exposed] = service["ports"], container["ports"]
    assert port["targetPort"] == exposed["name"]
    assert policy["ingress"][0] == {"ports": [{"port": exposed["containerPort"]}]}
    assert metadata["annotations"]["prometheus.io/port"] == str(exposed["containerPort"])
    assert metadata["annotations"]["prometheus.io/path"] == "/metrics"
    for container in containers(PODS[template]).values():
        assert container["envFrom"] == [{"configMapRef": {"name": file["ConfigMap"]["metadata"]["name"]}}]


def test_the_deployment_selects_its_own_pods_and_the_files_stand_beside_each_other() -> None:
    spec = HOST["Deployment"]["spec"]
    assert spec["selector"]["matchLabels"] == spec["template"]["metadata"]["labels"]
    assert not HOSTS["Service"]["spec"]["selector"].items() <= GROUP["workerTemplate"]["metadata"]["labels"].items()
    names = [(kind, one["metadata"]["name"]) for file in (HOST, HOSTS) for kind, one in file.items()]
    # LeaderWorkerSet makes a service of the set's own name
    names.append(("Service", HOSTS["LeaderWorkerSet"]["metadata"]["name"]))
    assert len(set(names)) == len(names)


# ---- several hosts


def test_the_leader_is_the_pod_of_one_host_and_more_and_the_hosts_are_alike() -> None:
    def but(container: Manifest, *keys: str) -> Manifest:
        return {key: value for key, value in container.items() if key not in {*keys, "envFrom"}}

    host, leader, worker = (containers(PODS[name]) for name in ("host", "leader", "worker"))
    assert but(leader["app"]) == but(host["app"])
    assert but(leader["workers"], "restartPolicy") == but(worker["workers"], "readinessProbe")
    several = ("env", "volumeMounts")
    assert but(leader["workers"], *several) == but(host["workers"], *several)
    assert all(one in leader["workers"]["env"] for one in host["workers"]["env"])
    assert worker["workers"]["readinessProbe"]["exec"]["command"] == ["phalanx", "status"]


def test_hosts_find_one_another_by_what_the_controller_says() -> None:
    seen = list(LWS_GIVES)
    for one in containers(PODS["worker"])["workers"]["env"]:
        for name in re.findall(r"\$\((\w+)\)", one.get("value", "")):
            assert name in seen, f"{name} would not be expanded"
        seen.append(one["name"])
    assert {f"PHALANX_{name.upper()}" for name in SEVERAL_HOSTS} <= set(seen)
    values = environment(containers(PODS["worker"])["workers"], HOSTS["ConfigMap"])
    assert values["PHALANX_RDZV_ENDPOINT"] == "$(LWS_LEADER_ADDRESS):29500"
    among = HOSTS["NetworkPolicy"]["spec"]["ingress"][1]["from"][0]["podSelector"]["matchLabels"]
    for name in ("leader", "worker"):
        assert among.items() <= TEMPLATES[name]["metadata"]["labels"].items()
        [secret] = [one["secret"] for one in PODS[name]["volumes"] if one["name"] == "cluster-key"]
        assert "optional" not in secret
    [mount] = [m for m in containers(PODS["worker"])["workers"]["volumeMounts"] if m["name"] == "cluster-key"]
    assert values["PHALANX_CLUSTER_KEY_FILE"] == f"{mount['mountPath']}/key"


# ---- a stop, as a kubelet does it


class Pod:
    """The pod of host.yaml with its containers as processes here, on the CPU."""

    def __init__(self, model: str, volume: Path) -> None:
        self._spec, self.port = PODS["host"], free_port()
        volume.chmod(0o777)
        self.running: dict[str, Service] = {}
        for name, container in containers(self._spec).items():
            values = environment(container, HOST["ConfigMap"])
            run_dir = volume / Path(values["PHALANX_RUN_DIR"]).name
            [verb] = container["args"]
            here = {"device": "cpu", "ranks": 2, "port": self.port}
            self.running[name] = Service(model, verb=verb, run_dir=run_dir, **here)
        self.app, self.workers = self.running["app"], self.running["workers"]

    def stop(self) -> dict[str, int]:
        """Wait, SIGTERM and SIGKILL as the manifest has them: exit codes, in the order of the ends."""
        end = time.monotonic() + self._spec["terminationGracePeriodSeconds"]
        codes: dict[str, int] = {}

        def stop(name: str) -> None:
            hook = containers(self._spec)[name].get("lifecycle", {}).get("preStop", {}).get("sleep", {})
            time.sleep(hook.get("seconds", 0))
            codes[name] = self.running[name].stop(seconds=end - time.monotonic())

        with concurrent.futures.ThreadPoolExecutor() as pool:  # containers at once, then sidecars in reverse
            list(pool.map(stop, [one["name"] for one in self._spec["containers"]]))
        for sidecar in reversed(self._spec.get("initContainers", [])):
            stop(sidecar["name"])
        return codes


class Client(threading.Thread):
    """Sends batches on one connection until one is refused or finds no connection; anything else is a fault."""

    def __init__(self, port: int) -> None:
        super().__init__(daemon=True)
        self.answered, self.refusal, self.fault = 0, "", ""
        self._http = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60)
        self.start()

    def run(self) -> None:
        with self._http as http:
            while not self.fault and not self.refusal:
                items = list(range(self.answered, self.answered + 70))
                try:
                    answer = http.post("/infer", json={"inputs": items, "parameters": {"sleep": 0.2}})
                except httpx.ConnectError:
                    self.refusal = "no connection"
                    return
                except httpx.TransportError as lost:
                    self.fault = f"lost: {lost!r}"
                    return
                if answer.status_code == 503 and "takes no new requests" in answer.text:
                    self.refusal = answer.headers["connection"]
                elif answer.status_code == 200 and answer.json()["outputs"] == items:
                    self.answered += 1
                else:
                    self.fault = f"{answer.status_code}: {answer.text[:200]}"


@pytest.fixture
def pod(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pod]:
    pod = Pod(f"{MODELS}:Obedient", tmp_path_factory.mktemp("emptydir"))
    try:
        yield pod
    finally:
        for service in pod.running.values():
            service.close()


@pytest.mark.long
def test_a_pod_that_is_stopped_under_load_loses_no_request(pod: Pod) -> None:
    pod.app.wait_ready()
    ranks = descendants(pod.workers.process.pid)
    clients = [Client(pod.port) for _ in range(12)]
    until(lambda: all(client.answered for client in clients), 60, "answers to all clients")
    codes = pod.stop()
    for client in clients:
        client.join(10)
    assert [client.fault for client in clients if client.fault] == []
    assert {client.refusal for client in clients} <= {"close", "no connection"}
    assert list(codes.items()) == [("app", 0), ("workers", 0)]
    assert not any(alive(rank) for rank in ranks)
