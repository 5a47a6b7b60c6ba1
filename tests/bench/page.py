"""Writes the results into README.md, between its markers, and draws the pictures that it shows."""

from __future__ import annotations

import pathlib
import statistics
from typing import Any, Callable, Iterable, Iterator

import pictures
import verdicts
from experiments import Configuration, Plan
from results import Results

BEGIN, END = "<!-- results: written by compare --report -->", "<!-- end of results -->"
GIB = 1 << 30
PARTS = ("adam", "fetch_wait", "flush_wait", "grad")  # of a step's record

Result = dict[str, Any]


def write(plan: Plan, results: Results, lines: list[verdicts.Line], page: pathlib.Path, folder: pathlib.Path) -> None:
    text = page.read_text()
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"{page} lacks the markers {BEGIN} and {END}")
    folder.mkdir(parents=True, exist_ok=True)
    report = Report(plan, results, lines, folder, pathlib.Path(folder.name))
    page.write_text(f"{before}{BEGIN}\n\n{report.text()}\n{END}{after}")


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = list(head)
    out = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    out += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(out) + "\n"


def _median(found: Iterable[Result], value: Callable[[Result], float]) -> float | None:
    values = [value(result) for result in found]
    return statistics.median(values) if values else None


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.2f} s"


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


class Report:
    def __init__(self, plan: Plan, results: Results, lines: list[verdicts.Line], folder: pathlib.Path, shown: pathlib.Path) -> None:
        self._plan, self._results, self._lines, self._folder, self._shown = plan, results, lines, folder, shown

    def text(self) -> str:
        parts = (self._head, self._verdicts, self._pairs, self._timeline, self._limits, self._halved, self._policies,
                 self._ablation, self._turns, self._scaling)  # fmt: skip
        return "\n".join(part for make in parts for part in make())

    # ---- Reading

    def _configurations(self, experiment: str) -> dict[str, Configuration]:
        return self._plan.experiments[experiment].runs

    def _of(self, configuration: Configuration) -> list[Result]:
        """All that are not void."""
        return [result for result in self._results.of(configuration).values() if not result.get("void")]

    def _period(self, configuration: Configuration) -> float | None:
        return _median(self._of(configuration), lambda result: result["period_s"])

    def _limit_share(self, configuration: Configuration) -> float | None:
        return _median(self._of(configuration), lambda result: result["limit_share"])

    def _picture(self, name: str, about: str) -> str:
        return f"![{about}]({self._shown / name})\n"

    # ---- Parts

    def _head(self) -> Iterator[str]:
        lines = self._results.lines
        if not lines:
            yield "No results yet.\n"
            return
        times = sorted(line["time"] for line in lines)
        commits = ", ".join(sorted({line["commit"] for line in lines}))
        versions = sorted({f"DeepSpeed {r['deepspeed']}, torch {r['torch']}" for r in (line["result"] for line in lines) if "deepspeed" in r})
        parameters = self._plan.size.parameters / 1e6
        yield (f"{len(lines)} runs of commit {commits} from {times[0]} to {times[-1]} on {lines[-1]['cores']} cores, "
               f"{parameters:.0f} M parameters, {'; '.join(versions) or 'without DeepSpeed'}.\n")  # fmt: skip

    def _verdicts(self) -> Iterator[str]:
        yield "### What must hold\n"
        rows = []
        for line in self._lines:
            median, range_ = line.figures
            if line.least is not None or line.most is not None:
                rows.append((line.group, line.what, line.bound, median, range_, str(len(line.values)), line.verdict, line.note))
        yield _table(("", "", "bound", "median", "range", "runs", "", ""), rows)

    def _pairs(self) -> Iterator[str]:
        runs = self._configurations("pairs")
        peers = self._of(runs["peer"])
        cpu = self._of(self._configurations("peer-in-memory")["cpu"])
        if not peers or not cpu:
            return
        yield "### Beside DeepSpeed\n"
        arithmetic_s = cpu[0]["backward_s"]
        backward_s = statistics.median(peer["backward_s"] for peer in peers)
        step_s = statistics.median(peer["step_s"] for peer in peers)
        limit_s = verdicts.PEER_WRITTEN * peers[0]["parameters"] / peers[0]["limits"]["nvme"][1]
        moved = "read {:.1f}, written {:.1f}".format(
            *(statistics.median(peer[f"device_{what}_bytes"] / peer["parameters"] for peer in peers) for what in ("read", "written"))
        )
        locked = _median(peers, lambda peer: peer["memory"]["locked_bytes"] / GIB)
        resident = _median(peers, lambda peer: peer["memory"]["peak_resident_bytes"] / GIB)
        rows = [("DeepSpeed, nvme", _seconds(backward_s + step_s - arithmetic_s), _seconds(limit_s),
                 _share(limit_s / (backward_s + step_s - arithmetic_s)), "", moved, f"{locked:.2f} GiB", f"{resident:.2f} GiB")]  # fmt: skip
        bars = [("DeepSpeed", [arithmetic_s, max(0.0, backward_s - arithmetic_s), step_s], _seconds(backward_s + step_s))]
        marks: list[float | None] = [arithmetic_s + limit_s]
        for name in verdicts.PAIR_BOUNDS:
            ours = self._of(runs[name])
            if not ours:
                continue
            period = statistics.median(result["period_s"] for result in ours)
            ratios = [pair.ratio for pair in verdicts.pairs(self._plan, self._results, name) if not pair.void]
            parameters = ours[0]["parameters"]
            moved = "read {:.1f}, written {:.1f}".format(
                *(sum(path[f"{what}_bytes"] for path in ours[0]["paths"]) / parameters for what in ("read", "written"))
            )
            memory = ours[0]["memory"]
            ratio = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} - {max(ratios):.2f})" if ratios else ""
            rows.append((f"mlpo, {name}", _seconds(period), _seconds(ours[0]["ideal_s"]), _share(ours[0]["ideal_s"] / period),
                         ratio, moved, f"{(memory['locked_bytes'] or 0) / GIB:.2f} GiB",
                         f"{((memory['peak_resident_bytes'] or 0)) / GIB:.2f} GiB"))  # fmt: skip
            parts = ours[0]["breakdown"]
            other_s = max(0.0, period - sum(parts[f"{part}_s"] for part in PARTS))
            bars.append((f"mlpo, {name}", [arithmetic_s, 0.0, 0.0, *(parts[f"{part}_s"] for part in PARTS), other_s],
                         _seconds(arithmetic_s + period)))  # fmt: skip
            marks.append(arithmetic_s + ours[0]["ideal_s"])
        yield _table(("", "beyond the arithmetic of backward", "what the bytes allow", "share", "ratio", "bytes a parameter",
                      "locked memory", "resident at most"), rows)  # fmt: skip
        pictures.bars(self._folder / "iteration.svg", "An iteration's backward pass and update", bars,
                      ("backward's arithmetic", "gradients written", "DeepSpeed's step", *(part.replace("_", " ") for part in PARTS), "other"),
                      "seconds; stroke: what the bytes allow", marks)  # fmt: skip
        yield self._picture("iteration.svg", "Where an iteration's time goes, beside the peer's")

    def _timeline(self) -> Iterator[str]:
        runs = self._configurations("pairs")
        charts = []
        seconds = 0.0
        for who, name in (("DeepSpeed", "peer"), ("mlpo", "both paths, 200 MiB")):
            for result in list(self._results.of(runs[name]).values())[:1]:
                for path, samples in result.get("samples", {}).items():
                    read, write, _ = result["limits"][path]
                    charts.append((f"{who}, {path}", samples, (read, write)))
                    seconds = max(seconds, samples[-1][0] if samples else 0.0)
        if charts:
            yield "### Paths over time\n"
            pictures.timelines(self._folder / "paths.svg", "Bandwidth of each path, by the kernel's counters", charts, max(seconds, 1.0))
            yield self._picture("paths.svg", "Bandwidth of each path over time")

    def _limits(self) -> Iterator[str]:
        series: dict[str, list[tuple[float, float]]] = {}
        cells: dict[str, dict[int, str]] = {}
        for experiment in ("limits", "jitter"):
            for configuration in self._configurations(experiment).values():
                profile, ranks = configuration["profile"], configuration["ranks"]
                found = self._of(configuration)
                if found:
                    shares = [result["limit_share"] for result in found]
                    series.setdefault(profile, []).append((ranks, statistics.median(shares)))
                    cells.setdefault(profile, {})[ranks] = f"{statistics.median(shares):.3f} ({min(shares):.3f} - {max(shares):.3f})"
        if not series:
            return
        yield "### Share of the limit\n"
        yield _table(("profile", "1 rank", "2", "4", "8"), [(name, *(row.get(n, "") for n in (1, 2, 4, 8))) for name, row in cells.items()])
        places = {1: 0.0, 2: 1.0, 4: 2.0, 8: 3.0}
        placed = {name: [(places[n], share) for n, share in points] for name, points in series.items()}
        bounds = {"": [(places[n], bound) for n, bound in verdicts.LIMIT_BOUNDS.items()]}
        pictures.lines(self._folder / "ranks.svg", "limit_share over ranks", placed, (0.8, 1.04),
                       [(place, f"{n} ranks") for n, place in places.items()], "dashed: what must hold", bounds)  # fmt: skip
        yield self._picture("ranks.svg", "Share of the limit over ranks")
        yield from self._bandwidths()

    def _bandwidths(self) -> Iterator[str]:
        rows, marks = [], []
        for configuration in self._configurations("limits").values():
            if configuration["ranks"] != 2:
                continue
            for result in self._of(configuration)[:1]:
                for path in result["paths"]:
                    read, write, duplex = result["limits"][path["name"]]
                    for what, limit in (("read", read), ("written", write)):
                        speed = path[f"{what}_bytes"] / result["period_s"] / 1e6
                        rows.append((f"{configuration['profile']}: {path['name']}, {what}", [speed], f"{speed:.0f}"))
                        marks.append(limit / 1e6 if duplex < 1 else read * write / (read + write) / 1e6)
        if rows:
            pictures.bars(self._folder / "bandwidth.svg", "Bandwidth of each path, two ranks", rows, ("",),
                          "MB/s; stroke: its limit with both directions busy", marks)  # fmt: skip
            yield self._picture("bandwidth.svg", "Bandwidth of each path against its limit")

    def _halved(self) -> Iterator[str]:
        configuration = self._configurations("halved")["nvme"]
        found = self._of(configuration)
        if not found:
            return
        yield "### A limit halved in the middle of a run\n"
        changes = {int(step): factor for step, (_, factor) in configuration["limits_at"].items()}
        full = verdicts.worth(found[0]["limits"])
        path = next(iter(configuration["limits_at"].values()))[0]
        ideal, factor = [], 1.0
        for step in range(1, configuration["steps"] + 1):
            factor = changes.get(step, factor)
            ideal.append((float(step), found[0]["transfer_s"] * full / verdicts.worth(found[0]["limits"], {path: factor})))
        series = {f"run {i}": [(float(s), t) for s, t in enumerate(result["step_s"], 1)] for i, result in enumerate(found, 1)}
        most = max(t for points in series.values() for _, t in points)
        pictures.lines(self._folder / "halved.svg", f"{path} at half its speed from step {min(changes)} to {max(changes) - 1}", series,
                       (0, most * 1.1), [(s, str(int(s))) for s, _ in ideal], "seconds of each step; dashed: limit", {"": ideal})  # fmt: skip
        yield self._picture("halved.svg", "Each step's time while a path's limit is halved")

    def _policies(self) -> Iterator[str]:
        profiles = ("paper", "half", "crossed", "jitter")
        runs = self._configurations("policies")
        adaptive = {**self._configurations("limits"), **self._configurations("jitter")}
        rows = [("adaptive", *(_share(self._limit_share(adaptive[f"{profile}, 1"])) for profile in profiles))]
        for policy in ("proportional", "ratio"):
            rows.append((policy, *(_share(self._limit_share(runs[f"{policy}, {profile}"])) for profile in profiles)))
        if any(any(row[1:]) for row in rows[1:]):
            yield "### Policies: share of the limit, one rank\n"
            yield _table(("", *profiles), rows)

    def _ablation(self) -> Iterator[str]:
        base = self._period(self._configurations("limits")["paper, 2"])
        if base is None:
            return
        rows, bars = [("all on", _seconds(base), "1.000")], [("all on", [base], "1.000")]
        for name, configuration in self._configurations("ablation").items():
            period = self._period(configuration)
            if period is not None:
                rows.append((name, _seconds(period), f"{period / base:.3f}"))
                bars.append((name, [period], f"{period / base:.3f}"))
        if len(rows) > 1:
            yield "### Each mechanism off, alone (`paper`, two ranks, pool of 50 of 256 blocks)\n"
            yield _table(("", "step", "cost"), rows)
            pictures.bars(self._folder / "ablation.svg", "A step without one mechanism", bars, ("",), "seconds; figure: times the whole")
            yield self._picture("ablation.svg", "Ablation")

    def _turns(self) -> Iterator[str]:
        runs = {**self._configurations("turns")}
        shared = self._configurations("limits")
        rows = []
        for profile in ("paper", "half", "unlimited"):
            for kind in ("shared", "exclusive", "turns of 8"):
                cells = []
                for ranks in (1, 2, 4, 8):
                    configuration = runs.get(f"{kind}, {profile}, {ranks}")
                    if kind == "shared" and profile != "unlimited":
                        configuration = shared[f"{profile}, {ranks}"]
                    cells.append(_share(self._limit_share(configuration)) if configuration else "")
                if any(cells):
                    rows.append((profile, kind, *cells))
        if any(row[1] != "shared" for row in rows):
            yield "### Turns and exclusive use: share of the limit (unlimited: of fio's mix)\n"
            yield _table(("", "", "1 rank", "2", "4", "8"), rows)

    def _scaling(self) -> Iterator[str]:
        rows = []
        for name, configuration in self._configurations("scaling").items():
            found = self._of(configuration)
            if found:
                cost = statistics.median(1e9 / result["parameters_per_s"] for result in found)
                rows.append((name, _seconds(self._period(configuration)), f"{cost:.2f} ns", _share(self._limit_share(configuration))))
        if rows:
            yield "### Cost by size, at one cached share\n"
            yield _table(("parameters", "step", "a parameter", "share of the limit"), rows)
