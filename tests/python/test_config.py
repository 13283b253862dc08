"""The "smddp" section, the environment variables, and the options that the core receives."""

from __future__ import annotations

import logging
import re
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from deepspeed_smddp import errors
from deepspeed_smddp.config import settings, units
from deepspeed_smddp.config.fields import settings_of
from deepspeed_smddp.config.parsing import RETIRED_VARIABLES, parse_section
from deepspeed_smddp.config.schema import (
    VARIABLES,
    DebugSettings,
    ProcessSettings,
    SmddpConfig,
)
from deepspeed_smddp.errors import SmddpConfigError

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """No SMDDP_ variable is set, no configuration was made, the rank is 0."""
    for variable in (*VARIABLES, *RETIRED_VARIABLES, "SMDDP_DEBUG", "RANK"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(settings, "_file", settings._File())
    monkeypatch.setattr(settings, "_jobs", 0)
    monkeypatch.setattr(settings, "_applied", None)
    monkeypatch.setattr(errors, "_warned", set())


@pytest.fixture
def core(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The options of the core, at each change."""
    calls: list[dict[str, Any]] = []
    follower = lambda settings: calls.append(settings.core_options())  # noqa: E731
    monkeypatch.setattr(settings, "_followers", [follower])
    return calls


def rows_of_core_table(table: str) -> dict[str, str]:
    text = (ROOT / "csrc/common/env.h").read_text()
    text = text[text.index(f"#define {table}") :]
    text = text[: text.index("\n\n")]
    rows = re.findall(r'X\((\w+),\s*"([^"]*)",\s*"[^"]*"\)', text)
    assert len(rows) == len(re.findall(r"^\s*X\(", text, re.MULTILINE))
    return dict(rows)


# Settings that the core does not read from the environment, as it does their neighbours.
IN_PYTHON = {"shared_allocator", "autoload", "deepspeed_hook", "report", "report_dir"}
IN_PYTHON |= {"zero_paths", "check_first_use"}


@pytest.mark.parametrize(
    ("table", "model"),
    [("SMDDP_ENV_TABLE", ProcessSettings), ("SMDDP_DEBUG_TABLE", DebugSettings)],
)
def test_the_core_has_the_same_names_and_defaults(table: str, model: Any) -> None:
    ours = {}
    for one in settings_of(model):
        if one.path not in IN_PYTHON:
            name = one.path if one.variable is None else one.variable.removeprefix("SMDDP_")
            default = one.field.default
            ours[name] = str(int(default) if isinstance(default, bool) else default)
    assert rows_of_core_table(table) == ours


def test_numbers_for_people_have_no_exponent() -> None:
    assert [units.size_text(kib << 10) for kib in (1, 999, 1000, 1023, 1024)] == [
        *("1 KiB", "999 KiB", "1000 KiB", "1023 KiB", "1 MiB")
    ]
    assert units.size_text((1 << 20) - 1) == "1024 KiB"
    assert units.size_text(12_345 << 30, 4) == "12345 GiB"
    assert units.rate_text(4e11) == "3200 Gbit/s" and units.rate_text(1.2499e8) == "999.9 Mbit/s"
    assert units.number_text(0.0012345) == "0.00123" and units.number_text(float("inf")) == "inf"


def test_users_have_at_most_29_settings() -> None:
    """A section within the section counts once: it is one subject, and off unless it is there."""
    assert len(SmddpConfig.fields()) + len(ProcessSettings.fields()) <= 29


@pytest.mark.parametrize(
    ("section", "parts"),
    [
        ({"allgather_bucket": 1}, ['allgather_bucket": 1', 'mean "allgather_bucket_size"?']),
        (
            {"activation_offload": {"horizn": 3}},
            ['activation_offload.horizn"', '"horizon"?'],
        ),
        ({"zzz": 1}, ["known keys: allgather_bucket_size, "]),
        ({"fallback": "loud"}, ['is "loud"', 'may hold "warn", "silent" or "error"']),
        ({"allgather_bucket_size": 12}, ["is 12", '"auto" or a number of bytes of at least 4096']),
        ({"reduce_scatter_bucket_size": "big"}, ["smddp.reduce_scatter_bucket_size", 'is "big"']),
        ({"max_sms": True}, ["is true", "a number of streaming multiprocessors"]),
        ({"timeout_seconds": 0}, ["is 0", "seconds above 0"]),
        ({"timeout_seconds": "600"}, ['is "600"', "seconds above 0"]),
        ({"activation_offload": 3}, ["is 3", '{"enabled": false, "horizon": 2}']),
        ({"activation_offload": {"horizon": 0}}, ["smddp.activation_offload.horizon", "is 0"]),
        ({"ledger": {"interval_seconds": -1}}, ["smddp.ledger.interval_seconds", "is -1"]),
        (True, ['"smddp" in the DeepSpeed config is true, but may']),
    ],
)
def test_wrong_section_gives_one_sentence(section: Any, parts: list[str]) -> None:
    with pytest.raises(SmddpConfigError) as caught:
        parse_section(section)
    assert all(part in str(caught.value) for part in parts), caught.value
    assert "\n" not in str(caught.value)


def test_numbers_as_json_and_hjson_read_them() -> None:
    section = parse_section({"allgather_bucket_size": 5e8, "timeout_seconds": 30})
    assert section.allgather_bucket_size == 500_000_000
    assert section.timeout_seconds == 30.0


def test_environment_before_file_before_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SMDDP_FALLBACK", "error")
    monkeypatch.setenv("SMDDP_REPORT_DIR", "/Scratch/Fast")
    offload = {"horizon": 4}
    section = {"fallback": "silent", "timeout_seconds": 5, "activation_offload": offload}
    resolved = settings.resolve(parse_section(section))
    assert resolved.section.fallback == "error"
    assert resolved.source("fallback") == "SMDDP_FALLBACK"
    assert resolved.section.timeout_seconds == 5
    assert resolved.source("timeout_seconds") == "ds_config"
    assert resolved.section.activation_offload.horizon == 4
    assert resolved.source("activation_offload.horizon") == "ds_config"
    assert resolved.process.report_dir == "/Scratch/Fast"
    assert resolved.section.reduce_precision == "wire"
    assert resolved.source("reduce_precision") == "default"


@pytest.mark.parametrize(
    ("key", "text", "expected"),
    [
        ("allgather_bucket_size", "65536", 65536),
        ("allgather_bucket_size", "AUTO", "auto"),
        ("report", "0", False),
        ("report", "true", True),
        ("timeout_seconds", "2.5", 2.5),
        ("max_sms", "4", 4),
        ("reduce_precision", "fp32", "fp32"),
        ("host_id", "Left", "Left"),
    ],
)
def test_variables_are_parsed(
    monkeypatch: pytest.MonkeyPatch, key: str, text: str, expected: object
) -> None:
    monkeypatch.setenv(f"SMDDP_{key.upper()}", text)
    resolved = settings.resolve()
    model = resolved.process if key in ProcessSettings.fields() else resolved.section
    assert getattr(model, key) == expected


def test_a_secret_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SMDDP_JOB_SECRET", "0123456789abcdef")
    assert "0123456789abcdef" not in repr(settings.resolve())


@pytest.mark.parametrize(
    ("name", "text", "parts"),
    [
        ("DEBUG", "algoritm=log", ['algoritm in SMDDP_DEBUG: "log"', 'did you mean "algorithm"?']),
        ("DEBUG", "curve=default,algorithm=ring", ['is "ring"', '"auto", "direct", "log"']),
        ("DEBUG", "flight_recorder=many", ["flight_recorder in SMDDP_DEBUG", "at least 0"]),
        ("ALLGATHER_BUCKET_SIZE", "lots", ["SMDDP_ALLGATHER_BUCKET_SIZE", '"auto" or a number']),
    ],
)
def test_wrong_variable_gives_one_sentence(
    monkeypatch: pytest.MonkeyPatch, name: str, text: str, parts: list[str]
) -> None:
    monkeypatch.setenv(f"SMDDP_{name}", text)
    with pytest.raises(SmddpConfigError) as caught:
        settings.resolve()
    assert all(part in str(caught.value) for part in parts), caught.value


def test_debug_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(
        "SMDDP_DEBUG", ",curve=20:4:1.25,zero_paths=0,check_first_use=0,single_copy=0"
    )
    debug = settings.resolve().debug
    assert debug.curve == "20:4:1.25"
    assert not debug.zero_paths and not debug.check_first_use
    assert settings.resolve().core_options()["check_first_use"] is False


def test_timeout_is_what_was_asked_for_unless_set(monkeypatch: pytest.MonkeyPatch) -> None:
    given = timedelta(minutes=30)
    assert settings.resolve().timeout(given) == given
    assert settings.resolve().timeout(None) == timedelta(seconds=600)
    # Also if the value that was set equals the default.
    assert settings.resolve(parse_section({"timeout_seconds": 600})).timeout(given) == timedelta(
        seconds=600
    )
    monkeypatch.setenv("SMDDP_TIMEOUT_SECONDS", "7")
    assert settings.resolve().timeout(given) == timedelta(seconds=7)


def test_the_core_receives_the_options(core: list[dict[str, Any]]) -> None:
    section = parse_section(
        {
            "allgather_bucket_size": 8192,
            "reduce_scatter_bucket_size": "auto",
            "reduce_precision": "fp32",
            "fallback": "error",
        }
    )
    settings.set_file(section, zero_allgather_elements=1000)
    settings.set_file(section, zero_allgather_elements=1000)  # unchanged: not passed again
    assert core == [
        {
            "allgather_bucket_bytes": 8192,
            "allgather_bucket_elements": 1000,
            "reduce_scatter_bucket_bytes": 0,
            "reduce_precision_fp32": True,
            "coding": "auto",
            "fallback": "error",
            "max_sms": 9,
            "reduce_on_cpu": False,
            "check_first_use": True,
            "silence_seconds": 30.0,
            "routes": {
                key: [(0, "default")] for key in ("all_gather", "reduce_scatter", "all_reduce")
            },
        }
    ]


def test_configure_from_python(core: list[dict[str, Any]]) -> None:
    import deepspeed_smddp

    applied = deepspeed_smddp.configure({"fallback": "silent"}, allgather_bucket_size=1 << 20)
    assert applied.source("fallback") == "configure()"
    assert core[-1]["fallback"] == "silent"
    assert core[-1]["allgather_bucket_bytes"] == 1 << 20
    deepspeed_smddp.configure(SmddpConfig(reduce_precision="fp32"))
    assert core[-1]["reduce_precision_fp32"] is True
    assert core[-1]["fallback"] == "warn"
    with pytest.raises(SmddpConfigError, match=r'did you mean "fallback"\?'):
        deepspeed_smddp.configure(falback="error")
    assert len(core) == 2


# --- several engines


def test_a_second_engine_adds_to_the_settings_of_the_first(core: list[dict[str, Any]]) -> None:
    settings.merge_file(parse_section({"fallback": "error", "ledger": {"table": True}}), 1000)
    both = settings.merge_file(parse_section({"max_sms": 4, "ledger": {"monitor": False}}))
    assert both.section.fallback == core[-1]["fallback"] == "error"
    assert both.section.max_sms == core[-1]["max_sms"] == 4
    assert both.section.ledger.table and not both.section.ledger.monitor
    assert both.zero_allgather_elements == 1000
    third = settings.merge_file(parse_section({"fallback": "error"}), 500)
    assert third.section == both.section and third.zero_allgather_elements == 500


def test_engines_that_contradict_one_another(core: list[dict[str, Any]]) -> None:
    before = settings.merge_file(parse_section({"ledger": {"interval_seconds": 2}}))
    with pytest.raises(SmddpConfigError) as caught:
        settings.merge_file(parse_section({"ledger": {"interval_seconds": 3}}))
    name = '"smddp.ledger.interval_seconds" of'
    for part in (f"{name} the DeepSpeed config is 3.0", f"{name} an earlier one is 2.0"):
        assert part in str(caught.value)
    assert settings.current() == before and len(core) == 1


def test_the_smallest_of_several_bucket_sizes_applies(core: list[dict[str, Any]]) -> None:
    for asked, applies in (
        ("auto", "auto"),
        (1 << 23, 1 << 23),
        (1 << 22, 1 << 22),
        ("auto", 1 << 22),
    ):
        both = settings.merge_file(parse_section({"allgather_bucket_size": asked}))
        assert both.section.allgather_bucket_size == applies
    assert settings.merge_file(SmddpConfig()).section.allgather_bucket_size == 1 << 22


def test_how_an_engine_is_built_is_its_own_affair(core: list[dict[str, Any]]) -> None:
    offload = {"activation_offload": {"enabled": True, "horizon": 3}}
    settings.merge_file(parse_section({"max_sms": 4, "sharded_data_parallel_degree": 2, **offload}))
    second = settings.merge_file(parse_section({"sharded_data_parallel_degree": 4}))
    assert second.section == SmddpConfig(max_sms=4, sharded_data_parallel_degree=4)


def test_an_engine_adds_to_what_the_program_has_configured(core: list[dict[str, Any]]) -> None:
    settings.configure(fallback="silent")
    assert settings.merge_file(SmddpConfig(), 1000).section == SmddpConfig(fallback="silent")
    both = settings.merge_file(parse_section({"max_sms": 4}))
    assert (both.section.fallback, both.section.max_sms) == ("silent", 4)
    assert (both.source("fallback"), both.source("max_sms")) == ("configure()", "ds_config")
    with pytest.raises(SmddpConfigError, match=r'but "fallback" of configure\(\) is "silent"'):
        settings.merge_file(parse_section({"fallback": "warn"}))
    assert settings.configure(fallback="error").section == SmddpConfig(fallback="error")


def test_the_sections_of_a_job_end_with_it(
    core: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings.configure(max_sms=4)
    settings.merge_file(parse_section({"fallback": "warn"}))
    settings.begin_job()
    with monkeypatch.context() as group:
        group.setattr(dist, "is_initialized", lambda: True)
        settings.merge_file(parse_section({"timeout_seconds": 5}))
    later = settings.merge_file(parse_section({"fallback": "error"}))
    assert later.section == SmddpConfig(max_sms=4, fallback="error")


# --- settings of older versions


def test_retired_keys_are_accepted_and_say_so_once(
    core: list[dict[str, Any]], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            section = parse_section({"hierarchical_allgather": False, "check_first_use": True})
    assert section == SmddpConfig()
    said = sorted(record.getMessage() for record in caplog.records)
    assert len(said) == 2 and "SMDDP_DEBUG=check_first_use=0" in said[0]
    assert '"smddp.hierarchical_allgather" has no effect any more' in said[1]


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("SMDDP_SINGLE_COPY", "SMDDP_DEBUG=single_copy=..."),
        ("SMDDP_LEDGER_TABLE", 'the key "smddp.ledger.table"'),
        ("SMDDP_LEAVE_SHARED_CORES", "a waiting thread always leaves a core"),
    ],
)
def test_a_retired_variable_says_what_replaces_it(
    core: list[dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    name: str,
    instead: str,
) -> None:
    monkeypatch.setenv(name, "1")
    with caplog.at_level(logging.WARNING):
        assert settings.apply(force=True).section == SmddpConfig()
        settings.apply(force=True)
    (record,) = caplog.records
    assert f"{name} has no effect any more: {instead}" in record.getMessage()


def test_unknown_variable_gives_a_warning(
    core: list[dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("SMDDP_FALBACK", "error")
    with caplog.at_level(logging.WARNING):
        settings.apply()
    assert [record.getMessage() for record in caplog.records] == [
        "smddp: the environment variable SMDDP_FALBACK is not known; did you mean SMDDP_FALLBACK?"
    ]


def test_doctor_names_value_and_source(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from deepspeed_smddp.diagnostics.doctor import checks as doctor

    path = tmp_path / "ds.json"
    path.write_text(
        '{"comm_backend": "smddp", "smddp": {"fallback": "error"},'
        ' "zero_optimization": {"stage": 3, "allgather_bucket_size": 1e6}}'
    )
    monkeypatch.setenv("SMDDP_TIMEOUT_SECONDS", "12")
    monkeypatch.setenv("SMDDP_HOST_ID", "left")
    monkeypatch.setenv("SMDDP_DEBUG", "flight_recorder=5")
    monkeypatch.setenv("DEEPSPEED_TIMEOUT", "20")
    rows = {row.name: (row.value, row.source) for row in doctor.setting_rows(path)}
    assert rows["comm_backend"] == ("smddp", "ds_config")
    assert rows["zero_optimization.allgather_bucket_size"] == ("1000000", "ds_config")
    assert rows["fallback"] == ("error", "ds_config")
    assert rows["timeout_seconds"] == ("12.0", "SMDDP_TIMEOUT_SECONDS")
    assert rows["DEEPSPEED_TIMEOUT"][0] == "20"
    assert rows["SMDDP_HOST_ID"] == ("left", "SMDDP_HOST_ID")
    assert rows["SMDDP_LOG_LEVEL"] == ("warning", "default")
    assert rows["flight_recorder"] == ("5", "SMDDP_DEBUG") and "hmem" not in rows
    assert doctor.host_identity() == "left"


def test_doctor_says_where_the_job_secret_is_from_and_never_shows_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from deepspeed_smddp.diagnostics.doctor import checks as doctor
    from deepspeed_smddp.diagnostics.doctor.facts import Finding, Verdict

    def job_secret() -> Finding:
        return next(found for found in doctor.findings() if found.name == "job secret")

    assert "random" in job_secret().text
    monkeypatch.setenv("SMDDP_JOB_SECRET", "fifteen letters")
    assert job_secret().verdict is Verdict.FAILED
    monkeypatch.setenv("SMDDP_JOB_SECRET", "0123456789abcdef")
    assert job_secret().text == "from SMDDP_JOB_SECRET"
    rows = {row.name: row.value for row in doctor.setting_rows()}
    assert rows["SMDDP_JOB_SECRET"] == "set"
    path = tmp_path / "secret"
    monkeypatch.setenv("SMDDP_JOB_SECRET_FILE", str(path))
    assert job_secret().verdict is Verdict.FAILED
    path.write_text("0123456789abcdef\n")
    assert job_secret().text == f"from {path}"


def test_doctor_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    from deepspeed_smddp import _C
    from deepspeed_smddp.diagnostics.doctor import checks
    from deepspeed_smddp.diagnostics.doctor.facts import Verdict

    report = {
        "version": "12.4",
        "devices": ["H100 (132 multiprocessors)"] * 2,
        "apart": [(0, 1)],
    }
    monkeypatch.setattr(_C, "cuda_report", lambda: report)
    monkeypatch.setattr(_C, "device_statistics", lambda: {"kernels": False})
    monkeypatch.setattr(checks.torch.cuda, "is_available", lambda: True)
    found = {finding.name: finding for finding in checks.gpu_findings()}
    assert found["GPUs"].text == "2 x H100 (132 multiprocessors); driver for CUDA 12.4"
    assert "0 and 1" in found["GPU peer access"].text
    assert "nvcc" in found["GPU kernels"].text
    assert found["CUDA tensors"].verdict is Verdict.LIMITED
    assert "carried by NCCL" in found["CUDA tensors"].text
    monkeypatch.setenv("SMDDP_REDUCE_ON", "cpu")
    found = {finding.name: finding for finding in checks.gpu_findings()}
    assert "summed by the CPU" in found["CUDA tensors"].text

    def no_driver() -> None:
        raise RuntimeError("install NVIDIA's driver")

    monkeypatch.setattr(_C, "cuda_report", no_driver)
    (only,) = checks.gpu_findings()
    assert only.verdict is Verdict.LIMITED and "install" in only.text
    monkeypatch.setattr(checks.torch.cuda, "is_available", lambda: False)
    (only,) = checks.gpu_findings()
    assert only.verdict is Verdict.OK and "CPU tensors need none" in only.text
