"""The "smddp" section, the environment variables, and the options that the core receives."""

from __future__ import annotations

import logging
import re
import sys
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from deepspeed_smddp.config import config, settings
from deepspeed_smddp.config.config import SmddpConfig, parse_section
from deepspeed_smddp.config.keys import Section
from deepspeed_smddp.config.variables import VARIABLES
from deepspeed_smddp.errors import SmddpConfigError

ROOT = Path(__file__).resolve().parents[2]
DESIGN_SECTION = {
    "allgather_bucket_size": "auto",
    "reduce_scatter_bucket_size": "auto",
    "sharded_data_parallel_degree": 0,
    "tensor_parallel_degree": 1,
    "tensor_parallel_seed": 0,
    "hierarchical_allgather": True,
    "max_sms": 9,
    "check_first_use": True,
    "reduce_on": "gpu",
    "reduce_precision": "wire",
    "fallback": "warn",
    "timeout_seconds": 600,
    "silence_seconds": 30,
    "activation_offload": {"enabled": False, "horizon": 2, "directory": ""},
    "ledger": {
        "table": False,
        "json_file": "",
        "json_lines": "",
        "prometheus_file": "",
        "interval_seconds": 0,
        "monitor": True,
    },
}


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """No SMDDP_ variable is set, no configuration was made, the rank is 0."""
    for variable in VARIABLES:
        monkeypatch.delenv(variable.environment_name, raising=False)
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(settings, "_file", (SmddpConfig(), settings.DS_CONFIG, 0))
    monkeypatch.setattr(settings, "_applied", None)
    monkeypatch.setattr(settings, "_warned", set())


