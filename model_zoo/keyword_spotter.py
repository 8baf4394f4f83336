"""A small network of convolutions and a GRU for keyword spotting."""

from __future__ import annotations

from torch import Tensor, nn

from model_zoo.classifier import Classifier


class KeywordSpotter(Classifier):
    """Keyword spotting in audio: two convolutions over time, a bidirectional GRU, the mean over time, two linear layers.

    This is the light model of the TimelyFL paper (section 4.4), taken from FedAudio (Zhang et al. 2022,
    arXiv:2210.15707). It has 79,044 parameters with 128 features and 36 outputs (35 words, and one for all others).
    Input: spectrograms (batch, time, num_features), time at least 4. Output: logits (batch, num_classes).
    """

    def __init__(
        self,
        num_features: int = 128,
        num_classes: int = 36,
        channels: tuple[int, int] = (32, 64),
        hidden: int = 64,
        dropout: float = 0.2,
        lr: float = 0.1,
        momentum: float = 0.0,
    ) -> None:
        """Build the layers.

        Args:
            num_features: values at each time step, such as mel bands.
            num_classes: number of logits.
            channels: of the two convolutions.
            hidden: units of the GRU in each direction, and of the first linear layer.
            dropout: probability of dropping an input of the GRU.
            lr: learning rate of SGD.
            momentum: momentum of SGD.
        """
        super().__init__(lr, momentum)
        self.save_hyperparameters()
        self.conv1 = nn.Conv1d(num_features, channels[0], 3, padding=1)
        self.conv2 = nn.Conv1d(channels[0], channels[1], 3, padding=1)
        self.relu, self.pool, self.dropout = nn.ReLU(), nn.MaxPool1d(2), nn.Dropout(dropout)
        self.gru = nn.GRU(channels[1], hidden, batch_first=True, bidirectional=True)
        self.fc1 = nn.Linear(2 * hidden, hidden)
        self.fc2 = nn.Linear(hidden, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of a batch."""
        x = self.pool(self.relu(self.conv1(x.transpose(1, 2))))
        x = self.pool(self.relu(self.conv2(x)))
        x, _ = self.gru(self.dropout(x).transpose(1, 2))
        logits: Tensor = self.fc2(self.relu(self.fc1(x.mean(dim=1))))
        return logits
