"""Schemas against documents: what a grammar takes is what `jsonschema` calls valid; what it cannot express is refused."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.errors import ParameterError
from headrace.sampling.structured_outputs import StructuredOutputsParams
from headrace.structured_output.objects import JSON_OPTIONS
from structured_driver import backend, compiled, encode, in_order, spelled, takes

TREE = {
    "type": "object",
    "properties": {"v": {"type": "integer"}, "n": {"anyOf": [{"$ref": "#/$defs/tree"}, {"type": "null"}]}},
    "required": ["v"],
    "additionalProperties": False,
}
KIND_A = {"type": "object", "properties": {"kind": {"const": "a"}, "x": {"type": "integer"}}, "required": ["kind", "x"]}
KIND_B = {"type": "object", "properties": {"kind": {"const": "b"}, "y": {"type": "string"}}, "required": ["kind", "y"]}
A_INTEGER = {"type": "object", "properties": {"a": {"type": "integer"}}}
A_AND_B = {"type": "object", "properties": {"a": {}, "b": {}}}

SCHEMAS: list[Any] = [
    True, {},
    *({"type": t} for t in ("integer", "number", "string", "boolean", "null", "array", "object")),
    {"type": ["integer", "null"]}, {"type": ["string", "array"]},
    {"enum": [1, "a", None, [1, 2], {"a": 1}]}, {"type": "string", "enum": ["a", "ab", 1]}, {"enum": ["a", "abc"], "minLength": 2},
    *({"const": c} for c in (5, 1.5, "abc", None, True, [1, 2], {"a": 1, "b": 2}, "é\n\"")),
    # numbers
    {"type": "integer", "minimum": 2}, {"type": "integer", "maximum": 5}, {"type": "integer", "exclusiveMinimum": 2},
    {"type": "integer", "exclusiveMaximum": 5}, {"type": "integer", "minimum": -1, "maximum": 7},
    {"type": "integer", "minimum": -100, "exclusiveMaximum": -4}, {"type": "number", "minimum": 0.5, "maximum": 2},
    {"type": "number", "exclusiveMinimum": 1, "exclusiveMaximum": 3}, {"type": "number", "minimum": 5},
    {"type": "number", "maximum": -0.5}, {"minimum": 2}, {"type": "integer", "multipleOf": 5}, {"type": "number", "multipleOf": 0.5},
    # strings
    {"type": "string", "minLength": 2}, {"type": "string", "maxLength": 2}, {"type": "string", "minLength": 2, "maxLength": 3},
    {"minLength": 2}, {"pattern": "^a"},
    *({"type": "string", "pattern": p} for p in ("^a", "b", "^[a-c]+$", "^a.c$", r"^\d{4}", "a|^b$", "", "^$", "^(a|é)*$")),
    {"type": "string", "pattern": "^a", "minLength": 3},
    # arrays
    {"type": "array", "items": {"type": "integer"}}, {"type": "array", "items": False}, {"items": {"type": "integer"}},
    {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}]},
    {"type": "array", "prefixItems": [{"type": "integer"}], "items": {"type": "string"}},
    {"type": "array", "prefixItems": [{"type": "integer"}], "items": False},
    {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "integer"}], "minItems": 2},
    {"type": "array", "minItems": 2}, {"type": "array", "maxItems": 2},
    {"type": "array", "minItems": 1, "maxItems": 3, "items": {"type": "integer"}},
    # objects
    A_INTEGER, A_INTEGER | {"required": ["a"]}, A_INTEGER | {"additionalProperties": False},
    A_INTEGER | {"additionalProperties": {"type": "string"}}, A_INTEGER | {"required": ["a", "c"]},
    A_INTEGER | {"required": ["a"], "minProperties": 2}, {"type": "object", "required": ["a"]}, {"required": ["a"]},
    A_AND_B | {"required": ["b"]}, {"type": "object", "additionalProperties": {"type": "integer"}},
    {"type": "object", "additionalProperties": False}, {"type": "object", "properties": {"a": False}},
    {"type": "object", "patternProperties": {"^x": {"type": "integer"}}},
    {"type": "object", "patternProperties": {"^x": {"type": "integer"}}, "additionalProperties": False},
    {"type": "object", "minProperties": 1}, {"type": "object", "maxProperties": 1},
    {"type": "object", "minProperties": 1, "maxProperties": 2}, {"properties": {"a": {"type": "integer"}}},
    # combinations
    {"anyOf": [{"type": "integer"}, {"type": "string"}]}, {"oneOf": [{"type": "integer"}, {"type": "string"}]},
    {"oneOf": [KIND_A, KIND_B]}, {"allOf": [{"type": "integer"}, {"minimum": 2}]},
    {"allOf": [{"type": "integer", "minimum": 2}, {"maximum": 7}]}, {"type": "integer", "anyOf": [{"minimum": 5}, {"maximum": 0}]},
    {"allOf": [A_INTEGER | {"required": ["a"]}, {"type": "object", "properties": {"b": {"type": "integer"}}, "required": ["b"]}]},
    {"type": "string", "allOf": [{"pattern": "^a"}, {"minLength": 3}]},
    # references
    {"$ref": "#/$defs/n", "$defs": {"n": {"type": "integer"}}}, {"$ref": "#/definitions/n", "definitions": {"n": {"type": "integer"}}},
    {"$ref": "#/$defs/tree", "$defs": {"tree": TREE}}, {"type": "array", "items": {"$ref": "#"}},
    {"$ref": "#/$defs/n", "minimum": 5, "$defs": {"n": {"type": "integer"}}},
    {"type": "object", "properties": {"a": {"$ref": "#/properties/b"}, "b": {"type": "integer"}}},
    # words that constrain nothing
    {"type": "integer", "title": "t", "description": "d", "default": 1, "examples": [1], "$comment": "c", "deprecated": True},
]  # fmt: skip

DOCUMENTS: list[Any] = [
    None, True, False, 0, 1, -1, 2, 3, 5, 7, 10, 100, -5, 1.5, 0.1, 0.5, -0.5, -2.5, 123456789012345,
    "", "a", "ab", "abc", "abcd", "b", "bb", "A1", "2020", "é", "aé", "漢字", "x\ny", 'q"q\\', "😀", "é\n\"",
    [], [1], [1, 2], [1, 1], [1, 2, 3], [1, 2, 3, 4], ["a"], ["a", 1], [1, "a"], [1, "a", "b"], [None], [[1]], [[]], [{}],
    [[], [[]]], [{"a": 1}],
    {}, {"a": 1}, {"a": "x"}, {"b": 1}, {"a": 1, "b": 2}, {"a": 1, "b": "x"}, {"a": 1, "c": 3}, {"a": 1, "b": 2, "c": 3},
    {"a": {"a": 1}}, {"a": None}, {"a": []}, {"x1": 1}, {"x1": "s"}, {"a": 1, "x1": 1}, {"v": 1}, {"v": 1, "n": None},
    {"v": 1, "n": {"v": 2}}, {"v": 1, "n": {"v": 2, "n": {"v": 3}}}, {"v": 1, "n": {"n": None}}, {"kind": "a", "x": 1},
    {"kind": "b", "y": "s"}, {"kind": "a", "y": "s"}, {"kind": "b", "x": 1}, {'"': 1}, {"é": {"漢": ["字"]}},
]  # fmt: skip


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda s: json.dumps(s)[:60])
def test_what_is_valid_is_what_is_taken(schema):
    matcher = compiled(json=schema)
    validator = jsonschema.Draft202012Validator(schema)
    valid = 0
    for document in DOCUMENTS:
        wanted = validator.is_valid(document)
        valid += wanted
        for text in spelled(in_order(schema, document)):
            assert takes(matcher, text) == wanted, f"{text} against {schema}: jsonschema says {wanted}"
    assert valid > 0, "the table has no valid document for this schema: the test shows too little"


@pytest.mark.parametrize(
    "text", ["", " ", "[", "[1", "[1,]", "[,1]", '{"a":}', '{"a"}', "{a: 1}", "'a'", "01", "1.", ".5", "+1", "1e", "NaN", "Infinity",
             "tru", "nul", '"\n"', '"\\x"', "1 2", "[1 2]", "{}{}", '"a', "[]]", "-"],
)  # fmt: skip
def test_what_is_no_json_is_not_taken(text):
    assert not takes(compiled(json={}), text)


def test_any_json_object():
    matcher = compiled(json_object=True)
    for document in DOCUMENTS:
        for text in spelled(document):
            assert takes(matcher, text) == isinstance(document, dict)


FORMATS = {
    "date": (["2020-01-31", "1999-12-01"], ["2020-1-1", "2020-13-01", "2020-01-32", "20200101", ""]),
    "time": (["12:30:00Z", "23:59:59.5+01:00"], ["12:30", "24:00:00Z", "1:30:00Z"]),
    "date-time": (["2020-01-31T12:30:00Z"], ["2020-01-31", "12:30:00Z", "2020-01-31 "]),
    "email": (["a@b.co", "x.y@z.org"], ["a", "a@", "@b.co", "a b@c.de"]),
    "uuid": (["123e4567-e89b-12d3-a456-426614174000"], ["123e4567", "123e4567-e89b-12d3-a456-42661417400g"]),
    "ipv4": (["127.0.0.1", "255.255.255.255"], ["256.0.0.1", "1.2.3", "1.2.3.4.5"]),
    "ipv6": (["::1", "2001:db8::ff00:42:8329"], ["1", ":::", "12345::"]),
    "hostname": (["example.com", "a"], ["", "-a.b", "a..b"]),
    "uri": (["http://a.b/c?d=e#f", "mailto:x@y.z"], ["", "a b", "http://a b"]),
    "duration": (["P1D", "PT1H30M", "P2W"], ["1D", "P", "PT"]),
}


@pytest.mark.parametrize("name", FORMATS)
def test_formats(name):
    matcher = compiled(json={"type": "string", "format": name})
    good, bad = FORMATS[name]
    assert [t for t in good if not takes(matcher, json.dumps(t))] == []
    assert [t for t in bad if takes(matcher, json.dumps(t))] == []


REFUSED = [
    ({"type": "array", "uniqueItems": True}, "uniqueItems"),
    ({"type": "array", "contains": {"type": "string"}}, "contains"),
    ({"type": "object", "propertyNames": {"pattern": "^a"}}, "propertyNames"),
    ({"type": "object", "dependentRequired": {"a": ["b"]}}, "dependentRequired"),
    ({"type": "object", "dependencies": {"a": ["b"]}}, "dependencies"),
    ({"dependentSchemas": {"a": {"required": ["b"]}}}, "dependentSchemas"),
    ({"type": "object", "unevaluatedProperties": False}, "unevaluatedProperties"),
    ({"unevaluatedItems": False}, "unevaluatedItems"),
    ({"not": {"type": "integer"}}, "not"),
    ({"if": {"type": "integer"}, "then": {"minimum": 2}}, "if"),
    ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf"),
    ({"type": "string", "format": "regex"}, "Unknown format: regex"),
    ({"type": "string", "pattern": "(?=a)b"}, "look-around"),
    ({"type": "string", "pattern": r"(a)\1"}, "backreferences"),
    ({"type": "string", "pattern": "^(a|b"}, "unclosed group"),
    ({"$ref": "http://example.com/s"}, "not present"),
    ({"$ref": "#/$defs/nowhere"}, "does not exist"),
    ({"$dynamicRef": "#x"}, "$dynamicRef"),
    ({"type": "integer", "multipleOf": 2**63}, "multipleOf"),
    # nothing satisfies these
    (False, "allows nothing"),
    ({"enum": []}, "Unsatisfiable"),
    ({"type": "integer", "minimum": 5, "maximum": 2}, "Unsatisfiable"),
    ({"type": "integer", "minimum": 2.5, "maximum": 2.6}, "Unsatisfiable"),
    ({"type": "string", "minLength": 3, "maxLength": 2}, "Unsatisfiable"),
    ({"type": "array", "minItems": 3, "maxItems": 2}, "Unsatisfiable"),
    ({"allOf": [{"type": "string"}, {"type": "integer"}]}, "Unsatisfiable"),
    # these are no schemas
    ({"type": "frob"}, "Invalid type"),
    ({"type": 5}, "type must be"),
    ({"minimum": "x"}, "minimum"),
    ({"type": "string", "minLength": -1}, "minLength"),
    ({"required": "a"}, "required"),
    ({"properties": []}, "properties"),
    # options of the backend in disguise
    ({"type": "integer", "x-guidance": {"lenient": True}}, "x-guidance"),
]


@pytest.mark.parametrize(("schema", "reason"), REFUSED, ids=lambda v: json.dumps(v)[:50])
def test_what_cannot_be_had_is_refused_with_its_reason(schema, reason):
    with pytest.raises(ParameterError) as error:
        compiled(json=schema)
    assert error.value.field == "structured_outputs.json"
    assert reason in error.value.allowed


def test_a_schema_that_nothing_satisfies_is_found_in_its_trial():
    with pytest.raises(ParameterError, match="can be compiled"):
        backend().trial(StructuredOutputsParams(json={"$ref": "#"}))


def names() -> st.SearchStrategy[str]:
    return st.sampled_from(["a", "b", "name", "x_1", "é", "two words"])


def leaves() -> st.SearchStrategy[dict[str, Any]]:
    low = st.integers(-50, 50)
    small = st.integers(0, 3)
    return st.one_of(
        st.just({"type": "null"}),
        st.just({"type": "boolean"}),
        st.builds(lambda a, n: {"type": "integer", "minimum": a, "maximum": a + n}, low, st.integers(0, 300)),
        st.builds(lambda a, n: {"type": "string", "minLength": a, "maxLength": a + n}, small, small),
        st.builds(lambda v: {"enum": v}, st.lists(st.sampled_from([1, -7, "a", "b c", None, True, [1], {"k": 2}]), min_size=1)),
        st.builds(lambda v: {"const": v}, st.sampled_from([0, "", "x", None, False, [], {}, [1, "a"]])),
        st.sampled_from(["^[a-c]{1,4}$", "^\\d{2}-\\d{2}$", "^(yes|no)$"]).map(lambda p: {"type": "string", "pattern": p}),
    )


def nested(inner: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    def obj(properties: dict[str, Any], keep: list[bool]) -> dict[str, Any]:
        required = [n for n, k in zip(properties, keep, strict=False) if k]
        return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}

    size = st.integers(0, 2)
    return st.one_of(
        st.builds(obj, st.dictionaries(names(), inner, max_size=3), st.lists(st.booleans(), min_size=3, max_size=3)),
        st.builds(lambda s, a, n: {"type": "array", "items": s, "minItems": a, "maxItems": a + n}, inner, size, size),
        st.builds(
            lambda s: {"type": "array", "prefixItems": s, "items": False, "minItems": len(s)}, st.lists(inner, max_size=3)
        ),
        st.builds(lambda s: {"anyOf": s}, st.lists(inner, min_size=1, max_size=3)),
    )


def schemas() -> st.SearchStrategy[dict[str, Any]]:
    """Schemas whose documents are small."""
    return st.recursive(leaves(), nested, max_leaves=6)


def documents(schema: Any) -> st.SearchStrategy[Any]:
    """What is valid under one of `schemas()`, its properties in order."""
    if "const" in schema or "enum" in schema:
        return st.sampled_from(schema.get("enum") or [schema.get("const")])
    if "anyOf" in schema:
        return st.sampled_from(schema["anyOf"]).flatmap(documents)
    kind = schema["type"]
    if kind == "null":
        return st.none()
    if kind == "boolean":
        return st.booleans()
    if kind == "integer":
        return st.integers(schema["minimum"], schema["maximum"])
    if kind == "string" and "pattern" in schema:
        return st.from_regex(schema["pattern"], fullmatch=True).filter(str.isascii)
    if kind == "string":
        letters = st.characters(exclude_categories=["Cs", "Cc"]) | st.sampled_from('\n\t"\\/')
        return st.text(letters, min_size=schema["minLength"], max_size=schema["maxLength"])
    if kind == "array" and "prefixItems" in schema:
        return st.tuples(*map(documents, schema["prefixItems"])).map(list)
    if kind == "array":
        return st.lists(documents(schema["items"]), min_size=schema["minItems"], max_size=schema["maxItems"])
    properties, required = schema["properties"], schema["required"]
    given = [documents(s) if n in required else st.just(...) | documents(s) for n, s in properties.items()]
    return st.tuples(*given).map(lambda values: {n: v for n, v in zip(properties, values, strict=True) if v is not ...})


@settings(max_examples=30, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_valid_documents_of_random_schemas_are_taken(data):
    schema = data.draw(schemas(), label="schema")
    document = data.draw(documents(schema), label="document")
    assert jsonschema.Draft202012Validator(schema).is_valid(document)
    matcher = compiled(json=schema)
    for text in spelled(document):
        assert takes(matcher, text)


@settings(max_examples=30, suppress_health_check=list(HealthCheck))
@given(schema=schemas(), document=st.sampled_from(DOCUMENTS) | schemas())
def test_invalid_documents_of_random_schemas_are_not_taken(schema, document):
    if not jsonschema.Draft202012Validator(schema).is_valid(document):
        matcher = compiled(json=schema)
        for text in spelled(document):
            assert not takes(matcher, text)


# ---------------------------------------------------------------------------------------------------------------------
# keys that may be left out come at any place

TEXT, NUMBER = {"type": "string"}, {"type": "integer"}
PERSON = {  # as Pydantic writes a default before a required field
    "type": "object", "title": "Person", "required": ["name"],
    "properties": {"nickname": {"anyOf": [TEXT, {"type": "null"}], "default": None, "title": "Nickname"}, "name": TEXT},
}  # fmt: skip
HOLDERS: dict[str, Any] = {  # schema with a person in it, and a document around the text of one
    "alone": (PERSON, "{}"),
    "property": ({"type": "object", "properties": {"p": PERSON}, "required": ["p"], "additionalProperties": False}, '{"p": %s}'),
    "optional": ({"type": "object", "properties": {"n": NUMBER, "p": PERSON}, "additionalProperties": False}, '{"p": %s, "n": 1}'),
    "reference": ({"$ref": "#/$defs/P", "$defs": {"P": PERSON}}, "%s"),
    "list": ({"type": "array", "items": {"$ref": "#/definitions/a~1b"}, "minItems": 2, "definitions": {"a/b": PERSON}}, '[{"name": "x"}, %s]'),
    "or null": ({"type": "object", "properties": {"p": {"anyOf": [PERSON, {"type": "null"}]}}, "required": ["p"]}, '{"p": %s}'),
    "all of": ({"allOf": [{"$ref": "#/$defs/P"}], "description": "one", "$defs": {"P": PERSON}}, "%s"),
    "extra": ({"type": "object", "properties": {"n": NUMBER}, "additionalProperties": PERSON}, '{"other": %s, "n": 5}'),
    "other object": ({"anyOf": [{"type": "object", "properties": {"k": {"const": 1}}, "required": ["k"]}, PERSON]}, "%s"),
    "itself": ({"type": "object", "properties": {"p": {"$ref": "#/$defs/P"}, "next": {"$ref": "#"}}, "required": ["p"], "$defs": {"P": PERSON}},
               '{"next": {"p": {"name": "y"}}, "p": %s}'),
}  # fmt: skip


@pytest.mark.parametrize("holder", HOLDERS)
def test_a_key_out_of_order_keeps_its_name_and_its_value(holder):
    schema, around = HOLDERS[holder]
    matcher = compiled(json=schema)

    def taken(person: str) -> bool:
        return takes(matcher, around.replace("%s", person) if "%s" in around else person)

    good = ('{"name": "Ann", "nickname": "A"}', '{"nickname": "A", "name": "Ann"}', '{"name": "Ann"}', '{"name":"Ann","nickname":null,"x":[1]}')
    bad = ('{"nickname": "A"}', '{"name": "Ann", "nickname": 1}', '{"name": "Ann", "name": "Ann"}', '{"name": "A", "nickname": "B", "nickname": "C"}')
    assert [p for p in good if not taken(p)] == []
    assert [p for p in bad if taken(p)] == []


@st.composite
def records(draw: st.DrawFn) -> tuple[dict[str, Any], dict[str, Any]]:
    """An object's schema with keys that may be left out, and a document of it with those at any place."""
    properties = draw(st.dictionaries(names() | st.sampled_from(['q"', "a\\\n", "a_1"]), leaves(), min_size=1, max_size=5))
    required = [name for name in properties if draw(st.booleans())]
    extra = draw(st.sampled_from([False, True, {"type": "integer"}]))
    order = list(properties)
    moved = draw(st.permutations([n for n in order if n not in required]))
    keys = [n for n in order if n in required]
    for name in moved:
        if draw(st.booleans()):
            keys.insert(draw(st.integers(0, len(keys))), name)
    document = {name: draw(documents(properties[name])) for name in keys}
    if extra is not False and draw(st.booleans()):
        document["zz"] = 5
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": extra}, document


