"""Reads the settings of a server from flags, the environment and a file."""

from __future__ import annotations

import difflib
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args, get_origin

import click
from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_settings import EnvSettingsSource, TomlConfigSettingsSource

from bngrad_server.config import ServerConfig, setting_name
from bngrad_server.setting_types import Computed, Metavar

if TYPE_CHECKING:
    from bngrad_server.errors import SettingError

Command = TypeVar("Command", bound=Callable[..., Any])

_FIELDS = {setting_name(name): field for name, field in ServerConfig.model_fields.items()}
# The variables of the tests, and those that Kubernetes sets in a pod for a Service whose name begins with bngrad.
_NO_SETTING = re.compile(r"BNGRAD_(CONFIG$|TEST_|REQUIRE_|(\w+_)?SERVICE_(HOST|PORT)|(\w+_)?PORT_\d+_(TCP|UDP))")
_NAME = re.compile(rf"\b({'|'.join(_FIELDS)})\b")
_BOOLEAN = "it should be true or false"
_STRING = "it should be a string, in quotes"
_WHOLE_NUMBER = "it should be a whole number"
_EXPECTED = {
    "bool_parsing": _BOOLEAN,
    "bool_type": _BOOLEAN,
    "float_type": "it should be a number",
    "int_from_float": _WHOLE_NUMBER,
    "int_parsing": _WHOLE_NUMBER,
    "int_type": _WHOLE_NUMBER,
    "path_type": _STRING,
    "string_type": _STRING,
    "tuple_type": "it should be a list of strings",
}
"""What is expected, by the type of pydantic's error, where its own words are those of a programmer."""


GROUPS = {
    "Addresses": ("listen", "advertise_stream", "http", "http_names", "socket_mode"),
    "Devices and workers": ("device", "workers", "threads", "worker_timeout"),
    "Memory": ("arena_bytes", "shared_bytes", "shared_group", "pinned_bytes", "gpu_memory_bytes", "max_message_bytes"),
    "TLS and tokens": (
        "tls_certificate", "tls_key", "tls_client_ca", "token_file", "open_health", "reflection", "insecure",
    ),
    "Overload and time limits": (
        "max_requests", "max_wait", "max_client_requests", "max_client_bytes", "transfer_timeout", "drain_timeout",
    ),
    "Batches": ("max_batch_jobs", "max_batch_bytes", "max_batch_delay", "front_bytes"),
    "Logs and traces": ("log_format", "log_level", "traces"),
}  # fmt: skip
"""The settings as the help groups them."""


class SettingsCommand(click.Command):
    """A command with `settings_options`, whose help has them in groups."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes a section for each group, and one for what is in none."""
        records = {each.name: record for each in self.get_params(ctx) if (record := each.get_help_record(ctx))}
        for title, names in GROUPS.items():
            with formatter.section(title):
                formatter.write_dl([records.pop(name) for name in names if name in records])
        with formatter.section("Options"):
            formatter.write_dl(list(records.values()))


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting in effect.

    Attributes:
        name: Its name in files.
        field: Its field in `ServerConfig`.
        value: Its value.
        origin: The flag, variable or file that gave the value, or "default".
    """

    name: str
    field: FieldInfo
    value: Any
    origin: str


class SettingsError(click.ClickException):
    """A setting is invalid or unknown; the message names it, its value and what is expected."""

    exit_code = 2


def unusable(error: SettingError, effective: Iterable[Setting]) -> SettingsError:
    """Returns the error of settings that this host cannot use, which names each by its origin."""
    return SettingsError(error.told({each.name: each.origin for each in effective}))


def flag(name: str) -> str:
    """Returns the option of a setting."""
    return "--" + name.replace("_", "-")


def variable(name: str) -> str:
    """Returns the environment variable of a setting."""
    return f"{ServerConfig.model_config['env_prefix']}{name.upper()}"


def metavar(field: FieldInfo) -> str:
    """Returns the placeholder of a setting's value in the help, such as its unit."""
    if get_origin(field.annotation) is Literal:
        return f"[{'|'.join(get_args(field.annotation))}]"
    given = next((each for each in field.metadata if isinstance(each, Metavar)), None)
    names: dict[Any, str] = {bool: "BOOLEAN", int: "INTEGER"}
    return given or names.get(field.annotation, "TEXT")


def default_text(field: FieldInfo) -> str:
    """Returns a setting's default, in words where it depends on the machine."""
    computed = next((each for each in field.metadata if isinstance(each, Computed)), None)
    if computed is not None:
        return computed
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if metavar(field) == "BYTES" and field.default and field.default % factor == 0:
            return f"{field.default // factor}{unit}"
    return as_text(field.default)


