"""The Grafana dashboard and the alerts ask for metrics that the daemon has; the Kubernetes manifest fits the daemon and the
profile.

    manifests_test.py BUILD_FOLDER
"""

from __future__ import annotations

import json
import os
import pathlib
import re
import socket
import subprocess
import sys
import tempfile
import urllib.request
from typing import Any

import node

DEPLOY = pathlib.Path(__file__).parents[2] / "deploy"


def metrics(programs: pathlib.Path) -> dict[str, set[str]]:
    """What a daemon exports over HTTP: name -> labels."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    with tempfile.TemporaryDirectory(prefix="mlpo-metrics.") as folder:
        command = [f"{programs}/mlpo-daemon", "--socket", f"{folder}/mlpo.sock", "--path", folder, "--memory", "48MiB"]
        settings = {"MLPO_DAEMON__METRICS_LISTEN": address, "XDG_CONFIG_HOME": folder}
        daemon = node.Service(command, f"{folder}/notify", environment=settings)
        daemon.wait_for("READY=1")
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=20) as answer:
            text = answer.read().decode()
        daemon.stop()
    exported: dict[str, set[str]] = {}
    for name, labels in re.findall(r"^(mlpo_\w+)(?:\{(.*)\})? ", text, re.M):
        exported.setdefault(name, set()).update(re.findall(r'(\w+)="', labels))
    if len(exported) < 20:
        node.fail(f"the daemon's metrics: {text}")
    return exported


def check_expression(expression: str, exported: dict[str, set[str]]) -> None:
    for name, selector in re.findall(r"(mlpo_\w+)(?:\{(.*?)\})?", expression):
        # instance is Prometheus' own.
        wrong = set(re.findall(r"(\w+)=", selector)) - exported.get(name, set()) - {"instance"}
        if name not in exported or wrong:
            node.fail(f"{expression}: the daemon has no {name} {wrong or ''}")


def check_dashboard(exported: dict[str, set[str]]) -> None:
    dashboard = json.loads((DEPLOY / "grafana" / "mlpo.json").read_text())
    targets = [target for panel in dashboard["panels"] for target in panel["targets"]]
    variables = [variable["query"] for variable in dashboard["templating"]["list"]]
    for expression in [target["expr"] for target in targets] + variables:
        check_expression(expression, exported)
    for target in targets:
        known = set.union({"instance"}, *(exported[name] for name in re.findall(r"mlpo_\w+", target["expr"])))
        unknown = set(re.findall(r"{{(\w+)}}", target["legendFormat"])) - known
        if unknown:
            node.fail(f"{target['expr']}: no label {unknown}")
    places = [panel["gridPos"] for panel in dashboard["panels"]]
    cells = [(x, y) for p in places for x in range(p["x"], p["x"] + p["w"]) for y in range(p["y"], p["y"] + p["h"])]
    if len(cells) != len(set(cells)) or max(x for x, _ in cells) > 23:
        node.fail("panels lie upon one another or outside")
    identities = [panel["id"] for panel in dashboard["panels"]]
    if len(set(identities)) != len(identities):
        node.fail("panels share an id")


# Debian's YAML parser belongs to Debian's Python.
_PYTHON = "/usr/bin/python3"
_READ_YAML = "import json, sys, yaml; print(json.dumps(list(yaml.safe_load_all(open(sys.argv[1])))))"


def can_read_yaml() -> bool:
    return subprocess.run([_PYTHON, "-c", "import yaml"], capture_output=True).returncode == 0


def read_yaml(*names: str) -> list[Any]:
    return json.loads(node.run(_PYTHON, "-c", _READ_YAML, DEPLOY.joinpath(*names)))


def check_alerts(exported: dict[str, set[str]]) -> None:
    (file,) = read_yaml("prometheus", "mlpo.rules.yml")
    rules = [rule for group in file["groups"] for rule in group["rules"]]
    if len(rules) < 10:
        node.fail(f"the alerts: {rules}")
    for rule in rules:
        check_expression(rule["expr"], exported)
        labels = set.union({"instance"}, *(exported[name] for name in re.findall(r"mlpo_\w+", rule["expr"])))
        texts = rule["annotations"]
        unknown = set(re.findall(r"\$labels\.(\w+)", texts["summary"] + texts["description"])) - labels
        if unknown or rule["labels"]["severity"] not in ("page", "ticket"):
            node.fail(f"{rule['alert']}: no label {unknown}, or an unknown severity")


def check_manifest(programs: pathlib.Path) -> None:
    config_map, daemon_set = read_yaml("k8s", "mlpo-daemon.yaml")
    assert config_map["kind"] == "ConfigMap" and daemon_set["kind"] == "DaemonSet"
    spec = daemon_set["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    assert volumes["config"]["configMap"]["name"] == config_map["metadata"]["name"]
    mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in container["volumeMounts"]}

    text = config_map["data"]["mlpo.toml"]
    with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
        file.write(text)
        file.flush()
        printed = node.run(f"{programs}/mlpo-daemon", "--config", file.name, "--print-config", env={})
    settings = dict(re.findall(r"^(\w+) = (\S+)", printed, re.M))
    assert settings["directory"].strip('"') in mounts, settings
    assert settings["group"].strip('"') == str(container["securityContext"]["runAsGroup"])
    # The pool, the arenas and something more; the drain and something more.
    gib = [int(settings[key].strip('"').removesuffix("GiB")) for key in ("pool", "arenas")]
    assert int(container["resources"]["limits"]["memory"].removesuffix("Gi")) > sum(gib)
    minutes = int(settings["drain_timeout"].strip('"').removesuffix("min"))
    assert spec["terminationGracePeriodSeconds"] > 60 * minutes
    program, flag, file, *_ = container["command"]
    assert (program, flag) == ("mlpo-daemon", "--config") and os.path.dirname(file) in mounts and "/run/mlpo" in mounts
    profile = container["securityContext"]["seccompProfile"]["localhostProfile"].split("/")[-1]
    assert (DEPLOY / "k8s" / profile).exists()


def main() -> None:
    programs = pathlib.Path(sys.argv[1]) / "bin"
    exported = metrics(programs)
    check_dashboard(exported)
    if can_read_yaml():
        check_manifest(programs)
        check_alerts(exported)
    else:
        print(f"skipped in part: {_PYTHON} cannot read YAML (package python3-yaml)")
    print("the dashboard, the alerts and the manifest fit the daemon")


if __name__ == "__main__":
    main()