@pytest.fixture
def core(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Records the calls of _C.configure in place of the compiled module."""
    calls: list[dict[str, Any]] = []
    module = ModuleType("deepspeed_smddp._C")
    module.configure = lambda **options: calls.append(options)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "deepspeed_smddp._C", module)
    monkeypatch.setattr("deepspeed_smddp._C", module, raising=False)
    return calls


def rows_of_core_table() -> dict[str, tuple[str, str]]:
    text = (ROOT / "csrc/common/env.h").read_text()
    table = text[text.index("#define SMDDP_ENV_TABLE") :]
    rows = re.findall(r'X\((\w+),\s*"([^"]*)",\s*"([^"]*)"\)', table)
    assert len(rows) == len(re.findall(r"^\s*X\(", table, re.MULTILINE))
    return {name: (default, meaning) for name, default, meaning in rows}


def test_environment_table_equals_that_of_the_core() -> None:
    core_rows = rows_of_core_table()
    ours = {variable.name: variable for variable in VARIABLES if variable.in_core}
    assert set(ours) == set(core_rows)
    for name, (default, _) in core_rows.items():
        assert ours[name].default == default, name


def test_every_key_has_a_variable_with_the_same_default() -> None:
    keys = set()
    for name, value in SmddpConfig():
        inner = value.keys if isinstance(value, Section) else None
        keys |= {f"{name}.{key}" for key in inner} if inner else {name}
    variables = {variable.key: variable for variable in VARIABLES if variable.key}
    assert set(variables) == keys
    for key, variable in variables.items():
        assert variable.name == key.replace(".", "_").upper()
        default: Any = SmddpConfig()
        for part in key.split("."):
            default = getattr(default, part)
        assert config.parse_variable(variable, variable.default) == default


def test_section_of_the_documentation_is_all_defaults() -> None:
    assert parse_section(DESIGN_SECTION) == SmddpConfig()


@pytest.mark.parametrize(
    ("section", "sentence"),
    [
        (
            {"allgather_bucket": 1},
            '"allgather_bucket": 1 is not a key of the section "smddp"; '
            'did you mean "allgather_bucket_size"?',
        ),
        (
            {"activation_offload": {"horizn": 3}},
            '"horizn": 3 is not a key of the section "smddp.activation_offload"; '
            'did you mean "horizon"?',
        ),
        (
            {"fallback": "loud"},
            '"smddp.fallback" is "loud", but may hold "warn", "silent" or "error"',
        ),
        (
            {"allgather_bucket_size": 12},
            '"smddp.allgather_bucket_size" is 12, but may hold "auto" or a number of bytes of at '
            "least 4096",
        ),
        (
            {"reduce_scatter_bucket_size": "big"},
            '"smddp.reduce_scatter_bucket_size" is "big", but may hold "auto" or a number of bytes '
            "of at least 4096",
        ),
        (
            {"max_sms": True},
            '"smddp.max_sms" is true, but may hold a number of streaming multiprocessors',
        ),
        (
            {"timeout_seconds": 0},
            '"smddp.timeout_seconds" is 0, but may hold a number of seconds above 0',
        ),
        (
            {"timeout_seconds": "600"},
            '"smddp.timeout_seconds" is "600", but may hold a number of seconds above 0',
        ),
        (
            {"hierarchical_allgather": 1},
            '"smddp.hierarchical_allgather" is 1, but may hold true or false',
        ),
        (
            {"activation_offload": 3},
            '"smddp.activation_offload" is 3, but may hold {"enabled": false, "horizon": 2}',
        ),
        (
            {"activation_offload": {"horizon": 0}},
            '"smddp.activation_offload.horizon" is 0, but may hold a number of layers of at least '
            "1",
        ),
        (
            {"ledger": {"promtheus_file": "x"}},
            '"promtheus_file": "x" is not a key of the section "smddp.ledger"; '
            'did you mean "prometheus_file"?',
        ),
        (
            {"ledger": {"interval_seconds": -1}},
            '"smddp.ledger.interval_seconds" is -1, but may hold a number of seconds, or 0 to '
            "write only when the process ends",
        ),
    ],
)
def test_wrong_section_gives_one_sentence(section: dict[str, Any], sentence: str) -> None:
    with pytest.raises(SmddpConfigError) as caught:
        parse_section(section)
    assert str(caught.value) == sentence


def test_a_key_unlike_any_other_lists_the_known_keys() -> None:
    with pytest.raises(SmddpConfigError, match=r"known keys: allgather_bucket_size, .*timeout_sec"):
        parse_section({"zzz": 1})


def test_a_section_that_is_no_object() -> None:
    with pytest.raises(SmddpConfigError, match=r'"smddp" in the DeepSpeed config is true, but may'):
        parse_section(True)


def test_numbers_as_json_and_hjson_read_them() -> None:
    section = parse_section({"allgather_bucket_size": 5e8, "timeout_seconds": 30})
    assert section.allgather_bucket_size == 500_000_000
    assert section.timeout_seconds == 30.0


def test_environment_before_file_before_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SMDDP_FALLBACK", "error")
    monkeypatch.setenv("SMDDP_ACTIVATION_OFFLOAD_HORIZON", "4")
    monkeypatch.setenv("SMDDP_ACTIVATION_OFFLOAD_DIRECTORY", "/Scratch/Fast")
    resolved = settings.resolve(parse_section({"fallback": "silent", "timeout_seconds": 5}))
    assert resolved.section.fallback == "error"
    assert resolved.source("fallback") == "SMDDP_FALLBACK"
    assert resolved.section.timeout_seconds == 5
    assert resolved.source("timeout_seconds") == "ds_config"
    assert resolved.section.activation_offload.horizon == 4
    assert resolved.section.activation_offload.directory == "/Scratch/Fast"
    assert resolved.section.reduce_precision == "wire"
    assert resolved.source("reduce_precision") == "default"


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("ALLGATHER_BUCKET_SIZE", "65536", 65536),
        ("ALLGATHER_BUCKET_SIZE", "AUTO", "auto"),
        ("HIERARCHICAL_ALLGATHER", "0", False),
        ("TIMEOUT_SECONDS", "2.5", 2.5),
        ("REDUCE_PRECISION", "fp32", "fp32"),
    ],
)
def test_variables_are_parsed(name: str, text: str, expected: object) -> None:
    variable = next(row for row in VARIABLES if row.name == name)
    assert config.parse_variable(variable, text) == expected


def test_wrong_variable_gives_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SMDDP_ALLGATHER_BUCKET_SIZE", "lots")
    with pytest.raises(SmddpConfigError) as caught:
        settings.resolve()
    assert str(caught.value) == (
        'SMDDP_ALLGATHER_BUCKET_SIZE is "lots", but may hold "auto" or a number of bytes of at '
        "least 4096"
    )


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
            "fallback": "error",
            "max_sms": 9,
            "reduce_on_cpu": False,
            "check_first_use": True,
            "silence_seconds": 30.0,
            "routes": {},
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


def test_keys_without_effect_warn_once(
    core: list[dict[str, Any]], caplog: pytest.LogCaptureFixture
) -> None:
    section = parse_section(
        {
            "hierarchical_allgather": False,
        }
    )
    with caplog.at_level(logging.WARNING):
        settings.set_file(section)
        settings.set_file(section, zero_allgather_elements=1)
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == len(settings._LATER)
    for key in settings._LATER:
        assert sum(f"{key} (ds_config) has no effect" in text for text in messages) == 1


def test_keys_with_effect_and_defaults_do_not_warn(
    core: list[dict[str, Any]], caplog: pytest.LogCaptureFixture
) -> None:
    live = {
        "allgather_bucket_size": 1 << 20,
        "reduce_scatter_bucket_size": 1 << 20,
        "reduce_precision": "fp32",
        "fallback": "silent",
        "timeout_seconds": 9,
        "sharded_data_parallel_degree": 8,
        "hierarchical_allgather": True,
        "activation_offload": {"enabled": True, "horizon": 3},
        "max_sms": 4,
        "reduce_on": "cpu",
    }
    with caplog.at_level(logging.WARNING):
        settings.set_file(parse_section(live))
    assert caplog.records == []
    assert core[-1]["max_sms"] == 4
    assert core[-1]["reduce_on_cpu"] is True


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
    rows = {row.name: (row.value, row.source) for row in doctor.setting_rows(path)}
    assert rows["comm_backend"] == ("smddp", "ds_config")
    assert rows["zero_optimization.allgather_bucket_size"] == ("1000000", "ds_config")
    assert rows["fallback"] == ("error", "ds_config")
    assert rows["timeout_seconds"] == ("12.0", "SMDDP_TIMEOUT_SECONDS")
    assert rows["SMDDP_HOST_ID"] == ("left", "SMDDP_HOST_ID")
    assert rows["SMDDP_SPIN_MICROSECONDS"] == ("200", "default")
    assert doctor.host_identity() == "left"


def test_doctor_shows_the_timeout_of_deepspeed(monkeypatch: pytest.MonkeyPatch) -> None:
    from deepspeed_smddp.diagnostics.doctor import checks as doctor

    def row() -> doctor.SettingRow | None:
        return next((r for r in doctor.setting_rows() if r.name == "DEEPSPEED_TIMEOUT"), None)

    monkeypatch.delenv("DEEPSPEED_TIMEOUT", raising=False)
    assert row() is None
    monkeypatch.setenv("DEEPSPEED_TIMEOUT", "20")
    shown = row()
    assert shown is not None and shown.value == "20" and "applies to" in shown.meaning
    monkeypatch.setenv("SMDDP_TIMEOUT_SECONDS", "7")
    shown = row()
    assert shown is not None and "timeout_seconds has precedence" in shown.meaning


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
        "gdrcopy": "2.4",
    }
    monkeypatch.setattr(_C, "cuda_report", lambda: report)
    monkeypatch.setattr(_C, "device_statistics", lambda: {"kernels": False})
    monkeypatch.setattr(checks.torch.cuda, "is_available", lambda: True)
    found = {finding.name: finding for finding in checks.gpu_findings()}
    assert found["GPUs"].text == "2 x H100 (132 multiprocessors); driver for CUDA 12.4"
    assert "0 and 1" in found["GPU peer access"].text
    assert "nvcc" in found["GPU kernels"].text and "2.4" in found["GDRCopy"].text
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
