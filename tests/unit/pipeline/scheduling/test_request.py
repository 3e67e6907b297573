"""The request record: how large it is, and which module writes each of its fields."""

from __future__ import annotations

import ast
from collections import defaultdict
from dataclasses import fields
from pathlib import Path

import pytest

import thermocline
from thermocline.pipeline.scheduling.request import Request, RequestCache
from thermocline.pipeline.scheduling.request_states import HeldState
from thermocline.pipeline.scheduling.request_windows import WindowBlocks

ROOT = Path(thermocline.__file__).parent
ROOM = "thermocline.pipeline.scheduling"
MUTATORS = {
    *("add", "append", "clear", "discard", "extend", "fill", "insert", "pop", "popitem", "put"),
    *("remove", "resize", "reverse", "setdefault", "sort", "update", "difference_update"),
    *("intersection_update", "symmetric_difference_update"),
}
WRITERS = {
    Request: {
        "known": "scheduler",
        "turn": "scheduler",
        "num_scored": "scheduler",
        "scheduled": "scheduler",
        "computed": "scheduler",
        "in_flight": "scheduler",
        "held": "scheduler",
        "status": "admission",
        "cache": "request_blocks",
    },
    RequestCache: dict.fromkeys(
        ("keys", "blocks", "table", "num_full", "num_matched"), "request_blocks"
    )
    | {"returning": "request_spill"},
    WindowBlocks: dict.fromkeys(("window_table", "num_passed", "window_blocks"), "request_windows"),
    HeldState: dict.fromkeys(
        ("slot", "pinned", "restore", "saves", "draft_slots"), "request_states"
    ),
}


def may_hold_a_request(path: Path) -> bool:
    return ROOM in path.read_text() or path.is_relative_to(ROOT / "pipeline" / "scheduling")


def field_of(target: ast.expr, aliases: dict[str, set[str]]) -> set[str]:
    """Return the fields that a write to this expression changes: the last attribute, or a local name of one."""
    while isinstance(target, ast.Subscript | ast.Starred):
        target = target.value
    if isinstance(target, ast.Tuple | ast.List):
        parts = [part for part in target.elts if not isinstance(part, ast.Name)]
        return set().union(*(field_of(part, aliases) for part in parts))
    if isinstance(target, ast.Attribute):
        is_own = isinstance(target.value, ast.Name) and target.value.id == "self"
        return set() if is_own else {target.attr}
    return aliases.get(target.id, set()) if isinstance(target, ast.Name) else set()


def aliases_in(tree: ast.AST) -> dict[str, set[str]]:
    """Return the local names that are bound to attributes, each with the attributes' names."""
    aliases = defaultdict(set)
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                pairs = [(target, node.value)]
                if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                    pairs = list(zip(target.elts, node.value.elts, strict=True))
                for name, value in pairs:
                    if isinstance(name, ast.Name) and isinstance(value, ast.Attribute):
                        aliases[name.id].add(value.attr)
    return aliases


def written_fields(source: str) -> set[str]:
    """Return the attributes that a module assigns, deletes or changes in place, but those of `self`."""
    tree = ast.parse(source)
    aliases, written = aliases_in(tree), set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.Delete):
            targets = [t for t in node.targets if not isinstance(t, ast.Name)]
        elif isinstance(node, ast.AugAssign):
            targets = [node.target]
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in MUTATORS
        ):
            targets = [node.func.value]
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "setattr":
            targets = []
            written.add(ast.unparse(node.args[1]).strip("'"))
        else:
            continue
        for target in targets:
            written |= field_of(target, aliases)
    return written


@pytest.mark.parametrize(
    "statement",
    [
        "request.known = []",
        "request.known += [1]",
        "request.known[0] = 1",
        "a, request.known = 1, 2",
        "mine = request.known; mine += [1]",
        "del request.known[1:]",
        "request.known.append(1)",
        "self.requests[1].known.clear()",
        "setattr(request, 'known', [])",
        "def f(request):\n    mine = request.known\n    mine.append(1)",
        "def f(request):\n    one, mine = 1, request.known\n    mine[0] = 1",
    ],
)
def test_every_kind_of_write_is_found(statement):
    """Assignments, deletions and changes in place, also by a local name."""
    assert "known" in written_fields(statement)


@pytest.mark.parametrize(
    "statement",
    ["x = request.known", "len(request.known)", "known = []", "known, x = request.known, 1"],
)
def test_reads_are_no_writes(statement):
    """What only looks at a field is free to do so."""
    assert "known" not in written_fields(statement)


def test_each_field_has_one_writer():
    """Of all modules that may hold a request, one writes each field, and no other field changes at all."""
    writers = defaultdict(set)
    for path in ROOT.rglob("*.py"):
        if may_hold_a_request(path):
            for name in written_fields(path.read_text()):
                writers[name].add(path.stem)
    for record, expected in WRITERS.items():
        names = [entry.name for entry in fields(record)]
        found = {name: writers[name] for name in names if writers[name]}
        assert found == {name: {writer} for name, writer in expected.items()}, record.__name__


def test_a_request_has_few_fields():
    """What belongs to blocks, windows and states is in records of its own."""
    assert len(fields(Request)) <= 14
    names = [entry.name for record in WRITERS for entry in fields(record)]
    assert len(names) == len(set(names)), "the writers of two fields can not be told apart"
