"""Whether the server would start with the environment that a deployment gives it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from prefixcache.config import CONFIG_VARIABLE, ENV_PREFIX, Settings, load_settings


def settings_from(environment: Mapping[str, str], folder: Path) -> Settings:
    """Reads the variables as the server does; every name and value that is wrong is an error.

    Secrets, which are files below /run/secrets in a container, are stood in for by one in `folder`.
    """
    secret = folder / "secret"
    secret.write_text("s3cret")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.delenv(CONFIG_VARIABLE, raising=False)
        for name in (f"{ENV_PREFIX}{name.upper()}" for name in Settings.model_fields):
            patch.delenv(name, raising=False)
        for name, value in environment.items():
            if name.startswith(ENV_PREFIX):
                patch.setenv(name, str(secret) if value.startswith("/run/secrets/") else value)
        return load_settings()
