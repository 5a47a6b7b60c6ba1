"""What compare measures: configurations by experiment, and in which order they are run.

A configuration says all that a run depends on but the machine and the programs, and is what results are found by again.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Iterator

Configuration = dict[str, Any]

MIB = 1 << 20
BLOCKS = 256  # of the state, at every size: so that a pool's share of it is the same
PAPER = ("nvme", "pfs")
HIDDEN = 2048  # of the peer's layers: of smaller ones it would keep the gradients in memory


@dataclasses.dataclass(frozen=True)
class Size:
    """How much is measured."""

    name: str
    layers: int  # of the peer's model
    pairs: int
    repeats: int
    steps: int  # of pairs and limits; the others take one less
    left_out: tuple[str, ...] = ()  # unless asked for by name

    @property
    def parameters(self) -> int:
        return self.layers * HIDDEN**2

    @property
    def block(self) -> int:
        return self.parameters // BLOCKS


FULL = Size("full", 64, 7, 3, 5)
QUICK = Size("quick", 16, 1, 1, 4, ("jitter", "policies", "integrity", "scaling", "scheduler", "turns"))
TINY = Size("tiny", 2, 1, 1, 4)  # shows that everything runs, and nothing else
SIZES = {size.name: size for size in (FULL, QUICK, TINY)}


@dataclasses.dataclass(frozen=True)
class Experiment:
    name: str
    shows: str
    runs: dict[str, Configuration]  # by what the report calls them
    rounds: int
    alternate: bool = False  # every other round backwards, so that neither side always has the other's heat before it


@dataclasses.dataclass(frozen=True)
class Run:
    experiment: str
    name: str
    configuration: Configuration
    round: int  # from 1


class Plan:
    def __init__(self, size: Size) -> None:
        self.size = size
        once, repeats = 1, size.repeats
        all_of = [
            Experiment("peer-in-memory", "the peer's arithmetic", {"cpu": self.peer("cpu", iterations=5)}, once),
            Experiment("pairs", "beside DeepSpeed", self.pairs(), size.pairs, alternate=True),
            Experiment("limits", "every path at its limit", self.limits(("paper", "half", "crossed")), repeats),
            Experiment("jitter", "a path that stutters", self.limits(("jitter",)), once),
            Experiment("policies", "shares of the paths", self.policies(), once),
            Experiment("halved", "a limit halved in the middle of a run, and restored", self.halved(), repeats),
            Experiment("three", "three paths", self.three(), repeats),
            Experiment("ranks", "unequal, skewed and stopped ranks", self.ranks(), repeats),
            # A disk without a limit has no speed that stays: as many rounds as pairs.
            Experiment("unlimited", "the bare disk, beside fio and DeepSpeed", self.unlimited(), size.pairs,
                       alternate=True),  # fmt: skip
            Experiment("adam", "the kernel beside DeepSpeedCPUAdam", {"adam": {"kind": "adam"}}, once),
            Experiment("ablation", "each mechanism switched off alone", self.ablation(), once),
            Experiment("integrity", "checksums on and off", self.integrity(), repeats, alternate=True),
            Experiment("scaling", "cost by size", self.scaling(), repeats),
            Experiment("scheduler", "the scheduler's own time", {"scheduler": {"kind": "scheduler"}}, once),
            Experiment("turns", "turns and exclusive use of a path", self.turns(), once),
        ]
        self.experiments = {experiment.name: experiment for experiment in all_of}

    # ---- Configurations

    def train(self, profile: str = "paper", ranks: int = 1, **other: Any) -> Configuration:
        """The pool of 600 MiB of 3 GiB, at every size."""
        return {
            "kind": "train",
            "profile": profile,
            "scale": 20,
            "paths": list(PAPER),
            "parameters": self.size.parameters,
            "block": self.size.block,
            "pool_blocks": 50,
            "ranks": ranks,
            "steps": self.size.steps - 1,
            "set": {},
            **other,
        }

    def peer(self, device: str, **other: Any) -> Configuration:
        return {
            "kind": "peer",
            "profile": "paper",
            "scale": 20,
            "device": device,
            "layers": self.size.layers,
            "hidden": HIDDEN,
            # As many subgroups at every size; 2e7 at the full one.
            "sub_group": round(2e7 * self.size.parameters / FULL.parameters),
            "iterations": 3,
            **other,
        }

    def pairs(self) -> dict[str, Configuration]:
        steps = self.size.steps
        return {
            "peer": self.peer("nvme", sample=True),
            "nvme alone, 200 MiB": self.train(steps=steps, paths=["nvme"], pool_blocks=16),
            "both paths, 200 MiB": self.train(steps=steps, pool_blocks=16, sample=True),
            "both paths, a quarter": self.train(steps=steps, pool_blocks=BLOCKS // 4),
        }

    def limits(self, profiles: tuple[str, ...]) -> dict[str, Configuration]:
        cells = [(profile, ranks) for ranks in (1, 2, 4, 8) for profile in profiles]
        return {f"{profile}, {ranks}": self.train(profile, ranks, steps=self.size.steps) for profile, ranks in cells}

    def policies(self) -> dict[str, Configuration]:
        """Beside adaptive, which the limits have. The user's weights are those of the profile `paper`."""
        ratio = {"scheduler.policy": "ratio", "path.nvme.weight": 265, "path.pfs.weight": 180}
        runs = {}
        for profile in ("paper", "half", "crossed", "jitter"):
            runs[f"proportional, {profile}"] = self.train(profile, set={"scheduler.policy": "proportional"})
            runs[f"ratio, {profile}"] = self.train(profile, set=ratio)
        return runs

    def halved(self) -> dict[str, Configuration]:
        changes = {"5": ["nvme", 0.5], "10": ["nvme", 1]}
        return {"nvme": self.train(steps=14, limits_at=changes)}

    def three(self) -> dict[str, Configuration]:
        return {f"{ranks}": self.train(ranks=ranks, steps=self.size.steps, paths=[*PAPER, "third"]) for ranks in (1, 2)}

    def ranks(self) -> dict[str, Configuration]:
        return {
            "sizes 1:3": self.train(ranks=2, extra=["--rank-weights", "1,3"]),
            "half a step apart": self.train(ranks=2, extra=["--skew", "0.5"]),
            "one of three stopped": self.train(ranks=3, steps=7, extra=["--stop-rank", "1@3"]),
        }

    def unlimited(self) -> dict[str, Configuration]:
        return {
            "mlpo": self.train("unlimited", 2, paths=["plain"], extra=["--fio"]),
            "peer": self.peer("nvme", profile="unlimited"),
        }

    def ablation(self) -> dict[str, Configuration]:
        """Beside what the limits have for two ranks on `paper`."""
        off: dict[str, dict[str, Any]] = {
            "proportional shares (the paper's)": {"set": {"scheduler.policy": "proportional"}},
            "order: alternating (the paper's)": {"set": {"scheduler.order": "alternating"}},
            "order: ascending": {"set": {"scheduler.order": "ascending"}},
            "gradients flushed in FP32": {"set": {"scheduler.gradients": "flushed"}},
            "no learning": {"set": {"scheduler.learn": False}},
            "one path": {"paths": ["nvme"]},
            "pool of 16 blocks": {"pool_blocks": 16},
            "exclusive paths": {"set": {"path.exclusive": True}},
        }
        return {name: self.train(ranks=2, **changes) for name, changes in off.items()}

    def integrity(self) -> dict[str, Configuration]:
        """Pairs: on limited paths, where workers wait for bytes, and on the bare disk, where they may not."""
        off = {"set": {"scheduler.integrity": False}}
        bare = {"paths": ["plain"], "extra": ["--fio"]}
        return {
            "paper": self.train(ranks=2),
            "paper, off": self.train(ranks=2, **off),
            "unlimited": self.train("unlimited", 2, **bare),
            "unlimited, off": self.train("unlimited", 2, **bare, **off),
        }

    def scaling(self) -> dict[str, Configuration]:
        """A quarter, as many and four times the parameters; blocks of one size, pool and subgroups in proportion."""
        runs = {}
        for factor in (0.25, 1, 4):
            parameters = round(self.size.parameters * factor)
            name = f"{parameters / 1e6:.0f} M"
            runs[name] = self.train(ranks=2, parameters=parameters, pool_blocks=round(48 * factor))
        return runs

    def turns(self) -> dict[str, Configuration]:
        kinds: dict[str, dict[str, Any]] = {
            "exclusive": {"path.exclusive": True},
            "turns of 8": {"path.turn": "{blocks = 8, direction = \"one\"}"},
        }
        runs = {}
        for kind, settings in kinds.items():
            for profile in ("paper", "half"):
                for ranks in (1, 2, 4, 8):
                    runs[f"{kind}, {profile}, {ranks}"] = self.train(profile, ranks, set=settings)
        for ranks in (1, 2, 4, 8):
            bare = {"paths": ["plain"], "extra": ["--fio"]}
            runs[f"shared, unlimited, {ranks}"] = self.train("unlimited", ranks, **bare)
            runs[f"exclusive, unlimited, {ranks}"] = self.train("unlimited", ranks, set=kinds["exclusive"], **bare)
        return runs

    # ---- Order

    def runs(self) -> Iterator[Run]:
        """What matters most first: pairs, then the limits' table, then once everything, then the repetitions."""
        first = ("peer-in-memory", "pairs", "limits")
        for name in first:
            for round_ in range(1, self.experiments[name].rounds + 1):
                yield from self._round(name, round_)
        rest = [name for name in self.experiments if name not in first]
        for round_ in range(1, max(self.experiments[name].rounds for name in rest) + 1):
            for name in rest:
                yield from self._round(name, round_)

    def _round(self, name: str, round_: int) -> Iterator[Run]:
        experiment = self.experiments[name]
        if round_ > experiment.rounds:
            return
        items = list(experiment.runs.items())
        if experiment.alternate and round_ % 2 == 0:
            items.reverse()
        for run, configuration in items:
            yield Run(name, run, configuration, round_)
