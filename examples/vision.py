"""Classify images with a small network with BatchNorm under ZeRO; EMA averages its weights.

python examples/vision.py                                   # 2 processes on the CPU, or every GPU
python examples/vision.py --stage 2 --precision bf16-mixed
python examples/vision.py --no-ema                          # to compare
"""

import argparse
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from lt_zero import EMA, ZeroStrategy

CLASSES, SIZE = 4, 16


class Classifier(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        widths = (1, 16, 32, 64)
        layers = [
            nn.Sequential(nn.Conv2d(a, b, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(b), nn.ReLU())
            for a, b in zip(widths, widths[1:], strict=False)
        ]
        self.layers = nn.Sequential(*layers, nn.Flatten(), nn.Linear(64 * (SIZE // 8) ** 2, CLASSES))
        self.accuracy = MulticlassAccuracy(CLASSES)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        return F.cross_entropy(self.layers(images).float(), labels)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        images, labels = batch
        self.accuracy(self.layers(images), labels)
        self.log("accuracy", self.accuracy, prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def make_images(count: int, seed: int) -> TensorDataset:
    """Noise with one bright quarter; its position is the class."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, CLASSES, (count,), generator=generator)
    images = torch.randn(count, 1, SIZE, SIZE, generator=generator)
    half = SIZE // 2
    for image, label in zip(images, labels.tolist(), strict=True):
        top, left = divmod(label, 2)
        image[0, top * half : (top + 1) * half, left * half : (left + 1) * half] += 0.4
    return TensorDataset(images, labels)


def main(arguments: list[str] | None = None) -> float:
    """Train; returns the accuracy of the final weights."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", type=int, default=3)
    parser.add_argument("--precision", default="32-true")
    parser.add_argument("--devices", type=int, default=torch.cuda.device_count() or 2)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--images", type=int, default=2048)
    parser.add_argument("--sync-batchnorm", action="store_true", help="statistics of all ranks (on GPUs)")
    parser.add_argument("--no-ema", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("vision_output"))
    args = parser.parse_args(arguments)

    L.seed_everything(0)
    saves = ModelCheckpoint(args.out, "best", monitor="accuracy", mode="max", save_weights_only=True)
    trainer = L.Trainer(
        strategy=ZeroStrategy(stage=args.stage),
        accelerator="auto" if torch.cuda.is_available() else "cpu",
        devices=args.devices,
        precision=args.precision,
        max_epochs=args.epochs,
        sync_batchnorm=args.sync_batchnorm,
        callbacks=[saves, *([] if args.no_ema else [EMA(decay=0.9)])],
        logger=False,
    )
    model = Classifier()
    train, test = make_images(args.images, 1), make_images(512, 2)
    validation = DataLoader(test, batch_size=128)
    trainer.fit(model, DataLoader(train, batch_size=64, shuffle=True), validation)
    (result,) = trainer.validate(model, validation)  # the average, which the callback has left in the model
    trainer.strategy.export(args.out / "classifier-fp16.pt", dtype="fp16")  # type: ignore[attr-defined]
    return float(result["accuracy"])


if __name__ == "__main__":
    main()
