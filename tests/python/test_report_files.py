"""The folder of a job's reports, which ranks make and remove beside one another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from deepspeed_smddp.diagnostics.report_files import JobFiles


@pytest.mark.quick
def test_a_folder_that_another_rank_removes_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SMDDP_REPORT_DIR", str(tmp_path))
    made, left = Path.mkdir, [1, 2]

    def mkdir(self: Path, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        if left and self.parent != tmp_path.parent:
            left.pop()
            self.rmdir()  # as the last rank of another group does

    monkeypatch.setattr(Path, "mkdir", mkdir)
    files = JobFiles("job", 0)
    assert not left and list(files.folder.glob("running-*.json"))
    files.close()
    assert not files.folder.exists()
