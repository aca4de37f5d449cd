"""Two clusters on one machine train one small GPT on text, each by itself, through a parameter server.

    python examples/diloco_text.py                    # the first cluster; it starts the server of this machine
    python examples/diloco_text.py                    # in a second terminal, at any time: the second cluster

A cluster may have several devices: --devices 2; its batch is that of all of them, and equal in all clusters.

Each cluster trains its own part of an epoch with its own optimizer. After `--inner-steps` steps it pushes what it
gained, and takes the new version over while it trains on. Ctrl+C leaves once what was trained is durable. Elsewhere:

    python examples/diloco_text.py --server HOST:29470 --name paris

`chaos-lightning ps status` shows the job (docs/diloco.md). For comparison, without other clusters: --strategy auto
"""

from __future__ import annotations

from common import build_trainer, parser
from lightning import seed_everything

from chaos_lightning.examples.datasets import TextData
from chaos_lightning.examples.models import GPTModule
from chaos_lightning.strategies import DiLoCoStrategy


def main(argv: list[str] | None = None) -> None:
    """Trains until `--max-steps` or `--max-epochs` of the job, whichever is first."""
    options = parser(__doc__)
    options.set_defaults(strategy="chaos_diloco")
    options.add_argument("--server", help="HOST:PORT of the parameter server (default: CHAOS_PS, or this machine's)")
    options.add_argument("--name", help="of this cluster, unique in the job")
    options.add_argument("--devices", type=int, default=1, help="processes of this cluster, kept in step by ddp")
    options.add_argument("--inner-steps", type=int, default=32, help="steps from one push to the next")
    options.add_argument("--source", default="stdlib", help="stdlib, python-doc, a file, or WikiText's folder")
    options.add_argument("--block", type=int, default=64, help="context in bytes")
    options.add_argument("--layers", type=int, default=4)
    options.add_argument("--width", type=int, default=128)
    args = options.parse_args(argv)

    seed_everything(args.seed)
    model = GPTModule(layers=args.layers, width=args.width, block=args.block)
    data = TextData(args.source, args.block, batch_size=args.batch_size)
    if args.strategy == "chaos_diloco":
        args.strategy = DiLoCoStrategy(server=args.server, name=args.name, inner_steps=args.inner_steps)
    build_trainer(args).fit(model, data)


if __name__ == "__main__":
    main()
