"""`python3 examples/check.py`: the examples are YAML, and leave a sandbox no way out but the proxy."""

import pathlib

import yaml

here = pathlib.Path(__file__).parent
documents = {
    str(path.relative_to(here)): list(yaml.safe_load_all(path.read_text())) for path in sorted(here.glob("*/*.yaml"))
}

compose = documents["compose/compose.yaml"][0]
exeat, sandbox = compose["services"]["exeat"], compose["services"]["sandbox"]
assert sandbox["networks"] == ["inside"] and "network_mode" not in sandbox and "ports" not in exeat
assert compose["networks"]["inside"] == {"internal": True}
assert all(not volume.startswith("state") for volume in sandbox["volumes"]), "the CA's key is in the state"
assert sandbox["depends_on"] == {"exeat": {"condition": "service_healthy"}}
assert exeat["read_only"] and exeat["cap_drop"] == ["ALL"]

policies = {policy["metadata"]["name"]: policy["spec"] for policy in documents["kubernetes/network.yaml"]}
proxy = {"app.kubernetes.io/name": "exeat"}
way_out = {"to": [{"podSelector": {"matchLabels": proxy}}], "ports": [{"protocol": "TCP", "port": 3128}]}
assert policies["sandboxes"]["egress"] == [way_out] and set(policies["sandboxes"]["policyTypes"]) == {"Ingress", "Egress"}
assert [rule["ports"] for rule in policies["exeat"]["ingress"]] == [way_out["ports"]]

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

print(f"{len(documents)} files, {sum(map(len, documents.values()))} documents")
