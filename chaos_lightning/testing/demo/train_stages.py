"""Training script of `demo-pipeline`: the small GPT of `train.py`, by `Trainer(strategy="chaos_pipeline")`.

Theory of operation. No device has memory for the whole model, so each process holds some of its blocks. Three things
serve the demo beside those of `train.py`: the loss of each step goes into the event log; a process kills itself in the
middle of a backward pass once a file with its name asks for it, an instant that nobody can hit from outside; and at the
end each member writes down a hash of each tensor that it holds. With `--alone` the same script trains in one process
without interruption, for comparison.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn

from chaos_lightning.machine.listener import free_port
from chaos_lightning.pipeline.absent import is_absent, named_tensors
from chaos_lightning.strategies import ChaosPipelineStrategy
from chaos_lightning.testing.demo import ALONE
from chaos_lightning.testing.demo.train import StepLosses, fit, options


class Stages(StepLosses):
    """`Demo` callback for a device: logs each step's loss, and kills its process in a backward pass once a file asks
    for it.
    """

    def __init__(self, folder: Path, pause_s: float) -> None:
        super().__init__(folder, pause_s)
        self._session: Any = None

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        self._session = trainer.strategy.session  # type: ignore[attr-defined]
        for block in module.blocks:  # type: ignore[union-attr]
            block.register_forward_hook(self._in_backward)

    def _in_backward(self, block: nn.Module, arguments: Any, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(self._die_if_asked)  # type: ignore[no-untyped-call]

    def _die_if_asked(self, gradient: Tensor) -> None:
        engine = self._session.engine
        if (self.folder / f"strike-{engine.name}").exists():
            words = {"kind": "sigkill", "node": engine.name, "phase": "backward", "step": engine.header.step + 1}
            engine.events.emit("fault_injected", **words)
            os.kill(os.getpid(), signal.SIGKILL)


def held(module: nn.Module) -> dict[str, str]:
    """Returns a hash of each tensor that is held in this process, by the tensor's name."""
    return {
        name: hashlib.sha256(tensor.detach().cpu().contiguous().numpy().tobytes()).hexdigest()
        for name, _, _, tensor in named_tensors(module)
        if not is_absent(tensor)
    }


def main() -> None:
    """Trains until the file `enough` asks for the end, and writes a hash of each tensor into a file."""
    parser = options(__doc__)
    parser.add_argument("--micro-batches", type=int, default=6, help="micro-batches of an optimizer step")
    parser.add_argument("--device-memory", type=int, default=0, help="bytes for layers on each device")
    parser.add_argument("--profile", default="", help="file of what layers cost")
    parser.add_argument("--alone", action="store_true", help="train in this process alone")
    args = parser.parse_args()
    words: dict[str, Any] = {"endpoint": f"127.0.0.1:{free_port()}"} if args.alone else {}
    strategy = ChaosPipelineStrategy(
        micro_batches=args.micro_batches,
        device_memory=None if args.alone else args.device_memory or None,
        profile="" if args.alone else args.profile,
        **words,
    )
    # The process for comparison is not asked to stop, or to die.
    trainer, model = fit(args, strategy, Stages(args.folder / ALONE if args.alone else args.folder, args.pause))
    session = strategy.session
    if session is not None and not session.departed:
        about = {"member": session.engine.name, "step": trainer.global_step, "tensors": held(model)}
        (args.folder / f"final-{session.engine.name}.json").write_text(json.dumps(about))


if __name__ == "__main__":
    main()
