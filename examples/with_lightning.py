"""MBN in Lightning: convert in __init__, one callback for Double-Forward and the schedule.

pip install ".[lightning]"; python examples/with_lightning.py
"""

import digits
import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader

import memnorm
from memnorm.integrations.lightning import MemnormCallback


class Digits(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = memnorm.convert(digits.network())

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        images, labels = batch
        return F.cross_entropy(self.net(images), labels)

    def test_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        images, labels = batch
        self.log("error in %", 100 * (self.net(images).argmax(1) != labels).float().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.02, momentum=0.9)


def main() -> None:
    pl.seed_everything(0)
    train, test = digits.data()
    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=1,
        accumulate_grad_batches=2,
        precision="bf16-mixed",
        callbacks=[MemnormCallback("net")],  # training_step calls self.net, not self
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    task = Digits()
    trainer.fit(task, digits.loader(train, batch_size=4))
    trainer.test(task, DataLoader(test, 100))
    print("remembered batches:", int(task.net[1].num_batches_tracked))


if __name__ == "__main__":
    main()
