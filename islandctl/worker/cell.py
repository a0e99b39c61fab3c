"""One rank's part of the cell: model, optimizer and data, and the three things done with them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.distributed.fsdp import FSDPModule

from islandctl.config.job import CellJob
from islandctl.errors import ConfigError, NotFiniteError
from islandctl.worker.data import Sequences, held_out_sequences
from islandctl.worker.experts import balance_loss
from islandctl.worker.model import Decoder
from islandctl.worker.optimizer import InnerOptimizer
from islandctl.worker.parallel import Ranks, arithmetic, build, parameters
from islandctl.worker.text import Text


@dataclass(frozen=True)
class StepResult:
    """What one training step showed, over all ranks."""

    loss: float
    """Cross-entropy, nats per token."""
    balance: float
    """The balance loss before its weight; 1 a block is even. 0 in a dense model."""
    grad_norm: float
    """Before clipping."""
    lr: float


class Cell:
    """The model with its optimizer and its place in the data, as this rank holds them.

    Raises:
        ConfigError: fewer sequences in a batch than ranks, or in the text than cells.
    """

    def __init__(self, job: CellJob, ranks: Ranks, text: Text) -> None:
        training = job.recipe.training
        if training.batch < ranks.size:
            raise ConfigError(
                f"training.batch: {training.batch} sequences cannot be shared by {ranks.size} ranks",
                hint="raise training.batch to at least the ranks of the largest cell",
            )
        torch.manual_seed(training.seed)
        self.recipe, self.ranks, self.pace = job.recipe, ranks, job.pace
        with torch.device("meta"):
            model = Decoder(job.recipe.decoder)
        self.model = build(model, ranks, seed=training.seed, precision=training.precision)
        self.parameters = parameters(self.model)
        self.inner = InnerOptimizer(self.parameters, training)
        self.sequences = Sequences(
            text.training,
            sequence=training.sequence,
            seed=training.seed,
            cell=job.cell,
            num_cells=len(job.cells),
        )
        self.held_out = held_out_sequences(
            text.held_out, sequence=training.sequence, count=job.recipe.evaluation.sequences
        )
        self.tokens_per_step = training.batch * training.sequence

    def train_step(self, step: int) -> StepResult:
        """One step of the inner optimizer on the cell's next batch.

        FSDP takes the mean of the ranks' gradients; each rank's loss is weighted so that this is the gradient
        of the mean over the whole batch, however the ranks share it.

        Args:
            step: the cell's own finished steps before this one.

        Raises:
            NotFiniteError: at every rank, before the weights are touched.
        """
        training, ranks = self.recipe.training, self.ranks
        rows = self.sequences.take(training.batch, rank=ranks.rank, num_ranks=ranks.size).to(ranks.device)
        with arithmetic(ranks, training.precision):
            logits_BSV, routing = self.model(rows[:, :-1])
        nats = F.cross_entropy(logits_BSV.float().flatten(0, 1), rows[:, 1:].flatten(), reduction="sum")

        sums = torch.cat((routing.counts_LE.flatten().double(), nats.detach().double()[None]))
        sums = ranks.total(sums)
        counts_LE = sums[:-1].float().view_as(routing.counts_LE)
        loss = float(sums[-1]) / self.tokens_per_step
        if not math.isfinite(loss):
            raise NotFiniteError(
                f"the loss is {loss} at step {step + 1}",
                hint="lower training.optimizer.lr or raise training.schedule.warmup, and launch a new run",
            )
        tokens_per_rank = self.tokens_per_step / ranks.size
        balance = balance_loss(counts_LE, routing.probs_LE, tokens_per_rank)
        torch.autograd.backward(nats / tokens_per_rank + self.recipe.decoder.balance * balance)
        grad_norm, lr = self.inner.step(self.pace.position(step))
        mean_balance = ranks.total(balance.detach().clone()) / ranks.size
        return StepResult(loss, float(mean_balance), grad_norm, lr)

    @torch.no_grad()
    def evaluate(self) -> float:
        """Bits per byte on the held-out sequences: nats / (ln 2 · bytes predicted). All ranks together."""
        ranks, count = self.ranks, self.held_out.shape[0]
        # Sharded ranks must run equally many forward passes: the last of them may repeat a sequence, uncounted.
        mine = torch.arange(ranks.rank, -(-count // ranks.size) * ranks.size, ranks.size)
        nats = torch.zeros((), dtype=torch.float64, device=ranks.device)
        for part in torch.split(mine, max(1, self.recipe.training.batch // ranks.size)):
            rows = self.held_out[part.clamp(max=count - 1)].to(ranks.device)
            with arithmetic(ranks, self.recipe.training.precision):
                logits_BSV, _ = self.model(rows[:, :-1])
            logits_NV = logits_BSV.float().flatten(0, 1)
            each = F.cross_entropy(logits_NV, rows[:, 1:].flatten(), reduction="none").view(len(part), -1)
            nats += (each.double().sum(dim=1) * (part < count).to(ranks.device)).sum()
        if isinstance(self.model, FSDPModule):
            self.model.reshard()  # FSDP2 keeps the root gathered until a backward pass; the seed may come before it
        num_bytes = self.held_out[:, 1:].numel()
        return float(ranks.total(nats)) / (math.log(2) * num_bytes)
