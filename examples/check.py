"""`python3 examples/check.py [HELM]`: the examples are YAML, and leave a sandbox no way out but the proxy.

With the program `helm`, the chart is linted and rendered, and deploys what the manifests deploy.
"""

import pathlib
import subprocess
import sys

import yaml

here = pathlib.Path(__file__).parent
documents = {
    str(path.relative_to(here)): list(yaml.safe_load_all(path.read_text())) for path in sorted(here.glob("*/*.yaml"))
}

compose = documents["compose/compose.yaml"][0]
exeat, sandbox = compose["services"]["exeat"], compose["services"]["sandbox"]
assert sandbox["networks"] == {"inside": {}} and "network_mode" not in sandbox and "ports" not in exeat
assert compose["networks"]["inside"] == {"internal": True}
assert all(not volume.startswith("state") for volume in sandbox["volumes"]), "the CA's key is in the state"
assert sandbox["depends_on"] == {"exeat": {"condition": "service_healthy"}}
assert exeat["read_only"] and exeat["cap_drop"] == ["ALL"]

policies = {policy["metadata"]["name"]: policy["spec"] for policy in documents["kubernetes/network.yaml"]}
proxy = {"app.kubernetes.io/name": "exeat"}
way_out = {"to": [{"podSelector": {"matchLabels": proxy}}], "ports": [{"protocol": "TCP", "port": 3128}]}
assert policies["sandboxes"]["egress"] == [way_out] and set(policies["sandboxes"]["policyTypes"]) == {"Ingress", "Egress"}
assert [rule["ports"] for rule in policies["exeat"]["ingress"]] == [way_out["ports"]]

beside = documents["compose/sidecar.yaml"][0]["services"]
assert {beside[name]["network_mode"] for name in ("exeat", "sandbox")} == {"service:network"}
assert beside["exeat"]["depends_on"] == {"network": {"condition": "service_healthy", "restart": True}}
assert beside["sandbox"]["restart"] == "no", "the engine does not wait for the rules"
assert beside["sandbox"]["depends_on"] == {"exeat": {"condition": "service_healthy"}}
assert beside["sandbox"]["user"] != beside["exeat"]["user"] == "65532:65532"
assert all(one["cap_drop"] == ["ALL"] for one in beside.values()) and "cap_add" not in beside["sandbox"]

files, agent = documents["kubernetes/sidecar.yaml"]
capture, proxy_beside = agent["spec"]["initContainers"]
(sandbox_beside,) = agent["spec"]["containers"]
assert capture["command"] == ["nft", "-f", "/etc/exeat/capture.nft"] and proxy_beside["restartPolicy"] == "Always"
assert f"meta skuid {proxy_beside['securityContext']['runAsUser']} accept" in files["data"]["capture.nft"]
for container in (proxy_beside, sandbox_beside):
    context = container["securityContext"]
    assert context["runAsNonRoot"] and context["capabilities"] == {"drop": ["ALL"]} and not context["allowPrivilegeEscalation"]
assert sandbox_beside["securityContext"]["runAsUser"] not in (0, proxy_beside["securityContext"]["runAsUser"])
assert {mount["name"] for mount in sandbox_beside["volumeMounts"]} == {"ca"}, "the CA's key is in the state"

deployment = next(one for one in documents["kubernetes/exeat.yaml"] if one["kind"] == "Deployment")
pods = [deployment["spec"]["template"], documents["kubernetes/sandbox.yaml"][0]]
for pod in pods:
    spec = pod["spec"]
    assert spec["automountServiceAccountToken"] is False
    assert spec["securityContext"]["runAsNonRoot"] and spec["securityContext"]["runAsUser"] > 0
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    for container in spec["containers"]:
        context = container["securityContext"]
        assert context["readOnlyRootFilesystem"] and not context["allowPrivilegeEscalation"]
        assert context["capabilities"] == {"drop": ["ALL"]}
probes = pods[0]["spec"]["containers"][0]
assert probes["readinessProbe"]["exec"]["command"] == ["/exeat", "health"], "the admin listener is on the loopback"
assert probes["livenessProbe"]["exec"]["command"] == ["/exeat", "health", "--live"]
assert pods[0]["metadata"]["labels"] == proxy and pods[1]["metadata"]["labels"] != proxy
named = documents["kubernetes/kustomization.yaml"][0]["resources"]
assert all(f"kubernetes/{name}" in documents for name in named)

def rendered(*options):
    """The objects of the chart by kind and name, as `helm template` prints them."""
    command = [sys.argv[1], "template", "exeat", str(here / "helm"), *options]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return {(one["kind"], one["metadata"]["name"]): one for one in yaml.safe_load_all(done.stdout) if one}


def without(value):
    """Leaves out what only the chart has: a label that tells releases apart, and a value that can be set."""
    if isinstance(value, dict):
        own = ["app.kubernetes.io/instance", "imagePullPolicy"]
        return {key: without(inner) for key, inner in value.items() if key not in own}
    return [without(inner) for inner in value] if isinstance(value, list) else value


if len(sys.argv) > 1:
    linted = subprocess.run([sys.argv[1], "lint", "--strict", str(here / "helm")], capture_output=True, text=True)
    assert linted.returncode == 0, linted.stdout
    toml = here / "kubernetes/exeat.toml"
    objects = rendered("--set-file", f"config={toml}")
    assert objects.pop(("ConfigMap", "exeat"))["data"] == {"exeat.toml": toml.read_text()}
    manifests = [*documents["kubernetes/exeat.yaml"], *documents["kubernetes/network.yaml"]]
    for manifest in manifests:
        kind, name = manifest["kind"], manifest["metadata"]["name"]
        name = "exeat-sandboxes" if name == "sandboxes" else name
        found, want = without(objects.pop((kind, name))["spec"]), manifest["spec"]
        assert found == want, (kind, name, found, want)
    assert not objects, list(objects)
    claimed = rendered("--set", "state.existingClaim=mine,networkPolicy.enabled=false,image.tag=x")
    assert not any(kind in ("PersistentVolumeClaim", "NetworkPolicy") for kind, _ in claimed)
    pod = claimed["Deployment", "exeat"]["spec"]["template"]["spec"]
    assert pod["volumes"][1]["persistentVolumeClaim"] == {"claimName": "mine"} and pod["containers"][0]["image"].endswith(":x")
    for wrong in ["unknown=1", "config=", "networkPolicy.enabled=maybe", "state.accessMode=ReadWriteMany"]:
        refused = subprocess.run([sys.argv[1], "template", "exeat", str(here / "helm"), "--set", wrong], capture_output=True)
        assert refused.returncode != 0, wrong
    print(f"the chart deploys the {len(manifests)} objects of the manifests, and its configuration")

print(f"{len(documents)} files, {sum(map(len, documents.values()))} documents")
