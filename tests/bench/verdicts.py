"""What must hold, and whether the results say so. Ratios are formed run by run, or pair by pair, and their median judged."""

from __future__ import annotations

import dataclasses
import statistics
from typing import Any, Iterator

from experiments import BLOCKS, Plan, Run
from results import Results

Result = dict[str, Any]

PAIR_BOUNDS = {"nvme alone, 200 MiB": 1.35, "both paths, 200 MiB": 2.25, "both paths, a quarter": 2.8}
LEAST_PEER_SHARE = 0.9  # of its own byte limit; below that the peer was disturbed, and the pair shows nothing
PEER_WRITTEN = 16  # bytes a parameter: gradient, master parameter and both moments, FP32
PEER_STEP_MOVES, OURS_MOVES = 28, 24  # bytes a parameter: the peer's reads the gradient, too
LIMIT_BOUNDS = {1: 0.97, 2: 0.97, 4: 0.95, 8: 0.95}
THREE_BOUND = 0.96  # a block of each path is read ahead of its step, one of 206 each: half a percent more than of two
WITHIN = 1 / 1.05  # makespans of unequal ranks


@dataclasses.dataclass
class Line:
    """One thing that must hold; without a bound, one that is reported."""

    group: str
    what: str
    values: list[float]
    least: float | None = None
    most: float | None = None
    needed: int = 1  # values, for a verdict
    note: str = ""

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def kept(self) -> bool:
        return (self.least is None or self.median >= self.least) and (self.most is None or self.median <= self.most)

    @property
    def verdict(self) -> str:
        bounded = self.least is not None or self.most is not None
        if bounded and len(self.values) < self.needed and "is void" in self.note:
            return "VOID"  # what could show it does not
        if not self.values:
            return "-"
        if not bounded:
            return "shown"
        if len(self.values) < self.needed:
            return f"{len(self.values)} of {self.needed}"
        return "holds" if self.kept else "BROKEN"

    @property
    def broken(self) -> bool:
        return self.verdict in ("BROKEN", "VOID")

    @property
    def bound(self) -> str:
        return f">= {self.least:.4g}" if self.least is not None else f"<= {self.most:.4g}" if self.most is not None else ""

    @property
    def figures(self) -> tuple[str, str]:
        """Median, and range."""
        if not self.values:
            return "", ""
        return f"{self.median:.3f}", f"{min(self.values):.3f} - {max(self.values):.3f}" if len(self.values) > 1 else ""

    def text(self) -> str:
        median, range_ = self.figures
        note = f"  {self.note}" if self.note else ""
        return f"{self.verdict:8} {self.group}: {self.what}  {median} {self.bound} [{range_}] n={len(self.values)}{note}"


def in_short(result: Result) -> str:
    if "period_s" in result:
        share = result["limit_share"]
        void = f", VOID: {result['void']}" if result["void"] else ""
        return f"step {result['period_s']:.2f} s" + (f", limit_share {share:.3f}" if share is not None else "") + void
    if "backward_s" in result:
        return f"backward {result['backward_s']:.2f} s, step {result['step_s']:.2f} s"
    return ", ".join(f"{key} {value}" for key, value in result.items() if isinstance(value, (int, float)))


@dataclasses.dataclass
class Pair:
    """The peer's iteration beside a step of ours; void with a reason."""

    round: int
    peer_s: float  # what it takes beyond the arithmetic of its backward pass
    peer_limit_s: float  # what its bytes need
    ours_s: float
    void: str

    @property
    def ratio(self) -> float:
        return max(self.peer_s, self.peer_limit_s) / self.ours_s


def _peer_times(peer: Result, arithmetic_s: float) -> tuple[float, float]:
    """What it takes beyond its arithmetic, and what its bytes need."""
    return peer["backward_s"] + peer["step_s"] - arithmetic_s, PEER_WRITTEN * peer["parameters"] / peer["limits"]["nvme"][1]


def _disturbances(peer: Result, arithmetic_s: float) -> list[str]:
    peer_s, limit_s = _peer_times(peer, arithmetic_s)
    found = []
    written = peer["device_written_bytes"] / peer["parameters"]
    if abs(written / PEER_WRITTEN - 1) > 0.03:
        found.append(f"the peer wrote {written:.1f} bytes a parameter")
    if limit_s / peer_s < LEAST_PEER_SHARE:
        found.append(f"the peer was at {limit_s / peer_s:.2f} of its own limit")
    return found


