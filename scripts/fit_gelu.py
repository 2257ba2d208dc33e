"""Fits what the kernels take for GELU of 16-bit tensors, and prints its coefficients and its error.

    python scripts/fit_gelu.py [DEGREE]

Phi(x) = 1 / (1 + 2^-u) with u = x P(x^2). P is the weighted minimax polynomial (Lawson's iteration) of the
logit of Phi to base 2, over 0 < x <= 6; the weight is what an error of u does to x Phi(x) for negative x,
in halves of a unit in the last place of fp16.
"""

from __future__ import annotations

import math
import sys

import numpy as np

POINTS, RANGE, ROUNDS = 4000, 6.0, 400


def fit(degree: int) -> tuple[np.ndarray, float]:
    """The coefficients from the constant up, and the largest weighted error."""
    x = np.linspace(1e-3, RANGE, POINTS)
    tail = np.array([0.5 * math.erfc(v / math.sqrt(2)) for v in x])
    wanted = -(np.log(tail) - np.log1p(-tail)) / math.log(2) / x
    y = x * tail
    half_unit = 0.5 * np.maximum(2.0 ** (np.floor(np.log2(y)) - 10), 2.0**-24)
    weight = x * math.log(2) * y / half_unit
    powers = np.vander(x**2, degree + 1, increasing=True)
    share = np.ones_like(x)
    coefficients, error = np.zeros(degree + 1), np.ones_like(x)
    for _ in range(ROUNDS):
        scale = np.sqrt(share) * weight
        coefficients, *_ = np.linalg.lstsq(powers * scale[:, None], wanted * scale, rcond=None)
        error = np.abs(powers @ coefficients - wanted) * weight
        share *= error / error.max() + 1e-12
        share /= share.sum()
    return coefficients, float(error.max())


def main() -> int:
    degree = int(sys.argv[1]) if len(sys.argv) > 1 else 6
    coefficients, error = fit(degree)
    for power, c in enumerate(coefficients):
        print(f"x^{2 * power:<3} {c:.8e}")
    print(f"largest error of x Phi(x), x < 0: {error:.3f} halves of a unit in the last place of fp16")
    return 0


if __name__ == "__main__":
    sys.exit(main())
