"""Flags of a command, made from the models of its settings and grouped by component in --help."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from shalekv.cli.catalog import REMOVED, Setting, groups_of, settings_of
from shalekv.settings import Settings

CommandT = TypeVar("CommandT", bound=Callable[..., Any])

_COLUMN_CHARS_MAX = 30


def settings_flags(model: type[Settings]) -> Callable[[CommandT], CommandT]:
    """A decorator that adds a flag for each setting of `model`; not given, it is None."""

    def add(command: CommandT) -> CommandT:
        for setting in reversed(list(settings_of(model))):
            command = click.option(setting.flag, cls=SettingFlag, setting=setting)(command)
        return command

    return add


class SettingFlag(click.Option):
    """The flag of one setting. Values stay text: the model says what is wrong with them."""

    def __init__(self, *_names: object, setting: Setting, **attributes: Any) -> None:
        """Take everything else from `setting`."""
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

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Tell of a flag that was removed why."""
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            for setting in REMOVED:
                if error.option_name == setting.flag:
                    message = f"there is no {setting.flag}: {setting.field.description}"
                    raise click.UsageError(message, ctx) from None
            raise

    def format_options(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        """The settings by component, then the other flags."""
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