def _in_memory(plan: Plan, results: Results) -> Result | None:
    return results.of(plan.experiments["peer-in-memory"].runs["cpu"]).get(1)


def disturbed(plan: Plan, results: Results, run: Run) -> bool:
    """Whether its round of pairs shows nothing for the peer's sake: both sides are run again then, one after the other."""
    cpu = _in_memory(plan, results)
    peer = results.of(plan.experiments["pairs"].runs["peer"]).get(run.round)
    return run.experiment == "pairs" and bool(cpu and peer and _disturbances(peer, cpu["backward_s"]))


def pairs(plan: Plan, results: Results, name: str) -> list[Pair]:
    cpu = _in_memory(plan, results)
    runs = plan.experiments["pairs"].runs
    peers, ours = results.of(runs["peer"]), results.of(runs[name])
    found = []
    for round_ in sorted(peers.keys() & ours.keys()):
        peer, own = peers[round_], ours[round_]
        arithmetic_s = cpu["backward_s"] if cpu else 0.0
        peer_s, limit_s = _peer_times(peer, arithmetic_s)
        reasons = [own["void"]] if own["void"] else []
        if not cpu:
            reasons.append("the peer's arithmetic is not known")
        reasons += _disturbances(peer, arithmetic_s)
        found.append(Pair(round_, peer_s, limit_s, own["period_s"], "; ".join(reasons)))
    return found


def _pair_lines(plan: Plan, results: Results) -> Iterator[Line]:
    for name, bound in PAIR_BOUNDS.items():
        all_pairs = pairs(plan, results, name)
        valid = [pair for pair in all_pairs if not pair.void]
        note = "; ".join(f"pair {pair.round} is void: {pair.void}" for pair in all_pairs if pair.void)
        yield Line("DeepSpeed / mlpo", name, [pair.ratio for pair in valid], bound, needed=7, note=note)


def _valid(results: Results, configuration: dict[str, Any]) -> tuple[dict[int, Result], str]:
    """By round those that are not void, and why others are."""
    found = results.of(configuration)
    voids = [f"run {round_} is void: {result['void']}" for round_, result in found.items() if result.get("void")]
    return {round_: result for round_, result in found.items() if not result.get("void")}, "; ".join(voids)


def _share_line(results: Results, group: str, what: str, configuration: dict[str, Any], least: float | None,
                needed: int = 3, factor: float = 1) -> Line:  # fmt: skip
    found, note = _valid(results, configuration)
    shares = [factor * result["limit_share"] for result in found.values()]
    return Line(group, what, shares, least, needed=needed, note=note)


def _limit_lines(plan: Plan, results: Results) -> Iterator[Line]:
    for name in ("limits", "jitter"):
        for what, configuration in plan.experiments[name].runs.items():
            bound = LIMIT_BOUNDS[configuration["ranks"]] if name == "limits" else None
            yield _share_line(results, "share of the limit", f"{what} ranks", configuration, bound)
    for what, configuration in plan.experiments["policies"].runs.items():
        yield _share_line(results, "share of the limit, policy", what, configuration, None)
    for what, configuration in plan.experiments["three"].runs.items():
        yield _share_line(results, "share of the limit, three paths", f"{what} ranks", configuration, THREE_BOUND)


def worth(limits: dict[str, list[float]], factors: dict[str, float] | None = None) -> float:
    """Bytes a second that paths read and write at the same time, each, with the limits of some multiplied."""
    total = 0.0
    for name, (read, write, duplex) in limits.items():
        factor = (factors or {}).get(name, 1.0)
        total += factor / max(1 / read, 1 / write, duplex * (1 / read + 1 / write))
    return total


def _halved_lines(plan: Plan, results: Results) -> Iterator[Line]:
    configuration = plan.experiments["halved"].runs["nvme"]
    (halved_at, (path, factor)), (restored_at, _) = configuration["limits_at"].items()
    halved, restored = int(halved_at), int(restored_at)
    found, note = _valid(results, configuration)
    # From the third step on under the new limits.
    spans = {"halved": (halved + 2, restored - 1, factor), "restored": (restored + 2, configuration["steps"], 1.0)}
    for what, (first, last, of_limit) in spans.items():
        values = []
        for result in found.values():
            ideal_s = result["transfer_s"] * worth(result["limits"]) / worth(result["limits"], {path: of_limit})
            values.append(ideal_s * (last - first + 1) / sum(result["step_s"][first - 1 : last]))
        yield Line("share of the limit", f"{path} {what}, steps {first} to {last}", values, 0.95, needed=3, note=note)


