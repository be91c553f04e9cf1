"""parse: read the text form of a trace (`jointtrace.ir.text` describes it) by recursive descent, in one walk."""
from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from jointtrace.errors import ParseError
from jointtrace.ir.names import DTYPES, KEYWORDS, SCALAR_KINDS, WORD
from jointtrace.ir.op import (
    ObjectType,
    Op,
    Phase,
    ScalarType,
    Size,
    Source,
    Symbol,
    Tag,
    Target,
    TensorType,
    Type,
    Var,
)
from jointtrace.ir.trace import Trace

_TOKEN = re.compile(
    r"""(?P<skip>(?m:^[ \t]*\#[^\n]*)|[ \t\r]+)"""
    r"""|(?P<newline>\n)"""
    r"""|(?P<string>b?(?:'(?:[^'\\\n]|\\.)*'|"(?:[^"\\\n]|\\.)*"))"""
    rf"""|(?P<word>{WORD.pattern})"""
    r"""|(?P<mark>[()\[\]{},:=%\#])"""
)
_WORDS = {"None": None, "True": True, "False": False, "...": Ellipsis}
_INTEGER = re.compile(r"-?\d+")
_PLAIN_OBJECTS = (torch.dtype, torch.layout, torch.memory_format)


def parse(text: str, table: Mapping[str, Any] | None = None) -> Trace:
    """Return the trace that `text` describes.

    Args:
        text: what `print_trace` returns; comment lines (`# ...`) and empty lines may stand between its lines.
        table: what names stand for: `$0`, `$1`, ... (from `constants(trace)`) and names of targets. A target that the
            table does not name and that reads `namespace.operator.overload` is looked up among torch's operators.

    Raises:
        ParseError: `text` is no trace, or refers to a constant that the table lacks.
    """
    parser = _Parser(text, table or {})
    parser.newlines()
    trace = parser.trace()
    parser.newlines()
    if parser.token.kind != "end":
        raise parser.error("the end of the text")
    return trace


class _Token(NamedTuple):
    kind: str
    text: str
    start: int


def _tokens(text: str) -> list[_Token]:
    found, start = [], 0
    while start < len(text):
        match = _TOKEN.match(text, start)
        if match is None:
            raise _error(text, start, "a closing quote")
        if match.lastgroup != "skip":
            found.append(_Token(match.lastgroup or "", match.group(), start))
        start = match.end()
    return [*found, _Token("end", "the end of the text", start)]


def _error(text: str, start: int, expected: str, found: str = "") -> ParseError:
    line = text.count("\n", 0, start) + 1
    column = start - (text.rfind("\n", 0, start) + 1) + 1
    return ParseError(f"line {line}, column {column}: expected {expected}" + (f", found {found}" if found else ""))


