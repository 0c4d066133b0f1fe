"""The Helm chart: rendered by Helm, checked against Kubernetes' own schemas, with settings that the server knows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from tests.support.deployed_settings import settings_from

helm = pytest.importorskip("helm_python", reason="there is no build of Helm's library for this machine")

CHART = Path(__file__).parents[2] / "deploy/helm/prefixcache"
KUBERNETES = ("1.27", "1.31", "1.37")
EVERYTHING: dict[str, Any] = {
    "image": {"tag": "1.2.3-cuda", "pullSecrets": ["registry"]},
    "settings": {
        "model": "/models/qwen",
        "max_queue": 1_000_000,
        "cache_memory": 0.5,
        "host_memory": "8GiB",
        "api_keys": "/run/secrets/keys/api_keys",
    },
    "redis": {"url": "rediss://cache:6379", "passwordSecret": {"name": "redis"}},
    "secretFiles": [{"name": "keys", "path": "/run/secrets/keys"}],
    "persistence": {"storageClassName": "fast"},
    "models": {"existingClaim": "models"},
    "gpu": {"count": 1},
    "autoscaling": {"enabled": True},
    "gateway": {"enabled": True, "replicas": 2},
    "serviceMonitor": {"enabled": True, "labels": {"release": "monitoring"}},
    "networkPolicy": {"extraEgress": [{"ports": [{"port": 443, "protocol": "TCP"}]}]},
    "podAnnotations": {"a": "b"},
    "podLabels": {"c": "d"},
    "nodeSelector": {"gpu": "yes"},
    "tolerations": [{"key": "gpu", "operator": "Exists"}],
}
MINIMUM: dict[str, Any] = {
    "persistence": {"enabled": False},
    "podDisruptionBudget": {"enabled": False},
    "networkPolicy": {"enabled": False},
}
CASES = {"defaults": {}, "everything": EVERYTHING, "minimum": MINIMUM}


def render(values: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The manifests by kind; the second Service is called Headless, and what belongs to the gateway Gateway…"""
    with helm.Chart.load(CHART) as chart:
        rendered = chart.render(values, name="demo", namespace="models")
    texts = [text for path, text in rendered.items() if path.endswith(".yaml")]
    manifests = [manifest for text in texts for manifest in yaml.safe_load_all(text) if manifest]
    return {_role(each): each for each in manifests}


def _role(manifest: dict[str, Any]) -> str:
    name, kind = manifest["metadata"]["name"], manifest["kind"]
    return "Headless" if name.endswith("-headless") else f"Gateway{kind}" if name.endswith("-gateway") else kind


def pod_of(values: dict[str, Any]) -> dict[str, Any]:
    return render(values)["StatefulSet"]["spec"]["template"]["spec"]


def environment_of(values: dict[str, Any]) -> dict[str, str]:
    [container] = pod_of(values)["containers"]
    return {variable["name"]: variable["value"] for variable in container["env"]}


def test_helm_finds_nothing_wrong() -> None:
    result = helm.lint(CHART, EVERYTHING, strict=True)
    assert result["errors"] == []
    assert [message for message in result["messages"] if message["severity"] > 1] == []  # 1: an icon would be nice


@pytest.mark.parametrize("version", KUBERNETES)
@pytest.mark.parametrize("values", CASES.values(), ids=CASES.keys())
def test_kubernetes_knows_every_field(values: dict[str, Any], version: str) -> None:
    manifests = render(values)
    assert {"StatefulSet", "Service", "Headless"} <= manifests.keys()
    for kind, manifest in manifests.items():
        if kind != "ServiceMonitor":  # the Prometheus Operator's own
            kubernetes_validate.validate(manifest, version, strict=True)


