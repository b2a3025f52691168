"""Settings with their names (flag, environment variable, key of the file), and flags of commands.

Everything follows from the models in `shalekv.settings`, so that a new setting needs no code here.
The --help of a command groups the flags by component.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeVar, get_args

import click
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from shalekv.settings import GIB, KIB, MIB, Settings
from shalekv.settings.budget import FROM_THE_BUDGET

CommandT = TypeVar("CommandT", bound=Callable[..., Any])

ENVIRONMENT_PREFIX = "SHALEKV_"
NESTED = "__"

_COLUMN_CHARS_MAX = 30
_UNITS = {"ms": "milliseconds", "s": "seconds", "bytes": "bytes"}
_UNIT = re.compile(r"_(ms|s|bytes)(?=_(?:max|min)$|$)")


@dataclass(frozen=True, slots=True)
class Setting:
    """One field of one group of settings."""

    group: str
    name: str
    field: FieldInfo

    @property
    def flag(self) -> str:
        """Such as ``--flush-interval-ms``; unique, since no two groups share a field name."""
        return flag_of(self.toml_key)

    @property
    def variable(self) -> str:
        """Such as ``SHALEKV_WRITER__FLUSH_INTERVAL_MS``."""
        return variable_of(self.toml_key)

    @property
    def toml_key(self) -> str:
        """Such as ``writer.flush_interval_ms``."""
        return f"{self.group}.{self.name}"

    @property
    def unit(self) -> str:
        """Such as ``milliseconds``; empty when the value has no unit."""
        found = _UNIT.search(self.name)
        return _UNITS[found.group(1)] if found else ""

    @property
    def is_switch(self) -> bool:
        """Return whether the value is a boolean."""
        return self.field.annotation is bool

    @property
    def is_secret(self) -> bool:
        """Return whether the value may hold a password: it is kept out of arguments, logs and
        errors.
        """
        extra = self.field.json_schema_extra
        return isinstance(extra, Mapping) and extra.get("secret") is True

    @property
    def user(self) -> str:
        """The kind of user who would change the value, and the reason."""
        extra = self.field.json_schema_extra
        return str(extra.get("user", "")) if isinstance(extra, Mapping) else ""

    @property
    def choices(self) -> list[str]:
        """The values of an enumeration; empty for other kinds."""
        annotation = self.field.annotation
        for kind in get_args(annotation) or (annotation,):  # the type may be optional
            if isinstance(kind, type) and issubclass(kind, StrEnum):
                return [member.value for member in kind]
        return []

    @property
    def placeholder(self) -> str:
        """Placeholder of the value in a help text."""
        if self.choices:
            return "|".join(self.choices)
        is_text = self.field.annotation is str
        found = _UNIT.search(self.name)
        return "TEXT" if is_text else found.group(1).upper() if found else "COUNT"

    @property
    def limits(self) -> str:
        """Such as ``0 to 60000``; empty when there is no range."""
        if self.choices:
            return " or ".join(self.choices)
        ends: dict[str, int] = {}
        for rule in self.field.metadata:
            ends |= {end: getattr(rule, end) for end in ("ge", "le") if hasattr(rule, end)}
        if ends.keys() != {"ge", "le"}:
            return ""
        return f"{self._amount(ends['ge'])} to {self._amount(ends['le'])}"

    @property
    def default(self) -> str:
        """The default in words; ``required`` when there is none."""
        if self.field.is_required():
            return "required"
        value = self.field.default
        if value is None or value == "":
            return "not set"
        if isinstance(value, bool):
            return "on" if value else "off"
        text = self._amount(value) if isinstance(value, int) else str(value)
        # The value of the model applies only at the default memory_bytes: when the setting is not
        # given, it is a share of memory_bytes.
        is_share = (self.group, self.name) in FROM_THE_BUDGET
        return f"{text} of the default memory_bytes" if is_share else text

    def _amount(self, number: int) -> str:
        if self.unit == "bytes":
            for size, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
                if number and number % size == 0:
                    return f"{number} ({number // size} {name})"
        return str(number)


def flag_of(toml_key: str) -> str:
    """The flag of a setting, such as ``--flush-bytes``, by its key."""
    return "--" + toml_key.partition(".")[2].replace("_", "-")


def variable_of(toml_key: str) -> str:
    """The environment variable of a setting by its key."""
    return f"{ENVIRONMENT_PREFIX}{toml_key.replace('.', NESTED)}".upper()


@dataclass(frozen=True, slots=True)
class FlagGroup:
    """The settings of one component."""

    name: str
    title: str
    settings: tuple[Setting, ...]


def groups_of(model: type[Settings]) -> list[FlagGroup]:
    """The groups of a model such as `WriterConfig`, in its order."""
    return [_group(name, field) for name, field in model.model_fields.items()]


def settings_of(model: type[Settings]) -> Iterator[Setting]:
    """All settings of a model such as `WriterConfig`."""
    for group in groups_of(model):
        yield from group.settings


def _group(name: str, field: FieldInfo) -> FlagGroup:
    model = field.annotation
    if not (isinstance(model, type) and issubclass(model, BaseModel)):
        raise TypeError(f"{name} is not a group of settings")
    title = (model.__doc__ or "").strip().splitlines()[0]
    fields = model.model_fields.items()
    return FlagGroup(name, title, tuple(Setting(name, key, info) for key, info in fields))


def settings_flags(model: type[Settings]) -> Callable[[CommandT], CommandT]:
    """A decorator that adds a flag for each setting of `model`; the value is None if not given."""

    def add(command: CommandT) -> CommandT:
        for setting in reversed(list(settings_of(model))):
            command = click.option(setting.flag, cls=SettingFlag, setting=setting)(command)
        return command

    return add


class SettingFlag(click.Option):
    """The flag of one setting. Values stay text: the model validates them."""

    def __init__(self, *_names: object, setting: Setting, **attributes: Any) -> None:
        """Derive name, placeholder and help from `setting`."""
        self.setting = setting
        declaration = setting.flag
        if setting.is_switch:
            declaration += "/--no-" + setting.flag.removeprefix("--")
        super().__init__(
            [declaration],
            default=None,
            type=click.Choice(setting.choices) if setting.choices else None,
            metavar=None if setting.is_switch else setting.placeholder,
            help=_help(setting),
            **attributes,
        )


class SettingsCommand(click.Command):
    """A command whose --help shows its settings under their components."""

    model: type[Settings]

    def format_options(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the settings by component, then the other flags."""
        rows: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(context):
            row = parameter.get_help_record(context)
            if row is not None:
                section = parameter.setting.group if isinstance(parameter, SettingFlag) else ""
                rows.setdefault(section, []).append(row)
        for group in groups_of(self.model):
            with formatter.section(f"[{group.name}] {group.title.rstrip('.')}"):
                formatter.write_dl(rows[group.name], col_max=_COLUMN_CHARS_MAX)
        with formatter.section("Other"):
            formatter.write_dl(rows[""], col_max=_COLUMN_CHARS_MAX)


def _help(setting: Setting) -> str:
    facts = [setting.default if setting.field.is_required() else f"default: {setting.default}"]
    if setting.limits and not setting.choices:
        facts.append(setting.limits)
    if setting.is_secret:
        facts.append("a secret: not as a flag, which `ps` shows")
    facts.append(setting.variable)
    return f"{setting.field.description}  [{'; '.join(facts)}]"
