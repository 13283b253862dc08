"""The manifests of examples/kubernetes against the schemas of Kubernetes and its PyTorch operator.

The clients of both are generated from these schemas. A field that a schema does not have, a value
of another type or a missing required field is an error.
"""

from __future__ import annotations

import re
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubeflow.training import models
from kubernetes import client

pytestmark = pytest.mark.quick
FOLDER = Path(__file__).resolve().parents[2] / "examples" / "kubernetes"
KINDS = {"PyTorchJob": "KubeflowOrgV1PyTorchJob", "Job": "V1Job", "Service": "V1Service"}
SCALARS: dict[str, type | tuple[type, ...]] = {
    "str": str,
    "int": int,
    "bool": bool,
    "datetime": datetime,
    "object": (str, int),  # a number or its text
}
CONTAINER = re.compile(r"(?:dict\(str, |list\[)([\w()\[\], ]+)[\])]")


def checked(value: Any, kind: str, place: str) -> Any:
    """The value as an object of the client; a ValueError names the place of what is wrong."""
    if (inner := CONTAINER.fullmatch(kind)) is not None:
        if isinstance(value, dict) and kind.startswith("dict"):
            # A quantity of a resource may be a number or its text.
            of = "object" if inner[1] == "str" else inner[1]
            return {key: checked(each, of, f"{place}.{key}") for key, each in value.items()}
        if isinstance(value, list) and kind.startswith("list"):
            return [checked(each, inner[1], f"{place}[{i}]") for i, each in enumerate(value)]
        raise ValueError(f"{place} is {value!r}, and a {kind} is expected")
    if kind in SCALARS:
        if isinstance(value, bool) != (kind == "bool") or not isinstance(value, SCALARS[kind]):
            raise ValueError(f"{place} is {value!r}, and a {kind} is expected")
        return value
    schema = getattr(models, kind, None) or getattr(client, kind)
    names = {outer: name for name, outer in schema.attribute_map.items()}
    if not isinstance(value, dict) or not value.keys() <= names.keys():
        raise ValueError(f"{place} is {value!r}, and may hold {sorted(names)}")
    fields = {
        names[key]: checked(each, schema.openapi_types[names[key]], f"{place}.{key}")
        for key, each in value.items()
    }
    try:
        return schema(**fields)
    except ValueError as missing:
        raise ValueError(f"{place}: {missing}") from None


def documents() -> list[Any]:
    """All objects of all manifests, with the names of their files."""
    return [
        pytest.param(document, id=f"{path.stem}-{document['kind']}")
        for path in sorted(FOLDER.glob("*.yaml"))
        for document in yaml.safe_load_all(path.read_text())
    ]


@pytest.mark.parametrize("document", documents())
def test_manifests_follow_the_schemas(document: Any) -> None:
    checked(document, KINDS[document["kind"]], document["kind"])
