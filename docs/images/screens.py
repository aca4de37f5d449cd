"""Takes the pictures of this folder: `python docs/images/screens.py`, with tmux and chromium installed.

Three members of a plain loop train; `top` and `status` run in terminals of tmux, whose contents become SVG. Then one
member is killed, the others end, and a browser takes the report, light and dark, 1280 and 400 pixels wide.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.text import Text

from chaos_lightning.machine.listener import free_port

HERE = Path(__file__).resolve().parent
COMMAND = Path(sys.executable).parent / "chaos-lightning"
SIZES = ((80, 24), (200, 50), (40, 24))
LOOP = """
import time, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from chaos_lightning.trainer import Trainer, capture_exit_event

torch.set_num_threads(1)
torch.manual_seed(1)
x = torch.randn(4000, 64)
model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 1))
optimizer = torch.optim.Adam(model.parameters())
loader = DataLoader(TensorDataset(x, x[:, :8].sin().sum(dim=1, keepdim=True)), batch_size=16, shuffle=True)
with Trainer() as trainer:
    for x, y in trainer.prepare(model, optimizer, loader, epochs=1000):
        optimizer.zero_grad()
        trainer.backward((model(x) - y).square().mean())
        time.sleep(0.05)
        trainer.update()
        trainer.check_state_replication()
        if capture_exit_event():
            trainer.request_node_exit()
            break
"""


def terminal(command: str, width: int, height: int, env: dict[str, str], seconds: float) -> str:
    """What a terminal of this size shows after so long, with its colours."""
    words = " ".join(f"{key}={value}" for key, value in env.items())
    name = f"screens-{os.getpid()}"
    size = ("-x", str(width), "-y", str(height))
    subprocess.run(["tmux", "new-session", "-d", "-s", name, *size, f"env {words} {command}; sleep 60"], check=True)
    try:
        time.sleep(seconds)
        shown = subprocess.run(["tmux", "capture-pane", "-t", name, "-p", "-e"], capture_output=True, text=True)
    finally:
        subprocess.run(["tmux", "kill-session", "-t", name], check=False)
    return shown.stdout.rstrip("\n")


def drawn(text: str, width: int, title: str, path: Path) -> None:
    with open(os.devnull, "w") as nowhere:
        console = Console(record=True, width=width, file=nowhere, force_terminal=True)
        console.print(Text.from_ansi(text))
    # rich names fonts on another host; a reader's own monospaced one does.
    path.write_text(re.sub(r"@font-face \{.*?\}\s*", "", console.export_svg(title=title), flags=re.DOTALL))


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        env = {"CHAOS_ENDPOINT": f"127.0.0.1:{free_port()}", "XDG_STATE_HOME": folder}
        (Path(folder) / "loop.py").write_text(LOOP)
        members = []
        for name in ("laptop", "desk", "attic"):
            given = {**os.environ, **env, "CHAOS_NAME": name}
            members.append(subprocess.Popen([sys.executable, "loop.py"], cwd=folder, env=given))
            time.sleep(8)
        for width, height in SIZES:
            for what, seconds in (("top", 6.0), ("status", 4.0)):
                text = terminal(f"{COMMAND} {what}", width, height, env, seconds)
                drawn(text, width, f"chaos-lightning {what}, {width} x {height}", HERE / f"{what}-{width}.svg")
        members[1].kill()
        time.sleep(10)
        for member in (members[0], members[2]):
            member.terminate()
            member.wait(30)
        report = [COMMAND, "report", "--title", "three members, one killed", "--out", folder]
        subprocess.run(report, env={**os.environ, **env}, check=True)
        for width in (1280, 400):
            for scheme, number in (("light", 1), ("dark", 0)):
                subprocess.run(
                    [
                        "chromium", "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
                        f"--window-size={width},1400", f"--blink-settings=preferredColorScheme={number}",
                        f"--screenshot={HERE / f'report-{width}-{scheme}.png'}", f"file://{folder}/report.html",
                    ],
                    check=True,
                    capture_output=True,
                )  # fmt: skip


if __name__ == "__main__":
    main()
