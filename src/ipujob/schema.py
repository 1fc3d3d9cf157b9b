"""What the schema of the CRD says of an object, before an API server does: the few words of OpenAPI that ours uses."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from functools import cache
from importlib import resources
from typing import Any

import yaml

from .documents import Fault, Place

_TYPES = {"object": dict, "array": list, "string": str, "integer": int, "boolean": bool}
_INT32 = 2**31 - 1
# Of the template, which is passed on unchecked, the parts that pods.py writes into.
_OPEN = "x-kubernetes-preserve-unknown-fields"
_OBJECT = {"type": "object", _OPEN: True}
_WORDS = {"type": "object", "additionalProperties": {"type": "string"}}
_NAMED = {
    "type": "array",
    "items": {**_OBJECT, "required": ["name"], "properties": {"name": {"type": "string"}}},
}
_MOUNTS = {**_NAMED, "items": {**_NAMED["items"], "properties": {"mountPath": {"type": "string"}}}}
_CONTAINER = {
    **_OBJECT,
    "properties": {
        "env": _NAMED,
        "volumeMounts": _MOUNTS,
        "resources": {**_OBJECT, "properties": {"limits": _OBJECT, "requests": _OBJECT}},
        "securityContext": {
            **_OBJECT,
            "properties": {"capabilities": {**_OBJECT, "properties": {"add": {"type": "array"}}}},
        },
    },
}
_TEMPLATE = {
    **_OBJECT,
    "properties": {
        "metadata": {**_OBJECT, "properties": {"labels": _WORDS, "annotations": _WORDS}},
        "spec": {
            **_OBJECT,
            "properties": {
                "containers": {"type": "array", "items": _CONTAINER},
                "initContainers": {"type": "array", "items": _CONTAINER},
                "volumes": _NAMED,
                "restartPolicy": {"type": "string"},
                "terminationGracePeriodSeconds": {"type": "integer", "minimum": 0},
            },
        },
    },
}
_GONE = {"modelReplicas": "modelReplicasPerWorker", "ipusPerModelReplica": "ipusPerJobInstance"}


@cache
def crd() -> dict[str, Any]:
    """The CustomResourceDefinition."""
    return yaml.safe_load(resources.files("ipujob").joinpath("crd.yaml").read_text())


def check(value: dict[str, Any]) -> Iterator[Fault]:
    """Everything in an IPUJob that its API server would refuse or leave away."""
    schema = crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    faults = list(_check(value.get("spec"), schema, ("spec",)))
    yield from faults
    place = ("spec", "workers", "template")
    if not any(place[: len(fault.place)] == fault.place[:3] for fault in faults):
        yield from _check(value["spec"]["workers"]["template"], _TEMPLATE, place)


def _check(value: Any, schema: dict[str, Any], place: Place) -> Iterator[Fault]:
    name = _name(place)
    if schema.get("x-kubernetes-int-or-string"):
        if isinstance(value, bool) or not isinstance(value, (int, str)):
            yield Fault(place, f"{name} must be a number, as a string or as it is, and is {_show(value)}")
        elif not re.search(schema["pattern"], str(value)):
            yield Fault(
                place,
                f"{name} must be a whole number that matches {schema['pattern']}, and is {_show(value)}",
            )
        return
    kind = schema.get("type")
    if kind and (not isinstance(value, _TYPES[kind]) or (kind == "integer" and isinstance(value, bool))):
        what = "is missing" if value is None else f"must be of type {kind}, and is {_show(value)}"
        yield Fault(place, f"{name} {what}")
        return
    if "enum" in schema and value not in schema["enum"]:
        yield Fault(
            place,
            f"{name} {_show(value)} is none of {', '.join(schema['enum'])}",
            _near(str(value), schema["enum"]),
        )
    if "pattern" in schema and not re.search(schema["pattern"], value):
        yield Fault(place, f"{name} {_show(value)} doesn't match {schema['pattern']}")
    if kind == "integer" and not schema["minimum"] <= value <= schema.get("maximum", _INT32):
        limits = f"{schema['minimum']} to {schema.get('maximum', _INT32)}"
        yield Fault(place, f"{name} is {value}, and must be within {limits}")
    if (kind == "array" and not value and schema.get("minItems")) or (
        value == "" and schema.get("minLength")
    ):
        yield Fault(place, f"{name} must not be empty")
    if kind == "array":
        for index, item in enumerate(value):
            yield from _check(item, schema.get("items", {}), (*place, index))
    if kind == "object" and isinstance(value, dict):
        yield from _check_fields(value, schema, place)


def _check_fields(value: dict[str, Any], schema: dict[str, Any], place: Place) -> Iterator[Fault]:
    known = schema.get("properties", {})
    for key in schema.get("required", ()):
        if value.get(key) is None:
            yield Fault(place, f"{_name((*place, key))} is missing")
    for key, item in value.items():
        if key in known:
            if item is not None:
                yield from _check(item, known[key], (*place, key))
        elif "additionalProperties" in schema:
            yield from _check(item, schema["additionalProperties"], (*place, str(key)))
        elif not schema.get(_OPEN):
            message = f"{_name((*place, str(key)))} is no field of an IPUJob"
            fix = f"use {', '.join(_GONE.values())}" if key in _GONE else _near(str(key), known)
            yield Fault((*place, str(key)), message, fix or "take it out: a cluster would leave it away")


def _near(word: str, known: Any) -> str:
    near = difflib.get_close_matches(word, list(known), 1)
    return f"write {near[0]}" if near else ""


def _name(place: Place) -> str:
    """spec.workers.template is written so; list items have their index."""
    return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in place).lstrip(".")


def _show(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
