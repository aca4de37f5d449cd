"""Tests the commands of docs/access.md, with loopback addresses and folders in place of machines."""

from __future__ import annotations

from pathlib import Path

import pytest
from blocks_support import block
from installed_support import Installed
from test_tutorial import RSYNC, Terminals, here, terminals

from chaos_lightning.machine.listener import free_port

__all__ = ["terminals"]


def with_rsync(installed: Installed, folder: Path) -> dict[str, str]:
    """Makes a stand-in for rsync that copies into folders; returns a PATH that finds it first."""
    tools = folder / "tools"
    tools.mkdir()
    (tools / "rsync").write_text(RSYNC)
    (tools / "rsync").chmod(0o755)
    return {"PATH": f"{tools}:{installed.environment(folder)['PATH']}"}


@pytest.mark.slow
def test_keys_are_made_and_rotated(installed: Installed, tmp_path: Path) -> None:
    path = with_rsync(installed, tmp_path)
    first, *_ = block("docs/access.md", "chaos-lightning keys init").splitlines()
    installed.run(first, tmp_path)
    installed.run(block("docs/access.md", "chaos-lightning keys node c="), tmp_path)
    installed.run(block("docs/access.md", "chaos-lightning keys node server="), tmp_path)
    installed.run(block("docs/access.md", "chaos-lightning keys rotate"), tmp_path, **path)
    shown = installed.run("chaos-lightning keys show", tmp_path)
    assert [name for name in ("a", "b", "c", "ann", "server", "home", "operator") if name not in shown] == []
    assert (tmp_path / "10.0.0.5" / "chaos-keys" / "node.key").is_file()


@pytest.mark.slow
def test_a_cluster_in_five_lines(terminals: Terminals) -> None:
    folder, installed, port = terminals.folder, terminals.installed, free_port()
    text = here(block("docs/access.md", "chaos-lightning keys init"), port)
    make, *copies, train, look = (line.partition("   #")[0] for line in text.splitlines())
    installed.run("\n".join([make, *copies]), folder, **with_rsync(installed, folder))
    # The page leaves out the port, which is 29400 then.
    train, look = (line.replace(" --endpoint 127.0.0.5", f" --endpoint 127.0.0.5:{port}") for line in (train, look))
    train = train.replace("--rdzv-endpoint=127.0.0.5", f"--rdzv-endpoint=127.0.0.5:{port}")
    for name, machine in (("a", "127.0.0.5"), ("b", "127.0.0.6")):
        (folder / machine / "train.py").write_text((folder / "train.py").read_text())
        terminals.type(name, train, folder / machine, node=f"{name}-0")
    said = installed.run(look, folder)
    assert [word for word in ("a-0~1", "b-0~2") if word not in said] == []
