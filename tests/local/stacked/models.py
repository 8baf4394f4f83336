"""Modules that are trained as one batch of clients to the same bits, and modules that are refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from lightning import LightningModule
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from tests.local.bench import Net, samples


class Dropping(Net):
    dropout = 0.3


class Normed(Net):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.LayerNorm(8))


class Adam(Net):
    kind: Any = torch.optim.Adam

    def configure_optimizers(self):
        return self.kind(self.parameters(), lr=0.02, weight_decay=0.01)


ELEMENTWISE = [
    type(kind.__name__, (Adam,), {"kind": kind})
    for kind in (
        torch.optim.AdamW,
        torch.optim.RMSprop,
        torch.optim.Adagrad,
        torch.optim.Adadelta,
        torch.optim.Adamax,
        torch.optim.NAdam,
        torch.optim.RAdam,
    )
]


class Groups(Net):
    def configure_optimizers(self):
        slow = {"params": self.fc2.parameters(), "lr": 0.01, "momentum": 0.0}
        return torch.optim.SGD([slow, {"params": self.fc1.parameters()}], lr=0.1, momentum=0.9, nesterov=True)


class Odd(Net):
    """Tensors of a client that begin at no multiple of 16 bytes, one number, and one that no loss depends on."""

    def __init__(self):
        super().__init__()
        self.scale, self.unused = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.ones(3))
        self.fc1, self.fc2 = nn.Linear(6, 7), nn.Linear(7, 3)

    def forward(self, x):
        return self.scale * super().forward(x)


class Part(LightningModule):
    """Logs by itself."""

    def forward(self, x):
        self.log("inside", x.mean())
        return x


class Logging(Net):
    def __init__(self):
        super().__init__()
        self.part = Part()

    def training_step(self, batch, index):
        x, y = batch
        logits = self.part(self(x))
        loss = F.cross_entropy(logits, y)
        self.log("hits", (logits.argmax(1) == y).float().mean(), batch_size=len(y))
        self.log_dict({"largest": logits.max(), "index": float(index)}, reduce_fx="max")
        self.log("step", float(index))
        self.log("half", logits.mean().bfloat16())
        return {"loss": loss}


class Losses(Net):
    """Attention by hand, an embedding, and losses that are means and sums."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(3, 8, padding_idx=0)
        self.conv = nn.Conv1d(1, 2, 3)

    def training_step(self, batch, index):
        x, y = batch
        hidden = torch.relu(self.fc1(x)) + self.table(y)
        hidden = torch.softmax(hidden @ hidden.t() / 8, -1) @ hidden
        logits = self.fc2(hidden) + self.conv(x.unsqueeze(1)).mean()
        return (
            F.cross_entropy(logits, y, label_smoothing=0.1)
            + F.mse_loss(logits, torch.zeros_like(logits))
            + (hidden**2).sum()
        )


class Recurrent(Net):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.LSTM(1, 8, batch_first=True)

    def forward(self, x):
        return self.fc2(self.fc1(x.unsqueeze(-1))[0][:, -1])


class Noisy(Net):
    def training_step(self, batch, index):
        x, y = batch
        return F.cross_entropy(self(x + 0.1 * torch.randn_like(x) * torch.rand(1)), y)


class Branching(Net):
    """Goes another way where the loss is small."""

    limit = -1.0

    def training_step(self, batch, index):
        loss = super().training_step(batch, index)
        return loss if loss > self.limit else 2 * loss


class Parting(Branching):
    limit = 1.1


class Numpy(Net):
    def training_step(self, batch, index):
        x, y = batch
        return F.cross_entropy(self(x * float(np.random.uniform(0.9, 1.1))), y)


class Counting(Net):
    calls = 0

    def training_step(self, batch, index):
        self.calls += 1
        return super().training_step(batch, index) / self.calls


class Remembering(Net):
    def __init__(self):
        super().__init__()
        self.seen = []

    def training_step(self, batch, index):
        self.seen.append(len(batch))
        return super().training_step(batch, index)


class Replacing(Net):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))

    def training_step(self, batch, index):
        self.mean = 0.9 * self.mean + batch[0].mean(0)
        return super().training_step(batch, index)


class Scheduled(Net):
    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


class Cycled(Net):
    """Another rate and momentum after each step."""

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=20)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": cycle, "interval": "step"}}


class Hooked(Net):
    def on_train_batch_end(self, outputs, batch, batch_idx):
        pass


class Transferred(Net):
    def on_after_batch_transfer(self, batch, dataloader_idx):
        return batch


class Attached(Net):
    def training_step(self, batch, index):
        return super().training_step(batch, index) / (1 + self.global_step)


class Estimating(Net):
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1 / self.trainer.estimated_stepping_batches)


class Monitored(Net):
    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "loss"}}


class Skipping(Net):
    def training_step(self, batch, index):
        return None if index == 1 else super().training_step(batch, index)


class Mean:
    """Has what makes an object a metric."""

    def compute(self):
        return torch.tensor(0.0)


class LogsMetric(Net):
    def training_step(self, batch, index):
        self.log("mean", Mean())
        return super().training_step(batch, index)


class LogsProduct(Net):
    def training_step(self, batch, index):
        self.log("one", 1.0, reduce_fx="prod")
        return super().training_step(batch, index)


class Seldom(Scheduled):
    """A scheduler that steps every second batch of an epoch."""

    def configure_optimizers(self):
        optimizer = Net.configure_optimizers(self)
        falls = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": falls, "interval": "step", "frequency": 2}}


class Rprop(Adam):
    kind = staticmethod(lambda parameters, lr, weight_decay: torch.optim.Rprop(parameters, lr))


class OneByOne(Dataset):
    """The same samples without the fast path, in a dict."""

    def __init__(self, noisy=False):
        self.noisy = noisy
        self.tensors = samples().tensors

    def __len__(self):
        return len(self.tensors[0])

    def __getitem__(self, row):
        x, y = (tensor[row] for tensor in self.tensors)
        return {"x": x + 0.1 * torch.randn(6) if self.noisy else x, "y": y}


class Mapped(Net):
    def training_step(self, batch, index):
        return super().training_step((batch["x"], batch["y"]), index)
