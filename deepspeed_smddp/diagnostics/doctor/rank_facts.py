"""All that one rank knows about itself for ``smddp doctor``, as data that fits into JSON."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from deepspeed_smddp.config.variables import PREFIX
from deepspeed_smddp.diagnostics.doctor import machine_facts, network_facts, software_facts
from deepspeed_smddp.diagnostics.doctor import process_checks as doctor
from deepspeed_smddp.diagnostics.doctor.fact import Fact
from deepspeed_smddp.diagnostics.doctor.finding import Finding, Verdict
from deepspeed_smddp.distributed import launchers
from deepspeed_smddp.errors import SmddpConfigError

# Variables of other libraries that change how ranks communicate or compute.
_FOREIGN = ("FI_", "NCCL_", "TORCH_NCCL_", "GLOO_", "UCX_", "OMP_", "KMP_", "DS_", "PYTORCH_")
# What hosts have of their own.
_OF_HOST = ("SMDDP_HOST_ID", "SMDDP_FABRIC_INTERFACE")
_HIDDEN = ("SECRET", "TOKEN", "PASSWORD", "KEY")
# "tcp;ofi_rxm on eth0 (192.0.2.2), libfabric 1.17": hosts differ in names and addresses of NICs.
_ADDRESSES = re.compile(r" on .*?(?=, libfabric)")
# Findings that a fact has already, or that each host has of its own.
_NOT_COMPARED = ("host identity", "Python", "torch", "built for torch", "DeepSpeed")


@dataclass
class RankFacts:
    """What one rank says of itself; ``host`` is its name for people, ``host_id`` for comparison."""

    rank: int
    host: str
    host_id: str
    local_rank: int
    facts: list[Fact] = field(default_factory=list)
    problems: list[Finding] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Plain data; :func:`from_json` is the inverse."""
        found = asdict(self)
        for row in (*found["facts"], *found["problems"]):
            for key in ("if_different", "verdict"):
                if key in row:
                    row[key] = row[key].value
        return found


def of_its_host(rank: int, ranks: Sequence[RankFacts]) -> list[int]:
    """All ranks of the host of this one; of a rank without facts that one alone."""
    host_id = next((known.host_id for known in ranks if known.rank == rank), None)
    return [known.rank for known in ranks if known.host_id == host_id] or [rank]


def from_json(found: dict[str, Any]) -> RankFacts:
    """The facts that another rank has sent."""
    facts = [Fact(**{**f, "if_different": Verdict(f["if_different"])}) for f in found["facts"]]
    problems = [Finding(**{**p, "verdict": Verdict(p["verdict"])}) for p in found["problems"]]
    return RankFacts(**{**found, "facts": facts, "problems": problems})


def collect(rank: int, ds_config: Path | None, nonce: str) -> RankFacts:
    """The facts of this process; a part that fails becomes a problem and stops no other part.

    Args:
        ds_config: the DeepSpeed config whose settings apply, or None.
        nonce: the same on all ranks of this run; secrets are compared by a hash with it.
    """
    host_id = doctor.host_identity()
    own = RankFacts(rank, launchers.host_name(), host_id, int(os.environ.get("LOCAL_RANK") or 0))
    _extend(own, "findings", _findings)
    for part in (software_facts.facts, machine_facts.facts, network_facts.facts, _variables):
        _extend(own, part.__module__.rpartition(".")[2], part)
    _extend(own, "settings", lambda: _settings(ds_config, nonce))
    _extend(own, "limits", machine_facts.findings)
    provider = next((fact.value for fact in own.facts if fact.name == "libfabric"), "")
    _extend(own, "networks", lambda: network_facts.findings(provider))
    return own


def _extend(own: RankFacts, name: str, part: Callable[[], Iterator[Fact | Finding]]) -> None:
    try:
        for found in part():
            if isinstance(found, Fact):
                own.facts.append(found)
            elif found.verdict is not Verdict.OK:
                own.problems.append(found)
    except SmddpConfigError as error:
        own.problems.append(Finding(name, str(error), Verdict.FAILED))
    except Exception as error:  # a fact that can't be read must not hide the others
        text = f"could not be read: {type(error).__name__}: {error}"
        own.problems.append(Finding(name, text, Verdict.LIMITED))


def _findings() -> Iterator[Fact | Finding]:
    for finding in doctor.findings():
        if finding.verdict is not Verdict.OK:
            yield finding
        elif finding.name not in _NOT_COMPARED:
            yield Fact(finding.name, _ADDRESSES.sub("", finding.text))


def _settings(ds_config: Path | None, nonce: str) -> Iterator[Fact]:
    for row in doctor.setting_rows(ds_config):
        secret = os.environ.get(row.name, "") if row.name.startswith(PREFIX) else ""
        value, failing = row.value, Verdict.LIMITED
        if "SECRET" in row.name:
            failing = Verdict.FAILED
            if value == "set":
                value = f"set, {hashlib.sha256(f'{nonce}{secret}'.encode()).hexdigest()[:8]}"
        scope = "host" if row.name in _OF_HOST else "job"
        yield Fact(row.name, value, scope, failing, row.source)  # type: ignore[arg-type]


def _variables() -> Iterator[Fact]:
    for name, value in sorted(os.environ.items()):
        if name.startswith(_FOREIGN) and not any(word in name for word in _HIDDEN):
            yield Fact(name, value, detail="environment")
