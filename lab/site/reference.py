"""The reference of the HTTP API: a page of Markdown for each path of the OpenAPI document."""

from __future__ import annotations

import json
import re
from typing import Any

Json = dict[str, Any]
_REF = "#/components/schemas/"


def reference(document: Json) -> dict[str, str]:
    """Return the pages by their names, with a list of all paths as `index.md`."""
    rows, pages = [], {}
    errors: dict[str, str] = {}
    for path, operations in document["paths"].items():
        name = page_name(path)
        pages[name] = _page(path, operations, document["components"]["schemas"])
        for method, operation in operations.items():
            errors |= {status: one["description"] for status, one in operation["responses"].items() if status >= "4"}
            rows.append(f"| `{method.upper()}` | [`{path}`]({name}) | {operation['summary']} |")
    head = f"# API reference\n\n{document['info']['description']}\n\nA running service shows the same at `/docs`.\n\n"
    meanings = [f"| {status} | {_cell(errors[status])} |" for status in sorted(errors)]
    lines = ["| | path | |", "|---|---|---|", *rows, "", "## Errors", "", "| status | |", "|---|---|", *meanings, ""]
    pages["index.md"] = head + "\n".join(lines)
    return pages


def page_name(path: str) -> str:
    """Return the name of a path's page."""
    return (re.sub(r"[^\w]+", "-", path).strip("-") or "root") + ".md"


def _page(path: str, operations: Json, schemas: Json) -> str:
    """Return a path's page: its operations, then every object that their bodies and replies have."""
    lines = [f"# {path}", ""]
    used: list[str] = []
    for method, operation in operations.items():
        lines += [f"## {method.upper()} {path}", "", f"{operation['summary']}.", "", operation["description"], ""]
        lines += _parameters(operation.get("parameters", []))
        lines += _contents("Body", operation.get("requestBody", {}).get("content", {}), used)
        for status, reply in operation["responses"].items():
            if status.startswith("2"):
                lines += _contents(f"Reply {status}", reply.get("content", {}), used, reply["description"])
        errors = [f"`{status}`" for status in operation["responses"] if not status.startswith("2")]
        lines += [f"[Errors](index.md#errors): {', '.join(errors)}.", ""]
    done: set[str] = set()
    while used:
        name = used.pop(0)
        if name not in done:
            done.add(name)
            lines += _object(name, schemas[name], used)
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).rstrip() + "\n"


def _parameters(parameters: list[Json]) -> list[str]:
    if not parameters:
        return []
    rows = [f"| `{one['name']}` | {one['in']} | {_cell(one.get('description', ''))} |" for one in parameters]
    return ["| parameter | in | |", "|---|---|---|", *rows, ""]


def _contents(title: str, contents: Json, used: list[str], about: str = "") -> list[str]:
    """Return the types of a body or reply, and an example of each kind that has one."""
    lines = [f"### {title}", "", about, ""] if contents or about else []
    for kind, content in contents.items():
        schema = content.get("schema", {})
        is_known = schema and schema != {"anyOf": [{}]}
        lines += [f"- `{kind}`: {_type(schema, used)}" if is_known else f"- `{kind}`"]
        examples = {name: one["value"] for name, one in content.get("examples", {}).items() if "value" in one}
        for name, value in list(examples.items())[:3]:
            lines += ["", f"{name}:", "", "```json", json.dumps(value, ensure_ascii=False), "```", ""]
    return [*lines, ""]


def _object(name: str, schema: Json, used: list[str]) -> list[str]:
    """Return an object's section: a row for each of its fields."""
    lines = [f"## {name}", "", schema.get("description", ""), ""]
    fields = schema.get("properties")
    if fields is None:
        return [*lines, _type(schema, used), ""]
    required = set(schema.get("required", []))
    lines += ["| field | type | default | |", "|---|---|---|---|"]
    for field, one in fields.items():
        default = "required" if field in required else f"`{json.dumps(one['default'])}`" if "default" in one else ""
        lines.append(f"| `{field}` | {_type(one, used)} | {_cell(default)} | {_cell(one.get('description', ''))} |")
    return [*lines, ""]


def _type(schema: Json, used: list[str]) -> str:
    """Return a type in words; objects that it names are added to `used`."""
    if "$ref" in schema:
        name = schema["$ref"].removeprefix(_REF)
        used.append(name)
        return f"[{name}](#{name.lower()})"
    if "const" in schema or "enum" in schema:
        return ", ".join(f"`{json.dumps(one)}`" for one in schema.get("enum", [schema.get("const")]))
    for key in ("anyOf", "oneOf"):
        if key in schema:
            found = [_type(one, used) for one in schema[key]]
            return " or ".join(dict.fromkeys(found))
    if "allOf" in schema:
        return _type(schema["allOf"][0], used)
    kind = schema.get("type", "any")
    if kind == "array":
        return f"list of {_type(schema.get('items', {}), used)}"
    if kind == "object" and isinstance(schema.get("additionalProperties"), dict):
        return f"map of {_type(schema['additionalProperties'], used)}"
    return f"{kind}{_bounds(schema)}"


def _bounds(schema: Json) -> str:
    """Return the bounds of a number in words."""
    least, most = schema.get("minimum"), schema.get("maximum")
    above, below = schema.get("exclusiveMinimum"), schema.get("exclusiveMaximum")
    parts = [f"at least {least}" if least is not None else f"above {above}" if above is not None else ""]
    parts += [f"at most {most}" if most is not None else f"below {below}" if below is not None else ""]
    found = " and ".join(one for one in parts if one)
    return f" ({found})" if found else ""


def _cell(text: str) -> str:
    """Return a text as one cell of a table."""
    return re.sub(r"\s+", " ", text).replace("|", "\\|")
