"""Settings from flags, the environment and a file, in this order of precedence.

The origin of each value is kept, so that an error names a setting as the user wrote it. Unknown
names are refused: a misspelt setting must not be ignored.
"""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import ValidationError
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from shalekv.cli.console import variables
from shalekv.cli.console.settings_flags import (
    ENVIRONMENT_PREFIX,
    NESTED,
    Setting,
    settings_of,
    variable_of,
)
from shalekv.errors import InvalidSetting
from shalekv.settings import AnyConfig, Settings
from shalekv.settings.retired import retirement

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

CONFIG_VARIABLE = variables.CONFIG_VARIABLE

Nested = dict[str, Any]
_Key = tuple[str, str]
SettingsT = TypeVar("SettingsT", bound=Settings)
_NUMBER, _FLAG = "must be a whole number", "must be true or false"
# What a value must be, by the kind of the problem that pydantic finds.
_PLAIN: Mapping[str, str] = MappingProxyType(
    {
        "int_parsing": _NUMBER,
        "int_type": _NUMBER,
        "int_from_float": _NUMBER,
        "bool_parsing": _FLAG,
        "bool_type": _FLAG,
        "string_type": "must be text",
        "enum": "must be {expected}",
        "greater_than_equal": "must be at least {ge}",
        "less_than_equal": "must be at most {le}",
    }
)


class _Sources(AnyConfig, BaseSettings):
    """The names of all settings, for the sources of pydantic-settings."""

    model_config = SettingsConfigDict(
        env_prefix=ENVIRONMENT_PREFIX, env_nested_delimiter=NESTED, env_ignore_empty=True
    )


def load_settings(flags: Mapping[str, Any], file: Path | None, model: type[SettingsT]) -> SettingsT:
    """Load the settings of one role, those of `model`.

    Environment and file may have settings of all roles, so that one file serves them all. `flags`
    maps the name of each setting to a value, or None. Raises `InvalidSetting`, which names every
    wrong setting by its flag, variable or key.
    """
    known = list(settings_of(AnyConfig))
    _refuse_unknown_variables(known)
    if file is not None:
        _refuse_unknown_keys(known, _read_toml(file), file)
    by_flag: Nested = {}
    for setting in known:
        if flags.get(setting.name) is not None:
            by_flag.setdefault(setting.group, {})[setting.name] = flags[setting.name]
    sources: list[tuple[PydanticBaseSettingsSource, str]] = [
        (EnvSettingsSource(_Sources), "variable"),
        (InitSettingsSource(_Sources, by_flag), "flag"),
    ]
    if file is not None:
        sources.insert(0, (TomlConfigSettingsSource(_Sources, toml_file=file), f"{file}"))
    values: Nested = {}
    origins: dict[_Key, str] = {}
    needed = {(setting.group, setting.name) for setting in settings_of(model)}
    for source, origin in sources:
        for group, given in source().items():
            members = {name: value for name, value in given.items() if (group, name) in needed}
            if not members:
                continue
            values[group] = values.get(group, {}) | members
            origins |= {(group, name): origin for name in members}
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise InvalidSetting(_problems_text(error, known, origins)) from None


def settings_in_file(file: Path, model: type[SettingsT]) -> SettingsT:
    """Load settings from a file alone, without flags and environment.

    For a command with a second store: flags and environment configure the first one. Raises as
    `load_settings`.
    """
    known = list(settings_of(AnyConfig))
    values = _read_toml(file)
    _refuse_unknown_keys(known, values, file)
    needed = {setting.group for setting in settings_of(model)}
    try:
        return model.model_validate({key: values[key] for key in values if key in needed})
    except ValidationError as error:
        given = {(group, name): f"{file}" for group, members in values.items() for name in members}
        raise InvalidSetting(_problems_text(error, known, given)) from None


def client_settings(file: Path) -> Mapping[str, Any]:
    """Return the settings of commands that talk to a server. Raises as `load_settings`."""
    values = _read_toml(file)
    _refuse_unknown_keys(list(settings_of(AnyConfig)), values, file)
    found: Nested = values.get(variables.CLIENT, {})
    return found