class _Parser:
    def __init__(self, text: str, table: Mapping[str, Any]) -> None:
        self.text = text
        self.table = table
        self.tokens = _tokens(text)
        self.position = 0
        self.types: dict[str, Type] = {}

    @property
    def token(self) -> _Token:
        return self.tokens[self.position]

    def error(self, expected: str, token: _Token | None = None) -> ParseError:
        token = token or self.token
        found = "the end of the line" if token.kind == "newline" else token.text
        return _error(self.text, token.start, expected, found)

    def take(self) -> _Token:
        self.position += 1
        return self.tokens[self.position - 1]

    def at(self, *texts: str) -> bool:
        """Whether the next tokens read `texts` (marks and bare words, never strings)."""
        ahead = self.tokens[self.position : self.position + len(texts)]
        return [t.text for t in ahead if t.kind in ("word", "mark")] == list(texts)

    def accept(self, *texts: str) -> bool:
        found = self.at(*texts)
        self.position += len(texts) if found else 0
        return found

    def expect(self, text: str) -> None:
        if not self.accept(text):
            raise self.error(f"`{text}`")

    def newlines(self) -> None:
        while self.token.kind == "newline":
            self.position += 1

    def end_line(self) -> None:
        if self.token.kind != "newline":
            raise self.error("the end of the line")
        self.newlines()

    def items(self, item: Callable[[], Any], closing: str) -> tuple[list[Any], bool]:
        """Read comma-separated items up to `closing`; also say whether a comma stood last."""
        found: list[Any] = []
        comma = False
        while not self.accept(closing):
            if found and not comma:
                raise self.error(f"`,` or `{closing}`")
            found.append(item())
            comma = self.accept(",")
        return found, comma

    def name(self, what: str) -> str:
        if self.token.kind == "word":
            return self.take().text
        return self.literal(str, what)

    def literal(self, kind: type, what: str) -> Any:
        token = self.token
        if token.kind == "string":
            value = ast.literal_eval(token.text)
            if isinstance(value, kind):
                self.position += 1
                return value
        raise self.error(what)

    def integer(self) -> int:
        if not _INTEGER.fullmatch(self.token.text):
            raise self.error("an integer")
        return int(self.take().text)

    def value(self) -> str:
        self.expect("%")
        return self.name("the name of a value")

    def trace(self) -> Trace:
        outer, self.types = self.types, {}
        self.expect("trace")
        self.expect("(")
        inputs = tuple(var.name for var in self.items(self.made, ")")[0])
        by = self.name("the name of a pass") if self.accept("by", "=") else ""
        notes = self.tree() if self.accept("notes", "=") else {}
        self.expect("{")
        self.end_line()
        if self.accept("types", "("):
            self.items(self.made, ")")
            self.end_line()
        ops = self.ops()
        self.expect("return")
        self.expect("(")
        outputs = tuple(self.items(self.tree, ")")[0])
        grads = tuple(self.items(self.tree, ")")[0]) if self.accept("grads", "(") else ()
        self.end_line()
        self.expect("}")
        types, self.types = self.types, outer
        return Trace(inputs, ops, outputs, grads, types, by, notes)

    def ops(self) -> tuple[Op, ...]:
        found: list[Op] = []
        phase = None
        while not self.at("return", "("):
            if self.at("fw", ":") or self.at("bw", ":"):
                phase = Phase(self.take().text)
                self.expect(":")
            elif phase is None:
                raise self.error("`fw:`, `bw:` or `return`")
            else:
                found.append(self.op(phase))
            self.end_line()
        return tuple(found)

    def op(self, phase: Phase) -> Op:
        out = None
        if not self.at_call():
            out = self.tree(self.made)
            self.expect("=")
        target = self.target()
        self.expect("(")
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        self.items(lambda: self.argument(args, kwargs), ")")
        body = self.trace() if self.accept("with") else None
        tags, writes, source = self.facts() if self.accept("#") else (frozenset(), (), None)
        return Op(target, tuple(args), kwargs, out, tags, phase, writes, source, body)

    def at_call(self) -> bool:
        token, after = self.tokens[self.position : self.position + 2]
        named = token.kind == "string" or (token.kind == "word" and not token.text.startswith("$"))
        return named and after.text == "("

    def argument(self, args: list[Any], kwargs: dict[str, Any]) -> None:
        after = self.tokens[self.position + 1]
        if self.token.kind in ("word", "string") and after.kind == "mark" and after.text == "=":
            key = self.name("an argument")
            self.expect("=")
            kwargs[key] = self.tree()
        elif kwargs:
            raise self.error("`name=value` after the first of them")
        else:
            args.append(self.tree())

    def target(self) -> Target:
        if self.token.kind == "word" and self.token.text in KEYWORDS:
            raise self.error("the name of a target")
        name = self.name("the name of a target")
        return Target(name, self.table[name] if name in self.table else _torch_operator(name))

    def facts(self) -> tuple[frozenset[Tag], tuple[str, ...], Source | None]:
        tags = frozenset(self.items(self.tag, "]")[0]) if self.accept("[") else frozenset()
        writes = tuple(self.items(self.value, ")")[0]) if self.accept("writes", "(") else ()
        return tags, writes, None if self.token.kind == "newline" else self.source()

    def tag(self) -> Tag:
        token = self.token
        try:
            return Tag(self.take().text)
        except ValueError:
            raise self.error(f"a tag ({', '.join(tag.value for tag in Tag)})", token) from None

    def source(self) -> Source:
        file = self.name("the name of a file")
        self.expect(":")
        line, module = self.integer(), ""
        if self.accept("("):
            module = self.name("the path of a module")
            self.expect(")")
        return Source(file, line, module, self.name("the name of a forward op") if self.accept("of") else "")

    def made(self) -> Var:
        """Read a value where it is made: `%name: type`."""
        name = self.value()
        if self.accept(":"):
            self.types[name] = self.type()
        return Var(name)

    def type(self) -> Type:
        word = self.take()
        if word.text in SCALAR_KINDS:
            return ScalarType(word.text)
        if word.text in ("scalar", "object"):
            kind = self.kind() if self.accept("(") else word.text
            return ScalarType(kind) if word.text == "scalar" else ObjectType(kind)
        if word.text not in DTYPES:
            raise self.error("a type, as f32[2, 3]", word)
        self.expect("[")
        shape = tuple(self.items(self.size, "]")[0])
        strides = tuple(self.items(self.size, "]")[0]) if self.accept("[") else None
        return TensorType(shape, DTYPES[word.text], self.device(), strides)

    def kind(self) -> str:
        name = self.name("a kind of value")
        self.expect(")")
        return name

    def device(self) -> str:
        if self.token.kind not in ("word", "string"):
            return "cpu"
        plain = self.token.kind == "word"
        name = self.name("a device")
        return f"{name}:{self.integer()}" if plain and self.accept(":") else name

    def size(self) -> Size:
        token = self.token
        name = self.name("a size")
        if self.accept("="):
            return Symbol(name, self.integer())
        if token.kind == "word" and _INTEGER.fullmatch(name):
            return int(name)
        raise self.error("`=` and the size seen")

    def tree(self, value: Callable[[], Var] | None = None) -> Any:
        """Read an argument tree; `value` reads its values."""
        if self.at("%"):
            return value() if value else Var(self.value())
        if self.at("trace", "("):
            return self.trace()
        if self.accept("("):
            items, comma = self.items(lambda: self.tree(value), ")")
            if len(items) == 1 and not comma:
                raise self.error("`,` in a tuple of one item", self.tokens[self.position - 1])
            return tuple(items)
        if self.accept("["):
            return self.items(lambda: self.tree(value), "]")[0]
        if self.accept("{"):
            return dict(self.items(lambda: self.pair(value), "}")[0])
        if self.token.kind == "string":
            return self.literal(object, "a constant")
        return self.word(value)

    def pair(self, value: Callable[[], Var] | None) -> tuple[Any, Any]:
        key = self.tree()
        self.expect(":")
        return key, self.tree(value)

    def word(self, value: Callable[[], Var] | None) -> Any:
        token = self.token
        if token.kind != "word":
            raise self.error("a value or a constant")
        self.position += 1
        if self.accept("("):
            if token.text == "symbol":
                return self.items(self.size, ")")[0][0]
            return self.build(token, self.items(lambda: self.tree(value), ")")[0])
        if token.text in _WORDS:
            return _WORDS[token.text]
        if token.text.startswith("$"):
            return self.constant(token)
        return self.plain(token)

    def plain(self, token: _Token) -> Any:
        named = getattr(torch, token.text.removeprefix("torch."), None) if token.text.startswith("torch.") else None
        if isinstance(named, _PLAIN_OBJECTS):
            return named
        try:
            return int(token.text) if _INTEGER.fullmatch(token.text) else float(token.text)
        except ValueError:
            raise self.error("a value or a constant", token) from None

    def constant(self, token: _Token) -> Any:
        name = token.text.partition("<")[0]
        if name not in self.table:
            raise self.error(f"an entry {name!r} in the table of constants", token)
        return self.table[name]

    def build(self, token: _Token, items: list[Any]) -> Any:
        """Return the object that the text writes as a call."""
        makers = {"slice": slice, "complex": complex, "device": torch.device}
        if token.text == "torch.Size":
            return torch.Size(items)
        if not token.text.startswith("$"):
            if token.text not in makers:
                raise self.error("a value or a constant", token)
            return makers[token.text](*items)
        container = self.constant(token)
        if issubclass(container, dict) or hasattr(container, "_fields"):
            return container(*items)
        return container(items)


def _torch_operator(name: str) -> Callable[..., Any] | None:
    """Return the torch operator called `namespace.operator.overload`, or None where there is none."""
    parts = name.split(".")
    if len(parts) != 3:
        return None
    try:
        return getattr(getattr(getattr(torch.ops, parts[0]), parts[1]), parts[2])
    except (AttributeError, RuntimeError):
        return None