@settings(max_examples=60, suppress_health_check=list(HealthCheck))
@given(records())
def test_keys_that_may_be_left_out_come_at_any_place(record):
    schema, document = record
    assert jsonschema.Draft202012Validator(schema).is_valid(document)
    matcher = compiled(json=schema)
    for text in spelled(document):
        assert takes(matcher, text)
    for name in schema["required"]:
        assert not takes(matcher, json.dumps({k: v for k, v in document.items() if k != name}, ensure_ascii=False))


def test_the_end_of_an_object_is_never_a_dead_end():
    """After each key of a closed object either another one or the end may follow, never a comma and then nothing."""
    matcher = compiled(json={"type": "object", "properties": {"a": NUMBER, "b": NUMBER}, "additionalProperties": False})
    assert matcher.accept(encode('{"b":1,"a":2'))
    assert matcher.valid_prefix(encode(",")) == 0 and matcher.valid_prefix(encode("}")) == 1
    matcher = compiled(json={"type": "object", "properties": {"a": NUMBER, "b": NUMBER}, "required": ["b"]})
    assert matcher.accept(encode('{"b":1,"a":2')) and matcher.valid_prefix(encode(', "c"')) > 0


def test_a_declared_key_cannot_be_spelled_otherwise():
    """Its value would then obey nothing: printable characters are not escaped in undeclared keys either."""
    matcher = compiled(json=PERSON)
    assert takes(matcher, '{"name": "Ann", "x\\u0001\\n\\"y": 5}')
    for key in ("n\\u0069ckname", "\\u006eickname", "x\\u0410", "x\\/"):
        assert not takes(matcher, f'{{"name": "Ann", "{key}": 5}}')