def _read_toml(file: Path) -> Nested:
    try:
        with file.open("rb") as stream:
            return tomllib.load(stream)
    except OSError as error:
        raise InvalidSetting(f"{file}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidSetting(f"{file} is not TOML: {error}") from error


def _refuse_unknown_variables(known: Iterable[Setting]) -> None:
    names = {setting.variable for setting in known}
    names |= {CONFIG_VARIABLE, variables.ADDRESS_VARIABLE}
    accepted = names | variables.CLIENT_VARIABLES
    unknown = []
    for name in sorted(os.environ):
        if name.upper().startswith(ENVIRONMENT_PREFIX) and name.upper() not in accepted:
            if advice := retirement(name.upper(), variable_of):
                unknown.append(f"{name} {advice}")
            else:
                hint = _suggest(name, names)
                unknown.append(f"{name} is in the environment, and there is no such setting{hint}")
    if unknown:
        raise InvalidSetting("\n".join(unknown))


def _refuse_unknown_keys(known: Iterable[Setting], values: Nested, file: Path) -> None:
    keys = {setting.toml_key for setting in known} | {
        f"{variables.CLIENT}.{key}" for key in variables.CLIENT_KEYS
    }
    groups = {key.partition(".")[0] for key in keys}
    unknown = []
    for group, members in values.items():
        if group not in groups:
            hint = _suggest(group, groups) or _suggest_group(group, keys)
            unknown.append(f"{file}: there is no [{group}]{hint}")
        elif not isinstance(members, dict):
            unknown.append(f"{file}: {group} must be a table: write [{group}] above its keys")
        else:
            found = {f"{group}.{name}" for name in members}
            for key in sorted(found - keys):
                if advice := retirement(key, str):
                    unknown.append(f"{file}: {key} {advice}")
                else:
                    unknown.append(f"{file}: there is no setting {key}{_suggest(key, keys)}")
    if unknown:
        raise InvalidSetting("\n".join(unknown))


def _suggest(name: str, names: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, names, n=1)
    return f" (did you mean {close[0]}?)" if close else ""


def _suggest_group(name: str, keys: Iterable[str]) -> str:
    within = [key for key in keys if key.partition(".")[2] == name]
    return f" (did you mean {within[0]}?)" if within else ""


def _problems_text(
    error: ValidationError, known: Iterable[Setting], origins: Mapping[_Key, str]
) -> str:
    """Describe each problem in a line, by the name under which the value was given."""
    by_key = {(setting.group, setting.name): setting for setting in known}
    lines = []
    for problem in error.errors():
        where = problem["loc"]
        message = plain_message(problem)
        is_missing = problem["type"] == "missing"
        if len(where) > 1:
            name = str(where[1])
        else:
            # The problem is with a group: `database` is missing, whose one required setting is
            # `url`, or a rule over several settings failed, whose message begins with the name of
            # the setting concerned.
            name = "url" if is_missing else message.partition(" ")[0]
        setting = by_key.get((str(where[0]), name))
        if setting is None:
            lines.append(f"{where[0]}: {message}")
        elif is_missing:
            lines.append(
                f"{setting.flag} is missing (or {setting.variable} in the environment, "
                f"or {setting.toml_key} in the file of --config)"
            )
        else:
            origin = origins.get((setting.group, setting.name), "flag")
            is_shown = len(where) > 1 and not setting.is_secret
            given = f", not {problem['input']!r}" if is_shown else ""
            lines.append(f"{_given_as(setting, origin)}: {message}{given}")
    return "\n".join(lines)


def plain_message(problem: ErrorDetails) -> str:
    """Say what a value must be, without words of pydantic where they are known."""
    text = _PLAIN.get(problem["type"])
    if text is None:
        return problem["msg"].removeprefix("Value error, ")
    return text.format(**problem.get("ctx", {}))


def _given_as(setting: Setting, origin: str) -> str:
    match origin:
        case "flag":
            return setting.flag
        case "variable":
            return setting.variable
        case file:
            return f"{file}: {setting.toml_key}"
