"""The pages' commands run in an environment that has the wheel, made once."""

from __future__ import annotations

import pytest
from installed_support import Installed, install


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """The wheel, installed by the commands of docs/install.md."""
    return install(tmp_path_factory.mktemp("installed"))