def as_text(value: Any) -> str:
    """Returns a value as it is written in the environment."""
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    if isinstance(value, float):
        return f"{value:g}"
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def settings_options(command: Command) -> Command:
    """Adds an option for each setting, and ``--config``, which the command gets as keyword arguments."""
    for name, field in reversed(_FIELDS.items()):
        command = _option(name, field)(command)
    config = click.option(
        "--config",
        type=click.Path(path_type=Path),
        envvar="BNGRAD_CONFIG",
        metavar="FILE",
        help="TOML file of settings, named as the options: max_wait = 5. [env: BNGRAD_CONFIG]",
    )
    return config(command)


def _option(name: str, field: FieldInfo) -> Callable[[Command], Command]:
    # The model checks the values, in the same way for flags, the environment and files.
    details: dict[str, Any] = {"default": None, "metavar": metavar(field)}
    names = [flag(name)]
    if field.annotation is bool:
        names, details = [f"{flag(name)}/--no-{flag(name)[2:]}"], {"default": None}
    elif get_origin(field.annotation) is tuple:
        details["multiple"] = True
    elif get_origin(field.annotation) is Literal:
        choices = get_args(field.annotation)
        details["shell_complete"] = lambda context, option, word: [each for each in choices if each.startswith(word)]
    elif Path in (field.annotation, *get_args(field.annotation)):
        details["type"] = click.Path()
    text = " ".join((field.description or "").split())
    return click.option(*names, name, help=f"{text} [env: {variable(name)}; default: {default_text(field)}]", **details)


def load(config: Path | None, flags: dict[str, Any]) -> tuple[ServerConfig, list[Setting]]:
    """Returns the settings in effect: flags, unless None or empty, override the environment, which overrides the file.

    Raises:
        SettingsError: A setting is invalid or unknown, or the file cannot be read.
    """
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    if config is not None:
        for name, value in _read_file(config).items():
            values[name], origins[name] = value, f"{name} in {config}"
    for name, value in _read_environment().items():
        values[name], origins[name] = value, variable(name)
    for name, value in flags.items():
        if value is not None and value != ():
            values[name], origins[name] = value, flag(name)
    try:
        effective = ServerConfig.model_validate(values)
    except ValidationError as error:
        raise SettingsError("\n".join(_complaints(error, values, origins))) from error
    return effective, [
        Setting(setting_name(name), field, getattr(effective, name), origins.get(setting_name(name), "default"))
        for name, field in ServerConfig.model_fields.items()
    ]


def _read_file(path: Path) -> dict[str, Any]:
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise SettingsError(f"cannot read settings from {path}: it is no file")
        values = TomlConfigSettingsSource(ServerConfig, path).toml_data
    except FileNotFoundError as error:
        raise SettingsError(f"cannot read settings from {path}: there is no such file") from error
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise SettingsError(f"cannot read settings from {path}: {reason}") from error
    for name in values:
        if name not in _FIELDS:
            raise SettingsError(f"{name} in {path} is no setting{_hint(name, str)}")
    return values


def _read_environment() -> dict[str, Any]:
    prefix = variable("")
    for name, value in os.environ.items():
        if not name.startswith(prefix) or _NO_SETTING.match(name) or _is_of_service(name, value):
            continue
        setting = name.removeprefix(prefix).lower()
        if setting not in _FIELDS:
            raise SettingsError(f"{name} in the environment is no setting{_hint(setting, variable)}")
    values = {setting_name(name): value for name, value in EnvSettingsSource(ServerConfig)().items()}
    return {name: value for name, value in values.items() if not _is_of_service(variable(name), value)}


def _is_of_service(name: str, value: str) -> bool:
    """Whether Kubernetes has set a variable; that of the Service bngrad-stream has the name of a setting."""
    return name.endswith("_PORT") and value.startswith(("tcp://", "udp://"))


def _hint(name: str, spell: Callable[[str], str]) -> str:
    similar = difflib.get_close_matches(name, _FIELDS, n=1)
    return f"; did you mean {spell(similar[0])}?" if similar else ""


def _complaints(error: ValidationError, values: dict[str, Any], origins: dict[str, str]) -> Iterator[str]:
    """Describes what is wrong, a line for each setting."""
    seen: set[str] = set()
    for each in error.errors(include_url=False):
        message = each["msg"].removeprefix("Value error, ").replace("Input should", "it should", 1)
        message = _EXPECTED.get(each["type"], message)
        if not each["loc"]:  # a check of several settings
            yield _NAME.sub(lambda found: origins.get(found[0]) or flag(found[0]), message)
            continue
        name = setting_name(str(each["loc"][0]))
        if name not in seen:
            is_of_a_list = len(each["loc"]) > 1
            yield f"{origins[name]} is {each['input'] if is_of_a_list else values[name]!r}; {message}"
        seen.add(name)
