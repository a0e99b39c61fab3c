"""Shampoo, slowly: one dense float64 matrix at a time, from the papers (1802.09568 alg. 1, 2309.06497 sec. 3).

Shares nothing with the product: numpy, no stacks, no torch.
"""

import numpy as np


def power(matrix, exponent, damping):
    """A symmetric matrix's power by its spectrum, damped relative to the largest eigenvalue."""
    spectrum, basis = np.linalg.eigh((matrix + matrix.T) / 2)
    spectrum = np.maximum(spectrum, 0) + damping * spectrum.max()
    return basis @ np.diag(spectrum**exponent) @ basis.T


class DenseShampoo:
    """For one block."""

    def __init__(self, shape, *, beta1, beta2, beta3, eps, damping, refresh, graft):
        self.beta1, self.beta2, self.beta3 = beta1, beta2, beta3
        self.eps, self.damping, self.refresh, self.graft = eps, damping, refresh, graft
        self.m, self.v = np.zeros(shape), np.zeros(shape)
        self.L, self.R = np.zeros((shape[0], shape[0])), np.zeros((shape[1], shape[1]))
        self.roots = None
        self.t = 0

    def direction(self, gradient):
        self.t += 1
        t = self.t
        self.m = self.beta1 * self.m + (1 - self.beta1) * gradient
        self.v = self.beta2 * self.v + (1 - self.beta2) * gradient**2
        self.L = self.beta3 * self.L + (1 - self.beta3) * np.einsum("ik,jk->ij", gradient, gradient)
        self.R = self.beta3 * self.R + (1 - self.beta3) * np.einsum("ki,kj->ij", gradient, gradient)
        mean = self.m / (1 - self.beta1**t)
        adam = mean / (np.sqrt(self.v / (1 - self.beta2**t)) + self.eps)
        if t % self.refresh == 0:
            whole = 1 - self.beta3**t
            self.roots = (power(self.L / whole, -0.25, self.damping), power(self.R / whole, -0.25, self.damping))
        if self.roots is None:
            return adam
        direction = self.roots[0] @ mean @ self.roots[1]
        if self.graft:
            direction = direction * np.sqrt((adam**2).sum() / (direction**2).sum())
        return direction


class Reference:
    """For one matrix: cut into blocks, stepped, put together again."""

    def __init__(self, matrix, *, lr, weight_decay, block, **settings):
        self.matrix, self.lr, self.weight_decay = np.array(matrix, dtype=np.float64), lr, weight_decay
        rows, columns = self.matrix.shape
        self.places = [
            np.ix_(range(i, min(i + block, rows)), range(j, min(j + block, columns)))
            for i in range(0, rows, block)
            for j in range(0, columns, block)
        ]
        self.parts = [DenseShampoo(self.matrix[place].shape, **settings) for place in self.places]

    def step(self, gradient):
        for place, part in zip(self.places, self.parts, strict=True):
            part_of_step = part.direction(np.asarray(gradient, dtype=np.float64)[place])
            self.matrix[place] -= self.lr * (part_of_step + self.weight_decay * self.matrix[place])
