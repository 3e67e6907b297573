"""Values of a body's fields from the greatest that a body can hold downwards, made from /openapi.json."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

HELLO = [{"role": "user", "content": "hello"}]
# What makes a body short and valid, by the name of its field.
SMALL: dict[str, Any] = {
    "messages": HELLO,
    "prompt": "hello",
    "content": "hello",
    "input": "hello",
    "tokens": [1],
    "model": "demo-moe",
    "max_tokens": 4,
    "max_output_tokens": 16,
    "options": {"num_predict": 4},
}


class Bodies:
    """The bodies of one server's operations. sizes: of texts; counts: of lists; both from the greatest down."""

    def __init__(self, document: dict[str, Any], sizes: tuple[int, ...], counts: tuple[int, ...]):
        self._schemas = document["components"]["schemas"]
        self._sizes = sizes
        self._counts = counts
        self.paths = {
            path: self._followed(
                item["post"]["requestBody"]["content"]["application/json"]["schema"]
            )
            for path, item in document["paths"].items()
            if "requestBody" in item.get("post", ())
        }

    def small(self, path: str) -> dict[str, Any]:
        """Return a short body that the path accepts."""
        fields = self.paths[path]["properties"]
        # One text: the fields that may stand for it exclude each other.
        texts = [name for name in ("messages", "content", "prompt", "input") if name in fields]
        left_out = set(texts[1:]) if "tokens" not in fields else set()
        return {name: SMALL[name] for name in fields if name in SMALL and name not in left_out}

    def fields(self, path: str) -> Iterator[tuple[str, list[list[Any]]]]:
        """Yield each field with its ladders: values of one kind, the greatest first."""
        for name, schema in self.paths[path]["properties"].items():
            yield name, [ladder for ladder in self._ladders(schema, 0) if ladder]

    def _ladders(self, schema: dict[str, Any], depth: int) -> Iterator[list[Any]]:
        schema = self._followed(schema)
        for choice in schema.get("anyOf", ()):
            yield from self._ladders(choice, depth)
        kind = schema.get("type")
        if "anyOf" not in schema and kind in (None, "string"):
            yield ["7" * size for size in self._sizes]
        if "anyOf" not in schema and kind in (None, "array"):
            item = self._item(schema.get("items", {}))
            yield [[item] * count for count in self._counts]
        inner: list[tuple[Any, dict[str, Any]]] = []
        if kind == "array" and depth < 1:
            inner = [(lambda value: [value], schema.get("items", {}))]
        elif kind == "object" and depth < 2:
            fields = schema.get("properties", {}).items()
            inner = [(lambda value, name=name: {name: value}, field) for name, field in fields]
            yield [{str(number): 1 for number in range(count)} for count in self._counts]
        elif kind in ("integer", "number"):
            yield [1 << 63, (1 << 63) - 1, 1 << 31, 1 << 20, 4096, 128, 20, 16, 1]
            yield [-(1 << 63), -1]
        elif kind == "boolean":
            yield [True]
        for wrap, field in inner:
            for ladder in self._ladders(field, depth + 1):
                yield [wrap(value) for value in ladder]

    def _item(self, schema: dict[str, Any]) -> Any:
        schema = self._followed(schema)
        if "anyOf" in schema:
            return self._item(schema["anyOf"][0])
        small = {"string": "7", "integer": 7, "number": 1, "boolean": True, "array": [7]}
        return small.get(schema.get("type", ""), HELLO[0])

    def _followed(self, schema: dict[str, Any]) -> dict[str, Any]:
        while "$ref" in schema:
            schema = self._schemas[schema["$ref"].rpartition("/")[2]]
        return schema
