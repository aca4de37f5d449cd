"""Training script of clusters in `demo-diloco`: the small GPT of `train.py`, by `Trainer(strategy="chaos_diloco")`.

Theory of operation. Each cluster trains by itself and takes its part of every epoch; under torchrun its ranks are one
elastic cluster. A pause makes steps longer, so that clusters have different speeds. The demo writes into the file
`enough` how many epochs there are to be: all clusters stop at the end of the same one, each by its own look. Losses and
the hash of the weights at the end go into an event log of the script's own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer

from chaos_lightning.events.events import EventLog
from chaos_lightning.strategies.diloco import ClusterStrategy, DiLoCoStrategy
from chaos_lightning.testing.demo import FINAL, LOSS
from chaos_lightning.testing.demo.train import Demo, fit, options, weights_of


class Apart(Demo):
    """`Demo` callback for a cluster: losses go to the event log `events`, and ranks take no vote on the end of
    training.
    """

    def __init__(self, folder: Path, pause_s: float, events: EventLog) -> None:
        super().__init__(folder, pause_s)
        self.events = events

    def on_validation_end(self, trainer: Trainer, module: LightningModule) -> None:
        loss = trainer.callback_metrics.get("val_loss")
        if loss is not None:
            self.events.emit(LOSS, epoch=trainer.current_epoch, loss=float(loss))

    def on_train_epoch_end(self, trainer: Trainer, module: LightningModule) -> None:
        if self.enough(trainer):
            trainer.should_stop = True


def main() -> None:
    """Trains until the file `enough` asks for the end, and logs the version and hash of the final weights."""
    parser = options(__doc__)
    parser.add_argument("--name", required=True, help="of this cluster")
    parser.add_argument("--inner", default="auto", help="how it trains; chaos: this is one of its ranks")
    parser.add_argument("--inner-steps", type=int, default=16, help="of a usual cluster from one push to the next")
    args = parser.parse_args()
    # A push takes half of the time between two, as behind a slow link: on this machine none would be seen under way.
    told = {"lease_ahead_s": 20.0, "spread": 0.5}
    strategy = DiLoCoStrategy(args.inner, name=args.name, inner_steps=args.inner_steps, options=told)
    with EventLog.in_directory(args.folder / "events", args.name, role="script") as events:
        _, model = fit(args, strategy, Apart(args.folder, args.pause, events))
        # A rank of an elastic cluster has the inner strategy, with the cluster's part around its session.
        fitted: Any = strategy
        part = fitted.fit.session if isinstance(strategy, ClusterStrategy) else fitted.session.hooks.cluster
        events.emit(FINAL, version=str(part.base), hash=weights_of(model), reason=part.over)


if __name__ == "__main__":
    main()