def test_an_unknown_field_would_be_found() -> None:
    """So the test above does look."""
    manifest = render({})["StatefulSet"]
    manifest["spec"]["template"]["spec"]["containers"][0]["readinessprobe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(manifest, KUBERNETES[-1], strict=True)


@pytest.mark.parametrize("values", CASES.values(), ids=CASES.keys())
def test_the_server_starts_with_these_settings(values: dict[str, Any], tmp_path: Path) -> None:
    settings = settings_from(environment_of(values), tmp_path)
    assert settings.grace_s == 30
    if values is EVERYTHING:
        assert (settings.max_queue, settings.cache_memory, settings.redis_password) == (1_000_000, 0.5, "s3cret")


def test_no_variables_of_services_reach_the_server() -> None:
    """Kubernetes would set PREFIXCACHE_PORT=tcp://… for a Service of this name."""
    assert pod_of({})["enableServiceLinks"] is False


def test_a_pod_has_time_to_drain() -> None:
    pod = pod_of({"drain": {"preStopSeconds": 7, "graceSeconds": 100}})
    [container] = pod["containers"]
    assert container["lifecycle"]["preStop"]["exec"]["command"] == ["sleep", "7"]
    assert pod["terminationGracePeriodSeconds"] == 7 + 100 + 60
    assert environment_of({"drain": {"preStopSeconds": 7, "graceSeconds": 100}})["PREFIXCACHE_GRACE_S"] == "100"


def test_the_pod_is_locked_down() -> None:
    pod = pod_of({})
    [container] = pod["containers"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod["automountServiceAccountToken"] is False
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    writable = {mount["mountPath"] for mount in container["volumeMounts"] if not mount.get("readOnly")}
    assert writable == {"/var/cache/prefixcache", "/tmp"}


def test_probes_allow_for_a_slow_first_start() -> None:
    [container] = pod_of({"startupSeconds": 1200})["containers"]
    startup = container["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] == 1200
    assert startup["httpGet"]["path"] == container["readinessProbe"]["httpGet"]["path"] == "/readyz"
    assert container["livenessProbe"]["httpGet"]["path"] == "/healthz"


def test_names_fit_together() -> None:
    manifests = render(EVERYTHING)
    labels = manifests["StatefulSet"]["spec"]["template"]["metadata"]["labels"]
    selectors = [
        manifests["StatefulSet"]["spec"]["selector"]["matchLabels"],
        manifests["Service"]["spec"]["selector"],
        manifests["Headless"]["spec"]["selector"],
        manifests["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"],
        manifests["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"],
    ]
    assert all(selector.items() <= labels.items() for selector in selectors)
    assert manifests["StatefulSet"]["spec"]["serviceName"] == manifests["Headless"]["metadata"]["name"]
    assert manifests["Headless"]["spec"]["clusterIP"] == "None"
    monitored = manifests["ServiceMonitor"]["spec"]["selector"]["matchLabels"]
    assert monitored.items() <= manifests["Headless"]["metadata"]["labels"].items()
    assert not monitored.items() <= manifests["Service"]["metadata"]["labels"].items()  # or each pod counts twice


def test_the_gateway_knows_all_replicas_there_may_be() -> None:
    assert not [kind for kind in render({}) if kind.startswith("Gateway")]
    manifests = render({"gateway": {"enabled": True}, "replicas": 3})
    [container] = manifests["GatewayDeployment"]["spec"]["template"]["spec"]["containers"]
    workers = container["args"][container["args"].index("--worker-urls") + 1 :]
    name, headless = manifests["StatefulSet"]["metadata"]["name"], manifests["Headless"]["metadata"]["name"]
    assert workers == [f"grpc://{name}-{index}.{headless}:50051" for index in range(3)]
    [container] = render(EVERYTHING)["GatewayDeployment"]["spec"]["template"]["spec"]["containers"]
    assert len(container["args"][container["args"].index("--worker-urls") + 1 :]) == 8  # maxReplicas


def test_the_gateway_may_call_the_replicas_and_nobody_takes_it_for_one() -> None:
    manifests = render(EVERYTHING)
    labels = manifests["GatewayDeployment"]["spec"]["template"]["metadata"]["labels"]
    replicas = manifests["StatefulSet"]["spec"]["selector"]["matchLabels"]
    assert manifests["GatewayDeployment"]["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert manifests["GatewayService"]["spec"]["selector"].items() <= labels.items()
    assert manifests["GatewayNetworkPolicy"]["spec"]["podSelector"]["matchLabels"].items() <= labels.items()
    assert not replicas.items() <= labels.items()
    peers = [peer for rule in manifests["NetworkPolicy"]["spec"]["ingress"] for peer in rule["from"]]
    selectors = [peer.get("podSelector", {}).get("matchLabels") for peer in peers]
    assert manifests["GatewayDeployment"]["spec"]["selector"]["matchLabels"] in selectors


def test_autoscaling_follows_the_queue_and_owns_the_number_of_replicas() -> None:
    manifests = render(EVERYTHING)
    [metric] = manifests["HorizontalPodAutoscaler"]["spec"]["metrics"]
    assert metric["pods"]["metric"]["name"] == "prefixcache_queue_depth"
    assert "replicas" not in manifests["StatefulSet"]["spec"]
    assert render({})["StatefulSet"]["spec"]["replicas"] == 2


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({"replica": 3}, "replica"),
        ({"settings": {"port": 1}}, "port"),
        ({"image": {"digest": "sha256:1"}}, "digest"),
        ({"redis": {"passwordSecret": {"name": "redis"}}}, "url"),
        ({"drain": {"graceSeconds": -1}}, "graceSeconds"),
        ({"startupSeconds": 5}, "startupSeconds"),
    ],
)
def test_wrong_values_are_refused_by_name(values: dict[str, Any], name: str) -> None:
    with helm.Chart.load(CHART) as chart, pytest.raises(helm.HelmError, match=name):
        chart.validate_schema(chart.merge_values(values))
