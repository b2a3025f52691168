"""Values in case files as protobuf values: see "Values" in README.md."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, cast

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

Json: TypeAlias = Any
Variables: TypeAlias = dict[str, Any]  # bytes, int, str or bool by name

COUNTER_BYTES = 8
_VARIABLE = re.compile(r"\$\{(\w+)\}")
_INDEX = "i"  # counter of the elements that `$times` makes
_FILLER = b"x"


class BadCase(ValueError):
    """A file of cases says what README.md does not allow."""


def message_of(kind: Descriptor, written: Json, variables: Variables) -> Message:
    message: Message = GetMessageClass(kind)()
    _fill(message, written, variables)
    return message


def scalar_of(field: FieldDescriptor, written: Json, variables: Variables) -> Any:
    """The value of one field, or of one element of a repeated field, that is no message."""
    match field.type:
        case FieldDescriptor.TYPE_BYTES:
            return bytes_of(written, variables)
        case FieldDescriptor.TYPE_STRING:
            return bytes_of(written, variables).decode()
        case FieldDescriptor.TYPE_BOOL:
            return _checked(written, bool)
        case FieldDescriptor.TYPE_ENUM if isinstance(written, str):
            return _enum_number(field, written)
        case _:
            return int_of(written, variables)


def bytes_of(written: Json, variables: Variables) -> bytes:
    """Return bytes: a text means its UTF-8, with `${name}` replaced."""
    if isinstance(written, str):
        return _substituted(written, variables)
    match operation(written):
        case "$hex", digits:
            return bytes.fromhex(_checked(digits, str))
        case "$repeat", [part, count]:
            return bytes_of(part, variables) * int_of(count, variables)
        case "$pad", [part, length]:
            start = bytes_of(part, variables)
            return start + _FILLER * (int_of(length, variables) - len(start))
        case "$concat", [*parts]:
            return b"".join(bytes_of(part, variables) for part in parts)
        case "$counter", number:
            value = int_of(number, variables)
            return value.to_bytes(COUNTER_BYTES, "little", signed=True)
    raise BadCase(f"these are no bytes: {written!r}")


def int_of(written: Json, variables: Variables) -> int:
    """An integer: a number, its digits as a text, or the variable that a text names."""
    if isinstance(written, int) and not isinstance(written, bool):
        return written
    if isinstance(written, str):
        return int(_substituted(written, variables))
    match operation(written):
        case "$plus", [*terms]:
            return sum(int_of(term, variables) for term in terms)
    raise BadCase(f"this is no integer: {written!r}")


def elements_of(written: Json, variables: Variables) -> Iterator[tuple[Json, Variables]]:
    """The elements of a list, each with the variables that hold for it."""
    for element in _checked(written, list):
        match operation(element):
            case "$times", [count, of]:
                for index in range(int_of(count, variables)):
                    yield of, {**variables, _INDEX: f"{index:05}"}
            case _:
                yield element, variables


def operation(written: Json) -> tuple[str, Json]:
    """Name and argument of an object with one name that begins with `$`; else two empties."""
    if isinstance(written, Mapping) and len(written) == 1:
        ((name, argument),) = written.items()
        if name.startswith("$"):
            return name, argument
    return "", None


def field_of(message: Message, name: str) -> FieldDescriptor:
    """The field of a message by its name in the proto."""
    field = message.DESCRIPTOR.fields_by_name.get(name)
    if field is None:
        raise BadCase(f"{message.DESCRIPTOR.full_name} has no field {name}")
    return cast("FieldDescriptor", field)  # of the faster of two implementations


def is_message(field: FieldDescriptor) -> bool:
    return field.message_type is not None


def is_map(field: FieldDescriptor) -> bool:
    entry = field.message_type
    return entry is not None and bool(entry.GetOptions().map_entry)


def _fill(message: Message, written: Json, variables: Variables) -> None:
    for name, value in _checked(written, dict).items():
        field = field_of(message, name)
        if field.is_repeated:
            _fill_list(field, getattr(message, name), value, variables)
        elif is_message(field):
            part: Message = getattr(message, name)
            part.SetInParent()
            _fill(part, value, variables)
        else:
            setattr(message, name, scalar_of(field, value, variables))


def _fill_list(field: FieldDescriptor, into: Any, written: Json, variables: Variables) -> None:
    for element, known in elements_of(written, variables):
        if is_message(field):
            _fill(into.add(), element, known)
        else:
            into.append(scalar_of(field, element, known))


def _substituted(text: str, variables: Variables) -> bytes:
    def value(name: str) -> bytes:
        try:
            found = variables[name]
        except KeyError:
            raise BadCase(f"no variable is called {name}") from None
        return found if isinstance(found, bytes) else str(found).encode()

    parts: Sequence[str] = _VARIABLE.split(text)  # text, name, text, name, ..., text
    encode: tuple[Callable[[str], bytes], ...] = (str.encode, value)
    return b"".join(encode[place % 2](part) for place, part in enumerate(parts))


def _enum_number(field: FieldDescriptor, name: str) -> int:
    values = field.enum_type.values_by_name if field.enum_type else {}
    value = values.get(name)
    if value is None:
        raise BadCase(f"{field.full_name} has no value {name}")
    return value.number


def _checked(written: Json, kind: type[Any]) -> Any:
    if not isinstance(written, kind):
        raise BadCase(f"this is no {kind.__name__}: {written!r}")
    return written
