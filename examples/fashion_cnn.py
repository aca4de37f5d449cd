"""A convolutional network with BatchNorm on FashionMNIST, elastic; on scikit-learn's digits where it is not installed.

python examples/fashion_cnn.py
torchrun --rdzv-backend=chaos --rdzv-endpoint=HOST:29400 --nnodes=1:16 --max-restarts=9 examples/fashion_cnn.py
python examples/fashion_cnn.py --strategy auto        # without chaos-lightning
"""

from __future__ import annotations

from common import build_trainer, parser
from lightning import seed_everything

from chaos_lightning.examples.datasets import ImageData
from chaos_lightning.examples.models import CNNModule


def main(argv: list[str] | None = None) -> None:
    """Trains until `--max-steps` or `--max-epochs`, whichever is first."""
    options = parser(__doc__)
    options.add_argument("--root", default="", help="folder of the IDX files (default: Debian's)")
    options.add_argument("--digits", action="store_true", help="train on scikit-learn's digits")
    args = options.parse_args(argv)

    seed_everything(args.seed)
    name = "digits" if args.digits else "fashion_mnist"
    data = ImageData(name, args.root, batch_size=args.batch_size, fallback=not args.root)
    build_trainer(args).fit(CNNModule(), data)


if __name__ == "__main__":
    main()