def _rank_lines(plan: Plan, results: Results) -> Iterator[Line]:
    group = "share of the limit, ranks"
    for what, configuration in plan.experiments["ranks"].runs.items():
        if "--stop-rank" not in configuration["extra"]:
            yield _share_line(results, group, what, configuration, WITHIN)
            continue
        # ideal_s is that of the others with the whole pool. What they had of it before is what they cannot lose.
        others = (configuration["ranks"] - 1) / configuration["ranks"]
        pool = configuration["pool_blocks"]
        factor = others * (BLOCKS - pool) / (others * BLOCKS - pool)
        yield _share_line(results, group, f"{what}, with their part of the pool", configuration, WITHIN, factor=factor)
        yield _share_line(results, group, f"{what}, with the whole pool", configuration, None)


def _unlimited_lines(plan: Plan, results: Results) -> Iterator[Line]:
    runs = plan.experiments["unlimited"].runs
    yield _share_line(results, "unlimited disk", "mlpo / fio's mix", runs["mlpo"], 0.9, needed=7)
    ours, void = _valid(results, runs["mlpo"])
    peers = results.of(runs["peer"])
    moved = OURS_MOVES * (1 - runs["mlpo"]["pool_blocks"] / BLOCKS)
    gains = [peers[i]["step_s"] / ours[i]["period_s"] * moved / PEER_STEP_MOVES for i in ours.keys() & peers.keys()]
    note = "; ".join(filter(None, [f"bytes: {PEER_STEP_MOVES / moved:.2f}", void]))
    yield Line("unlimited disk", "(DeepSpeed's step / mlpo's) / ratio of the bytes", gains, 1.0, needed=7, note=note)


def _integrity_lines(plan: Plan, results: Results) -> Iterator[Line]:
    runs = plan.experiments["integrity"].runs
    for where, most in (("paper", 1.03), ("unlimited", None)):
        on, on_void = _valid(results, runs[where])
        off, off_void = _valid(results, runs[f"{where}, off"])
        ratios = [on[i]["period_s"] / off[i]["period_s"] for i in on.keys() & off.keys()]
        note = "; ".join(filter(None, [on_void, off_void]))
        yield Line("checksums", f"a step with / without, {where}", ratios, most=most, needed=3, note=note)


def _other_lines(plan: Plan, results: Results) -> Iterator[Line]:
    adam = results.of({"kind": "adam"}).get(1)
    for kind in adam["kinds"] if adam else []:
        spread = [kind["ratio_least"][name] for name in ("min", "median", "max")]
        note = f"{kind['pairs']} turns of each side"
        yield Line("Adam", f"DeepSpeedCPUAdam / mlpo, {kind['grad']} in, {kind['dtype']} out", spread, 1.25, note=note)
    yield Line("Adam", "mlpo / plain loop", [adam["loop_ratio"]] if adam else [], 0.95)
    costs: dict[str, list[float]] = {}
    for what, configuration in plan.experiments["scaling"].runs.items():
        for result in _valid(results, configuration)[0].values():
            costs.setdefault(what, []).append(1 / result["parameters_per_s"])
    medians = [statistics.median(values) for values in costs.values()]
    spread = [max(medians) / min(medians)] if len(medians) == len(plan.experiments["scaling"].runs) else []
    note = ", ".join(f"{what}: {statistics.median(values) * 1e9:.2f} ns" for what, values in costs.items())
    yield Line("cost a parameter", "dearest size / cheapest", spread, most=1.1, note=note)
    scheduler = results.of({"kind": "scheduler"}).get(1)
    yield Line("scheduler", "microseconds a block, 10^6 blocks", [scheduler["us_per_block"]] if scheduler else [], most=5)


def all_of(plan: Plan, results: Results) -> list[Line]:
    lines = []
    for part in (_pair_lines, _limit_lines, _halved_lines, _rank_lines, _unlimited_lines, _integrity_lines,
                 _other_lines):  # fmt: skip
        lines += part(plan, results)
    return lines