def test_the_order_of_required_keys_is_the_schemas():
    answer = {"type": "object", "properties": {"reasoning": TEXT, "note": TEXT, "answer": TEXT}, "required": ["reasoning", "answer"]}
    matcher = compiled(json=answer)
    assert takes(matcher, '{"note":"", "reasoning":"x","answer":"y"}') and takes(matcher, '{"reasoning":"x","answer":"y","note":""}')
    assert not takes(matcher, '{"answer":"y","reasoning":"x"}')
    # an undeclared key while a required one is missing is what a model makes of a name that it half remembers
    assert takes(matcher, '{"reasoning":"x","answer":"y","more":1,"note":""}') and not takes(matcher, '{"reason":"x","reasoning":"x","answer":"y"}')


def test_objects_in_a_grammar_and_in_tags_are_the_same():
    lark = 'start: "call " tool\ntool: %json ' + json.dumps(PERSON | {"x-guidance": JSON_OPTIONS}) + "\n"
    for matcher, text in (
        (compiled(grammar=lark), "call %s"),
        (compiled(structural_tag={"structures": [{"begin": "<f>", "schema": PERSON, "end": "</f>"}], "triggers": ["<f"]}), "a<f>%s</f>b"),
    ):
        assert takes(matcher, text % '{"name": "Ann", "nickname": "A"}') and takes(matcher, text % '{"nickname": null, "name": "Ann"}')
        assert not takes(matcher, text % '{"name": "Ann", "name": "A"}')


def test_reasons_are_in_words():
    for wish in ({"json": {"$ref": "#"}}, {"regex": "[^\\x00-\\U0010FFFF]"}, {"grammar": 'start: "a" start'}):
        with pytest.raises(ParameterError) as error:
            backend().trial(StructuredOutputsParams(**wish))
        assert "NoExtension" not in str(error.value) and "limit" not in str(error.value)
    with pytest.raises(ParameterError) as error:
        compiled(regex="(a")
    assert "unclosed group" in error.value.allowed and "start:" not in error.value.allowed
    with pytest.raises(ParameterError, match="unknown name") as error:
        compiled(grammar="start: foo\nfoo: bar\n")  # the user's own lines are shown
    assert "bar" in error.value.allowed
