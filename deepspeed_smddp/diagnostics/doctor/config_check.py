"""What ``smddp doctor --config`` says of a DeepSpeed config, beyond the values of its settings."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from deepspeed_smddp.config import settings
from deepspeed_smddp.config.fields import nearest
from deepspeed_smddp.config.parsing import SECTION
from deepspeed_smddp.deepspeed import comm_backend, unsupported_features
from deepspeed_smddp.deepspeed.sharding import sharding_degree
from deepspeed_smddp.diagnostics.doctor.facts import Finding, Verdict, limited

_NAME = "config"


def config_findings(path: Path) -> Iterator[Finding]:
    """What is wrong with the config or goes past smddp; one line without a fault if nothing.

    Raises:
        SmddpConfigError: a value that training would refuse.
    """
    request = comm_backend.parse(path)
    config = request.config
    if not config:
        text = f"{path} is neither JSON nor hjson with an object in it"
        yield Finding(_NAME, text, Verdict.FAILED)
        return
    own = (comm_backend.KEY, SECTION)
    misspelt = {key: guess for key in config if key not in own and (guess := nearest(key, own))}
    for key, guess in misspelt.items():
        text = f'"{key}" has no effect: did you mean "{guess}"?'
        yield Finding(_NAME, text, Verdict.FAILED)
    if not request.wants_smddp:
        said = f'is "{request.backend}"' if request.backend else "is not set"
        more = f', and the section "{SECTION}" has no effect' if request.section else ""
        text = f'"{comm_backend.KEY}" {said}: the job does not use smddp{more}'
        yield Finding(_NAME, text, Verdict.FAILED if more else Verdict.LIMITED)
        return
    if settings.resolve(request.section).section.sharded_data_parallel_degree:
        sharding_degree.check_config(config)
    sentences = unsupported_features.sentences(config)
    yield from (limited(_NAME, sentence.removeprefix("smddp: ")) for sentence in sentences)
    if not misspelt and not sentences:
        yield Finding(_NAME, str(path))
