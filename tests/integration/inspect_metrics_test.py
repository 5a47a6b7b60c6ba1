"""mlpo-ctl metrics, metrics_file and metrics_listen, with real daemons: read by prometheus_client's parser, they say what
status says. Arguments: the folder of the programs, and which tests, if not all.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import subprocess
import sys
import unittest
import urllib.request

from inspected import BIN, CLEAN, DEADLINE, Case, ctl, eventually


def parse(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    sys.path.append("/usr/lib/python3/dist-packages")  # where Debian has it, whichever Python runs this
    try:
        from prometheus_client.parser import text_string_to_metric_families
    except ImportError:
        raise unittest.SkipTest("python3-prometheus-client is not installed") from None
    finally:
        sys.path.pop()
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found[sample.name, tuple(sorted(sample.labels.items()))] = sample.value
    return found


def sample(metrics: dict, name: str, **labels: str) -> float:
    return metrics[name, tuple(sorted(labels.items()))]


class Metrics(Case):
    def compare(self, metrics: dict, status: dict) -> None:
        self.assertEqual(sample(metrics, "mlpo_pool_bytes"), status["pool"]["bytes"])
        self.assertEqual(sample(metrics, "mlpo_pool_free_blocks"), status["pool"]["free_blocks"])
        self.assertEqual(sample(metrics, "mlpo_sessions"), status["totals"]["sessions"])
        self.assertEqual(sample(metrics, "mlpo_arenas_limit_bytes"), status["arenas_limit_bytes"])
        self.assertEqual(sample(metrics, "mlpo_state", state=status["state"]), 1)
        states = [value for (name, _), value in metrics.items() if name == "mlpo_state"]
        self.assertEqual((len(states), sum(states)), (4, 1))
        for path in status["paths"]:
            for direction, key, errors in (("read", "read_bytes", "read_errors"), ("write", "written_bytes", "write_errors")):
                of_path = {"path": path["name"], "direction": direction}
                self.assertEqual(sample(metrics, "mlpo_path_bytes_total", **of_path), path[key])
                self.assertEqual(sample(metrics, "mlpo_path_errors_total", **of_path), path[errors])
            for key in ("checksum_mismatches", "checksum_errors"):
                self.assertEqual((path[key], sample(metrics, f"mlpo_path_{key}_total", path=path["name"])), (0, 0))
            self.assertEqual(sample(metrics, "mlpo_path_state", path=path["name"], state=path["state"]), 1)
            info = {"path": path["name"], "directory": path["directory"], "engine": path["engine"]}
            self.assertEqual(sample(metrics, "mlpo_path_info", **info), 1)

    def test_text_file_and_http(self) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        file = self.folder / "metrics.prom"
        daemon = self.daemon(
            config=f'[daemon]\nmetrics_file = "{file}"\nmetrics_interval = 1\nmetrics_listen = "127.0.0.1:{port}"\n'
        )
        self.train(daemon)
        eventually(lambda: not json.loads(ctl("status", "--json", "--socket", daemon.socket).stdout)["sessions"])
        status = json.loads(ctl("status", "--json", "--socket", daemon.socket).stdout)
        self.assertGreater(status["paths"][0]["written_bytes"], 0)
        self.compare(parse(ctl("metrics", "--socket", daemon.socket).stdout), status)
        as_json = json.loads(ctl("metrics", "--json", "--socket", daemon.socket).stdout)
        self.compare(parse(as_json["text"]), status)
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=DEADLINE) as answer:
            over_http = parse(answer.read().decode())
        self.compare(over_http, status)
        self.assertLess(sample(over_http, "mlpo_thread_beat_age_seconds", thread="data"), 5)
        written = sample(parse(as_json["text"]), "mlpo_path_bytes_total", path="one", direction="write")
        in_file = lambda: parse(file.read_text()).get(  # noqa: E731
            ("mlpo_path_bytes_total", (("direction", "write"), ("path", "one")))
        )
        eventually(lambda: in_file() == written)
        self.compare(parse(file.read_text()), status)
        self.assertEqual(stat.S_IMODE(file.stat().st_mode), 0o644)
        self.assertEqual(daemon.end(), 0)
        self.assertFalse(file.exists())
        self.assertEqual([entry.name for entry in self.folder.iterdir() if "metrics" in entry.name], [])

    def test_sessions_are_for_who_may_see_them(self) -> None:
        daemon = self.daemon()
        script = (
            f"{BIN}/mlpo-ctl metrics --socket {daemon.socket} > {self.folder}/during;"
            f"{BIN}/mlpo-ctl status --json --socket {daemon.socket} > {self.folder}/status"
        )
        # A session that lives while its metrics are asked for.
        command = [BIN / "mlpo-bench", "train", "--params", "8M", "--steps", "100000", "--socket", daemon.socket]
        trainer = subprocess.Popen(command, env=CLEAN, stdout=subprocess.DEVNULL, start_new_session=True)
        try:
            first_update = lambda text: any(  # noqa: E731
                name == "mlpo_session_epoch" and epoch > 0 for (name, _), epoch in parse(text).items()
            )
            eventually(lambda: first_update(ctl("metrics", "--socket", daemon.socket).stdout))
            subprocess.run(["bash", "-c", script], env=CLEAN, timeout=DEADLINE, check=True)
        finally:
            os.killpg(trainer.pid, signal.SIGKILL)
            trainer.wait()
        metrics = parse((self.folder / "during").read_text())
        session = json.loads((self.folder / "status").read_text())["sessions"][0]
        labels = {"job": session["job"], "rank": str(session["rank"]), "uid": str(os.geteuid())}
        self.assertEqual(sample(metrics, "mlpo_session_parameters", **labels), session["parameters"])
        self.assertLessEqual(sample(metrics, "mlpo_session_epoch", **labels), session["epoch"])
        self.assertGreater(sample(metrics, "mlpo_session_submissions_total", **labels), 0)

    def test_only_this_host_may_listen(self) -> None:
        for address in ("0.0.0.0:9464", "9464", "10.1.2.3:9464", "127.0.0.1:0", "127.0.0.1:65536", "localhost:1", "[::]:9"):
            config = self.folder / "listen.toml"
            config.write_text(f'[daemon]\nmetrics_listen = "{address}"\n[[path]]\ndirectory = "/tmp"\n')
            command = [BIN / "mlpo-daemon", "--config", config, "--check-config"]
            checked = subprocess.run(command, env=CLEAN, timeout=DEADLINE, capture_output=True, text=True)
            self.assertEqual(checked.returncode, 78, address)
            self.assertIn("127.0.0.1:PORT", checked.stderr)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1] + sys.argv[2:])
