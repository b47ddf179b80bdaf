"""What a request wants its output to look like, from any of the API's spellings to one (kind, value)."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import msgspec

from headrace.api.context import ApiContext
from headrace.api.errors import bad_request, invalid, unknown, unsupported
from headrace.errors import ParameterError
from headrace.extras import install_command
from headrace.sampling.params import SamplingParams
from headrace.sampling.structured_outputs import KINDS, StructuredOutputsParams
from headrace.structured_output.reasons import in_words, reason_of

MODIFIERS = ("disable_any_whitespace", "disable_additional_properties", "whitespace_pattern")


class Structure(NamedTuple):
    """`kind` is one of KINDS, `field` the body's field that asked for it, `answer` that for what may stand for calls."""

    kind: str
    value: Any
    field: str
    answer: str = ""


def spec_of(
    response_format: dict[str, Any] | None, structured_outputs: dict[str, Any] | None = None
) -> Structure | None:
    """Raises ApiError on a malformed or contradictory spec."""
    spec = from_response_format(response_format)
    other = from_structured_outputs(structured_outputs)
    if spec is not None and other is not None:
        raise bad_request("Give response_format or structured_outputs, not both.", "structured_outputs", "invalid_value")
    return spec or other


def constrain(ctx: ApiContext, params: SamplingParams, spec: Structure | None) -> SamplingParams:
    """`params` with the spec; refused where the engine cannot constrain its output. It is compiled by the engine, later."""
    if spec is None:
        return params
    if not ctx.engine.supports_structured:
        raise unsupported(spec.field, f"this server runs without the package llguidance ({install_command('llguidance')})")
    try:
        return msgspec.structs.replace(params, structured_outputs=StructuredOutputsParams(**{spec.kind: spec.value}))
    except ParameterError as error:
        raise renamed(error, spec) from None


def renamed(error: ParameterError, spec: Structure | None) -> ParameterError:
    """The error under the name that the request's own field has."""
    if spec is None or not error.field.startswith("structured_outputs") or spec.field == "structured_outputs":
        return error
    if spec.kind != "grammar":
        return ParameterError(spec.field, error.value, error.allowed)
    # the grammar is ours (see tool_grammar): of its lines only the tool is known to the client
    place = re.match(r"at (\d+)\(", reason_of(error))
    lines = str(spec.value).splitlines()
    line = lines[int(place[1]) - 1] if place and int(place[1]) <= len(lines) else ""
    allowed = f"what can be compiled ({in_words(reason_of(error), 'json')})"
    if line.startswith("answer: ") or spec.answer == spec.field:
        return ParameterError(spec.answer, "the schema", allowed)
    if spec.answer and not line:
        return ParameterError(spec.field, f"their parameters, or the schema of {spec.answer}", allowed)
    name = re.search(r'"name": \{"const": ("(?:[^"\\]|\\.)*")\}', line)
    return ParameterError(spec.field, f"the parameters of {name[1] if name else 'the tools'}", allowed)


def from_response_format(value: dict[str, Any] | None, field: str = "response_format") -> Structure | None:
    """Chat's `response_format`; for Responses' flat `text.format` see `responses`."""
    if value is None:
        return None
    kind = value.get("type")
    known = {
        "text": {"type"}, "json_object": {"type"}, "json_schema": {"type", "json_schema"},
        "structural_tag": {"type", "structures", "triggers"},
    }  # fmt: skip
    if not isinstance(kind, str) or kind not in known:
        raise invalid(f"{field}.type", f"allowed are {', '.join(known)}.")
    for name in value:
        if name not in known[kind]:
            raise unknown(f"{field}.{name}")
    if kind == "text":
        return None
    if kind == "json_object":
        return Structure("json_object", True, field)
    if kind == "structural_tag":
        return Structure(kind, {k: v for k, v in value.items() if k != "type"}, field)
    return json_schema(value.get("json_schema"), f"{field}.json_schema", field)


def json_schema(value: Any, path: str, field: str) -> Structure:
    """`{name, schema, strict, description}`."""
    if not isinstance(value, dict):
        raise invalid(path, "an object with name and schema is needed.", "missing_required_parameter")
    for name in value:
        if name not in ("name", "schema", "strict", "description"):
            raise unknown(f"{path}.{name}")
    if not isinstance(value.get("name"), str) or not value["name"]:
        raise invalid(f"{path}.name", "a non-empty text is needed.")
    schema = value.get("schema")
    if not isinstance(schema, dict | bool):
        raise invalid(f"{path}.schema", "a JSON schema is needed.")
    return Structure("json", schema, field)


def from_structured_outputs(value: dict[str, Any] | None) -> Structure | None:
    """vLLM's `structured_outputs`: exactly one kind."""
    if value is None:
        return None
    field = "structured_outputs"
    for name, v in value.items():
        if name not in KINDS and name not in MODIFIERS:
            raise unknown(f"{field}.{name}")
        if name in MODIFIERS and v not in (None, False):
            raise unsupported(f"{field}.{name}", "not supported by this server")
    given = [(k, v) for k, v in value.items() if k in KINDS and v is not None]
    if len(given) != 1:
        raise invalid(field, f"exactly one of {', '.join(KINDS)}.")
    return Structure(given[0][0], given[0][1], field)
