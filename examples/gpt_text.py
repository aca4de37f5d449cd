"""A small GPT on text, elastic.

Alone, with a scheduler of its own:
    python examples/gpt_text.py

On any number of machines, at any time, with or without torchrun:
    torchrun --rdzv-backend=chaos --rdzv-endpoint=HOST:29400 --nnodes=1:16 --max-restarts=9 examples/gpt_text.py
    python examples/gpt_text.py --endpoint HOST:29400

Without chaos-lightning, for comparison:
    python examples/gpt_text.py --strategy auto
"""

from __future__ import annotations

from common import build_trainer, parser
from lightning import seed_everything

from chaos_lightning.examples.datasets import TextData
from chaos_lightning.examples.models import GPTModule


def main(argv: list[str] | None = None) -> None:
    """Trains until `--max-steps` or `--max-epochs`, whichever is first."""
    options = parser(__doc__)
    options.add_argument("--source", default="stdlib", help="stdlib, python-doc, a file, or WikiText's folder")
    options.add_argument("--block", type=int, default=64, help="context in bytes")
    options.add_argument("--layers", type=int, default=4)
    options.add_argument("--width", type=int, default=128)
    args = options.parse_args(argv)

    seed_everything(args.seed)
    model = GPTModule(layers=args.layers, width=args.width, block=args.block)
    data = TextData(args.source, args.block, batch_size=args.batch_size)
    build_trainer(args).fit(model, data)


if __name__ == "__main__":
    main()
