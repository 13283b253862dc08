"""Where torch.distributed enters the package: makes a group, and starts what serves a job.

The one module that knows both the backend and what rests on it. ``smddp_autoload`` calls it.
"""

from __future__ import annotations

import atexit
from contextlib import ExitStack, nullcontext
from typing import Any

import torch.distributed as dist

from deepspeed_smddp.config import settings
from deepspeed_smddp.deepspeed import monitoring, start_up
from deepspeed_smddp.diagnostics import counters, hang_reporter, slow_watch
from deepspeed_smddp.distributed import backend, extension, split_group

_serving = ExitStack()  # what serves the latest job


def create(options: Any, backend_options: Any = None) -> extension.core.ProcessGroupSMDDP:
    """Makes one group, as :func:`deepspeed_smddp.distributed.backend.create` says.

    With the default group begin the reports, the watch for slow ranks, and the counters. The first
    two end with it, with the next one, or with the process.
    """
    is_default = not dist.is_initialized()
    try:
        if is_default:
            settings.begin_job()
        settings.follow(counters.follow)
        with start_up.watched() if is_default else nullcontext():
            group = backend.create(options, backend_options, _measured_steps)
        if is_default:
            _serve(group, options)
    except BaseException:
        backend.reset_names_after_failed_world()
        raise
    return group


def _serve(group: extension.core.ProcessGroupSMDDP, options: Any) -> None:
    global _serving
    split_group.install()
    monitoring.follow_optimizers()
    # Of this group's rendezvous: it holds nothing of ranks that were restarted.
    store = dist.PrefixStore(group.rendezvous, options.store)  # type: ignore[attr-defined]
    atexit.unregister(_serving.close)
    _serving.close()
    _serving = ExitStack()
    atexit.register(_serving.close)  # runs before what the extension has registered
    rank, ranks = options.group_rank, options.group_size
    slow_watch.start(_serving, store, rank, ranks)
    hang_reporter.start(_serving, store, rank, ranks, group.rendezvous)
    group.at_end(_serving.close)


def _measured_steps(group: Any, collective: str, device: str) -> Any:
    from deepspeed_smddp.tuning import routes  # few jobs have the route "auto"

    return routes.resolve(group, collective, device)
