"""A small GRU learns the Python library's own sources, byte by byte: plain PyTorch, and `islandctl.attach`.

The lines that belong to islandctl are marked.
"""

import argparse
import os
import sysconfig
from pathlib import Path

import torch
from torch import nn

import islandctl  # <-

BATCH, SEQUENCE = 16, 64


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, 96)
        self.layers = nn.ModuleList(nn.GRU(96, 96, batch_first=True) for _ in range(2))
        self.head = nn.Linear(96, 256)

    def forward(self, rows):
        hidden = self.embedding(rows)
        for layer in self.layers:
            hidden = hidden + layer(hidden)[0]
        return self.head(hidden)


class Text:
    """Random pieces of the text; it can go on where it was left."""

    def __init__(self, cell: int) -> None:
        sources = sorted(Path(sysconfig.get_path("stdlib")).glob("[a-m]*.py"))
        self.bytes = torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in sources)), dtype=torch.uint8)
        self.generator = torch.Generator().manual_seed(cell)

    def batch(self):
        starts = torch.randint(len(self.bytes) - SEQUENCE, (BATCH,), generator=self.generator)
        rows = torch.stack([self.bytes[start : start + SEQUENCE + 1] for start in starts.tolist()]).long()
        return rows[:, :-1], rows[:, 1:]

    def state_dict(self):
        return {"generator": self.generator.get_state()}

    def load_state_dict(self, state):
        self.generator.set_state(state["generator"])


parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=1e-3)
args = parser.parse_args()

model = Model()  # the same first values in every cell: torch's generator begins with training.seed
optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
text = Text(int(os.environ["ISLANDCTL_CELL"]))  # <- every cell reads other pieces

island = islandctl.attach(model, optimizer, state={"text": text})  # <-
for _ in island.steps():  # <- from where the last checkpoint was
    inputs, targets = text.batch()
    loss = nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    island.step(loss=loss.item())  # <-
island.finish()  # <-
