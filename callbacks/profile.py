"""ModelProfile as a callback: measures the model while a Trainer trains it, and writes the planner's file.

Theory of operation. `pipeline.profile` measures; here it begins with fit, in rank 0, with the LightningModule as the
model. `chaos-lightning profile` does the same without a callback, and asks a running job for its links.
"""

from __future__ import annotations

import logging
from pathlib import Path

from lightning.pytorch import Callback, LightningModule, Trainer

from chaos_lightning.errors import ConfigurationError
from chaos_lightning.pipeline.model_profile import estimated_s, this_machine, write
from chaos_lightning.pipeline.profile import STEPS, ModelProfiler, Outcome

log = logging.getLogger("chaos_lightning.callbacks")


class PipelineProfile(Callback):
    """Callback that measures the model during some steps, and writes the profile that `chaos-lightning plan` reads.

    Args:
        out: File to write; JSON if its name ends with .json.
        steps: Steps to measure, behind five that warm up; half of them by layer.
        chain: Path of the list of blocks in the LightningModule; "": its `chaos_chain`, or the longest of alike blocks.
        force: Whether to write over the file.
    """

    def __init__(
        self, out: str | Path = "profile.yaml", steps: int = STEPS, chain: str = "", force: bool = False
    ) -> None:
        self.out, self.steps, self.chain, self.force = Path(out), steps, chain, force
        self._profiler: ModelProfiler | None = None

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.is_global_zero:
            return
        if self.out.exists() and not self.force:
            raise ConfigurationError(f"PipelineProfile: {self.out} is there already; give force=True to write over it")
        self._profiler = ModelProfiler(
            report=self._write,
            steps=self.steps,
            chain=self.chain,
            root=pl_module,
            say=lambda line: log.info("%s", line),
        )
        self._profiler.attach()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if self._profiler is not None:
            self._profiler.detach()
            self._profiler = None

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self._profiler is not None:
            self._profiler.detach()
            log.warning(
                "PipelineProfile: training ended after %d of %d measured steps, so there is no file; train longer, or "
                "give fewer steps", self._profiler.done_steps, self.steps,
            )  # fmt: skip
            self._profiler = None

    def _write(self, outcome: Outcome) -> None:
        self._profiler = None
        if isinstance(outcome, ConfigurationError):
            raise outcome
        write(self.out, outcome, this_machine(outcome))
        estimated = estimated_s(self.out)
        log.info(
            "%s: a step takes %.4g s here, estimated %.4g s (%+.1f%%)",
            self.out, outcome.step_s, estimated, 100 * (estimated / outcome.step_s - 1),
        )  # fmt: skip
        for note in outcome.notes:
            log.warning("PipelineProfile: %s", note)
